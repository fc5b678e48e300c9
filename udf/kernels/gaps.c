/*
 * gaps.c: how many steps a row waits until it is sampled again, when each step takes it with probability q.
 *
 * The wait K has P(K = k) = q s^k, s = 1 - q. Written in binary, its digits are independent: digit j is one with
 * probability s^(2^j) / (1 + s^(2^j)), and what is above digit J is geometric with ratio s^(2^J). So a wait costs J + 2
 * coins or so, however small q is. J is the first with s^(2^J) <= 1/2.
 *
 * Claim: at every step, whatever happened before, the probability to be taken is within a factor 1 +- 2^-50 of q.
 * Proof. A coin's threshold is its probability rounded to 64 bits, with an error below 2^-62, the arithmetic included:
 * from x = 1 - s^(2^j), the next is x (2 - x), where relative errors of 2^-102 only add up. All digits' probabilities
 * lie between 1/3 and 1/2, that of the coin above them between 1/4 and 1/2, so heads and tails of each have a relative
 * error below 2^-60. Let k = a 2^J + b. Given that the wait is at least k, it is k with probability
 *
 *     P(tail) P(low = b) / (P(tail) P(low >= b) + P(head)),
 *
 * whatever a is. Numerator and denominator are sums of products of at most J + 1 <= 45 such probabilities, so that the
 * ratio has a relative error below (1 + 2^-60)^45 / (1 - 2^-60)^45 - 1 < 2^-53. If J = 0 the only coin stops with
 * probability q >= 1/2, with an error below 2^-62. A wait is drawn anew after each step that takes the row. QED
 *
 * With q >= 2^-44 a wait would need 2^20 heads in a row to leave 64 bits.
 */
#include "wide.h"

/* The first 64 binary places of a probability below 1; the last place may be off by one. */
static uint64_t
places(DpWide p)
{
    double upper = floor(p.hi * 0x1p64);

    return (uint64_t)upper + (uint64_t)(int64_t)floor((p.hi * 0x1p64 - upper) + p.lo * 0x1p64);
}

static DpWide
one_minus(DpWide x)
{
    return wide_add_double((DpWide){-x.hi, -x.lo}, 1.0);
}

bool
dp_gap_start(DpGaps *gaps, double q)
{
    DpWide x = {q, 0.0}; /* 1 - s^(2^j) */

    if (!(q >= DP_SMALLEST_RATE && q <= 1.0))
        return false;
    for (gaps->digits = 0; x.hi < 0.5; gaps->digits++) {
        DpWide power = one_minus(x);

        gaps->digit[gaps->digits] = places(wide_div(power, wide_add_double(power, 1.0)));
        x = wide_mul(x, wide_add_double(power, 1.0));
    }
    gaps->above = places(one_minus(x));
    return true;
}

static uint32_t
next_word(DpWords *w)
{
    if (w->left == 0) {
        dp_random_fill(&w->random, w->words, DP_STOCK / 16);
        w->generation = w->random.generation;
        w->left = DP_STOCK;
    }
    return w->words[DP_STOCK - w->left--];
}

/* True with probability threshold / 2^64; the lower half is drawn only if it matters. */
static inline bool
coin(DpWords *w, uint64_t threshold)
{
    uint32_t upper = next_word(w);

    if (upper != threshold >> 32)
        return upper < threshold >> 32;
    return next_word(w) < (uint32_t)threshold;
}

uint64_t
dp_gap(DpWords *w, const DpGaps *gaps)
{
    uint64_t gap = 0;

    dp_random_check(&w->random);
    if (w->generation != w->random.generation && !w->random.seeded)
        w->left = 0;
    while (coin(w, gaps->above))
        gap++;
    for (int j = gaps->digits - 1; j >= 0; j--)
        gap = 2 * gap + coin(w, gaps->digit[j]);
    return gap;
}
