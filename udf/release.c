/*
 * release.c: the only way out. release(run, noise) adds noise beside the weights and returns them. (A model that has to
 * be chosen first gets the same noise by the same function, and waits: see tune.c.)
 *
 * A state that was begun as private leaves through a mechanism or not at all, and is wiped when it has. One that was
 * made of noisy sums alone needs no further noise.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "catalog/pg_type.h"
#include "utils/builtins.h"

PG_FUNCTION_INFO_V1(dp_release);

static void
invalid_noise(const char *what)
{
    ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("noise: %s", what)));
}

/* The grid must be a power of two, so that dividing and multiplying by it is exact. */
static double
grid_of(Jsonb *noise)
{
    double grid = dp_number(noise, "grid");
    int exponent;

    if (!(grid > 0) || frexp(grid, &exponent) != 0.5)
        invalid_noise("the grid is not a power of two");
    return grid;
}

static void
add_gaussian(Jsonb *noise, DpRandom *random, double *w, int d)
{
    double grid = grid_of(noise);
    double steps = dp_number(noise, "scale") / grid;

    if (steps < 1 || steps > 0x1p20 || steps != floor(steps))
        invalid_noise("the scale is not a whole number of grid steps between 1 and 2^20");
    dp_release_gaussian(random, grid, (uint64_t)steps, w, d);
}

static void
add_knorm(Jsonb *noise, DpRandom *random, double *w, int d)
{
    double grid = grid_of(noise);
    double scale = dp_number(noise, "scale");
    DpWide *room = palloc_extended(sizeof(DpWide) * d, MCXT_ALLOC_HUGE);

    if (!(scale / grid >= 1) || scale / grid > 0x1p20)
        invalid_noise("the scale is not between 1 and 2^20 grid steps");
    dp_release_knorm(random, grid, scale, w, room, d);
    pfree(room);
}

static void
draw_noise(const char *mechanism, Jsonb *noise, DpRandom *random, double *w, int d)
{
    if (strcmp(mechanism, "gaussian") == 0)
        add_gaussian(noise, random, w, d);
    else if (strcmp(mechanism, "l2-laplace") == 0)
        add_knorm(noise, random, w, d);
    else
        invalid_noise("no such mechanism");
}

/* The key is wiped however drawing ends: it may be cancelled. */
void
dp_perturb(Jsonb *noise, double *w, int d)
{
    char *mechanism = dp_word(noise, "mechanism");
    DpRandom random;

    dp_random_from(&random, noise, DP_STREAM_NOISE);
    PG_TRY();
    {
        draw_noise(mechanism, noise, &random, w, d);
    }
    PG_FINALLY();
    {
        explicit_bzero(&random, sizeof(random));
    }
    PG_END_TRY();
}

static void
add_noise(const DpState *state, Jsonb *noise, double *w)
{
    if (strcmp(dp_word(noise, "mechanism"), "none") != 0)
        dp_perturb(noise, w, state->weights);
    else if (state->flags & DP_STATE_PRIVATE && !dp_state_solver(state)->noised(state->body))
        ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE), errmsg("a private run is released with noise")));
}

ArrayType *
dp_float8_array(const double *values, int n)
{
    Size size = ARR_OVERHEAD_NONULLS(1) + sizeof(double) * n;
    ArrayType *array = palloc0(size);

    SET_VARSIZE(array, size);
    array->ndim = 1;
    array->elemtype = FLOAT8OID;
    ARR_DIMS(array)[0] = n;
    ARR_LBOUND(array)[0] = 1;
    memcpy(ARR_DATA_PTR(array), values, sizeof(double) * n);
    return array;
}

void
dp_output(const DpState *state, Jsonb *noise, double *w)
{
    dp_state_solver(state)->output(state->body, w);
    add_noise(state, noise, w);
}

Datum
dp_release(PG_FUNCTION_ARGS)
{
    int64 run = PG_GETARG_INT64(0);
    DpState *state = dp_state_of_run(run);
    double *w = palloc(sizeof(double) * state->weights);
    ArrayType *released;

    dp_output(state, PG_GETARG_JSONB_P(1), w);
    released = dp_float8_array(w, state->weights);
    dp_state_forget(run);
    PG_RETURN_ARRAYTYPE_P(released);
}
