"""Whole numbers and choices of exact probability: udf/kernels/exact.c once more, in Python integers.

The coins follow Canonne, Kamath and Steinke (2020). From the same words come the same choices as in C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Whole = npt.NDArray[np.int64]


class Choices(Protocol):
    """What a pass chooses by."""

    def choose(self, scores: Whole, numerator: int, denominator: int) -> int:
        """A place, with probability proportional to exp(score numerator / denominator)."""

    def laplace(self, scale: int) -> int:
        """A whole number k, with probability proportional to exp(-|k| / scale)."""


@dataclass(frozen=True)
class Exact:
    """From a stream of 32-bit words."""

    words: Iterator[int]

    def choose(self, scores: Whole, numerator: int, denominator: int) -> int:
        best = int(scores.max())
        while True:
            place = self.below(len(scores))
            if self._exponential_coin((best - int(scores[place])) * numerator, denominator):
                return place

    def laplace(self, scale: int) -> int:
        while True:
            magnitude = self.below(scale)
            if not self._fraction_coin(magnitude, scale):
                continue
            while self._fraction_coin(1, 1):
                magnitude += scale
            negative = next(self.words) & 1
            if not (negative and magnitude == 0):
                return -magnitude if negative else magnitude

    def below(self, n: int) -> int:
        """A uniform number below n (Lemire 2019)."""
        while True:
            product = self._word64() * n
            if product % 2**64 >= (2**64 - n) % n:
                return product >> 64

    def _word64(self) -> int:
        return next(self.words) | next(self.words) << 32

    def _bits(self, bits: int) -> int:
        if bits <= 32:
            return next(self.words) & ((1 << bits) - 1)
        number = self._word64()
        if bits > 64:
            number = number << 64 | self._word64()
        return number & ((1 << bits) - 1)

    def _coin(self, numerator: int, denominator: int) -> bool:
        if numerator == denominator:
            return True
        bits = (denominator - 1).bit_length()
        while (number := self._bits(bits)) >= denominator:
            pass
        return number < numerator

    def _fraction_coin(self, numerator: int, denominator: int) -> bool:
        """True with probability exp(-numerator / denominator), for a fraction of at most 1."""
        k = 1
        while self._coin(numerator, denominator * k):
            k += 1
        return k % 2 == 1

    def _exponential_coin(self, numerator: int, denominator: int) -> bool:
        while numerator > denominator:
            if not self._fraction_coin(1, 1):
                return False
            numerator -= denominator
        return self._fraction_coin(numerator, denominator)


@dataclass(frozen=True)
class Drawn:
    """From NumPy, by other means: Gumbel noise, and the difference of two waits."""

    rng: np.random.Generator

    def choose(self, scores: Whole, numerator: int, denominator: int) -> int:
        return int(np.argmax(scores * (numerator / denominator) + self.rng.gumbel(size=len(scores))))

    def laplace(self, scale: int) -> int:
        first, second = self.rng.geometric(-np.expm1(-1 / scale), size=2)
        return int(first - second)
