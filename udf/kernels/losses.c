/*
 * losses.c: the losses as scalar functions of the margin.
 *
 * Adding one is an entry here and one in bismarck_dp/losses.py, which states its constants; the contract tests compare
 * the two and check the constants on random points.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

static double
logistic_value(double z, double y, double param)
{
    double m = y * z;

    (void)param;
    return m > 0 ? log1p(exp(-m)) : log1p(exp(m)) - m;
}

static double
logistic_slope(double z, double y, double param)
{
    (void)param;
    return -y / (1.0 + exp(y * z));
}

/* Huber's smoothing of the hinge, with half-width h: Appendix B of Wu et al. 2017. */
static double
huber_value(double z, double y, double h)
{
    double m = y * z;

    if (m > 1.0 + h)
        return 0.0;
    if (m < 1.0 - h)
        return 1.0 - m;
    return (1.0 + h - m) * (1.0 + h - m) / (4.0 * h);
}

static double
huber_slope(double z, double y, double h)
{
    double m = y * z;

    if (m > 1.0 + h)
        return 0.0;
    if (m < 1.0 - h)
        return -y;
    return -y * (1.0 + h - m) / (2.0 * h);
}

static double
hinge_value(double z, double y, double param)
{
    (void)param;
    return y * z < 1.0 ? 1.0 - y * z : 0.0;
}

static double
hinge_slope(double z, double y, double param)
{
    (void)param;
    return y * z < 1.0 ? -y : 0.0;
}

/* Half the square, continued by its tangent where the residual leaves [-clip, clip]: Lipschitz, and still convex. */
static double
squared_value(double z, double y, double clip)
{
    double r = fabs(z - y);

    return r <= clip ? 0.5 * r * r : clip * r - 0.5 * clip * clip;
}

static double
squared_slope(double z, double y, double clip)
{
    return fmax(-clip, fmin(clip, z - y));
}

/*
 * exp(x) in a form that compilers vectorise, to within 1e-12 of itself: x = k ln 2 + 4 r with |r| <= ln 2 / 8, the
 * polynomial of degree 7 that equals exp(r) at Chebyshev's points (off by 7e-16 at most), squared twice. k ln 2 is off
 * by 1e-13 at most. Beyond +-700 it stays where it is.
 */
static inline double
smooth_exp(double x)
{
    const double whole = 0x1.8p52;
    double r, p;
    union {
        double number;
        int64_t bits;
    } power;

    x = x < 700.0 ? x : 700.0;
    x = x > -700.0 ? x : -700.0;
    power.number = x * 0x1.71547652b82fep0 + whole; /* k in the low bits */
    r = x * 0.25 - (power.number - whole) * 0x1.62e42fefa39efp-3;
    p = 0x1.6c2fbf82246b3p-10 + r * 0x1.a03038b1c9ec6p-13;
    p = 0x1.555554652b8efp-5 + r * (0x1.111110a654945p-7 + r * p);
    p = 0x1.0000000005c50p-1 + r * (0x1.5555555557e5cp-3 + r * p);
    p = 0x1.ffffffffffffap-1 + r * (0x1.fffffffffffffp-1 + r * p);
    p = p * p;
    p = p * p;
    power.bits = (power.bits + 1023) << 52;
    return p * power.number;
}

DP_VECTORISED static void
logistic_slopes(const double *z, double *out, int n, double y, double param)
{
    (void)param;
    for (int i = 0; i < n; i++)
        out[i] = -y / (1.0 + smooth_exp(y * z[i]));
}

DP_VECTORISED static void
huber_slopes(const double *z, double *out, int n, double y, double h)
{
    for (int i = 0; i < n; i++) {
        double excess = (1.0 + h - y * z[i]) / (2.0 * h);

        excess = excess > 0.0 ? excess : 0.0;
        out[i] = -y * (excess < 1.0 ? excess : 1.0);
    }
}

static void
hinge_slopes(const double *z, double *out, int n, double y, double param)
{
    for (int i = 0; i < n; i++)
        out[i] = hinge_slope(z[i], y, param);
}

DP_VECTORISED static void
squared_slopes(const double *z, double *out, int n, double y, double clip)
{
    double most = clip < DP_STEEPEST ? clip : DP_STEEPEST;

    for (int i = 0; i < n; i++) {
        double r = z[i] - y;

        r = r > -most ? r : -most;
        out[i] = r < most ? r : most;
    }
}

static const DpLoss losses[] = {
    {"logistic", logistic_value, logistic_slope, logistic_slopes},
    {"huber", huber_value, huber_slope, huber_slopes},
    {"hinge", hinge_value, hinge_slope, hinge_slopes},
    {"squared", squared_value, squared_slope, squared_slopes},
};

#define N_LOSSES ((int)(sizeof(losses) / sizeof(losses[0])))

const DpLoss *
dp_loss_named(const char *name)
{
    for (int i = 0; i < N_LOSSES; i++)
        if (strcmp(losses[i].name, name) == 0)
            return &losses[i];
    return NULL;
}

const DpLoss *
dp_loss_at(int index)
{
    return &losses[index];
}

int
dp_loss_index(const DpLoss *loss)
{
    return (int)(loss - losses);
}
