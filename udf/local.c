/*
 * local.c: the local protocol. A provider makes her gradient and its noise in her own database; a learner adds up noisy
 * gradients and sees nothing else.
 *
 *   dp_local_gradient(state, x, y, epsilon, delta)   the provider's side: one noisy negative gradient, on a grid
 *   dp_local_round(state, gradient)                  the learner's side: an aggregate over the gradients of a round
 *
 * The state is public and comes from somebody the provider does not trust. Whatever it says, her gradient is clipped to
 * the bound that the noise covers: bound and noise are worked out on her side, from the epsilon and delta that she
 * gives. The noise is sampled as for a released model. A row that is no row (NULL, not finite, an unknown label)
 * answers with noise alone.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "catalog/pg_type.h"
#include "lib/stringinfo.h"
#include "parser/parse_func.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

PG_FUNCTION_INFO_V1(dp_local_gradient);
PG_FUNCTION_INFO_V1(dp_local_add);
PG_FUNCTION_INFO_V1(dp_local_final);

static Jsonb *
ask(const char *verb, const char *request)
{
    Oid types[] = {TEXTOID, JSONBOID};
    Oid door = LookupFuncName(list_make2(makeString("bismarck_dp"), makeString("call")), 2, types, false);
    Datum json = DirectFunctionCall1(jsonb_in, CStringGetDatum(request));

    return DatumGetJsonbP(OidFunctionCall2(door, CStringGetTextDatum(verb), json));
}

static char *
text_of(Jsonb *json)
{
    return JsonbToCString(NULL, &json->root, VARSIZE(json));
}

/* ---- the provider ---- */

static double *
weights_of(Jsonb *params, int width)
{
    JsonbValue key = {.type = jbvString, .val.string = {.val = "weights", .len = 7}};
    JsonbValue *found = findJsonbValueFromContainer(&params->root, JB_FOBJECT, &key);
    double *w = palloc(sizeof(double) * width);

    if (found == NULL || found->type != jbvBinary || JsonContainerSize(found->val.binary.data) != width)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("the state has no weights")));
    for (int j = 0; j < width; j++) {
        JsonbValue *value = getIthJsonbValueFromContainer(found->val.binary.data, j);

        if (value == NULL || value->type != jbvNumeric)
            ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a weight of the state is no number")));
        w[j] = DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(value->val.numeric)));
    }
    return w;
}

/* The features, or NULL where there are none; another number of them than the state's is an error. */
static const double *
features_of(FunctionCallInfo fcinfo, int d)
{
    ArrayType *array;

    if (PG_ARGISNULL(1))
        return NULL;
    array = PG_GETARG_ARRAYTYPE_P(1);
    if (ARR_NDIM(array) != 1 || ARR_DIMS(array)[0] != d)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
                        errmsg("x is not a list of %d numbers, as many as the state has features", d)));
    return array_contains_nulls(array) ? NULL : (const double *)ARR_DATA_PTR(array);
}

static void
negative_gradient(Jsonb *params, const float *row, int width, double *g)
{
    const DpLoss *loss = dp_loss_named(dp_word(params, "loss"));
    double *w = weights_of(params, width);
    double slope = loss->slope(dp_dot(w, row + 1, width), (double)row[0], dp_number(params, "loss_param"));

    slope = dp_clip_slope(slope, row + 1, width, dp_number(params, "clip"));
    for (int j = 0; j < width; j++)
        g[j] = -slope * (double)row[1 + j];
}

static Jsonb *
gradient_params(FunctionCallInfo fcinfo)
{
    StringInfoData request;

    if (PG_ARGISNULL(0) || PG_ARGISNULL(3) || PG_ARGISNULL(4))
        ereport(ERROR,
                (errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED), errmsg("model_state, epsilon or delta is NULL"),
                 errhint("Pass a state, and the epsilon and delta that you are willing to spend on one gradient.")));
    initStringInfo(&request);
    appendStringInfo(&request, "{\"state\": %s, \"epsilon\": \"%.17g\", \"delta\": \"%.17g\"}",
                     text_of(PG_GETARG_JSONB_P(0)), PG_GETARG_FLOAT8(3), PG_GETARG_FLOAT8(4));
    return ask("local_gradient", request.data);
}

Datum
dp_local_gradient(PG_FUNCTION_ARGS)
{
    Jsonb *params = gradient_params(fcinfo);
    List *made = NIL;
    DpCoding coding = dp_coding(params, &made);
    int d = (int)dp_number(params, "d"), width = dp_shape_width(&coding.shape, d);
    float *row = palloc0(sizeof(float) * (width + 1));
    double *g = palloc(sizeof(double) * width);

    dp_code_row(&coding, PG_ARGISNULL(2) ? NAN : PG_GETARG_FLOAT8(2), features_of(fcinfo, d), d, row);
    negative_gradient(params, row, width, g);
    dp_perturb(params, g, width);
    PG_RETURN_ARRAYTYPE_P(dp_float8_array(g, width));
}

/* ---- the learner ---- */

typedef struct Round {
    Jsonb *state;
    int64 count;
    int width;
    double sum[FLEXIBLE_ARRAY_MEMBER];
} Round;

static Round *
start_round(MemoryContext context, Jsonb *state, int width)
{
    Round *round = MemoryContextAllocZero(context, offsetof(Round, sum) + sizeof(double) * width);

    round->state = MemoryContextAlloc(context, VARSIZE(state));
    memcpy(round->state, state, VARSIZE(state));
    round->width = width;
    return round;
}

static void
add_gradient(Round *round, ArrayType *gradient)
{
    const double *g = (const double *)ARR_DATA_PTR(gradient);

    if (ARR_NDIM(gradient) != 1 || array_contains_nulls(gradient) || ARR_DIMS(gradient)[0] != round->width)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
                        errmsg("the gradients of a round differ in length, or have a NULL")));
    for (int j = 0; j < round->width; j++) {
        if (!isfinite(g[j]))
            ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a gradient is not finite")));
        round->sum[j] += g[j];
    }
    round->count++;
}

Datum
dp_local_add(PG_FUNCTION_ARGS)
{
    MemoryContext context = dp_aggregate_context(fcinfo);
    Jsonb *state;
    Round *round;

    if (PG_ARGISNULL(1) || PG_ARGISNULL(2))
        ereport(ERROR, (errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED), errmsg("model_state or gradient is NULL"),
                        errhint("A provider without a usable row still answers, with noise: use dp_local_gradient.")));
    state = PG_GETARG_JSONB_P(1);
    if (PG_ARGISNULL(0))
        round = start_round(context, state,
                            ArrayGetNItems(ARR_NDIM(PG_GETARG_ARRAYTYPE_P(2)), ARR_DIMS(PG_GETARG_ARRAYTYPE_P(2))));
    else
        round = (Round *)PG_GETARG_POINTER(0);
    if (VARSIZE(state) != VARSIZE(round->state) || memcmp(state, round->state, VARSIZE(state)) != 0)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a round has one state"),
                        errhint("Aggregate gradients that were taken at the same state.")));
    add_gradient(round, PG_GETARG_ARRAYTYPE_P(2));
    PG_RETURN_POINTER(round);
}

/* Without gradients there is no round, and no state. */
Datum
dp_local_final(PG_FUNCTION_ARGS)
{
    StringInfoData request;
    Round *round;

    dp_aggregate_context(fcinfo);
    if (PG_ARGISNULL(0))
        PG_RETURN_NULL();
    round = (Round *)PG_GETARG_POINTER(0);
    initStringInfo(&request);
    appendStringInfo(&request, "{\"state\": %s, \"count\": " INT64_FORMAT ", \"sum\": [", text_of(round->state),
                     round->count);
    for (int j = 0; j < round->width; j++)
        appendStringInfo(&request, "%s%.17g", j ? ", " : "", round->sum[j]);
    appendStringInfoString(&request, "]}");
    PG_RETURN_DATUM(DirectFunctionCall2(jsonb_object_field, JsonbPGetDatum(ask("local_round", request.data)),
                                        CStringGetTextDatum("state")));
}
