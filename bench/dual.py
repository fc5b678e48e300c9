"""`make bench`, fifth part: dual coordinate descent against SGD, as ratios within one run on one machine.

A pass of scd, dpscd and dpscd_seq against an epoch of sgd with the same batches, and against dpsgd, which draws the
same samples; dpscd once more with less memory than the rows take, so that drawn rows go through files. 1,000,000 rows x
50 features in the server. Passes are timed by turns; figures are medians.
"""

from __future__ import annotations

from typing import Any

from noisy import DELTA, PASSES, compare, shape
from rich.console import Console
from rich.table import Table
from run import make_rows, server

BATCH = 1000
COMMON: dict[str, Any] = {"batch_size": BATCH, "epochs": PASSES + 1}
DUAL: dict[str, Any] = {**COMMON, "lambda": 1e-3}
SGD: dict[str, Any] = {"algorithm": "sgd", "delta": 0.0, **COMMON}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("scd", {"algorithm": "scd", "delta": 0.0, **DUAL}, SGD, "256MB", ""),
    ("dpscd", {"algorithm": "dpscd", "delta": DELTA, **DUAL}, SGD, "256MB", "<= 3"),
    ("dpscd, through files", {"algorithm": "dpscd", "delta": DELTA, **DUAL}, SGD, "32MB", ""),
    ("dpscd_seq", {"algorithm": "dpscd_seq", "delta": DELTA, **DUAL}, SGD, "256MB", ""),
    ("dpscd against dpsgd", {"algorithm": "dpscd", "delta": DELTA, **DUAL},
     {"algorithm": "dpsgd", "delta": DELTA, **COMMON}, "256MB", ""),
]  # fmt: skip


def main() -> None:
    n, d = shape(__doc__)
    table = Table("pass", "seconds", "of the other", "ratio", "to reach", title=f"{n:,} rows x {d}, batches of {BATCH}")
    with server() as db, db.engine.begin() as connection:
        make_rows(connection, "rows", n, d)
        for name, ours, theirs, memory, target in CASES:
            connection.exec_driver_sql(f"SET LOCAL maintenance_work_mem = '{memory}'")
            first, second = compare(connection, n, d, ours, theirs)
            table.add_row(name, f"{first:.3f}", f"{second:.3f}", f"{first / second:.2f}", target)
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
