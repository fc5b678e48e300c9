"""What the owner of a protected table has said of it, and what becomes of that."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import psycopg2
import pytest
import sqlalchemy
from conftest import two_classes
from protected import notices, protect
from sqlalchemy.exc import DBAPIError

from bismarck_dp import BismarckError
from bismarck_dp.controller.database import Database


@pytest.fixture
def rows(table: Any) -> Any:
    return table(*two_classes(400, 3))


# ---- which tables ----


KINDS = {
    "view": ("CREATE VIEW odd AS SELECT * FROM {0}", "DROP VIEW odd", "is no plain table"),
    "materialised view": (
        "CREATE MATERIALIZED VIEW odd AS SELECT * FROM {0}",
        "DROP MATERIALIZED VIEW odd",
        "is no plain table",
    ),
    "partitioned": ("CREATE TABLE odd (y float8) PARTITION BY RANGE (y)", "DROP TABLE odd", "is no plain table"),
    "inherits": ("CREATE TABLE odd () INHERITS ({0})", "DROP TABLE odd", "inheritance child"),
    "temporary": ("CREATE TEMP TABLE odd (y float8)", "DROP TABLE odd", "is temporary"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_protected(db: Database, rows: Any, kind: str) -> None:
    make, drop, message = (text.format(rows.name) for text in KINDS[kind])
    with db.engine.connect() as connection:
        connection.exec_driver_sql(make)
        with pytest.raises(Exception, match=message), connection.begin_nested():
            connection.exec_driver_sql("SELECT dp_protect('odd', 1, 0)")
        connection.exec_driver_sql(drop)
        connection.rollback()


def test_system_tables_cannot_be_protected(db: Database) -> None:
    for name in ("pg_catalog.pg_authid", "bismarck_dp.model", "bismarck_dp.entry"):
        with pytest.raises(BismarckError, match="belongs to the system or to an extension"):
            protect(db, name, 1.0, 0.0)


def test_arrays_of_other_lengths_count_for_nothing(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    said = protect(db, rows.name, 3.0, 0.0)
    assert said["lengths"] == {"x": 3}
    sql(f"UPDATE {rows.name} SET x = '{{1,2,3,4,5}}' WHERE id = 7")
    assert allowed.train(rows.name, epsilon=0.5).d == 3
    assert allowed.explain(rows.name, epsilon=0.5)["d"] == 3
    assert db.train(rows.name, epsilon=0.5).d == 3
    with pytest.raises(BismarckError, match="differ in length"):
        db.train(rows.name, algorithm="sgd")
    assert protect(db, rows.name, 3.0, 0.0)["lengths"] == {"x": 3}, "it stays"
    with pytest.warns(UserWarning, match="differ in length"):
        assert protect(db, rows.name, 3.0, 0.0, lengths=None)["lengths"] == {}, "it is measured anew"
    assert protect(db, rows.name, 3.0, 0.0, lengths={"x": 5})["lengths"] == {"x": 5}
    assert protect(db, rows.name, 4.0, 0.0)["lengths"] == {"x": 5}, "what was named stays, too"


@pytest.mark.parametrize("array", ["'{}'", "'{{1,2},{3,4}}'"])
def test_arrays_that_are_no_lists_have_no_length(db: Database, sql: Any, array: str) -> None:
    """And what was found once is taken again."""
    sql(f"CREATE TABLE odd AS SELECT i % 2 AS y, {array}::float8[] AS x FROM generate_series(1, 50) i")
    try:
        for _ in range(2):
            with pytest.warns(UserWarning, match='column "x" holds no list of numbers'):
                assert db.protect("odd", 1.0, 0.0)["lengths"] == {}
    finally:
        sql("DROP TABLE odd")


def test_a_length_that_no_array_has(db: Database, rows: Any) -> None:
    with pytest.warns(UserWarning, match='arrays in column "x" hold 3 numbers, not 4: none of them counts'):
        assert protect(db, rows.name, 3.0, 0.0, lengths={"x": 4})["lengths"] == {"x": 4}


def test_a_length_that_nobody_said(db: Database, allowed: Database, sql: Any) -> None:
    sql("CREATE TABLE hollow (y float8, x float8[])")
    try:
        assert protect(db, "hollow", 3.0, 0.0)["lengths"] == {}
        sql("INSERT INTO hollow SELECT i % 2, ARRAY[i, 1] FROM generate_series(1, 100) i")
        with pytest.raises(BismarckError, match='how many numbers column "x" holds is not known'):
            allowed.train("hollow", epsilon=0.5)
        protect(db, "hollow", 3.0, 0.0, lengths={"x": 2})
        assert allowed.train("hollow", epsilon=0.5).d == 2
    finally:
        sql("DROP TABLE hollow")


def test_the_coding_of_two_classes_is_found_when_a_table_is_protected(
    db: Database, allowed: Database, table: Any, sql: Any
) -> None:
    """And never again: what is released later depends on what the owner was shown."""
    x, y = two_classes(300, 3)
    rows = table(x, (y + 1) / 2)
    sql(f"ALTER TABLE {rows.name} ADD three int, ADD nothing int, ADD mostly int, ADD yes boolean")
    sql(f"UPDATE {rows.name} SET three = id % 3, mostly = id % 2 * 2 - 1, yes = y > 0")
    sql(f"UPDATE {rows.name} SET mostly = id WHERE id < 20")
    assert db.protect(rows.name, 9.0, 0.0)["classes"] == {"y": [0.0, 1.0], "mostly": [-1.0, 1.0], "yes": [0.0, 1.0]}
    sql(f"UPDATE {rows.name} SET y = y * 2 - 1")
    for ask in (
        allowed.train,
        partial(db.train, model="ours"),
        partial(allowed.tune, grid={"lambda": [0.1]}, model="t"),
    ):
        assert ask(rows.name, epsilon=0.5).classes.tolist() == [0.0, 1.0]
    assert db.protect(rows.name, 9.0, 0.0)["classes"]["y"] == [0.0, 1.0], "it stays"
    assert db.protect(rows.name, 9.0, 0.0, classes=None)["classes"]["y"] == [-1.0, 1.0], "it is found anew"
    assert db.protect(rows.name, 9.0, 0.0, classes=None, columns=["x", "yes"])["classes"] == {"yes": [0.0, 1.0]}


def test_a_unit_says_no_more_of_the_coding_than_of_a_model(db: Database, table: Any, sql: Any) -> None:
    """Rows of one unit beyond those that may count are not looked at for it."""
    x, y = two_classes(300, 3)
    rows = table(x, (y + 1) / 2)
    sql(f"ALTER TABLE {rows.name} ADD person int")
    sql(f"UPDATE {rows.name} SET person = id")
    sql(f"UPDATE {rows.name} SET person = 0, y = 7 WHERE id <= 100")
    assert "y" not in db.protect(rows.name, 1.0, 0.0)["classes"]
    assert db.protect(rows.name, 1.0, 0.0, classes=None, privacy_unit="person")["classes"]["y"] == [0.0, 1.0]


def test_what_is_not_there_yet_is_said(db: Database, allowed: Database, sql: Any) -> None:
    sql("CREATE TABLE soon (y int, x float8[])")
    try:
        with pytest.warns(UserWarning, match="yet") as said:
            db.protect("soon", 9.0, 0.0)
        assert sorted(str(one.message).partition(":")[0] for one in said) == [
            'column "x" holds no list of numbers yet',
            "there are no labels yet",
        ]
        sql("INSERT INTO soon SELECT i % 2, ARRAY[i, 1] FROM generate_series(1, 100) i")
        found = db.protect("soon", 9.0, 0.0, classes=None)
        assert (found["lengths"], found["classes"]) == ({"x": 2}, {"y": [0.0, 1.0]})
        assert allowed.train("soon", epsilon=0.5).d == 2
    finally:
        sql("DROP TABLE soon")


def test_the_coding_is_what_the_owner_said(db: Database, allowed: Database, table: Any) -> None:
    x, y = two_classes(300, 3)
    rows = table(x, (y + 1) / 2)
    assert db.protect(rows.name, 9.0, 0.0, classes={})["classes"] == {}
    for who in (db, allowed):
        for ask in (who.train, who.explain, partial(who.tune, grid={"lambda": [0.1]})):
            with pytest.raises(BismarckError, match='which values label column "y" has is not known'):
                ask(rows.name, epsilon=0.5)
    assert db.budget(rows.name)["releases"] == 0
    protect(db, rows.name, 9.0, 0.0, classes={"y": [0, 1]})
    assert allowed.train(rows.name, epsilon=0.5).classes.tolist() == [0.0, 1.0]
    assert allowed.tune(rows.name, grid={"lambda": [0.1, 1.0]}, epsilon=0.5, batch_size=5).classes.tolist() == [
        0.0,
        1.0,
    ]
    protect(db, rows.name, 9.0, 0.0, classes={"y": [0, 1, 2]})
    assert allowed.train(rows.name, epsilon=0.5).classes.tolist() == [0.0, 1.0, 2.0]
    assert allowed.train(rows.name, epsilon=0.5, classes=[1, 0]).classes.tolist() == [1.0, 0.0]


def test_columns_that_nobody_trains_on_are_in_nobodys_way(db: Database, allowed: Database, sql: Any) -> None:
    """Types that count as numbers elsewhere, arrays of words, and arrays of many lengths."""
    sql("CREATE DOMAIN share AS float8; CREATE DOMAIN label AS int")
    sql(
        "CREATE TABLE ward AS SELECT '1'::money AS paid, 7::oid AS key, ARRAY['a'] AS words, '1 2'::int2vector AS pair,"
        " array_fill(1, ARRAY[i % 3]) AS codes, (i % 2)::label AS y, ARRAY[i / 100.0, 1]::share[] AS x"
        " FROM generate_series(1, 100) i"
    )
    try:
        with pytest.warns(UserWarning, match='arrays in column "codes" differ in length'):
            said = db.protect("ward", 3.0, 0.0)
        assert (said["lengths"], said["classes"]) == ({"pair": 2, "x": 2}, {"y": [0.0, 1.0]})
        assert allowed.train("ward", epsilon=0.5).d == 2
        with pytest.raises(BismarckError, match='how many numbers column "codes" holds is not known'):
            allowed.train("ward", features="codes", epsilon=0.5)
    finally:
        sql("DROP TABLE ward; DROP DOMAIN share; DROP DOMAIN label")


def test_a_boolean_label_has_a_coding_of_its_own(db: Database, allowed: Database, sql: Any) -> None:
    sql("CREATE TABLE truth AS SELECT i % 2 = 0 AS y, i / 100.0 AS a, 1 AS b FROM generate_series(1, 100) i")
    try:
        db.protect("truth", 3.0, 0.0)
        model = allowed.train("truth", features=["a", "b"], epsilon=0.5)
        assert (model.classes.tolist(), model.d) == ([0.0, 1.0], 2)
    finally:
        sql("DROP TABLE truth")


def test_the_order_is_kept_once_something_was_spent(db: Database, rows: Any) -> None:
    first = protect(db, rows.name, 3.0, 1e-6)
    assert protect(db, rows.name, 1.0, 1e-6)["renyi_order"] != first["renyi_order"], "nothing was spent"
    kept = protect(db, rows.name, 3.0, 1e-6)["renyi_order"]
    db.train(rows.name, epsilon=0.5, delta=1e-8)
    lower = protect(db, rows.name, 2.5, 1e-6)
    assert lower["renyi_order"] == kept
    assert lower["rho"] < first["rho"]
    with pytest.raises(BismarckError, match="has releases under adjacency replace"):
        protect(db, rows.name, 3.0, 1e-6, adjacency="zero-out")
    assert protect(db, rows.name, 3.0, 1e-6, composition="pure")["rho"] is None


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_old_snapshots_protect_nothing(db: Database, allowed: Database, rows: Any, sql: Any, level: str) -> None:
    """They show whose the table was, and what was spent then."""
    sql(f"ALTER TABLE {rows.name} OWNER TO analyst")
    with allowed.engine.connect() as connection:
        connection.exec_driver_sql(f"BEGIN ISOLATION LEVEL {level}")
        connection.exec_driver_sql(f"SELECT count(*) FROM {rows.name}")
        connection.exec_driver_sql("COMMIT; BEGIN ISOLATION LEVEL " + level)
        connection.exec_driver_sql("SELECT count(*) FROM pg_class")
        sql(f"ALTER TABLE {rows.name} OWNER TO postgres")
        for call in (f"dp_protect('{rows.name}', 900, 0.5)", f"dp_unprotect('{rows.name}')"):
            connection.exec_driver_sql("SAVEPOINT before")
            with pytest.raises(Exception, match="isolation level READ COMMITTED"):
                connection.exec_driver_sql(f"SELECT {call}")
            connection.exec_driver_sql("ROLLBACK TO before")
        connection.exec_driver_sql("ROLLBACK")
    with pytest.raises(BismarckError, match="not protected"):
        db.budget(rows.name)


def test_another_total_adds_its_delta(db: Database, rows: Any) -> None:
    protect(db, rows.name, 1.0, 1e-6)
    protect(db, rows.name, 2.0, 1e-6)
    db.train(rows.name, epsilon=0.5, delta=1e-8)
    assert notices(db, f"SELECT dp_protect('{rows.name}', 2, 1e-6)") == []
    (said,) = notices(db, f"SELECT dp_protect('{rows.name}', 3, 1e-7)")
    assert "worth epsilon 3 and delta 1.1e-06 at most" in said


def test_a_protection_of_another_transaction_is_seen_at_once(db: Database, rows: Any) -> None:
    """And one of this transaction is not: the debit is another session's."""
    with db.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT dp_protect('{rows.name}', 1, 0, '{{\"classes\": {{\"y\": [-1, 1]}}}}')")
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="is not committed yet"), connection.begin_nested():
            connection.exec_driver_sql(f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 0.5)")
        connection.commit()
        connection.exec_driver_sql(f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 0.5)")
    assert db.budget(rows.name)["releases"] == 1


def test_labels_of_no_coding_are_not_heard_of(db: Database, allowed: Database, table: Any) -> None:
    """What the owner is refused for without privacy, nobody is told with it."""
    rows = table(np.ones((100, 2)) / 4, np.arange(100.0))
    protect(db, rows.name, 3.0, 0.0)
    with pytest.raises(BismarckError, match="has other values than"):
        db.train(rows.name, algorithm="sgd")
    for who, model in ((db, "ours"), (allowed, "theirs")):
        assert who.train(rows.name, model=model, epsilon=0.5).n == 100


# ---- what stays, and what does not ----


STRICT = {
    "composition": "pure",
    "adjacency": "zero-out",
    "analysts": ["analyst"],
    "columns": ["y", "x"],
    "lengths": {"x": 3},
    "classes": {"y": [0, 1]},
}


def test_another_budget_opens_nothing(db: Database, allowed: Database, rows: Any) -> None:
    """What is not said anew stays; null is the default."""
    first = db.protect(rows.name, 1.0, 0.0, **STRICT)
    second = db.protect(rows.name, 2.0, 1e-6)
    changed = {"epsilon": 2.0, "delta": 1e-6}
    assert second == {**first, **changed}
    db.unprotect(rows.name)
    assert db.protect(rows.name, 2.0, 1e-6) == second
    opened = db.protect(rows.name, 2.0, 1e-6, **dict.fromkeys(STRICT))
    assert opened["composition"] == "zcdp"
    assert opened["columns"] == "all"
    assert opened["analysts"] == ["dp_analyst"]
    assert opened["classes"] == {"y": [-1.0, 1.0]}, "found"
    assert opened["lengths"] == {"x": 3}, "measured"


def test_an_owner_sees_what_was_said(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    db.protect(rows.name, 1.0, 0.0, **STRICT)
    look = f"SELECT * FROM bismarck_dp.protections WHERE \"table\" = '{rows.name}'::regclass"
    (seen,) = sql(look)
    assert {name: seen[name] for name in STRICT} == STRICT
    assert (seen["active"], float(seen["epsilon"]), seen["owner"]) == (True, 1.0, "postgres")
    db.unprotect(rows.name)
    assert [one["active"] for one in sql(look)] == [False]
    with allowed.engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM bismarck_dp.protections").scalar_one() == 0


def test_classes_are_read_as_a_training_reads_them(db: Database, allowed: Database, rows: Any) -> None:
    assert protect(db, rows.name, 3.0, 0.0, classes={"y": 3})["classes"] == {"y": [0.0, 1.0, 2.0]}
    assert allowed.train(rows.name, epsilon=0.5).classes.tolist() == [0.0, 1.0, 2.0]
    for wrong in ({"y": None}, {"y": []}, {"y": "x"}, [0, 1], {"z": [0, 1]}):
        with pytest.raises(BismarckError, match=r"classes|\bz\b"):
            protect(db, rows.name, 3.0, 0.0, classes=wrong)
    assert db.budget(rows.name)["releases"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": {"y": 3}}, 'unknown array column in lengths "y"'),
        ({"lengths": {"x": math.inf}}, "cannot be sent as JSON"),
        ({"columns": {"y", "x"}}, "cannot be sent as JSON"),
        ({"unit_rows": 0}, "unit_rows"),
        ({"columns": 3}, "columns is no list of names"),
        ({"classes": {"x": [0, 1]}}, 'unknown column of numbers in classes "x"'),
        ({"classes": {"y": [0]}}, 'of column "y", classes is'),
    ],
)
def test_options_that_say_nothing(db: Database, rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        protect(db, rows.name, 3.0, 0.0, **options)
    with pytest.raises(BismarckError, match="is not protected"):
        db.budget(rows.name)


@pytest.mark.parametrize("epsilon", ["abc", [1], True, {}])
def test_a_budget_that_is_no_number(db: Database, rows: Any, epsilon: Any) -> None:
    with pytest.raises(BismarckError, match="epsilon is no number"):
        protect(db, rows.name, epsilon, 0.0)
    with pytest.raises(BismarckError, match="the table's name is no text"):
        protect(db, 3, 1.0, 0.0)  # type: ignore[arg-type]


def test_null_is_the_default(db: Database, rows: Any) -> None:
    said = protect(db, rows.name, 3.0, 0.0, unit_rows=None, privacy_unit=None, composition=None, analysts=None)
    assert (said["privacy_unit"], said["composition"], said["analysts"]) == ("row", "zcdp", ["dp_analyst"])


# ---- several budgets, one after the other ----


def test_all_budgets_that_paid_add_their_delta(db: Database, rows: Any) -> None:
    """Not only the last but one: the proof is in budget.py."""
    protect(db, rows.name, 9.0, 1e-5)
    db.train(rows.name, epsilon=0.9, delta=1e-8)
    with pytest.warns(UserWarning, match="under another budget.* epsilon 9 and delta 1.1e-05 at most"):
        protect(db, rows.name, 4.0, 1e-6)
    db.train(rows.name, epsilon=0.1, delta=1e-9)
    with pytest.warns(UserWarning, match="under 2 other budgets.* epsilon 9 and delta 1.2e-05 at most"):
        protect(db, rows.name, 5.0, 1e-6)
    entries = [one for one in db.ledger() if one["table"] == rows.name]
    assert [(one["total_epsilon"], one["total_delta"], one["composition"]) for one in entries] == [
        (9.0, 1e-5, "zcdp"),
        (4.0, 1e-6, "zcdp"),
    ]


def test_the_end_of_divergences_is_told(db: Database, rows: Any) -> None:
    """A release that simple sums have paid, and that divergences could not."""
    protect(db, rows.name, 1.0, 1e-6)
    train = f"SELECT dp_train('{rows.name}', '%s', 'y', '{{x}}', %s, %s)"
    assert notices(db, train % ("small", 0.1, 1e-8)) == []
    (said,) = notices(db, train % ("large", 0.7, 0))
    assert said.startswith(f"from here on epsilons and deltas of public.{rows.name} simply add up")
    assert db.budget(rows.name)["epsilon_spent"] == pytest.approx(0.8)
    assert notices(db, train % ("last", 0.1, 1e-8)) == []


def test_a_refusal_names_what_is_used_up(db: Database, rows: Any) -> None:
    protect(db, rows.name, 1.0, 1e-6, composition="pure")
    db.train(rows.name, epsilon=0.1, delta=9e-7)
    with pytest.raises(BismarckError, match=r"which leaves epsilon 0\.9 by") as refusal:
        db.train(rows.name, epsilon=0.1, delta=2e-7)
    assert refusal.value.hint == "a delta of at most 1e-07 may fit: no epsilon was found that does with delta 2e-07"
    db.train(rows.name, epsilon=0.1, delta=1e-7)


def test_a_budget_without_delta_says_so(db: Database, rows: Any) -> None:
    protect(db, rows.name, 1.0, 0.0)
    db.train(rows.name, epsilon=0.25)
    with pytest.raises(BismarckError, match="does not allow") as refusal:
        db.train(rows.name, epsilon=0.9, delta=1e-7)
    assert refusal.value.hint == (
        "no delta is left to simple sums: epsilon 0.75 would fit with delta 0, and an algorithm that does without"
    )
    db.train(rows.name, epsilon=0.75)
    with pytest.raises(BismarckError, match="does not allow") as refusal:
        db.train(rows.name, epsilon=0.5, delta=1e-7)
    assert refusal.value.hint == "no delta is left to simple sums, and nothing was found that would fit"


def test_less_delta_than_was_spent(db: Database, rows: Any) -> None:
    protect(db, rows.name, 1.0, 1e-6)
    db.train(rows.name, epsilon=0.5, delta=1e-8)
    protect(db, rows.name, 1.0, 0.0)
    with pytest.raises(BismarckError, match="does not allow") as refusal:
        db.train(rows.name, epsilon=0.1, delta=1e-8)
    assert refusal.value.hint == "no delta is left to simple sums, and nothing was found that would fit"


def test_a_tuning_is_told_what_sums_leave(db: Database, rows: Any) -> None:
    """Its plans take too long to look for more."""
    protect(db, rows.name, 1.0, 0.0, composition="pure")
    db.train(rows.name, epsilon=0.25)
    how = {"grid": {"lambda": [0.1, 0.01]}, "method": "random_stopping", "trials": 2.0, "batch_size": 5}
    with pytest.raises(BismarckError, match="does not allow") as refusal:
        db.tune(rows.name, epsilon=0.9, **how)
    assert refusal.value.hint == "epsilon 0.75 would fit, with delta 0 and all else the same"
    db.tune(rows.name, epsilon=0.75, **how)
    assert db.budget(rows.name)["releases"] == 2


# ---- a table that is another, or another's ----


def test_what_a_protected_table_becomes_can_be_let_go(db: Database, rows: Any, sql: Any) -> None:
    protect(db, rows.name, 1.0, 0.0)
    sql(f"CREATE TABLE heir () INHERITS ({rows.name})")
    try:
        with pytest.raises(BismarckError, match="inheritance child"):
            protect(db, rows.name, 1.0, 0.0)
        db.unprotect(rows.name)
        with pytest.raises(BismarckError, match="is not protected"):
            db.unprotect(rows.name)
    finally:
        sql("DROP TABLE heir")


@pytest.mark.parametrize("call", ["dp_protect('{}', 1, 0)", "dp_unprotect('{}')"])
def test_a_transaction_that_may_only_read_protects_nothing(db: Database, rows: Any, call: str) -> None:
    protect(db, rows.name, 1.0, 0.0)
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        with pytest.raises(DBAPIError, match="writes, and cannot in a transaction that may only read"):
            connection.exec_driver_sql("SELECT " + call.format(rows.name))


def test_a_new_owner_says_so_himself(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    """Until then nothing is released: a protection of another owner may be another table's, of the same number."""
    protect(db, rows.name, 1.0, 0.0)
    allowed.train(rows.name, epsilon=0.4)
    sql("CREATE ROLE heir")
    try:
        sql(f"ALTER TABLE {rows.name} OWNER TO heir")
        for who in (db, allowed):
            for ask in (who.train, who.explain):
                with pytest.raises(BismarckError, match="was protected by another owner"):
                    ask(rows.name, epsilon=0.4)
        assert db.protect(rows.name, 1.0, 0.0)["releases"] == 1
        with pytest.raises(BismarckError, match="does not allow"):
            allowed.train(rows.name, epsilon=0.7)
        allowed.train(rows.name, epsilon=0.6)
    finally:
        sql(f"ALTER TABLE {rows.name} OWNER TO postgres; DROP ROLE heir")


def test_a_protection_of_a_table_that_went_opens_no_other(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    """Tables of a temporary type go with it, and no event trigger hears of that. Numbers come again."""
    sql("CREATE ROLE ghost; GRANT CREATE ON SCHEMA public TO ghost")
    try:
        with db.engine.connect() as connection:
            connection.exec_driver_sql("CREATE TYPE pg_temp.tt AS (y float8, x float8[])")
            connection.exec_driver_sql("CREATE TABLE haunted OF pg_temp.tt")
            with pytest.raises(sqlalchemy.exc.DBAPIError, match="is made of a type, and may go with it"):
                connection.exec_driver_sql("SELECT dp_protect('haunted', 1, 0)")
        with db.engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO bismarck_dp.protected (source, name, owner, active, epsilon, delta, composition,"
                " adjacency, unit_rows, summed_delta, analysts, lengths, classes)"
                f" VALUES ('{rows.name}'::regclass::oid, 'haunted', 'ghost', true, 1000, 0.5, 'pure', 'replace',"
                """ 1, 0.5, '{analyst}', '{"x": 3}', '{"y": [-1, 1]}')"""
            )
        for who in (db, allowed):
            with pytest.raises(BismarckError, match="was protected by another owner"):
                who.train(rows.name, epsilon=900.0)
        assert db.ledger() == [] or rows.name not in {one["table"] for one in db.ledger()}
        db.unprotect(rows.name)
        assert db.train(rows.name, epsilon=0.5).ledger_id is None
    finally:
        sql("DROP OWNED BY ghost; DROP ROLE ghost")


def test_the_units_column_has_its_name(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    protect(db, rows.name, 3.0, 1e-6, privacy_unit="id")
    allowed.train(rows.name, epsilon=0.1, delta=1e-8)
    sql(f"ALTER TABLE {rows.name} RENAME COLUMN id TO number")
    for ask in (partial(allowed.train, epsilon=0.1), partial(allowed.explain, epsilon=0.1)):
        with pytest.raises(BismarckError, match='has no column "id", which is its privacy unit') as refusal:
            ask(rows.name)
        assert "give it back its name" in refusal.value.hint
    with pytest.raises(BismarckError, match='has no column "id", which is its privacy unit'):
        protect(db, rows.name, 4.0, 1e-6)
    sql(f"ALTER TABLE {rows.name} RENAME COLUMN number TO id")
    allowed.train(rows.name, epsilon=0.1, delta=1e-8)


@pytest.mark.parametrize("before", [False, True], ids=["never protected", "protected once"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_does_not_hide_a_protection(
    db: Database, analyst: Database, rows: Any, sql: Any, level: str, before: bool
) -> None:
    """Who may read the rows, or is lent the right to, pays for what began after the table was protected."""
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    if before:
        protect(db, rows.name, 1.0, 0.0)
        db.unprotect(rows.name)
    with analyst.engine.connect() as connection:
        connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
        connection.exec_driver_sql("SELECT 1")
        protect(db, rows.name, 1.0, 0.0)
        for call in (
            f"dp_train('{rows.name}', 'm', 'y', '{{x}}', 50)",
            f"dp_train('{rows.name}', 'm', 'y', '{{x}}', NULL, algorithm => 'sgd')",
            f"dp_explain('{rows.name}', 'm', 'y', '{{x}}', 50)",
        ):
            with pytest.raises(sqlalchemy.exc.DBAPIError) as refusal, connection.begin_nested():
                connection.exec_driver_sql(f"SELECT {call}")
            assert isinstance(refusal.value.orig, psycopg2.errors.ActiveSqlTransaction)
            assert "was protected after this transaction began" in str(refusal.value)
    assert db.budget(rows.name)["releases"] == 0


def test_the_owner_looks_at_no_label_for_a_private_model(db: Database, rows: Any, sql: Any) -> None:
    """Nor does who is lent the owner's rights: what counting labels says has no price."""
    protect(db, rows.name, 9.0, 0.0)
    body = f"SELECT value FROM dp_explain(''{rows.name}'', ''m'', ''y'', ''{{x}}'', 0.5) WHERE key = ''d''"
    sql(f"CREATE FUNCTION lent() RETURNS text LANGUAGE sql SECURITY DEFINER AS '{body}'")
    try:
        for change in ("y = id % 2", "y = 2 WHERE id < 50", "y = id", "x = '{1}' WHERE id = 1", "y = NULL"):
            sql(f"UPDATE {rows.name} SET {change}")
            model = db.train(rows.name, epsilon=0.5)
            assert (model.classes.tolist(), model.d, sql("SELECT lent()")) == ([-1.0, 1.0], 3, [{"lent": "3"}])
    finally:
        sql("DROP FUNCTION lent()")
