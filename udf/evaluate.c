/*
 * evaluate.c: what a model is worth on the rows of a source, in one pass. bismarck_dp/evaluation.py has the claim.
 *
 *   evaluate(model, source, label, features, params)     exact, for whoever may read the rows
 *   noisy_sums(model, source, label, features, params)   whole numbers with noise, and nothing else
 *
 * A row that has no features, no label that the model knows, or no finite margin counts for nothing. Noisy sums are
 * made of integers alone: each row adds whole units, at most as many as the plan says, whatever it holds; the exact
 * sums stay here, and are wiped. Nothing that is reported on the way depends on a value.
 */
#include "model.h"

#include <math.h>

#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/tuplesort.h"

PG_FUNCTION_INFO_V1(dp_evaluate);
PG_FUNCTION_INFO_V1(dp_noisy_sums);

typedef struct Reader {
    const DpSource *source;
    DpModel *model;
    DpCoding coding; /* of labels */
    double *x, *p;
    int64 rows, strange; /* strange: with an array of another length */
    bool looks;          /* for those: whoever may count lookups of arrays must not find them */
    void (*add)(struct Reader *reader, double y);
    MemoryContext per_row;
} Reader;

/* ---- a row ---- */

static bool
all_finite(const double *z, int n)
{
    for (int c = 0; c < n; c++)
        if (!isfinite(z[c]))
            return false;
    return true;
}

/* The label as the model has it: the place of its class, or the number; NaN when it is neither. */
static double
label_of(const Reader *r, double y)
{
    double code;

    if (!r->model->is_classifier)
        return isfinite(y) ? y : NAN;
    code = dp_coded_label(&r->coding, y);
    return r->model->outputs > 1 || isnan(code) ? code : code > 0;
}

static bool
is_strange(const Reader *r, TupleTableSlot *slot)
{
    ArrayType *array;

    if (!r->looks || !r->source->is_array || slot->tts_isnull[1])
        return false;
    array = DatumGetArrayTypeP(slot->tts_values[1]);
    return ARR_NDIM(array) != 1 || ARR_DIMS(array)[0] != r->model->d;
}

static bool
read_row(TupleTableSlot *slot, void *arg)
{
    Reader *r = arg;
    DpModel *m = r->model;
    MemoryContext old = MemoryContextSwitchTo(r->per_row);
    double y = slot->tts_isnull[0] ? NAN : label_of(r, dp_to_double(slot->tts_values[0], r->source->label_type));

    r->rows++;
    if (!dp_read_features(r->source, slot, 1, r->x, m->d))
        r->strange += is_strange(r, slot);
    else if (!isnan(y) && dp_model_margins(m, r->x) && all_finite(m->z, m->outputs))
        r->add(r, y);
    MemoryContextSwitchTo(old);
    MemoryContextReset(r->per_row);
    return true;
}

/* What orders rows of two classes: the margin, or the difference of two. */
static double
score_of(const DpModel *m)
{
    return m->outputs == 1 ? m->z[0] : m->z[1] - m->z[0];
}

/* log(1 + exp(-z)) */
static double
softplus_minus(double z)
{
    return z > 0 ? log1p(exp(-z)) : log1p(exp(z)) - z;
}

/* -log of the probability of class y, as far as numbers go: the probability itself may be too small for one. */
static double
log_loss_of(const Reader *r, int y)
{
    const DpModel *m = r->model;
    double sum;

    if (m->outputs == 1)
        return softplus_minus(y ? m->z[0] : -m->z[0]);
    if (m->is_softmax)
        return dp_softmax(m->z, r->p, m->outputs, &sum) ? fmax(sum - m->z[y], 0.0) : INFINITY;
    sum = 0.0;
    for (int c = 0; c < m->outputs; c++)
        sum += 1.0 / (1.0 + exp(-m->z[c]));
    return sum > 0 ? fmax(log(sum) + softplus_minus(m->z[y]), 0.0) : log(m->outputs);
}

static double
squared(double a)
{
    return a * a;
}

/* ---- reading ---- */

static void
wrong_plan(void)
{
    ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("the model cannot be evaluated so")));
}

static void
check_width(const DpSource *source, const DpModel *m)
{
    if (!source->is_array && dp_source_width(source) != m->d)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
                        errmsg("model \"%s\" has %d features, and the columns have %d", m->name, m->d,
                               dp_source_width(source)),
                        errhint("Name the columns that the model was trained on, in their order.")));
}

static void
fill_coding(DpCoding *c, Jsonb *params)
{
    if (dp_has(params, "classes"))
        c->classes = dp_numbers(params, "classes", &c->many);
    else {
        c->negative = dp_number(params, "negative");
        c->other_negative = dp_number(params, "other_negative");
        c->positive = dp_number(params, "positive");
    }
}

static void
start_reader(Reader *r, FunctionCallInfo fcinfo, Jsonb *params)
{
    char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
    DpSource *source;

    r->model = dp_model_named(name, dp_caller_role(), fcinfo->flinfo->fn_oid, CurrentMemoryContext);
    source = dp_source(PG_GETARG_OID(1), PG_GETARG_TEXT_PP(2), PG_GETARG_ARRAYTYPE_P(3), r->model->coding);
    source->unit = dp_unit_of(source->relation, params);
    r->source = source;
    check_width(source, r->model);
    if (r->model->is_classifier)
        fill_coding(&r->coding, params);
    if (r->coding.many != (r->model->outputs > 1 ? r->model->outputs : 0))
        wrong_plan();
    r->x = palloc_extended(sizeof(double) * r->model->d, MCXT_ALLOC_HUGE);
    r->p = palloc(sizeof(double) * r->model->outputs);
    r->per_row = AllocSetContextCreate(CurrentMemoryContext, "row", ALLOCSET_DEFAULT_SIZES);
}

/* ---- exact ---- */

typedef struct Exact {
    Reader reader;
    int64 counted, right;
    double loss;
    Tuplesortstate *scores[2]; /* of the two classes; NULL where there are not two */
    double residuals;          /* squared */
    double mean, deviations;   /* of labels; squared, from their mean */
} Exact;

static void
add_class(Exact *e, int y)
{
    const DpModel *m = e->reader.model;

    e->right += dp_model_place(m) == y;
    if (m->is_logistic)
        e->loss += log_loss_of(&e->reader, y);
    if (e->scores[0] != NULL)
        tuplesort_putdatum(e->scores[y], Float8GetDatum(score_of(m)), false);
}

/* Welford's: no two large numbers are subtracted. */
static void
add_number(Exact *e, double y)
{
    double before = y - e->mean;

    e->residuals += squared(e->reader.model->z[0] - y);
    e->mean += before / (double)e->counted;
    e->deviations += before * (y - e->mean);
}

static void
add_exactly(Reader *reader, double y)
{
    Exact *e = (Exact *)reader;

    e->counted++;
    if (reader->model->is_classifier)
        add_class(e, (int)y);
    else
        add_number(e, y);
}

static bool
next_score(Tuplesortstate *sorted, double *score)
{
    Datum value;
    bool isnull, found;

#if PG_VERSION_NUM >= 160000
    found = tuplesort_getdatum(sorted, true, false, &value, &isnull, NULL);
#else
    found = tuplesort_getdatum(sorted, true, &value, &isnull, NULL);
#endif
    if (found)
        *score = DatumGetFloat8(value);
    return found;
}

/* Pairs of a positive and a negative in the right order, a tie being half of one, of all pairs. NaN: there are none. */
static double
area_of(Tuplesortstate *negatives, Tuplesortstate *positives)
{
    double negative = 0.0, positive, ordered = 0.0, below = 0.0, equal = 0.0, last = -INFINITY, n_positives = 0.0;
    bool more;

    tuplesort_performsort(negatives);
    tuplesort_performsort(positives);
    more = next_score(negatives, &negative);
    while (next_score(positives, &positive)) {
        CHECK_FOR_INTERRUPTS();
        if (positive > last) {
            below += equal;
            equal = 0.0;
        }
        last = positive;
        for (; more && negative < positive; more = next_score(negatives, &negative))
            below += 1.0;
        for (; more && negative == positive; more = next_score(negatives, &negative))
            equal += 1.0;
        ordered += below + equal / 2;
        n_positives += 1.0;
    }
    for (below += equal; more; more = next_score(negatives, &negative))
        below += 1.0;
    return n_positives > 0 && below > 0 ? ordered / n_positives / below : NAN;
}

static void
start_scores(Exact *e)
{
    const DpModel *m = e->reader.model;

    for (int c = 0; c < 2 && m->n_classes == 2; c++)
        e->scores[c] =
            tuplesort_begin_datum(FLOAT8OID, Float8LessOperator, InvalidOid, false, Max(work_mem / 2, 64), NULL, 0);
}

static double
end_scores(Exact *e)
{
    double area = NAN;

    if (e->scores[0] != NULL) {
        area = area_of(e->scores[0], e->scores[1]);
        tuplesort_end(e->scores[0]);
        tuplesort_end(e->scores[1]);
    }
    return area;
}

/* evaluate(...): rows, strange, counted, right, loss, auc, residuals, deviations. */
Datum
dp_evaluate(PG_FUNCTION_ARGS)
{
    Exact e = {.reader = {.add = add_exactly, .looks = true}};
    double auc;

    start_reader(&e.reader, fcinfo, PG_GETARG_JSONB_P(4));
    start_scores(&e);
    dp_read_source(e.reader.source, true, read_row, &e);
    auc = end_scores(&e);
    PG_RETURN_ARRAYTYPE_P(dp_float8_array((double[]){(double)e.reader.rows, (double)e.reader.strange, (double)e.counted,
                                                     (double)e.right, e.loss, auc, e.residuals, e.deviations},
                                          8));
}

/* ---- noisy ---- */

typedef enum Kind { ROWS, LOSS, REST, KINDS } Kind; /* the rest: scores of two classes, or labels that are numbers */

typedef struct Group {
    int cells;
    int64 unit;     /* 0: the group is not asked for */
    uint64_t noise; /* in units */
    int64 *sums;
} Group;

typedef struct Noisy {
    Reader reader;
    Group groups[KINDS];
    double loss_bound, label_bound;
    double *edges; /* between cells of scores, in order */
    int n_edges;
} Noisy;

static int64
units_of(double share, const Group *g)
{
    return (int64)nearbyint((double)g->unit * fmax(-1.0, fmin(1.0, share)));
}

static void
add_loss(Noisy *s, double loss)
{
    Group *g = &s->groups[LOSS];

    if (g->unit > 0)
        g->sums[0] += units_of(fmin(loss, s->loss_bound) / s->loss_bound, g);
}

/* How many edges are below the score. */
static int
cell_of(const Noisy *s, double score)
{
    int low = 0, high = s->n_edges;

    while (low < high) {
        int middle = (low + high) / 2;

        if (s->edges[middle] < score)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void
count_class(Noisy *s, int y)
{
    const DpModel *m = s->reader.model;
    Group *rows = &s->groups[ROWS], *scores = &s->groups[REST];

    if (rows->unit > 0)
        rows->sums[dp_model_place(m) != y] += rows->unit;
    if (s->groups[LOSS].unit > 0)
        add_loss(s, log_loss_of(&s->reader, y));
    if (scores->unit > 0)
        scores->sums[y * (s->n_edges + 1) + cell_of(s, score_of(m))] += scores->unit;
}

static void
count_number(Noisy *s, double y)
{
    double cut = fmax(-s->label_bound, fmin(s->label_bound, y));
    Group *rows = &s->groups[ROWS], *labels = &s->groups[REST];

    rows->sums[0] += rows->unit;
    add_loss(s, squared(s->reader.model->z[0] - cut));
    if (labels->unit > 0) {
        labels->sums[0] += units_of(cut / s->label_bound, labels);
        labels->sums[1] += units_of(squared(cut / s->label_bound), labels);
    }
}

static void
add_noisily(Reader *reader, double y)
{
    if (reader->model->is_classifier)
        count_class((Noisy *)reader, (int)y);
    else
        count_number((Noisy *)reader, y);
}

static void
start_group(Group *g, double unit, double noise, int cells, bool gaussian)
{
    if (unit < 0 || unit > 0x1p20 || unit != floor(unit))
        wrong_plan();
    if (unit > 0 && (!(noise >= 1) || noise > (gaussian ? 0x1p20 : 0x1p57) || noise != floor(noise)))
        wrong_plan();
    g->unit = (int64)unit;
    g->noise = (uint64_t)noise;
    g->cells = unit > 0 ? cells : 0;
    g->sums = dp_secret_alloc(CurrentMemoryContext, sizeof(int64) * Max(g->cells, 1));
}

static void
start_sums(Noisy *s, Jsonb *params, bool gaussian)
{
    bool classes = s->reader.model->is_classifier;
    int n_units, n_noise;
    double *units = dp_numbers(params, "units", &n_units), *noise = dp_numbers(params, "noise", &n_noise);

    s->edges = dp_numbers(params, "edges", &s->n_edges);
    s->loss_bound = dp_number(params, "loss_bound");
    s->label_bound = classes ? 0.0 : dp_number(params, "label_bound");
    if (n_units != KINDS || n_noise != KINDS || !(s->loss_bound > 0) || (!classes && !(s->label_bound > 0)))
        wrong_plan();
    if (classes && units[REST] > 0 && s->reader.model->n_classes != 2)
        wrong_plan();
    start_group(&s->groups[ROWS], units[ROWS], noise[ROWS], classes ? 2 : 1, gaussian);
    start_group(&s->groups[LOSS], units[LOSS], noise[LOSS], 1, gaussian);
    start_group(&s->groups[REST], units[REST], noise[REST], classes ? 2 * (s->n_edges + 1) : 2, gaussian);
    if (!classes && s->groups[ROWS].unit == 0)
        wrong_plan();
}

/* The number of rows, which is public, and every sum with noise of its own. */
static ArrayType *
release(Noisy *s, DpRandom *random, bool gaussian)
{
    int n = 1;
    Datum *numbers;

    for (int k = 0; k < KINDS; k++)
        n += s->groups[k].cells;
    numbers = palloc(sizeof(Datum) * n);
    n = 0;
    numbers[n++] = Int64GetDatum(s->reader.rows);
    for (int k = 0; k < KINDS; k++) {
        Group *g = &s->groups[k];

        for (int c = 0; c < g->cells; c++) {
            int64 noise = gaussian ? dp_discrete_gaussian(random, g->noise) : dp_discrete_laplace(random, g->noise);

            numbers[n++] = Int64GetDatum(g->sums[c] + noise);
        }
    }
    return construct_array(numbers, n, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE);
}

Datum
dp_noisy_sums(PG_FUNCTION_ARGS)
{
    Jsonb *params = PG_GETARG_JSONB_P(4);
    Noisy s = {.reader = {.add = add_noisily}};
    bool gaussian = strcmp(dp_word(params, "mechanism"), "gaussian") == 0;
    DpRandom *random = dp_secret_alloc(CurrentMemoryContext, sizeof(DpRandom));

    if (!gaussian && strcmp(dp_word(params, "mechanism"), "laplace") != 0)
        wrong_plan();
    start_reader(&s.reader, fcinfo, params);
    start_sums(&s, params, gaussian);
    dp_random_from(random, params, DP_STREAM_EVALUATION);
    dp_read_source(s.reader.source, true, read_row, &s);
    PG_RETURN_ARRAYTYPE_P(release(&s, random, gaussian));
}
