"""One throw-away server for the session; every test gets a database connection and leaves nothing behind."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import kernels
import numpy as np
import pytest
import sqlalchemy
from protected import Secret

from bismarck_dp import BismarckError, explain
from bismarck_dp.controller.database import Database, connect, embedded
from bismarck_dp.solvers import SOLVERS


@pytest.fixture(scope="session")
def server() -> Iterator[Database]:
    home = Path(tempfile.mkdtemp(prefix="bdp_test_", dir="/tmp"))
    home.chmod(0o755)
    database = embedded(str(home / "cluster"), durable=False, extension=kernels.extension())
    try:
        yield database
    finally:
        database.close()
        shutil.rmtree(home, ignore_errors=True)


LEFTOVERS = """
    SELECT relname FROM pg_class WHERE relnamespace = 'bismarck_dp'::regnamespace AND relname LIKE 'run\\_%%'
    UNION ALL SELECT name FROM bismarck_dp.model
    UNION ALL SELECT pid::text FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid()
"""


@pytest.fixture
def db(server: Database) -> Iterator[Database]:
    """The server, with no model, packed table or running statement left when the test ends."""
    yield server
    with server.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM bismarck_dp.model")
    deadline = time.monotonic() + PATIENCE
    while (left := leftovers(server)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


PATIENCE = 10.0
"""Seconds that a busy machine may need to end a backend whose connection was closed."""


def leftovers(server: Database) -> list[str]:
    with server.engine.begin() as connection:
        return [row[0] for row in connection.exec_driver_sql(LEFTOVERS)]


@pytest.fixture
def analyst(db: Database) -> Iterator[Database]:
    """A connection as a role with no rights of its own."""
    assert db.cluster is not None
    with db.engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE analyst LOGIN")
        connection.exec_driver_sql("GRANT CREATE ON SCHEMA public TO analyst")
    other = connect(db.cluster.url(user="analyst"))
    yield other
    other.close()
    with db.engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY analyst CASCADE; DROP ROLE analyst")


@pytest.fixture
def allowed(analyst: Database, sql: Any) -> Database:
    """A member of dp_analyst, who owns nothing."""
    sql("GRANT dp_analyst TO analyst")
    return analyst


_numbers = count()


class Table:
    """A table of rows, and the arrays it was made from."""

    def __init__(self, db: Database, x: Any, y: Any, dtype: str = "float4") -> None:
        self.db = db
        self.name = f"t{next(_numbers)}"
        self.x, self.y = np.asarray(x), np.asarray(y)
        db.load(self.name, self.x, self.y, dtype=dtype)

    def drop(self) -> None:
        with self.db.engine.begin() as connection:
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {self.name} CASCADE")


@pytest.fixture
def table(db: Database) -> Iterator[Any]:
    """Makes tables that are dropped at the end of the test."""
    made: list[Table] = []

    def make(x: Any, y: Any, dtype: str = "float4") -> Table:
        made.append(Table(db, x, y, dtype))
        return made[-1]

    yield make
    for one in made:
        one.drop()


@pytest.fixture
def sql(db: Database) -> Any:
    """Runs one statement as the superuser and returns its rows."""

    def run(text: str, **values: Any) -> Any:
        with db.engine.begin() as connection:
            result = connection.execute(sqlalchemy.text(text), values)
            return result.mappings().all() if result.returns_rows else []

    return run


@pytest.fixture(scope="module")
def sessions(server: Database) -> Iterator[Secret]:
    """One session for each role of a module's attacks: importing NumPy in the server takes longer than an attack."""
    secret = Secret(server)
    yield secret
    secret.close()


@pytest.fixture
def secret(db: Database, sessions: Secret) -> Iterator[Secret]:
    """A protected table that `analyst` may train on and not read; see protected.py."""
    sessions.make()
    yield sessions
    sessions.clean()


def two_classes(n: int, d: int, seed: int = 0) -> tuple[Any, Any]:
    """Rows around the unit ball with a linear rule and some noise; labels -1/1."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, d)) / np.sqrt(d)).astype(np.float32)
    w = rng.normal(size=d)
    y = np.where(x @ w + 0.3 * rng.normal(size=n) > 0, 1.0, -1.0)
    return x, y


def needed(algorithm: str) -> dict[str, Any]:
    """Options without which an algorithm does nothing."""
    return {"lambda": 0.1} if SOLVERS[algorithm].remembers else {}


def plans(algorithm: str, epsilon: float, delta: float, adjacency: str) -> bool:
    """Whether an algorithm takes such a budget at all: some are for delta above 0 only."""
    spec = {"algorithm": algorithm, "epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    try:
        explain(n=100, d=2, **spec, **needed(algorithm))
    except BismarckError:
        return False
    return True
