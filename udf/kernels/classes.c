/*
 * classes.c: many classes at once. A model of k classes has k rows of d weights, and a row x has k margins.
 *
 * A loss of many classes has a slope for each of them, s = (s_1 ... s_k), and its gradient is the outer product s x.
 * With
 *
 *     softmax   s = p - e_y,  p_c = exp(z_c) / sum exp(z)    |s| <= sqrt 2, and a Hessian of norm at most |x|^2 / 2
 *     ovr       s_c = the slope of a two-class loss whose label is 1 for c = y and -1 for the others: |s| <= sqrt k
 *
 * one pass trains all classes: rows are read, and turned into doubles, once. Each margin is computed as dp_dot would.
 */
#include "kernels.h"

#include <math.h>

#define LANES 8

static inline __attribute__((always_inline)) double
sum_lanes(const double lane[LANES])
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* The margins of a few outputs in a run, few enough for their lanes to stay in registers. */
static inline __attribute__((always_inline)) void
margins_of(const double *w, const float *x, int d, int outputs, double *z)
{
    double lane[4][LANES] = {{0}};
    double rest[4] = {0};
    int j = 0;

    for (; j + LANES <= d; j += LANES)
        for (int c = 0; c < outputs; c++)
            for (int l = 0; l < LANES; l++)
                lane[c][l] += w[(size_t)c * (size_t)d + (size_t)(j + l)] * (double)x[j + l];
    for (; j < d; j++)
        for (int c = 0; c < outputs; c++)
            rest[c] += w[(size_t)c * (size_t)d + (size_t)j] * (double)x[j];
    for (int c = 0; c < outputs; c++)
        z[c] = sum_lanes(lane[c]) + rest[c];
}

DP_VECTORISED void
dp_margins(const double *w, const float *x, int d, int outputs, double *z)
{
    int c = 0;

    for (; c + 4 <= outputs; c += 4)
        margins_of(w + (size_t)c * (size_t)d, x, d, 4, z + c);
    for (; c + 2 <= outputs; c += 2)
        margins_of(w + (size_t)c * (size_t)d, x, d, 2, z + c);
    if (c < outputs)
        margins_of(w + (size_t)c * (size_t)d, x, d, 1, z + c);
}

/* Numbers of a row that are turned into doubles at once, for all classes. */
#define DOUBLES 256

DP_VECTORISED void
dp_add_outer(double *g, const double *slopes, const float *x, int d, int outputs)
{
    double some[DOUBLES];

    for (int start = 0; start < d; start += DOUBLES) {
        int n = d - start < DOUBLES ? d - start : DOUBLES;

        for (int j = 0; j < n; j++)
            some[j] = (double)x[start + j];
        for (int c = 0; c < outputs; c++) {
            double slope = slopes[c], *to = g + (size_t)c * (size_t)d + start;

            for (int j = 0; j < n; j++)
                to[j] += slope * some[j];
        }
    }
}

int
dp_largest(const double *z, int n)
{
    int best = 0;

    for (int c = 1; c < n; c++)
        if (z[c] > z[best])
            best = c;
    return best;
}
