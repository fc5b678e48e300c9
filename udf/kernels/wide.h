/*
 * wide.h: numbers of twice a double's precision, as an unevaluated sum hi + lo with hi the nearest double.
 *
 * Every operation has a relative error of at most 16 u^2 = 2^-102 (u = 2^-53) while nothing over- or underflows: by
 * Joldes, Muller and Popescu (2017) sums have 3.1 u^2 (their algorithm 6) or, with a double, 2 u^2 (4), products 7 u^2
 * (10) or 1.6 u^2 (7), quotients 15.1 u^2 (17); square roots have 7 u^2 (below). Scaling by a power of two is exact.
 * The products' errors come from Dekker's splitting, not from a fused multiply-add, so that the same bits come out on
 * every machine.
 */
#ifndef BISMARCK_DP_WIDE_H
#define BISMARCK_DP_WIDE_H

#include "kernels.h"

#include <float.h>
#include <math.h>

_Static_assert(FLT_EVAL_METHOD == 0, "wide numbers need doubles that are rounded at every step");

/* The rounded sum and its error. */
static inline DpWide
two_sum(double a, double b)
{
    double sum = a + b;
    double of_b = sum - a;

    return (DpWide){sum, (a - (sum - of_b)) + (b - of_b)};
}

/* The same for |a| >= |b|. */
static inline DpWide
fast_two_sum(double a, double b)
{
    double sum = a + b;

    return (DpWide){sum, b - (sum - a)};
}

/* The upper 26 bits, and the rest: products of halves are exact. */
static inline DpWide
split(double a)
{
    double t = 134217729.0 * a; /* 2^27 + 1 */
    double upper = t - (t - a);

    return (DpWide){upper, a - upper};
}

/* The rounded product and its error. */
static inline DpWide
two_product(double a, double b)
{
    double product = a * b;
    DpWide x = split(a), y = split(b);

    return (DpWide){product, ((x.hi * y.hi - product) + x.hi * y.lo + x.lo * y.hi) + x.lo * y.lo};
}

static inline DpWide
wide_add_double(DpWide x, double y)
{
    DpWide s = two_sum(x.hi, y);

    return fast_two_sum(s.hi, x.lo + s.lo);
}

static inline DpWide
wide_add(DpWide x, DpWide y)
{
    DpWide s = two_sum(x.hi, y.hi), t = two_sum(x.lo, y.lo);
    DpWide v = fast_two_sum(s.hi, s.lo + t.hi);

    return fast_two_sum(v.hi, t.lo + v.lo);
}

static inline DpWide
wide_mul(DpWide x, DpWide y)
{
    DpWide c = two_product(x.hi, y.hi);

    return fast_two_sum(c.hi, c.lo + (x.hi * y.lo + x.lo * y.hi));
}

static inline DpWide
wide_mul_double(DpWide x, double y)
{
    DpWide c = two_product(x.hi, y);
    DpWide t = fast_two_sum(c.hi, x.lo * y);

    return fast_two_sum(t.hi, t.lo + c.lo);
}

static inline DpWide
wide_div(DpWide x, DpWide y)
{
    double quotient = x.hi / y.hi;
    DpWide r = wide_mul_double(y, quotient);

    return fast_two_sum(quotient, ((x.hi - r.hi) + (x.lo - r.lo)) / y.hi);
}

/*
 * One step of Newton from s = sqrt(x.hi). With |x - s^2| <= 3.1 u x the step itself is off by 1.3 u^2 sqrt(x); x.hi -
 * s^2 is exact but for the last two additions, 7 u^2 x, and the quotient is rounded, 1.6 u^2 sqrt(x): 6.5 u^2 in all.
 */
static inline DpWide
wide_sqrt(DpWide x)
{
    double s = sqrt(x.hi);
    DpWide square = two_product(s, s);

    if (s == 0.0)
        return (DpWide){0.0, 0.0};
    return fast_two_sum(s, (((x.hi - square.hi) - square.lo) + x.lo) / (2.0 * s));
}

/* 0.word[0] word[1] ... in base 2^64, from the last digit up: 2 n additions of numbers that are not negative. */
static inline DpWide
wide_fraction(const uint64_t *word, int n)
{
    DpWide x = {0.0, 0.0};

    for (int i = 2 * n - 1; i >= 0; i--) {
        x = wide_add_double(x, (double)(uint32_t)(word[i / 2] >> (i % 2 ? 0 : 32)));
        x = (DpWide){x.hi * 0x1p-32, x.lo * 0x1p-32};
    }
    return x;
}

/*
 * The nearest integer, for |x| < 2^52. hi is the double nearest to x, so x lies beyond a half only if hi does, or if hi
 * is that half and lo points beyond.
 */
static inline int64_t
wide_round(DpWide x)
{
    double whole = floor(x.hi);
    double rest = x.hi - whole;

    return (int64_t)whole + (rest > 0.5 || (rest == 0.5 && x.lo > 0.0));
}

#endif
