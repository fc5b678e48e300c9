/*
 * noise.c: what is added to a model before it leaves.
 *
 * Discrete Laplace and discrete Gaussian follow Canonne, Kamath and Steinke (2020): integers and fair coins only, so
 * the distribution is exact. With sigma <= 2^20 every fraction below fits 128 bits. The K-norm noise (density
 * proportional to exp(-|z| / scale), Theorem 1 of Wu et al. 2017) is computed in double precision and rounded to a
 * grid 2^16 times coarser than its scale; docs/privacy.md says what that does and does not give.
 */
#include "kernels.h"

#include <math.h>

typedef unsigned __int128 u128;

static u128
random_u128(DpRandom *r)
{
    u128 high = dp_random_u64(r);

    return high << 64 | dp_random_u64(r);
}

static int
bit_length(u128 n)
{
    uint64_t high = (uint64_t)(n >> 64), low = (uint64_t)n;

    if (high)
        return 128 - __builtin_clzll(high);
    return low ? 64 - __builtin_clzll(low) : 0;
}

/* True with probability numerator / denominator: a uniform integer below the denominator, by rejection. */
static bool
bernoulli(DpRandom *r, u128 numerator, u128 denominator)
{
    int bits = bit_length(denominator - 1);
    u128 mask = bits == 128 ? ~(u128)0 : ((u128)1 << bits) - 1;
    u128 u;

    do
        u = (bits <= 64 ? (u128)dp_random_u64(r) : random_u128(r)) & mask;
    while (u >= denominator);
    return u < numerator;
}

/* True with probability exp(-numerator / denominator) for a fraction in [0, 1]: CKS algorithm 1. */
static bool
bernoulli_exp_fraction(DpRandom *r, u128 numerator, u128 denominator)
{
    uint64_t k = 1;

    while (bernoulli(r, numerator, denominator * k))
        k++;
    return k % 2 == 1;
}

static bool
bernoulli_exp(DpRandom *r, u128 numerator, u128 denominator)
{
    for (; numerator > denominator; numerator -= denominator)
        if (!bernoulli_exp_fraction(r, 1, 1))
            return false;
    return bernoulli_exp_fraction(r, numerator, denominator);
}

/* Probability proportional to exp(-|k| / scale) on the integers: CKS algorithm 2. */
int64_t
dp_discrete_laplace(DpRandom *r, uint64_t scale)
{
    for (;;) {
        uint64_t u = dp_random_below(r, scale);
        int64_t magnitude;
        bool negative;

        if (!bernoulli_exp_fraction(r, u, scale))
            continue;
        magnitude = (int64_t)u;
        while (bernoulli_exp_fraction(r, 1, 1))
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

        if (bernoulli_exp(r, gap * gap, 2 * variance * t * t))
            return k;
    }
}

/* Uniform on (0, 1), never 0: half a step above each multiple of 2^-64. */
static double
open_uniform(DpRandom *r)
{
    return ((double)dp_random_u64(r) + 0.5) * 0x1p-64;
}

static void
two_normals(DpRandom *r, double *a, double *b)
{
    double radius = sqrt(-2.0 * log(open_uniform(r)));
    double angle = 2.0 * M_PI * open_uniform(r);

    *a = radius * cos(angle);
    *b = radius * sin(angle);
}

/* Gamma(d, 1) for integer d is a sum of d exponentials. */
static double
gamma_of_order(DpRandom *r, int d)
{
    double sum = 0.0;

    for (int j = 0; j < d; j++)
        sum -= log(open_uniform(r));
    return sum;
}

/*
 * Direction uniform on the SPHERE, radius Gamma(d, scale). The paper's Appendix E draws the direction from the ball:
 * that density is unbounded at zero and private for no epsilon.
 */
void
dp_knorm_noise(DpRandom *r, double scale, double *noise, int d)
{
    double spare, factor;

    for (int j = 0; j < d; j += 2)
        two_normals(r, &noise[j], j + 1 < d ? &noise[j + 1] : &spare);
    factor = scale * gamma_of_order(r, d) / dp_norm(noise, d);
    for (int j = 0; j < d; j++)
        noise[j] *= factor;
}

void
dp_release_gaussian(DpRandom *r, double grid, uint64_t sigma, double *w, int d)
{
    for (int j = 0; j < d; j++) {
        int64_t steps = (int64_t)nearbyint(w[j] / grid);

        w[j] = grid * (double)(steps + dp_discrete_gaussian(r, sigma));
    }
}

void
dp_release_knorm(DpRandom *r, double grid, double scale, double *w, double *noise, int d)
{
    dp_knorm_noise(r, scale, noise, d);
    for (int j = 0; j < d; j++)
        w[j] = grid * nearbyint((w[j] + noise[j]) / grid);
}
