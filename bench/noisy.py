"""`make bench`, third part: what noise inside the pass costs, as ratios within one run on one machine.

Passes over 1,000,000 rows x 50 features in the server. scs13 against sgd with the same batches, dpsgd (Poisson samples)
against sgd on the permutation, banco (one row at a time) against sgd with b = 1. Every figure is the median of passes
by turns, so that a slow minute of the machine hits both sides.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table
from run import Connection, make_rows, seconds, server

from bismarck_dp import Spec, make_plan
from bismarck_dp.controller.engines import Request, SqlEngine
from bismarck_dp.solvers import SOLVERS

PASSES = 9
DELTA = 1e-7


class Passes:
    """The passes of one algorithm, one after the other; banco, which makes only one, begins anew each time."""

    def __init__(self, connection: Connection, n: int, d: int, algorithm: str, delta: float, **options: Any) -> None:
        epsilon = 1.0 if SOLVERS[algorithm].private else None
        spec = Spec.create(algorithm, "logistic", epsilon, delta, options)
        source = connection.exec_driver_sql("SELECT 'rows'::regclass::oid").scalar_one()
        self.engine = SqlEngine(connection)
        self.plan = make_plan(spec, n, d)
        self.request = Request(source, "bench", "y", ["x"], spec)
        self.packing = seconds(self._pack)
        self.engine.begin(self.packed, self.plan)

    def _pack(self) -> None:
        self.packed = self.engine.pack(self.request, self.plan)

    def seconds(self) -> float:
        if self.plan.kernel == "banco":
            self.engine.begin(self.packed, self.plan)
        return seconds(lambda: self.engine.epoch(self.packed, self.plan))

    def close(self) -> None:
        self.engine.release(self.packed, self.plan)
        self.engine.drop(self.packed)


def compare(connection: Connection, n: int, d: int, first: dict[str, Any], second: dict[str, Any]) -> Any:
    """The median seconds of a pass of both, by turns; the first pass of each warms up."""
    pair = [Passes(connection, n, d, **one) for one in (first, second)]
    times = by_turns(pair)
    for passes in pair:
        passes.close()
    return times


def by_turns(all_of_them: list[Passes]) -> list[float]:
    times = [[passes.seconds() for passes in all_of_them] for _ in range(PASSES + 1)][1:]
    return [statistics.median(column) for column in zip(*times)]


def cases() -> list[tuple[str, dict[str, Any], dict[str, Any], str]]:
    found = []
    for b, target in ((1, "<= 3"), (10, "<= 1.3"), (50, ""), (500, "<= 1.02")):
        options = {"batch_size": b, "epochs": PASSES + 1}
        plain = {"algorithm": "sgd", "delta": 0.0, **options}
        for delta in (DELTA, 0.0):
            noisy = {"algorithm": "scs13", "delta": delta, **options}
            found.append((f"scs13, b = {b}, {'gaussian' if delta else 'l2-laplace'}", noisy, plain, target))
    options = {"batch_size": 50, "epochs": PASSES + 1}
    sampled = {"algorithm": "dpsgd", "delta": DELTA, **options}
    found.append(("dpsgd, q n = 50", sampled, {"algorithm": "sgd", "delta": 0.0, **options}, "<= 3"))
    single = {"algorithm": "sgd", "delta": 0.0, "batch_size": 1, "epochs": PASSES + 1}
    for delta, name in ((DELTA, "gaussian"), (0.0, "l2-laplace")):
        found.append((f"banco, {name}", {"algorithm": "banco", "delta": delta}, single, ""))
    return found


def shape(description: str | None) -> tuple[int, int]:
    """Rows and features, from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=50)
    arguments = parser.parse_args()
    return arguments.rows, arguments.features


def main() -> None:
    n, d = shape(__doc__)
    table = Table("pass", "seconds", "of sgd, same batches", "ratio", "to reach", title=f"{n:,} rows x {d} features")
    with server() as db, db.engine.begin() as connection:
        make_rows(connection, "rows", n, d)
        for name, first, second, target in cases():
            ours, theirs = compare(connection, n, d, first, second)
            table.add_row(name, f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.3f}", target)
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
