/*
 * columns.c: packed columns, and coordinate descent over them.
 *
 *   pack_columns(source, label, features, target, params)   rows, clipped as for blocks of rows, as runs of columns
 *   descend(run, columns, params)                            one pass: a round of coordinate steps
 *
 * A tuple holds a run of one column: the same few thousand rows of every column fill one tuple each, so a step on a
 * coordinate reads that column and nothing else. Runs with few numbers that are not zero may hold these and their
 * places; not those of a private run, because how much is written to disk can be seen from other sessions.
 * Labels are folded into the columns of two classes (y x), and are a column of their own for regression: see cd.c.
 * Rows stay in the order in which they come: sums do not depend on it.
 *
 * Memory, for n rows: 8 n bytes of margins and 4 n of the column at hand, 6 bytes for each run to find it, and while
 * packing maintenance_work_mem (or 256 bytes for each column, if that is more).
 */
#include "bismarck_dp.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(dp_pack_columns);
PG_FUNCTION_INFO_V1(dp_descend);

/* A tuple's content: the run's rows, and how many are not zero, or DENSE; then numbers, then their places, if any. */
typedef struct RunHeader {
    int32 rows;
    int32 filled;
} RunHeader;

#define DENSE (-1)
#define MOST_ROWS ((int)((DP_PAGE_BYTES - sizeof(RunHeader)) / sizeof(float)))
#define FEWEST_ROWS 64

/* ---- packing ---- */

typedef struct Transposer {
    Relation relation;
    BulkInsertState bulk;
    int width;    /* columns of features */
    int columns;  /* with that of labels, if there is one */
    int room;     /* rows of a run */
    int held;     /* of the open one */
    bool sparse;  /* runs may be */
    int64 tuples; /* written */
    float *runs;  /* one after the other */
    struct varlena *content;
} Transposer;

static RunHeader *
header_of(struct varlena *content)
{
    return (RunHeader *)VARDATA(content);
}

static int
count_filled(const float *run, int n)
{
    int filled = 0;

    for (int i = 0; i < n; i++)
        filled += run[i] != 0.0f;
    return filled;
}

static Size
write_sparse(char *to, const float *run, int n, int filled)
{
    float *numbers = (float *)to;
    uint16 *places = (uint16 *)(to + sizeof(float) * filled);

    for (int i = 0; i < n; i++)
        if (run[i] != 0.0f) {
            *numbers++ = run[i];
            *places++ = (uint16)i;
        }
    return (sizeof(float) + sizeof(uint16)) * filled;
}

static void
write_run(Transposer *t, const float *run)
{
    RunHeader *header = header_of(t->content);
    int filled = t->sparse ? count_filled(run, t->held) : t->held;
    bool sparse = (sizeof(float) + sizeof(uint16)) * filled < sizeof(float) * t->held;
    Size bytes = sizeof(float) * t->held;
    Datum values[2];
    bool nulls[2] = {false, false};
    HeapTuple tuple;

    header->rows = t->held;
    header->filled = sparse ? filled : DENSE;
    if (sparse)
        bytes = write_sparse((char *)(header + 1), run, t->held, filled);
    else
        memcpy(header + 1, run, bytes);
    SET_VARSIZE(t->content, VARHDRSZ + sizeof(RunHeader) + bytes);
    if (t->tuples == PG_INT32_MAX)
        ereport(ERROR, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED), errmsg("the table is too large to pack by columns"),
                        errhint("Raise maintenance_work_mem, or use fewer features.")));
    values[0] = Int32GetDatum((int32)t->tuples++);
    values[1] = PointerGetDatum(t->content);
    tuple = heap_form_tuple(RelationGetDescr(t->relation), values, nulls);
    heap_insert(t->relation, tuple, GetCurrentCommandId(true), TABLE_INSERT_SKIP_FSM, t->bulk);
    heap_freetuple(tuple);
}

static void
write_runs(Transposer *t)
{
    for (int j = 0; j < t->columns && t->held > 0; j++) {
        CHECK_FOR_INTERRUPTS();
        write_run(t, t->runs + (Size)j * t->room);
    }
    t->held = 0;
}

static void
add_to_columns(const char *row, void *arg)
{
    Transposer *t = arg;
    float label = *(const float *)row;
    const float *x = (const float *)row + 1;
    float *to = t->runs + t->held;

    if (t->columns > t->width) {
        for (int j = 0; j < t->width; j++)
            to[(Size)j * t->room] = x[j];
        to[(Size)t->width * t->room] = label;
    } else
        for (int j = 0; j < t->width; j++)
            to[(Size)j * t->room] = label * x[j];
    if (++t->held == t->room)
        write_runs(t);
}

static int
rows_of_run(int columns)
{
    return (int)Min(MOST_ROWS, Max(FEWEST_ROWS, dp_allowed_memory() / (sizeof(float) * columns)));
}

/* pack_columns(source, label, features, target, params): the number of rows packed. */
Datum
dp_pack_columns(PG_FUNCTION_ARGS)
{
    Jsonb *params = PG_GETARG_JSONB_P(4);
    DpSource *source = dp_pack_source(fcinfo, params);
    Transposer t = {.width = dp_packed_width(params), .sparse = dp_number(params, "sparse") != 0};
    int64 n;

    t.columns = t.width + dp_has(params, "label_bound");
    t.room = rows_of_run(t.columns);
    t.relation = table_open(PG_GETARG_OID(3), RowExclusiveLock);
    t.bulk = GetBulkInsertState();
    t.runs = MemoryContextAllocHuge(CurrentMemoryContext, sizeof(float) * t.columns * t.room);
    t.content = palloc(VARHDRSZ + sizeof(RunHeader) + sizeof(float) * t.room);
    n = dp_pack_rows(source, params, add_to_columns, &t);
    write_runs(&t);
    FreeBulkInsertState(t.bulk);
    table_close(t.relation, NoLock);
    CommandCounterIncrement();
    PG_RETURN_INT64(n);
}

/* ---- reading ---- */

/* What a run of training keeps from pass to pass. */
typedef struct DpColumns {
    int64 n;
    int columns;
    int runs; /* of a column */
    int room; /* rows of each, but for the last */
    ItemPointerData *where;
    double *margins;
    float *column; /* the one at hand */
} DpColumns;

typedef struct Reader {
    const DpColumns *store;
    Relation relation;
    Snapshot snapshot;
} Reader;

/* Before PostgreSQL 15 a tuple that is not visible gives its buffer back by itself, and there is no choice. */
#if PG_VERSION_NUM >= 150000
#define fetch(relation, snapshot, tuple, buffer) heap_fetch(relation, snapshot, tuple, buffer, false)
#else
#define fetch(relation, snapshot, tuple, buffer) heap_fetch(relation, snapshot, tuple, buffer)
#endif

static void
corrupted(void)
{
    ereport(ERROR, (errcode(ERRCODE_DATA_CORRUPTED), errmsg("the packed columns do not fit the plan")));
}

static void
fill_column(float *to, const struct varlena *content, int rows)
{
    const RunHeader *header = (const RunHeader *)VARDATA(content);
    const float *numbers = (const float *)(header + 1);
    const uint16 *places = (const uint16 *)(numbers + Max(header->filled, 0));

    if (header->rows != rows || header->filled > rows)
        corrupted();
    if (header->filled == DENSE) {
        memcpy(to, numbers, sizeof(float) * rows);
        return;
    }
    memset(to, 0, sizeof(float) * rows);
    for (int i = 0; i < header->filled; i++) {
        if (places[i] >= rows)
            corrupted();
        to[places[i]] = numbers[i];
    }
}

/* Copies one run of a column; returns how many rows it has. */
static int
read_run(const Reader *r, int j, int run)
{
    const DpColumns *c = r->store;
    int64 first = (int64)run * c->room;
    int rows = (int)Min((int64)c->room, c->n - first);
    HeapTupleData tuple;
    Buffer buffer;
    bool isnull;

    tuple.t_self = c->where[(Size)run * c->columns + j];
    if (!fetch(r->relation, r->snapshot, &tuple, &buffer))
        corrupted();
    fill_column(c->column + first,
                (struct varlena *)DatumGetPointer(heap_getattr(&tuple, 2, RelationGetDescr(r->relation), &isnull)),
                rows);
    ReleaseBuffer(buffer);
    return rows;
}

/* Where every run is: one scan of the table. */
static void
find_runs(DpColumns *c, Relation relation, Snapshot snapshot)
{
    Size count = (Size)c->runs * c->columns, found = 0;
    TableScanDesc scan = table_beginscan(relation, snapshot, 0, NULL);
    HeapTuple tuple;

    while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL) {
        bool isnull;
        int32 number = DatumGetInt32(heap_getattr(tuple, 1, RelationGetDescr(relation), &isnull));

        CHECK_FOR_INTERRUPTS();
        if (number < 0 || number >= count)
            corrupted();
        c->where[number] = tuple->t_self;
        found++;
    }
    table_endscan(scan);
    if (found != count)
        corrupted();
}

/* The margins of weights that are all zero: -y for regression, 0 otherwise. */
static void
start_margins(DpColumns *c, const Reader *r, bool labels)
{
    for (int run = 0; run < c->runs && labels; run++)
        (void)read_run(r, c->columns - 1, run);
    for (int64 i = 0; i < c->n; i++)
        c->margins[i] = labels ? -(double)c->column[i] : 0.0;
}

static DpColumns *
open_columns(MemoryContext context, Relation relation, Snapshot snapshot, int width, Jsonb *params)
{
    DpColumns *c = MemoryContextAllocZero(context, sizeof(DpColumns));
    bool labels = dp_number(params, "labels") != 0;
    Reader reader = {.store = c, .relation = relation, .snapshot = snapshot};

    c->n = (int64)dp_number(params, "n");
    c->columns = width + labels;
    c->room = rows_of_run(c->columns);
    c->runs = (int)((c->n + c->room - 1) / c->room);
    c->where = MemoryContextAllocHuge(context, sizeof(ItemPointerData) * c->runs * c->columns);
    c->margins = MemoryContextAllocHuge(context, sizeof(double) * c->n);
    c->column = MemoryContextAllocHuge(context, sizeof(float) * c->n);
    find_runs(c, relation, snapshot);
    start_margins(c, &reader, labels);
    return c;
}

/* ---- descending ---- */

DP_VECTORISED static void
move_margins(double *margins, const float *column, double by, int64 n)
{
    for (int64 i = 0; i < n; i++)
        margins[i] += by * (double)column[i];
}

static double
sum_column(const Reader *r, const DpSolver *solver, const DpState *state, int j)
{
    const DpColumns *c = r->store;
    double sum = 0.0;

    for (int run = 0; run < c->runs; run++) {
        int rows = read_run(r, j, run);
        int64 first = (int64)run * c->room;

        sum += solver->sum(state->body, j, c->margins + first, c->column + first, rows);
    }
    return sum;
}

static void
make_pass(const Reader *r, DpState *state, DpPool *pool)
{
    const DpSolver *solver = dp_state_solver(state);
    DpColumns *c = (DpColumns *)r->store;
    DpRandom random;
    int j;

    dp_random_of_state(&random, state, DP_STREAM_COORDINATES + (uint64_t)solver->passes(state->body));
    dp_state_begin_pass(state, 0);
    while (solver->next(state->body, &random, &j)) {
        double by;

        CHECK_FOR_INTERRUPTS();
        by = solver->move(state->body, j, sum_column(r, solver, state, j), pool);
        if (by != 0)
            move_margins(c->margins, c->column, by, c->n);
    }
    solver->observe(state->body, c->margins, c->n);
    dp_state_check_complete(state);
    solver->end_pass(state->body, pool);
}

/* descend(run, columns, params): one pass. params has n, and whether there is a column of labels. */
Datum
dp_descend(PG_FUNCTION_ARGS)
{
    int64 run = PG_GETARG_INT64(0);
    MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "descent", ALLOCSET_DEFAULT_SIZES);
    MemoryContext old = MemoryContextSwitchTo(context), kept;
    DpState *state = dp_state_copy(context, dp_state_of_run(run));
    DpColumns **store = dp_columns_of_run(run, &kept);
    Reader reader = {.relation = table_open(PG_GETARG_OID(1), AccessShareLock), .snapshot = GetActiveSnapshot()};

    if (dp_state_solver(state)->next == NULL)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("this run reads rows, not columns")));
    if (*store == NULL)
        *store = open_columns(kept, reader.relation, reader.snapshot, state->d, PG_GETARG_JSONB_P(2));
    reader.store = *store;
    make_pass(&reader, state, dp_pool_of_state(context, state, 0));
    table_close(reader.relation, NoLock);
    dp_state_keep(run, state);
    MemoryContextSwitchTo(old);
    MemoryContextDelete(context);
    PG_RETURN_VOID();
}
