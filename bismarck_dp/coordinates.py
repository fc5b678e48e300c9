"""Coordinate descent: one weight is moved at a time, by the derivative of the mean loss along it.

CD moves random coordinates (Mangold et al. 2022), GCD the one that promises most (Mangold et al. 2023). Both minimise

    f(w) + psi(w),    f(w) = (1/n) sum_i loss(<w, x_i>, y_i),    psi(w) = (lambda / 2) |w|^2 + l1 |w|_1, in a box,

by  w_j <- prox_{(step / M_j) psi} ( w_j - (step / M_j) g_j ),  g_j the derivative of f along j and M_j its Lipschitz
constant. M_j is `constants`, or the bound curvature F^2 that the feature bound F implies, or is measured, for a share
of epsilon. The algorithms that claim nothing measure it exactly.

What is private. Derivatives of rows are cut to C_j = C sqrt(M_j / sum M), so that all C_j / sqrt(M_j) are equal and
sum C_j^2 = C^2, and are added up in units of C_j:

    u_j = sum_i max(-1, min(1, slope_i x_ij / C_j)),        each term rounded to a multiple of 2^-k.

Claim: u_j moves by at most J = 2 (`replace`) or 1 (`zero-out`) when a row differs, in every coordinate, at all weights.
Proof: one term differs, and has a magnitude of at most 1; a term is a function of its row, the weights and M, which are
the same on both sides, being made of noisy numbers alone. A row that counts for nothing is a row of zeros, and its
terms are 0 at all weights, which are numbers, however long the steps. k is such that n terms add up without rounding
(n 2^k <= 2^52): the sum does not depend on the order of the rows, nor on who adds them up. QED

So every noise below is that of one number in units of C_j, and the constants M_j, given or measured, do not enter it.
Weights are made of noisy numbers alone: prox, steps and averages are post-processing.

Constants. sum_i x_ij^2, with |x_i| <= F, in units of F^2 / 2^20 and rounded down for each row: the terms of one row are
whole numbers that add up to at most 2^20, so that two tables differ by at most J 2^20 in L1, over all coordinates
together. One discrete Laplace number of scale J 2^20 / e for each makes all of them together e-DP, for an e that is the
share `private_constants` of epsilon. What comes out is kept between twice the noise's scale and the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .accounting import ComposedDpEvent
from .calibrators import Gaussians, Laplaces, PureSum, ZcdpSum
from .errors import BismarckError
from .losses import LOSSES, Loss, loss_param
from .mechanisms import Noise, Sums, calibrate_sums
from .penalties import Separable
from .sensitivity import Pulse, Schedule
from .sgd import Private, Setting, Sgd, replace_options
from .spec import COORDINATE, ROWS, Spec
from .steps import Step

SHARED = ROWS | {"lambda", "step", "huber_h"} | (COORDINATE - {"inner_iterations", "rule", "top", "private_constants"})
"""Options of all of them."""

SQUARES = 2**20
"""Steps of the squares whose sum is measured, for a row at the feature bound."""

MOST_SCALE = 2.0**50
"""of their noise"""

SCORES = 2**20
"""Steps of a score for each unit of u."""

SLACK = 16
"""How much further apart two computed scores may be than two real ones, in steps (udf/kernels/gcd.c)."""

EXPONENTS = 2**40
"""Steps of a selection's epsilon, which is rounded down."""

ROUNDING = 1e-12
"""What is said of sensitivities is rounded, too; the noise is that of J itself."""

MOST_SELECTION = 2.0**20
"""An epsilon beyond which a choice is as good as certain."""

SELECTION_SHARE = 0.5
"""of the privacy goes to selections, the rest to values"""


@dataclass(frozen=True)
class Rounds(Schedule):
    """Passes of coordinate steps; the first one may measure the constants instead."""

    steps: int = 1
    """in a round"""
    width: int = 1
    measures: bool = False
    reads_columns: bool = False
    distinct: bool = False
    """no coordinate is drawn twice in a round"""

    def updates(self, rows: int) -> int:
        return self.steps

    @property
    def rounds(self) -> int:
        return self.passes - int(self.measures)

    @property
    def total_updates(self) -> int:
        return self.rounds * self.steps

    def data_passes(self, done: int) -> float:
        """A step on one of d columns reads a d-th of the data."""
        if not self.reads_columns:
            return done
        return int(self.measures) + (done - int(self.measures)) * self.steps / self.width


class Coordinates(Sgd):
    """What coordinate solvers share."""

    many = False
    selects = True
    default_iterations = 10

    def _with_defaults(self, spec: Spec) -> Spec:
        loss, asked = LOSSES[spec.loss], spec.options
        if loss.curvature(1.0) is None:
            raise BismarckError(
                f'algorithm "{self.name}" needs a loss with a curvature, and "{spec.loss}" has none',
                'use the loss "huber", a smoothed hinge, or "logistic"',
            )
        changes: dict[str, Any] = {}
        if asked["iterations"] is None:
            changes["iterations"] = self.default_iterations
        if not loss.classification and asked["label_bound"] is None:
            changes["label_bound"] = 1.0 if self.private else math.inf
        return replace_options(spec, changes)

    def setting(self, spec: Spec, n: int, d: int) -> Setting:
        setting = super().setting(spec, n, d)
        options = setting.spec.options
        given = options["constants"]
        if isinstance(given, list) and len(given) != setting.width:
            raise BismarckError(
                f"constants has {len(given)} numbers for {setting.width} weights",
                "give one number for all, or one for each feature (and one for the intercept)",
            )
        if given is not None and options["private_constants"] is not None:
            raise BismarckError(
                "constants are given, and private_constants would measure them", "leave one of them out"
            )
        return replace(setting, penalty=Separable(options["lambda"], options["l1"], options["box"]))

    def _batch_size(self, asked: int | None, n: int) -> int:
        return n

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        """Derivatives are cut, if at all: residuals are not."""
        param = loss_param(spec.loss, {**spec.options, "clip": math.inf})
        return param, spec.options["feature_bound"] * loss.steepness(param), math.inf

    def _step(self, setting: Setting) -> Step:
        """What 1 / M_j is multiplied by; t counts passes over the weights, or iterations of gcd."""
        asked = setting.spec.options["step"]
        if isinstance(asked, float):
            return Step("constant", eta=asked)
        if asked == "decreasing":
            return Step("strongly-convex", beta=1.0, gamma=1.0)
        if asked == "sqrt":
            return Step("inverse-sqrt", eta=1.0, beta=1.0)
        return Step("constant", eta=1.0)

    def _measures(self, setting: Setting) -> bool:
        """Whether a first pass measures the constants."""
        options = setting.spec.options
        return options["constants"] is None and (not self.private or options["private_constants"] is not None)

    def _rounds(self, setting: Setting, steps: int, average: str, workers: int) -> Rounds:
        measures = self._measures(setting)
        return Rounds(
            n=setting.n,
            batch_size=setting.n,
            passes=setting.spec.options["iterations"] + int(measures),
            workers=workers,
            average=average,
            shuffle="none",
            step=self._step(setting),
            penalty=setting.penalty,
            steps=steps,
            width=setting.width,
            measures=measures,
            reads_columns=self.layout == "columns",
        )

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        options = setting.spec.options
        curvature = setting.loss.curvature(setting.param)
        assert curvature is not None
        bound = curvature * options["feature_bound"] ** 2
        return {
            "constants": 0.0 if self._measures(setting) else options["constants"] or bound,
            "measures": self._measures(setting),
            "measure_scale": measure_scale(setting) if self.private and self._measures(setting) else 0,
            "curvature": curvature,
            "margin_label": 1 if setting.loss.classification else 0,
            "feature_bound": options["feature_bound"],
            "l1": options["l1"],
            "box": "inf" if math.isinf(options["box"]) else options["box"],
        }


class Cd(Coordinates):
    """Proximal random coordinate descent, without privacy: with M_j measured, it converges to the minimum."""

    name = "cd"
    kernel = "cd"
    layout = "columns"
    options = SHARED | {"inner_iterations", "average", "tolerance"}
    default_average = "none"

    def _schedule(self, setting: Setting) -> Schedule:
        average = setting.spec.options["average"] or self.default_average
        return self._rounds(setting, self._steps(setting), average, 1)

    def _steps(self, setting: Setting) -> int:
        """K."""
        return int(setting.spec.options["inner_iterations"] or setting.width)

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        return {**super()._extra(setting, noise), "inner_iterations": self._steps(setting)}


class Gcd(Coordinates):
    """Proximal greedy coordinate descent, without privacy: a pass, then the best coordinates are moved."""

    name = "gcd"
    kernel = "gcd"
    options = SHARED | {"rule", "top", "workers", "tolerance"}
    default_iterations = 100

    def setting(self, spec: Spec, n: int, d: int) -> Setting:
        setting = super().setting(spec, n, d)
        top = setting.spec.options["top"]
        if top > setting.width:
            raise BismarckError(f"top is {top}, and there are {setting.width} weights", f"use at most {setting.width}")
        return setting

    def _schedule(self, setting: Setting) -> Schedule:
        options = setting.spec.options
        return self._rounds(setting, options["top"], "none", self._workers(options["workers"], setting.n))

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        options = setting.spec.options
        return {
            **super()._extra(setting, noise),
            "rule": options["rule"],
            "top": options["top"],
            "selection_numerator": 0,
            "selection_denominator": 1,
        }


class PrivateCoordinates(Private, Coordinates):
    """What the private ones share: the cut, the measured constants, and the accounting of both."""

    perturbs = "coordinates"

    def _with_defaults(self, spec: Spec) -> Spec:
        """Without `clip`, C is the bound of a row's gradient; for the squared loss label_bound times feature_bound."""
        spec = Coordinates._with_defaults(self, spec)
        if spec.options["clip"] is not None:
            return spec
        loss = LOSSES[spec.loss]
        steep = loss.steepness(1.0) if loss.classification else spec.options["label_bound"]
        return replace_options(spec, {"clip": steep * spec.options["feature_bound"]})

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        param, steep, _ = super()._bounds(spec, loss)
        clip = spec.options["clip"]
        return param, min(clip, steep), clip

    def _calibrator(self, setting: Setting, schedule: Rounds) -> Gaussians | ZcdpSum | PureSum:
        """What prices all steps together: one Gaussian each, unless a solver releases more."""
        return Gaussians(schedule.total_updates)

    def _noise(self, setting: Setting) -> tuple[Noise, Gaussians | ZcdpSum | PureSum]:
        """The noise of u_j, and its calibrator; both follow from the setting alone."""
        spec = setting.spec
        assert spec.epsilon is not None
        schedule = self._schedule(setting)
        assert isinstance(schedule, Rounds)
        calibrator = self._calibrator(setting, schedule)
        sums = Sums(touched=schedule.total_updates, width=1, reach=float(setting.n))
        left = spec.epsilon * (1 - (spec.options["private_constants"] or 0.0))
        return calibrate_sums(sums, float(jump(setting)), left, spec.delta, calibrator), calibrator

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        """In units of the gradient. The C_j differ, but their squares add up to C^2: what is said of noise and
        sensitivity is said of C_j = C / sqrt(d), and coordinate j has C_j / (C / sqrt(d)) times both.
        """
        noise, _ = self._noise(setting)
        unit = setting.clip / math.sqrt(setting.width) / setting.n
        event, accountant, share = noise.event, noise.accountant, constants_epsilon(setting.spec)
        if share is not None:
            event = ComposedDpEvent((event, Laplaces().event(1 / share)))
            accountant = accountant if accountant == "pure" else f"{accountant}+pure"
        mechanism = "gaussian" if noise.mechanism == "gaussian" else "laplace"
        return jump(setting) * unit * (1 + ROUNDING), replace(
            noise,
            mechanism=mechanism,
            scale=noise.scale * unit,
            grid=noise.grid * unit,
            accountant=accountant,
            event=event,
        )

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        inside, _ = self._noise(setting)
        kernel = {"noise": inside.mechanism, "noise_scale": inside.scale, "noise_grid": inside.grid}
        return {**super()._extra(setting, noise), **kernel}

    def _details(self, setting: Setting) -> dict[str, Any]:
        return {"constants_epsilon": constants_epsilon(setting.spec)}


class Dpcd(PrivateCoordinates, Cd):
    """DP-CD (Mangold et al. 2022): T rounds of K steps, each on a random coordinate, with Gaussian noise.

    Claim: (epsilon, delta)-DP. Proof: which coordinates are moved does not depend on values and may be known. The T K
    noisy u_j have sensitivity J each, and each is made with those before in view: T K Gaussians are one with
    sqrt(T K) J (Dong, Roth and Su 2022). So the noise of g_j is (J C_j / n) sqrt(T K) times the analytic multiplier.
    (The poster's formula lacks K: docs/privacy.md, C1.) With measured constants, which are pure, epsilons add up.
    """

    name = "dpcd"
    options = (Cd.options | {"adjacency", "clip", "private_constants"}) - {"tolerance"}
    default_iterations = 5
    default_average = "all"

    def setting(self, spec: Spec, n: int, d: int) -> Setting:
        if spec.delta == 0:
            raise BismarckError(
                'algorithm "dpcd" is private for delta above 0 only',
                "pass a delta far below 1/n, for example 1e-6, or use dpgcd",
            )
        return super().setting(spec, n, d)


class Dpgcd(PrivateCoordinates, Gcd):
    """DP-GCD (Mangold et al. 2023): T passes, in each of which the best c coordinates are chosen and moved.

    Claim: epsilon-DP, or (epsilon, delta)-DP. Proof. Scores: at given weights, each of the three rules, in units of
    C_j / (n sqrt(M_j)), is a function of u_j alone, and 1-Lipschitz: the distance of -g_j from the subgradients of
    psi_j (gs-s); the length of a prox step (gs-r), a prox being non-expansive; sqrt(2 q_j) for the decrease q_j of the
    model along j (gs-q), because q_j >= M_j a^2 / 2 at the best move a, and dq_j / dg_j = -a. Where the penalty keeps
    a weight at zero, which all three give a score of zero, it is |u_j| - n l1 / C_j instead: negative, continuous with
    the rest, and as steep. All C_j / sqrt(M_j) are equal, so all scores have one unit and one sensitivity, J. Choices:
    j with probability proportional to exp(e score_j / (2 J)), c times without replacement, is c times e-DP and c times
    e^2 / 8-zCDP (`accounting.selection_rho`); scores are whole numbers whose rounding is counted in J, and the choice
    is exact. Values: c noisy u_j of sensitivity J. With Gaussian noise all of it is zCDP, of which choices get half;
    with Laplace noise it is pure, and epsilons add up. (The paper's noisy maximum lacks a factor 2, and unequal noise
    is no such mechanism at all: docs/privacy.md, G1 and G2.)
    """

    name = "dpgcd"
    options = (Gcd.options | {"adjacency", "clip", "private_constants"}) - {"tolerance"}
    default_iterations = 10

    def _calibrator(self, setting: Setting, schedule: Rounds) -> ZcdpSum | PureSum:
        kind = PureSum if setting.spec.delta == 0 else ZcdpSum
        return kind(schedule.total_updates, schedule.total_updates, SELECTION_SHARE)

    def selection_epsilon(self, setting: Setting) -> float:
        """Of each choice, beside the noise that values have."""
        noise, calibrator = self._noise(setting)
        assert isinstance(calibrator, (ZcdpSum, PureSum))
        return min(calibrator.selection(noise.scale / jump(setting)), MOST_SELECTION)

    def _details(self, setting: Setting) -> dict[str, Any]:
        return {**super()._details(setting), "selection_epsilon": self.selection_epsilon(setting)}

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        steps = round(score_jump(jump(setting)) * SCORES)
        return {
            **super()._extra(setting, noise),
            "selection_numerator": math.floor(self.selection_epsilon(setting) * EXPONENTS),
            "selection_denominator": 2 * steps * EXPONENTS,
        }


def score_jump(jump: int) -> float:
    """How far a computed score moves when a row differs, if sums move by so much."""
    return jump + SLACK / SCORES


def jump(setting: Setting) -> int:
    """J: how far u_j moves when a row differs."""
    return 2 if setting.spec.options["adjacency"] == "replace" else 1


def constants_epsilon(spec: Spec) -> float | None:
    """What measuring the constants costs."""
    share = spec.options["private_constants"]
    return None if share is None or spec.epsilon is None else share * spec.epsilon


def measure_scale(setting: Setting) -> int:
    """The scale of the discrete Laplace noise on sums of squares."""
    epsilon = constants_epsilon(setting.spec)
    assert epsilon is not None
    scale = jump(setting) * SQUARES / epsilon * (1 + 1e-12)
    if scale > MOST_SCALE:
        raise BismarckError(
            f"epsilon {epsilon:g} is too small to measure constants with", "use a larger share, or give the constants"
        )
    return math.ceil(scale)
