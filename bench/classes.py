"""`make bench`, sixth part: ten classes against two, as ratios within one run on one machine.

A pass that trains ten classes, jointly or one against the rest, against a pass of two classes with the same algorithm
and batches. 1,000,000 rows x 50 features in the server. Passes are timed by turns; figures are medians.
"""

from __future__ import annotations

from typing import Any

from noisy import DELTA, PASSES, compare, shape
from rich.console import Console
from rich.table import Table
from run import make_rows, server

CLASSES = 10
COMMON: dict[str, Any] = {"batch_size": 50, "epochs": PASSES + 1}
TWO: dict[str, Any] = {"classes": [0, 1], **COMMON}

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("sgd, softmax", {"algorithm": "sgd", "delta": 0.0, "multiclass": "softmax"}, "<= 4"),
    ("sgd, one against the rest", {"algorithm": "sgd", "delta": 0.0, "multiclass": "ovr"}, "<= 4"),
    ("scs13, softmax", {"algorithm": "scs13", "delta": DELTA, "multiclass": "softmax"}, "<= 4"),
    ("dpsgd, softmax", {"algorithm": "dpsgd", "delta": DELTA, "multiclass": "softmax"}, "<= 4"),
]


def main() -> None:
    n, d = shape(__doc__)
    title = f"{n:,} rows x {d}, {CLASSES} classes"
    table = Table("pass", "seconds", "of two classes", "ratio", "to reach", title=title)
    with server() as db, db.engine.begin() as connection:
        make_rows(connection, "rows", n, d)
        connection.exec_driver_sql(f"UPDATE rows SET y = pg_catalog.floor(pg_catalog.random() * {CLASSES})")
        for name, case, target in CASES:
            ours = {**case, "classes": CLASSES, **COMMON}
            theirs = {"algorithm": case["algorithm"], "delta": case["delta"], **TWO}
            first, second = compare(connection, n, d, ours, theirs)
            table.add_row(name, f"{first:.3f}", f"{second:.3f}", f"{first / second:.2f}", target)
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
