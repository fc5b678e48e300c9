/*
 * sample.c: a pass that hands rows over one by one: sample(run, tables, params) runs it, and keeps the state. Batches
 * are Poisson samples or, without a probability, the rows in their order. A solver that remembers gets each row's
 * memory with it, which is found by the row's slot, its place among all packed rows, and stays in this backend.
 *
 * Every row joins every step of the pass independently with probability q, and nobody learns which: the draws come from
 * a fresh key and stay in this file and its temporary ones. Amplification by sampling needs exactly that; a shuffled
 * table cut into batches does not have it (docs/privacy.md).
 *
 * The cells (row, step) are walked in the order of rows, from one that is drawn to the next, by the waits of gaps.c:
 * one wait for every draw, however many cells lie between. The draws are then put in the order of steps. If all packed
 * rows fit maintenance_work_mem they are kept in memory from the first pass on, and visited at random; otherwise each
 * pass reads them once and sends the drawn ones to temporary files, one for each range of steps, that fit by
 * themselves. Both ways the same draws, in the same order, give the same bits.
 */
#include "rows.h"
#include "shuffle.h"

#include <math.h>

#include "miscadmin.h"
#include "utils/memutils.h"

PG_FUNCTION_INFO_V1(dp_sample);

typedef struct Walk {
    DpWords words;
    DpGaps gaps;
    uint64 next; /* the next cell that is drawn: row times steps, plus step */
    uint64 steps;
} Walk;

/* Draws in the order they were made: row `row[i]` of `rows` joins step `first_step + step[i]`. */
typedef struct Drawn {
    const DpRows *rows;
    const int64 *slot; /* of the rows; NULL: that is their number */
    uint32 *row, *step;
    int64 n, room;
    int64 first_step, steps;
} Drawn;

typedef struct Sampling {
    MemoryContext context; /* of one pass */
    DpState *state;
    DpPool *pool;
    Walk *walk;
    Size row_bytes;
    int64 n, steps;
    int64 row;                  /* being walked */
    double *memory;             /* by slot, or NULL */
    int64 batch_size, in_batch; /* of rows in their order */

    Drawn drawn; /* with all rows in memory */

    int ranges; /* of steps, otherwise: each has a file */
    BufFile **files;
    int64 *file_rows;
} Sampling;

static void
start_walk(Sampling *s, double probability)
{
    uint64_t pass = (uint64_t)dp_state_solver(s->state)->passes(s->state->body);

    s->walk = dp_secret_alloc(s->context, sizeof(Walk));
    dp_random_of_state(&s->walk->words.random, s->state, DP_STREAM_SAMPLE + pass);
    if (!dp_gap_start(&s->walk->gaps, probability))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"probability\" is invalid")));
    s->walk->steps = (uint64)s->steps;
    s->walk->next = dp_gap(&s->walk->words, &s->walk->gaps);
}

/* The row's next step that is drawn, if it has one more. */
static bool
next_step(Walk *walk, int64 row, int64 *step)
{
    uint64 first = (uint64)row * walk->steps;

    if (walk->next - first >= walk->steps)
        return false;
    *step = (int64)(walk->next - first);
    walk->next += 1 + dp_gap(&walk->words, &walk->gaps);
    return true;
}

static void
check_rows(bool right)
{
    if (!right)
        ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("the packed rows do not fit the plan")));
}

/* The slot of the row at hand, when rows come in their order. */
static int64
next_slot(Sampling *s)
{
    check_rows(s->row < s->n);
    return s->row++;
}

static void
take_row(const Sampling *s, const float *row, int64 slot)
{
    dp_state_solver(s->state)->take(s->state->body, row, s->memory == NULL ? NULL : &s->memory[slot]);
}

/* ---- draws in memory, put in the order of steps and folded ---- */

static void
start_drawn(Drawn *drawn, const DpRows *rows, int64 expected, int64 first_step, int64 steps)
{
    int64 room = expected + 4 * (int64)sqrt((double)expected) + 64;

    *drawn = (Drawn){.rows = rows, .room = room, .first_step = first_step, .steps = steps};
    drawn->row = MemoryContextAllocHuge(CurrentMemoryContext, sizeof(uint32) * room);
    drawn->step = MemoryContextAllocHuge(CurrentMemoryContext, sizeof(uint32) * room);
}

static void
add_drawn(Drawn *drawn, int64 row, int64 step)
{
    if (drawn->n == drawn->room) {
        drawn->room *= 2;
        drawn->row = repalloc_huge(drawn->row, sizeof(uint32) * drawn->room);
        drawn->step = repalloc_huge(drawn->step, sizeof(uint32) * drawn->room);
    }
    drawn->row[drawn->n] = (uint32)row;
    drawn->step[drawn->n++] = (uint32)(step - drawn->first_step);
}

/* Where each step's draws end, once `by_step` has put them in order: a counting sort, which keeps the order of rows. */
static int64 *
by_step(const Drawn *drawn, uint32 *order)
{
    int64 *end = MemoryContextAllocHuge(CurrentMemoryContext, sizeof(int64) * (drawn->steps + 1));

    memset(end, 0, sizeof(int64) * (drawn->steps + 1));
    for (int64 i = 0; i < drawn->n; i++)
        end[drawn->step[i] + 1]++;
    for (int64 t = 0; t < drawn->steps; t++)
        end[t + 1] += end[t];
    for (int64 i = 0; i < drawn->n; i++)
        order[end[drawn->step[i]]++] = drawn->row[i];
    return end;
}

/* A step without rows is a step all the same: it has its noise. */
static void
end_step(Sampling *s)
{
    if (!dp_state_solver(s->state)->step(s->state->body, s->pool))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("there are more steps than planned")));
    CHECK_FOR_INTERRUPTS();
}

static int64
slot_of(const Drawn *drawn, uint32 row)
{
    return drawn->slot == NULL ? row : drawn->slot[row];
}

static inline __attribute__((always_inline)) void
prefetch(const Sampling *s, const Drawn *drawn, uint32 row)
{
    dp_row_prefetch(drawn->rows, row);
    if (s->memory != NULL)
        __builtin_prefetch(&s->memory[slot_of(drawn, row)], 1);
}

static void
fold_drawn(Sampling *s, const Drawn *drawn)
{
    uint32 *order = MemoryContextAllocHuge(CurrentMemoryContext, sizeof(uint32) * Max(drawn->n, 1));
    int64 *end = by_step(drawn, order);
    int64 at = 0;

    for (int64 t = 0; t < drawn->steps; t++) {
        for (; at < end[t]; at++) {
            if (at + DP_PREFETCH < drawn->n)
                prefetch(s, drawn, order[at + DP_PREFETCH]);
            take_row(s, (const float *)dp_row_at(drawn->rows, order[at]), slot_of(drawn, order[at]));
            if (at % 4096 == 0)
                CHECK_FOR_INTERRUPTS();
        }
        end_step(s);
    }
    pfree(order);
    pfree(end);
}

/* ---- all rows in memory ---- */

static void
add_to_rows(const char *row, void *arg)
{
    dp_rows_add(arg, row);
}

static void
load_rows(DpRows *rows, Size row_bytes, int64 n, Oid *tables, int parts)
{
    MemoryContextReset(rows->context);
    dp_rows_start(rows, rows->context, row_bytes, (Size)n * row_bytes);
    for (int i = 0; i < parts; i++)
        dp_visit_rows(tables[i], row_bytes, add_to_rows, rows);
}

static void
sample_memory(Sampling *s, const DpRows *rows, double expected)
{
    int64 step;

    start_drawn(&s->drawn, rows, (int64)expected, 0, s->steps);
    for (s->row = 0; s->row < rows->n; s->row++) {
        while (next_step(s->walk, s->row, &step))
            add_drawn(&s->drawn, s->row, step);
        if (s->row % 4096 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    fold_drawn(s, &s->drawn);
}

/* ---- rows sorted by step, through files ---- */

/* For the rows of a range, where memories leave less. */
#define LEAST_MEMORY ((Size)1024 * 1024)

/* Stands before each row in a file. */
typedef struct Ticket {
    int64 step;
    int64 slot;
} Ticket;

static void
open_ranges(Sampling *s, double expected)
{
    double bytes = expected * (double)(s->row_bytes + sizeof(Ticket) + sizeof(int64) + 3 * sizeof(uint32));

    Size left = dp_allowed_memory() - (s->memory == NULL ? 0 : sizeof(double) * s->n);

    s->ranges = (int)Min(s->steps, dp_bucket_count(bytes, Max(left, LEAST_MEMORY)));
    s->files = palloc(sizeof(BufFile *) * s->ranges);
    s->file_rows = palloc0(sizeof(int64) * s->ranges);
    for (int i = 0; i < s->ranges; i++)
        s->files[i] = BufFileCreateTemp(false);
}

/* Range i has the steps from i steps / ranges, rounded up, to those of the next. */
static int64
first_of_range(const Sampling *s, int range)
{
    return ((int64)range * s->steps + s->ranges - 1) / s->ranges;
}

static void
send_row(const char *row, void *arg)
{
    Sampling *s = arg;
    Ticket ticket = {.slot = next_slot(s)};

    while (next_step(s->walk, ticket.slot, &ticket.step)) {
        int range = (int)(ticket.step * s->ranges / s->steps);

        BufFileWrite(s->files[range], &ticket, sizeof(ticket));
        BufFileWrite(s->files[range], (void *)row, s->row_bytes);
        s->file_rows[range]++;
    }
}

static Ticket
read_row(Sampling *s, int range, char *row)
{
    Ticket ticket;

    dp_read_back(s->files[range], &ticket, sizeof(ticket));
    dp_read_back(s->files[range], row, s->row_bytes);
    return ticket;
}

/* A range of one step needs no order, and its rows no memory: a step may hold the whole table. */
static void
stream_range(Sampling *s, int range)
{
    char *row = palloc(s->row_bytes);

    dp_rewind(s->files[range]);
    for (int64 i = 0; i < s->file_rows[range]; i++) {
        Ticket ticket = read_row(s, range, row);

        take_row(s, (const float *)row, ticket.slot);
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    BufFileClose(s->files[range]);
    pfree(row);
    end_step(s);
}

static void
fold_range(Sampling *s, int range)
{
    MemoryContext context = AllocSetContextCreate(s->context, "steps", ALLOCSET_DEFAULT_SIZES);
    MemoryContext old = MemoryContextSwitchTo(context);
    int64 first = first_of_range(s, range), rows_in_file = s->file_rows[range];
    int64 *slots = MemoryContextAllocHuge(context, sizeof(int64) * Max(rows_in_file, 1));
    char *row = palloc(s->row_bytes);
    DpRows rows;
    Drawn drawn;

    dp_rows_start(&rows, context, s->row_bytes, Max((Size)rows_in_file, 1) * s->row_bytes);
    start_drawn(&drawn, &rows, rows_in_file, first, first_of_range(s, range + 1) - first);
    drawn.slot = slots;
    dp_rewind(s->files[range]);
    for (int64 i = 0; i < rows_in_file; i++) {
        Ticket ticket = read_row(s, range, row);

        dp_rows_add(&rows, row);
        slots[i] = ticket.slot;
        add_drawn(&drawn, i, ticket.step);
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    BufFileClose(s->files[range]);
    fold_drawn(s, &drawn);
    MemoryContextSwitchTo(old);
    MemoryContextDelete(context);
}

static void
sample_files(Sampling *s, Oid *tables, int parts, double expected)
{
    open_ranges(s, expected);
    for (int i = 0; i < parts; i++)
        dp_visit_rows(tables[i], s->row_bytes, send_row, s);
    for (int i = 0; i < s->ranges; i++)
        if (first_of_range(s, i + 1) - first_of_range(s, i) == 1)
            stream_range(s, i);
        else
            fold_range(s, i);
}

/* ---- rows in their order ---- */

static void
take_in_order(const char *row, void *arg)
{
    Sampling *s = arg;

    take_row(s, (const float *)row, next_slot(s));
    if (++s->in_batch == s->batch_size) {
        end_step(s);
        s->in_batch = 0;
    }
}

static void
scan_rows(Sampling *s, Oid *tables, int parts)
{
    for (int i = 0; i < parts; i++)
        dp_visit_rows(tables[i], s->row_bytes, take_in_order, s);
    if (s->in_batch > 0)
        end_step(s);
}

static void
look_at(const char *row, void *arg)
{
    Sampling *s = arg;

    dp_state_solver(s->state)->look(s->state->body, (const float *)row, s->memory[next_slot(s)]);
}

/* ---- a pass ---- */

/* With three numbers for each draw beside the rows. */
static bool
fit_memory(const Sampling *s, double expected)
{
    double n = (double)s->n,
           bytes = n * (double)s->row_bytes + 3 * sizeof(uint32) * expected + sizeof(int64) * (double)s->steps;

    if (s->memory != NULL)
        bytes += n * sizeof(double);
    return bytes <= (double)dp_allowed_memory() && n < (double)PG_UINT32_MAX;
}

static void
draw_rows(Sampling *s, int64 run, Oid *tables, int parts, double probability)
{
    double expected = (double)s->n * probability * (double)s->steps;
    DpRows *rows = dp_rows_of_run(run);

    start_walk(s, probability);
    if (fit_memory(s, expected)) {
        if (rows->n != s->n)
            load_rows(rows, s->row_bytes, s->n, tables, parts);
        check_rows(rows->n == s->n);
        sample_memory(s, rows, expected);
    } else
        sample_files(s, tables, parts, expected);
}

/* Never more than it is given: rows that do not fit are read again and again, but memories must be at hand. */
static double *
memory_of(int64 run, int64 n)
{
    if ((Size)n > dp_allowed_memory() / sizeof(double))
        ereport(ERROR, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
                        errmsg("8 bytes for each of " INT64_FORMAT " rows do not fit maintenance_work_mem", n)));
    return dp_memory_of_run(run, n);
}

static void
run_pass(Sampling *s, int64 run, Oid *tables, int parts, Jsonb *params)
{
    const DpSolver *solver = dp_state_solver(s->state);

    if (solver->remembers)
        s->memory = memory_of(run, s->n);
    if (dp_has(params, "probability"))
        draw_rows(s, run, tables, parts, dp_number(params, "probability"));
    else
        scan_rows(s, tables, parts);
    check_rows(s->row == s->n);
    dp_state_check_complete(s->state);
    solver->weigh(s->state->body);
    solver->end_pass(s->state->body, s->pool);
    s->row = 0;
    for (int i = 0; i < parts && solver->looks != NULL && solver->looks(s->state->body); i++)
        dp_visit_rows(tables[i], s->row_bytes, look_at, s);
}

/* sample(run, tables, params): one pass. params has n, updates (the batches of a pass), batch_size and probability. */
Datum
dp_sample(PG_FUNCTION_ARGS)
{
    int64 run = PG_GETARG_INT64(0);
    Jsonb *params = PG_GETARG_JSONB_P(2);
    int parts;
    Oid *tables = dp_oids_of(PG_GETARG_ARRAYTYPE_P(1), &parts);
    MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "sampling", ALLOCSET_DEFAULT_SIZES);
    MemoryContext old = MemoryContextSwitchTo(context);
    Sampling s = {.context = context, .steps = (int64)dp_number(params, "updates")};

    s.n = (int64)dp_number(params, "n");
    s.batch_size = (int64)dp_number(params, "batch_size");
    s.state = dp_state_copy(context, dp_state_of_run(run));
    s.row_bytes = sizeof(float) * (Size)(s.state->d + 1);
    if (dp_state_solver(s.state)->take == NULL || s.n < 1 || s.steps < 1 || s.steps >= (int64)PG_UINT32_MAX ||
        (double)s.n * (double)s.steps > 0x1p62)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("this run cannot be sampled")));
    if (dp_state_solver(s.state)->noised(s.state->body) && !dp_has(params, "probability"))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("a private run needs samples")));
    s.pool = dp_pool_of_state(context, s.state, 0);
    dp_state_begin_pass(s.state, 0);
    run_pass(&s, run, tables, parts, params);
    dp_state_keep(run, s.state);
    MemoryContextSwitchTo(old);
    MemoryContextDelete(context);
    PG_RETURN_VOID();
}
