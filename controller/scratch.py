"""Trainings that leave nothing behind: rows that visit a database for one transaction, and a server for whoever has
none.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

from sqlalchemy.engine import Connection

from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import Array
from bismarck_dp.model import Model

from .database import Database, connect, embedded
from .demo import remove_home, temporary_home
from .loaders import quote_ident


def train_rows(database: Database, x: Array, y: Array, model: str | None, **spec: Any) -> Model:
    """Trains on rows held here. They are made, read and dropped in one transaction: no other session ever sees them,
    and whatever fails or is killed leaves nothing.
    """
    table = _fresh_name()
    with database.transaction() as connection:
        inside = _Inside(database, connection)
        inside.load(table, x, y, progress=False)
        trained = _train(inside, table, model, spec)
        connection.exec_driver_sql(f"DROP TABLE {quote_ident(table)}")
        return trained


def train_table(database: Database, source: str, model: str | None, **spec: Any) -> Model:
    """Trains on a table that is there; the model is registered only if it has a name."""
    with database.transaction() as connection:
        return _train(_Inside(database, connection), source, model, spec)


@contextmanager
def opened(database: Database | str | None) -> Iterator[Database]:
    """A database as it is, the one at a URL for as long as it is needed, or, without either, this process's own."""
    if database is None:
        yield shared()
    elif isinstance(database, str):
        with connect(database) as found:
            yield found
    elif isinstance(database, Database):
        yield database
    else:
        raise BismarckError(
            f"database is of type {type(database).__name__}", "it must be a Database, the URL of one, or None"
        )


_starting = threading.Lock()
_started: dict[int, Database] = {}
"""By process: a forked one must neither use nor stop the server of another."""


def shared() -> Database:
    """The one PostgreSQL of this process, started when first asked for. At exit it is stopped and its directory
    removed.
    """
    with _starting:
        if os.getpid() not in _started:
            home = temporary_home()
            # Unlike atexit, this also runs in workers of multiprocessing, and never in a fork of who asked for it. A
            # context manager would not do: a fork that ends closes all generators it was born with.
            Finalize(None, remove_home, (home,), exitpriority=-1)
            _started[os.getpid()] = embedded(str(home), durable=False)
        return _started[os.getpid()]


class _Inside(Database):
    """A database whose verbs all run in one transaction, which somebody else ends."""

    def __init__(self, database: Database, connection: Connection) -> None:
        super().__init__(database.engine, database.cluster)
        self.connection = connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        yield self.connection


def _train(inside: Database, source: str, model: str | None, spec: dict[str, Any]) -> Model:
    """The model is forgotten, not rolled back: what it spent stays spent."""
    trained = inside.train(source, model=_fresh_name() if model is None else model, **spec)
    if model is None:
        inside.forget(trained.name)
    return trained


def _fresh_name() -> str:
    """A name that nobody has taken, nor could on purpose."""
    return f"bismarck_dp_{secrets.token_hex(16)}"
