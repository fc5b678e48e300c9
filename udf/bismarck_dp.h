/*
 * bismarck_dp.h: what the PostgreSQL glue shares. The arithmetic is in kernels/.
 */
#ifndef BISMARCK_DP_H
#define BISMARCK_DP_H

#include "postgres.h"

#include "executor/tuptable.h"
#include "fmgr.h"
#include "nodes/pg_list.h"
#include "storage/lockdefs.h"
#include "utils/array.h"
#include "utils/jsonb.h"
#include "utils/relcache.h"

#include "kernels/kernels.h"

/* ---- the caller: whose rights count when the source is read (door.c) ---- */

typedef struct DpCaller {
    Oid role;
    const char *search_path;
    Oid admitted; /* a protected table that is read with the extension's rights */
    struct DpCaller *outer;
} DpCaller;

extern Oid dp_caller_role(void);
extern Oid dp_owner_of_function(Oid function);  /* of one of ours: the extension's owner */
extern const char *dp_caller_search_path(void); /* NULL: the current one */
extern bool dp_caller_is_admitted(Oid relation);
extern void dp_set_option(const char *name, const char *value);

/* ---- the state: one varlena that carries its solver's parameters and numbers (state.c) ---- */

#define DP_STATE_MAGIC 0x62647073 /* "bdps" */
#define DP_STATE_VERSION 3
#define DP_STATE_PRIVATE 0x0001 /* may leave through a mechanism only, or with noise inside */
#define DP_STATE_SEEDED 0x0002  /* for tests: noise inside the pass comes from the seed */

typedef struct DpState {
    int32 vl_len_;
    uint32 magic;
    uint16 version;
    uint16 flags;
    int32 solver;
    int32 d;       /* numbers of a packed row */
    int32 weights; /* d for each output */
    int32 block;   /* next block expected in this pass */
    int64 seed;
    double body[FLEXIBLE_ARRAY_MEMBER];
} DpState;

extern DpState *dp_state_checked(Datum datum);
extern const DpSolver *dp_state_solver(const DpState *state);
extern DpState *dp_state_of_run(int64 run);
extern void dp_state_keep(int64 run, const DpState *state);
extern void dp_state_forget(int64 run);

/* A model that waits to be chosen, noise and all: its run is over, and gives nothing else out (see tune.c). */
typedef struct DpHeld {
    bool private;
    bool finite; /* all weights are */
    int width;   /* numbers of a packed row */
    int outputs; /* margins of a row, each with `width` weights */
    int trial;   /* which one it is */
    int64 score; /* with its noise: fewer is better */
    double w[FLEXIBLE_ARRAY_MEMBER];
} DpHeld;

extern void dp_state_hold(int64 run, const double *w);
extern DpHeld *dp_held_of_run(int64 run);
extern bool dp_is_held(int64 run);
extern void dp_held_rename(int64 run, int64 to);

extern struct DpRows *dp_rows_of_run(int64 run); /* room for the packed rows, until the run ends; empty at first */
extern struct DpColumns **dp_columns_of_run(int64 run,
                                            MemoryContext *context); /* the same for columns; NULL at first */
/* A number for each row, zero at first, to be moved by one pass: until its state is kept nobody gets them again. */
extern double *dp_memory_of_run(int64 run, int64 n);
extern DpState *dp_state_copy(MemoryContext context, const DpState *state);
extern void dp_state_begin_pass(DpState *state, int part);
extern void dp_state_check_complete(const DpState *state);

/* ---- parameters (params.c) ---- */

extern double dp_number(Jsonb *params, const char *key);
extern bool dp_has(Jsonb *params, const char *key);
extern double *dp_numbers(Jsonb *params, const char *key, int *n); /* of an array */
extern char *dp_word(Jsonb *params, const char *key);
extern Jsonb *dp_object(Jsonb *params, const char *key);
extern DpParams dp_params(Jsonb *params);

/* ---- aggregates (epoch.c) ---- */

extern MemoryContext dp_aggregate_context(FunctionCallInfo fcinfo); /* an error outside of one */

/* ---- releases (release.c) ---- */

extern void dp_perturb(Jsonb *noise, double *w, int d); /* by the mechanism that noise names: exact, on its grid */
extern void dp_output(const DpState *state, Jsonb *noise, double *w); /* the weights, with the noise they leave with */
extern ArrayType *dp_float8_array(const double *values, int n);

/* ---- numbers of a column ---- */

typedef enum DpNumberType {
    DP_NOT_A_NUMBER,
    DP_BOOL,
    DP_INT2,
    DP_INT4,
    DP_INT8,
    DP_FLOAT4,
    DP_FLOAT8,
    DP_NUMERIC,
} DpNumberType;

/* ---- units, whose rows are limited together (units.c) ---- */

typedef struct DpUnit {
    char *column;
    Oid oid;       /* the column's type as PostgreSQL names it */
    int rows;      /* of each unit that may count */
    int64 before;  /* rows of its unit that came before the one at hand, where all are looked at */
    Jsonb *params; /* whose seed is that of the choice, in a test */
} DpUnit;

struct DpUnits;

extern DpUnit *dp_unit_of(Oid relation, Jsonb *params);              /* NULL: a row is a unit */
extern struct DpUnits *dp_units_start(const DpUnit *unit, int rows); /* without rows they are counted only */
extern int64 dp_units_add(struct DpUnits *units, Datum value, bool isnull, int64 row);
extern int64 dp_units_choose(struct DpUnits *units); /* the number of slots */
extern bool dp_units_chosen(struct DpUnits *units, Datum value, bool isnull, int64 row);
extern void dp_units_end(struct DpUnits *units);

/* ---- the source (source.c, read.c) ---- */

typedef struct DpSource {
    Oid relation;
    char *label;
    List *features;                   /* column names, char * */
    DpNumberType label_type;          /* DP_BOOL allowed here only */
    bool is_array;                    /* one array column */
    bool is_portion;                  /* no source at all, but raw rows that split has put aside */
    DpNumberType *types;              /* of the columns, or of the array's elements */
    Oid label_oid, *oids;             /* the columns' types as PostgreSQL names them */
    struct DpCategories **categories; /* of the columns; NULL for one that holds numbers */
    DpUnit *unit;                     /* NULL: a row is one */
} DpSource;

typedef bool (*DpReceive)(TupleTableSlot *slot, void *arg);

extern DpSource *dp_source(Oid relation, text *label, ArrayType *features, Jsonb *params);
extern List *dp_names_of(ArrayType *array);
extern void dp_resolve_features(DpSource *source, Jsonb *params); /* what follows from names and oids */
extern Oid dp_column_type(Oid relation, const char *column);
extern DpNumberType dp_number_type(Oid type);
extern double dp_to_double(Datum value, DpNumberType type);
extern void dp_read_source(const DpSource *source, bool label, DpReceive receive, void *arg);
extern int64 dp_count_slots(const DpSource *source, bool label, DpReceive receive, void *arg);

/* ---- features of a row: numbers, and categories as zeros and ones (features.c) ---- */

extern struct DpCategories *dp_categories_of(Jsonb *params, const char *column, Oid type); /* NULL: none are given */
extern int dp_source_width(const DpSource *source); /* features of several columns */
/* d numbers from the columns of a row, the first of which is at `at`. False: one is missing (it is NaN), or there are
 * not d. */
extern bool dp_read_features(const DpSource *source, TupleTableSlot *slot, int at, double *x, int d);
extern bool dp_features_of(const DpSource *source, const Datum *values, const bool *nulls, double *x, int d);

/* ---- packed rows and blocks (pack.c) ---- */

typedef struct DpCoding {
    DpShape shape;
    double *room; /* for the features of one row */
    bool regression;
    double label_bound;
    double negative, other_negative, positive; /* labels of the two classes; a second one may mean the negative */
    int many;                                  /* classes, where there are more than two */
    double *classes;                           /* their labels */
} DpCoding;

/* Matrices of projections take much memory. Where several are used together, one that was made is used again: they are
 * in the list `made`, which is empty at first. */
extern DpCoding dp_coding(Jsonb *params, List **made);
extern void dp_shape_project(DpShape *shape, int p, int64 seed, int d, List **made);
extern double dp_coded_label(const DpCoding *coding, double y); /* as the kernels have it, or NAN */
extern bool dp_code_row(const DpCoding *coding, double y, const double *x, int d, float *row); /* whether it counts */

/* What a block may hold that shares its heap page with no other. */
#define DP_PAGE_BYTES (MaxHeapTupleSize - MAXALIGN(SizeofHeapTupleHeader) - sizeof(int32) - VARHDRSZ)

typedef void (*DpVisit)(const char *row, void *arg);

extern DpSource *dp_pack_source(FunctionCallInfo fcinfo, Jsonb *params); /* of the first three arguments */
extern int64 dp_pack_rows(const DpSource *source, Jsonb *params, DpVisit visit, void *arg); /* the number of rows */
extern int dp_packed_width(Jsonb *params); /* features, projected if they are, and the intercept */

/* A raw row: its label and its d features as doubles, all of them NaN where one is no number. */
extern int64 dp_raw_rows(const DpSource *source, int d, DpVisit visit, void *arg); /* the number of rows */
#define DP_RAW_BYTES(d) (sizeof(double) * ((Size)(d) + 1))

extern Oid *dp_oids_of(ArrayType *array, int *n);
extern Size dp_allowed_memory(void);
extern int dp_rows_per_block(Size row_bytes);
extern Relation dp_open_blocks(Oid table, LOCKMODE mode);
extern void dp_empty_table(Oid table);
extern int64 dp_visit_rows(Oid table, Size row_bytes, DpVisit visit, void *arg); /* the number of rows */

/* ---- random numbers (params.c): one stream for each use ---- */

#define DP_STREAM_ORDER 1 /* plus the pass, for a fresh order */
#define DP_STREAM_NOISE ((uint64_t)1 << 32)
#define DP_STREAM_SUMS ((uint64_t)1 << 33)        /* plus 256 times the pass, plus the partition */
#define DP_STREAM_SQUARES ((uint64_t)3 << 33)     /* the same */
#define DP_STREAM_SAMPLE ((uint64_t)1 << 34)      /* plus the pass */
#define DP_STREAM_CHOICES ((uint64_t)5 << 33)     /* plus 256 times the pass */
#define DP_STREAM_COORDINATES ((uint64_t)7 << 33) /* plus the pass */
#define DP_STREAM_BOUNDS ((uint64_t)11 << 33)
#define DP_STREAM_EVALUATION ((uint64_t)13 << 33)
#define DP_STREAM_PORTIONS ((uint64_t)33 << 33)
#define DP_STREAM_WINNER ((uint64_t)35 << 33)
#define DP_STREAM_SCORE ((uint64_t)37 << 33)
#define DP_STREAM_UNITS ((uint64_t)39 << 33)

extern void dp_random_from(DpRandom *random, Jsonb *params, uint64_t stream);
extern void dp_random_of_state(DpRandom *random, const DpState *state, uint64_t stream);
extern void *dp_secret_alloc(MemoryContext context, Size size); /* wiped when the context goes */
extern DpPool *dp_pool_of_state(MemoryContext context, const DpState *state, int part);

#endif
