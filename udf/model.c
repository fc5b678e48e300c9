/*
 * model.c: registered models, and what they say about a row.
 *
 * A row is scaled, projected and cut as it was in training: the model is a function of such rows.
 */
#include "model.h"

#include <math.h>

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

static const char *const model_query =
    "SELECT loss, d, feature_bound, weights, intercept, classes, normalize, scale, multiclass, project_dim, "
    "project_seed,"
    "       pg_catalog.jsonb_build_object('categories', categories), features, categories IS NOT NULL,"
    "       owner, tableoid, ctid, xmin"
    "  FROM bismarck_dp.model"
    " WHERE name OPERATOR(pg_catalog.=) $1 AND pg_catalog.pg_has_role($2, owner, 'MEMBER')";

typedef enum Column {
    LOSS = 1,
    D,
    FEATURE_BOUND,
    WEIGHTS,
    INTERCEPT,
    CLASSES,
    NORMALIZE,
    SCALE,
    MULTICLASS,
    PROJECT_DIM,
    PROJECT_SEED,
    CODING,
    FEATURES,
    IS_CODED,
    OWNER,
    RELATION,
    PLACE,
    MAKER,
} Column;

static Datum
column(Column number, bool *isnull)
{
    return SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, number, isnull);
}

static bool
word_is(Column number, const char *word)
{
    bool isnull;
    Datum value = column(number, &isnull);

    return !isnull && strcmp(TextDatumGetCString(value), word) == 0;
}

/* Rows of models are ours, but a superuser may have edited one. */
static void
check(bool fits)
{
    if (!fits)
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("the columns of the model do not fit each other")));
}

static double *
numbers_of(Column number, int *count)
{
    bool isnull;
    ArrayType *array = DatumGetArrayTypeP(column(number, &isnull));
    double *copy;

    check(!array_contains_nulls(array) && ARR_ELEMTYPE(array) == FLOAT8OID);
    *count = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
    copy = palloc_extended(sizeof(double) * Max(*count, 1), MCXT_ALLOC_HUGE);
    memcpy(copy, ARR_DATA_PTR(array), sizeof(double) * *count);
    return copy;
}

static void
fill_shape(DpModel *m)
{
    bool isnull;
    Datum p;
    int count = 0;

    m->shape.bound = DatumGetFloat8(column(FEATURE_BOUND, &isnull));
    m->shape.normalize = DatumGetBool(column(NORMALIZE, &isnull));
    (void)column(SCALE, &isnull);
    if (!isnull)
        m->shape.scale = numbers_of(SCALE, &count);
    check(m->shape.scale == NULL || count == m->d);
    p = column(PROJECT_DIM, &isnull);
    if (!isnull) {
        Datum seed = column(PROJECT_SEED, &isnull);
        List *made = NIL;

        check(!isnull);
        dp_shape_project(&m->shape, DatumGetInt32(p), DatumGetInt64(seed), m->d, &made);
    }
}

/* Weights of an output, and its intercept behind them. */
static void
fill_weights(DpModel *m)
{
    int n_weights, n_intercepts, features;
    double *weights = numbers_of(WEIGHTS, &n_weights), *intercept = numbers_of(INTERCEPT, &n_intercepts);

    m->shape.intercept = n_intercepts > 0;
    m->width = dp_shape_width(&m->shape, m->d);
    features = m->width - m->shape.intercept;
    if (n_weights != m->outputs * features || (n_intercepts != 0 && n_intercepts != m->outputs))
        ereport(ERROR,
                (errcode(ERRCODE_DATA_CORRUPTED), errmsg("model \"%s\" has a wrong number of weights", m->name)));
    m->weights = palloc_extended(sizeof(double) * m->outputs * m->width, MCXT_ALLOC_HUGE);
    for (int c = 0; c < m->outputs; c++) {
        memcpy(m->weights + (Size)c * m->width, weights + (Size)c * features, sizeof(double) * features);
        if (n_intercepts > 0)
            m->weights[(Size)c * m->width + features] = intercept[c];
    }
}

static void
fill_model(DpModel *m)
{
    bool isnull;

    m->is_logistic = word_is(LOSS, "logistic");
    m->d = DatumGetInt32(column(D, &isnull));
    m->classes = numbers_of(CLASSES, &m->n_classes);
    m->is_classifier = m->n_classes > 0;
    (void)column(MULTICLASS, &isnull);
    check(m->d >= 1 && m->n_classes != 1 && m->n_classes <= DP_MOST_CLASSES && (isnull || m->n_classes >= 2) &&
          (!isnull || m->n_classes <= 2) && (m->n_classes > 0 || !m->is_logistic));
    m->outputs = isnull ? 1 : m->n_classes;
    m->is_softmax = word_is(MULTICLASS, "softmax");
    m->features = DatumGetArrayTypePCopy(column(FEATURES, &isnull));
    if (DatumGetBool(column(IS_CODED, &isnull)))
        m->coding = DatumGetJsonbPCopy(column(CODING, &isnull));
    m->owner = DatumGetObjectId(column(OWNER, &isnull));
    m->relation = DatumGetObjectId(column(RELATION, &isnull));
    m->place = *(ItemPointer)DatumGetPointer(column(PLACE, &isnull));
    m->maker = DatumGetTransactionId(column(MAKER, &isnull));
    fill_shape(m);
    fill_weights(m);
    m->row = palloc(sizeof(float) * m->width);
    m->room = palloc_extended(sizeof(double) * ((Size)m->d + m->width), MCXT_ALLOC_HUGE);
    m->z = palloc(sizeof(double) * m->outputs);
}

DpModel *
dp_model_named(const char *name, Oid asking, Oid function, MemoryContext context)
{
    Oid types[] = {TEXTOID, OIDOID};
    Datum values[] = {CStringGetTextDatum(name), ObjectIdGetDatum(asking)};
    MemoryContext spi;
    DpModel *m;
    Oid role;
    int security;

    GetUserIdAndSecContext(&role, &security);
    SetUserIdAndSecContext(dp_owner_of_function(function), security | SECURITY_LOCAL_USERID_CHANGE);
    SPI_connect();
    if (SPI_execute_with_args(model_query, 2, types, values, NULL, true, 1) != SPI_OK_SELECT || SPI_processed != 1)
        ereport(ERROR, (errcode(ERRCODE_UNDEFINED_OBJECT), errmsg("model \"%s\" does not exist", name),
                        errhint("The view bismarck_dp.models lists the models you may use.")));
    spi = MemoryContextSwitchTo(context);
    m = palloc0(sizeof(DpModel));
    m->name = pstrdup(name);
    fill_model(m);
    MemoryContextSwitchTo(spi);
    SPI_finish();
    SetUserIdAndSecContext(role, security);
    return m;
}

static void
margins_of_row(DpModel *m)
{
    for (int c = 0; c < m->outputs; c++)
        m->z[c] = dp_dot(m->weights + (Size)c * m->width, m->row, m->width);
}

bool
dp_model_margins(DpModel *m, const double *x)
{
    if (!dp_clip_row(x, m->d, &m->shape, m->room, m->row))
        return false;
    margins_of_row(m);
    return true;
}

bool
dp_model_margins_of_floats(DpModel *m, const float *x)
{
    if (!dp_clip_floats(x, m->d, &m->shape, m->room, m->row))
        return false;
    margins_of_row(m);
    return true;
}

int
dp_model_place(const DpModel *m)
{
    return m->outputs > 1 ? dp_largest(m->z, m->outputs) : m->z[0] > 0;
}

double
dp_model_answer(const DpModel *m)
{
    return m->is_classifier ? m->classes[dp_model_place(m)] : m->z[0];
}

/* One against the rest: each by itself, made to add up to 1. */
void
dp_model_probabilities(const DpModel *m, double *p)
{
    double total = 0.0;

    if (m->outputs == 1) {
        p[0] = 1.0 / (1.0 + exp(m->z[0]));
        p[1] = 1.0 / (1.0 + exp(-m->z[0]));
        return;
    }
    if (m->is_softmax && dp_softmax(m->z, p, m->outputs, NULL))
        return;
    for (int c = 0; c < m->outputs; c++)
        total += p[c] = 1.0 / (1.0 + exp(-m->z[c]));
    for (int c = 0; c < m->outputs; c++)
        p[c] = total > 0.0 ? p[c] / total : 1.0 / m->outputs;
}
