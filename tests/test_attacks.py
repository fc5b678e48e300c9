"""The attack's statistics: exact bounds, and rates that no mechanism of the claimed epsilon can have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from bismarck_dp import attacks
from bismarck_dp.attacks import Rates, Test, clopper_pearson, epsilon_bound, mu_bound, strongest, trade_off

Test.__test__ = False  # type: ignore[attr-defined]  # not a test of ours


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (57, 1000), (999, 1000)])
def test_clopper_pearson_is_scipys(hits: int, trials: int) -> None:
    low, high = clopper_pearson(hits, trials, 0.0005)
    theirs = stats.binomtest(hits, trials).proportion_ci(0.999, method="exact")
    assert low == pytest.approx(theirs.low, abs=1e-12)
    assert high == pytest.approx(theirs.high, abs=1e-12)


def test_clopper_pearson_covers() -> None:
    """The bounds are wrong at most as often as they say, for rates near zero too."""
    rng = np.random.default_rng(0)
    for rate in (0.003, 0.2, 0.97):
        hits = rng.binomial(200, rate, size=4000)
        bounds = np.array([clopper_pearson(int(h), 200, 0.05) for h in hits])
        assert np.mean(bounds[:, 0] > rate) <= 0.05 + 0.012
        assert np.mean(bounds[:, 1] < rate) <= 0.05 + 0.012


def test_a_perfect_test_proves_a_large_epsilon() -> None:
    rates = Rates(1000, 1000, 0, 1000)
    assert 4 < epsilon_bound(rates, 0.0, 0.999) < math.log(1000)
    assert epsilon_bound(Rates(500, 1000, 500, 1000), 0.0, 0.999) == 0
    assert epsilon_bound(Rates(1000, 1000, 900, 1000), 0.0, 0.999) > 2, "the complement tells the tables apart"
    assert epsilon_bound(Rates(100, 1000, 0, 1000), 0.2, 0.999) == 0, "delta allows that much"


def snapped(values: np.ndarray) -> np.ndarray:
    """On a grid, as releases are."""
    return np.round(values * 2.0**16) / 2.0**16


def laplace(rng: np.random.Generator, centre: float, epsilon: float, count: int) -> np.ndarray:
    return snapped(centre + rng.laplace(scale=1 / epsilon, size=(count, 1)))


def gauss(rng: np.random.Generator, centre: float, mu: float, count: int) -> np.ndarray:
    return snapped(centre + rng.normal(scale=1 / mu, size=(count, 1)))


def finding(first: np.ndarray, second: np.ndarray, mechanism: str, delta: float) -> attacks.Finding:
    centres = np.array([1.0]), np.array([0.0])
    values = [dict(attacks.statistics(sample, *centres, mechanism)) for sample in (first, second)]
    return strongest(values[0], values[1], delta, mechanism == "gaussian")


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_the_bound_stays_below_a_true_epsilon_and_comes_near(epsilon: float) -> None:
    rng = np.random.default_rng(1)
    found = [
        finding(laplace(rng, 1, epsilon, 4000), laplace(rng, 0, epsilon, 4000), "l2-laplace", 0.0) for _ in range(20)
    ]
    assert max(f.epsilon for f in found) <= epsilon
    assert np.median([f.epsilon for f in found]) > 0.6 * epsilon


def test_the_gaussian_bound_stays_below_a_true_mu_and_comes_near() -> None:
    rng = np.random.default_rng(2)
    bounds = []
    for _ in range(20):
        first, second = gauss(rng, 1, 1.0, 4000), gauss(rng, 0, 1.0, 4000)
        rates = Test("position", 0.5, False).rates(first[:, 0], second[:, 0])
        bounds.append(mu_bound(rates, 0.999))
    assert max(bounds) <= 1
    assert np.median(bounds) > 0.8


def test_half_the_noise_is_found_out() -> None:
    rng = np.random.default_rng(3)
    assert finding(laplace(rng, 1, 2, 1500), laplace(rng, 0, 2, 1500), "l2-laplace", 0.0).epsilon > 1
    claimed = attacks._gaussian_epsilon(0.5, 1e-2)
    assert finding(gauss(rng, 1, 1.0, 1500), gauss(rng, 0, 1.0, 1500), "gaussian", 1e-2).epsilon > claimed


def test_noise_from_the_ball_is_found_out() -> None:
    """Its density has a pole at zero, which nearness finds and the likelihood ratio of the right noise does not."""
    rng = np.random.default_rng(4)
    first, second = (laplace(rng, 0, 1, 2000) * rng.random((2000, 1)) + centre for centre in (1, 0))
    found = finding(first, second, "l2-laplace", 0.0)
    assert found.epsilon > 1
    assert "near" in found.test or "distance" in found.test


def test_noise_in_plain_floating_point_is_found_out() -> None:
    """Off the grid, the last bits of centre + noise tell the centre (Mironov 2012), whatever epsilon is."""
    rng = np.random.default_rng(1)
    first, second = (centre + rng.laplace(scale=2, size=(4000, 1)) for centre in (1, 0))
    assert finding(first, second, "l2-laplace", 0.0).epsilon > 1
    assert finding(snapped(first), snapped(second), "l2-laplace", 0.0).epsilon <= 0.5


def test_trade_off_curve() -> None:
    fpr, fnr = trade_off(np.array([3.0, 2.0, 1.0]), np.array([0.5, 2.5]))
    assert list(fpr) == [0, 0, 0.5, 0.5, 0.5, 1]
    np.testing.assert_allclose(fnr, [1, 2 / 3, 2 / 3, 1 / 3, 0, 0], atol=1e-12)
    lowest = attacks.claimed_trade_off(np.array([0.0, 0.1, 1.0]), 1.0, 0.05)
    np.testing.assert_allclose(lowest, [0.95, 0.95 - math.e * 0.1, 0.0], atol=1e-12)
