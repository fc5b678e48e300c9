/*
 * encode.c: dp_encode, the features of a row of any table, as the model was trained on them.
 *
 * Columns are found by name and read by type, as in training (features.c). What was found is kept with the call site,
 * for rows of the same type and a model that was not replaced.
 */
#include "model.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/typcache.h"

PG_FUNCTION_INFO_V1(dp_encode);

typedef struct Encoder {
    MemoryContext context;
    uint64 type; /* of the row, as it was defined then */
    Oid relation;
    ItemPointerData place;
    TransactionId maker; /* of the model's row */
    DpSource *source;
    int *columns; /* of the features, from 0 */
    int natts;
    Datum *values, *taken;
    bool *nulls, *taken_nulls;
    double *x;
} Encoder;

static int
column_named(TupleDesc desc, const char *name)
{
    for (int i = 0; i < desc->natts; i++) {
        Form_pg_attribute attribute = TupleDescAttr(desc, i);

        if (!attribute->attisdropped && strcmp(NameStr(attribute->attname), name) == 0)
            return i;
    }
    ereport(ERROR, (errcode(ERRCODE_UNDEFINED_COLUMN), errmsg("the row has no column \"%s\"", name),
                    errhint("The model's column \"features\" names the columns it was trained on.")));
    return -1;
}

static void
find_columns(Encoder *e, TupleDesc desc)
{
    int n = list_length(e->source->features);

    e->columns = palloc(sizeof(int) * n);
    e->source->oids = palloc(sizeof(Oid) * n);
    for (int i = 0; i < n; i++) {
        e->columns[i] = column_named(desc, list_nth(e->source->features, i));
        e->source->oids[i] = TupleDescAttr(desc, e->columns[i])->atttypid;
    }
    e->taken = palloc(sizeof(Datum) * n);
    e->taken_nulls = palloc(sizeof(bool) * n);
    e->natts = desc->natts;
    e->values = palloc(sizeof(Datum) * e->natts);
    e->nulls = palloc(sizeof(bool) * e->natts);
}

/* The lists of categories are copied: the model may go before the call site does. */
static void
fill_encoder(Encoder *e, const DpModel *m, TupleDesc desc)
{
    MemoryContext old = MemoryContextSwitchTo(e->context);
    Jsonb *coding = m->coding == NULL ? NULL : DatumGetJsonbPCopy(PointerGetDatum(m->coding));

    e->relation = m->relation;
    e->place = m->place;
    e->maker = m->maker;
    e->source = palloc0(sizeof(DpSource));
    e->source->features = dp_names_of(m->features);
    find_columns(e, desc);
    dp_resolve_features(e->source, coding);
    if (!e->source->is_array && dp_source_width(e->source) != m->d)
        ereport(ERROR, (errcode(ERRCODE_DATATYPE_MISMATCH),
                        errmsg("model \"%s\" has %d features, not %d", m->name, m->d, dp_source_width(e->source))));
    e->x = palloc_extended(sizeof(double) * m->d, MCXT_ALLOC_HUGE);
    MemoryContextSwitchTo(old);
}

static Encoder *
encoder_of_call(FunctionCallInfo fcinfo, DpModel *m, uint64 type, TupleDesc desc)
{
    Encoder *e = fcinfo->flinfo->fn_extra;
    MemoryContext context;

    if (e != NULL && e->type == type && e->relation == m->relation && ItemPointerEquals(&e->place, &m->place) &&
        e->maker == m->maker)
        return e;
    fcinfo->flinfo->fn_extra = NULL;
    if (e != NULL)
        MemoryContextDelete(e->context);
    context = AllocSetContextCreate(fcinfo->flinfo->fn_mcxt, "bismarck_dp encoder", ALLOCSET_SMALL_SIZES);
    e = MemoryContextAllocZero(context, sizeof(Encoder));
    e->context = context;
    e->type = type;
    fill_encoder(e, m, desc);
    return fcinfo->flinfo->fn_extra = e;
}

static bool
is_of_length(const Encoder *e, const DpModel *m)
{
    ArrayType *array = e->taken_nulls[0] ? NULL : DatumGetArrayTypeP(e->taken[0]);

    if (array == NULL)
        return false;
    if (ARR_NDIM(array) > 1)
        ereport(ERROR, (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR), errmsg("features must be one list, not a matrix")));
    if (ARR_NDIM(array) == 0 || ARR_DIMS(array)[0] != m->d)
        ereport(ERROR,
                (errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR), errmsg("model \"%s\" has %d features, not %d", m->name, m->d,
                                                                ARR_NDIM(array) == 0 ? 0 : ARR_DIMS(array)[0])));
    e->taken[0] = PointerGetDatum(array);
    return true;
}

/* dp_encode(model, row): a missing number is NaN; no features at all if the column that has them all is NULL. */
Datum
dp_encode(PG_FUNCTION_ARGS)
{
    HeapTupleHeader row = PG_GETARG_HEAPTUPLEHEADER(1);
    Oid type = HeapTupleHeaderGetTypeId(row);
    int32 mod = HeapTupleHeaderGetTypMod(row);
    TupleDesc desc = lookup_rowtype_tupdesc(type, mod);
    DpModel *m = dp_model_kept(PG_GETARG_TEXT_PP(0), fcinfo->flinfo->fn_oid);
    Encoder *e = encoder_of_call(fcinfo, m, assign_record_type_identifier(type, mod), desc);
    HeapTupleData tuple = {.t_len = HeapTupleHeaderGetDatumLength(row), .t_data = row};

    heap_deform_tuple(&tuple, desc, e->values, e->nulls);
    ReleaseTupleDesc(desc);
    for (int i = 0; i < list_length(e->source->features); i++) {
        e->taken[i] = e->values[e->columns[i]];
        e->taken_nulls[i] = e->nulls[e->columns[i]];
    }
    if (e->source->is_array && !is_of_length(e, m))
        PG_RETURN_NULL();
    (void)dp_features_of(e->source, e->taken, e->taken_nulls, e->x, m->d);
    PG_RETURN_ARRAYTYPE_P(dp_float8_array(e->x, m->d));
}
