/*
 * primal.c: coordinate descent in blocks, with noise on the moves (PrimalDP-SCD of Damaskinos et al. 2021).
 *
 * The host keeps the margins X w and reads columns, with labels folded into the data as for cd.c. A pass moves a block
 * of L coordinates, drawn at random without repetition, all from the same margins:
 *
 *     move_j  =  - (g_j + lambda w_j) / (L M_j + lambda),  cut to +-clip;      w_j  +=  move_j  [+ noise, rounded]
 *
 * g_j is the derivative of the mean loss and M_j its Lipschitz constant, measured in the first pass and never shown.
 * Two tables' moves differ by at most 2 clip sqrt(L), whatever the rest is: the cut alone sees to that. The columns of
 * a block are asked for twice: for the moves, and to move the margins.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

typedef struct Primal {
    int32_t d;
    int32_t loss;   /* index of the loss */
    int32_t passes; /* planned, the one that measures included */
    int32_t pass;   /* completed */
    int32_t block;  /* L */
    int32_t at;     /* columns asked for in this pass */
    int64_t n;
    double loss_param, lambda, clip, curvature, label;
    DpNoise noise;

    double vectors[]; /* w, M, the block's moves, all coordinates in some order: d each */
} Primal;

#define WEIGHTS(s) ((s)->vectors)
#define SMOOTHNESS(s) ((s)->vectors + (s)->d)
#define MOVE(s) ((s)->vectors + 2 * (size_t)(s)->d)
#define ORDER(s) ((s)->vectors + 3 * (size_t)(s)->d)

#define BLOCK 512 /* slopes at a time */

static size_t
primal_size(int d)
{
    return sizeof(Primal) + 4 * (size_t)d * sizeof(double);
}

static const char *
check(const Primal *s)
{
    if (s->n < 1 || s->passes < 2)
        return "n or epochs";
    if (s->block < 1 || s->block > s->d)
        return "inner_iterations";
    return s->clip > 0 && isfinite(s->clip) ? NULL : "clip";
}

static const char *
primal_start(void *body, int d, const DpParams *p)
{
    Primal *s = body;
    const DpLoss *loss = dp_loss_named(p->word(p->host, "loss"));
    const char *wrong;

    memset(s, 0, primal_size(d));
    if (loss == NULL)
        return "loss";
    s->d = d;
    s->loss = dp_loss_index(loss);
    s->passes = (int32_t)p->number(p->host, "epochs");
    s->block = (int32_t)p->number(p->host, "inner_iterations");
    s->n = (int64_t)p->number(p->host, "n");
    s->loss_param = p->number(p->host, "loss_param");
    s->lambda = p->number(p->host, "lambda");
    s->clip = p->number(p->host, "clip");
    s->curvature = p->number(p->host, "curvature");
    s->label = p->number(p->host, "margin_label");
    for (int j = 0; j < d; j++)
        ORDER(s)[j] = j;
    wrong = dp_noise_start(&s->noise, p, s->block);
    return wrong != NULL ? wrong : check(s);
}

static bool
primal_begin_pass(void *body, int part)
{
    Primal *s = body;

    if (part != 0 || s->pass >= s->passes)
        return false;
    s->at = 0;
    return true;
}

static bool
measuring(const Primal *s)
{
    return s->pass == 0;
}

/* Puts coordinates drawn at random first: Fisher and Yates's shuffle, as far as it is needed. */
static void
draw_block(Primal *s, DpRandom *random)
{
    for (int i = 0; i < s->block; i++) {
        int k = i + (int)dp_random_below(random, (uint64_t)(s->d - i));
        double drawn = ORDER(s)[k];

        ORDER(s)[k] = ORDER(s)[i];
        ORDER(s)[i] = drawn;
    }
}

/* After the last pass nobody asks for margins. */
static bool
primal_next(void *body, DpRandom *random, int *j)
{
    Primal *s = body;
    int wanted = measuring(s) ? s->d : s->pass == s->passes - 1 ? s->block : 2 * s->block;

    if (s->at == wanted)
        return false;
    if (s->at == 0 && !measuring(s))
        draw_block(s, random);
    *j = measuring(s) ? s->at : (int)ORDER(s)[s->at % s->block];
    return true;
}

static double
sum_squares(const float *column, int n)
{
    double norm = dp_row_norm(column, n);

    return norm * norm;
}

static double
primal_sum(const void *body, int j, const double *margins, const float *column, int n)
{
    const Primal *s = body;
    const DpLoss *loss = dp_loss_at(s->loss);
    double slopes[BLOCK], sum = 0.0;

    (void)j;
    if (measuring(s))
        return sum_squares(column, n);
    for (int start = 0; start < n && s->at < s->block; start += BLOCK) {
        int some = n - start < BLOCK ? n - start : BLOCK;

        loss->slopes(margins + start, slopes, some, s->label, s->loss_param);
        sum += dp_dot(slopes, column + start, some);
    }
    return sum;
}

/* A number, and cut, whatever the sum is. */
static double
move_of(const Primal *s, int j, double sum)
{
    double steep = s->block * SMOOTHNESS(s)[j] + s->lambda;
    double move = -(sum / (double)s->n + s->lambda * WEIGHTS(s)[j]) / steep;

    return isnan(move) ? 0.0 : fmax(-s->clip, fmin(s->clip, move));
}

static void
move_weights(Primal *s, DpPool *pool)
{
    dp_noise_add(&s->noise, pool, MOVE(s), s->block);
    for (int i = 0; i < s->block; i++)
        WEIGHTS(s)[(int)ORDER(s)[i]] += MOVE(s)[i];
}

static double
primal_move(void *body, int j, double sum, DpPool *pool)
{
    Primal *s = body;
    int at = s->at++;

    if (measuring(s)) {
        SMOOTHNESS(s)[j] = s->curvature * sum / (double)s->n;
        return 0.0;
    }
    if (at >= s->block)
        return MOVE(s)[at - s->block];
    MOVE(s)[at] = move_of(s, j, sum);
    if (s->at == s->block)
        move_weights(s, pool);
    return 0.0;
}

static void
primal_observe(void *body, const double *margins, int64_t n)
{
    (void)body;
    (void)margins;
    (void)n;
}

static bool
primal_complete(const void *body)
{
    const Primal *s = body;

    return s->at >= (measuring(s) ? s->d : s->block);
}

static void
primal_end_pass(void *body, DpPool *pool)
{
    (void)pool;
    ((Primal *)body)->pass++;
}

static void
primal_output(const void *body, double *w)
{
    const Primal *s = body;

    memcpy(w, WEIGHTS(s), (size_t)s->d * sizeof(double));
}

static int
primal_passes(const void *body)
{
    return ((const Primal *)body)->pass;
}

static bool
primal_noised(const void *body)
{
    return ((const Primal *)body)->noise.mechanism != DP_NO_NOISE;
}

const DpSolver dp_primal = {
    .name = "primal",
    .size = primal_size,
    .start = primal_start,
    .begin_pass = primal_begin_pass,
    .complete = primal_complete,
    .end_pass = primal_end_pass,
    .next = primal_next,
    .sum = primal_sum,
    .move = primal_move,
    .observe = primal_observe,
    .output = primal_output,
    .passes = primal_passes,
    .noised = primal_noised,
};
