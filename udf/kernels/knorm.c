/*
 * knorm.c: noise with density proportional to exp(-|z| / scale) (Theorem 1 of Wu et al. 2017), for delta = 0.
 *
 * The direction is uniform on the SPHERE, the radius Gamma(d, scale), a sum of d exponential numbers. The paper's
 * Appendix E draws the direction from the ball: that density is unbounded at zero and private for no epsilon. A
 * direction is that of d normal numbers x, drawn in pairs: sqrt(E) times a point (u, v) / |(u, v)| of the circle,
 * E exponential. (That is a normal number up to a common factor, which the direction forgets.)
 *
 * What is computed is not a real number, and the release is not quite that of the ideal mechanism round((w + Z) / g).
 * This is how near it is. All lengths are in grid steps: 1 <= scale <= 2^20. Let rho = 4 (d + 1024).
 *
 * CLAIM. But for an event of probability below e^-2048 that does not depend on w, the released vector is the rounding
 * of w + Z' with |Z' - Z| <= e in each coordinate, for a random vector Z whose density lies within factors exp(+-a) of
 * the K-norm density, and
 *
 *     e = 2^-79 (d + 40) (d + 1024),        a = (d + 1) 2^-61        (d <= 2^30).
 *
 * THEOREM. Then for every w and every grid point k the probabilities of k, here and in the ideal mechanism, differ by
 * at most a factor exp(+-b), b = a + 2 d e / (1 - 2 e) + e sqrt(d). So the release is (epsilon + 2 b)-private if the
 * ideal mechanism is epsilon-private, but for that event; mechanisms.py pays for the 2 b.
 *
 * Proof of the theorem. Let C be the cube of side 1 that is rounded to k. The release is k only if Z lies in C grown by
 * e on each side, and it is k if Z lies in C shrunk by e. Stretching C from its centre by 1 +- 2 e gives these cubes:
 * volumes change by (1 +- 2 e)^d, and no point moves further than 2 e sqrt(d) / 2, along which the logarithm of the
 * density changes by at most e sqrt(d) / scale. With log(1 + 2 e) <= -log(1 - 2 e) <= 2 e / (1 - 2 e) that is b. QED
 *
 * Proof of the claim. D = 2^-102 bounds the relative error of an operation in wide.h. Nothing over- or underflows:
 * numbers that are not zero lie between 2^-520 and 2^60, and their errors above 2^-640.
 *
 * 1. Cutting off. dp_exponential is a real E cut off by less than 2^-256, so sqrt(E) by less than 2^-128. The point
 *    (u, v) is real and uniform on a union of squares of side h = 2^-63, cut off to 127 places: its direction moves by
 *    less than sqrt(2) 2^-127 / (1/4) < 2^-124, because |(u, v)| >= 1/4.
 * 2. The squares. Along a ray from 0 the corner (a, b) of the square can only grow, so the accepted part of the ray is
 *    an interval from r to R, where r is in [1/4, 1/4 + sqrt(2) h] and R in [1, 1 + sqrt(2) h]. The density of the
 *    angle, proportional to R^2 - r^2, is within a factor 1 + 4 h = 1 + 2^-61 of constant. There are (d + 1) / 2 pairs
 *    at most.
 * 3. Drawing again. |x|^2 and x / |x| are independent for normal x, so that a condition on |x| alone does not bias the
 *    direction. The computed |x|^2 is within K = (d + 40) D of that of the real x: given the direction, it is kept with
 *    a probability between those of |x|^2 >= (1 + K) / 16 and of |x|^2 >= (1 - K) / 16, whose ratio is below 1 + K.
 *    (For odd d, |x| depends on the last angle, which costs another 2^-61 in the normalisation.) With 2.: a.
 * 4. Rounding. Relative errors, in units of D: E 9, u and v 4; |(u, v)|^2 10; E / |(u, v)|^2 20; its root 11; x 16;
 *    x^2 33; |x|^2 33 + d; |x| 18 + d/2; the radius 9 + d; scale radius / |x| 29 + 3d/2; z 46 + 3d/2. With the second
 *    order 2 (d + 32) is more than enough.
 * 5. Together. Let radius and all E be at most rho. The radius exceeds it with probability at most 2^d e^(-rho/2), an E
 *    with e^-rho: in all less than e^-2048. As |x| > 0.24, by 1. the direction x / |x| moves by less than
 *    sqrt(d + 1024) 2^-119 < D. So |Z' - Z| <= scale rho (2 (d + 32) + 1) D + scale d 2^-256, and adding the fraction
 *    of w costs (scale rho + 1) D: less than 2 (d + 40) D 2^20 rho = e. The integer part of w is added exactly, and
 *    wide_round is exact.
 */
#include "exact.h"
#include "wide.h"

#define SHORTEST 0.0625 /* |x|^2: shorter directions, with their larger relative errors, are drawn again */

/* (magnitude + 64 random bits behind it) / 2^63, the lowest bit of `drawn` being the sign */
static DpWide
coordinate(DpRandom *r, uint64_t drawn)
{
    uint64_t word[2] = {drawn >> 1, dp_random_u64(r)};
    DpWide x = wide_fraction(word, 2);
    double unit = drawn & 1 ? -2.0 : 2.0;

    return (DpWide){unit * x.hi, unit * x.lo};
}

/* Uniform on the squares whose corner (a, b) / 2^63 has 1/4 <= |corner| < 1: nearly a ring, far enough from 0. */
static void
point_of_ring(DpRandom *r, DpWide *u, DpWide *v)
{
    uint64_t a, b;
    u128 square;

    do {
        a = dp_random_u64(r);
        b = dp_random_u64(r);
        square = (u128)(a >> 1) * (a >> 1) + (u128)(b >> 1) * (b >> 1);
    } while (square >> 126 != 0 || square >> 122 == 0);
    *u = coordinate(r, a);
    *v = coordinate(r, b);
}

static void
two_normals(DpRandom *r, DpWide *x, DpWide *y)
{
    DpWide u, v, stretch;

    point_of_ring(r, &u, &v);
    stretch = wide_sqrt(wide_div(dp_exponential(r), wide_add(wide_mul(u, u), wide_mul(v, v))));
    *x = wide_mul(stretch, u);
    *y = wide_mul(stretch, v);
}

static DpWide
sum_of_squares(const DpWide *x, int d)
{
    DpWide sum = {0.0, 0.0};

    for (int j = 0; j < d; j++)
        sum = wide_add(sum, wide_mul(x[j], x[j]));
    return sum;
}

/* A vector of uniform direction; returns its length. */
static DpWide
direction(DpRandom *r, DpWide *x, int d)
{
    DpWide square, spare;

    do {
        for (int j = 0; j < d; j += 2)
            two_normals(r, &x[j], j + 1 < d ? &x[j + 1] : &spare);
        square = sum_of_squares(x, d);
    } while ((square.hi - SHORTEST) + square.lo < 0.0);
    return wide_sqrt(square);
}

/* Gamma(d, 1) */
static DpWide
radius(DpRandom *r, int d)
{
    DpWide sum = {0.0, 0.0};

    for (int j = 0; j < d; j++)
        sum = wide_add(sum, dp_exponential(r));
    return sum;
}

/* In one dimension a direction is a sign. */
void
dp_knorm_noise(DpRandom *r, double scale, DpWide *noise, int d)
{
    DpWide norm = wide_mul_double(radius(r, d), scale);

    if (d == 1)
        noise[0] = dp_random_u32(r) & 1 ? (DpWide){-norm.hi, -norm.lo} : norm;
    else {
        DpWide factor = wide_div(norm, direction(r, noise, d));

        for (int j = 0; j < d; j++)
            noise[j] = wide_mul(noise[j], factor);
    }
}

/* w in grid steps is cut into a whole number and a fraction, both exactly; only the fraction meets the noise. */
void
dp_release_knorm(DpRandom *r, double grid, double scale, double *w, DpWide *room, int d)
{
    dp_knorm_noise(r, scale / grid, room, d);
    for (int j = 0; j < d; j++) {
        double steps = w[j] / grid;
        double whole = nearbyint(steps);

        w[j] = grid * (double)((int64_t)whole + wide_round(wide_add_double(room[j], steps - whole)));
    }
}
