"""Solvers: what each needs from loss and penalty, its schedule, and its sensitivity with the proof.

A solver turns a spec and the table's shape into a Plan. Combinations without a proof are refused here, by name,
before a row is read.
"""

from __future__ import annotations

import math
from typing import Any

from .errors import BismarckError
from .losses import LOSSES, Loss, loss_param
from .mechanisms import NO_NOISE, Noise, calibrate
from .penalties import L2
from .plan import Plan
from .sensitivity import Pulse, Schedule, output_sensitivity
from .spec import OPTIONS, Spec
from .steps import Step

STEP_EXPONENT = 0.5
"""c of Corollaries 2 and 3: their steps start near 2 / (beta n^c)."""

DEFAULT_BATCH = 50

MOST_FEATURES = 1_000_000

UNIT_ROUNDOFF = 2.0**-53


class Sgd:
    """Permutation SGD in mini-batches (Bismarck; rule (7) of Wu et al. 2017), without privacy."""

    name = "sgd"
    kernel = "sgd"
    private = False
    perturbs = "nothing"
    """what noise is added to: nothing, or the output alone"""
    options: frozenset[str] = frozenset(OPTIONS)

    def plan(self, spec: Spec, n: int, d: int, pulse: Pulse) -> Plan:
        spec = self._with_defaults(spec)
        options = spec.options
        loss = LOSSES[spec.loss]
        penalty = L2(options["lambda"])
        param = loss_param(spec.loss, options)
        bound = options["feature_bound"]
        lipschitz = bound * loss.steepness(param)
        curvature = loss.curvature(param)
        smoothness = None if curvature is None else bound**2 * curvature + penalty.strength
        batch_size = self._batch_size(options["batch_size"], n)
        schedule = Schedule(
            n=n,
            batch_size=batch_size,
            passes=options["epochs"],
            workers=self._workers(options["workers"], n),
            average=options["average"],
            shuffle=options["shuffle"],
            step=self._step(options["step"], penalty, smoothness, n),
            penalty=penalty,
        )
        width = d + int(options["fit_intercept"])
        self._check(spec, loss, schedule, smoothness)
        sensitivity, noise = self._release(spec, schedule, lipschitz, smoothness, width, pulse)
        seeded = options["seed"] is not None
        return Plan(
            spec=spec,
            n=n,
            d=d,
            kernel=self.kernel,
            schedule=schedule,
            lipschitz=lipschitz,
            smoothness=smoothness,
            sensitivity=sensitivity,
            noise=noise,
            private=self.private and not seeded,
            notes=tuple(self._notes(spec, n)),
        )

    def _with_defaults(self, spec: Spec) -> Spec:
        """Bounds for the squared loss: none unless asked for, where nothing is promised."""
        return _replace_options(spec, _regression_bounds(spec, math.inf))

    def _batch_size(self, asked: int | None, n: int) -> int:
        if asked is not None and asked > n:
            raise BismarckError(f"batch_size {asked} is larger than the table's {n} rows", f"use at most {n}")
        return min(DEFAULT_BATCH, n) if asked is None else asked

    def _workers(self, asked: int, n: int) -> int:
        if asked > n:
            raise BismarckError(f"{asked} workers cannot share {n} rows", f"use at most {n}")
        return asked

    def _step(self, asked: float | str | None, penalty: L2, smoothness: float | None, n: int) -> Step:
        """The step rules of the public interface; hinge has no smoothness: 1 stands in for it, or lambda above that."""
        beta = max(penalty.strength, 1.0) if smoothness is None else smoothness
        if asked is None:
            asked = "decreasing" if penalty.strength > 0 else "constant"
        if isinstance(asked, float):
            return Step("constant", eta=asked)
        if asked == "constant":
            limit = 1.0 / beta if penalty.strength > 0 else 2.0 / beta
            return Step("constant", eta=min(1 / math.sqrt(n), limit))
        if asked == "decreasing" and penalty.strength > 0:
            return Step("strongly-convex", beta=beta, gamma=penalty.strong_convexity)
        return Step(asked, beta=beta, offset=float(n**STEP_EXPONENT))

    def _check(self, spec: Spec, loss: Loss, schedule: Schedule, smoothness: float | None) -> None:
        """Nothing to prove for a model that claims nothing."""

    def _release(
        self, spec: Spec, schedule: Schedule, lipschitz: float, smoothness: float | None, width: int, pulse: Pulse
    ) -> tuple[float | None, Noise]:
        return None, NO_NOISE

    def _notes(self, spec: Spec, n: int) -> list[str]:
        return ["not private: the weights are exact"]


class Bolton(Sgd):
    """PSGD with output perturbation (Wu et al. 2017, Algorithms 1 and 2), at the corrected sensitivity.

    Claim: the released weights are epsilon-DP (delta = 0) or (epsilon, delta)-DP under the chosen adjacency, among
    tables of n rows with arrays of one length and labels of one coding (both public), because rows are clipped to the
    feature bound and labels checked in `pack`, the run's randomness does not depend on values, and the model's L2
    sensitivity is at most `output_sensitivity` (proof there) plus rounding (`_rounding`).
    """

    name = "bolton"
    private = True
    perturbs = "output"
    options = Sgd.options - {"tolerance"}

    def _with_defaults(self, spec: Spec) -> Spec:
        return _replace_options(spec, _regression_bounds(spec, 1.0))

    def _check(self, spec: Spec, loss: Loss, schedule: Schedule, smoothness: float | None) -> None:
        if smoothness is None:
            raise BismarckError(
                f'loss "{loss.name}" is not smooth, so bolton has no proof for it',
                'use "huber", its smoothed form, or "logistic"',
            )
        strongly_convex = schedule.penalty.strength > 0
        limit = (1 if strongly_convex else 2) / smoothness
        if schedule.step.first > limit:
            raise BismarckError(
                f"step {schedule.step.first:g} is above {1 if strongly_convex else 2}/beta = {limit:g}: "
                "updates could push models apart, and bolton has no proof",
                f"use a step of at most {limit:g}",
            )

    def _release(
        self, spec: Spec, schedule: Schedule, lipschitz: float, smoothness: float | None, width: int, pulse: Pulse
    ) -> tuple[float | None, Noise]:
        assert spec.epsilon is not None
        assert smoothness is not None
        jump = lipschitz * (2 if spec.options["adjacency"] == "replace" else 1)
        reach = _reach(schedule, lipschitz, spec.options["radius"])
        # A row's norm is checked in doubles: at a step of exactly 2/beta an update may expand by 1e-13.
        sensitivity = output_sensitivity(schedule, jump, pulse) * (1 + 1e-6 + 1e-13 * _step_sum(schedule)[0])
        sensitivity += _rounding(schedule, lipschitz, smoothness, width, reach, spec.options["radius"])
        return sensitivity, calibrate(sensitivity, spec.epsilon, spec.delta, width, reach)

    def _notes(self, spec: Spec, n: int) -> list[str]:
        assert spec.epsilon is not None
        notes = []
        if spec.options["seed"] is not None:
            notes.append("NOT PRIVATE: the seed is known, so the noise can be subtracted")
        if spec.delta >= 1 / n:
            notes.append(f"delta {spec.delta:g} is at least 1/n: it allows a row to be shown whole")
        if spec.epsilon > 10:
            notes.append(
                f"epsilon {spec.epsilon:g} is large: one row may change any outcome's odds by e^{spec.epsilon:g}"
            )
        return notes


def _regression_bounds(spec: Spec, default: float) -> dict[str, Any]:
    label_bound = spec.options["label_bound"]
    clip = spec.options["clip"]
    if LOSSES[spec.loss].classification:
        return {}
    label_bound = default if label_bound is None else label_bound
    return {"label_bound": label_bound, "clip": label_bound if clip is None else clip}


def _replace_options(spec: Spec, changes: dict[str, Any]) -> Spec:
    return Spec(spec.algorithm, spec.loss, spec.epsilon, spec.delta, {**spec.options, **changes})


def _step_sum(schedule: Schedule) -> tuple[int, float]:
    """The number of updates of the longest partition, and an upper bound of the sum of their steps."""
    updates = max(schedule.updates(rows) for rows in schedule.part_sizes()) * schedule.passes
    return updates, schedule.step.total(updates)


def _reach(schedule: Schedule, lipschitz: float, radius: float) -> float:
    """A norm the weights cannot exceed: the ball, L / lambda (the shrink balances the gradient), or all steps
    together.
    """
    strength = schedule.penalty.strength
    return min(radius, lipschitz / strength if strength > 0 else math.inf, _step_sum(schedule)[1] * lipschitz)


def _rounding(
    schedule: Schedule, lipschitz: float, smoothness: float, width: int, reach: float, radius: float
) -> float:
    """How far double rounding can push two runs apart, beyond the exact recursion.

    Per update, with u = 2^-53 and |w| <= R: a dot product in eight lanes errs by (d/8 + 8) u R F, so the average
    gradient by beta_d (d/8 + 8) u R; slopes and the batch sum by (b + 12) u L; shrink, subtraction and averaging by 4
    u R; a projection by (d/8 + 8) u R; averaging P partitions after a pass by 2 P u R. Updates do not expand, so
    errors add up over T updates, in each of the two runs. Never below T 2^-48 R.
    """
    updates, step_sum = _step_sum(schedule)
    lanes = width / 8 + 8
    per_norm = 4.0 * updates + 2 * schedule.workers * schedule.passes
    per_norm += smoothness * lanes * step_sum + (lanes * updates if math.isfinite(radius) else 0)
    rounding = 2 * UNIT_ROUNDOFF * (per_norm * reach + (schedule.batch_size + 12) * lipschitz * step_sum)
    return max(rounding, updates * 2.0**-48 * reach)


_ALL: list[Sgd] = [Sgd(), Bolton()]

SOLVERS: dict[str, Sgd] = {solver.name: solver for solver in _ALL}


def make_plan(spec: Spec, n: int, d: int, pulse: Pulse = lambda: None) -> Plan:
    """The plan of a spec for n rows of d features; `pulse` is called now and then if that takes long."""
    if n < 1:
        raise BismarckError("the table has no rows", "there is nothing to train on")
    if d < 1:
        raise BismarckError("the rows have no features", "name a non-empty array column, or numeric columns")
    if d > MOST_FEATURES:
        raise BismarckError(f"the rows have {d} features", f"at most {MOST_FEATURES} are supported")
    return SOLVERS[spec.algorithm].plan(spec, n, d, pulse)
