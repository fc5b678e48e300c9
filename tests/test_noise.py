"""The delivered noise against its claimed distribution, and calibration against an independent accountant."""

from __future__ import annotations

import ctypes
import math
import secrets

import dp_accounting
import kernels
import numpy as np
import pytest
from kernels import library
from scipy import stats

from bismarck_dp.errors import BismarckError
from bismarck_dp.mechanisms import calibrate, gaussian_multiplier, grid_of

SAMPLES = 200_000
LEVEL = 1e-6
"""A right sampler fails a test once in a million runs."""


def fresh() -> kernels.Random:
    return kernels.Random.start(secrets.token_bytes(32))


def gaussian(sigma: int, count: int) -> np.ndarray:
    random = fresh()
    at = ctypes.byref(random)
    draw, sigma_c = library.dp_discrete_gaussian, ctypes.c_uint64(sigma)
    return np.array([draw(at, sigma_c) for _ in range(count)], dtype=np.int64)


@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_discrete_gaussian_frequencies(sigma: int) -> None:
    """Chi-square against exp(-k^2 / (2 sigma^2)), tails pooled."""
    sample = gaussian(sigma, SAMPLES)
    k = np.arange(-4 * sigma, 4 * sigma + 1)
    weights = np.exp(-(np.arange(-40 * sigma, 40 * sigma + 1) ** 2) / (2 * sigma**2))
    probability = np.exp(-(k**2) / (2 * sigma**2)) / weights.sum()
    observed = np.array([(sample == i).sum() for i in k])
    observed = np.append(observed, SAMPLES - observed.sum())
    expected = SAMPLES * np.append(probability, 1 - probability.sum())
    keep = expected > 5
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    assert stats.chi2.sf(statistic, keep.sum() - 1) > LEVEL


@pytest.mark.parametrize("sigma", [2**15, 54321, 2**16, 2**20])
def test_discrete_gaussian_at_release_scale(sigma: int) -> None:
    """So fine a grid that the continuous distribution is the reference: Kolmogorov-Smirnov, and the variance."""
    sample = gaussian(sigma, SAMPLES)
    assert stats.kstest(sample / sigma, "norm").pvalue > LEVEL
    variance = np.mean((sample / sigma) ** 2)
    assert abs(variance - 1) < 6 * math.sqrt(2 / SAMPLES)


def test_discrete_laplace_frequencies() -> None:
    random, scale = fresh(), 3
    at = ctypes.byref(random)
    sample = np.array([library.dp_discrete_laplace(at, ctypes.c_uint64(scale)) for _ in range(SAMPLES)])
    k = np.arange(-20, 21)
    r = math.exp(-1 / scale)
    probability = (1 - r) / (1 + r) * r ** np.abs(k)
    observed = np.array([(sample == i).sum() for i in k])
    observed = np.append(observed, SAMPLES - observed.sum())
    expected = SAMPLES * np.append(probability, 1 - probability.sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, len(expected) - 1) > LEVEL


@pytest.mark.parametrize("d", [1, 2, 3, 20])
def test_knorm_noise_has_gamma_radius_and_uniform_direction(d: int) -> None:
    """|z| is Gamma(d, scale); z / |z| is uniform on the sphere, so each squared coordinate is Beta(1/2, (d-1)/2).

    A direction from the ball (the paper's Appendix E) shortens the radius and fails the first test.
    """
    count, scale, random = 20_000, 0.7, fresh()
    sample = np.empty((count, d))
    for row in sample:
        library.dp_knorm_noise(ctypes.byref(random), ctypes.c_double(scale), kernels.pointer(row), d)
    radius = np.linalg.norm(sample, axis=1)
    assert stats.kstest(radius, stats.gamma(d, scale=scale).cdf).pvalue > LEVEL
    assert abs(np.mean(sample > 0) - 0.5) < 3 / math.sqrt(count * d)
    if d > 1:
        direction = sample / radius[:, None]
        for j in range(d):
            assert stats.kstest(direction[:, j] ** 2, stats.beta(0.5, (d - 1) / 2).cdf).pvalue > LEVEL
        assert abs(np.corrcoef(direction[:, 0], radius)[0, 1]) < 5 / math.sqrt(count)


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
    out, room = w.copy(), np.empty(len(w))
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
@pytest.mark.parametrize("width", [1, 50, 5000])
def test_knorm_calibration_covers_rounding(epsilon: float, width: int) -> None:
    noise = calibrate(0.5, epsilon, 0.0, width, 1.0)
    assert noise.mechanism == "l2-laplace"
    assert noise.scale >= (0.5 + noise.grid * math.sqrt(width)) / epsilon * (1 - 1e-12)
    assert noise.scale <= (0.5 + noise.grid * math.sqrt(width)) / epsilon * (1 + 1e-12)


def test_calibration_refuses_what_the_grid_cannot_hold() -> None:
    with pytest.raises(BismarckError, match="below the precision"):
        calibrate(1e-9, 1e6, 0.0, 5, 1e6)
    with pytest.raises(BismarckError, match="epsilon is too small"):
        calibrate(1.0, 1e-9, 0.0, 10**6, 1.0)
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
