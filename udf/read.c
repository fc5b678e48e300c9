/*
 * read.c: the rows of a source, read with the caller's rights; or, where its owner has protected it and the controller
 * has let the caller in, its heap alone, without a query.
 *
 * The query names columns and nothing more: no operator, cast or function of ours that a search_path could replace.
 */
#include "bismarck_dp.h"

#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "tcop/dest.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

/* ---- running the query as the caller ---- */

static char *
source_query(const DpSource *source, bool label)
{
    StringInfoData query;
    const char *comma = "";
    ListCell *cell;

    initStringInfo(&query);
    appendStringInfoString(&query, "SELECT ");
    if (label) {
        appendStringInfoString(&query, quote_identifier(source->label));
        comma = ", ";
    }
    foreach(cell, source->features)
    {
        appendStringInfo(&query, "%s%s", comma, quote_identifier(lfirst(cell)));
        comma = ", ";
    }
    if (source->unit != NULL)
        appendStringInfo(&query, ", %s", quote_identifier(source->unit->column));
    appendStringInfo(&query, " FROM %s",
                     quote_qualified_identifier(get_namespace_name(get_rel_namespace(source->relation)),
                                                get_rel_name(source->relation)));
    return query.data;
}

typedef struct Receiver {
    DestReceiver dest;
    const DpSource *source;
    bool label;
    DpReceive receive;
    void *arg;
} Receiver;

static bool
receive_slot(TupleTableSlot *slot, DestReceiver *self)
{
    Receiver *receiver = (Receiver *)self;

    CHECK_FOR_INTERRUPTS();
    slot_getallattrs(slot);
    return receiver->receive(slot, receiver->arg);
}

/* Values are decoded by the types that were looked up; a mismatch would read memory as what it is not. */
static void
receiver_startup(DestReceiver *self, int operation, TupleDesc type)
{
    Receiver *receiver = (Receiver *)self;
    const DpSource *source = receiver->source;
    int at = 0;
    bool same = type->natts == list_length(source->features) + receiver->label + (source->unit != NULL);

    (void)operation;
    if (same && receiver->label)
        same = TupleDescAttr(type, at++)->atttypid == source->label_oid;
    for (int i = 0; same && i < list_length(source->features); i++)
        same = TupleDescAttr(type, at++)->atttypid == source->oids[i];
    if (same && source->unit != NULL)
        same = TupleDescAttr(type, at++)->atttypid == source->unit->oid;
    if (!same)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_IN_USE), errmsg("the source's columns changed while it was read")));
}

static void
receiver_end(DestReceiver *self)
{
    (void)self;
}

static PlannedStmt *
plan_query(const char *query)
{
    RawStmt *raw = linitial_node(RawStmt, pg_parse_query(query));
    List *rewritten;

#if PG_VERSION_NUM >= 150000
    rewritten = pg_analyze_and_rewrite_fixedparams(raw, query, NULL, 0, NULL);
#else
    rewritten = pg_analyze_and_rewrite(raw, query, NULL, 0, NULL);
#endif
    return pg_plan_query(linitial_node(Query, rewritten), query, 0, NULL);
}

static void
run_query(const char *query, PlannedStmt *plan, Receiver *receiver)
{
    QueryDesc *desc =
        CreateQueryDesc(copyObject(plan), query, GetActiveSnapshot(), InvalidSnapshot, &receiver->dest, NULL, NULL, 0);

    ExecutorStart(desc, 0);
#if PG_VERSION_NUM >= 180000
    ExecutorRun(desc, ForwardScanDirection, 0);
#else
    ExecutorRun(desc, ForwardScanDirection, 0, true);
#endif
    ExecutorFinish(desc);
    ExecutorEnd(desc);
    FreeQueryDesc(desc);
}

/* A scan from the table's start, so that a seeded test sees one order; nothing is compiled for one pass. */
static void
set_scan_options(void)
{
    if (dp_caller_search_path() != NULL)
        dp_set_option("search_path", dp_caller_search_path());
    dp_set_option("synchronize_seqscans", "off");
    dp_set_option("jit", "off");
}

/* ---- reading what others have protected ---- */

/* Stored columns of a heap, or nothing: no view, foreign server or column that is computed when it is read. */
static void
check_admitted(Relation source)
{
    bool stored = source->rd_rel->relkind == RELKIND_RELATION && source->rd_rel->relam == HEAP_TABLE_AM_OID;

    for (int i = 0; i < source->rd_att->natts; i++) {
        char generated = TupleDescAttr(source->rd_att, i)->attgenerated;

        stored = stored && (generated == '\0' || generated == ATTRIBUTE_GENERATED_STORED);
    }
    if (!stored)
        ereport(ERROR,
                (errcode(ERRCODE_WRONG_OBJECT_TYPE), errmsg("the source is no plain table, and is read by nobody else"),
                 errhint("Only its owner can train on it.")));
}

/* Where a column is, by its name; it still has the type that was looked up. */
static AttrNumber
place_of_column(Relation source, const char *name, Oid type)
{
    AttrNumber number = get_attnum(RelationGetRelid(source), name);

    if (number <= 0 || TupleDescAttr(source->rd_att, number - 1)->atttypid != type)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_IN_USE), errmsg("the source's columns changed while it was read")));
    return number;
}

static AttrNumber *
places_of_columns(Relation source, const Receiver *receiver, int *count)
{
    const DpSource *s = receiver->source;
    AttrNumber *places = palloc(sizeof(AttrNumber) * (list_length(s->features) + 2));

    *count = 0;
    if (receiver->label)
        places[(*count)++] = place_of_column(source, s->label, s->label_oid);
    for (int i = 0; i < list_length(s->features); i++)
        places[(*count)++] = place_of_column(source, list_nth(s->features, i), s->oids[i]);
    if (s->unit != NULL)
        places[(*count)++] = place_of_column(source, s->unit->column, s->unit->oid);
    return places;
}

static void
scan_heap(Relation source, const AttrNumber *places, TupleTableSlot *out, Receiver *receiver)
{
    TableScanDesc scan = table_beginscan_strat(source, GetActiveSnapshot(), 0, NULL, true, false);
    TupleTableSlot *row = table_slot_create(source, NULL);
    bool more = true;

    while (more && table_scan_getnextslot(scan, ForwardScanDirection, row)) {
        ExecClearTuple(out);
        for (int i = 0; i < out->tts_tupleDescriptor->natts; i++)
            out->tts_values[i] = slot_getattr(row, places[i], &out->tts_isnull[i]);
        more = receive_slot(ExecStoreVirtualTuple(out), &receiver->dest);
    }
    ExecDropSingleTupleTableSlot(row);
    table_endscan(scan);
}

/*
 * With the extension's rights no query is planned. A planner folds what a table's owner has written, expressions of
 * indexes, partial indexes and statistics, and would run his functions with those rights; policies of rows
 * and the caller's settings would have their say, too. A scan of the heap runs nobody's code, and reads this table's
 * rows and no child's.
 */
static void
read_admitted(const DpSource *source, Receiver *receiver)
{
    MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "bismarck_dp source", ALLOCSET_DEFAULT_SIZES);
    MemoryContext outside = MemoryContextSwitchTo(context);
    Relation relation = table_open(source->relation, AccessShareLock);
    TupleTableSlot *out;
    AttrNumber *places;
    TupleDesc desc;
    int count;

    check_admitted(relation);
    places = places_of_columns(relation, receiver, &count);
    desc = CreateTemplateTupleDesc(count);
    for (int i = 0; i < count; i++)
        TupleDescCopyEntry(desc, (AttrNumber)(i + 1), relation->rd_att, places[i]);
    out = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
    scan_heap(relation, places, out, receiver);
    ExecDropSingleTupleTableSlot(out);
    table_close(relation, NoLock);
    MemoryContextSwitchTo(outside);
    MemoryContextDelete(context);
}

/* ---- reading, once or twice ---- */

/* A query may be run twice, by one plan: names could lead elsewhere, or rows come in another order. */
typedef struct Reading {
    const DpSource *source;
    bool label;
    char *query; /* NULL: the caller is admitted */
    PlannedStmt *plan;
} Reading;

static void
read_once(const Reading *reading, DpReceive receive, void *arg)
{
    Receiver receiver = {.dest = {receive_slot, receiver_startup, receiver_end, receiver_end, DestNone},
                         .source = reading->source,
                         .label = reading->label,
                         .receive = receive,
                         .arg = arg};

    if (reading->query == NULL)
        read_admitted(reading->source, &receiver);
    else
        run_query(reading->query, reading->plan, &receiver);
}

/* ---- at most so many rows of each unit ---- */

typedef struct Limited {
    struct DpUnits *units;
    int at; /* the unit's column, which is the last */
    int64 row;
    int64 before; /* rows of its unit */
    int64 left;   /* slots to be filled */
    DpReceive receive;
    void *arg;
    MemoryContext context;
    TupleTableSlot *empty;
} Limited;

static bool
number_row(TupleTableSlot *slot, void *arg)
{
    Limited *l = arg;

    if (l->empty == NULL) {
        MemoryContext old = MemoryContextSwitchTo(l->context);

        l->at = slot->tts_tupleDescriptor->natts - 1;
        l->empty = MakeSingleTupleTableSlot(CreateTupleDescCopy(slot->tts_tupleDescriptor), &TTSOpsVirtual);
        MemoryContextSwitchTo(old);
    }
    l->before = dp_units_add(l->units, slot->tts_values[l->at], slot->tts_isnull[l->at], l->row++);
    return true;
}

static bool
receive_chosen(TupleTableSlot *slot, void *arg)
{
    Limited *l = arg;

    if (!dp_units_chosen(l->units, slot->tts_values[l->at], slot->tts_isnull[l->at], l->row++))
        return true;
    l->left--;
    if (l->receive(slot, l->arg))
        return true;
    l->left = 0;
    return false;
}

/* Slots without a row: a unit had too few, or a view gave other rows the second time. */
static void
receive_empty(Limited *l)
{
    for (; l->left > 0; l->left--) {
        CHECK_FOR_INTERRUPTS();
        ExecStoreAllNullTuple(l->empty);
        if (!l->receive(l->empty, l->arg))
            break;
    }
    if (l->empty != NULL)
        ExecDropSingleTupleTableSlot(l->empty);
}

static void
read_limited(const Reading *reading, DpReceive receive, void *arg)
{
    Limited l = {.receive = receive, .arg = arg, .context = CurrentMemoryContext};

    l.units = dp_units_start(reading->source->unit, reading->source->unit->rows);
    read_once(reading, number_row, &l);
    l.left = dp_units_choose(l.units);
    l.row = 0;
    read_once(reading, receive_chosen, &l);
    receive_empty(&l);
    dp_units_end(l.units);
}

static int64
read_rows(const Reading *reading, DpReceive receive, void *arg)
{
    if (reading->source->unit == NULL)
        read_once(reading, receive, arg);
    else
        read_limited(reading, receive, arg);
    return 0;
}

typedef struct Counted {
    Limited numbered;
    DpUnit *unit;
    DpReceive receive;
    void *arg;
} Counted;

static bool
count_and_receive(TupleTableSlot *slot, void *arg)
{
    Counted *c = arg;

    (void)number_row(slot, &c->numbered);
    c->unit->before = c->numbered.before;
    return c->receive(slot, c->arg);
}

static int64
read_counting(const Reading *reading, DpReceive receive, void *arg)
{
    DpUnit *unit = reading->source->unit;
    Counted c = {.numbered = {.context = CurrentMemoryContext}, .unit = unit, .receive = receive, .arg = arg};
    int64 slots;

    c.numbered.units = dp_units_start(unit, 0);
    read_once(reading, count_and_receive, &c);
    slots = dp_units_choose(c.numbered.units);
    receive_empty(&c.numbered);
    dp_units_end(c.numbered.units);
    return slots;
}

typedef int64 (*ReadRows)(const Reading *reading, DpReceive receive, void *arg);

/* However often rows are read, it is under one snapshot. */
static int64
read_under_one_snapshot(Reading *reading, ReadRows read, DpReceive receive, void *arg)
{
    int64 slots;

    PushCopiedSnapshot(GetActiveSnapshot());
    UpdateActiveSnapshotCommandId();
    if (reading->query != NULL)
        reading->plan = plan_query(reading->query);
    slots = read(reading, receive, arg);
    PopActiveSnapshot();
    return slots;
}

/*
 * Everything a function of the caller's sets while the source is read is undone, not kept: a kept search_path would
 * become that of the extension's own statements.
 */
static int64
read_source(const DpSource *source, bool label, ReadRows read, DpReceive receive, void *arg)
{
    Reading reading = {.source = source, .label = label};
    int options;
    Oid role;
    int context;
    int64 slots;

    if (dp_caller_is_admitted(source->relation))
        return read_under_one_snapshot(&reading, read, receive, arg);
    options = NewGUCNestLevel();
    GetUserIdAndSecContext(&role, &context);
    SetUserIdAndSecContext(dp_caller_role(), context | SECURITY_LOCAL_USERID_CHANGE);
    set_scan_options();
    reading.query = source_query(source, label);
    slots = read_under_one_snapshot(&reading, read, receive, arg);
    SetUserIdAndSecContext(role, context);
    AtEOXact_GUC(false, options);
    return slots;
}

/* Every row; or, of each unit, as many slots as may count, with as many of its rows, chosen at random, as there are. */
void
dp_read_source(const DpSource *source, bool label, DpReceive receive, void *arg)
{
    (void)read_source(source, label, read_rows, receive, arg);
}

/* Every row, whatever its unit; and how many slots there are. */
int64
dp_count_slots(const DpSource *source, bool label, DpReceive receive, void *arg)
{
    return read_source(source, label, read_counting, receive, arg);
}
