"""The audit: attacks an installed database through dp_train, with a user's own spec, on neighbouring tables of our own.

Five questions, each of which can only show that a claim is false, never that it is true:

    claim         does the database declare the sensitivity and the noise that this spec needs, and does the event that
                  it stores cost no more than the claimed epsilon?
    shape         does anything in a model's row but the weights differ between neighbours, or an error?
    record-play   with a known seed the noise is the same, so two releases differ by what the rows make of them: is that
                  ever more than the declared sensitivity? (Noise on the weights only. Noise on sums is rounded with
                  the sum, and steps are taken with it: there, sums are compared outside the server.)
    noise         rows that count for nothing leave the noise alone: has it the declared distribution, or what a run
                  makes of that?
    attack        with the noise on, does a test tell the tables apart more often than epsilon and delta allow?

The tables are temporary, every training is rolled back, and so nothing is left behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy.exc import DBAPIError

from bismarck_dp import attacks, recordplay
from bismarck_dp.accounting import GaussianDpEvent, leaves
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import Array
from bismarck_dp.neighbours import Pair, pairs
from bismarck_dp.plan import Plan
from bismarck_dp.scaling import measures
from bismarck_dp.solvers import SOLVERS, make_plan
from bismarck_dp.spec import Spec

from .subject import Subject, claimed, session

if TYPE_CHECKING:
    from .database import Database
    from .train import Progress

ROWS = 100
FEATURES = 2
TRIALS = 1000
FEWEST_TRIALS = 100
FEWEST_ROWS = 20
"""With fewer, one odd label of a pair could be too many for the column to count as binary."""


@dataclass(frozen=True)
class Audit:
    """What was claimed and what was found, with every number that a reader needs to check it."""

    algorithm: str
    loss: str
    mechanism: str
    adjacency: str
    n: int
    d: int
    epsilon: float
    delta: float
    empirical_epsilon: float
    provable_epsilon: float
    sensitivity: float
    measured_sensitivity: float
    trials: int
    confidence: float
    pair: str
    test: str
    verdict: str
    reasons: list[str]
    seconds: float
    first_row: list[float | None]
    second_row: list[float | None]
    false_positive_rates: list[float]
    false_negative_rates: list[float]

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"


def audit(
    database: Database,
    *,
    epsilon: float,
    delta: float = 0.0,
    algorithm: str = "bolton",
    loss: str = "logistic",
    n: int = ROWS,
    d: int = FEATURES,
    trials: int = TRIALS,
    progress: Progress | None = None,
    **options: Any,
) -> Audit:
    """Attacks a spec with `trials` trainings on each of two neighbouring tables of n rows and d features."""
    started = time.monotonic()
    _check("trials", trials, FEWEST_TRIALS)
    _check("n", n, FEWEST_ROWS)
    _check("d", d, 1)
    plan = _plan(Spec.create(algorithm, loss, epsilon, delta, options), n, d)
    rng = np.random.default_rng()
    worst, distance = recordplay.worst(plan, rng)
    tried = [worst, *pairs(plan, rng)]
    target = max((Target.of(plan, pair, rng) for pair in tried), key=lambda target: target.distance)
    with session(database) as connection:
        subject = Subject(connection, plan, options)
        played = [subject.play(pair) for pair in tried]
        reasons = [*subject.wrong_noise(), *(reason for _, found in played for reason in found)]
        try:
            finding, curve = _attack(subject, target, trials, progress)
        except DBAPIError:
            if not reasons:
                raise
            finding, curve = attacks.NOTHING, attacks.NO_CURVE
    if finding.epsilon > claimed(plan):
        reasons.append(f"an attacker gets epsilon {finding.epsilon:.3g}, more than the claimed {epsilon:g}")
    return Audit(
        algorithm=algorithm,
        loss=loss,
        mechanism=plan.noise.mechanism,
        adjacency=plan.spec.options["adjacency"],
        n=n,
        d=d,
        epsilon=claimed(plan),
        delta=plan.spec.delta,
        empirical_epsilon=finding.epsilon,
        provable_epsilon=attacks.ceiling(trials, plan.spec.delta),
        sensitivity=plan.released_sensitivity,
        # A seed cancels noise that is added to the weights. Noise on sums it does not: those are played outside.
        measured_sensitivity=max(apart for apart, _ in played) if plan.perturbs == "output" else distance,
        trials=trials,
        confidence=attacks.CONFIDENCE,
        pair=target.pair.name,
        test=finding.test,
        verdict="fail" if reasons else "pass",
        reasons=list(dict.fromkeys(reasons)),
        seconds=time.monotonic() - started,
        first_row=_plain_row(target.pair.first),
        second_row=_plain_row(target.pair.second),
        false_positive_rates=curve[0].tolist(),
        false_negative_rates=curve[1].tolist(),
    )


def _check(name: str, value: Any, fewest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BismarckError(f"{name} is {value!r}", f"it must be a whole number from {fewest}")
    if value < fewest:
        raise BismarckError(f"{name} is {value}", f"it must be at least {fewest}")


def _plan(spec: Spec, n: int, d: int) -> Plan:
    if not SOLVERS[spec.algorithm].private:
        raise BismarckError(f'algorithm "{spec.algorithm}" claims no privacy', "audit a private algorithm")
    if spec.options["seed"] is not None:
        raise BismarckError("a run with a seed is not private", "leave out the option seed")
    if spec.options["privacy_unit"] is not None:
        raise BismarckError("an audit makes tables whose rows are nobody's", "leave out privacy_unit")
    if measures(spec):
        raise BismarckError(
            "an audit holds noise fixed and compares models, and measured bounds have noise of their own",
            "give scale as numbers; tests/test_preparation.py attacks the bounds",
        )
    return make_plan(spec, n, d)


def _plain_row(version: tuple[Array, float]) -> list[float | None]:
    """Label and features of a row, None for what is not finite."""
    row, label = version
    return [value if math.isfinite(value) else None for value in (label, *row.tolist())]


@dataclass(frozen=True)
class Target:
    """A pair to attack, and what each of its tables releases on average without noise: whoever knows the rows can
    compute that.
    """

    pair: Pair
    first: Array
    second: Array

    @classmethod
    def of(cls, plan: Plan, pair: Pair, rng: np.random.Generator) -> Target:
        orders = [recordplay.orders(plan, rng) for _ in range(recordplay.affordable(plan, 10))]
        first, second = (
            np.mean([recordplay.released(plan, table, order) for order in orders], axis=0) for table in pair.tables()
        )
        return cls(pair, first, second)

    @property
    def distance(self) -> float:
        return float(np.linalg.norm(self.first - self.second))


def _attack(
    subject: Subject, target: Target, trials: int, progress: Progress | None
) -> tuple[attacks.Finding, tuple[Array, Array]]:
    plan = subject.plan
    values = []
    for half, table in enumerate(subject.load_pair(target.pair)):
        releases = subject.releases(table, trials, _part(progress, half * trials, 2 * trials))
        values.append(dict(attacks.statistics(releases, target.first, target.second, plan.noise.mechanism)))
    gaussian = all(isinstance(leaf, GaussianDpEvent) for leaf in leaves(plan.event))
    finding = attacks.strongest(values[0], values[1], plan.spec.delta, gaussian)
    shown = finding.test.split(",")[0]
    return finding, attacks.trade_off(values[0][shown], values[1][shown])


def _part(progress: Progress | None, before: int, planned: int) -> Callable[[int], None]:
    """Progress of one table's trainings as progress of all."""
    return lambda done: None if progress is None else progress(before + done, planned)
