"""Dual coordinate descent: C against NumPy, the minimum against scikit-learn, memories against files, and bad input."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import numpy as np
import pytest
from conftest import two_classes
from kernels import library
from scipy import optimize
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import LinearSVC
from sqlalchemy.exc import DBAPIError
from test_kernels import PARAMS
from test_noisy import begun, peak_memory, server_orders

from bismarck_dp import BismarckError, Plan, Spec, explain, make_plan, reference
from bismarck_dp.ascent import Dual
from bismarck_dp.controller.database import Database, embedded
from bismarck_dp.losses import LOSSES
from bismarck_dp.recordplay import samples
from bismarck_dp.solvers import SOLVERS

SEED = 11
DUAL = ("scd", "dpscd", "dpscd_seq")


def planned(algorithm: str, loss: str, n: int, d: int, epsilon: float = 2.0, delta: float = 1e-6, **o: Any) -> Plan:
    private = SOLVERS[algorithm].private
    options = {"lambda": 0.02, **o}
    return make_plan(Spec.create(algorithm, loss, epsilon if private else None, delta if private else 0, options), n, d)


def table_of(plan: Plan, seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(plan.n, plan.d))
    x[::9] = math.nan  # rows that count for nothing
    x[4] = 0.0
    y = np.where(rng.random(plan.n) < 0.5, -1.0, 1.0)
    return x, y if LOSSES[plan.spec.loss].classification else rng.normal(size=plan.n)


# ---- losses ----

CASES = [
    (name, p, y)
    for name in LOSSES
    for p in PARAMS[name]
    for y in ((-1.0, 0.0, 1.0) if LOSSES[name].classification else (-1.5, 0.0, 0.7))
]


def variables(name: str, y: float, param: float) -> Any:
    """Dual variables inside their domain, its ends included."""
    inside = np.linspace(0, 1, 21) if LOSSES[name].classification else np.linspace(-1, 1, 21) * min(param, 4.0)
    return y * inside if LOSSES[name].classification else inside


@pytest.mark.parametrize(("name", "param", "y"), CASES)
def test_conjugates_are_conjugates(name: str, param: float, y: float) -> None:
    """C is NumPy's; value(z) + conjugate(a) + a z is never negative, and zero where a is minus the slope at z."""
    loss, inner = LOSSES[name], library.dp_loss_named(name.encode()).contents
    z = np.linspace(-4, 4, 161)
    for a in variables(name, y, param):
        conjugate = loss.conjugate(np.array(a), np.array(y), param)
        assert inner.conjugate(a, y, param) == pytest.approx(float(conjugate), rel=1e-12, abs=1e-15)
        assert (loss.value(z, np.full_like(z, y), param) + conjugate + a * z).min() >= -1e-12
    labels = np.full_like(z, y)
    a = -loss.slope(z, labels, param)
    total = loss.value(z, labels, param) + loss.conjugate(a, labels, param) + a * z
    np.testing.assert_allclose(total, 0, atol=1e-12)


def part(name: str, z: float, y: float, a: float, c: float, param: float) -> Any:
    """What a move to b is meant to minimise."""
    loss = LOSSES[name]
    return lambda b: float(loss.conjugate(np.array(b), np.array(y), param)) + z * (b - a) + c * (b - a) ** 2 / 2


@pytest.mark.parametrize(("name", "param", "y"), CASES)
def test_moves_minimise_their_part(name: str, param: float, y: float) -> None:
    """C is NumPy's. The minimum is found by a search; the logistic move is at least as good as the one from which its
    Newton step starts, and does not go past the minimum by more than it was short of it.
    """
    inner = library.dp_loss_named(name.encode()).contents
    rng = np.random.default_rng(0)
    domain = variables(name, y, param)
    for _ in range(60):
        z, c, a = rng.normal() * 4, 10.0 ** rng.uniform(-3, 3), float(rng.choice(domain))
        arrays = (np.array(value) for value in (z, y, a, c))
        moved = float(LOSSES[name].dual(*arrays, param))
        assert inner.dual(z, y, a, c, param) == pytest.approx(moved, rel=1e-9, abs=1e-12)
        if y == 0 and LOSSES[name].classification:
            assert moved == 0
            continue
        value = part(name, z, y, a, c, param)
        low, high = sorted((0.0, y)) if LOSSES[name].classification else (-min(param, 100.0), min(param, 100.0))
        best = optimize.minimize_scalar(value, bounds=(low, high), method="bounded", options={"xatol": 1e-10}).x
        if name == "logistic":
            sure = a + (y / (1 + math.exp(y * z)) - a) * 4 / (4 + c)
            assert value(moved) <= min(value(a), value(sure)) + 1e-12
            assert abs(moved - best) <= abs(a - best) + 1e-6
        else:
            assert value(moved) <= value(best) + 1e-9


@pytest.mark.parametrize("z", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_v_makes_a_row_add_more_than_the_clip(name: str, z: float) -> None:
    """Whatever noise makes of v: a row's share is a number, no longer than the clip, and zero for a row of zeros."""
    for algorithm in ("dpscd", "dpscd_seq"):
        plan = planned(algorithm, name, 8, 2, batch_size=4, clip=0.3)
        run = kernels.Run({**plan.kernel_params(), "noise": "none"}, 2, "scd")
        assert run.solver.begin_pass(run.state, 0)
        vectors = np.frombuffer(run.state, offset=run.solver.size(0), dtype=np.float64)
        for memory in (0.0, 0.7, -1e300, math.inf, math.nan):
            for row in ([1.0, 0.6, 0.8], [-1.0, 1e-3, 0.0], [0.0, 0.0, 0.0]):
                vectors[:] = 0
                vectors[[0, 1, 4, 5]] = z
                run.memory[0] = memory
                run.take(run.state, np.array([row], np.float32), [0])
                added = vectors[2:4]
                assert np.isfinite(added).all()
                assert np.linalg.norm(added) <= 0.3 * (1 + 1e-6) * (row[1] != 0)


# ---- C against NumPy ----

OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 1, "epochs": 2},
    {"batch_size": 53, "fit_intercept": True},
    {"batch_size": 10, "clip": 0.05, "feature_bound": 3.0, "adjacency": "zero-out"},
    {"batch_size": 7, "normalize": True, "scale": 0.5, "lambda": 1.0},
    {"batch_size": 7, "lambda": 1e-5, "clip": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("algorithm", DUAL)
def test_c_agrees_with_numpy(algorithm: str, loss: str, options: dict[str, Any]) -> None:
    """Every loss, batch and clip, with noise from a seed and rows that count for nothing, to 1e-9; the gap too."""
    taken = {name: value for name, value in options.items() if name in SOLVERS[algorithm].options}
    plan = planned(algorithm, loss, 53, 5, **{"epochs": 3, **taken})
    rows = kernels.packed(table_of(plan), plan)
    private, passes = algorithm != "scd", plan.schedule.passes
    rng = np.random.default_rng(0)
    orders: Any = [samples(plan, rng) for _ in range(passes)] if private else None
    noise = reference.seeded_noise(plan, SEED) if private else None
    run = kernels.Run(plan.kernel_params(), plan.width, "scd", SEED)
    expected = reference.train(rows[:, 1:], rows[:, 0], plan, orders, noise)
    for j in range(passes):
        run.sample(rows, orders[j] if private else reference._batches(plan.schedule, np.arange(53))[0])
    np.testing.assert_allclose(run.weights, expected, rtol=1e-9, atol=1e-9)
    if not private:
        dual = Dual.of(rows[:, 1:], rows[:, 0], plan)
        dual.a, dual.v = run.memory, expected * dual.strength
        np.testing.assert_allclose(dual.a @ dual.x, dual.v, rtol=1e-9, atol=1e-9)
        assert run.solver.gap(run.state) == pytest.approx(dual.gap(), rel=1e-9, abs=1e-12)


PRIMAL: list[dict[str, Any]] = [
    {},
    {"inner_iterations": 6, "clip": 0.3},
    {"inner_iterations": 3, "iterations": 7, "lambda": 0.0, "scale": [0.5, 1, 1, 2, 1, 1]},
    {"fit_intercept": True, "inner_iterations": 2, "normalize": True, "clip": 1e-4},
]


@pytest.mark.parametrize("options", PRIMAL, ids=str)
@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"hinge"}))
def test_blocks_in_c_agree_with_numpy(loss: str, options: dict[str, Any]) -> None:
    plan = planned("dpscd_primal", loss, 53, 6, **options)
    rows = kernels.packed(table_of(plan), plan)
    found = kernels.train(rows, plan.kernel_params(), plan.schedule.passes, kernel="primal", seed=SEED)
    orders, noise = reference.coordinates(SEED, plan), reference.seeded_noise(plan, SEED)
    np.testing.assert_allclose(
        found, reference.train(rows[:, 1:], rows[:, 0], plan, orders, noise), rtol=1e-9, atol=1e-9
    )


# ---- the minimum ----

STRENGTH = 1e-2


@pytest.fixture(scope="module")
def problem() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 8)) @ (np.eye(8) + 0.3 * rng.normal(size=(8, 8)))
    x = (x / np.linalg.norm(x, axis=1).max()).astype(np.float32)
    return x, x @ rng.normal(size=8) + 0.1 * rng.normal(size=2000)


PEERS: dict[str, Any] = {
    "squared": lambda n: Ridge(STRENGTH * n, fit_intercept=False, tol=1e-12),
    "hinge": lambda n: LinearSVC(
        C=1 / (STRENGTH * n), loss="hinge", fit_intercept=False, tol=1e-10, max_iter=10**7, dual=True
    ),
    "logistic": lambda n: LogisticRegression(
        C=1 / (STRENGTH * n), fit_intercept=False, tol=1e-12, max_iter=10**6, solver="newton-cholesky"
    ),
}


@pytest.mark.parametrize(("loss", "batch_size", "epochs"), [
    ("squared", 1, 500), ("squared", 16, 2000), ("logistic", 1, 500), ("logistic", 16, 1000), ("hinge", 1, 10_000),
])  # fmt: skip
def test_scd_reaches_scikit_learns_minimum(
    db: Database, table: Any, problem: Any, loss: str, batch_size: int, epochs: int
) -> None:
    """Weights to 1e-5, with a duality gap below 1e-6 that bounds how far the objective is from its minimum."""
    x, y = problem
    labels = y.astype(np.float32).astype(float) if loss == "squared" else np.where(y > 0, 1.0, -1.0)
    rows = table(x, labels)
    options = {"lambda": STRENGTH, "epochs": epochs, "batch_size": batch_size, "feature_bound": 2.0, "seed": 1}
    model = db.train(rows.name, model="m", epsilon=None, algorithm="scd", loss=loss, **options)
    best = np.ravel(PEERS[loss](len(y)).fit(x.astype(np.float64), labels).coef_)
    np.testing.assert_allclose(model.weights, best, atol=1e-5)
    assert model.gap is not None
    assert 0 <= model.gap < 1e-6

    def objective(w: Any) -> float:
        value = LOSSES[loss].value(x.astype(np.float64) @ w, labels, math.inf)
        return float(value.mean() + STRENGTH / 2 * w @ w)

    assert objective(model.weights) - objective(best) <= model.gap + 1e-12


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_tolerance_is_a_share_of_the_gap(db: Database, table: Any, problem: Any, loss: str) -> None:
    x, y = problem
    rows = table(x, y if loss == "squared" else np.where(y > 0, 1.0, -1.0))
    options = {"lambda": 0.01, "epochs": 1000, "batch_size": 4, "feature_bound": 2.0, "tolerance": 1e-3}
    model = db.train(rows.name, model="m", epsilon=None, algorithm="scd", loss=loss, **options)
    assert model.passes < 200
    assert model.gap is not None
    assert model.gap < 1e-3 * 2


def test_other_algorithms_have_no_gap(db: Database, table: Any) -> None:
    rows = table(*two_classes(100, 3))
    assert db.train(rows.name, model="a", epsilon=None, algorithm="sgd").gap is None
    model = db.train(rows.name, model="b", epsilon=1.0, delta=1e-6, algorithm="dpscd", lambda_=0.1)
    assert model.gap is None


# ---- in the server ----

IN_SERVER: list[tuple[str, str, dict[str, Any]]] = [
    ("scd", "logistic", {"batch_size": 7}),
    ("scd", "squared", {"fit_intercept": True, "scale": 0.7}),
    ("dpscd", "logistic", {"batch_size": 20, "fit_intercept": True}),
    ("dpscd", "squared", {"batch_size": 7, "clip": 0.1, "normalize": True}),
    ("dpscd_seq", "hinge", {"batch_size": 20, "scale": [1, 2, 0.5, 1, 1]}),
    ("dpscd_primal", "huber", {"inner_iterations": 3}),
]


@pytest.mark.filterwarnings("ignore:.*(seed is known|does not shrink)")
@pytest.mark.parametrize(("algorithm", "loss", "options"), IN_SERVER, ids=str)
def test_weights_in_the_server_equal_numpys(
    db: Database, table: Any, algorithm: str, loss: str, options: dict[str, Any]
) -> None:
    """Order, samples and noise from the seed, to 1e-9; SQL and the SQLAlchemy engine agree to the bit."""
    x, y = two_classes(200, 5)
    rows = table(x, y)
    options = {"lambda": 0.02, **options, "seed": SEED}
    spec = {"epsilon": 2.0 if algorithm != "scd" else None, "delta": 1e-6 if algorithm != "scd" else 0.0}
    model = db.train(rows.name, model="a", algorithm=algorithm, loss=loss, **spec, **options)
    plan = planned(algorithm, loss, 200, 5, **options)
    features, labels = reference.pack(x, y, plan)
    orders = reference.coordinates(SEED, plan) if plan.layout == "columns" else server_orders(plan)
    noise = reference.seeded_noise(plan, SEED) if algorithm != "scd" else None
    found = np.append(model.weights, model.intercept)
    np.testing.assert_allclose(found, reference.train(features, labels, plan, orders, noise), rtol=1e-9, atol=1e-9)
    with db.engine.begin() as connection:
        row = connection.exec_driver_sql(
            "SELECT weights || intercept, gap FROM dp_train(%(t)s::regclass, 'b', 'y', '{x}', %(e)s, %(d)s, %(a)s,"
            " %(l)s, %(o)s::jsonb)",
            {
                "t": rows.name,
                "e": spec["epsilon"],
                "d": spec["delta"],
                "a": algorithm,
                "l": loss,
                "o": json.dumps(options),
            },
        ).one()
    np.testing.assert_array_equal(row[0], found)
    assert (row[1] is None) == (algorithm != "scd")


@pytest.mark.parametrize("algorithm", ["dpscd", "dpscd_seq"])
@pytest.mark.parametrize("batch_size", [1, 50, 3000, 8000])
def test_rows_that_do_not_fit_memory_keep_their_memories(
    db: Database, table: Any, algorithm: str, batch_size: int
) -> None:
    """All rows in memory, or drawn ones through files, with their slots: the same bits after three passes."""
    rows = table(*two_classes(8000, 40))
    options = {"seed": SEED, "epochs": 3, "batch_size": batch_size, "lambda": 0.01}
    spec = Spec.create(algorithm, "logistic", 1.0, 1e-6, options)
    weights = []
    for memory in ("64MB", "1MB"):
        with begun(db, rows.name, spec, 8000, 40) as (engine, packed, plan):
            engine.connection.exec_driver_sql(f"SET LOCAL maintenance_work_mem = '{memory}'")
            for _ in range(3):
                engine.epoch(packed, plan)
            weights.append(engine.release(packed, plan))
    np.testing.assert_array_equal(*weights)


@pytest.mark.filterwarnings("ignore:.*seed is known")
@pytest.mark.parametrize("algorithm", ["scd", "dpscd"])
def test_wide_rows(db: Database, table: Any, algorithm: str) -> None:
    """Rows that are stored out of line, against NumPy."""
    x, y = two_classes(60, 2500)
    rows = table(x, y)
    options = {"seed": SEED, "epochs": 2, "batch_size": 10, "lambda": 0.02}
    private: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6} if algorithm == "dpscd" else {"epsilon": None}
    model = db.train(rows.name, model="wide", algorithm=algorithm, **private, **options)
    plan = planned(algorithm, "logistic", 60, 2500, **options)
    features, labels = reference.pack(x, y, plan)
    noise = reference.seeded_noise(plan, SEED) if algorithm == "dpscd" else None
    expected = reference.train(features, labels, plan, server_orders(plan), noise)
    np.testing.assert_allclose(model.weights, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", DUAL)
def test_more_rows_than_the_user_gives_memory_for(db: Database, table: Any, algorithm: str) -> None:
    """Eight bytes for each: said by explain, refused before anything is packed, and what the hint says works."""
    n = 140_000
    rows = table(np.ones((n, 1), np.float32), np.resize([-1.0, 1.0], n))
    private: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-9} if algorithm != "scd" else {"epsilon": None}
    spec = {**private, "algorithm": algorithm, "lambda": 0.1, "batch_size": 1000, "epochs": 1}
    assert db.explain(rows.name, **spec)["memory"] == 8 * n
    with db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '1MB'")
        call = (
            "SELECT n FROM dp_train(%(t)s::regclass, 'm', 'y', '{x}', %(e)s, %(d)s, %(a)s,"
            """ options => '{"lambda": 0.1, "batch_size": 1000, "epochs": 1}')"""
        )
        values = {"t": rows.name, "e": private["epsilon"], "d": private.get("delta", 0), "a": algorithm}
        with pytest.raises(DBAPIError) as refused, connection.begin_nested():
            connection.exec_driver_sql(call, values)
        diagnostics = refused.value.orig.diag  # type: ignore[union-attr]
        assert diagnostics.message_primary == (
            f'algorithm "{algorithm}" keeps 8 bytes for each of 140000 rows, 2 MB, and maintenance_work_mem is 1 MB'
        )
        other = "sgd" if algorithm == "scd" else "dpsgd"
        assert diagnostics.message_hint == f"SET maintenance_work_mem = '2MB', or use {other}"
        connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '2MB'")
        assert connection.exec_driver_sql(call, values).scalar_one() == n


@pytest.mark.parametrize("algorithm", ["scd", "dpscd"])
def test_training_takes_eight_bytes_for_each_row(db: Database, table: Any, algorithm: str) -> None:
    """And what is left of maintenance_work_mem, whatever the rows take."""
    n, d = 500_000, 20
    rows = table(np.zeros((n, d), np.float32), np.resize([-1.0, 1.0], n))
    private = (1.0, 1e-9) if algorithm == "dpscd" else (None, 0.0)
    spec = Spec.create(algorithm, "logistic", *private, {"lambda": 0.1, "batch_size": 1000, "epochs": 1})
    with begun(db, rows.name, spec, n, d, "5MB") as (engine, packed, plan):
        before = peak_memory(engine)
        engine.epoch(packed, plan)
        assert peak_memory(engine) - before < 8 * n / 1024 + 6_000, "kB; the rows take 42,000"


def test_the_server_refuses_memories_that_do_not_fit(db: Database, table: Any) -> None:
    """Also where the controller did not ask: a run that was begun elsewhere."""
    rows = table(np.ones((140_000, 1), np.float32), np.resize([-1.0, 1.0], 140_000))
    spec = Spec.create("dpscd", "logistic", 1.0, 1e-9, {"lambda": 0.1, "batch_size": 1000})
    with begun(db, rows.name, spec, 140_000, 1) as (engine, packed, plan):
        engine.connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '1MB'")
        with pytest.raises(DBAPIError, match="8 bytes for each of 140000 rows do not fit maintenance_work_mem"):
            engine.epoch(packed, plan)


def test_packed_rows_must_fit_the_plan(db: Database, table: Any) -> None:
    """More or fewer rows than memories, or another number of them in a later pass, are an error, not a crash."""
    rows = table(*two_classes(100, 3))
    for algorithm in ("scd", "dpscd"):
        private = (1.0, 1e-6) if algorithm == "dpscd" else (None, 0)
        spec = Spec.create(algorithm, "logistic", *private, {"lambda": 0.1, "batch_size": 10})
        for n in (90, 110):
            with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
                wrong = {**plan.sample_params(), "n": n}
                sample = "SELECT bismarck_dp.sample(%(r)s, %(t)s::regclass[], %(p)s::jsonb)"
                values = {"r": packed.run, "t": packed.tables, "p": json.dumps(wrong)}
                with pytest.raises(DBAPIError, match=r"do not fit the plan|before the last row"):
                    engine.connection.exec_driver_sql(sample, values)
        with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
            engine.epoch(packed, plan)
            values = {**values, "r": packed.run, "t": packed.tables, "p": json.dumps({**wrong, "n": 10**9})}
            engine.connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '20GB'")
            with pytest.raises(DBAPIError, match="the run has another number of rows"):
                engine.connection.exec_driver_sql(sample, values)


@pytest.fixture(scope="module")
def cramped() -> Iterator[Database]:
    """A server with hardly any buffers: it reads any table larger than a quarter of them as it reads huge ones."""
    home = Path(tempfile.mkdtemp(prefix="bdp_cramped_", dir="/tmp"))
    home.chmod(0o755)
    settings = {"shared_buffers": "1MB"}
    try:
        with embedded(str(home / "c"), durable=False, extension=kernels.extension(), settings=settings) as database:
            yield database
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("algorithm", ["scd", "dpscd"])
def test_memories_stay_with_their_rows_whatever_else_was_read(cramped: Database, algorithm: str) -> None:
    """PostgreSQL reads a large table from where another scan left off. One that was left in the middle must not give
    rows the memories of others: the same bits come out.
    """
    cramped.load(algorithm, *two_classes(8000, 40))
    private = (1.0, 1e-9) if algorithm == "dpscd" else (None, 0.0)
    spec = Spec.create(algorithm, "logistic", *private, {"lambda": 1e-3, "batch_size": 500, "epochs": 3, "seed": SEED})
    weights = []
    for disturbed in (False, True):
        with begun(cramped, algorithm, spec, 8000, 40, "1MB") as (engine, packed, plan):
            for _ in range(3):
                engine.epoch(packed, plan)
                left_off = f"DECLARE c CURSOR FOR SELECT block FROM {packed.tables[0]}; MOVE 90 FROM c; CLOSE c"
                engine.connection.exec_driver_sql(left_off if disturbed else "SELECT")
            weights.append(engine.release(packed, plan))
    np.testing.assert_array_equal(*weights)


def test_a_pass_that_failed_is_not_taken_up_again(db: Database, table: Any) -> None:
    """Its state is as it was before; the memories are not."""
    rows = table(*two_classes(100, 3))
    spec = Spec.create("scd", "logistic", None, 0, {"lambda": 0.1, "batch_size": 10})
    with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
        engine.epoch(packed, plan)
        twice = {"r": packed.run, "t": packed.tables * 2, "p": json.dumps(plan.sample_params())}
        sample = "SELECT bismarck_dp.sample(%(r)s, %(t)s::regclass[], %(p)s::jsonb)"
        with pytest.raises(DBAPIError, match="do not fit the plan"), engine.connection.begin_nested():
            engine.connection.exec_driver_sql(sample, twice)
        with pytest.raises(DBAPIError, match="a pass of this run failed"):
            engine.epoch(packed, plan)


def test_a_run_that_is_begun_again_remembers_nothing(db: Database, table: Any) -> None:
    rows = table(*two_classes(100, 3))
    spec = Spec.create("scd", "logistic", None, 0, {"lambda": 0.1, "batch_size": 10, "epochs": 1})
    with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
        gaps = []
        for _ in range(2):
            engine.begin(packed, plan)
            engine.epoch(packed, plan)
            gaps.append(engine.gap(packed))
    assert gaps[0] == gaps[1]


def test_a_block_solver_has_no_objective_to_show(db: Database, sql: Any) -> None:
    plan = planned("dpscd_primal", "huber", 100, 3)
    params = json.dumps({**plan.kernel_params(), "private": False})
    begin = "SELECT bismarck_dp.begin(900, 'primal', 3, CAST(:p AS jsonb)), bismarck_dp.objective(900) AS shown"
    assert sql(begin, p=params)[0]["shown"] is None


def test_labels_beyond_all_floats_count_for_nothing(db: Database, table: Any) -> None:
    """Or the gap would be no number."""
    x, y = two_classes(100, 3)
    rows = table(x, np.where(np.arange(100) == 7, 1e300, y))
    others = table(x, np.where(np.arange(100) == 7, np.nan, y))
    spec: dict[str, Any] = {"epsilon": None, "algorithm": "scd", "loss": "squared", "lambda": 0.1, "seed": 1}
    first, second = (db.train(t.name, model=t.name, **spec) for t in (rows, others))
    np.testing.assert_array_equal(first.weights, second.weights)
    assert first.gap == second.gap
    assert first.gap is not None
    assert 0 < first.gap < 1


def test_a_private_run_is_never_given_batches_in_order(db: Database, table: Any) -> None:
    rows = table(*two_classes(100, 3))
    spec = Spec.create("dpscd", "logistic", 1.0, 1e-6, {"lambda": 0.1})
    with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
        params = {**plan.sample_params(), "probability": None}
        with pytest.raises(DBAPIError, match="a private run needs samples"):
            engine.connection.exec_driver_sql(
                "SELECT bismarck_dp.sample(%(r)s, %(t)s::regclass[], %(p)s::jsonb)",
                {"r": packed.run, "t": packed.tables, "p": json.dumps(params)},
            )


# ---- rows that are scaled ----


@pytest.mark.parametrize("algorithm", sorted(SOLVERS))
def test_every_algorithm_scales_rows_by_themselves(db: Database, table: Any, algorithm: str) -> None:
    """By given bounds, and to one norm; a prediction does the same, in SQL and in Python."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(300, 3)) * [100.0, 1.0, 0.01]
    y = np.where(x[:, 0] / 100 + x[:, 1] > 0, 1.0, -1.0)
    x[5], x[6, 1], x[7] = 0.0, 1e30, [1e-200, 0, 0]
    rows = table(x, y, "float8")
    solver = SOLVERS[algorithm]
    private: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-6} if solver.private else {"epsilon": None}
    options: dict[str, Any] = {"scale": [200.0, 3.0, 0.03], "normalize": True, "feature_bound": 2.0}
    options |= {"fit_intercept": True} | ({"lambda": 0.1} if "lambda" in solver.options else {})
    model = db.train(rows.name, model="m", algorithm=algorithm, **private, **options)
    np.testing.assert_array_equal(model.scale, options["scale"])
    assert model.normalize
    with db.engine.begin() as connection:
        found = connection.exec_driver_sql(f"SELECT x, dp_predict('m', x) FROM {rows.name}").all()
    np.testing.assert_array_equal([row[1] for row in found], model.predict([row[0] for row in found]))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, [1e-3, 1.0, 1e9]])
def test_scaled_rows_agree_with_numpy(scale: Any, normalize: bool, intercept: bool) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(200, 3)) * 10.0 ** rng.integers(-3, 3, size=(200, 1))
    x[0], x[1], x[2], x[3] = 0.0, [1e300, -1e300, 1.0], [5e-324, 0, 0], [1e-310, 1e-320, 0]
    expected = reference.clip_rows(x, 2.0, intercept, scale, normalize)
    for row, want in zip(x, expected):
        good, found = kernels.clip_row(row, intercept, 2.0, scale, normalize)
        assert good
        np.testing.assert_allclose(found, want, rtol=2e-7, atol=1e-44)
        norm = float(np.sqrt((found.astype(np.longdouble) ** 2).sum()))
        assert norm <= 2.0 * (1 + 1e-12)
        if normalize and (intercept or np.abs(row).max() > 1e-300):
            assert norm >= 2.0 * (1 - 1e-6)


def test_an_infinite_feature_is_not_cut_to_its_bound() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        good, found = kernels.clip_row(np.array([bad, 1.0]), True, 1.0, 0.5, True)
        assert not good
        assert not found.any()


# ---- bad input ----


@pytest.mark.parametrize(
    ("algorithm", "loss", "options", "message", "hint"),
    [
        ("scd", "logistic", {"lambda": 0}, 'algorithm "scd" needs lambda above 0', "for example to 1e-4"),
        ("dpscd", "hinge", {"lambda": None}, 'algorithm "dpscd" needs lambda above 0', "set lambda"),
        ("dpscd", "hinge", {"step": 0.1}, 'unknown option "step" for this algorithm', "valid: adjacency, batch_size"),
        ("scd", "hinge", {"clip": 0.1}, 'unknown option "clip" for this algorithm', "valid: batch_size"),
        ("dpscd", "hinge", {"tolerance": 0.1}, 'unknown option "tolerance" for this algorithm', "valid"),
        (
            "dpscd",
            "hinge",
            {"batch_size": 101},
            "batch_size 101 is larger than the table's 100 rows",
            "use at most 100",
        ),
        ("dpscd", "hinge", {"scale": [1, 2]}, "scale has 2 numbers for 3 features", "give one for all"),
        ("dpscd", "hinge", {"scale": 0}, "scale is 0", "it must be a number from 1e-15"),
        ("dpscd", "hinge", {"normalize": "yes"}, 'normalize is "yes"', "it must be true or false"),
        ("dpscd_primal", "hinge", {}, "needs a loss with a curvature", 'use the loss "huber"'),
        ("dpscd_primal", "huber", {"inner_iterations": 4}, "inner_iterations is 4, and there are 3", "use at most 3"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    algorithm: str, loss: str, options: dict[str, Any], message: str, hint: str
) -> None:
    private: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6} if algorithm != "scd" else {}
    with pytest.raises(BismarckError) as refused:
        explain(algorithm=algorithm, loss=loss, n=100, d=3, **private, **{"lambda": 0.1, **options})
    assert message in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize("algorithm", ["dpscd", "dpscd_seq", "dpscd_primal"])
def test_no_pure_privacy(algorithm: str) -> None:
    with pytest.raises(BismarckError, match="is private for delta above 0 only"):
        explain(algorithm=algorithm, n=100, d=3, epsilon=1.0, **{"lambda": 0.1})
