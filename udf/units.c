/*
 * units.c: of each unit of a source (a person, say) so many rows at most, chosen at random.
 *
 * What is wanted: a source with U units is read as exactly c U slots, whatever its rows are. A unit's rows are chosen
 * uniformly, c of them or all if there are fewer, and independently of other units' (reservoir sampling: Vitter 1985,
 * algorithm R; bounded numbers are drawn without bias). bismarck_dp/units.py has the claim.
 *
 * How: a first pass over the source knows a row by its number, and adds the number to the unit's choice; a second pass
 * asks whether row and unit are a chosen pair. So a unit never has more than c rows, even if a view gives rows in
 * another order the second time: a row that was not chosen under its own unit stays out. Rows without a unit are one
 * unit all together.
 *
 * The bytes of a value decide which unit it is, never an operator of anybody's. Numbers, dates and UUIDs are their own
 * key. A text is told by two polynomials modulo the prime p = 2^61 - 1, at secret random points: coefficients are its
 * length and 7 bytes each. Two texts of at most 7 m bytes are different polynomials of degree m + 1 at most, and agree
 * at both points with a probability of at most ((m + 1) / p)^2, whatever the texts, for they do not depend on the
 * points. For a million texts of 70 bytes, that two of all share a key has a probability below 2^-76.
 */
#include "bismarck_dp.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/uuid.h"

#define PRIME (((uint64)1 << 61) - 1)
#define CHUNK 7 /* bytes, whose number is below the prime */
#define FIRST 1024

typedef struct Key {
    uint64 low, high;
} Key;

typedef struct Unit {
    Key key;
    int64 seen;  /* rows; 0: a free place */
    int64 place; /* of its choice, among those of all units */
} Unit;

typedef struct DpUnits {
    Oid type;
    int most;       /* rows of a unit; 0: units are counted only */
    int slots;      /* the same, and not 0 */
    Unit *table;    /* places are tried one after the other */
    int64 capacity; /* a power of two, more than there are units */
    int64 count;    /* units in all, the one without a name among them */
    Unit nameless;
    int64 *chosen; /* `most` row numbers for each unit */
    int64 room;    /* units that they are for */
    uint64 points[3];
    DpRandom *random;
    MemoryContext context;
} DpUnits;

/* ---- which unit ---- */

static void
check_type(const char *column, Oid type)
{
    switch (getBaseType(type)) {
    case INT2OID:
    case INT4OID:
    case INT8OID:
    case DATEOID:
    case UUIDOID:
    case TEXTOID:
    case VARCHAROID:
        return;
    default:
        ereport(ERROR,
                (errcode(ERRCODE_DATATYPE_MISMATCH),
                 errmsg("column \"%s\" has type %s, which cannot be a privacy unit", column, format_type_be(type)),
                 errhint("Use a whole number, text, varchar, uuid or date: cast it to bigint or text, in a view or, of "
                         "a table that is protected, for good.")));
    }
}

DpUnit *
dp_unit_of(Oid relation, Jsonb *params)
{
    Jsonb *given;
    DpUnit *unit;

    if (!dp_has(params, "unit"))
        return NULL;
    given = dp_object(params, "unit");
    unit = palloc0(sizeof(DpUnit));
    unit->column = dp_word(given, "column");
    unit->oid = dp_column_type(relation, unit->column);
    unit->params = params;
    check_type(unit->column, unit->oid);
    if (!(dp_number(given, "rows") >= 1 && dp_number(given, "rows") <= 1e6))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"rows\" is invalid")));
    unit->rows = (int)dp_number(given, "rows");
    return unit;
}

/* One more coefficient of a polynomial. */
static uint64
step(uint64 sum, uint64 coefficient, uint64 point)
{
    unsigned __int128 product = (unsigned __int128)((sum + coefficient) % PRIME) * point;
    uint64 folded = (uint64)(product & PRIME) + (uint64)(product >> 61);

    return folded >= PRIME ? folded - PRIME : folded;
}

static uint64
polynomial(const char *bytes, size_t length, uint64 point)
{
    uint64 sum = step(0, length, point);

    for (size_t at = 0; at < length; at += CHUNK) {
        uint64 chunk = 0;

        memcpy(&chunk, bytes + at, Min(CHUNK, length - at));
        sum = step(sum, chunk, point);
    }
    return sum;
}

static Key
key_of_text(const DpUnits *units, Datum value)
{
    text *word = DatumGetTextPP(value);
    size_t length = VARSIZE_ANY_EXHDR(word);
    Key key = {polynomial(VARDATA_ANY(word), length, units->points[0]),
               polynomial(VARDATA_ANY(word), length, units->points[1])};

    if ((Pointer)word != DatumGetPointer(value))
        pfree(word);
    return key;
}

static Key
key_of(const DpUnits *units, Datum value)
{
    Key key = {0};

    switch (units->type) {
    case INT2OID:
        key.low = (uint64)DatumGetInt16(value);
        return key;
    case INT4OID:
        key.low = (uint64)DatumGetInt32(value);
        return key;
    case INT8OID:
        key.low = (uint64)DatumGetInt64(value);
        return key;
    case DATEOID:
        key.low = (uint64)DatumGetDateADT(value);
        return key;
    case UUIDOID:
        memcpy(&key, DatumGetUUIDP(value)->data, UUID_LEN);
        return key;
    default:
        return key_of_text(units, value);
    }
}

/* ---- the table of units ---- */

static Unit *
place_in(const DpUnits *units, Unit *table, int64 capacity, Key key)
{
    uint64 at = step(step(0, key.low % PRIME, units->points[2]), key.high % PRIME, units->points[2]);

    for (;; at++) {
        Unit *unit = &table[at & (uint64)(capacity - 1)];

        if (unit->seen == 0 || (unit->key.low == key.low && unit->key.high == key.high))
            return unit;
    }
}

static Unit *
unit_of(DpUnits *units, Datum value, bool isnull)
{
    Unit *unit;
    Key key;

    if (isnull)
        return &units->nameless;
    key = key_of(units, value);
    unit = place_in(units, units->table, units->capacity, key);
    unit->key = key;
    return unit;
}

/* Before more of it is taken. */
static void
check_memory(const DpUnits *units, Size bytes)
{
    if (bytes > dp_allowed_memory())
        ereport(ERROR, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
                        errmsg("a choice of rows for so many units takes %zu MB, and maintenance_work_mem is %zu MB",
                               bytes / (1024 * 1024) + 1, dp_allowed_memory() / (1024 * 1024)),
                        errhint("Raise maintenance_work_mem%s.", units->most > 1 ? ", or use fewer unit_rows" : "")));
}

static Size
table_bytes(int64 capacity)
{
    return sizeof(Unit) * (Size)capacity;
}

static Size
chosen_bytes(const DpUnits *units, int64 room)
{
    return sizeof(int64) * (Size)units->most * (Size)room;
}

static void *
take(DpUnits *units, Size bytes)
{
    return MemoryContextAllocExtended(units->context, bytes, MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
}

static void
grow_table(DpUnits *units)
{
    int64 capacity = 2 * units->capacity;
    Unit *table;

    check_memory(units, table_bytes(units->capacity) + table_bytes(capacity) + chosen_bytes(units, units->room));
    table = take(units, table_bytes(capacity));
    for (int64 i = 0; i < units->capacity; i++) {
        CHECK_FOR_INTERRUPTS();
        if (units->table[i].seen > 0)
            *place_in(units, table, capacity, units->table[i].key) = units->table[i];
    }
    pfree(units->table);
    units->table = table;
    units->capacity = capacity;
}

static void
grow_chosen(DpUnits *units)
{
    int64 room = 2 * units->room;
    Size bytes = chosen_bytes(units, room);

    check_memory(units, table_bytes(units->capacity) + chosen_bytes(units, units->room) + bytes);
    units->chosen = repalloc_huge(units->chosen, bytes);
    units->room = room;
}

DpUnits *
dp_units_start(const DpUnit *unit, int rows)
{
    DpUnits *units = palloc0(sizeof(DpUnits));

    units->type = getBaseType(unit->oid);
    units->most = rows;
    units->slots = unit->rows;
    units->context = AllocSetContextCreate(CurrentMemoryContext, "units", ALLOCSET_DEFAULT_SIZES);
    units->random = dp_secret_alloc(units->context, sizeof(DpRandom));
    dp_random_from(units->random, unit->params, DP_STREAM_UNITS);
    for (int i = 0; i < lengthof(units->points); i++)
        units->points[i] = dp_random_below(units->random, PRIME);
    units->capacity = FIRST;
    units->room = Max(1, FIRST / Max(1, rows));
    check_memory(units, table_bytes(units->capacity) + chosen_bytes(units, units->room));
    units->table = take(units, table_bytes(units->capacity));
    if (rows > 0)
        units->chosen = take(units, chosen_bytes(units, units->room));
    return units;
}

void
dp_units_end(DpUnits *units)
{
    MemoryContextDelete(units->context);
    pfree(units);
}

/* ---- choosing ---- */

static int64 *
choice_of(const DpUnits *units, const Unit *unit)
{
    return units->chosen + unit->place * units->most;
}

static Unit *
add_unit(DpUnits *units, Datum value, bool isnull)
{
    Unit *unit;

    /* The unit without a name counts, too: how much memory is taken must not depend on when it comes. */
    if (4 * units->count >= 3 * units->capacity)
        grow_table(units);
    if (units->most > 0 && units->count == units->room)
        grow_chosen(units);
    unit = unit_of(units, value, isnull);
    unit->place = units->count++;
    return unit;
}

/* How many rows of its unit came before. The k-th takes the place of each one chosen before with probability 1 / k. */
int64
dp_units_add(DpUnits *units, Datum value, bool isnull, int64 row)
{
    Unit *unit = unit_of(units, value, isnull);
    int64 at, before;

    if (unit->seen == 0)
        unit = add_unit(units, value, isnull);
    at = before = unit->seen++;
    if (at >= units->most && units->most > 0)
        at = (int64)dp_random_below(units->random, (uint64)unit->seen);
    if (at < units->most)
        choice_of(units, unit)[at] = row;
    return before;
}

static int
compare_rows(const void *a, const void *b)
{
    int64 first = *(const int64 *)a, second = *(const int64 *)b;

    return first < second ? -1 : first > second;
}

static void
sort_choice(DpUnits *units, Unit *unit)
{
    if (unit->seen > 0)
        qsort(choice_of(units, unit), (size_t)Min(unit->seen, units->most), sizeof(int64), compare_rows);
}

int64
dp_units_choose(DpUnits *units)
{
    for (int64 i = 0; i < units->capacity && units->most > 1; i++) {
        CHECK_FOR_INTERRUPTS();
        sort_choice(units, &units->table[i]);
    }
    if (units->most > 1)
        sort_choice(units, &units->nameless);
    return units->count * units->slots;
}

bool
dp_units_chosen(DpUnits *units, Datum value, bool isnull, int64 row)
{
    Unit *unit = unit_of(units, value, isnull);

    return unit->seen > 0 && bsearch(&row, choice_of(units, unit), (size_t)Min(unit->seen, units->most), sizeof(int64),
                                     compare_rows) != NULL;
}
