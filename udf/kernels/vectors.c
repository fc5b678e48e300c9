/*
 * vectors.c: dot products, sums and row clipping.
 *
 * Rows are float4, weights float8. Sums run in eight lanes that are added at the end: the compiler can vectorise that
 * without reordering anything, and bismarck_dp/solvers.py counts its rounding error (d/8 additions in a chain).
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

#define LANES 8

static inline double
sum_lanes(const double lane[LANES])
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

DP_VECTORISED double
dp_dot(const double *w, const float *x, int d)
{
    double lane[LANES] = {0};
    double rest = 0.0;
    int j = 0;

    for (; j + LANES <= d; j += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += w[j + l] * (double)x[j + l];
    for (; j < d; j++)
        rest += w[j] * (double)x[j];
    return sum_lanes(lane) + rest;
}

DP_VECTORISED void
dp_axpy(double *g, double a, const float *x, int d)
{
    for (int j = 0; j < d; j++)
        g[j] += a * (double)x[j];
}

DP_VECTORISED double
dp_norm(const double *w, int d)
{
    double lane[LANES] = {0};
    double rest = 0.0;
    int j = 0;

    for (; j + LANES <= d; j += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += w[j + l] * w[j + l];
    for (; j < d; j++)
        rest += w[j] * w[j];
    return sqrt(sum_lanes(lane) + rest);
}

DP_VECTORISED double
dp_row_norm(const float *x, int d)
{
    double lane[LANES] = {0};
    double rest = 0.0;
    int j = 0;

    for (; j + LANES <= d; j += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += (double)x[j + l] * (double)x[j + l];
    for (; j < d; j++)
        rest += (double)x[j] * (double)x[j];
    return sqrt(sum_lanes(lane) + rest);
}

/*
 * A gradient slope x of norm above the clip is scaled down to it. Weights may be anything that noise and steps make of
 * them, so the slope may be infinite or no number: the result never is, nor is it rounded up by a quotient too small
 * for a double.
 */
double
dp_clip_by_norm(double slope, double norm, double clip)
{
    double most = clip / norm;

    if (isnan(slope) || norm == 0.0)
        return 0.0;
    return fabs(slope) > most ? copysign(most, slope) : slope;
}

double
dp_clip_slope(double slope, const float *x, int d, double clip)
{
    return dp_clip_by_norm(slope, dp_row_norm(x, d), clip);
}

DP_VECTORISED void
dp_scale(double *a, double factor, int d)
{
    for (int j = 0; j < d; j++)
        a[j] *= factor;
}

/* A point inside stays where it is. */
void
dp_project(double *w, double radius, int d)
{
    double norm = dp_norm(w, d);

    if (norm > radius)
        dp_scale(w, radius / norm, d);
}

static double
largest_entry(const double *x, int d, double constant)
{
    double largest = constant;

    for (int j = 0; j < d; j++)
        largest = fmax(largest, fabs(x[j]));
    return largest;
}

/* The norm of (x, constant) in units of `unit`, which keeps the squares of huge and tiny entries finite. */
static double
norm_in_units(const double *x, int d, double constant, double unit)
{
    double sum = (constant / unit) * (constant / unit);

    for (int j = 0; j < d; j++)
        sum += (x[j] / unit) * (x[j] / unit);
    return sqrt(sum);
}

/* x - x is zero for finite x and NaN otherwise, so sums test all entries without a branch each. */
DP_VECTORISED static bool
all_finite(const double *x, int d)
{
    double lane[LANES] = {0};
    double rest = 0.0;
    int j = 0;

    for (; j + LANES <= d; j += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += x[j + l] - x[j + l];
    for (; j < d; j++)
        rest += x[j] - x[j];
    return sum_lanes(lane) + rest == 0.0;
}

/* To float4, never away from zero: rounding must not lift a row above its bound. */
static inline float
toward_zero(double v)
{
    union {
        float value;
        uint32_t bits;
    } f = {(float)v};

    f.bits -= fabs((double)f.value) > fabs(v);
    return f.value;
}

DP_VECTORISED static void
scale_row(const double *x, double scale, float *out, int d)
{
    for (int j = 0; j < d; j++)
        out[j] = toward_zero(x[j] * scale);
}

/* What a row in units of `unit` is multiplied by, to be within its bound or, normalized, at it; norm is in such units.
 */
static double
factor_of(const DpShape *shape, double norm, double unit)
{
    return norm > shape->bound / unit || (shape->normalize && norm > 0.0) ? shape->bound / norm : unit;
}

DP_VECTORISED static void
scale_floats(const float *x, double scale, float *out, int d)
{
    for (int j = 0; j < d; j++)
        out[j] = toward_zero((double)x[j] * scale);
}

/* The norm of a row and the constant behind it. The root of a square is the number itself, where neither is extreme. */
static inline double
norm_with(double norm, double constant)
{
    return constant == 0.0 ? norm : sqrt(norm * norm + constant);
}

/* Of a row whose squares leave, or nearly leave, the range of doubles, or that is no number. */
static inline bool
is_extreme(double norm)
{
    return !(norm >= 1e-150 && norm <= 1e150);
}

static void
cut_row(const double *x, int d, const DpShape *shape, double norm, float *out)
{
    double factor = factor_of(shape, norm, 1.0);

    scale_row(x, factor, out, d);
    if (shape->intercept)
        out[d] = toward_zero(factor);
}

/* Entries so large or so small that their squares leave the range of doubles: in units of the largest. */
static void
clip_extreme_row(const double *x, int d, double constant, const DpShape *shape, float *out)
{
    double largest = largest_entry(x, d, constant);
    double unit = largest > 0.0 ? largest : 1.0;
    double factor = factor_of(shape, norm_in_units(x, d, constant, unit), unit);

    for (int j = 0; j < d; j++)
        out[j] = toward_zero(x[j] / unit * factor);
    if (constant > 0.0)
        out[d] = toward_zero(constant / unit * factor);
}

DP_VECTORISED static void
divide_and_cut(const double *x, const double *scale, double *out, int d)
{
    for (int j = 0; j < d; j++) {
        double v = x[j] / scale[j];

        v = v > -1.0 ? v : -1.0;
        out[j] = v < 1.0 ? v : 1.0;
    }
}

int
dp_shape_width(const DpShape *shape, int d)
{
    return (shape->matrix == NULL ? d : shape->projected) + shape->intercept;
}

/* A row so long that its projection might be beyond all numbers is shortened first: it is cut to its bound anyway. */
static const double *
project_features(const double *x, int d, const DpShape *shape, double *room)
{
    double longest = 1e200, largest = largest_entry(x, d, 0.0);

    if (largest > longest) {
        for (int j = 0; j < d; j++)
            room[j] = x[j] / largest * longest;
        x = room;
    }
    dp_project_row(shape->matrix, x, room + d, shape->projected, d);
    return room + d;
}

bool
dp_clip_row(const double *x, int d, const DpShape *shape, double *room, float *out)
{
    double constant = shape->intercept ? 1.0 : 0.0;
    double norm;

    /* A norm that is a number is one of numbers: most rows need not be looked through for others. */
    if (shape->scale == NULL && shape->matrix == NULL && !is_extreme(norm = norm_with(dp_norm(x, d), constant))) {
        cut_row(x, d, shape, norm, out);
        return true;
    }
    if (!all_finite(x, d)) {
        memset(out, 0, (size_t)dp_shape_width(shape, d) * sizeof(float));
        return false;
    }
    if (shape->scale != NULL) {
        divide_and_cut(x, shape->scale, room, d);
        x = room;
    }
    if (shape->matrix != NULL) {
        x = project_features(x, d, shape, room);
        d = shape->projected;
    }
    norm = norm_with(dp_norm(x, d), constant);
    if (is_extreme(norm))
        clip_extreme_row(x, d, constant, shape, out);
    else
        cut_row(x, d, shape, norm, out);
    return true;
}

DP_VECTORISED static void
widen(const float *x, double *out, int d)
{
    for (int j = 0; j < d; j++)
        out[j] = x[j];
}

bool
dp_clip_floats(const float *x, int d, const DpShape *shape, double *room, float *out)
{
    double norm, factor;

    if (shape->scale == NULL && shape->matrix == NULL) {
        norm = norm_with(dp_row_norm(x, d), shape->intercept ? 1.0 : 0.0);
        if (!is_extreme(norm)) {
            factor = factor_of(shape, norm, 1.0);
            scale_floats(x, factor, out, d);
            if (shape->intercept)
                out[d] = toward_zero(factor);
            return true;
        }
    }
    widen(x, room, d);
    return dp_clip_row(room, d, shape, room, out);
}
