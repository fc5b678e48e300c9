/*
 * source.c: the table or view with one row per example: which columns it has, what their values are as numbers, and how
 * many rows there are. read.c reads them.
 *
 * Values become doubles here, in C, without an error whatever they are: what is too large becomes infinite, and the
 * caller of this file treats infinite like NULL.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "access/htup_details.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"

PG_FUNCTION_INFO_V1(dp_number_kind);
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

/* number_kind(type): number, array of numbers, or NULL. */
Datum
dp_number_kind(PG_FUNCTION_ARGS)
{
    Oid type = PG_GETARG_OID(0), element = get_element_type(getBaseType(type));

    if (dp_number_type(type) != DP_NOT_A_NUMBER)
        PG_RETURN_DATUM(CStringGetTextDatum("number"));
    if (OidIsValid(element) && dp_number_type(element) != DP_NOT_A_NUMBER)
        PG_RETURN_DATUM(CStringGetTextDatum("array"));
    PG_RETURN_NULL();
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
    /* Names may be repeated; descriptors of rows count columns in 16 bits. */
    if (n > MaxHeapAttributeNumber)
        ereport(ERROR, (errcode(ERRCODE_TOO_MANY_COLUMNS), errmsg("%d feature columns are named", n),
                        errhint("Name at most %d, or one array column.", MaxHeapAttributeNumber)));
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

/* hold_source(source): what is there now stays, and nobody else holds it so. */
Datum
dp_hold_source(PG_FUNCTION_ARGS)
{
    LockRelationOid(PG_GETARG_OID(0), ShareUpdateExclusiveLock);
    if (get_rel_relkind(PG_GETARG_OID(0)) == '\0')
        ereport(ERROR, (errcode(ERRCODE_UNDEFINED_TABLE), errmsg("the table does not exist")));
    PG_RETURN_VOID();
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
        shape.rows = dp_count_slots(source, shape.labels, measure, &shape);
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
