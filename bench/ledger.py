"""`make bench`, eighth part: what a debit costs. Entries are on disk when it returns: the server is a durable one.

One connection, then eight at once, on one protected table and on eight, with an empty ledger and with 10,000 entries of
the table in it; and what a debit is of a small dp_train.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any

from conftest import two_classes
from ledgers import House, answer, own_server
from rich.console import Console
from rich.table import Table

CONNECTIONS = 8
ENTRIES = 10_000
TRAININGS = 50

FILL = """
    INSERT INTO bismarck_dp.entry (protected, source, who, login, verb, model, spec, event, adjacency, privacy_unit,
        unit_rows, renyi_order, rho, slack, epsilon, delta, total_epsilon, total_delta, composition, outcome, releases,
        unpriced, sum_rho, sum_slack, sum_epsilon, sum_delta)
    SELECT r.protected, r.source, r.who, r.login, r.verb, r.model, r.spec, r.event, r.adjacency, r.privacy_unit,
        r.unit_rows, r.renyi_order, r.rho, r.slack, r.epsilon, r.delta, 1000, 1e-6, 'zcdp', 'paid',
        s.releases + i, s.unpriced, s.rho + i * r.rho, s.slack + i * r.slack,
        s.epsilon + i * r.epsilon, s.delta + i * r.delta
    FROM jsonb_populate_record(NULL::bismarck_dp.entry, %s) AS r, LATERAL bismarck_dp.spent(r.protected) AS s,
        generate_series(1, %s) AS i
"""


def cheap(house: House) -> str:
    """A release that fits often."""
    return house.request(epsilon="0.0001", rho="0.0000001")


def debits(house: House, count: int) -> list[float]:
    """Seconds of each, one after the other."""
    connection, request = house.connect("postgres"), cheap(house)
    found = []
    for _ in range(count):
        started = time.perf_counter()
        ((outcome, _),) = answer(connection, "SELECT * FROM bismarck_dp.debit(%s)", request)
        found.append(time.perf_counter() - started)
        assert outcome == "paid"
    connection.close()
    return found


def rate(houses: list[House], count: int) -> float:
    """Debits a second of all connections together."""
    threads = [threading.Thread(target=debits, args=(house, count)) for house in houses]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(houses) * count / (time.perf_counter() - started)


def trainings(house: House) -> tuple[float, float]:
    """Medians of a small dp_train and of a debit, in turns: a busy machine is as busy for both."""
    connection: Any = house.connect()
    whole, part = [], []
    for number in range(TRAININGS):
        started = time.perf_counter()
        answer(connection, f"SELECT {house.train_sql(f'm{number}', 0.01)}")
        whole.append(time.perf_counter() - started)
        part += debits(house, 1)
    connection.close()
    return statistics.median(whole[1:]), statistics.median(part)  # the first one starts Python


def measure(table: Table, houses: list[House], what: str, count: int) -> None:
    one = statistics.median(debits(houses[0], count))
    same, several = rate([houses[0]] * len(houses), count), rate(houses, count)
    table.add_row(what, f"{1000 * one:.1f}", f"{same:.0f}", f"{several:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debits", type=int, default=100)
    count = parser.parse_args().debits
    table = Table("", "ms, median", "a second, one table", "a second, eight tables",
                  title=f"Debits, and {CONNECTIONS} connections at once, on {os.cpu_count()} cores")  # fmt: skip
    with own_server() as db:
        houses = [House(db, f"rows{number}", "ann") for number in range(CONNECTIONS)]
        for house in houses:
            db.load(house.table, *two_classes(1000, 10))
            house.protect(1000.0, 1e-6)
        debits(houses[0], 10)
        measure(table, houses, "empty ledger", count)
        whole, part = trainings(houses[0])
        houses[0].ask(FILL, cheap(houses[0]), ENTRIES)
        measure(table, houses, f"{ENTRIES:,} entries", count)
        table.add_row("to reach", "<= 15", ">= 100", ">= 100")
        table.caption = (
            f"a dp_train of 1,000 rows x 10 takes {1000 * whole:.0f} ms, of which a debit is {part / whole:.0%}"
        )
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
