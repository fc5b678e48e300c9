"""Private tuning by random stopping: the plans of trials of which only the best leaves, and what it costs.

A trial picks one of the specs, each with the same probability, trains its plan on n rows, and scores the model by a
noisy number of errors on other rows. K trials are made (`repeats.Stopping`), and the model with the best noisy score
leaves, with that score or without it.

Claim: what leaves is (epsilon, delta)-DP for the epsilon and delta of the specs, which is that of all trials together.

Proof. A row is used for training or for scores, in all trials the same. If neighbours differ in a row of training, then
scores have the same law given the models; if in another row, then models have the same law, and scores differ by one
error. So a trial's Renyi divergence is the largest of its plans' and its score's, order by order: the mixture of the
specs has the same weights on both sides (joint quasi-convexity). Theorem 2 (`repeats`) does the rest.

delta = 0. Every plan and the score is e-DP as delivered, for e = epsilon / (2 + shape): arithmetic is paid for within.

delta > 0. What is delivered has to be within the curve of its event (`renyi`).
  bolton     releases a discrete Gaussian, which is exactly rho-zCDP with rho = (released sensitivity)^2 / (2 scale^2),
             in any number of coordinates (Canonne, Kamath and Steinke 2020, Theorem 14); its event says no less.
  score      likewise; the event is that rho.
  sums       are computed. With real noise their divergences are those of the event at most. The law R' of a computed
             run satisfies R'(S) <= e^tau R(S) + b and R(S) <= e^tau R'(S) + b for all sets S, where R is the law with
             real noise (and no larger samples than were planned for), tau is the noise's `excess` and b = 3 e^-t
             (`mechanisms.calibrate_sums`).

Lemma: there is a law R" with e^-tau R <= R" <= e^tau R everywhere, and at most b away from R' in total variation.
Proof: cut the density of R' off at e^tau R and fill it up to e^-tau R. That takes away a mass x <= b and adds y <= b.
If the total is now above 1, move it towards e^-tau R, whose mass is below 1, until it is 1; if below, towards e^tau R.
This moves a mass |x - y| and leaves the bounds. In all, half the L1 distance is (x + y + |x - y|) / 2 <= b. QED

So trials with R" have the divergences D_a(R" | R") <= D_a(R | R) + (2 a - 1) / (a - 1) tau, from the integral of
R"^a R"^(1 - a); Theorem 2 holds for these, with nothing left over, however large K is. And K trials as computed are at
most E[K] b in total variation from K trials with R". Such a distance c costs c (1 + e^epsilon) of delta (there and
back again), and so does what K is cut off at, P(K > most). Both are taken off delta before the rest is solved for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .accounting import (
    Event,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    ParallelDpEvent,
    RepeatAndSelectDpEvent,
    ZCDpEvent,
    gaussian_epsilon,
    turn,
)
from .errors import BismarckError
from .mechanisms import log1p_exp
from .plan import Plan
from .renyi import Curve, curve_of, largest
from .repeats import Stopping
from .sensitivity import Pulse
from .solvers import make_plan
from .spec import SMALLEST_DELTA, Spec

__all__ = ["Budget", "ScoreNoise", "Stopping", "Trials", "plan_trials"]

MOST_SIGMA = 2**20
"""of the exact discrete Gaussian (udf/kernels/noise.c)"""

FINE = 2**15
"""The scale of a score's noise is at least so many steps, if that takes at most MOST_UNIT for an error."""

MOST_UNIT = 2**20

MOST_SUM = 2**62
"""Sums of errors are 64-bit numbers."""

MOST_EPSILON = 100.0
"""with a delta: e^epsilon times what goes wrong has to be small"""

SPARED = 100.0
"""A trial's delta is the total over E[K] e^epsilon, times this: what computed noise costs of delta is then small."""

CUT = 1e-6
"""the share of delta that cutting K off may cost"""

TIGHT, AIM = 2e-3, 1e-3
"""The total is at most this share below epsilon; the search aims between."""

MOST_TRIES = 12


@dataclass(frozen=True)
class ScoreNoise:
    """Noise of a number of errors: it is counted in steps, `unit` of them for an error, and gets a discrete Laplace or
    Gaussian number of this scale in steps.
    """

    mechanism: str
    scale: int
    unit: int


class Budget(NamedTuple):
    """What the plan of one trial is made for."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Trials:
    plans: tuple[Plan, ...]
    """one for each spec, whose epsilon and delta are those of a single trial"""
    score: ScoreNoise
    event: Event
    """all of it"""
    base: Budget
    most: int
    """K may be cut off here for delta > 0, which is paid for; for delta = 0 it is what no run ever reaches (but for
    probability 2^-200), and K must not be cut off
    """
    stopping: Stopping
    score_event: Event
    """of one score"""
    cut: float
    """the probability that K is cut off, or more"""


def plan_trials(
    specs: Sequence[Spec],
    n: int,
    d: int,
    held_out: int,
    stopping: Stopping,
    pulse: Pulse = lambda: None,
    sensitivity: int = 1,
) -> Trials:
    """Plans for the trials of specs that carry the epsilon and delta of all trials together.

    A row of the `held_out` rows moves the number of errors by at most `sensitivity`, under either adjacency. Errors of
    a regression, each cut to 1, are rounded to whole steps of 1 / unit row by row: the sensitivity is 1 then, too.
    """
    epsilon, delta, adjacency = _budget(specs)
    if held_out < 1:
        raise BismarckError("there are no rows to score models on", "hold out at least one row")
    if not 1 <= sensitivity <= MOST_SIGMA:
        raise BismarckError(f"sensitivity {sensitivity} is out of range", f"it must be from 1 to {MOST_SIGMA}")
    if delta == 0:
        base = Budget(stopping.base_pure(epsilon), 0.0)
        plans = _plans(specs, n, d, base, pulse)
        score = _score("laplace", sensitivity / base.epsilon, sensitivity, held_out)
        cost: Event = LaplaceDpEvent(score.scale / (score.unit * sensitivity))
        most, cut = stopping.most(2.0**-200), 0.0
    else:
        search = Search(specs, n, d, stopping, epsilon, delta, adjacency, pulse)
        base, plans = search.run()
        score = _score("gaussian", sensitivity / math.sqrt(2 * search.score_rho(plans)), sensitivity, held_out)
        cost = ZCDpEvent((score.unit * sensitivity / score.scale) ** 2 / 2 * (1 + 2.0**-50))
        most, cut = search.most, search.cut
    private = all(plan.private for plan in plans)
    branches = tuple(dict.fromkeys([*(plan.event for plan in plans), cost]))
    event = RepeatAndSelectDpEvent(ParallelDpEvent(branches), stopping.mean, stopping.shape)
    return Trials(plans, score, event if private else NonPrivateDpEvent(), base, most, stopping, cost, cut)


def _budget(specs: Sequence[Spec]) -> tuple[float, float, str]:
    """What all specs agree on."""
    if not specs:
        raise BismarckError("there are no specs to choose from", "give at least one")
    for spec in specs:
        if spec.epsilon is None:
            raise BismarckError(
                f'algorithm "{spec.algorithm}" is not private, and random stopping is about privacy',
                "use private algorithms only, or try all of these and take the best",
            )
    for name, values in (
        ("epsilon", {spec.epsilon for spec in specs}),
        ("delta", {spec.delta for spec in specs}),
        ("adjacency", {spec.options["adjacency"] for spec in specs}),
    ):
        if len(values) > 1:
            raise BismarckError(f"specs differ in {name}", f"all trials share one {name}, that of all of them together")
    first = specs[0]
    assert first.epsilon is not None
    return first.epsilon, first.delta, first.options["adjacency"]


def _plans(specs: Sequence[Spec], n: int, d: int, base: Budget, pulse: Pulse) -> tuple[Plan, ...]:
    try:
        every = [replace(spec, epsilon=base.epsilon, delta=base.delta) for spec in specs]
        return tuple(make_plan(spec, n, d, pulse) for spec in every)
    except BismarckError as error:
        share = f"epsilon {base.epsilon:.3g}" + (f" and delta {base.delta:.3g}" if base.delta else "")
        raise BismarckError(f"a trial gets {share}: {error.message}", error.hint, error.sqlstate) from None


def _score(mechanism: str, scale: float, sensitivity: int, held_out: int) -> ScoreNoise:
    """Noise of this scale in errors: steps are fine enough for it, and as few as that takes."""
    unit = 1
    while scale * unit < FINE and unit < MOST_UNIT and held_out * sensitivity * unit * 2 <= MOST_SUM:
        unit *= 2
    steps = math.ceil(scale * unit * (1 + 1e-12))
    if held_out * sensitivity * unit > MOST_SUM or steps > (MOST_SIGMA if mechanism == "gaussian" else 2**50):
        raise BismarckError(
            "epsilon asks for more noise on scores than there are numbers for",
            "use a larger epsilon, a smaller mean, or fewer held-out rows",
        )
    return ScoreNoise(mechanism, steps, unit)


def computed(curve: Curve, excess: float) -> Curve:
    """The curve of R", whose probabilities are within factors exp(+-excess) of those with this curve."""
    orders = np.array(curve.orders)
    apart = 2 + 1 / (orders - 1)  # (2 a - 1) / (a - 1)
    return Curve(curve.orders, np.asarray(curve.divergences + apart * excess))


@dataclass(frozen=True)
class Search:
    """The largest epsilon of a trial whose total is that of the specs, for delta > 0."""

    specs: Sequence[Spec]
    n: int
    d: int
    stopping: Stopping
    epsilon: float
    delta: float
    adjacency: str
    pulse: Pulse

    @property
    def cut(self) -> float:
        return CUT * self.delta * math.exp(-log1p_exp(self.epsilon))

    @property
    def most(self) -> int:
        return self.stopping.most(self.cut)

    def run(self) -> tuple[Budget, tuple[Plan, ...]]:
        """Totals grow with a trial's epsilon, nearly in proportion: secants in logarithms, and the best safe point."""
        if self.epsilon > MOST_EPSILON:
            raise BismarckError(
                f"epsilon {self.epsilon:g} is too large for random stopping with a delta",
                f"use at most {MOST_EPSILON:g}",
            )
        small = self.delta * min(1.0, SPARED / self.stopping.mean * math.exp(-self.epsilon))
        if small < SMALLEST_DELTA:
            raise BismarckError(f"delta {self.delta:g} is too small for random stopping", "use a larger delta")
        point, slope = math.log(self._guess(small)), 1.0
        found: tuple[Budget, tuple[Plan, ...]] | None = None
        low, high = -math.inf, math.inf
        last: tuple[float, float] | None = None
        for _ in range(MOST_TRIES):
            self.pulse()
            base = Budget(math.exp(point), small)
            plans = _plans(self.specs, self.n, self.d, base, self.pulse)
            total = self.total(plans)
            excess = math.log(min(max(total, 1e-3 * self.epsilon), 1e3 * self.epsilon) / self.epsilon)
            if last and point != last[0]:
                slope = min(max((excess - last[1]) / (point - last[0]), 0.2), 5.0)
            if total <= self.epsilon:
                low, found = point, (base, plans)
            else:
                high = point
            if -TIGHT <= excess <= 0 or high - low < AIM / 10:
                break
            last, point = (point, excess), point - min(max((excess + AIM) / slope, -1.0), 1.0)
            if not low < point < high:
                point = (low + high) / 2
        if found is None:
            raise BismarckError(
                f"epsilon {self.epsilon:g} and delta {self.delta:g} leave no noise that trials could be made with",
                "use a larger epsilon, fewer updates, fewer features, or a smaller mean",
            )
        return found

    def _guess(self, small: float) -> float:
        """That of a Gaussian release."""
        rho = turn(lambda rho: self.stopping.total(Curve.zcdp(rho), self.delta) <= self.epsilon)[0]
        return max(gaussian_epsilon(1 / math.sqrt(2 * max(rho, 1e-60)), small), 1e-3 * self.epsilon)

    def curve(self, plans: tuple[Plan, ...]) -> Curve:
        """The largest of the plans, as delivered."""
        return largest(computed(curve_of(plan.noise.event, self.adjacency), plan.noise.excess) for plan in plans)

    def left(self, plans: tuple[Plan, ...]) -> float:
        """Delta without what computed noise and the end of K cost."""
        rarity = min(plan.noise.rarity for plan in plans)
        often = 3 * self.stopping.mean * math.exp(log1p_exp(self.epsilon) - rarity)
        return self.delta * (1 - 2 * CUT) - often

    def total(self, plans: tuple[Plan, ...], rho: float = 0.0) -> float:
        """The epsilon of all trials, with scores that are rho-zCDP."""
        left = self.left(plans)
        if left <= 0:
            return math.inf
        return self.stopping.total(largest([self.curve(plans), Curve.zcdp(rho)]), left)

    def score_rho(self, plans: tuple[Plan, ...]) -> float:
        """What scores may cost in the shadow of the plans: the most that leaves the total at epsilon."""
        left, curve = self.left(plans), self.curve(plans)
        total = self.stopping.total
        return turn(lambda rho: total(largest([curve, Curve.zcdp(rho)]), left) <= self.epsilon)[0]
