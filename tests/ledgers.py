"""A protected table, someone who may train on it, and what its ledger says; and the rules of budget.py once more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import kernels
import psycopg2
from conftest import PATIENCE, two_classes

from bismarck_dp.controller.database import Database, embedded
from bismarck_dp.controller.embedded import DATABASE

LONG = '{"lambda": 0.01, "epochs": 1000000, "batch_size": 1}'
"""A training that somebody will have to stop."""


ENTRY: dict[str, Any] = {
    "source": "public.rows", "verb": "train", "model": "m", "who": "ann", "login": "ann",
    "spec": {"loss": "logistic", "label": "y", "options": {"lambda": 0.01, "classes": [-1.0, 1.0]}, "features": ["x"],
             "algorithm": "bolton"},
    "event": {"name": "LaplaceDpEvent", "noise_multiplier": 10.0},
    "rho": "0.0049", "slack": "0", "epsilon": "0.1", "delta": "0",
}  # fmt: skip


@dataclass
class House:
    """A protected table of a server, and an analyst who is somebody else."""

    db: Database
    table: str
    analyst: str
    database: str = DATABASE
    opened: list[Any] = field(default_factory=list)

    def connect(self, user: str = "") -> Any:
        """A connection of one's own, each statement a transaction, unless it says BEGIN."""
        query = self.db.engine.url.query
        connection = psycopg2.connect(
            host=query["host"], port=query["port"], user=user or self.analyst, dbname=self.database
        )
        connection.autocommit = True
        self.opened.append(connection)
        return connection

    def close(self) -> None:
        for connection in self.opened:
            connection.close()

    def ask(self, statement: str, *values: Any, user: str = "postgres") -> list[Any]:
        connection = self.connect(user)
        try:
            return answer(connection, statement, *values)
        finally:
            connection.close()

    def protect(self, epsilon: float, delta: float = 0.0, options: str = "{}") -> None:
        self.ask(
            'SELECT dp_protect(%s, %s, %s, \'{"classes": {"y": [-1, 1]}, "lengths": null}\' || %s::jsonb)',
            *(self.table, epsilon, delta, options),
        )

    def train_sql(self, model: str, epsilon: float = 0.1, options: str = '{"lambda": 0.01}', more: str = "") -> str:
        return (
            f"dp_train('{self.table}', '{model}', 'y', '{{x}}', {epsilon!r}::float8, options => '{options}'::jsonb"
            f"{more})"
        )

    def train(self, model: str, epsilon: float = 0.1, options: str = '{"lambda": 0.01}', more: str = "") -> int:
        """As the analyst; returns the entry that paid."""
        text = f"SELECT ledger_id FROM {self.train_sql(model, epsilon, options, more)}"
        return int(self.ask(text, user=self.analyst)[0][0])

    def request(self, **changes: Any) -> str:
        """What the controller sends to the ledger for a small release; amounts are decimal numbers, as text."""
        (found,) = self.ask(
            "SELECT jsonb_build_object('protected', id, 'table', source::oid::text, 'adjacency', adjacency,"
            " 'privacy_unit', privacy_unit, 'unit_rows', unit_rows, 'renyi_order', renyi_order,"
            " 'terms', jsonb_build_object('analysts', analysts, 'columns', columns))"
            " FROM bismarck_dp.protected WHERE source = %s::regclass",
            self.table,
        )[0]
        return json.dumps({**ENTRY, **found, **changes})

    def debit(self, **changes: Any) -> str:
        """Past the controller, how the ledger takes it."""
        return str(self.ask("SELECT outcome FROM bismarck_dp.debit(%s)", self.request(**changes))[0][0])

    def paid(self) -> list[tuple[Any, ...]]:
        """What was paid on this table, oldest first."""
        return self.ask(
            "SELECT e.id, e.who, e.verb, e.model, e.rho, e.slack, e.epsilon, e.delta FROM bismarck_dp.ledger AS e"
            " WHERE e.outcome = 'paid' AND e.table::oid = %s::regclass ORDER BY e.id",
            self.table,
        )

    def spent(self, user: str = "postgres") -> tuple[float, float, int]:
        """Epsilon, delta and releases, as dp_budget says."""
        found = self.ask("SELECT epsilon_spent, delta_spent, releases FROM dp_budget(%s)", self.table, user=user)
        return tuple(found[0])  # type: ignore[return-value]

    def wait_for_entries(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.paid()) < number:
            assert time.monotonic() < deadline, "no debit was made"
            time.sleep(0.01)


def answer(connection: Any, statement: str, *values: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall()) if cursor.description else []


def make_house(db: Database, table: str, analyst: str, rows: int = 100) -> House:
    db.load(table, *two_classes(rows, 3))
    return House(db, table, analyst)


@contextmanager
def own_server(**how: Any) -> Iterator[Database]:
    """A durable server for what crashes, with someone to train, named ann."""
    home = tempfile.mkdtemp(prefix="bdp_ledger_", dir="/tmp")
    os.chmod(home, 0o755)
    try:
        with embedded(os.path.join(home, "cluster"), extension=kernels.extension(), **how) as db:
            with db.engine.begin() as connection:
                connection.exec_driver_sql("CREATE ROLE ann LOGIN IN ROLE dp_analyst")
            yield db
    finally:
        shutil.rmtree(home, ignore_errors=True)


def crash(house: House, pid: int) -> None:
    """Kills a process of the server, and waits until everyone is thrown out and the server answers again."""
    witness = house.connect()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    with suppress(psycopg2.Error):
        while time.monotonic() < deadline:
            answer(witness, "SELECT 1")
            time.sleep(0.01)
    witness.close()
    wait_until_up(house)


def wait_until_up(house: House) -> None:
    """After a crash: until the server answers again."""
    house.db.engine.dispose()
    deadline = time.monotonic() + 60
    while True:
        with suppress(psycopg2.Error):
            house.ask("SELECT 1")
            return
        assert time.monotonic() < deadline, "the server did not come back"
        time.sleep(0.05)


LEFT = """
    SELECT relname::text FROM pg_class WHERE relnamespace = 'bismarck_dp'::regnamespace AND relname LIKE 'run\\_%'
    UNION ALL SELECT backend_type FROM pg_stat_activity WHERE backend_type LIKE 'bismarck%'
"""


def check_nothing_is_left(house: House) -> None:
    """No packed table, and no worker, once those who are going have gone."""
    deadline = time.monotonic() + PATIENCE
    while (left := house.ask(LEFT)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


# ---- the rules, in fractions ----


Amounts = Sequence[Any]
"""rho (None: not known), slack, epsilon and delta of a release."""


@dataclass(frozen=True)
class Bounds:
    epsilon: Fraction
    delta: Fraction
    summed_delta: Fraction
    rho: Fraction | None
    slack: Fraction | None

    @classmethod
    def of(cls, house: House, connection: Any = None) -> Bounds:
        """As the connection sees them."""
        text = (
            "SELECT epsilon, delta, summed_delta, rho, slack FROM bismarck_dp.protected"
            " WHERE source = %s::regclass AND active"
        )
        found = answer(connection, text, house.table) if connection else house.ask(text, house.table)
        return cls(*(None if bound is None else Fraction(bound) for bound in found[0]))  # type: ignore[arg-type]


def fits(bounds: Bounds, paid: Sequence[Amounts]) -> bool:
    """Whether the last of these releases is paid for, those before it being so."""
    rho, slack, epsilon, delta = (sum((Fraction(one[i] or 0) for one in paid), Fraction(0)) for i in range(4))
    known = all(one[0] is not None for one in paid)
    if known and bounds.rho is not None and bounds.slack is not None and rho <= bounds.rho and slack <= bounds.slack:
        return True
    summed = bounds.delta if len(paid) == 1 else bounds.summed_delta
    return epsilon <= bounds.epsilon and delta <= summed


def models(house: House) -> list[str]:
    return [row[0] for row in house.ask("SELECT name FROM bismarck_dp.model ORDER BY id")]


@contextmanager
def durable_house(db: Database, test: str) -> Iterator[House]:
    """A table of a server of one's own with a budget of 1, for one test."""
    found = make_house(db, "".join(c if c.isalnum() else "_" for c in test[5:]), "ann")
    found.protect(1.0)
    yield found
    found.close()
    wait_until_up(found)
    check_nothing_is_left(found)
    found.ask("DELETE FROM bismarck_dp.model")
