/*
 * source.c: the table or view with one row per example, read with the caller's rights; or, where its owner has
 * protected it and the controller has let the caller in, its heap alone, without a query.
 *
 * The query names columns and nothing more: no operator, cast or function of ours that a search_path could replace.
 * Values become doubles here, in C, without an error whatever they are: what is too large becomes infinite, and the
 * caller of this file treats infinite like NULL.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "tcop/dest.h"
#include "tcop/tcopprot.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(dp_hold_source);
PG_FUNCTION_INFO_V1(dp_describe);

/* ---- which columns, of which types ---- */

DpNumberType
dp_number_type(Oid type)
{
    switch (getBaseType(type)) {
    case BOOLOID:
        return DP_BOOL;
    case INT2OID:
        return DP_INT2;
    case INT4OID:
        return DP_INT4;
    case INT8OID:
        return DP_INT8;
    case FLOAT4OID:
        return DP_FLOAT4;
    case FLOAT8OID:
        return DP_FLOAT8;
    case NUMERICOID:
        return DP_NUMERIC;
    default:
        return DP_NOT_A_NUMBER;
    }
}

Oid
dp_column_type(Oid relation, const char *column)
{
    AttrNumber number = get_attnum(relation, column);

    if (number == InvalidAttrNumber || number < 0)
        ereport(ERROR, (errcode(ERRCODE_UNDEFINED_COLUMN),
                        errmsg("column \"%s\" of \"%s\" does not exist", column, get_rel_name(relation))));
    return get_atttype(relation, number);
}

static void
wrong_type(const char *column, Oid type, const char *wanted)
{
    ereport(ERROR, (errcode(ERRCODE_DATATYPE_MISMATCH),
                    errmsg("column \"%s\" has type %s, which is not %s", column, format_type_be(type), wanted)));
}

static void
check_relation(Oid relation)
{
    char kind = get_rel_relkind(relation);

    if (kind == '\0')
        ereport(ERROR, (errcode(ERRCODE_UNDEFINED_TABLE), errmsg("the source table does not exist")));
    if (kind != RELKIND_RELATION && kind != RELKIND_VIEW && kind != RELKIND_MATVIEW &&
        kind != RELKIND_PARTITIONED_TABLE && kind != RELKIND_FOREIGN_TABLE)
        ereport(ERROR,
                (errcode(ERRCODE_WRONG_OBJECT_TYPE), errmsg("\"%s\" is not a table or view", get_rel_name(relation))));
}

List *
dp_names_of(ArrayType *array)
{
    Datum *values;
    bool *nulls;
    int n;
    List *names = NIL;

    deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT, &values, &nulls, &n);
    for (int i = 0; i < n; i++) {
        if (nulls[i])
            ereport(ERROR, (errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED), errmsg("a feature column has no name")));
        names = lappend(names, TextDatumGetCString(values[i]));
    }
    if (names == NIL)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("no feature columns are named"),
                        errhint("Name one array column or several numeric columns.")));
    return names;
}

/* By the columns' types, which are in source->oids. */
void
dp_resolve_features(DpSource *source, Jsonb *params)
{
    Oid element = get_element_type(getBaseType(source->oids[0]));
    int i = 0;
    ListCell *cell;

    source->types = palloc(sizeof(DpNumberType) * list_length(source->features));
    source->categories = palloc0(sizeof(struct DpCategories *) * list_length(source->features));
    source->is_array = OidIsValid(element) && list_length(source->features) == 1;
    if (source->is_array) {
        source->types[0] = dp_number_type(element);
        if (source->types[0] == DP_NOT_A_NUMBER)
            wrong_type(linitial(source->features), source->oids[0], "an array of numbers");
        return;
    }
    foreach(cell, source->features)
    {
        const char *name = lfirst(cell);

        source->types[i] = dp_number_type(source->oids[i]);
        source->categories[i] = dp_categories_of(params, name, source->oids[i]);
        if (source->types[i] == DP_NOT_A_NUMBER && source->categories[i] == NULL)
            wrong_type(name, source->oids[i],
                       "a number (an array column stands alone, and other columns need a list of categories)");
        i++;
    }
}

static Oid *
column_types(Oid relation, List *names)
{
    Oid *oids = palloc(sizeof(Oid) * list_length(names)), *next = oids;
    ListCell *cell;

    foreach(cell, names) *next++ = dp_column_type(relation, lfirst(cell));
    return oids;
}

/* params may have lists of categories, and a unit; NULL: there are none. */
DpSource *
dp_source(Oid relation, text *label, ArrayType *features, Jsonb *params)
{
    DpSource *source = palloc0(sizeof(DpSource));
    Oid type;

    /* Held to the end of the transaction: nobody renames or alters what was looked at before it is read. */
    LockRelationOid(relation, AccessShareLock);
    check_relation(relation);
    source->relation = relation;
    source->label = text_to_cstring(label);
    source->features = dp_names_of(features);
    type = source->label_oid = dp_column_type(relation, source->label);
    source->label_type = dp_number_type(type);
    if (source->label_type == DP_NOT_A_NUMBER)
        wrong_type(source->label, type, "a number or boolean");
    source->oids = column_types(relation, source->features);
    dp_resolve_features(source, params);
    source->unit = params == NULL ? NULL : dp_unit_of(relation, params);
    return source;
}

/* hold_source(source): what is there now stays. */
Datum
dp_hold_source(PG_FUNCTION_ARGS)
{
    LockRelationOid(PG_GETARG_OID(0), AccessShareLock);
    if (get_rel_relkind(PG_GETARG_OID(0)) == '\0')
        ereport(ERROR, (errcode(ERRCODE_UNDEFINED_TABLE), errmsg("the table does not exist")));
    PG_RETURN_VOID();
}

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

double
dp_to_double(Datum value, DpNumberType type)
{
    switch (type) {
    case DP_BOOL:
        return DatumGetBool(value) ? 1.0 : 0.0;
    case DP_INT2:
        return DatumGetInt16(value);
    case DP_INT4:
        return DatumGetInt32(value);
    case DP_INT8:
        return (double)DatumGetInt64(value);
    case DP_FLOAT4:
        return DatumGetFloat4(value);
    case DP_FLOAT8:
        return DatumGetFloat8(value);
    case DP_NUMERIC:
        return DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, value));
    case DP_NOT_A_NUMBER:
        break;
    }
    return NAN;
}

/* ---- running the query as the caller ---- */

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
run_query(const char *query, Receiver *receiver)
{
    QueryDesc *desc =
        CreateQueryDesc(plan_query(query), query, GetActiveSnapshot(), InvalidSnapshot, &receiver->dest, NULL, NULL, 0);

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

/* A query may be run twice, and must be the same one: names could lead elsewhere, or rows come in another order. */
typedef struct Reading {
    const DpSource *source;
    bool label;
    char *query; /* NULL: the caller is admitted */
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
        run_query(reading->query, &receiver);
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
read_under_one_snapshot(const Reading *reading, ReadRows read, DpReceive receive, void *arg)
{
    int64 slots;

    PushCopiedSnapshot(GetActiveSnapshot());
    UpdateActiveSnapshotCommandId();
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
static int64
count_slots(const DpSource *source, bool label, DpReceive receive, void *arg)
{
    return read_source(source, label, read_counting, receive, arg);
}

/* ---- describe: how many rows and features, and how the labels are written ---- */

typedef struct Shape {
    const DpSource *source;
    bool labels;  /* count the labels' codes, too */
    bool lengths; /* look at those of arrays */
    int64 rows;
    int32 shortest, longest;            /* arrays; -1 for one that is not a list */
    int64 minus_one, zero, one, others; /* labels; NULL is not counted */
    int64 counts[DP_MOST_CLASSES];      /* of labels that are whole numbers from 0 */
} Shape;

/* The header is enough for a length: a long array is not read whole. */
static int
array_length_of(Datum datum)
{
    struct varlena *value = (struct varlena *)DatumGetPointer(datum);
    ArrayType *array = (ArrayType *)value;
    int length;

    if (VARATT_IS_EXTENDED(value))
        array = (ArrayType *)PG_DETOAST_DATUM_SLICE(datum, 0, sizeof(ArrayType) + sizeof(int));
    length = ARR_NDIM(array) == 1 ? ARR_DIMS(array)[0] : ARR_NDIM(array) == 0 ? 0 : -1;
    if ((struct varlena *)array != value)
        pfree(array);
    return length;
}

static void
count_label(Shape *shape, double y)
{
    if (y >= 0 && y < DP_MOST_CLASSES && y == floor(y))
        shape->counts[(int)y]++;
    if (y == 1.0)
        shape->one++;
    else if (y == 0.0)
        shape->zero++;
    else if (y == -1.0)
        shape->minus_one++;
    else
        shape->others++;
}

/* No unit has more of a say in what labels mean than as many rows as may count. */
static bool
is_counted(const DpUnit *unit)
{
    return unit == NULL || unit->before < unit->rows;
}

static bool
measure(TupleTableSlot *slot, void *arg)
{
    Shape *shape = arg;
    int features = shape->labels ? 1 : 0;

    shape->rows++;
    if (shape->labels && !slot->tts_isnull[0] && is_counted(shape->source->unit))
        count_label(shape, dp_to_double(slot->tts_values[0], shape->source->label_type));
    if (shape->lengths && !slot->tts_isnull[features]) {
        int length = array_length_of(slot->tts_values[features]);

        shape->shortest = Min(shape->shortest, length);
        shape->longest = Max(shape->longest, length);
    }
    return true;
}

/* One label in a thousand, and never a few alone, nor a few units, makes a class. */
static int64
fewest(const Shape *shape, int64 labels)
{
    int64 few = 5 * (shape->source->unit == NULL ? 1 : shape->source->unit->rows);

    return Max(few, (labels + 999) / 1000);
}

/* How many classes there are if labels count from 0, without a gap, and how many labels are among them. */
static int
count_classes(const Shape *shape, int64 *whole)
{
    int64 labels = shape->minus_one + shape->zero + shape->one + shape->others;
    int classes = 0;

    while (classes < DP_MOST_CLASSES && shape->counts[classes] >= fewest(shape, labels))
        classes++;
    *whole = 0;
    for (int c = 0; c < classes; c++)
        *whole += shape->counts[c];
    return classes;
}

/*
 * What is public of a table must not depend on a choice of rows: all of them are looked at, and `rows` are the slots.
 *
 * describe(source, label, features, labels, params): rows, shortest, longest, minus_one, zero, one, others, is_boolean,
 * classes, whole.
 */
Datum
dp_describe(PG_FUNCTION_ARGS)
{
    DpSource *source =
        dp_source(PG_GETARG_OID(0), PG_GETARG_TEXT_PP(1), PG_GETARG_ARRAYTYPE_P(2), PG_GETARG_JSONB_P(4));
    bool lengths = source->is_array && !dp_has(PG_GETARG_JSONB_P(4), "count_only");
    Shape shape = {
        .source = source, .labels = PG_GETARG_BOOL(3), .lengths = lengths, .shortest = PG_INT32_MAX, .longest = -2};
    TupleDesc desc;
    Datum values[10];
    bool nulls[10] = {0};
    int64 whole;

    if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
        elog(ERROR, "describe returns a record");
    if (!source->is_array)
        shape.shortest = shape.longest = dp_source_width(source);
    if (source->unit == NULL)
        dp_read_source(source, shape.labels, measure, &shape);
    else
        shape.rows = count_slots(source, shape.labels, measure, &shape);
    values[0] = Int64GetDatum(shape.rows);
    values[1] = Int32GetDatum(shape.shortest);
    values[2] = Int32GetDatum(shape.longest);
    values[3] = Int64GetDatum(shape.minus_one);
    values[4] = Int64GetDatum(shape.zero);
    values[5] = Int64GetDatum(shape.one);
    values[6] = Int64GetDatum(shape.others);
    values[7] = BoolGetDatum(source->label_type == DP_BOOL);
    values[8] = Int32GetDatum(count_classes(&shape, &whole));
    values[9] = Int64GetDatum(whole);
    return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values, nulls));
}
