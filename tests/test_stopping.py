"""Random stopping: the law of the number of trials, what the best of them costs, and the plans of trials.

Everything is priced again by other roads: dp-accounting, mpmath, and exact laws of small mechanisms.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import dp_accounting
import mpmath
import numpy as np
import pytest
from conftest import needed, plans
from dp_accounting import rdp
from scipy import optimize, stats

from bismarck_dp import BismarckError, Spec, make_plan
from bismarck_dp.accounting import (
    ComposedDpEvent,
    Event,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    ParallelDpEvent,
    PoissonSampledDpEvent,
    RepeatAndSelectDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
    epsilon_of,
    gaussian_epsilon,
    gaussian_multiplier,
    leaves,
    zcdp_epsilon,
    zcdp_of,
    zcdp_rho,
)
from bismarck_dp.renyi import Curve, curve_of, sampled
from bismarck_dp.repeats import BITS
from bismarck_dp.solvers import SOLVERS
from bismarck_dp.stopping import ScoreNoise, Search, Stopping, Trials, computed, plan_trials

LAWS = [(10.0, 0.0), (10.0, 1.0), (3.0, 0.5), (4.0, -0.5), (1.2, -0.9), (25.0, 8.0), (1.5, 40.0)]


def probabilities(stopping: Stopping, most: int) -> list[Any]:
    """P(K = 1), ..., P(K = most), from the definition."""
    g, s = mpmath.mpf(stopping.gamma), mpmath.mpf(stopping.shape)
    if s == 0:
        return [(1 - g) ** k / (k * -mpmath.log(g)) for k in range(1, most + 1)]
    norm = g**-s - 1
    return [(1 - g) ** k / norm * mpmath.rf(s, k) / mpmath.factorial(k) for k in range(1, most + 1)]


def always(number: int) -> Callable[[int], int]:
    """A source of as many bits as a draw is to ask for, which are these."""

    def bits(count: int) -> int:
        assert count == BITS
        return number

    return bits


# ---- the law ----


@pytest.mark.parametrize(("mean", "shape"), [*LAWS, (1e6, 0.0), (1e6, 1.0), (1e6, 100.0), (1 + 1e-6, 3.0)])
def test_gamma_gives_the_mean_and_no_more(mean: float, shape: float) -> None:
    def expected(gamma: float) -> Any:
        g, s = mpmath.mpf(gamma), mpmath.mpf(shape)
        return s * (1 - g) / (g * (1 - g**s)) if shape else (1 / g - 1) / mpmath.log(1 / g)

    with mpmath.workdps(60):
        gamma = Stopping(mean, shape).gamma
        assert expected(gamma) <= mean < expected(math.nextafter(gamma, 0))
        assert expected(gamma) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_a_draw_has_its_probabilities_to_the_last_bit(mean: float, shape: float) -> None:
    """The random number at which k becomes k + 1 is the distribution function's, to far beyond double precision."""
    stopping = Stopping(mean, shape)
    with mpmath.workprec(BITS + 512):
        every = probabilities(stopping, 60)
        for k in (1, 2, 3, 10, 59):
            edge = int(mpmath.floor(sum(every[:k]) * mpmath.mpf(2) ** BITS))
            slack = 1 << (BITS - 1900)
            assert stopping.draw(always(edge - slack)) == k
            assert stopping.draw(always(edge + slack)) == k + 1


def test_a_draw_ends_whatever_the_bits() -> None:
    for mean, shape in LAWS[:-1]:
        assert Stopping(mean, shape).draw(always((1 << BITS) - 1)) > 100
        assert Stopping(mean, shape).draw(always(0)) == 1


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_draws_follow_the_law(mean: float, shape: float) -> None:
    stopping = Stopping(mean, shape)
    draws = 20_000
    bits = random.Random(7).getrandbits
    seen = np.array([stopping.draw(bits) for _ in range(draws)])
    expected = draws * np.array([float(p) for p in probabilities(stopping, 4000)])
    cells = np.flatnonzero(expected >= 20)
    observed = np.array([np.sum(seen == k + 1) for k in cells])
    observed = np.append(observed, draws - observed.sum())
    wanted = np.append(expected[cells], draws - expected[cells].sum())
    assert stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-4
    if shape >= 0:
        spread = math.sqrt(np.var(seen) / draws)
        assert abs(seen.mean() - mean) < 5 * spread


@pytest.mark.parametrize(("mean", "shape"), [law for law in LAWS if law[1] >= 0])
@pytest.mark.parametrize("probability", [0.3, 1e-3, 1e-12, 1e-60])
def test_most_is_seldom_exceeded(mean: float, shape: float, probability: float) -> None:
    stopping = Stopping(mean, shape)
    most = stopping.most(probability)
    with mpmath.workdps(120):
        tail = 1 - sum(probabilities(stopping, most))
        assert tail <= probability
        assert tail > probability**1.6 / 1e3, "far too large a bound"


@pytest.mark.parametrize(
    ("mean", "shape"), [(1.0, 0.0), (0.5, 0.0), (2e6, 0.0), (10, -1.0), (10, 101), (10, 1e-9), (math.nan, 0)]
)
def test_unknown_laws_are_refused(mean: float, shape: float) -> None:
    with pytest.raises(BismarckError, match=r"of RepeatAndSelectDpEvent is out of range"):
        Stopping(mean, shape)


def test_runs_without_end_are_refused() -> None:
    with pytest.raises(BismarckError, match="more trials than anybody can wait for"):
        Stopping(1000, -0.9)
    with pytest.raises(BismarckError, match="probability 0 is out of range"):
        Stopping().most(0.0)


# ---- what the best of K costs ----


def best_of(stopping: Stopping, law: Any) -> Any:
    """The exact law of the best of K trials, whose results are ordered as they are listed."""
    above = np.append(np.cumsum(law[::-1])[::-1][1:], 0.0)
    g = stopping.gamma
    upper, lower = g + (1 - g) * above, g + (1 - g) * (above + law)
    if stopping.shape == 0:
        return np.log(lower / upper) / -math.log(g)
    s = stopping.shape
    return upper**-s * -np.expm1(-s * np.log(lower / upper)) / (g**-s - 1)


def test_the_exact_law_of_the_best_is_that_of_its_trials() -> None:
    """By adding up over K, for a check of the checker."""
    law = np.array([0.2, 0.5, 0.05, 0.25])
    for mean, shape in LAWS:
        stopping = Stopping(mean, shape)
        weights = [float(p) for p in probabilities(stopping, 400)]
        below = np.cumsum(law)
        each = [weight * np.diff(np.append(0, below**k)) for k, weight in enumerate(weights, 1)]
        missing = 1 - sum(weights)
        assert np.abs(np.sum(each, axis=0) - best_of(stopping, law)).max() <= missing + 1e-12


@pytest.mark.parametrize("shape", [-0.5, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_pure_trials_cost_what_is_claimed_and_not_less(shape: float, epsilon: float) -> None:
    """A rare result, and above it some that the neighbour has more of, is the worst there is."""
    stopping = Stopping(2000.0 if shape >= 0 else 60.0, shape)
    e, top, rare = math.exp(epsilon), 0.1 * math.exp(-epsilon), 1e-9
    mine = np.array([1 - top - rare * e, rare * e, top])
    other = np.array([1 - top * e - rare, rare, top * e])
    assert max(abs(np.log(mine / other))) <= epsilon * (1 + 1e-12)
    worst = float(max(abs(np.log(best_of(stopping, mine) / best_of(stopping, other)))))
    assert worst <= stopping.total_pure(epsilon) * (1 + 1e-9)
    assert worst > 0.9 * stopping.total_pure(epsilon)
    assert worst > (1 + shape) * epsilon


def test_pure_trials_of_any_kind_cost_no_more() -> None:
    rng = np.random.default_rng(3)
    for _ in range(400):
        stopping = Stopping(float(rng.uniform(1.1, 200)), float(rng.choice([-0.4, 0.0, 0.7, 1.0, 5.0])))
        epsilon, size = float(rng.uniform(0.05, 2)), int(rng.integers(2, 9))
        logs = rng.normal(size=size) * 3
        signs = rng.choice([-1.0, 1.0], size=size)
        mine, other = np.exp(logs + signs * epsilon / 4), np.exp(logs - signs * epsilon / 4)
        mine, other = mine / mine.sum(), other / other.sum()
        base = max(abs(np.log(mine / other))) + 1e-12
        worst = max(abs(np.log(best_of(stopping, mine) / best_of(stopping, other))))
        assert worst <= stopping.total_pure(base) * (1 + 1e-9)


def test_the_base_of_a_pure_total_is_below_it_by_a_hair() -> None:
    for shape, total in product((-0.9, -0.3, 0.0, 0.1, 1.0, 7.7), (1e-9, 0.1, 1.0, 3.3, 1e6)):
        stopping = Stopping(1.5, shape)
        base = stopping.base_pure(total)
        assert total * (1 - 1e-14) < stopping.total_pure(base) <= total


def discrete_gaussian(sigma: float, shift: int) -> Any:
    """exactly shift^2 / (2 sigma^2)-zCDP against the one without the shift"""
    k = np.arange(-int(14 * sigma) - 20, int(14 * sigma) + 21)
    law = np.exp(-((k - shift) ** 2) / (2 * sigma**2))
    return law / law.sum()


def exact_delta(mine: Any, other: Any, epsilon: float) -> float:
    return float(np.maximum(mine - math.exp(epsilon) * other, 0).sum())


def exact_epsilon(mine: Any, other: Any, delta: float) -> float:
    return float(optimize.brentq(lambda epsilon: exact_delta(mine, other, epsilon) - delta, 0, 30))


@pytest.mark.parametrize(("mean", "shape"), [(10.0, 0.0), (10.0, 1.0), (50.0, 0.0), (3.0, -0.5), (200.0, 0.5)])
@pytest.mark.parametrize("multiplier", [0.8, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_gaussian_trials_cost_no_more_than_is_claimed(
    mean: float, shape: float, multiplier: float, delta: float
) -> None:
    stopping, shift = Stopping(mean, shape), 8
    mine, other = discrete_gaussian(shift * multiplier, shift), discrete_gaussian(shift * multiplier, 0)
    claimed = stopping.total(Curve.zcdp(1 / (2 * multiplier**2)), delta)
    deltas, pairs = [], ((mine, other), (other, mine))
    for a, b in pairs:
        for order in (slice(None), slice(None, None, -1)):
            x, y = best_of(stopping, a[order]), best_of(stopping, b[order])
            deltas.append(exact_delta(x, y, claimed))
            assert deltas[-1] <= delta
    assert max(deltas) > 0
    # The claim says something: what one trial costs is too little for the best of them.
    single = gaussian_epsilon(multiplier, delta)
    assert max(exact_delta(best_of(stopping, a), best_of(stopping, b), single) for a, b in pairs) > delta


@pytest.mark.parametrize("tau", [0.01, 0.1])
def test_computed_noise_is_paid_for(tau: float) -> None:
    """Trials whose probabilities are off by factors exp(+-tau), as bad as can be."""
    stopping, multiplier, shift, delta = Stopping(30.0, 0.0), 4.0, 8, 1e-4
    real, unreal = discrete_gaussian(shift * multiplier, shift), discrete_gaussian(shift * multiplier, 0)
    curve = Curve.zcdp(1 / (2 * multiplier**2))
    claimed = stopping.total(computed(curve, tau), delta)
    assert claimed >= stopping.total(curve, delta) + 2 * tau
    plain = exact_epsilon(best_of(stopping, real), best_of(stopping, unreal), delta)
    exceeded = False
    for quantile in (0.3, 0.5, 0.7, 0.9, 0.97):
        for sign in (1.0, -1.0):
            tilt = np.where(np.cumsum(real) > quantile, sign, -sign) * tau / 2
            mine, other = real * np.exp(tilt), unreal * np.exp(-tilt)
            mine, other = mine / mine.sum(), other / other.sum()
            assert max(abs(np.log(mine / real))) <= tau * (1 + 1e-9)
            x, y = best_of(stopping, mine), best_of(stopping, other)
            assert max(exact_delta(x, y, claimed), exact_delta(y, x, claimed)) <= delta
            exceeded = exceeded or exact_epsilon(x, y, delta) > plain + tau / 2
    assert exceeded, "arithmetic does cost something"


SAME = np.concatenate((1 + np.geomspace(0.02, 2000, 300), np.arange(3, 60))).tolist()


def library(event: Any, delta: float, orders: Any) -> float:
    return float(rdp.RdpAccountant(orders).compose(event.to_dp_event()).get_epsilon(delta))


@pytest.mark.parametrize(("mean", "shape"), [(10.0, 0.0), (10.0, 1.0), (3.0, 0.5), (300.0, 0.0)])
@pytest.mark.parametrize(("multiplier", "delta"), [(0.7, 1e-6), (3.0, 1e-3), (10.0, 1e-9), (50.0, 1e-6)])
def test_gaussian_totals_equal_the_library(mean: float, shape: float, multiplier: float, delta: float) -> None:
    event = RepeatAndSelectDpEvent(GaussianDpEvent(multiplier), mean, shape)
    stopping = Stopping(mean, shape)
    theirs = library(event, delta, SAME)
    same = stopping.total(curve_of(event.event, "replace", tuple(SAME)), delta)
    assert same == pytest.approx(theirs, rel=1e-6)
    ours = stopping.total(curve_of(event.event, "replace"), delta)
    assert ours == pytest.approx(epsilon_of(event, delta, "replace").epsilon, rel=1e-11)
    assert ours <= theirs * (1 + 2e-3)
    best = optimum(stopping, 1 / (2 * multiplier**2), delta)
    assert best * (1 - 1e-9) <= ours <= best * (1 + 2e-3)


def optimum(stopping: Stopping, rho: float, delta: float) -> float:
    """Of Theorem 2 and the conversion for rho-zCDP, over real orders: the second one in closed form."""
    log = math.log(1 / stopping.gamma)
    ratio = 2 * math.sqrt(rho * log) - rho if rho < log else log

    def total(above: float) -> float:
        a = 1 + math.exp(above)
        renyi = rho * a + (1 + stopping.shape) * ratio + math.log(stopping.mean) / (a - 1)
        return renyi + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1)

    starts = [optimize.minimize_scalar(total, bounds=(low, low + 3), method="bounded").fun for low in range(-4, 16, 2)]
    return max(0.0, min(starts))


@pytest.mark.parametrize(
    ("probability", "count", "multiplier", "delta"),
    [(0.01, 1000, 1.0, 1e-6), (0.1, 100, 2.0, 1e-5), (0.5, 10, 4.0, 1e-6), (0.001, 10_000, 0.8, 1e-7)],
)
def test_sampled_totals_equal_the_library(probability: float, count: int, multiplier: float, delta: float) -> None:
    base = SelfComposedDpEvent(PoissonSampledDpEvent(probability, GaussianDpEvent(multiplier)), count)
    event = RepeatAndSelectDpEvent(base, 10.0, 0.0)
    orders = [1.5, 2.5, *range(2, 120)]
    theirs = library(event, delta, orders)
    same = Stopping().total(curve_of(base, "zero-out", tuple(float(order) for order in orders)), delta)
    assert theirs * (1 - 1e-9) <= same <= theirs * (1 + 1e-6)
    ours = epsilon_of(event, delta, "zero-out")
    assert ours.accountant == "rdp"
    assert 0.98 * theirs <= ours.epsilon <= theirs * (1 + 2e-3), "the library's orders are fewer"
    assert epsilon_of(event, delta, "replace").epsilon > ours.epsilon


def test_the_number_that_papers_are_read_for() -> None:
    """Ten trials for 1.8 instead of 1.08, at delta = 1e-6, for a base that costs 1.08 by zCDP. An exact Gaussian of
    1.08 has less noise, and costs 1.93; and both are more at larger deltas.
    """
    stopping = Stopping(10.0, 0.0)
    rho = zcdp_rho(1.08, 1e-6)
    assert stopping.total(Curve.zcdp(rho), 1e-6) == pytest.approx(1.80, abs=0.005)
    exact = 1 / (2 * gaussian_multiplier(1.08, 1e-6) ** 2)
    assert stopping.total(Curve.zcdp(exact), 1e-6) == pytest.approx(1.93, abs=0.01)
    assert stopping.total(Curve.zcdp(zcdp_rho(1.08, 1e-3)), 1e-3) > 2.2
    assert stopping.total_pure(1.08) == pytest.approx(2.16)


# ---- curves ----


def pair_divergence(order: float, z: float, mine: Any, other: Any) -> Any:
    """D of two mixtures, each a list of weights and centres, by mpmath."""

    def density(x: Any, mixture: Any) -> Any:
        return sum(weight * mpmath.npdf(x, centre, z) for weight, centre in mixture)

    points = [-12 * z - 1, -1, 0, 1, *np.linspace(1, 2 * order + 12 * z, 12)[1:]]
    with mpmath.workdps(25):
        integral = mpmath.quad(
            lambda x: density(x, mine) ** order * density(x, other) ** (1 - order), points, maxdegree=5
        )
        return mpmath.log(integral) / (order - 1)


PAIRS = [(1.0, 0.01), (0.6, 0.2), (3.0, 0.5), (1.5, 0.9), (10.0, 0.05)]
CHECKED = (1.1, 3.7, 16.0)


@pytest.mark.parametrize(("z", "q"), PAIRS)
def test_sampled_curves_are_those_of_the_dominating_pairs(z: float, q: float) -> None:
    plain = [(1.0, 0)]
    up, down = [(1 - q, 0), (q, 1)], [(1 - q, 0), (q, -1)]
    replaced = sampled(z, q, "replace", CHECKED)
    zeroed = sampled(z, q, "zero-out", CHECKED)
    for order, two, one in zip(CHECKED, replaced, zeroed):
        exact = float(pair_divergence(order, z, up, down))
        assert exact <= two <= exact * (1 + 1e-9) + 2e-12 / (order - 1)
        exact = max(float(pair_divergence(order, z, up, plain)), float(pair_divergence(order, z, plain, up)))
        assert exact <= one <= exact * (1 + 1e-9) + 2e-12 / (order - 1)


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (0.7, 0.5)])
def test_no_replaced_row_is_told_more_easily(z: float, q: float) -> None:
    for (u, v), order in product([(1, -1), (1, 0), (0, 1), (1, 0.5), (-1, 1), (0.4, -0.8)], (1.5, 4.0)):
        exact = pair_divergence(order, z, [(1 - q, 0), (q, u)], [(1 - q, 0), (q, v)])
        assert exact <= sampled(z, q, "replace", (order,))[0]
        if 0 in (u, v):
            assert exact <= sampled(z, q, "zero-out", (order,))[0]


def test_sampled_curves_equal_the_library() -> None:
    """At whole orders. Below 2 the library interpolates, and elsewhere between them its series may not converge."""
    orders = [2.0, 3.0, 7.0, 16.0, 33.0, 64.0]
    for z, q in PAIRS:
        event = PoissonSampledDpEvent(q, GaussianDpEvent(z))
        accountant = rdp.RdpAccountant(orders).compose(event.to_dp_event())
        theirs = np.array(accountant._rdp)
        ours = np.array(sampled(z, q, "zero-out", tuple(orders)))
        assert np.all(ours >= theirs * (1 - 1e-9) - 1e-13)
        assert np.all(ours <= theirs * (1 + 1e-6) + 1e-10)


def test_a_curve_takes_less_than_a_second() -> None:
    for z, q, adjacency in product((0.51, 1.01, 20.1, 1000.1), (1e-5, 0.011, 0.91), ("replace", "zero-out")):
        begin = time.perf_counter()
        curve = curve_of(SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z)), 100), adjacency)
        assert time.perf_counter() - begin < 1.0
        assert np.sum(np.isfinite(curve.divergences)) > 100


def test_sampled_curves_cost_at_least_what_loss_distributions_say_and_little_more() -> None:
    for z, q, count in ((1.0, 0.01, 1000), (5.0, 0.1, 1000), (20.0, 0.5, 1000), (1.2, 1e-3, 100_000)):
        event = SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z)), count)
        for adjacency in ("replace", "zero-out"):
            exact = epsilon_of(event, 1e-6, adjacency).epsilon
            assert exact < curve_of(event, adjacency).epsilon(1e-6) < 1.2 * exact


@pytest.mark.parametrize("epsilon", [1e-4, 0.1, 1.0, 5.0, 60.0])
def test_pure_curves_are_those_of_the_coin(epsilon: float) -> None:
    with mpmath.workdps(60):
        lie = 1 / (1 + mpmath.exp(epsilon))
        for order in (1.01, 1.5, 2.0, 10.0, 1000.0):
            moment = (1 - lie) ** order * lie ** (1 - order) + lie**order * (1 - lie) ** (1 - order)
            exact = mpmath.log(moment) / (order - 1)
            ours = curve_of(LaplaceDpEvent(1 / epsilon), "replace", (order,)).divergences[0]
            assert exact * (1 - 1e-12) <= ours <= exact * (1 + 1e-8)
    assert curve_of(LaplaceDpEvent(1 / epsilon), "replace").epsilon(0.0) == pytest.approx(epsilon, rel=1e-12)


def test_zcdp_converts_as_before() -> None:
    for rho, delta in product((1e-6, 1e-3, 0.1, 3.0), (1e-12, 1e-6, 1e-2)):
        exact = zcdp_epsilon(rho, delta)
        assert exact * (1 - 1e-9) <= curve_of(ZCDpEvent(rho), "replace").epsilon(delta) <= exact * (1 + 1e-3)
    assert curve_of(NonPrivateDpEvent(), "replace").epsilon(0.5) == math.inf
    assert curve_of(ComposedDpEvent(()), "replace").epsilon(0.0) == 0.0


# ---- events ----

EVENTS: list[Event] = [
    RepeatAndSelectDpEvent(GaussianDpEvent(2.0), 10.0, 0.0),
    RepeatAndSelectDpEvent(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 7), 3.5, -0.25),
    ParallelDpEvent((GaussianDpEvent(2.0), LaplaceDpEvent(3.0))),
    RepeatAndSelectDpEvent(ParallelDpEvent((GaussianDpEvent(2.0), ZCDpEvent(0.1))), 10.0, 1.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_events_make_a_round_trip(event: Event) -> None:
    assert Event.from_json(event.to_json()) == event


def test_the_library_knows_what_it_has() -> None:
    theirs = EVENTS[0].to_dp_event()
    assert theirs == dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(2.0), 10.0, 0.0)
    same = ParallelDpEvent((GaussianDpEvent(2.0), GaussianDpEvent(2.0)))
    assert same.to_dp_event() == dp_accounting.GaussianDpEvent(2.0)
    for event in EVENTS[2:]:
        with pytest.raises(BismarckError, match="no event for different events side by side"):
            event.to_dp_event()


@pytest.mark.parametrize(
    "json",
    [
        {"name": "ParallelDpEvent", "events": []},
        {"name": "ParallelDpEvent", "events": {"name": "NoOpDpEvent"}},
        {"name": "RepeatAndSelectDpEvent", "event": {"name": "NoOpDpEvent"}, "mean": 1, "shape": 0},
        {"name": "RepeatAndSelectDpEvent", "event": {"name": "NoOpDpEvent"}, "mean": 10, "shape": -1},
        {"name": "RepeatAndSelectDpEvent", "event": {"name": "NoOpDpEvent"}, "mean": 10},
    ],
)
def test_bad_events_are_refused(json: Any) -> None:
    with pytest.raises(BismarckError, match=json["name"]):
        Event.from_json(json)


def test_side_by_side_costs_the_dearest() -> None:
    cheap, dear, pure = GaussianDpEvent(5.0), GaussianDpEvent(1.5), LaplaceDpEvent(1 / 3.0)
    both = ParallelDpEvent((cheap, dear))
    assert epsilon_of(both, 1e-6, "replace") == epsilon_of(dear, 1e-6, "replace")
    mixed = epsilon_of(ParallelDpEvent((cheap, pure)), 1e-6, "replace").epsilon
    assert mixed == max(epsilon_of(one, 1e-6, "replace").epsilon for one in (cheap, pure))
    assert zcdp_of(both) == 1 / (2 * 1.5**2)
    assert zcdp_of(ComposedDpEvent((both, ZCDpEvent(1.0)))) == 1 + 1 / (2 * 1.5**2)
    assert epsilon_of(ParallelDpEvent((cheap, NonPrivateDpEvent())), 1e-6, "replace").epsilon == math.inf
    assert epsilon_of(ParallelDpEvent((pure, NoOpDpEvent())), 0.0, "replace").epsilon == pytest.approx(3.0)
    many = ParallelDpEvent(tuple(GaussianDpEvent(1.0 + k) for k in range(1000)))
    assert epsilon_of(many, 1e-6, "replace") == epsilon_of(GaussianDpEvent(1.0), 1e-6, "replace")


def test_side_by_side_composes_by_the_dearest_choice() -> None:
    a, b, c = GaussianDpEvent(2.0), LaplaceDpEvent(2.0), GaussianDpEvent(3.0)
    left, right = ParallelDpEvent((a, b)), ParallelDpEvent((b, c))
    ours = epsilon_of(ComposedDpEvent((left, right, a)), 1e-6, "zero-out").epsilon
    choices = [ComposedDpEvent((x, y, a)) for x in (a, b) for y in (b, c)]
    assert ours == max(epsilon_of(choice, 1e-6, "zero-out").epsilon for choice in choices)
    twice = epsilon_of(SelfComposedDpEvent(left, 2), 1e-6, "zero-out").epsilon
    pairs = [ComposedDpEvent((x, y)) for x in (a, b) for y in (a, b)]
    assert twice == max(epsilon_of(pair, 1e-6, "zero-out").epsilon for pair in pairs)
    alike = SelfComposedDpEvent(ParallelDpEvent((a, a)), 10**6)
    assert epsilon_of(alike, 1e-6, "replace") == epsilon_of(SelfComposedDpEvent(a, 10**6), 1e-6, "replace")
    with pytest.raises(BismarckError, match="ParallelDpEvent"):
        epsilon_of(SelfComposedDpEvent(left, 10**6), 1e-6, "zero-out")


def test_the_best_of_trials_composes_by_renyi_divergences() -> None:
    repeated = RepeatAndSelectDpEvent(GaussianDpEvent(3.0), 10.0, 0.0)
    beside = GaussianDpEvent(2.0)
    both = epsilon_of(ComposedDpEvent((repeated, beside)), 1e-6, "replace")
    assert both.accountant == "rdp"
    assert both.epsilon == pytest.approx(library(ComposedDpEvent((repeated, beside)), 1e-6, SAME), rel=2e-3)
    assert both.epsilon > epsilon_of(repeated, 1e-6, "replace").epsilon
    pure = RepeatAndSelectDpEvent(LaplaceDpEvent(4.0), 10.0, 0.5)
    assert epsilon_of(pure, 0.0, "replace").epsilon == pytest.approx(2.5 / 4)
    assert epsilon_of(pure, 1e-6, "replace").epsilon <= 2.5 / 4 * (1 + 1e-9)
    composed = ComposedDpEvent((pure, LaplaceDpEvent(1.0)))
    assert epsilon_of(composed, 0.0, "replace").epsilon == pytest.approx(2.5 / 4 + 1)
    assert epsilon_of(repeated, 0.0, "replace").epsilon == math.inf
    assert epsilon_of(RepeatAndSelectDpEvent(NonPrivateDpEvent(), 10.0, 0.0), 0.1, "replace").epsilon == math.inf
    assert epsilon_of(RepeatAndSelectDpEvent(repeated, 3.0, 0.0), 1e-6, "replace").epsilon > both.epsilon / 2
    with pytest.raises(BismarckError, match="RepeatAndSelectDpEvent"):
        zcdp_of(repeated)
    with pytest.raises(BismarckError, match="RepeatAndSelectDpEvent"):
        epsilon_of(PoissonSampledDpEvent(0.5, repeated), 1e-6, "replace")


# ---- plans of trials ----

BUDGETS = [(0.5, 0.0), (1.0, 1e-6), (4.0, 1e-3)]
CLAIMS = [
    (name, epsilon, delta, adjacency)
    for name, solver in SOLVERS.items()
    for epsilon, delta in BUDGETS
    for adjacency in ("replace", "zero-out")
    if solver.private and plans(name, epsilon, delta, adjacency)
]
N, D, HELD_OUT = 1000, 4, 300

FEW = 1 + np.geomspace(0.3, 600, 90)


def spec_of(algorithm: str, epsilon: float, delta: float, adjacency: str = "replace", **options: Any) -> Spec:
    return Spec.create(algorithm, "logistic", epsilon, delta, {"adjacency": adjacency, **needed(algorithm), **options})


def divergences(event: Event, adjacency: str) -> Any:
    """The curve at a few orders once more, from sums over a fine grid."""
    total = np.zeros(len(FEW))
    for leaf, count in leaves(event).items():
        if isinstance(leaf, PoissonSampledDpEvent):
            assert isinstance(leaf.event, GaussianDpEvent)
            z, q = leaf.event.noise_multiplier, leaf.sampling_probability
            x = np.linspace(-30 * z - 1, 30 * z + 1 + 2 * FEW[-1], 100_001)
            up, plain, down = (stats.norm.logpdf(x, centre, z) for centre in (1, 0, -1))
            mine = np.logaddexp(math.log(q) + up, math.log1p(-q) + plain)
            other = np.logaddexp(math.log(q) + down, math.log1p(-q) + plain) if adjacency == "replace" else plain
            for i, order in enumerate(FEW):
                logs = order * mine + (1 - order) * other
                moment = logs.max() + math.log(np.exp(logs - logs.max()).sum() * (x[1] - x[0]))
                total[i] += count * moment / (order - 1)
        elif isinstance(leaf, GaussianDpEvent):
            total += count * FEW / (2 * leaf.noise_multiplier**2)
        elif isinstance(leaf, ZCDpEvent):
            total += count * FEW * leaf.rho
        else:
            assert isinstance(leaf, LaplaceDpEvent)
            total += count * np.minimum(1 / leaf.noise_multiplier, FEW / (2 * leaf.noise_multiplier**2))
    return total


def priced_again(trials: Trials, stopping: Stopping, delta: float, adjacency: str, score: float) -> float:
    """Theorem 2 and the conversion, as the paper has them, for what the plans and the score cost."""
    curve = np.max([divergences(plan.event, adjacency) for plan in trials.plans], axis=0)
    curve = np.maximum(curve, score * FEW)
    ratios = [(1 - 1 / b) * cost + math.log(1 / stopping.gamma) / b for b, cost in zip(FEW, curve)]
    totals = curve + (1 + stopping.shape) * min(ratios) + math.log(stopping.mean) / (FEW - 1)
    return float(np.min(totals + np.log1p(-1 / FEW) - np.log(delta * FEW) / (FEW - 1)))


@pytest.mark.parametrize(("algorithm", "epsilon", "delta", "adjacency"), CLAIMS)
def test_trials_cost_no_more_than_epsilon(algorithm: str, epsilon: float, delta: float, adjacency: str) -> None:
    stopping = Stopping(8.0, 0.0)
    spec = spec_of(algorithm, epsilon, delta, adjacency)
    trials = plan_trials([spec], N, D, HELD_OUT, stopping)
    (plan,) = trials.plans
    assert (plan.spec.epsilon, plan.spec.delta) == trials.base
    assert plan == make_plan(replace(spec, epsilon=trials.base.epsilon, delta=trials.base.delta), N, D)
    cost = epsilon_of(trials.event, delta, adjacency).epsilon
    assert 0.99 * epsilon <= cost <= epsilon * (1 + 1e-9)
    assert Event.from_json(trials.event.to_json()) == trials.event
    noise = trials.score
    ratio = noise.scale / noise.unit
    assert 2**14 < noise.scale <= 2**20
    if delta == 0:
        assert noise.mechanism == "laplace"
        assert epsilon * (1 - 1e-3) <= stopping.total_pure(1 / ratio) <= epsilon * (1 + 1e-12)
        assert stopping.total_pure(trials.base.epsilon) <= epsilon
        assert stopping.total_pure(epsilon_of(plan.event, 0.0, adjacency).epsilon) <= epsilon * (1 + 1e-9)
    else:
        assert noise.mechanism == "gaussian"
        again = priced_again(trials, stopping, delta, adjacency, 1 / (2 * ratio**2))
        assert 0.98 * epsilon <= again <= epsilon * (1 + 3e-3), "few orders cost a little more"
        assert stopping.total(Curve.zcdp(1 / (2 * ratio**2)), delta) <= epsilon
        if plan.perturbs == "output":
            assert plan.noise.excess == 0
            exact = plan.released_sensitivity**2 / (2 * plan.noise.scale**2)
            assert zcdp_of(plan.event) >= exact
        else:
            assert plan.noise.excess > 0
            assert math.isfinite(plan.noise.rarity)


def test_trials_of_different_specs_cost_the_dearest() -> None:
    specs = [
        spec_of("bolton", 1.0, 1e-6),
        spec_of("dpsgd", 1.0, 1e-6, epochs=3),
        spec_of("dpsgd", 1.0, 1e-6, batch_size=10),
        spec_of("dpgcd", 1.0, 1e-6, private_constants=0.1),
    ]
    stopping = Stopping(8.0, 1.0)
    trials = plan_trials(specs, N, D, HELD_OUT, stopping)
    assert [plan.spec.algorithm for plan in trials.plans] == [spec.algorithm for spec in specs]
    assert {(plan.spec.epsilon, plan.spec.delta) for plan in trials.plans} == {tuple(trials.base)}
    cost = epsilon_of(trials.event, 1e-6, "replace").epsilon
    assert 0.99 <= cost <= 1 + 1e-9
    rho = (trials.score.unit / trials.score.scale) ** 2 / 2
    assert 0.97 <= priced_again(trials, stopping, 1e-6, "replace", rho) <= 1 + 3e-3
    assert isinstance(trials.event, RepeatAndSelectDpEvent)
    assert isinstance(trials.event.event, ParallelDpEvent)
    assert {plan.event for plan in trials.plans} < set(trials.event.event.events)


def test_a_long_tail_is_paid_for_or_not_cut() -> None:
    for delta in (0.0, 1e-6):
        stopping = Stopping(20.0, 0.0)
        trials = plan_trials([spec_of("bolton", 1.0, delta)], N, D, HELD_OUT, stopping)
        with mpmath.workdps(80):
            tail = 1 - sum(probabilities(stopping, trials.most))
        assert tail <= (1e-6 * delta / (1 + math.e) if delta else 2.0**-200)


def search_of(spec: Spec) -> Search:
    assert spec.epsilon is not None
    return Search([spec], N, D, Stopping(), spec.epsilon, spec.delta, "replace", lambda: None)


def test_arithmetic_of_all_trials_is_paid_for() -> None:
    """What computed noise may be off by is in the curve, and its rare failures, once for each trial, in delta."""
    spec = spec_of("scs13", 1.0, 1e-6)
    search = search_of(spec)
    (plan,) = plan_trials([spec], N, D, HELD_OUT, Stopping()).plans
    before = search.total((plan,))
    rough = replace(plan, noise=replace(plan.noise, excess=0.01))
    assert search.total((rough,)) >= before + 0.02
    bound = 3 * 10.0 * (1 + math.e) * math.exp(-plan.noise.rarity)
    assert search.left((plan,)) <= 1e-6 * (1 - 1e-6) - bound
    assert bound < 1e-3 * 1e-6
    often = replace(plan, noise=replace(plan.noise, rarity=math.log(1e7)))
    assert search.left((often,)) < 0
    assert search.total((often,)) == math.inf


def test_scores_have_steps_that_fit() -> None:
    for epsilon, delta in ((0.02, 1e-6), (1.0, 1e-6), (50.0, 1e-6), (0.01, 0.0), (100.0, 0.0)):
        for sensitivity in (1, 2**10):
            trials = plan_trials([spec_of("bolton", epsilon, delta)], N, D, 10**6, Stopping(), sensitivity=sensitivity)
            noise = trials.score
            assert noise.unit & (noise.unit - 1) == 0
            assert 1 <= noise.unit <= 2**20
            assert noise.scale >= 2**14
            assert noise.mechanism == "laplace" or noise.scale <= 2**20
            ratio = noise.scale / (noise.unit * sensitivity)
            total = (
                Stopping().total(Curve.zcdp(1 / (2 * ratio**2)), delta) if delta else Stopping().total_pure(1 / ratio)
            )
            assert 0.98 * epsilon <= total <= epsilon * (1 + 1e-9)
            assert isinstance(noise, ScoreNoise)


def test_a_seed_is_no_privacy_for_trials_either() -> None:
    trials = plan_trials([spec_of("bolton", 1.0, 1e-6, seed=3)], N, D, HELD_OUT, Stopping())
    assert trials.event == NonPrivateDpEvent()


def test_trials_that_cannot_be_are_refused() -> None:
    def refuse(specs: list[Spec], match: str, held_out: int = HELD_OUT, sensitivity: int = 1) -> None:
        with pytest.raises(BismarckError, match=match):
            plan_trials(specs, N, D, held_out, Stopping(), sensitivity=sensitivity)

    good = spec_of("bolton", 1.0, 1e-6)
    refuse([], "no specs")
    refuse([good, Spec.create("sgd")], '"sgd" is not private')
    refuse([good, spec_of("bolton", 2.0, 1e-6)], "differ in epsilon")
    refuse([good, spec_of("bolton", 1.0, 1e-7)], "differ in delta")
    refuse([good, spec_of("bolton", 1.0, 1e-6, "zero-out")], "differ in adjacency")
    refuse([good], "no rows to score", held_out=0)
    refuse([good], "sensitivity 0 is out of range", sensitivity=0)
    refuse([good], "more noise on scores", sensitivity=2**20)
    refuse([spec_of("dpsgd", 1.0, 0.0)], "a trial gets epsilon 0.5: .* delta above 0 only")
    refuse([spec_of("bolton", 1e6, 1e-6)], "too large for random stopping")
    refuse([spec_of("bolton", 20.0, 1e-300)], "too small for random stopping")


def test_a_trial_gets_more_than_a_tenth_of_the_budget() -> None:
    """What all of this is for: ten trials on average at half the price of two."""
    trials = plan_trials([spec_of("bolton", 1.0, 1e-6)], N, D, HELD_OUT, Stopping(10.0, 0.0))
    assert trials.base.epsilon > 0.53
    assert gaussian_epsilon(gaussian_multiplier(trials.base.epsilon, trials.base.delta), 1e-6) < 0.56
