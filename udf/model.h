/* model.h: a registered model as predictions need it (model.c). */
#ifndef BISMARCK_DP_MODEL_H
#define BISMARCK_DP_MODEL_H

#include "bismarck_dp.h"

#include "storage/itemptr.h"

typedef struct DpModel {
    char *name;
    bool is_logistic; /* has probabilities */
    bool is_classifier;
    bool is_softmax; /* of many classes: one loss; otherwise one against the rest */
    int d;           /* features, before they are projected */
    int width;       /* numbers of a row as it was packed */
    int outputs;     /* margins of a row: one, or one for each of many classes */
    DpShape shape;
    int n_classes;       /* two or more; 0 for regression */
    double *classes;     /* the labels' own coding */
    double *weights;     /* `width` for each output, the intercept last */
    Jsonb *coding;       /* what becomes of columns: the lists of categories; NULL where there are none */
    ArrayType *features; /* names of the columns it was trained on */
    double *room;
    float *row;
    double *z; /* margins of the last row */
    Oid owner;
    Oid relation; /* where it is stored, in which place, and by which transaction */
    ItemPointerData place;
    TransactionId maker;
} DpModel;

/*
 * The model of that name, if the role may use it, read with the rights of the owner of one of our functions; an error
 * if there is none. Everything is allocated in `context`.
 */
extern DpModel *dp_model_named(const char *name, Oid role, Oid function, MemoryContext context);

/* The same for whoever calls the function, and as of now: kept from call to call (cache.c), to be used at once. */
extern DpModel *dp_model_kept(const text *name, Oid function);

/* The margins of d features, in m->z; false when one of them is not finite. */
extern bool dp_model_margins(DpModel *m, const double *x);
extern bool dp_model_margins_of_floats(DpModel *m, const float *x);

/* What was predicted, of m->z: the class's place, its label or the value, probabilities of all classes. */
extern int dp_model_place(const DpModel *m);
extern double dp_model_answer(const DpModel *m);
extern void dp_model_probabilities(const DpModel *m, double *p);

#endif
