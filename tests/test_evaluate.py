"""dp_evaluate without epsilon: metrics equal scikit-learn's, whatever the labels, columns and rows are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from click.testing import CliRunner
from conftest import two_classes
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score, roc_auc_score

from bismarck_dp import BismarckError, Model
from bismarck_dp.controller.cli import main
from bismarck_dp.controller.database import Database, connect


def many_classes(n: int, d: int, k: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, d)) / np.sqrt(d)).astype(np.float32)
    return x, (x @ rng.normal(size=(d, k)) + 0.3 * rng.normal(size=(n, k))).argmax(axis=1).astype(float)


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name] == (value if value is None else pytest.approx(value, abs=1e-9, rel=1e-9)), name


def expected(model: Model, x: Any, y: Any) -> dict[str, Any]:
    """What scikit-learn says of the model's own margins."""
    if len(model.classes) == 0:
        predicted = model.predict(x)
        return {"n": len(y), "mse": mean_squared_error(y, predicted), "r2": r2_score(y, predicted)}
    margins = model.decision_function(x)
    auc = None
    if len(model.classes) == 2 and len(set(y)) == 2:
        score = margins if margins.ndim == 1 else margins[:, 1] - margins[:, 0]
        auc = roc_auc_score(y == model.classes[1], score)
    loss = log_loss(y, model.predict_proba(x), labels=model.classes) if model.loss == "logistic" else None
    return {"n": len(y), "accuracy": accuracy_score(y, model.predict(x)), "auc": auc, "log_loss": loss}


@pytest.mark.parametrize(
    ("loss", "algorithm", "more"),
    [
        ("logistic", "sgd", {}),
        ("logistic", "bolton", {"lambda_": 0.1, "epsilon": 1.0, "fit_intercept": True}),
        ("huber", "bolton", {"lambda_": 0.1, "epsilon": 1.0, "delta": 1e-6}),
        ("hinge", "sgd", {"normalize": True, "scale": 2.0}),
        ("logistic", "sgd", {"project_dim": 3, "project_seed": 7}),
        ("logistic", "sgd", {"multiclass": "softmax"}),
        ("squared", "sgd", {}),
        ("squared", "bolton", {"lambda_": 0.1, "epsilon": 1.0, "label_bound": 2.0}),
    ],
)
def test_metrics_are_scikit_learns(db: Database, table: Any, loss: str, algorithm: str, more: dict[str, Any]) -> None:
    x, y = two_classes(500, 6)
    y = y if loss != "squared" else 3 * x[:, 0] - x[:, 1] + 0.1 * np.random.default_rng(1).normal(size=len(x))
    rows, other = table(x[:300], y[:300]), table(x[300:], y[300:], "float8")
    model = db.train(rows.name, model="m", algorithm=algorithm, loss=loss, **more)
    close(db.evaluate("m", rows.name), expected(model, rows.x, rows.y))
    close(db.evaluate("m", other.name), expected(model, other.x, other.y))


@pytest.mark.parametrize(
    ("loss", "multiclass", "k"), [("logistic", "softmax", 4), ("logistic", "ovr", 5), ("huber", "ovr", 3)]
)
def test_many_classes(db: Database, table: Any, loss: str, multiclass: str, k: int) -> None:
    rows = table(*many_classes(400, 5, k))
    model = db.train(rows.name, model="m", algorithm="sgd", loss=loss, multiclass=multiclass)
    found = db.evaluate("m", rows.name)
    close(found, expected(model, rows.x, rows.y))
    assert found["auc"] is None
    assert (found["log_loss"] is None) == (loss != "logistic")


def test_labels_of_every_coding(db: Database, table: Any, sql: Any) -> None:
    """What 0 and -1 mean is as in training: the negative class both, unless classes were named."""
    x, y = two_classes(300, 4)
    rows = table(x, y)
    model = db.train(rows.name, model="m", algorithm="sgd")
    sql(
        f"CREATE VIEW coded AS SELECT (y > 0) AS truth, greatest(y, 0)::int AS zero, 1 + (y > 0)::int AS named, x"
        f" FROM {rows.name}"
    )
    wanted = expected(model, x, y)
    close(db.evaluate("m", rows.name, label="y", features="x"), wanted)
    close(db.evaluate("m", "coded", label="truth"), wanted)
    close(db.evaluate("m", "coded", label="zero"), wanted)
    named = db.train("coded", model="named", label="named", algorithm="sgd", classes=[1, 2])
    close(db.evaluate("named", "coded"), expected(named, x, np.where(y > 0, 2.0, 1.0)))
    assert db.evaluate("named", "coded", label="zero")["n"] == (y > 0).sum(), "0 is no label of this model"


def test_ties_count_half(db: Database, table: Any, sql: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, size=(2000, 2)) / 4
    y = np.where(x[:, 0] + x[:, 1] + rng.normal(size=2000) > 0, 1.0, -1.0)
    rows = table(x, y)
    db.train(rows.name, model="m", algorithm="sgd")
    sql("UPDATE bismarck_dp.model SET weights = '{1, 0.5}'")
    score = x @ [1, 0.5]
    found = db.evaluate("m", rows.name)
    assert found["auc"] == pytest.approx(roc_auc_score(y, score), abs=1e-12)
    assert found["accuracy"] == pytest.approx(np.mean((score > 0) == (y > 0)), abs=1e-12)
    sql("UPDATE bismarck_dp.model SET weights = '{0, 0}'")
    assert db.evaluate("m", rows.name)["auc"] == 0.5


def test_margins_that_do_not_fit_memory_are_sorted_through_files(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(40_000, 2))
    db.train(rows.name, model="m", algorithm="sgd", epochs=1)
    statement = f"SELECT * FROM dp_evaluate('m', '{rows.name}')"
    with db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL work_mem = '64kB'")
        small = dict(connection.exec_driver_sql(statement).all())
    assert small == db.evaluate("m", rows.name)
    limited = pytest.raises(sqlalchemy.exc.DBAPIError, match="temporary file size exceeds")
    with limited, db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL work_mem = '64kB'; SET LOCAL temp_file_limit = 0")
        connection.exec_driver_sql(statement)


def test_one_class_has_no_auc_and_equal_labels_no_r2(db: Database, table: Any) -> None:
    x, y = two_classes(100, 3)
    db.train(table(x, y).name, model="m", algorithm="sgd")
    only = table(x[y > 0], y[y > 0])
    found = db.evaluate("m", only.name)
    assert found["auc"] is None
    assert found["accuracy"] is not None
    db.train(table(x, x[:, 0]).name, model="r", algorithm="sgd", loss="squared")
    found = db.evaluate("r", table(x, np.ones(100)).name)
    assert found["r2"] is None
    assert found["mse"] > 0


BAD = """
    INSERT INTO {0} VALUES (9001, 1, NULL), (9002, 1, '{{NaN,0,0}}'), (9003, NULL, '{{0,0,0}}'),
        (9004, 7, '{{0,0,0}}'), (9005, 1, '{{0,NULL,0}}'), (9006, 'NaN', '{{1,1,1}}'), (9007, -1, '{{1,Infinity,0}}')
"""


def test_bad_rows_count_for_nothing(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(200, 3), dtype="float8")
    model = db.train(rows.name, model="m", algorithm="sgd")
    sql(BAD.format(rows.name))
    close(db.evaluate("m", rows.name), expected(model, rows.x, rows.y))


def test_columns_categories_and_views(db: Database, sql: Any) -> None:
    sql(
        "CREATE TABLE people AS SELECT random() - 0.5 AS a, (10 * random())::numeric AS b,"
        " (ARRAY['red', 'green', 'blue', NULL])[1 + i % 4] AS colour, i % 3 = 0 AS y FROM generate_series(1, 400) AS i"
    )
    try:
        how = {"label": "y", "features": ["colour", "a", "b"], "categories": {"colour": ["red", "blue"]}}
        model = db.train("people", model="m", algorithm="sgd", scale={"a": 1, "b": 10}, **how)
        rows = [dict(row) for row in sql("SELECT colour, a, b::float8 AS b FROM people")]
        y = np.array([float(row["y"]) for row in sql("SELECT y::int AS y FROM people")])
        wanted = expected(model, model.encode(rows), y)
        close(db.evaluate("m", "people"), wanted)
        sql("CREATE VIEW seen AS SELECT b, a, colour, y::int FROM people")
        close(db.evaluate("m", "seen"), wanted)
        with pytest.raises(BismarckError, match="4 features, and the columns have 3"):
            db.evaluate("m", "people", features=["colour", "a"])
        with pytest.raises(BismarckError, match="a list of categories"):
            db.evaluate("m", "pg_tables", label="hasindexes", features=["tablename", "schemaname"])
    finally:
        sql("DROP TABLE people CASCADE")


def test_metrics_that_are_asked_for(db: Database, table: Any) -> None:
    rows = table(*two_classes(100, 3))
    db.train(rows.name, model="m", algorithm="sgd")
    assert list(db.evaluate("m", rows.name, metrics=["auc"])) == ["n", "auc"]
    assert list(db.evaluate("m", rows.name, epsilon=1, metrics=["accuracy"])) == [
        *("n", "accuracy", "n_noise", "accuracy_noise", "epsilon", "delta")
    ]
    assert list(db.evaluate("m", rows.name, epsilon=1, metrics=["auc"])) == ["auc", "auc_noise", "epsilon", "delta"]


# ---- what is refused ----


@pytest.fixture
def model(db: Database, table: Any) -> str:
    """A classifier and a regression; the name of the table they were trained on."""
    rows = table(*two_classes(60, 3))
    db.train(rows.name, model="m", algorithm="sgd")
    db.train(rows.name, model="r", algorithm="sgd", loss="squared")
    return rows.name


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("nobody", {}, 'model "nobody" does not exist'),
        ("m", {"label": "z"}, 'column "z" of .* does not exist'),
        ("m", {"features": "y"}, "3 features, and the columns have 1"),
        ("m", {"features": ["x", "y"]}, "an array column stands alone"),
        ("m", {"features": []}, "no feature columns are named"),
        ("m", {"label": "x"}, "is not a number or boolean"),
        ("m", {"epsilon": 0}, "epsilon is 0"),
        ("m", {"epsilon": -1}, "epsilon is -1"),
        ("m", {"epsilon": math.inf}, "epsilon is inf"),
        ("m", {"epsilon": math.nan}, "epsilon is nan"),
        ("m", {"epsilon": 1e16}, "epsilon is 1e"),
        ("m", {"epsilon": 1, "delta": 1}, "delta is 1"),
        ("m", {"epsilon": 1, "delta": -1e-6}, "delta is -1e-06"),
        ("m", {"epsilon": 1e-9, "delta": 1e-6}, "epsilon is so small"),
        ("m", {"delta": 1e-6}, "there is no epsilon"),
        ("m", {"bins": 8}, "bins is for noisy evaluations"),
        ("m", {"seed": 1}, "seed is for noisy evaluations"),
        ("m", {"epsilon": 1, "bins": 0}, "bins is 0"),
        ("m", {"epsilon": 1, "bins": 2.5}, "bins is 2.5"),
        ("m", {"epsilon": 1, "bin": 8}, 'unknown option "bin"'),
        ("m", {"epsilon": 1, "loss_bound": 0}, "loss_bound is 0"),
        ("m", {"epsilon": 1, "label_bound": 1}, "label_bound is for numbers to predict"),
        ("m", {"epsilon": 1, "adjacency": "add"}, 'unknown adjacency "add"'),
        ("m", {"epsilon": 1, "metrics": ["f1"]}, 'unknown metric "f1"'),
        ("m", {"epsilon": 1, "metrics": [["auc"]]}, "unknown metric"),
        ("m", {"epsilon": 1, "metrics": ["r2"]}, "the model has no r2"),
        ("m", {"epsilon": 1, "metrics": []}, "metrics is"),
        ("r", {"epsilon": 1}, "the model has no label_bound, and noise needs one"),
        ("r", {"epsilon": 1, "metrics": ["auc"]}, "the model has no auc"),
    ],
)
def test_refusals(db: Database, model: str, name: str, how: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message) as refusal:
        db.evaluate(name, model, **how)
    assert "internal error" not in str(refusal.value)


def test_exact_evaluation_refuses_tables_of_another_shape(db: Database, table: Any, model: str, sql: Any) -> None:
    x, y = two_classes(50, 4)
    with pytest.raises(BismarckError, match="arrays of another length than the model's 3 features"):
        db.evaluate("m", table(x, y).name)
    empty = table(x[:, :3], y)
    sql(f"TRUNCATE {empty.name}")
    with pytest.raises(BismarckError, match="the table has no rows"):
        db.evaluate("m", empty.name)
    with pytest.raises(BismarckError, match="no row has both"):
        db.evaluate("m", table(x[:, :3], 7 + y).name)


def test_noisy_evaluation_refuses_nothing_that_depends_on_values(
    db: Database, table: Any, model: str, sql: Any
) -> None:
    x, y = two_classes(50, 4)
    names = ["n", "accuracy", "auc", "log_loss"]
    names += [f"{name}_noise" for name in names] + ["loss_bound", "epsilon", "delta"]
    for rows in (table(x, y), table(x[:, :3], 7 + y), table(x[:, :3], y)):
        assert list(db.evaluate("m", rows.name, epsilon=1)) == names
    sql(f"TRUNCATE {rows.name}")
    assert list(db.evaluate("m", rows.name, epsilon=1)) == names


def test_noisy_evaluation_says_nothing_beside_its_numbers(db: Database, table: Any, model: str, sql: Any) -> None:
    """No notice, whatever the rows hold, and nothing is written."""
    rows = table(*two_classes(50, 3), dtype="float8")
    sql(BAD.format(rows.name))
    with db.engine.begin() as connection:
        driver: Any = connection.connection.dbapi_connection
        with driver.cursor() as cursor:
            cursor.execute("SET TRANSACTION READ ONLY; SET LOCAL client_min_messages = debug1")
            del driver.notices[:]
            cursor.execute("DO $$ BEGIN RAISE DEBUG 'heard'; END $$")
            cursor.execute(f"SELECT * FROM dp_evaluate('m', '{rows.name}', epsilon => 1)")
        assert len(driver.notices) == 1
        assert "heard" in driver.notices[0]


@pytest.mark.parametrize("request_", ["[]", "{}", '"m"', '{"model": "m"}', '{"model": 1, "source": 1}'])
def test_malformed_requests(db: Database, sql: Any, request_: str) -> None:
    with pytest.raises(Exception, match="malformed request"):
        sql("SELECT bismarck_dp.call('evaluate', CAST(:request AS jsonb))", request=request_)


def test_nulls(db: Database, model: str, sql: Any) -> None:
    for arguments, message in (
        (f"NULL, '{model}'", "model is NULL"),
        ("'m', NULL", "source is NULL"),
        (f"'m', '{model}', features => ARRAY[NULL]", "features is NULL"),
        ("'m', 0", "the source table does not exist"),
        (f"'m', '{model}', options => '[1]'", "options is"),
    ):
        with pytest.raises(Exception, match=message):
            sql(f"SELECT * FROM dp_evaluate({arguments})")
    found = sql(f"SELECT * FROM dp_evaluate('m', '{model}', NULL, NULL, NULL, NULL, NULL)")
    assert {row["metric"]: row["value"] for row in found} == db.evaluate("m", model)


# ---- rights ----


@pytest.fixture
def analyst(db: Database) -> Iterator[Database]:
    assert db.cluster is not None
    with db.engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE analyst LOGIN")
    other = connect(db.cluster.url(user="analyst"))
    yield other
    other.close()
    with db.engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY analyst CASCADE; DROP ROLE analyst")


def test_the_source_is_read_with_the_callers_rights(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    open_rows, closed = table(*two_classes(100, 3)), table(*two_classes(100, 3))
    sql(f"GRANT SELECT (y, x) ON {open_rows.name} TO analyst")
    analyst.train(open_rows.name, model="mine", epsilon=1)
    db.train(closed.name, model="theirs", algorithm="sgd")
    for how in ({}, {"epsilon": 1.0}):
        assert analyst.evaluate("mine", open_rows.name, **how)["accuracy"] is not None
        with pytest.raises(BismarckError, match=f"permission denied for table {closed.name}"):
            analyst.evaluate("mine", closed.name, **how)
        with pytest.raises(BismarckError, match='model "theirs" does not exist'):
            analyst.evaluate("theirs", open_rows.name, **how)
    with pytest.raises(BismarckError, match="only the owner of"):
        analyst.evaluate("mine", open_rows.name, epsilon=1, seed=1)
    for function in ("evaluate", "noisy_sums"):
        call = f"SELECT bismarck_dp.{function}('mine', '{open_rows.name}', 'y', '{{x}}', '{{}}')"
        denied = pytest.raises(sqlalchemy.exc.DBAPIError, match=f"permission denied for function {function}")
        with denied, analyst.engine.begin() as connection:
            connection.exec_driver_sql(call)


# ---- the command line ----


def test_command_line(db: Database, table: Any) -> None:
    assert db.cluster is not None
    rows = table(*two_classes(100, 3))
    db.train(rows.name, model="m", algorithm="sgd")

    def run(*words: str) -> Any:
        return CliRunner(env={"BISMARCK_DP_URL": db.cluster.url()}).invoke(main, ["evaluate", "m", rows.name, *words])

    assert json.loads(run("--json").stdout) == db.evaluate("m", rows.name)
    noisy = json.loads(run("--json", "--epsilon", "2", "--label", "y", "--features", "x", "--bins", "4").stdout)
    assert noisy["epsilon"] == 2
    assert list(json.loads(run("--json", "--metrics", "auc").stdout)) == ["n", "auc"]
    shown = run().stdout
    assert "accuracy" in shown
    assert "log loss" in shown
    refused = run("--epsilon", "0")
    assert refused.exit_code == 1
    assert "epsilon is 0" in refused.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": "abc"},
        {"delta": "x"},
        {"source": "here"},
        {"source": -1},
        {"features": "x"},
        {"features": 3},
    ],
    ids=str,
)
def test_a_malformed_request_is_no_bug(db: Database, table: Any, change: dict[str, Any]) -> None:
    rows = table(*two_classes(50, 2))
    model = db.train(rows.name, algorithm="sgd")
    with db.engine.connect() as connection:
        source = connection.exec_driver_sql(f"SELECT '{rows.name}'::regclass::oid").scalar_one()
        fields = {"model": model.name, "source": source, "label": None, "features": None, "epsilon": None}
        request = json.dumps({**fields, "delta": None, "options": {}, **change})
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="malformed request"):
            connection.exec_driver_sql("SELECT bismarck_dp.call('evaluate', %(r)s::jsonb)", {"r": request})
