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

static const DpLoss losses[] = {
    {"logistic", logistic_value, logistic_slope},
    {"huber", huber_value, huber_slope},
    {"hinge", hinge_value, hinge_slope},
    {"squared", squared_value, squared_slope},
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
