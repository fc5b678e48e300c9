/*
 * random.c: a ChaCha20 key stream (RFC 8439's block function, 64-bit counter and stream number).
 *
 * The key comes from the operating system for everything that is released; from a seed only in tests, by the owner of
 * the data. One key may serve several streams (the order of the rows, the noise) that never overlap.
 *
 * Noise that is used twice cancels, so a process must not go on with a key it inherited by fork(). Every fork gives the
 * child a new generation number; a generator remembers the generation it was keyed in, and one that finds itself in
 * another forgets its key and its unused words and takes a fresh key before it gives out anything. That costs one
 * comparison for each word and no system call. What does not run the handlers of pthread_atfork (a bare clone system
 * call, a copied virtual machine) is not noticed.
 */
#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS_PER_PULSE 16384

#define ROTATE(x, k) (((x) << (k)) | ((x) >> (32 - (k))))
#define QUARTER(a, b, c, d)                                                                                            \
    (a += b, d ^= a, d = ROTATE(d, 16), c += d, b ^= c, b = ROTATE(b, 12), a += b, d ^= a, d = ROTATE(d, 8), c += d,   \
     b ^= c, b = ROTATE(b, 7))

static uint32_t generation = 0;

static void
count_generation(void)
{
    generation++;
}

static uint32_t
little_endian(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

void
dp_random_start(DpRandom *r, const uint8_t key[DP_KEY_BYTES], uint64_t stream)
{
    static const uint8_t sigma[] = "expand 32-byte k";

    for (int i = 0; i < 4; i++)
        r->input[i] = little_endian(sigma + 4 * i);
    for (int i = 0; i < 8; i++)
        r->input[4 + i] = little_endian(key + 4 * i);
    r->input[12] = r->input[13] = 0;
    r->input[14] = (uint32_t)stream;
    r->input[15] = (uint32_t)(stream >> 32);
    r->used = 16;
    r->generation = generation;
    r->seeded = true;
    r->pulse = NULL;
}

/* Two threads that come here at once count a fork twice, which does no harm. */
static bool
watch_for_forks(void)
{
    static bool watching = false;

    if (!watching)
        watching = pthread_atfork(NULL, NULL, count_generation) == 0;
    return watching;
}

bool
dp_random_fresh(DpRandom *r, uint64_t stream)
{
    uint8_t key[DP_KEY_BYTES];

    if (!watch_for_forks() || getentropy(key, sizeof(key)) != 0)
        return false;
    dp_random_start(r, key, stream);
    r->seeded = false;
    explicit_bzero(key, sizeof(key));
    return true;
}

/* Without a fresh key there is nothing a child may safely give out, and no caller that expects to hear of it. */
static void
start_again(DpRandom *r)
{
    void (*pulse)(void) = r->pulse;

    if (!dp_random_fresh(r, (uint64_t)r->input[15] << 32 | r->input[14]))
        abort();
    r->pulse = pulse;
}

void
dp_random_check(DpRandom *r)
{
    if (r->generation == generation)
        return;
    if (r->seeded)
        r->generation = generation;
    else
        start_again(r);
}

static void
next_block(DpRandom *r)
{
    uint32_t x[16];

    memcpy(x, r->input, sizeof(x));
    for (int i = 0; i < 10; i++) {
        QUARTER(x[0], x[4], x[8], x[12]);
        QUARTER(x[1], x[5], x[9], x[13]);
        QUARTER(x[2], x[6], x[10], x[14]);
        QUARTER(x[3], x[7], x[11], x[15]);
        QUARTER(x[0], x[5], x[10], x[15]);
        QUARTER(x[1], x[6], x[11], x[12]);
        QUARTER(x[2], x[7], x[8], x[13]);
        QUARTER(x[3], x[4], x[9], x[14]);
    }
    for (int i = 0; i < 16; i++)
        r->block[i] = x[i] + r->input[i];
    if (++r->input[12] == 0)
        r->input[13]++;
    r->used = 0;
    if (r->pulse != NULL && r->input[12] % BLOCKS_PER_PULSE == 0)
        r->pulse();
}

static inline uint32_t
next_word(DpRandom *r)
{
    if (r->generation != generation)
        dp_random_check(r);
    if (r->used == 16)
        next_block(r);
    return r->block[r->used++];
}

uint32_t
dp_random_u32(DpRandom *r)
{
    return next_word(r);
}

uint64_t
dp_random_u64(DpRandom *r)
{
    uint64_t low = next_word(r);

    return low | (uint64_t)next_word(r) << 32;
}

/* Multiply and take the high word; reject the few low words that would favour some results (Lemire 2019). */
uint64_t
dp_random_below(DpRandom *r, uint64_t n)
{
    unsigned __int128 product = (unsigned __int128)dp_random_u64(r) * n;

    if ((uint64_t)product < n) {
        uint64_t unfair = -n % n;

        while ((uint64_t)product < unfair)
            product = (unsigned __int128)dp_random_u64(r) * n;
    }
    return (uint64_t)(product >> 64);
}
