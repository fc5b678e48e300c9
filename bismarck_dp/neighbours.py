"""Neighbouring tables made to hurt: what record-play tests and attacks are run on.

A pair differs in its first row: by value (`replace`), or one of the two versions counts for nothing (`zero-out`). Some
pairs are the worst that we know for a bound, some are rows that a careless program would trip over, and `climb` looks
for worse ones by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .losses import LOSSES, Array
from .plan import Plan


@dataclass(frozen=True)
class Pair:
    """Two tables of n rows and d features that are equal but for row 0."""

    name: str
    rows: Array
    labels: Array
    first: tuple[Array, float]
    second: tuple[Array, float]

    def tables(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        return self._with(*self.first), self._with(*self.second)

    def _with(self, row: Array, label: float) -> tuple[Array, Array]:
        x, y = self.rows.copy(), self.labels.copy()
        x[0], y[0] = row, label
        return x, y


def null_row(d: int) -> tuple[Array, float]:
    """A row that counts for nothing but keeps its slot."""
    return np.full(d, np.nan), math.nan


def pairs(plan: Plan, rng: np.random.Generator) -> list[Pair]:
    """Every kind of pair for a plan: the worst known, the awkward, and a random one."""
    return [aligned(plan), pushed(plan), *awkward(plan), scattered(plan, rng)]


def aligned(plan: Plan) -> Pair:
    """Along the first axis nothing but the differing row has a gradient, so nothing but the shrink closes the gap. It
    reaches 0.7 to 0.9 of the corrected bound for the Huber loss, and up to 70 times the paper's.
    """
    _, high = label_range(plan)
    rows = np.zeros((plan.n, plan.d))
    rows[:, -1] = plan.spec.options["feature_bound"]
    row = np.zeros(plan.d)
    row[0] = plan.spec.options["feature_bound"]
    if plan.d == 1:
        rows[:] = 0.0
    return _pair("aligned", plan, rows, np.full(plan.n, high), (row, high), (-row, high))


def pushed(plan: Plan) -> Pair:
    """All other rows push the weights to where the differing row is as wrong as can be, so that its gradient is near
    the Lipschitz constant also for a loss that is steep only there.
    """
    low, high = label_range(plan)
    bound = plan.spec.options["feature_bound"]
    rows = np.zeros((plan.n, plan.d))
    rows[:, -1] = bound
    row = np.zeros(plan.d)
    row[-1] = 0.6 * bound
    aside = np.zeros(plan.d)
    aside[0] = 0.8 * bound
    return _pair("pushed", plan, rows, np.full(plan.n, high), (row + aside, low), (row - aside, low))


def awkward(plan: Plan) -> list[Pair]:
    """Rows that must be cut or count for nothing: missing, infinite, far too long, with a label that is no label."""
    _, high = label_range(plan)
    honest = aligned(plan)
    row, _ = honest.first
    far = 1e9 if LOSSES[plan.spec.loss].classification else 1e30
    versions = {
        "missing": null_row(plan.d),
        "infinite": (np.where(row != 0, np.inf, 0.0), high),
        "long": (-3 * row, high),
        "endless": (-1e200 * row, high),
        "mislabelled": (-row, high + far),
    }
    made = [replace(honest, name=name, second=version) for name, version in versions.items()]
    return made if plan.spec.options["adjacency"] == "replace" else made[:1]


def scattered(plan: Plan, rng: np.random.Generator) -> Pair:
    """Random rows of every length with random labels."""
    bound = plan.spec.options["feature_bound"]
    rows = rng.normal(size=(plan.n, plan.d)) * bound * rng.choice([0.2, 1.0, 5.0])
    known = plan.spec.options["classes"] if plan.outputs > 1 else label_range(plan)
    labels = rng.choice(known, size=plan.n)
    second = (rng.normal(size=plan.d) * 5 * bound, float(rng.choice(known)))
    return _pair("scattered", plan, rows, labels, (rows[0], float(labels[0])), second)


def label_range(plan: Plan) -> tuple[float, float]:
    """Two labels, or the two ends of what a label may be."""
    options = plan.spec.options
    if LOSSES[plan.spec.loss].classification:
        negative, *_, positive = options["classes"] or (-1.0, 1.0)
        return negative, positive
    return -options["label_bound"], options["label_bound"]


def _pair(
    name: str, plan: Plan, rows: Array, labels: Array, first: tuple[Array, float], second: tuple[Array, float]
) -> Pair:
    null = plan.spec.options["adjacency"] == "zero-out"
    return Pair(name, rows, labels, first, null_row(plan.d) if null else second)


Distance = Callable[[Pair], float]


def climb(pair: Pair, plan: Plan, distance: Distance, rng: np.random.Generator, rounds: int) -> tuple[Pair, float]:
    """The worst pair that a hill climb over the differing row finds, and its distance."""
    best, reached, stride = pair, distance(pair), 0.5
    for _ in range(rounds):
        candidate = _moved(best, plan, stride, rng)
        there = distance(candidate)
        if there > reached:
            best, reached = replace(candidate, name=f"{pair.name}, climbed"), there
        else:
            stride = max(0.01, 0.9 * stride)
    return best, reached


def _moved(pair: Pair, plan: Plan, stride: float, rng: np.random.Generator) -> Pair:
    """The differing row's versions moved a little, now and then with another label; a null row stays one."""

    def move(version: tuple[Array, float]) -> tuple[Array, float]:
        row, label = version
        if not np.isfinite(row).all() or math.isnan(label):
            return version
        step = rng.normal(size=plan.d) * stride * plan.spec.options["feature_bound"]
        return row + step, float(rng.choice(label_range(plan))) if rng.random() < 0.1 else label

    return replace(pair, first=move(pair.first), second=move(pair.second))
