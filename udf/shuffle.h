/* shuffle.h: a uniform permutation of many fixed-size rows in bounded memory (shuffle.c). */
#ifndef BISMARCK_DP_SHUFFLE_H
#define BISMARCK_DP_SHUFFLE_H

#include "bismarck_dp.h"

#include "storage/buffile.h"

typedef void (*DpEmit)(const char *row, void *arg);

typedef struct DpShuffle DpShuffle;

extern DpShuffle *dp_shuffle_start(Size row_bytes, Size memory, int64 expected_rows, DpRandom *random);
extern void dp_shuffle_add(DpShuffle *shuffle, const char *row);
extern void dp_shuffle_emit(DpShuffle *shuffle, DpEmit emit, void *arg); /* gives every row out, and ends the shuffle */

/* ---- temporary files, for whoever sends rows to buckets ---- */

extern int dp_bucket_count(double bytes, Size memory);
extern void dp_read_back(BufFile *file, void *room, Size bytes);
extern void dp_rewind(BufFile *file);

#endif
