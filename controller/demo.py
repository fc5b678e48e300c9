"""What `make demo` shows: private models beside an exact one, trained and judged by SQL alone."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy.engine import Connection, CursorResult

from bismarck_dp.losses import Array

from .database import Database, embedded
from .embedded import Cluster
from .loaders import load
from .train import Progress

FEATURES = 20
HELD_OUT = 5_000
STEM = "bismarck_dp_demo"
OPTIONS = {"lambda": 0.01, "epochs": 10, "batch_size": 50}
LARGE = {"lambda": 0.01, "epochs": 10, "batch_size": 500}
"""With noise on every sum, a larger batch has less of it for each row."""


@dataclass(frozen=True)
class Trial:
    algorithm: str
    loss: str
    epsilon: float | None
    delta: float = 0.0
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)


TRIALS = (
    Trial("sgd", "logistic", None),
    Trial("bolton", "logistic", 1.0),
    Trial("bolton", "logistic", 0.1),
    Trial("bolton", "logistic", 0.5, 1e-6),
    Trial("bolton", "logistic", 0.1, 1e-6),
    Trial("bolton", "huber", 1.0),
    Trial("bolton", "huber", 0.1),
    Trial("bolton", "huber", 0.5, 1e-6),
    Trial("bolton", "huber", 0.1, 1e-6),
    Trial("scs13", "logistic", 1.0, options=LARGE),
    Trial("scs13", "logistic", 0.5, 1e-6, LARGE),
    Trial("bst14", "logistic", 0.5, 1e-6, LARGE),
    Trial("dpsgd", "logistic", 0.5, 1e-6, LARGE),
    Trial("dpsgd", "hinge", 0.1, 1e-6, LARGE),
    Trial("banco", "logistic", 4.0, 1e-6, {}),
    Trial("gcd", "logistic", None, options={"l1": 0.002}),
    Trial("dpcd", "logistic", 0.5, 1e-6, {"private_constants": 0.1}),
    Trial("dpgcd", "logistic", 1.0, options={"private_constants": 0.1}),
    Trial("dpgcd", "logistic", 0.5, 1e-6, {"private_constants": 0.1}),
    Trial("scd", "hinge", None, options={"lambda": 0.01}),
    Trial("dpscd", "hinge", 0.5, 1e-6, LARGE),
    Trial("dpscd", "logistic", 0.1, 1e-6, LARGE),
)


@dataclass(frozen=True)
class Outcome:
    rows: int
    held_out: int
    features: int
    trials: list[dict[str, Any]]
    sql: list[str]


@contextmanager
def temporary_database() -> Iterator[Database]:
    """A cluster for this run alone. However the run ends, the server is stopped and its directory removed."""
    path = temporary_home()
    try:
        with embedded(str(path), durable=False) as database:
            yield database
    finally:
        remove_home(path)


def temporary_home() -> Path:
    """A directory for a cluster."""
    path = Path(tempfile.mkdtemp(prefix="bismarck_dp_demo.", dir="/tmp"))
    path.chmod(0o755)  # the server's user must get in
    return path


def remove_home(path: Path) -> None:
    """Stops the server in it first, if one runs."""
    with _undisturbed():
        Cluster(path).stop()
        shutil.rmtree(path)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not cut the cleaning up short; it reaches the main thread only."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(database: Database, rows: int, progress: Progress | None = None) -> Outcome:
    """Trains every trial. It all happens in one transaction, so that whatever fails leaves nothing behind."""
    with database.transaction() as connection:
        session = _Session(connection)
        session.load(rows)
        models = [session.train(number, trial) for number, trial in _counted(progress)]
        accuracies = session.accuracies()
        session.tidy()
    trials = [{**model, "accuracy": accuracies[model["model"]]} for model in models]
    return Outcome(rows, HELD_OUT, FEATURES, trials, session.sql)


def _counted(progress: Progress | None) -> Iterator[tuple[int, Trial]]:
    for number, trial in enumerate(TRIALS, 1):
        yield number, trial
        if progress is not None:
            progress(number, len(TRIALS))


class _Session:
    """The demo's statements, sent and written down."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sql: list[str] = []
        self._see_extension()
        self.table = _free_name(connection)

    def _send(self, sql: str) -> CursorResult[Any]:
        self.sql.append(sql)
        return self.connection.exec_driver_sql(sql)

    def _see_extension(self) -> None:
        """The dp_ functions lie wherever the extension was created; what is shown need not spell that out."""
        self.connection.exec_driver_sql(
            "SELECT pg_catalog.set_config('search_path', pg_catalog.concat_ws(', ',"
            " pg_catalog.current_setting('search_path'), pg_catalog.quote_ident(nspname)), true)"
            " FROM pg_catalog.pg_extension AS e JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace"
            " WHERE extname = 'bismarck_dp'"
        )

    def load(self, rows: int) -> None:
        x, y = synthetic(rows + HELD_OUT)
        load(self.connection, self.table, x[:rows], y[:rows], progress=False)
        load(self.connection, f"{self.table}_held_out", x[rows:], y[rows:], progress=False)

    def train(self, number: int, trial: Trial) -> dict[str, Any]:
        name = f"{self.table}_{number}"
        epsilon = "NULL" if trial.epsilon is None else f"{trial.epsilon:g}"
        row = self._send(
            f"SELECT * FROM dp_train('{self.table}', '{name}', 'y', ARRAY['x'], {epsilon}, {trial.delta:g},\n"
            f"    algorithm => '{trial.algorithm}', loss => '{trial.loss}', options => '{json.dumps(trial.options)}')"
        ).one()
        shown = ("algorithm", "loss", "epsilon", "delta", "mechanism", "sensitivity", "noise_scale", "seconds")
        return {"model": name, **{column: getattr(row, column) for column in shown}}

    def accuracies(self) -> dict[str, float]:
        answer = self._send(
            f"SELECT model, (SELECT avg((dp_predict(model, x) = y)::int)::float8 FROM {self.table}_held_out)"
            f" AS accuracy\n    FROM {self._models()}"
        )
        return {row.model: row.accuracy for row in answer}

    def tidy(self) -> None:
        self._send(f"SELECT dp_forget(model) FROM {self._models()}")
        self._send(f"DROP TABLE {self.table}, {self.table}_held_out")

    def _models(self) -> str:
        """By number: a pattern could match a model that somebody else made."""
        return f"(SELECT '{self.table}_' || number AS model FROM generate_series(1, {len(TRIALS)}) AS number) AS models"


def _free_name(connection: Connection) -> str:
    """The stem, or the stem with the first number that no table and no model begins with."""
    rows = connection.exec_driver_sql(
        "SELECT relname FROM pg_catalog.pg_class UNION ALL SELECT name FROM bismarck_dp.models"
    )
    taken = [row[0] for row in rows if row[0].startswith(STEM)]
    names = itertools.chain([STEM], (f"{STEM}_{number}" for number in itertools.count(2)))
    return next(name for name in names if not any(other.startswith(name) for other in taken))


def synthetic(rows: int) -> tuple[Array, Array]:
    """Two overlapping classes, -1 and 1, inside the unit ball; the same rows each time."""
    random = np.random.default_rng(2017)
    direction = random.normal(size=FEATURES)
    direction /= np.linalg.norm(direction)
    y = random.choice([-1.0, 1.0], size=rows)
    x = random.normal(size=(rows, FEATURES)) + 1.5 * y[:, None] * direction
    return x / np.linalg.norm(x, axis=1, keepdims=True), y
