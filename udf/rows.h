/* rows.h: fixed-size rows in memory, in chunks (rows.c). */
#ifndef BISMARCK_DP_ROWS_H
#define BISMARCK_DP_ROWS_H

#include "bismarck_dp.h"

typedef struct DpRows {
    MemoryContext context;
    Size row_bytes;
    int64 n;
    int64 rows_per_chunk;
    int64 chunk_count, chunk_room;
    char **chunks;
} DpRows;

extern void dp_rows_start(DpRows *rows, MemoryContext context, Size row_bytes, Size chunk_bytes);
extern void dp_rows_add(DpRows *rows, const char *row);
extern void dp_rows_clear(DpRows *rows); /* frees the rows, and leaves an empty store */

static inline char *
dp_row_at(const DpRows *rows, int64 i)
{
    return rows->chunks[i / rows->rows_per_chunk] + (i % rows->rows_per_chunk) * rows->row_bytes;
}

/*
 * Rows are visited in a random order: each is asked for a little before it is needed. Always inlined, because GCC takes
 * a function that does nothing but prefetch for one that does nothing, and drops the call.
 */
#define DP_PREFETCH 16

static inline __attribute__((always_inline)) void
dp_row_prefetch(const DpRows *rows, int64 i)
{
    const char *row = dp_row_at(rows, i);

    for (Size at = 0; at < rows->row_bytes && at < 512; at += 64)
        __builtin_prefetch(row + at);
}

#endif
