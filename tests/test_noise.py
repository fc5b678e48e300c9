"""The delivered noise against its claimed distribution, and calibration against an independent accountant."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction

import dp_accounting
import kernels
import numpy as np
import pytest
from kernels import library
from samplers import WIDE, draw
from scipy import integrate, stats
from statistics_of import LEVEL, check_frequencies, check_moments, check_tail

from bismarck_dp.errors import BismarckError
from bismarck_dp.mechanisms import calibrate, gaussian_multiplier, grid_of, knorm_excess

SAMPLES = 10_000_000


def frequencies(sample: np.ndarray, reach: int) -> np.ndarray:
    """How often each of -reach..reach occurs, and at last how often anything else."""
    inside = sample[np.abs(sample) <= reach].astype(np.int64)
    counts = np.bincount(inside + reach, minlength=2 * reach + 1)
    return np.append(counts, len(sample) - len(inside))


def check_integers(sample: np.ndarray, k: np.ndarray, probability: np.ndarray, beyond: list[float]) -> None:
    """Frequencies, tails and four moments of integers against the probabilities of all k that matter."""
    reach = int(k[-1])
    check_frequencies(frequencies(sample, reach), np.append(probability, max(0.0, 1 - probability.sum())))
    for limit in beyond:
        check_tail(sample, limit, probability[np.abs(k) > limit].sum())
    check_moments(sample, lambda p: float((k.astype(float) ** p * probability).sum()))


@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_discrete_gaussian_frequencies(sigma: int) -> None:
    """exp(-k^2 / (2 sigma^2)) exactly, tails included."""
    sample = draw("gaussians", sigma, count=SAMPLES if sigma == 2 else SAMPLES // 10, dtype=np.int64)
    k = np.arange(-12 * sigma, 12 * sigma + 1)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    check_integers(sample, k, weights / weights.sum(), [3 * sigma, 4 * sigma, 5 * sigma])


@pytest.mark.parametrize(("sigma", "count"), [(54321, SAMPLES), (2**15, SAMPLES // 10), (2**20, SAMPLES // 10)])
def test_discrete_gaussian_at_release_scale(sigma: int, count: int) -> None:
    """So fine a grid that the continuous distribution is the reference."""
    sample = draw("gaussians", sigma, count=count, dtype=np.int64) / sigma
    assert stats.kstest(sample, "norm").pvalue > LEVEL
    check_moments(sample, stats.norm.moment)
    for limit in (3, 4, 5):
        check_tail(sample, limit, 2 * stats.norm.sf(limit))


def test_discrete_laplace_frequencies() -> None:
    scale = 3
    sample = draw("laplaces", scale, count=SAMPLES, dtype=np.int64)
    k = np.arange(-40 * scale, 40 * scale + 1)
    r = math.exp(-1 / scale)
    check_integers(sample, k, (1 - r) / (1 + r) * r ** np.abs(k), [10 * scale, 15 * scale])


def test_discrete_laplace_at_release_scale() -> None:
    sample = draw("laplaces", 2**16, count=SAMPLES // 10, dtype=np.int64) / 2**16
    assert stats.kstest(sample, "laplace").pvalue > LEVEL
    check_moments(sample, lambda p: math.factorial(p) * (p % 2 == 0))


def test_exponential() -> None:
    """The whole part geometric, the fraction's density falling as e^-f, and neither knows of the other."""
    sample = draw("exponentials", count=SAMPLES)
    assert stats.kstest(sample, "expon").pvalue > LEVEL
    check_moments(sample, stats.expon.moment)
    for limit in (10, 15):
        check_tail(sample, limit, math.exp(-limit))
    whole, fraction = np.minimum(np.floor(sample), 9).astype(int), np.floor(10 * (sample % 1)).astype(int)
    of_whole = np.append(np.exp(-np.arange(9.0)) * -math.expm1(-1), math.exp(-9))
    of_fraction = -np.diff(np.exp(-np.arange(11) / 10)) / -math.expm1(-1)
    check_frequencies(np.bincount(10 * whole + fraction, minlength=100), np.outer(of_whole, of_fraction).ravel())


def test_small_exponentials_keep_their_relative_precision() -> None:
    """All binary places are random, down to a hundred behind the first one of a small number."""
    sample = draw("wide_exponentials", count=200_000, dtype=WIDE)
    small = sample[(sample["hi"] < 2**-7) & (sample["hi"] > 2**-11)]
    assert len(small) > 1000
    low = []
    for hi, lo in small.tolist():
        x = Fraction(hi) + Fraction(lo)
        shift = 100 - math.frexp(hi)[1]
        low.append(int(x * 2**shift) % 16)
    check_frequencies(np.bincount(low, minlength=16), np.full(16, 1 / 16))


def test_gumbel() -> None:
    sample = draw("gumbels", count=SAMPLES)
    assert stats.kstest(sample, "gumbel_r").pvalue > LEVEL
    check_moments(sample, lambda p: float(integrate.quad(lambda t: (-math.log(t)) ** p * math.exp(-t), 0, np.inf)[0]))
    for limit in (10, 15):
        check_tail(np.maximum(sample, 0), limit, stats.gumbel_r.sf(limit))
    check_tail(np.minimum(sample, 0), 2.5, stats.gumbel_r.cdf(-2.5))


@pytest.mark.parametrize(("d", "count"), [(1, SAMPLES), (2, SAMPLES // 2), (3, SAMPLES // 4), (20, SAMPLES // 40)])
def test_knorm_noise_has_gamma_radius_and_uniform_direction(d: int, count: int) -> None:
    """|z| is Gamma(d, scale); z / |z| is uniform on the sphere, so each squared coordinate is Beta(1/2, (d-1)/2).

    A direction from the ball (the paper's Appendix E) shortens the radius and fails the first test.
    """
    scale = 1.7
    sample = draw("knorms", scale, d, count=count, width=d).reshape(count, d)
    radius = np.linalg.norm(sample, axis=1)
    assert stats.kstest(radius, stats.gamma(d, scale=scale).cdf).pvalue > LEVEL
    check_moments(radius / scale, stats.gamma(d).moment)
    for limit in (10, 15):
        check_tail(radius / scale, limit, stats.gamma(d).sf(limit))
    check_tail(np.maximum(sample[:, 0], 0), 0, 0.5)
    if d > 1:
        direction = sample / radius[:, None]
        for j in (0, 1, d - 1):
            assert stats.kstest(direction[:, j] ** 2, stats.beta(0.5, (d - 1) / 2).cdf).pvalue > LEVEL
        orthants = (direction[:, 0] > 0) + 2 * (direction[:, 1] > 0) + 4 * (direction[:, d - 1] > 0)
        if d > 2:
            check_frequencies(np.bincount(orthants, minlength=8), np.full(8, 1 / 8))
        assert abs(np.corrcoef(direction[:, 0], radius)[0, 1]) < 6 / math.sqrt(count)
    if d == 2:
        angle = np.arctan2(sample[:, 1], sample[:, 0])
        assert stats.kstest(angle, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > LEVEL


def rounded_laplace(w: float, scale: float, k: np.ndarray) -> np.ndarray:
    """P(round(w + z) = k): differences of the distribution function, without cancellation in the upper tail."""
    law = stats.laplace(scale=scale)
    lower, upper = k - 0.5 - w, k + 0.5 - w
    return np.where(lower > 0, law.sf(lower) - law.sf(upper), law.cdf(upper) - law.cdf(lower))


@pytest.mark.parametrize("w", [0.0, 0.3, -1234567.5])
def test_rounded_release_in_one_dimension_is_exact(w: float) -> None:
    """A scale of two grid steps or so, where every grid point's probability can be seen."""
    grid, scale = 2.0**-5, 2.25
    near = round(w)
    steps = draw("releases", grid, grid * scale, np.array([grid * w]), 1, count=SAMPLES) / grid - near
    k = np.arange(-40, 41)
    probability = rounded_laplace(w - near, scale, k)
    check_frequencies(frequencies(steps, 40), np.append(probability, 1 - probability.sum()))
    wide = np.arange(-400, 401)
    for limit in (10 * scale, 15 * scale):
        check_tail(steps, limit, rounded_laplace(w - near, scale, wide[np.abs(wide) > limit]).sum())


def test_rounded_release_in_two_dimensions_is_exact() -> None:
    """Probabilities of 81 cells by quadrature; zero noise lies in a corner, where the density's edge does no harm."""
    scale, reach = 1.5, 4
    steps = draw("releases", 1.0, scale, np.array([0.5, 0.5]), 2, count=SAMPLES // 4, width=2).astype(np.int64)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    at = (np.arange(-reach, reach + 1)[:, None] - 0.5 + nodes / 2).ravel()
    density = np.exp(-np.hypot(at[:, None], at[None, :]) / scale) / (2 * math.pi * scale**2)
    cells = np.einsum("aibj,i,j->ab", density.reshape(9, 60, 9, 60), weights / 2, weights / 2)
    inside = np.all(np.abs(steps) <= reach, axis=1)
    index = (steps[inside, 0] + reach) * 9 + steps[inside, 1] + reach
    observed = np.append(np.bincount(index, minlength=81), (~inside).sum())
    check_frequencies(observed, np.append(cells.ravel(), 1 - cells.sum()))


def test_low_bits_of_a_release_say_nothing() -> None:
    """Weights that differ by 2^-30 of a grid step reach the same grid points, equally often."""
    near, far = (draw("releases", 1.0, 3.0, np.array([w]), 1, count=SAMPLES // 10) for w in (0.0, 2.0**-30))
    assert np.all(near == np.round(near))
    assert np.all(far == np.round(far))
    both = np.array([frequencies(near, 25)[:-1], frequencies(far, 25)[:-1]])
    assert np.all(both > 0)
    assert stats.chi2_contingency(both).pvalue > LEVEL


def test_a_release_rounds_halves_by_the_noise_alone() -> None:
    """w on the edge of two cells: each side is as likely, also where w is as large as doubles allow."""
    for w in (0.5, 2.0**51 + 0.5, -(2.0**51) + 0.5):
        sample = draw("releases", 1.0, 2.0**20, np.array([w]), 1, count=SAMPLES // 50)
        check_frequencies(np.bincount(sample > w, minlength=2), np.array([0.5, 0.5]))


def fresh() -> kernels.Random:
    return kernels.Random.fresh()


def test_bounded_draws_are_unbiased() -> None:
    random, n = fresh(), 7
    draws = [library.dp_random_below(ctypes.byref(random), ctypes.c_uint64(n)) for _ in range(70_000)]
    assert stats.chisquare(np.bincount(draws, minlength=n)).pvalue > LEVEL
    large = 3 * 2**62
    top = [library.dp_random_below(ctypes.byref(random), ctypes.c_uint64(large)) for _ in range(30_000)]
    assert max(top) < large
    thirds = np.bincount([value // 2**62 for value in top], minlength=3)
    assert stats.chisquare(thirds).pvalue > LEVEL, "a plain modulo would favour small values"


def test_release_leaves_every_weight_on_the_grid() -> None:
    grid, sigma = 2.0**-12, 40000
    w = np.random.default_rng(0).normal(size=501)
    out = w.copy()
    library.dp_release_gaussian(
        ctypes.byref(fresh()), ctypes.c_double(grid), ctypes.c_uint64(sigma), kernels.pointer(out), len(out)
    )
    assert np.all(out / grid == np.round(out / grid))
    assert stats.kstest((out - w) / (sigma * grid), "norm").pvalue > LEVEL
    out, room = w.copy(), np.empty(len(w), dtype=WIDE)
    library.dp_release_knorm(
        ctypes.byref(fresh()),
        ctypes.c_double(grid),
        ctypes.c_double(1.5),
        kernels.pointer(out),
        kernels.pointer(room),
        len(w),
    )
    assert np.all(out / grid == np.round(out / grid))
    assert 0.5 < np.linalg.norm(out - w) / (1.5 * len(w)) < 1.5


PRIVACY = [(e, d) for e in (1e-3, 0.05, 0.5, 1.0, 3.0, 9.0, 30.0) for d in (1e-12, 1e-8, 1e-6, 1e-3, 0.1)]


@pytest.mark.parametrize(("epsilon", "delta"), PRIVACY)
def test_gaussian_multiplier_equals_the_accountants(epsilon: float, delta: float) -> None:
    ours = gaussian_multiplier(epsilon, delta)
    theirs = dp_accounting.get_sigma_gaussian(epsilon, delta)
    assert abs(ours / theirs - 1) < 1e-6
    assert dp_accounting.get_epsilon_gaussian(ours, delta) <= epsilon * (1 + 1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), PRIVACY)
@pytest.mark.parametrize("width", [1, 50, 5000])
def test_gaussian_calibration_covers_rounding(epsilon: float, delta: float, width: int) -> None:
    sensitivity = 0.0123
    noise = calibrate(sensitivity, epsilon, delta, width, 1.0)
    assert noise.grid == 2.0 ** round(math.log2(noise.grid))
    assert noise.grid == grid_of(noise.scale) or noise.scale / noise.grid > 2**16, "2^16 steps, or finer"
    assert noise.scale / noise.grid == round(noise.scale / noise.grid)
    assert 2**15 <= noise.scale / noise.grid <= 2**20
    needed = sensitivity + noise.grid * math.sqrt(width)
    assert noise.scale >= needed * dp_accounting.get_sigma_gaussian(epsilon, delta)
    assert noise.scale <= needed * dp_accounting.get_sigma_gaussian(epsilon, delta) * 1.001


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("width", [1, 50, 5000, 10**6])
def test_knorm_calibration_covers_rounding(epsilon: float, width: int) -> None:
    noise = calibrate(0.5, epsilon, 0.0, width, 1.0)
    assert noise.mechanism == "l2-laplace"
    assert noise.scale / noise.grid <= 2**20
    needed = Fraction(0.5) + Fraction(noise.grid) * Fraction(math.isqrt(width * 2**200), 2**100)
    spent = needed / Fraction(noise.scale)
    assert spent + Fraction(knorm_excess(width)) <= Fraction(epsilon)
    assert spent >= Fraction(epsilon) * (1 - Fraction(1, 10**12)) - 2 * Fraction(knorm_excess(width))


@pytest.mark.parametrize("d", [1, 2, 50, 1000, 10**6])
def test_knorm_excess_is_the_theorems(d: int) -> None:
    """The constants of knorm.c, from the errors that it counts, in exact fractions."""
    unit = Fraction(1, 2**102)
    radius, scale = 4 * (d + 1024), 2**20
    relative = (46 + Fraction(3 * d, 2)) * unit * (1 + Fraction(1, 10**6))
    cut = Fraction(math.isqrt(d + 1024) + 1, 2**119) + Fraction(d, 2**256)
    e = scale * radius * (relative + cut) + (scale * radius + 1) * unit
    pairs = (d + 1) // 2 if d > 1 else 0
    a = (pairs + d % 2) * Fraction(1, 2**61) + (d + 40) * unit if d > 1 else Fraction(0)
    b = a + d * 2 * e / (1 - 2 * e) + e * (math.isqrt(d) + 1)
    assert 2 * b <= Fraction(knorm_excess(d))
    assert knorm_excess(d) < 1e-5


@pytest.mark.parametrize("e", [1e-3, 1e-2])
def test_grown_and_shrunk_cells_are_as_likely_as_claimed(e: float) -> None:
    """The theorem's inequality in one dimension, with errors large enough to see."""
    for scale in (1.0, 3.0, 100.0):
        k = np.linspace(-10 * scale, 10 * scale, 401)
        law = stats.laplace(scale=scale)
        cell, grown, shrunk = (law.cdf(k + 0.5 + x) - law.cdf(k - 0.5 - x) for x in (0, e, -e))
        bound = 2 * e / (1 - 2 * e) + e / scale
        assert np.all(np.log(grown / cell) <= bound + 1e-9)
        assert np.all(np.log(shrunk / cell) >= -bound - 1e-9)


def test_calibration_refuses_what_the_grid_cannot_hold() -> None:
    with pytest.raises(BismarckError, match="below the precision"):
        calibrate(1e-9, 1e6, 0.0, 5, 1e6)
    with pytest.raises(BismarckError, match="epsilon is too small"):
        calibrate(1.0, 1e-9, 0.0, 10**6, 1.0)
    with pytest.raises(BismarckError, match="epsilon is too small"):
        calibrate(1.0, 5e-6, 0.0, 10**6, 1.0)
    with pytest.raises(BismarckError, match="sensitivity"):
        calibrate(0.0, 1.0, 0.0, 5, 1.0)


def discrete_log_ratio(sigma: int, k: np.ndarray) -> np.ndarray:
    """log of rounded over discrete Gaussian probability, in extended precision by the midpoint expansion."""
    u = (np.arange(2000) + 0.5) / 2000 - 0.5
    s2 = float(sigma) ** 2
    mean = np.mean(np.exp(-(k[:, None] * u + u**2 / 2) / s2), axis=1)
    return np.log(mean)


@pytest.mark.parametrize("sigma", [8, 100, 2**15])
def test_rounded_and_discrete_gaussian_are_as_close_as_claimed(sigma: int) -> None:
    """The two inequalities that the Gaussian's calibration rests on."""
    k = np.unique(np.round(np.linspace(0, 12 * sigma, 400)))
    ratio = discrete_log_ratio(sigma, k)
    slack = 1e-7 / sigma
    assert np.all(ratio >= -1 / (24 * sigma**2) - slack)
    assert np.all(ratio <= k**2 / (24 * float(sigma) ** 4) + slack)
