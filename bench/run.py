"""`make bench`: how fast packing, an epoch and a whole training are, as ratios within one run on one machine.

    make bench                              1,000,000 rows x 50 features
    make bench BENCH="--rows 10000000"      and ten times that, with the time per row at both sizes

Against: (a) CREATE TABLE AS SELECT … ORDER BY random() with the same memory, (b) a scan that touches the array column,
(c) exporting the table and scikit-learn's SGDClassifier, same passes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import SGDClassifier

from bismarck_dp import Spec, make_plan
from bismarck_dp.controller.database import Database, embedded
from bismarck_dp.controller.engines import Request, SqlEngine

EPOCHS = 10
BATCH_SIZE = 50
STRENGTH = 1e-3
MEMORY = "256MB"
CHUNK = 500_000

Connection = sqlalchemy.Connection


@contextmanager
def server(more: dict[str, str] | None = None) -> Iterator[Database]:
    home = Path(tempfile.mkdtemp(prefix="bdp_bench_", dir="/tmp"))
    home.chmod(0o755)
    try:
        settings = {"work_mem": MEMORY, "maintenance_work_mem": MEMORY, "max_wal_size": "8GB", "autovacuum": "off"}
        settings |= more or {}
        with embedded(str(home / "cluster"), durable=False, settings=settings) as database:
            yield database
    finally:
        shutil.rmtree(home, ignore_errors=True)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def make_rows(connection: Connection, table: str, n: int, d: int) -> None:
    """A table of random rows, appended in chunks so that this process stays small."""
    rng = np.random.default_rng(0)
    from bismarck_dp.controller.loaders import load

    w = rng.normal(size=d)
    for start in range(0, n, CHUNK):
        x = rng.normal(size=(min(CHUNK, n - start), d)).astype(np.float32) / np.sqrt(d)
        y = np.where(x @ w + 0.3 * rng.normal(size=len(x)) > 0, 1.0, -1.0)
        load(connection, "piece", x, y, dtype="float4", replace=True)
        how = "CREATE TABLE {} AS" if start == 0 else "INSERT INTO {}"
        connection.exec_driver_sql(how.format(table) + " SELECT id, y, x FROM piece")
    connection.exec_driver_sql("DROP TABLE piece")


def export(connection: Connection, table: str, d: int) -> tuple[Any, Any]:
    """The table as arrays: binary COPY, read with one structured type."""
    buffer = io.BytesIO()
    cursor: Any = connection.connection.cursor()
    cursor.copy_expert(f"COPY {table} (y, x) TO STDOUT (FORMAT binary)", buffer)
    element = np.dtype([("length", ">i4"), ("value", ">f4")])
    row = np.dtype([("count", ">i2"), ("y_length", ">i4"), ("y", ">f8"), ("x_length", ">i4"), ("head", "V20"),
                    ("x", element, (d,))])  # fmt: skip
    rows = np.frombuffer(buffer.getbuffer(), dtype=row, offset=19, count=(len(buffer.getbuffer()) - 21) // row.itemsize)
    return rows["x"]["value"].astype(np.float32), rows["y"].astype(np.float64)


def scikit_learn(x: Any, y: Any, epochs: int) -> None:
    SGDClassifier(loss="log_loss", alpha=STRENGTH, max_iter=epochs, tol=None, random_state=0).fit(x, y)


class Training:
    """One training, its steps timed."""

    def __init__(self, connection: Connection, table: str, n: int, d: int, epsilon: float | None) -> None:
        self.engine = SqlEngine(connection)
        spec = Spec.create("sgd" if epsilon is None else "bolton", "logistic", epsilon, 0, options())
        source = connection.exec_driver_sql(f"SELECT '{table}'::regclass::oid").scalar_one()
        self.request = Request(source, "bench", "y", ["x"], spec)
        self.plan = make_plan(spec, n, d)

    def pack(self) -> float:
        return seconds(self._pack)

    def _pack(self) -> None:
        self.packed = self.engine.pack(self.request, self.plan)

    def epochs(self) -> list[float]:
        self.engine.begin(self.packed, self.plan)
        times = [seconds(lambda: self.engine.epoch(self.packed, self.plan)) for _ in range(EPOCHS)]
        self.engine.drop(self.packed)
        return times


def options() -> dict[str, Any]:
    return {"lambda": STRENGTH, "epochs": EPOCHS, "batch_size": BATCH_SIZE}


def dp_train(connection: Connection, table: str, epsilon: float | None, **more: Any) -> float:
    """A whole `SELECT dp_train(...)`, from the raw table to the registered model, forgotten again."""
    statement = (
        "SELECT dp_train(%(t)s::regclass, 'bench', 'y', '{x}', %(e)s, algorithm => %(a)s, options => %(o)s::jsonb)"
    )
    values = {
        "t": table,
        "e": epsilon,
        "a": "sgd" if epsilon is None else "bolton",
        "o": json.dumps({**options(), **more}),
    }
    elapsed = seconds(lambda: connection.exec_driver_sql(statement, values))
    connection.exec_driver_sql("SELECT dp_forget('bench')")
    return elapsed


def peak_memory(connection: Connection) -> tuple[float, float]:
    """The backend's peak resident memory in MB, with and without the shared buffers it touched."""
    pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    status = Path(f"/proc/{pid}/status").read_text()
    kilobytes = {key: int(value) for key, value in re.findall(r"^(VmHWM|RssShmem):\s+(\d+) kB", status, re.M)}
    return kilobytes["VmHWM"] / 1024, (kilobytes["VmHWM"] - kilobytes["RssShmem"]) / 1024


class Report:
    def __init__(self, title: str) -> None:
        self.table = Table("what", "seconds", "against", "ratio", "to reach", title=title)

    def add(self, what: str, took: float, against: str = "", other: float | None = None, target: str = "") -> None:
        ratio = "" if other is None else f"{took / other:.3f}"
        self.table.add_row(
            what, f"{took:.3f}", against if other is None else f"{against} ({other:.3f} s)", ratio, target
        )

    def fact(self, what: str, value: str, target: str = "") -> None:
        self.table.add_row(what, "", value, "", target)


def measure(db: Database, n: int, d: int, repeats: int) -> tuple[Report, float]:
    """All figures for one size; returns the report and the seconds per row of a whole training."""
    report = Report(f"{n:,} rows x {d} features, {EPOCHS} passes, batches of {BATCH_SIZE}, memory {MEMORY}")
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        scan = statistics.median(
            seconds(lambda: connection.exec_driver_sql("SELECT sum(x[1]) FROM rows")) for _ in range(3)
        )
        shuffled = statistics.median(seconds(lambda: shuffle_by_sort(connection)) for _ in range(repeats))
        packs, epochs = times_of_steps(db, n, d, repeats)
        noiseless, private = whole_trainings(connection, repeats)
        report.add("pack", packs, "(a) CREATE TABLE AS … ORDER BY random()", shuffled, "<= 0.5")
        report.add("one epoch", epochs, "(b) a scan that touches the array", scan)
        sklearn_epoch, whole = against_scikit_learn(connection, d)
        report.add("one epoch", epochs, "one epoch of scikit-learn in memory", sklearn_epoch, "<= 0.5")
        report.add("dp_train, private", private, f"(c) export + scikit-learn, {EPOCHS} passes", whole, "<= 0.5")
        report.add("dp_train, private", private, "dp_train, noiseless", noiseless, "<= 1.01")
        report.fact("peak memory of the backend", memory_of_training(db), "< 600 MB at 10,000,000 rows")
    return report, private / n


def shuffle_by_sort(connection: Connection) -> None:
    connection.exec_driver_sql("DROP TABLE IF EXISTS sorted")
    connection.exec_driver_sql("CREATE TABLE sorted AS SELECT * FROM rows ORDER BY random()")
    connection.exec_driver_sql("DROP TABLE sorted")


def times_of_steps(db: Database, n: int, d: int, repeats: int) -> tuple[float, float]:
    packs, epochs = [], []
    for _ in range(repeats):
        with db.engine.begin() as connection:
            training = Training(connection, "rows", n, d, 1.0)
            packs.append(training.pack())
            epochs += training.epochs()
    return statistics.median(packs), statistics.median(epochs)


def whole_trainings(connection: Connection, repeats: int) -> tuple[float, float]:
    """Medians of alternating runs, so that a slow minute of the machine hits both."""
    dp_train(connection, "rows", None, epochs=1)
    pairs = [(dp_train(connection, "rows", None), dp_train(connection, "rows", 1.0)) for _ in range(max(repeats, 3))]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def against_scikit_learn(connection: Connection, d: int) -> tuple[float, float]:
    start = time.perf_counter()
    x, y = export(connection, "rows", d)
    exported = time.perf_counter() - start
    fit = seconds(lambda: scikit_learn(x, y, EPOCHS))
    return fit / EPOCHS, exported + fit


def memory_of_training(db: Database) -> str:
    """In a fresh backend, so that the peak is the training's own."""
    db.engine.dispose()
    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        dp_train(connection, "rows", 1.0, epochs=1)
        total, own = peak_memory(connection)
    return f"{total:.0f} MB, of it {own:.0f} MB not shared buffers"


def small_trainings(db: Database) -> Report:
    report = Report("1,000 rows x 50 features, whole dp_train")
    with db.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE small AS SELECT * FROM rows LIMIT 1000")
    fresh = []
    for _ in range(3):
        db.engine.dispose()
        start = time.perf_counter()
        with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            dp_train(connection, "small", 1.0)
            fresh.append(time.perf_counter() - start)
            warm = statistics.median(dp_train(connection, "small", 1.0) for _ in range(9))
    report.add("on a new connection", statistics.median(fresh), target="<= 1.5 s")
    report.add("on a warm connection", warm, target="<= 0.3 s")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="the largest table; 1,000,000 comes first")
    parser.add_argument("--features", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 150)
    per_row: dict[int, float] = {}
    with server() as db:
        for n in sorted({min(1_000_000, arguments.rows), arguments.rows}):
            with db.engine.begin() as connection:
                connection.exec_driver_sql("DROP TABLE IF EXISTS rows")
                make_rows(connection, "rows", n, arguments.features)
            with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM ANALYZE rows")
            report, per_row[n] = measure(db, n, arguments.features, arguments.repeats if n <= 1_000_000 else 1)
            console.print(report.table)
        console.print(small_trainings(db).table)
    if len(per_row) == 2:
        first, last = per_row.values()
        console.print(
            f"time per row: {1e6 * first:.2f} us, then {1e6 * last:.2f} us: ratio {last / first:.3f} (within 15 %)"
        )


if __name__ == "__main__":
    main()
