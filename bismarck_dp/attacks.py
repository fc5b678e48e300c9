"""Statistics of an attack: from two samples of releases to a lower bound of epsilon that holds with confidence.

An attacker who sees a release guesses which of two neighbouring tables it came from. For an (epsilon, delta)-DP
mechanism every test obeys  TPR <= e^epsilon FPR + delta  (Kairouz, Oh and Viswanath 2015), so rates that break this
prove the claim false. The test is chosen on a quarter of the releases and its rates are measured on the others, with
Clopper and Pearson's exact bounds, so that the choice costs no confidence.

For a mechanism that claims to be Gaussian there is a stronger reading of the same rates (Dong, Roth and Su 2022): its
trade-off curve is that of N(0, 1) against N(mu, 1), so mu >= z(TPR) - z(FPR), and mu gives an epsilon at every delta.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .losses import Array

CONFIDENCE = 0.999
"""of the whole answer; it is shared between the bounds that the answer is the larger of"""

THRESHOLDS = 60
"""Tests tried for each statistic, either way round; with many more, the luckiest would win instead of the best."""

CAUTION = 0.99
"""The confidence of the bounds by which tests are compared."""

PART = 4
"""One release in so many chooses the test, the others measure it."""


@dataclass(frozen=True)
class Rates:
    """How often a test says "the first table" when it is (true positives) and when it is not (false positives)."""

    true_positives: int
    of_first: int
    false_positives: int
    of_second: int

    def bounds(self, confidence: float) -> tuple[float, float]:
        """The true positive rate from below and the false positive rate from above, both at once."""
        error = (1 - confidence) / 2
        low = clopper_pearson(self.true_positives, self.of_first, error)[0]
        return low, clopper_pearson(self.false_positives, self.of_second, error)[1]


def clopper_pearson(hits: int, trials: int, error: float) -> tuple[float, float]:
    """A rate from below and from above; each is wrong with probability at most `error`."""
    from scipy.special import betaincinv

    low = float(betaincinv(hits, trials - hits + 1, error)) if hits > 0 else 0.0
    high = float(betaincinv(hits + 1, trials - hits, 1 - error)) if hits < trials else 1.0
    return low, high


def epsilon_bound(rates: Rates, delta: float, confidence: float) -> float:
    """The least epsilon that the rates allow at delta: from the test, and from its complement."""
    tpr, fpr = rates.bounds(confidence)
    return max(_log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr), 0.0)


def mu_bound(rates: Rates, confidence: float) -> float:
    """The least mu of a Gaussian trade-off curve that the rates allow."""
    from scipy.special import ndtri

    tpr, fpr = rates.bounds(confidence)
    return max(0.0, float(ndtri(tpr) - ndtri(fpr))) if tpr > 0 and fpr < 1 else 0.0


def ceiling(trials: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that so many trials can prove: that of a test which is always right."""
    measured = trials - len(range(0, trials, PART))
    return epsilon_bound(Rates(measured, measured, 0, measured), delta, 1 - (1 - confidence) / 2)


def noise_level(noise: Array, mechanism: str, scale: float) -> float:
    """The p-value of noise vectors under their declared distribution (Kolmogorov and Smirnov): of every coordinate for
    Gaussian noise, of the norm for K-norm noise, which is Gamma; 0 where a value is not finite.
    """
    from scipy.stats import gamma, kstest, norm

    if not np.isfinite(noise).all():
        return 0.0
    if mechanism == "gaussian":
        return float(kstest(noise.ravel(), norm(scale=scale).cdf).pvalue)
    return float(kstest(np.linalg.norm(noise, axis=1), gamma(noise.shape[1], scale=scale).cdf).pvalue)


def same_law_level(first: Array, second: Array) -> float:
    """The p-value of two samples of vectors under one distribution (Kolmogorov and Smirnov): of every coordinate and of
    the norm; 0 where a value is not finite.
    """
    from scipy.stats import ks_2samp

    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return 0.0
    columns = [(first[:, j], second[:, j]) for j in range(first.shape[1])]
    columns.append((np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1)))
    return min(1.0, len(columns) * min(float(ks_2samp(*column).pvalue) for column in columns))


def _log_ratio(numerator: float, denominator: float) -> float:
    return math.log(numerator / denominator) if numerator > 0 and denominator > 0 else 0.0


# ---- tests an attacker tries ----


def statistics(releases: Array, first: Array, second: Array, mechanism: str) -> Iterator[tuple[str, Array]]:
    """Numbers that tell the tables apart, given what each would release without noise.

    The likelihood ratio of the declared noise is the best there is when the noise is as declared (Neyman and Pearson);
    for Gaussian noise it is the position along the line between the two. How near a release is to one of the two
    finds noise that is too often too small.
    """
    finite = np.isfinite(releases).all(axis=1)
    releases = np.nan_to_num(releases)
    gap = first - second
    near_first = np.linalg.norm(releases - first, axis=1)
    near_second = np.linalg.norm(releases - second, axis=1)
    yield "position", releases @ gap
    if mechanism != "gaussian":
        yield "likelihood ratio", near_second - near_first
    yield "nearness to the first", -near_first
    yield "distance from the second", near_second
    yield "finiteness", np.where(finite, 1.0, 0.0)


@dataclass(frozen=True)
class Test:
    """Says "the first table" when the statistic is at least the threshold (or, flipped, at most)."""

    statistic: str
    threshold: float
    flipped: bool

    def rates(self, first: Array, second: Array) -> Rates:
        """On the statistic's values for releases of the first and of the second table."""
        sign = -1 if self.flipped else 1
        hits = [int(np.sum(sign * values >= sign * self.threshold)) for values in (first, second)]
        return Rates(hits[0], len(first), hits[1], len(second))


def candidates(name: str, first: Array, second: Array) -> Iterator[Test]:
    pooled = np.concatenate([first, second])
    for threshold in np.unique(np.quantile(pooled, np.linspace(0, 1, THRESHOLDS))):
        yield Test(name, float(threshold), False)
        yield Test(name, float(threshold), True)


@dataclass(frozen=True)
class Finding:
    """The strongest lower bound of epsilon, and the test it comes from."""

    epsilon: float
    test: str
    rates: Rates


NOTHING = Finding(0.0, "none", Rates(0, 0, 0, 0))
NO_CURVE = np.zeros(0), np.zeros(0)


def strongest(
    first: dict[str, Array], second: dict[str, Array], delta: float, gaussian: bool, confidence: float = CONFIDENCE
) -> Finding:
    """The larger of the general bound and, for a Gaussian claim, the Gaussian one; both hold with `confidence`.

    `first` and `second` hold each statistic's values on the releases of either table. The test is chosen on one
    release in PART and measured on the others.
    """
    share = 1 - (1 - confidence) / 2
    found = [_best(first, second, delta, share, kind) for kind in ((False, True) if gaussian else (False,))]
    return max(found, key=lambda finding: finding.epsilon)


def _best(first: dict[str, Array], second: dict[str, Array], delta: float, share: float, gaussian: bool) -> Finding:
    few = {name: (first[name][::PART], second[name][::PART]) for name in first}

    def bound(rates: Rates, confidence: float) -> float:
        return mu_bound(rates, confidence) if gaussian else epsilon_bound(rates, delta, confidence)

    def promise(test: Test) -> tuple[float, float]:
        """A cautious bound, so that no lucky extreme wins; where there is none, how well the test guesses."""
        rates = test.rates(*few[test.statistic])
        return bound(rates, CAUTION), rates.true_positives / rates.of_first - rates.false_positives / rates.of_second

    chosen = max((test for name in few for test in candidates(name, *few[name])), key=promise)
    rates = chosen.rates(*(np.delete(side[chosen.statistic], np.s_[::PART]) for side in (first, second)))
    if gaussian:
        return Finding(_gaussian_epsilon(bound(rates, share), delta), f"{chosen.statistic}, Gaussian", rates)
    return Finding(bound(rates, share), chosen.statistic, rates)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    from .calibrators import Gaussians

    return Gaussians().epsilon(1 / mu, delta) if mu > 0 else 0.0


def trade_off(first: Array, second: Array) -> tuple[Array, Array]:
    """False positive and false negative rates of all thresholds on a statistic: the measured trade-off curve."""
    order = np.argsort(-np.concatenate([first, second]), kind="stable")
    is_first: npt.NDArray[np.bool_] = np.concatenate([np.ones(len(first), bool), np.zeros(len(second), bool)])[order]
    fpr = np.concatenate([[0.0], np.cumsum(~is_first) / len(second)])
    fnr = np.concatenate([[1.0], 1 - np.cumsum(is_first) / len(first)])
    return fpr, fnr


def claimed_trade_off(fpr: Array, epsilon: float, delta: float) -> Array:
    """The lowest false negative rate that (epsilon, delta)-DP allows (Wasserman and Zhou 2010)."""
    first = 1 - delta - math.exp(min(epsilon, 700.0)) * fpr
    second = math.exp(-epsilon) * (1 - delta - fpr)
    return np.maximum(0.0, np.maximum(first, second))
