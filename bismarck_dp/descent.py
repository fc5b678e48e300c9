"""Coordinate descent once more, in NumPy: the oracle for udf/kernels/cd.c and gcd.c, from the formulas of
`coordinates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .choices import Choices, Whole
from .coordinates import SCORES, SQUARES, Rounds
from .losses import LOSSES, Array
from .penalties import Separable
from .plan import Plan

LARGEST = 2.0**31
"""What weights and penalties are cut to, in units of a score."""


DIVERGED = 1e150
"""No weight goes further."""

STEEPEST = 1e200
"""No slope is steeper, or no number."""

SANE = 1e100
"""A weight beyond is infinite when it is released."""


@dataclass(frozen=True)
class Problem:
    """Packed rows, and what a plan makes of them at given weights."""

    x: Array
    y: Array
    plan: Plan
    smoothness: Array

    @classmethod
    def of(cls, features: npt.ArrayLike, labels: npt.ArrayLike, plan: Plan, choices: Choices | None) -> Problem:
        x, y = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.float64)
        given = plan.extra["constants"]
        smoothness = _measured(x, plan, choices) if plan.extra["measures"] else np.broadcast_to(given, x.shape[1])
        return cls(x, y, plan, np.array(smoothness, dtype=np.float64))

    @property
    def cut(self) -> Array:
        """C_j."""
        root = np.sqrt(self.smoothness)
        return root * self.plan.clip / math.sqrt(self.smoothness.sum()) if math.isfinite(self.plan.clip) else root

    @property
    def unit(self) -> Array:
        return self.cut / self.plan.n

    @property
    def penalty(self) -> Separable:
        penalty = self.plan.schedule.penalty
        assert isinstance(penalty, Separable)
        return penalty

    def sums(self, w: Array) -> Array:
        """u."""
        with np.errstate(all="ignore"):
            slopes = LOSSES[self.plan.spec.loss].slope(self.x @ w, self.y, self.plan.loss_param)
            slopes = np.clip(np.where(np.isnan(slopes), 0.0, slopes), -STEEPEST, STEEPEST)
            terms = slopes[:, None] * self.x / np.where(self.cut > 0, self.cut, np.inf)
        if not math.isfinite(self.plan.clip):
            return np.asarray(terms.sum(axis=0))
        grid = 2.0 ** (max(2, math.frexp(self.plan.n)[1]) - 52)
        return np.asarray((grid * np.rint(np.clip(terms, -1.0, 1.0) / grid)).sum(axis=0))

    def moved(self, w: float, u: float, j: int, t: int) -> float:
        """Where the prox takes weight j along a noisy sum, at the t-th step."""
        if self.smoothness[j] == 0:
            return w
        with np.errstate(over="ignore"):
            rate = np.minimum(self.plan.schedule.step.at(np.array([float(t)])) / self.smoothness[j], DIVERGED)
        return float(np.clip(self.penalty.prox(w - rate * self.unit[j] * u, rate), -DIVERGED, DIVERGED)[0])

    def scores(self, w: Array, u: Array, rule: str) -> Array:
        """What each coordinate promises, in units in which the sums have one sensitivity for all; below zero where the
        penalty keeps a weight at zero: by how much.
        """
        live = self.smoothness > 0
        unit, smooth = np.where(live, self.unit, 1.0), np.where(live, self.smoothness, 1.0)
        most = LARGEST if self.plan.perturbs == "coordinates" else math.inf
        at = np.clip(w * smooth / unit, -most, most)
        t, box = np.minimum(self.penalty.l1 / unit, most), np.minimum(self.penalty.box * smooth / unit, most)
        with np.errstate(divide="ignore"):
            ridge = np.minimum(self.penalty.strength / smooth, most / np.abs(at))
        found = np.where((at == 0) & (np.abs(u) <= t), np.abs(u) - t, RULES[rule](u, at, t, ridge, box))
        return np.where(live, found, 0.0)


def _measured(x: Array, plan: Plan, choices: Choices | None) -> Array:
    """M_j from sums of squares."""
    bound, scale = plan.extra["feature_bound"] ** 2, plan.extra["measure_scale"]
    if scale == 0:
        return np.asarray(plan.extra["curvature"] * (x**2).sum(axis=0) / plan.n)
    steps = np.floor(x**2 * (SQUARES / bound)).sum(axis=0)
    noise = [0 if choices is None else choices.laplace(scale) for _ in range(x.shape[1])]
    most = SQUARES * plan.n
    kept = np.clip(steps + np.array(noise), min(2 * scale, most), most)
    return np.asarray(plan.extra["curvature"] * kept * bound / SQUARES / plan.n)


# ---- rules: of u, and of the weight, l1, lambda and box in its units ----


def _prox(u: Array, w: Array, t: Array, ridge: Array, box: Array) -> Array:
    v = w - u
    return np.clip(np.sign(v) * np.maximum(np.abs(v) - t, 0.0) / (1 + ridge), -box, box)


def _gs_s(u: Array, w: Array, t: Array, ridge: Array, box: Array) -> Array:
    """The distance from -u to the subgradients, an interval: a point inside, longer at zero and at the box's walls."""
    low = np.where(w == 0, -t, ridge * w + t * np.sign(w))
    high = np.where(w == 0, t, low)
    low, high = np.where(w <= -box, -np.inf, low), np.where(w >= box, np.inf, high)
    return np.maximum(np.maximum(low + u, -u - high), 0.0)


def _gs_r(u: Array, w: Array, t: Array, ridge: Array, box: Array) -> Array:
    return np.abs(_prox(u, w, t, ridge, box) - w)


def _gs_q(u: Array, w: Array, t: Array, ridge: Array, box: Array) -> Array:
    """The decrease of the model at its minimum, by its definition; in extended precision, as terms cancel."""
    k, at, l1, l2 = (np.asarray(value, dtype=np.longdouble) for value in (u, w, t, ridge))
    v = at - k
    a = np.clip(np.sign(v) * np.maximum(np.abs(v) - l1, 0) / (1 + l2), -box, box) - at
    rise = l1 * (np.abs(at + a) - np.abs(at)) + l2 * ((at + a) ** 2 - at**2) / 2
    return np.asarray(np.sqrt(2 * np.maximum(-(k * a + a**2 / 2 + rise), 0)), dtype=np.float64)


RULES: dict[str, Any] = {"gs-s": _gs_s, "gs-r": _gs_r, "gs-q": _gs_q}


# ---- runs ----


def train_cd(problem: Problem, orders: list[Any], noises: list[Iterator[Array] | None]) -> Array:
    """Rounds of steps on the coordinates of `orders`."""
    plan, schedule = problem.plan, _rounds(problem.plan)
    w = np.zeros(problem.x.shape[1])
    per_round = (schedule.steps - 1) // schedule.width + 1
    for r, (order, noise) in enumerate(zip(orders, noises)):
        iterates = []
        for k, j in enumerate(order):
            w = w.copy()
            w[j] = problem.moved(w[j], _noisy(problem.sums(w)[j], plan, noise), j, 1 + r * per_round + k // len(w))
            iterates.append(w)
        if schedule.average == "all" or (schedule.average == "suffix" and r == len(orders) - 1):
            w = np.mean(iterates, axis=0)
    return _released(w)


def train_gcd(problem: Problem, noises: list[Iterator[Array] | None], choices: list[Choices | None]) -> Array:
    """A pass, then the best coordinates move; without choices, the first of the best."""
    plan = problem.plan
    w = np.zeros(problem.x.shape[1])
    for t, (noise, choice) in enumerate(zip(noises, choices), 1):
        u = problem.sums(w)
        for j in _best(problem.scores(w, u, plan.extra["rule"]), plan, choice):
            w[j] = problem.moved(w[j], _noisy(u[j], plan, noise), j, t)
    return _released(w)


def _released(w: Array) -> Array:
    return np.where(np.abs(w) < SANE, w, np.inf)


def _rounds(plan: Plan) -> Rounds:
    assert isinstance(plan.schedule, Rounds)
    return plan.schedule


def _best(scores: Array, plan: Plan, choice: Choices | None) -> Iterator[int]:
    top = plan.extra["top"]
    if choice is None:
        yield from np.argsort(-scores, kind="stable")[:top].tolist()
        return
    left: Whole = np.arange(len(scores))
    steps: Whole = np.rint(np.minimum(scores, 2 * LARGEST) * SCORES).astype(np.int64)
    for _ in range(top):
        at = choice.choose(steps, plan.extra["selection_numerator"], plan.extra["selection_denominator"])
        yield int(left[at])
        left[at], steps[at] = left[-1], steps[-1]
        left, steps = left[:-1], steps[:-1]


def _noisy(u: float, plan: Plan, noise: Iterator[Array] | None) -> float:
    if noise is None:
        return u
    grid = plan.extra["noise_grid"]
    return float(grid * np.rint((u + next(noise)[0]) / grid))
