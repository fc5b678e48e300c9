/*
 * noise.c: what is added to a model before it leaves, where delta > 0.
 *
 * Discrete Laplace and discrete Gaussian follow Canonne, Kamath and Steinke (2020): integers and fair coins only, so
 * the distribution is exact. With sigma <= 2^20 every fraction below fits 128 bits.
 */
#include "exact.h"

#include <math.h>

/* Probability proportional to exp(-|k| / scale) on the integers: CKS algorithm 2. */
int64_t
dp_discrete_laplace(DpRandom *r, uint64_t scale)
{
    for (;;) {
        uint64_t u = dp_random_below(r, scale);
        int64_t magnitude;
        bool negative;

        if (!dp_bernoulli_exp_fraction(r, u, scale))
            continue;
        magnitude = (int64_t)u;
        while (dp_bernoulli_exp_fraction(r, 1, 1))
            magnitude += (int64_t)scale;
        negative = dp_random_u32(r) & 1;
        if (negative && magnitude == 0)
            continue;
        return negative ? -magnitude : magnitude;
    }
}

/* Probability proportional to exp(-k^2 / (2 sigma^2)) on the integers: CKS algorithm 3. */
int64_t
dp_discrete_gaussian(DpRandom *r, uint64_t sigma)
{
    u128 variance = (u128)sigma * sigma;
    uint64_t t = sigma + 1;

    for (;;) {
        int64_t k = dp_discrete_laplace(r, t);
        u128 reach = (u128)(uint64_t)(k < 0 ? -k : k) * t;
        u128 gap = reach > variance ? reach - variance : variance - reach;

        if (dp_bernoulli_exp(r, gap * gap, 2 * variance * t * t))
            return k;
    }
}

void
dp_release_gaussian(DpRandom *r, double grid, uint64_t sigma, double *w, int d)
{
    for (int j = 0; j < d; j++) {
        int64_t steps = (int64_t)nearbyint(w[j] / grid);

        w[j] = grid * (double)(steps + dp_discrete_gaussian(r, sigma));
    }
}
