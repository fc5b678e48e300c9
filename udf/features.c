/*
 * features.c: the features of a source's row as numbers.
 *
 * Columns of numbers, or of an array, are taken as they are. A column with categories becomes as many numbers as there
 * are categories in the list that the user gave: a one at the value's place, zeros elsewhere, and zeros everywhere for
 * a value that is not in the list, or is missing. The list never comes from the rows. Words are compared byte by byte,
 * and numbers as numbers: no operator or function of a user's runs here.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"

typedef struct DpCategories {
    int n;
    DpNumberType type; /* of a column of numbers; DP_NOT_A_NUMBER: words */
    bool is_enum, is_padded;
    double *numbers;
    JsonbValue *words;
} DpCategories;

static JsonbContainer *
list_of(Jsonb *params, const char *column)
{
    JsonbValue key = {.type = jbvString}, *found;

    if (params == NULL || !dp_has(params, "categories"))
        return NULL;
    key.val.string.val = "categories";
    key.val.string.len = (int)strlen("categories");
    found = findJsonbValueFromContainer(&params->root, JB_FOBJECT, &key);
    if (found->type != jbvBinary || !JsonContainerIsObject(found->val.binary.data))
        return NULL;
    key.val.string.val = (char *)column;
    key.val.string.len = (int)strlen(column);
    found = findJsonbValueFromContainer(found->val.binary.data, JB_FOBJECT, &key);
    return found == NULL || found->type != jbvBinary ? NULL : found->val.binary.data;
}

static void
read_list(DpCategories *c, JsonbContainer *list, const char *column)
{
    for (int i = 0; i < c->n; i++) {
        JsonbValue *value = getIthJsonbValueFromContainer(list, (uint32)i);

        if (value == NULL || value->type != (c->numbers == NULL ? jbvString : jbvNumeric))
            ereport(ERROR,
                    (errcode(ERRCODE_DATATYPE_MISMATCH),
                     errmsg("column \"%s\" holds %s, and its categories are not all %s", column,
                            c->numbers == NULL ? "words" : "numbers", c->numbers == NULL ? "words" : "numbers")));
        if (c->numbers == NULL)
            c->words[i] = *value;
        else
            c->numbers[i] =
                DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(value->val.numeric)));
    }
}

DpCategories *
dp_categories_of(Jsonb *params, const char *column, Oid type)
{
    JsonbContainer *list = list_of(params, column);
    Oid base = getBaseType(type);
    DpCategories *c;

    if (list == NULL)
        return NULL;
    c = palloc0(sizeof(DpCategories));
    c->n = (int)JsonContainerSize(list);
    c->type = dp_number_type(type);
    c->is_enum = type_is_enum(base);
    c->is_padded = base == BPCHAROID;
    if (c->type == DP_NOT_A_NUMBER && !c->is_enum && base != TEXTOID && base != VARCHAROID && base != BPCHAROID)
        ereport(ERROR, (errcode(ERRCODE_DATATYPE_MISMATCH),
                        errmsg("column \"%s\" has type %s, which cannot have categories", column, format_type_be(type)),
                        errhint("Use a column of text, an enum, numbers or booleans.")));
    if (c->type == DP_NOT_A_NUMBER)
        c->words = palloc(sizeof(JsonbValue) * c->n);
    else
        c->numbers = palloc(sizeof(double) * c->n);
    read_list(c, list, column);
    return c;
}

static int
place_of_number(const DpCategories *c, double value)
{
    for (int i = 0; i < c->n; i++)
        if (c->numbers[i] == value)
            return i;
    return -1;
}

static int
place_of_word(const DpCategories *c, const char *word, int length)
{
    for (int i = 0; i < c->n; i++)
        if (c->words[i].val.string.len == length && memcmp(c->words[i].val.string.val, word, length) == 0)
            return i;
    return -1;
}

static int
place_of(const DpCategories *c, Datum value)
{
    text *word;
    int length;

    if (c->numbers != NULL)
        return place_of_number(c, dp_to_double(value, c->type));
    if (c->is_enum) {
        char *label = DatumGetCString(DirectFunctionCall1(enum_out, value));

        return place_of_word(c, label, (int)strlen(label));
    }
    word = DatumGetTextPP(value);
    length = (int)VARSIZE_ANY_EXHDR(word);
    return place_of_word(c, VARDATA_ANY(word), c->is_padded ? bpchartruelen(VARDATA_ANY(word), length) : length);
}

int
dp_source_width(const DpSource *source)
{
    int width = 0;

    for (int i = 0; i < list_length(source->features); i++)
        width += source->categories[i] == NULL ? 1 : source->categories[i]->n;
    return width;
}

static bool
copy_elements(const DpSource *source, ArrayType *array, double *x)
{
    int16 length;
    bool by_value, complete = true;
    char align;
    Datum *values;
    bool *nulls;
    int n;

    get_typlenbyvalalign(ARR_ELEMTYPE(array), &length, &by_value, &align);
    deconstruct_array(array, ARR_ELEMTYPE(array), length, by_value, align, &values, &nulls, &n);
    for (int j = 0; j < n; j++) {
        x[j] = nulls[j] ? NAN : dp_to_double(values[j], source->types[0]);
        complete &= !nulls[j];
    }
    return complete;
}

static bool
features_of_array(const DpSource *source, Datum datum, double *x, int d)
{
    ArrayType *array = DatumGetArrayTypeP(datum);

    if (ARR_NDIM(array) != 1 || ARR_DIMS(array)[0] != d)
        return false;
    if (source->types[0] == DP_FLOAT8 && !ARR_HASNULL(array))
        memcpy(x, ARR_DATA_PTR(array), sizeof(double) * d);
    else if (source->types[0] == DP_FLOAT4 && !ARR_HASNULL(array))
        for (int j = 0; j < d; j++)
            x[j] = ((float *)ARR_DATA_PTR(array))[j];
    else
        return copy_elements(source, array, x);
    return true;
}

static double *
write_category(const DpCategories *c, Datum value, bool isnull, double *x)
{
    int place = isnull ? -1 : place_of(c, value);

    for (int i = 0; i < c->n; i++)
        *x++ = i == place ? 1.0 : 0.0;
    return x;
}

static bool
features_of_columns(const DpSource *source, const Datum *values, const bool *nulls, double *x)
{
    bool complete = true;

    for (int i = 0; i < list_length(source->features); i++) {
        if (source->categories[i] != NULL)
            x = write_category(source->categories[i], values[i], nulls[i], x);
        else {
            *x++ = nulls[i] ? NAN : dp_to_double(values[i], source->types[i]);
            complete &= !nulls[i];
        }
    }
    return complete;
}

bool
dp_features_of(const DpSource *source, const Datum *values, const bool *nulls, double *x, int d)
{
    if (source->is_array)
        return !nulls[0] && features_of_array(source, values[0], x, d);
    return features_of_columns(source, values, nulls, x);
}

bool
dp_read_features(const DpSource *source, TupleTableSlot *slot, int at, double *x, int d)
{
    return dp_features_of(source, slot->tts_values + at, slot->tts_isnull + at, x, d);
}
