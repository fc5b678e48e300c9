"""Noise inside the pass: C against NumPy with the noise injected, the noise against its distribution, the arithmetic
against its bounds, the calibration against the accountants, and Poisson samples against coins.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import dp_accounting
import kernels
import mpmath
import numpy as np
import pytest
from conftest import two_classes
from dp_accounting import pld
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels import library
from scipy import stats
from sqlalchemy.exc import DBAPIError
from statistics_of import LEVEL, check_binomial, check_moments

from bismarck_dp import BismarckError, Plan, Spec, explain, make_plan, reference
from bismarck_dp.calibrators import Gaussians, PoissonGaussians
from bismarck_dp.controller.database import Database
from bismarck_dp.controller.engines import Packed, Request, SqlEngine
from bismarck_dp.losses import LOSSES
from bismarck_dp.mechanisms import NORMAL_ERROR, Sums, most_of_binomial
from bismarck_dp.recordplay import samples

SEED = 11
NOISY = ("scs13", "dpsgd", "bst14", "banco")


def planned(algorithm: str, loss: str, n: int, d: int, delta: float = 1e-6, epsilon: float = 2.0, **o: Any) -> Plan:
    return make_plan(Spec.create(algorithm, loss, epsilon, delta, o), n, d)


def table_of(plan: Plan, seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(plan.n, plan.d))
    y = np.where(rng.random(plan.n) < 0.5, -1.0, 1.0)
    return x, y if LOSSES[plan.spec.loss].classification else rng.normal(size=plan.n)


# ---- C against NumPy ----

OPTIONS: list[dict[str, Any]] = [
    {},
    {"step": 0.3, "batch_size": 1, "average": "all"},
    {"step": "decreasing", "batch_size": 10, "average": "suffix", "radius": 0.4},
    {"lambda": 0.05, "batch_size": 53, "clip": 0.2},
    {"lambda": 2.0, "workers": 3, "batch_size": 4, "average": "all"},
    {"step": "sqrt", "shuffle": "each_pass", "clip": 5.0, "feature_bound": 3.0, "workers": 2},
]


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_scs13_agrees_with_numpy(loss: str, options: dict[str, Any], delta: float) -> None:
    """Every step rule, batch size, average, projection and number of partitions, noise included, to 1e-9."""
    for d in (1, 10, 41):
        plan = planned("scs13", loss, 53, d, delta, epochs=3, **options)
        rows = kernels.packed(table_of(plan), plan)
        found = kernels.train(rows, plan.kernel_params(), 3, seed=SEED)
        expected = reference.train(rows[:, 1:], rows[:, 0], plan, noise=reference.seeded_noise(plan, SEED))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=f"d = {d}")


SAMPLED: list[tuple[str, dict[str, Any]]] = [
    ("dpsgd", {}),
    ("dpsgd", {"batch_size": 1, "step": 0.2, "average": "all"}),
    ("dpsgd", {"batch_size": 20, "lambda": 0.1, "clip": 0.3, "radius": 0.5}),
    ("bst14", {"batch_size": 7, "average": "suffix"}),
    ("bst14", {"batch_size": 7, "lambda": 0.1}),
    ("bst14", {"batch_size": 53, "radius": 2.0}),
]


@pytest.mark.parametrize(("algorithm", "options"), SAMPLED, ids=str)
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_sampled_batches_agree_with_numpy(loss: str, algorithm: str, options: dict[str, Any]) -> None:
    """On the same samples, some of them empty: sums are divided by batch_size whatever they hold."""
    plan = planned(algorithm, loss, 53, 5, epochs=3, **options)
    rng = np.random.default_rng(0)
    rows = kernels.packed(table_of(plan), plan)
    orders: list[Any] = [samples(plan, rng) for _ in range(3)]
    orders[1][0] = np.array([], dtype=np.int64)
    found = kernels.train(rows, plan.kernel_params(), 3, orders=orders, seed=SEED)
    expected = reference.train(rows[:, 1:], rows[:, 0], plan, orders, reference.seeded_noise(plan, SEED))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_a_gradient_is_scaled_down_to_the_clip() -> None:
    """Its norm, not its slope: long and short rows, both sides of the bound."""
    plan = planned("dpsgd", "squared", 4, 2, clip=0.5, label_bound=10.0)
    assert plan.clip == 0.5
    assert plan.lipschitz == 0.5
    for x, y, norm in [([1.0, 0.0], 3.0, 0.5), ([0.1, 0.0], 3.0, 0.3), ([0.0, 0.6], 0.5, 0.3), ([0.6, 0.8], -9.0, 0.5)]:
        rows = kernels.packed((np.array([x] * 4), np.full(4, y)), plan)
        one = reference.gradient_of(rows[:, 1:], rows[:, 0], [0], np.zeros(2), plan)
        assert np.linalg.norm(one) == pytest.approx(norm, rel=1e-6)
        batches = [np.array([0], dtype=np.int64)]
        moved = kernels.first_sum(plan, rows, {**plan.kernel_params(), "noise": "none"}, batches)
        np.testing.assert_allclose(moved, one, rtol=1e-6)


FLOATS = st.floats(width=32, min_value=-(2.0**49), max_value=2.0**49)


@given(
    slope=st.floats(),
    x=st.lists(FLOATS, min_size=1, max_size=12),
    clip=st.floats(1e-15, 1e15),
)
@example(slope=math.nan, x=[1.0], clip=1.0)
@example(slope=math.inf, x=[0.0], clip=1.0)
@example(slope=-math.inf, x=[1e-45], clip=1e15)
@example(slope=1.345e293, x=[1e15], clip=1e-15)
@settings(max_examples=1000, deadline=None)
def test_no_slope_leaves_the_clip(slope: float, x: list[float], clip: float) -> None:
    """Whatever noise and steps make of the weights, one row's gradient is a number, and no longer than the clip."""
    row = np.array(x, dtype=np.float32)
    found = library.dp_clip_slope(ctypes.c_double(slope), kernels.pointer(row), len(row), ctypes.c_double(clip))
    norm = float(np.sqrt((row.astype(np.float64) ** 2).sum()))
    assert math.isfinite(found)
    assert abs(found) * norm <= clip * (1 + 1e-12)
    if math.isfinite(slope) and abs(slope) * norm < clip * (1 - 1e-12) and norm > 0:
        assert found == slope


@pytest.mark.parametrize("slope", [math.nan, math.inf, -math.inf, 0.7])
def test_a_slope_without_a_clip_is_a_number_where_there_is_noise(slope: float) -> None:
    row = np.ones(2, dtype=np.float32)
    for mechanism in (0, 1, 2):
        noise = kernels.Noise(mechanism, 0, 1.0, 0.125)
        found = library.dp_noised_slope(
            ctypes.byref(noise), ctypes.c_double(slope), kernels.pointer(row), 2, ctypes.c_double(math.inf)
        )
        expected = slope if math.isfinite(slope) or mechanism == 0 else 0.0
        assert found == expected or (math.isnan(found) and math.isnan(expected))


# ---- in the server ----


@pytest.mark.parametrize(
    ("algorithm", "loss", "d"), [("scs13", "squared", 1), ("scs13", "logistic", 2), ("dpsgd", "squared", 1)]
)
def test_no_row_makes_a_training_fail(db: Database, table: Any, algorithm: str, loss: str, d: int) -> None:
    """Steps so long that noise takes the weights to where one row's margin overflows: others' noise must stay noise."""
    x, y = np.full((100, d), 0.1), np.resize([1.0, -1.0], 100)
    x[7] = np.resize([1e15, -1e15], d)
    rows = table(x, y, "float8")
    options = {"step": 1e298, "feature_bound": 1e15, "batch_size": 10, "epochs": 1, "clip": 1.0}
    for i in range(5):
        model = db.train(rows.name, model=str(i), epsilon=0.01, delta=1e-6, algorithm=algorithm, loss=loss, **options)
        assert np.isfinite(model.weights).all()


@contextmanager
def begun(
    db: Database, name: str, spec: Spec, n: int, d: int, memory: str = "64MB"
) -> Iterator[tuple[SqlEngine, Packed, Plan]]:
    """A run before its first pass, taken back at the end."""
    plan = make_plan(spec, n, d)
    with db.engine.connect() as connection:
        engine = SqlEngine(connection)
        connection.exec_driver_sql(f"SET LOCAL maintenance_work_mem = '{memory}'")
        source = connection.exec_driver_sql(f"SELECT '{name}'::regclass::oid").scalar_one()
        packed = engine.pack(Request(source, "m", "y", ["x"], spec), plan)
        engine.begin(packed, plan)
        yield engine, packed, plan
        connection.rollback()


def server_orders(plan: Plan) -> list[Any]:
    """In which the server takes rows under the seed."""
    passes = range(plan.schedule.passes)
    packed = reference.order(SEED, plan.n)
    if plan.schedule.shuffle == "poisson":
        return [[packed[batch] for batch in reference.samples(SEED, plan, j)] for j in passes]
    return [packed] * plan.schedule.passes


IN_SERVER: list[tuple[str, float, dict[str, Any]]] = [
    ("scs13", 0.0, {}),
    ("scs13", 1e-6, {"workers": 3, "batch_size": 7, "fit_intercept": True, "lambda": 0.1}),
    ("dpsgd", 1e-6, {"batch_size": 7, "clip": 0.4}),
    ("dpsgd", 1e-6, {"batch_size": 200}),
    ("bst14", 1e-6, {"batch_size": 20}),
    ("bst14", 1e-6, {"batch_size": 20, "lambda": 0.1}),
    ("banco", 0.0, {}),
    ("banco", 1e-6, {"fit_intercept": True}),
]


@pytest.mark.parametrize(("algorithm", "delta", "options"), IN_SERVER, ids=str)
def test_weights_in_the_server_equal_numpys(
    db: Database, table: Any, algorithm: str, delta: float, options: dict[str, Any]
) -> None:
    """Order, samples and noise from the seed, to 1e-9; SQL and the SQLAlchemy engine agree to the bit."""
    x, y = two_classes(200, 5)
    rows = table(x, y)
    options = {**options, "seed": SEED, **({"epochs": 2} if algorithm != "banco" else {})}
    with pytest.warns(UserWarning, match="seed is known"):
        model = db.train(rows.name, model="a", epsilon=2.0, delta=delta, algorithm=algorithm, **options)
    plan = planned(algorithm, "logistic", 200, 5, delta, **options)
    features, labels = reference.pack(x, y, plan)
    expected = reference.train(features, labels, plan, server_orders(plan), reference.seeded_noise(plan, SEED))
    found = np.append(model.weights, model.intercept)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    with db.engine.begin() as connection:
        row = connection.exec_driver_sql(
            "SELECT weights || intercept FROM dp_train(%(t)s::regclass, 'b', 'y', '{x}', 2, %(d)s, %(a)s,"
            " options => %(o)s::jsonb)",
            {"t": rows.name, "d": delta, "a": algorithm, "o": json.dumps(options)},
        ).scalar_one()
    np.testing.assert_array_equal(row, found)


@pytest.mark.parametrize("batch_size", [1, 50, 3000, 8000])
def test_rows_that_do_not_fit_memory_are_sampled_alike(db: Database, table: Any, batch_size: int) -> None:
    """All rows in memory, or drawn ones sorted by step through files: the same bits."""
    rows = table(*two_classes(8000, 40))
    spec = Spec.create("dpsgd", "logistic", 1.0, 1e-6, {"seed": SEED, "epochs": 2, "batch_size": batch_size})
    weights = []
    for memory in ("64MB", "1MB"):
        with begun(db, rows.name, spec, 8000, 40) as (engine, packed, plan):
            engine.connection.exec_driver_sql(f"SET LOCAL maintenance_work_mem = '{memory}'")
            engine.epoch(packed, plan)
            engine.epoch(packed, plan)
            weights.append(engine.release(packed, plan))
    np.testing.assert_array_equal(*weights)


def test_wide_rows_are_sampled(db: Database, table: Any) -> None:
    """Rows that are stored out of line, against NumPy."""
    x, y = two_classes(60, 2500)
    rows = table(x, y)
    options = {"seed": SEED, "epochs": 2, "batch_size": 10}
    with pytest.warns(UserWarning, match="seed is known"):
        model = db.train(rows.name, model="wide", epsilon=2.0, delta=1e-6, algorithm="dpsgd", **options)
    plan = planned("dpsgd", "logistic", 60, 2500, **options)
    features, labels = reference.pack(x, y, plan)
    expected = reference.train(features, labels, plan, server_orders(plan), reference.seeded_noise(plan, SEED))
    np.testing.assert_allclose(model.weights, expected, rtol=1e-9, atol=1e-9)


def test_a_batch_larger_than_memory_is_not_held_in_it(db: Database, table: Any) -> None:
    """Every row in every batch, in a megabyte: the peak of the backend does not grow with the table."""
    rows = table(np.zeros((150_000, 20), np.float32), np.resize([-1.0, 1.0], 150_000))
    spec = Spec.create("dpsgd", "logistic", 1.0, 1e-6, {"epochs": 1, "batch_size": 150_000})
    with begun(db, rows.name, spec, 150_000, 20) as (engine, packed, plan):
        engine.connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '1MB'")
        before = peak_memory(engine)
        engine.epoch(packed, plan)
        assert peak_memory(engine) - before < 6_000, "kB; the rows take 12,600"


def peak_memory(engine: SqlEngine) -> int:
    """Of what is not shared, in kB, since the last call."""
    pid = engine.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    status = Path(f"/proc/{pid}/status").read_text()
    values = {name: int(kilobytes) for name, kilobytes in re.findall(r"^(VmHWM|RssShmem):\s+(\d+) kB", status, re.M)}
    return values["VmHWM"] - values["RssShmem"]


def one_hot(db: Database, table: Any, n: int) -> Any:
    """Every row has a feature of its own, so that a weight counts how often its row was drawn."""
    return table(np.eye(n, dtype=np.float32), np.ones(n))


def times_drawn(db: Database, name: str, n: int, b: int, memory: str = "64MB") -> tuple[Any, float]:
    """How often each row was drawn in one pass, and the standard deviation of the noise on that number."""
    options = {"epochs": 1, "batch_size": b, "step": 0.01 * b, "classes": [0, 1], "adjacency": "zero-out"}
    with db.engine.begin() as connection:
        connection.exec_driver_sql(f"SET LOCAL maintenance_work_mem = '{memory}'")
        connection.exec_driver_sql("SET LOCAL client_min_messages = error")
        row = connection.exec_driver_sql(
            "SELECT weights, noise_scale, plan FROM dp_train(%(t)s::regclass, 'drawn', 'y', '{x}', 400, 0.01, 'dpsgd',"
            " loss => 'hinge', options => %(o)s::jsonb)",
            {"t": name, "o": json.dumps(options)},
        ).one()
        connection.exec_driver_sql("SELECT dp_forget('drawn')")
    variance = row.noise_scale**2 + row.plan["grid"] ** 2 / 12
    return np.array(row.weights) / 0.01, math.sqrt(-(-n // b) * variance)


def noisy_binomial(steps: int, q: float, sigma: float) -> Any:
    """The moments of a binomial number plus normal noise."""
    k = np.arange(steps + 1)
    law = stats.binom(steps, q).pmf(k)

    def moment(p: int) -> float:
        normal = [float(stats.norm.moment(j)) if j else 1.0 for j in range(p + 1)]
        return float(sum(math.comb(p, j) * sigma**j * normal[j] * (law * k ** (p - j)).sum() for j in range(p + 1)))

    return moment


@pytest.mark.parametrize("memory", ["64MB", "1MB"])
def test_rows_are_drawn_by_independent_coins(db: Database, table: Any, memory: str) -> None:
    """How often each row was drawn is binomial. In a shuffled table, cut into batches, it would be once for each."""
    n, b = 600, 60
    rows = one_hot(db, table, n)
    drawn = [times_drawn(db, rows.name, n, b, memory) for _ in range(10)]
    counts, sigma = np.concatenate([count for count, _ in drawn]), drawn[0][1]
    assert sigma < 0.5, "a draw cannot be told from none"
    check_moments(counts, noisy_binomial(10, b / n, sigma))


def test_draws_of_two_trainings_have_nothing_in_common(db: Database, table: Any) -> None:
    n, b = 600, 60
    rows = one_hot(db, table, n)
    first, second = (times_drawn(db, rows.name, n, b)[0] for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5.5 / math.sqrt(n)


def test_every_batch_has_noise_also_an_empty_one(db: Database, table: Any) -> None:
    """Rows that count for nothing: the weights are the sum of all steps' noise, at its declared size."""
    n, d, b = 40, 200, 4
    rows = table(np.full((n, d), np.nan), np.ones(n))
    options = {"classes": [0, 1], "epochs": 5, "batch_size": b, "step": 1.0}
    for algorithm, delta in (("scs13", 1e-6), ("dpsgd", 1e-6), ("scs13", 0.0)):
        model = db.train(
            rows.name, model=algorithm + str(delta), epsilon=1, delta=delta, algorithm=algorithm, **options
        )
        assert model.noise_scale is not None
        spread = model.noise_scale * (math.sqrt(d + 1) if delta == 0 else 1.0)
        total = float((model.weights**2).sum()) / (50 * (spread / b) ** 2)
        slack = 1.3 if delta == 0 else 1.0
        low, high = stats.chi2.ppf([LEVEL, 1 - LEVEL], d)
        assert low / slack < total < high * slack


@pytest.mark.parametrize("algorithm", ["scs13", "dpsgd", "banco"])
def test_no_more_passes_than_planned(db: Database, table: Any, algorithm: str) -> None:
    """The noise is calibrated for so many passes: the server refuses another."""
    rows = table(*two_classes(100, 3))
    spec = Spec.create(algorithm, "logistic", 1.0, 1e-6, {} if algorithm == "banco" else {"epochs": 2})
    with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
        for _ in range(plan.schedule.passes):
            engine.epoch(packed, plan)
        try:
            engine.epoch(packed, plan)
            said = "another pass was made"
        except DBAPIError as refusal:
            said = str(refusal)
        assert "all planned passes were made" in said


# ---- the noise ----

COUNT = 400_000


def noises(mechanism: str, scale: float, grid: float, d: int, count: int, sum_: float = 0.0) -> Any:
    """As added to sums of `sum_` in each coordinate."""
    out = np.full((count, d), sum_)
    pool = kernels.Pool.fresh()
    noise = kernels.Noise(kernels.MECHANISMS.index(mechanism), 0, scale, grid)
    add, where, size = library.dp_noise_add, ctypes.byref(pool), d * out.itemsize
    for i in range(count):
        add(ctypes.byref(noise), where, ctypes.c_void_p(out.ctypes.data + i * size), d)
    assert np.array_equal(out / grid, np.rint(out / grid)), "a sum is not on the grid"
    return out - sum_


def smooth(sample: Any, grid: float) -> Any:
    """Spread over its cell, so that a continuous law can be compared."""
    return sample + np.random.default_rng(0).uniform(-grid / 2, grid / 2, sample.shape)


@pytest.mark.parametrize("d", [1, 2, 50])
def test_gaussian_noise_on_sums_has_its_law(d: int) -> None:
    sigma, grid = 12.0, 1.0
    sample = smooth(noises("gaussian", sigma, grid, d, COUNT // d, 0.3), grid)
    law = stats.norm(scale=math.sqrt(sigma**2 + grid**2 / 6))
    assert stats.kstest(sample.ravel(), law.cdf).pvalue > LEVEL
    check_moments(sample.ravel() / law.std(), lambda p: float(stats.norm.moment(p)))
    if d > 1:
        both = np.corrcoef(sample[:, 0], sample[:, 1])[0, 1]
        assert abs(both) < 5.5 / math.sqrt(len(sample))


@pytest.mark.parametrize("d", [1, 2, 3, 20, 51])
def test_knorm_noise_on_sums_has_its_law(d: int) -> None:
    """The norm is Gamma(d), the direction uniform: compared on a grid that is far finer than the plans'."""
    scale, grid = 3.0, 2.0**-20
    sample = noises("l2-laplace", scale, grid, d, COUNT // max(d, 4))
    norms = np.linalg.norm(sample, axis=1)
    assert stats.kstest(norms, stats.gamma(d, scale=scale).cdf).pvalue > LEVEL
    if d == 1:
        assert stats.kstest(sample.ravel(), stats.laplace(scale=scale).cdf).pvalue > LEVEL
        return
    squares = (sample[:, 0] / norms) ** 2
    assert stats.kstest(squares, stats.beta(0.5, (d - 1) / 2).cdf).pvalue > LEVEL
    check_binomial(int((sample[:, -1] > 0).sum()), len(sample), 0.5)


def test_squared_lengths_are_exponential() -> None:
    random = kernels.Random.fresh()
    out = np.empty(2_000_000)
    library.dp_squared_lengths(ctypes.byref(random), kernels.pointer(out), ctypes.c_size_t(len(out)))
    assert stats.kstest(out, stats.chi2(2).cdf).pvalue > LEVEL
    check_moments(out / 2, lambda p: float(math.factorial(p)))


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
def test_squared_lengths_equal_numpys(count: int) -> None:
    out = np.full(count + 1, -1.0)
    random = kernels.Random.start(bytes(32), 7)
    library.dp_squared_lengths(ctypes.byref(random), kernels.pointer(out), ctypes.c_size_t(count))
    words = reference.key_stream(bytes(32), 7, -(-count // 128) * 256)
    np.testing.assert_allclose(out[:count], reference.squared_lengths(words)[:count], rtol=1e-12, atol=1e-12)
    assert out[count] == -1.0


def test_a_stock_longer_than_needed_is_used_up_before_more_is_made() -> None:
    """Sums wider than the stock, and many narrow ones: one stream of numbers, none twice, none left out."""
    key, stream = bytes([9]) * 32, 256 * 3 + 1
    normals = reference.gaussians(reference.key_stream(key, reference.SUMS_STREAM + stream, 256 * 64), 1.0)
    for d in (3000, 5000, 7):
        pool, taken = kernels.Pool.start(key, stream), []
        while sum(map(len, taken)) + d <= 8000:
            out = np.zeros(d)
            noise = kernels.Noise(1, 0, 1.0, 2.0**-30)
            library.dp_noise_add(ctypes.byref(noise), ctypes.byref(pool), kernels.pointer(out), d)
            taken.append(out)
        found = np.concatenate(taken)
        np.testing.assert_allclose(found, normals[: len(found)], rtol=0, atol=2.0**-30)


# ---- what rounding costs ----


@pytest.mark.parametrize("error", [1e-3, 1e-5])
def test_cells_grown_by_an_error_are_as_likely_as_claimed(error: float) -> None:
    """The claim of sums.c for one coordinate, 2 e / (g - 2 e) + e (|z| + 2 g) / sigma^2, by exact probabilities."""
    sigma, grid = mpmath.mpf(1), mpmath.mpf(1) / 8
    with mpmath.workdps(40):
        for z in np.linspace(-20, 20, 81):
            low = mpmath.floor(z / grid) * grid
            mass = [_mass(low - sign * error, low + grid + sign * error) for sign in (0, 1, -1)]
            bound = 2 * error / (grid - 2 * error) + error * (abs(z) + 2 * grid) / sigma**2
            assert abs(mpmath.log(mass[1] / mass[0])) <= bound
            assert abs(mpmath.log(mass[2] / mass[0])) <= bound


def _mass(low: Any, high: Any) -> Any:
    """Of the standard normal law, from the side where it does not cancel."""
    if low > 0:
        low, high = -high, -low
    return mpmath.ncdf(high) - mpmath.ncdf(low)


def test_the_excess_covers_the_kernels_errors() -> None:
    """The sum over coordinates of the cells' bound at the stated error, with |z| of a long sample, is below tau."""
    sums = Sums(touched=1000, width=20, reach=50.0)
    z = np.abs(np.random.default_rng(0).standard_normal(2 * 20_000))
    error = NORMAL_ERROR + 2.0**-52 * 50.0 / 3.0
    summed = float(np.sum(2 * error / (1 / 16 - 2 * error) + error * (z + 2 / 8)))
    assert summed <= sums.gaussian_excess(3.0, 30.0) <= 1.2 * summed + 100 * error
    drawn = Sums(touched=1000, width=20, reach=50.0, draws=1e9)
    assert drawn.gaussian_excess(3.0, 30.0) >= summed / 2 + 48 * 2.0**-60 * 2e9


def test_arithmetic_costs_little_and_is_paid_for() -> None:
    """The noise is above that of the nominal epsilon, by less than a thousandth in an ordinary run."""
    for algorithm, delta in (("scs13", 0.0), ("scs13", 1e-6), ("dpsgd", 1e-6), ("bst14", 1e-6), ("banco", 0.0)):
        plan = planned(algorithm, "logistic", 50_000, 50, delta, epsilon=1.0)
        leaf = plan.noise.event.to_json()
        while "event" in leaf:
            leaf = leaf["event"]
        unit = plan.lipschitz if algorithm in ("dpsgd", "bst14") else 2 * plan.lipschitz
        assert 1 < plan.noise.scale / (leaf["noise_multiplier"] * unit) < 1.001
        spread = plan.noise.scale * (math.sqrt(51) if delta == 0 else 1.0)
        assert spread / 16 < plan.noise.grid <= spread / 8


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
def test_the_rounding_of_large_sums_is_paid_for(adjacency: str) -> None:
    """Ten million rows in a batch: partial sums round to 2^-53 of themselves, with the differing row and without."""
    n = 10_000_000
    rounding = 2.0**-53 * n**2
    assert rounding > 0.01
    jumps = 2 if adjacency == "replace" else 1
    for algorithm in ("scs13", "dpsgd"):
        plan = planned(algorithm, "hinge", n, 3, adjacency=adjacency, batch_size=n, epochs=1)
        assert plan.sensitivity is not None
        assert plan.sensitivity >= jumps * (1 + rounding)
        exact = Gaussians().multiplier(2.0, 1e-6) * jumps
        assert plan.noise.scale >= exact * (1 + rounding)


def test_samples_hardly_ever_exceed_their_bound() -> None:
    for n, q, times in product((100, 100_000), (0.01, 0.3), (1, 10_000)):
        most = most_of_binomial(n, q, times, 1.0, 1e-6)
        assert most <= n
        assert times * stats.binom.sf(most, n, q) <= 1e-6 * 1e-6 / (1 + math.e)


# ---- calibration ----


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
def test_scs13_composes_passes(adjacency: str) -> None:
    """sigma = 2 L sqrt(k) times the analytic multiplier, or density exp(-epsilon |z| / (2 L k))."""
    jump = 2.0 if adjacency == "replace" else 1.0
    for epochs, bound in product((1, 10), (1.0, 3.0)):
        options: dict[str, Any] = {"epochs": epochs, "feature_bound": bound, "adjacency": adjacency}
        plan = planned("scs13", "hinge", 1000, 5, 1e-5, 0.7, **options)
        wanted = jump * bound * math.sqrt(epochs) * dp_accounting.get_sigma_gaussian(0.7, 1e-5)
        assert plan.noise.scale == pytest.approx(wanted, rel=1e-4)
        assert plan.noise.scale >= wanted
        pure = planned("scs13", "hinge", 1000, 5, 0.0, 0.7, **options)
        assert pure.noise.scale == pytest.approx(jump * bound * epochs / 0.7, rel=1e-4)
        assert pure.noise.scale >= jump * bound * epochs / 0.7


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("n", "b", "epochs"), [(60_000, 50, 10), (500, 500, 3), (1000, 300, 1)])
def test_sampled_noise_costs_no_more_than_epsilon(n: int, b: int, epochs: int, adjacency: str) -> None:
    """By the library's privacy loss distributions, with its own doubling for a replaced row."""
    plan = planned("dpsgd", "logistic", n, 5, 1e-6, 1.0, batch_size=b, epochs=epochs, adjacency=adjacency)
    relation = dp_accounting.NeighboringRelation
    theirs = relation.REPLACE_ONE if adjacency == "replace" else relation.ADD_OR_REMOVE_ONE
    step = dp_accounting.PoissonSampledDpEvent(b / n, dp_accounting.GaussianDpEvent(plan.noise.scale / plan.lipschitz))
    event = dp_accounting.SelfComposedDpEvent(step, -(-n // b) * epochs)
    cost = pld.PLDAccountant(theirs).compose(event).get_epsilon(1e-6)
    assert cost <= 1.0 + 1e-3
    assert cost >= 0.99


def test_a_shuffled_table_is_not_a_sample() -> None:
    """scs13 on the same batches takes many times the noise of dpsgd: its order amplifies nothing."""
    ours, sampled = (planned(name, "logistic", 60_000, 5, 1e-6, 1.0).noise.scale for name in ("scs13", "dpsgd"))
    assert ours > 20 * sampled
    assert ours == pytest.approx(2 * math.sqrt(10) * Gaussians().multiplier(1.0, 1e-6), rel=1e-3)
    assert sampled == pytest.approx(PoissonGaussians(50 / 60_000, 12_000, "replace").multiplier(1.0, 1e-6), rel=1e-3)


def test_bst14_takes_the_papers_steps() -> None:
    """2 R / (G sqrt(t)) on sums, G^2 = d sigma^2 + b^2 L^2; 1 / (gamma t) with a regulariser, within L / lambda."""
    plan = planned("bst14", "logistic", 5000, 7, 1e-6, 1.0, radius=3.0, batch_size=20)
    norm = math.sqrt(7 * plan.noise.scale**2 + 20**2)
    t = np.array([1.0, 4.0, 100.0])
    np.testing.assert_allclose(plan.schedule.step.at(t) / 20, 2 * 3.0 / (norm * np.sqrt(t)))
    strong = planned("bst14", "logistic", 5000, 7, 1e-6, 1.0, **{"lambda": 0.25})
    np.testing.assert_allclose(strong.schedule.step.at(t), 1 / (0.25 * t))
    assert strong.spec.options["radius"] == 4.0


def test_scs13_steps_by_the_root_unless_told() -> None:
    plan = planned("scs13", "logistic", 5000, 7)
    np.testing.assert_allclose(plan.schedule.step.at(np.array([1.0, 4.0, 100.0])), [1.0, 0.5, 0.1])
    assert planned("scs13", "logistic", 5000, 7, **{"lambda": 4.0}).schedule.step.first == 0.25
    assert planned("scs13", "logistic", 5000, 7, step=0.3).schedule.step.first == 0.3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"algorithm": "dpsgd", "delta": 0.0}, "private for delta above 0 only"),
        ({"algorithm": "bst14", "delta": 0.0}, "private for delta above 0 only"),
        ({"algorithm": "dpsgd", "workers": 2}, 'unknown option "workers"'),
        ({"algorithm": "bst14", "step": 0.1}, 'unknown option "step"'),
        ({"algorithm": "banco", "epochs": 2}, 'unknown option "epochs"'),
        ({"algorithm": "banco", "lambda": 0.1}, 'unknown option "lambda"'),
        ({"algorithm": "scs13", "tolerance": 0.1}, 'unknown option "tolerance"'),
        ({"algorithm": "scs13", "epsilon": 1e-14}, "double precision cannot give"),
        ({"algorithm": "scs13", "epsilon": 1e15, "batch_size": 1000}, "double precision cannot give"),
        ({"algorithm": "dpsgd", "batch_size": 2000}, "larger than the table"),
        ({"algorithm": "scs13", "epsilon": None}, "needs an epsilon"),
    ],
)
def test_refuses_what_it_cannot_promise(what: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        explain(**{"n": 1000, "d": 5, "epsilon": 1.0, "delta": 1e-6, **what})


def test_a_long_run_of_small_noise_learns(db: Database, table: Any) -> None:
    """At a generous epsilon every algorithm separates two classes."""
    x, y = two_classes(20_000, 5)
    rows = table(x, y)
    for algorithm in NOISY:
        options = {} if algorithm == "banco" else {"epochs": 3}
        model = db.train(rows.name, model=algorithm, epsilon=8, delta=1e-6, algorithm=algorithm, **options)
        assert model.trust == "central"
        assert model.score(x, y) > 0.8, algorithm
