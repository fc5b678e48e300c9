/* solvers.c: the solvers there are. */
#include "kernels.h"

#include <string.h>

static const DpSolver *const solvers[] = {&dp_sgd, &dp_banco, &dp_cd, &dp_gcd, &dp_scd, &dp_primal};

#define N_SOLVERS ((int)(sizeof(solvers) / sizeof(solvers[0])))

const DpSolver *
dp_solver_named(const char *name)
{
    for (int i = 0; i < N_SOLVERS; i++)
        if (strcmp(solvers[i]->name, name) == 0)
            return solvers[i];
    return NULL;
}

const DpSolver *
dp_solver_at(int index)
{
    return index >= 0 && index < N_SOLVERS ? solvers[index] : NULL;
}

int
dp_solver_index(const DpSolver *solver)
{
    int i = 0;

    while (solvers[i] != solver)
        i++;
    return i;
}
