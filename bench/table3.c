/*
 * The two algorithms of table3.py without a database, for tuning: one training for each call, tens of thousands of
 * calls.
 *
 * Noise comes in as arrays of standard draws, so that all settings of a grid see the same draws and this file needs no
 * generator. Nothing here is private; what is released comes from the database.
 *
 * Columns are contiguous: those of a dense matrix one after the other (rows == NULL), or those of a sparse one, whose
 * values in column j are start[j] to start[j + 1].
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SQUARED, LOGISTIC };
enum { GS_R, GS_S, GS_Q };

typedef struct {
    int n, p, loss;
    const float *values;
    const int *rows;  /* NULL if dense */
    const int *start; /* p + 1 of them; unused if dense */
    const float *y;
    const double *smooth; /* M_j */
    double l1;
} Problem;

static double
shrink(double v, double by)
{
    return v > by ? v - by : v < -by ? v + by : 0;
}

static void
slopes(const Problem *q, const float *margin, float *slope)
{
    if (q->loss == SQUARED)
        for (int i = 0; i < q->n; i++)
            slope[i] = margin[i] - q->y[i];
    else
        for (int i = 0; i < q->n; i++)
            slope[i] = -q->y[i] / (1 + expf(q->y[i] * margin[i]));
}

/* u_j: the sum over rows of slope * x / C_j, each clipped to [-1, 1]. */
static double
clipped_sum(const Problem *q, int j, const float *slope, float inverse)
{
    float sum = 0;

    if (q->rows == NULL) {
        const float *x = q->values + (size_t)j * q->n;

        for (int i = 0; i < q->n; i++)
            sum += fminf(fmaxf(slope[i] * x[i] * inverse, -1), 1);
    } else
        for (int k = q->start[j]; k < q->start[j + 1]; k++)
            sum += fminf(fmaxf(slope[q->rows[k]] * q->values[k] * inverse, -1), 1);
    return sum;
}

/* Moves the margins along column j, and with `slope` the slopes of the rows they belong to. */
static void
move(const Problem *q, int j, float by, float *margin, float *slope)
{
    if (q->rows == NULL) {
        const float *x = q->values + (size_t)j * q->n;

        for (int i = 0; i < q->n; i++)
            margin[i] += by * x[i];
        if (slope != NULL)
            slopes(q, margin, slope);
        return;
    }
    for (int k = q->start[j]; k < q->start[j + 1]; k++) {
        int i = q->rows[k];

        margin[i] += by * q->values[k];
        if (slope != NULL)
            slope[i] = q->loss == SQUARED ? margin[i] - q->y[i] : -q->y[i] / (1 + expf(q->y[i] * margin[i]));
    }
}

/* What coordinate j promises; unless `cut`, it is negative where the penalty keeps the weight at zero. */
static double
score(int rule, int cut, double w, double g, double smooth, double l1)
{
    if (!cut && w == 0)
        return fabs(g) - l1;

    double to = shrink(w - g / smooth, l1 / smooth), a = to - w;

    if (rule == GS_R)
        return fabs(a) * smooth;
    if (rule == GS_S)
        return w == 0 ? fabs(shrink(g, l1)) : fabs(g + (w > 0 ? l1 : -l1));
    return sqrt(2 * smooth * fmax(0, -(g * a + smooth * a * a / 2 + l1 * (fabs(to) - fabs(w)))));
}

static double
stepped(const Problem *q, int j, double w, double g, double step)
{
    double by = step / q->smooth[j];

    return shrink(w - by * g, by * q->l1);
}

/* u at zero weights. */
void
sums_at_zero(const Problem *q, const double *clip, float *u)
{
    float *margin = calloc(q->n, sizeof(float)), *slope = malloc(q->n * sizeof(float));

    slopes(q, margin, slope);
    for (int j = 0; j < q->p; j++)
        u[j] = (float)clipped_sum(q, j, slope, (float)(1 / clip[j]));
    free(margin);
    free(slope);
}

/*
 * DP-GCD: `passes` passes, in each of which the `top` coordinates of the largest noisy scores move.
 *
 * `first` is u at zero weights. `choice` has p standard draws for each pass, `value` `top` of them.
 */
void
greedy(const Problem *q, const double *clip, const float *first, int passes, int top, int rule, int cut, double step,
       double choice_scale, double value_scale, const float *choice, const float *value, double *w)
{
    float *margin = calloc(q->n, sizeof(float)), *slope = malloc(q->n * sizeof(float));
    double *u = malloc(q->p * sizeof(double)), *best = malloc(top * sizeof(double)), *to = malloc(top * sizeof(double));
    int *which = malloc(top * sizeof(int));

    memset(w, 0, q->p * sizeof(double));
    for (int t = 0; t < passes; t++) {
        int found = 0;

        if (t > 0)
            slopes(q, margin, slope);
        for (int j = 0; j < q->p; j++) {
            double unit = clip[j] / q->n, noisy;
            int k;

            u[j] = t == 0 ? first[j] : clipped_sum(q, j, slope, (float)(1 / clip[j]));
            noisy = score(rule, cut, w[j], unit * u[j], q->smooth[j], q->l1) / unit;
            noisy += choice_scale * choice[(size_t)t * q->p + j];
            if (found == top && noisy <= best[top - 1])
                continue;
            for (k = found < top ? found++ : top - 1; k > 0 && best[k - 1] < noisy; k--) {
                best[k] = best[k - 1];
                which[k] = which[k - 1];
            }
            best[k] = noisy;
            which[k] = j;
        }
        for (int k = 0; k < top; k++) {
            int j = which[k];

            to[k] = stepped(q, j, w[j], clip[j] / q->n * (u[j] + value_scale * value[t * top + k]), step);
        }
        for (int k = 0; k < top; k++) {
            move(q, which[k], (float)(to[k] - w[which[k]]), margin, NULL);
            w[which[k]] = to[k];
        }
    }
    free(margin);
    free(slope);
    free(u);
    free(best);
    free(to);
    free(which);
}

/* DP-CD: `steps` steps along the coordinates `along`. Gives the last weights and the mean of all. */
void
random_steps(const Problem *q, const double *clip, int steps, double step, double scale, const int *along,
             const float *value, double *w, double *mean)
{
    float *margin = calloc(q->n, sizeof(float)), *slope = malloc(q->n * sizeof(float));
    int *since = calloc(q->p, sizeof(int));

    memset(w, 0, q->p * sizeof(double));
    memset(mean, 0, q->p * sizeof(double));
    slopes(q, margin, slope);
    for (int k = 0; k < steps; k++) {
        int j = along[k];
        double u = clipped_sum(q, j, slope, (float)(1 / clip[j])) + scale * value[k];
        double to = stepped(q, j, w[j], clip[j] / q->n * u, step);

        if (to == w[j])
            continue;
        mean[j] += w[j] * (k - since[j]);
        since[j] = k;
        move(q, j, (float)(to - w[j]), margin, slope);
        w[j] = to;
    }
    for (int j = 0; j < q->p; j++)
        mean[j] = (mean[j] + w[j] * (steps - since[j])) / steps;
    free(margin);
    free(slope);
    free(since);
}

/* The mean loss and l1 |w|_1. */
double
objective(const Problem *q, const double *w)
{
    float *margin = calloc(q->n, sizeof(float));
    double loss = 0, size = 0;

    for (int j = 0; j < q->p; j++)
        if (w[j] != 0) {
            size += fabs(w[j]);
            move(q, j, (float)w[j], margin, NULL);
        }
    for (int i = 0; i < q->n; i++) {
        double m = margin[i], y = q->y[i];

        loss += q->loss == SQUARED ? (m - y) * (m - y) / 2 : fmax(0, -y * m) + log1p(exp(-fabs(m)));
    }
    free(margin);
    return loss / q->n + q->l1 * size;
}
