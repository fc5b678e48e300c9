/*
 * predict.c: dp_predict and dp_predict_proba, fast enough to run over a table.
 *
 * A model is looked up once per snapshot and role, with the extension's rights and the caller's right to see it, and
 * cached with the call site: a PL/pgSQL expression keeps its call site for a whole transaction, in which the model, and
 * who asks, may change. A row is scaled as it was in training: the model is a function of such rows.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(dp_predict);
PG_FUNCTION_INFO_V1(dp_predict_proba);

typedef struct Model {
    MemoryContext context; /* its own, to be deleted when another model takes its place */
    Oid role;
    SubTransactionId subtransaction;
    TransactionId xmin, xmax; /* of the snapshot it was seen with */
    CommandId command;
    char *name;
    bool is_logistic;
    bool is_classifier;
    int d;
    DpShape shape;
    double classes[2];
    double *weights; /* d of them, and the intercept behind */
    double *room;
    float *row;
} Model;

static const char *const model_query =
    "SELECT loss, d, feature_bound, weights OPERATOR(pg_catalog.||) intercept, classes,"
    "       pg_catalog.cardinality(intercept) OPERATOR(pg_catalog.>) 0, normalize, scale"
    "  FROM bismarck_dp.model"
    " WHERE name OPERATOR(pg_catalog.=) $1 AND pg_catalog.pg_has_role($2, owner, 'MEMBER')";

static Datum
column(int number, bool *isnull)
{
    return SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, number, isnull);
}

static double *
copy_numbers(MemoryContext context, Datum array, int *count)
{
    ArrayType *numbers = DatumGetArrayTypeP(array);
    double *copy;

    *count = ARR_DIMS(numbers)[0];
    copy = MemoryContextAlloc(context, sizeof(double) * *count);
    memcpy(copy, ARR_DATA_PTR(numbers), sizeof(double) * *count);
    return copy;
}

static void
fill_model(Model *m, MemoryContext context)
{
    bool isnull;
    ArrayType *classes;
    Datum scale;
    int count;

    m->is_logistic = strcmp(TextDatumGetCString(column(1, &isnull)), "logistic") == 0;
    m->d = DatumGetInt32(column(2, &isnull));
    m->shape.bound = DatumGetFloat8(column(3, &isnull));
    m->weights = copy_numbers(context, column(4, &isnull), &count);
    m->row = MemoryContextAlloc(context, sizeof(float) * (count + 1));
    m->room = MemoryContextAlloc(context, sizeof(double) * count);
    classes = DatumGetArrayTypeP(column(5, &isnull));
    m->is_classifier = ARR_NDIM(classes) == 1;
    if (m->is_classifier)
        memcpy(m->classes, ARR_DATA_PTR(classes), sizeof(m->classes));
    m->shape.intercept = DatumGetBool(column(6, &isnull));
    m->shape.normalize = DatumGetBool(column(7, &isnull));
    scale = column(8, &isnull);
    if (!isnull)
        m->shape.scale = copy_numbers(context, scale, &count);
}

static Model *
new_model(MemoryContext parent, const char *name)
{
    MemoryContext context = AllocSetContextCreate(parent, "model", ALLOCSET_SMALL_SIZES);
    Model *m = MemoryContextAllocZero(context, sizeof(Model));

    m->context = context;
    m->role = GetUserId();
    m->subtransaction = GetCurrentSubTransactionId();
    m->xmin = GetActiveSnapshot()->xmin;
    m->xmax = GetActiveSnapshot()->xmax;
    m->command = GetActiveSnapshot()->curcid;
    m->name = MemoryContextStrdup(context, name);
    return m;
}

/* What another session committed moves xmax, what this one did the command, what was undone the subtransaction. */
static bool
still_holds(const Model *m, const char *name)
{
    Snapshot snapshot = GetActiveSnapshot();

    return m != NULL && m->role == GetUserId() && m->subtransaction == GetCurrentSubTransactionId() &&
           m->xmin == snapshot->xmin && m->xmax == snapshot->xmax && m->command == snapshot->curcid &&
           strcmp(m->name, name) == 0;
}

static Model *
look_up(FunctionCallInfo fcinfo, const char *name)
{
    Model *m = new_model(fcinfo->flinfo->fn_mcxt, name);
    Oid types[] = {TEXTOID, OIDOID};
    Datum values[] = {CStringGetTextDatum(name), ObjectIdGetDatum(GetUserId())};
    Oid role;
    int security;

    GetUserIdAndSecContext(&role, &security);
    SetUserIdAndSecContext(dp_owner_of_function(fcinfo->flinfo->fn_oid), security | SECURITY_LOCAL_USERID_CHANGE);
    SPI_connect();
    if (SPI_execute_with_args(model_query, 2, types, values, NULL, true, 1) != SPI_OK_SELECT || SPI_processed != 1)
        ereport(ERROR, (errcode(ERRCODE_UNDEFINED_OBJECT), errmsg("model \"%s\" does not exist", name),
                        errhint("The view bismarck_dp.models lists the models you may use.")));
    fill_model(m, m->context);
    SPI_finish();
    SetUserIdAndSecContext(role, security);
    return m;
}

static Model *
model_of_call(FunctionCallInfo fcinfo)
{
    char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
    Model *m = fcinfo->flinfo->fn_extra;

    if (!still_holds(m, name)) {
        fcinfo->flinfo->fn_extra = NULL;
        if (m != NULL)
            MemoryContextDelete(m->context);
        fcinfo->flinfo->fn_extra = m = look_up(fcinfo, name);
    }
    pfree(name);
    return m;
}

/* The margin of a row, or NAN when a feature is not a finite number. */
static double
margin(Model *m, ArrayType *features)
{
    if (ARR_NDIM(features) > 1)
        ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR), errmsg("features must be one list, not a matrix")));
    if (ArrayGetNItems(ARR_NDIM(features), ARR_DIMS(features)) != m->d)
        ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
                        errmsg("model \"%s\" has %d features, not %d", m->name, m->d,
                               ArrayGetNItems(ARR_NDIM(features), ARR_DIMS(features)))));
    if (array_contains_nulls(features) ||
        !dp_clip_row((double *)ARR_DATA_PTR(features), m->d, &m->shape, m->room, m->row))
        return NAN;
    return dp_dot(m->weights, m->row, m->d + m->shape.intercept);
}

Datum
dp_predict(PG_FUNCTION_ARGS)
{
    Model *m = model_of_call(fcinfo);
    double z = margin(m, PG_GETARG_ARRAYTYPE_P(1));

    if (isnan(z))
        PG_RETURN_NULL();
    PG_RETURN_FLOAT8(m->is_classifier ? m->classes[z > 0] : z);
}

Datum
dp_predict_proba(PG_FUNCTION_ARGS)
{
    Model *m = model_of_call(fcinfo);
    double z = margin(m, PG_GETARG_ARRAYTYPE_P(1));
    Datum values[2];

    if (!m->is_logistic)
        ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED), errmsg("model \"%s\" gives no probabilities", m->name),
                        errhint("Train it with loss => 'logistic'.")));
    if (isnan(z))
        PG_RETURN_NULL();
    values[0] = Float8GetDatum(1.0 / (1.0 + exp(z)));
    values[1] = Float8GetDatum(1.0 / (1.0 + exp(-z)));
    PG_RETURN_ARRAYTYPE_P(construct_array(values, 2, FLOAT8OID, sizeof(float8), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
}
