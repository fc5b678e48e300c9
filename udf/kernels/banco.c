/*
 * banco.c: BANCO (Jun and Orabona 2019), SGD without a learning rate, from subgradients that are noisy one by one.
 *
 * A direction q in the unit ball and a magnitude m are learned apart, and w = m q. With q_1 = w_1 = 0, row t gives
 *
 *     g = -slope_t x_t + noise, rounded to a grid (sums.c)
 *     x += <g, q>,  S += |g|^2,  y += s1^2 / 2 + G^2
 *     m = 1/(2a) int_{-a}^{a} u exp(u x - u^2 y) du
 *     q <- Proj_1(q + sqrt(2 / S) g),  w <- m q
 *
 * and the result is the mean of the w at which subgradients were taken. What enters the body is noisy before anything
 * is done with it, a row of zeros like any other; each row is used once, so a row's privacy is that of its own noise,
 * whatever G, s1^2 and a (lipschitz, variance, reach) are: these decide only how well it learns. One pass, one
 * partition: the magnitude's argument is about one sequence of bets. bismarck_dp/banco.py derives the constants.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

/* The iterates of 10^18 rows can be added up without overflow. */
#define LARGEST 1e280

typedef struct Banco {
    int32_t d;
    int32_t loss; /* index of the loss */
    int32_t pass; /* completed */
    int32_t unused;
    int64_t n; /* rows in the table */
    int64_t t; /* of them, folded */
    double loss_param, clip;
    double bet;   /* s1^2 / 2 + G^2, what y grows by */
    double reach; /* a */
    DpNoise noise;

    double x, y, squares; /* squares is S */
    double vectors[];     /* w, q, the row's subgradient, the sum of the iterates: d each */
} Banco;

#define WEIGHTS(s) ((s)->vectors)
#define DIRECTION(s) ((s)->vectors + (s)->d)
#define GRADIENT(s) ((s)->vectors + 2 * (size_t)(s)->d)
#define TOTAL(s) ((s)->vectors + 3 * (size_t)(s)->d)

/* ---- the magnitude ---- */

/*
 * Gauss and Legendre on [0, 1]: from the roots r of the Legendre polynomial P_24, found by mpmath with 50 digits,
 * (1 + r) / 2 and 1 / ((1 - r^2) P_24'(r)^2).
 */
static const struct {
    double node, weight;
} rule[] = {
    {0.00240639000148931991, 0.0061706148999935997734}, {0.012635722014345250901, 0.014265694314466831591},
    {0.030862723998633620738, 0.022138719408709903084}, {0.056792236497799482893, 0.029649292457718390373},
    {0.089999007013048539023, 0.036673240705540152867}, {0.12993790421072281788, 0.043095080765976637959},
    {0.17595317403151221537, 0.048809326052056944135},  {0.22728926430558023217, 0.053722135057982817391},
    {0.28310324618697743076, 0.057752834026862800677},  {0.34247866015191831281, 0.060835236463901695602},
    {0.40444056626319184542, 0.062918728173414148061},  {0.46797155356869718696, 0.063969097673376078487},
    {0.53202844643130281304, 0.063969097673376078487},  {0.59555943373680815458, 0.062918728173414148061},
    {0.65752133984808168719, 0.060835236463901695602},  {0.71689675381302256924, 0.057752834026862800677},
    {0.77271073569441976783, 0.053722135057982817391},  {0.82404682596848778463, 0.048809326052056944135},
    {0.87006209578927718212, 0.043095080765976637959},  {0.91000099298695146098, 0.036673240705540152867},
    {0.94320776350220051711, 0.029649292457718390373},  {0.96913727600136637926, 0.022138719408709903084},
    {0.9873642779856547491, 0.014265694314466831591},   {0.99759360999851068009, 0.0061706148999935997734},
};

#define NODES ((int)(sizeof(rule) / sizeof(rule[0])))

/* exp(log) * rest, log >= 0, without overflow on the way */
static double
scaled(double log, double rest)
{
    double half = exp(fmin(log, 1400.0) / 2.0);

    return fmin(half * rest * half, LARGEST);
}

/* By k = x / (2 sqrt(y)), the peak in units of 1 / sqrt(y), when it is at least one such unit below a. */
static double
closed_form(double x, double k, double a, double root)
{
    const double half_sqrt_pi = 0.88622692545275801365;
    double reach = a * root;
    double inside = k / reach * half_sqrt_pi * (erf(reach - k) + erf(reach + k));
    double ends = 0.5 * exp(-(reach - k) * (reach - k)) * expm1(-2.0 * a * x);

    return scaled(k * k, (inside + ends / reach) / (2.0 * root));
}

/*
 * 1/(2a) int_0^a u exp(u x - u^2 y) (1 - exp(-2 u x)) du, the maximum of the exponent factored out. With the peak above
 * a, or less than 1 / sqrt(y) below, what counts lies between a and 9 standard deviations, or 38 e-foldings, below the
 * maximum.
 */
static double
quadrature(double x, double y, double a)
{
    double peak = 0.5 * x / y;
    double top = fmin(peak, a);
    double slope = peak >= a ? x - 2.0 * (a * y) : 0.0; /* rounding may leave it below zero */
    double width = fmin(9.0 * M_SQRT1_2 / sqrt(y), slope > 0.0 ? 38.0 / slope : INFINITY);
    double span = fmin(a, a - top + width);
    double total = 0.0;

    for (int i = 0; i < NODES; i++) {
        double u = a - span * rule[i].node;
        double above = a - top - span * rule[i].node;

        total += rule[i].weight * (u / a) * exp(above * (slope - above * y)) * -expm1(-2.0 * u * x);
    }
    return scaled(top * (x - top * y), 0.5 * span * total);
}

double
dp_banco_magnitude(double x, double y, double a)
{
    double size = fabs(x), root = sqrt(y);
    double k = 0.5 * size / root;

    if (size == 0.0)
        return 0.0;
    return copysign(a * root - k >= 1.0 ? closed_form(size, k, a, root) : quadrature(size, y, a), x);
}

/* ---- the solver ---- */

static size_t
banco_size(int d)
{
    return sizeof(Banco) + 4 * (size_t)d * sizeof(double);
}

static bool
positive(double number)
{
    return number > 0.0 && isfinite(number);
}

static const char *
banco_start(void *body, int d, const DpParams *p)
{
    Banco *s = body;
    const DpLoss *loss = dp_loss_named(p->word(p->host, "loss"));
    double lipschitz = p->number(p->host, "lipschitz");
    double variance = p->number(p->host, "variance");

    memset(s, 0, banco_size(d));
    if (loss == NULL)
        return "loss";
    s->d = d;
    s->loss = dp_loss_index(loss);
    s->n = (int64_t)p->number(p->host, "n");
    s->loss_param = p->number(p->host, "loss_param");
    s->clip = p->number(p->host, "clip");
    s->bet = variance / 2.0 + lipschitz * lipschitz;
    s->reach = p->number(p->host, "reach");
    if (!positive(lipschitz) || !(variance >= 0.0) || !positive(s->bet) || !positive(s->reach))
        return "lipschitz, variance or reach";
    if (s->n < 1 || p->number(p->host, "workers") != 1.0 || p->number(p->host, "epochs") != 1.0)
        return "n, workers or epochs";
    return dp_noise_start(&s->noise, p, d);
}

static bool
banco_begin_pass(void *body, int part)
{
    const Banco *s = body;

    return s->pass == 0 && part == 0;
}

/* An iterate counts before it changes: the mean is over those at which a subgradient was taken. */
static void
learn(Banco *s)
{
    double *w = WEIGHTS(s), *q = DIRECTION(s), *g = GRADIENT(s), *total = TOTAL(s);
    double won = 0.0, square = 0.0, rate, m;

    for (int j = 0; j < s->d; j++) {
        total[j] += w[j];
        won += g[j] * q[j];
        square += g[j] * g[j];
    }
    s->x += won;
    s->y += s->bet;
    s->squares += square;
    rate = s->squares > 0.0 ? sqrt(2.0 / s->squares) : 0.0;
    for (int j = 0; j < s->d; j++)
        q[j] += rate * g[j];
    dp_project(q, 1.0, s->d);
    m = dp_banco_magnitude(s->x, s->y, s->reach);
    for (int j = 0; j < s->d; j++)
        w[j] = m * q[j];
}

static bool
banco_fold(void *body, const float *rows, int n, DpPool *pool)
{
    Banco *s = body;
    const DpLoss *loss = dp_loss_at(s->loss);

    if (s->t + n > s->n)
        return false;
    for (int i = 0; i < n; i++, rows += s->d + 1) {
        double slope = loss->slope(dp_dot(WEIGHTS(s), rows + 1, s->d), (double)rows[0], s->loss_param);

        memset(GRADIENT(s), 0, (size_t)s->d * sizeof(double));
        dp_axpy(GRADIENT(s), -dp_noised_slope(&s->noise, slope, rows + 1, s->d, s->clip), rows + 1, s->d);
        dp_noise_add(&s->noise, pool, GRADIENT(s), s->d);
        learn(s);
        s->t++;
    }
    return true;
}

static bool
banco_complete(const void *body)
{
    const Banco *s = body;

    return s->t == s->n;
}

/* There is one partition: its share is all, and there is nothing to add to it. */
static void
banco_weigh(void *body)
{
    (void)body;
}

static void
banco_merge(void *body, const void *other)
{
    (void)body;
    (void)other;
}

static void
banco_end_pass(void *body, DpPool *pool)
{
    (void)pool;
    ((Banco *)body)->pass++;
}

/* Never added up: it would have to come from rows without noise. */
static double
banco_objective(const void *body)
{
    (void)body;
    return NAN;
}

static void
banco_output(const void *body, double *w)
{
    const Banco *s = body;

    memcpy(w, TOTAL(s), (size_t)s->d * sizeof(double));
    dp_scale(w, 1.0 / (double)(s->t > 0 ? s->t : 1), s->d);
}

static int
banco_passes(const void *body)
{
    return ((const Banco *)body)->pass;
}

static bool
banco_noised(const void *body)
{
    return ((const Banco *)body)->noise.mechanism != DP_NO_NOISE;
}

const DpSolver dp_banco = {
    .name = "banco",
    .size = banco_size,
    .start = banco_start,
    .begin_pass = banco_begin_pass,
    .fold = banco_fold,
    .complete = banco_complete,
    .merge = banco_merge,
    .weigh = banco_weigh,
    .end_pass = banco_end_pass,
    .objective = banco_objective,
    .output = banco_output,
    .passes = banco_passes,
    .noised = banco_noised,
};
