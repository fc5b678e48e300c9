"""Checks of a sample against a distribution. A right sampler fails one once in a million runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import stats

LEVEL = 1e-6


def check_frequencies(observed: npt.NDArray[np.int64], probability: npt.NDArray[np.float64]) -> None:
    """Chi-square, with all cells that expect fewer than ten in one."""
    count = observed.sum()
    expected = count * probability
    few = expected < 10
    observed = np.append(observed[~few], observed[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    if expected[-1] < 10:
        check_binomial(int(observed[-1]), int(count), float(expected[-1] / count))
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, len(expected) - 1) > LEVEL, (observed, expected)


def check_binomial(observed: int, count: int, probability: float) -> None:
    law = stats.binom(count, min(max(probability, 0.0), 1.0))
    rare = min(law.cdf(observed), law.sf(observed - 1))
    assert rare > LEVEL / 2, (observed, law.mean())


def check_tail(sample: npt.NDArray[np.float64], limit: float, probability: float) -> None:
    """How many exceed the limit in size."""
    check_binomial(int((np.abs(sample) > limit).sum()), len(sample), probability)


def check_moments(sample: npt.NDArray[np.float64], moment: Callable[[int], float]) -> None:
    """The first four, within six of their own standard errors, which the moments up to the eighth give."""
    power = np.ones(len(sample))
    for p in range(1, 5):
        power = power * sample
        error = math.sqrt((moment(2 * p) - moment(p) ** 2) / len(sample))
        assert abs(power.mean() - moment(p)) < 6 * error, f"moment {p}"
