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
#include "catalog/namespace.h"
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

/* A table for blocks that was made in this transaction: nothing else is written to, or emptied. */
Relation
dp_open_blocks(Oid table, LOCKMODE mode)
{
    Relation relation = relation_open(table, mode);
    TupleDesc desc = RelationGetDescr(relation);

    if (relation->rd_rel->relkind != RELKIND_RELATION || relation->rd_createSubid == InvalidSubTransactionId ||
        RelationGetNamespace(relation) != get_namespace_oid("bismarck_dp", false) || desc->natts != 2 ||
        TupleDescAttr(desc, 0)->atttypid != INT4OID || TupleDescAttr(desc, 1)->attlen != -1)
        ereport(ERROR, (errcode(ERRCODE_WRONG_OBJECT_TYPE), errmsg("\"%s\" is no table for blocks of this transaction",
                                                                   RelationGetRelationName(relation))));
    return relation;
}

static void
open_part(Writer *w)
{
    w->relation = dp_open_blocks(w->targets[w->part], RowExclusiveLock);
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

int
dp_rows_per_block(Size row_bytes)
{
    Size bytes = row_bytes <= DP_PAGE_BYTES ? DP_PAGE_BYTES : WIDE_BLOCK_BYTES;

    return Max(1, (int)(bytes / row_bytes));
}

static void
start_writer(Writer *w, Oid *targets, int parts, int64 n, Size row_bytes)
{
    *w = (Writer){.targets = targets, .parts = parts, .n = n, .row_bytes = row_bytes};
    w->room = dp_rows_per_block(row_bytes);
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
    double *x;   /* room for the features of one row */
    float *row;  /* the packed row */
    double *raw; /* the raw one */
    int64 n;
    int64 bad; /* rows that count for nothing */
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

typedef struct Matrix {
    int p, d;
    int64 seed;
    double numbers[FLEXIBLE_ARRAY_MEMBER];
} Matrix;

static Matrix *
make_matrix(int p, int64 seed, int d)
{
    Matrix *m = palloc_extended(offsetof(Matrix, numbers) + sizeof(double) * (Size)p * (Size)d, MCXT_ALLOC_HUGE);

    m->p = p;
    m->d = d;
    m->seed = seed;
    dp_projection(seed, m->numbers, p, d);
    return m;
}

static Matrix *
matrix_among(List *made, int p, int64 seed, int d)
{
    ListCell *cell;

    foreach(cell, made)
    {
        Matrix *m = lfirst(cell);

        if (m->p == p && m->seed == seed && m->d == d)
            return m;
    }
    return NULL;
}

/* The matrix is made anew wherever it is needed: a seed is all that is kept of it. */
void
dp_shape_project(DpShape *shape, int p, int64 seed, int d, List **made)
{
    Matrix *m;

    if (p < 1 || p > d)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"project_dim\" is invalid")));
    m = matrix_among(*made, p, seed, d);
    if (m == NULL) {
        m = make_matrix(p, seed, d);
        *made = lappend(*made, m);
    }
    shape->matrix = m->numbers;
    shape->projected = p;
}

DpCoding
dp_coding(Jsonb *params, List **made)
{
    DpCoding c = {.shape = {.intercept = dp_number(params, "fit_intercept") != 0}};
    int d = (int)dp_number(params, "d");

    c.shape.bound = dp_number(params, "feature_bound");
    c.shape.normalize = dp_number(params, "normalize") != 0;
    c.shape.scale = dp_has(params, "scales") ? scales_of(params, d) : NULL;
    if (dp_has(params, "project_dim"))
        dp_shape_project(&c.shape, (int)dp_number(params, "project_dim"), (int64)dp_number(params, "project_seed"), d,
                         made);
    c.room = palloc_extended(sizeof(double) * (d + (Size)c.shape.projected), MCXT_ALLOC_HUGE);
    c.regression = dp_has(params, "label_bound");
    if (c.regression)
        c.label_bound = dp_number(params, "label_bound");
    else if (dp_has(params, "classes"))
        c.classes = dp_numbers(params, "classes", &c.many);
    else {
        c.negative = dp_number(params, "negative");
        c.other_negative = dp_number(params, "other_negative");
        c.positive = dp_number(params, "positive");
    }
    return c;
}

/* The place of a label among many; labels that count from 0 are their own place. */
static double
class_of(const DpCoding *c, double y)
{
    if (y >= 0 && y < c->many && c->classes[(int)y] == y)
        return y;
    for (int i = 0; i < c->many; i++)
        if (c->classes[i] == y)
            return i;
    return NAN;
}

double
dp_coded_label(const DpCoding *c, double y)
{
    if (c->regression) {
        double cut = fmax(-c->label_bound, fmin(c->label_bound, y));

        return isfinite(y) && isfinite((float)cut) ? cut : NAN;
    }
    if (c->many > 0)
        return class_of(c, y);
    return y == c->positive ? 1.0 : y == c->negative || y == c->other_negative ? -1.0 : NAN;
}

/* Packs a row, label first; one without features (NULL), or with anything that is no number, becomes zeros. */
bool
dp_code_row(const DpCoding *c, double y, const double *x, int d, float *row)
{
    double label = dp_coded_label(c, y);
    bool counts = !isnan(label) && x != NULL && dp_clip_row(x, d, &c->shape, c->room, row + 1);

    if (counts)
        row[0] = (float)label;
    else
        memset(row, 0, sizeof(float) * (dp_shape_width(&c->shape, d) + 1));
    return counts;
}

static bool
pack_row(TupleTableSlot *slot, void *arg)
{
    Packer *p = arg;
    MemoryContext old = MemoryContextSwitchTo(p->per_row);
    double y = slot->tts_isnull[0] ? NAN : dp_to_double(slot->tts_values[0], p->source->label_type);

    bool whole = dp_read_features(p->source, slot, 1, p->x, p->d);

    p->bad += !dp_code_row(&p->coding, y, whole ? p->x : NULL, p->d, p->row);
    MemoryContextSwitchTo(old);
    MemoryContextReset(p->per_row);
    p->visit((char *)p->row, p->arg);
    p->n++;
    return true;
}

/* Values that are no numbers show in none of a raw row's bytes but its NaNs, which are as many as the numbers. */
static bool
raw_row(TupleTableSlot *slot, void *arg)
{
    Packer *p = arg;
    MemoryContext old = MemoryContextSwitchTo(p->per_row);
    /* Features are read of every row, also in vain: what lies out of line is looked up, and lookups can be counted. */
    bool whole = dp_read_features(p->source, slot, 1, p->x, p->d);

    whole = whole && !slot->tts_isnull[0];
    p->raw[0] = whole ? dp_to_double(slot->tts_values[0], p->source->label_type) : NAN;
    for (int j = 0; j < p->d; j++)
        whole = whole && isfinite(p->x[j]);
    for (int j = 0; j < p->d; j++)
        p->raw[j + 1] = p->x[j];
    if (!whole || !isfinite(p->raw[0]))
        for (int j = 0; j <= p->d; j++)
            p->raw[j] = NAN;
    MemoryContextSwitchTo(old);
    MemoryContextReset(p->per_row);
    p->n++;
    p->visit((char *)p->raw, p->arg);
    return true;
}

/* Blocks are aligned for floats only. */
static void
pack_raw_row(const char *row, void *arg)
{
    Packer *p = arg;

    memcpy(p->raw, row, DP_RAW_BYTES(p->d));
    dp_code_row(&p->coding, p->raw[0], p->raw + 1, p->d, p->row);
    p->n++;
    p->visit((char *)p->row, p->arg);
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

static Packer
start_packer(const DpSource *source, int d, DpVisit visit, void *arg)
{
    Packer p = {.source = source, .d = d, .visit = visit, .arg = arg};

    if (!source->is_array && !source->is_portion && dp_source_width(source) != d)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"d\" is not the column count")));
    p.x = palloc0(sizeof(double) * d);
    p.raw = palloc(DP_RAW_BYTES(d));
    p.per_row = AllocSetContextCreate(CurrentMemoryContext, "row", ALLOCSET_DEFAULT_SIZES);
    return p;
}

int64
dp_pack_rows(const DpSource *source, Jsonb *params, DpVisit visit, void *arg)
{
    Packer p = start_packer(source, (int)dp_number(params, "d"), visit, arg);
    List *made = NIL;

    p.coding = dp_coding(params, &made);
    p.row = palloc0(sizeof(float) * (dp_packed_width(params) + 1));
    if (source->is_portion)
        (void)dp_visit_rows(source->relation, DP_RAW_BYTES(p.d), pack_raw_row, &p);
    else
        dp_read_source(source, true, pack_row, &p);
    if (dp_has(params, "tell_bad") && p.bad > 0)
        ereport(NOTICE, (errmsg(INT64_FORMAT " of " INT64_FORMAT " rows count for nothing", p.bad, p.n),
                         errdetail("A feature or the label is missing, is no finite number, or does not fit.")));
    return p.n;
}

int64
dp_raw_rows(const DpSource *source, int d, DpVisit visit, void *arg)
{
    Packer p = start_packer(source, d, visit, arg);

    dp_read_source(source, true, raw_row, &p);
    return p.n;
}

/*
 * What is packed: the source, read with the caller's rights; or, where the controller says so, a portion of it that was
 * put aside in this transaction, which is no table of anybody else's.
 */
DpSource *
dp_pack_source(FunctionCallInfo fcinfo, Jsonb *params)
{
    Oid relation = PG_GETARG_OID(0);
    DpSource *portion;

    if (!dp_has(params, "portion"))
        return dp_source(relation, PG_GETARG_TEXT_PP(1), PG_GETARG_ARRAYTYPE_P(2), params);
    if (get_rel_namespace(relation) != get_namespace_oid("bismarck_dp", false))
        ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg("a portion is a table of schema bismarck_dp")));
    portion = palloc0(sizeof(DpSource));
    portion->relation = relation;
    portion->is_portion = true;
    return portion;
}

int
dp_packed_width(Jsonb *params)
{
    const char *features = dp_has(params, "project_dim") ? "project_dim" : "d";

    return (int)dp_number(params, features) + (dp_number(params, "fit_intercept") != 0);
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
    Jsonb *params = PG_GETARG_JSONB_P(4);
    DpSource *source = dp_pack_source(fcinfo, params);
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
void
dp_empty_table(Oid table)
{
    Relation relation = dp_open_blocks(table, AccessExclusiveLock);

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
        dp_empty_table(sources[i]);
    write_all(shuffle, n, row_bytes, PG_GETARG_ARRAYTYPE_P(1));
    PG_RETURN_INT64(n);
}
