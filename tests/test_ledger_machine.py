"""The ledger against the rules in fractions, step by step, with what hypothesis thinks of."""

from __future__ import annotations

import threading
from contextlib import suppress
from fractions import Fraction
from itertools import count
from typing import Any

import psycopg2
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledgers import Amounts, Bounds, House, answer, fits, make_house

from bismarck_dp.controller.database import Database

SETTINGS = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

numbers = count()

totals = st.sampled_from([(1.0, 1e-6), (3.0, 1e-6), (0.4, 1e-7)])
"""Of one composition: once something was spent their order is kept, and all divergences add up."""

releases = st.tuples(
    st.sampled_from([None, "0", "0.01", "0.0001", "0.05"]),
    st.sampled_from(["0", "1e-12", "1e-9"]),
    st.sampled_from(["0.1", "0.3", "0.7", "1", "0.000000000000000000000000000001"]),
    st.sampled_from(["0", "1e-9", "4.9e-7", "5e-7", "1e-6"]),
)
"""rho, slack, epsilon, delta"""


class Machine(RuleBasedStateMachine):
    """One table, what was paid on it, and the bounds that hold; None: it is not protected."""

    def __init__(self, db: Database) -> None:
        super().__init__()
        self.db = db
        self.paid: list[Amounts] = []
        self.bounds: Bounds | None = None

    @initialize(total=totals)
    def begin(self, total: tuple[float, float]) -> None:
        self.house: House = make_house(self.db, f"machine{next(numbers)}", "analyst", rows=10)
        self.connection = self.house.connect("postgres")
        self.protect(total)

    @rule(total=totals)
    def protect(self, total: tuple[float, float]) -> None:
        self.house.protect(*total)
        self.bounds = Bounds.of(self.house)

    @precondition(lambda self: self.bounds is not None)
    @rule()
    def unprotect(self) -> None:
        self.house.ask("SELECT dp_unprotect(%s)", self.house.table)
        self.bounds = None

    @rule(release=releases, undone=st.booleans())
    def debit(self, release: Amounts, undone: bool) -> None:
        """What is paid depends on the rules alone, and stays paid whatever becomes of the transaction."""
        request = self.request(release)
        if undone:
            answer(self.connection, "BEGIN")
        outcome = answer(self.connection, "SELECT outcome FROM bismarck_dp.debit(%s)", request)[0][0]
        if undone:
            answer(self.connection, "ROLLBACK")
        assert outcome == self.expected(release)
        self.paid += [release] if outcome == "paid" else []

    def request(self, release: Amounts) -> str:
        return self.house.request(**dict(zip(("rho", "slack", "epsilon", "delta"), release)))

    def expected(self, release: Amounts) -> str:
        if self.bounds is None:
            return "unprotected"
        return "paid" if fits(self.bounds, [*self.paid, release]) else "refused"

    @rule(release=releases, moment=st.floats(0, 0.02))
    def killed(self, release: Amounts, moment: float) -> None:
        """A debit whose session is ended meanwhile is made as a whole, if it fits, or not at all."""
        mine = self.house.connect("postgres")
        killer = threading.Timer(moment, self.house.ask, ["SELECT pg_terminate_backend(%s)", mine.info.backend_pid])
        request, before = self.request(release), self.entries()
        killer.start()
        with suppress(psycopg2.Error):
            answer(mine, "SELECT * FROM bismarck_dp.debit(%s)", request)
        killer.join()
        self.wait_for_workers()
        new = self.entries()[len(before) :]
        assert len(new) <= (self.expected(release) == "paid")
        self.paid += [release] * len(new)

    def entries(self) -> list[Any]:
        return self.house.paid()

    def wait_for_workers(self) -> None:
        while self.house.ask("SELECT 1 FROM pg_stat_activity WHERE backend_type LIKE 'bismarck%%'"):
            pass

    @precondition(lambda self: self.bounds is not None)
    @rule(epsilon=st.sampled_from([0.1, 0.3]))
    def train(self, epsilon: float) -> None:
        """A model is there if, and only if, its entry is; what it cost is what the ledger says."""
        name = f"machine model {next(numbers)}"
        before = len(self.entries())
        try:
            entry = self.house.train(name, epsilon)
        except psycopg2.errors.ConfigurationLimitExceeded:
            assert len(self.entries()) == before
            return
        new = self.entries()[before:]
        assert [one[0] for one in new] == [entry]
        release = new[0][4:]
        assert self.expected(release) == "paid"
        self.paid.append(release)

    @invariant()
    def sums_are_those_of_what_was_paid(self) -> None:
        if hasattr(self, "house"):
            said = self.house.ask(
                "SELECT s.releases, s.epsilon, s.delta FROM bismarck_dp.protected p, LATERAL bismarck_dp.spent(p.id) s"
                " WHERE p.source = %s::regclass",
                self.house.table,
            )[0]
            mine = [sum(Fraction(one[at]) for one in self.paid) for at in (2, 3)]
            assert [said[0], *map(Fraction, said[1:])] == [len(self.paid), *mine]

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.house.close()
            self.house.ask(f"DROP TABLE {self.house.table}")


def test_the_ledger_does_what_the_rules_say(db: Database, analyst: Database, sql: Any) -> None:
    sql("GRANT dp_analyst TO analyst")
    run_state_machine_as_test(lambda: Machine(db), settings=SETTINGS)


@pytest.mark.parametrize("release", [("0.01", "0", "0.1", "0"), (None, "0", "0.1", "0")])
def test_the_machine_knows_what_does_not_fit(db: Database, release: Amounts) -> None:
    """Or it would agree with anything."""
    house = make_house(db, f"machine{next(numbers)}", "analyst", rows=10)
    house.protect(1.0)
    bounds = Bounds.of(house)
    assert fits(bounds, [release] * 10)
    assert not fits(bounds, [release] * 11)
    house.close()
    house.ask(f"DROP TABLE {house.table}")
