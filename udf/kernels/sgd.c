/*
 * sgd.c: SGD over packed rows, in mini-batches, on fixed partitions (Bismarck; Wu et al. 2017), or on sampled batches.
 *
 * Update t of a partition, with the batch B:
 *
 *     w <- Proj_R( (1 - eta_t lambda) w - (eta_t / b) ( sum_{i in B} slope_i x_i  [+ noise, rounded to a grid] ) )
 *
 * The sum is divided by b, however many rows the batch has: fewer at the end of a pass, any number when rows are
 * sampled, also none. The regulariser stays outside the average, and a batch never reaches over the end of a pass: the
 * sensitivity proof (bismarck_dp/sensitivity.py) needs all three. With noise inside (sums.c), no batch is left without
 * it, and w is made of noisy sums alone. A row's gradient is scaled down to norm `clip`, if that is finite. After each
 * pass the partitions' models are averaged with weights m_p / m.
 *
 * With many classes w is a matrix, a row of weights for each class, and slope_i a vector (classes.c): one model, one
 * sum, one norm.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

typedef enum Averaging { AVERAGE_NONE, AVERAGE_ALL, AVERAGE_SUFFIX } Averaging;

typedef enum Multiclass { TWO_CLASSES, SOFTMAX, OVR } Multiclass;

typedef struct Sgd {
    int32_t d;          /* numbers of a row */
    int32_t outputs;    /* margins of a row: one, or one for each of many classes */
    int32_t weights;    /* d for each output */
    int32_t multiclass; /* Multiclass */
    int32_t loss;       /* index of the loss */
    int32_t average;    /* Averaging */
    int32_t track;      /* add up the loss, for stopping by tolerance (never in a private run) */
    int64_t n;          /* rows in the table */
    int64_t batch_size; /* b */
    int32_t parts;
    int32_t part;
    int32_t passes; /* planned */
    int32_t pass;   /* completed */
    double lambda, radius, loss_param, clip;
    DpStep step;
    DpNoise noise;

    int64_t rows;     /* of this partition */
    int64_t seen;     /* of them, in this pass */
    int64_t in_batch; /* rows in the open batch */
    int64_t t;        /* updates of this partition, over all passes */
    double loss_sum;

    double vectors[]; /* w, the batch's gradient, the pass's sum of iterates, the average: `weights` each */
} Sgd;

#define WEIGHTS(s) ((s)->vectors)
#define GRADIENT(s) ((s)->vectors + (s)->weights)
#define PASS_SUM(s) ((s)->vectors + 2 * (size_t)(s)->weights)
#define AVERAGE(s) ((s)->vectors + 3 * (size_t)(s)->weights)

static size_t
sgd_size(int weights)
{
    return sizeof(Sgd) + 4 * (size_t)weights * sizeof(double);
}

static const char *
sgd_start(void *body, int d, const DpParams *p)
{
    static const char *const averages[] = {"none", "all", "suffix"};
    static const char *const kinds[] = {"none", "softmax", "ovr"};
    Sgd *s = body;
    const DpLoss *loss = dp_loss_named(p->word(p->host, "loss"));
    int outputs = (int)p->number(p->host, "outputs");
    const char *wrong;

    if (loss == NULL)
        return "loss";
    if (outputs < 1 || outputs > DP_MOST_CLASSES || outputs > INT32_MAX / d)
        return "outputs";
    memset(s, 0, sgd_size(outputs * d));
    s->d = d;
    s->outputs = outputs;
    s->weights = outputs * d;
    s->multiclass = dp_index_of(p->word(p->host, "multiclass"), kinds, 3);
    if (s->multiclass < 0 || (s->multiclass == TWO_CLASSES) != (outputs == 1))
        return "multiclass";
    s->loss = dp_loss_index(loss);
    s->average = dp_index_of(p->word(p->host, "average"), averages, 3);
    s->track = p->number(p->host, "track") != 0;
    s->n = (int64_t)p->number(p->host, "n");
    s->batch_size = (int64_t)p->number(p->host, "batch_size");
    s->parts = (int32_t)p->number(p->host, "workers");
    s->passes = (int32_t)p->number(p->host, "epochs");
    s->lambda = p->number(p->host, "lambda");
    s->radius = p->number(p->host, "radius");
    s->loss_param = p->number(p->host, "loss_param");
    s->clip = p->number(p->host, "clip");
    if (s->average < 0)
        return "average";
    if (s->batch_size < 1 || s->parts < 1 || s->parts > s->n || s->passes < 1)
        return "batch_size, workers or epochs";
    wrong = dp_step_start(&s->step, p);
    if (wrong == NULL)
        wrong = dp_noise_start(&s->noise, p, s->weights);
    return wrong != NULL ? wrong : s->track && s->noise.mechanism != DP_NO_NOISE ? "track" : NULL;
}

/* Row shares differ by at most one and depend on nothing but the counts. */
static int64_t
rows_of_part(const Sgd *s, int part)
{
    return s->n / s->parts + (part < s->n % s->parts);
}

static int64_t
updates_per_pass(const Sgd *s)
{
    return (s->rows + s->batch_size - 1) / s->batch_size;
}

static bool
sgd_begin_pass(void *body, int part)
{
    Sgd *s = body;

    if (s->pass >= s->passes)
        return false;
    s->part = part;
    s->rows = rows_of_part(s, part);
    s->t = s->pass * updates_per_pass(s);
    s->seen = 0;
    s->in_batch = 0;
    s->loss_sum = 0.0;
    memset(GRADIENT(s), 0, 2 * (size_t)s->weights * sizeof(double)); /* and the pass's sum behind it */
    return true;
}

/* With a tolerance the last pass is not known beforehand, so every pass keeps its sum. */
static bool
averages_this_pass(const Sgd *s)
{
    return s->average == AVERAGE_ALL || (s->average == AVERAGE_SUFFIX && (s->track || s->pass == s->passes - 1));
}

DP_VECTORISED static void
descend(double *w, double *g, double shrink, double rate, int d)
{
    for (int j = 0; j < d; j++) {
        w[j] = shrink * w[j] - rate * g[j];
        g[j] = 0.0;
    }
}

DP_VECTORISED static void
add(double *a, const double *b, double factor, int d)
{
    for (int j = 0; j < d; j++)
        a[j] += factor * b[j];
}

static void
update(Sgd *s, DpPool *pool)
{
    double eta = dp_step(&s->step, ++s->t);
    double *w = WEIGHTS(s);

    dp_noise_add(&s->noise, pool, GRADIENT(s), s->weights);
    descend(w, GRADIENT(s), 1.0 - eta * s->lambda, eta / (double)s->batch_size, s->weights);
    if (isfinite(s->radius))
        dp_project(w, s->radius, s->weights);
    if (averages_this_pass(s))
        add(PASS_SUM(s), w, 1.0, s->weights);
    s->in_batch = 0;
}

/* The slopes of all classes, and the loss where it is wanted. */
static void
slopes_of(const Sgd *s, const DpLoss *loss, const double *z, int y, double *slopes, double *value)
{
    double log_sum = 0.0;

    if (s->multiclass == OVR) {
        for (int c = 0; c < s->outputs; c++) {
            double side = c == y ? 1.0 : -1.0;

            slopes[c] = loss->slope(z[c], side, s->loss_param);
            *value += s->track ? loss->value(z[c], side, s->loss_param) : 0.0;
        }
        return;
    }
    if (dp_softmax(z, slopes, s->outputs, s->track ? &log_sum : NULL))
        slopes[y] -= 1.0;
    else
        memset(slopes, 0, (size_t)s->outputs * sizeof(double));
    *value += log_sum - z[y];
}

/*
 * As dp_noised_slope does for one: the gradient slopes x is scaled down to norm `clip`, if that is finite, and with
 * noise to come a slope that is no number counts for nothing. Slopes of softmax are numbers always.
 */
static void
clip_slopes(const Sgd *s, const float *x, double *slopes)
{
    double norm, most;

    if (s->noise.mechanism != DP_NO_NOISE || isfinite(s->clip))
        for (int c = 0; c < s->outputs; c++)
            if (!isfinite(slopes[c]))
                slopes[c] = 0.0;
    if (!isfinite(s->clip))
        return;
    norm = dp_row_norm(x, s->d);
    most = norm > 0.0 ? s->clip / norm : 0.0;
    norm = dp_norm(slopes, s->outputs);
    if (norm > most)
        dp_scale(slopes, most / norm, s->outputs);
}

static void
add_row_of_many(Sgd *s, const DpLoss *loss, const float *row)
{
    double z[DP_MOST_CLASSES], slopes[DP_MOST_CLASSES], value = 0.0;

    dp_margins(WEIGHTS(s), row + 1, s->d, s->outputs, z);
    slopes_of(s, loss, z, (int)row[0], slopes, &value);
    s->loss_sum += s->track ? value : 0.0;
    clip_slopes(s, row + 1, slopes);
    dp_add_outer(GRADIENT(s), slopes, row + 1, s->d, s->outputs);
}

static inline void
add_row(Sgd *s, const DpLoss *loss, const float *row)
{
    double y = (double)row[0], z, slope;

    if (s->multiclass != TWO_CLASSES) {
        add_row_of_many(s, loss, row);
        return;
    }
    z = dp_dot(WEIGHTS(s), row + 1, s->d);
    slope = loss->slope(z, y, s->loss_param);
    if (s->track)
        s->loss_sum += loss->value(z, y, s->loss_param);
    dp_axpy(GRADIENT(s), dp_noised_slope(&s->noise, slope, row + 1, s->d, s->clip), row + 1, s->d);
}

static bool
sgd_fold(void *body, const float *rows, int n, DpPool *pool)
{
    Sgd *s = body;
    const DpLoss *loss = dp_loss_at(s->loss);

    if (s->seen + n > s->rows)
        return false;
    for (int i = 0; i < n; i++, rows += s->d + 1) {
        add_row(s, loss, rows);
        s->seen++;
        if (++s->in_batch == s->batch_size || s->seen == s->rows)
            update(s, pool);
    }
    return true;
}

static void
sgd_take(void *body, const float *row, double *memory)
{
    Sgd *s = body;

    (void)memory;
    add_row(s, dp_loss_at(s->loss), row);
}

/* Every update of the pass, and not one more: an update without its rows would still have its noise. */
static bool
sgd_complete(const void *body)
{
    const Sgd *s = body;

    return s->t == (s->pass + 1) * updates_per_pass(s);
}

static bool
sgd_step(void *body, DpPool *pool)
{
    if (sgd_complete(body))
        return false;
    update(body, pool);
    return true;
}

static void
sgd_weigh(void *body)
{
    Sgd *s = body;
    double share = (double)s->rows / (double)s->n;

    dp_scale(WEIGHTS(s), share, s->weights);
    dp_scale(PASS_SUM(s), share / (double)updates_per_pass(s), s->weights);
}

static void
sgd_merge(void *body, const void *other)
{
    Sgd *s = body;
    const Sgd *o = other;
    double share = (double)o->rows / (double)o->n;

    add(WEIGHTS(s), WEIGHTS(o), share, s->weights);
    add(PASS_SUM(s), PASS_SUM(o), share / (double)updates_per_pass(o), s->weights);
    s->loss_sum += o->loss_sum;
}

static void
sgd_end_pass(void *body, DpPool *pool)
{
    Sgd *s = body;

    (void)pool;
    if (s->average == AVERAGE_SUFFIX)
        memcpy(AVERAGE(s), PASS_SUM(s), (size_t)s->weights * sizeof(double));
    else
        add(AVERAGE(s), PASS_SUM(s), 1.0, s->weights);
    s->pass++;
}

static double
sgd_objective(const void *body)
{
    const Sgd *s = body;
    double norm = dp_norm(WEIGHTS(s), s->weights);

    return s->loss_sum / (double)s->n + 0.5 * s->lambda * norm * norm;
}

static void
sgd_output(const void *body, double *w)
{
    const Sgd *s = body;

    memcpy(w, s->average == AVERAGE_NONE ? WEIGHTS(s) : AVERAGE(s), (size_t)s->weights * sizeof(double));
    if (s->average == AVERAGE_ALL)
        dp_scale(w, 1.0 / (double)s->pass, s->weights);
}

static int
sgd_passes(const void *body)
{
    return ((const Sgd *)body)->pass;
}

static bool
sgd_noised(const void *body)
{
    return ((const Sgd *)body)->noise.mechanism != DP_NO_NOISE;
}

const DpSolver dp_sgd = {
    .name = "sgd",
    .size = sgd_size,
    .start = sgd_start,
    .begin_pass = sgd_begin_pass,
    .fold = sgd_fold,
    .take = sgd_take,
    .step = sgd_step,
    .complete = sgd_complete,
    .merge = sgd_merge,
    .weigh = sgd_weigh,
    .end_pass = sgd_end_pass,
    .objective = sgd_objective,
    .output = sgd_output,
    .passes = sgd_passes,
    .noised = sgd_noised,
    .many = true,
};
