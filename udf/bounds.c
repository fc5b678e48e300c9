/*
 * bounds.c: a bound for each feature, chosen privately among powers of two. bismarck_dp/scaling.py has the claim.
 *
 * One pass counts, for each feature and each candidate, the rows whose magnitude is at most that candidate; the counts
 * stay here. A candidate's score is minus how far its count is from the wanted rank, and the exponential mechanism
 * chooses among them exactly. Features that come of categories are zeros and ones: their bound is 1, and costs nothing.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "utils/builtins.h"
#include "utils/memutils.h"

PG_FUNCTION_INFO_V1(dp_bounds);

typedef struct Counts {
    const DpSource *source;
    int d;
    int first, candidates; /* 2^first, and how many powers from there on */
    double *x;
    int64 *counts; /* for each feature, of rows by their smallest candidate; the last is for those beyond all */
    MemoryContext per_row;
} Counts;

/* The smallest candidate that is no less than |x|: its place. */
static int
place_of(const Counts *c, double x)
{
    int exponent;
    double fraction = frexp(fabs(x), &exponent);
    int place = exponent - (fraction == 0.5) - c->first;

    return x == 0.0 || place < 0 ? 0 : Min(place, c->candidates);
}

/* A row that is not all numbers counts for nothing, as in training. */
static bool
all_finite(const double *x, int d)
{
    for (int j = 0; j < d; j++)
        if (!isfinite(x[j]))
            return false;
    return true;
}

static void
count_features(Counts *c)
{
    if (all_finite(c->x, c->d))
        for (int j = 0; j < c->d; j++)
            c->counts[(Size)j * (c->candidates + 1) + place_of(c, c->x[j])]++;
}

/* A raw row that split has put aside: its label, and d features. */
static void
count_raw_row(const char *row, void *arg)
{
    Counts *c = arg;

    memcpy(c->x, row + sizeof(double), sizeof(double) * c->d);
    count_features(c);
}

static bool
count_row(TupleTableSlot *slot, void *arg)
{
    Counts *c = arg;
    MemoryContext old = MemoryContextSwitchTo(c->per_row);

    if (dp_read_features(c->source, slot, 0, c->x, c->d))
        count_features(c);
    MemoryContextSwitchTo(old);
    MemoryContextReset(c->per_row);
    return true;
}

/*
 * The best, or, privately, the i-th with probability proportional to exp((score numerator - i prior) / denominator).
 * Scores are at most n apart: the plan keeps the products below 2^62.
 */
static int
choose(DpRandom *random, int64 *score, int n, Jsonb *params)
{
    int best = 0;

    if (dp_number(params, "private") != 0) {
        int64 numerator = (int64)dp_number(params, "numerator"), prior = (int64)dp_number(params, "prior");

        for (int i = 0; i < n; i++)
            score[i] = score[i] * numerator - i * prior;
        return dp_exponential_choice(random, score, n, 1, (uint64_t)dp_number(params, "denominator"));
    }
    for (int i = 1; i < n; i++)
        if (score[i] > score[best])
            best = i;
    return best;
}

static double
bound_of(const Counts *c, int j, int64 rank, DpRandom *random, Jsonb *params)
{
    int64 *score = palloc(sizeof(int64) * c->candidates), below = 0;
    int chosen;

    for (int i = 0; i < c->candidates; i++) {
        below += c->counts[(Size)j * (c->candidates + 1) + i];
        score[i] = -llabs(below - rank);
    }
    chosen = choose(random, score, c->candidates, params);
    pfree(score);
    return ldexp(1.0, c->first + chosen);
}

static void
start_counts(Counts *c, Jsonb *params)
{
    c->first = (int)dp_number(params, "first");
    c->candidates = (int)dp_number(params, "last") - c->first + 1;
    if (c->candidates < 1 || c->candidates > 2000 ||
        (!c->source->is_array && !c->source->is_portion && dp_source_width(c->source) != c->d))
        ereport(ERROR,
                (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("the features' bounds cannot be measured so")));
    c->x = palloc_extended(sizeof(double) * c->d, MCXT_ALLOC_HUGE);
    c->counts = palloc_extended(sizeof(int64) * c->d * (c->candidates + 1), MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
    c->per_row = AllocSetContextCreate(CurrentMemoryContext, "row", ALLOCSET_DEFAULT_SIZES);
}

/* bounds(source, label, features, params): a power of two for each feature; `coded` are those that come of categories.
 */
Datum
dp_bounds(PG_FUNCTION_ARGS)
{
    Jsonb *params = PG_GETARG_JSONB_P(3);
    DpSource *source = dp_pack_source(fcinfo, params);
    Counts c = {.source = source, .d = (int)dp_number(params, "d")};
    double *bounds = palloc_extended(sizeof(double) * c.d, MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
    DpRandom *random = dp_secret_alloc(CurrentMemoryContext, sizeof(DpRandom));
    int n;
    double *coded = dp_numbers(params, "coded", &n);

    start_counts(&c, params);
    dp_random_from(random, params, DP_STREAM_BOUNDS);
    for (int i = 0; i < n; i++)
        if (coded[i] >= 0 && coded[i] < c.d)
            bounds[(int)coded[i]] = 1.0;
    if (source->is_portion)
        (void)dp_visit_rows(source->relation, DP_RAW_BYTES(c.d), count_raw_row, &c);
    else
        dp_read_source(source, false, count_row, &c);
    for (int j = 0; j < c.d; j++)
        if (bounds[j] == 0.0)
            bounds[j] = bound_of(&c, j, (int64)dp_number(params, "rank"), random, params);
    PG_RETURN_ARRAYTYPE_P(dp_float8_array(bounds, c.d));
}
