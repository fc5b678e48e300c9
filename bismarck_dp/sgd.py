"""The base of all solvers on sums of gradients: what a user's words mean, and plain SGD.

A solver turns a spec and the table's shape into a Plan. Combinations without a proof are refused here, by name,
before a row is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .errors import BismarckError
from .losses import LOSSES, SOFTMAX_CURVATURE, Loss, loss_param, many_steepness
from .mechanisms import NO_NOISE, Noise
from .penalties import L2
from .plan import Plan, multiclass, outputs, row_width
from .sensitivity import Pulse, Schedule
from .spec import COORDINATE, OPTIONS, Spec
from .steps import Step

STEP_EXPONENT = 0.5
"""c of Corollaries 2 and 3: their steps start near 2 / (beta n^c)."""

DEFAULT_BATCH = 50


@dataclass(frozen=True)
class Setting:
    """A spec and a shape, with the constants that follow from them."""

    spec: Spec
    n: int
    d: int
    loss: Loss
    penalty: L2
    param: float
    """the loss's one number"""
    lipschitz: float
    """of a row's loss as the solver uses it: a bound on the norm of a row's gradient, after any clipping"""
    clip: float
    """rows' gradients are scaled down to this norm; infinite where they cannot exceed the bound anyway"""
    smoothness: float | None
    batch_size: int

    @property
    def row_width(self) -> int:
        """Numbers of a packed row."""
        return row_width(self.spec, self.d)

    @property
    def outputs(self) -> int:
        return outputs(self.spec)

    @property
    def width(self) -> int:
        """Numbers of the model."""
        return self.row_width * self.outputs

    @property
    def jump(self) -> float:
        """How far a sum of gradients at one point moves when one row differs."""
        return self.lipschitz * (2 if self.spec.options["adjacency"] == "replace" else 1)


class Sgd:
    """Permutation SGD in mini-batches (Bismarck; rule (7) of Wu et al. 2017), without privacy."""

    name = "sgd"
    kernel = "sgd"
    private = False
    perturbs = "nothing"
    """what noise is added to: nothing, the output alone, the sum of every batch, derivatives or moves"""
    layout = "rows"
    """how packed copies are laid out: rows, or columns"""
    remembers = False
    """whether the server keeps a number for each row while it trains"""
    samples = False
    """whether privacy comes of Poisson samples, too"""
    many = True
    """whether it takes more than two classes"""
    selects = False
    """whether weights may stay zero, so that a model has a support to show"""
    options: frozenset[str] = frozenset(OPTIONS) - COORDINATE

    def plan(self, spec: Spec, n: int, d: int, pulse: Pulse) -> Plan:
        setting = self.setting(spec, n, d)
        schedule = self._schedule(setting)
        self._check(setting, schedule)
        sensitivity, noise = self._release(setting, schedule, pulse)
        return Plan(
            spec=setting.spec,
            n=n,
            d=d,
            kernel=self.kernel,
            schedule=schedule,
            loss_param=setting.param,
            lipschitz=setting.lipschitz,
            clip=setting.clip,
            smoothness=setting.smoothness,
            sensitivity=sensitivity,
            noise=noise,
            perturbs=self.perturbs,
            layout=self.layout,
            remembers=self.remembers,
            private=self.private and spec.options["seed"] is None,
            notes=tuple(self.notes(setting.spec, n)),
            extra=self._extra(setting, noise),
            details=self._details(setting),
        )

    def _check_classes(self, spec: Spec) -> None:
        """Many classes need a loss of classes, and their labels."""
        kind, asked, classes = multiclass(spec), spec.options["multiclass"], spec.options["classes"]
        if asked is not None and not LOSSES[spec.loss].classification:
            raise BismarckError(f'loss "{spec.loss}" predicts a number and has no classes', "leave out multiclass")
        if kind == "softmax" and spec.loss != "logistic":
            raise BismarckError(
                f'multiclass "softmax" is the logistic loss of many classes, and the loss is "{spec.loss}"',
                'use multiclass "ovr", or loss "logistic"',
            )
        if kind is not None and classes is None:
            raise BismarckError("multiclass needs the classes", 'name them, for example {"classes": 10} for 0 to 9')
        if kind is not None and LOSSES[spec.loss].classification and not self.many:
            raise BismarckError(
                f'algorithm "{self.name}" tells two classes apart, and classes has {len(classes)}',
                "use bolton, scs13, bst14, dpsgd or sgd",
            )

    def _with_defaults(self, spec: Spec) -> Spec:
        """Bounds for the squared loss: none unless asked for, where nothing is promised."""
        return replace_options(spec, regression_bounds(spec, math.inf))

    def setting(self, spec: Spec, n: int, d: int) -> Setting:
        check_rows(spec, d)
        self._check_classes(spec)
        spec = self._with_defaults(spec)
        loss = LOSSES[spec.loss]
        penalty = L2(spec.options["lambda"])
        param, lipschitz, clip = self._bounds(spec, loss)
        curvature = SOFTMAX_CURVATURE if multiclass(spec) == "softmax" else loss.curvature(param)
        return Setting(
            spec=spec,
            n=n,
            d=d,
            loss=loss,
            penalty=penalty,
            param=param,
            lipschitz=lipschitz,
            clip=clip,
            smoothness=None if curvature is None else spec.options["feature_bound"] ** 2 * curvature + penalty.strength,
            batch_size=self._batch_size(spec.options["batch_size"], n),
        )

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        """The loss's number, the bound of a row's gradient, and the norm that gradients are scaled down to."""
        param = loss_param(spec.loss, spec.options)
        return param, spec.options["feature_bound"] * steepness(spec, loss, param), math.inf

    def _schedule(self, setting: Setting) -> Schedule:
        options = setting.spec.options
        return Schedule(
            n=setting.n,
            batch_size=setting.batch_size,
            passes=options["epochs"],
            workers=self._workers(options["workers"], setting.n),
            average=options["average"] or "none",
            shuffle=self._shuffle(options),
            step=self._step(setting),
            penalty=setting.penalty,
        )

    def _shuffle(self, options: dict[str, Any]) -> str:
        """How rows come to batches."""
        return str(options["shuffle"])

    def _batch_size(self, asked: int | None, n: int) -> int:
        if asked is not None and asked > n:
            raise BismarckError(f"batch_size {asked} is larger than the table's {n} rows", f"use at most {n}")
        return min(DEFAULT_BATCH, n) if asked is None else asked

    def _workers(self, asked: int, n: int) -> int:
        if asked > n:
            raise BismarckError(f"{asked} workers cannot share {n} rows", f"use at most {n}")
        return asked

    def _step(self, setting: Setting) -> Step:
        """The step rules of the public interface; hinge has no smoothness: 1 stands in for it, or lambda above that."""
        strength, n = setting.penalty.strength, setting.n
        asked = setting.spec.options["step"]
        beta = max(strength, 1.0) if setting.smoothness is None else setting.smoothness
        if asked is None:
            asked = "decreasing" if strength > 0 else "constant"
        if isinstance(asked, float):
            return Step("constant", eta=asked)
        if asked == "constant":
            limit = 1.0 / beta if strength > 0 else 2.0 / beta
            return Step("constant", eta=min(1 / math.sqrt(n), limit))
        if asked == "decreasing" and strength > 0:
            return Step("strongly-convex", beta=beta, gamma=setting.penalty.strong_convexity)
        return Step(asked, beta=beta, offset=float(n**STEP_EXPONENT))

    def _check(self, setting: Setting, schedule: Schedule) -> None:
        """Nothing to prove for a model that claims nothing."""

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        return None, NO_NOISE

    def notes(self, spec: Spec, n: int) -> list[str]:
        return ["not private: the weights are exact"]

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        """Numbers that only this solver's kernel reads."""
        return {}

    def _details(self, setting: Setting) -> dict[str, Any]:
        """What only this solver has to explain."""
        return {}


class Private(Sgd):
    """What all private solvers share: bounds for the squared loss, and what a reader is warned of."""

    private = True
    options = Sgd.options - {"tolerance"}

    def _with_defaults(self, spec: Spec) -> Spec:
        return replace_options(spec, regression_bounds(spec, 1.0))

    def notes(self, spec: Spec, n: int) -> list[str]:
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


def regression_bounds(spec: Spec, default: float) -> dict[str, Any]:
    label_bound = spec.options["label_bound"]
    clip = spec.options["clip"]
    if LOSSES[spec.loss].classification:
        return {}
    label_bound = default if label_bound is None else label_bound
    return {"label_bound": label_bound, "clip": label_bound if clip is None else clip}


def steepness(spec: Spec, loss: Loss, param: float) -> float:
    """sup |slope|, of all classes together where there are many: they are one vector, with one noise."""
    kind = multiclass(spec)
    return loss.steepness(param) * (many_steepness(kind, outputs(spec)) if kind else 1.0)


def check_rows(spec: Spec, d: int) -> None:
    scale, projected = spec.options["scale"], spec.options["project_dim"]
    if projected is not None and projected > d:
        raise BismarckError(f"project_dim is {projected}, and the rows have {d} features", f"use at most {d}")
    if isinstance(scale, list) and len(scale) != d:
        raise BismarckError(f"scale has {len(scale)} numbers for {d} features", "give one for all, or one for each")
    if isinstance(scale, dict):
        raise BismarckError("scale names columns, and the rows have none", "give one number, or one for each feature")


def replace_options(spec: Spec, changes: dict[str, Any]) -> Spec:
    return Spec(spec.algorithm, spec.loss, spec.epsilon, spec.delta, {**spec.options, **changes})
