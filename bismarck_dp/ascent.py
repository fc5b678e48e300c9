"""Dual and block coordinate descent once more, in NumPy: the oracle for udf/kernels/scd.c and primal.c, from the
formulas of `dual`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .losses import LOSSES, Array
from .plan import Plan

Rows = npt.NDArray[np.int64]


@dataclass
class Dual:
    """Packed rows, their dual variables, and v."""

    x: Array
    y: Array
    plan: Plan
    a: Array
    v: Array

    @classmethod
    def of(cls, features: npt.ArrayLike, labels: npt.ArrayLike, plan: Plan) -> Dual:
        x, y = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.float64)
        return cls(x, y, plan, np.zeros(len(y)), np.zeros(x.shape[1]))

    @property
    def strength(self) -> float:
        """lambda n."""
        return self.plan.schedule.penalty.strength * self.plan.n

    @property
    def weights(self) -> Array:
        return self.v / self.strength

    def moves(self, rows: Rows, v: Array) -> Array:
        """How far each of these rows' variables moves by itself."""
        x, before = self.x[rows], self.a[rows]
        norm = np.sqrt((x**2).sum(axis=1))
        together = 1 if self.plan.extra["sequential"] else self.plan.schedule.batch_size
        curvature = together * norm**2 / self.strength
        dual = LOSSES[self.plan.spec.loss].dual
        move = dual(x @ v / self.strength, self.y[rows], before, curvature, self.plan.loss_param) - before
        if math.isinf(self.plan.clip):
            return np.where(np.isfinite(move), move, 0.0)
        with np.errstate(divide="ignore"):
            most = self.plan.clip / norm
        return np.where(np.isnan(move) | (norm == 0), 0.0, np.clip(move, -most, most))

    def take(self, rows: Rows) -> Array:
        """Moves the variables of a batch; returns the sum of move x, which is not yet added to v."""
        if self.plan.extra["sequential"]:
            return self._in_sequence(rows)
        moves = self.moves(rows, self.v)
        self.a[rows] += moves
        return np.asarray(moves @ self.x[rows])

    def _in_sequence(self, rows: Rows) -> Array:
        """What a row sees of those before it moves the sum, never its variable."""
        total = np.zeros_like(self.v)
        counted = [i for i in rows if self.x[i].any()][: self.plan.extra["most"]]
        for i in counted:
            one = np.array([i])
            alone = self.moves(one, self.v)
            total += self.moves(one, self.v + total)[0] * self.x[i]
            self.a[i] += alone[0]
        return total

    def gap(self) -> float:
        """The duality gap, as Fenchel and Young's inequality gives it row by row."""
        loss, z = LOSSES[self.plan.spec.loss], self.x @ self.weights
        param = self.plan.loss_param
        shares = loss.value(z, self.y, param) + loss.conjugate(self.a, self.y, param) + self.a * z
        return max(0.0, float(shares.mean()))


def last_sum(features: npt.ArrayLike, labels: npt.ArrayLike, plan: Plan, passes: list[list[Rows]]) -> Array:
    """The sum of the last batch that has row 0, given sums before it that do not depend on row 0; zeros without one."""
    public = Dual.of(features, labels, plan)
    public.x[0], public.y[0] = 0.0, 0.0
    real = Dual.of(features, labels, plan)
    found, own = np.zeros_like(public.v), 0.0
    for rows in (rows for batches in passes for rows in batches):
        if 0 in rows:
            seen = replace(real, a=public.a.copy(), v=public.v)
            seen.a[0] = own
            found = seen.take(rows)
            own = seen.a[0]
        public.v = public.v + public.take(rows)
    return found


def block_moves(features: npt.ArrayLike, labels: npt.ArrayLike, plan: Plan, w: Array, block: Rows) -> Array:
    """How far the weights of a block move, before noise."""
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    strength = plan.schedule.penalty.strength
    slopes = LOSSES[plan.spec.loss].slope(x @ w, y, plan.loss_param)
    smoothness = plan.extra["curvature"] * (x[:, block] ** 2).mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        moves = -(slopes @ x[:, block] / plan.n + strength * w[block]) / (len(block) * smoothness + strength)
    return np.where(np.isnan(moves), 0.0, np.clip(moves, -plan.clip, plan.clip))
