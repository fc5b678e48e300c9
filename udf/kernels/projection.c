/*
 * projection.c: a Gaussian matrix that a public seed stands for, and rows multiplied by it.
 *
 * Entry (i, j) of the matrix of p rows is N(0, 1/p): lengths of rows are kept on average. The numbers come from the key
 * stream of the seed by Box and Muller, two words for each uniform number. They do not depend on data and need not be
 * secret; rows are cut to their bound after they were projected, so privacy asks nothing of them.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

static const double turn = 6.283185307179586;

/* In (0, 1). */
static double
uniform(DpRandom *r)
{
    return ((double)(dp_random_u64(r) >> 11) + 0.5) * 0x1p-53;
}

void
dp_projection(int64_t seed, double *matrix, int p, int d)
{
    uint8_t key[DP_KEY_BYTES] = {0};
    size_t n = (size_t)p * (size_t)d;
    double scale = 1.0 / sqrt((double)p);
    DpRandom r;

    memcpy(key, &seed, sizeof(seed));
    dp_random_start(&r, key, DP_STREAM_PROJECTION);
    for (size_t i = 0; i < n; i += 2) {
        double radius = scale * sqrt(-2.0 * log(uniform(&r))), angle = turn * uniform(&r);

        matrix[i] = radius * cos(angle);
        if (i + 1 < n)
            matrix[i + 1] = radius * sin(angle);
    }
}

DP_VECTORISED void
dp_project_row(const double *matrix, const double *x, double *out, int p, int d)
{
    for (int i = 0; i < p; i++, matrix += d) {
        double lane[8] = {0};
        double rest = 0.0;
        int j = 0;

        for (; j + 8 <= d; j += 8)
            for (int l = 0; l < 8; l++)
                lane[l] += matrix[j + l] * x[j + l];
        for (; j < d; j++)
            rest += matrix[j] * x[j];
        out[i] = (((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))) + rest;
    }
}
