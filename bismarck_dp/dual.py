"""Stochastic coordinate descent on the dual (SDCA; Damaskinos et al. 2021), and its primal relative.

The weights that minimise  (1/n) sum_i loss_i(<w, x_i>) + (lambda / 2) |w|^2  are v / (lambda n), v = sum_i a_i x_i, for
the dual variables a that minimise  (1/n) sum_i conjugate_i(a_i) + |v|^2 / (2 lambda n^2).  A batch moves the variables
of its L rows, each to the minimum of its own part of a bound that holds for all of them together (Ma et al. 2015):

    move_i = argmin over m of  conjugate_i(a_i + m) + <x_i, v> m / (lambda n) + L |x_i|^2 m^2 / (2 lambda n).

There is a formula for the squared, hinge and huber losses; for the logistic one a Newton step. No step size is needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .calibrators import Gaussians
from .coordinates import Rounds
from .errors import BismarckError
from .losses import LOSSES, Loss, loss_param
from .mechanisms import Noise, Sums, calibrate_sums
from .noisy import Poisson, row_bound
from .plan import row_width
from .sensitivity import Pulse, Schedule
from .sgd import Private, Setting, Sgd, replace_options
from .spec import ROWS, Spec
from .steps import Step

PRIMAL_CLIP = 0.01
PRIMAL_SWEEPS = 5


class Scd(Sgd):
    """Mini-batch SDCA without privacy: batches of a shuffled table in its order. With L = 1 it is SDCA itself."""

    name = "scd"
    kernel = "scd"
    remembers = True
    many = False
    options = ROWS | {"lambda", "epochs", "batch_size", "huber_h", "tolerance"}
    sequential = False
    """whether a row of a batch sees the moves of those before it"""

    def _with_defaults(self, spec: Spec) -> Spec:
        if spec.options["lambda"] == 0:
            raise BismarckError(
                f'algorithm "{self.name}" needs lambda above 0: without a regulariser there is no dual to descend on',
                "set lambda, for example to 1e-4",
            )
        if LOSSES[spec.loss].classification or spec.options["label_bound"] is not None:
            return spec
        return replace_options(spec, {"label_bound": 1.0 if self.private else math.inf})

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        """Residuals are not cut."""
        param = loss_param(spec.loss, {**spec.options, "clip": math.inf})
        return param, spec.options["feature_bound"] * loss.steepness(param), math.inf

    def _batch_size(self, asked: int | None, n: int) -> int:
        return super()._batch_size(1 if asked is None else asked, n)

    def _step(self, setting: Setting) -> Step:
        return Step("exact")

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        return {"sequential": self.sequential, "most": self._most(setting)}

    def _most(self, setting: Setting) -> int:
        """Rows of a sequential batch, of which there are none here."""
        return 0


class Dpscd(Scd, Poisson):
    """DP-SCD (Damaskinos et al. 2021) with exact dual variables that nobody sees: noise on v alone.

    A batch is a Poisson sample, a move is scaled down so that |move_i x_i| <= C, the batch's sum of move_i x_i gets
    Gaussian noise, and v is the sum of the noisy sums. The a_i are kept in the server, without noise.

    Claim: (epsilon, delta)-DP, at the noise of as many Poisson-sampled Gaussians with clip norm C (`poisson`), although
    a row's moves depend on what happened to it before.

    Proof. Let tables differ in row k, and o_1, ..., o_T be the noisy sums. (1) Coins are independent from row to row:
    condition on those of all other rows. The hockey-stick divergence is jointly convex and their law is the same for
    both tables, so a bound for all outcomes is a bound. (2) Given o_1, ..., o_(t-1), and with them v, the others'
    variables are the same on both sides: a move follows from its row, its variable and v, and from nothing else. So is
    the sum s of the others' moves at step t. (3) Row k's variable follows from its own coins so far, whose posterior
    law given o_1, ..., o_(t-1) is pi. Its coin at t is independent of them. So o_t has the law
    sum over histories h of pi(h) [ (1-q) N(s) + q N(s + u_h) ], |u_h| <= C, on one side, and the same with other pi'
    and u' on the other (zero-out: u' = 0). Both are mixtures over pairs (h, h') with weights pi(h) pi'(h'), and by
    joint convexity no further apart than the worst pair, which `poisson` bounds. (4) So each step, given what was
    released, is dominated by the same pair of distributions; dominating pairs compose adaptively (Zhu, Dong and Wang
    2022, Theorem 10). The weights are made of o_1, ..., o_T. QED

    It takes independent coins: with batches of a fixed size the others' batches tell whether row k was in one, and (1)
    fails. It takes variables that never leave: with them, whose sample had whom is known and nothing is amplified. The
    paper's noise is for variables that are released, too: sqrt(2) as much on v, and as much on each of them.

    Without `clip`, C is the length of the first move of a row whose norm and label are at their bounds.
    """

    name = "dpscd"
    options = (Scd.options | {"clip", "adjacency"}) - {"tolerance"}

    def setting(self, spec: Spec, n: int, d: int) -> Setting:
        spec = self._with_defaults(spec)
        if spec.options["clip"] is None:
            spec = replace_options(spec, {"clip": self._first_move(spec, n)})
        return super().setting(spec, n, d)

    def _batch_size(self, asked: int | None, n: int) -> int:
        return Sgd._batch_size(self, asked, n)

    def _first_move(self, spec: Spec, n: int) -> float:
        options, loss = spec.options, LOSSES[spec.loss]
        together = 1 if self.sequential else self._batch_size(options["batch_size"], n)
        curvature = together * options["feature_bound"] ** 2 / (options["lambda"] * n)
        label = 1.0 if loss.classification else options["label_bound"]
        at = np.zeros(1)
        move = loss.dual(at, at + label, at, at + curvature, self._bounds(spec, loss)[0])
        return float(options["feature_bound"] * move[0])

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        """No variable moves further than the loss is steep."""
        param, steep, _ = super()._bounds(spec, loss)
        clip = spec.options["clip"]
        bound = steep if clip is None else min(clip, steep)
        return param, bound, bound


class DpscdSeq(Dpscd):
    """SEQDP-SCD: a row of a batch sees the moves of those before it. A baseline: its noise is that of whole batches.

    Claim: (epsilon, delta)-DP. Proof: as for `Dpscd`, with two changes. Row k changes the moves of those behind it in
    its batch, so that the sum of a batch B with row k is within C + 2 C (|B| - 1) = (2 |B| - 1) C of that without it,
    on both sides; a step is then a Poisson-sampled Gaussian with that clip norm. And step (2) above needs variables
    that follow from their own row and v: what a row saw in its batch moves the sum, and is forgotten; its variable
    moves as if the row had been alone. (If variables kept what they saw, a batch without row k would still tell of it,
    and (2 |B| - 1) C would pay for nothing: docs/privacy.md, S8.) A batch is cut off behind so many rows as none has,
    but for a probability that is paid for (`most_of_binomial`).
    """

    name = "dpscd_seq"
    sequential = True

    def _most(self, setting: Setting) -> int:
        return math.floor(self._most_rows(setting))

    def _jumps(self, setting: Setting, rows: float) -> tuple[float, float]:
        most, one = math.floor(rows), row_bound(setting, rows)
        apart = 2 * most if setting.spec.options["adjacency"] == "replace" else 2 * most - 1
        return (2 * most - 1) * one, apart * one


class DpscdPrimal(Private):
    """PrimalDP-SCD: T blocks of L weights, each moved to the minimum of a bound along it, with noise on the moves.

    Claim: (epsilon, delta)-DP. Proof: the margins follow from the rows and the noisy weights; a move follows from the
    rows and the margins, in whatever way, and is cut to +-C. So the L moves of a block, given what was released, are
    within 2 C sqrt(L) for any two tables at all. Which weights are in a block does not depend on values. T Gaussians
    are one with sqrt(T) times the sensitivity. (The paper also noises the margins of all rows, and assumes normalised
    columns, which is no private thing to do.)

    The noise does not shrink as rows are added, because the cut is on the move and not on a row's share of it: `dpcd`
    does what this one was meant to.
    """

    name = "dpscd_primal"
    kernel = "primal"
    perturbs = "moves"
    layout = "columns"
    many = False
    options = ROWS | {"lambda", "iterations", "inner_iterations", "huber_h", "clip", "adjacency"}

    def setting(self, spec: Spec, n: int, d: int) -> Setting:
        width = row_width(spec, d)
        block = spec.options["inner_iterations"] or 1
        if block > width:
            raise BismarckError(f"inner_iterations is {block}, and there are {width} weights", f"use at most {width}")
        blocks = spec.options["iterations"] or PRIMAL_SWEEPS * -(-width // block)
        return super().setting(replace_options(spec, {"inner_iterations": block, "iterations": blocks}), n, d)

    def _with_defaults(self, spec: Spec) -> Spec:
        loss = LOSSES[spec.loss]
        if spec.delta == 0:
            raise BismarckError(
                f'algorithm "{self.name}" is private for delta above 0 only',
                "pass a delta far below 1/n, for example 1e-6",
            )
        if loss.curvature(1.0) is None:
            raise BismarckError(
                f'algorithm "{self.name}" needs a loss with a curvature, and "{spec.loss}" has none',
                'use the loss "huber", a smoothed hinge, or "dpscd"',
            )
        defaults = {"clip": PRIMAL_CLIP} if loss.classification else {"clip": PRIMAL_CLIP, "label_bound": 1.0}
        return replace_options(spec, {name: v for name, v in defaults.items() if spec.options[name] is None})

    def _bounds(self, spec: Spec, loss: Loss) -> tuple[float, float, float]:
        param = loss_param(spec.loss, {**spec.options, "clip": math.inf})
        return param, spec.options["feature_bound"] * loss.steepness(param), spec.options["clip"]

    def _batch_size(self, asked: int | None, n: int) -> int:
        return n

    def _schedule(self, setting: Setting) -> Schedule:
        options = setting.spec.options
        return Rounds(
            n=setting.n,
            batch_size=setting.n,
            passes=options["iterations"] + 1,
            workers=1,
            average="none",
            shuffle="none",
            step=Step("exact"),
            penalty=setting.penalty,
            steps=options["inner_iterations"],
            width=setting.width,
            measures=True,
            reads_columns=True,
            distinct=True,
        )

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        spec, clip = setting.spec, setting.clip
        assert spec.epsilon is not None
        blocks, root = spec.options["iterations"], math.sqrt(spec.options["inner_iterations"])
        sums = Sums(touched=blocks, width=spec.options["inner_iterations"], reach=clip * root)
        sensitivity = 2 * clip * root * (1 + 1e-12)
        return sensitivity, calibrate_sums(sums, sensitivity, spec.epsilon, spec.delta, Gaussians(blocks))

    def _extra(self, setting: Setting, noise: Noise) -> dict[str, Any]:
        return {
            "curvature": setting.loss.curvature(setting.param),
            "margin_label": 1 if setting.loss.classification else 0,
            "inner_iterations": setting.spec.options["inner_iterations"],
        }

    def notes(self, spec: Spec, n: int) -> list[str]:
        return [*super().notes(spec, n), "the noise does not shrink with the number of rows: dpcd's does"]
