/*
 * exact.h: coins of exact probability, which the samplers share.
 */
#ifndef BISMARCK_DP_EXACT_H
#define BISMARCK_DP_EXACT_H

#include "kernels.h"

typedef unsigned __int128 u128;

/* True with probability numerator / denominator <= 1. */
extern bool dp_bernoulli(DpRandom *r, u128 numerator, u128 denominator);

/* True with probability exp(-numerator / denominator): for a fraction up to 1, and for any. */
extern bool dp_bernoulli_exp_fraction(DpRandom *r, u128 numerator, u128 denominator);
extern bool dp_bernoulli_exp(DpRandom *r, u128 numerator, u128 denominator);

#endif
