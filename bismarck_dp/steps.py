"""Step sizes. t counts the updates of a partition from 1, over all passes; no rule ever grows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .losses import Array


def _log_one_minus(x: float) -> float:
    """log(1 - x), very negative instead of infinite where rounding makes x one."""
    return math.log1p(-x) if x < 1 else -1e9


@dataclass(frozen=True)
class Step:
    """One of these rules; the numbers a rule does not use are zero.

    constant         eta
    decreasing       2 / (beta (t + offset))          Corollary 2 of Wu et al. 2017, offset = n^c
    sqrt             2 / (beta (sqrt(t) + offset))    Corollary 3
    strongly-convex  min(1 / beta, 1 / (gamma t))     Algorithm 2
    inverse-sqrt     min(1 / beta, eta / sqrt(t))     SCS13, and Algorithm 4
    betting          none: BANCO's weights are a gambler's stakes
    exact            none: every move minimises a model of the objective
    """

    rule: str
    eta: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    offset: float = 0.0

    def at(self, t: Array) -> Array:
        if self.rule == "decreasing":
            return 2.0 / (self.beta * (t + self.offset))
        if self.rule == "sqrt":
            return 2.0 / (self.beta * (np.sqrt(t) + self.offset))
        if self.rule == "strongly-convex":
            return np.minimum(1.0 / self.beta, 1.0 / (self.gamma * t))
        if self.rule == "inverse-sqrt":
            return np.minimum(1.0 / self.beta, self.eta / np.sqrt(t))
        return np.full_like(t, self.eta)

    @property
    def first(self) -> float:
        """The largest step."""
        return float(self.at(np.array([1.0]))[0])

    def total(self, updates: int) -> float:
        """No less than the sum of the first steps: a step that never grows adds up to less than its integral from 0."""
        if self.rule == "decreasing":
            return 2 / self.beta * math.log1p(updates / self.offset)
        if self.rule == "sqrt":
            return 4 / self.beta * math.sqrt(updates)
        if self.rule == "inverse-sqrt":
            return min(updates / self.beta, 2 * self.eta * math.sqrt(updates))
        if self.rule == "strongly-convex" and self.gamma * updates > self.beta:
            return (1 + math.log(self.gamma * updates / self.beta)) / self.gamma
        return updates * self.first

    def log_shrink(self, passes: int, updates: int, strength: float) -> Array | None:
        """log of the product of (1 - eta_t strength) over each pass, where it has a closed form; strength is gamma."""
        if self.rule == "constant":
            return np.full(passes, updates * _log_one_minus(self.eta * strength))
        if self.rule != "strongly-convex" or strength != self.gamma:
            return None
        before = np.arange(passes, dtype=np.float64) * updates
        constant = np.clip(np.floor(self.beta / self.gamma) - before, 0, updates)
        # Beyond them eta_t strength = 1 / t, and the product of (1 - 1/t) telescopes.
        telescoped = np.log((before + constant) / (before + updates))
        return np.asarray(np.where(constant > 0, constant * _log_one_minus(strength / self.beta), 0.0) + telescoped)

    def params(self) -> dict[str, Any]:
        """What the kernel reads."""
        numbers = asdict(self)
        return {"step": numbers.pop("rule"), **numbers}
