/* rows.c: a store of fixed-size rows; see rows.h. */
#include "rows.h"

#include "utils/memutils.h"

#define CHUNK_BYTES ((Size)1024 * 1024)

void
dp_rows_start(DpRows *rows, MemoryContext context, Size row_bytes, Size memory)
{
    *rows = (DpRows){.context = context, .row_bytes = row_bytes, .chunk_room = 64};
    rows->rows_per_chunk = Max(1, (int64)(Min(CHUNK_BYTES, memory / 8) / row_bytes));
    rows->chunks = MemoryContextAlloc(context, sizeof(char *) * rows->chunk_room);
}

static void
add_chunk(DpRows *rows)
{
    if (rows->chunk_count == rows->chunk_room) {
        rows->chunk_room *= 2;
        rows->chunks = repalloc_huge(rows->chunks, sizeof(char *) * rows->chunk_room);
    }
    rows->chunks[rows->chunk_count++] = MemoryContextAllocHuge(rows->context, rows->rows_per_chunk * rows->row_bytes);
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
