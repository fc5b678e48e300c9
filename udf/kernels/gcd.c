/*
 * gcd.c: proximal greedy coordinate descent (Mangold et al. 2023): a pass over the rows, then the best weights move.
 *
 * A pass adds up u_j for all coordinates (descent.c). Then, `top` times, one that was not chosen yet is chosen by its
 * score, and its weight moves along u_j, with noise. Weights that were never chosen are zero, and margins cost only
 * those that are not.
 *
 * Scores. Let k = u_j, and write weights in units of unit_j / M_j and the penalty in units of u, so that M_j is 1:
 * W = w_j M_j / unit_j, t = l1 / unit_j, l = lambda / M_j, B = box M_j / unit_j, psi(v) = t |v| + l v^2 / 2 within +-B.
 *
 *     gs-s:  the distance of -k from the subgradients of psi at W
 *     gs-r:  |p - W|,  p = prox_psi(W - k)
 *     gs-q:  sqrt(2 q),  q = -min over a of  k a + a^2 / 2 + psi(W + a) - psi(W)
 *
 * but |k| - t, below zero, where W = 0 and |k| <= t: the penalty keeps such a weight at zero, and all of them would
 * have the score 0 otherwise, however hopeless, and win by their number. All of this is 1-Lipschitz in k
 * (bismarck_dp/coordinates.py) and, as C_j / sqrt(M_j) is the same for all j, has the same unit for all j. With noise,
 * scores become whole numbers of steps of 2^-20, and the choice is the exponential mechanism's, exact (exact.c).
 *
 * With v = W - k, p has the sign of v, or is 0 if |v| <= t. Then, s being that sign, a = p - W the move, and R standing
 * for 2 t (|W| - s W),
 *
 *     p = 0:        a = -W,                          2 q = W^2 + l W^2 + 2 |W| (t - sign(W) v)
 *     within +-B:   a = -(k + s t + l W) / (1 + l),   2 q = (k + s t + l W)^2 / (1 + l) + R
 *     at s B:       a = s B - W,                      2 q = (1 + l) a^2 + 2 |a| (|v| - t - (1 + l) B) + R
 *
 * CLAIM. Computed scores of two sides differ by at most 16 steps more than the difference of their k.
 * Proof. W, t, B and l are the same on both sides; W, t and B are cut to 2^31, and l to 2^31 / |W|, which makes another
 * penalty of them, and a score that is 1-Lipschitz as before. |k| <= n <= 2^32. A sum of at most 2^33 errs by half a
 * step, of at most 2^34 by one, and so does a product. So k + s t + l W is within 2 steps, t - sign(W) v within one,
 * and |v| - t - (1 + l) B, where it counts, within 3. These are multiplied by themselves, by |W| or by |a|, and divided
 * by sqrt(2 q), which is at least their root's other factor: within 3 steps of the score. All terms of 2 q are
 * positive, with a relative error of at most 4 2^-53 beyond that, and their root, of at most 2^33, errs by 3 steps
 * more. A step for where two of the cases meet: scores are continuous there. That is 7 steps on each side, and half a
 * step for rounding. QED
 */
#include "descent.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SCORES 0x1p20
#define LARGEST 0x1p31
#define BLOCK 64 /* rows whose slopes are made before they are added up */

typedef enum Rule { GS_S, GS_R, GS_Q } Rule;

typedef struct Gcd {
    DpDescent base;
    int32_t rule; /* Rule */
    int32_t top;
    int32_t parts;
    int32_t support; /* weights that are not zero, at the start of the pass */
    int64_t rows;    /* of this partition */
    int64_t seen;    /* of them, in this pass */
    uint64_t numerator, denominator;
    double loss_sum;
    double penalty; /* of the weights at the start of the pass */

    double vectors[]; /* w, M, units, 1 / C_j, sums: d each; then scores (int64), and coordinates (int32) */
} Gcd;

#define WEIGHTS(s) ((s)->vectors)
#define SMOOTHNESS(s) ((s)->vectors + (s)->base.d)
#define UNIT(s) ((s)->vectors + 2 * (size_t)(s)->base.d)
#define PER_UNIT(s) ((s)->vectors + 3 * (size_t)(s)->base.d)
#define SUMS(s) ((s)->vectors + 4 * (size_t)(s)->base.d)
#define SCORE(s) ((int64_t *)((s)->vectors + 5 * (size_t)(s)->base.d))
#define COORDINATE(s) ((int32_t *)((s)->vectors + 6 * (size_t)(s)->base.d))

static size_t
gcd_size(int d)
{
    return sizeof(Gcd) + 7 * (size_t)d * sizeof(double);
}

static const char *
gcd_start(void *body, int d, const DpParams *p)
{
    static const char *const rules[] = {"gs-s", "gs-r", "gs-q"};
    Gcd *s = body;
    const char *wrong;

    memset(s, 0, gcd_size(d));
    s->base.d = d;
    wrong = dp_descent_start(&s->base, d, p, SMOOTHNESS(s), UNIT(s));
    s->rule = dp_index_of(p->word(p->host, "rule"), rules, 3);
    s->top = (int32_t)p->number(p->host, "top");
    s->parts = (int32_t)p->number(p->host, "workers");
    s->numerator = (uint64_t)p->number(p->host, "selection_numerator");
    s->denominator = (uint64_t)p->number(p->host, "selection_denominator");
    if (wrong == NULL && s->rule < 0)
        wrong = "rule";
    if (wrong == NULL && (s->top < 1 || s->top > d || s->parts < 1 || s->parts > s->base.n))
        wrong = "top or workers";
    return wrong != NULL ? wrong : s->denominator < 1 ? "selection_denominator" : NULL;
}

static bool
gcd_begin_pass(void *body, int part)
{
    Gcd *s = body;

    if (s->base.pass >= s->base.passes)
        return false;
    s->rows = s->base.n / s->parts + (part < s->base.n % s->parts);
    s->seen = 0;
    s->loss_sum = 0.0;
    s->penalty = dp_descent_penalty(&s->base, WEIGHTS(s));
    s->support = 0;
    memset(SUMS(s), 0, (size_t)s->base.d * sizeof(double));
    for (int j = 0; j < s->base.d; j++) {
        PER_UNIT(s)[j] = UNIT(s)[j] > 0 ? 1.0 / (UNIT(s)[j] * (double)s->base.n) : 0.0;
        if (WEIGHTS(s)[j] != 0)
            COORDINATE(s)[s->support++] = j;
    }
    return true;
}

static double
margin(const Gcd *s, const float *x)
{
    const int32_t *support = COORDINATE(s);
    double z = 0.0;

    if (s->support > s->base.d / 8)
        return dp_dot(WEIGHTS(s), x, s->base.d);
    for (int i = 0; i < s->support; i++)
        z += WEIGHTS(s)[support[i]] * (double)x[support[i]];
    return z;
}

static double
finite_slope(double slope)
{
    return isnan(slope) ? 0.0 : fmax(-DP_STEEPEST, fmin(DP_STEEPEST, slope));
}

static double
slope_of(Gcd *s, const DpLoss *loss, const float *row)
{
    double y = (double)row[0], z = margin(s, row + 1);

    if (s->base.track)
        s->loss_sum += loss->value(z, y, s->base.loss_param);
    return finite_slope(loss->slope(z, y, s->base.loss_param));
}

static void
add_rows(Gcd *s, const float *rows, int n)
{
    const DpLoss *loss = dp_loss_at(s->base.loss);
    double slopes[BLOCK];

    for (int i = 0; i < n; i++)
        slopes[i] = slope_of(s, loss, rows + i * ((size_t)s->base.d + 1));
    dp_descent_add_terms(&s->base, slopes, rows + 1, n, PER_UNIT(s), SUMS(s));
}

static bool
gcd_fold(void *body, const float *rows, int n, DpPool *pool)
{
    Gcd *s = body;
    size_t stride = (size_t)s->base.d + 1;

    (void)pool;
    if (s->seen + n > s->rows)
        return false;
    s->seen += n;
    if (dp_descent_measuring(&s->base))
        for (int i = 0; i < n; i++)
            dp_descent_add_squares(&s->base, rows + i * stride + 1, SUMS(s));
    else
        for (int i = 0; i < n; i += BLOCK)
            add_rows(s, rows + i * stride, n - i < BLOCK ? n - i : BLOCK);
    return true;
}

static bool
gcd_complete(const void *body)
{
    const Gcd *s = body;

    return s->seen == s->rows;
}

static void
gcd_weigh(void *body)
{
    (void)body;
}

static void
gcd_merge(void *body, const void *other)
{
    Gcd *s = body;
    const Gcd *o = other;

    for (int j = 0; j < s->base.d; j++)
        SUMS(s)[j] += SUMS(o)[j];
    s->loss_sum += o->loss_sum;
}

/* ---- scores ---- */

/* A coordinate in units in which M_j is 1. */
typedef struct Scaled {
    double k, w, t, l, box;
} Scaled;

static double
gs_s(const Scaled *c)
{
    double r = c->k + copysign(c->t, c->w) + c->l * c->w;

    if (c->w >= c->box)
        return fmax(r, 0.0);
    return c->w <= -c->box ? fmax(-r, 0.0) : fabs(r);
}

/* The best move, and twice what it gains; `sign` is that of W - k. */
static double
best_move(const Scaled *c, double *gain)
{
    double v = c->w - c->k, sign = copysign(1.0, v);
    double r = c->k + sign * c->t + c->l * c->w, beyond = fabs(v) - (c->t + (1.0 + c->l) * c->box);
    double back = 2.0 * c->t * (fabs(c->w) - sign * c->w);

    if (fabs(v) <= c->t) {
        *gain = c->w * c->w + c->l * c->w * c->w + 2.0 * fabs(c->w) * fmax(c->t - copysign(v, v * c->w), 0.0);
        return -c->w;
    }
    if (beyond >= 0) {
        double a = sign * c->box - c->w;

        *gain = (1.0 + c->l) * a * a + 2.0 * fabs(a) * beyond + back;
        return a;
    }
    *gain = r * r / (1.0 + c->l) + back;
    return -r / (1.0 + c->l);
}

static double
score_of(const Gcd *s, int j)
{
    double per_unit = 1.0 / UNIT(s)[j], length = SMOOTHNESS(s)[j] * per_unit;
    double largest = s->base.noise.mechanism == DP_NO_NOISE ? INFINITY : LARGEST;
    Scaled c = {.k = SUMS(s)[j]};
    double move, gain;

    if (!(SMOOTHNESS(s)[j] > 0))
        return 0.0;
    c.w = fmax(-largest, fmin(largest, WEIGHTS(s)[j] * length));
    c.t = fmin(largest, s->base.l1 * per_unit);
    c.box = fmin(largest, s->base.box * length);
    c.l = s->base.lambda / SMOOTHNESS(s)[j];
    if (c.w == 0 && fabs(c.k) <= c.t)
        return fabs(c.k) - c.t;
    if (c.w != 0)
        c.l = fmin(c.l, largest / fabs(c.w));
    if (s->rule == GS_S)
        return c.w == 0 ? fabs(c.k) - c.t : gs_s(&c);
    move = best_move(&c, &gain);
    return s->rule == GS_R ? fabs(move) : sqrt(gain);
}

/* ---- choices ---- */

static void
make_scores(Gcd *s)
{
    for (int j = 0; j < s->base.d; j++) {
        COORDINATE(s)[j] = j;
        SCORE(s)[j] = (int64_t)rint(fmin(score_of(s, j), 2 * LARGEST) * SCORES);
    }
}

/* One of the first `left` places, which the last of them then takes. */
static int
choose(Gcd *s, int left, DpPool *pool)
{
    int at = dp_exponential_choice(&pool->choices, SCORE(s), left, s->numerator, s->denominator);
    int chosen = COORDINATE(s)[at];

    COORDINATE(s)[at] = COORDINATE(s)[left - 1];
    SCORE(s)[at] = SCORE(s)[left - 1];
    return chosen;
}

/* A score and whose it is, in the room of scores and coordinates. */
typedef struct Scored {
    double score;
    int64_t j;
} Scored;

static int
by_score(const void *a, const void *b)
{
    const Scored *first = a, *second = b;

    if (first->score != second->score)
        return first->score > second->score ? -1 : 1;
    return first->j < second->j ? -1 : 1;
}

static void
move(Gcd *s, int j, DpPool *pool)
{
    double u = SUMS(s)[j];

    dp_noise_add(&s->base.noise, pool, &u, 1);
    WEIGHTS(s)
    [j] =
        dp_descent_prox(&s->base, WEIGHTS(s)[j], UNIT(s)[j] * u, SMOOTHNESS(s)[j], 1 + s->base.pass - s->base.measures);
}

/* Without noise: the best ones, of equal ones the first. */
static void
move_best(Gcd *s)
{
    Scored *scored = (Scored *)SCORE(s), best = {-INFINITY, 0};

    for (int j = 0; j < s->base.d; j++) {
        scored[j] = (Scored){score_of(s, j), j};
        if (scored[j].score > best.score)
            best = scored[j];
    }
    if (s->top == 1) {
        move(s, (int)best.j, NULL);
        return;
    }
    qsort(scored, (size_t)s->base.d, sizeof(Scored), by_score);
    for (int i = 0; i < s->top; i++)
        move(s, (int)scored[i].j, NULL);
}

static void
move_chosen(Gcd *s, DpPool *pool)
{
    make_scores(s);
    for (int i = 0; i < s->top; i++)
        move(s, choose(s, s->base.d - i, pool), pool);
}

static void
gcd_end_pass(void *body, DpPool *pool)
{
    Gcd *s = body;

    if (dp_descent_measuring(&s->base)) {
        memcpy(SMOOTHNESS(s), SUMS(s), (size_t)s->base.d * sizeof(double));
        dp_descent_measured(&s->base, pool == NULL ? NULL : &pool->choices, SMOOTHNESS(s), UNIT(s));
    } else if (s->base.noise.mechanism == DP_NO_NOISE)
        move_best(s);
    else
        move_chosen(s, pool);
    s->base.pass++;
}

/* Of the weights with which the pass began. The first pass, when it measures the constants, has none. */
static double
gcd_objective(const void *body)
{
    const Gcd *s = body;

    if (s->base.measures && s->base.pass == 1)
        return INFINITY;
    return s->loss_sum / (double)s->base.n + s->penalty;
}

static void
gcd_output(const void *body, double *w)
{
    const Gcd *s = body;

    dp_descent_output(&s->base, WEIGHTS(s), w);
}

static int
gcd_passes(const void *body)
{
    return ((const Gcd *)body)->base.pass;
}

static bool
gcd_noised(const void *body)
{
    return ((const Gcd *)body)->base.noise.mechanism != DP_NO_NOISE;
}

void
dp_gcd_scores(const void *body, double *sums, double *scores)
{
    const Gcd *s = body;

    memcpy(sums, SUMS(s), (size_t)s->base.d * sizeof(double));
    for (int j = 0; j < s->base.d; j++)
        scores[j] = score_of(s, j);
}

const DpSolver dp_gcd = {
    .name = "gcd",
    .size = gcd_size,
    .start = gcd_start,
    .begin_pass = gcd_begin_pass,
    .fold = gcd_fold,
    .complete = gcd_complete,
    .merge = gcd_merge,
    .weigh = gcd_weigh,
    .end_pass = gcd_end_pass,
    .objective = gcd_objective,
    .output = gcd_output,
    .passes = gcd_passes,
    .noised = gcd_noised,
};
