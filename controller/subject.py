"""The database under audit: tables of our own, trainings that never happened, and what is wrong with what they show."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import sqlalchemy
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from bismarck_dp import attacks, recordplay
from bismarck_dp.accounting import Event, epsilon_of
from bismarck_dp.losses import Array
from bismarck_dp.neighbours import Pair, label_range
from bismarck_dp.plan import Plan
from bismarck_dp.solvers import SOLVERS

from .loaders import quote_ident

if TYPE_CHECKING:
    from .database import Database

SEEDS = (1, 2, 3)
"""Orders in which every pair is played through the server."""

NOISE_TRIALS = 200
NOISE_LEVEL = 1e-4
"""Right noise is taken for wrong once in so many audits."""

AT_ONCE = 40
"""Packed tables that one transaction makes; each holds a lock until its end."""

OWN_COLUMNS = {"id", "name", "created", "seconds", "weights", "intercept", "support", "source", "owner"}
"""Columns of a model that may differ: the release itself, and what names or times a training."""


def claimed(plan: Plan) -> float:
    """The epsilon of a private plan."""
    assert plan.spec.epsilon is not None
    return plan.spec.epsilon


@contextmanager
def session(database: Database) -> Iterator[Connection]:
    """A connection of its own; its temporary tables are dropped at the end, or by the server when it goes."""
    from .database import translated

    engine = sqlalchemy.create_engine(database.engine.url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            yield connection
            with connection.begin():
                connection.exec_driver_sql("DISCARD TEMP")
    except DBAPIError as error:
        raise translated(error) from error
    finally:
        engine.dispose()


class Subject:
    """The database under audit: trains a plan on a table of ours, and takes every training back."""

    def __init__(self, connection: Connection, plan: Plan, options: dict[str, Any]) -> None:
        self.connection = connection
        self.plan = plan
        self.options = options
        self.name = uuid.uuid4().hex
        with connection.begin():
            schema = connection.exec_driver_sql(
                "SELECT n.nspname FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n"
                " ON n.oid OPERATOR(pg_catalog.=) e.extnamespace"
                " WHERE e.extname OPERATOR(pg_catalog.=) 'bismarck_dp'"
            ).scalar_one()
        self.dp_train = f"{quote_ident(schema)}.dp_train".replace("%", "%%")

    @property
    def perturbs_output(self) -> bool:
        """Whether noise is added to the model alone, so that a fixed seed cancels it."""
        return SOLVERS[self.plan.spec.algorithm].perturbs == "output"

    def load(self, table: str, rows: Array, labels: Array) -> str:
        """A temporary table; a label that is not a number is NULL, a feature NaN."""
        values = [{"y": None if math.isnan(y) else y, "x": x} for x, y in zip(rows.tolist(), labels.tolist())]
        with self._transaction():
            self._run(f"DROP TABLE IF EXISTS pg_temp.{table}")
            self._run(f"CREATE TEMP TABLE {table} (y pg_catalog.float8, x pg_catalog.float8[])")
            self._run(f"INSERT INTO pg_temp.{table} VALUES (%(y)s, %(x)s::pg_catalog.float8[])", values)
        return f"pg_temp.{table}"

    def load_pair(self, pair: Pair) -> tuple[str, str]:
        first, second = pair.tables()
        return self.load("bismarck_dp_first", *first), self.load("bismarck_dp_second", *second)

    @contextmanager
    def _transaction(self, keep: bool = True) -> Iterator[None]:
        """One transaction. It sees PostgreSQL's own names only: nobody's operator runs with the auditor's rights."""
        transaction = self.connection.begin()
        try:
            self._run("SET LOCAL search_path = pg_catalog, pg_temp")
            self._run("SET LOCAL client_min_messages = error")
            yield
            if keep:
                transaction.commit()
        finally:
            if transaction.is_active:
                transaction.rollback()

    def _run(self, statement: str, values: Any = None) -> Any:
        return self.connection.exec_driver_sql(statement, values)

    def train(self, table: str, times: int = 1, seed: int | None = None) -> list[dict[str, Any]]:
        """The rows of as many models, from one transaction that never happened."""
        spec = self.plan.spec
        values = {
            "names": [f"audit {self.name} {number}" for number in range(times)],
            "table": table,
            "epsilon": spec.epsilon,
            "delta": spec.delta,
            "algorithm": spec.algorithm,
            "loss": spec.loss,
            "options": json.dumps(self.options if seed is None else {**self.options, "seed": seed}),
        }
        with self._transaction(keep=False):
            rows = self._run(
                "SELECT pg_catalog.to_jsonb(m)::pg_catalog.text"
                " FROM pg_catalog.unnest(%(names)s::pg_catalog.text[]) AS names (model),"
                f" LATERAL {self.dp_train}(source => %(table)s::pg_catalog.regclass, model => names.model,"
                " label => 'y', features => '{x}', epsilon => %(epsilon)s, delta => %(delta)s,"
                " algorithm => %(algorithm)s, loss => %(loss)s, options => %(options)s::pg_catalog.jsonb) AS m",
                values,
            )
            return [json.loads(row[0]) for row in rows]

    def releases(self, table: str, times: int, done: Callable[[int], None] = lambda count: None) -> Array:
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
            outcomes = [self._outcome(table, seed) for table in tables]
            failed = [outcome for outcome in outcomes if isinstance(outcome, DBAPIError)]
            if len(failed) == len(outcomes):
                raise failed[0]
            if failed:
                reasons.append(f"a training fails on one of two neighbouring tables (pair: {pair.name})")
                continue
            first, second = (outcome for outcome in outcomes if isinstance(outcome, dict))
            apart = float(np.linalg.norm(released(first) - released(second)))
            farthest = max(farthest, apart)
            reasons += [f"{reason} (pair: {pair.name})" for reason in self._wrong(first, second, apart)]
        return farthest, reasons

    def _outcome(self, table: str, seed: int | None = None) -> dict[str, Any] | DBAPIError:
        try:
            return self.train(table, seed=seed)[0]
        except DBAPIError as error:
            return error

    def _wrong(self, first: dict[str, Any], second: dict[str, Any], apart: float) -> Iterator[str]:
        """What two models of neighbouring tables, trained under one seed, show that they should not."""
        for column in first:
            if column not in OWN_COLUMNS and first[column] != second[column]:
                yield f"column {column} tells neighbouring tables apart"
        right = self.plan.released_sensitivity
        rounding = first["plan"]["grid"] * math.sqrt(self.plan.width) if self.perturbs_output else 0.0
        declared = first["sensitivity"] + rounding
        if self.perturbs_output and not apart <= declared:
            yield f"models are {apart:.3g} apart, the database declares a sensitivity of {declared:.3g}"
        if not declared >= right * (1 - 1e-9):
            yield f"the database declares a sensitivity of {declared:.3g}, {right:.3g} is right"

    def wrong_noise(self) -> list[str]:
        """What is wrong with the claim of a model, and with its noise: rows without a number leave the noise alone."""
        plan = self.plan
        rows = np.full((plan.n, plan.d), np.nan)
        table = self.load("bismarck_dp_noise", rows, np.full(plan.n, label_range(plan)[1]))
        model = self._outcome(table)
        if isinstance(model, DBAPIError):
            return ["a training fails on a table of rows that are not numbers"]
        event = Event.from_json(model["event"])
        cost = epsilon_of(event, plan.spec.delta, plan.spec.options["adjacency"]).epsilon
        reasons = []
        if not cost <= claimed(plan) * (1 + 1e-6):
            reasons.append(f"the stored event costs epsilon {cost:.3g}, the claim is {claimed(plan):g}")
        if not model["noise_scale"] >= plan.noise.scale * (1 - 1e-9):
            reasons.append(
                f"the database declares noise of {model['noise_scale']:.3g}, {plan.noise.scale:.3g} is right"
            )
        if self._noise_level(self.releases(table, NOISE_TRIALS), model) < NOISE_LEVEL:
            reasons.append(f"the noise does not have the declared distribution, {model['mechanism']}")
        return reasons

    def _noise_level(self, noise: Array, model: dict[str, Any]) -> float:
        """The p-value of releases without rows: against the declared noise, or what a run makes of it."""
        if self.perturbs_output:
            return attacks.noise_level(noise, model["mechanism"], model["noise_scale"])
        plays = recordplay.affordable(self.plan, 10 * NOISE_TRIALS)
        return attacks.same_law_level(noise, recordplay.noise_alone(self.plan, np.random.default_rng(), plays))


def released(model: dict[str, Any]) -> Array:
    return np.array([*model["weights"], *model["intercept"]], dtype=np.float64)
