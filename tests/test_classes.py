"""Many classes: C against NumPy, minima against scikit-learn, constants, one release for all classes, and its noise."""

from __future__ import annotations

import ctypes
import json
import math
from typing import Any

import kernels
import numpy as np
import pytest
from kernels import library, pointer
from scipy import optimize, special, stats
from sklearn.linear_model import LogisticRegression
from statistics_of import LEVEL

import bismarck_dp
from bismarck_dp import BismarckError, Plan, Spec, make_plan, reference
from bismarck_dp.controller.database import Database
from bismarck_dp.losses import LOSSES, ovr_slopes, softmax_slopes
from bismarck_dp.recordplay import samples

SEED = 11
KINDS = [("logistic", "softmax"), ("logistic", "ovr"), ("huber", "ovr"), ("hinge", "ovr")]


def planned(algorithm: str, loss: str, kind: str, n: int, d: int, k: int, **options: Any) -> Plan:
    epsilon, delta = (None, 0.0) if algorithm == "sgd" else (2.0, options.pop("delta", 1e-6))
    options = {"classes": k, "multiclass": kind, **options}
    return make_plan(Spec.create(algorithm, loss, epsilon, delta, options), n, d)


def rows_of(n: int, d: int, k: int, seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) / 2
    return x, (x @ rng.normal(size=(d, k)) + 0.2 * rng.gumbel(size=(n, k))).argmax(axis=1).astype(float)


# ---- the functions ----


def test_margins_are_the_dot_products_bit_for_bit() -> None:
    library.dp_dot.restype = ctypes.c_double
    rng = np.random.default_rng(0)
    for d in (1, 7, 8, 50, 131):
        for k in (1, 2, 3, 4, 5, 10, 17):
            w, x, z = rng.normal(size=(k, d)), rng.normal(size=d).astype(np.float32), np.empty(k)
            library.dp_margins(pointer(w), pointer(x), d, k, pointer(z))
            one_by_one = [library.dp_dot(pointer(np.ascontiguousarray(row)), pointer(x), d) for row in w]
            assert z.tolist() == one_by_one


def softmax(z: Any) -> tuple[bool, Any, float]:
    library.dp_softmax.restype = ctypes.c_bool
    margins, p, log_sum = np.array(z, dtype=np.float64), np.empty(len(z)), ctypes.c_double()
    good = library.dp_softmax(pointer(margins), pointer(p), len(margins), ctypes.byref(log_sum))
    return bool(good), p, log_sum.value


def test_softmax_is_scipys_within_what_the_rounding_bound_allows() -> None:
    rng = np.random.default_rng(1)
    for scale in (1e-3, 1.0, 30.0, 1e5):
        z = rng.normal(size=10) * scale
        good, p, log_sum = softmax(z)
        assert good
        np.testing.assert_allclose(p, special.softmax(z), rtol=0, atol=2.1e-12 + 13 * 2.0**-53)
        assert log_sum == pytest.approx(special.logsumexp(z), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_softmax_has_no_probabilities_beyond_all_numbers(bad: float) -> None:
    assert not softmax([0.0, bad, 1.0])[0]
    assert not softmax([bad, bad])[0]


def test_slopes_have_their_constants() -> None:
    """|p - e_y| <= sqrt 2 and the Hessian at most 1/2, both attained; the slopes are the derivative of the loss."""
    rng = np.random.default_rng(2)
    norms, curvatures = [], []
    for scale in (0.0, 1.0, 5.0, 50.0):
        z = rng.normal(size=(500, 4)) * scale
        y = rng.integers(4, size=500).astype(float)
        norms.append(np.linalg.norm(softmax_slopes(z, y), axis=1).max())
        p = special.softmax(z, axis=1)
        hessians = p[:, :, None] * np.eye(4) - p[:, :, None] * p[:, None, :]
        curvatures.append(np.linalg.eigvalsh(hessians).max())
    assert max(norms) <= math.sqrt(2) * (1 + 1e-12)
    assert max(norms) > 0.999 * math.sqrt(2)
    assert 0.49 < max(*curvatures, np.linalg.eigvalsh(np.array([[0.25, -0.25], [-0.25, 0.25]])).max()) <= 0.5 + 1e-12
    z0, y0 = rng.normal(size=4), np.array([2.0])
    numeric = optimize.approx_fprime(z0, lambda z: float(special.logsumexp(z) - z[2]), 1e-7)
    np.testing.assert_allclose(softmax_slopes(z0[None], y0)[0], numeric, atol=1e-6)
    for loss in ("logistic", "huber", "hinge"):
        slopes = ovr_slopes(LOSSES[loss], rng.normal(size=(500, 4)) * 3, rng.integers(4, size=500).astype(float), 0.1)
        assert np.linalg.norm(slopes, axis=1).max() <= 2.0


def test_lipschitz_and_smoothness_of_plans() -> None:
    joint = planned("bolton", "logistic", "softmax", 100, 3, 10, feature_bound=2.0)
    rest = planned("bolton", "logistic", "ovr", 100, 3, 10, feature_bound=2.0)
    assert joint.lipschitz == pytest.approx(2 * math.sqrt(2))
    assert joint.smoothness == pytest.approx(4 / 2)
    assert rest.lipschitz == pytest.approx(2 * math.sqrt(10))
    assert rest.smoothness == pytest.approx(4 / 4)
    two = make_plan(Spec.create("bolton", "logistic", 2.0, 1e-6, {"feature_bound": 2.0, "step": 0.01}), 100, 3)
    ten = planned("bolton", "logistic", "ovr", 100, 3, 10, feature_bound=2.0, step=0.01)
    assert two.sensitivity is not None
    assert ten.sensitivity == pytest.approx(math.sqrt(10) * two.sensitivity, rel=1e-5)
    assert ten.width == 30


# ---- C against NumPy ----

OPTIONS: list[dict[str, Any]] = [
    {"step": 0.3, "batch_size": 1},
    {"lambda": 0.05, "batch_size": 10, "average": "all", "workers": 3},
    {"step": "sqrt", "average": "suffix", "radius": 0.4, "feature_bound": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("loss", "kind"), KINDS)
def test_sgd_agrees_with_numpy(loss: str, kind: str, options: dict[str, Any]) -> None:
    for d, k in ((1, 2), (10, 3), (41, 11)):
        plan = planned("sgd", loss, kind, 53, d, k, epochs=3, **options)
        rows = kernels.packed(rows_of(53, d, k), plan)
        found = kernels.train(rows, plan.kernel_params(), 3)
        np.testing.assert_allclose(found, reference.train(rows[:, 1:], rows[:, 0], plan), rtol=0, atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize(("loss", "kind"), KINDS)
def test_noise_on_sums_agrees_with_numpy(loss: str, kind: str, delta: float, clip: float | None) -> None:
    for d, k in ((1, 2), (10, 3), (41, 11)):
        plan = planned("scs13", loss, kind, 53, d, k, delta=delta, epochs=3, clip=clip, batch_size=7)
        rows = kernels.packed(rows_of(53, d, k), plan)
        found = kernels.train(rows, plan.kernel_params(), 3, seed=SEED)
        noise = reference.seeded_noise(plan, SEED)
        np.testing.assert_allclose(
            found, reference.train(rows[:, 1:], rows[:, 0], plan, noise=noise), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("algorithm", ["dpsgd", "bst14"])
def test_samples_agree_with_numpy(algorithm: str) -> None:
    plan = planned(algorithm, "logistic", "softmax", 53, 5, 4, epochs=3, batch_size=7, clip=0.4)
    rows, rng = kernels.packed(rows_of(53, 5, 4), plan), np.random.default_rng(0)
    orders: list[Any] = [samples(plan, rng) for _ in range(3)]
    found = kernels.train(rows, plan.kernel_params(), 3, orders=orders, seed=SEED)
    expected = reference.train(rows[:, 1:], rows[:, 0], plan, orders, reference.seeded_noise(plan, SEED))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("loss", "kind"), KINDS)
def test_no_weights_make_a_gradient_longer_than_the_noise_covers(loss: str, kind: str) -> None:
    """Weights beyond all numbers, which noise and long steps may lead to: gradients are numbers within their bound."""
    for clip in (None, 0.25):
        plan = planned("scs13", loss, kind, 1, 3, 4, epochs=1, batch_size=1, step=1.0, clip=clip)
        for size in (0.0, 1.0, 1e150, 1e300, math.inf, math.nan):
            row = np.array([[2.0, 0.6, 0.0, 0.8]], dtype=np.float32)
            run = kernels.Run(plan.kernel_params(), 3, seed=SEED)
            vectors = np.frombuffer(run.state, offset=run.solver.size(0), dtype=np.float64)
            before = np.random.default_rng(0).choice([-size, size], size=12)
            vectors[:12] = before
            assert run.solver.begin_pass(run.state, 0)
            run.solver.take(run.state, pointer(row), None)
            gradient = vectors[12:24]
            assert np.isfinite(gradient).all()
            assert np.linalg.norm(gradient) <= plan.lipschitz * (1 + 1e-6)


def test_the_jump_of_a_replaced_row_is_attained() -> None:
    """At weights that are sure and wrong, nearly opposite rows are nearly 2 sqrt 2 apart: nothing less would do."""
    plan = planned("scs13", "logistic", "softmax", 4, 2, 3)
    w = np.array([[0.0, 1e6], [0.0, 0.0], [0.0, 0.0]]).reshape(-1)
    there, back = (
        reference.gradient_of(np.array([[side, 0.01]], np.float32), np.array([1], np.float32), [0], w, plan)
        for side in (0.9999, -0.9999)
    )
    assert plan.sensitivity is not None
    assert 0.999 * plan.sensitivity < np.linalg.norm(there - back) <= plan.sensitivity


# ---- in the server ----


def in_server(db: Database, table: str, **options: Any) -> Any:
    with db.engine.begin() as connection:
        row = connection.exec_driver_sql(
            "SELECT pg_catalog.to_jsonb(m)::text FROM dp_train(%(t)s::regclass, %(m)s, 'y', '{x}', NULL, algorithm =>"
            " 'sgd', loss => %(l)s, options => %(o)s::jsonb) AS m",
            {"t": table, "m": f"m_{table}", "l": options.pop("loss", "logistic"), "o": json.dumps(options)},
        ).one()
        connection.exec_driver_sql("DELETE FROM bismarck_dp.model")
    return bismarck_dp.Model.from_row(json.loads(row[0]))


@pytest.mark.parametrize(("loss", "kind"), KINDS)
def test_weights_in_the_server_equal_numpys(db: Database, table: Any, loss: str, kind: str) -> None:
    x, y = rows_of(157, 6, 4)
    rows = table(x, y, "float8")
    for options in ({"lambda": 0.05, "workers": 3}, {"step": 0.2, "fit_intercept": True, "average": "all"}):
        model = in_server(db, rows.name, loss=loss, multiclass=kind, epochs=2, seed=SEED, **options)
        plan = planned("sgd", loss, kind, 157, 6, 4, epochs=2, **options)
        order = reference.order(SEED, 157)
        expected = reference.train(*reference.pack(x, y, plan), plan, [order, order])
        np.testing.assert_allclose(model.matrix().reshape(-1), expected, rtol=0, atol=1e-9)
        assert model.classes.tolist() == [0, 1, 2, 3]
        assert model.multiclass == kind
        assert len(model.intercept) == (4 if "fit_intercept" in options else 0)


@pytest.mark.parametrize("algorithm", ["scs13", "dpsgd"])
def test_noisy_sums_in_the_server_equal_numpys(db: Database, table: Any, algorithm: str) -> None:
    x, y = rows_of(157, 6, 4)
    options = {"epochs": 2, "batch_size": 20, "step": 0.5}
    model = db.train(
        table(x, y, "float8").name, algorithm=algorithm, epsilon=2.0, delta=1e-6, seed=SEED, classes=4, **options
    )
    plan = planned(algorithm, "logistic", "softmax", 157, 6, 4, **options)
    order = reference.order(SEED, 157)
    orders: list[Any] = [order, order]
    if algorithm == "dpsgd":
        orders = [[order[slots] for slots in reference.samples(SEED, plan, j)] for j in range(2)]
    expected = reference.train(*reference.pack(x, y, plan), plan, orders, reference.seeded_noise(plan, SEED))
    np.testing.assert_allclose(model.weights, expected, rtol=1e-9, atol=1e-9)


def test_one_against_the_rest_is_k_trainings_in_one_pass(db: Database, table: Any) -> None:
    x, y = rows_of(300, 5, 3)
    rows = table(x, y)
    joint = in_server(db, rows.name, loss="huber", epochs=3, seed=SEED, **{"lambda": 0.02})
    for c in range(3):
        single = table(x, (y == c).astype(float))
        alone = in_server(db, single.name, loss="huber", epochs=3, seed=SEED, **{"lambda": 0.02})
        np.testing.assert_array_equal(joint.weights.reshape(3, 5)[c], alone.weights)


def test_the_minimum_is_scikit_learns(db: Database, table: Any) -> None:
    x, y = rows_of(400, 4, 5)
    bound, strength = float(np.linalg.norm(x, axis=1).max()), 0.05
    step = 1 / (bound**2 / 2 + strength)
    options = {"feature_bound": bound, "lambda": strength, "epochs": 2000, "batch_size": 400, "step": step}
    model = in_server(db, table(x, y, "float8").name, **options)
    wanted = LogisticRegression(C=1 / (400 * strength), fit_intercept=False, tol=1e-10, max_iter=5000).fit(x, y)
    np.testing.assert_allclose(model.weights.reshape(5, 4), wanted.coef_, atol=1e-5)
    assert (model.predict(x) == wanted.predict(x)).mean() > 0.999
    np.testing.assert_allclose(model.predict_proba(x), wanted.predict_proba(x), atol=1e-5)


def test_labels_may_be_any_numbers(db: Database, table: Any) -> None:
    x, y = rows_of(300, 4, 3)
    names = np.array([7.5, -2.0, 100.0])
    plain = in_server(db, table(x, y).name, seed=SEED, classes=3)
    named = in_server(db, table(x, names[y.astype(int)]).name, seed=SEED, classes=names.tolist())
    np.testing.assert_array_equal(plain.weights, named.weights)
    np.testing.assert_array_equal(names[plain.predict(x).astype(int)], named.predict(x))


def test_rows_without_a_class_count_for_nothing_and_keep_their_slot(db: Database, table: Any) -> None:
    x, y = rows_of(300, 4, 3)
    y[::10] = 17.0
    x[1::10] = np.nan
    got = in_server(db, table(x, y, "float8").name, seed=SEED, classes=3, epochs=2, batch_size=7)
    plan = planned("sgd", "logistic", "softmax", 300, 4, 3, epochs=2, batch_size=7)
    order = reference.order(SEED, 300)
    features, labels = reference.pack(x, y, plan)
    assert not features[::10].any()
    np.testing.assert_allclose(got.weights, reference.train(features, labels, plan, [order, order]), atol=1e-9)


# ---- how many classes there are ----


def found_classes(db: Database, table: Any, y: Any, **options: Any) -> list[float]:
    rows = table(np.ones((len(y), 2)), np.asarray(y, dtype=float))
    return list(db.train(rows.name, epsilon=None, algorithm="sgd", **options).classes)


def test_classes_are_found_by_looking(db: Database, table: Any) -> None:
    rng = np.random.default_rng(0)
    assert found_classes(db, table, rng.integers(3, size=100)) == [0, 1, 2]
    assert found_classes(db, table, rng.integers(2, size=100)) == [0, 1]
    assert found_classes(db, table, [0, 1] * 50 + [2] * 4) == [0, 1], "a few labels make no class"
    assert found_classes(db, table, [0, 1] * 50 + [2] * 5) == [0, 1, 2]
    assert found_classes(db, table, [0, 1, 2] * 2000 + [3] * 7) == [0, 1, 2, 3], "one in a thousand does"
    assert found_classes(db, table, [0, 1, 2] * 2000 + [3] * 6) == [0, 1, 2]
    assert found_classes(db, table, [0, 1] * 100 + [999] * 9) == [0, 1], "and none behind a gap"
    assert found_classes(db, table, [-1, 1] * 50) == [-1, 1]
    assert found_classes(db, table, [0, 1, 2] * 30, classes=5) == [0, 1, 2, 3, 4]


def test_a_model_says_that_its_classes_were_found_by_looking(db: Database, table: Any) -> None:
    x, y = rows_of(300, 4, 3)
    rows = table(x, y)
    with pytest.warns(UserWarning, match="number of classes was found by counting labels"):
        found = db.train(rows.name, epsilon=1.0)
    assert "is not protected" in found.note
    assert db.train(rows.name, epsilon=1.0, classes=3).note == ""


def test_labels_that_are_no_classes_are_refused(db: Database, table: Any) -> None:
    with pytest.raises(BismarckError, match="other values than"):
        found_classes(db, table, np.random.default_rng(0).normal(size=100))
    with pytest.raises(BismarckError, match="other values than"):
        found_classes(db, table, [0, 1, 2] * 30 + [0.5] * 30)


def test_explain_counts_classes(db: Database, table: Any) -> None:
    x, y = rows_of(300, 4, 6)
    plan = db.explain(table(x, y).name, epsilon=1.0)
    assert (plan["classes"], plan["multiclass"]) == (6, "softmax")
    assert plan == bismarck_dp.explain(n=300, d=4, epsilon=1.0, classes=6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"loss": "huber", "multiclass": "softmax", "classes": 3}, "logistic loss of many classes"),
        ({"multiclass": "ovr"}, "multiclass needs the classes"),
        ({"loss": "squared", "multiclass": "ovr"}, "has no classes"),
        ({"algorithm": "dpcd", "delta": 1e-6, "classes": 3}, '"dpcd" tells two classes apart'),
        ({"algorithm": "dpscd", "delta": 1e-6, "lambda": 1, "classes": 3}, '"dpscd" tells two classes apart'),
        ({"algorithm": "banco", "classes": 3}, '"banco" tells two classes apart'),
        ({"classes": 1}, "classes is 1"),
        ({"classes": 1001}, "classes is 1001"),
        ({"classes": [1, 2, 1]}, "classes is"),
        ({"classes": "three"}, "classes is"),
        ({"multiclass": "all"}, 'unknown multiclass "all"'),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError) as refusal:
        bismarck_dp.explain(n=100, d=3, epsilon=1.0, **spec)
    assert message in str(refusal.value)
    assert refusal.value.hint


# ---- the noise of a release ----


@pytest.mark.parametrize("kind", ["softmax", "ovr"])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_a_release_of_many_classes_has_one_noise(db: Database, table: Any, kind: str, delta: float) -> None:
    """Rows that count for nothing leave noise alone: one vector for all classes, at the scale of the joint claim."""
    rows = table(np.full((20, 3), np.nan), np.zeros(20), "float8")
    options = {"classes": 4, "multiclass": kind, "lambda": 0.5, "epochs": 1}
    models = [db.train(rows.name, epsilon=1.0, delta=delta, **options) for _ in range(150)]
    plan = make_plan(Spec.create("bolton", "logistic", 1.0, delta, options), 20, 3)
    draws = np.array([model.weights for model in models])
    assert draws.shape == (150, 12)
    assert {model.noise_scale for model in models} == {plan.noise.scale}
    if delta == 0:
        law = stats.gamma(12, scale=plan.noise.scale)
        assert stats.kstest(np.linalg.norm(draws, axis=1), law.cdf).pvalue > LEVEL
    else:
        assert stats.kstest(draws.reshape(-1) / plan.noise.scale, stats.norm.cdf).pvalue > LEVEL
        squares = (draws**2).sum(axis=1) / plan.noise.scale**2
        assert stats.kstest(squares, stats.chi2(12).cdf).pvalue > LEVEL
