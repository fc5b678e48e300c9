/*
 * predict.c: dp_predict, dp_predict_proba and dp_predict_all, fast enough to run over a table.
 *
 * Features are float8[] in SQL. Where a column of another kind of number is cast to that, the planner is told to leave
 * the cast out (dp_predict_support): the array says itself what it holds, and is read as it lies in the page.
 */
#include "model.h"

#include <math.h>

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "nodes/pathnodes.h"
#include "nodes/supportnodes.h"
#include "utils/array.h"
#include "utils/builtins.h"

PG_FUNCTION_INFO_V1(dp_predict);
PG_FUNCTION_INFO_V1(dp_predict_proba);
PG_FUNCTION_INFO_V1(dp_predict_all);
PG_FUNCTION_INFO_V1(dp_predict_support);

static DpModel *
model_of_call(FunctionCallInfo fcinfo)
{
    return dp_model_kept(PG_GETARG_TEXT_PP(0), fcinfo->flinfo->fn_oid);
}

/* ---- a row ---- */

/* Whole numbers become doubles as their casts have it. */
static bool
margins_of_integers(DpModel *m, const char *data, Oid element)
{
    for (int j = 0; j < m->d; j++)
        m->room[j] = element == INT2OID   ? ((const int16 *)data)[j]
                     : element == INT4OID ? ((const int32 *)data)[j]
                                          : (double)((const int64 *)data)[j];
    return dp_model_margins(m, m->room);
}

/* The margins of d numbers; false when one of them is not finite, or what comes of them is no number. */
static bool
margins_of_numbers(DpModel *m, const char *data, Oid element)
{
    bool finite = element == FLOAT8OID   ? dp_model_margins(m, (const double *)data)
                  : element == FLOAT4OID ? dp_model_margins_of_floats(m, (const float *)data)
                                         : margins_of_integers(m, data, element);

    return finite && !isnan(m->z[0]);
}

static void
check_length(const DpModel *m, int n)
{
    if (n != m->d)
        ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
                        errmsg("model \"%s\" has %d features, not %d", m->name, m->d, n)));
}

#define LINE 64 /* bytes that a processor fetches at once */

/*
 * A page is filled from its end: a scan's next row lies in front of this one, and is fetched while this one is worked
 * on. Inlined by force: by itself it has no effect that GCC knows of, and a call would be left out.
 */
static inline __attribute__((always_inline)) void
fetch_next(const ArrayType *features)
{
    Size size = Min(VARSIZE(features), BLCKSZ / 4);

    for (Size at = 0; at <= size + LINE; at += LINE)
        __builtin_prefetch((const char *)features - at - LINE);
}

static bool
margins(DpModel *m, ArrayType *features)
{
    fetch_next(features);
    if (ARR_NDIM(features) > 1)
        ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR), errmsg("features must be one list, not a matrix"),
                        errhint("dp_predict_all takes a list of rows.")));
    check_length(m, ARR_NDIM(features) == 0 ? 0 : ARR_DIMS(features)[0]);
    return !array_contains_nulls(features) && margins_of_numbers(m, ARR_DATA_PTR(features), ARR_ELEMTYPE(features));
}

Datum
dp_predict(PG_FUNCTION_ARGS)
{
    ArrayType *features = PG_GETARG_ARRAYTYPE_P(1);
    DpModel *m = model_of_call(fcinfo);

    if (!margins(m, features))
        PG_RETURN_NULL();
    PG_RETURN_FLOAT8(dp_model_answer(m));
}

Datum
dp_predict_proba(PG_FUNCTION_ARGS)
{
    ArrayType *features = PG_GETARG_ARRAYTYPE_P(1);
    DpModel *m = model_of_call(fcinfo);
    bool finite = margins(m, features);
    double *p;

    if (!m->is_logistic)
        ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED), errmsg("model \"%s\" gives no probabilities", m->name),
                        errhint("Train it with loss => 'logistic'.")));
    if (!finite)
        PG_RETURN_NULL();
    p = palloc(sizeof(double) * m->n_classes);
    dp_model_probabilities(m, p);
    PG_RETURN_ARRAYTYPE_P(dp_float8_array(p, m->n_classes));
}

/* ---- many rows in one array ---- */

static int
size_of(Oid element)
{
    return element == INT2OID ? sizeof(int16) : element == INT4OID || element == FLOAT4OID ? 4 : sizeof(double);
}

/* The same numbers, with NaN where one is missing: data holds those alone that are there. */
static char *
without_gaps(ArrayType *array, int n)
{
    Oid element = ARR_ELEMTYPE(array);
    int size = size_of(element);
    Datum *values;
    bool *nulls;
    double *numbers = palloc_extended(sizeof(double) * n, MCXT_ALLOC_HUGE);

    deconstruct_array(array, element, size, true,
                      size == 2   ? TYPALIGN_SHORT
                      : size == 4 ? TYPALIGN_INT
                                  : TYPALIGN_DOUBLE,
                      &values, &nulls, &n);
    for (int i = 0; i < n; i++)
        numbers[i] = nulls[i] ? NAN : dp_to_double(values[i], dp_number_type(element));
    return (char *)numbers;
}

static ArrayType *
answers_of(DpModel *m, const char *data, Oid element, int n)
{
    Datum *values = palloc(sizeof(Datum) * n);
    bool *nulls = palloc(sizeof(bool) * n);
    int first = 1;

    for (int i = 0; i < n; i++, data += (Size)m->d * size_of(element)) {
        CHECK_FOR_INTERRUPTS();
        nulls[i] = !margins_of_numbers(m, data, element);
        values[i] = Float8GetDatum(nulls[i] ? 0.0 : dp_model_answer(m));
    }
    return construct_md_array(values, nulls, 1, &n, &first, FLOAT8OID, sizeof(double), FLOAT8PASSBYVAL,
                              TYPALIGN_DOUBLE);
}

Datum
dp_predict_all(PG_FUNCTION_ARGS)
{
    ArrayType *rows = PG_GETARG_ARRAYTYPE_P(1);
    DpModel *m = model_of_call(fcinfo);
    int n = ARR_NDIM(rows) == 0 ? 0 : ARR_DIMS(rows)[0];

    if (n == 0)
        PG_RETURN_ARRAYTYPE_P(construct_empty_array(FLOAT8OID));
    if (ARR_NDIM(rows) != 2)
        ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR), errmsg("features must be a list of rows"),
                        errhint("dp_predict takes one row.")));
    check_length(m, ARR_DIMS(rows)[1]);
    if (array_contains_nulls(rows))
        PG_RETURN_ARRAYTYPE_P(answers_of(m, without_gaps(rows, n * m->d), FLOAT8OID, n));
    PG_RETURN_ARRAYTYPE_P(answers_of(m, ARR_DATA_PTR(rows), ARR_ELEMTYPE(rows), n));
}

/* ---- casts that need not be done ---- */

static bool
is_read_as_it_is(Oid type)
{
    return type == FLOAT4ARRAYOID || type == INT2ARRAYOID || type == INT4ARRAYOID || type == INT8ARRAYOID;
}

/*
 * The same call, with the array under the cast in its place and labelled as what the function takes: the executor hands
 * it over as it is. Where grouping sets may blank out the cast as a column, it stays.
 */
static Node *
without_cast(SupportRequestSimplify *request)
{
    Node *features = list_length(request->fcall->args) == 2 ? lsecond(request->fcall->args) : NULL;
    Node *inner;
    FuncExpr *call;

    if (features == NULL || !IsA(features, ArrayCoerceExpr) || exprType(features) != FLOAT8ARRAYOID)
        return NULL;
    if (request->root != NULL && request->root->parse->groupingSets != NIL)
        return NULL;
    inner = (Node *)((ArrayCoerceExpr *)features)->arg;
    if (!is_read_as_it_is(exprType(inner)))
        return NULL;
    call = makeNode(FuncExpr);
    *call = *request->fcall;
    call->args = list_make2(linitial(call->args),
                            makeRelabelType((Expr *)inner, FLOAT8ARRAYOID, -1, InvalidOid, COERCE_IMPLICIT_CAST));
    return (Node *)call;
}

Datum
dp_predict_support(PG_FUNCTION_ARGS)
{
    Node *request = (Node *)PG_GETARG_POINTER(0);

    PG_RETURN_POINTER(IsA(request, SupportRequestSimplify) ? without_cast((SupportRequestSimplify *)request) : NULL);
}
