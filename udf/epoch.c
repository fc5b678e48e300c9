/*
 * epoch.c: a pass over the packed blocks, as aggregates.
 *
 *   epoch(state, part, block, rows)   folds the blocks of one partition, in order, into a copy of the state
 *   merge(state ORDER BY part)        averages the partitions and ends the pass
 *   fold(run, query)                  runs the SELECT that does both, with the run's state as $1, and keeps the result
 *
 * The state travels as a parameter because a parameter reaches parallel workers and never a table. Blocks must come in
 * their written order: the batches are cut along it, so anything else is an error, not a slower answer.
 */
#include "bismarck_dp.h"

#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/parse_type.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"

PG_FUNCTION_INFO_V1(dp_epoch_step);
PG_FUNCTION_INFO_V1(dp_epoch_final);
PG_FUNCTION_INFO_V1(dp_merge_step);
PG_FUNCTION_INFO_V1(dp_merge_final);
PG_FUNCTION_INFO_V1(dp_fold);

/* One partition's pass under way. Its noise stays in this process, and is wiped with the aggregate's memory. */
typedef struct Pass {
    DpState *state;
    DpPool *pool;
} Pass;

MemoryContext
dp_aggregate_context(FunctionCallInfo fcinfo)
{
    MemoryContext context;

    if (!AggCheckCallContext(fcinfo, &context))
        ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED), errmsg("callable inside an aggregate only")));
    return context;
}

static Pass *
begin_pass(MemoryContext context, DpState *start, int part)
{
    Pass *pass = MemoryContextAlloc(context, sizeof(Pass));

    if (dp_state_solver(start)->fold == NULL)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("this run does not fold blocks")));
    pass->state = dp_state_copy(context, start);
    pass->pool = dp_pool_of_state(context, pass->state, part);
    dp_state_begin_pass(pass->state, part);
    return pass;
}

Datum
dp_epoch_step(PG_FUNCTION_ARGS)
{
    MemoryContext context = dp_aggregate_context(fcinfo);
    Pass *pass;
    DpState *state;
    struct varlena *rows;
    Size row_bytes;

    if (PG_ARGISNULL(1) || PG_ARGISNULL(2) || PG_ARGISNULL(3) || PG_ARGISNULL(4))
        ereport(ERROR, (errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED), errmsg("a packed block has no nulls")));
    if (PG_ARGISNULL(0))
        pass = begin_pass(context, dp_state_checked(PG_GETARG_DATUM(1)), PG_GETARG_INT32(2));
    else
        pass = (Pass *)PG_GETARG_POINTER(0);
    state = pass->state;

    CHECK_FOR_INTERRUPTS();
    if (PG_GETARG_INT32(3) != state->block++)
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("packed blocks are out of order")));
    rows = PG_DETOAST_DATUM(PG_GETARG_DATUM(4));
    row_bytes = (Size)(state->d + 1) * sizeof(float);
    if (VARSIZE(rows) - VARHDRSZ == 0 || (VARSIZE(rows) - VARHDRSZ) % row_bytes != 0 ||
        !dp_state_solver(state)->fold(state->body, (const float *)VARDATA(rows),
                                      (int)((VARSIZE(rows) - VARHDRSZ) / row_bytes), pass->pool))
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("a packed block does not fit the plan")));
    if ((Pointer)rows != DatumGetPointer(PG_GETARG_DATUM(4)))
        pfree(rows);
    PG_RETURN_POINTER(pass);
}

Datum
dp_epoch_final(PG_FUNCTION_ARGS)
{
    DpState *state;

    dp_aggregate_context(fcinfo);
    if (PG_ARGISNULL(0))
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("a partition has no blocks")));
    state = ((Pass *)PG_GETARG_POINTER(0))->state;
    dp_state_check_complete(state);
    PG_RETURN_POINTER(state);
}

Datum
dp_merge_step(PG_FUNCTION_ARGS)
{
    MemoryContext context = dp_aggregate_context(fcinfo);
    DpState *other = dp_state_checked(PG_GETARG_DATUM(1));
    DpState *state;

    if (dp_state_solver(other)->merge == NULL)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("this run does not fold blocks")));
    if (PG_ARGISNULL(0)) {
        state = dp_state_copy(context, other);
        dp_state_solver(state)->weigh(state->body);
    } else {
        state = (DpState *)PG_GETARG_POINTER(0);
        dp_state_solver(state)->merge(state->body, other->body);
    }
    PG_RETURN_POINTER(state);
}

Datum
dp_merge_final(PG_FUNCTION_ARGS)
{
    MemoryContext context = dp_aggregate_context(fcinfo);
    DpState *state;

    if (PG_ARGISNULL(0))
        PG_RETURN_NULL();
    state = (DpState *)PG_GETARG_POINTER(0);
    dp_state_solver(state)->end_pass(state->body, dp_pool_of_state(context, state, 0));
    PG_RETURN_POINTER(state);
}

/*
 * Blocks in file order, partitions side by side when there are several, and no time spent compiling the plan. The
 * planner folds the parameter into the plan as a constant, so a printed plan would show the weights to the log, or to a
 * client that asked for log messages.
 */
static void
set_pass_options(void)
{
    dp_set_option("debug_print_parse", "off");
    dp_set_option("debug_print_rewritten", "off");
    dp_set_option("debug_print_plan", "off");
    dp_set_option("synchronize_seqscans", "off");
    dp_set_option("jit", "off");
    dp_set_option("parallel_setup_cost", "0");
    dp_set_option("parallel_tuple_cost", "0");
    dp_set_option("min_parallel_table_scan_size", "0");
    dp_set_option("max_parallel_workers_per_gather", "1024"); /* max_parallel_workers still limits them all */
}

static Oid
state_type(void)
{
    return typenameTypeId(NULL, makeTypeNameFromNameList(list_make2(makeString("bismarck_dp"), makeString("state"))));
}

Datum
dp_fold(PG_FUNCTION_ARGS)
{
    int64 run = PG_GETARG_INT64(0);
    char *query = text_to_cstring(PG_GETARG_TEXT_PP(1));
    Datum state = PointerGetDatum(dp_state_of_run(run));
    Oid type = state_type();
    int options = NewGUCNestLevel();
    Datum result;
    bool isnull;

    set_pass_options();
    SPI_connect();
    if (SPI_execute_with_args(query, 1, &type, &state, NULL, true, 0) != SPI_OK_SELECT || SPI_processed != 1 ||
        SPI_gettypeid(SPI_tuptable->tupdesc, 1) != type)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a pass must give one state")));
    result = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1, &isnull);
    if (isnull)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a pass must give one state")));
    dp_state_keep(run, dp_state_checked(result));
    SPI_finish();
    AtEOXact_GUC(false, options);
    PG_RETURN_VOID();
}
