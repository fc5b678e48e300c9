/*
 * exact.c: coins, exponential numbers and choices of exact probability, from integers and fair coins only.
 *
 * The coins follow Canonne, Kamath and Steinke (2020). An exponential number is E = G + F: G counts heads of a coin of
 * probability 1/e, and F in [0, 1) has density proportional to e^-f. F is a uniform multiple of 2^-256 that is kept
 * with probability e^-F. All those multiples stand for cells of one width, whose probabilities under e^-f are in the
 * ratio e^-F: so G + F is exactly a real exponential number cut off after 256 binary places.
 */
#include "exact.h"
#include "wide.h"

#define WORDS 4

static u128
random_bits(DpRandom *r, int bits)
{
    u128 u;

    if (bits <= 32)
        return dp_random_u32(r) & (uint32_t)(((uint64_t)1 << bits) - 1);
    u = dp_random_u64(r);
    if (bits > 64)
        u = u << 64 | dp_random_u64(r);
    return bits == 128 ? u : u & (((u128)1 << bits) - 1);
}

static int
bit_length(u128 n)
{
    uint64_t high = (uint64_t)(n >> 64), low = (uint64_t)n;

    if (high)
        return 128 - __builtin_clzll(high);
    return low ? 64 - __builtin_clzll(low) : 0;
}

/* A uniform integer below the denominator, by rejection. */
bool
dp_bernoulli(DpRandom *r, u128 numerator, u128 denominator)
{
    int bits = bit_length(denominator - 1);
    u128 u;

    if (numerator == denominator)
        return true;
    do
        u = random_bits(r, bits);
    while (u >= denominator);
    return u < numerator;
}

/* CKS algorithm 1. */
bool
dp_bernoulli_exp_fraction(DpRandom *r, u128 numerator, u128 denominator)
{
    uint64_t k = 1;

    while (dp_bernoulli(r, numerator, denominator * k))
        k++;
    return k % 2 == 1;
}

bool
dp_bernoulli_exp(DpRandom *r, u128 numerator, u128 denominator)
{
    for (; numerator > denominator; numerator -= denominator)
        if (!dp_bernoulli_exp_fraction(r, 1, 1))
            return false;
    return dp_bernoulli_exp_fraction(r, numerator, denominator);
}

/* A uniform multiple of 2^-256 in [0, 1), whose words are drawn when they are first looked at. */
typedef struct Fraction {
    uint64_t word[WORDS];
    int known;
} Fraction;

static uint64_t
word_of(DpRandom *r, Fraction *f, int i)
{
    while (f->known <= i)
        f->word[f->known++] = dp_random_u64(r);
    return f->word[i];
}

/* True with probability f: another uniform fraction is smaller. The first word decides, but for one case in 2^64. */
static bool
bernoulli_of(DpRandom *r, Fraction *f)
{
    for (int i = 0; i < WORDS; i++) {
        uint64_t mine = word_of(r, f, i), other = dp_random_u64(r);

        if (mine != other)
            return other < mine;
    }
    return false;
}

/* True with probability exp(-f): CKS algorithm 1, a coin of f / k being one of f and one of 1 / k. */
static bool
bernoulli_exp_of(DpRandom *r, Fraction *f)
{
    uint64_t k = 1;

    while (dp_bernoulli(r, 1, k) && bernoulli_of(r, f))
        k++;
    return k % 2 == 1;
}

DpWide
dp_exponential(DpRandom *r)
{
    double whole = 0.0;
    Fraction f;

    while (dp_bernoulli_exp_fraction(r, 1, 1))
        whole += 1.0;
    do
        f.known = 0;
    while (!bernoulli_exp_of(r, &f));
    word_of(r, &f, WORDS - 1);
    return wide_add_double(wide_fraction(f.word, WORDS), whole);
}

double
dp_gumbel(DpRandom *r)
{
    return -log(dp_exponential(r).hi);
}

static int64_t
largest(const int64_t *score, int n)
{
    int64_t best = score[0];

    for (int j = 1; j < n; j++)
        if (score[j] > best)
            best = score[j];
    return best;
}

/* A uniform index, kept with probability exp(-(largest - score) numerator / denominator). */
int
dp_exponential_choice(DpRandom *r, const int64_t *score, int n, uint64_t numerator, uint64_t denominator)
{
    int64_t best = largest(score, n);

    for (;;) {
        int j = (int)dp_random_below(r, (uint64_t)n);
        uint64_t gap = (uint64_t)best - (uint64_t)score[j];

        if (dp_bernoulli_exp(r, (u128)gap * numerator, denominator))
            return j;
    }
}
