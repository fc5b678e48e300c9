/*
 * pack.c: one pass over the source makes shuffled, clipped, packed blocks.
 *
 * A packed row is its label and its features as float4, the label first. A row with a NULL, a NaN, an infinite value,
 * another length or a label that is no label becomes a row of zeros: it has no gradient, and it keeps its slot, so that
 * no other row's batch depends on it. Features are scaled and rows cut to the feature bound here, each by itself, never
 * assumed to obey it.
 * Rows go to the target tables in order, the first rows_of_part(0) to the first, and so on: who gets which row depends
 * on the row count and the permutation alone. Narrow rows fill one heap page per block; wide rows are stored out of
 * line.
 */
#include "shuffle.h"

#include <math.h>

#include "access/detoast.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/heap.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(dp_block_in);
PG_FUNCTION_INFO_V1(dp_block_out);
PG_FUNCTION_INFO_V1(dp_pack);
PG_FUNCTION_INFO_V1(dp_repack);

#define WIDE_BLOCK_BYTES ((Size)128 * 1024)

/* ---- the block type: like the state, it prints a summary and cannot be typed in ---- */

Datum
dp_block_in(PG_FUNCTION_ARGS)
{
    ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED), errmsg("a packed block cannot be typed in")));
    PG_RETURN_NULL();
}

Datum
dp_block_out(PG_FUNCTION_ARGS)
{
    PG_RETURN_CSTRING(psprintf("%zu bytes", toast_raw_datum_size(PG_GETARG_DATUM(0)) - VARHDRSZ));
}

/* ---- writing blocks ---- */

typedef struct Writer {
    Oid *targets;
    int parts;
    int part;        /* being written */
    int64 n;         /* rows in all */
    int64 part_left; /* rows the part still takes */
    Relation relation;
    BulkInsertState bulk;
    Size row_bytes;
    int room; /* rows per block */
    int held; /* rows in the open block */
    int32 block;
    struct varlena *rows;
} Writer;

static void
open_part(Writer *w)
{
    w->relation = table_open(w->targets[w->part], RowExclusiveLock);
    w->bulk = GetBulkInsertState();
    w->part_left = w->n / w->parts + (w->part < w->n % w->parts);
    w->block = 0;
}

static void
close_part(Writer *w)
{
    FreeBulkInsertState(w->bulk);
    table_close(w->relation, NoLock);
}

static void
start_writer(Writer *w, Oid *targets, int parts, int64 n, Size row_bytes)
{
    Size bytes = row_bytes <= DP_PAGE_BYTES ? DP_PAGE_BYTES : WIDE_BLOCK_BYTES;

    *w = (Writer){.targets = targets, .parts = parts, .n = n, .row_bytes = row_bytes};
    w->room = Max(1, (int)(bytes / row_bytes));
    w->rows = palloc(VARHDRSZ + w->room * row_bytes);
    open_part(w);
}

static void
write_block(Writer *w)
{
    Datum values[2] = {Int32GetDatum(w->block++), PointerGetDatum(w->rows)};
    bool nulls[2] = {false, false};
    HeapTuple tuple;

    SET_VARSIZE(w->rows, VARHDRSZ + w->held * w->row_bytes);
    tuple = heap_form_tuple(RelationGetDescr(w->relation), values, nulls);
    heap_insert(w->relation, tuple, GetCurrentCommandId(true), TABLE_INSERT_SKIP_FSM, w->bulk);
    heap_freetuple(tuple);
    w->held = 0;
}

static void
write_row(const char *row, void *arg)
{
    Writer *w = arg;

    memcpy(VARDATA(w->rows) + w->held++ * w->row_bytes, row, w->row_bytes);
    if (--w->part_left == 0) {
        write_block(w);
        close_part(w);
        if (++w->part < w->parts)
            open_part(w);
    } else if (w->held == w->room)
        write_block(w);
}

/* ---- reading rows ---- */

typedef struct Packer {
    const DpSource *source;
    DpCoding coding;
    int d;
    double *x;  /* room for the features of one row */
    float *row; /* the packed row */
    int64 n;
    MemoryContext per_row;
    DpVisit visit;
    void *arg;
} Packer;

static double *
scales_of(Jsonb *params, int d)
{
    DpParams host = dp_params(params);
    double *scale = palloc(sizeof(double) * d);

    host.numbers(host.host, "scales", scale, d);
    for (int j = 0; j < d; j++)
        if (!(scale[j] > 0))
            ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"scales\" is invalid")));
    return scale;
}

DpCoding
dp_coding(Jsonb *params)
{
    DpCoding c = {.shape = {.intercept = dp_number(params, "fit_intercept") != 0}};
    int d = (int)dp_number(params, "d");

    c.shape.bound = dp_number(params, "feature_bound");
    c.shape.normalize = dp_number(params, "normalize") != 0;
    c.shape.scale = dp_has(params, "scales") ? scales_of(params, d) : NULL;
    c.room = palloc(sizeof(double) * d);
    c.regression = dp_has(params, "label_bound");
    if (c.regression)
        c.label_bound = dp_number(params, "label_bound");
    else {
        c.negative = dp_number(params, "negative");
        c.other_negative = dp_number(params, "other_negative");
        c.positive = dp_number(params, "positive");
    }
    return c;
}

/* The label in the kernels' coding, or NAN. */
static double
label_of(const DpCoding *c, double y)
{
    if (c->regression) {
        double cut = fmax(-c->label_bound, fmin(c->label_bound, y));

        return isfinite(y) && isfinite((float)cut) ? cut : NAN;
    }
    return y == c->positive ? 1.0 : y == c->negative || y == c->other_negative ? -1.0 : NAN;
}

/* Packs a row, label first; one without features (NULL), or with anything that is no number, becomes zeros. */
void
dp_code_row(const DpCoding *c, double y, const double *x, int d, float *row)
{
    double label = label_of(c, y);

    if (isnan(label) || x == NULL || !dp_clip_row(x, d, &c->shape, c->room, row + 1))
        memset(row, 0, sizeof(float) * (d + c->shape.intercept + 1));
    else
        row[0] = (float)label;
}

static bool
copy_elements(const Packer *p, ArrayType *array)
{
    DpNumberType type = p->source->types[0];
    int16 length;
    bool by_value;
    char align;
    Datum *values;
    int n;

    get_typlenbyvalalign(ARR_ELEMTYPE(array), &length, &by_value, &align);
    deconstruct_array(array, ARR_ELEMTYPE(array), length, by_value, align, &values, NULL, &n);
    for (int j = 0; j < n; j++)
        p->x[j] = dp_to_double(values[j], type);
    return true;
}

static bool
features_of_array(const Packer *p, Datum datum)
{
    ArrayType *array = DatumGetArrayTypeP(datum);

    if (ARR_NDIM(array) != 1 || ARR_DIMS(array)[0] != p->d || array_contains_nulls(array))
        return false;
    if (p->source->types[0] == DP_FLOAT8)
        memcpy(p->x, ARR_DATA_PTR(array), sizeof(double) * p->d);
    else if (p->source->types[0] == DP_FLOAT4)
        for (int j = 0; j < p->d; j++)
            p->x[j] = ((float *)ARR_DATA_PTR(array))[j];
    else
        return copy_elements(p, array);
    return true;
}

static bool
features_of_columns(const Packer *p, TupleTableSlot *slot)
{
    for (int j = 0; j < p->d; j++) {
        if (slot->tts_isnull[j + 1])
            return false;
        p->x[j] = dp_to_double(slot->tts_values[j + 1], p->source->types[j]);
    }
    return true;
}

static bool
read_features(const Packer *p, TupleTableSlot *slot)
{
    if (p->source->is_array)
        return !slot->tts_isnull[1] && features_of_array(p, slot->tts_values[1]);
    return features_of_columns(p, slot);
}

static bool
pack_row(TupleTableSlot *slot, void *arg)
{
    Packer *p = arg;
    MemoryContext old = MemoryContextSwitchTo(p->per_row);
    double y = slot->tts_isnull[0] ? NAN : dp_to_double(slot->tts_values[0], p->source->label_type);

    dp_code_row(&p->coding, y, read_features(p, slot) ? p->x : NULL, p->d, p->row);
    MemoryContextSwitchTo(old);
    MemoryContextReset(p->per_row);
    p->visit((char *)p->row, p->arg);
    p->n++;
    return true;
}

Oid *
dp_oids_of(ArrayType *array, int *n)
{
    Datum *values;
    Oid *oids;

    deconstruct_array(array, REGCLASSOID, sizeof(Oid), true, TYPALIGN_INT, &values, NULL, n);
    oids = palloc(sizeof(Oid) * *n);
    for (int i = 0; i < *n; i++)
        oids[i] = DatumGetObjectId(values[i]);
    return oids;
}

int64
dp_pack_rows(const DpSource *source, Jsonb *params, DpVisit visit, void *arg)
{
    Packer p = {.source = source, .coding = dp_coding(params), .d = (int)dp_number(params, "d")};

    if (!source->is_array && list_length(source->features) != p.d)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"d\" is not the column count")));
    p.visit = visit;
    p.arg = arg;
    p.x = palloc(sizeof(double) * p.d);
    p.row = palloc0(sizeof(float) * (p.d + 2));
    p.per_row = AllocSetContextCreate(CurrentMemoryContext, "row", ALLOCSET_DEFAULT_SIZES);
    dp_read_source(source, true, pack_row, &p);
    return p.n;
}

int
dp_packed_width(Jsonb *params)
{
    return (int)dp_number(params, "d") + (dp_number(params, "fit_intercept") != 0);
}

Size
dp_allowed_memory(void)
{
    return (Size)maintenance_work_mem * 1024;
}

static void
write_all(DpShuffle *shuffle, int64 n, Size row_bytes, ArrayType *targets)
{
    int parts;
    Oid *oids = dp_oids_of(targets, &parts);
    Writer writer;

    if (n < parts)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("there are fewer rows than workers")));
    start_writer(&writer, oids, parts, n, row_bytes);
    dp_shuffle_emit(shuffle, write_row, &writer);
    CommandCounterIncrement();
}

static void
add_to_shuffle(const char *row, void *arg)
{
    dp_shuffle_add(arg, row);
}

/* pack(source, label, features, targets, params): the number of rows packed. */
Datum
dp_pack(PG_FUNCTION_ARGS)
{
    DpSource *source = dp_source(PG_GETARG_OID(0), PG_GETARG_TEXT_PP(1), PG_GETARG_ARRAYTYPE_P(2));
    Jsonb *params = PG_GETARG_JSONB_P(4);
    Size row_bytes = sizeof(float) * (dp_packed_width(params) + 1);
    DpShuffle *shuffle;
    DpRandom random;
    int64 n;

    dp_random_from(&random, params, DP_STREAM_ORDER);
    shuffle = dp_shuffle_start(row_bytes, dp_allowed_memory(), (int64)dp_number(params, "n"), &random);
    n = dp_pack_rows(source, params, add_to_shuffle, shuffle);
    write_all(shuffle, n, row_bytes, PG_GETARG_ARRAYTYPE_P(3));
    PG_RETURN_INT64(n);
}

/* ---- a fresh permutation of what is packed already ---- */

/*
 * Rows in the order they were written, in every pass: not from where another scan happened to be, as PostgreSQL would
 * read a large table. A row's place is how its memory is found.
 */
int64
dp_visit_rows(Oid table, Size row_bytes, DpVisit visit, void *arg)
{
    Relation relation = table_open(table, AccessShareLock);
    TableScanDesc scan = table_beginscan_strat(relation, GetActiveSnapshot(), 0, NULL, true, false);
    HeapTuple tuple;
    int64 n = 0;

    while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL) {
        bool isnull;
        Datum datum = heap_getattr(tuple, 2, RelationGetDescr(relation), &isnull);
        struct varlena *rows = PG_DETOAST_DATUM(datum);

        CHECK_FOR_INTERRUPTS();
        for (Size at = 0; at < VARSIZE(rows) - VARHDRSZ; at += row_bytes, n++)
            visit(VARDATA(rows) + at, arg);
        if ((Pointer)rows != DatumGetPointer(datum))
            pfree(rows);
    }
    table_endscan(scan);
    table_close(relation, NoLock);
    return n;
}

/* Gives the disk space back at once: the table is of this transaction, which has no further use for it. */
static void
empty_table(Oid table)
{
    Relation relation = table_open(table, AccessExclusiveLock);

    heap_truncate_one_rel(relation);
    table_close(relation, NoLock);
}

/* repack(sources, targets, params): the number of rows; empties the sources. params has d, n, fit_intercept, pass. */
Datum
dp_repack(PG_FUNCTION_ARGS)
{
    Jsonb *params = PG_GETARG_JSONB_P(2);
    Size row_bytes = sizeof(float) * (dp_packed_width(params) + 1);
    int parts;
    Oid *sources = dp_oids_of(PG_GETARG_ARRAYTYPE_P(0), &parts);
    DpShuffle *shuffle;
    DpRandom random;
    int64 n = 0;

    dp_random_from(&random, params, DP_STREAM_ORDER + (uint64_t)dp_number(params, "pass"));
    shuffle = dp_shuffle_start(row_bytes, dp_allowed_memory(), (int64)dp_number(params, "n"), &random);
    for (int i = 0; i < parts; i++)
        n += dp_visit_rows(sources[i], row_bytes, add_to_shuffle, shuffle);
    for (int i = 0; i < parts; i++)
        empty_table(sources[i]);
    write_all(shuffle, n, row_bytes, PG_GETARG_ARRAYTYPE_P(1));
    PG_RETURN_INT64(n);
}
