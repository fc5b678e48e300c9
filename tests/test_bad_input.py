"""Bad input: a clear message that names the thing, and nothing left behind (the db fixture checks that each time)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import psycopg2
import pytest
import sqlalchemy
from conftest import two_classes

import bismarck_dp
from bismarck_dp.controller.database import Database


def dp_train(db: Database, source: str, **changes: Any) -> Any:
    """SELECT * FROM dp_train(...) with good arguments but for the changes."""
    arguments = {
        "source": source, "model": "m", "label": "y", "features": ["x"], "epsilon": 1.0, "delta": 0.0,
        "algorithm": "bolton", "loss": "logistic", "options": {}, **changes,
    }  # fmt: skip
    arguments["options"] = json.dumps(arguments["options"])
    with db.engine.begin() as connection:
        return (
            connection.exec_driver_sql(
                "SELECT * FROM dp_train(%(source)s::regclass, %(model)s, %(label)s, %(features)s::text[],"
                " %(epsilon)s::float8, %(delta)s, %(algorithm)s, %(loss)s, %(options)s::jsonb)",
                arguments,
            )
            .mappings()
            .one()
        )


def refusal(db: Database, source: str, **changes: Any) -> psycopg2.Error:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        dp_train(db, source, **changes)
    error = caught.value.orig
    assert isinstance(error, psycopg2.Error)
    assert "Traceback" not in str(error)
    return error


@pytest.fixture
def rows(table: Any) -> str:
    return str(table(*two_classes(100, 3)).name)


ARGUMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"label": "nope"}, 'column "nope" of "t', ""),
    ({"features": ["nope"]}, 'column "nope" of "t', ""),
    ({"features": []}, "no feature columns are named", "array column"),
    ({"features": ["x", "id"]}, 'column "x" has type real[], which is not a number', ""),
    ({"features": ["id", "y"]}, 'label column "y" is among the features', ""),
    ({"label": "x"}, 'column "x" has type real[], which is not a number or boolean', ""),
    ({"label": "ctid"}, 'column "ctid" of "t', ""),
    ({"model": None}, "the model has no name", ""),
    ({"model": ""}, "the model has no name", ""),
    ({"label": None}, "label is NULL", ""),
    ({"features": None}, "features is NULL", ""),
    ({"epsilon": 0}, "epsilon is 0", "above 0"),
    ({"epsilon": -1}, "epsilon is -1", "above 0"),
    ({"epsilon": float("nan")}, "epsilon is nan", "above 0"),
    ({"epsilon": float("inf")}, "epsilon is inf", "finite"),
    ({"epsilon": None}, 'algorithm "bolton" is private and needs an epsilon', "non-private"),
    ({"epsilon": 1, "algorithm": "sgd"}, 'algorithm "sgd" is not private', "NULL"),
    ({"delta": 1}, "delta is 1", "below 1"),
    ({"delta": -0.1}, "delta is -0.1", "below 1"),
    ({"delta": float("nan")}, "delta is nan", "below 1"),
    ({"algorithm": "bolt-on"}, 'unknown algorithm "bolt-on"', '"bolton"'),
    ({"loss": "logistics"}, 'unknown loss "logistics"', '"logistic"'),
    ({"loss": "hinge"}, 'loss "hinge" is not smooth', "huber"),
    ({"options": {"epoch": 3}}, 'unknown option "epoch"', '"epochs"'),
    ({"options": {"tolerance": 0.1}}, 'unknown option "tolerance"', "valid:"),
    ({"options": [1]}, "options is [1]", "object"),
    ({"options": {"epochs": 0}}, "epochs is 0", "whole number from 1"),
    ({"options": {"epochs": 2.5}}, "epochs is 2.5", "whole number"),
    ({"options": {"epochs": "many"}}, 'epochs is "many"', "whole number"),
    ({"options": {"lambda": -1}}, "lambda is -1", "0, or a number from 1e-15"),
    ({"options": {"radius": 0}}, "radius is 0", "from 1e-15"),
    ({"options": {"feature_bound": 1e200}}, "feature_bound is 1e+200", "to 1e+15"),
    ({"options": {"huber_h": 0}, "loss": "huber"}, "huber_h is 0", "from 1e-09"),
    ({"options": {"step": "fast"}}, 'unknown step "fast"', "constant"),
    ({"options": {"step": 100}}, "step 100 is above 2/beta", "at most 8"),
    ({"options": {"average": "some"}}, 'unknown average "some"', "suffix"),
    ({"options": {"fit_intercept": 1}}, "fit_intercept is 1", "true or false"),
    ({"options": {"adjacency": "add-remove"}}, 'unknown adjacency "add-remove"', "replace"),
    ({"options": {"classes": [1, 1]}}, "classes is [1, 1]", "different numbers"),
    ({"options": {"batch_size": 101}}, "batch_size 101 is larger than the table's 100 rows", "at most 100"),
    ({"options": {"feature_bound": 1e-200}}, "feature_bound is 1e-200", "from 1e-15"),
    ({"options": {"step": 1e-320}}, "step is 9.99", "from 1e-15"),
    ({"options": {"workers": 257}}, "workers is 257", "from 1 to 256"),
    ({"delta": 1e-320}, "delta is 9.99", "from 1e-300"),
    ({"algorithm": "ab" * 1_000_000}, 'unknown algorithm "abab', "valid:"),
    ({"options": {"ab" * 1_000_000: 1}}, 'unknown option "abab', "valid:"),
    ({"options": {"average": "ab" * 1_000_000}}, 'unknown average "abab', "valid:"),
    ({"options": {"lambda": 10**400}}, "lambda is inf", "to 1e+15"),
    ({"options": {"epochs": 10**400}}, "epochs is inf", "whole number"),
    ({"epsilon": 1e-310}, "epsilon is 1e-310", "from 1e-15"),
    ({"epsilon": 1e300}, "epsilon is 1e+300", "to 1e+15"),
    ({"model": "m" * 201}, "the model's name has 201 characters", "at most 200"),
    ({"options": {"workers": 101}}, "101 workers cannot share 100 rows", "at most 100"),
]


@pytest.mark.parametrize(("changes", "message", "hint"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_arguments(db: Database, rows: str, changes: dict[str, Any], message: str, hint: str) -> None:
    error = refusal(db, rows, **changes)
    assert message in error.diag.message_primary
    assert len(error.diag.message_primary) < 200, "a message shows no more than the start of what it was given"
    assert hint in (error.diag.message_hint or "")


@pytest.mark.parametrize(("changes", "message", "hint"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_python_says_the_same(db: Database, rows: str, changes: dict[str, Any], message: str, hint: str) -> None:
    if None in (changes.get("label", 0), changes.get("features", 0), changes.get("model", 0)) or changes.get(
        "options"
    ) == [1]:
        return  # not to be written in Python
    arguments = {"epsilon": 1.0, **changes}
    options = arguments.pop("options", {})
    with pytest.raises(bismarck_dp.BismarckError) as caught:
        db.train(rows, **arguments, **options)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_missing_table(db: Database) -> None:
    error = refusal(db, "nowhere")
    assert error.diag.message_primary == 'relation "nowhere" does not exist'
    with pytest.raises(bismarck_dp.BismarckError, match='table "nowhere" does not exist'):
        db.train("nowhere", epsilon=1)


def test_text_column(db: Database, sql: Any) -> None:
    sql("CREATE TABLE texts (y text, x text[], z text)")
    sql("INSERT INTO texts VALUES ('1', '{a}', 'b')")
    assert 'column "y" has type text, which is not a number or boolean' in refusal(db, "texts").diag.message_primary
    sql("ALTER TABLE texts ALTER y TYPE int USING 1")
    assert 'column "x" has type text[], which is not an array of numbers' in refusal(db, "texts").diag.message_primary
    error = refusal(db, "texts", features=["z"])
    assert 'column "z" has type text, which is not a number' in error.diag.message_primary
    sql("DROP TABLE texts")


@pytest.mark.parametrize("second", ["{1,2,3}", "{}", "{{1,2},{3,4}}"])
def test_ragged_arrays(db: Database, sql: Any, second: str) -> None:
    sql("CREATE TABLE ragged (y int, x float8[])")
    sql(f"INSERT INTO ragged VALUES (1, '{{1,2}}'), (-1, '{second}')")
    error = refusal(db, "ragged")
    sql("DROP TABLE ragged")
    assert error.diag.message_primary == 'arrays in column "x" differ in length'
    assert error.diag.message_hint == "every row needs the same number of features"


@pytest.mark.parametrize("value", ["NULL", "'{}'", "'{{1},{2}}'"])
def test_no_usable_array(db: Database, sql: Any, value: str) -> None:
    sql("CREATE TABLE hollow (y int, x float8[])")
    sql(f"INSERT INTO hollow VALUES (1, {value})")
    error = refusal(db, "hollow")
    sql("DROP TABLE hollow")
    assert "no one-dimensional array" in error.diag.message_primary or "no features" in error.diag.message_primary


def test_empty_table(db: Database, sql: Any) -> None:
    sql("CREATE TABLE empty (y int, x float8[])")
    error = refusal(db, "empty")
    sql("DROP TABLE empty")
    assert error.diag.message_primary == "the table has no rows"


@pytest.mark.parametrize("labels", [[0, 1, 1.5], [-1, 0, 1], [1, 2, 3], [0.5, 1.5]])
def test_label_with_other_values(db: Database, table: Any, labels: list[float]) -> None:
    x, _ = two_classes(90, 2)
    rows = table(x, np.resize(labels, 90))
    error = refusal(db, rows.name)
    assert 'label column "y" has other values than' in error.diag.message_primary
    assert "classes" in error.diag.message_hint


def test_model_name_taken(db: Database, rows: str) -> None:
    dp_train(db, rows)
    error = refusal(db, rows)
    assert error.diag.message_primary == 'model name "m" is taken'
    assert error.pgcode == "42710"


def test_unknown_model(db: Database, sql: Any) -> None:
    for call in ("dp_predict('ghost', '{1}')", "dp_predict_proba('ghost', '{1}')", "dp_forget('ghost')"):
        with pytest.raises(Exception, match='model "ghost" does not exist'):
            sql(f"SELECT {call}")


def test_wrong_number_of_features(db: Database, rows: str, sql: Any) -> None:
    dp_train(db, rows)
    with pytest.raises(Exception, match='model "m" has 3 features, not 2'):
        sql("SELECT dp_predict('m', '{1,2}')")
    with pytest.raises(bismarck_dp.BismarckError, match='model "m" has 3 features, not 2'):
        db.predict("m", [[1, 2]])


def test_no_probabilities_without_logistic(db: Database, rows: str, sql: Any) -> None:
    dp_train(db, rows, loss="huber")
    with pytest.raises(Exception, match="gives no probabilities"):
        sql("SELECT dp_predict_proba('m', '{1,2,3}')")


def test_not_a_table(db: Database, sql: Any) -> None:
    sql("CREATE SEQUENCE numbers")
    error = refusal(db, "numbers")
    sql("DROP SEQUENCE numbers")
    assert error.diag.message_primary == '"numbers" is not a table or view'


def test_a_view_that_fails_says_so_without_a_traceback(db: Database, rows: str, sql: Any) -> None:
    sql(f"CREATE VIEW broken AS SELECT 1 / (id - 5) AS y, x FROM {rows}")
    error = refusal(db, "broken")
    sql("DROP VIEW broken")
    assert error.diag.message_primary == "division by zero"
    assert error.pgcode == "22012"


def test_names_that_need_quoting(db: Database, sql: Any) -> None:
    sql('CREATE SCHEMA "Odd schema"')
    sql('CREATE TABLE "Odd schema"."Weird ""table" ("the label" int, "x%s""$1" float8[])')
    sql('INSERT INTO "Odd schema"."Weird ""table" SELECT i % 2, ARRAY[i % 2, 1] FROM generate_series(1, 50) AS i')
    row = dp_train(
        db, '"Odd schema"."Weird ""table"', label="the label", features=['x%s"$1'], model='it\'s "m" %s $1', epsilon=100
    )
    assert row["name"] == 'it\'s "m" %s $1'
    assert row["source"] == '"Odd schema"."Weird ""table"'
    model = db.train('"Odd schema"."Weird ""table"', label="the label", features='x%s"$1', epsilon=100)
    assert model.n == 50
    predicted = sql("SELECT dp_predict(:m, '{1,1}') AS p", m=row["name"])
    assert predicted[0]["p"] in (0, 1)
    sql('DROP SCHEMA "Odd schema" CASCADE')


def test_a_huge_step_diverges_with_a_message(db: Database, table: Any) -> None:
    x, y = two_classes(300, 3)
    rows = table(x, y)
    error = refusal(
        db,
        rows.name,
        algorithm="sgd",
        loss="squared",
        epsilon=None,
        options={"step": 1e30, "batch_size": 1, "epochs": 50},
    )
    assert "training diverged" in error.diag.message_primary


def test_load_refuses_bad_arrays_and_leaves_no_table(db: Database, sql: Any) -> None:
    with pytest.raises(bismarck_dp.BismarckError):
        db.load("half", np.ones((3, 2)), [1, 2])
    assert sql("SELECT to_regclass('half') AS t")[0]["t"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"lambda": 1, "feature_bound": 1e-9},
        {"lambda": 1, "feature_bound": 1e-9, "step": "constant"},
        {"lambda": 1e15, "feature_bound": 1e-15, "average": "all"},
        {"lambda": 1e-15, "radius": 1e15, "batch_size": 1},
        {"feature_bound": 1e15},
        {"feature_bound": 1e15, "step": "sqrt", "lambda": 1e-15},
    ],
    ids=str,
)
def test_extreme_options_train_or_are_refused_in_words(db: Database, rows: str, options: dict[str, Any]) -> None:
    outcome = attempt(db, rows, options)
    if isinstance(outcome, sqlalchemy.exc.DBAPIError):
        assert "internal error" not in str(outcome.orig)
        assert "Traceback" not in str(outcome.orig)
    else:
        assert np.isfinite(outcome["weights"]).all()


def attempt(db: Database, rows: str, options: dict[str, Any]) -> Any:
    try:
        return dp_train(db, rows, options=options)
    except sqlalchemy.exc.DBAPIError as error:
        return error


WHOLE = {
    "source": 0, "model": "m", "label": "y", "features": ["x"], "epsilon": 1, "delta": 0, "algorithm": "sgd",
    "loss": "logistic", "options": {},
}  # fmt: skip
MALFORMED = [
    "{}", "[]", "null", "7", '{"model": ["a"]}', '{"model": {"a": 1}}', '{"source": 0}',
    *(json.dumps({**WHOLE, **wrong}) for wrong in (
        {"model": 5}, {"features": 1.5}, {"features": [["x"]]}, {"label": {}}, {"epsilon": []},
    )),
]  # fmt: skip


@pytest.mark.parametrize("request_", MALFORMED)
@pytest.mark.parametrize(
    "verb",
    ["train", "explain", "forget", "serve", "local_start", "local_gradient", "local_round", "local_register"],
)
def test_malformed_calls_are_refused_in_words(db: Database, sql: Any, verb: str, request_: str) -> None:
    said = r"malformed request|is NULL|does not exist|unknown verb|not a state|no name"
    with pytest.raises(Exception, match=said) as caught:
        sql("SELECT bismarck_dp.call(:verb, CAST(:request AS jsonb))", verb=verb, request=request_)
    assert "Traceback" not in str(caught.value)


def test_no_such_relation(db: Database, sql: Any) -> None:
    with pytest.raises(Exception, match="the source table does not exist"):
        sql("SELECT dp_train(CAST(0 AS regclass), 'm', 'y', '{x}', 1.0)")
    with pytest.raises(Exception, match="the source table does not exist"):
        sql("SELECT * FROM dp_explain(CAST(0 AS regclass), 'm', 'y', '{x}', 1.0)")


def test_a_view_that_trains_itself_ends_in_words(db: Database, rows: str, sql: Any) -> None:
    sql(
        "CREATE FUNCTION again() RETURNS float8 LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM dp_train('circle', 'm', 'y', '{x}', 1.0); RETURN 1; END $$"
    )
    sql(f"CREATE VIEW circle AS SELECT y * again() AS y, x FROM {rows}")
    error = refusal(db, "circle")
    sql("DROP VIEW circle; DROP FUNCTION again")
    assert "Traceback" not in error.diag.message_primary
