/*
 * bulk.c: random numbers by the thousand, for noise that is added to every batch of a training.
 *
 * Wanted: Gaussians at a few nanoseconds each, from the same ChaCha20 key stream as everything else, and the same bits
 * from every instruction set. Two steps, both plain loops that the compiler turns into vectors:
 *
 *   key stream   sixteen blocks side by side, one per lane; word for word the stream of random.c. A generator may serve
 *                single and bulk draws by turns: both take the next unused blocks, so nothing is ever given out twice.
 *   Gaussians    Box and Muller: radius R = sqrt(-2 ln u), angle uniform on the circle, each from 64 bits of its own.
 *                One group of sixteen blocks makes 128 numbers. Division and square root are IEEE's, the rest is
 *                polynomials in a fixed order. No table depends on a random number; one branch does:
 *   rare pairs   u below 2^-24 or above 1 - 2^-24, where 64 bits, or a double's 53, are too coarse for R. That is one
 *                pair in 2^23, in one group of 2^17. Its radius is drawn again, given on which side u lies, from words
 *                that are taken after the group's blocks.
 *
 * How close a pair comes to the normal one, in units of sigma (a double between 2^-900 and 2^900):
 *
 *   An exact normal pair, made of real numbers in the same cells, lies within 2^-42 of the pair delivered, unless it is
 *   longer than 64. That has probability e^-2048 < 2^-2900.
 *
 * Why: rounding, angle and radius add up.
 *
 *   - Rounding. Given the middles of its cells, u's as a double, each number is within 2^-49 of the exact transform,
 *     relatively: fewer than 11 roundings of 2^-53 add up; 5 of them is the most that was seen. For the pair that is
 *     2^-49 R: 2^-46.4 for an ordinary one, 2^-43 for any.
 *   - Angle. A quarter of the circle has 2^62 cells: less than 2^-62 R.
 *   - Radius, u ordinary. |dR/du| = 1/(u R), and u R has no minimum but at the ends of a range. Up to u = 1/2 it is at
 *     least 2^-21.48, and the double is off by at most half a cell, 2^-65, and 2^-53 u: |dR| < 2^-43.5. From 1/2 on it
 *     is at least 2^-11.51, and the double is off by at most 2^-65 + 2^-54: |dR| < 2^-42.48. With rounding and angle
 *     both stay below 2^-42.4.
 *   - Radius, u < 2^-24. Then -ln u = 24 ln 2 + E, and E is exponential. The one that dp_exponential gives is cut off
 *     after 256 binary places: 2^-258. The rest is rounding.
 *   - Radius, u > 1 - 2^-24. Then 1 - u = 2^-24 V, and V is uniform, from 64 fresh bits. R is 2^-11.5 sqrt(V), but for
 *     2^-25 of it, and square roots of numbers 2^-65 apart differ by at most 2^-32.5: 2^-43.9, also for the smallest V.
 *
 * No tail is cut off: E has no largest value. The three kinds of u have exactly their probabilities. Signs are exact:
 * negating a pair takes one bit that serves nothing else. All this takes the key stream for random bits.
 *
 * What that cannot promise: doubles are not real numbers. Which doubles can come out depends on sigma, and on what the
 * noise is added to; the low bits of a sum can tell two data sets apart (Mironov 2012). So this noise is only for
 * sums that are rounded to a grid together with it (sums.c), and never given away as it is.
 *
 * Squared lengths alone (dp_squared_lengths) take u as above and nothing else: R^2 = -2 ln u. The root of such a number
 * is within 2^-42 of a real one, by what is said of the radius above; and the norm of several such roots is as near to
 * the norm of real ones as their vectors are to each other.
 *
 * Buffers that held key stream are wiped; registers, what the compiler spills of them, and the few words of a rare pair
 * are not.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

#define LANES 16                 /* blocks side by side */
#define GROUP_WORDS (16 * LANES) /* word i of block l is at i * LANES + l */
#define GROUP_PAIRS (GROUP_WORDS / 4)
#define GROUP_NUMBERS (2 * GROUP_PAIRS)
#define GROUPS_PER_PULSE 1024
#define RARE 256u /* of the 2^32 high words of u, at each end: 2^-24 of them */

#define INLINE static inline __attribute__((always_inline))

/* The compiler may not drop it: it must believe that somebody looks at the memory afterwards. */
static void
wipe(void *secret, size_t bytes)
{
    memset(secret, 0, bytes);
    __asm__ volatile("" : : "r"(secret) : "memory");
}

static size_t
smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void
pulse(DpRandom *r)
{
    if (r->pulse != NULL)
        r->pulse();
}

/* ---- key stream ---- */

INLINE uint32_t
rotate(uint32_t x, int bits)
{
    return x << bits | x >> (32 - bits);
}

INLINE void
quarter_round(uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d)
{
    *a += *b;
    *d = rotate(*d ^ *a, 16);
    *c += *d;
    *b = rotate(*b ^ *c, 12);
    *a += *b;
    *d = rotate(*d ^ *a, 8);
    *c += *d;
    *b = rotate(*b ^ *c, 7);
}

INLINE void
double_round(uint32_t x[16])
{
    quarter_round(&x[0], &x[4], &x[8], &x[12]);
    quarter_round(&x[1], &x[5], &x[9], &x[13]);
    quarter_round(&x[2], &x[6], &x[10], &x[14]);
    quarter_round(&x[3], &x[7], &x[11], &x[15]);
    quarter_round(&x[0], &x[5], &x[10], &x[15]);
    quarter_round(&x[1], &x[6], &x[11], &x[12]);
    quarter_round(&x[2], &x[7], &x[8], &x[13]);
    quarter_round(&x[3], &x[4], &x[9], &x[14]);
}

/* Written out: with a loop in it, the loop over the lanes would not be vectorised. */
INLINE void
ten_double_rounds(uint32_t x[16])
{
    double_round(x), double_round(x), double_round(x), double_round(x), double_round(x);
    double_round(x), double_round(x), double_round(x), double_round(x), double_round(x);
}

/* The blocks at the counter in input and at the fifteen counters behind it. */
DP_VECTORISED static void
sixteen_blocks(const uint32_t *restrict input, uint32_t *restrict words)
{
    for (int l = 0; l < LANES; l++) {
        uint32_t ahead = (uint32_t)l, carry = input[12] + ahead < ahead;
        uint32_t x[16];

        for (int i = 0; i < 16; i++)
            x[i] = input[i];
        x[12] += ahead;
        x[13] += carry;
        ten_double_rounds(x);
        for (int i = 0; i < 16; i++)
            words[i * LANES + l] = x[i] + input[i];
        words[12 * LANES + l] += ahead;
        words[13 * LANES + l] += carry;
    }
}

/*
 * Takes up to sixteen blocks out of the stream: the generator has moved on before anybody sees them, and one inherited
 * by fork() has a key of its own.
 */
static void
take_blocks(DpRandom *r, uint32_t *words, uint32_t blocks)
{
    dp_random_check(r);
    sixteen_blocks(r->input, words);
    r->input[12] += blocks;
    r->input[13] += r->input[12] < blocks;
    r->used = 16;
}

static void
fill_without_pulse(DpRandom *r, uint32_t *out, size_t blocks)
{
    _Alignas(64) uint32_t words[GROUP_WORDS];

    while (blocks > 0) {
        size_t some = smaller(blocks, LANES);

        take_blocks(r, words, (uint32_t)some);
        for (size_t l = 0; l < some; l++)
            for (int i = 0; i < 16; i++)
                *out++ = words[i * LANES + l];
        blocks -= some;
    }
    wipe(words, sizeof(words));
}

void
dp_random_fill(DpRandom *r, uint32_t *out, size_t blocks)
{
    while (blocks > 0) {
        size_t some = smaller(blocks, GROUPS_PER_PULSE * LANES);

        fill_without_pulse(r, out, some);
        out += 16 * some;
        blocks -= some;
        pulse(r);
    }
}

/* ---- Gaussians ---- */

typedef union Bits {
    double value;
    uint64_t bits;
} Bits;

INLINE uint64_t
bits_of(double value)
{
    return (Bits){.value = value}.bits;
}

INLINE double
double_of(uint64_t bits)
{
    return (Bits){.bits = bits}.value;
}

/* c[0] + c[1] z + ... + c[6] z^6 by halves: a chain of four instead of seven. */
INLINE double
polynomial(const double c[7], double z)
{
    double z2 = z * z, z4 = z2 * z2;

    return ((c[0] + c[1] * z) + (c[2] + c[3] * z) * z2) + ((c[4] + c[5] * z) + c[6] * z2) * z4;
}

/*
 * -2 ln(u / 2^64) for u in [1/2, 2^64]; never negative. With u = 2^e m, m in [sqrt(1/2), sqrt(2)), and
 * s = (m - 1) / (m + 1): ln m = 2 artanh(s). The polynomial is minimax for 4 artanh(s) / s - 4, over s^2 (2^-59).
 */
INLINE double
minus_two_log(double u)
{
    static const double c[7] = {1.3333333333333468,  0.7999999999883273, 0.5714285748403038, 0.4444439722179723,
                                0.36367124798251344, 0.3062819786955849, 0.2959094993857769};
    const uint64_t one = bits_of(1.0), root_of_half = 0x3fe6a09e667f3bcd, fraction = 0x000fffffffffffff;
    uint64_t scaled = bits_of(u) + (one - root_of_half);
    double m = double_of((scaled & fraction) + root_of_half);
    double missing = (0x1p52 + 1023 + 64) - double_of(bits_of(0x1p52) | scaled >> 52); /* 64 - e */
    double s = (m - 1.0) / (m + 1.0), z = s * s;

    return missing * 1.3862943611198906 - s * (4.0 + z * polynomial(c, z));
}

/* sin and cos of f pi/2 for |f| < 1/2, with z = f^2; minimax (2^-57 and 2^-55, once their coefficients are doubles). */
INLINE double
sine(double f, double z)
{
    static const double c[7] = {-0.6459640975062463,    0.07969262624616694,     -0.004681754135315138,
                                0.00016044118472959378, -3.5988427318782625e-06, 5.69193164786698e-08,
                                -6.628017706094162e-10};

    return f * (1.5707963267948966 + z * polynomial(c, z));
}

INLINE double
cosine(double z)
{
    static const double c[7] = {-1.2337005501361697,   0.2536695079010468,     -0.02086348076331257,
                                0.0009192602741910882, -2.520203678840028e-05, 4.7106096723663676e-07,
                                -6.32120240096093e-09};

    return 1.0 + z * polynomial(c, z);
}

/* The middle of one of the 2^64 cells of [0, 1], times 2^64; never 0. */
INLINE double
middle(uint32_t high, uint32_t low)
{
    return (double)high * 0x1p32 + ((double)low + 0.5);
}

/*
 * Words i, i + 4, i + 8, i + 12 of a block make a pair: the low and high half of u, then 2 bits that choose a quarter
 * of the circle (swap the coordinates, negate both) and 62 that place the point on it: f, between -1/2 and 1/2, never
 * 0.
 */
INLINE double
place(const uint32_t *words, int j)
{
    uint32_t low = words[j + 2 * GROUP_PAIRS], high = words[j + 3 * GROUP_PAIRS];

    return (int32_t)high * 0x1p-32 + ((low & ~3u) + 2) * 0x1p-64;
}

INLINE void
put_pair(const uint32_t *restrict words, int j, double f, double radius, double *restrict out)
{
    double z = f * f;
    uint64_t x = bits_of(cosine(z)), y = bits_of(sine(f, z)), turn = words[j + 2 * GROUP_PAIRS];
    uint64_t swap = (x ^ y) & (0 - (turn & 1));

    radius = double_of(bits_of(radius) ^ (turn & 2) << 62);
    out[j] = radius * double_of(x ^ swap);
    out[j + GROUP_PAIRS] = radius * double_of(y ^ swap);
}

DP_VECTORISED static void
box_muller(const uint32_t *restrict words, double sigma, double *restrict out)
{
    for (int j = 0; j < GROUP_PAIRS; j++) {
        double f = place(words, j); /* first: some compilers make faster code of this order */
        double radius = sigma * sqrt(minus_two_log(middle(words[j + GROUP_PAIRS], words[j])));

        put_pair(words, j, f, radius, out);
    }
}

/* u's high word is one of the first or of the last. */
INLINE bool
is_rare(const uint32_t *words, int j)
{
    return (uint32_t)(words[j + GROUP_PAIRS] + RARE) < 2 * RARE;
}

DP_VECTORISED static bool
has_rare_pair(const uint32_t *words)
{
    uint32_t found = 0;

    for (int j = 0; j < GROUP_PAIRS; j++)
        found |= is_rare(words, j);
    return found;
}

/* The square of the radius, given u < 2^-24: 2 (24 ln 2 + E). */
static double
square_of_tail(DpRandom *r)
{
    return 33.27106466687737 + 2.0 * dp_exponential(r).hi;
}

/* Given u > 1 - 2^-24: -2 ln(1 - v), v uniform below 2^-24; what the series leaves out is 2^-74 of it. */
static double
square_of_centre(DpRandom *r)
{
    uint64_t bits = dp_random_u64(r);
    double v = 0x1p-88 * middle((uint32_t)(bits >> 32), (uint32_t)bits);

    return v * (2.0 + v * (1.0 + v * (2.0 / 3.0)));
}

static double
square_of_rare(DpRandom *r, uint32_t high)
{
    return high < RARE ? square_of_tail(r) : square_of_centre(r);
}

/* A pulse may leave for good, and there are words to wipe: it has to wait. */
static void
redo_rare_pairs(DpRandom *r, const uint32_t *words, double sigma, double *out)
{
    void (*waiting)(void) = r->pulse;

    r->pulse = NULL;
    for (int j = 0; j < GROUP_PAIRS; j++)
        if (is_rare(words, j)) {
            double radius = sqrt(square_of_rare(r, words[j + GROUP_PAIRS]));

            put_pair(words, j, place(words, j), sigma * radius, out);
        }
    r->pulse = waiting;
}

static void
gaussians_without_pulse(DpRandom *r, double sigma, double *out, size_t groups)
{
    _Alignas(64) uint32_t words[GROUP_WORDS];

    for (; groups > 0; groups--, out += GROUP_NUMBERS) {
        take_blocks(r, words, LANES);
        box_muller(words, sigma, out);
        if (has_rare_pair(words))
            redo_rare_pairs(r, words, sigma, out);
    }
    wipe(words, sizeof(words));
}

void
dp_gaussians(DpRandom *r, double sigma, double *out, size_t n)
{
    double last[GROUP_NUMBERS];

    while (n >= GROUP_NUMBERS) {
        size_t groups = smaller(n / GROUP_NUMBERS, GROUPS_PER_PULSE);

        gaussians_without_pulse(r, sigma, out, groups);
        out += groups * GROUP_NUMBERS;
        n -= groups * GROUP_NUMBERS;
        pulse(r);
    }
    if (n > 0) {
        gaussians_without_pulse(r, sigma, last, 1);
        memcpy(out, last, n * sizeof(double));
        wipe(last, sizeof(last));
        pulse(r);
    }
}

/* ---- squared lengths: u alone, of words i (low) and i + half a group (high) ---- */

#define GROUP_SQUARES (GROUP_WORDS / 2)

DP_VECTORISED static bool
squares_of(const uint32_t *restrict words, double *restrict out)
{
    uint32_t rare = 0;

    for (int j = 0; j < GROUP_SQUARES; j++)
        out[j] = minus_two_log(middle(words[j + GROUP_SQUARES], words[j]));
    for (int j = 0; j < GROUP_SQUARES; j++)
        rare |= (uint32_t)(words[j + GROUP_SQUARES] + RARE) < 2 * RARE;
    return rare;
}

static void
redo_rare_squares(DpRandom *r, const uint32_t *words, double *out)
{
    void (*waiting)(void) = r->pulse;

    r->pulse = NULL;
    for (int j = 0; j < GROUP_SQUARES; j++)
        if ((uint32_t)(words[j + GROUP_SQUARES] + RARE) < 2 * RARE)
            out[j] = square_of_rare(r, words[j + GROUP_SQUARES]);
    r->pulse = waiting;
}

void
dp_squared_lengths(DpRandom *r, double *out, size_t n)
{
    _Alignas(64) uint32_t words[GROUP_WORDS];
    double group[GROUP_SQUARES];

    for (size_t at = 0; at < n; at += GROUP_SQUARES) {
        double *to = n - at >= GROUP_SQUARES ? out + at : group;

        take_blocks(r, words, LANES);
        if (squares_of(words, to))
            redo_rare_squares(r, words, to);
        if (to == group)
            memcpy(out + at, group, (n - at) * sizeof(double));
    }
    wipe(words, sizeof(words));
    wipe(group, sizeof(group));
    pulse(r);
}
