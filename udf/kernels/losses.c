/*
 * losses.c: the losses as scalar functions of the margin, and their conjugates as functions of a dual variable.
 *
 * With two classes a dual variable a has y a = b between 0 and 1. A row that counts for nothing has y = 0: its loss is
 * a constant, the conjugate minus that constant, and its dual variable stays 0.
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

/* exp(z - most), and whether all differences are finite: x - x is zero then. */
DP_VECTORISED static bool
exps_below(const double *z, double most, double *out, int n)
{
    int64_t bad = 0;

    for (int i = 0; i < n; i++) {
        double below = z[i] - most;

        out[i] = smooth_exp(below);
        bad |= below - below != 0.0;
    }
    return bad == 0;
}

bool
dp_softmax(const double *z, double *p, int outputs, double *log_sum)
{
    double most = z[0], sum = 0.0, share;

    for (int c = 1; c < outputs; c++)
        most = z[c] > most ? z[c] : most;
    if (!exps_below(z, most, p, outputs))
        return false;
    for (int c = 0; c < outputs; c++)
        sum += p[c];
    share = 1.0 / sum;
    for (int c = 0; c < outputs; c++)
        p[c] *= share;
    if (log_sum != NULL)
        *log_sum = most + log(sum);
    return true;
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

static double
within(double a, double low, double high)
{
    return fmax(low, fmin(high, a));
}

static double
entropy(double p)
{
    return p > 0.0 ? p * log(p) : 0.0;
}

static double
logistic_conjugate(double a, double y, double param)
{
    double b = within(y * a, 0.0, 1.0);

    return y == 0.0 ? -logistic_value(0.0, 0.0, param) : entropy(b) + entropy(1.0 - b);
}

/*
 * One Newton step on g(b) = b ln b + (1 - b) ln(1 - b) + m (b - from) + c (b - from)^2 / 2. The minimum lies between
 * `from` and u = 1 / (1 + e^m), where g' is c (u - from). The step starts on the way there, at the share 4 / (4 + c)
 * that the curvature of the entropy, at least 4, makes sure of (Shalev-Shwartz and Zhang 2013): inside the domain,
 * wherever `from` is. It ends between the two.
 */
static double
logistic_dual(double z, double y, double from, double curvature, double param)
{
    double m = y * z, before = within(y * from, 0.0, 1.0), u = 1.0 / (1.0 + exp(m));
    double b = before + (u - before) * 4.0 / (4.0 + curvature);

    (void)param;
    if (b > 0.0 && b < 1.0)
        b -= (log(b / (1.0 - b)) + m + curvature * (b - before)) / (1.0 / (b * (1.0 - b)) + curvature);
    return y * within(b, fmin(before, u), fmax(before, u));
}

static double
huber_conjugate(double a, double y, double h)
{
    double b = within(y * a, 0.0, 1.0);

    return y == 0.0 ? -huber_value(0.0, 0.0, h) : h * b * b - (1.0 + h) * b;
}

/* A parabola on [0, 1]. */
static double
huber_dual(double z, double y, double from, double curvature, double h)
{
    double before = within(y * from, 0.0, 1.0);

    return y * within(before + (1.0 + h - y * z - 2.0 * h * before) / (2.0 * h + curvature), 0.0, 1.0);
}

static double
hinge_conjugate(double a, double y, double param)
{
    (void)param;
    return y == 0.0 ? -1.0 : -within(y * a, 0.0, 1.0);
}

/* The same without the loss's own curvature; without any, the end that the slope points to. */
static double
hinge_dual(double z, double y, double from, double curvature, double param)
{
    (void)param;
    return huber_dual(z, y, from, curvature, 0.0);
}

static double
squared_conjugate(double a, double y, double clip)
{
    (void)clip;
    return 0.5 * a * a - a * y;
}

static double
squared_dual(double z, double y, double from, double curvature, double clip)
{
    return within(from + (y - z - from) / (1.0 + curvature), -clip, clip);
}

static const DpLoss losses[] = {
    {"logistic", logistic_value, logistic_slope, logistic_slopes, logistic_conjugate, logistic_dual},
    {"huber", huber_value, huber_slope, huber_slopes, huber_conjugate, huber_dual},
    {"hinge", hinge_value, hinge_slope, hinge_slopes, hinge_conjugate, hinge_dual},
    {"squared", squared_value, squared_slope, squared_slopes, squared_conjugate, squared_dual},
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
