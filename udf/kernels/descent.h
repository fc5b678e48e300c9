/* descent.h: what coordinate solvers share (descent.c). */
#ifndef BISMARCK_DP_DESCENT_H
#define BISMARCK_DP_DESCENT_H

#include "kernels.h"

/* No weight goes further: products of it with any bounds are still numbers. */
#define DP_DIVERGED 1e150

/* And none beyond this is released. */
#define DP_SANE 1e100

typedef struct DpDescent {
    int32_t d;
    int32_t loss;     /* index of the loss */
    int32_t passes;   /* planned */
    int32_t pass;     /* completed */
    int32_t measures; /* the first pass measures the constants */
    int32_t track;    /* add up the loss, for stopping by tolerance (never in a private run) */
    int64_t n;        /* rows in the table */
    double loss_param, lambda, l1, box;
    double clip;                     /* C; infinite where nothing is cut */
    double curvature, feature_bound; /* of the loss, and of rows */
    double measure_scale;            /* of the noise on sums of squares; 0 for none */
    double bound, magic;             /* of a term of u: cut to +-bound, rounded by adding magic and taking it away */
    DpStep step;
    DpNoise noise;
} DpDescent;

/* Reads the parameters; smoothness and unit are of d numbers each. NULL, or what is wrong. */
extern const char *dp_descent_start(DpDescent *s, int d, const DpParams *params, double *smoothness, double *unit);

static inline bool
dp_descent_measuring(const DpDescent *s)
{
    return s->measures && s->pass == 0;
}

/* What a number adds to its column's sum of squares: x^2, or whole steps of F^2 / 2^20 where noise will be added. */
extern double dp_descent_squares(const DpDescent *s, const float *column, int n);
extern void dp_descent_add_squares(const DpDescent *s, const float *row, double *sums);

/* Sums of squares become M_j, with their noise; then the units follow. */
extern void dp_descent_measured(const DpDescent *s, DpRandom *random, double *smoothness, double *unit);

/* Adds up the terms of u: of a run of one column, or of a few rows for all columns; per_unit is 1 / C_j. */
extern double dp_descent_terms(const DpDescent *s, const double *slopes, const float *column, int n, double per_unit);
extern void dp_descent_add_terms(const DpDescent *s, const double *slopes, const float *rows, int n,
                                 const double *per_unit, double *sums);

/* Where weight w goes along derivative g, at the t-th step: a prox of the penalty. */
extern double dp_descent_prox(const DpDescent *s, double w, double g, double smoothness, int64_t t);
extern void dp_descent_output(const DpDescent *s, const double *weights, double *w);
extern double dp_descent_penalty(const DpDescent *s, const double *w);

#endif
