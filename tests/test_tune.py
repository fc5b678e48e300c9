"""Tuning through SQL, Python and the command line: what is refused, what is stored, what stays behind, who may what."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg2
import pytest
import sqlalchemy
from click.testing import CliRunner
from conftest import two_classes
from test_access import refused, run
from test_faults import Running
from test_noisy import peak_memory

from bismarck_dp import BismarckError, Model
from bismarck_dp.accounting import Event, epsilon_of
from bismarck_dp.controller import tune
from bismarck_dp.controller.cli import main
from bismarck_dp.controller.database import Database
from bismarck_dp.controller.engines import Portions, Request, SqlEngine
from bismarck_dp.spec import Spec
from bismarck_dp.tuning import MOST_CANDIDATES, make_candidates

GRID = {"lambda": [0.001, 0.01], "epochs": [1, 2]}


def tune_sql(name: str, model: str = "tuned", epsilon: str = "1.0", grid: Any = GRID, **more: str) -> str:
    rest = "".join(f", {key} => {value}" for key, value in more.items())
    shown = "NULL" if grid is None else f"'{json.dumps(grid)}'"
    return f"SELECT * FROM dp_tune('{name}', '{model}', 'y', '{{x}}', {epsilon}, grid => {shown}{rest})"


# ---- what it does ----


def test_one_candidate_is_released_with_all_of_epsilon(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(1003, 3))
    found = sql(tune_sql(rows.name))[0]
    assert (found["epsilon"], found["delta"], found["private"], found["note"]) == (1.0, 0.0, True, "")
    assert found["n"] in (200, 201)
    assert found["tuning"] == {
        "method": "portions", "candidates": 4, "portions": 5, "rows": 1003, "selection_epsilon": 1.0,
    }  # fmt: skip
    assert found["plan"]["n"] == found["n"]
    assert (found["options"]["lambda"], found["options"].get("epochs", 1)) in [
        (a, b) for a in (0.001, 0.01) for b in (1, 2)
    ]
    assert [row["name"] for row in sql("SELECT name FROM bismarck_dp.models")] == ["tuned"]
    assert sql("SELECT dp_predict('tuned', '{1,2,3}') AS p")[0]["p"] in (-1, 1)
    event = Event.from_json(found["event"])
    assert type(event).__name__ == "ParallelDpEvent"
    assert epsilon_of(event, 0.0, "replace").epsilon == pytest.approx(1.0)


def test_python_drives_it_from_outside_and_others_call_it_in_the_server(
    db: Database,
    analyst: Database,
    table: Any,
    sql: Any,
) -> None:
    """The same seed gives the same model either way."""
    rows = table(*two_classes(600, 3))
    sql(f"ALTER TABLE {rows.name} OWNER TO analyst")
    done: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="seed is known"):
        outside = db.tune(rows.name, grid=GRID, epsilon=1.0, delta=1e-6, seed=5, progress=lambda *now: done.append(now))
    with pytest.warns(UserWarning, match="seed is known"):
        inside = analyst.tune(rows.name, grid=GRID, epsilon=1.0, delta=1e-6, seed=5, model="inside")
    assert isinstance(outside, Model)
    assert outside.name == f"{rows.name}_1"
    assert inside.owner == "analyst"
    np.testing.assert_array_equal(outside.weights, inside.weights)
    assert (outside.tuning, outside.options, outside.event) == (
        inside.tuning,
        inside.options,
        {"name": "NonPrivateDpEvent"},
    )
    assert not outside.private
    assert done == [(i, 6) for i in range(1, 7)]
    sql(f"ALTER TABLE {rows.name} OWNER TO postgres")


def test_the_better_candidate_wins_where_the_difference_is_large(db: Database, table: Any) -> None:
    """Classes that only an intercept can tell apart."""
    rows = table(*shifted(2000))
    model = db.tune(rows.name, grid={"fit_intercept": [False, True]}, epsilon=10.0, epochs=20)
    assert len(model.intercept) == 1
    assert model.score(rows.x, rows.y) > 0.9


def shifted(n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    y = rng.choice([-1.0, 1.0], n)
    return np.where(y > 0, 0.9, 0.1)[:, None].astype(np.float32), y


ALGORITHMS = [
    {"algorithm": "bolton", "lambda": 0.01},
    {"algorithm": "dpsgd", "epochs": 1},
    {"algorithm": "scs13", "epochs": 1, "shuffle": "each_pass"},
    {"algorithm": "dpcd"},
    {"algorithm": "dpgcd", "workers": 2},
    {"algorithm": "dpscd", "lambda": 0.1},
    {"loss": "huber", "workers": 3, "shuffle": "each_pass"},
    {"scale": 0.5, "normalize": True, "feature_bound": 2.0},
]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("method", ["portions", "random_stopping"])
def test_candidates_may_be_of_any_algorithm_and_loss(db: Database, table: Any, adjacency: str, method: str) -> None:
    rows = table(*two_classes(900, 4))
    grid = [{k: v for k, v in one.items() if k != "shuffle" or method == "portions"} for one in ALGORITHMS]
    model = db.tune(rows.name, grid=grid, epsilon=1.0, delta=1e-6, method=method, trials=4.0, adjacency=adjacency)
    assert (model.epsilon, model.delta, model.adjacency) == (1.0, 1e-6, adjacency)
    assert model.tuning is not None
    assert model.tuning["method"] == method
    assert model.private
    assert epsilon_of(Event.from_json(model.event), 1e-6, adjacency).epsilon <= 1.0 + 1e-9


def test_regression(db: Database, table: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(800, 3)).astype(np.float32) / 3
    rows = table(x, x @ [1.0, -1.0, 0.5])
    model = db.tune(rows.name, grid={"epochs": [1, 20]}, epsilon=50.0, loss="squared")
    assert model.options["epochs"] == 20
    model = db.tune(rows.name, grid={"epochs": [1, 20]}, epsilon=50.0, loss="squared", method="random_stopping")
    assert model.epsilon == 50.0


def test_without_privacy_the_fewest_errors_win(db: Database, table: Any) -> None:
    rows = table(*shifted(400))
    for _ in range(5):
        model = db.tune(
            rows.name, grid={"fit_intercept": [False, True], "algorithm": ["sgd", "scd"], "lambda": [0.001]}
        )
        assert len(model.intercept) == 1
        assert (model.epsilon, model.private, model.event) == (None, False, {"name": "NonPrivateDpEvent"})
        assert model.tuning is not None
        assert model.tuning["selection_epsilon"] is None
        assert (model.gap is not None) == (model.algorithm == "scd")


def test_a_public_table_costs_nothing_and_says_so(db: Database, table: Any) -> None:
    rows, public = table(*shifted(400)), table(*shifted(2000))
    with pytest.warns(UserWarning, match="taken as public"):
        model = db.tune(
            rows.name, grid={"fit_intercept": [False, True]}, epsilon=20.0, epochs=20, public_source=public.name
        )
    assert len(model.intercept) == 1
    assert (model.n, model.epsilon) == (400, 20.0)
    assert model.tuning == {
        "method": "public", "candidates": 2, "rows": 2000, "public_source": f"public.{public.name}", "cost": 0,
    }  # fmt: skip
    assert "taken as public" in model.note
    assert model.event == {"name": "LaplaceDpEvent", "noise_multiplier": 1 / 20}


def test_public_rows_alone_decide(db: Database, table: Any) -> None:
    """The source's own labels are pure chance: what is best on public rows wins all the same."""
    rng = np.random.default_rng(3)
    x, y = shifted(400)
    rows, public = table(x, rng.permutation(y)), table(*shifted(2000))
    for _ in range(5):
        model = db.tune(
            rows.name, grid={"fit_intercept": [False, True]}, epsilon=5.0, epochs=20, public_source=public.name
        )
        assert len(model.intercept) == 1


def test_a_public_table_is_read_with_the_callers_rights(
    db: Database,
    analyst: Database,
    table: Any,
    sql: Any,
) -> None:
    rows, public = table(*two_classes(100, 3)), table(*two_classes(100, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    refused(
        analyst, tune_sql(rows.name, public_source=f"'{public.name}'"), f"permission denied for table {public.name}"
    )
    sql(f"GRANT SELECT ON {public.name} TO analyst")
    assert run(analyst, tune_sql(rows.name, public_source=f"'{public.name}'"))[0]["owner"] == "analyst"


def test_many_candidates_take_few_locks(db: Database, table: Any) -> None:
    rows = table(*two_classes(3000, 2))
    model = db.tune(rows.name, grid={"lambda": [i / 1000 for i in range(1, 301)]}, epsilon=1.0, epochs=1)
    assert model.n in (9, 10)


def test_a_model_that_diverges_is_wrong_everywhere(db: Database, table: Any) -> None:
    """It loses against any other, and is an error only when it is the winner."""
    rows = table(*two_classes(400, 3))
    wild = {"algorithm": "dpsgd", "loss": "squared", "lambda": 1.0, "step": 1e100, "epochs": 3}
    tame = {"algorithm": "dpsgd", "loss": "squared", "epochs": 3}
    model = db.tune(rows.name, grid=[wild, tame, wild], epsilon=50.0, delta=1e-6)
    assert "step" not in model.options
    with pytest.raises(BismarckError, match="diverged"):
        db.tune(rows.name, grid=[wild, wild], epsilon=50.0, delta=1e-6)


def test_the_command_line(db: Database, table: Any) -> None:
    rows = table(*two_classes(600, 3))
    assert db.cluster is not None
    runner = CliRunner()
    command = ["tune", rows.name, "--grid", json.dumps(GRID), "--epsilon", "1", "--url", db.cluster.url()]
    shown = runner.invoke(main, [*command, "--model", "shown"])
    assert shown.exit_code == 0, shown.stderr
    assert "portions" in shown.stdout
    assert "pass 6 of 6" in shown.stderr
    answer = runner.invoke(main, [*command, "--json", "--method", "random_stopping", "--trials", "2"])
    assert json.loads(answer.stdout)["tuning"]["trials"] == 2
    public = runner.invoke(main, [*command, "--json", "--public-source", table(*two_classes(100, 3)).name])
    assert json.loads(public.stdout)["tuning"]["cost"] == 0
    assert runner.invoke(main, [*command, "--method", "random_stopping"]).stderr == ""  # the number of trials is secret
    wrong = runner.invoke(main, ["tune", rows.name, "--grid", "{", "--epsilon", "1"])
    assert wrong.exit_code == 2
    assert "it is not JSON" in wrong.stderr
    wrong = runner.invoke(main, [*command[:2], "--grid", '{"seed": [1]}', *command[4:]])
    assert wrong.exit_code == 1
    assert '"seed" is the same for all candidates' in wrong.stderr


# ---- what is refused ----

LONG = {"lambda": [1 / i for i in range(1, 40)], "epochs": list(range(1, 40))}

BAD_GRIDS: list[tuple[Any, str, str]] = [
    (None, "grid is NULL", "lambda"),
    ({}, "the grid has no candidates", "lambda"),
    ([], "the grid has no candidates", "lambda"),
    (3, "grid is neither an object of lists nor a list of objects", "for example"),
    ("lambda", "grid is neither", "for example"),
    ([1], "grid is neither", "for example"),
    ({"lambda": 0.1}, '"lambda" of the grid has no list of values', "for example"),
    ({"lambda": []}, '"lambda" of the grid has no list of values', "for example"),
    ({"lambda": "all"}, '"lambda" of the grid has no list of values', "for example"),
    (LONG, f"the grid has {39 * 39} candidates", f"at most {MOST_CANDIDATES}"),
    ([{}] * 1001, "the grid has 1001 candidates", "at most"),
    ({"lamda": [0.1]}, 'candidate 1 {"lamda": 0.1}: unknown option "lamda"', "lambda"),
    ({"lambda": [0.1, -1]}, 'candidate 2 {"lambda": -1}: lambda is -1', "0, or a number"),
    ({"lambda": [0.1], "epochs": [1, "x"]}, 'epochs is "x"', "whole number"),
    ({"algorithm": ["bolton", "dpsdg"]}, 'candidate 2 {"algorithm": "dpsdg"}: unknown algorithm', "dpsgd"),
    ({"algorithm": [1]}, 'candidate 1 {"algorithm": 1}: unknown algorithm "1"', "valid"),
    ({"algorithm": [None]}, 'unknown algorithm "None"', "valid"),
    ({"loss": [{}]}, 'unknown loss "{}"', "valid"),
    ({"algorithm": ["sgd"]}, 'algorithm "sgd" is not private', "NULL"),
    ({"loss": ["hinge"]}, 'candidate 1 {"loss": "hinge"}: loss "hinge" is not smooth', "huber"),
    ({"loss": ["logistic", "squared"]}, "the grid mixes losses", "compared"),
    ({"algorithm": ["bolton", "dpgcd"], "epochs": [1]}, 'unknown option "epochs" for this algorithm', "iterations"),
    ({"batch_size": [100]}, 'candidate 1 {"batch_size": 100}: batch_size 100 is larger', "use at most 50"),
    ({"scale": [[1, 2]]}, "scale has 2 numbers for 3 features", "one for all"),
    ({"lambda": [0.1], "lambda_": [0.1]}, "lambda is given twice", "once"),
    ([{"epochs": i} for i in range(1, 101)], "100 rows cannot be split into 101 portions", "fewer candidates"),
    *(
        ({name: [1]}, f'"{name}" is the same for all candidates', "not in the grid")
        for name in ("epsilon", "delta", "seed", "adjacency", "classes", "label_bound", "categories")
    ),
]


@pytest.mark.parametrize(("grid", "message", "hint"), BAD_GRIDS, ids=lambda value: str(value)[:40])
def test_bad_grids_are_refused_by_name(db: Database, table: Any, grid: Any, message: str, hint: str) -> None:
    rows = table(*two_classes(100, 3))
    with pytest.raises(sqlalchemy.exc.DBAPIError) as caught, db.engine.begin() as connection:
        connection.exec_driver_sql(tune_sql(rows.name, grid=grid))
    error = caught.value.orig
    assert isinstance(error, psycopg2.Error)
    assert message in error.diag.message_primary
    assert hint in error.diag.message_hint
    with pytest.raises(BismarckError) as refusal:
        db.tune(rows.name, grid=grid, epsilon=1.0)
    assert message in refusal.value.message


BAD_ARGUMENTS: list[tuple[dict[str, str], str]] = [
    ({"epsilon": "NULL"}, "needs an epsilon"),
    ({"epsilon": "0"}, "epsilon is 0"),
    ({"epsilon": "'nan'"}, "epsilon is nan"),
    ({"delta": "1"}, "delta is 1"),
    ({"method": "'portion'"}, 'unknown method "portion"'),
    ({"method": "NULL"}, "method is NULL"),
    ({"algorithm": "'bolt'"}, 'unknown algorithm "bolt"'),
    ({"loss": "NULL"}, "loss is NULL"),
    ({"options": "'[1]'"}, "options is"),
    ({"options": "NULL"}, ""),
    ({"options": "'{\"lambda\": 1}'"}, '"lambda" is an option and in the grid'),
    ({"options": "'{\"lambda_\": 1}'"}, '"lambda" is an option and in the grid'),
    ({"options": "'{\"portion\": true}'"}, 'unknown option "portion"'),
    ({"public_source": "'{t}'"}, "public_source is the source itself"),
    ({"public_source": "1::oid::regclass"}, "the source table does not exist"),
    ({"public_source": "'pg_class'", "method": "'random_stopping'"}, "tunes on the source, and public_source is given"),
    ({"method": "'random_stopping'", "trials": "1"}, "trials is 1"),
    ({"method": "'random_stopping'", "trials": "'nan'"}, "trials is nan"),
    ({"method": "'random_stopping'", "trials": "NULL"}, "trials is NULL"),
    ({"method": "'random_stopping'", "algorithm": "'sgd'", "epsilon": "NULL"}, "random_stopping is about privacy"),
    ({"loss": "'squared'", "algorithm": "'sgd'", "epsilon": "NULL"}, "label_bound is not given"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments(db: Database, table: Any, sql: Any, changes: dict[str, str], message: str) -> None:
    rows = table(*two_classes(100, 3))
    statement = tune_sql(
        rows.name, **{key: value.format(t=rows.name) if "{t}" in value else value for key, value in changes.items()}
    )
    if not message and "options" in changes:
        assert sql(statement)[0]["private"]
        return
    with pytest.raises(sqlalchemy.exc.DBAPIError) as caught:
        sql(statement)
    assert message in str(caught.value.orig)
    assert "Traceback" not in str(caught.value.orig)
    assert "internal error" not in str(caught.value.orig)


def test_every_candidate_is_checked_before_the_source_is_split(db: Database, table: Any, sql: Any) -> None:
    """The last one is refused: no run was begun, so no number was given to one."""
    rows = table(*two_classes(100, 3))
    last = "SELECT last_value FROM bismarck_dp.run"
    before = sql(last)[0]["last_value"]
    for method in ("portions", "random_stopping"):
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="candidate 3"):
            sql(tune_sql(rows.name, grid={"batch_size": [1, 2, 99]}, method=f"'{method}'"))
    assert sql(last)[0]["last_value"] == before


def test_a_malformed_request_at_the_door(analyst: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(60, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    good = {
        "source": 1, "model": "m", "label": "y", "features": ["x"], "epsilon": "1", "delta": "0", "algorithm": "bolton",
        "loss": "logistic", "options": {}, "grid": GRID, "method": "portions", "public_source": None, "trials": "10",
    }  # fmt: skip
    bad = [
        [], 3, {**good, "portion": True}, {**good, "public_source": []}, {**good, "public_source": "x"},
        {**good, "trials": []}, {**good, "trials": "x"}, {**good, "source": "x"}, {**good, "method": {}},
        {key: value for key, value in good.items() if key != "grid"},
    ]  # fmt: skip
    for request in bad:
        with pytest.raises(sqlalchemy.exc.DBAPIError) as caught, analyst.engine.begin() as connection:
            connection.exec_driver_sql("SELECT bismarck_dp.call('tune', %(r)s::jsonb)", {"r": json.dumps(request)})
        assert "internal error" not in str(caught.value.orig), request


def test_models_that_do_not_fit_into_memory(db: Database, table: Any, sql: Any) -> None:
    rows = table(np.zeros((40, 9000), np.float32), np.ones(40))
    with db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '1MB'")
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="20 models take 2 MB, and maintenance_work_mem is 1 MB"):
            connection.exec_driver_sql(tune_sql(rows.name, grid={"epochs": list(range(1, 21))}))


def test_projections_of_a_grid_are_one_matrix(db: Database, table: Any) -> None:
    """A candidate's luck with its matrix is not what a grid compares; and room is needed for one matrix alone."""
    rows = table(np.ones((40, 1000), np.float32), np.ones(40))
    with opened(db, rows.name) as (engine, request):
        peaks = []
        for count in (2, 12):
            candidates = make_candidates(
                {"epochs": list(range(1, count + 1))}, epsilon=1.0, options={"project_dim": 400}
            )
            request = replace(request, model=f"of {count}", spec=candidates[0].spec)
            tuning = tune._prepared(tune.Tuning(request, candidates), engine.describe(request))
            assert len({candidate.spec.options["project_seed"] for candidate in tuning.candidates}) == 1
            tune.tune(engine, tune.Tuning(request, candidates))
            peaks.append(peak_memory(engine))
    assert peaks[1] - peaks[0] < 12_000, "kB; ten more matrices would take 32,000"


def test_matrices_that_do_not_fit_into_memory(db: Database, table: Any) -> None:
    rows = table(np.ones((40, 1000), np.float32), np.ones(40))
    with db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '5MB'")
        grid = {"project_dim": [400, 401]}
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="2 models take 7 MB, and maintenance_work_mem is 5 MB"):
            connection.exec_driver_sql(tune_sql(rows.name, grid=grid))


# ---- portions ----


@pytest.mark.parametrize("method", ["portions", "random_stopping"])
def test_coins_that_leave_a_portion_empty_are_tossed_again(db: Database, table: Any, method: str) -> None:
    """Of five rows every other toss leaves one of three portions empty, or the rows for scores."""
    rows = table(*two_classes(5, 2))
    how: dict[str, Any] = {"method": method, "adjacency": "zero-out", "batch_size": 1, "classes": [-1, 1]}
    for _ in range(12):
        assert db.tune(rows.name, grid={"epochs": [1, 2]}, epsilon=1.0, **how).private


def test_coins_cannot_make_portions_of_nothing(db: Database, table: Any) -> None:
    rows = table(*two_classes(30, 2))
    how: dict[str, Any] = {"adjacency": "zero-out", "batch_size": 10, "classes": [-1, 1], "algorithm": "dpsgd"}
    with pytest.raises(BismarckError, match="portions of 30 rows, as coins divide them, are too small to train on"):
        db.tune(rows.name, grid={"lambda": [0.1, 0.2]}, epsilon=1.0, delta=1e-3, seed=4, **how)


@contextmanager
def opened(db: Database, name: str, **options: Any) -> Iterator[tuple[SqlEngine, Request]]:
    """An engine in a transaction that is rolled back, in which packed rows can be read."""
    with db.engine.connect() as connection:
        for kind in ("block", "wide_block"):
            connection.exec_driver_sql(f"CREATE CAST (bismarck_dp.{kind} AS bytea) WITHOUT FUNCTION")
        oid = connection.exec_driver_sql(f"SELECT '{name}'::regclass::oid").scalar_one()
        yield SqlEngine(connection), Request(oid, "m", "y", ["x"], Spec.create("bolton", "logistic", 1.0, 0.0, options))
        connection.rollback()


def contents(engine: SqlEngine, portions: Portions, d: int) -> list[Any]:
    """Labels and features of every portion."""
    found = []
    for table in portions.tables:
        blocks = engine.connection.exec_driver_sql(f"SELECT rows::bytea FROM {table} ORDER BY block").scalars().all()
        found.append(np.frombuffer(b"".join(bytes(block) for block in blocks)).reshape(-1, d + 1))
    return found


@pytest.mark.parametrize(("n", "d"), [(1, 1), (7, 2), (1000, 3), (60, 1500)])
@pytest.mark.parametrize("fixed", [True, False])
def test_every_row_is_in_exactly_one_portion(db: Database, table: Any, n: int, d: int, fixed: bool) -> None:
    x = np.random.default_rng(n).normal(size=(n, d)).astype(np.float32)
    rows = table(x, np.arange(n, dtype=float))
    shares = [n - n // 2, 0, n // 2] if fixed else [4, 0, 1]
    with opened(db, rows.name) as (engine, request):
        portions = engine.split(request, d, shares, fixed)
        parts = contents(engine, portions, d)
    assert [len(part) for part in parts] == portions.sizes
    assert portions.rows == sum(portions.sizes) == n
    assert portions.sizes == shares or not fixed
    together = np.concatenate(parts)
    np.testing.assert_array_equal(np.sort(together[:, 0]), np.arange(n))
    np.testing.assert_array_equal(together[:, 1:], x[together[:, 0].astype(int)])


def test_portions_are_exact_under_concurrent_updates(db: Database, table: Any) -> None:
    """Updates move rows about; one scan sees each of them once."""
    n = 3000
    rows = table(np.zeros((n, 2), np.float32), np.arange(n, dtype=float))
    stop = threading.Event()

    def update() -> None:
        while not stop.is_set():
            with db.engine.begin() as connection:
                connection.exec_driver_sql(f"UPDATE {rows.name} SET x = '{{1,1}}' WHERE random() < 0.2")

    thread = threading.Thread(target=update)
    thread.start()
    try:
        for _ in range(10):
            with opened(db, rows.name) as (engine, request):
                parts = contents(engine, engine.split(request, 2, [1000] * 3, True), 2)
            np.testing.assert_array_equal(np.sort(np.concatenate(parts)[:, 0]), np.arange(n))
    finally:
        stop.set()
        thread.join()


BAD_ROWS = ["NULL", "'{}'", "'{1}'", "'{1,2,3}'", "'{1,NULL}'", "'{nan,1}'", "'{1,inf}'", "'{{1,2}}'"]


def test_what_is_written_has_one_size_whatever_the_values(db: Database, table: Any, sql: Any) -> None:
    sizes = set()
    for value in ["'{1,2}'", *BAD_ROWS]:
        rows = table(np.ones((500, 2), np.float32), np.ones(500))
        sql(
            f"UPDATE {rows.name} SET x = {value}, y = {'NULL' if value == 'NULL' else 1} WHERE id > 1".replace(
                "{{", "{{"
            )
        )
        with opened(db, rows.name, seed=1) as (engine, request):
            portions = engine.split(request, 2, [200, 300], True)
            sizes.add(tuple(disk_size(engine, name) for name in portions.tables))
            parts = np.concatenate(contents(engine, portions, 2))
        assert len(parts) == 500
        assert np.isnan(parts).all(axis=1).sum() == (0 if value == "'{1,2}'" else 499)
        assert np.isfinite(parts).all(axis=1).sum() == (500 if value == "'{1,2}'" else 1)
    assert len(sizes) == 1


def test_wide_rows_are_not_compressed(db: Database, table: Any) -> None:
    sizes = set()
    for x in (np.zeros((60, 1500)), np.random.default_rng(0).normal(size=(60, 1500)), np.full((60, 1500), np.nan)):
        rows = table(x.astype(np.float32), np.ones(60))
        with opened(db, rows.name, seed=1) as (engine, request):
            sizes.add(disk_size(engine, engine.split(request, 1500, [60], True).tables[0]))
    assert len(sizes) == 1


def disk_size(engine: SqlEngine, name: str) -> int:
    return int(engine.connection.exec_driver_sql(f"SELECT pg_total_relation_size('{name}')").scalar_one())


def counting_view(sql: Any, table: str, steps: str) -> None:
    """A view whose number of rows depends on how often it was read."""
    sql("CREATE SEQUENCE reads")
    sql(
        f"CREATE VIEW restless AS SELECT y, x FROM {table}, (SELECT nextval('reads') AS r OFFSET 0) AS s"
        f" WHERE id <= {steps}"
    )


def test_rows_that_come_meanwhile_are_counted_again(db: Database, table: Any, sql: Any) -> None:
    """n is counted, then the split finds another number, and begins again."""
    rows = table(*two_classes(200, 3))
    try:
        counting_view(sql, rows.name, "CASE WHEN r = 1 THEN 150 ELSE 200 END")
        assert sql(tune_sql("restless"))[0]["tuning"]["rows"] == 200
        sql("ALTER SEQUENCE reads RESTART")
        found = sql(tune_sql("restless", "stopped", method="'random_stopping'"))[0]
        assert (found["tuning"]["rows"], found["n"]) == (200, 160)
        sql("DROP VIEW restless; DROP SEQUENCE reads")
        counting_view(sql, rows.name, "100 + r")
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="another number of rows whenever it is read"):
            sql(tune_sql("restless", "never"))
    finally:
        sql("DROP VIEW restless; DROP SEQUENCE reads")


# ---- nothing else can be had ----


@pytest.fixture
def held(db: Database, table: Any) -> Iterator[tuple[SqlEngine, Any, Portions]]:
    """Two private models that wait, and rows to choose them by."""
    rows = table(*two_classes(90, 3))
    candidates = make_candidates({"epochs": [1, 2]}, epsilon=1.0)
    with opened(db, rows.name) as (engine, request):
        portions = engine.split(request, 3, [30, 30, 30], True)
        runs = []
        for i, candidate in enumerate(candidates):
            plan = candidate.plan(30, 3)
            packed = engine.pack(engine.portion(request, portions, i, candidate.spec), plan)
            engine.begin(packed, plan)
            engine.epoch(packed, plan)
            engine.hold(packed, plan)
            runs.append((packed, plan))
        yield engine, runs, portions


def fails(engine: SqlEngine, statement: str, message: str) -> None:
    with pytest.raises(Exception, match=message), engine.connection.begin_nested():
        engine.connection.exec_driver_sql(statement)


def judge(runs: Any, **more: Any) -> dict[str, Any]:
    return {"d": 3, "units": 1, "codings": [plan.pack_params() for _, plan in runs], **more}


def test_a_model_that_waits_gives_nothing_out(held: Any) -> None:
    engine, runs, portions = held
    run = runs[0][0].run
    for statement in (f"release({run}, '{{}}')", f"hold({run}, '{{}}')", f"gap({run})", f"objective({run})"):
        fails(engine, f"SELECT bismarck_dp.{statement}", "is over: its model waits to be chosen")
    ids = [packed.run for packed, _ in runs]
    with pytest.raises(Exception, match="chosen by a private mechanism"), engine.connection.begin_nested():
        engine.choose(portions.tables[2], ids, judge(runs, public=False))


def test_losers_and_winner_are_gone_when_one_was_chosen(held: Any) -> None:
    engine, runs, portions = held
    ids = [packed.run for packed, _ in runs]
    place, weights = engine.choose(portions.tables[2], ids, judge(runs, numerator=1, denominator=2, seed=None))
    assert place in (0, 1)
    assert len(weights) == 3
    for number in ids:
        fails(engine, f"SELECT * FROM bismarck_dp.winner({number})", "holds no model")
        fails(engine, f"SELECT bismarck_dp.release({number}, '{{}}')", "was not begun")


def test_a_savepoint_takes_models_with_it(held: Any) -> None:
    engine, runs, portions = held
    candidate = make_candidates({"epochs": [1]}, epsilon=1.0)[0]
    plan = candidate.plan(30, 3)
    nested = engine.connection.begin_nested()
    request = Request(0, "m", "y", ["x"], candidate.spec)
    packed = engine.pack(engine.portion(request, portions, 2, candidate.spec), plan)
    engine.begin(packed, plan)
    engine.hold(packed, plan)
    nested.rollback()
    fails(engine, f"SELECT * FROM bismarck_dp.winner({packed.run})", "holds no model")
    engine.connection.exec_driver_sql(f"SELECT * FROM bismarck_dp.winner({runs[0][0].run})")


WRONG = [
    ({"codings": []}, "codings"),
    ({"codings": {}}, "codings"),
    ({"codings": [1, 2]}, "codings"),
    ({"units": 0}, "units"),
    ({"units": 2**21}, "units"),
    ({"d": 2}, "another number of features"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_parameters_that_do_not_fit(held: Any, change: dict[str, Any], message: str) -> None:
    engine, runs, portions = held
    ids = [packed.run for packed, _ in runs]
    params = {**judge(runs, numerator=1, denominator=2, seed=None), **change}
    with pytest.raises(Exception, match=message), engine.connection.begin_nested():
        engine.choose(portions.tables[2], ids, params)
    with pytest.raises(Exception, match="no model to choose from"), engine.connection.begin_nested():
        engine.choose(portions.tables[2], [], params)


@pytest.mark.parametrize("noise", [("gaussian", 0), ("gaussian", 2**21), ("laplace", 1.5), ("none", 1)])
def test_scores_have_noise_or_are_none(held: Any, noise: tuple[str, float]) -> None:
    engine, runs, portions = held
    mechanism, scale = noise
    params = {**judge(runs[:1]), "mechanism": mechanism, "scale": scale, "trial": 0, "seed": None}
    with pytest.raises(Exception, match="the noise of a score is invalid"), engine.connection.begin_nested():
        engine.score(portions.tables[2], runs[0][0].run, 0, params)


STRANGERS = [
    "SELECT bismarck_dp.split('pg_authid', 'oid', '{oid}', '{}', '{}')",
    "SELECT bismarck_dp.hold(1, '{}')",
    "SELECT bismarck_dp.choose('pg_authid', '{1}', '{}')",
    "SELECT bismarck_dp.score('pg_authid', 1, 1, '{}')",
    "SELECT bismarck_dp.winner(1)",
    "SELECT bismarck_dp.empty('{pg_authid}')",
    "SELECT bismarck_dp.pack('pg_authid', 'oid', '{oid}', '{}', '{\"portion\": true}')",
]


@pytest.mark.parametrize("statement", STRANGERS)
def test_steps_are_closed_to_others(analyst: Database, statement: str) -> None:
    refused(analyst, statement)


@pytest.mark.parametrize("verb", ["train", "tune"])
def test_nobody_reads_the_extensions_tables_through_it(
    db: Database,
    analyst: Database,
    table: Any,
    sql: Any,
    verb: str,
) -> None:
    """A portion is read with the extension's rights: no request can say that a source is one."""
    sql("CREATE UNLOGGED TABLE bismarck_dp.run_0_0_0 (block int4 NOT NULL, rows bismarck_dp.block NOT NULL)")
    sql("CREATE TABLE bismarck_dp.own AS SELECT 1.0::float8 AS y, '{1,2}'::float8[] AS x FROM generate_series(1, 50)")
    grid = ", grid => '{\"epochs\": [1]}'" if verb == "tune" else ""
    try:
        for name in ("run_0_0_0", "own", "model"):
            refused(
                analyst,
                f"SELECT dp_{verb}('bismarck_dp.{name}', 'm', 'y', '{{x}}', 1.0{grid})",
                "permission denied|does not exist",
            )
        for options in ('{"portion": true}', '{"is_portion": 1}'):
            refused(
                analyst,
                f"SELECT dp_{verb}('bismarck_dp.own', 'm', 'y', '{{x}}', 1.0, options => '{options}'{grid})",
                "unknown option",
            )
    finally:
        sql("DROP TABLE bismarck_dp.run_0_0_0, bismarck_dp.own")


def test_only_the_extensions_tables_are_portions(db: Database, table: Any) -> None:
    rows = table(*two_classes(60, 3))
    with opened(db, rows.name) as (engine, request):
        plan = make_candidates({"epochs": [1]}, epsilon=1.0)[0].plan(60, 3)
        with pytest.raises(Exception, match="a portion is a table of schema bismarck_dp"):
            engine.pack(Request(request.source, "m", "y", ["x"], request.spec, portion=True), plan)


def test_a_view_sees_no_portion_while_it_is_read(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    """The caller's own function, called in the middle of the split, has no rights on the tables being written."""
    rows = table(*two_classes(60, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    run(
        analyst,
        "CREATE FUNCTION peek() RETURNS float8 LANGUAGE plpgsql AS $$ DECLARE t text; BEGIN"
        " SELECT oid::regclass INTO t FROM pg_class WHERE relname LIKE 'run\\_%' LIMIT 1;"
        " IF t IS NOT NULL THEN EXECUTE 'SELECT count(*) FROM ' || t; END IF; RETURN 0; END $$",
    )
    run(analyst, f"CREATE VIEW nosy AS SELECT y + peek() AS y, x FROM {rows.name}")
    refused(analyst, tune_sql("nosy"), "permission denied for table run_")


# ---- nothing stays behind ----

SLOW = {"epochs": [100_000, 200_000], "batch_size": [1000]}


@pytest.mark.parametrize("method", ["portions", "random_stopping"])
def test_cancelling_leaves_nothing(db: Database, table: Any, method: str) -> None:
    rows = table(*two_classes(20_000, 20))
    for moment in (0.05, 0.4):
        running = Running(db, tune_sql(rows.name, grid=SLOW, method=f"'{method}'"))
        time.sleep(moment)
        running.connection.cancel()
        running.wait()
        assert isinstance(running.error, psycopg2.errors.QueryCanceled)


def test_a_caught_error_leaves_nothing(db: Database, table: Any, sql: Any) -> None:
    """Inside the exception block all was done, up to a name that is taken, or a winner that diverged."""
    rows = table(*two_classes(300, 3))
    wild = [{"algorithm": "dpsgd", "loss": "squared", "lambda": 1.0, "step": 1e100}]
    for statement in (tune_sql(rows.name), tune_sql(rows.name, epsilon="1.0, 1e-6", grid=wild)):
        perform = statement.replace("SELECT * FROM", "PERFORM")
        sql(
            f"DO $$ BEGIN BEGIN {perform}; RAISE 'no'; EXCEPTION WHEN OTHERS THEN NULL; END; END $$".replace(":", "\\:")
        )
        assert sql("SELECT count(*) AS n FROM bismarck_dp.model")[0]["n"] == 0
        assert sql("SELECT count(*) AS n FROM pg_class WHERE relname LIKE 'run\\_%'")[0]["n"] == 0


def test_a_taken_name_is_refused_before_anything_is_read(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    sql(tune_sql(rows.name))
    with pytest.raises(BismarckError, match="is taken"):
        db.tune(rows.name, grid=GRID, epsilon=1.0, model="tuned")


def test_disk_space_does_not_grow_with_trials(db: Database, table: Any) -> None:
    """Another session sees how large the database is: that must not tell how many trials were made."""
    rows = table(*two_classes(5000, 20))
    sizes = []
    with opened(db, rows.name) as (engine, request):
        portions = engine.split(request, 20, [4000, 1000], True)
        candidate = make_candidates({"epochs": [1]}, epsilon=1.0)[0]
        plan, shelf = candidate.plan(4000, 20), {}
        for _ in range(4):
            packed = engine.pack(engine.portion(request, portions, 0, candidate.spec), plan, shelf)
            sizes.append(engine.connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
            engine.shelve(packed, plan, shelf)
        tables = engine.connection.exec_driver_sql("SELECT count(*) FROM pg_class WHERE relname LIKE 'run\\_%%'")
        assert tables.scalar_one() == 3
    assert len(set(sizes[1:])) == 1


def test_rows_by_columns(db: Database, table: Any, sql: Any) -> None:
    """Several feature columns of other types; a seed gives what the array column gives."""
    x, y = two_classes(300, 2)
    rows = table(np.round(x, 3), y)
    sql(f"CREATE TABLE by_columns AS SELECT y::int AS y, x[1]::numeric AS a, x[2]::float8 AS b FROM {rows.name}")
    try:
        with pytest.warns(UserWarning, match="seed"):
            one = db.tune("by_columns", grid=GRID, epsilon=1.0, features=["a", "b"], seed=3)
        with pytest.warns(UserWarning, match="seed"):
            two = db.tune(rows.name, grid=GRID, epsilon=1.0, seed=3)
        np.testing.assert_allclose(one.weights, two.weights, atol=1e-4)
        assert one.options == two.options
    finally:
        sql("DROP TABLE by_columns")


@pytest.mark.parametrize("method", ["portions", "random_stopping"])
def test_tables_with_categories(db: Database, sql: Any, method: str) -> None:
    sql(
        "CREATE TABLE flats AS SELECT (price < 1000)::int AS y, price, kind"
        " FROM (SELECT 500 + 1000 * random() AS price,"
        " (ARRAY['new', 'old', NULL])[1 + floor(random() * 3)::int] AS kind FROM generate_series(1, 3000)) AS r"
    )
    try:
        asked = {"features": ["price", "kind"], "categories": {"kind": ["new", "old"]}, "fit_intercept": True}
        measured = {"scale": "quantile"} if method == "portions" else {"scale": {"price": 1024}}
        grid = [{"scale": {"price": 2000}, "lambda": 0.01}, {**measured, "lambda": 0.01}]
        model = db.tune("flats", grid=grid, method=method, epsilon=8.0, delta=1e-5, **asked)
        assert (model.d, model.categories) == (3, {"kind": ["new", "old"]})
        assert model.scale is not None
        assert model.scale[0] in (2000, 512, 1024, 2048, 4096)
        assert model.scale.tolist()[1:] == [1, 1]
    finally:
        sql("DROP TABLE flats")


def test_transactions_are_not_numbered_by_trials(db: Database, table: Any, sql: Any) -> None:
    """Anyone who can connect sees how many transactions have written, and a view's function the numbers of runs: that
    must not tell how many trials there were, of which there are hardly ever as many in twelve tunings.
    """
    rows = table(*two_classes(200, 3))
    grid = [{"epochs": 1}, {"epochs": 2, "lambda": 0.1}]
    count = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS x, last_value AS k FROM bismarck_dp.run"
    written, runs = [], []
    for i in range(12):
        before = sql(count)
        sql(tune_sql(rows.name, model=f"m{i}", grid=grid, method="'random_stopping'"))
        after = sql(count)
        written.append(after[0]["x"] - before[0]["x"])
        runs.append(after[0]["k"] - before[0]["k"])
    assert len(set(written[1:])) == 1, written
    assert len(set(runs[1:])) == 1, runs


@pytest.mark.parametrize("settings", [{"scale": "quantile"}, {"shuffle": "each_pass"}], ids=str)
def test_trials_that_would_write_are_refused(db: Database, table: Any, settings: dict[str, Any]) -> None:
    rows = table(*two_classes(200, 3))
    with pytest.raises(BismarckError, match=r"candidate 2 .*random_stopping packs rows once"):
        db.tune(rows.name, grid=[{}, settings], method="random_stopping", epsilon=1.0)


def test_packed_tables_of_many_classes_are_used_again(db: Database, table: Any) -> None:
    """Rows that fit a page, and a model that does not."""
    rng = np.random.default_rng(0)
    rows = table(rng.normal(size=(900, 60)), np.arange(900) % 40)
    with opened(db, rows.name, classes=40) as (engine, request):
        portions = engine.split(request, 60, [800, 100], True)
        candidate = make_candidates({"epochs": [1]}, epsilon=1.0, options={"classes": 40})[0]
        plan, shelf = candidate.plan(800, 60), {}
        for _ in range(3):
            packed = engine.pack(engine.portion(request, portions, 0, candidate.spec), plan, shelf)
            engine.shelve(packed, plan, shelf)
        tables = engine.connection.exec_driver_sql("SELECT count(*) FROM pg_class WHERE relname LIKE 'run\\_%%'")
        assert tables.scalar_one() == 3


def test_the_steps_are_not_shown_to_the_caller(analyst: Database, db: Database, table: Any, sql: Any) -> None:
    """Plans and debug messages would tell how many trials there were, and of which candidates."""
    rows = table(*two_classes(200, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    with analyst.engine.connect() as connection:
        for setting in ("client_min_messages = debug5", "debug_print_plan = on", "debug_print_parse = on"):
            connection.exec_driver_sql(f"SET {setting}")
        raw: Any = connection.connection.dbapi_connection
        del raw.notices[:]
        connection.exec_driver_sql(tune_sql(rows.name, grid=[{"epochs": 1}, {"epochs": 2}], method="'random_stopping'"))
        inside = [notice for notice in raw.notices if "bismarck_dp.score" in notice or "run_" in notice]
        assert inside == []
        function = str(sql("SELECT 'bismarck_dp.score'::regproc::oid AS f")[0]["f"])
        assert not [notice for notice in raw.notices if f":funcid {function} " in notice]
        connection.rollback()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT bismarck_dp.empty(ARRAY['bismarck_dp.models'::regclass])",
        "SELECT bismarck_dp.empty(ARRAY['{rows}'::regclass])",
        "SELECT bismarck_dp.split('{rows}', 'y', '{{x}}', ARRAY['{rows}'::regclass],"
        ' \'{{"d": 3, "shares": [1], "fixed": true}}\')',
        "SELECT bismarck_dp.pack('{rows}', 'y', '{{x}}', ARRAY['{rows}'::regclass], '{params}')",
    ],
)
def test_only_tables_for_blocks_are_written_or_emptied(db: Database, table: Any, sql: Any, statement: str) -> None:
    """Also for a superuser, who could call these steps: a table of somebody's is no place for blocks."""
    rows = table(*two_classes(20, 3))
    params = json.dumps(make_candidates([{}], epsilon=1.0)[0].plan(20, 3).pack_params())
    with db.engine.connect() as connection, pytest.raises(sqlalchemy.exc.DBAPIError, match="no table for blocks"):
        connection.exec_driver_sql(statement.format(rows=rows.name, params=params).replace("%", "%%"))
    assert sql(f"SELECT count(*) AS n FROM {rows.name}")[0]["n"] == 20


def test_numpys_numbers_in_grids_and_options(db: Database, table: Any) -> None:
    rows = table(*two_classes(200, 3))
    grid = {"lambda": np.logspace(-3, -1, 2), "epochs": range(1, 3)}
    model = db.tune(rows.name, grid=grid, epsilon=np.float64(1.0), batch_size=np.int64(10))
    assert model.tuning is not None
    assert model.tuning["candidates"] == 4
    assert db.evaluate(model, rows.name)["n"] == 200
    assert db.predict(model, rows.x).shape == (200,)
