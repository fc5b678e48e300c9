"""The estimators: scikit-learn's own checks, and what they promise beyond."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
import sqlalchemy
from conftest import two_classes
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from test_docs import PYTHON_REFERENCE, table_rows

import bismarck_dp
from bismarck_dp import BismarckError, DPClassifier, DPRegressor
from bismarck_dp.controller.database import Database, connect
from bismarck_dp.controller.scratch import shared
from bismarck_dp.spec import OPTIONS

FAILING = {
    "check_estimators_nan_inf": (
        [DPClassifier, DPRegressor],
        "`fit` refuses no row for its values: that there is no model would tell about the row. Rows that are not finite"
        " count for nothing, as in dp_train; `predict` does refuse them",
    ),
    "check_supervised_y_no_nan": (
        [DPRegressor],
        "the same for labels. A classifier without `classes` refuses them: there the set of labels is public",
    ),
}
"""Checks of scikit-learn that fail, for whom, and why; docs/python.md repeats them."""

SEEDED = {"epsilon": 1e6, "seed": 1, "feature_bound": 6.0, "epochs": 50}
"""Next to no noise, and the same each time: the checks ask for scores, and for equal models from equal rows."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Large budgets and seeds are warned of, and here they are meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(epsilon .* is large|seed).*")
        yield


@pytest.mark.parametrize("estimator", [DPClassifier(**SEEDED), DPRegressor(**SEEDED, label_bound=4.0)])
def test_scikit_learns_checks(estimator: Any) -> None:
    """All are run; those that fail are those that are listed, no more and no fewer."""
    outcomes = check_estimator(estimator, on_fail=None, on_skip=None)
    assert len(outcomes) > 45
    failed = {outcome["check_name"]: outcome["exception"] for outcome in outcomes if outcome["status"] == "failed"}
    assert set(failed) == {name for name, (kinds, _) in FAILING.items() if type(estimator) in kinds}, failed
    skipped = {outcome["check_name"] for outcome in outcomes if outcome["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}, "which scikit-learn skips unless SCIPY_ARRAY_API is set"


def test_failing_checks_are_documented() -> None:
    shown = table_rows(PYTHON_REFERENCE, "Checks that fail")
    wanted = {name: [", ".join(f"`{kind.__name__}`" for kind in kinds), why] for name, (kinds, why) in FAILING.items()}
    assert shown == wanted


@pytest.mark.parametrize("kind", [DPClassifier, DPRegressor])
def test_parameters_are_the_options_of_dp_train(kind: Any) -> None:
    own = ["epsilon", "delta", "algorithm", "loss", "database", "model"]
    options = ["lambda_" if name == "lambda" else name for name in OPTIONS]
    assert list(inspect.signature(kind).parameters) == own + options
    defaults = kind().get_params()
    assert {name for name, value in defaults.items() if value is not None} == {"delta", "algorithm"}
    assert (defaults["delta"], defaults["algorithm"]) == (0.0, "bolton")


@pytest.mark.parametrize("kind", [DPClassifier, DPRegressor])
def test_privacy_is_spelled_out(db: Database, kind: Any) -> None:
    x, y = two_classes(50, 2)
    with pytest.raises(BismarckError, match='algorithm "bolton" is private and needs an epsilon'):
        kind(database=db).fit(x, y)
    assert kind(database=db, algorithm="sgd").fit(x, y).privacy_["private"] is False


def tables(db: Database) -> list[str]:
    """Tables and models that an estimator may have left."""
    with db.engine.begin() as connection:
        return [
            row[0]
            for row in connection.exec_driver_sql(
                "SELECT relname FROM pg_class WHERE relname LIKE 'bismarck\\_dp\\_%%' AND relkind = 'r'"
                " UNION ALL SELECT name FROM bismarck_dp.model"
            )
        ]


def test_a_classifier(db: Database) -> None:
    x, y = two_classes(400, 3)
    words = np.where(y > 0, "yes", "no")
    fitted = DPClassifier(database=db, epsilon=2.0, delta=1e-6, lambda_=0.05, fit_intercept=True).fit(x, words)
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert fitted.coef_.shape == (1, 3)
    assert fitted.intercept_.shape == (1,)
    assert (fitted.n_features_in_, fitted.n_iter_) == (3, 10)
    assert not hasattr(fitted, "feature_names_in_")
    assert {name: fitted.privacy_[name] for name in ("private", "epsilon", "delta", "adjacency", "mechanism")} == {
        "private": True, "epsilon": 2.0, "delta": 1e-6, "adjacency": "replace", "mechanism": "gaussian"
    }  # fmt: skip
    margins = fitted.decision_function(x)
    assert fitted.predict(x).tolist() == np.where(margins > 0, "yes", "no").tolist()
    assert fitted.predict_proba(x)[:, 1] == pytest.approx(1 / (1 + np.exp(-margins)))
    assert fitted.score(x, words) == np.mean(fitted.predict(x) == words) > 0.7
    lengths = np.sqrt(1 + (x**2).sum(axis=1))
    assert margins == pytest.approx((x @ fitted.coef_[0] + fitted.intercept_[0]) / lengths, rel=1e-5, abs=1e-6)
    assert tables(db) == []


def test_fit_is_load_and_train(db: Database, table: Any) -> None:
    """The same rows by hand, with a seed: the same model, up to its name and time."""
    x, y = two_classes(300, 4)
    rows = table(x, (y + 1) / 2)
    spec: dict[str, Any] = {"epsilon": 1.0, "lambda_": 0.1, "epochs": 3, "seed": 5}
    model = db.train(rows.name, model="mine", classes=[0, 1], **spec)
    fitted = DPClassifier(database=db, **spec).fit(x, np.where(y > 0, "b", "a"))
    assert fitted.coef_.tolist() == [model.weights.tolist()]
    assert fitted.intercept_.tolist() == [0.0]
    assert fitted.privacy_ == model.privacy
    assert tables(db) == ["mine"]


def test_a_regressor(db: Database, table: Any) -> None:
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(500, 3)) / 3).astype(np.float32)
    y = 3 * (x @ [0.5, -1.0, 0.3]) + 0.1 * rng.normal(size=500)
    spec: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-6, "label_bound": 3.0, "radius": 4.0, "seed": 2}
    spec |= {"epochs": 20, "lambda_": 0.01}
    fitted = DPRegressor(database=db, **spec).fit(x, y)
    model = db.train(table(x, y).name, model="mine", loss="squared", **spec)
    assert fitted.coef_.tolist() == model.weights.tolist()
    assert fitted.intercept_ == 0.0
    assert fitted.score(x, y) == pytest.approx(model.score(x, y))
    assert fitted.score(x, y) > 0.5
    assert not hasattr(fitted, "decision_function")
    assert not hasattr(fitted, "predict_proba")
    level = DPRegressor(database=db, fit_intercept=True, **spec).fit(x, y + 1)
    assert level.intercept_ == level.model_.intercept[0] > 0
    db.forget("mine")


def test_fit_table_is_train(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(300, 3))
    spec: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "lambda_": 0.1, "seed": 7}
    model = db.train(rows.name, model="mine", **spec)
    fitted = DPClassifier(database=db, **spec).fit_table(f"public.{rows.name}")
    assert fitted.coef_.tolist() == [model.weights.tolist()]
    assert fitted.classes_.tolist() == [-1.0, 1.0]
    assert fitted.predict(rows.x).tolist() == model.predict(rows.x).tolist()
    assert fitted.n_features_in_ == 3
    assert tables(db) == ["mine"], "nothing but what was there, and the rows are still in their table"
    assert sql(f"SELECT count(*) AS n FROM {rows.name}")[0]["n"] == 300
    sql(f"CREATE VIEW wide AS SELECT y AS z, x[1] AS a, x[2] AS b, x[3] AS c FROM {rows.name}")
    names = ["a", "b", "c"]
    fitted.fit_table("wide", label="z", features=names)
    assert fitted.coef_.tolist() == [model.weights.tolist()]
    assert fitted.feature_names_in_.tolist() == names
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(pd.DataFrame(rows.x, columns=list("xyz")))
    fitted.fit_table(rows.name)
    assert not hasattr(fitted, "feature_names_in_")
    level = DPRegressor(database=db, **spec).fit_table("wide", "z", names)
    assert level.coef_.tolist() == db.train(rows.name, loss="squared", **spec).weights.tolist()
    sql("DROP VIEW wide")


def test_fit_table_takes_its_classes_from_the_model_or_from_the_parameter(db: Database, table: Any) -> None:
    x, y = two_classes(200, 2)
    rows = table(x, np.where(y > 0, 7, 3))
    with pytest.raises(BismarckError, match="has other values than"):
        DPClassifier(database=db, epsilon=1.0).fit_table(rows.name)
    fitted = DPClassifier(database=db, classes=[7, 3], algorithm="sgd").fit_table(rows.name)
    assert fitted.classes_.tolist() == [3.0, 7.0]
    assert fitted.score(x, rows.y) > 0.8


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "longer"), (0, 1), (-1, 1), (2.0, 1e6), (False, True), (np.int8(3), np.int8(4))],
)
def test_labels_of_any_kind(db: Database, first: Any, second: Any) -> None:
    x, y = two_classes(200, 2)
    labels = np.where(y > 0, second, first)
    fitted = DPClassifier(database=db, algorithm="sgd", epochs=20).fit(x, labels)
    assert fitted.classes_.tolist() == [first, second]
    assert fitted.classes_.dtype == labels.dtype
    assert fitted.score(x, labels) > 0.8
    other = DPClassifier(database=db, algorithm="sgd", epochs=20, classes=[second, first]).fit(x, labels)
    assert other.classes_.tolist() == [first, second]
    assert other.score(x, labels) > 0.8


def test_given_classes_are_not_looked_for(db: Database) -> None:
    """Labels that are no class, and missing ones, have no gradient; the model is that of a table with NaN for them."""
    x, y = two_classes(200, 2)
    labels = np.where(y > 0, "yes", "no").astype(object)
    labels[:3] = ["perhaps", None, np.nan]
    labels[3] = pd.NA
    with pytest.raises(ValueError, match="cannot be put in order, or some are missing"):
        DPClassifier(database=db, epsilon=1.0).fit(x[1:], labels[1:][::-1])
    fitted = DPClassifier(database=db, epsilon=1.0, classes=["no", "yes"], seed=1).fit(x, labels)
    blank = x.copy()
    blank[:4] = np.nan
    same = DPClassifier(database=db, epsilon=1.0, classes=["no", "yes"], seed=1)
    same.fit(blank, np.where(y > 0, "yes", "no"))
    assert fitted.coef_.tolist() == same.coef_.tolist()
    between = DPClassifier(database=db, epsilon=1.0, classes=[0.25, 0.5]).fit(x, np.where(y > 0, 0.5, 0.25))
    assert set(between.predict(x)) <= {0.25, 0.5}, "which scikit-learn takes for a regression's, where it looks"
    alone = DPClassifier(database=db, epsilon=1.0, classes=["no", "yes"]).fit(x, np.full(200, "no"))
    assert alone.classes_.tolist() == ["no", "yes"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_row_is_refused_for_its_values(db: Database, value: float) -> None:
    """Neighbouring tables: with the value in a row there is a model, as there is without; and the noise covers it."""
    x, y = two_classes(100, 2)
    x[17, 1] = value
    for estimator in (DPClassifier(database=db, epsilon=1.0), DPRegressor(database=db, epsilon=1.0)):
        assert estimator.fit(x, y).model_.n == 100
        with pytest.raises(ValueError, match=r"contains (NaN|infinity)"):
            estimator.predict(x)
    y[5] = value
    assert DPRegressor(database=db, epsilon=1.0).fit(x, y).model_.n == 100
    assert DPClassifier(database=db, epsilon=1.0, classes=[-1, 1]).fit(x, y).model_.n == 100


def test_the_released_model_is_the_one_that_was_noised(db: Database) -> None:
    """Over many fits the weights scatter by the noise that the estimator claims; half of it would be noticed."""
    x, y = two_classes(100, 2)
    fits = [DPClassifier(database=db, epsilon=1.0, delta=1e-6, lambda_=0.1, epochs=1).fit(x, y) for _ in range(150)]
    spread = np.std([one.coef_[0] for one in fits], axis=0)
    scale = fits[0].privacy_["noise_scale"]
    # Of 300 numbers: 5 standard errors, and at most the distance two orders of the rows can make.
    assert scale * 0.8 < np.sqrt(np.mean(spread**2)) < scale * 1.2 + fits[0].privacy_["sensitivity"]


def test_data_frames(db: Database) -> None:
    x, y = two_classes(200, 3)
    frame = pd.DataFrame(x, columns=["age", "income", "weight"])
    series = pd.Series(np.where(y > 0, "yes", "no"), dtype="category")
    fitted = DPClassifier(database=db, epsilon=5.0).fit(frame, series)
    assert fitted.feature_names_in_.tolist() == list(frame.columns)
    assert fitted.predict(frame).shape == (200,)
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(frame[["income", "age", "weight"]])
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        fitted.predict(x)


@pytest.mark.parametrize("loss", ["huber", "hinge"])
def test_losses_without_probabilities(db: Database, loss: str) -> None:
    x, y = two_classes(200, 2)
    fitted = DPClassifier(database=db, epsilon=5.0, delta=1e-6, algorithm="dpsgd", loss=loss).fit(x, y)
    assert fitted.model_.loss == loss
    assert not hasattr(fitted, "predict_proba")
    assert set(fitted.predict(x)) <= {-1.0, 1.0}


def test_refusals(db: Database) -> None:
    x, y = two_classes(60, 2)

    def refused(estimator: Any, message: str, kind: type[Exception] = BismarckError, x: Any = x, y: Any = y) -> None:
        with pytest.raises(kind, match=message):
            estimator.set_params(database=db).fit(x, y)

    refused(DPClassifier(epsilon=1.0, loss="squared"), 'loss "squared" is not one of a DPClassifier .valid: hinge, hub')
    refused(DPRegressor(epsilon=1.0, loss="hinge"), 'loss "hinge" is not one of a DPRegressor .valid: squared')
    refused(DPClassifier(epsilon=1.0, loss="hing"), 'unknown loss "hing"')
    refused(DPClassifier(epsilon=1.0, algorithm="bolt"), 'unknown algorithm "bolt"')
    refused(DPClassifier(epsilon=0), "epsilon is 0")
    refused(DPClassifier(epsilon=1.0, epochs=-1), "epochs is -1")
    refused(DPClassifier(epsilon=1.0, tolerance=0.1), 'unknown option "tolerance" for this algorithm')
    refused(DPClassifier(epsilon=1.0), "needs more than one class", ValueError, y=np.ones(60))
    refused(DPClassifier(epsilon=1.0, classes=["a"]), "needs more than one class", ValueError)
    refused(DPClassifier(epsilon=1.0), "Unknown label type: continuous", ValueError, y=np.linspace(0, 1, 60))
    refused(DPClassifier(epsilon=1.0), "requires y to be passed", ValueError, y=None)
    refused(DPRegressor(epsilon=1.0), "inconsistent numbers of samples", ValueError, y=y[1:])
    refused(DPClassifier(epsilon=1.0), "[Ss]parse", TypeError, x=scipy.sparse.csr_array(x))
    with pytest.raises(BismarckError, match=r"database is of type int .it must be a Database, the URL of one, or None"):
        DPClassifier(epsilon=1.0, database=7).fit(x, y)
    with pytest.raises(BismarckError, match="the URL is not one of a database"):
        DPClassifier(epsilon=1.0, database="nowhere").fit(x, y)
    with pytest.raises(BismarckError, match='table "nosuch" does not exist'):
        DPClassifier(epsilon=1.0, database=db).fit_table("nosuch")
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        DPClassifier(epoch=1)
    with pytest.raises(NotFittedError):
        DPClassifier(lambda_=1.0).predict(x)
    assert tables(db) == []


def test_numbers_of_numpy_are_numbers(db: Database) -> None:
    """Grids are made by np.logspace and np.arange."""
    x, y = two_classes(60, 2)
    spec: dict[str, Any] = {"epsilon": np.float32(1), "epochs": np.int64(2), "fit_intercept": np.bool_(True)}
    spec |= {"scale": np.array([1.0, 2.0]), "classes": np.array([-1, 1]), "lambda_": np.float64(0.1)}
    fitted = DPClassifier(database=db, **spec).fit(x, y)
    assert fitted.n_iter_ == 2
    assert fitted.model_.scale.tolist() == [1.0, 2.0]


# ---- what is left behind ----


def test_a_fit_that_fails_leaves_nothing(db: Database, table: Any) -> None:
    x, y = two_classes(60, 2)
    db.train(table(x, y).name, model="taken", epsilon=1.0)
    with pytest.raises(BismarckError, match='model name "taken" is taken'):
        DPClassifier(database=db, epsilon=1.0, model="taken").fit(x, y)
    with pytest.raises(BismarckError, match="diverged"):
        DPRegressor(database=db, algorithm="sgd", step=1e300).fit(x, y)
    with pytest.raises(BismarckError, match="larger than the table's 60 rows"):
        DPClassifier(database=db, epsilon=1.0, batch_size=61).fit(x, y)
    assert tables(db) == ["taken"]


def test_no_other_session_sees_the_rows(db: Database) -> None:
    """Asked right before the rows are dropped, when they are all there."""
    x, y = two_classes(60, 2)
    seen: list[tuple[str, list[str]]] = []

    def look(_c: Any, _d: Any, statement: str, *_: Any) -> None:
        if statement.startswith('DROP TABLE "bismarck_dp_'):
            seen.append((statement, tables(Database(other))))

    other = sqlalchemy.create_engine(db.engine.url)
    sqlalchemy.event.listen(db.engine, "before_cursor_execute", look)
    try:
        DPClassifier(database=db, epsilon=1.0).fit(x, y)
    finally:
        sqlalchemy.event.remove(db.engine, "before_cursor_execute", look)
        other.dispose()
    assert [found for _, found in seen] == [[]]
    assert tables(db) == []


def test_a_named_model_is_kept(db: Database) -> None:
    x, y = two_classes(60, 2)
    fitted = DPClassifier(database=db, epsilon=1.0, model="kept").fit(x, y)
    assert db.model("kept").weights.tolist() == fitted.coef_[0].tolist()
    assert tables(db) == ["kept"]


@pytest.fixture
def analyst(db: Database) -> Iterator[str]:
    """The URL of a user who may make tables and nothing else."""
    assert db.cluster is not None
    with db.engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE analyst LOGIN; GRANT CREATE ON SCHEMA public TO analyst")
    yield db.cluster.url(user="analyst")
    with db.engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY analyst CASCADE; DROP ROLE analyst")


def test_an_ordinary_user_by_url(db: Database, analyst: str, table: Any, sql: Any) -> None:
    x, y = two_classes(200, 3)
    rows = table(x, y)
    spec: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6, "lambda_": 0.1}
    by_owner = DPClassifier(database=db, seed=1, **spec).fit(x, y)
    by_analyst = DPClassifier(database=analyst, seed=1, **spec).fit(x, y)
    assert by_analyst.coef_.tolist() == by_owner.coef_.tolist()
    with pytest.raises(BismarckError, match="permission denied"):
        DPClassifier(database=analyst, **spec).fit_table(rows.name)
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    assert DPClassifier(database=analyst, **spec).fit_table(rows.name).model_.owner == "analyst"
    assert tables(db) == []
    sql("REVOKE CREATE ON SCHEMA public FROM analyst")
    with pytest.raises(BismarckError, match="cannot be made: permission denied for schema public"):
        DPClassifier(database=analyst, **spec).fit(x, y)
    assert DPClassifier(database=analyst, **spec).fit_table(rows.name).model_.private
    backends = "SELECT count(*) AS n FROM pg_stat_activity WHERE usename = 'analyst' AND state <> 'idle'"
    assert sql(backends)[0]["n"] == 0


# ---- copies, pickles, and scikit-learn's tools ----


def test_clones_share_a_database(db: Database) -> None:
    original = DPClassifier(database=db, epsilon=1.0, epochs=3, scale=[1.0, 2.0])
    copy = clone(original)
    assert copy.database is db
    assert copy.get_params() == original.get_params()
    assert original.set_params(epochs=4).epochs == 4
    assert copy.epochs == 3


def test_a_fitted_estimator_predicts_anywhere(db: Database, tmp_path: Path) -> None:
    """Pickled with a URL or without a database, unpickled in a process where no database can be had."""
    x, y = two_classes(100, 2)
    fitted = DPClassifier(database=db, epsilon=1.0).fit(x, np.where(y > 0, "yes", "no"))
    with pytest.raises(BismarckError, match=r"cannot be pickled.*give an estimator the URL"):
        pickle.dumps(fitted)
    fitted.set_params(database="postgresql://nobody@nowhere/nothing")
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "fitted.pickle").write_bytes(pickle.dumps(fitted))
    script = """
        import pickle, sys, numpy
        fitted = pickle.load(open("fitted.pickle", "rb"))
        print(*fitted.predict(numpy.load("x.npy")))
        assert "bismarck_dp.controller" not in sys.modules and "sqlalchemy" not in sys.modules
    """
    assert run(script, tmp_path).split() == fitted.predict(x).tolist()


def test_a_pipeline_and_a_grid(db: Database) -> None:
    """They work; what is wrong with them is in the documentation."""
    x, y = two_classes(200, 3)
    pipeline = make_pipeline(StandardScaler(), DPClassifier(database=db, epsilon=20.0, lambda_=0.1)).fit(x, y)
    assert pipeline.score(x, y) > 0.6
    grid = GridSearchCV(DPClassifier(database=db, epsilon=20.0), {"lambda_": np.logspace(-2, 0, 2)}, cv=2).fit(x, y)
    assert grid.best_params_["lambda_"] in (0.01, 1.0)
    assert grid.best_estimator_.model_.plan["strong_convexity"] == grid.best_params_["lambda_"]
    assert tables(db) == []


# ---- the process's own server ----


def run(script: str, directory: Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=directory, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


def gone(path: str, pid: str) -> bool:
    """Whether a server's directory and process are; a zombie, where nothing reaps it, is a process no more."""
    state = Path(f"/proc/{pid}/stat")
    return not os.path.exists(path) and (not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")


SERVER = """
    import os, sys, multiprocessing, numpy
    from pathlib import Path
    from bismarck_dp import DPClassifier, DPRegressor
    from bismarck_dp.controller.scratch import shared

    def fit():
        x = numpy.linspace(-1, 1, 40)[:, None]
        DPClassifier(epsilon=1.0).fit(x, x[:, 0] > 0)
        DPRegressor(epsilon=1.0).fit(x, x[:, 0])
        cluster = shared().cluster
        print(cluster.path, (cluster.pgdata / "postmaster.pid").read_text().split()[0], flush=True)
        assert cluster.running
"""


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2)], ids=["end", "exit", "interrupt"]
)
def test_the_server_ends_with_its_process(tmp_path: Path, end: str, code: int) -> None:
    (path, pid), *more = map(str.split, run(f"{SERVER}\n    fit()\n    {end}\n", tmp_path, code).splitlines())
    assert not more
    assert gone(path, pid)


def test_forked_processes_have_their_own_server(tmp_path: Path) -> None:
    """A worker of multiprocessing, and a plain fork, which ends by itself: the first server outlives both."""
    fork = """
    fit()
    worker = multiprocessing.get_context("fork").Process(target=fit)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    if (child := os.fork()) == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    fit()
    """
    first, second, again = (line.split() for line in run(SERVER + fork, tmp_path).splitlines())
    assert first == again
    assert first[0] != second[0]
    assert gone(*first)
    assert gone(*second)


def test_one_server_for_all_estimators_of_a_process() -> None:
    x, y = two_classes(60, 2)
    DPClassifier(epsilon=1.0).fit(x, y)
    assert shared() is shared()
    assert tables(shared()) == []


# ---- without scikit-learn ----


def test_the_package_does_not_need_scikit_learn(tmp_path: Path) -> None:
    """Neither the import nor a look at the names; the estimators themselves say what to install."""
    (tmp_path / "sklearn.py").write_text("raise ImportError('not here')")
    script = """
        import sys
        sys.path.insert(0, ".")
        import bismarck_dp
        bismarck_dp.explain(n=10, d=2, epsilon=1.0)
        assert {"DPClassifier", "DPRegressor"} <= set(bismarck_dp.__all__)
        for name in ("DPClassifier", "DPRegressor"):
            try:
                getattr(bismarck_dp, name)
            except bismarck_dp.BismarckError as error:
                print(error)
    """
    told = "the estimators need scikit-learn, 1.6 or later (pip install 'scikit-learn>=1.6')\n"
    assert run(script, tmp_path) == 2 * told
    with pytest.raises(AttributeError, match="has no attribute 'DPClasifier'"):
        bismarck_dp.DPClasifier  # noqa: B018


def test_the_extra_asks_for_what_the_error_names() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '\nsklearn = [\n    "scikit-learn>=1.6",\n]\n' in text
    assert tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 6)


def test_a_database_is_not_pickled_elsewhere_either(db: Database) -> None:
    assert db.cluster is not None
    with connect(db.cluster.url()) as other, pytest.raises(BismarckError, match="cannot be pickled"):
        pickle.dumps({"database": other})


def test_many_classes(db: Database) -> None:
    rng = np.random.default_rng(0)
    y = np.array(["a", "b", "c"])[rng.integers(0, 3, 600)]
    x = (np.eye(3)[np.searchsorted(["a", "b", "c"], y)] + 0.2 * rng.normal(size=(600, 3))) / 2
    fitted = DPClassifier(database=db, epsilon=20.0, lambda_=0.01).fit(x, y)
    assert fitted.classes_.tolist() == ["a", "b", "c"]
    assert fitted.coef_.shape == (3, 3)
    assert fitted.intercept_.shape == (3,)
    assert fitted.decision_function(x).shape == fitted.predict_proba(x).shape == (600, 3)
    assert fitted.score(x, y) > 0.8
    assert tables(db) == []
    places = np.searchsorted(["a", "b", "c"], y)
    for four in (4, np.int64(4), np.arange(4)):
        assert DPClassifier(database=db, epsilon=20.0, classes=four).fit(x, places).coef_.shape == (4, 3)


def test_a_table_with_categories_and_a_data_frame_to_predict(db: Database) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"age": rng.random(400), "colour": rng.choice(["red", "blue", "grey"], 400)})
    frame["y"] = (frame["age"] + (frame["colour"] == "red") > 0.8).astype(int)
    with db.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE frames (y int, age float8, colour text)")
        for row in frame.itertuples():
            connection.exec_driver_sql(
                "INSERT INTO frames VALUES (%s, %s, %s)", (int(row.y), float(row.age), row.colour)
            )
    try:
        # Without an intercept the weight of age is near zero: its sign, and with it the score, would be the noise's.
        spec: dict[str, Any] = {"epsilon": 50.0, "lambda_": 0.01, "fit_intercept": True}
        fitted = DPClassifier(database=db, categories={"colour": ["red", "blue"]}, **spec)
        fitted.fit_table("frames", label="y", features=["age", "colour"])
        assert fitted.n_features_in_ == 3
        assert fitted.score(frame, frame["y"]) > 0.8
        again = clone(fitted).set_params(scale={"age": 2.0}).fit(frame[["age", "colour"]], frame["y"])
        assert again.coef_.shape == (1, 3)
        assert again.score(frame, frame["y"]) > 0.8
        assert again.model_.scale.tolist() == [2, 1, 1]
        assert pickle.loads(pickle.dumps(again.set_params(database=None))).predict(frame[:2]).shape == (2,)
        with pytest.raises(BismarckError, match="name columns, and X has none"):
            clone(fitted).fit(frame[["age"]].to_numpy(), frame["y"])
        with pytest.raises(BismarckError, match='unknown column in categories "colour"'):
            clone(fitted).fit(frame[["age"]], frame["y"])
    finally:
        with db.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE frames")
