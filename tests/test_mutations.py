"""The harness has teeth: on a copy of the project with one known mistake in it, a named test fails.

Each mutation is an edit of the real source, compiled and installed aside; the named test then runs against that copy in
a process of its own, with its own server. It must fail by assertion: a copy that does not build, start or train fails
this test instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from bismarck_dp.controller.embedded import _pg_config

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "softmax with the constant of two classes",
        "bismarck_dp/losses.py",
        'return math.sqrt(2) if kind == "softmax" else math.sqrt(classes)',
        'return 1.0 if kind == "softmax" else math.sqrt(classes)',
        "test_classes.py::test_the_jump_of_a_replaced_row_is_attained",
    ),
    Mutation(
        "one against the rest with the noise of one class",
        "bismarck_dp/losses.py",
        'return math.sqrt(2) if kind == "softmax" else math.sqrt(classes)',
        'return math.sqrt(2) if kind == "softmax" else 1.0',
        "test_recordplay.py::test_neighbours_stay_within_the_declared_sensitivity",
    ),
    Mutation(
        "gradients of many classes that are not clipped",
        "udf/kernels/sgd.c",
        "    if (norm > most)\n",
        "    if (norm > 1e9 * most)\n",
        "test_classes.py::test_no_weights_make_a_gradient_longer_than_the_noise_covers",
    ),
    Mutation(
        "noise on the weights of one class only",
        "udf/release.c",
        "dp_perturb(noise, w, state->weights);",
        "dp_perturb(noise, w, state->d);",
        "test_classes.py::test_a_release_of_many_classes_has_one_noise",
    ),
    Mutation(
        "rows that are not cut after they were projected",
        "udf/kernels/vectors.c",
        "    double factor = factor_of(shape, norm, 1.0);",
        "    double factor = shape->matrix != NULL ? 1.0 : factor_of(shape, norm, 1.0);",
        "test_preparation.py::test_projected_rows_keep_their_bound",
    ),
    Mutation(
        "bounds chosen without the factor 2",
        "bismarck_dp/scaling.py",
        '"numerator": numerator,',
        '"numerator": 2 * numerator,',
        "test_preparation.py::test_bounds_are_paid_for",
    ),
    Mutation(
        "bounds twice as sure as planned",
        "udf/bounds.c",
        "score[i] = score[i] * numerator - i * prior;",
        "score[i] = 2 * score[i] * numerator - i * prior;",
        "test_preparation.py::test_choices_follow_the_exponential_mechanism",
    ),
    Mutation(
        "bounds that cost nothing",
        "bismarck_dp/scaling.py",
        'return replace(spec, epsilon=spec.epsilon * (1 - spec.options["private_scale"]))',
        "return spec",
        "test_preparation.py::test_bounds_are_paid_for",
    ),
    Mutation(
        "half the Gaussian noise",
        "udf/kernels/noise.c",
        "dp_discrete_gaussian(r, sigma))",
        "dp_discrete_gaussian(r, sigma / 2))",
        "test_audit.py::test_the_gaussian_claim_holds_and_is_not_idle",
    ),
    Mutation(
        "half the K-norm noise",
        "udf/kernels/knorm.c",
        "dp_knorm_noise(r, scale / grid,",
        "dp_knorm_noise(r, 0.5 * scale / grid,",
        "test_audit.py::test_the_l2_laplace_claim_holds_and_is_not_idle",
    ),
    Mutation(
        "a direction from the ball",
        "udf/kernels/knorm.c",
        "dp_knorm_noise(r, scale / grid,",
        "dp_knorm_noise(r, pow(dp_random_u32(r) * 0x1p-32, 1.0 / d) * scale / grid,",
        "test_audit.py::test_the_l2_laplace_claim_holds_and_is_not_idle",
    ),
    Mutation(
        "a fixed seed",
        "udf/kernels/random.c",
        "getentropy(key, sizeof(key)) != 0",
        "memset(key, 7, sizeof(key)) == NULL",
        "test_audit.py::test_the_gaussian_claim_holds_and_is_not_idle",
    ),
    Mutation(
        "the paper's /b",
        "bismarck_dp/sensitivity.py",
        "return jump / schedule.batch_size *",
        "return jump / schedule.batch_size**2 *",
        "test_audit.py::test_the_batched_claim_holds",
    ),
    Mutation(
        "a bad row skipped",
        "udf/pack.c",
        "    p->visit((char *)p->row, p->arg);\n    p->n++;",
        "    if (p->row[0] == 0)\n        return true;\n    p->visit((char *)p->row, p->arg);\n    p->n++;",
        "test_audit.py::test_bad_rows_are_no_tell",
    ),
    Mutation(
        "a bad row refused",
        "udf/pack.c",
        "    MemoryContextReset(p->per_row);\n    p->visit",
        '    MemoryContextReset(p->per_row);\n    if (p->row[0] == 0)\n        elog(ERROR, "bad row");\n    p->visit',
        "test_audit.py::test_bad_rows_are_no_tell",
    ),
    Mutation(
        "no noise to speak of, at an epsilon that no attack can prove",
        "udf/kernels/knorm.c",
        "dp_knorm_noise(r, scale / grid,",
        "dp_knorm_noise(r, 1e-9 * scale / grid,",
        "test_audit.py::test_says_how_much_it_could_have_proven",
    ),
    Mutation(
        "half the noise, at the default spec",
        "udf/kernels/knorm.c",
        "dp_knorm_noise(r, scale / grid,",
        "dp_knorm_noise(r, 0.5 * scale / grid,",
        "test_audit.py::test_every_private_algorithm_keeps_its_claim[bolton-0.0-replace]",
    ),
    Mutation(
        "a sensitivity declared too small by the server alone",
        "controller/train.py",
        "    bounds = engine.measure(request, plan)",
        '    object.__setattr__(plan, "sensitivity", plan.sensitivity / 1.5)\n'
        "    bounds = engine.measure(request, plan)",
        "test_audit.py::test_the_batched_claim_holds",
    ),
    Mutation(
        "twice the step",
        "udf/kernels/sgd.c",
        "eta = dp_step(",
        "eta = 2 * dp_step(",
        "test_audit.py::test_the_gaussian_claim_holds_and_is_not_idle",
    ),
    Mutation(
        "rows not cut to the bound",
        "udf/kernels/vectors.c",
        "return norm > shape->bound / unit",
        "return norm > 4 * shape->bound / unit",
        "test_audit.py::test_bad_rows_are_no_tell",
    ),
    Mutation(
        "half the Gaussian noise on sums",
        "udf/kernels/sums.c",
        "add_normals(pool, noise->scale, noise->grid",
        "add_normals(pool, 0.5 * noise->scale, noise->grid",
        "test_noisy.py::test_gaussian_noise_on_sums_has_its_law[50]",
    ),
    Mutation(
        "half the noise on sums, as the audit sees it",
        "udf/kernels/sums.c",
        "add_normals(pool, noise->scale, noise->grid",
        "add_normals(pool, 0.5 * noise->scale, noise->grid",
        "test_audit.py::test_every_private_algorithm_keeps_its_claim[dpsgd-0.01-replace]",
    ),
    Mutation(
        "K-norm noise with one degree of freedom too few",
        "udf/kernels/sums.c",
        "chi(pool, d + 1)",
        "chi(pool, d)",
        "test_noisy.py::test_knorm_noise_on_sums_has_its_law[3]",
    ),
    Mutation(
        "half the K-norm noise on sums, as the audit sees it",
        "udf/kernels/sums.c",
        "noise->scale * chi(pool, d + 1)",
        "0.5 * noise->scale * chi(pool, d + 1)",
        "test_audit.py::test_every_private_algorithm_keeps_its_claim[banco-0.0-replace]",
    ),
    Mutation(
        "noise that is not rounded",
        "udf/kernels/sums.c",
        "sum[j] = grid * (((sum[j] + scale * numbers[j]) * per_step + whole) - whole);",
        "sum[j] += scale * numbers[j] + 0 * per_step * whole;",
        "test_noisy.py::test_gaussian_noise_on_sums_has_its_law[2]",
    ),
    Mutation(
        "a shuffled table accounted as Poisson samples",
        "udf/sample.c",
        "    walk->next += 1 + dp_gap(&walk->words, &walk->gaps);",
        "    walk->next = first + walk->steps + dp_random_below(&walk->words.random, walk->steps);",
        "test_noisy.py::test_rows_are_drawn_by_independent_coins[64MB]",
    ),
    Mutation(
        "no noise on an empty batch",
        "udf/kernels/sgd.c",
        "    dp_noise_add(&s->noise, pool, GRADIENT(s), s->weights);",
        "    if (dp_norm(GRADIENT(s), s->weights) > 0)\n"
        "        dp_noise_add(&s->noise, pool, GRADIENT(s), s->weights);",
        "test_noisy.py::test_every_batch_has_noise_also_an_empty_one",
    ),
    Mutation(
        "one pass accounted for many",
        "bismarck_dp/noisy.py",
        "Laplaces(passes) if spec.delta == 0 else Gaussians(passes)",
        "Laplaces(1) if spec.delta == 0 else Gaussians(1)",
        "test_noisy.py::test_scs13_composes_passes[replace]",
    ),
    Mutation(
        "the sampled noise of a row that is never replaced",
        "bismarck_dp/noisy.py",
        'PoissonGaussians(probability, steps, spec.options["adjacency"])',
        'PoissonGaussians(probability, steps, "zero-out")',
        "test_noisy.py::test_sampled_noise_costs_no_more_than_epsilon[60000-50-10-replace]",
    ),
    Mutation(
        "a slope that is no number",
        "udf/kernels/vectors.c",
        "if (isnan(slope) || norm == 0.0)",
        "if (norm == 0.0)",
        "test_noisy.py::test_no_slope_leaves_the_clip",
    ),
    Mutation(
        "a gradient that is not clipped",
        "udf/kernels/vectors.c",
        "return fabs(slope) > most ? copysign(most, slope) : slope;",
        "return fabs(slope) > 1e9 * most ? copysign(most, slope) : slope;",
        "test_recordplay.py::test_neighbours_stay_within_the_declared_sensitivity",
    ),
    Mutation(
        "a choice among candidates at twice its epsilon",
        "bismarck_dp/tuning.py",
        '"denominator": 2 * EXPONENTS * units(plans)',
        '"denominator": EXPONENTS * units(plans)',
        "test_tune_privacy.py::test_the_choice_has_the_law_of_the_exponential_mechanism[logistic]",
    ),
    Mutation(
        "rows of the portions also held out",
        "udf/tune.c",
        "        add_row(s, draw_portion(s), row);",
        "        add_row(s, draw_portion(s), row), add_row(s, &s->portions[s->count - 1], row);",
        "test_tune.py::test_every_row_is_in_exactly_one_portion[True-1000-3]",
    ),
    Mutation(
        "candidates trained on what was held out",
        "controller/tune.py",
        "portions, list(range(len(plans))), progress)",
        "portions, [len(plans)] * len(plans), progress)",
        "test_tune_privacy.py::test_a_tuning_is_what_its_parts_make[0-replace]",
    ),
    Mutation(
        "half the noise of a trial's score",
        "udf/tune.c",
        "dp_discrete_laplace(random, (uint64_t)scale)",
        "dp_discrete_laplace(random, (uint64_t)scale / 2)",
        "test_tune_privacy.py::test_scores_have_their_noise[laplace-24-8]",
    ),
    Mutation(
        "no noise on models that wait to be chosen",
        "udf/tune.c",
        "    dp_output(state, PG_GETARG_JSONB_P(1), w);",
        "    dp_state_solver(state)->output(state->body, w);",
        "test_tune_privacy.py::test_a_tuning_is_what_its_parts_make[0-replace]",
    ),
    Mutation(
        "the same noise in every pass",
        "udf/params.c",
        "    stream = 256 * (uint64_t)solver->passes(state->body) + (uint64_t)part;",
        "    stream = (uint64_t)part;",
        "test_noisy.py::test_weights_in_the_server_equal_numpys",
    ),
    Mutation(
        "a pass more than planned",
        "udf/kernels/sgd.c",
        "if (s->pass >= s->passes)",
        "if (s->pass > s->passes)",
        "test_noisy.py::test_no_more_passes_than_planned[scs13]",
    ),
    Mutation(
        "half the noise on a provider's gradient",
        "bismarck_dp/local.py",
        "return setting.jump * (1 + 1e-6)",
        "return setting.jump / 2",
        "test_local.py::test_a_gradient_has_its_noise",
    ),
    Mutation(
        "a provider's gradient that is not clipped",
        "udf/local.c",
        'slope = dp_clip_slope(slope, row + 1, width, dp_number(params, "clip"));',
        'slope = dp_clip_slope(slope, row + 1, width, 1e9 * dp_number(params, "clip"));',
        "test_local.py::test_no_state_makes_a_gradient_longer_than_the_noise_covers",
    ),
    Mutation(
        "a poster's formula without K",
        "bismarck_dp/coordinates.py",
        "return Gaussians(schedule.total_updates)",
        "return Gaussians(schedule.rounds)",
        "test_coordinates_privacy.py::test_dpcd_counts_every_inner_step",
    ),
    Mutation(
        "a choice without the factor 2",
        "bismarck_dp/coordinates.py",
        '"selection_denominator": 2 * steps * EXPONENTS',
        '"selection_denominator": steps * EXPONENTS',
        "test_coordinates_privacy.py::test_a_choice_costs_its_epsilon_and_no_more",
    ),
    Mutation(
        "choices twice as sure as planned",
        "udf/kernels/gcd.c",
        "SCORE(s), left, s->numerator, s->denominator)",
        "SCORE(s), left, 2 * s->numerator, s->denominator)",
        "test_coordinates_privacy.py::test_choices_are_the_exponential_mechanisms",
    ),
    Mutation(
        "Laplace noise for a row that is never replaced",
        "bismarck_dp/coordinates.py",
        'return 2 if setting.spec.options["adjacency"] == "replace" else 1',
        "return 1",
        "test_recordplay.py::test_noise_on_coordinates_is_tight",
    ),
    Mutation(
        "scores that are louder for some coordinates",
        "udf/kernels/gcd.c",
        "Scaled c = {.k = SUMS(s)[j]};",
        "Scaled c = {.k = SUMS(s)[j] * sqrt(SMOOTHNESS(s)[j])};",
        "test_coordinates_privacy.py::test_scores_of_unequal_coordinates_have_one_sensitivity",
    ),
    Mutation(
        "half the noise on a coordinate",
        "udf/kernels/cd.c",
        "    dp_noise_add(&s->base.noise, pool, &sum, 1);",
        "    sum *= 2;\n    dp_noise_add(&s->base.noise, pool, &sum, 1);\n    sum /= 2;",
        "test_coordinates_privacy.py::test_a_step_has_its_gaussian_noise",
    ),
    Mutation(
        "a row of zeros that counts",
        "udf/kernels/losses.c",
        "double most = clip < DP_STEEPEST ? clip : DP_STEEPEST;",
        "double most = clip;",
        "test_coordinates.py::test_a_row_of_zeros_counts_for_nothing_at_any_weights",
    ),
    Mutation(
        "a derivative that is not cut",
        "udf/kernels/descent.c",
        "s->bound = cut ? 1.0 : INFINITY;",
        "s->bound = cut ? 1e9 : INFINITY;",
        "test_recordplay.py::test_noise_on_coordinates_is_tight",
    ),
    Mutation(
        "constants measured without noise",
        "udf/kernels/descent.c",
        "(double)((int64_t)squares + dp_discrete_laplace(random, (uint64_t)s->measure_scale));",
        "(double)((int64_t)squares + 0 * dp_discrete_laplace(random, (uint64_t)s->measure_scale));",
        "test_coordinates_privacy.py::test_measured_constants_have_their_laplace_noise",
    ),
    Mutation(
        "constants that cost nothing",
        "bismarck_dp/coordinates.py",
        'left = spec.epsilon * (1 - (spec.options["private_constants"] or 0.0))',
        "left = spec.epsilon",
        "test_coordinates_privacy.py::test_constants_are_paid_for",
    ),
    Mutation(
        "a coordinate step twice as long",
        "udf/kernels/descent.c",
        "rate = fmin(dp_step(&s->step, t) / smoothness, DP_DIVERGED);",
        "rate = fmin(2 * dp_step(&s->step, t) / smoothness, DP_DIVERGED);",
        "test_coordinates.py::test_c_agrees_with_numpy",
    ),
    Mutation(
        "half the noise on v",
        "udf/kernels/scd.c",
        "    dp_noise_add(&s->noise, pool, SUM(s), s->d);",
        "    DpNoise half = s->noise;\n    half.scale /= 2;\n    dp_noise_add(&half, pool, SUM(s), s->d);",
        "test_dual_privacy.py::test_v_has_the_noise_of_every_batch",
    ),
    Mutation(
        "what rows add that goes past the noise",
        "udf/kernels/scd.c",
        "    dp_axpy(SUM(s), move, row + 1, s->d);\n    *memory += move;",
        "    dp_axpy(V(s), move, row + 1, s->d);\n    *memory += move;",
        "test_dual.py::test_c_agrees_with_numpy",
    ),
    Mutation(
        "a move that is not clipped",
        "udf/kernels/scd.c",
        "return dp_clip_by_norm(move, norm, s->clip);",
        "return dp_clip_by_norm(move, norm, 1e9 * s->clip);",
        "test_dual.py::test_no_v_makes_a_row_add_more_than_the_clip",
    ),
    Mutation(
        "a step on the dual twice as long",
        "udf/kernels/losses.c",
        "return within(from + (y - z - from) / (1.0 + curvature), -clip, clip);",
        "return within(from + 2 * (y - z - from) / (1.0 + curvature), -clip, clip);",
        "test_dual.py::test_moves_minimise_their_part",
    ),
    Mutation(
        "batches of a fixed size that are accounted as Poisson samples",
        "udf/sample.c",
        '    if (dp_has(params, "probability"))',
        "    if (!solver->remembers)",
        "test_dual_privacy.py::test_rows_are_drawn_by_independent_coins",
    ),
    Mutation(
        "memories that go to other rows when another scan is under way",
        "udf/pack.c",
        "table_beginscan_strat(relation, GetActiveSnapshot(), 0, NULL, true, false)",
        "table_beginscan(relation, GetActiveSnapshot(), 0, NULL)",
        "test_dual.py::test_memories_stay_with_their_rows_whatever_else_was_read",
    ),
    Mutation(
        "dual variables that leave, in the duality gap",
        "udf/state.c",
        "    if (state->flags & DP_STATE_PRIVATE)",
        "    if (state->flags & DP_STATE_SEEDED)",
        "test_dual_privacy.py::test_a_private_run_shows_no_gap_and_no_objective",
    ),
    Mutation(
        "a sequential batch that is noised like a row",
        "bismarck_dp/dual.py",
        "return (2 * most - 1) * one, apart * one",
        "return one, apart * one",
        "test_dual_privacy.py::test_sequential_noise_is_that_of_whole_batches",
    ),
    Mutation(
        "sequential memories that keep what they saw",
        "udf/kernels/scd.c",
        "    *memory += move_of(s, row, norm, *memory, V(s));",
        "    *memory += move;",
        "test_dual_privacy.py::test_a_row_never_reaches_the_memories_of_others",
    ),
    Mutation(
        "blocks noised for one move",
        "bismarck_dp/dual.py",
        "sensitivity = 2 * clip * root * (1 + 1e-12)",
        "sensitivity = 2 * clip * (1 + 1e-12)",
        "test_dual_privacy.py::test_noise_on_moves_is_tight",
    ),
    Mutation(
        "moves that are not cut",
        "udf/kernels/primal.c",
        "fmax(-s->clip, fmin(s->clip, move))",
        "fmax(-9 * s->clip, fmin(9 * s->clip, move))",
        "test_dual_privacy.py::test_noise_on_moves_is_tight",
    ),
    Mutation(
        "rows normalized beyond their bound",
        "udf/kernels/vectors.c",
        "? shape->bound / norm : unit;",
        "? 1.01 * shape->bound / norm : unit;",
        "test_dual.py::test_scaled_rows_agree_with_numpy",
    ),
    Mutation(
        "the best of pure trials without what the choice costs",
        "bismarck_dp/repeats.py",
        "return (2 + self.shape) * base",
        "return (1 + self.shape) * base",
        "test_stopping.py::test_pure_trials_cost_what_is_claimed_and_not_less[0.5-0.0]",
    ),
    Mutation(
        "trials that are not counted",
        "bismarck_dp/repeats.py",
        "often = math.log(self.mean) / (orders - 1)",
        "often = 0 / orders",
        "test_stopping.py::test_gaussian_totals_equal_the_library[0.7-1e-06-10.0-0.0]",
    ),
    Mutation(
        "the shape of the law left out",
        "bismarck_dp/repeats.py",
        "(1 + self.shape) * ratio + often",
        "ratio + often",
        "test_stopping.py::test_gaussian_totals_equal_the_library[0.7-1e-06-10.0-1.0]",
    ),
    Mutation(
        "a number of trials that falls too slowly",
        "bismarck_dp/repeats.py",
        "(k * unit + shape) >> keep_bits) // ((k + 1) * unit)",
        "((k + 1) * unit + shape) >> keep_bits) // ((k + 1) * unit)",
        "test_stopping.py::test_draws_follow_the_law[10.0-0.0]",
    ),
    Mutation(
        "half the noise on scores",
        "bismarck_dp/stopping.py",
        "steps = math.ceil(scale * unit * (1 + 1e-12))",
        "steps = math.ceil(scale * unit / 2)",
        "test_stopping.py::test_trials_cost_no_more_than_epsilon[bolton-1.0-1e-06-replace]",
    ),
    Mutation(
        "arithmetic that trials do not pay for",
        "bismarck_dp/stopping.py",
        "curve.divergences + apart * excess",
        "curve.divergences + apart * 0",
        "test_stopping.py::test_arithmetic_of_all_trials_is_paid_for",
    ),
    Mutation(
        "sampled divergences of a row that is never replaced",
        "bismarck_dp/renyi.py",
        "directions((Step(z, q, 1),), adjacency)",
        'directions((Step(z, q, 1),), "zero-out")',
        "test_stopping.py::test_no_replaced_row_is_told_more_easily[1.0-0.1]",
    ),
    Mutation(
        "the cheapest of events side by side",
        "bismarck_dp/accounting.py",
        "return max((epsilon_of(choice, delta, adjacency)",
        "return min((epsilon_of(choice, delta, adjacency)",
        "test_stopping.py::test_side_by_side_costs_the_dearest",
    ),
    Mutation(
        "half the noise on an evaluation",
        "udf/evaluate.c",
        "dp_discrete_laplace(random, g->noise);",
        "dp_discrete_laplace(random, g->noise / 2);",
        "test_evaluate_privacy.py::test_every_number_has_its_own_noise",
    ),
    Mutation(
        "half the Gaussian noise on an evaluation",
        "udf/evaluate.c",
        "dp_discrete_gaussian(random, g->noise) :",
        "dp_discrete_gaussian(random, (g->noise + 1) / 2) :",
        "test_evaluate_privacy.py::test_every_number_has_its_own_noise",
    ),
    Mutation(
        "one noise for all sums of an evaluation",
        "udf/evaluate.c",
        "dp_discrete_laplace(random, g->noise);",
        "dp_discrete_laplace(memcpy(&(DpRandom){0}, random, sizeof(DpRandom)), g->noise);",
        "test_evaluate_privacy.py::test_every_number_has_its_own_noise",
    ),
    Mutation(
        "a histogram that pays for one of two cells",
        "bismarck_dp/evaluation.py",
        "    return 2.0 * unit if pure else math.sqrt(2) * unit\n\n\n@dataclass",
        "    return 1.0 * unit\n\n\n@dataclass",
        "test_evaluate_privacy.py::test_no_row_moves_a_group_further_than_declared_and_some_do[two-0.0-replace]",
    ),
    Mutation(
        "labels and their squares paid for as one number",
        "bismarck_dp/evaluation.py",
        "return 2.25 * unit + 2 if pure",
        "return 2.0 * unit + 2 if pure",
        "test_evaluate_privacy.py::test_no_row_moves_a_group_further_than_declared_and_some_do[number-0.0-replace]",
    ),
    Mutation(
        "a loss that is not cut",
        "udf/evaluate.c",
        "units_of(fmin(loss, s->loss_bound) / s->loss_bound, g)",
        "(int64)nearbyint((double)g->unit * fmin(loss, 1e3) / s->loss_bound)",
        "test_evaluate_privacy.py::test_sums_in_the_server_are_numpys",
    ),
    Mutation(
        "shares of an evaluation that add up to more",
        "bismarck_dp/evaluation.py",
        "part = shares[name] / total",
        "part = shares[name] / max(shares[name], total / 2)",
        "test_evaluate_privacy.py::test_a_release_costs_no_more_than_epsilon",
    ),
    Mutation(
        "candidates of a tuning that train without noise",
        "udf/tune.c",
        "dp_output(state, PG_GETARG_JSONB_P(1), w);",
        "dp_state_solver(state)->output(state->body, w);",
        "test_tune_attacks.py::test_an_attack_on_a_tuning_gets_no_more_than_epsilon[random_stopping-replace]",
    ),
    Mutation(
        "a matrix for each candidate",
        "udf/pack.c",
        "m = matrix_among(*made, p, seed, d);",
        "m = NULL, (void)matrix_among;",
        "test_tune.py::test_projections_of_a_grid_are_one_matrix",
    ),
    Mutation(
        "all rows of a unit",
        "udf/read.c",
        "    if (reading->source->unit == NULL)\n        read_once",
        "    if (reading->source->unit == NULL || reading->source->unit != NULL)\n        read_once",
        "test_units.py::test_a_unit_moves_the_model_by_its_sensitivity_at_most[1-replace]",
    ),
    Mutation(
        "the last rows of a unit, always",
        "udf/units.c",
        "at = (int64)dp_random_below(units->random, (uint64)unit->seen);",
        "at = unit->seen % units->most;",
        "test_units.py::test_choices_are_uniform_and_independent[1]",
    ),
    Mutation(
        "slots of a unit that share no delta",
        "bismarck_dp/units.py",
        "share = delta * ratio * (1 - SPARED)",
        "share = delta * max(ratio, 1 - SPARED)",
        "test_units.py::test_the_lemma_is_attained",
    ),
    Mutation(
        "an event of slots that is sold as one of units",
        "bismarck_dp/units.py",
        "noise_multiplier=event.noise_multiplier / rows *",
        "noise_multiplier=event.noise_multiplier *",
        "test_units.py::test_lifted_events_are_never_cheaper_than_the_truth[2]",
    ),
    Mutation(
        "bounds measured with the epsilon of a unit for each row",
        "bismarck_dp/scaling.py",
        "    spec = slot_spec(plan.spec)\n",
        "    spec = plan.spec\n",
        "test_units.py::test_measured_bounds_are_paid_for_by_slots",
    ),
    Mutation(
        "a budget for divergences that is too large",
        "bismarck_dp/budget.py",
        "bound / order * DOWN",
        "3 * bound / order * DOWN",
        "test_budget.py::test_gaussians_that_fill_a_total_stay_within_it[1.0-1e-06]",
    ),
    Mutation(
        "divergences converted at all of delta",
        "bismarck_dp/budget.py",
        "CONVERTED, LEFT_OVER, SUMMED = 0.4, 0.1, 0.5",
        "CONVERTED, LEFT_OVER, SUMMED = 1.0, 0.1, 0.5",
        "test_budget.py::test_the_shares_of_delta_are_all_of_it",
    ),
    Mutation(
        "computed noise priced as real noise",
        "bismarck_dp/budget.py",
        'curve = computed(curve_of(event, str(spec.options["adjacency"]), (order,)), excess)',
        'curve = computed(curve_of(event, str(spec.options["adjacency"]), (order,)), 0 * excess)',
        "test_budget.py::test_noise_that_is_computed_costs_more_than_its_event",
    ),
    Mutation(
        "coins priced too low",
        "bismarck_dp/renyi.py",
        "np.minimum(coin, np.minimum(epsilon, a * epsilon**2 / 2))",
        "np.minimum(coin, np.minimum(epsilon, a * epsilon**2 / 20))",
        "test_budget.py::test_coins_that_fill_the_total_are_not_far_below_it",
    ),
    Mutation(
        "releases that are forgotten",
        "sql/bismarck_dp.sql",
        "ORDER BY one.releases DESC LIMIT 1) AS e ON true",
        "ORDER BY one.releases DESC LIMIT 0) AS e ON true",
        "test_protect.py::test_the_owner_pays_for_private_models_and_for_no_other",
    ),
    Mutation(
        "a constraint that anybody's operator may check",
        "sql/bismarck_dp.sql",
        "CHECK (epsilon OPERATOR(pg_catalog.>) 0::pg_catalog.numeric)",
        "CHECK (epsilon > 0)",
        "test_upgrade.py::test_nothing_of_anybody_elses_is_built_in[None]",
    ),
    Mutation(
        "rows that a unit without a name takes for itself",
        "udf/units.c",
        "    if (4 * units->count >= 3 * units->capacity)",
        "    if (!isnull && 4 * units->count >= 3 * units->capacity)",
        "test_units.py::test_memory_depends_on_the_number_of_units_alone",
    ),
    Mutation(
        "units' computed noise charged as that of one slot",
        "bismarck_dp/units.py",
        "excess=noise.excess * rows,",
        "excess=noise.excess,",
        "test_units.py::test_computed_noise_of_more_sums_is_paid_for",
    ),
    Mutation(
        "computed noise that may go wrong ten times as often",
        "bismarck_dp/budget.py",
        "slack = LEFT_OVER * delta * math.exp(",
        "slack = 10 * LEFT_OVER * delta * math.exp(",
        "test_budget.py::test_the_bound_converts_to_the_total[1.0-1e-06]",
    ),
    Mutation(
        "rows counted aloud for whoever calls",
        "controller/guard.py",
        "tells_bad=self.protection is not None and self.protection.told",
        "tells_bad=self.protection is not None",
        "test_protect.py::test_who_is_lent_the_owners_rights_hears_nothing",
    ),
    Mutation(
        "strangers who train without privacy",
        "controller/guard.py",
        "    if not private:\n        raise",
        "    if not private and not found.allowed:\n        raise",
        "test_regress.py::test_sql_output_is_as_expected",
    ),
    Mutation(
        "a unit that is not the owner's",
        "controller/guard.py",
        "return {**options, **self.protection.unit} if",
        "return {**options} if",
        "test_protect.py::test_releases_are_for_the_unit_that_the_owner_named[patient-1]",
    ),
    Mutation(
        "labels counted for a private model of the owner's",
        "controller/guard.py",
        "if self.protection is None or not self.private:",
        "if not self.stranger or not self.private:",
        "test_protections.py::test_the_owner_looks_at_no_label_for_a_private_model",
    ),
    Mutation(
        "a protection by another owner",
        "controller/guard.py",
        "if found.owner_now != found.owner:",
        "if found.owner_now == '':",
        "test_protections.py::test_a_protection_of_a_table_that_went_opens_no_other",
    ),
    Mutation(
        "a snapshot from before the protection",
        "udf/debit.c",
        "SPI_execute_snapshot(plan, values, NULL, GetLatestSnapshot()",
        "SPI_execute_snapshot(plan, values, NULL, GetActiveSnapshot()",
        "test_protections.py::test_an_old_snapshot_does_not_hide_a_protection",
    ),
    Mutation(
        "debits for whoever refreshes a view",
        "udf/debit.c",
        "if (InSecurityRestrictedOperation())",
        "if (InSecurityRestrictedOperation() && IsBinaryUpgrade)",
        "test_security_code.py::test_chores_of_others_pay_for_nothing",
    ),
    Mutation(
        "numbers of tables as names",
        "udf/debit.c",
        "PG_RETURN_OID(InvalidOid);",
        "PG_RETURN_OID(atooid(name));",
        "test_ledger.py::test_a_tables_number_is_no_name",
    ),
    Mutation(
        "conditions that are counted on hidden entries",
        "sql/bismarck_dp.sql",
        "CURRENT_USER)\n    OFFSET 0;\nGRANT SELECT ON bismarck_dp.ledger",
        "CURRENT_USER);\nGRANT SELECT ON bismarck_dp.ledger",
        "test_security.py::test_guesses_about_others_are_not_counted[ledger]",
    ),
    Mutation(
        "lookups that are counted",
        "udf/door.c",
        'dp_set_option("track_counts", "off");',
        "",
        "test_security_traces.py::test_lookups_of_arrays_out_of_line_are_not_counted[evaluate]",
    ),
    Mutation(
        "trials that are counted",
        "controller/queries.py",
        "'on' if on else 'off'",
        "'on'",
        "test_security_traces.py::test_trials_of_a_tuning_are_not_counted",
    ),
    Mutation(
        "models that are not counted",
        "controller/queries.py",
        "'on' if on else 'off'",
        "'off'",
        "test_security_traces.py::test_what_is_written_is_counted_so_that_autovacuum_comes",
    ),
    Mutation(
        "buffers that are counted",
        "udf/door.c",
        "pgBufferUsage = used; /*",
        "/*",
        "test_security_traces.py::test_buffers_are_not_counted",
    ),
    Mutation(
        "what may go wrong is free where doubles end",
        "bismarck_dp/budget.py",
        "return max(probability, LEAST_SLACK)",
        "return probability",
        "test_budget.py::test_what_may_go_wrong_is_never_free[900.0-scs13]",
    ),
    Mutation(
        "no slack in the totals of offices",
        "bismarck_dp/mechanisms.py",
        "RARER = 64.0",
        "RARER = 0.0",
        "test_budget.py::test_what_may_go_wrong_leaves_room_where_the_total_is_large[scs13]",
    ),
]


NOTHING = Mutation(
    "nothing", "udf/pack.c", "pack.c: one pass", "pack.c: a single pass", "test_audit.py::test_the_batched_claim_holds"
)


def mutated(mutation: Mutation, home: Path) -> tuple[Path, Path]:
    """A package and a compiled extension with the mutation in them."""
    source, extension = home / "source", home / "extension"
    for part in ("bismarck_dp", "controller", "udf", "sql"):
        shutil.copytree(ROOT / part, source / part, symlinks=True)
    target = source / mutation.file
    text = target.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: the mutation no longer fits"
    target.write_text(text.replace(mutation.old, mutation.new))
    build = ["make", "-s", "-C", str(source / "udf"), f"PG_CONFIG={_pg_config()}", "stage", f"STAGE={extension}"]
    subprocess.run(build, check=True)
    return source, extension


def run_on(mutation: Mutation) -> subprocess.CompletedProcess[str]:
    """The named test on the mutated copy, which the server's user must be able to read."""
    home = Path(tempfile.mkdtemp(prefix="bdp_mutant_", dir="/tmp"))
    try:
        source, extension = mutated(mutation, home)
        subprocess.run(["chmod", "-R", "a+rX", str(home)], check=True)
        env = {**os.environ, "PYTHONPATH": str(source), "BISMARCK_DP_TEST_EXTENSION": str(extension)}
        pytest_of_ours = str(Path(sys.executable).with_name("pytest"))
        command = [pytest_of_ours, "-x", "-q", "-p", "no:cacheprovider", f"tests/{mutation.test}"]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_makes_a_named_test_fail(mutation: Mutation) -> None:
    run = run_on(mutation)
    assert run.returncode == 1, run.stdout + run.stderr
    # Of several ways to fail, hypothesis shows a group of exceptions. A refusal that is missing is a failure, too.
    assert re.search(r"^(E| +\|) +(AssertionError|assert |Failed: DID NOT RAISE)", run.stdout, re.MULTILINE), run.stdout
    assert "1 failed" in run.stdout, run.stdout
    assert "error" not in run.stdout.splitlines()[-1], run.stdout


def test_a_copy_without_a_mistake_passes() -> None:
    run = run_on(NOTHING)
    assert run.returncode == 0, run.stdout + run.stderr
