"""Random operations on protected tables, with kills and crashes between them: after each batch the ledger is summed up
again, entry by entry, and nobody has spent what was not there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import psycopg2
import pytest
from ledgers import (
    LONG,
    Bounds,
    House,
    answer,
    check_nothing_is_left,
    crash,
    fits,
    make_house,
    own_server,
    wait_until_up,
)
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from bismarck_dp.controller.database import Database, connect

OPERATIONS = 10_000
BATCHES = 20
CRASHES = 4
"""Batches that end with one, of a backend or of the whole server."""

TABLES = 4
THREADS = 2

REFUSED = {
    "53400": "the budget is spent",
    "42501": "the table is not protected",
    "55000": "its protection is not committed",
    "42704": "the model is forgotten",
}
"""What an operation may be answered, by SQLSTATE."""

LOST = {None, "57P01", "57P02", "57P03", "08007"}
"""The session is gone, or was ended, or the server does not take one just now, or the worker of a debit was ended.
Whatever else is answered is a fault.
"""


@dataclass
class Known:
    """A table, and the bounds that hold from an entry on."""

    house: House
    bounds: list[tuple[int, Bounds | None]] = field(default_factory=list)
    """None: it was not protected"""
    doubtful: set[int] = field(default_factory=set)
    """places of bounds whose COMMIT was not heard of: they may hold, or those before"""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """held where bounds change: debits meanwhile would be of either"""


class Driver:
    """One connection per user that does this and that. The ledger is looked at later."""

    def __init__(self, tables: list[Known], seed: int) -> None:
        self.coins = random.Random(seed)
        self.tables = tables
        self.connections: dict[str, Any] = {}
        self.number = seed * 1_000_000
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        """of debits that are asked for past the controller, which are refused without an error"""
        self.released: list[str] = []
        """models that were answered, whatever became of the transaction"""
        self.faults: list[BaseException] = []

    def connection(self, user: str) -> Any:
        if user not in self.connections or self.connections[user].closed:
            self.connections[user] = self.tables[0].house.connect(user)
        return self.connections[user]

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()

    def run(self, operations: int) -> None:
        names = list(WEIGHTS)
        try:
            for name in self.coins.choices(names, [WEIGHTS[name] for name in names], k=operations):
                self.operate(name)
        except BaseException as fault:  # of a thread, which nobody else would hear of
            self.faults.append(fault)

    def operate(self, name: str) -> None:
        """An operation is done, or refused for a reason that it may be refused for, or lost with its session."""
        try:
            getattr(self, name)(self.coins.choice(self.tables))
            self.done[name] += 1
        except psycopg2.Error as error:
            if error.pgcode in REFUSED:
                self.refused[name] += 1
            elif error.pgcode in LOST:
                self.lost[name] += 1
                wait_until_up(self.tables[0].house)
            else:
                raise
        for user in list(self.connections):
            self.end_transaction(user)

    def end_transaction(self, user: str) -> None:
        """By a statement: psycopg2 does not roll back what it has not begun."""
        connection = self.connections[user]
        try:
            if not connection.closed and connection.info.transaction_status != TRANSACTION_STATUS_IDLE:
                answer(connection, "ROLLBACK")
        except psycopg2.Error as error:
            if error.pgcode not in LOST:
                raise
            connection.close()

    def ask(self, user: str, *statements: str) -> None:
        for statement in statements:
            answer(self.connection(user), statement)

    def name(self) -> str:
        self.number += 1
        return f"m{self.number}"

    def epsilon(self) -> str:
        return str(self.coins.choice(["0.1", "0.01", "0.001", "0.3", "0.0123456789012345"]))

    # ---- operations ----

    def debit(self, known: Known) -> None:
        amounts = {
            "rho": self.coins.choice([None, "0.01", "0.0001", "0.00003"]),
            "slack": self.coins.choice(["0", "0", "1e-12"]),
            "epsilon": self.epsilon(),
            "delta": self.coins.choice(["0", "0", "1e-8", "3e-7"]),
        }
        request = known.house.request(**amounts, model=self.name())
        outcome = answer(self.connection("postgres"), "SELECT outcome FROM bismarck_dp.debit(%s)", request)[0][0]
        self.outcomes[outcome] += 1

    def debit_and_roll_back(self, known: Known) -> None:
        self.ask("postgres", "BEGIN")
        self.debit(known)
        self.ask("postgres", "ROLLBACK")

    def budget(self, known: Known) -> None:
        self.ask("ann", f"SELECT * FROM dp_budget('{known.house.table}')")

    def entries(self, known: Known) -> None:
        self.ask("ann", "SELECT count(*) FROM bismarck_dp.ledger")

    def protect(self, known: Known) -> None:
        """Another total. Entries before it were paid out of the one before."""
        with known.lock:
            self.protect_again(known, *self.coins.choice(TOTALS))

    def protect_again(self, known: Known, epsilon: float, delta: float, composition: str) -> None:
        options = json.dumps({"composition": composition, "classes": {"y": [-1, 1]}})
        self.rule(known, "SELECT dp_protect(%s, %s, %s, %s)", epsilon, delta, options)

    def rule(self, known: Known, statement: str, *values: Any) -> None:
        """Other bounds, for all entries but those that are there."""
        connection = self.connection("postgres")
        answer(connection, "BEGIN")
        answer(connection, statement, known.house.table, *values)
        # While this is open nothing is debited, so that the last entry is the last under the bounds before.
        last = answer(connection, "SELECT coalesce(max(id), 0) FROM bismarck_dp.entry")[0][0]
        found = Bounds.of(known.house, connection) if "dp_protect" in statement else None
        known.bounds.append((last, found))
        known.doubtful.add(place := len(known.bounds) - 1)
        answer(connection, "COMMIT")
        known.doubtful.discard(place)

    def protect_and_roll_back(self, known: Known) -> None:
        self.ask("postgres", "BEGIN", f"SELECT dp_protect('{known.house.table}', 900, 1e-5)")
        self.debit(known)
        self.ask("postgres", "ROLLBACK")

    def unprotect(self, known: Known) -> None:
        """Until it is protected again, nothing is debited."""
        with known.lock:
            self.rule(known, "SELECT dp_unprotect(%s)")

    def train(self, known: Known) -> None:
        name = self.name()
        self.ask("ann", f"SELECT {known.house.train_sql(name, float(self.epsilon()))}")
        self.released.append(name)

    def train_and_roll_back(self, known: Known) -> None:
        self.ask("ann", "BEGIN")
        self.train(known)
        self.ask("ann", "ROLLBACK")

    def forget(self, known: Known) -> None:
        self.ask("ann", "SELECT dp_forget(min(name)) FROM bismarck_dp.models HAVING count(*) > 0")

    def stop(self, known: Known) -> None:
        """At a random moment of a training without end."""
        mine = known.house.connect()
        killer = threading.Timer(self.coins.uniform(0, 0.3), self.terminate, [known.house, mine.info.backend_pid])
        killer.start()
        try:
            answer(mine, f"SELECT {known.house.train_sql(self.name(), 0.01, LONG)}")
        finally:
            killer.join()
            mine.close()

    def kill(self, known: Known) -> None:
        """Whoever is at work just now, be it the worker that makes a debit."""
        found = known.house.ask(AT_WORK)
        if found:
            self.terminate(known.house, self.coins.choice(found)[0])

    def terminate(self, house: House, pid: int) -> None:
        house.ask("SELECT pg_terminate_backend(%s)", pid)


AT_WORK = """
    SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()
    AND (backend_type LIKE 'bismarck%%' OR backend_type = 'client backend' AND state = 'active')
"""

WEIGHTS = {
    "debit": 36,
    "debit_and_roll_back": 8,
    "budget": 20,
    "entries": 22,
    "protect": 4,
    "protect_and_roll_back": 2,
    "unprotect": 1,
    "train": 4,
    "train_and_roll_back": 2,
    "forget": 2,
    "stop": 0.15,
    "kill": 0.5,
}

TOTALS = [(1.0, 0.0, "zcdp"), (5.0, 1e-6, "zcdp"), (20.0, 1e-5, "zcdp"), (8.0, 1e-6, "pure"), (0.5, 1e-8, "zcdp")]


@pytest.fixture(scope="module")
def server() -> Iterator[Database]:
    with own_server() as db:
        yield db


def test_nobody_spends_what_is_not_there(server: Database) -> None:
    seed = int(os.environ.get("LEDGER_SEED") or random.SystemRandom().getrandbits(16))
    print(f"LEDGER_SEED={seed}")
    coins = random.Random(seed)
    tables = [Known(make_house(server, f"rows{number}", "ann", rows=10)) for number in range(TABLES)]
    drivers = [Driver(tables, seed + 1 + number) for number in range(THREADS)]
    for known in tables:
        drivers[0].protect(known)
    seen: set[tuple[Any, ...]] = set()
    for batch in range(BATCHES):
        threads = [threading.Thread(target=one.run, args=(OPERATIONS // BATCHES // THREADS,)) for one in drivers]
        for thread in threads:
            thread.start()
        if batch < CRASHES:
            threads[0].join(coins.uniform(0, 3))
            (crash_backend if batch % 2 else crash_server)(tables[0].house, drivers[0])
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        assert [fault for one in drivers for fault in one.faults] == []
        for known in tables:
            found = set(check_sums(known))
            assert {entry for entry in seen if entry[1] == known.house.table} <= found, "entries are there for good"
            seen |= found
        check_models(tables[0].house, [name for one in drivers for name in one.released])
        check_nothing_is_left(tables[0].house)
    check_much_was_done(drivers, seen)
    for one in drivers:
        one.close()


def check_much_was_done(drivers: list[Driver], seen: set[tuple[Any, ...]]) -> None:
    """Or nothing was shown: most operations are answered, and of each kind some are."""
    done, refused, lost, outcomes = (
        sum((getattr(one, name) for one in drivers), Counter()) for name in ("done", "refused", "lost", "outcomes")
    )
    for name, counts in (("done", done), ("refused", refused), ("lost", lost), ("debits", outcomes)):
        print(f"{name}: {dict(counts)}")
    print(f"{len(seen)} entries paid")
    assert done.total() + refused.total() + lost.total() == OPERATIONS // BATCHES // THREADS * THREADS * BATCHES
    assert lost.total() < OPERATIONS / 20
    assert done.total() > OPERATIONS / 2
    # What is stopped is never done.
    assert all(done[name] > 0 for name in WEIGHTS if name != "stop")
    assert lost["stop"] + refused["stop"] > 0
    assert all(outcomes[outcome] > 0 for outcome in ("paid", "refused", "unprotected"))
    assert done["train"] >= 20
    assert len(seen) >= outcomes["paid"]


def crash_backend(house: House, driver: Driver) -> None:
    """Of someone who may be at work."""
    pids = [pid for (pid,) in house.ask("SELECT pid FROM pg_stat_activity WHERE usename = 'ann'")]
    crash(house, pids[0] if pids else house.connect().info.backend_pid)


def crash_server(house: House, driver: Driver) -> None:
    """Stopped at once, and started again."""
    cluster = house.db.cluster
    assert cluster is not None
    house.db.engine.dispose()
    os.kill(int((cluster.pgdata / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
    while (cluster.pgdata / "postmaster.pid").exists():
        threading.Event().wait(0.05)
    cluster.start()
    house.db.engine = connect(cluster.url()).engine


def check_sums(known: Known) -> list[tuple[Any, ...]]:
    """Every paid entry was within the bounds of its time; and what the ledger says is spent is spent."""
    entries = known.house.ask(
        "SELECT e.id, e.rho, e.slack, e.epsilon, e.delta, e.renyi_order FROM bismarck_dp.entry AS e"
        " JOIN bismarck_dp.protected AS p ON p.id = e.protected"
        " WHERE e.outcome = 'paid' AND p.source = %s::regclass ORDER BY e.id",
        known.house.table,
    )
    # A divergence of another order than the later ones' is as good as unknown to them.
    amounts = [entry[1:5] for entry in entries]
    for place, entry in enumerate(entries):
        before = [(one[1] if one[5] == entry[5] else None, *one[2:5]) for one in entries[: place + 1]]
        assert any(bounds is not None and fits(bounds, before) for bounds in bounds_at(known, entry[0])), (
            f"entry {entry[0]} of {known.house.table} was paid, and was not there"
        )
    said = known.house.ask(
        "SELECT s.releases, s.mixed, s.rho, s.slack, s.epsilon, s.delta FROM bismarck_dp.protected AS p,"
        " LATERAL bismarck_dp.spent(p.id) AS s WHERE p.source = %s::regclass",
        known.house.table,
    )[0]
    assert list(said[:2]) == [len(entries), 0]
    assert [Fraction(one) for one in said[2:]] == [sum(Fraction(one[i] or 0) for one in amounts) for i in range(4)]
    return [(entry[0], known.house.table, *entry[1:]) for entry in entries]


def bounds_at(known: Known, entry: int) -> list[Bounds | None]:
    """Those that held when an entry was made: one, but for a crash."""
    found = []
    for place in reversed([place for place, (last, _) in enumerate(known.bounds) if last < entry]):
        found.append(known.bounds[place][1])
        if place not in known.doubtful:
            break
    return found


def check_models(house: House, released: list[str]) -> None:
    """Models of protected tables were paid, once each; so was what was rolled back or forgotten since."""
    unpaid = house.ask(
        "SELECT m.name FROM bismarck_dp.model AS m LEFT JOIN bismarck_dp.entry AS e ON e.id = m.ledger_id"
        " AND e.outcome = 'paid' AND e.model = m.name AND e.verb = 'train' AND e.epsilon = m.epsilon::numeric"
        " WHERE e.id IS NULL"
    )
    assert unpaid == []
    assert house.ask("SELECT ledger_id FROM bismarck_dp.model GROUP BY 1 HAVING count(*) > 1") == []
    paid = {name for (name,) in house.ask("SELECT model FROM bismarck_dp.entry WHERE outcome = 'paid'")}
    assert set(released) <= paid
