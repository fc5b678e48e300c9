/*
 * descent.c: the arithmetic of coordinate descent: derivatives in units of their cut, constants, and the prox.
 *
 * For coordinate j let C_j be its cut (C sqrt(M_j / sum M), or sqrt(M_j) where nothing is cut) and
 *
 *     u_j = sum over rows of  round( max(-1, min(1, slope x_j / C_j)) ),      g_j = unit_j u_j,   unit_j = C_j / n.
 *
 * A term is rounded to a multiple of q = 2^(e - 52), where 2^e >= n: adding up to n of them is exact, in any order, so
 * that one row changes u_j by no more than its own two terms. Rounding adds 1.5 2^e to a term and takes it away again:
 * numbers from 2^e to 2^(e + 1) are the multiples of q. Without noise terms are neither cut nor rounded.
 *
 * A row of zeros has terms that are exactly 0, whatever the weights: `zero-out` stands on that. A slope is a number,
 * and at most DP_STEEPEST, whatever the margin; times a float and 1 / C_j it stays one. (Weights and rates are kept
 * below 1e150, so that margins are numbers, too.)
 *
 * Rows come packed: a label, then d features, then the next row.
 */
#include "descent.h"

#include <math.h>

#define LANES 8
#define SQUARES 0x1p20

static double
sum_lanes(const double lane[LANES])
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* C_j / n, from M_j: all C_j / sqrt(M_j) are equal. A coordinate without a curvature has none, and never moves. */
static void
set_units(const DpDescent *s, const double *smoothness, double *unit)
{
    double trace = 0.0, factor;

    for (int j = 0; j < s->d; j++)
        trace += smoothness[j];
    factor = isfinite(s->clip) ? s->clip / sqrt(trace) : 1.0;
    for (int j = 0; j < s->d; j++)
        unit[j] = factor * sqrt(smoothness[j]) / (double)s->n;
}

static void
set_rounding(DpDescent *s)
{
    bool cut = isfinite(s->clip);
    int exponent;

    (void)frexp((double)s->n, &exponent);
    s->bound = cut ? 1.0 : INFINITY;
    s->magic = cut ? ldexp(1.5, exponent < 2 ? 2 : exponent) : 0.0;
}

static const char *
check(const DpDescent *s, const double *smoothness)
{
    for (int j = 0; j < s->d && !s->measures; j++)
        if (!(smoothness[j] > 0) || !isfinite(smoothness[j]))
            return "constants";
    if (s->n < 1 || (double)s->n > 0x1p32 || s->passes < 1)
        return "n or epochs";
    if (s->noise.mechanism != DP_NO_NOISE && !(s->clip > 0 && isfinite(s->clip)))
        return "clip";
    /* Exact constants are for runs without noise, and noisy ones for runs that have a generator. */
    if (s->measures && (s->noise.mechanism != DP_NO_NOISE) != (s->measure_scale > 0))
        return "measure_scale";
    if (!(s->measure_scale >= 0 && s->measure_scale <= 0x1p50) || s->measure_scale != floor(s->measure_scale))
        return "measure_scale";
    return s->track && s->noise.mechanism != DP_NO_NOISE ? "track" : NULL;
}

const char *
dp_descent_start(DpDescent *s, int d, const DpParams *p, double *smoothness, double *unit)
{
    const DpLoss *loss = dp_loss_named(p->word(p->host, "loss"));
    const char *wrong;

    if (loss == NULL)
        return "loss";
    s->d = d;
    s->loss = dp_loss_index(loss);
    s->passes = (int32_t)p->number(p->host, "epochs");
    s->measures = p->number(p->host, "measures") != 0;
    s->track = p->number(p->host, "track") != 0;
    s->n = (int64_t)p->number(p->host, "n");
    s->loss_param = p->number(p->host, "loss_param");
    s->lambda = p->number(p->host, "lambda");
    s->l1 = p->number(p->host, "l1");
    s->box = p->number(p->host, "box");
    s->clip = p->number(p->host, "clip");
    s->curvature = p->number(p->host, "curvature");
    s->feature_bound = p->number(p->host, "feature_bound");
    s->measure_scale = p->number(p->host, "measure_scale");
    wrong = dp_step_start(&s->step, p);
    if (wrong == NULL)
        wrong = dp_noise_start(&s->noise, p, 1);
    if (wrong != NULL)
        return wrong;
    p->numbers(p->host, "constants", smoothness, d);
    set_rounding(s);
    if (!s->measures)
        set_units(s, smoothness, unit);
    return check(s, smoothness);
}

/* ---- constants ---- */

DP_VECTORISED double
dp_descent_squares(const DpDescent *s, const float *column, int n)
{
    double per_step = SQUARES / (s->feature_bound * s->feature_bound);
    double sum = 0.0;

    if (s->measure_scale > 0)
        for (int i = 0; i < n; i++)
            sum += floor((double)column[i] * (double)column[i] * per_step);
    else
        for (int i = 0; i < n; i++)
            sum += (double)column[i] * (double)column[i];
    return sum;
}

DP_VECTORISED void
dp_descent_add_squares(const DpDescent *s, const float *row, double *sums)
{
    double per_step = SQUARES / (s->feature_bound * s->feature_bound);

    if (s->measure_scale > 0)
        for (int j = 0; j < s->d; j++)
            sums[j] += floor((double)row[j] * (double)row[j] * per_step);
    else
        for (int j = 0; j < s->d; j++)
            sums[j] += (double)row[j] * (double)row[j];
}

/* A noisy sum of squares, kept between twice the noise's scale and what n rows at the bound would give. */
static double
noisy_squares(const DpDescent *s, DpRandom *random, double squares)
{
    double most = SQUARES * (double)s->n, least = fmin(2.0 * s->measure_scale, most);
    double noisy = (double)((int64_t)squares + dp_discrete_laplace(random, (uint64_t)s->measure_scale));

    return fmax(least, fmin(most, noisy)) * s->feature_bound * s->feature_bound / SQUARES;
}

void
dp_descent_measured(const DpDescent *s, DpRandom *random, double *smoothness, double *unit)
{
    for (int j = 0; j < s->d; j++) {
        double squares = s->measure_scale > 0 ? noisy_squares(s, random, smoothness[j]) : smoothness[j];

        smoothness[j] = s->curvature * squares / (double)s->n;
    }
    set_units(s, smoothness, unit);
}

/* ---- derivatives ---- */

static inline double
term(double slope, float x, double per_unit, double bound, double magic)
{
    double t = slope * (double)x * per_unit;

    t = t > -bound ? t : -bound;
    t = t < bound ? t : bound;
    return (t + magic) - magic;
}

DP_VECTORISED double
dp_descent_terms(const DpDescent *s, const double *slopes, const float *column, int n, double per_unit)
{
    double bound = s->bound, magic = s->magic;
    double lane[LANES] = {0};
    double rest = 0.0;
    int i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += term(slopes[i + l], column[i + l], per_unit, bound, magic);
    for (; i < n; i++)
        rest += term(slopes[i], column[i], per_unit, bound, magic);
    return sum_lanes(lane) + rest;
}

DP_VECTORISED static void
add_terms(const DpDescent *s, double slope, const float *row, const double *per_unit, double *sums)
{
    double bound = s->bound, magic = s->magic;

    for (int j = 0; j < s->d; j++)
        sums[j] += term(slope, row[j], per_unit[j], bound, magic);
}

/* Four rows at once: units and sums are loaded once for all of them. */
DP_VECTORISED static void
add_terms_of_four(const DpDescent *s, const double *slopes, const float *rows, const double *per_unit, double *sums)
{
    double bound = s->bound, magic = s->magic;
    size_t stride = (size_t)s->d + 1;

    for (int j = 0; j < s->d; j++) {
        const float *x = rows + j;

        sums[j] +=
            (term(slopes[0], x[0], per_unit[j], bound, magic) + term(slopes[1], x[stride], per_unit[j], bound, magic)) +
            (term(slopes[2], x[2 * stride], per_unit[j], bound, magic) +
             term(slopes[3], x[3 * stride], per_unit[j], bound, magic));
    }
}

void
dp_descent_add_terms(const DpDescent *s, const double *slopes, const float *rows, int n, const double *per_unit,
                     double *sums)
{
    int i = 0;

    for (; i + 4 <= n; i += 4)
        add_terms_of_four(s, slopes + i, rows + i * ((size_t)s->d + 1), per_unit, sums);
    for (; i < n; i++)
        add_terms(s, slopes[i], rows + i * ((size_t)s->d + 1), per_unit, sums);
}

/* ---- the penalty ---- */

double
dp_descent_prox(const DpDescent *s, double w, double g, double smoothness, int64_t t)
{
    double rate, moved;

    if (!(smoothness > 0))
        return w;
    rate = fmin(dp_step(&s->step, t) / smoothness, DP_DIVERGED);
    moved = w - rate * g;
    moved = copysign(fmax(fabs(moved) - rate * s->l1, 0.0), moved) / (1.0 + rate * s->lambda);
    moved = fmax(-DP_DIVERGED, fmin(DP_DIVERGED, moved));
    return fmax(-s->box, fmin(s->box, moved)) + 0.0; /* never minus zero */
}

/* A weight of that size, or a mean of such, did not come there by descending: nobody must take it for one. */
void
dp_descent_output(const DpDescent *s, const double *weights, double *w)
{
    for (int j = 0; j < s->d; j++)
        w[j] = fabs(weights[j]) < DP_SANE ? weights[j] : INFINITY;
}

double
dp_descent_penalty(const DpDescent *s, const double *w)
{
    double norm = dp_norm(w, s->d), sum = 0.0;

    for (int j = 0; j < s->d; j++)
        sum += fabs(w[j]);
    return 0.5 * s->lambda * norm * norm + s->l1 * sum;
}
