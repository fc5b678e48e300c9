"""Repeat and select: the best of a random number K of trials, of which nothing else leaves (Papernot and Steinke 2022).

K has the truncated negative binomial distribution of a shape s > -1 and a 0 < g < 1, on k = 1, 2, ...:

    P(K = k)  proportional to  (1 - g)^k  s (s + 1) ... (s + k - 1) / k!,      for s = 0 to  (1 - g)^k / k.

s = 1 is geometric, s = 0 logarithmic. Its generating function has the derivative
f'(x) = E[K] (g / (1 - (1 - g) x))^(1 + s), which is all that the proof needs.

Theorem 2 of the paper. If a trial has Renyi divergences D_a and D_b at orders a > 1 and b >= 1, between neighbours in
both directions, then the best of K trials has at order a at most

    D_a + (1 + s) ((1 - 1/b) D_b + log(1/g) / b) + log(E[K]) / (a - 1).

Proof. Give each trial a number of its own, uniform in [0, 1], behind the score, so that no two are equal: the results
are ordered totally and continuously. With Q the law of a trial and F its distribution function, the best of K has the
density f'(F(y)) Q(y). Hence e^((a-1) D) is the integral of Q^a Q'^(1-a) f'(F) (f'(F) / f'(F'))^(a-1). Here f'(F) <=
f'(1) = E[K], and f'(F) / f'(F') = (p' / p)^(1+s) for p = 1 - (1 - g) F(y). This p, at least g, is the probability of an
event: that a coin of probability 1 - g, or the trial (not above y), fails. So p' <= (p e^D_b)^(1 - 1/b) (Hoelder), and
p' / p <= e^((1 - 1/b) D_b) g^(-1/b). QED

Pure DP. If a trial is e-DP then the density's ratio is at most e^e (p' / p)^(1+s) <= e^((2+s) e): the same with a and b
infinite. It is (2 + s) e, whatever the mean, and large means come near to it (tests/test_stopping.py).

K, the other trials and their scores must stay secret. What leaves is the best trial's result, and its noisy score may
leave with it. The time that a run takes tells of K: who may see it gets more than is promised here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np

from .accounting import NoOpDpEvent, RepeatAndSelectDpEvent
from .errors import BismarckError
from .renyi import Curve

LEAST_GAMMA = 1e-12
"""Below, runs of as many trials as nobody can wait for would be what the mean is made of."""

BITS = 2048
"""random ones, for a draw"""

POINT = BITS + 256
"""bits behind the point of its probabilities"""

DIGITS = 720
"""decimal ones: more than POINT bits, and than cancellation can take away"""

ROUNDING = 1e-12
"""Totals are rounded up by this share."""


@dataclass(frozen=True)
class Stopping:
    """The distribution of the number of trials, and what the best of them costs."""

    mean: float = 10.0
    shape: float = 0.0

    def __post_init__(self) -> None:
        RepeatAndSelectDpEvent(NoOpDpEvent(), self.mean, self.shape)  # has the ranges
        _gamma(self.mean, self.shape)

    @property
    def gamma(self) -> float:
        """g: the least floating point number with which the mean is at most `mean`.

        Trials are drawn with this very number, and it is priced as it is; the cost falls with g, since both log(1/g)
        and E[K] do. So g may only err towards 1 in the draw, or towards 0 in the price; here it is the same in both,
        and `mean`, which is no less than E[K], stands for it in the price.
        """
        return _gamma(self.mean, self.shape)

    def draw(self, bits: Callable[[int], int]) -> int:
        """K, by the inverse of its distribution function; bits(k) is a number of k fresh random bits.

        Claim: for all k of a probability above 2^-1790, P(K = k) is within factors exp(+-(k + 2) 2^-255) of the law;
        the others have less than 2^-1700 together. Proof: a probability is computed in steps of 2^-POINT and rounded
        down, k times, a share of at most 2^(1790 - POINT) each; the number of random points in its interval is off by
        one, of at least 2^(BITS - 1790). The first one, P(K = 1) > 2^-1340, is right to some 20 digits more. Behind
        the mode they fall at least geometrically, by 1 - g / 2 sooner or later, hence the rest.
        """
        left = bits(BITS) << (POINT - BITS)
        keep, keep_bits = _complement(self.gamma)
        shape, unit = _ratio(self.shape)
        k, mass = 1, _first(self.gamma, self.shape)
        while left >= mass > 0:
            left -= mass
            mass = (mass * keep * (k * unit + shape) >> keep_bits) // ((k + 1) * unit)
            k += 1
        return k

    def most(self, probability: float) -> int:
        """A number that K exceeds with at most this probability, by Chernoff.

        With 1 - (1 - g) x = g r, E x^K is ((g r)^-s - 1) / (g^-s - 1), or 1 + log(r) / log(g) for s = 0, finite for
        0 < r <= 1; P(K > m) is at most that over x^(m + 1).
        """
        if not 0 < probability < 1:
            raise BismarckError(f"probability {probability:g} is out of range", "it must be between 0 and 1")
        g, s = self.gamma, self.shape
        best = math.inf
        for r in np.geomspace(1e-4, 0.99, 100).tolist():
            moment = _log_lift(math.log(g * r), s) - _log_lift(math.log(g), s)
            step = math.log1p(-g * r) - math.log1p(-g)
            best = min(best, (moment - math.log(probability)) / step)
        return max(1, math.ceil(best * (1 + 1e-9)))

    def total_pure(self, base: float) -> float:
        """The epsilon of the best of K trials that are `base`-DP each, at delta = 0."""
        return (2 + self.shape) * base

    def base_pure(self, total: float) -> float:
        """The largest epsilon of a trial with which the best of them costs no more than `total`, from below."""
        base = total / (2 + self.shape)
        while self.total_pure(base) > total:
            base = math.nextafter(base, 0.0)
        return base

    def curve(self, base: Curve) -> Curve:
        """Theorem 2, at every order of a trial's curve and the best b of them; b = 1 needs no divergence at all."""
        orders = np.array(base.orders)
        log = -math.log(self.gamma)
        ratio = min(log, float(np.min((1 - 1 / orders) * base.divergences + log / orders, initial=math.inf)))
        often = math.log(self.mean) / (orders - 1)
        return Curve(base.orders, np.asarray(base.divergences + (1 + self.shape) * ratio + often))

    def total(self, curve: Curve, delta: float) -> float:
        """The epsilon at delta of the best of K trials with this curve each: the best of all pairs of orders."""
        return self.curve(curve).epsilon(delta) * (1 + ROUNDING)


def _mean(gamma: float, shape: float) -> Decimal:
    """E[K] = s (1 - g) / (g (1 - g^s)), or (1/g - 1) / log(1/g), to some 40 digits."""
    context = Context(prec=60)
    g, s = Decimal(gamma), Decimal(shape)
    rest = context.subtract(Decimal(1), g)
    if shape == 0:
        return context.divide(rest, context.multiply(g, context.minus(context.ln(g))))
    power = context.subtract(Decimal(1), context.exp(context.multiply(s, context.ln(g))))
    return context.divide(context.multiply(s, rest), context.multiply(g, power))


@lru_cache(maxsize=64)
def _gamma(mean: float, shape: float) -> float:
    """The mean falls as g grows: bisection down to neighbouring numbers, of which the upper one is safe."""
    asked = Decimal(mean)
    low, high = LEAST_GAMMA, 1 - 2.0**-53
    if _mean(low, shape) < asked:
        raise BismarckError(
            f"a mean of {mean:g} trials with shape {shape:g} takes runs of more trials than anybody can wait for",
            "use a smaller mean, or a larger shape",
        )
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if _mean(middle, shape) <= asked else (middle, high)
    return high


def _log_lift(log: float, shape: float) -> float:
    """log |x^-s - 1| of an x below 1 with this logarithm, or of log(1/x) for s = 0."""
    if shape == 0:
        return math.log(-log)
    return max(0.0, -shape * log) + math.log(-math.expm1(abs(shape) * log))


def _ratio(number: float) -> tuple[int, int]:
    return float(number).as_integer_ratio()


def _complement(gamma: float) -> tuple[int, int]:
    """1 - g as a whole number and the power of two that it is over."""
    numerator, denominator = _ratio(gamma)
    return denominator - numerator, denominator.bit_length() - 1


@lru_cache(maxsize=64)
def _first(gamma: float, shape: float) -> int:
    """P(K = 1) = s (1 - g) / (g^-s - 1), or (1 - g) / log(1/g), in steps of 2^-POINT."""
    context = Context(prec=DIGITS)
    g, s = Decimal(gamma), Decimal(shape)
    rest = context.subtract(Decimal(1), g)
    if shape == 0:
        probability = context.divide(rest, context.minus(context.ln(g)))
    else:
        power = context.subtract(context.exp(context.multiply(context.minus(s), context.ln(g))), Decimal(1))
        probability = context.divide(context.multiply(s, rest), power)
    return int(context.multiply(probability, Decimal(2**POINT)))
