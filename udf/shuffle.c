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

#include "miscadmin.h"
#include "storage/buffile.h"
#include "utils/memutils.h"

#define CHUNK_BYTES ((Size)1024 * 1024)
#define PREFETCH 8
#define MAX_BUCKETS 512

struct DpShuffle {
    MemoryContext context;
    Size row_bytes;
    Size memory;
    int64 expected_rows;
    DpRandom *random;

    int64 n; /* rows added */
    char **chunks;
    int64 chunk_count, chunk_room;
    int64 rows_per_chunk;

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
    s->row_bytes = row_bytes;
    s->memory = memory;
    s->expected_rows = expected_rows;
    s->random = random;
    s->rows_per_chunk = Max(1, (int64)(Min(CHUNK_BYTES, memory / 8) / row_bytes));
    s->chunk_room = 64;
    s->chunks = MemoryContextAlloc(context, sizeof(char *) * s->chunk_room);
    return s;
}

static char *
row_at(const DpShuffle *s, int64 i)
{
    return s->chunks[i / s->rows_per_chunk] + (i % s->rows_per_chunk) * s->row_bytes;
}

static void
add_chunk(DpShuffle *s)
{
    if (s->chunk_count == s->chunk_room) {
        s->chunk_room *= 2;
        s->chunks = repalloc_huge(s->chunks, sizeof(char *) * s->chunk_room);
    }
    s->chunks[s->chunk_count++] = MemoryContextAllocHuge(s->context, s->rows_per_chunk * s->row_bytes);
}

/* One row more, its place in the order included, would not fit. */
static bool
is_full(const DpShuffle *s)
{
    return s->n > 0 && (Size)(s->n + 1) * (s->row_bytes + sizeof(uint32)) > s->memory;
}

static void
to_bucket(DpShuffle *s, const char *row)
{
    int bucket = (int)dp_random_below(s->random, s->buckets);

    BufFileWrite(s->files[bucket], (void *)row, s->row_bytes);
    s->file_rows[bucket]++;
}

/* Enough buckets that each is expected to fill half the memory; not more than the memory has buffers for. */
static int
bucket_count(const DpShuffle *s)
{
    int64 rows = Max(s->expected_rows, 2 * s->n);
    int64 wanted = (int64)((double)rows * (double)(s->row_bytes + sizeof(uint32)) * 2.0 / (double)s->memory) + 1;
    int64 affordable = (int64)(s->memory / (2 * BLCKSZ));

    return (int)Max(2, Min(Min(wanted, affordable), MAX_BUCKETS));
}

static void
open_buckets(DpShuffle *s)
{
    MemoryContext old = MemoryContextSwitchTo(s->context);

    s->buckets = bucket_count(s);
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
    for (int64 i = 0; i < s->n; i++) {
        to_bucket(s, row_at(s, i));
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
    for (int64 i = 0; i < s->chunk_count; i++)
        pfree(s->chunks[i]);
    s->chunk_count = 0;
}

void
dp_shuffle_add(DpShuffle *s, const char *row)
{
    if (s->buckets == 0 && is_full(s))
        spill(s);
    if (s->buckets > 0)
        to_bucket(s, row);
    else {
        if (s->n == s->chunk_count * s->rows_per_chunk)
            add_chunk(s);
        memcpy(row_at(s, s->n), row, s->row_bytes);
    }
    s->n++;
}

static uint32 *
random_order(DpShuffle *s)
{
    uint32 *order = MemoryContextAllocHuge(s->context, sizeof(uint32) * Max(s->n, 1));

    for (int64 i = 0; i < s->n; i++)
        order[i] = (uint32)i;
    for (int64 i = s->n - 1; i > 0; i--) {
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
prefetch(const char *row, Size bytes)
{
    for (Size at = 0; at < bytes && at < 512; at += 64)
        __builtin_prefetch(row + at);
}

static void
emit_memory(DpShuffle *s, DpEmit emit, void *arg)
{
    uint32 *order = random_order(s);

    for (int64 i = 0; i < s->n; i++) {
        if (i + PREFETCH < s->n)
            prefetch(row_at(s, order[i + PREFETCH]), s->row_bytes);
        emit(row_at(s, order[i]), arg);
        if (i % 1024 == 0)
            CHECK_FOR_INTERRUPTS();
    }
}

static void
read_row(BufFile *file, char *row, Size bytes)
{
    if (BufFileRead(file, row, bytes) != bytes)
        ereport(ERROR, (errcode_for_file_access(), errmsg("could not read back a temporary file")));
}

/* A bucket is a smaller shuffle; a file is closed as soon as it is read, so disk use falls as the result grows. */
static void
emit_bucket(DpShuffle *s, int bucket, DpEmit emit, void *arg)
{
    DpShuffle *inner = dp_shuffle_start(s->row_bytes, s->memory, s->file_rows[bucket], s->random);
    char *row = palloc(s->row_bytes);

    if (BufFileSeek(s->files[bucket], 0, 0L, SEEK_SET) != 0)
        ereport(ERROR, (errcode_for_file_access(), errmsg("could not rewind a temporary file")));
    for (int64 i = 0; i < s->file_rows[bucket]; i++) {
        read_row(s->files[bucket], row, s->row_bytes);
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
