"""What becomes of rows before training: projection, categories, bounds by column, and bounds measured privately."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import dp_accounting
import kernels
import numpy as np
import pytest
from conftest import two_classes
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import library, pointer
from scipy import stats
from statistics_of import LEVEL

import bismarck_dp
from bismarck_dp import BismarckError, Spec, make_plan, reference, scaling
from bismarck_dp.accounting import Event, epsilon_of
from bismarck_dp.controller.database import Database

SEED = 11

# ---- projection ----


def matrix_in_c(seed: int, p: int, d: int) -> Any:
    matrix = np.empty((p, d))
    library.dp_projection(kernels.ctypes.c_int64(seed), pointer(matrix), p, d)
    return matrix


@pytest.mark.parametrize(("seed", "p", "d"), [(0, 1, 1), (5, 3, 7), (2**52, 50, 784), (17, 4, 5)])
def test_the_matrix_of_a_seed_is_numpys(seed: int, p: int, d: int) -> None:
    np.testing.assert_allclose(matrix_in_c(seed, p, d), reference.projection(seed, p, d), rtol=0, atol=1e-12)


def test_the_matrix_is_gaussian_and_keeps_lengths_on_average() -> None:
    numbers = np.concatenate([matrix_in_c(seed, 50, 400).reshape(-1) for seed in range(5)]) * math.sqrt(50)
    assert stats.kstest(numbers, stats.norm.cdf).pvalue > LEVEL
    assert not np.array_equal(matrix_in_c(1, 3, 4), matrix_in_c(2, 3, 4))
    x = np.random.default_rng(0).normal(size=400)
    lengths = [np.linalg.norm(matrix_in_c(seed, 50, 400) @ x) for seed in range(200)]
    assert np.mean(lengths) == pytest.approx(np.linalg.norm(x), rel=0.05)


numbers = st.floats(width=64, allow_nan=True, allow_infinity=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(numbers, min_size=4, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_projected_rows_keep_their_bound(values: list[float], intercept: bool, normalize: bool, scaled: bool) -> None:
    """Any row at all: clipped after it was projected, as NumPy does it, and never half-counted."""
    matrix, scale = matrix_in_c(3, 2, 4), 0.5 if scaled else None
    good, out = kernels.clip_row(np.array(values), intercept, 1.0, scale, normalize, matrix)
    assert good == bool(np.isfinite(values).all())
    assert np.isfinite(out).all()
    assert np.linalg.norm(out.astype(np.float64)) <= 1 + 1e-12
    expected = reference.clip_rows([values], 1.0, intercept, scale, normalize, matrix)[0]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_projected_training_equals_numpys(db: Database, table: Any) -> None:
    x, y = two_classes(157, 12)
    rows, order = table(x, y), reference.order(SEED, 157)
    for options in ({}, {"fit_intercept": True, "normalize": True, "scale": 0.7}):
        asked = {"project_dim": 5, "project_seed": 99, "lambda": 0.05, "epochs": 2, **options}
        model = db.train(rows.name, algorithm="sgd", seed=SEED, **asked)
        plan = make_plan(Spec.create("sgd", "logistic", None, 0, asked), 157, 12)
        expected = reference.train(*reference.pack(x, y, plan), plan, [order, order])
        np.testing.assert_allclose(model.matrix().reshape(-1), expected, rtol=0, atol=1e-7)
        assert (model.d, model.project_dim, model.project_seed, model.weights.shape) == (12, 5, 99, (5,))


def test_predictions_project_by_themselves(db: Database, table: Any, sql: Any) -> None:
    x, y = two_classes(300, 12)
    rows = table(x, y)
    model = db.train(rows.name, epsilon=5.0, project_dim=6, **{"lambda": 0.05})
    found = sql(f"SELECT dp_predict('{model.name}', x) AS p FROM {rows.name} ORDER BY id")
    np.testing.assert_array_equal([row["p"] for row in found], model.predict(x))


def test_a_projection_is_drawn_anew_and_stored(db: Database, table: Any) -> None:
    rows = table(*two_classes(100, 5))
    seeds = {db.train(rows.name, epsilon=1.0, project_dim=2).project_seed for _ in range(5)}
    assert len(seeds) == 5
    assert None not in seeds


def test_columns_are_projected_too(db: Database, table: Any) -> None:
    """cd reads columns of projected rows, and its support counts those."""
    x, y = two_classes(200, 8)
    model = db.train(table(x, y).name, algorithm="cd", project_dim=3, project_seed=1, iterations=200)
    packed = reference.clip_rows(x, 1.0, matrix=reference.projection(1, 3, 8))
    loss = np.logaddexp(0, -y * (packed.astype(np.float64) @ model.weights)).mean()
    assert loss < math.log(2)
    assert model.support is not None
    assert set(model.support) <= {0, 1, 2}


def test_a_matrix_that_does_not_fit_memory_is_refused(db: Database, table: Any, sql: Any) -> None:
    rows = table(np.ones((10, 400)), np.ones(10))
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET maintenance_work_mem = '1MB'")
        with pytest.raises(Exception, match="a projection of 400 features to 390 keeps a matrix, 2 MB"):
            connection.exec_driver_sql(
                f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 1, options => '{{\"project_dim\": 390}}')"
            )


def test_counts_that_do_not_fit_memory_are_refused(db: Database, table: Any) -> None:
    rows = table(np.ones((10, 2000)), np.ones(10))
    options = '{"scale": "quantile", "scale_range": [1e-15, 1e15]}'
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET maintenance_work_mem = '1MB'")
        with pytest.raises(Exception, match="measuring bounds of 2000 features takes 2 MB"):
            connection.exec_driver_sql(f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 1, options => '{options}')")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"project_dim": 4}, "project_dim is 4, and the rows have 3 features"),
        ({"project_dim": 0}, "project_dim is 0"),
        ({"project_dim": 1.5}, "project_dim is 1.5"),
        ({"project_seed": -1}, "project_seed is -1"),
        ({"scale": [1, 2]}, "scale has 2 numbers for 3 features"),
        ({"scale": "max"}, 'unknown scale "max"'),
        ({"scale": {"a": 1}}, "scale names columns"),
        ({"scale": {}}, "scale is"),
        ({"scale": {"a": 0}}, 'scale of column "a" is 0'),
        ({"scale": "quantile", "scale_range": [1.1, 1.9]}, "no power of two from 1.1 to 1.9"),
        ({"scale": "quantile", "scale_range": [2, 1]}, "scale_range is"),
        ({"scale": "quantile", "quantile": 1.5}, "quantile is 1.5"),
        ({"scale": "quantile", "private_scale": 1}, "private_scale is 1"),
        ({"categories": []}, "categories is"),
        ({"categories": {"a": []}}, 'categories of column "a" is'),
        ({"categories": {"a": ["x", 1]}}, 'categories of column "a" is'),
        ({"categories": {"a": ["x", "x"]}}, "has a value twice"),
        ({"categories": {"a": [1, 1.0]}}, "has a value twice"),
    ],
    ids=str,
)
def test_bad_preparation_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError) as refusal:
        bismarck_dp.explain(n=100, d=3, epsilon=1.0, **options)
    assert message in str(refusal.value)
    assert refusal.value.hint


# ---- categories ----


@pytest.fixture
def people(sql: Any) -> Any:
    sql("CREATE TYPE mood AS ENUM ('good', 'bad', 'so-so')")
    sql(
        "CREATE TABLE people (id int, y int, age float8, colour text, kind varchar(9), padded char(6), feeling mood,"
        " rooms int, price numeric, owner boolean, born date)"
    )
    rng = np.random.default_rng(1)
    words = np.array(["red", "green", "blue", None], dtype=object)
    for i in range(120):
        row = {"id": i, "y": int(rng.integers(2)), "age": float(rng.random()), "colour": words[rng.integers(4)]}
        row |= {"kind": words[rng.integers(4)], "padded": words[rng.integers(4)], "price": float(rng.integers(3)) / 2}
        row |= {"feeling": ["good", "bad", None][rng.integers(3)], "rooms": int(rng.integers(4))}
        row |= {"owner": bool(rng.integers(2)), "born": "2000-01-01"}
        names = ", ".join(row)
        sql(f"INSERT INTO people ({names}) VALUES ({', '.join(':' + name for name in row)})", **row)
    yield
    sql("DROP TABLE people")
    sql("DROP TYPE mood")


CATEGORIES = {
    "colour": ["red", "green"],
    "kind": ["blue", "red", "black"],
    "padded": ["red"],
    "feeling": ["good", "so-so"],
    "rooms": [0, 3, 7],
    "price": [0.5],
    "owner": [True],
}


def test_categories_are_zeros_and_ones(db: Database, people: Any, sql: Any, table: Any) -> None:
    """The same bits as a training on an array of zeros and ones made by hand; unknown values and NULL are zeros."""
    columns = ["age", *CATEGORIES]
    model = db.train("people", label="y", features=columns, algorithm="sgd", seed=SEED, categories=CATEGORIES, epochs=2)
    rows = [dict(row) for row in sql("SELECT * FROM people ORDER BY ctid")]  # as they lie, which the order starts from
    coded = [
        [row["age"]]
        + [
            float((row[name].rstrip() if isinstance(row[name], str) else row[name]) == value)
            for name, values in CATEGORIES.items()
            for value in values
        ]
        for row in rows
    ]
    plain = db.train(table(coded, [row["y"] for row in rows], "float8").name, algorithm="sgd", seed=SEED, epochs=2)
    np.testing.assert_array_equal(model.weights, plain.weights)
    assert model.d == 14
    assert model.features == columns
    trimmed = [{**row, "padded": row["padded"] and row["padded"].rstrip()} for row in rows]
    np.testing.assert_array_equal(model.encode(trimmed), coded)
    np.testing.assert_array_equal(model.predict(model.encode(trimmed)), plain.predict(coded))


def test_a_single_column_of_categories(db: Database, people: Any) -> None:
    assert db.train("people", features="colour", algorithm="sgd", categories={"colour": ["red", "blue"]}).d == 2


def test_bounds_by_column(db: Database, people: Any) -> None:
    asked = {"features": ["age", "colour", "price"], "algorithm": "sgd", "categories": {"colour": ["red", "blue"]}}
    model = db.train("people", **asked, scale={"age": 2, "price": 4}, seed=SEED)
    assert model.scale is not None
    assert model.scale.tolist() == [2, 1, 1, 4]
    same = db.train("people", **asked, scale=[2, 1, 1, 4], seed=SEED)
    np.testing.assert_array_equal(model.weights, same.weights)


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        (["age", "colour"], {}, 'column "colour" has type text'),
        (["age"], {"categories": {"color": ["red"]}}, 'unknown column in categories "color"'),
        (["age", "born"], {"categories": {"born": ["x"]}}, "which cannot have categories"),
        (["age", "colour"], {"categories": {"colour": [1, 2]}}, "its categories are not all words"),
        (["age", "rooms"], {"categories": {"rooms": ["1"]}}, "its categories are not all numbers"),
        (["age", "price"], {"scale": {"age": 1}}, 'scale has no bound for column "price"'),
        (["age"], {"scale": {"ages": 1}}, 'unknown column in scale "ages"'),
        (
            ["age", "colour"],
            {"scale": {"age": 1, "colour": 1}, "categories": {"colour": ["red"]}},
            'unknown column in scale "colour"',
        ),
    ],
    ids=str,
)
def test_columns_that_do_not_fit_are_refused(
    db: Database, people: Any, features: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BismarckError) as refusal:
        db.train("people", features=features, epsilon=1.0, **options)
    assert message in str(refusal.value)


# ---- bounds measured privately ----


def law(x: Any, rank: int, first: int, last: int, e: float) -> Any:
    """The probabilities of the candidates, from the formula."""
    candidates = 2.0 ** np.arange(first, last + 1)
    scores = -np.abs((np.abs(x)[:, None] <= candidates).sum(axis=0) - rank)
    weights = np.exp(e * scores / 2 - math.log(2) * np.arange(len(candidates)))
    return weights / weights.sum()


def chosen(db: Database, table: str, params: dict[str, Any]) -> list[float]:
    with db.engine.begin() as connection:
        found = connection.exec_driver_sql(
            "SELECT bismarck_dp.bounds(%(t)s::regclass, 'y', '{x}', %(p)s::jsonb)",
            {"t": table, "p": json.dumps(params)},
        ).scalar_one()
    return list(found)


def params_of(n: int, d: int, epsilon: float | None, **options: Any) -> dict[str, Any]:
    spec = Spec.create("bolton" if epsilon else "sgd", "logistic", epsilon, 0, {"scale": "quantile", **options})
    return scaling.measure_params(make_plan(spec, n, d))


COPIES = 3000


@pytest.mark.parametrize("shift", [0.0, 1e9])
def test_choices_follow_the_exponential_mechanism(db: Database, table: Any, shift: float) -> None:
    """As many copies of one feature as choices are wanted; and neighbours' laws, so found, obey the claim."""
    column = np.append(np.geomspace(0.01, 50, 39), shift)
    rows = table(np.repeat(column[:, None], COPIES, axis=1), np.ones(40), "float8")
    params = params_of(40, COPIES, 0.4 * COPIES * 10, quantile=0.6, scale_range=[0.5, 64])
    e = params["numerator"] / scaling.EXPONENTS
    assert e == pytest.approx(0.4, rel=1e-5)
    found = Counter(chosen(db, rows.name, params))
    expected = law(column, 24, -1, 6, e) * COPIES
    counts = np.array([found.pop(2.0**k, 0) for k in range(-1, 7)])
    assert not found
    assert stats.chisquare(counts, expected).pvalue > LEVEL


def test_neighbours_choices_obey_the_claim() -> None:
    """Over adversarial rows: no probability moves by more than e^e, and some by nearly as much."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for e in (0.1, 1.0):
        for _ in range(300):
            x = np.exp(rng.normal(size=20) * 3)
            rank = int(rng.integers(1, 21))
            there, back = (law(np.append(x, row), rank, -6, 6, e) for row in (1e-9, 1e9))
            ratio = np.abs(np.log(there / back)).max() / e
            assert ratio <= 1 + 1e-9
            worst = max(worst, ratio)
    assert worst > 0.7


def test_attackers_of_bounds_do_not_beat_epsilon(db: Database, table: Any) -> None:
    """One row near the rank moves the choice: its odds, over thousands of choices of the server, within e^e, and not
    far within.
    """
    base = np.append(np.full(9, 0.9), np.full(2, 1.9))
    e, found = 1.0, []
    for row in (0.1, 3.9):
        column = np.append(base, row)
        rows = table(np.repeat(column[:, None], COPIES, axis=1), np.ones(12), "float8")
        params = params_of(12, COPIES, e * COPIES * 10, quantile=0.9, scale_range=[1, 4])
        found.append(sum(bound == 1.0 for bound in chosen(db, rows.name, params)))
    low, high = (stats.binomtest(k, COPIES).proportion_ci(0.999, "exact") for k in found)
    assert math.log(low.low / high.high) <= e
    assert math.log(low.high / high.low) > 0.3, "the attack sees the row"


def test_without_privacy_the_best_bound_is_taken(db: Database, table: Any) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(500, 6)) * 10.0 ** np.arange(-2, 4)
    bounds = chosen(db, table(x, np.ones(500), "float8").name, params_of(500, 6, None))
    candidates = 2.0 ** np.arange(-10, 21)
    scores = -np.abs((np.abs(x)[:, :, None] <= candidates).sum(axis=0) - 475)
    assert bounds == candidates[scores.argmax(axis=1)].tolist()


def test_candidates_are_counted_to_the_bit(db: Database, table: Any) -> None:
    """A power of two is its own bound; zero has the smallest; what is beyond all has none; bad rows do not count."""
    params = {**params_of(4, 1, None, scale_range=[0.25, 4]), "rank": 4}
    for value, bound in [(1.0, 1.0), (np.nextafter(1, 2), 2.0), (-2.0, 2.0), (0.0, 0.25), (1e-300, 0.25), (4.0, 4.0)]:
        assert chosen(db, table(np.full((4, 1), value), np.ones(4), "float8").name, params) == [bound]
    for value in (4.1, np.inf, np.nan):
        assert chosen(db, table(np.full((4, 1), value), np.ones(4), "float8").name, params) == [0.25], "a tie"


def test_an_epsilon_that_tells_nothing_is_warned_of() -> None:
    few, many = (bismarck_dp.explain(n=n, d=5, epsilon=1.0, scale="quantile") for n in (500, 50_000))
    assert "tells little of 500 rows" in few["note"]
    assert many["note"] == ""


def test_bounds_are_paid_for() -> None:
    options = {"scale": "quantile", "private_scale": 0.25, "lambda": 0.1, "epochs": 2}
    for algorithm, delta in (("bolton", 0.0), ("bolton", 1e-6), ("scs13", 1e-6), ("dpsgd", 1e-6), ("dpgcd", 1e-6)):
        taken = {name: value for name, value in options.items() if name != "epochs" or algorithm != "dpgcd"}
        plan = make_plan(Spec.create(algorithm, "logistic", 2.0, delta, taken), 1000, 7)
        alone = {name: value for name, value in taken.items() if "scale" not in name}
        less = make_plan(Spec.create(algorithm, "logistic", 1.5, delta, alone), 1000, 7)
        assert plan.noise.scale == less.noise.scale, "the training has what is left"
        assert epsilon_of(plan.event, delta, "replace").epsilon <= 2.0 * (1 + 1e-9)
        assert plan.explain()["scale_epsilon"] == 0.5
        numerator = scaling.measure_params(plan)["numerator"]
        assert 7 * numerator / scaling.EXPONENTS <= 0.5
        assert Event.from_json(plan.explain()["event"]) == plan.event


def test_the_event_is_worth_what_the_library_says() -> None:
    plan = make_plan(Spec.create("bolton", "logistic", 2.0, 1e-6, {"scale": "quantile", "lambda": 0.1}), 1000, 3)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    assert accountant.compose(plan.event.to_dp_event()).get_epsilon(1e-6) <= 2.0 * (1 + 1e-3)
    assert isinstance(plan.event.to_dp_event(), dp_accounting.ComposedDpEvent)


def test_a_training_measures_stores_and_applies_its_bounds(db: Database, table: Any) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(4000, 3)) * [1.0, 100.0, 0.01]
    y = np.where(x @ [1.0, 0.01, 100.0] > 0, 1.0, -1.0)
    rows = table(x, y, "float8")
    # A share for which one power of two is far better than its neighbours.
    model = db.train(rows.name, epsilon=4.0, scale="quantile", quantile=0.85, feature_bound=2.0, **{"lambda": 0.01})
    assert model.scale is not None
    assert model.scale.tolist() == [2.0, 128.0, 2.0**-6]
    assert model.score(x, y) > 0.85
    assert db.train(rows.name, epsilon=4.0, **{"lambda": 0.01}).score(x, y) < 0.75


def test_categories_need_no_bound(db: Database, people: Any) -> None:
    asked = {"features": ["age", "colour"], "categories": {"colour": ["red", "blue"]}, "scale": "quantile"}
    model = db.train("people", epsilon=20.0, **asked)
    assert model.scale is not None
    assert model.scale.tolist()[1:] == [1, 1]
    assert model.event["events"][1] == {"name": "LaplaceDpEvent", "noise_multiplier": 0.5}
