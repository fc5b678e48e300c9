/*
 * scd.c: stochastic coordinate descent on the dual, one coordinate for each row (SDCA; Damaskinos et al. 2021).
 *
 * Row i has a dual variable a_i, its memory. v is the sum of a_i x_i, and the weights are v / (lambda n). A batch moves
 * the variables of its rows, each as if all L of them pointed the same way (`sigma`):
 *
 *     move_i  =  argmin over m of  conjugate(a_i + m) + <x_i, v> m / (lambda n) + sigma |x_i|^2 m^2 / (2 lambda n)
 *     a_i    +=  move_i,  scaled down so that |move_i x_i| <= clip;      v  +=  sum of move_i x_i  [+ noise, rounded]
 *
 * With privacy v is made of noisy sums alone. The memories are exact, and nothing but the next moves of their own rows
 * ever depends on them: bismarck_dp/dual.py has the proof that this is enough. It needs every move to follow from its
 * own row, its own memory and v.
 *
 * `sequential`: a row of a batch sees the moves of the rows before it, with sigma = 1. Then no memory may follow from
 * what it saw, or it would carry other rows into later batches: the memory moves as if v were all there is. A batch has
 * at most `most` rows that count; rows behind them are left out.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

typedef struct Scd {
    int32_t d;
    int32_t loss; /* index of the loss */
    int32_t sequential;
    int32_t track;   /* measure the gap after every pass, not just the last (never in a private run) */
    int32_t passes;  /* planned */
    int32_t pass;    /* completed */
    int64_t batches; /* of a pass */
    int64_t made;    /* of them, in this pass */
    int64_t most;    /* rows of a sequential batch */
    int64_t taken;   /* of them, in this batch */
    int64_t n;
    double strength; /* lambda n */
    double lambda, sigma, loss_param, clip;
    DpNoise noise;
    double loss_sum, gap_sum;

    double vectors[]; /* v, the batch's sum, v with the moves of this batch: d each */
} Scd;

#define V(s) ((s)->vectors)
#define SUM(s) ((s)->vectors + (s)->d)
#define AHEAD(s) ((s)->vectors + 2 * (size_t)(s)->d)

static size_t
scd_size(int d)
{
    return sizeof(Scd) + 3 * (size_t)d * sizeof(double);
}

static const char *
check(const Scd *s)
{
    if (s->n < 1 || s->batches < 1 || s->passes < 1)
        return "n, batch_size or epochs";
    if (!(s->lambda > 0))
        return "lambda";
    if (s->sequential && s->most < 1)
        return "most";
    if (s->noise.mechanism != DP_NO_NOISE && !(s->clip > 0 && isfinite(s->clip)))
        return "clip";
    return s->track && s->noise.mechanism != DP_NO_NOISE ? "track" : NULL;
}

static const char *
scd_start(void *body, int d, const DpParams *p)
{
    Scd *s = body;
    const DpLoss *loss = dp_loss_named(p->word(p->host, "loss"));
    double batch_size = p->number(p->host, "batch_size");
    const char *wrong;

    memset(s, 0, scd_size(d));
    if (loss == NULL)
        return "loss";
    if (!(batch_size >= 1))
        return "batch_size";
    s->d = d;
    s->loss = dp_loss_index(loss);
    s->sequential = p->number(p->host, "sequential") != 0;
    s->track = p->number(p->host, "track") != 0;
    s->passes = (int32_t)p->number(p->host, "epochs");
    s->n = (int64_t)p->number(p->host, "n");
    s->batches = (s->n + (int64_t)batch_size - 1) / (int64_t)batch_size;
    s->most = (int64_t)p->number(p->host, "most");
    s->lambda = p->number(p->host, "lambda");
    s->strength = s->lambda * (double)s->n;
    s->sigma = s->sequential ? 1.0 : batch_size;
    s->loss_param = p->number(p->host, "loss_param");
    s->clip = p->number(p->host, "clip");
    wrong = dp_noise_start(&s->noise, p, d);
    return wrong != NULL ? wrong : check(s);
}

static void
begin_batch(Scd *s)
{
    memset(SUM(s), 0, (size_t)s->d * sizeof(double));
    if (s->sequential)
        memcpy(AHEAD(s), V(s), (size_t)s->d * sizeof(double));
    s->taken = 0;
}

static bool
scd_begin_pass(void *body, int part)
{
    Scd *s = body;

    if (part != 0 || s->pass >= s->passes)
        return false;
    s->made = 0;
    s->loss_sum = s->gap_sum = 0.0;
    begin_batch(s);
    return true;
}

/* How far the dual variable of a row of this norm moves when the sum of all is v; a number, whatever v is. */
static double
move_of(const Scd *s, const float *row, double norm, double memory, const double *v)
{
    double z = dp_dot(v, row + 1, s->d) / s->strength;
    double curvature = s->sigma * norm * norm / s->strength;
    double move = dp_loss_at(s->loss)->dual(z, (double)row[0], memory, curvature, s->loss_param) - memory;

    if (isfinite(s->clip))
        return dp_clip_by_norm(move, norm, s->clip);
    return isfinite(move) ? move : 0.0;
}

/* Rows that count for nothing are not counted, so that none of them keeps another one out. */
static void
take_in_sequence(Scd *s, const float *row, double norm, double *memory)
{
    double move;

    if (norm == 0.0 || s->taken == s->most)
        return;
    s->taken++;
    move = move_of(s, row, norm, *memory, AHEAD(s));
    dp_axpy(SUM(s), move, row + 1, s->d);
    dp_axpy(AHEAD(s), move, row + 1, s->d);
    *memory += move_of(s, row, norm, *memory, V(s));
}

static void
scd_take(void *body, const float *row, double *memory)
{
    Scd *s = body;
    double norm = dp_row_norm(row + 1, s->d), move;

    if (s->sequential) {
        take_in_sequence(s, row, norm, memory);
        return;
    }
    move = move_of(s, row, norm, *memory, V(s));
    dp_axpy(SUM(s), move, row + 1, s->d);
    *memory += move;
}

static bool
scd_complete(const void *body)
{
    const Scd *s = body;

    return s->made == s->batches;
}

DP_VECTORISED static void
add(double *v, const double *sum, int d)
{
    for (int j = 0; j < d; j++)
        v[j] += sum[j];
}

static bool
scd_step(void *body, DpPool *pool)
{
    Scd *s = body;

    if (scd_complete(s))
        return false;
    dp_noise_add(&s->noise, pool, SUM(s), s->d);
    add(V(s), SUM(s), s->d);
    begin_batch(s);
    s->made++;
    return true;
}

static void
scd_weigh(void *body)
{
    (void)body;
}

static void
scd_end_pass(void *body, DpPool *pool)
{
    (void)pool;
    ((Scd *)body)->pass++;
}

static bool
scd_looks(const void *body)
{
    const Scd *s = body;

    return s->noise.mechanism == DP_NO_NOISE && (s->track || s->pass == s->passes);
}

/* A row's share of the duality gap is that of Fenchel and Young's inequality: never negative. */
static void
scd_look(void *body, const float *row, double memory)
{
    Scd *s = body;
    const DpLoss *loss = dp_loss_at(s->loss);
    double y = (double)row[0], z = dp_dot(V(s), row + 1, s->d) / s->strength;
    double value = loss->value(z, y, s->loss_param);

    s->loss_sum += value;
    s->gap_sum += value + loss->conjugate(memory, y, s->loss_param) + memory * z;
}

static double
scd_objective(const void *body)
{
    const Scd *s = body;
    double norm = dp_norm(V(s), s->d) / s->strength;

    return s->loss_sum / (double)s->n + 0.5 * s->lambda * norm * norm;
}

static double
scd_gap(const void *body)
{
    const Scd *s = body;

    return s->gap_sum < 0.0 ? 0.0 : s->gap_sum / (double)s->n; /* rounding may leave less */
}

static void
scd_output(const void *body, double *w)
{
    const Scd *s = body;

    memcpy(w, V(s), (size_t)s->d * sizeof(double));
    dp_scale(w, 1.0 / s->strength, s->d);
}

static int
scd_passes(const void *body)
{
    return ((const Scd *)body)->pass;
}

static bool
scd_noised(const void *body)
{
    return ((const Scd *)body)->noise.mechanism != DP_NO_NOISE;
}

const DpSolver dp_scd = {
    .name = "scd",
    .size = scd_size,
    .start = scd_start,
    .begin_pass = scd_begin_pass,
    .take = scd_take,
    .step = scd_step,
    .remembers = true,
    .looks = scd_looks,
    .look = scd_look,
    .complete = scd_complete,
    .weigh = scd_weigh,
    .end_pass = scd_end_pass,
    .objective = scd_objective,
    .gap = scd_gap,
    .output = scd_output,
    .passes = scd_passes,
    .noised = scd_noised,
};
