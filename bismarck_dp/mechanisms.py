"""Mechanisms: from an L2 sensitivity and (epsilon, delta) to the noise that the server adds, on a grid that floats
cannot betray.

A release is  g * (round(w / g) + integer noise)  or  g * round((w + noise) / g)  for a power of two g about 2^-16 of
the noise: every released number is a multiple of g, whatever the data. Rounding moves two models at most g * sqrt(d)
further apart, so the noise is calibrated to sensitivity + g * sqrt(d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .accounting import Event, NonPrivateDpEvent, gaussian_multiplier
from .calibrators import Gaussians, Laplaces, PoissonGaussians, PureSum, ZcdpSum
from .errors import BismarckError

GRID_STEPS = 2.0**16
"""The noise scale is between half of this and this many grid steps, or more where that is too coarse."""

FINEST_STEPS = 2.0**20
"""More steps would overflow the exact sampler's 128-bit fractions."""

EXACT_STEPS = 2.0**52
"""A model this many grid steps from zero would lose bits in a double."""


@dataclass(frozen=True)
class Noise:
    """What the server needs to release a model, and what a reader needs to check it."""

    mechanism: str
    scale: float
    """standard deviation per coordinate (gaussian), scale of the norm (l2-laplace)"""
    grid: float
    accountant: str
    event: Event
    """what it is worth to an accountant, after arithmetic is paid for: never more than the noise that is added"""
    excess: float = 0.0
    """tau: probabilities are within factors exp(+-tau) of those with real noise of at least the event's multiplier"""
    rarity: float = math.inf
    """t: but for a probability of at most three e^-t"""

    def params(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism, "scale": self.scale, "grid": self.grid}


NO_NOISE = Noise("none", 0.0, 0.0, "none", NonPrivateDpEvent())


def calibrate(sensitivity: float, epsilon: float, delta: float, width: int, reach: float) -> Noise:
    """Noise for a vector of `width` numbers, none of which exceeds `reach`: K-norm for delta = 0, Gaussian
    otherwise.
    """
    if not (0 < sensitivity < math.inf):
        raise BismarckError(f"sensitivity {sensitivity} is not a positive number", "no noise can be calibrated to it")
    noise = _knorm(sensitivity, epsilon, width) if delta == 0 else _gaussian(sensitivity, epsilon, delta, width)
    if reach / noise.grid > EXACT_STEPS:
        raise BismarckError(
            f"epsilon {epsilon:g} asks for noise below the precision of the weights",
            "use a smaller epsilon, or set radius to the norm you expect",
        )
    return noise


def grid_of(scale: float, steps: float = GRID_STEPS) -> float:
    """The power of two that makes the scale between steps / 2 and steps grid steps."""
    mantissa, exponent = math.frexp(scale / steps)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def _on_grid(sensitivity: float, multiplier: float, width: int) -> tuple[float, float]:
    """The noise scale for the sensitivity after rounding, and its grid: the coarsest that costs at most a hundredth."""
    steps = GRID_STEPS
    while steps < FINEST_STEPS and grid_of(multiplier * sensitivity, steps) * math.sqrt(width) > 0.01 * sensitivity:
        steps *= 2
    grid = grid_of(multiplier * sensitivity, steps)
    while (scale := multiplier * (sensitivity + grid * math.sqrt(width))) < 1e300:
        if grid_of(scale, steps) == grid:
            return scale, grid
        grid = grid_of(scale, steps)
    raise _too_small(width)


def _too_small(width: int) -> BismarckError:
    return BismarckError(
        f"epsilon is too small for {width} features: rounding alone would outweigh the noise",
        "use a larger epsilon or fewer features",
    )


def knorm_excess(width: int) -> float:
    """What arithmetic costs K-norm noise: where real numbers would give epsilon, the release has epsilon + this.

    Lengths are in grid steps, and 1 <= scale <= 2^20. udf/kernels/knorm.c computes a Z' and rounds w + Z'. It proves
    that there is a real vector Z, of a density within factors exp(+-a) of the K-norm density, with |Z' - Z| <= e in
    each coordinate, where  a = (d + 1) 2^-61  and  e = 2^-79 (d + 40) (d + 1024);  the last rounding and the cutting
    off of all random numbers are included. (But for noise of a norm above 4 (d + 1024) scales, which has probability
    below e^-2048, whatever the data.)

    Theorem: for all w and all grid points k, the probability of k is within factors exp(+-b) of that in the ideal
    mechanism round(w + Z),  b = a + 2 d e / (1 - 2 e) + e sqrt(d).  Proof: the release is k only if Z lies in k's cube
    of side 1 grown by e on each side, and it is k if Z lies in the cube shrunk by e. These are the cube stretched from
    its centre by 1 +- 2 e: volumes change by (1 +- 2 e)^d, and points move by at most e sqrt(d), over which the log
    density, of slope 1 / scale <= 1, changes by at most e sqrt(d). And -log(1 - 2 e) <= 2 e / (1 - 2 e). QED

    Two neighbours cost 2 b. That is 2e-18 for d = 1, 8e-17 for 50, 1.5e-14 for 1000 and 6.6e-6 for a million.
    """
    e = 2.0**-79 * (width + 40) * (width + 1024)
    if e >= 0.25:
        return math.inf
    return 2 * ((width + 1) * 2.0**-61 + 2 * width * e / (1 - 2 * e) + e * math.sqrt(width))


def _knorm(sensitivity: float, epsilon: float, width: int) -> Noise:
    """Density proportional to exp(-epsilon |z| / Delta): epsilon-DP (Wu et al. 2017, Theorem 1), and rounding the sum
    keeps it. The scale is that of the epsilon that remains when `knorm_excess` and the rounding of this calculation, a
    few parts in 2^52, are paid for. (Rounding after the sum would not need the sensitivity after rounding, which
    `_on_grid` takes: that costs at most a hundredth, unless epsilon is tiny, and errs on the safe side.)
    """
    left = epsilon * (1 - 2.0**-42) - knorm_excess(width)
    if left <= 0:
        raise _too_small(width)
    scale, grid = _on_grid(sensitivity, 1 / left, width)
    return Noise("l2-laplace", scale, grid, Laplaces.accountant, Laplaces().event(1 / epsilon))


def _gaussian(sensitivity: float, epsilon: float, delta: float, width: int) -> Noise:
    """The discrete Gaussian at the analytic Gaussian's scale, (epsilon, delta)-DP.

    The analytic mechanism (Balle and Wang 2018) is exact for continuous noise, and stays so when its result is rounded.
    Rounded and discrete Gaussian differ little: for s = scale / grid >= 2^15 the log ratio of their probabilities of
    k is between -1 / (24 s^2) and k^2 / (24 s^4) (Jensen; sinh(a) <= a exp(a^2 / 6)). Summed over d coordinates it is
    below tau = 2 (d + 2 sqrt(d t) + 2 t) / (24 s^2) but with probability e^-t (chi-square tail, doubled for the
    rounding). Going from one to the other and back costs 2 tau of epsilon and, with e^-t = 1e-6 delta / (1 +
    e^epsilon), at most a millionth of delta and a factor e^tau: so the analytic scale is taken at the epsilon and
    delta that remain.
    """
    t = math.log(1e6 / delta) + log1p_exp(epsilon)
    tau = 2 * (width + 2 * math.sqrt(width * t) + 2 * t) / (24 * (GRID_STEPS / 2) ** 2)
    left = epsilon - 2 * tau
    if left <= 0:
        raise BismarckError(f"epsilon {epsilon:g} is too small for {width} features", f"use more than {2 * tau:.1g}")
    multiplier = gaussian_multiplier(left, delta * (1 - 2e-6) * math.exp(-tau))
    scale, grid = _on_grid(sensitivity, multiplier, width)
    one = Gaussians()
    event = one.event(one.multiplier(epsilon, delta))
    return Noise("gaussian", grid * math.ceil(scale / grid), grid, one.accountant, event)


def log1p_exp(x: float) -> float:
    """log(1 + e^x), for x that are not negative; does not overflow."""
    return x + math.log1p(math.exp(-x))


# ---- noise on sums, inside a pass ----

COARSENESS = 8.0
"""Noisy sums are rounded to a grid of at most the noise's standard deviation over this, and at least half of that."""

NORMAL_ERROR = 2.0**-42 + 2.0**-45
"""How near a number of the kernels' stock comes to a real normal one, scaled and added to a sum."""

LONGEST = 64.0
"""No normal pair is longer, but for probability e^-2048."""

LEAST_EXCESS, MOST_EXCESS = 2.0**-40, 16.0
"""What arithmetic is given of epsilon, in powers of two: so calibrations of many plans are the same."""

RARER = 64.0
"""What is rare must stay so in a table's whole life, and there it weighs e^epsilon of the table's total: `budget`."""


@dataclass(frozen=True)
class Sums:
    """What arithmetic may cost a run of noisy sums: see udf/kernels/sums.c, whose errors are added up here."""

    touched: int
    """sums that the differing row may be in; the others have the same law on both sides, as computed, but for numbers
    that make a normal pair with one in a touched sum"""
    width: int
    reach: float
    """a norm that no sum exceeds"""
    draws: float = 0.0
    """rows drawn by Poisson sampling, on average, in all steps together"""

    def gaussian_excess(self, scale: float, t: float) -> float:
        """tau: but for probability e^-t (and e^-2048 for each pair), every outcome of the run has a probability within
        factors exp(+-tau) of that with real noise and real coins, if the noise has at least this scale.

        N counts the coordinates of touched sums, and as many that they are paired with, unless all sums are touched.
        With e in units of sigma and a grid of at least sigma / 16: N terms 2 e / (1/16 - 2 e), and e times the sum of
        |z| + 1/4, where |z| <= (1 + z^2) / 2 and the chi-square tail give N + sqrt(N t) + t for |z|.
        Draws: a wait is made of at most 46 coins, each of a relative error below 2^-60, and one more for each 2^J >=
        0.69 / q cells that it is long (gaps.c): less than 48 for each draw in all. There are at most 2 q C + 3 t draws
        among C cells (Bernstein), and one wait more for each pass, which `touched` bounds. (From q = 1/2 on there is a
        single coin for each cell: then cells are independent and their rate is off by 2^-62, which the accountant is
        told.)
        """
        e = NORMAL_ERROR + 2.0**-52 * self.reach / scale
        if e > 2.0**-10:
            return math.inf
        count = float(self.touched) * self.width * (1 if self.draws > 0 else 2)
        noise = count * 2 * e / (0.5 / COARSENESS - 2 * e) + e * (1.25 * count + math.sqrt(count * t) + t)
        waits = 48 * 2.0**-60 * (2 * self.draws + 3 * t + self.touched) if self.draws > 0 else 0.0
        return noise + waits

    def knorm_excess(self, scale: float) -> float:
        """The same for K-norm noise, with no exception but e^-2048: the slope of its log density is bounded.

        A touched sum's normal numbers lie in at most two halves of a group of 128, whose partners lie side by side and
        so in at most two other sums for each half, or, from 64 numbers on, in the sums before and after: five in all.
        """
        root = math.sqrt(self.width + 1)
        longest = root + LONGEST
        e = 2.0**-42 * (LONGEST * root + longest) + LONGEST * longest * (self.width + 16) * 2.0**-53
        e += 2.0**-52 * self.reach / scale
        grid = 0.5 / COARSENESS * root
        if e > grid / 4:
            return math.inf
        return 5 * self.touched * (2 * self.width * e / (grid - 2 * e) + e * math.sqrt(self.width))


def calibrate_sums(
    sums: Sums,
    sensitivity: float,
    epsilon: float,
    delta: float,
    calibrator: Gaussians | Laplaces | PoissonGaussians | ZcdpSum | PureSum,
) -> Noise:
    """Noise for every sum of a run, such that what the calibrator says of all of them is (epsilon, delta)-DP with
    arithmetic paid for: from computed to real noise, across the neighbours, and back costs 2 tau of epsilon and, at
    probability e^-t = 1e-6 delta / (1 + e^epsilon), a factor e^tau and a millionth of delta; as much again for the
    number of draws, and for the size of a sample (`most_of_binomial`).

    The errors are bounded at the noise that the full epsilon asks for: what is left of it asks for more. Without
    samples t is larger by RARER, which costs next to nothing.
    """
    nominal = calibrator.multiplier(epsilon, delta)
    pure = isinstance(calibrator, (Laplaces, PureSum))
    t = 0.0 if pure else math.log(1e6 / delta) + log1p_exp(epsilon) + (0.0 if sums.draws > 0 else RARER)
    scale = sensitivity * nominal
    excess = sums.knorm_excess(scale) if pure else sums.gaussian_excess(scale, t)
    tau = 2.0 ** math.ceil(math.log2(max(excess, LEAST_EXCESS))) if excess < epsilon else math.inf
    if tau > min(epsilon / 4, MOST_EXCESS):
        raise BismarckError(
            f"epsilon {epsilon:g} asks for noise that double precision cannot give to {sums.touched} sums",
            f"use a {'smaller' if epsilon > 1 else 'larger'} epsilon, fewer updates or fewer features",
        )
    left = delta * (1 - 4e-6) * math.exp(-tau)
    # A search may err by a hair: the event that is stored never says more than the noise that is added.
    scale = sensitivity * max(calibrator.multiplier(epsilon - 2 * tau, left), nominal) * (1 + 1e-12)
    spread = scale * math.sqrt(sums.width + 1) if pure else scale
    grid = math.ldexp(0.5, math.frexp(spread / COARSENESS)[1])
    if (sums.reach + LONGEST * (spread + LONGEST * scale)) / grid > 2.0**50:
        raise BismarckError(
            f"epsilon {epsilon:g} asks for noise below the precision of the sums",
            "use a smaller epsilon, or a smaller batch_size",
        )
    mechanism = "l2-laplace" if pure else "gaussian"
    return Noise(mechanism, scale, grid, calibrator.accountant, calibrator.event(nominal), tau, math.inf if pure else t)


def most_of_binomial(n: int, probability: float, times: int, epsilon: float, delta: float) -> float:
    """A number of rows that none of so many Poisson samples exceeds, but for probability 1e-6 delta / (1 + e^epsilon)
    (Bernstein): q n + sqrt(2 q n t) + t.
    """
    t = math.log(1e6 / delta) + log1p_exp(epsilon) + math.log(times)
    mean = probability * n
    return min(float(n), mean + math.sqrt(2 * mean * t) + t)
