"""Coordinate descent: C against NumPy, the minimum against scikit-learn, columns against rows, and bad input."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import kernels
import numpy as np
import pytest
from conftest import two_classes
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression
from sqlalchemy.exc import DBAPIError
from test_noisy import begun, peak_memory

from bismarck_dp import BismarckError, Plan, Spec, explain, make_plan, reference
from bismarck_dp.controller.database import Database
from bismarck_dp.descent import RULES
from bismarck_dp.losses import LOSSES
from bismarck_dp.solvers import SOLVERS

SEED = 11
SMOOTH = [name for name, loss in LOSSES.items() if loss.curvature(1.0) is not None]
PRIVATE = [("dpcd", 1e-6), ("dpgcd", 1e-6), ("dpgcd", 0.0)]
FREE = [("cd", 0.0), ("gcd", 0.0)]


def planned(algorithm: str, loss: str, n: int, d: int, delta: float = 1e-6, epsilon: float = 2.0, **o: Any) -> Plan:
    private = algorithm.startswith("dp")
    return make_plan(Spec.create(algorithm, loss, epsilon if private else None, delta if private else 0.0, o), n, d)


def table_of(plan: Plan, seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(plan.n, plan.d)) * rng.choice([0.1, 0.4, 1.0], size=plan.d)
    y = np.where(rng.random(plan.n) < 0.5, -1.0, 1.0)
    return x, y if LOSSES[plan.spec.loss].classification else rng.normal(size=plan.n)


def expected_of(rows: Any, plan: Plan) -> Any:
    """What NumPy makes of packed rows under the seed."""
    order = reference.coordinates(SEED, plan) if plan.kernel == "cd" else None
    noise = reference.seeded_noise(plan, SEED) if plan.perturbs == "coordinates" else None
    return reference.train(rows[:, 1:], rows[:, 0], plan, order, noise)


# ---- C against NumPy ----

OPTIONS: list[dict[str, Any]] = [
    {},
    {"l1": 0.02, "lambda": 0.1},
    {"box": 0.05, "l1": 0.01, "fit_intercept": True},
    {"constants": 0.2, "step": 0.5, "feature_bound": 3.0},
    {"constants": [0.1, 0.2, 0.3, 0.4, 0.5, 4.0], "clip": 0.3},
    {"private_constants": 0.3, "adjacency": "zero-out"},
    {"rule": "gs-s", "l1": 0.02, "lambda": 0.05, "box": 0.1},
    {"rule": "gs-q", "l1": 0.02, "lambda": 0.05, "box": 0.1},
    {"top": 3, "workers": 3},
    {"average": "all", "iterations": 4, "step": "sqrt"},
    {"average": "suffix", "inner_iterations": 7, "iterations": 4, "step": "decreasing"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize(("algorithm", "delta"), [*FREE, *PRIVATE])
def test_c_agrees_with_numpy(algorithm: str, delta: float, loss: str, options: dict[str, Any]) -> None:
    """Every rule, penalty, average, step and source of constants, with noise and choices from a seed, to 1e-9."""
    taken = {name: value for name, value in options.items() if name in SOLVERS[algorithm].options}
    plan = planned(algorithm, loss, 57, 6, delta, **{"iterations": 6, **taken})
    rows = kernels.packed(table_of(plan), plan)
    found = kernels.train(rows, plan.kernel_params(), plan.schedule.passes, kernel=plan.kernel, seed=SEED)
    np.testing.assert_allclose(found, expected_of(rows, plan), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "label", "param"), [("logistic", 1, 0), ("huber", 1, 0.1), ("squared", 0, math.inf)])
def test_many_slopes_at_once_are_those_of_one(name: str, label: float, param: float) -> None:
    loss = kernels.library.dp_loss_named(name.encode()).contents
    z = np.concatenate([np.random.default_rng(0).normal(size=1000) * 20, [0, 1e-300, 699, 701, -701, 1e9, -1e9]])
    found = np.empty_like(z)
    loss.slopes(kernels.pointer(z), kernels.pointer(found), len(z), label, param)
    np.testing.assert_allclose(found, [loss.slope(at, label, param) for at in z], rtol=1e-12, atol=1e-300)


def test_rules_equal_their_definitions() -> None:
    """Scores by a search over moves and subgradients, on a grid fine enough to tell."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        u, t, ridge = rng.normal() * 3, abs(rng.normal()), abs(rng.normal())
        box = float(rng.choice([0.5, math.inf]))
        w = float(np.clip(rng.choice([0.0, 0.3, -0.4, 0.5]), -box, box))
        moves = np.linspace(-8, 8, 160_001)
        at = w + moves
        model = u * moves + moves**2 / 2 + t * (np.abs(at) - abs(w)) + ridge * (at**2 - w**2) / 2
        model[np.abs(at) > box + 1e-9] = math.inf
        args = [np.array([value]) for value in (u, w, t, ridge, box)]
        assert RULES["gs-q"](*args)[0] == pytest.approx(math.sqrt(2 * max(-model.min(), 0)), abs=2e-4)
        assert RULES["gs-r"](*args)[0] == pytest.approx(abs(moves[model.argmin()]), abs=2e-4)
        slopes = ridge * w + (t * np.linspace(-1, 1, 20_001) if w == 0 else np.array([t * np.sign(w)]))
        walls = np.linspace(0, 50, 50_001) if abs(w) == box else np.zeros(1)
        shortest = min(float(np.abs(u + slopes[:, None] + np.sign(w) * walls).min()), 1e9)
        assert RULES["gs-s"](*args)[0] == pytest.approx(shortest, abs=2e-3)


def test_sums_are_exact_whatever_the_order() -> None:
    """So no row's share depends on others, nor a parallel plan on who adds up what."""
    plan = planned("dpgcd", "logistic", 5000, 7, workers=3)
    rows = kernels.packed(table_of(plan), plan)
    mixed = rows[np.random.default_rng(0).permutation(len(rows))]
    params = {**plan.kernel_params(), "noise": "none"}
    others = mixed[(mixed != rows[0]).any(axis=1)]
    first, second = (kernels.coordinate_sums(plan, np.vstack([rows[:1], r]), params, []) for r in (rows[1:], others))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("margin", [math.nan, math.inf, -math.inf, 1e300])
def test_no_margin_makes_a_term_longer_than_one(margin: float) -> None:
    """Whatever noise and steps make of the weights."""
    plan = planned("dpcd", "squared", 8, 1, feature_bound=1e15)
    run = kernels.Run(plan.kernel_params(), 1, "cd", SEED)
    columns = kernels.Columns(np.full((8, 2), 1e15, np.float32), True)
    columns.margins[:] = 0
    columns.margins[3] = margin
    assert run.solver.begin_pass(run.state, 0)
    assert abs(run.column_sum(columns, 0)) <= 1.0


BEYOND = (math.nan, math.inf, -math.inf, 1.7e308, -1e200)


@pytest.mark.parametrize("margin", BEYOND)
@pytest.mark.parametrize("loss", SMOOTH)
def test_a_row_of_zeros_counts_for_nothing_at_any_weights(loss: str, margin: float) -> None:
    """`zero-out` pays for one term, not for two: against a row of zeros no other is more than one unit away."""
    plan = planned("dpcd", loss, 8, 1, adjacency="zero-out")
    run = kernels.Run(plan.kernel_params(), 1, "cd", SEED)
    assert run.solver.begin_pass(run.state, 0)
    columns = kernels.Columns(np.zeros((8, 2), np.float32), loss == "squared")
    columns.margins[:] = margin
    assert run.column_sum(columns, 0) == 0
    plan = planned("dpgcd", loss, 8, 2, adjacency="zero-out")
    run = kernels.Run(plan.kernel_params(), 2, "gcd", SEED)
    vectors = np.frombuffer(run.state, offset=run.solver.size(0), dtype=np.float64)
    vectors[:2] = margin
    assert not kernels._gcd_sums(run, np.zeros((8, 3), np.float32))[0].any()


@pytest.mark.parametrize("algorithm", ["dpcd", "dpgcd"])
def test_steps_of_any_length_leave_numbers_or_are_refused(db: Database, table: Any, algorithm: str) -> None:
    """Weights beyond all bounds are said to have diverged; none is ever infinite inside, where zeros would count."""
    rows = table(np.zeros((20, 3), np.float32), np.ones(20))
    options = {"step": 1e298, "constants": [1e-15, 1.0, 1.0], "clip": 1e15, "iterations": 30, "adjacency": "zero-out"}
    spec = Spec.create(algorithm, "squared", 12.0, 1e-6, {**options, "seed": SEED})
    with begun(db, rows.name, spec, 20, 3) as (engine, packed, plan):
        for _ in range(plan.schedule.passes):
            engine.epoch(packed, plan)
        found = np.array(engine.release(packed, plan))
    packed_rows = kernels.packed((np.zeros((20, 3)), np.ones(20)), plan)
    expected = expected_of(packed_rows, plan)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert np.isinf(found).any()
    with pytest.raises(BismarckError, match="training diverged"):
        db.train(rows.name, model="m", epsilon=12.0, delta=1e-6, algorithm=algorithm, loss="squared", **options)


# ---- the minimum ----


@pytest.fixture(scope="module")
def regression() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3000, 12)) @ (np.eye(12) + 0.3 * rng.normal(size=(12, 12)))).astype(np.float32)
    w = rng.normal(size=12) * (rng.random(12) < 0.5)
    return x, (x @ w + rng.normal(size=3000)).astype(np.float32)


WIDE = {"feature_bound": 1e3}
LONG = [("cd", {"iterations": 150}), ("cd", {"iterations": 60, "inner_iterations": 200, "average": "all"})]
GREEDY = [("gcd", {"iterations": 900, "rule": rule}) for rule in ("gs-s", "gs-r", "gs-q")]


@pytest.mark.parametrize(("algorithm", "options"), [*LONG, *GREEDY, ("gcd", {"iterations": 900, "top": 2})], ids=str)
@pytest.mark.parametrize(("l1", "strength"), [(0.1, 0.0), (0.05, 0.1)])
def test_regression_reaches_scikit_learns_minimum(
    db: Database, table: Any, regression: Any, algorithm: str, options: dict[str, Any], l1: float, strength: float
) -> None:
    x, y = regression
    rows = table(x, y)
    options = {**options, **WIDE, "l1": l1, "lambda": strength}
    model = db.train(rows.name, model="m", epsilon=None, algorithm=algorithm, loss="squared", **options)
    whole, share = l1 + strength, l1 / (l1 + strength)
    peer = Lasso(l1, fit_intercept=False, tol=1e-12) if strength == 0 else None
    peer = peer or ElasticNet(alpha=whole, l1_ratio=share, fit_intercept=False, tol=1e-12, max_iter=10**6)
    best = peer.fit(x.astype(np.float64), y.astype(np.float64)).coef_
    np.testing.assert_allclose(model.weights, best, atol=1e-6)
    np.testing.assert_array_equal(model.support, np.flatnonzero(best))


@pytest.mark.parametrize(
    ("algorithm", "options"), [("cd", {"iterations": 1500}), ("gcd", {"iterations": 6000, "rule": "gs-q"})], ids=str
)
def test_logistic_regression_reaches_scikit_learns_minimum(
    db: Database, table: Any, regression: Any, algorithm: str, options: dict[str, Any]
) -> None:
    x, y = regression
    labels = np.where(y > 0, 1.0, -1.0)
    rows = table(x, labels)
    model = db.train(rows.name, model="m", epsilon=None, algorithm=algorithm, l1=0.01, **WIDE, **options)
    peer = LogisticRegression(
        l1_ratio=1.0, C=1 / (0.01 * len(y)), fit_intercept=False, solver="saga", tol=1e-12, max_iter=100_000
    )
    best = peer.fit(x.astype(np.float64), labels).coef_[0]
    np.testing.assert_allclose(model.weights, best, atol=1e-6)
    np.testing.assert_array_equal(model.support, np.flatnonzero(best))


def test_a_box_and_a_tolerance(db: Database, table: Any, regression: Any) -> None:
    x, y = regression
    rows = table(x, y)
    for algorithm in ("cd", "gcd"):
        spec: dict[str, Any] = {"epsilon": None, "algorithm": algorithm, "loss": "squared", "iterations": 500, **WIDE}
        model = db.train(rows.name, model=algorithm, box=0.1, **spec)
        best = _boxed(x.astype(np.float64), y.astype(np.float64), 0.1)
        np.testing.assert_allclose(model.weights, best, atol=1e-6)
        early = db.train(rows.name, model="early " + algorithm, tolerance=1e-3, **spec)
        assert early.passes < 100


def _boxed(x: Any, y: Any, box: float) -> Any:
    """Least squares in a box, by projected gradients."""
    w, rate = np.zeros(x.shape[1]), len(y) / np.linalg.norm(x, 2) ** 2
    for _ in range(20_000):
        w = np.clip(w - rate * x.T @ (x @ w - y) / len(y), -box, box)
    return w


# ---- in the server ----

IN_SERVER: list[tuple[str, float, str, dict[str, Any]]] = [
    ("cd", 0.0, "logistic", {"l1": 0.01}),
    ("cd", 0.0, "squared", {"fit_intercept": True, "average": "all"}),
    ("gcd", 0.0, "huber", {"workers": 3}),
    ("dpcd", 1e-6, "logistic", {"fit_intercept": True, "lambda": 0.1}),
    ("dpcd", 1e-6, "squared", {"private_constants": 0.2, "iterations": 2}),
    ("dpgcd", 1e-6, "logistic", {"private_constants": 0.2, "top": 2}),
    ("dpgcd", 0.0, "squared", {"workers": 2, "rule": "gs-q", "l1": 0.001}),
]


@pytest.mark.filterwarnings("ignore:.*seed is known")
@pytest.mark.parametrize(("algorithm", "delta", "loss", "options"), IN_SERVER, ids=str)
def test_weights_in_the_server_equal_numpys(
    db: Database, table: Any, algorithm: str, delta: float, loss: str, options: dict[str, Any]
) -> None:
    """Coordinates, choices and noise from the seed, to 1e-9; SQL and the SQLAlchemy engine agree to the bit."""
    x, y = two_classes(200, 5)
    rows = table(x, y)
    options = {**options, "seed": SEED}
    epsilon = 2.0 if algorithm.startswith("dp") else None
    model = db.train(rows.name, model="a", epsilon=epsilon, delta=delta, algorithm=algorithm, loss=loss, **options)
    plan = planned(algorithm, loss, 200, 5, delta, **options)
    packed = kernels.packed((x, y), plan)
    found = np.append(model.weights, model.intercept)
    np.testing.assert_allclose(found, expected_of(packed, plan), rtol=1e-9, atol=1e-9)
    with db.engine.begin() as connection:
        row = connection.exec_driver_sql(
            "SELECT weights || intercept, support FROM dp_train(%(t)s::regclass, 'b', 'y', '{x}', %(e)s, %(d)s, %(a)s,"
            " %(l)s, %(o)s::jsonb)",
            {"t": rows.name, "e": epsilon, "d": delta, "a": algorithm, "l": loss, "o": json.dumps(options)},
        ).one()
    np.testing.assert_array_equal(row[0], found)
    np.testing.assert_array_equal(row[1], np.flatnonzero(model.weights) + 1)


def columns_of(n: int, d: int) -> tuple[Any, Any]:
    """Dense, sparse and empty columns."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(n, d)) * (rng.random((n, d)) < np.linspace(0, 1, d))
    return x.astype(np.float32), rng.normal(size=n)


@pytest.mark.parametrize(("n", "d", "memory"), [(6000, 7, "64MB"), (6000, 7, "1MB"), (300, 3000, "1MB")])
def test_columns_in_many_runs_are_those_of_the_rows(db: Database, table: Any, n: int, d: int, memory: str) -> None:
    """Runs as long as a page, or as memory allows, dense or sparse: the weights are NumPy's, for every length."""
    x, y = columns_of(n, d)
    rows = table(x, y)
    spec = Spec.create("cd", "squared", None, 0.0, {"iterations": 2, "seed": SEED, "inner_iterations": 40})
    with begun(db, rows.name, spec, n, d, memory) as (engine, packed, plan):
        for _ in range(plan.schedule.passes):
            engine.epoch(packed, plan)
        found = engine.release(packed, plan)
    np.testing.assert_allclose(found, expected_of(kernels.packed((x, y), plan), plan), rtol=1e-9, atol=1e-9)


def packed_bytes(db: Database, name: str, spec: Spec, n: int, d: int) -> int:
    with begun(db, name, spec, n, d) as (engine, packed, _):
        size = engine.connection.exec_driver_sql(f"SELECT pg_relation_size('{packed.tables[0]}')").scalar_one()
    return int(size)


def test_sparse_columns_are_small_unless_their_size_would_tell(db: Database, table: Any) -> None:
    """One number in a hundred takes a small part of a full copy's pages; a private copy's size says nothing."""
    n, d = 4000, 50
    rng = np.random.default_rng(0)
    rows = [
        table((rng.normal(size=(n, d)) * (rng.random((n, d)) < density)).astype(np.float32), np.ones(n))
        for density in (0.01, 1.0)
    ]
    sparse, dense = (packed_bytes(db, one.name, Spec.create("cd", "squared"), n, d) for one in rows)
    assert sparse < dense / 15
    private = Spec.create("dpcd", "squared", 1.0, 1e-6, {})
    sparse, dense = (packed_bytes(db, one.name, private, n, d) for one in rows)
    assert sparse == dense


def test_memory_is_twelve_bytes_a_row_and_little_more(db: Database, table: Any) -> None:
    """Margins and the column at hand; neither d nor the number of steps counts."""
    n = 600_000
    rows = table(np.zeros((n, 8), np.float32), np.resize([-1.0, 1.0], n))
    spec = Spec.create("dpcd", "logistic", 1.0, 1e-6, {"iterations": 2})
    with begun(db, rows.name, spec, n, 8) as (engine, packed, plan):
        before = peak_memory(engine)
        engine.epoch(packed, plan)
        engine.epoch(packed, plan)
        assert 1024 * (peak_memory(engine) - before) < 12 * n + 4 * 2**20


def test_rows_that_are_no_rows_count_for_nothing(db: Database, table: Any) -> None:
    """A missing or infinite value, a label that is none: the rest of the model is as if the row were zero."""
    x, y = two_classes(100, 3)
    bad, zero = x.astype(np.float64), x.astype(np.float64)
    bad[5, 1], bad[7, 0], zero[5], zero[7] = math.nan, math.inf, 0.0, 0.0
    for algorithm in ("cd", "gcd"):
        weights = [
            db.train(table(rows, y, "float8").name, model=f"{algorithm}{i}", epsilon=None, algorithm=algorithm,
                     seed=SEED, iterations=7).weights
            for i, rows in enumerate((bad, zero))
        ]  # fmt: skip
        np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("algorithm", ["dpcd", "dpgcd"])
def test_no_more_passes_than_planned(db: Database, table: Any, algorithm: str) -> None:
    """The noise is calibrated for so many steps: the server refuses another."""
    rows = table(*two_classes(100, 3))
    spec = Spec.create(algorithm, "logistic", 1.0, 1e-6, {"iterations": 2, "private_constants": 0.5})
    with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
        for _ in range(plan.schedule.passes):
            engine.epoch(packed, plan)
        said = refusal(lambda: engine.epoch(packed, plan))
        assert "all planned passes were made" in said


def refusal(work: Any) -> str:
    try:
        work()
    except DBAPIError as error:
        return str(error)
    return "nothing was refused"


def test_rows_and_columns_are_not_mistaken_for_each_other(db: Database, table: Any) -> None:
    rows = table(*two_classes(100, 3))
    with begun(db, rows.name, Spec.create("cd", "logistic"), 100, 3) as (engine, packed, _):
        arm = f"SELECT bismarck_dp.epoch($1, 0, block, rows) AS state FROM {packed.tables[0]}"
        text = f"SELECT bismarck_dp.fold({packed.run}, 'SELECT bismarck_dp.merge(state) FROM ({arm}) AS s')"
        assert "does not fold blocks" in refusal(lambda: engine.connection.exec_driver_sql(text))
    with begun(db, rows.name, Spec.create("gcd", "logistic"), 100, 3) as (engine, packed, _):
        call = f"SELECT bismarck_dp.descend({packed.run}, '{packed.tables[0]}', '{{\"n\": 100, \"labels\": 0}}')"
        assert "reads rows, not columns" in refusal(lambda: engine.connection.exec_driver_sql(call))
    with begun(db, rows.name, Spec.create("cd", "logistic"), 100, 3) as (engine, packed, _):
        call = f"SELECT bismarck_dp.descend({packed.run}, '{packed.tables[0]}', '{{\"n\": 5000, \"labels\": 0}}')"
        assert "do not fit the plan" in refusal(lambda: engine.connection.exec_driver_sql(call))


def test_iterates_of_greedy_descent_stay_sparse(db: Database, table: Any) -> None:
    x, y = two_classes(500, 200)
    rows = table(x, y)
    model = db.train(rows.name, model="m", epsilon=5.0, delta=1e-6, algorithm="dpgcd", iterations=4, top=2)
    assert 1 <= len(model.support) <= 8
    np.testing.assert_array_equal(model.support, np.flatnonzero(model.weights))
    dense = db.train(rows.name, model="d", epsilon=5.0, delta=1e-6)
    assert dense.support is None


# ---- bad input ----


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"algorithm": "dpcd", "delta": 0.0}, "private for delta above 0 only"),
        ({"algorithm": "dpcd", "loss": "hinge"}, "needs a loss with a curvature"),
        ({"algorithm": "gcd", "loss": "hinge", "epsilon": None}, "needs a loss with a curvature"),
        ({"algorithm": "dpgcd", "constants": [1.0, 2.0]}, "constants has 2 numbers for 5 weights"),
        ({"algorithm": "dpgcd", "constants": []}, "constants is"),
        ({"algorithm": "dpgcd", "constants": [1, 2, 3, 4, -5]}, "constants is -5"),
        ({"algorithm": "dpgcd", "constants": 1.0, "private_constants": 0.1}, "constants are given"),
        ({"algorithm": "dpgcd", "private_constants": 1.0}, "private_constants is 1"),
        ({"algorithm": "dpgcd", "private_constants": 0.1, "epsilon": 1e-8}, "too small to measure constants"),
        ({"algorithm": "dpgcd", "top": 6}, "top is 6, and there are 5 weights"),
        ({"algorithm": "dpgcd", "rule": "gs-x"}, 'unknown rule "gs-x"'),
        ({"algorithm": "dpcd", "rule": "gs-r"}, 'unknown option "rule" for this algorithm'),
        ({"algorithm": "dpcd", "epochs": 3}, 'unknown option "epochs" for this algorithm'),
        ({"algorithm": "dpcd", "tolerance": 0.1}, 'unknown option "tolerance" for this algorithm'),
        ({"algorithm": "cd", "epsilon": None, "private_constants": 0.1}, 'unknown option "private_constants"'),
        ({"algorithm": "cd", "epsilon": 1.0}, "is not private"),
        ({"algorithm": "bolton", "l1": 0.1}, 'unknown option "l1" for this algorithm'),
        ({"algorithm": "dpgcd", "l1": -1}, "l1 is -1"),
        ({"algorithm": "dpgcd", "iterations": 0}, "iterations is 0"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_do(what: dict[str, Any], message: str) -> None:
    spec = {"loss": "logistic", "n": 100, "d": 5, "epsilon": 1.0, "delta": 1e-6, **what}
    if spec["epsilon"] is None:
        spec["delta"] = 0.0
    with pytest.raises(BismarckError, match=re.escape(message)):
        explain(**spec)
