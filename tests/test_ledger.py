"""What is paid stays paid: rollbacks, kills, crashes, races and renamed tables take nothing back."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import psycopg2
import pytest
from conftest import Table, two_classes
from ledgers import (
    LONG,
    Bounds,
    House,
    answer,
    check_nothing_is_left,
    crash,
    durable_house,
    fits,
    models,
    own_server,
)

from bismarck_dp.controller.database import Database, connect

SETTINGS = {"max_prepared_transactions": "4", "max_worker_processes": "2"}
"""The launcher of logical replication takes one of the worker slots: one debit at a time is left."""


@pytest.fixture
def house(db: Database, table: Any, analyst: Database, sql: Any) -> Iterator[House]:
    """A table with a budget of 1, to be spent in simple sums."""
    sql("GRANT dp_analyst TO analyst")
    rows: Table = table(*two_classes(100, 3))
    found = House(db, rows.name, "analyst")
    found.protect(1.0)
    yield found
    found.close()
    check_nothing_is_left(found)


@pytest.fixture(scope="module")
def own() -> Iterator[Database]:
    """A durable server, for what harms others."""
    with own_server(settings=SETTINGS) as db:
        yield db


@pytest.fixture
def durable(own: Database, request: Any) -> Iterator[House]:
    with durable_house(own, request.node.name) as found:
        yield found


def check_paid_without_model(house: House, releases: int = 1) -> None:
    assert [row[3] for row in house.paid()] == ["gone"] * releases
    assert house.spent() == pytest.approx((0.1 * releases, 0, releases))
    assert models(house) == []


# ---- what a caller can take back ----


def test_rollback(house: House) -> None:
    mine = house.connect()
    answer(mine, "BEGIN")
    assert len(answer(mine, f"SELECT weights FROM {house.train_sql('gone')}")[0][0]) == 3
    answer(mine, "ROLLBACK")
    check_paid_without_model(house)


def test_savepoint(house: House) -> None:
    mine = house.connect()
    answer(mine, "BEGIN")
    for _ in range(3):
        answer(mine, "SAVEPOINT before")
        answer(mine, f"SELECT {house.train_sql('gone')}")
        answer(mine, "ROLLBACK TO before")
    answer(mine, "COMMIT")
    check_paid_without_model(house, 3)


def test_caught_exceptions(house: House) -> None:
    body = f"PERFORM {house.train_sql('gone')}; RAISE 'no'; EXCEPTION WHEN raise_exception THEN NULL;"
    house.ask(f"DO $$ BEGIN BEGIN {body} END; BEGIN {body} END; END $$", user="analyst")
    check_paid_without_model(house, 2)


def test_an_answer_that_is_printed_and_then_undone(house: House) -> None:
    mine = house.connect()
    body = f"RAISE NOTICE 'weights %', (SELECT weights FROM {house.train_sql('gone')}); RAISE 'no';"
    with pytest.raises(psycopg2.errors.RaiseException):
        answer(mine, f"DO $$ BEGIN {body} END $$")
    assert any("weights {" in notice for notice in mine.notices), "the answer was seen"
    check_paid_without_model(house)


def test_an_abandoned_cursor(house: House) -> None:
    mine = house.connect()
    answer(mine, "BEGIN")
    answer(mine, f"DECLARE c CURSOR FOR SELECT weights FROM {house.train_sql('gone')}")
    assert house.paid() == [], "nothing was released yet"
    assert len(answer(mine, "FETCH c")[0][0]) == 3
    answer(mine, "ROLLBACK")
    check_paid_without_model(house)


def test_a_statement_timeout(house: House) -> None:
    """However long a debit takes here: the timeout grows until one is made before it."""
    mine = house.connect()
    for milliseconds in (500, 2000, 8000, 32000):
        answer(mine, f"SET statement_timeout = {milliseconds}")
        with pytest.raises(psycopg2.errors.QueryCanceled):
            answer(mine, f"SELECT {house.train_sql('gone', options=LONG)}")
        if house.paid():
            break
    check_paid_without_model(house)


class Training:
    """A statement in a thread, and how it ended."""

    def __init__(self, house: House, statement: str) -> None:
        self.connection = house.connect()
        self.error: psycopg2.Error | None = None
        self.pid = self.connection.info.backend_pid
        self.thread = threading.Thread(target=self._run, args=(statement,))
        self.thread.start()

    def _run(self, statement: str) -> None:
        try:
            answer(self.connection, statement)
        except psycopg2.Error as error:
            self.error = error

    def wait(self) -> None:
        self.thread.join(120)
        assert not self.thread.is_alive()
        self.connection.close()


def test_a_cancelled_training_is_paid(house: House) -> None:
    running = Training(house, f"SELECT {house.train_sql('gone', options=LONG)}")
    house.wait_for_entries(1)
    running.connection.cancel()
    running.wait()
    assert isinstance(running.error, psycopg2.errors.QueryCanceled)
    check_paid_without_model(house)


def kill_at_random_moments(house: House, kill: Any, times: int) -> None:
    """Half of them once the debit is seen, and half whenever: an entry that anybody has seen is there for good."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    coins, seen = random.Random(seed), []
    for turn in range(times):
        running = Training(house, f"SELECT {house.train_sql('gone', 0.001, LONG)}")
        if turn % 2:
            house.wait_for_entries(len(seen) + 1)
        time.sleep(coins.uniform(0, 0.06 if turn % 2 else 0.2))
        before = house.paid()
        assert before[: len(seen)] == seen
        kill(running.pid)
        running.wait()
        assert running.error is not None
        seen = house.paid()
        assert seen[: len(before)] == before
        assert len(seen) <= len(before) + 1, "a debit that was under way is made once, or not at all"
    assert len(seen) >= times // 2
    epsilon, _, releases = house.spent()
    assert releases == len(seen)
    assert epsilon == pytest.approx(0.001 * len(seen))
    assert models(house) == []
    check_nothing_is_left(house)


def test_terminated_backends(house: House) -> None:
    kill_at_random_moments(house, lambda pid: house.ask("SELECT pg_terminate_backend(%s)", pid), 20)


def test_killed_backends(durable: House) -> None:
    """Each takes the whole server with it, which recovers."""
    kill_at_random_moments(durable, lambda pid: crash(durable, pid), 20)


def test_a_crash_of_the_server(durable: House) -> None:
    cluster = durable.db.cluster
    assert cluster is not None
    durable.train("kept")
    before = durable.paid()
    durable.db.engine.dispose()
    os.kill(int((cluster.pgdata / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
    while (cluster.pgdata / "postmaster.pid").exists():
        time.sleep(0.05)
    cluster.start()
    durable.db.engine = connect(cluster.url()).engine
    assert durable.paid() == before
    assert durable.train("next") > before[-1][0]


def test_a_prepared_transaction(durable: House) -> None:
    mine = durable.connect()
    answer(mine, "BEGIN")
    answer(mine, f"SELECT {durable.train_sql('gone')}")
    answer(mine, "PREPARE TRANSACTION 'both'")
    assert len(durable.paid()) == 1
    answer(mine, "ROLLBACK PREPARED 'both'")
    check_paid_without_model(durable)


# ---- races ----


def race(house: House, trainings: int, connections: int, epsilon: float) -> list[str]:
    """Trainings, one after the other on each connection; how those that were refused were."""
    numbers, refusals = iter(range(trainings)), []

    def work() -> None:
        mine = house.connect()
        for number in numbers:
            try:
                answer(mine, f"SELECT {house.train_sql(f'm{number}', epsilon)}")
            except psycopg2.Error as error:
                refusals.append(error.diag.message_primary or str(error))
        mine.close()

    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return refusals


@pytest.mark.parametrize("composition", ["zcdp", "pure"])
def test_a_race_for_the_last_bit(house: House, composition: str) -> None:
    """Of two hundred as many are paid as fit, and they have their models."""
    delta = 1e-6 if composition == "zcdp" else 0.0
    house.protect(5.0 if composition == "zcdp" else 3.0, delta, json.dumps({"composition": composition}))
    refusals = race(house, 200, 8, 0.075 if composition == "zcdp" else 0.02)
    bounds, paid = Bounds.of(house), [row[4:] for row in house.paid()]
    assert all("does not allow" in refusal for refusal in refusals)
    assert len(paid) == 200 - len(refusals) == len(models(house))
    assert all(fits(bounds, paid[: i + 1]) for i in range(len(paid)))
    assert 100 < len(paid) < 200
    assert not fits(bounds, [*paid, paid[0]]), "no more would fit"
    epsilon, spent_delta, releases = house.spent()
    assert epsilon <= float(bounds.epsilon)
    assert spent_delta <= float(bounds.delta)
    assert releases == len(paid)


# ---- what becomes of tables ----


def check_spent_and_paid_from(house: House, releases: int) -> None:
    """What was spent before is still spent, and a training adds to it."""
    assert house.spent() == pytest.approx((0.1 * releases, 0, releases))
    house.train(f"m{releases}")
    assert house.spent("analyst") == pytest.approx((0.1 * (releases + 1), 0, releases + 1))


def test_a_renamed_table(house: House) -> None:
    house.train("m0")
    name = house.table
    house.ask(f"ALTER TABLE {name} RENAME TO other_name")
    house.table = "other_name"
    check_spent_and_paid_from(house, 1)
    house.ask(f"ALTER TABLE other_name RENAME TO {name}")
    house.table = name


def test_a_table_in_another_schema(house: House) -> None:
    name = house.table
    house.train("m0")
    house.ask(f"CREATE SCHEMA a; GRANT USAGE ON SCHEMA a TO analyst; ALTER TABLE {name} SET SCHEMA a")
    house.table = f"a.{name}"
    check_spent_and_paid_from(house, 1)
    house.ask("ALTER SCHEMA a RENAME TO b")
    house.table = f"b.{name}"
    check_spent_and_paid_from(house, 2)
    house.ask("DROP SCHEMA b CASCADE")
    house.table = name


def test_a_truncated_table(house: House) -> None:
    house.train("m0")
    house.ask(f"TRUNCATE {house.table}")
    assert house.spent() == pytest.approx((0.1, 0, 1))
    with pytest.raises(psycopg2.Error, match="no rows"):
        house.train("none")
    assert len(house.paid()) == 1
    house.ask(f"INSERT INTO {house.table} SELECT i, (-1) ^ i, '{{1,0,0}}' FROM generate_series(1, 100) AS i")
    check_spent_and_paid_from(house, 1)


def test_another_owner(house: House) -> None:
    """Who owns the table sets its budget, from what was spent on; who owned it does not."""
    house.train("m0")
    house.ask("CREATE ROLE heir LOGIN")
    house.ask(f"ALTER TABLE {house.table} OWNER TO heir")
    with pytest.raises(psycopg2.Error, match="was protected by another owner"):
        house.train("m1")
    house.ask(f"SELECT dp_protect('{house.table}', 1, 0)", user="heir")
    check_spent_and_paid_from(house, 1)
    house.ask(f"SELECT dp_protect('{house.table}', 0.25, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')", user="heir")
    assert house.spent("heir") == pytest.approx((0.2, 0, 2))
    with pytest.raises(psycopg2.Error, match="only the owner"):
        house.ask(f"SELECT dp_protect('{house.table}', 9, 0)", user="analyst")
    with pytest.raises(psycopg2.Error, match="does not allow"):
        house.train("more")
    house.ask(f"ALTER TABLE {house.table} OWNER TO postgres; DROP ROLE heir")


def test_a_table_that_is_dropped_and_made_again(house: House) -> None:
    house.train("m0")
    entries = [row[0] for row in house.paid()]
    house.ask(f"DROP TABLE {house.table}")
    house.ask(f"CREATE TABLE {house.table} AS SELECT i AS id, (-1) ^ i AS y, '{{1,0,0}}'::float8[] AS x"
              " FROM generate_series(1, 100) AS i")  # fmt: skip
    with pytest.raises(psycopg2.Error, match="permission denied for table"):
        house.train("stranger")
    with pytest.raises(psycopg2.Error, match="is not protected"):
        house.spent()
    kept = house.ask('SELECT id FROM bismarck_dp.ledger WHERE id = ANY (%s) AND "table" IS NULL', entries)
    assert [row[0] for row in kept] == entries
    owner = house.connect("postgres")
    answer(owner, f"SELECT dp_protect('{house.table}', 1, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')")
    assert any("was protected before, and is gone" in notice for notice in owner.notices)
    house.train("m1")
    assert house.spent("analyst") == pytest.approx((0.1, 0, 1))


def test_a_drop_that_is_rolled_back(house: House) -> None:
    house.train("m0")
    owner = house.connect("postgres")
    answer(owner, f"BEGIN; DROP TABLE {house.table}; ROLLBACK")
    check_spent_and_paid_from(house, 1)


def test_unprotecting_forgets_nothing(house: House) -> None:
    house.train("m0")
    house.ask(f"SELECT dp_unprotect('{house.table}')")
    with pytest.raises(psycopg2.Error, match="permission denied for table"):
        house.train("stranger")
    house.protect(0.25)
    check_spent_and_paid_from(house, 1)
    with pytest.raises(psycopg2.Error, match="does not allow"):
        house.train("more")


# ---- names and workers ----


def test_a_tables_number_is_no_name(house: House) -> None:
    """In another database it is another table's. So dumps have names, which lead to the table or to none."""
    read = "SELECT %s::bismarck_dp.source::oid::regclass::text"
    quoted = "Qu\"o.ted; '"
    house.ask('CREATE SCHEMA "A.b"; CREATE TABLE "A.b"."Qu""o.ted; \'" (y int)')
    try:
        number = house.ask("SELECT oid::text FROM pg_class WHERE relname = %s", quoted)[0][0]
        (name,) = house.ask("SELECT %s::oid::bismarck_dp.source::text", number)[0]
        assert house.ask(read, name) == [(name,)]
        for other in (number, "-", "nowhere", "no.where"):
            assert house.ask(read, other) == [("-",)]
        with pytest.raises(psycopg2.Error, match="invalid name syntax"):
            house.ask(read, "a b")
    finally:
        house.ask('DROP SCHEMA "A.b" CASCADE')


def test_no_free_worker(durable: House) -> None:
    """A debit that somebody keeps waiting takes the only slot: another is refused, and later there is room again."""
    durable.train("m0")
    holder = durable.connect("postgres")
    answer(holder, "BEGIN")
    answer(holder, "LOCK TABLE bismarck_dp.entry IN SHARE MODE")
    waiting = Training(durable, f"SELECT {durable.train_sql('m1')}")
    workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'bismarck_dp debit'"
    while durable.ask(workers) == [(0,)]:
        time.sleep(0.01)
    with pytest.raises(psycopg2.errors.InsufficientResources, match="nothing was spent"):
        durable.train("m2")
    answer(holder, "ROLLBACK")
    waiting.wait()
    assert len(durable.paid()) == len(models(durable)) == (2 if waiting.error is None else 1)
    releases = len(durable.paid())
    durable.train("m3")
    assert durable.spent() == pytest.approx((0.1 * (releases + 1), 0, releases + 1))


# ---- what is refused, and costs nothing ----


def test_a_protection_that_is_not_committed(house: House, table: Any) -> None:
    rows = table(*two_classes(100, 3))
    owner = house.connect("postgres")
    answer(owner, f"BEGIN; SELECT dp_protect('{rows.name}', 1, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')")
    with pytest.raises(psycopg2.Error, match="not committed yet, or was changed meanwhile: nothing was spent"):
        answer(owner, f"SELECT dp_train('{rows.name}', 'early', 'y', '{{x}}', 0.1)")
    answer(owner, "ROLLBACK")
    answer(owner, f"SELECT dp_protect('{rows.name}', 1, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')")
    answer(owner, f"SELECT dp_train('{rows.name}', 'late', 'y', '{{x}}', 0.1)")
    assert answer(owner, f"SELECT epsilon_spent, releases FROM dp_budget('{rows.name}')") == [(0.1, 1)]


def test_a_larger_total_that_is_not_committed(house: House) -> None:
    """What is paid is paid out of totals that are committed: the owner cannot raise one, train, and roll it back."""
    house.protect(0.1)
    owner = house.connect("postgres")
    answer(owner, "BEGIN")
    answer(owner, f"SELECT dp_protect('{house.table}', 5, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')")
    with pytest.raises(psycopg2.Error, match="nothing was spent"):
        answer(owner, f"SELECT {house.train_sql('more', 0.5)}")
    answer(owner, "ROLLBACK")
    assert house.paid() == []


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"options": '{"lambada": 1}'}, "unknown option"),
        ({"options": '{"adjacency": "zero-out"}'}, "protected under adjacency replace"),
        ({"more": ", loss => 'hinge'"}, "hinge"),
        ({"options": '{"lambda": 0.01, "project_dim": 100}'}, "maintenance_work_mem"),
        ({"options": '{"lambda": 0.01, "scale": "quantile", "scale_range": [1e-15, 1e15]}'}, "maintenance_work_mem"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": 1.1}, "does not allow epsilon 1.1"),
        ({"model": "taken"}, "is taken"),
        ({"model": ""}, "no name"),
        ({"features": "nothing"}, "does not exist"),
        ({"before": "BEGIN READ ONLY"}, "read-only"),
    ],
)
def test_a_training_that_is_refused_costs_nothing(house: House, training: dict[str, Any], message: str) -> None:
    if message == "maintenance_work_mem":
        widen(house)
    house.protect(1.0, 1e-5)
    house.train("taken")
    mine = house.connect()
    answer(mine, "SET maintenance_work_mem = '1MB'")
    answer(mine, training.pop("before", "SELECT 1"))
    features = training.pop("features", "x")
    statement = house.train_sql(**{"model": "refused", **training}).replace("{x}", f"{{{features}}}")
    with pytest.raises(psycopg2.Error, match=message):
        answer(mine, f"SELECT {statement}")
    assert [row[3] for row in house.paid()] == ["taken"]


def widen(house: House) -> None:
    house.ask(f"UPDATE {house.table} SET x = array_fill(0::float4, ARRAY[3000])")


@pytest.mark.parametrize(
    ("method", "option"),
    [("portions", '"scale": "quantile", "scale_range": [1e-15, 1e15]'), ("random_stopping", '"project_dim": 100')],
)
def test_tuning_without_memory_costs_nothing(house: House, method: str, option: str) -> None:
    widen(house)
    house.protect(1.0, 1e-5)
    mine = house.connect()
    answer(mine, "SET maintenance_work_mem = '1MB'")
    tuned = (
        f"dp_tune('{house.table}', 'm', 'y', '{{x}}', 0.5, 1e-6, options => '{{{option}}}',"
        f" grid => '{{\"lambda\": [0.1, 1]}}', method => '{method}')"
    )
    with pytest.raises(psycopg2.Error, match="maintenance_work_mem"):
        answer(mine, f"SELECT {tuned}")
    assert house.paid() == []


def refusal_of(house: House, epsilon: float, more: str = "") -> Any:
    with pytest.raises(psycopg2.Error, match="does not allow") as caught:
        house.train("refused", epsilon, more=more)
    return caught.value.diag


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_a_refusal_says_what_would_fit(house: House, delta: float) -> None:
    house.protect(1.0, delta)
    for number in range(3):
        house.train(f"m{number}", 0.25)
    said = refusal_of(house, 2.0)
    epsilon, _, _ = house.spent("analyst")
    assert f"3 releases spent epsilon {epsilon:.4g} of 1" in said.message_primary
    assert f"which leaves epsilon {1 - epsilon:.4g} by that count" in said.message_primary
    assert "nothing was spent now" in said.message_primary
    fitting = float(said.message_hint.split("epsilon ")[1].split(" ")[0])
    # It is the largest that eight halvings of a factor of a thousand find, in three digits.
    refusal_of(house, fitting * 1.1)
    house.train("fits", fitting)
    assert house.spent()[0] <= 1.0


def test_sums_are_exact(house: House) -> None:
    """Thrice 0.1 is 0.3, which doubles do not say."""
    house.protect(0.3, 0.0, '{"composition": "pure"}')
    for number in range(3):
        house.train(f"m{number}")
    assert sum(Fraction(row[6]) for row in house.paid()) == Fraction(3, 10)
    assert house.debit(epsilon="1e-9") == "refused"
    assert len(house.paid()) == 3


def test_entries_and_protections_are_not_changed(house: House) -> None:
    """Not even by a superuser, who can add entries, and would have to disable or drop triggers for more."""
    house.train("m0")
    before = house.ask("SELECT * FROM bismarck_dp.entry"), house.ask("SELECT * FROM bismarck_dp.protected")
    for statement in (
        "UPDATE bismarck_dp.entry SET epsilon = 1e-9",
        "UPDATE bismarck_dp.entry SET outcome = 'refused' WHERE false",
        "DELETE FROM bismarck_dp.entry",
        "TRUNCATE bismarck_dp.entry",
        "TRUNCATE bismarck_dp.protected CASCADE",
        "DELETE FROM bismarck_dp.protected",
        "SET session_replication_role = replica; DELETE FROM bismarck_dp.entry",
        "SET session_replication_role = replica; DELETE FROM bismarck_dp.protected",
        "UPDATE bismarck_dp.protected SET source = 'bismarck_dp.model' WHERE active",
        "UPDATE bismarck_dp.protected SET id = DEFAULT WHERE active",
        "INSERT INTO bismarck_dp.entry OVERRIDING SYSTEM VALUE TABLE bismarck_dp.entry"
        " ON CONFLICT (id) DO UPDATE SET slack = 0",
        "MERGE INTO bismarck_dp.entry e USING bismarck_dp.protected p ON e.protected = p.id WHEN MATCHED THEN DELETE",
    ):
        with pytest.raises(psycopg2.Error, match="never changed"):
            house.ask(statement)
    for thing in ("TABLE bismarck_dp.entry", "FUNCTION bismarck_dp.append_only",
                  "EVENT TRIGGER bismarck_dp_forget_dropped"):  # fmt: skip
        with pytest.raises(psycopg2.Error, match="extension bismarck_dp requires it"):
            house.ask(f"DROP {thing}")
    for verb in ("SELECT * FROM", "UPDATE", "DELETE FROM", "INSERT INTO", "TRUNCATE"):
        rest = {"UPDATE": " SET adjacency = ''", "INSERT INTO": " DEFAULT VALUES"}.get(verb, "")
        for one in ("entry", "protected"):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                house.ask(f"{verb} bismarck_dp.{one}{rest}", user="analyst")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        house.ask("SELECT bismarck_dp.debit('{}')", user="analyst")
    assert (house.ask("SELECT * FROM bismarck_dp.entry"), house.ask("SELECT * FROM bismarck_dp.protected")) == before


def test_an_entry_that_a_superuser_adds_can_only_cost(house: House) -> None:
    """INSERT and COPY need no debit; but amounts and their sums are not negative, and no sum is built upon twice."""
    house.train("m0")
    columns = (
        "protected, source, who, login, verb, model, spec, event, adjacency, unit_rows, slack, epsilon, delta, outcome,"
        " total_epsilon, total_delta, composition, releases, unpriced, sum_rho, sum_slack, sum_epsilon, sum_delta"
    )
    add = (
        f"INSERT INTO bismarck_dp.entry ({columns}) SELECT id, name, '', '', '', '', '{{}}', '{{}}', adjacency, 1, 0,"
        " %s, 0, 'paid', epsilon, delta, composition, %s, 1, 0, 0, %s, 0 FROM bismarck_dp.protected"
        f" WHERE source = '{house.table}'::regclass"
    )
    for epsilon, number, total in (("-0.1", 2, "0.1"), ("0.1", 2, "0.05"), ("0.1", None, "0.2"), ("0.1", 2, None)):
        with pytest.raises(psycopg2.errors.CheckViolation):
            house.ask(add, epsilon, number, total)
    with pytest.raises(psycopg2.errors.UniqueViolation):
        house.ask(add, "0.1", 1, "0.1")
    house.ask(add, "0.85", 2, "0.95")
    assert house.debit(epsilon="0.06") == "refused"
    assert house.debit(epsilon="0.05") == "paid"
    house.ask(add, "NaN", 4, "NaN")
    assert house.debit(epsilon="0.0001") == "refused"


def test_a_protection_that_is_being_changed(house: House) -> None:
    """Nothing is debited while its owner has a change open: of the order, say, that divergences add up at."""
    owner = house.connect("postgres")
    answer(owner, f"BEGIN; SELECT dp_protect('{house.table}', 2, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')")
    with pytest.raises(psycopg2.Error, match="was changed meanwhile: nothing was spent"):
        house.train("meanwhile")
    answer(owner, "COMMIT")
    house.train("then")
    assert [row[3] for row in house.paid()] == ["then"]
