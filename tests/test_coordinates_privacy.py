"""Coordinate descent: noise, choices and constants against their laws, what a row can do against what is declared,
accounting against dp-accounting.
"""

from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting
import kernels
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp
from scipy import stats
from statistics_of import LEVEL, check_frequencies
from test_coordinates import PRIVATE, SEED, planned

from bismarck_dp import Plan, explain, reference
from bismarck_dp.accounting import Event, epsilon_of, gaussian_multiplier, zcdp_rho
from bismarck_dp.choices import Drawn, Exact
from bismarck_dp.controller.database import Database
from bismarck_dp.coordinates import SCORES, SLACK, SQUARES
from bismarck_dp.descent import LARGEST, Problem
from bismarck_dp.neighbours import pairs, scattered
from bismarck_dp.recordplay import distance, orders

# ---- the noise, and the choices ----


def test_a_step_has_its_gaussian_noise(db: Database, table: Any) -> None:
    """Rows that count for nothing leave the noise alone: of the declared scale, through the prox of one step."""
    n, trials = 20, 600
    rows = table(np.full((n, 1), np.nan, np.float32), np.ones(n))
    options = {"iterations": 1, "inner_iterations": 1, "constants": 1.0}
    weights = released(db, rows.name, trials, epsilon=1.0, delta=1e-5, algorithm="dpcd", **options)
    scale = explain(algorithm="dpcd", loss="logistic", n=n, d=1, epsilon=1.0, delta=1e-5, **options)["noise_scale"]
    assert scale == pytest.approx(2 / n * gaussian_multiplier(1.0, 1e-5), rel=1e-6)
    assert stats.kstest(weights.ravel(), stats.norm(scale=scale).cdf).pvalue > LEVEL


def test_a_step_has_its_laplace_noise(db: Database, table: Any) -> None:
    n, trials = 20, 600
    rows = table(np.full((n, 1), np.nan, np.float32), np.ones(n))
    options = {"iterations": 1, "constants": 1.0}
    weights = released(db, rows.name, trials, epsilon=1.0, delta=0.0, algorithm="dpgcd", **options)
    scale = explain(algorithm="dpgcd", loss="logistic", n=n, d=1, epsilon=1.0, **options)["noise_scale"]
    assert scale == pytest.approx(2 / n / 0.5, rel=1e-6)
    assert stats.kstest(weights.ravel(), stats.laplace(scale=scale).cdf).pvalue > LEVEL


def released(db: Database, name: str, times: int, **spec: Any) -> Any:
    """Weights of as many models, from a transaction that never happened."""
    private = {key: spec.pop(key) for key in ("epsilon", "delta", "algorithm")}
    loss = spec.pop("loss", "logistic")
    with db.engine.connect() as connection:
        found = connection.exec_driver_sql(
            f"SELECT m.weights FROM generate_series(1, {times}) AS i, LATERAL dp_train(%(t)s::regclass, 'm' || i, 'y',"
            " '{x}', %(epsilon)s, %(delta)s, %(algorithm)s, %(loss)s, %(o)s::jsonb) AS m",
            {"t": name, "o": json.dumps(spec), "loss": loss, **private},
        ).all()
        connection.rollback()
    return np.array([row[0] for row in found])


def test_choices_are_the_exponential_mechanisms(db: Database, table: Any) -> None:
    """How often each coordinate is chosen, against exp(e score / 2 J); the two are far enough apart to tell factors."""
    n, d, trials = 120, 4, 1500
    x = np.zeros((n, d), np.float32)
    for j in range(d):
        x[30 * j : 30 * j + 20 + 2 * j, j] = 1.0
    rows = table(x, np.ones(n))
    options = {"iterations": 1, "constants": 1.0, "clip": 1.0}
    weights = released(db, rows.name, trials, epsilon=2.0, delta=0.0, algorithm="dpgcd", **options)
    chosen = np.array([np.flatnonzero(w)[0] for w in weights])
    plan = planned("dpgcd", "logistic", n, d, 0.0, 2.0, **options)
    u = Problem.of(x, np.ones(n), plan, None).sums(np.zeros(d))
    assert np.abs(u).tolist() == pytest.approx([20, 22, 24, 26])
    odds = np.exp(1.0 * np.abs(u) / (2 * 2))
    check_frequencies(np.bincount(chosen, minlength=d), odds / odds.sum())


def test_choices_by_other_means_have_the_same_law() -> None:
    """The exact choice, and NumPy's Gumbel noise: what twins use stands for what the kernels do."""
    scores = np.array([0, 3, 5, 9]) * 1000
    words = iter(reference.key_stream(reference.seed_key(4), 1, 3_000_000).tolist())
    law = np.exp(scores / 3000) / np.exp(scores / 3000).sum()
    for choices in (Exact(words), Drawn(np.random.default_rng(2))):
        found = [choices.choose(scores, 1, 3000) for _ in range(20_000)]
        check_frequencies(np.bincount(found, minlength=4), law)
        noise = np.array([choices.laplace(5) for _ in range(20_000)])
        k = np.arange(-15, 16)
        mass = np.exp(-np.abs(k) / 5) * np.tanh(0.1)
        inside = noise[np.abs(noise) <= 15]
        check_frequencies(
            np.append(np.bincount(inside + 15, minlength=31), len(noise) - len(inside)), np.append(mass, 1 - mass.sum())
        )


def test_measured_constants_have_their_laplace_noise(db: Database, table: Any) -> None:
    """A single step of a nearly noiseless run shows 1 / M: its law is that of one release for a share of epsilon."""
    n, trials = 100, 600
    rows = table(np.full((n, 1), 0.5, np.float32), np.ones(n))
    options = {"iterations": 1, "inner_iterations": 1, "private_constants": 0.001, "clip": 0.5}
    spec = {"epsilon": 1000.0, "delta": 1e-5, "algorithm": "dpcd", "loss": "squared", "label_bound": 1.0}
    found = 0.5 / released(db, rows.name, trials, **spec, **options).ravel()
    assert stats.kstest(found, stats.laplace(loc=0.25, scale=2 / n).cdf).pvalue > LEVEL
    assert found.min() >= 2 * 2 / n * 0.99


# ---- what a row can do ----


def squares(plan: Plan, rows: Any) -> Any:
    """Sums of squares as the kernel measures them, in steps."""
    run = kernels.Run(plan.kernel_params(), plan.width, "cd", SEED)
    columns = kernels.Columns(rows, False)
    assert run.solver.begin_pass(run.state, 0)
    return np.array([run.column_sum(columns, j) for j in range(plan.width)])


@pytest.mark.parametrize(("adjacency", "jump"), [("replace", 2), ("zero-out", 1)])
@pytest.mark.parametrize("bound", [1.0, 3.0, 1e-7])
def test_constants_of_neighbours_stay_within_their_sensitivity(adjacency: str, jump: int, bound: float) -> None:
    """In L1, over all coordinates together; rows along an axis reach it."""
    plan = planned("dpcd", "logistic", 30, 5, private_constants=0.2, adjacency=adjacency, feature_bound=bound)
    rng = np.random.default_rng(0)
    reached = 0.0
    for pair in [*pairs(plan, rng), *(scattered(plan, rng) for _ in range(50))]:
        first, second = (squares(plan, kernels.packed(table, plan)) for table in pair.tables())
        reached = max(reached, float(np.abs(first - second).sum()))
    assert reached <= jump * SQUARES
    assert reached >= 0.99 * SQUARES
    epsilon = 0.2 * 2.0
    assert plan.extra["measure_scale"] >= jump * SQUARES / epsilon


@pytest.mark.parametrize("rule", ["gs-s", "gs-r", "gs-q"])
@pytest.mark.parametrize("constants", [[1e-4, 1.0, 1.0], [1.0, 1e-6, 30.0]])
def test_scores_of_unequal_coordinates_have_one_sensitivity(rule: str, constants: list[float]) -> None:
    """Constants far apart: with noise of one scale for all, a quiet coordinate must not be louder than the others."""
    rng = np.random.default_rng(7)
    options = {"constants": constants, "rule": rule, "l1": 0.01, "iterations": 3, "clip": 0.3}
    plan = planned("dpgcd", "squared", 30, 3, **options)
    assert plan.sensitivity is not None
    found = [distance(plan, pair, orders(plan, rng), kernels.play) for _ in range(10) for pair in pairs(plan, rng)]
    assert 0.9 * plan.sensitivity <= max(found) <= plan.sensitivity


def scored(rule: str, w: Any, smoothness: Any, unit: Any, sums: Any, **penalty: float) -> Any:
    """Scores of the C kernel for numbers of our own, put into its body."""
    d = len(w)
    plan = planned("dpgcd", "squared", 2**20, d, rule=rule, clip=1.0, **penalty)
    run = kernels.Run(plan.kernel_params(), d, "gcd", SEED)
    vectors = np.frombuffer(run.state, offset=run.solver.size(0), dtype=np.float64)
    vectors[: 5 * d] = np.concatenate([w, smoothness, unit, np.zeros(d), sums])
    same, found = np.empty(d), np.empty(d)
    kernels.library.dp_gcd_scores(run.state, kernels.pointer(same), kernels.pointer(found))
    np.testing.assert_array_equal(same, sums)
    return found


def exact_score(rule: str, w: float, smoothness: float, unit: float, k: float, **penalty: float) -> Any:
    """By the definitions, in a hundred digits; what is public is cut as documented, in doubles."""
    at = max(-LARGEST, min(LARGEST, w * (smoothness * (1 / unit))))
    t, box = min(LARGEST, penalty["l1"] * (1 / unit)), min(LARGEST, penalty["box"] * (smoothness * (1 / unit)))
    ridge = penalty["lambda"] / smoothness
    ridge = ridge if at == 0 else min(ridge, LARGEST / abs(at))
    with mpmath.workdps(100):
        k, at, t, box, ridge = (mpmath.mpf(value) for value in (k, at, t, box, ridge))
        if at == 0 and abs(k) <= t:
            return abs(k) - t
        if rule == "gs-s":
            low = -t if at == 0 else ridge * at + t * mpmath.sign(at)
            high = t if at == 0 else low
            return max(-mpmath.inf if at <= -box else low + k, -mpmath.inf if at >= box else -k - high, 0)
        v = at - k
        p = max(-box, min(box, mpmath.sign(v) * max(abs(v) - t, 0) / (1 + ridge)))
        a = p - at
        gain = -(k * a + a**2 / 2 + t * (abs(p) - abs(at)) + ridge * (p**2 - at**2) / 2)
        return abs(a) if rule == "gs-r" else mpmath.sqrt(2 * max(gain, 0))


@pytest.mark.parametrize("rule", ["gs-s", "gs-r", "gs-q"])
def test_scores_err_by_no_more_than_their_slack(rule: str) -> None:
    """Weights, penalties and units of every size, at and across the corners: within seven steps of the real score."""
    rng = np.random.default_rng(3)
    d = 400
    for _ in range(6):
        penalty = {
            "l1": float(rng.choice([0.0, 1e-6, 1e-2, 1e3])),
            "lambda": float(rng.choice([0.0, 1e-8, 0.1, 1e9])),
            "box": float(rng.choice([1e-4, 0.5, 1e12])),
        }
        smoothness, unit = 10.0 ** rng.uniform(-9, 3, d), 10.0 ** rng.uniform(-12, 0, d)
        w = np.clip(rng.choice([0.0, 1.0, -1.0], d) * 10.0 ** rng.uniform(-9, 9, d), -penalty["box"], penalty["box"])
        corner = np.clip(w * smoothness / unit + rng.choice([-1, 0, 1], d) * penalty["l1"] / unit, -(2**20), 2**20)
        sums = np.rint(np.where(rng.random(d) < 0.5, corner, rng.uniform(-(2**20), 2**20, d)) * 2**20) / 2**20
        found = scored(rule, w, smoothness, unit, sums, **penalty)
        for j in range(d):
            real = exact_score(rule, w[j], smoothness[j], unit[j], sums[j], **penalty)
            assert abs(found[j] - real) * SCORES <= (SLACK - 1) / 2, (penalty, w[j], smoothness[j], unit[j], sums[j])


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_a_choice_costs_its_epsilon_and_no_more(adjacency: str, delta: float) -> None:
    """One score up and all others down, as far as a row can move them: without the factor 2 it would cost twice."""
    plan = planned("dpgcd", "logistic", 1000, 50, delta, 1.0, adjacency=adjacency)
    claimed = plan.explain()["selection_epsilon"]
    jump = 2 if adjacency == "replace" else 1
    rate = plan.extra["selection_numerator"] / plan.extra["selection_denominator"]
    losses = []
    for ahead in np.linspace(-300, 300, 61):
        before = np.full(50, 500 * SCORES)
        before[0] += ahead * SCORES
        after = before - jump * SCORES
        after[0] = before[0] + jump * SCORES
        log = [scores * rate - np.logaddexp.reduce(scores * rate) for scores in (before, after)]
        losses.append(np.abs(log[0] - log[1]).max())
    assert 0.9 * claimed <= max(losses) <= claimed * (1 + 1e-9)
    assert SLACK * rate < 1e-4 * claimed


# ---- accounting ----


def test_dpcd_counts_every_inner_step() -> None:
    """sigma_j = (2 C_j / n) sqrt(T K) sigma(epsilon, delta): the poster's formula lacks K."""
    n, d = 1000, 25
    for t, k in ((1, 100), (7, 30)):
        found = explain(algorithm="dpcd", loss="logistic", n=n, d=d, epsilon=1.0, delta=1e-6, iterations=t,
                        inner_iterations=k)  # fmt: skip
        sigma = dp_accounting.get_sigma_gaussian(1.0, 1e-6)
        expected = 2 * (1 / math.sqrt(d)) / n * math.sqrt(t * k) * sigma
        assert found["noise_scale"] == pytest.approx(expected, rel=1e-5)
        assert found["noise_scale"] >= expected * (1 - 1e-9)
        accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-5)
        accountant.compose(Event.from_json(found["event"]).to_dp_event())
        assert accountant.get_epsilon(1e-6) <= 1.0 + 1e-3
        zero_out = explain(algorithm="dpcd", loss="logistic", n=n, d=d, epsilon=1.0, delta=1e-6, iterations=t,
                           inner_iterations=k, adjacency="zero-out")  # fmt: skip
        assert zero_out["noise_scale"] == pytest.approx(found["noise_scale"] / 2, rel=1e-5)


@pytest.mark.parametrize(("iterations", "top"), [(1, 1), (20, 1), (10, 5)])
def test_dpgcd_adds_up_zcdp(iterations: int, top: int) -> None:
    """T c (e^2 / 8 + J^2 / (2 sigma^2)), priced again by the library's Renyi accountant."""
    n, d = 1000, 25
    found = explain(algorithm="dpgcd", loss="logistic", n=n, d=d, epsilon=1.0, delta=1e-6, iterations=iterations,
                    top=top)  # fmt: skip
    noise = found["noise_scale"] / found["sensitivity"]
    rho = iterations * top * (found["selection_epsilon"] ** 2 / 8 + 1 / (2 * noise**2))
    assert rho == pytest.approx(zcdp_rho(1.0, 1e-6), rel=1e-5)
    assert rho <= zcdp_rho(1.0, 1e-6) * (1 + 1e-9)
    accountant = rdp.RdpAccountant()
    accountant.compose(Event.from_json(found["event"]).to_dp_event())
    assert accountant.get_epsilon(1e-6) <= 1.0 * (1 + 1e-2)


@pytest.mark.parametrize(("iterations", "top"), [(1, 1), (20, 1), (10, 5)])
def test_pure_dpgcd_adds_up_epsilons(iterations: int, top: int) -> None:
    found = explain(algorithm="dpgcd", loss="logistic", n=1000, d=25, epsilon=1.0, iterations=iterations, top=top)
    each = found["selection_epsilon"] + found["sensitivity"] / found["noise_scale"]
    assert iterations * top * each == pytest.approx(1.0, rel=1e-5)
    assert iterations * top * each <= 1.0
    assert epsilon_of(Event.from_json(found["event"]), 0.0, "replace") == (pytest.approx(1.0), "pure")


@pytest.mark.parametrize(("algorithm", "delta"), PRIVATE)
def test_constants_are_paid_for(algorithm: str, delta: float) -> None:
    """Out of the same epsilon: what is left for the steps buys less."""
    spec = {"algorithm": algorithm, "loss": "logistic", "n": 1000, "d": 25, "epsilon": 1.0, "delta": delta}
    free, paid = explain(**spec), explain(**spec, private_constants=0.25)
    less = explain(**{**spec, "epsilon": 0.75})
    assert paid["constants_epsilon"] == 0.25
    assert paid["noise_scale"] == pytest.approx(less["noise_scale"], rel=1e-6)
    assert paid["noise_scale"] > 1.2 * free["noise_scale"]
    cost = epsilon_of(Event.from_json(paid["event"]), delta, "replace")
    assert cost.epsilon == pytest.approx(1.0, rel=1e-6)
    assert cost.accountant == paid["accountant"]


def test_the_rounding_of_large_sums_is_paid_for() -> None:
    """Adding noise to a sum of billions errs by more than adding it to a sum of hundreds."""
    spec = {"algorithm": "dpcd", "loss": "logistic", "d": 9, "epsilon": 100.0, "delta": 1e-6, "iterations": 50}
    small, large = (explain(**spec, n=n)["noise_scale"] * n for n in (100, 2**31))
    assert 1 + 1e-6 < large / small < 1.1
