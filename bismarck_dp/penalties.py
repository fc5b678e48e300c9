"""Penalties: a shrink, a value and a strong-convexity constant."""

from __future__ import annotations

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
