"""BANCO: the magnitude against mpmath, the constants against the noise, the kernel against its NumPy twin."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import kernels
import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bismarck_dp import Plan, Spec, make_plan, reference
from bismarck_dp.banco import LARGEST, LOG_ROOT, Bet, Learner, magnitude
from bismarck_dp.losses import LOSSES, Array

kernels.library.dp_banco_magnitude.restype = ctypes.c_double
kernels.library.dp_banco_magnitude.argtypes = (ctypes.c_double, ctypes.c_double, ctypes.c_double)
c_magnitude = kernels.library.dp_banco_magnitude

KEY = bytes(range(32))


def load_bench() -> Any:
    """bench/banco.py as a module."""
    path = Path(__file__).parents[1] / "bench" / "banco.py"
    spec = importlib.util.spec_from_file_location("bench_banco", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_banco"] = module
    spec.loader.exec_module(module)
    return module


bench = load_bench()


# ---- the magnitude ----


def exact_magnitude(x: float, y: float, a: float) -> tuple[mpmath.mpf, float]:
    """The integral with 100 digits, and the logarithm that is factored out of it; x > 0."""
    with mpmath.workdps(100):
        big_x, big_y, big_a = mpmath.mpf(x), mpmath.mpf(y), mpmath.mpf(a)
        if y == 0:
            angle = big_a * big_x
            return (mpmath.cosh(angle) - mpmath.sinh(angle) / angle) / big_x, float(angle)
        root = mpmath.sqrt(big_y)
        k, reach = big_x / (2 * root), big_a * root
        area = mpmath.erf(reach - k) + mpmath.erf(reach + k)
        if k > reach:
            area = mpmath.erfc(k - reach) - mpmath.erfc(k + reach)
        ends = mpmath.exp(-((reach - k) ** 2)) - mpmath.exp(-((reach + k) ** 2))
        top = min(k, reach)
        value = mpmath.exp(k * k) * (k * mpmath.sqrt(mpmath.pi) * area - ends) / (4 * big_a * big_y)
        return value, float(top * (2 * k - top))


def spread() -> list[tuple[float, float, float]]:
    """Peaks from the middle to far outside of [-a, a], and bells from flat to narrow."""
    reaches = [*np.geomspace(1e-3, 60, 25), 0.99, 1.0, 1.01, 2.0]
    peaks = [*np.geomspace(1e-6, 60, 30), *np.geomspace(70, 3000, 8)]
    # next to where the closed form takes over
    pairs = [*product(reaches, peaks), *((r, r - gap) for r in reaches for gap in (0.99, 1.0, 1.01) if r > gap)]
    grid = product(pairs, (0.01, 0.6838, 30.0))
    return [(float(2 * k * reach / a), float(reach / a) ** 2, a) for (reach, k), a in grid]


def test_the_magnitude_against_mpmath() -> None:
    """To 2e-14, and what half an ulp of x and y makes of an exponent of that size."""
    tried = 0
    for x, y, a in [*spread(), *((x, 0.0, a) for x in (1e-9, 0.3, 7.0, 200.0) for a in (0.01, 1.0))]:
        exact, log = exact_magnitude(x, y, a)
        if 1e-200 < exact < 1e260:
            tried += 1
            for found in (magnitude(x, y, a), c_magnitude(x, y, a)):
                assert abs(float(found / exact - 1)) <= 2e-14 + 3e-16 * log, (x, y, a)
    assert tried > 2000


def test_the_magnitude_of_a_few_rows_is_the_paper_s_integral() -> None:
    for x, y, a in [(30.0, 900.0, 0.25), (-300.0, 900.0, 0.25), (2000.0, 900.0, 0.25), (-1.0, 0.1, 0.5)]:
        exact = mpmath.quad(lambda u, x=x, y=y: u * mpmath.exp(u * x - u * u * y), [-a, -a / 2, 0, a / 2, a]) / (2 * a)
        assert magnitude(x, y, a) == pytest.approx(float(exact), rel=1e-10)


numbers = st.floats(allow_nan=False, allow_infinity=False)
sizes = st.one_of(st.floats(0, allow_nan=False, allow_infinity=False), st.floats(1e-3, 1e6))
TINY, HUGE = 5e-324, 1.7e308


@given(x=st.one_of(numbers, st.floats(-1e4, 1e4)), y=sizes, a=sizes.filter(lambda a: a > 0))
@example(x=HUGE, y=0.0, a=TINY)
@example(x=HUGE, y=HUGE, a=HUGE)
@example(x=1.0, y=0.0, a=HUGE)
@example(x=HUGE, y=0.5, a=HUGE)
@example(x=1e200, y=1e300, a=1e300)
@example(x=TINY, y=HUGE, a=HUGE)
@example(x=TINY, y=TINY, a=TINY)
@example(x=HUGE, y=TINY, a=1.0)
@example(x=TINY, y=TINY, a=4.4989137945431964e161)
@example(x=1.0, y=HUGE, a=1e-154)
@example(x=2.0, y=1.0, a=1.0)
@example(x=0.0, y=0.0, a=1.0)
@settings(max_examples=3000, deadline=None)
def test_the_magnitude_is_always_a_number(x: float, y: float, a: float) -> None:
    """Finite, of the sign of x, odd to the last bit, and the same in both languages, but for numbers that are so small
    that halving one rounds it.
    """
    for function in (magnitude, c_magnitude):
        m = function(x, y, a)
        assert abs(m) <= LARGEST
        assert m * math.copysign(1.0, x) >= 0
        assert function(-x, y, a) == -m
    m = magnitude(x, y, a)
    exact = all(number == 0 or abs(number) > 1e-290 for number in (x, y, a))
    if exact and abs(m) < LARGEST / 10 and (abs(m) > 1e-280 or m == 0 == x):
        assert c_magnitude(x, y, a) == pytest.approx(m, rel=1e-12 + 1e-15 * abs(math.log(abs(m) or 1)))


def test_the_languages_agree() -> None:
    for x, y, a in spread():
        m = magnitude(x, y, a)
        assert m == LARGEST or c_magnitude(x, y, a) == pytest.approx(m, rel=1e-12)


# ---- the constants ----


def test_the_root_is_approached_from_below() -> None:
    with mpmath.workdps(40):
        root = mpmath.findroot(lambda u: mpmath.log(1 - u) + u + u * u, 0.68)
        assert mpmath.mpf(LOG_ROOT) < root < mpmath.mpf(np.nextafter(LOG_ROOT, 1.0))
    u = np.linspace(-LOG_ROOT, LOG_ROOT, 100_001)
    assert (np.log1p(u) - u + u * u).min() >= -1e-16


@pytest.mark.parametrize("d", [1, 2, 20, 1000])
def test_the_variance_bounds_the_moments_up_to_the_reach(d: int) -> None:
    """ln E exp(u <z, v>) = -(d + 1)/2 ln(1 - s^2 u^2) is at most u^2 s1^2 / 2 up to u = 1/(2 s), and equal there."""
    for lipschitz, epsilon in product((0.1, 1.0, 3.0), (0.5, 2.0)):
        scale = 2 * lipschitz / epsilon
        bet = Bet.knorm(lipschitz, scale, d)
        u = np.linspace(0, 1 / (2 * scale), 1001)[1:]
        slack = u**2 * bet.variance / 2 + (d + 1) / 2 * np.log1p(-((scale * u) ** 2))
        assert slack.min() >= -1e-12 * d
        assert slack[-1] == pytest.approx(0, abs=1e-12 * d)
        assert bet.variance == pytest.approx(4.603 * (d + 1) * lipschitz**2 / epsilon**2, rel=1e-4)
        assert bet.reach == min(LOG_ROOT / lipschitz, epsilon / (4 * lipschitz))


def knorm_noise(rng: np.random.Generator, count: int, d: int, scale: float) -> Array:
    """A direction times a gamma-distributed norm: not how the kernel makes it."""
    directions = rng.standard_normal((count, d))
    norms = rng.gamma(d, scale, count)
    return np.asarray(directions * (norms / np.linalg.norm(directions, axis=1))[:, None])


@pytest.mark.parametrize("d", [1, 5])
def test_the_moments_by_sampling(d: int) -> None:
    scale = 2.0
    z = knorm_noise(np.random.default_rng(3), 2_000_000, d, scale)[:, 0]
    for part in (0.1, 0.25, 0.4):
        u = part / scale
        sampled = np.exp(u * z)
        error = 5 * sampled.std() / math.sqrt(len(z))
        assert abs(sampled.mean() - (1 - part**2) ** (-(d + 1) / 2)) <= error
        assert sampled.mean() - error <= math.exp(u * u * Bet.knorm(1.0, scale, d).variance / 2)


@pytest.mark.parametrize("bet", [Bet.knorm(1.5, 3.0, 4), Bet.gaussian(1.5, 0.7)], ids=["l2-laplace", "gaussian"])
def test_no_bet_wins_on_average(bet: Bet) -> None:
    """E exp(u <g + z, q> - u^2 (s1^2 / 2 + G^2)) <= 1 + u <g, q> for all |u| <= a and |<g, q>| <= G."""
    for u, g in product(np.linspace(-bet.reach, bet.reach, 201), np.linspace(-1.5, 1.5, 61)):
        moment = u * u * 0.7**2 / 2 if bet.variance == 0.7**2 else -2.5 * math.log1p(-((3.0 * u) ** 2))
        assert math.exp(u * g + moment - u * u * (bet.variance / 2 + bet.lipschitz**2)) <= (1 + u * g) * (1 + 1e-12)


# ---- the learner ----


def test_a_learner_survives_json() -> None:
    rng = np.random.default_rng(8)
    learner = Learner.start(Bet.gaussian(1.0, 2.0), 3)
    for _ in range(50):
        learner.step(rng.normal(size=3) + 0.5)
    copy = Learner.from_json(json.loads(json.dumps(learner.to_json())))
    assert copy.to_json() == learner.to_json()
    gradient = rng.normal(size=3)
    learner.step(gradient, count=7)
    copy.step(gradient, count=7)
    np.testing.assert_array_equal(copy.w, learner.w)
    np.testing.assert_array_equal(copy.mean, learner.mean)


def test_a_mean_of_many_counts_with_its_own_variance() -> None:
    learner = Learner.start(Bet.gaussian(2.0, 3.0), 1)
    learner.step(np.ones(1), count=9)
    assert learner.y == pytest.approx(9.0 / 9 / 2 + 4.0)
    learner.step(np.ones(1))
    assert learner.y == pytest.approx(9.0 / 9 / 2 + 4.0 + 9.0 / 2 + 4.0)


def test_the_mean_is_over_the_iterates_that_were_asked_about() -> None:
    learner, asked = Learner.start(Bet.gaussian(1.0, 0.1), 2), []
    assert not learner.mean.any()
    for _ in range(30):
        asked.append(learner.w)
        learner.step(np.array([0.6, -0.8]))
    np.testing.assert_allclose(learner.mean, np.mean(asked, axis=0), rtol=1e-14)
    assert not asked[0].any()
    assert asked[-1] @ np.array([0.6, -0.8]) > 0, "steps go along the negative subgradient"


def test_no_gradient_is_no_step() -> None:
    learner = Learner.start(Bet.gaussian(1.0, 0.0), 2)
    learner.step(np.zeros(2))
    assert not learner.w.any()


# ---- the kernel ----

SEED = 5


def planned(loss: str, delta: float, n: int, d: int, **options: object) -> Plan:
    return make_plan(Spec.create("banco", loss, 20.0, delta, options), n, d)


def rows_of(plan: Plan) -> tuple[Array, Array]:
    """Random rows; every tenth counts for nothing."""
    rng = np.random.default_rng(17)
    x = rng.normal(size=(plan.n, plan.d))
    y = x @ rng.normal(size=plan.d)
    x[::10] = np.nan
    return x, np.sign(y) if LOSSES[plan.spec.loss].classification else y


@pytest.mark.parametrize("options", [{}, {"clip": 0.3}, {"fit_intercept": True, "feature_bound": 2.0}], ids=str)
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("d", [1, 6, 33])
def test_the_kernel_agrees_with_numpy(loss: str, delta: float, options: dict[str, object], d: int) -> None:
    """To 1e-9, noise included; every tenth row is of zeros, and gets its noise."""
    plan = planned(loss, delta, 700, d, **options)
    rows = kernels.packed(rows_of(plan), plan)
    expected = reference.train(rows[:, 1:], rows[:, 0], plan, noise=reference.seeded_noise(plan, SEED))
    assert np.linalg.norm(expected) > 0
    for cut in (1, 64, 700):
        found = kernels.train(rows, plan.kernel_params(), 1, cut, kernel="banco", seed=SEED)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


def params_of(**changes: object) -> dict[str, object]:
    return {**planned("logistic", 1e-6, 5, 3).kernel_params(), **changes}


def start(params: dict[str, object]) -> tuple[kernels.Solver, ctypes.Array[ctypes.c_char], bytes | None]:
    solver = kernels.library.dp_solver_named(b"banco").contents
    body = ctypes.create_string_buffer(solver.size(3))
    host = kernels.host_of(params)
    return solver, body, solver.start(body, 3, ctypes.byref(host))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workers": 2}, b"workers"),
        ({"epochs": 2}, b"epochs"),
        ({"n": 0}, b"n"),
        ({"lipschitz": 0}, b"lipschitz"),
        ({"lipschitz": float("nan")}, b"lipschitz"),
        ({"variance": -1}, b"variance"),
        ({"variance": "inf"}, b"variance"),
        ({"reach": 0}, b"reach"),
        ({"reach": "inf"}, b"reach"),
        ({"loss": "cubic"}, b"loss"),
        ({"noise": "loud"}, b"noise"),
        ({"noise_grid": 0.3}, b"noise_grid"),
    ],
)
def test_the_kernel_refuses(wrong: dict[str, object], said: bytes) -> None:
    answer = start(params_of(**wrong))[2]
    assert answer is not None
    assert said in answer


def test_a_pass_is_one_pass_over_one_partition() -> None:
    solver, body, wrong = start(params_of())
    pool, rows, w = kernels.Pool.start(KEY), np.zeros((6, 4), dtype=np.float32), np.ones(3)
    assert wrong is None
    assert not solver.take
    assert not solver.step
    assert solver.noised(body)
    assert not solver.begin_pass(body, 1)
    assert solver.begin_pass(body, 0)
    solver.output(body, kernels.pointer(w))
    assert not w.any()
    assert solver.fold(body, kernels.pointer(rows), 4, ctypes.byref(pool))
    assert not solver.complete(body)
    assert not solver.fold(body, kernels.pointer(rows), 2, ctypes.byref(pool))
    assert solver.fold(body, kernels.pointer(rows), 1, ctypes.byref(pool))
    assert solver.complete(body)
    assert math.isnan(solver.objective(body))
    solver.weigh(body)
    solver.end_pass(body, None)
    assert solver.passes(body) == 1
    assert not solver.begin_pass(body, 0)
    solver.output(body, kernels.pointer(w))
    assert w.any(), "rows of zeros have noise"


def test_without_noise_it_says_so() -> None:
    solver, body, wrong = start(params_of(noise="none"))
    assert wrong is None
    assert not solver.noised(body)


# ---- what it is for ----


@pytest.mark.parametrize("norm", bench.NORMS)
def test_it_keeps_up_with_sgd_that_is_told_the_norm(norm: float) -> None:
    """Absolute loss, 50 features, epsilon = 8, a million rows: less than twice the excess risk, whatever |w*| is."""
    assert bench.oracle_ratio(norm, bench.ABSOLUTE, seed=0) < 2
