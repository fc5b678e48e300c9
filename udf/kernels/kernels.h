/*
 * kernels.h: the arithmetic of training and of noise, in plain C.
 *
 * Nothing here knows PostgreSQL: a host hands over packed rows and parameters, and gets numbers back. The server's
 * glue is one host, the tests (through ctypes) another. Every function has a NumPy twin in bismarck_dp/reference.py
 * and agrees with it to 1e-9. No fast-math and no fused multiply-add: the arithmetic that was written is the
 * arithmetic that is proven, and the same bits come out on every machine.
 */
#ifndef BISMARCK_DP_KERNELS_H
#define BISMARCK_DP_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A build may define it otherwise: the tests and the benchmark do, to hold one instruction set against another. */
#ifndef DP_VECTORISED
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DP_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define DP_VECTORISED
#endif
#endif

/* ---- parameters, as a host reads them ---- */

typedef struct DpParams {
    double (*number)(const void *host, const char *key);
    const char *(*word)(const void *host, const char *key);
    void (*numbers)(const void *host, const char *key, double *out, int n); /* n of them, or one that stands for all */
    const void *host;
} DpParams;

/* ---- losses: scalar functions of the margin z = <w, x> and the label y; a loss never meets the features ---- */

#define DP_STEEPEST 1e200 /* no slope among many is steeper, or no number, whatever z is */

typedef struct DpLoss {
    const char *name;
    double (*value)(double z, double y, double param);
    double (*slope)(double z, double y, double param);                           /* derivative in z */
    void (*slopes)(const double *z, double *out, int n, double y, double param); /* many, to within 1e-12; finite */
    double (*conjugate)(double a, double y, double param);                       /* at -a, for a dual variable a */
    /* The dual variable that minimises conjugate(a) + z (a - from) + curvature (a - from)^2 / 2, or is near it. */
    double (*dual)(double z, double y, double from, double curvature, double param);
} DpLoss;

extern const DpLoss *dp_loss_named(const char *name); /* NULL when there is none */
extern const DpLoss *dp_loss_at(int index);
extern int dp_loss_index(const DpLoss *loss);

/* ---- rows and vectors ---- */

extern double dp_dot(const double *w, const float *x, int d);
extern void dp_axpy(double *g, double a, const float *x, int d);
extern double dp_norm(const double *w, int d);
extern double dp_row_norm(const float *x, int d);
extern double dp_clip_slope(double slope, const float *x, int d, double clip); /* finite, and |slope x| <= clip */
extern double dp_clip_by_norm(double slope, double norm, double clip);         /* the same, of a row of this norm */
extern void dp_scale(double *a, double factor, int d);
extern void dp_project(double *w, double radius, int d); /* onto the ball, never onto the sphere */

/* ---- many classes: k rows of d weights, one after the other (classes.c) ---- */

#define DP_MOST_CLASSES 1000

extern void dp_margins(const double *w, const float *x, int d, int outputs, double *z);
extern void dp_add_outer(double *g, const double *slopes, const float *x, int d, int outputs);
/* Probabilities and, unless NULL, the log of the sum of exp(z). False where margins are beyond all numbers. */
extern bool dp_softmax(const double *z, double *p, int outputs, double *log_sum);
extern int dp_largest(const double *z, int n); /* the first of the largest */

/* ---- random projection (projection.c) ---- */

#define DP_STREAM_PROJECTION ((uint64_t)9 << 33)

extern void dp_projection(int64_t seed, double *matrix, int p, int d); /* p rows of d numbers */
extern void dp_project_row(const double *matrix, const double *x, double *out, int p, int d);

/*
 * What becomes of features: each is divided by its scale and cut to +-1, if there are scales; the row is multiplied by
 * a matrix, if there is one; a constant 1 is put behind, when intercept; and the row is scaled down to L2 norm `bound`,
 * or, to be normalized, up to it as well.
 */
typedef struct DpShape {
    const double *scale;  /* one for each feature, or NULL */
    const double *matrix; /* `projected` rows of d numbers, or NULL */
    int projected;
    bool intercept;
    bool normalize;
    double bound;
} DpShape;

/* Writes the row to out. False, and a row of zeros, when a value is not finite: such a row has no gradient but keeps
 * its slot. room is for d numbers, and as many as there are after projection. */
extern bool dp_clip_row(const double *x, int d, const DpShape *shape, double *room, float *out);
extern bool dp_clip_floats(const float *x, int d, const DpShape *shape, double *room, float *out); /* the same row */
extern int dp_shape_width(const DpShape *shape, int d); /* numbers of the row that is written */

/* ---- steps ---- */

typedef enum DpStepRule {
    DP_STEP_CONSTANT,        /* eta */
    DP_STEP_DECREASING,      /* 2 / (beta (t + offset)), Corollary 2 of Wu et al. 2017 */
    DP_STEP_SQRT,            /* 2 / (beta (sqrt(t) + offset)), Corollary 3 */
    DP_STEP_STRONGLY_CONVEX, /* min(1/beta, 1/(gamma t)), Algorithm 2 */
    DP_STEP_INVERSE_SQRT,    /* min(1/beta, eta / sqrt(t)), SCS13 and Algorithm 4 */
} DpStepRule;

typedef struct DpStep {
    int32_t rule;
    int32_t unused;
    double eta, beta, gamma, offset;
} DpStep;

extern const char *dp_step_start(DpStep *step, const DpParams *params); /* NULL, or what is wrong */
extern double dp_step(const DpStep *step, int64_t t);
extern int dp_index_of(const char *word, const char *const *words, int n); /* -1 when it is none of them */

/* ---- random numbers: ChaCha20 under a key from the operating system (or, for tests, from a seed) ---- */

#define DP_KEY_BYTES 32

typedef struct DpRandom {
    uint32_t input[16];
    uint32_t block[16];
    int used;            /* words of block already given out */
    uint32_t generation; /* of the process that keyed it: changes with every fork */
    bool seeded;         /* from a seed: the stream is repeatable, also in a child */
    void (*pulse)(void); /* called now and then while numbers are drawn, or NULL */
} DpRandom;

extern void dp_random_start(DpRandom *r, const uint8_t key[DP_KEY_BYTES], uint64_t stream); /* from a seed */
extern bool dp_random_fresh(DpRandom *r, uint64_t stream); /* from the operating system; false: it gave no key */

/* Before anything is made from input: takes a fresh key if this process inherited the generator by fork(). */
extern void dp_random_check(DpRandom *r);
extern uint32_t dp_random_u32(DpRandom *r);
extern uint64_t dp_random_u64(DpRandom *r);
extern uint64_t dp_random_below(DpRandom *r, uint64_t n); /* uniform on 0..n-1, unbiased */

/* The generator's words in stock, made by dp_random_fill; a stock that was inherited by fork() is thrown away. */
#define DP_STOCK 256

typedef struct DpWords {
    DpRandom random;
    uint32_t generation; /* of the stock */
    int32_t left;        /* words not yet used, at the end */
    uint32_t words[DP_STOCK];
} DpWords;

/* ---- samplers: exact from integers and fair coins, or as close as said ---- */

/* hi + lo, hi the double nearest to it: about 106 bits (wide.h) */
typedef struct DpWide {
    double hi, lo;
} DpWide;

extern int64_t dp_discrete_laplace(DpRandom *r, uint64_t scale);
extern int64_t dp_discrete_gaussian(DpRandom *r, uint64_t sigma); /* exact; 1 <= sigma <= 2^20 */
extern DpWide dp_exponential(DpRandom *r); /* a real one cut off after 256 binary places, to 2^-98 of itself */
extern double dp_gumbel(DpRandom *r);      /* in double precision: to compare with, not to release by */

/*
 * An index j with probability proportional to exp(score[j] numerator / denominator), exactly: the exponential
 * mechanism, or the largest of score numerator / denominator + Gumbel noise. n and denominator are at least 1.
 */
extern int dp_exponential_choice(DpRandom *r, const int64_t *score, int n, uint64_t numerator, uint64_t denominator);

/*
 * Waits of Poisson sampling: how many steps pass before the next that takes a row, when each takes it with probability
 * q. Whatever happened before, a step takes the row with a probability within a factor 1 +- DP_RATE_ERROR of q: an
 * accountant must be given q (1 + DP_RATE_ERROR), or 1 if that is more. False when q is not between 2^-44 and 1.
 */
#define DP_SMALLEST_RATE 0x1p-44
#define DP_RATE_ERROR 0x1p-50

typedef struct DpGaps {
    uint64_t digit[44]; /* probabilities of binary digits, in units of 2^-64 */
    uint64_t above;     /* of one more step of 2^digits */
    int digits;
} DpGaps;

extern bool dp_gap_start(DpGaps *gaps, double q);
extern uint64_t dp_gap(DpWords *words, const DpGaps *gaps);

/* ---- noise ---- */

/* Density proportional to exp(-|z| / scale), to the precision that knorm.c proves; 1 <= scale <= 2^20. */
extern void dp_knorm_noise(DpRandom *r, double scale, DpWide *noise, int d);

/* Adds noise to w and leaves it on the grid; grid is a power of two, sigma a number of grid steps, scale at least 1 and
 * at most 2^20 of them; room is for d numbers. */
extern void dp_release_gaussian(DpRandom *r, double grid, uint64_t sigma, double *w, int d);
extern void dp_release_knorm(DpRandom *r, double grid, double scale, double *w, DpWide *room, int d);

/* ---- bulk noise: many numbers at once, to be rounded with what they are added to (see bulk.c and sums.c) ---- */

/* The next blocks of 16 words each, as dp_random_u32 would give them; the rest of a begun block is skipped. */
extern void dp_random_fill(DpRandom *r, uint32_t *out, size_t blocks);

/*
 * n independent N(0, sigma^2), as close as bulk.c says. Skips the rest of a begun block; then uses 16 blocks for each
 * begun 128, and after one such group in 2^17 a few words more: where the stream stands at the end depends on luck.
 */
extern void dp_gaussians(DpRandom *r, double sigma, double *out, size_t n);

/* Squared lengths of n independent normal pairs; roots are within 2^-42 of a real pair's length. Half the words. */
extern void dp_squared_lengths(DpRandom *r, double *out, size_t n);

/* ---- noise inside a pass: on every batch's sum, which is then rounded to a grid (sums.c) ---- */

typedef enum DpMechanism { DP_NO_NOISE, DP_GAUSSIAN, DP_L2_LAPLACE } DpMechanism;

typedef struct DpNoise {
    int32_t mechanism; /* DpMechanism */
    int32_t unused;
    double scale; /* standard deviation (Gaussian), or scale of the norm (K-norm) */
    double grid;  /* a power of two */
} DpNoise;

/* Numbers in stock, and the generator that makes more of them. One that was inherited by fork() is thrown away. */
#define DP_NUMBERS 2048

typedef struct DpStock {
    DpRandom random;
    uint32_t generation;
    int32_t left; /* numbers not yet used, at the end */
    double numbers[DP_NUMBERS];
} DpStock;

/* Noise for one partition's pass, in one process: standard normal numbers, squared lengths of pairs of them, and what
 * exact choices are made from. */
typedef struct DpPool {
    DpStock normals, squares;
    DpRandom choices;
} DpPool;

extern const char *dp_noise_start(DpNoise *noise, const DpParams *params, int d); /* NULL, or what is wrong */
extern double dp_noised_slope(const DpNoise *noise, double slope, const float *x, int d,
                              double clip); /* clipped if it can be */
extern void dp_noise_add(const DpNoise *noise, DpPool *pool, double *sum, int d);

/* ---- the bet of BANCO: 1/(2a) int_{-a}^{a} u exp(u x - u^2 y) du, cut to +-1e280; y >= 0, a > 0 (banco.c) ---- */

extern double dp_banco_magnitude(double x, double y, double a);

/* ---- solvers ---- */

/*
 * A solver folds packed rows into a body it alone understands. Partitions are fixed by the row count, each is folded
 * by itself, and the partitions' bodies are merged once per pass. Rows come in blocks, in their order (fold), or one by
 * one as they are sampled (take), and then the host says where a batch ends (step). A solver that remembers has a
 * number for each row, zero at first, which the host keeps and shows to nobody else; it may look at all rows after a
 * pass. Or columns come, one after the other, as the solver asks for them (next): the host adds up what runs of a
 * column give (sum), tells the solver, which moves the weight (move), and moves the margins as far along the column. A
 * solver that adds noise takes it from the pool, inside the pass or at its end, never both; others never look at it.
 */
typedef struct DpSolver {
    const char *name;
    size_t (*size)(int weights);                                      /* d for each output */
    const char *(*start)(void *body, int d, const DpParams *params);  /* NULL, or what is wrong */
    bool (*begin_pass)(void *body, int part);                         /* false: all planned passes were made */
    bool (*fold)(void *body, const float *rows, int n, DpPool *pool); /* false: more rows than the pass has */
    void (*take)(void *body, const float *row, double *memory);       /* NULL: rows cannot be sampled */
    bool (*step)(void *body, DpPool *pool);                           /* false: more batches than the pass has */
    bool remembers;                                                   /* take has a memory for each row */
    bool (*looks)(const void *body);                                  /* whether it wants all rows after this pass */
    void (*look)(void *body, const float *row, double memory);
    bool (*complete)(const void *body);           /* every batch of the pass was folded */
    void (*merge)(void *body, const void *other); /* adds another partition's share */
    void (*weigh)(void *body);                    /* turns one partition's body into its share */
    void (*end_pass)(void *body, DpPool *pool);
    bool (*next)(void *body, DpRandom *random, int *j); /* false: the pass is over; NULL: works on rows */
    double (*sum)(const void *body, int j, const double *margins, const float *column, int n);
    double (*move)(void *body, int j, double sum, DpPool *pool);   /* how far weight j moves */
    void (*observe)(void *body, const double *margins, int64_t n); /* adds to the objective, if it is asked for */
    double (*objective)(const void *body);                         /* mean training objective of the last pass */
    double (*gap)(const void *body);                               /* duality gap after it; NULL: there is none */
    void (*output)(const void *body, double *w);
    int (*passes)(const void *body);  /* completed */
    bool (*noised)(const void *body); /* everything in it was made from noisy sums: it needs no noise to leave */
    bool many;                        /* a row may have several outputs, each with weights of its own */
} DpSolver;

extern const DpSolver dp_sgd;
extern const DpSolver dp_banco;
extern const DpSolver dp_cd;
extern const DpSolver dp_gcd;
extern const DpSolver dp_scd;
extern const DpSolver dp_primal;
extern void dp_gcd_scores(const void *body, double *sums, double *scores); /* after the last row, before choices */
extern const DpSolver *dp_solver_named(const char *name);
extern const DpSolver *dp_solver_at(int index);
extern int dp_solver_index(const DpSolver *solver);

#endif
