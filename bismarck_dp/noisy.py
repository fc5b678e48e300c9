"""Noise inside the pass: SCS13 on permutations, BST14 and DP-SGD on Poisson samples, BANCO on single rows.

All of them release the noisy sum of every batch, to themselves: the weights are made of these sums and nothing else, so
they are post-processing. Hence no demands on the loss but a bound on a row's gradient, and none on steps, averages or
projections. What a row can do to one sum:

    jump   two sums of gradients at the same weights, over tables that differ in one row, differ by at most J = 2 L
           (`replace`) or L (`zero-out`) in norm, and only if the row is in the batch. L bounds a row's gradient.

The sums are computed in doubles, in one order. Rows before and after the differing one give the same numbers on both
sides, but partial sums differ, and so does their rounding: by at most 2^-53 L i at the i-th row, in each of the two.
For a batch of c rows that is 2^-53 L c^2. Norms and slopes are checked in doubles, too: a millionth of L pays for that.
So a row that joins a batch, or leaves it, moves the sum by at most L' = L (1 + 1e-6) + 2^-53 L c^2; J is 2 L' or L'.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .banco import Bet
from .calibrators import Gaussians, Laplaces, PoissonGaussians
from .errors import BismarckError
from .losses import LOSSES, Loss, loss_param
from .mechanisms import Noise, Sums, calibrate_sums, most_of_binomial
from .plan import Plan
from .sensitivity import Pulse, Schedule
from .sgd import Private, Setting, replace_options, steepness
from .spec import ROWS, Spec
from .steps import Step

DEFAULT_RADIUS = 10.0

LEAST_EPSILON, LEAST_DELTA = 1e-9, 1e-100
"""Of what privacy loss distributions are asked for: below, their numbers leave the range of doubles."""

RATE_ERROR = 2.0**-50
"""The kernels' waits keep each draw's probability within this factor (udf/kernels/gaps.c)."""


def row_bound(setting: Setting, rows: float) -> float:
    """L', for sums of up to so many rows."""
    return setting.lipschitz * (1 + 1e-6 + 2.0**-53 * rows**2)


def jumps(setting: Setting) -> int:
    """J / L'."""
    return 2 if setting.spec.options["adjacency"] == "replace" else 1


class Noisy(Private):
    """What solvers with noisy sums share. A row's gradient slope x is scaled by min(1, clip / |slope x|) before it is
    added, so that L = clip. Without `clip` it is the loss's own bound, which scales nothing; for the squared loss,
    which has none, label_bound times feature_bound.
    """

    perturbs = "sums"

    def _with_defaults(self, spec: Spec) -> Spec:
        if LOSSES[spec.loss].classification:
            return spec
        label_bound, clip = spec.options["label_bound"] or 1.0, spec.options["clip"]
        clip = label_bound * spec.options["feature_bound"] if clip is None else clip
        return replace_options(spec, {"label_bound": label_bound, "clip": clip})

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        """Residuals are not cut: the gradient is."""
        param = loss_param(spec.loss, {**spec.options, "clip": math.inf})
        steep = spec.options["feature_bound"] * steepness(spec, loss, param)
        clip = spec.options["clip"]
        if clip is None or clip >= steep:
            return param, steep, math.inf
        return param, clip, clip


class Scs13(Noisy):
    """Noise on every mini-batch of permutation SGD (Song, Chaudhuri and Sarwate 2013, over several passes).

    Claim: epsilon-DP, or (epsilon, delta)-DP. Proof: given the order, which does not depend on values, a row is in one
    batch of one partition per pass. All other sums of the pass have the same law for both tables, given what was
    released before. So a pass releases one sum of sensitivity J about the row, and k passes are k such releases, each
    made with what came before in view: k Gaussians are one with sqrt(k) J (Gaussian differential privacy composes
    exactly, Dong, Roth and Su 2022), and k pure releases of epsilon / k add up to epsilon. The order may be known.
    """

    name = "scs13"

    def _step(self, setting: Setting) -> Step:
        """1 / sqrt(t), never above 1 / lambda, where the shrink would turn the weights over."""
        if setting.spec.options["step"] is None:
            return Step("inverse-sqrt", eta=1.0, beta=max(setting.penalty.strength, 1.0))
        return super()._step(setting)

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        spec = setting.spec
        assert spec.epsilon is not None
        rows = min(setting.batch_size, setting.n)
        sensitivity = jumps(setting) * row_bound(setting, rows)
        passes = schedule.passes
        calibrator = Laplaces(passes) if spec.delta == 0 else Gaussians(passes)
        sums = Sums(touched=passes, width=setting.width, reach=rows * setting.lipschitz)
        return sensitivity, calibrate_sums(sums, sensitivity, spec.epsilon, spec.delta, calibrator)


class Poisson(Noisy):
    """What BST14 and DP-SGD share: batches are Poisson samples of the table.

    Claim: (epsilon, delta)-DP. Proof: each row joins each batch by a coin of its own, of probability q, whose outcome
    stays in the server. A step is then dominated by a Poisson-sampled Gaussian (`poisson`). Dominating pairs compose,
    adaptively too: privacy loss distributions give the noise for all steps together. A batch has any number of rows,
    also none; its sum is divided by q n = batch_size, a constant, and it always has its noise.
    """

    samples = True
    options = Noisy.options - {"workers", "shuffle"}

    def plan(self, spec: Spec, n: int, d: int, pulse: Pulse) -> Plan:
        from .poisson import pulsing  # others' plans need not load it

        with pulsing(pulse):
            return super().plan(spec, n, d, pulse)

    def _shuffle(self, options: dict[str, Any]) -> str:
        return "poisson"

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        return self._noise(setting)

    def _noise(self, setting: Setting) -> tuple[float, Noise]:
        """The sensitivity of a sum and its noise; both follow from the setting alone."""
        spec, n, b = setting.spec, setting.n, setting.batch_size
        assert spec.epsilon is not None
        if spec.delta == 0:
            raise BismarckError(
                f'algorithm "{self.name}" is private for delta above 0 only',
                "pass a delta far below 1/n, for example 1e-6, or use bolton or scs13",
            )
        if spec.epsilon < LEAST_EPSILON or spec.delta < LEAST_DELTA:
            raise BismarckError(
                f"epsilon {spec.epsilon:g} or delta {spec.delta:g} is too small for the accountant of samples",
                f"use epsilon from {LEAST_EPSILON:g} and delta from {LEAST_DELTA:g}, or scs13",
            )
        steps = -(-n // b) * spec.options["epochs"]
        probability = min(1.0, b / n * (1 + RATE_ERROR))
        rows = self._most_rows(setting)
        bound, sensitivity = self._jumps(setting, rows)
        sums = Sums(touched=steps, width=setting.width, reach=rows * setting.lipschitz, draws=float(b) * steps)
        calibrator = PoissonGaussians(probability, steps, spec.options["adjacency"])
        return sensitivity, calibrate_sums(sums, bound, spec.epsilon, spec.delta, calibrator)

    def _most_rows(self, setting: Setting) -> float:
        """Rows of the largest batch of the run, but for a probability that is paid for."""
        spec, n, b = setting.spec, setting.n, setting.batch_size
        assert spec.epsilon is not None
        return most_of_binomial(n, b / n, -(-n // b) * spec.options["epochs"], spec.epsilon, spec.delta)

    def _jumps(self, setting: Setting, rows: float) -> tuple[float, float]:
        """How far a row that joins a batch of at most so many moves its sum, and the sensitivity of a sum."""
        bound = row_bound(setting, rows)
        return bound, jumps(setting) * bound


class Dpsgd(Poisson):
    """DP-SGD (Abadi et al. 2016): gradients of rows scaled down to norm `clip`, Poisson samples, Gaussian noise.

    The claim and the proof are those of `Poisson`.
    """

    name = "dpsgd"


class Bst14(Poisson):
    """Bassily, Smith and Thakurta 2014 with a constant number of passes (Algorithms 4 and 5 of Wu et al. 2017).

    The claim and the proof are those of `Poisson`. The steps are the paper's: with a regulariser 1 / (gamma t); without
    one 2 R / (G sqrt(t)) on the sum of a batch, with G^2 = d sigma^2 + b^2 L^2 and R the radius, which bound the mean
    square of a noisy sum and the weights. The noise is not the paper's: its amplification needs the independent draws
    that a scan does not make, and its iota is 1 where 2 L is right and stands under the root (docs/privacy.md).
    """

    name = "bst14"
    options = Poisson.options - {"step"}

    def _with_defaults(self, spec: Spec) -> Spec:
        """Algorithm 4 needs a ball; the minimiser of Algorithm 5 lies within L / lambda, so that projecting onto that
        ball never hurts.
        """
        spec = super()._with_defaults(spec)
        if math.isfinite(spec.options["radius"]):
            return spec
        strength = spec.options["lambda"]
        bound = self._bounds(spec, LOSSES[spec.loss])[1]
        return replace_options(spec, {"radius": bound / strength if strength > 0 else DEFAULT_RADIUS})

    def _step(self, setting: Setting) -> Step:
        strength = setting.penalty.strength
        if strength > 0:
            return Step("strongly-convex", beta=strength, gamma=strength)
        _, noise = self._noise(setting)
        norm = math.hypot(math.sqrt(setting.width) * noise.scale, setting.batch_size * setting.lipschitz)
        eta = 2 * setting.spec.options["radius"] * setting.batch_size / norm
        return Step("inverse-sqrt", eta=eta, beta=1 / eta)


class Banco(Noisy):
    """BANCO (Jun and Orabona 2019): one pass, row by row, without a learning rate.

    Claim: epsilon-DP, or (epsilon, delta)-DP. Proof: a row is asked for one gradient, which gets noise for the jump J
    of that row alone before anything is done with it: scale J / epsilon (K-norm), or J times the analytic multiplier.
    This holds for each row by itself, whatever the other rows are: it is what local differential privacy asks for. But
    here the server holds the rows and adds the noise, so those who are protected trust it: the trust is central.
    `local` has the protocol in which they need not. The constants of the bets are those of `banco`.
    """

    name = "banco"
    kernel = "banco"
    many = False
    options = ROWS | {"clip", "huber_h", "adjacency"}

    def _batch_size(self, asked: int | None, n: int) -> int:
        return 1

    def _schedule(self, setting: Setting) -> Schedule:
        step = Step("betting")
        return Schedule(setting.n, 1, 1, 1, average="all", shuffle="once", step=step, penalty=setting.penalty)

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        spec = setting.spec
        assert spec.epsilon is not None
        sensitivity = jumps(setting) * row_bound(setting, 1)
        calibrator = Laplaces() if spec.delta == 0 else Gaussians()
        sums = Sums(touched=1, width=setting.width, reach=setting.lipschitz)
        return sensitivity, calibrate_sums(sums, sensitivity, spec.epsilon, spec.delta, calibrator)

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        if noise.mechanism == "gaussian":
            return asdict(Bet.gaussian(setting.lipschitz, noise.scale))
        return asdict(Bet.knorm(setting.lipschitz, noise.scale, setting.width))
