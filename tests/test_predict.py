"""Predictions in SQL: the numbers, whatever a model is made of and rows come as, and which model answers when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psycopg2
import pytest
import sqlalchemy
from conftest import Table, two_classes

from bismarck_dp import Model
from bismarck_dp.controller.database import Database
from bismarck_dp.losses import LOSSES

D = 15
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "intercept": {"fit_intercept": True},
    "scale": {"scale": [0.5 + 0.1 * j for j in range(D)]},
    "normalize": {"normalize": True, "feature_bound": 0.7, "fit_intercept": True},
    "project": {"project_dim": 6, "project_seed": 4},
    "everything": {"scale": 2.0, "project_dim": 9, "project_seed": 4, "normalize": True, "fit_intercept": True},
    "softmax": {"classes": [0, 1, 2, 5], "multiclass": "softmax"},
    "ovr": {"classes": [0, 1, 2, 5], "multiclass": "ovr", "fit_intercept": True, "scale": 2.0},
    "value": {"loss": "squared"},
    "value with intercept": {"loss": "squared", "fit_intercept": True},
}


def awkward_rows() -> Any:
    """Ordinary rows, long and short ones, extremes of doubles and of floats, and rows that are no numbers."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(60, D)) * rng.choice([0.01, 0.2, 1.0, 30.0], size=(60, 1))
    special = np.zeros((9, D))
    special[1] = 1e-200
    special[2] = 1e200
    special[3, 4] = np.nan
    special[4, 0] = np.inf
    special[5] = -1e-42
    special[6] = rng.normal(size=D) * 1e-39
    special[7, :2] = [1.0, 3e-46]
    special[8] = 3e38
    return np.vstack([rows, special])


def labels(options: dict[str, Any], n: int) -> Any:
    rng = np.random.default_rng(6)
    if options.get("loss") == "squared":
        return rng.normal(size=n)
    return rng.choice(options.get("classes", [0, 1]), size=n).astype(float)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float8", "float4"])
def test_every_shape_predicts_as_python_does(db: Database, table: Any, sql: Any, name: str, dtype: str) -> None:
    x = awkward_rows()
    if dtype == "float4":
        with np.errstate(over="ignore"):
            x = x.astype(np.float32).astype(np.float64)
    rows = table(x, labels(SHAPES[name], len(x)), dtype)
    model = db.train(rows.name, model="m", algorithm="sgd", **SHAPES[name])
    told = sql(f"SELECT dp_predict('m', x) AS p FROM {rows.name} ORDER BY id")
    got = np.array([np.nan if row["p"] is None else row["p"] for row in told])
    if LOSSES[model.loss].classification:
        np.testing.assert_array_equal(got, model.predict(x))
    else:
        np.testing.assert_allclose(got, model.predict(x), rtol=1e-11, atol=1e-300)
    assert np.isnan(got).sum() == (~np.isfinite(x).all(axis=1)).sum() > 0
    if model.loss == "logistic":
        chances = sql(f"SELECT dp_predict_proba('m', x) AS p FROM {rows.name} ORDER BY id")
        finite = np.isfinite(x).all(axis=1)
        assert [row["p"] is not None for row in chances] == finite.tolist()
        np.testing.assert_allclose(
            [row["p"] for row in chances if row["p"]], model.predict_proba(x)[finite], rtol=1e-9, atol=1e-12
        )
    batch = sql(f"SELECT dp_predict_all('m', array_agg(x ORDER BY id)) AS p FROM {rows.name}")[0]["p"]
    assert batch == [row["p"] for row in told]


def in_lanes(a: Any, b: Any) -> Any:
    """The sum of products as the kernels add it up: eight lanes, then what is left over."""
    whole = len(a) // 8 * 8
    lane, rest = np.zeros(8), 0.0
    for j in range(0, whole, 8):
        lane = lane + a[j : j + 8] * b[j : j + 8]
    for j in range(whole, len(a)):
        rest = rest + a[j] * b[j]
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7])) + rest


def margin_by_hand(model: Model, x: Any) -> float:
    """Norm, factor, rounding toward zero and dot product, one operation at a time."""
    norm, constant = np.sqrt(in_lanes(x, x)), float(len(model.intercept) > 0)
    norm = np.sqrt(norm * norm + constant)
    factor = model.feature_bound / norm if norm > model.feature_bound else 1.0
    row = np.append(x, 1.0)[: len(x) + len(model.intercept)] * factor
    single = row.astype(np.float32)
    single = np.where(np.abs(single) > np.abs(row), np.nextafter(single, np.float32(0)), single).astype(np.float64)
    return float(in_lanes(np.append(model.weights, model.intercept), single))


@pytest.mark.parametrize("d", [1, 7, 8, 9, 15, 16, 50])
@pytest.mark.parametrize("intercept", [False, True])
def test_margins_are_the_same_to_the_bit(db: Database, table: Any, sql: Any, d: int, intercept: bool) -> None:
    """Of long and short rows, of doubles and floats, of numbers that are subnormal as floats."""
    rng = np.random.default_rng(d)
    x = rng.normal(size=(200, d)) * rng.choice([1e-42, 1e-3, 0.3, 1.0, 1e5], size=(200, 1))
    model = db.train(
        table(x, rng.normal(size=200), "float8").name, model="m", algorithm="sgd", loss="squared",
        fit_intercept=intercept, feature_bound=1.3,
    )  # fmt: skip
    single = x.astype(np.float32)
    for rows, dtype in ((x, "float8"), (single.astype(float), "float4")):
        name = table(rows, np.zeros(200), dtype).name
        got = [row["p"] for row in sql(f"SELECT dp_predict('m', x) AS p FROM {name} ORDER BY id")]
        assert got == [margin_by_hand(model, row) for row in rows]


def plan_of(db: Database, query: str) -> str:
    """The plan as the server prints it for its developers; EXPLAIN shows every change of type as a cast."""
    with session(db) as cursor:
        cursor.execute("SET debug_print_plan = on; SET client_min_messages = log")
        cursor.execute(query)
        notices = "".join(cursor.connection.notices)
    assert "FUNCEXPR" in notices
    return notices


@pytest.mark.parametrize("element", ["float4", "int2", "int4", "int8", "numeric"])
def test_other_arrays_are_read_without_a_cast(db: Database, table: Any, sql: Any, element: str) -> None:
    """The plan has none left, numeric aside, whose cast is PostgreSQL's own; answers are those of the cast."""
    x = np.random.default_rng(1).integers(-3, 4, size=(50, 3)).astype(float)
    rows = table(x, x[:, 0] > 0, "float8")
    model = db.train(rows.name, model="m", algorithm="sgd")
    sql(f"CREATE TABLE others AS SELECT id, x::{element}[] AS x FROM {rows.name}")
    try:
        assert ("ARRAYCOERCEEXPR" in plan_of(db, "SELECT dp_predict('m', x) FROM others")) == (element == "numeric")
        for call in ("dp_predict('m', x)", "dp_predict('m', x::float8[])", "dp_predict('m', x::float8[]::float8[])"):
            got = [row["p"] for row in sql(f"SELECT {call} AS p FROM others ORDER BY id")]
            assert got == model.predict(x).tolist()
        matrix = sql("SELECT dp_predict_all('m', array_agg(x ORDER BY id)) AS p FROM others")[0]["p"]
        assert matrix == model.predict(x).tolist()
        grouped = "SELECT x::float8[] AS x, dp_predict('m', x) AS p, count(*) FROM others GROUP BY {} ORDER BY 1"
        plain = sql(grouped.format("x::float8[]") if element != "numeric" else grouped.format("x"))
        assert [row["p"] for row in plain] == model.predict([row["x"] for row in plain]).tolist()
        if element != "numeric":
            for row in sql(grouped.format("ROLLUP (x::float8[])")):
                assert (row["p"] is None) == (row["x"] is None)
    finally:
        sql("DROP TABLE others")


def test_literals_parameters_and_missing_numbers(db: Database, table: Any, sql: Any) -> None:
    model = db.train(table(*two_classes(100, 2)).name, model="m", algorithm="sgd")
    want = model.predict([[1, 2]])[0]
    for call in ("'{1,2}'", "ARRAY[1,2]", "ARRAY[1.0,2.0]", "'{1,2}'::float4[]", "'{1,2}'::int[]"):
        assert sql(f"SELECT dp_predict('m', {call}) AS p")[0]["p"] == want, call
    assert sql("SELECT dp_predict('m', CAST(:x AS float4[])) AS p", x=[1.0, 2.0])[0]["p"] == want
    assert sql("SELECT dp_predict('m', ARRAY[1, NULL]::float4[]) AS p")[0]["p"] is None
    assert sql("SELECT dp_predict(NULL, '{1,2}') AS p, dp_predict('m', NULL) AS q")[0] == {"p": None, "q": None}
    for given, answers in (
        ("'{{1,2},{NULL,2},{1,NaN},{1,2}}'", [want, None, None, want]),
        ("'{{1,2},{NULL,2},{1,2}}'::float4[]", [want, None, want]),
        ("'{{1,2},{NULL,2},{1,2}}'::int2[]", [want, None, want]),
        ("'{}'", []),
    ):
        assert sql(f"SELECT dp_predict_all('m', {given}) AS p")[0]["p"] == answers


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("dp_predict('m', '{{1,2}}')", "features must be one list, not a matrix"),
        ("dp_predict('m', '{1,2,3}')", 'model "m" has 2 features, not 3'),
        ("dp_predict('m', '{}')", 'model "m" has 2 features, not 0'),
        ("dp_predict_all('m', '{1,2}')", "features must be a list of rows"),
        ("dp_predict_all('m', '{{1},{2}}')", 'model "m" has 2 features, not 1'),
        ("dp_predict_all('ghost', '{}')", 'model "ghost" does not exist'),
        ("dp_encode('ghost', ROW(1))", 'model "ghost" does not exist'),
        ("dp_encode('m', ROW(1))", 'the row has no column "x"'),
        ("dp_encode('m', r) FROM (SELECT 'a'::text AS x) r", 'column "x" has type text, which is not a number'),
        ("dp_encode('m', r) FROM (SELECT ARRAY[1, 2, 3] AS x) r", 'model "m" has 2 features, not 3'),
        ("dp_encode('m', r) FROM (SELECT ARRAY['a'] AS x) r", "which is not an array of numbers"),
        ("dp_encode('m', r) FROM (SELECT 1 AS x) r", 'model "m" has 2 features, not 1'),
    ],
)
def test_errors_name_what_is_wrong(db: Database, table: Any, sql: Any, call: str, message: str) -> None:
    db.train(table(*two_classes(100, 2)).name, model="m", algorithm="sgd")
    with pytest.raises(Exception, match=message):
        sql(f"SELECT {call}")


def test_workers_give_the_same_answers(db: Database, table: Any) -> None:
    x, y = two_classes(5000, 4)
    rows = table(x, y)
    model = db.train(rows.name, model="m", algorithm="sgd")
    query = f"SELECT id, dp_predict('m', x) AS p, dp_predict_proba('m', x) AS q FROM {rows.name}"
    with db.engine.begin() as connection:
        connection.exec_driver_sql(
            "SET LOCAL parallel_setup_cost = 0; SET LOCAL parallel_tuple_cost = 0;"
            " SET LOCAL min_parallel_table_scan_size = 0; SET LOCAL parallel_leader_participation = off"
        )
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, VERBOSE) {query}").scalars().all()
        assert any("Workers Launched: " in line and "Launched: 0" not in line for line in plan), plan
        found = sorted(connection.exec_driver_sql(query).all())
        # A model of this very transaction, that no other session sees: its workers do.
        connection.exec_driver_sql("UPDATE bismarck_dp.model SET classes = '{7, 8}'")
        own = connection.exec_driver_sql(f"SELECT DISTINCT dp_predict('m', x) FROM {rows.name}").scalars().all()
        connection.rollback()
    assert [row[1] for row in found] == model.predict(x).tolist()
    np.testing.assert_allclose([row[2] for row in found], model.predict_proba(x), atol=1e-12)
    assert sorted(own) == [7, 8]


# ---- rows by the names of their columns ----


def test_rows_are_encoded_as_in_training(db: Database, sql: Any) -> None:
    sql("CREATE TYPE size AS ENUM ('small', 'large')")
    sql(
        "CREATE TABLE patients AS SELECT i AS id, (i % 2)::int AS y, (i % 7)::numeric AS age,"
        " (ARRAY['a', 'b', 'c', NULL])[i % 4 + 1] AS colour, (i % 3)::int2 AS grade,"
        " (ARRAY['small', 'large'])[i % 2 + 1]::size AS size FROM generate_series(1, 60) i"
    )
    try:
        lists = {"colour": ["b", "a"], "grade": [1, 2], "size": ["large"]}
        features = ["age", "colour", "grade", "size"]
        model = db.train("patients", model="m", features=features, algorithm="sgd", categories=lists)
        rows = sql(
            "SELECT p.*, dp_encode('m', p) AS x, dp_predict('m', dp_encode('m', p)) AS told FROM patients p ORDER BY id"
        )
        want = model.encode([dict(row) for row in rows])
        assert model.d == 6
        assert [row["x"] for row in rows] == want.tolist()
        assert [row["told"] for row in rows] == model.predict(want).tolist()
        # A view with other columns in another order, a record, and missing values.
        shuffled = "SELECT size, 0 AS z, grade, colour, age FROM patients WHERE id = 1"
        assert sql(f"SELECT dp_encode('m', r) AS x FROM ({shuffled}) r")[0]["x"] == want[0].tolist()
        none = "SELECT NULL::size AS size, 9 AS grade, 'none' AS colour, NULL::int AS age"
        got = sql(f"SELECT dp_encode('m', r) AS x, dp_predict('m', dp_encode('m', r)) AS p FROM ({none}) r")[0]
        assert np.isnan(got["x"][0])
        assert (got["x"][1:], got["p"]) == ([0, 0, 0, 0, 0], None)
        with pytest.raises(Exception, match='the row has no column "age"'):
            sql("SELECT dp_encode('m', r) FROM (SELECT 1 AS grade) r")
        with pytest.raises(Exception, match='column "age" has type text'):
            sql("SELECT dp_encode('m', r) FROM (SELECT 'x'::text AS age, colour, grade, size FROM patients) r")
    finally:
        sql("DROP TABLE patients; DROP TYPE size")


def test_rows_with_one_array_are_encoded(db: Database, table: Any, sql: Any) -> None:
    x, y = two_classes(50, 3)
    rows = table(x, y)
    db.train(rows.name, model="m", algorithm="sgd")
    got = sql(f"SELECT dp_encode('m', t) AS x FROM {rows.name} t ORDER BY id")
    assert np.array_equal([row["x"] for row in got], x)
    assert sql("SELECT dp_encode('m', r) AS x FROM (SELECT NULL::float8[] AS x) r")[0]["x"] is None
    gap = sql("SELECT dp_encode('m', r) AS x FROM (SELECT ARRAY[1, NULL, 3] AS x) r")[0]["x"]
    assert np.array_equal(gap, [1, np.nan, 3], equal_nan=True)


def test_an_encoder_follows_its_table_and_its_model(db: Database, table: Any, sql: Any) -> None:
    """PL/pgSQL keeps a call site for a transaction, in which columns and models may change."""
    sql("CREATE TABLE pairs AS SELECT i % 2 AS y, 0 AS gone, i AS a, -i AS b FROM generate_series(1, 20) i")
    try:
        db.train("pairs", model="m", features=["a", "b"], algorithm="sgd")
        with db.engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE FUNCTION pg_temp.look() RETURNS float8[] LANGUAGE plpgsql AS $$ DECLARE r record; x float8[];"
                " BEGIN SELECT * INTO r FROM pairs WHERE a = 3; x := dp_encode('m', r); RETURN x; END $$"
            )
            connection.exec_driver_sql("CREATE TEMP TABLE seen (x float8[])")
            connection.exec_driver_sql(
                "DO $$ BEGIN INSERT INTO seen SELECT pg_temp.look(); ALTER TABLE pairs DROP COLUMN gone;"
                " INSERT INTO seen SELECT pg_temp.look();"
                " UPDATE bismarck_dp.model SET features = '{b,a}' WHERE name = 'm';"
                " INSERT INTO seen SELECT pg_temp.look(); END $$"
            )
            assert connection.exec_driver_sql("SELECT x FROM seen").scalars().all() == [[3, -3], [3, -3], [-3, 3]]
            connection.rollback()
    finally:
        sql("DROP TABLE pairs")


# ---- which model answers ----


@contextmanager
def session(db: Database, user: str = "postgres") -> Iterator[Any]:
    url = db.engine.url
    connection = psycopg2.connect(host=url.query["host"], port=url.query["port"], user=user, dbname="bismarck")
    connection.autocommit = True
    try:
        yield connection.cursor()
    finally:
        connection.close()


ASK = "SELECT dp_predict('m', '{1}')"


def ask(cursor: Any) -> Any:
    cursor.execute(ASK)
    return cursor.fetchone()[0]


def absent(cursor: Any) -> bool:
    try:
        ask(cursor)
    except psycopg2.errors.UndefinedObject:
        return True
    return False


def answers(number: int) -> str:
    """A statement after which the model answers with that number."""
    return f"UPDATE bismarck_dp.model SET classes = '{{{number},{number}}}' WHERE name = 'm'"


@pytest.fixture
def model(db: Database, table: Any) -> Iterator[Any]:
    """Two sessions of the superuser, and a model that answers 1."""
    rows = table([[1.0], [0.5]], [1.0, 0.0])
    db.train(rows.name, model="m", algorithm="sgd")
    with session(db) as one, session(db) as two:
        one.execute(answers(1))
        assert ask(one) == ask(two) == 1
        yield one, two, rows.name


def train_again(rows: str) -> str:
    return f"SELECT name FROM dp_train('{rows}', 'm', 'y', '{{x}}', NULL, algorithm => 'sgd')"


def test_a_model_changed_forgotten_or_made_again_elsewhere(model: Any) -> None:
    one, two, rows = model
    two.execute(answers(2))
    assert ask(one) == 2
    two.execute("SELECT dp_forget('m')")
    assert absent(one)
    two.execute(train_again(rows))
    two.execute(answers(3))
    assert ask(one) == 3
    two.execute("DELETE FROM bismarck_dp.model")
    two.execute("VACUUM bismarck_dp.model")
    assert absent(one), "its page is gone"


def copies(names: str, number: int = 9) -> str:
    """A statement that registers more models like the first one, all in one transaction, which answer the number."""
    last = "(SELECT coalesce(max(id), 1) FROM bismarck_dp.model)"
    changed = f"jsonb_build_object('id', n.at + {last}, 'name', n.name, 'classes', ARRAY[{number}, {number}])"
    return (
        "INSERT INTO bismarck_dp.model OVERRIDING SYSTEM VALUE"
        f" SELECT (jsonb_populate_record(k, {changed})).*"
        f" FROM kept k, unnest('{names}'::text[]) WITH ORDINALITY n(name, at)"
    )


def place_of(cursor: Any, name: str) -> Any:
    cursor.execute("SELECT ctid FROM bismarck_dp.model WHERE name = %s", (name,))
    return cursor.fetchone()[0]


def test_a_model_made_in_the_place_of_another(model: Any) -> None:
    """The place of a row that was replaced is used again, once its page is filled halfway."""
    one, two, _ = model
    two.execute("ALTER TABLE bismarck_dp.model SET (fillfactor = 50)")
    assert ask(one) == 1
    place = place_of(two, "m")
    for number in range(2, 200):
        two.execute(answers(number))
        if place_of(two, "m") == place:
            break
    assert place_of(two, "m") == place
    assert ask(one) == number
    two.execute("ALTER TABLE bismarck_dp.model RESET (fillfactor)")


def test_a_table_of_models_that_is_rewritten_or_emptied(model: Any) -> None:
    """Rows move to others' places, of the same transaction."""
    one, two, _ = model
    two.execute("CREATE TEMP TABLE kept AS SELECT * FROM bismarck_dp.model")
    two.execute("TRUNCATE bismarck_dp.model")
    assert absent(one)
    two.execute(copies("{m, other}"))
    place = place_of(two, "m")
    one.execute("SELECT dp_predict('m', '{1}'), dp_predict('other', '{1}')")
    assert one.fetchone() == (9, 9)
    two.execute("DELETE FROM bismarck_dp.model WHERE name = 'm'")
    two.execute("VACUUM FULL bismarck_dp.model")
    assert place_of(two, "other") == place
    assert absent(one)
    one.execute("SELECT dp_predict('other', '{1}')")
    assert one.fetchone() == (9,)


def test_what_is_undone_is_forgotten(model: Any) -> None:
    one, two, rows = model
    one.execute(f"BEGIN; {answers(2)}")
    assert ask(one) == 2
    assert ask(two) == 1
    one.execute(f"SAVEPOINT s; {answers(3)}")
    assert ask(one) == 3
    one.execute("ROLLBACK TO s")
    assert ask(one) == 2
    one.execute("SAVEPOINT t; SELECT dp_forget('m'); SAVEPOINT u")
    assert absent(one)
    one.execute("ROLLBACK TO t")
    assert ask(one) == 2
    one.execute(f"{answers(4)}; RELEASE t")
    assert ask(one) == 4
    one.execute("ROLLBACK")
    assert ask(one) == ask(two) == 1
    one.execute("SELECT dp_forget('m')")
    one.execute("BEGIN")
    one.execute(train_again(rows))
    assert ask(one) is not None
    one.execute("ROLLBACK")
    assert absent(one)


def test_what_is_undone_is_forgotten_even_if_no_snapshot_shows_it(db: Database, model: Any) -> None:
    """A transaction that began later is over already: what ends now moves no snapshot's bounds."""
    one, _, _ = model
    with session(db) as newer:
        one.execute(f"BEGIN; SELECT 1; SAVEPOINT s; {answers(2)}")
        newer.execute("SELECT pg_current_xact_id()")
        assert ask(one) == 2
        one.execute("ROLLBACK TO s")
        assert ask(one) == 1
        one.execute("ROLLBACK")


def test_a_snapshot_keeps_its_model(model: Any) -> None:
    one, two, _ = model
    one.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    assert ask(one) == 1
    two.execute(answers(2))
    assert ask(two) == 2
    assert ask(one) == 1
    two.execute("SELECT dp_forget('m')")
    assert ask(one) == 1
    one.execute("COMMIT")
    assert absent(one)


def test_a_cursor_keeps_its_model(model: Any) -> None:
    """The cursor's snapshot and the statement's take turns in one session."""
    one, two, rows = model
    one.execute(f"BEGIN; DECLARE c CURSOR FOR SELECT dp_predict('m', '{{1}}') FROM {rows}")
    one.execute("FETCH c")
    assert one.fetchone()[0] == 1
    two.execute(answers(2))
    assert ask(one) == 2
    one.execute("FETCH c")
    assert one.fetchone()[0] == 1
    one.execute("COMMIT")


def test_a_snapshot_does_not_see_what_came_later(model: Any) -> None:
    one, two, rows = model
    two.execute("SELECT dp_forget('m')")
    one.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    two.execute(train_again(rows))
    assert ask(two) is not None
    one.execute("SAVEPOINT s")
    assert absent(one)
    one.execute("ROLLBACK")
    assert not absent(one)


def test_an_old_transaction_that_ends_is_noticed(db: Database, model: Any) -> None:
    """It moves neither the first nor the last transaction of a snapshot: an older one runs, and a newer one is done."""
    one, two, _ = model
    with session(db) as older, session(db) as newer:
        older.execute("BEGIN; SELECT pg_current_xact_id()")
        two.execute(f"BEGIN; {answers(2)}")
        newer.execute("SELECT pg_current_xact_id()")
        waiter = threading.Timer(0.5, lambda: two.execute("COMMIT"))
        waiter.start()
        one.execute(
            "DO $$ BEGIN IF dp_predict('m', '{1}') <> 1 THEN RAISE 'early'; END IF; PERFORM pg_sleep(2);"
            " IF dp_predict('m', '{1}') <> 2 THEN RAISE 'late'; END IF; END $$"
        )
        waiter.join()
        older.execute("ROLLBACK")


def test_rights_are_asked_for_again(db: Database, model: Any) -> None:
    one, two, _ = model
    two.execute("CREATE ROLE owners; CREATE ROLE visitor LOGIN; UPDATE bismarck_dp.model SET owner = 'owners'")
    try:
        with session(db, "visitor") as visitor:
            assert absent(visitor)
            two.execute("GRANT owners TO visitor")
            assert ask(visitor) == 1
            two.execute("REVOKE owners FROM visitor")
            assert absent(visitor)
        assert ask(one) == 1
        one.execute("SET ROLE visitor")
        assert absent(one)
        one.execute("RESET ROLE")
        assert ask(one) == 1
    finally:
        one.execute("RESET ROLE")
        two.execute("DELETE FROM bismarck_dp.model; DROP ROLE owners, visitor")


def test_an_extension_dropped_and_made_again(db: Database) -> None:
    """In a database of its own: other tables, other functions, under the same names."""
    with session(db) as cursor:
        cursor.execute("CREATE DATABASE again")
    url = db.engine.url
    connection = psycopg2.connect(host=url.query["host"], port=url.query["port"], user="postgres", dbname="again")
    connection.autocommit = True
    try:
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE rows AS SELECT i % 2 AS y, ARRAY[i::float8] AS x FROM generate_series(1, 9) i")
        for number in (1, 2):
            cursor.execute("CREATE EXTENSION bismarck_dp CASCADE")
            assert absent(cursor)
            cursor.execute(train_again("rows"))
            cursor.execute(answers(number))
            assert ask(cursor) == number
            cursor.execute("DROP EXTENSION bismarck_dp CASCADE; DROP SCHEMA IF EXISTS bismarck_dp CASCADE")
    finally:
        connection.close()
        with session(db) as cursor:
            cursor.execute("DROP DATABASE again")


def test_more_models_than_are_kept(model: Any) -> None:
    """They take turns, and each answers for itself; memory stays within bounds."""
    one, _, _ = model
    one.execute("CREATE TEMP TABLE kept AS SELECT * FROM bismarck_dp.model")
    for number in range(1, 151):
        one.execute(copies(f"{{m{number}}}", number))
    turns = "SELECT count(*) FROM generate_series(1, 3) t, generate_series(1, 150) i"
    one.execute(f"{turns} WHERE dp_predict('m' || i, '{{1}}') = i")
    assert one.fetchone()[0] == 450
    one.execute("SELECT count(*) FROM pg_backend_memory_contexts WHERE name = 'bismarck_dp model'")
    assert one.fetchone()[0] == 64


def test_a_model_too_large_to_keep_goes_with_its_transaction(db: Database, table: Any) -> None:
    """A projection from 40,000 features to 300 is a matrix of 96 MB."""
    rng = np.random.default_rng(0)
    rows = table(rng.normal(size=(4, 40_000)), [0, 1, 0, 1])
    kept = "SELECT coalesce(sum(total_bytes), 0) FROM pg_backend_memory_contexts WHERE name = 'bismarck_dp model'"
    with session(db) as one:
        one.execute("SET maintenance_work_mem = '200MB'")
        one.execute(
            f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', NULL, algorithm => 'sgd',"
            ' options => \'{"project_dim": 300, "epochs": 1}\')'
        )
        one.execute(f"BEGIN; SELECT dp_predict('m', x) FROM {rows.name}")
        one.execute(kept)
        assert one.fetchone()[0] > 90e6
        one.execute("COMMIT")
        one.execute(kept)
        assert one.fetchone()[0] == 0


def test_no_model_is_looked_up_where_no_query_runs(db: Database, table: Any, sql: Any) -> None:
    """A domain's CHECK right after COMMIT has no snapshot: an error, where there was a crash."""
    db.train(table(np.ones((20, 1)), np.arange(20) % 2).name, model="lonely", algorithm="sgd")
    sql(
        "CREATE DOMAIN checked AS bigint"
        " CHECK (VALUE IS NULL OR dp_predict('lonely', ARRAY[VALUE::float8]) IS NOT NULL)"
    )
    sql(
        "CREATE PROCEDURE commits() LANGUAGE plpgsql AS"
        " 'DECLARE v checked; BEGIN COMMIT; GET DIAGNOSTICS v = ROW_COUNT; END'"
    )
    try:
        with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            with pytest.raises(sqlalchemy.exc.DBAPIError, match="where no query runs"):
                connection.exec_driver_sql("CALL commits()")
            assert connection.exec_driver_sql("SELECT dp_predict('lonely', '{1}') IS NOT NULL").scalar_one()
    finally:
        sql("DROP PROCEDURE commits")
        sql("DROP DOMAIN checked")


@pytest.mark.parametrize(
    "change",
    [
        "classes = '{1}'",
        "classes = '{}'",
        "classes = '{1,2,3}'",
        "scale = '{1}'",
        "weights = '{1,NULL}'",
        "weights = '{1}'",
        "intercept = '{1,2}'",
        "project_dim = 2",
        "multiclass = 'softmax'",
    ],
)
def test_a_model_whose_columns_do_not_fit_is_refused(db: Database, table: Any, change: str) -> None:
    db.train(table(*two_classes(50, 2)).name, model="edited", algorithm="sgd")
    with db.engine.connect() as connection:
        connection.exec_driver_sql(f"UPDATE bismarck_dp.model SET {change} WHERE name = 'edited'")
        with pytest.raises(sqlalchemy.exc.DBAPIError, match=r"do not fit each other|wrong number of weights"):
            connection.exec_driver_sql("SELECT dp_predict_proba('edited', '{1,2}')")


@pytest.mark.parametrize(("level", "reads"), [("REPEATABLE READ", True), ("READ COMMITTED", False)])
def test_a_role_that_was_taken_away_sees_no_model_from_then_on(
    db: Database, analyst: Database, sql: Any, level: str, reads: bool
) -> None:
    """Rights are those of now: a statement with a snapshot of its own, or one that reads a table, hears of them."""
    sql("CREATE ROLE lender")
    sql("GRANT lender TO analyst")
    rows = Table(db, *two_classes(50, 2))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    db.train(rows.name, model="lent", algorithm="sgd")
    sql("UPDATE bismarck_dp.model SET owner = 'lender' WHERE name = 'lent'")
    try:
        with analyst.engine.connect().execution_options(isolation_level=level) as connection:
            table = f"FROM {rows.name} LIMIT 1" if reads else ""
            ask = f"SELECT dp_predict('lent', '{{1,2}}') IS NOT NULL {table}"
            assert connection.exec_driver_sql(ask).scalar_one()
            sql("REVOKE lender FROM analyst")
            with pytest.raises(sqlalchemy.exc.DBAPIError, match='"lent" does not exist'):
                connection.exec_driver_sql(ask)
    finally:
        sql("DELETE FROM bismarck_dp.model")
        sql("DROP ROLE lender")
        rows.drop()
