"""`make bench`, fourth part: coordinate descent against SGD, as ratios within one run on one machine.

    pass    cd: as many coordinate steps as there are columns; gcd: one choice. Against an epoch of sgd, batches of 50.
    pack    columns, or rows, against the rows of sgd.

1,000,000 rows x 50 features in the server. Passes and packings are timed by turns, so that a slow minute of the machine
hits all of them; figures are medians.
"""

from __future__ import annotations

import statistics
from typing import Any

from noisy import DELTA, PASSES, Passes, by_turns, shape
from rich.console import Console
from rich.table import Table
from run import Connection, make_rows, server

PACKINGS = 5

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "cd": ({"algorithm": "cd", "delta": 0.0}, "<= 2"),
    "dpcd, average none": ({"algorithm": "dpcd", "delta": DELTA, "average": "none"}, "<= 2"),
    "dpcd, average all": ({"algorithm": "dpcd", "delta": DELTA}, ""),
    "gcd": ({"algorithm": "gcd", "delta": 0.0}, "<= 1.3"),
    "dpgcd, gaussian": ({"algorithm": "dpgcd", "delta": DELTA}, "<= 1.3"),
    "dpgcd, laplace": ({"algorithm": "dpgcd", "delta": 0.0}, "<= 1.3"),
    "dpgcd, two workers": ({"algorithm": "dpgcd", "delta": DELTA, "workers": 2}, ""),
}


def measure(connection: Connection, n: int, d: int, case: dict[str, Any]) -> tuple[float, float, float, float]:
    """Seconds of a pass and of packing, of the case and of sgd; a first pass that measures constants is left out."""
    plain = {"algorithm": "sgd", "delta": 0.0, "batch_size": 50, "epochs": PASSES + 1}
    packings = []
    for repeat in range(PACKINGS):
        pair = [Passes(connection, n, d, **one) for one in ({**case, "iterations": PASSES + 1}, plain)]
        packings.append([passes.packing for passes in pair])
        if repeat == 0:
            ours, theirs = by_turns(pair)
        for passes in pair:
            passes.close()
    pack, pack_of_sgd = (statistics.median(column) for column in zip(*packings))
    return ours, theirs, pack, pack_of_sgd


def main() -> None:
    n, d = shape(__doc__)
    table = Table("", "pass", "of sgd", "ratio", "to reach", "pack", "of sgd", "ratio", "to reach",
                  title=f"{n:,} rows x {d} features")  # fmt: skip
    with server() as db, db.engine.begin() as connection:
        make_rows(connection, "rows", n, d)
        for name, (case, target) in CASES.items():
            ours, theirs, pack, pack_of_sgd = measure(connection, n, d, case)
            passes = (f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.2f}", target)
            packs = (f"{pack:.2f}", f"{pack_of_sgd:.2f}", f"{pack / pack_of_sgd:.2f}", "<= 1.5")
            table.add_row(name, *passes, *packs)
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
