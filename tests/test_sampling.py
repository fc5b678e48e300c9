"""Poisson sampling's waits and the exponential mechanism's choices, against exact probabilities."""

from __future__ import annotations

import ctypes
import itertools
import math
from fractions import Fraction

import kernels
import numpy as np
import pytest
from kernels import library
from samplers import draw
from scipy import stats
from statistics_of import LEVEL, check_binomial, check_frequencies, check_moments, check_tail

SAMPLES = 10_000_000
RATES = [1.0, 0.5, 0.3, 1e-3, 1e-6]


def gaps_of(q: float) -> kernels.Gaps:
    gaps = kernels.Gaps()
    assert library.dp_gap_start(ctypes.byref(gaps), ctypes.c_double(q))
    return gaps


class Waits:
    """The distribution that the coins give, in exact fractions."""

    def __init__(self, q: float) -> None:
        gaps = gaps_of(q)
        self.above = Fraction(gaps.above, 2**64)
        self.one = [Fraction(gaps.digit[j], 2**64) for j in range(gaps.digits)]

    def equal(self, low: int) -> Fraction:
        return math.prod((p if low >> j & 1 else 1 - p for j, p in enumerate(self.one)), start=Fraction(1))

    def at_least(self, low: int) -> Fraction:
        """Equal, or equal down to a zero digit and one there."""
        total, prefix = Fraction(0), Fraction(1)
        for j in reversed(range(len(self.one))):
            if low >> j & 1:
                prefix *= self.one[j]
            else:
                total += prefix * self.one[j]
                prefix *= 1 - self.one[j]
        return total + prefix

    def hazard(self, low: int) -> Fraction:
        """The probability to be taken now, having waited for `low` steps of a period: the same in every period."""
        stop = 1 - self.above
        return stop * self.equal(low) / (stop * self.at_least(low) + self.above)


@pytest.mark.parametrize("q", [*RATES, 0.999, 0.25, 2 / 3, 1e-9, 1e-12, 2.0**-44, 1 - 2.0**-53, 0.5 - 2.0**-54])
def test_every_step_takes_a_row_with_the_stated_probability(q: float) -> None:
    """Within 2^-50 of q, whatever happened before: exactly, from the coins' integers."""
    waits = Waits(q)
    period = 2 ** len(waits.one)
    rng = np.random.default_rng(0)
    lows = {0, period - 1, period // 2, *(int(x * period) for x in rng.random(200))}
    lows |= {2**j for j in range(len(waits.one))}
    for low in lows:
        assert abs(waits.hazard(low) / Fraction(q) - 1) <= Fraction(1, 2**50)


def test_rates_that_are_refused() -> None:
    for q in (0.0, -0.5, 1.0000001, math.nan, math.inf, 2.0**-45):
        assert not library.dp_gap_start(ctypes.byref(kernels.Gaps()), ctypes.c_double(q))


@pytest.mark.parametrize("q", RATES)
def test_waits_are_geometric(q: float) -> None:
    """Frequencies between quantiles, tails and moments; at a high rate of every single wait."""
    sample = draw("gaps", q, count=SAMPLES if q in (0.5, 1e-3) else SAMPLES // 10, dtype=np.uint64).astype(np.int64)
    if q == 1.0:
        assert not np.any(sample)
        return
    law = stats.geom(q, loc=-1)
    edges = np.unique(law.ppf(np.append(np.linspace(0.01, 0.99, 99), 1 - np.geomspace(1e-3, 1e-6, 4))))
    cumulative = np.append(np.insert(law.cdf(edges), 0, 0.0), 1.0)
    observed = np.bincount(np.searchsorted(edges, sample), minlength=len(edges) + 1)
    check_frequencies(observed, np.diff(cumulative))
    for limit in (10, 15):
        check_tail(sample, math.floor(limit / q), float(law.sf(math.floor(limit / q))))
    if q == 1e-3:
        k = np.arange(60_000)
        check_moments(sample * q, lambda p: float(((k * q) ** p * law.pmf(k)).sum()))


def test_binary_digits_are_independent() -> None:
    """Each digit has its frequency, and no two of them know of each other."""
    q, count = 1e-3, SAMPLES // 5
    sample = draw("gaps", q, count=count, dtype=np.uint64)
    digits = len(Waits(q).one)
    assert digits == 10
    bits = np.array([(sample >> np.uint64(j)) & np.uint64(1) for j in range(digits)]).astype(bool)
    for j, bit in enumerate(bits):
        power = (1 - q) ** 2**j
        check_binomial(int(bit.sum()), count, power / (1 + power))
    level = LEVEL / math.comb(digits, 2)
    for one, other in itertools.combinations(bits, 2):
        table = np.bincount(2 * one + other, minlength=4).reshape(2, 2)
        assert stats.chi2_contingency(table).pvalue > level
    assert stats.chi2_contingency(np.array([np.bincount(bits[0][(sample >> 10) == a]) for a in (0, 1)])).pvalue > LEVEL


@pytest.mark.parametrize("q", [1.0, 0.5, 0.01, 1e-3])
def test_rows_taken_at_each_step_are_binomial(q: float) -> None:
    """Many rows over 200 steps: every step takes its share, and steps are independent."""
    rows, steps = 20_000, 200
    taken = np.zeros((rows, steps), dtype=bool)
    at = draw("gaps", q, count=rows, dtype=np.uint64).astype(np.int64)
    alive = np.flatnonzero(at < steps)
    while len(alive):
        taken[alive, at[alive]] = True
        at[alive] += 1 + draw("gaps", q, count=len(alive), dtype=np.uint64).astype(np.int64)
        alive = alive[at[alive] < steps]
    if q == 1.0:
        assert taken.all()
        return
    check_frequencies(taken.sum(axis=0), np.full(steps, 1 / steps))
    check_binomial(int(taken.sum()), rows * steps, q)
    both = int((taken[:, 1:] & taken[:, :-1]).sum())
    check_binomial(both, rows * (steps - 1), q * q)


SCORES = np.array([0, 3, 5, -2, 5, 1], dtype=np.int64)


def weights_of(scores: np.ndarray, rate: float) -> np.ndarray:
    weights = np.exp((scores - scores.max()) * rate)
    return weights / weights.sum()


def gumbel_tops(scores: np.ndarray, rate: float, top: int, count: int) -> np.ndarray:
    noisy = scores * rate + draw("gumbels", count=count * len(scores)).reshape(count, len(scores))
    return np.argsort(-noisy, axis=1)[:, :top]


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 2), (3, 1), (1, 1000), (0, 1), (7, 3)])
def test_choices_follow_the_exponential_mechanism(numerator: int, denominator: int) -> None:
    count, rate = SAMPLES // 10, numerator / denominator
    chosen = draw("choices", SCORES, len(SCORES), numerator, denominator, 1, count=count, dtype=np.int32)
    observed = np.bincount(chosen, minlength=len(SCORES))
    check_frequencies(observed, weights_of(SCORES, rate))
    noisy = np.bincount(gumbel_tops(SCORES, rate, 1, count)[:, 0], minlength=len(SCORES))
    both = np.array([observed, noisy])
    assert stats.chi2_contingency(both[:, both.sum(axis=0) > 20]).pvalue > LEVEL


def test_choosing_again_and_again_is_one_shot_of_gumbel_noise() -> None:
    """The first two of six, in order: against the product formula, and against the two largest noisy scores."""
    count, rate, n = SAMPLES // 10, 0.5, len(SCORES)
    chosen = draw("choices", SCORES, n, 1, 2, 2, count=count, dtype=np.int32, width=2)
    weights = weights_of(SCORES, rate)
    probability = np.outer(weights, weights) / (1 - weights)[:, None] * (1 - np.eye(n))
    observed = np.bincount(n * chosen[:, 0] + chosen[:, 1], minlength=n * n)
    check_frequencies(observed, probability.ravel())
    tops = gumbel_tops(SCORES, rate, 2, count)
    noisy = np.bincount(n * tops[:, 0] + tops[:, 1], minlength=n * n)
    both = np.array([observed, noisy])
    assert stats.chi2_contingency(both[:, both.sum(axis=0) > 20]).pvalue > LEVEL


def test_the_largest_scores_do_not_overflow() -> None:
    ends = np.array([-(2**63), 2**63 - 1, 0], dtype=np.int64)
    chosen = draw("choices", ends, 3, 2**64 - 1, 1, 1, count=1000, dtype=np.int32)
    assert np.all(chosen == 1)
    chosen = draw("choices", ends, 3, 1, 2**63, 1, count=SAMPLES // 10, dtype=np.int32)
    check_frequencies(np.bincount(chosen, minlength=3), weights_of(ends / 2**63, 1.0))
