"""The audit: attacks an installed database through dp_train, with a user's own spec, on neighbouring tables of our own.

Three questions, each of which can only show that a claim is false, never that it is true:

    record-play   with a known seed the noise is the same, so two releases differ by what the rows make of them: is that
                  ever more than the declared sensitivity?
    shape         does anything in the model's row but the weights differ between neighbours?
    attack        with the noise on, does a test tell the tables apart more often than epsilon and delta allow?

The tables are temporary, every training is rolled back, and so nothing is left behind.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from bismarck_dp import attacks, recordplay
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import Array
from bismarck_dp.neighbours import Pair, pairs
from bismarck_dp.plan import Plan
from bismarck_dp.solvers import SOLVERS, make_plan
from bismarck_dp.spec import Spec

from .loaders import quote_ident

if TYPE_CHECKING:
    from .database import Database
    from .train import Progress

ROWS = 100
FEATURES = 2
TRIALS = 1000
FEWEST_TRIALS = 100
FEWEST_ROWS = 20
"""With fewer, one odd label of a pair could be too many for the column to count as binary."""

SEEDS = (1, 2, 3)
"""Orders in which every pair is played through the server."""

AT_ONCE = 40
"""Packed tables that one transaction makes; each holds a lock until its end."""

OWN_COLUMNS = {"id", "name", "created", "seconds", "weights", "intercept", "source", "owner"}
"""Columns of a model that may differ: the release itself, and what names or times a training."""


@dataclass(frozen=True)
class Audit:
    """What was claimed, what was found, and for whom to check: every number of the attack."""

    algorithm: str
    loss: str
    mechanism: str
    adjacency: str
    n: int
    d: int
    epsilon: float
    delta: float
    empirical_epsilon: float
    sensitivity: float
    measured_sensitivity: float
    trials: int
    confidence: float
    pair: str
    test: str
    verdict: str
    reasons: list[str]
    seconds: float
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
    plan = _plan(Spec.create(algorithm, loss, epsilon, delta, options), n, d)
    if trials < FEWEST_TRIALS:
        raise BismarckError(f"{trials} trials are too few", f"use at least {FEWEST_TRIALS}")
    if n < FEWEST_ROWS:
        raise BismarckError(f"{n} rows are too few", f"use at least {FEWEST_ROWS}")
    rng = np.random.default_rng()
    tried = [recordplay.worst(plan, rng)[0], *pairs(plan, rng)]
    target = max((_Target.of(plan, pair, rng) for pair in tried), key=lambda target: target.distance)
    with _session(database) as session:
        subject = Subject(session, plan, options)
        played = [subject.play(pair) for pair in tried]
        finding, curve = _attack(subject, target, trials, progress)
    measured = max(distance for distance, _ in played)
    reasons = [reason for _, found in played for reason in found]
    if finding.epsilon > epsilon:
        reasons.append(f"an attacker gets epsilon {finding.epsilon:.3g}, more than the claimed {epsilon:g}")
    return Audit(
        algorithm=algorithm,
        loss=loss,
        mechanism=plan.noise.mechanism,
        adjacency=plan.spec.options["adjacency"],
        n=n,
        d=d,
        epsilon=float(epsilon),
        delta=float(delta),
        empirical_epsilon=finding.epsilon,
        sensitivity=plan.released_sensitivity,
        measured_sensitivity=measured,
        trials=trials,
        confidence=attacks.CONFIDENCE,
        pair=target.pair.name,
        test=finding.test,
        verdict="fail" if reasons else "pass",
        reasons=list(dict.fromkeys(reasons)),
        seconds=time.monotonic() - started,
        false_positive_rates=curve[0].tolist(),
        false_negative_rates=curve[1].tolist(),
    )


def _plan(spec: Spec, n: int, d: int) -> Plan:
    if not SOLVERS[spec.algorithm].private:
        raise BismarckError(f'algorithm "{spec.algorithm}" claims no privacy', "audit a private algorithm")
    if spec.options["seed"] is not None:
        raise BismarckError("a run with a seed is not private", "leave out the option seed")
    return make_plan(spec, n, d)


@contextmanager
def _session(database: Database) -> Iterator[Connection]:
    """One connection, whose temporary tables go with it."""
    from .database import translated

    with database.engine.connect() as connection:
        try:
            yield connection
        except DBAPIError as error:
            raise translated(error) from error
        finally:
            connection.invalidate()


class Subject:
    """The database under audit: trains a plan on a table of ours, and takes every training back."""

    def __init__(self, connection: Connection, plan: Plan, options: dict[str, Any]) -> None:
        self.connection = connection
        self.plan = plan
        self.options = options
        with connection.begin():
            schema = connection.exec_driver_sql(
                "SELECT n.nspname FROM pg_catalog.pg_extension e"
                " JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'bismarck_dp'"
            ).scalar_one()
        self.dp_train = f"{quote_ident(schema)}.dp_train"

    def load(self, table: str, rows: Array, labels: Array) -> str:
        """A temporary table; what is not a number is stored as NULL."""
        values = [{"y": _or_null(y), "x": [_or_null(v) for v in x]} for x, y in zip(rows.tolist(), labels.tolist())]
        with self.connection.begin():
            self.connection.exec_driver_sql(f"DROP TABLE IF EXISTS pg_temp.{table}")
            self.connection.exec_driver_sql(f"CREATE TEMP TABLE {table} (y float8, x float8[])")
            self.connection.exec_driver_sql(f"INSERT INTO pg_temp.{table} VALUES (%(y)s, %(x)s::float8[])", values)
        return f"pg_temp.{table}"

    def load_pair(self, pair: Pair) -> tuple[str, str]:
        first, second = pair.tables()
        return self.load("bismarck_dp_first", *first), self.load("bismarck_dp_second", *second)

    def train(self, table: str, times: int = 1, seed: int | None = None) -> list[dict[str, Any]]:
        """The rows of as many models, from one transaction that never happened."""
        spec = self.plan.spec
        values = {
            "times": times,
            "table": table,
            "epsilon": spec.epsilon,
            "delta": spec.delta,
            "algorithm": spec.algorithm,
            "loss": spec.loss,
            "options": json.dumps(self.options if seed is None else {**self.options, "seed": seed}),
        }
        transaction = self.connection.begin()
        try:
            self.connection.exec_driver_sql("SET LOCAL client_min_messages = error")
            rows = self.connection.exec_driver_sql(
                f"SELECT pg_catalog.to_jsonb(m)::text FROM pg_catalog.generate_series(1, %(times)s) AS g,"
                f" LATERAL {self.dp_train}(source => %(table)s::pg_catalog.regclass, model => 'audit ' || g,"
                " label => 'y', features => '{x}', epsilon => %(epsilon)s, delta => %(delta)s,"
                " algorithm => %(algorithm)s, loss => %(loss)s, options => %(options)s::jsonb) AS m",
                values,
            )
            return [json.loads(row[0]) for row in rows]
        finally:
            transaction.rollback()

    def releases(self, table: str, times: int, done: Callable[[int], None]) -> Array:
        """Released vectors of as many trainings, a transaction for every few of them."""
        schedule = self.plan.schedule
        at_once = max(1, AT_ONCE // (schedule.workers * (2 if schedule.shuffle == "each_pass" else 1)))
        models: list[dict[str, Any]] = []
        while len(models) < times:
            models += self.train(table, min(at_once, times - len(models)))
            done(len(models))
        return np.array([released(model) for model in models])

    def play(self, pair: Pair) -> tuple[float, list[str]]:
        """How far apart neighbours end in the server under a seed, and what is wrong with that."""
        tables = self.load_pair(pair)
        farthest, reasons = 0.0, []
        for seed in SEEDS:
            first, second = (self.train(table, seed=seed)[0] for table in tables)
            farthest = max(farthest, float(np.linalg.norm(released(first) - released(second))))
            reasons += [
                f"column {column} tells neighbouring tables apart (pair: {pair.name})"
                for column in first
                if column not in OWN_COLUMNS and first[column] != second[column]
            ]
        declared = self.plan.released_sensitivity
        if farthest > declared:
            reasons.append(f"models are {farthest:.3g} apart, the declared sensitivity is {declared:.3g} ({pair.name})")
        return farthest, reasons


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value


def released(model: dict[str, Any]) -> Array:
    return np.array([*model["weights"], *model["intercept"]], dtype=np.float64)


@dataclass(frozen=True)
class _Target:
    """A pair to attack, and what each of its tables releases on average without noise: whoever knows the rows can
    compute that.
    """

    pair: Pair
    first: Array
    second: Array

    @classmethod
    def of(cls, plan: Plan, pair: Pair, rng: np.random.Generator) -> _Target:
        orders = [recordplay.orders(plan, rng) for _ in range(10)]
        first, second = (
            np.mean([recordplay.play(plan, table, order) for order in orders], axis=0) for table in pair.tables()
        )
        return cls(pair, first, second)

    @property
    def distance(self) -> float:
        return float(np.linalg.norm(self.first - self.second))


def _attack(
    subject: Subject, target: _Target, trials: int, progress: Progress | None
) -> tuple[attacks.Finding, tuple[Array, Array]]:
    delta, mechanism = subject.plan.spec.delta, subject.plan.noise.mechanism
    values = []
    for half, table in enumerate(subject.load_pair(target.pair)):
        releases = subject.releases(table, trials, _part(progress, half * trials, 2 * trials))
        values.append(dict(attacks.statistics(releases, target.first, target.second, mechanism)))
    finding = attacks.strongest(values[0], values[1], delta, mechanism == "gaussian")
    shown = finding.test.split(",")[0]
    return finding, attacks.trade_off(values[0][shown], values[1][shown])


def _part(progress: Progress | None, before: int, planned: int) -> Callable[[int], None]:
    """Progress of one table's trainings as progress of all."""
    return lambda done: None if progress is None else progress(before + done, planned)
