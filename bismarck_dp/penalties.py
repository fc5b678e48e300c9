"""Penalties: a shrink or a prox, a value and a strong-convexity constant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .losses import Array


@dataclass(frozen=True)
class L2:
    """(lambda / 2) |w|^2, applied outside the batch average and to every weight, the intercept included."""

    strength: float

    @property
    def strong_convexity(self) -> float:
        return self.strength

    def shrink(self, eta: Array) -> Array:
        """The factor an update of step eta pulls every weight towards zero by."""
        return 1.0 - eta * self.strength

    def value(self, w: Array) -> float:
        return 0.5 * self.strength * float(np.dot(w, w))


@dataclass(frozen=True)
class Separable(L2):
    """psi(w) = (lambda / 2) |w|^2 + l1 |w|_1, infinite where a weight leaves [-box, box]: one weight at a time."""

    l1: float = 0.0
    box: float = math.inf

    def prox(self, v: Array, rate: Array) -> Array:
        """argmin over x of (x - v)^2 / 2 + rate psi(x): towards zero by rate l1, shrunk, kept in the box."""
        soft = np.sign(v) * np.maximum(np.abs(v) - rate * self.l1, 0.0)
        return np.clip(soft / (1 + rate * self.strength), -self.box, self.box)

    def value(self, w: Array) -> float:
        return super().value(w) + self.l1 * float(np.abs(w).sum())
