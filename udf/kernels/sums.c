/*
 * sums.c: noise on the sum of a batch, at a few nanoseconds a number, that floating point cannot betray.
 *
 * Wanted: noise on every batch of a training, for any loss and any step. Exact samplers cost a hundred times the batch.
 * Numbers from bulk.c are cheap, but their low bits, added to a sum, could tell what they were added to. So the noisy
 * sum is rounded to a grid g that is coarse next to the error of the noise and fine next to the noise itself:
 *
 *     released sum  =  g round((sum + Z) / g),      g a power of two, at most 1/8 of the noise's standard deviation.
 *
 * Rounding what is already noisy is post-processing: it costs no sensitivity, and at most 1/768 of variance. Whatever
 * is made of the rounded sums afterwards (steps, projections, averages, the released weights with all their low bits)
 * is post-processing too. What is left to show is that the rounded sum has nearly the distribution that real noise
 * would give it.
 *
 * CLAIM. Let each coordinate of (sum + Z) as computed be within e of that with real noise. Then the probability of
 * every grid point is within a factor exp(+-tau) of the real one, tau being for d coordinates
 *
 *     Gaussian:  the sum over coordinates of  2 e / (g - 2 e) + e (|z| + 2 g) / sigma^2
 *     K-norm:    2 d e / (g - 2 e) + e sqrt(d) / scale
 *
 * where z is the real noise of a coordinate.
 *
 * Proof. The result is k only if the real noisy sum lies in k's cube of side g grown by e on each side, and it is k if
 * that lies in the cube shrunk by e. Stretching a side from its middle by 1 +- 2 e / g changes its length by that
 * factor, and log(1 + 2 e / g) <= -log(1 - 2 e / g) <= 2 e / (g - 2 e). No point moves further than e in a coordinate,
 * e sqrt(d) in all: over that the log density changes by at most e (|z| + g + e) / sigma^2 in a coordinate for the
 * Gaussian, as z lies within g + e of any other point of its grown cell, and by e sqrt(d) / scale for K-norm noise. QED
 *
 * The error e. A number of the pool is within 2^-42 of a real normal one, and in all pairs none is longer than 64, but
 * for probability e^-2048 a pair (bulk.c). Multiplying and adding it to a sum of norm at most M errs by three more
 * roundings: e <= sigma (2^-42 + 2^-45) + 2^-52 M.
 * K-norm noise is scale |G'| G with d + 1 and d normal numbers, of which G' is never made, only its length: given V =
 * |G'|^2, which is chi-square with d + 1 degrees of freedom, the density of sqrt(V) G at z is proportional to V^(-d/2)
 * exp(-|z|^2 / (2 V)), and V's to V^((d - 1) / 2) exp(-V / 2); the integral of V^(-1/2) exp(-|z|^2 / (2 V) - V / 2)
 * over V is sqrt(2 pi) exp(-|z|). |G'| is off by at most 2^-42 sqrt(d + 1), and by (d + 4) 2^-53 of itself; it is below
 * rho = sqrt(d + 1) + 64 but for probability e^-2048. So e <= scale (2^-42 (64 sqrt(d + 1) + rho) + 64 rho (d + 16)
 * 2^-53) + 2^-52 M. bismarck_dp/mechanisms.py adds this up over a run and takes it off epsilon.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

const char *
dp_noise_start(DpNoise *noise, const DpParams *p, int d)
{
    static const char *const names[] = {"none", "gaussian", "l2-laplace"};
    const char *name = p->word(p->host, "noise");
    double spread;
    int exponent;

    noise->unused = 0;
    noise->mechanism = -1;
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0)
            noise->mechanism = i;
    noise->scale = p->number(p->host, "noise_scale");
    noise->grid = p->number(p->host, "noise_grid");
    if (noise->mechanism < 0)
        return "noise";
    if (noise->mechanism == DP_NO_NOISE)
        return NULL;
    if (!(noise->grid > 0) || frexp(noise->grid, &exponent) != 0.5)
        return "noise_grid";
    spread = noise->mechanism == DP_GAUSSIAN ? noise->scale : noise->scale * sqrt((double)d + 1.0);
    return spread >= noise->grid && isfinite(spread) ? NULL : "noise_scale";
}

typedef enum Kind { NORMALS, SQUARES } Kind;

static void
fill(DpStock *stock, Kind kind)
{
    if (kind == NORMALS)
        dp_gaussians(&stock->random, 1.0, stock->numbers, DP_NUMBERS);
    else
        dp_squared_lengths(&stock->random, stock->numbers, DP_NUMBERS);
    stock->generation = stock->random.generation;
    stock->left = DP_NUMBERS;
}

/* Up to `wanted` numbers from the stock, which is filled up first if it is empty, or another process's. */
static const double *
take_numbers(DpStock *stock, Kind kind, int wanted, int *some)
{
    const double *numbers;

    dp_random_check(&stock->random);
    if (stock->left == 0 || (stock->generation != stock->random.generation && !stock->random.seeded))
        fill(stock, kind);
    numbers = stock->numbers + DP_NUMBERS - stock->left;
    *some = wanted < stock->left ? wanted : stock->left;
    stock->left -= *some;
    return numbers;
}

/* Adding and taking away 3 2^51 rounds to a whole number, to the even one from halfway; the plan keeps below 2^50. */
DP_VECTORISED static void
add_rounded(double *sum, const double *numbers, double scale, double grid, int d)
{
    const double whole = 0x1.8p52, per_step = 1.0 / grid;

    for (int j = 0; j < d; j++)
        sum[j] = grid * (((sum[j] + scale * numbers[j]) * per_step + whole) - whole);
}

static void
add_normals(DpPool *pool, double scale, double grid, double *sum, int d)
{
    int some;

    for (; d > 0; d -= some, sum += some) {
        const double *numbers = take_numbers(&pool->normals, NORMALS, d, &some);

        add_rounded(sum, numbers, scale, grid, some);
    }
}

/* In lanes: one after the other, the additions would take as long as making the numbers. */
DP_VECTORISED static double
total(const double *numbers, int n)
{
    double lane[8] = {0};
    double rest = 0.0;
    int j = 0;

    for (; j + 8 <= n; j += 8)
        for (int l = 0; l < 8; l++)
            lane[l] += numbers[j + l];
    for (; j < n; j++)
        rest += numbers[j];
    return (((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))) + rest;
}

/* The length of n normal numbers: of pairs, and of one more if n is odd. */
static double
chi(DpPool *pool, int n)
{
    double square = 0.0;
    int some;

    if (n % 2 == 1) {
        double number = *take_numbers(&pool->normals, NORMALS, 1, &some);

        square = number * number;
    }
    for (n /= 2; n > 0; n -= some) {
        const double *numbers = take_numbers(&pool->squares, SQUARES, n, &some);

        square += total(numbers, some);
    }
    return sqrt(square);
}

/* A loss is bounded, but its slope at weights beyond all numbers may be none: then the row has no gradient. */
double
dp_noised_slope(const DpNoise *noise, double slope, const float *x, int d, double clip)
{
    if (isfinite(clip))
        return dp_clip_slope(slope, x, d, clip);
    return noise->mechanism == DP_NO_NOISE || isfinite(slope) ? slope : 0.0;
}

void
dp_noise_add(const DpNoise *noise, DpPool *pool, double *sum, int d)
{
    if (noise->mechanism == DP_GAUSSIAN)
        add_normals(pool, noise->scale, noise->grid, sum, d);
    else if (noise->mechanism == DP_L2_LAPLACE)
        add_normals(pool, noise->scale * chi(pool, d + 1), noise->grid, sum, d);
}
