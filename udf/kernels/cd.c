/*
 * cd.c: proximal coordinate descent on random coordinates (Mangold et al. 2022), column by column.
 *
 * The host keeps the margins X w and reads one column for each step. Labels are folded into the data: for two classes
 * columns and margins are those of y x, and y is 1; for regression margins start at -y, and y is 0 (`label`).
 *
 * A round is K steps on coordinates drawn at random, whatever the data. When rounds are averaged, the next starts at
 * the mean of the round's K iterates: the columns of weights that differ from their mean are asked for once more. The
 * first pass may measure the constants instead: it asks for every column once.
 */
#include "descent.h"

#include <math.h>
#include <string.h>

typedef enum Averaging { AVERAGE_NONE, AVERAGE_ALL, AVERAGE_SUFFIX } Averaging;

typedef struct Cd {
    DpDescent base;
    int32_t average; /* Averaging */
    int32_t cursor;  /* column that comes next when they come in order */
    int64_t steps;   /* K */
    int64_t k;       /* of them, made in this round */
    double label;
    double loss_sum;

    double vectors[]; /* w, sums of the round's iterates, M, units: d each */
} Cd;

#define WEIGHTS(s) ((s)->vectors)
#define TOTAL(s) ((s)->vectors + (s)->base.d)
#define SMOOTHNESS(s) ((s)->vectors + 2 * (size_t)(s)->base.d)
#define UNIT(s) ((s)->vectors + 3 * (size_t)(s)->base.d)

#define BLOCK 512 /* slopes at a time: they stay in the nearest cache */

static size_t
cd_size(int d)
{
    return sizeof(Cd) + 4 * (size_t)d * sizeof(double);
}

static const char *
cd_start(void *body, int d, const DpParams *p)
{
    static const char *const averages[] = {"none", "all", "suffix"};
    Cd *s = body;
    const char *wrong;

    memset(s, 0, cd_size(d));
    s->base.d = d;
    wrong = dp_descent_start(&s->base, d, p, SMOOTHNESS(s), UNIT(s));
    s->average = dp_index_of(p->word(p->host, "average"), averages, 3);
    s->steps = (int64_t)p->number(p->host, "inner_iterations");
    s->label = p->number(p->host, "margin_label");
    if (wrong == NULL && s->average < 0)
        wrong = "average";
    return wrong != NULL ? wrong : s->steps < 1 ? "inner_iterations" : NULL;
}

static bool
cd_begin_pass(void *body, int part)
{
    Cd *s = body;

    if (part != 0 || s->base.pass >= s->base.passes)
        return false;
    s->cursor = 0;
    s->k = dp_descent_measuring(&s->base) ? s->steps : 0;
    s->loss_sum = 0.0;
    for (int j = 0; j < s->base.d; j++)
        TOTAL(s)[j] = (double)s->steps * WEIGHTS(s)[j];
    return true;
}

static bool
averages_this_pass(const Cd *s)
{
    return s->average == AVERAGE_ALL || (s->average == AVERAGE_SUFFIX && s->base.pass == s->base.passes - 1);
}

static double
mean_of(const Cd *s, int j)
{
    return TOTAL(s)[j] / (double)s->steps;
}

/* Weights that must still move to their mean, with their margins; after the last pass nobody asks for margins. */
static bool
next_to_average(Cd *s, int *j)
{
    if (!averages_this_pass(s) || (s->base.pass == s->base.passes - 1 && !s->base.track))
        return false;
    for (; s->cursor < s->base.d; s->cursor++)
        if (mean_of(s, s->cursor) != WEIGHTS(s)[s->cursor]) {
            *j = s->cursor++;
            return true;
        }
    return false;
}

static bool
cd_next(void *body, DpRandom *random, int *j)
{
    Cd *s = body;

    if (dp_descent_measuring(&s->base)) {
        *j = s->cursor++;
        return *j < s->base.d;
    }
    if (s->k == s->steps)
        return next_to_average(s, j);
    *j = (int)dp_random_below(random, (uint64_t)s->base.d);
    return true;
}

static double
cd_sum(const void *body, int j, const double *margins, const float *column, int n)
{
    const Cd *s = body;
    const DpLoss *loss = dp_loss_at(s->base.loss);
    double per_unit = UNIT(s)[j] > 0 ? 1.0 / (UNIT(s)[j] * (double)s->base.n) : 0.0;
    double slopes[BLOCK], sum = 0.0;

    if (dp_descent_measuring(&s->base))
        return dp_descent_squares(&s->base, column, n);
    for (int start = 0; start < n && s->k < s->steps; start += BLOCK) {
        int some = n - start < BLOCK ? n - start : BLOCK;

        loss->slopes(margins + start, slopes, some, s->label, s->base.loss_param);
        sum += dp_descent_terms(&s->base, slopes, column + start, some, per_unit);
    }
    return sum;
}

/* A step: the derivative, with its noise, and the prox. */
static double
step_along(Cd *s, int j, double sum, DpPool *pool)
{
    int64_t t = 1 + (s->base.pass - s->base.measures) * ((s->steps - 1) / s->base.d + 1) + s->k / s->base.d;
    double before = WEIGHTS(s)[j], after;

    dp_noise_add(&s->base.noise, pool, &sum, 1);
    after = dp_descent_prox(&s->base, before, UNIT(s)[j] * sum, SMOOTHNESS(s)[j], t);
    WEIGHTS(s)[j] = after;
    TOTAL(s)[j] += (after - before) * (double)(s->steps - s->k);
    s->k++;
    return after - before;
}

static double
cd_move(void *body, int j, double sum, DpPool *pool)
{
    Cd *s = body;
    double before = WEIGHTS(s)[j];

    if (dp_descent_measuring(&s->base)) {
        SMOOTHNESS(s)[j] = sum;
        return 0.0;
    }
    if (s->k < s->steps)
        return step_along(s, j, sum, pool);
    WEIGHTS(s)[j] = mean_of(s, j);
    return WEIGHTS(s)[j] - before;
}

static void
cd_observe(void *body, const double *margins, int64_t n)
{
    Cd *s = body;
    const DpLoss *loss = dp_loss_at(s->base.loss);

    for (int64_t i = 0; i < n && s->base.track; i++)
        s->loss_sum += loss->value(margins[i], s->label, s->base.loss_param);
}

static bool
cd_complete(const void *body)
{
    const Cd *s = body;

    return s->k == s->steps && (!dp_descent_measuring(&s->base) || s->cursor > s->base.d);
}

static void
cd_end_pass(void *body, DpPool *pool)
{
    Cd *s = body;

    if (dp_descent_measuring(&s->base))
        dp_descent_measured(&s->base, pool == NULL ? NULL : &pool->choices, SMOOTHNESS(s), UNIT(s));
    else if (averages_this_pass(s))
        for (int j = 0; j < s->base.d; j++)
            WEIGHTS(s)[j] = mean_of(s, j);
    s->base.pass++;
}

/* The first pass, when it measures the constants, has none. */
static double
cd_objective(const void *body)
{
    const Cd *s = body;

    if (s->base.measures && s->base.pass == 1)
        return INFINITY;
    return s->loss_sum / (double)s->base.n + dp_descent_penalty(&s->base, WEIGHTS(s));
}

static void
cd_output(const void *body, double *w)
{
    const Cd *s = body;

    dp_descent_output(&s->base, WEIGHTS(s), w);
}

static int
cd_passes(const void *body)
{
    return ((const Cd *)body)->base.pass;
}

static bool
cd_noised(const void *body)
{
    return ((const Cd *)body)->base.noise.mechanism != DP_NO_NOISE;
}

const DpSolver dp_cd = {
    .name = "cd",
    .size = cd_size,
    .start = cd_start,
    .begin_pass = cd_begin_pass,
    .complete = cd_complete,
    .end_pass = cd_end_pass,
    .next = cd_next,
    .sum = cd_sum,
    .move = cd_move,
    .observe = cd_observe,
    .objective = cd_objective,
    .output = cd_output,
    .passes = cd_passes,
    .noised = cd_noised,
};
