"""Training in a real server: against NumPy to 1e-9, between engines to the bit, against scikit-learn, on any source."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import psycopg2
import pytest
from conftest import two_classes
from sklearn.linear_model import LogisticRegression, Ridge

import bismarck_dp
from bismarck_dp import Spec, make_plan, reference
from bismarck_dp.controller.database import Database
from bismarck_dp.losses import LOSSES

SEED = 11


def expected(x: Any, y: Any, loss: str, **options: Any) -> Any:
    """What NumPy makes of the rows, in the order that the seed gives."""
    plan = make_plan(Spec.create("sgd", loss, None, 0, options), len(y), np.asarray(x).shape[1])
    features, labels = reference.pack(x, y, plan)
    streams = range(1, 1 + plan.schedule.passes) if plan.schedule.shuffle == "each_pass" else [1] * plan.schedule.passes
    rows, orders = np.arange(len(y)), []
    for j, stream in enumerate(streams):
        if j == 0 or plan.schedule.shuffle == "each_pass":
            rows = rows[reference.order(SEED, len(y), stream)]
        orders.append(rows)
    return reference.train(features, labels, plan, orders)


def in_server(db: Database, table: str, loss: str = "logistic", **options: Any) -> Any:
    """The weights and intercept that SELECT dp_train(...) gives."""
    with db.engine.begin() as connection:
        row = (
            connection.exec_driver_sql(
                "SELECT * FROM dp_train(%(t)s::regclass, %(m)s, 'y', '{x}', NULL, algorithm => 'sgd', loss => %(l)s,"
                " options => %(o)s::jsonb)",
                {
                    "t": table,
                    "m": f"m_{np.random.default_rng().integers(1 << 60)}",
                    "l": loss,
                    "o": json.dumps(options),
                },
            )
            .mappings()
            .one()
        )
    return np.array(row["weights"] + row["intercept"])


STEPS: list[dict[str, Any]] = [{"step": 0.2}, {"step": "decreasing"}, {"step": "sqrt"}, {"lambda": 0.05}]


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_weights_equal_numpys(db: Database, table: Any, loss: str) -> None:
    """Every loss x step x batch size x averaging x projection, through the packed table, to 1e-9."""
    rng = np.random.default_rng(3)
    n, d = 157, 6
    x = rng.normal(size=(n, d)).astype(np.float32)
    y = np.where(rng.random(n) < 0.5, -1.0, 1.0) if LOSSES[loss].classification else rng.normal(size=n)
    rows = table(x, y)
    for step, b, average, radius in product(STEPS, [1, 10, 157], ["none", "all", "suffix"], [None, 0.5]):
        options = {**step, "batch_size": b, "average": average, "radius": radius, "epochs": 2, "seed": SEED}
        got = in_server(db, rows.name, loss, **options)
        np.testing.assert_allclose(got, expected(x, y, loss, **options), rtol=0, atol=1e-9, err_msg=str(options))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 3, "lambda": 0.05, "batch_size": 7},
        {"workers": 3, "step": 0.2, "average": "all"},
        {"shuffle": "each_pass", "lambda": 0.05, "batch_size": 7},
        {"shuffle": "each_pass", "workers": 2, "average": "suffix"},
        {"fit_intercept": True, "feature_bound": 0.7, "lambda": 0.05},
    ],
    ids=str,
)
def test_partitions_orders_and_intercept_equal_numpys(db: Database, table: Any, options: dict[str, Any]) -> None:
    x, y = two_classes(250, 5)
    rows = table(x, y)
    options = {**options, "epochs": 3, "seed": SEED}
    np.testing.assert_allclose(in_server(db, rows.name, **options), expected(x, y, "logistic", **options), atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"lambda": 0.01}, {"workers": 2, "average": "all"}, {"shuffle": "each_pass"}], ids=str
)
def test_server_and_client_give_the_same_bits(db: Database, table: Any, options: dict[str, Any]) -> None:
    x, y = two_classes(3000, 9)
    rows = table(x, y)
    outside = db.train(rows.name, algorithm="sgd", seed=SEED, **options)
    assert np.array_equal(in_server(db, rows.name, seed=SEED, **options), outside.weights)


def test_a_wide_table_is_stored_out_of_line_and_equals_numpys(db: Database, table: Any) -> None:
    x, y = two_classes(60, 5000)
    rows = table(x, y)
    options: dict[str, Any] = {"batch_size": 7, "epochs": 2, "seed": SEED, "shuffle": "each_pass"}
    np.testing.assert_allclose(in_server(db, rows.name, **options), expected(x, y, "logistic", **options), atol=1e-9)


def test_one_feature(db: Database, table: Any) -> None:
    x, y = two_classes(100, 1)
    rows = table(x, y)
    np.testing.assert_allclose(in_server(db, rows.name, seed=SEED), expected(x, y, "logistic", seed=SEED), atol=1e-9)


def test_one_row(db: Database, table: Any) -> None:
    rows = table([[0.5, 0.5]], [1.0])
    assert db.train(rows.name, epsilon=1.0, loss="huber").n == 1


def test_bad_rows_keep_their_slot_and_count_for_nothing(db: Database, table: Any, sql: Any) -> None:
    x, y = two_classes(200, 4)
    x, y = x.astype(np.float64), y.copy()
    x[3, 1], x[50, 0], x[51, 3], y[120] = np.nan, np.inf, -np.inf, 7.0
    rows = table(x, y, "float8")
    sql(f"UPDATE {rows.name} SET y = NULL WHERE id = (SELECT min(id) + 7 FROM {rows.name})")
    sql(f"UPDATE {rows.name} SET x = NULL WHERE id = (SELECT min(id) + 8 FROM {rows.name})")
    sql(f"UPDATE {rows.name} SET x[2] = NULL WHERE id = (SELECT min(id) + 9 FROM {rows.name})")
    # UPDATE moves a row to the end of the heap: keep the order that the expectation assumes.
    sql(f"CREATE TABLE {rows.name}_sorted AS SELECT y, x FROM {rows.name} ORDER BY id")
    y[7] = np.nan
    x[[8, 9]] = np.nan
    options: dict[str, Any] = {"batch_size": 10, "lambda": 0.05, "seed": SEED}
    got = in_server(db, f"{rows.name}_sorted", **options)
    sql(f"DROP TABLE {rows.name}_sorted")
    np.testing.assert_allclose(got, expected(x, y, "logistic", **options), atol=1e-9)


@pytest.mark.parametrize(
    "types", [["int2", "int4"], ["int8", "numeric"], ["float4", "float8"], ["boolean", "numeric(8,3)"]]
)
def test_many_columns_of_any_numeric_type(db: Database, sql: Any, types: list[str]) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2, size=(120, 2)).astype(float)
    y = np.where(rng.random(120) < 0.5, 0, 1)
    sql(f'CREATE TABLE wide (y int, a {types[0]}, "B c" {types[1]})')
    cast = "::int::boolean" if types[0] == "boolean" else ""
    values = ", ".join(f"({b}, {int(p)}{cast}, {int(q)})" for (p, q), b in zip(x, y))
    sql(f"INSERT INTO wide VALUES {values}")
    got = db.train("wide", features=["a", "B c"], algorithm="sgd", seed=SEED, epochs=3)
    sql("DROP TABLE wide")
    assert got.classes.tolist() == [0, 1]
    want = expected(x, y, "logistic", seed=SEED, epochs=3)
    np.testing.assert_allclose(got.weights, want, atol=1e-9)


@pytest.mark.parametrize("element", ["int2", "int4", "int8", "numeric", "float8"])
def test_array_columns_of_any_numeric_type(db: Database, sql: Any, element: str) -> None:
    x = np.random.default_rng(1).integers(-3, 4, size=(90, 3)).astype(float)
    y = np.where(x[:, 0] > 0, 1, -1)
    sql(f"CREATE TABLE arrays (y boolean, x {element}[])")
    values = ", ".join(f"({b > 0}, ARRAY{r.tolist()}::{element}[])" for r, b in zip(x, y))
    sql(f"INSERT INTO arrays VALUES {values}")
    got = db.train("arrays", algorithm="sgd", seed=SEED, epochs=2)
    sql("DROP TABLE arrays")
    np.testing.assert_allclose(got.weights, expected(x, y, "logistic", seed=SEED, epochs=2), atol=1e-9)
    assert got.classes.tolist() == [0, 1], "a boolean label reads as 0/1"


def test_views_and_partitioned_tables(db: Database, table: Any, sql: Any) -> None:
    x, y = two_classes(300, 3)
    rows = table(x, y)
    want = db.train(rows.name, algorithm="sgd", seed=SEED).weights
    sql(f"CREATE VIEW seen AS SELECT x AS points, y > 0 AS good FROM {rows.name} ORDER BY id")
    sql(f"CREATE TABLE parted (LIKE {rows.name}) PARTITION BY RANGE (id)")
    sql("CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (MINVALUE) TO (150)")
    sql("CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (150) TO (MAXVALUE)")
    sql(f"INSERT INTO parted SELECT * FROM {rows.name} ORDER BY id")
    view = db.train("seen", label="good", features="points", algorithm="sgd", seed=SEED)
    parted = db.train("parted", algorithm="sgd", seed=SEED)
    sql("DROP VIEW seen; DROP TABLE parted")
    assert np.array_equal(view.weights, want)
    assert np.array_equal(parted.weights, want)


def test_a_long_run_reaches_scikit_learns_optimum(db: Database, table: Any) -> None:
    x, y = two_classes(400, 5)
    strength = 0.05
    rows = table(x, y)
    clipped = reference.clip_rows(x, 1.0).astype(float)
    best = LogisticRegression(C=1 / (strength * len(y)), fit_intercept=False, tol=1e-12, max_iter=10_000)
    best.fit(clipped, y)
    # Full batches: plain gradient descent at 1/beta, which converges linearly.
    model = db.train(
        rows.name, algorithm="sgd", batch_size=len(y), step=1 / (0.25 + strength), epochs=400, **{"lambda": strength}
    )
    np.testing.assert_allclose(model.weights, best.coef_[0], atol=1e-4)

    target = clipped @ np.arange(1.0, 6.0) + 0.1 * np.random.default_rng(0).normal(size=len(y))
    rows = table(x, target)
    ridge = Ridge(alpha=strength * len(y), fit_intercept=False).fit(clipped, target)
    model = db.train(
        rows.name, algorithm="sgd", loss="squared", batch_size=len(y), step=0.9, epochs=600, **{"lambda": strength}
    )
    np.testing.assert_allclose(model.weights, ridge.coef_, atol=1e-4)
    small = db.train(rows.name, algorithm="sgd", loss="squared", batch_size=20, epochs=300, **{"lambda": strength})
    np.testing.assert_allclose(small.weights, ridge.coef_, atol=2e-2)


def test_tolerance_stops_early_and_only_without_privacy(db: Database, table: Any) -> None:
    x, y = two_classes(500, 4)
    rows = table(x, y)
    long = db.train(rows.name, algorithm="sgd", epochs=200, **{"lambda": 0.1})
    short = db.train(rows.name, algorithm="sgd", epochs=200, tolerance=1e-3, **{"lambda": 0.1})
    assert long.passes == 200
    assert 1 < short.passes < 50
    with pytest.raises(bismarck_dp.BismarckError, match='unknown option "tolerance"'):
        db.train(rows.name, epsilon=1, tolerance=1e-3)


def test_the_worst_tables_stay_below_the_bound_and_above_0_6_of_it(db: Database, table: Any) -> None:
    """Full size, trained in PostgreSQL with the noise off: along e_1 only the differing row has a gradient."""
    n, d = 60_000, 50
    x = np.zeros((n, d), dtype=np.float32)
    x[:, 1] = 1
    x[12_345] = 0
    x[12_345, 0] = 1
    other = x.copy()
    other[12_345, 0] = -1
    options: dict[str, Any] = {"loss": "huber", "epochs": 10, "batch_size": 50, "lambda": 1e-3, "radius": 1000}
    bound = bismarck_dp.explain(n=n, d=d, epsilon=1, delta=0, **options)["sensitivity"]
    models = [
        db.train(table(rows, np.ones(n)).name, algorithm="sgd", seed=SEED, classes=[-1, 1], **options)
        for rows in (x, other)
    ]
    measured = float(np.linalg.norm(models[0].weights - models[1].weights))
    assert 0.6 * bound <= measured <= bound


def test_the_noise_in_the_server_has_its_claimed_size(db: Database, table: Any) -> None:
    """Many releases of one tiny table: mean squared noise per weight against sigma^2, and the norm against Gamma."""
    x, y = two_classes(50, 40)
    rows = table(x, y)
    exact = db.train(rows.name, algorithm="sgd", step=0.1, epochs=1, batch_size=50).weights
    for delta, size in ((1e-6, lambda m: m.noise_scale**2), (0.0, lambda m: m.noise_scale**2 * 41)):
        models = [
            db.train(rows.name, epsilon=2.0, delta=delta, step=0.1, epochs=1, batch_size=50, adjacency="replace")
            for _ in range(40)
        ]
        noise = np.array([m.weights - exact for m in models])
        assert len(np.unique(noise)) > 1500, "every release draws its own noise"
        ratio = np.mean(noise**2) / size(models[0])
        assert 0.75 < ratio < 1.33
        assert models[0].private
        grid = models[0].plan["grid"]
        assert all(np.all(m.weights / grid == np.round(m.weights / grid)) for m in models)


def test_a_seed_voids_privacy_and_the_model_says_so(db: Database, table: Any) -> None:
    x, y = two_classes(100, 3)
    rows = table(x, y)
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        models = [db.train(rows.name, epsilon=1.0, seed=5) for _ in range(2)]
    assert np.array_equal(models[0].weights, models[1].weights)
    assert not models[0].private
    assert "NOT PRIVATE" in models[0].note


@pytest.mark.parametrize(
    ("epsilon", "delta", "message"), [(20, 0, "epsilon 20 is large"), (1, 0.5, "delta 0.5 is at least 1/n")]
)
def test_weak_privacy_is_said_aloud(db: Database, table: Any, epsilon: float, delta: float, message: str) -> None:
    x, y = two_classes(100, 3)
    rows = table(x, y)
    with pytest.warns(UserWarning, match=message):
        model = db.train(rows.name, epsilon=epsilon, delta=delta)
    assert message in model.note


def test_explain_is_the_same_everywhere(db: Database, table: Any, sql: Any) -> None:
    x, y = two_classes(500, 3)
    rows = table(x, y)
    plain = bismarck_dp.explain(n=500, d=3, epsilon=0.5, delta=1e-6, epochs=4, lambda_=0.01)
    assert db.explain(rows.name, epsilon=0.5, delta=1e-6, epochs=4, lambda_=0.01) == plain
    told = sql(
        "SELECT * FROM dp_explain(CAST(:t AS regclass), 'm', 'y', '{x}', 0.5, 1e-6,"
        ' options => \'{"epochs": 4, "lambda": 0.01}\')',
        t=rows.name,
    )
    shown = {row["key"]: row["value"] for row in told}
    assert json.loads(shown.pop("event")) == plain["event"]
    assert shown == {
        key: None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in plain.items()
        if key != "event"
    }
    model = db.train(rows.name, epsilon=0.5, delta=1e-6, epochs=4, lambda_=0.01)
    assert model.plan == plain
    keys = "algorithm loss mechanism adjacency sensitivity noise_scale epsilon delta lipschitz smoothness"
    keys += " strong_convexity passes updates accountant note"
    assert set(keys.split()) <= set(plain)


def test_prediction_is_the_same_everywhere(db: Database, table: Any, sql: Any) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(400, 3)) * 2
    y = (x @ [1, -2, 0.5] + 0.3 > 0).astype(int)
    rows = table(x, y, "float8")
    for intercept in (False, True):
        model = db.train(rows.name, algorithm="sgd", fit_intercept=intercept, **{"lambda": 1e-3})
        told = sql(
            f"SELECT dp_predict(:m, x) AS p, dp_predict_proba(:m, x) AS q FROM {rows.name} ORDER BY id", m=model.name
        )
        assert np.array_equal([row["p"] for row in told], model.predict(x))
        np.testing.assert_allclose([row["q"] for row in told], model.predict_proba(x), atol=1e-12)
        assert model.score(x, y) > 0.9
        assert set(model.predict(x)) == {0, 1}
    assert sql("SELECT dp_predict(:m, ARRAY[1, 'NaN'::float8, 1]) AS p", m=model.name)[0]["p"] is None


def test_regression(db: Database, table: Any, sql: Any) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4000, 3)) / 2
    y = x @ [0.5, -0.3, 0.2]
    rows = table(x, y)
    model = db.train(rows.name, epsilon=5, loss="squared", label_bound=1, **{"lambda": 0.05})
    assert model.classes.tolist() == []
    assert model.score(reference.clip_rows(x, 1.0), y) > 0.7
    told = sql(f"SELECT dp_predict(:m, x) AS p FROM {rows.name} ORDER BY id LIMIT 9", m=model.name)
    np.testing.assert_allclose([row["p"] for row in told], model.predict(rows.x[:9].astype(np.float32)), atol=1e-12)


def test_rows_that_come_between_count_and_pack_are_planned_for(db: Database, table: Any, monkeypatch: Any) -> None:
    """n is taken from what was packed: the plan of the released model never speaks of other rows."""
    from bismarck_dp.controller import train as loop
    from bismarck_dp.controller.engines import SqlEngine

    x, y = two_classes(200, 3)
    rows = table(x, y)
    described = SqlEngine.describe

    def describe_then_insert(engine: Any, request: Any, labels: bool = True) -> Any:
        shape = described(engine, request, labels)
        engine.connection.exec_driver_sql(f"INSERT INTO {rows.name} SELECT id + 1000, y, x FROM {rows.name} LIMIT 50")
        return shape

    monkeypatch.setattr(SqlEngine, "describe", describe_then_insert)
    model = db.train(rows.name, epsilon=1.0, **{"lambda": 0.1})
    assert loop.train is not None
    assert model.n == 250
    assert model.sensitivity == bismarck_dp.explain(n=250, d=3, epsilon=1.0, **{"lambda": 0.1})["sensitivity"]


def test_labels_may_be_named(db: Database, table: Any) -> None:
    x, y = two_classes(300, 3)
    rows = table(x, np.where(y > 0, 2.0, 1.0))
    model = db.train(rows.name, algorithm="sgd", classes=[1, 2], seed=SEED)
    assert set(model.predict(x)) == {1, 2}
    np.testing.assert_allclose(model.weights, expected(x, y, "logistic", seed=SEED), atol=1e-9)


def test_connect_takes_a_plain_url_and_refuses_a_bad_one(db: Database) -> None:
    assert db.cluster is not None
    with bismarck_dp.connect(db.cluster.url().replace("postgresql+psycopg2", "postgresql")) as other:
        assert other.models() == []
    for url in ("nonsense", "postgresql+nodriver://me:secret@host/db"):
        with pytest.raises(bismarck_dp.BismarckError, match="not one of a database") as caught:
            bismarck_dp.connect(url)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("workers", [1, 3])
def test_partitions_run_side_by_side(db: Database, table: Any, workers: int) -> None:
    """PostgreSQL's own account of the plan: one aggregate per partition under Parallel Append, or no workers at all."""
    rows = table(*two_classes(5000, 9))
    url = db.engine.url
    connection = psycopg2.connect(host=url.query["host"], port=url.query["port"], user="postgres", dbname="bismarck")
    cursor = connection.cursor()
    cursor.execute("LOAD 'auto_explain'; SET client_min_messages = log; SET auto_explain.log_nested_statements = on")
    cursor.execute("SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on")
    cursor.execute(
        f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 1.0, options => %s)",
        (json.dumps({"workers": workers, "epochs": 1}),),
    )
    plans = [notice for notice in connection.notices if "bismarck_dp.merge" in notice and "fold" not in notice]
    connection.rollback()
    connection.close()
    assert len(plans) == 1
    assert ("Parallel Append" in plans[0]) == (workers > 1)
    assert ("Workers Launched: 0" not in plans[0] and "Workers Launched" in plans[0]) == (workers > 1)
    assert plans[0].count("Seq Scan on run_") == workers


def test_what_a_label_means_does_not_depend_on_other_rows(db: Database, table: Any) -> None:
    """One label from -1 to 0 turns the majority's coding, and so how predictions are written, but no row's meaning."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(1000, 2)) / 2).astype(np.float32)
    y = np.array([1.0] * 900 + [0.0] * 50 + [-1.0] * 50)
    other = y.copy()
    other[-1] = 0.0
    models = [db.train(table(x, labels).name, algorithm="sgd", seed=SEED, **{"lambda": 0.01}) for labels in (y, other)]
    assert [m.classes.tolist() for m in models] == [[-1, 1], [0, 1]]
    assert np.array_equal(models[0].weights, models[1].weights)
