/*
 * shuffle.c: a uniform permutation without a sort.
 *
 * Rows are kept in memory while they fit, and permuted by Fisher and Yates. When they do not, each row goes to a bucket
 * drawn uniformly (a temporary file), and each bucket is permuted by itself, by the same means: concatenated, the
 * buckets are a uniform permutation of all rows (Rao 1961, Sandelius 1962). Every row is written once per level, and
 * memory stays bounded however many rows come. Temporary files vanish with the transaction, and count towards
 * temp_file_limit.
 */
#include "shuffle.h"

#include "rows.h"

#include "miscadmin.h"
#include "storage/buffile.h"
#include "utils/memutils.h"

#define CHUNK_BYTES ((Size)1024 * 1024)
#define MAX_BUCKETS 512

struct DpShuffle {
    MemoryContext context;
    Size memory;
    int64 expected_rows;
    DpRandom *random;

    DpRows rows; /* those in memory */

    int buckets; /* 0 while everything fits */
    BufFile **files;
    int64 *file_rows;
};

DpShuffle *
dp_shuffle_start(Size row_bytes, Size memory, int64 expected_rows, DpRandom *random)
{
    MemoryContext context = AllocSetContextCreate(CurrentMemoryContext, "shuffle", ALLOCSET_DEFAULT_SIZES);
    DpShuffle *s = MemoryContextAllocZero(context, sizeof(DpShuffle));

    s->context = context;
    s->memory = memory;
    s->expected_rows = expected_rows;
    s->random = random;
    dp_rows_start(&s->rows, context, row_bytes, Min(CHUNK_BYTES, memory / 8));
    return s;
}

/* One row more, its place in the order included, would not fit. */
static bool
is_full(const DpShuffle *s)
{
    return s->rows.n > 0 && (Size)(s->rows.n + 1) * (s->rows.row_bytes + sizeof(uint32)) > s->memory;
}

static void
to_bucket(DpShuffle *s, const char *row)
{
    int bucket = (int)dp_random_below(s->random, s->buckets);

    BufFileWrite(s->files[bucket], (void *)row, s->rows.row_bytes);
    s->file_rows[bucket]++;
}

/* Enough buckets that each is expected to fill half the memory; not more than the memory has buffers for. */
int
dp_bucket_count(double bytes, Size memory)
{
    int64 wanted = (int64)Min(bytes * 2.0 / (double)memory + 1.0, (double)MAX_BUCKETS);
    int64 affordable = (int64)(memory / (2 * BLCKSZ));

    return (int)Max(2, Min(wanted, affordable));
}

static void
open_buckets(DpShuffle *s)
{
    MemoryContext old = MemoryContextSwitchTo(s->context);

    s->buckets = dp_bucket_count(
        (double)Max(s->expected_rows, 2 * s->rows.n) * (double)(s->rows.row_bytes + sizeof(uint32)), s->memory);
    s->files = palloc(sizeof(BufFile *) * s->buckets);
    s->file_rows = palloc0(sizeof(int64) * s->buckets);
    for (int i = 0; i < s->buckets; i++)
        s->files[i] = BufFileCreateTemp(false);
    MemoryContextSwitchTo(old);
}

static void
spill(DpShuffle *s)
{
    open_buckets(s);
    for (int64 i = 0; i < s->rows.n; i++) {
        to_bucket(s, dp_row_at(&s->rows, i));
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    dp_rows_clear(&s->rows);
}

void
dp_shuffle_add(DpShuffle *s, const char *row)
{
    if (s->buckets == 0 && is_full(s))
        spill(s);
    if (s->buckets > 0)
        to_bucket(s, row);
    else
        dp_rows_add(&s->rows, row);
}

static uint32 *
random_order(DpShuffle *s)
{
    uint32 *order = MemoryContextAllocHuge(s->context, sizeof(uint32) * Max(s->rows.n, 1));

    for (int64 i = 0; i < s->rows.n; i++)
        order[i] = (uint32)i;
    for (int64 i = s->rows.n - 1; i > 0; i--) {
        int64 j = (int64)dp_random_below(s->random, i + 1);
        uint32 swap = order[i];

        order[i] = order[j];
        order[j] = swap;
        if (i % 65536 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    return order;
}

static void
emit_memory(DpShuffle *s, DpEmit emit, void *arg)
{
    uint32 *order = random_order(s);

    for (int64 i = 0; i < s->rows.n; i++) {
        if (i + DP_PREFETCH < s->rows.n)
            dp_row_prefetch(&s->rows, order[i + DP_PREFETCH]);
        emit(dp_row_at(&s->rows, order[i]), arg);
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
}

void
dp_read_back(BufFile *file, void *room, Size bytes)
{
    if (BufFileRead(file, room, bytes) != bytes)
        ereport(ERROR, (errcode_for_file_access(), errmsg("could not read back a temporary file")));
}

void
dp_rewind(BufFile *file)
{
    if (BufFileSeek(file, 0, 0L, SEEK_SET) != 0)
        ereport(ERROR, (errcode_for_file_access(), errmsg("could not rewind a temporary file")));
}

/* A bucket is a smaller shuffle; a file is closed as soon as it is read, so disk use falls as the result grows. */
static void
emit_bucket(DpShuffle *s, int bucket, DpEmit emit, void *arg)
{
    DpShuffle *inner = dp_shuffle_start(s->rows.row_bytes, s->memory, s->file_rows[bucket], s->random);
    char *row = palloc(s->rows.row_bytes);

    dp_rewind(s->files[bucket]);
    for (int64 i = 0; i < s->file_rows[bucket]; i++) {
        dp_read_back(s->files[bucket], row, s->rows.row_bytes);
        dp_shuffle_add(inner, row);
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    BufFileClose(s->files[bucket]);
    pfree(row);
    dp_shuffle_emit(inner, emit, arg);
}

void
dp_shuffle_emit(DpShuffle *s, DpEmit emit, void *arg)
{
    if (s->buckets == 0)
        emit_memory(s, emit, arg);
    else
        for (int i = 0; i < s->buckets; i++)
            emit_bucket(s, i, emit, arg);
    MemoryContextDelete(s->context);
}
