"""`make bench`, seventh part: predictions in SQL, as rows a second and as ratios to a scan that touches the array.

1,000,000 rows x 50 features in shared buffers, as float8[] and as float4[], one process, no JIT: dp_predict with two
classes, with an intercept, and with ten classes, against array_length over the same table. Then prepared statements
of one row each, against one that looks at the array alone. Statements take turns; figures are medians and, for rows a
second, the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table
from run import Connection, make_rows, seconds, server

REPEATS = 9
STATEMENTS = 10_000
MODELS: dict[str, dict[str, Any]] = {
    "two classes": {},
    "two classes, intercept": {"fit_intercept": True},
    "ten classes": {"classes": 10, "multiclass": "softmax"},
}
TOUCH = "SELECT count(array_length(x, 1)) FROM {}"


def make_models(connection: Connection) -> None:
    """Trained on a few rows: what a prediction costs depends on the shape of a model alone."""
    connection.exec_driver_sql("CREATE TABLE few AS SELECT mod(id, 10) AS digit, y, x FROM rows4 WHERE id <= 1000")
    for name, options in MODELS.items():
        connection.exec_driver_sql(
            "SELECT dp_train('few', %(m)s, %(l)s, '{x}', NULL, algorithm => 'sgd', options => %(o)s::jsonb)",
            {"m": name, "l": "digit" if "classes" in options else "y", "o": json.dumps(options)},
        )


def by_turns(connection: Connection, queries: list[str]) -> list[list[float]]:
    def once(query: str) -> float:
        return seconds(lambda: connection.exec_driver_sql(query))

    rounds = [[once(query) for query in queries] for _ in range(REPEATS + 1)]
    return [list(times) for times in zip(*rounds[1:])]


def scans(connection: Connection, table: Table, n: int) -> None:
    for rows, kind in (("rows8", "float8[]"), ("rows4", "float4[]")):
        queries = [TOUCH.format(rows)]
        queries += [f"SELECT count(dp_predict('{name}', x)) FROM {rows}" for name in MODELS]
        touch, *found = by_turns(connection, queries)
        for name, times in zip(MODELS, found):
            typical, least = statistics.median(times), min(times)
            table.add_row(
                f"{name}, {kind}", f"{n / typical:,.0f}", f"{n / least:,.0f}",
                f"{typical / statistics.median(touch):.2f}", "> 5,000,000" if name == "two classes" else "",
            )  # fmt: skip


def single_rows(connection: Connection, d: int) -> float:
    """Seconds of prepared statements of one row, divided by those of statements that only look at the array."""
    row = "{" + ",".join(["0.1"] * d) + "}"
    cursor: Any = connection.connection.cursor()
    cursor.execute("PREPARE predict(float8[]) AS SELECT dp_predict('two classes', $1)")
    cursor.execute("PREPARE look(float8[]) AS SELECT array_length($1, 1)")

    def run(name: str) -> float:
        return seconds(lambda: [cursor.execute(f"EXECUTE {name}('{row}')") for _ in range(STATEMENTS)])

    pairs = [(run("predict"), run("look")) for _ in range(3)]
    return statistics.median(first for first, _ in pairs) / statistics.median(second for _, second in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=50)
    arguments = parser.parse_args()
    n, d = arguments.rows, arguments.features
    table = Table("dp_predict", "rows/s", "at best", "ratio", "to reach", title=f"{n:,} rows x {d}")
    with server({"shared_buffers": "2GB"}) as db:
        with db.engine.begin() as connection:
            make_rows(connection, "rows4", n, d)
            connection.exec_driver_sql("CREATE TABLE rows8 AS SELECT id, y, x::float8[] AS x FROM rows4")
            make_models(connection)
        with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in ("VACUUM ANALYZE rows4", "VACUUM ANALYZE rows8", "SET jit = off"):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql("SET max_parallel_workers_per_gather = 0")
            scans(connection, table, n)
            table.add_row(f"{STATEMENTS:,} prepared statements", "", "", f"{single_rows(connection, d):.2f}", "")
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
