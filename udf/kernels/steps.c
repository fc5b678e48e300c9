/* steps.c: how long steps are, and words that mean numbers. */
#include "kernels.h"

#include <math.h>
#include <string.h>

int
dp_index_of(const char *word, const char *const *words, int n)
{
    for (int i = 0; i < n; i++)
        if (strcmp(word, words[i]) == 0)
            return i;
    return -1;
}

const char *
dp_step_start(DpStep *step, const DpParams *p)
{
    static const char *const rules[] = {"constant", "decreasing", "sqrt", "strongly-convex", "inverse-sqrt"};

    step->unused = 0;
    step->rule = dp_index_of(p->word(p->host, "step"), rules, 5);
    step->eta = p->number(p->host, "eta");
    step->beta = p->number(p->host, "beta");
    step->gamma = p->number(p->host, "gamma");
    step->offset = p->number(p->host, "offset");
    return step->rule < 0 ? "step" : NULL;
}

double
dp_step(const DpStep *step, int64_t t)
{
    switch (step->rule) {
    case DP_STEP_DECREASING:
        return 2.0 / (step->beta * ((double)t + step->offset));
    case DP_STEP_SQRT:
        return 2.0 / (step->beta * (sqrt((double)t) + step->offset));
    case DP_STEP_STRONGLY_CONVEX:
        return fmin(1.0 / step->beta, 1.0 / (step->gamma * (double)t));
    case DP_STEP_INVERSE_SQRT:
        return fmin(1.0 / step->beta, step->eta / sqrt((double)t));
    default:
        return step->eta;
    }
}
