/*
 * state.c: the un-noised model in training, as a type that keeps to itself.
 *
 * We want a value that aggregates can fold and that nobody selects by mistake: it prints a summary, cannot be typed in,
 * has no binary output, and no cast shows its weights. Between passes it stays in the memory of the backend, until the
 * transaction ends: it is never written to a table, to WAL or to disk.
 */
#include "rows.h"

#include <math.h>

#include "access/xact.h"
#include "lib/ilist.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

PG_FUNCTION_INFO_V1(dp_state_in);
PG_FUNCTION_INFO_V1(dp_state_out);
PG_FUNCTION_INFO_V1(dp_begin);
PG_FUNCTION_INFO_V1(dp_objective);
PG_FUNCTION_INFO_V1(dp_gap_of_run);

typedef struct Run {
    dlist_node node;
    int64 id;
    SubTransactionId owner; /* the run goes when this is rolled back */
    DpState *state;
    MemoryContext context; /* of the rows, or columns */
    DpRows rows;
    struct DpColumns *columns;
    MemoryContext memory_context; /* of the memories */
    double *memory;               /* one for each row, where the solver remembers */
    int64 memory_rows;
    bool moving;  /* a pass over memories was begun, and not finished */
    DpHeld *held; /* instead of all the rest, once training is over */
} Run;

/* Runs of this transaction, in its memory; the callback empties the list when that memory goes. */
static dlist_head runs = DLIST_STATIC_INIT(runs);
static bool watching = false;

static void
forget_runs(XactEvent event, void *arg)
{
    (void)arg;
    if (event != XACT_EVENT_PRE_COMMIT && event != XACT_EVENT_PRE_PREPARE)
        dlist_init(&runs);
}

static void
drop_run(Run *run)
{
    explicit_bzero(run->state, VARSIZE(run->state));
    pfree(run->state);
    MemoryContextDelete(run->context);
    MemoryContextDelete(run->memory_context);
    dlist_delete(&run->node);
    pfree(run);
}

/* A training that failed inside a savepoint must not keep its rows in memory until the transaction ends. */
static void
follow_subtransaction(SubXactEvent event, SubTransactionId mine, SubTransactionId parent, void *arg)
{
    dlist_mutable_iter iter;

    (void)arg;
    dlist_foreach_modify (iter, &runs) {
        Run *run = dlist_container(Run, node, iter.cur);

        if (run->owner == mine && event == SUBXACT_EVENT_COMMIT_SUB)
            run->owner = parent;
        else if (run->owner == mine && event == SUBXACT_EVENT_ABORT_SUB)
            drop_run(run);
    }
}

static Run *
find_run(int64 id)
{
    dlist_iter iter;

    dlist_foreach (iter, &runs) {
        Run *run = dlist_container(Run, node, iter.cur);

        if (run->id == id)
            return run;
    }
    return NULL;
}

DpState *
dp_state_of_run(int64 id)
{
    Run *run = find_run(id);

    if (run == NULL)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
                        errmsg("run " INT64_FORMAT " was not begun in this transaction", id)));
    if (run->held != NULL)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
                        errmsg("run " INT64_FORMAT " is over: its model waits to be chosen", id)));
    return run->state;
}

void
dp_state_keep(int64 id, const DpState *state)
{
    Run *run = find_run(id);
    DpState *copy = dp_state_copy(TopTransactionContext, state);

    if (run == NULL) {
        if (!watching) {
            RegisterXactCallback(forget_runs, NULL);
            RegisterSubXactCallback(follow_subtransaction, NULL);
        }
        watching = true;
        run = MemoryContextAlloc(TopTransactionContext, sizeof(Run));
        run->id = id;
        run->owner = GetCurrentSubTransactionId();
        run->context = AllocSetContextCreate(TopTransactionContext, "run", ALLOCSET_DEFAULT_SIZES);
        run->rows = (DpRows){.context = run->context};
        run->columns = NULL;
        run->memory_context = AllocSetContextCreate(TopTransactionContext, "memories", ALLOCSET_SMALL_SIZES);
        run->memory = NULL;
        run->memory_rows = 0;
        run->held = NULL;
        dlist_push_head(&runs, &run->node);
    } else
        pfree(run->state);
    run->state = copy;
    run->moving = false;
}

void
dp_state_forget(int64 id)
{
    Run *run = find_run(id);

    if (run != NULL)
        drop_run(run);
}

/* Nothing of the training stays but the weights, which are wiped with their context, however that ends. */
void
dp_state_hold(int64 id, const double *w)
{
    DpState *state = dp_state_of_run(id);
    Run *run = find_run(id);
    DpHeld *held;

    MemoryContextReset(run->context);
    run->rows = (DpRows){.context = run->context};
    run->columns = NULL;
    MemoryContextReset(run->memory_context);
    run->memory = NULL;
    held = dp_secret_alloc(run->memory_context, offsetof(DpHeld, w) + sizeof(double) * state->weights);
    held->private = (state->flags & DP_STATE_PRIVATE) != 0;
    held->width = state->d;
    held->outputs = state->weights / state->d;
    held->finite = true;
    for (int j = 0; j < state->weights; j++)
        held->finite = held->finite && isfinite(w[j]);
    memcpy(held->w, w, sizeof(double) * state->weights);
    explicit_bzero(state->body, VARSIZE(state) - offsetof(DpState, body));
    run->held = held;
}

bool
dp_is_held(int64 id)
{
    Run *run = find_run(id);

    return run != NULL && run->held != NULL;
}

DpHeld *
dp_held_of_run(int64 id)
{
    if (!dp_is_held(id))
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
                        errmsg("run " INT64_FORMAT " holds no model in this transaction", id)));
    return find_run(id)->held;
}

void
dp_held_rename(int64 id, int64 to)
{
    find_run(id)->id = to;
}

DpRows *
dp_rows_of_run(int64 id)
{
    (void)dp_state_of_run(id);
    return &find_run(id)->rows;
}

struct DpColumns **
dp_columns_of_run(int64 id, MemoryContext *context)
{
    (void)dp_state_of_run(id);
    *context = find_run(id)->context;
    return &find_run(id)->columns;
}

double *
dp_memory_of_run(int64 id, int64 n)
{
    Run *run;

    (void)dp_state_of_run(id);
    run = find_run(id);
    if (run->memory == NULL) {
        run->memory = dp_secret_alloc(run->memory_context, sizeof(double) * n);
        run->memory_rows = n;
    }
    if (run->memory_rows != n)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("the run has another number of rows")));
    if (run->moving)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE), errmsg("a pass of this run failed")));
    run->moving = true;
    return run->memory;
}

DpState *
dp_state_copy(MemoryContext context, const DpState *state)
{
    DpState *copy = MemoryContextAlloc(context, VARSIZE(state));

    memcpy(copy, state, VARSIZE(state));
    return copy;
}

/* More passes than the noise was calibrated for would cost more than the plan says. */
void
dp_state_begin_pass(DpState *state, int part)
{
    state->block = 0;
    if (!dp_state_solver(state)->begin_pass(state->body, part))
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE), errmsg("all planned passes were made")));
}

void
dp_state_check_complete(const DpState *state)
{
    if (!dp_state_solver(state)->complete(state->body))
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("a pass ended before the last row")));
}

DpState *
dp_state_checked(Datum datum)
{
    DpState *state = (DpState *)PG_DETOAST_DATUM(datum);

    if (VARSIZE(state) < sizeof(DpState) || state->magic != DP_STATE_MAGIC || state->version != DP_STATE_VERSION ||
        dp_solver_at(state->solver) == NULL)
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("not a training state of this version")));
    return state;
}

const DpSolver *
dp_state_solver(const DpState *state)
{
    return dp_solver_at(state->solver);
}

Datum
dp_state_in(PG_FUNCTION_ARGS)
{
    ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED), errmsg("a training state cannot be typed in")));
    PG_RETURN_NULL();
}

Datum
dp_state_out(PG_FUNCTION_ARGS)
{
    DpState *state = dp_state_checked(PG_GETARG_DATUM(0));
    const DpSolver *solver = dp_state_solver(state);

    PG_RETURN_CSTRING(psprintf("%s, %d weights, %d passes", solver->name, state->weights, solver->passes(state->body)));
}

/* A state of four vectors of them is below a gigabyte. */
#define MOST_WEIGHTS 20000000

/* begin(run, solver, d, params): a state at the start of training. */
Datum
dp_begin(PG_FUNCTION_ARGS)
{
    const DpSolver *solver = dp_solver_named(text_to_cstring(PG_GETARG_TEXT_PP(1)));
    int32 d = PG_GETARG_INT32(2);
    Jsonb *params = PG_GETARG_JSONB_P(3);
    double weights = (double)d * dp_number(params, "outputs");
    DpParams host = dp_params(params);
    DpState *state;
    const char *wrong;
    Size size;

    if (solver == NULL || d < 1)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("no such solver, or no features")));
    if (!(weights >= d && weights <= MOST_WEIGHTS) || (weights > d && !solver->many))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"outputs\" is invalid")));
    size = offsetof(DpState, body) + solver->size((int)weights);
    state = palloc0(size);
    SET_VARSIZE(state, size);
    state->magic = DP_STATE_MAGIC;
    state->version = DP_STATE_VERSION;
    state->flags = dp_number(params, "private") != 0 ? DP_STATE_PRIVATE : 0;
    if (dp_has(params, "seed")) {
        state->flags |= DP_STATE_SEEDED;
        state->seed = (int64)dp_number(params, "seed");
    }
    state->solver = dp_solver_index(solver);
    state->d = d;
    state->weights = (int32)weights;
    wrong = solver->start(state->body, d, &host);
    if (wrong != NULL)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter %s is invalid", wrong)));
    if (find_run(PG_GETARG_INT64(0)) != NULL)
        dp_state_forget(PG_GETARG_INT64(0)); /* with its rows and what it remembers of them */
    dp_state_keep(PG_GETARG_INT64(0), state);
    PG_RETURN_VOID();
}

/* The state of a run that shows how well it does; a private run never does. */
static DpState *
shown_state(int64 run)
{
    DpState *state = dp_state_of_run(run);

    if (state->flags & DP_STATE_PRIVATE)
        ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg("a private run shows no training loss")));
    return state;
}

/* objective(run): the training objective, for stopping by tolerance. */
Datum
dp_objective(PG_FUNCTION_ARGS)
{
    DpState *state = shown_state(PG_GETARG_INT64(0));

    if (dp_state_solver(state)->objective == NULL)
        PG_RETURN_NULL();
    PG_RETURN_FLOAT8(dp_state_solver(state)->objective(state->body));
}

/* gap(run): the duality gap after the last pass; NULL where there is no dual. */
Datum
dp_gap_of_run(PG_FUNCTION_ARGS)
{
    DpState *state = shown_state(PG_GETARG_INT64(0));
    const DpSolver *solver = dp_state_solver(state);

    if (solver->gap == NULL)
        PG_RETURN_NULL();
    PG_RETURN_FLOAT8(solver->gap(state->body));
}
