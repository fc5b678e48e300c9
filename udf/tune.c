/*
 * tune.c: many models, of which one leaves.
 *
 *   split(source, label, features, targets, params)   one scan: every row into exactly one table, as raw doubles
 *   hold(run, noise)                                   ends a training: its noisy weights stay in memory
 *   choose(held_out, runs, params)                     the winner of all that are held, by their errors on other rows
 *   score(held_out, run, best, params)                 a noisy error count; the better of two is held on, as `best`
 *   winner(best)                                       what is held, in the end
 *   empty(tables)                                      gives disk space back at once
 *
 * Which portion a row comes to is drawn before anything of the row is looked at, from a secret key: by what is left of
 * sizes that were fixed beforehand, which makes a uniformly random partition, or by the row's own coin, which depends
 * on its place and the key alone. Every row is written with the same size. Error counts, the scores made of them and
 * the models that lose do not leave this file: they are wiped.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/rel.h"

PG_FUNCTION_INFO_V1(dp_split);
PG_FUNCTION_INFO_V1(dp_hold);
PG_FUNCTION_INFO_V1(dp_choose);
PG_FUNCTION_INFO_V1(dp_score);
PG_FUNCTION_INFO_V1(dp_winner);
PG_FUNCTION_INFO_V1(dp_empty);

/* The key goes with the context, however the call ends. */
static DpRandom *
secret_random(Jsonb *params, uint64_t stream)
{
    DpRandom *random = dp_secret_alloc(CurrentMemoryContext, sizeof(DpRandom));

    dp_random_from(random, params, stream);
    return random;
}

/* ---- portions ---- */

typedef struct Portion {
    Relation relation;
    uint64 share; /* rows it still takes, or its weight */
    int64 rows;   /* it has */
    int32 blocks; /* written */
    int held;     /* rows in the open one */
    struct varlena *block;
} Portion;

typedef struct Splitter {
    Portion *portions;
    int count;
    bool fixed;    /* shares are sizes, and are used up */
    uint64 shares; /* all together */
    Size row_bytes;
    int room; /* rows of a block */
    DpRandom *random;
} Splitter;

static Portion *
draw_portion(Splitter *s)
{
    uint64 at = dp_random_below(s->random, s->shares);
    Portion *p = s->portions;

    for (; at >= p->share; p++)
        at -= p->share;
    if (s->fixed) {
        p->share--;
        s->shares--;
    }
    return p;
}

/* Without a bulk insert's state: it would pin a page of every portion. */
static void
write_block(Portion *p, Size row_bytes)
{
    Datum values[2] = {Int32GetDatum(p->blocks++), PointerGetDatum(p->block)};
    bool nulls[2] = {false, false};
    HeapTuple tuple;

    SET_VARSIZE(p->block, VARHDRSZ + p->held * row_bytes);
    tuple = heap_form_tuple(RelationGetDescr(p->relation), values, nulls);
    heap_insert(p->relation, tuple, GetCurrentCommandId(true), TABLE_INSERT_SKIP_FSM, NULL);
    heap_freetuple(tuple);
    p->held = 0;
}

static void
add_row(Splitter *s, Portion *p, const char *row)
{
    memcpy(VARDATA(p->block) + p->held++ * s->row_bytes, row, s->row_bytes);
    p->rows++;
    if (p->held == s->room)
        write_block(p, s->row_bytes);
}

/* Rows beyond the fixed sizes came after they were counted: they go nowhere, and whoever asked is told. */
static void
split_row(const char *row, void *arg)
{
    Splitter *s = arg;

    if (s->shares > 0)
        add_row(s, draw_portion(s), row);
}

static Splitter
open_portions(Oid *targets, int count, Jsonb *params)
{
    Splitter s = {.portions = palloc0(sizeof(Portion) * count), .count = count};
    DpParams host = dp_params(params);
    double *shares = palloc(sizeof(double) * count);

    if (!(dp_number(params, "d") >= 1 && dp_number(params, "d") <= 1e6))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"d\" is invalid")));
    s.fixed = dp_number(params, "fixed") != 0;
    s.row_bytes = DP_RAW_BYTES((int)dp_number(params, "d"));
    s.room = dp_rows_per_block(s.row_bytes);
    s.random = secret_random(params, DP_STREAM_PORTIONS);
    host.numbers(host.host, "shares", shares, count);
    for (int i = 0; i < count; i++) {
        if (!(shares[i] >= 0 && shares[i] <= 0x1p52))
            ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"shares\" is invalid")));
        s.portions[i].share = (uint64)shares[i];
        s.shares += s.portions[i].share;
        s.portions[i].relation = dp_open_blocks(targets[i], RowExclusiveLock);
        s.portions[i].block = palloc(VARHDRSZ + s.room * s.row_bytes);
    }
    return s;
}

static Datum
close_portions(Splitter *s)
{
    Datum *sizes = palloc(sizeof(Datum) * s->count);

    for (int i = 0; i < s->count; i++) {
        if (s->portions[i].held > 0)
            write_block(&s->portions[i], s->row_bytes);
        table_close(s->portions[i].relation, NoLock);
        sizes[i] = Int64GetDatum(s->portions[i].rows);
    }
    CommandCounterIncrement();
    return PointerGetDatum(construct_array(sizes, s->count, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
}

static Datum
pair(FunctionCallInfo fcinfo, Datum first, Datum second)
{
    Datum values[2] = {first, second};
    bool nulls[2] = {false, false};
    TupleDesc desc;

    if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
        elog(ERROR, "a record was expected");
    return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}

/* split(source, label, features, targets, params): the source's rows, and how many each target got. */
Datum
dp_split(PG_FUNCTION_ARGS)
{
    Jsonb *params = PG_GETARG_JSONB_P(4);
    DpSource *source = dp_source(PG_GETARG_OID(0), PG_GETARG_TEXT_PP(1), PG_GETARG_ARRAYTYPE_P(2), params);
    int count;
    Oid *targets = dp_oids_of(PG_GETARG_ARRAYTYPE_P(3), &count);
    Splitter splitter = open_portions(targets, count, params);
    int64 rows = dp_raw_rows(source, (int)dp_number(params, "d"), split_row, &splitter);

    return pair(fcinfo, Int64GetDatum(rows), close_portions(&splitter));
}

/* empty(tables): of this transaction, to be filled again or dropped. */
Datum
dp_empty(PG_FUNCTION_ARGS)
{
    int count;
    Oid *tables = dp_oids_of(PG_GETARG_ARRAYTYPE_P(0), &count);

    for (int i = 0; i < count; i++)
        dp_empty_table(tables[i]);
    PG_RETURN_VOID();
}

/* ---- models that wait ---- */

/* hold(run, noise): like release, but nothing leaves. */
Datum
dp_hold(PG_FUNCTION_ARGS)
{
    int64 run = PG_GETARG_INT64(0);
    DpState *state = dp_state_of_run(run);
    double *w = dp_secret_alloc(CurrentMemoryContext, sizeof(double) * state->weights);

    dp_output(state, PG_GETARG_JSONB_P(1), w);
    dp_state_hold(run, w);
    PG_RETURN_VOID();
}

static ArrayType *
weights_of(const DpHeld *held)
{
    return dp_float8_array(held->w, held->width * held->outputs);
}

/* ---- errors on rows that no model was trained on ---- */

typedef struct Contestant {
    const DpHeld *held;
    DpCoding coding;
    float *row;   /* room for one, in its own coding */
    int64 errors; /* in units */
} Contestant;

typedef struct Jury {
    Contestant *contestants;
    int count;
    int d;
    double units; /* of one error */
    double *raw;
    List *matrices; /* of projections: models that share one share its room */
} Jury;

/* The class with the largest margin is another. */
static double
error_of_many(const Contestant *c)
{
    double z[DP_MOST_CLASSES];

    dp_margins(c->held->w, c->row + 1, c->held->width, c->held->outputs, z);
    return dp_largest(z, c->held->outputs) != (int)c->row[0];
}

/*
 * How wrong a model is about a row: 0 to 1. A wrong class is 1; for numbers it is the square of the distance, of which
 * twice the label bound, or more, is 1. A model that is no model is wrong about everything.
 */
static double
error_of(const Contestant *c)
{
    double z = c->held->finite ? dp_dot(c->held->w, c->row + 1, c->held->width) : NAN;
    double share = (z - (double)c->row[0]) / (2 * c->coding.label_bound);

    if (isnan(z))
        return 1.0;
    if (c->held->outputs > 1)
        return error_of_many(c);
    if (!c->coding.regression)
        return (z > 0 ? 1.0f : -1.0f) != c->row[0];
    return Min(1.0, share * share);
}

/* A row that counts for nothing is no error of anybody's. */
static void
judge_row(const char *row, void *arg)
{
    Jury *jury = arg;

    memcpy(jury->raw, row, DP_RAW_BYTES(jury->d));
    for (int i = 0; i < jury->count; i++) {
        Contestant *c = &jury->contestants[i];

        if (dp_code_row(&c->coding, jury->raw[0], jury->raw + 1, jury->d, c->row))
            c->errors += (int64)floor(error_of(c) * jury->units);
    }
}

static Contestant
contestant(Jury *jury, int64 run, Jsonb *coding)
{
    Contestant c = {.held = dp_held_of_run(run), .coding = dp_coding(coding, &jury->matrices)};

    if (c.held->width != dp_shape_width(&c.coding.shape, jury->d) || (int)dp_number(coding, "d") != jury->d ||
        c.held->outputs != Max(c.coding.many, 1))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a model has another number of features")));
    if (c.coding.regression && !isfinite(c.coding.label_bound))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"label_bound\" is infinite")));
    c.row = palloc(sizeof(float) * (c.held->width + 1));
    return c;
}

static Jury
start_jury(int count, Jsonb *params)
{
    Jury jury = {.count = count, .d = (int)dp_number(params, "d"), .units = dp_number(params, "units")};

    if (!(jury.units >= 1 && jury.units <= 0x1p20))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"units\" is invalid")));
    jury.contestants = dp_secret_alloc(CurrentMemoryContext, sizeof(Contestant) * count);
    jury.raw = palloc(DP_RAW_BYTES(jury.d));
    return jury;
}

/* The codings of all models: a list under that word. */
static Jsonb *
coding_at(Jsonb *params, int i)
{
    JsonbValue key = {.type = jbvString, .val.string = {.val = "codings", .len = 7}};
    JsonbValue *list = findJsonbValueFromContainer(&params->root, JB_FOBJECT, &key);
    JsonbValue *coding = NULL;

    if (list != NULL && list->type == jbvBinary && JsonContainerIsArray(list->val.binary.data))
        coding = getIthJsonbValueFromContainer(list->val.binary.data, i);
    if (coding == NULL || coding->type != jbvBinary || !JsonContainerIsObject(coding->val.binary.data))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"codings\" is invalid")));
    return JsonbValueToJsonb(coding);
}

/* ---- choosing ---- */

static int
fewest_errors(const Jury *jury)
{
    int best = 0;

    for (int i = 1; i < jury->count; i++)
        if (jury->contestants[i].errors < jury->contestants[best].errors)
            best = i;
    return best;
}

/*
 * With probability proportional to exp(-errors numerator / denominator), exactly. Without a numerator it is the one
 * with the fewest errors, which is for models that promise nothing, or rows that are public.
 */
static int
chosen(const Jury *jury, Jsonb *params)
{
    int64_t *score = dp_secret_alloc(CurrentMemoryContext, sizeof(int64_t) * jury->count);

    if (!dp_has(params, "numerator")) {
        for (int i = 0; i < jury->count; i++)
            if (jury->contestants[i].held->private && dp_number(params, "public") == 0)
                ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
                                errmsg("private models are chosen by a private mechanism")));
        return fewest_errors(jury);
    }
    for (int i = 0; i < jury->count; i++)
        score[i] = -jury->contestants[i].errors;
    return dp_exponential_choice(secret_random(params, DP_STREAM_WINNER), score, jury->count,
                                 (uint64_t)dp_number(params, "numerator"), (uint64_t)dp_number(params, "denominator"));
}

static int64 *
runs_of(ArrayType *array, int *n)
{
    Datum *values;
    int64 *runs;

    deconstruct_array(array, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE, &values, NULL, n);
    if (*n < 1)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("there is no model to choose from")));
    runs = palloc(sizeof(int64) * *n);
    for (int i = 0; i < *n; i++)
        runs[i] = DatumGetInt64(values[i]);
    return runs;
}

/* choose(held_out, runs, params): the winner's place, counted from 0, and its weights; all models are forgotten. */
Datum
dp_choose(PG_FUNCTION_ARGS)
{
    Jsonb *params = PG_GETARG_JSONB_P(2);
    int count, best;
    int64 *runs = runs_of(PG_GETARG_ARRAYTYPE_P(1), &count);
    Jury jury = start_jury(count, params);
    Datum weights;

    for (int i = 0; i < count; i++)
        jury.contestants[i] = contestant(&jury, runs[i], coding_at(params, i));
    (void)dp_visit_rows(PG_GETARG_OID(0), DP_RAW_BYTES(jury.d), judge_row, &jury);
    best = chosen(&jury, params);
    weights = PointerGetDatum(weights_of(jury.contestants[best].held));
    for (int i = 0; i < count; i++)
        dp_state_forget(runs[i]);
    return pair(fcinfo, Int32GetDatum(best), weights);
}

/* ---- one trial after the other ---- */

static int64
score_noise(Jsonb *params)
{
    char *mechanism = dp_word(params, "mechanism");
    double scale = dp_number(params, "scale");
    DpRandom *random = secret_random(params, DP_STREAM_SCORE);
    bool laplace = strcmp(mechanism, "laplace") == 0;

    if ((!laplace && strcmp(mechanism, "gaussian") != 0) || !(scale >= 1 && scale <= (laplace ? 0x1p50 : 0x1p20)) ||
        scale != floor(scale))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("the noise of a score is invalid")));
    return laplace ? dp_discrete_laplace(random, (uint64_t)scale) : dp_discrete_gaussian(random, (uint64_t)scale);
}

/* The first of two that are equal stays. */
static void
keep_better(int64 run, int64 best)
{
    if (dp_is_held(best) && dp_held_of_run(best)->score <= dp_held_of_run(run)->score)
        dp_state_forget(run);
    else {
        if (dp_is_held(best))
            dp_state_forget(best);
        dp_held_rename(run, best);
    }
}

/* score(held_out, run, best, params): params has the trial's number, the model's coding, and the noise. */
Datum
dp_score(PG_FUNCTION_ARGS)
{
    int64 run = PG_GETARG_INT64(1), best = PG_GETARG_INT64(2);
    Jsonb *params = PG_GETARG_JSONB_P(3);
    Jury jury = start_jury(1, params);
    DpHeld *held = dp_held_of_run(run);

    jury.contestants[0] = contestant(&jury, run, coding_at(params, 0));
    (void)dp_visit_rows(PG_GETARG_OID(0), DP_RAW_BYTES(jury.d), judge_row, &jury);
    held->score = jury.contestants[0].errors + score_noise(params);
    held->trial = (int)dp_number(params, "trial");
    keep_better(run, best);
    PG_RETURN_VOID();
}

/* winner(best): which trial it was, and its weights. */
Datum
dp_winner(PG_FUNCTION_ARGS)
{
    int64 best = PG_GETARG_INT64(0);
    DpHeld *held = dp_held_of_run(best);
    int trial = held->trial;
    Datum weights = PointerGetDatum(weights_of(held));

    dp_state_forget(best);
    return pair(fcinfo, Int32GetDatum(trial), weights);
}
