/* Many draws at once, under fresh keys, and the arithmetic of wide.h: a host for tests, built by samplers.py. */
#include <stdlib.h>

#include "kernels.h"
#include "wide.h"

static DpRandom
fresh(void)
{
    DpRandom r;

    if (!dp_random_fresh(&r, 0))
        abort();
    return r;
}

void
words(uint64_t *out, size_t n)
{
    DpRandom r = fresh();

    for (size_t i = 0; i < n; i++)
        out[i] = dp_random_u64(&r);
}

void
gaussians(uint64_t sigma, int64_t *out, size_t n)
{
    DpRandom r = fresh();

    for (size_t i = 0; i < n; i++)
        out[i] = dp_discrete_gaussian(&r, sigma);
}

void
laplaces(uint64_t scale, int64_t *out, size_t n)
{
    DpRandom r = fresh();

    for (size_t i = 0; i < n; i++)
        out[i] = dp_discrete_laplace(&r, scale);
}

void
exponentials(double *out, size_t n)
{
    DpRandom r = fresh();

    for (size_t i = 0; i < n; i++)
        out[i] = dp_exponential(&r).hi;
}

void
wide_exponentials(DpWide *out, size_t n)
{
    DpRandom r = fresh();

    for (size_t i = 0; i < n; i++)
        out[i] = dp_exponential(&r);
}

void
gumbels(double *out, size_t n)
{
    DpRandom r = fresh();

    for (size_t i = 0; i < n; i++)
        out[i] = dp_gumbel(&r);
}

void
knorms(double scale, int d, double *out, size_t n)
{
    DpRandom r = fresh();
    DpWide *noise = malloc(sizeof(DpWide) * d);

    for (size_t i = 0; i < n; i++) {
        dp_knorm_noise(&r, scale, noise, d);
        for (int j = 0; j < d; j++)
            out[i * d + j] = noise[j].hi;
    }
    free(noise);
}

/* n releases of the d numbers w. */
void
releases(double grid, double scale, const double *w, int d, double *out, size_t n)
{
    DpRandom r = fresh();
    DpWide *room = malloc(sizeof(DpWide) * d);

    for (size_t i = 0; i < n; i++) {
        for (int j = 0; j < d; j++)
            out[i * d + j] = w[j];
        dp_release_knorm(&r, grid, scale, out + i * d, room, d);
    }
    free(room);
}

void
gaps(double q, uint64_t *out, size_t n)
{
    DpWords words = {.random = fresh()};
    DpGaps gaps;

    if (!dp_gap_start(&gaps, q))
        abort();
    for (size_t i = 0; i < n; i++)
        out[i] = dp_gap(&words, &gaps);
}

/* The first `top` of n scores, each chosen from those that are left. */
void
choices(const int64_t *score, int n, uint64_t numerator, uint64_t denominator, int top, int32_t *out, size_t count)
{
    DpRandom r = fresh();
    int64_t *left = malloc(sizeof(int64_t) * n);
    int32_t *name = malloc(sizeof(int32_t) * n);

    for (size_t i = 0; i < count; i++) {
        for (int j = 0; j < n; j++) {
            left[j] = score[j];
            name[j] = j;
        }
        for (int c = 0; c < top; c++) {
            int j = dp_exponential_choice(&r, left, n - c, numerator, denominator);

            out[i * top + c] = name[j];
            left[j] = left[n - c - 1];
            name[j] = name[n - c - 1];
        }
    }
    free(left);
    free(name);
}

void
operations(const DpWide *x, const DpWide *y, DpWide *sum, DpWide *product, DpWide *quotient, DpWide *root, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        sum[i] = wide_add(x[i], y[i]);
        product[i] = wide_mul(x[i], y[i]);
        quotient[i] = wide_div(x[i], y[i]);
        root[i] = wide_sqrt(x[i].hi < 0 ? (DpWide){-x[i].hi, -x[i].lo} : x[i]);
    }
}

void
mixed_operations(const DpWide *x, const double *y, DpWide *sum, DpWide *product, int64_t *rounded, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        sum[i] = wide_add_double(x[i], y[i]);
        product[i] = wide_mul_double(x[i], y[i]);
        rounded[i] = wide_round(x[i]);
    }
}

void
fractions(const uint64_t *word, int words_each, DpWide *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = wide_fraction(word + i * words_each, words_each);
}
