/*
 * params.c: parameters travel as one jsonb from the plan to the kernels, under the words users know.
 *
 * "inf" stands for infinity, which JSON cannot write as a number.
 */
#include "bismarck_dp.h"

#include <math.h>

#include "utils/builtins.h"
#include "utils/numeric.h"
#include "miscadmin.h"

static JsonbValue *
find(Jsonb *params, const char *key)
{
    JsonbValue name;

    name.type = jbvString;
    name.val.string.val = (char *)key;
    name.val.string.len = (int)strlen(key);
    return findJsonbValueFromContainer(&params->root, JB_FOBJECT, &name);
}

static JsonbValue *
find_or_fail(Jsonb *params, const char *key)
{
    JsonbValue *value = find(params, key);

    if (value == NULL)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"%s\" is missing", key)));
    return value;
}

bool
dp_has(Jsonb *params, const char *key)
{
    JsonbValue *value = find(params, key);

    return value != NULL && value->type != jbvNull;
}

double
dp_number(Jsonb *params, const char *key)
{
    JsonbValue *value = find_or_fail(params, key);

    if (value->type == jbvNumeric)
        return DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(value->val.numeric)));
    if (value->type == jbvBool)
        return value->val.boolean ? 1.0 : 0.0;
    if (value->type == jbvString && value->val.string.len == 3 && memcmp(value->val.string.val, "inf", 3) == 0)
        return INFINITY;
    ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"%s\" is not a number", key)));
    return 0.0;
}

char *
dp_word(Jsonb *params, const char *key)
{
    JsonbValue *value = find_or_fail(params, key);

    if (value->type != jbvString)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"%s\" is not a word", key)));
    return pnstrdup(value->val.string.val, value->val.string.len);
}

Jsonb *
dp_object(Jsonb *params, const char *key)
{
    JsonbValue *value = find_or_fail(params, key);

    if (value->type != jbvBinary || !JsonContainerIsObject(value->val.binary.data))
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"%s\" is not an object", key)));
    return JsonbValueToJsonb(value);
}

static double
host_number(const void *host, const char *key)
{
    return dp_number((Jsonb *)host, key);
}

static const char *
host_word(const void *host, const char *key)
{
    return dp_word((Jsonb *)host, key);
}

/* An array of as many numbers as are wanted, or a number that stands for all of them. */
static void
host_numbers(const void *host, const char *key, double *out, int n)
{
    JsonbValue *value = find_or_fail((Jsonb *)host, key);
    JsonbIterator *it;
    JsonbValue element;
    int at = 0;

    if (value->type != jbvBinary) {
        double number = dp_number((Jsonb *)host, key);

        for (; at < n; at++)
            out[at] = number;
        return;
    }
    it = JsonbIteratorInit(value->val.binary.data);
    for (JsonbIteratorToken token; (token = JsonbIteratorNext(&it, &element, true)) != WJB_DONE;)
        if (token == WJB_ELEM && element.type == jbvNumeric && at < n)
            out[at++] =
                DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(element.val.numeric)));
    if (at < n)
        ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("parameter \"%s\" has too few numbers", key)));
}

double *
dp_numbers(Jsonb *params, const char *key, int *n)
{
    JsonbValue *value = find_or_fail(params, key);
    double *numbers;

    *n = value->type == jbvBinary ? (int)JsonContainerSize(value->val.binary.data) : 0;
    numbers = palloc(sizeof(double) * Max(*n, 1));
    if (*n > 0)
        host_numbers(params, key, numbers, *n);
    return numbers;
}

DpParams
dp_params(Jsonb *params)
{
    return (DpParams){host_number, host_word, host_numbers, params};
}

static void
check_for_interrupts(void)
{
    CHECK_FOR_INTERRUPTS();
}

/*
 * A key from the operating system, or from the owner's seed in a test. A seeded run is not private and its model says
 * so.
 */
static void
start_random(DpRandom *random, bool seeded, int64 seed, uint64_t stream)
{
    uint8_t key[DP_KEY_BYTES] = {0};

    if (seeded) {
        memcpy(key, &seed, sizeof(seed));
        dp_random_start(random, key, stream);
    } else if (!dp_random_fresh(random, stream))
        ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR), errmsg("the operating system gave no random numbers")));
    random->pulse = check_for_interrupts;
}

void
dp_random_from(DpRandom *random, Jsonb *params, uint64_t stream)
{
    bool seeded = dp_has(params, "seed");

    start_random(random, seeded, seeded ? (int64)dp_number(params, "seed") : 0, stream);
}

/* The state carries a seed, never a key: whoever runs a pass takes a key of its own. */
void
dp_random_of_state(DpRandom *random, const DpState *state, uint64_t stream)
{
    start_random(random, (state->flags & DP_STATE_SEEDED) != 0, state->seed, stream);
}

typedef struct Secret {
    MemoryContextCallback callback;
    Size size;
    double content[FLEXIBLE_ARRAY_MEMBER];
} Secret;

static void
wipe_secret(void *arg)
{
    Secret *secret = arg;

    explicit_bzero(secret->content, secret->size);
}

/* Keys and unused noise: gone with their context, however that ends. */
void *
dp_secret_alloc(MemoryContext context, Size size)
{
    Secret *secret =
        MemoryContextAllocExtended(context, offsetof(Secret, content) + size, MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);

    secret->size = size;
    secret->callback.func = wipe_secret;
    secret->callback.arg = secret;
    MemoryContextRegisterResetCallback(context, &secret->callback);
    return secret->content;
}

/* The stock of noise for one partition's pass, or NULL where the solver adds none. */
DpPool *
dp_pool_of_state(MemoryContext context, const DpState *state, int part)
{
    const DpSolver *solver = dp_state_solver(state);
    DpPool *pool;
    uint64_t stream;

    if (!solver->noised(state->body))
        return NULL;
    pool = dp_secret_alloc(context, sizeof(DpPool));
    stream = 256 * (uint64_t)solver->passes(state->body) + (uint64_t)part;
    dp_random_of_state(&pool->normals.random, state, DP_STREAM_SUMS + stream);
    dp_random_of_state(&pool->squares.random, state, DP_STREAM_SQUARES + stream);
    dp_random_of_state(&pool->choices, state, DP_STREAM_CHOICES + stream);
    return pool;
}
