"""The privacy unit: at most c rows of each, chosen at random, and a guarantee for all of them."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import two_classes
from scipy import stats
from statistics_of import LEVEL

import bismarck_dp
from bismarck_dp import BismarckError, Spec, make_plan, units
from bismarck_dp.accounting import (
    ComposedDpEvent,
    Event,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    ParallelDpEvent,
    PoissonSampledDpEvent,
    RepeatAndSelectDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
    epsilon_of,
    gaussian_multiplier,
)
from bismarck_dp.controller.database import Database
from bismarck_dp.evaluation import cost, plan_evaluation
from bismarck_dp.solvers import SOLVERS

SEED = 5

# ---- the lemma, and events ----

BUDGETS = [(0.1, 1e-9), (1.0, 1e-6), (5.0, 1e-3), (30.0, 1e-2), (1000.0, 1e-6)]


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Exactly (Balle and Wang 2018), by another way than the package's."""
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("rows", [2, 3, 10, 100])
@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_a_walk_over_slots_costs_what_is_asked_for(epsilon: float, delta: float, rows: int) -> None:
    """The sum of the walk itself, in logarithms: e^(k e) d for each of c steps."""
    if epsilon == 1000 and rows > 2:
        with pytest.raises(BismarckError, match=f"epsilon 1000 for {rows} rows leaves too little for each"):
            units.slot_budget(epsilon, 1e-100, rows)
        return
    each, share = units.slot_budget(epsilon, delta, rows)
    total = np.logaddexp.reduce([step * each for step in range(rows)]) + math.log(share)
    assert math.log(delta) - 1e-8 <= total <= math.log(delta)
    assert epsilon * (1 - 1e-9) <= each * rows <= epsilon
    assert units.slot_budget(epsilon, 0.0, rows) == (each, 0.0)


def test_one_row_costs_itself() -> None:
    assert units.slot_budget(1.0, 1e-6, 1) == (1.0, 1e-6)


@pytest.mark.parametrize("rows", [2, 3, 10])
@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS[:4])
def test_the_gaussian_of_a_slot_is_enough_for_a_unit(epsilon: float, delta: float, rows: int) -> None:
    each, share = units.slot_budget(epsilon, delta, rows)
    assert gaussian_delta(epsilon, rows / gaussian_multiplier(each, share)) <= delta


def test_the_lemma_is_attained() -> None:
    """A mechanism whose neighbours on a line tell apart as much as (e, d) allows: none of it may be left out."""
    e, d, rows = 0.7, 1e-3, 4
    chain = [0.01]
    for _ in range(rows):
        chain.append(math.exp(e) * chain[-1] + d)
    epsilon = e * rows
    missing = chain[-1] - math.exp(epsilon) * chain[0]
    each, share = units.slot_budget(epsilon, missing, rows)
    assert each == pytest.approx(e, rel=1e-9)
    assert share == pytest.approx(d, rel=1e-9)


EVENTS = [
    GaussianDpEvent(3.0),
    LaplaceDpEvent(2.0),
    ZCDpEvent(0.02),
    SelfComposedDpEvent(GaussianDpEvent(9.0), 10),
    ComposedDpEvent((GaussianDpEvent(8.0), LaplaceDpEvent(20.0))),
    ComposedDpEvent((SelfComposedDpEvent(GaussianDpEvent(30.0), 5), SelfComposedDpEvent(ZCDpEvent(1e-4), 5))),
]


@pytest.mark.parametrize("rows", [2, 3, 10])
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_a_lifted_event_costs_no_more_than_the_lemma(event: Event, rows: int) -> None:
    """What is (e, d)-DP for a slot is priced at no more than c e at the lemma's delta."""
    for d in (1e-12, 1e-9, 1e-6):
        e = epsilon_of(event, d, "replace").epsilon
        delta = d * math.expm1(rows * e) / math.expm1(e)
        if delta < 1:
            assert epsilon_of(units.lifted(event, rows), delta, "replace").epsilon <= rows * e * (1 + 1e-9)


@pytest.mark.parametrize("rows", [2, 5])
def test_lifted_events_are_never_cheaper_than_the_truth(rows: int) -> None:
    gaussian, laplace, zcdp = (units.lifted(event, rows) for event in EVENTS[:3])
    assert isinstance(gaussian, GaussianDpEvent)
    assert isinstance(laplace, LaplaceDpEvent)
    assert isinstance(zcdp, ZCDpEvent)
    # Shifted by c, the noise is the same: exact for Gaussian and Laplace, and for zCDP at a Gaussian.
    assert 3.0 / rows * (1 - 1e-12) <= gaussian.noise_multiplier <= 3.0 / rows
    assert 2.0 / rows * (1 - 1e-12) <= laplace.noise_multiplier <= 2.0 / rows
    assert 0.02 * rows**2 <= zcdp.rho <= 0.02 * rows**2 * (1 + 1e-12)
    assert zcdp.rho == pytest.approx(rows**2 / (2 * (1 / math.sqrt(2 * 0.02)) ** 2))
    true = epsilon_of(GaussianDpEvent(3.0 / rows), 1e-6, "replace").epsilon
    assert epsilon_of(gaussian, 1e-6, "replace").epsilon >= true


def test_events_without_a_bound_are_refused() -> None:
    sampled = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    parallel = ParallelDpEvent((GaussianDpEvent(1.0), LaplaceDpEvent(1.0)))
    for event in (sampled, parallel, RepeatAndSelectDpEvent(GaussianDpEvent(1.0), 5.0, 0.0)):
        assert units.lifted(event, 1) == event
        with pytest.raises(BismarckError, match=f"{type(event).__name__} has no bound here for several rows"):
            units.lifted(ComposedDpEvent((LaplaceDpEvent(1.0), event)), 2)
    for nothing in (NoOpDpEvent(), NonPrivateDpEvent()):
        assert units.lifted(nothing, 3) == nothing


# ---- plans ----

WITHOUT_SAMPLES = [name for name, solver in SOLVERS.items() if solver.private and not solver.samples]


def planned(algorithm: str, rows: int, delta: float, **options: Any) -> bismarck_dp.Plan | None:
    if delta == 0 and algorithm in ("dpcd", "dpscd_primal"):
        return None
    asked = {"privacy_unit": "p", "unit_rows": rows, **options}
    return make_plan(Spec.create(algorithm, "logistic", 1.0, delta, asked), 300, 3)


@pytest.mark.parametrize("options", [{}, {"scale": "quantile"}, {"adjacency": "zero-out"}], ids=str)
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("rows", [2, 3, 7])
@pytest.mark.parametrize("algorithm", WITHOUT_SAMPLES)
def test_plans_cost_no_more_than_they_claim(algorithm: str, rows: int, delta: float, options: dict[str, Any]) -> None:
    plan, one = planned(algorithm, rows, delta, **options), planned(algorithm, 1, delta, **options)
    if plan is None or one is None:
        return
    assert (plan.spec.epsilon, plan.spec.delta) == (1.0, delta)
    assert epsilon_of(plan.event, delta, plan.spec.options["adjacency"]).epsilon <= 1.0
    assert plan.sensitivity == pytest.approx(rows * (one.sensitivity or 0))
    assert plan.noise.scale > (rows - 0.01) * one.noise.scale
    shown = plan.explain()
    assert (shown["epsilon"], shown["delta"], shown["privacy_unit"]) == (1.0, delta, f"p, at most {rows} rows")
    for name in ("scale_epsilon", "constants_epsilon"):
        assert shown[name] == (None if one.explain()[name] is None else pytest.approx(one.explain()[name]))


def test_measured_bounds_are_paid_for_by_slots() -> None:
    """All choices together may take the tenth of epsilon that is theirs, shared by a unit's rows."""
    from bismarck_dp.scaling import EXPONENTS, measure_params

    plan, one = planned("bolton", 5, 0.0, scale="quantile"), planned("bolton", 1, 0.0, scale="quantile")
    assert plan is not None
    assert one is not None
    numerator = measure_params(plan)["numerator"]
    assert numerator == pytest.approx(measure_params(one)["numerator"] / 5, rel=1e-4)
    assert 5 * 3 * numerator / EXPONENTS <= 0.1


def test_evaluations_cost_no_more_than_they_claim() -> None:
    from bismarck_dp.evaluation import Subject

    subject = Subject((-1.0, 1.0), True, False, 1, True, 1.0, None)
    for delta, rows in itertools.product((0.0, 1e-6), (1, 2, 5)):
        plan = plan_evaluation(subject, 1.0, delta, {"privacy_unit": "p", "unit_rows": rows})
        one = plan_evaluation(subject, 1.0, delta, {})
        assert cost(plan) <= 1.0
        assert plan.groups[0].noise / plan.groups[0].unit >= (rows - 0.01) * one.groups[0].noise / one.groups[0].unit
        assert (plan.epsilon, plan.delta) == (1.0, delta)


def test_a_row_is_a_unit_by_default() -> None:
    assert bismarck_dp.explain(n=100, d=2, epsilon=1.0)["privacy_unit"] == "row"
    named = bismarck_dp.explain(n=100, d=2, epsilon=1.0, delta=1e-6, privacy_unit="patient")
    plain = bismarck_dp.explain(n=100, d=2, epsilon=1.0, delta=1e-6)
    assert named == {**plain, "privacy_unit": "patient, at most 1 row"}


def test_notes_are_about_units() -> None:
    noted = bismarck_dp.explain(n=300, d=2, epsilon=1.0, delta=4e-3, privacy_unit="p", unit_rows=3)["note"]
    assert noted == ""
    assert "at least 1/n" in bismarck_dp.explain(n=300, d=2, epsilon=1.0, delta=4e-3)["note"]


@pytest.mark.parametrize("algorithm", ["bst14", "dpsgd", "dpscd", "dpscd_seq"])
def test_samples_are_refused(algorithm: str) -> None:
    with pytest.raises(BismarckError, match=f'"{algorithm}" samples rows, and unit_rows is 2') as refusal:
        Spec.create(algorithm, "logistic", 1.0, 1e-6, {"privacy_unit": "p", "unit_rows": 2})
    assert "or unit_rows 1" in refusal.value.hint
    Spec.create(algorithm, "logistic", 1.0, 1e-6, {"privacy_unit": "p"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit_rows": 2}, "unit_rows is 2, and there is no privacy_unit"),
        ({"privacy_unit": "p", "unit_rows": 0}, "unit_rows is 0"),
        ({"privacy_unit": "p", "unit_rows": 1.5}, "unit_rows is 1.5"),
        ({"privacy_unit": ""}, 'privacy_unit is ""'),
        ({"privacy_unit": 3}, "privacy_unit is 3"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        Spec.create("bolton", "logistic", 1.0, 0.0, options)


def test_too_little_for_each_slot_is_refused() -> None:
    with pytest.raises(BismarckError, match="epsilon 1000 for 2 rows leaves too little for each"):
        units.slot_budget(1000.0, 1e-200, 2)


# ---- which rows come in ----

Rows = Sequence[tuple[Any, Any, Any]]
"""Unit, label and features."""

Make = Callable[..., str]


@pytest.fixture
def owned(db: Database) -> Iterator[Make]:
    """Makes tables of rows that belong to units, in the rows' order."""
    names: list[str] = []

    def make(rows: Rows, kind: str = "bigint") -> str:
        names.append(f"owned_{len(names)}")
        with db.engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TABLE {names[-1]} (p {kind}, y float8, x float8[])")
            connection.exec_driver_sql(
                f"INSERT INTO {names[-1]} VALUES (%(p)s::text::{kind}, %(y)s, %(x)s::float8[])",
                [
                    {"p": None if p is None else str(p), "y": y and float(y), "x": [float(v) for v in x]}
                    for p, y, x in rows
                ],
            )
        return names[-1]

    yield make
    with db.engine.begin() as connection:
        for name in names:
            connection.exec_driver_sql(f"DROP TABLE IF EXISTS {name} CASCADE")


def telling(counts: Sequence[int], names: Sequence[Any] | None = None) -> list[tuple[Any, float, Any]]:
    """Units with so many rows each. Unit u has features e_u, and its k-th row the label 2^k: one pass of short steps
    writes the sum of the chosen labels into weight u.
    """
    eye = np.eye(len(counts))
    return [(u if names is None else names[u], 2.0**k, eye[u]) for u, count in enumerate(counts) for k in range(count)]


STEP = 1e-4


def chosen(db: Database, source: str, rows: int = 1, unit: str = "p", **options: Any) -> tuple[int, list[int]]:
    """n, and for each unit the sum of 2^k over its rows k that came in."""
    asked: dict[str, Any] = {
        "step": STEP,
        "epochs": 1,
        "batch_size": 1,
        "privacy_unit": unit,
        "unit_rows": rows,
        **options,
    }
    model = db.train(source, algorithm="sgd", loss="squared", **asked)
    return model.n, [round(weight / STEP) for weight in model.weights]


def bits(number: int) -> list[int]:
    return [k for k in range(number.bit_length()) if number >> k & 1]


COUNTS = [1, 2, 3, 5, 1, 7, 4]


@pytest.mark.parametrize("rows", [1, 2, 3, 10])
def test_slots_are_full_as_far_as_rows_go(db: Database, owned: Make, rows: int) -> None:
    source = owned(telling(COUNTS))
    n, sums = chosen(db, source, rows)
    assert n == rows * len(COUNTS)
    assert [len(bits(total)) for total in sums] == [min(rows, count) for count in COUNTS]
    assert all(max(bits(total)) < count for total, count in zip(sums, COUNTS))


def test_rows_without_a_unit_are_one(db: Database, owned: Make) -> None:
    names = [None if u in (1, 3) else u for u in range(5)]
    n, sums = chosen(db, owned(telling([2, 2, 3, 2, 1], names)), 2)
    assert n == 4 * 2
    assert len(bits(sums[1])) + len(bits(sums[3])) == 2
    assert [len(bits(sums[u])) for u in (0, 2, 4)] == [2, 2, 1]


UUIDS = [f"00000000-0000-0000-0000-00000000000{i}" for i in range(6)]
LONG = ["", "a", "A", "a" * 7, "b" * 9000, "".join(random.Random(SEED).choices(string.printable[:94], k=9000))]
"""The last one is stored out of line."""


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("smallint", [-1, 0, 1, 2, 32767, -32768]),
        ("int", [-1, 0, 1, 2, 2**31 - 1, -(2**31)]),
        ("bigint", [-1, 0, 1, 2**31, 2**63 - 1, -(2**63)]),
        ("text", LONG),
        ("varchar", LONG),
        ("date", [f"2020-01-0{i}" for i in range(1, 6)] + ["infinity"]),
        ("uuid", UUIDS),
    ],
)
def test_units_of_every_type(db: Database, owned: Make, kind: str, names: list[Any]) -> None:
    for limit in (1, 2):
        n, sums = chosen(db, owned(telling([3] * 6, names), kind), limit)
        assert n == 6 * limit
        assert [len(bits(total)) for total in sums] == [limit] * 6


def test_a_domain_is_its_type(db: Database, owned: Make, sql: Any) -> None:
    sql("CREATE DOMAIN person AS bigint CHECK (VALUE >= 0)")
    source = owned(telling([3, 2]), "person")
    assert chosen(db, source)[0] == 2
    sql(f"DROP TABLE {source}; DROP DOMAIN person")


def test_thousands_of_units(db: Database, sql: Any) -> None:
    """The table of units grows, and so does the choice; texts as well as numbers."""
    sql(
        "CREATE TABLE many AS SELECT i % 5000 AS p, 'person ' || i % 5000 AS name, sign(random() - 0.5) AS y,"
        " ARRAY[random(), random()]::float4[] AS x FROM generate_series(1, 20000) AS i"
    )
    for unit, rows in itertools.product(("p", "name"), (1, 3, 9)):
        model = db.train("many", epsilon=1.0, privacy_unit=unit, unit_rows=rows)
        assert (model.n, model.privacy_unit) == (5000 * rows, f"{unit}, at most {rows} row{'s' * (rows > 1)}")
    sql("DROP TABLE many")


@pytest.mark.parametrize("rows", [1, 2])
def test_choices_are_uniform_and_independent(db: Database, owned: Make, rows: int) -> None:
    """Every set of a unit's rows equally often, whatever the unit next to it has chosen."""
    held, count, times = 5, 100, 20
    source = owned(telling([held] * count))
    drawn = np.array([chosen(db, source, rows)[1] for _ in range(times)])
    sets = [sum(1 << k for k in some) for some in itertools.combinations(range(held), rows)]
    found = np.array([[(drawn == one).sum()] for one in sets]).reshape(-1)
    assert found.sum() == times * count
    assert stats.chisquare(found).pvalue > LEVEL
    pairs = np.array([[((drawn[:, ::2] == a) & (drawn[:, 1::2] == b)).sum() for b in sets] for a in sets])
    assert stats.chi2_contingency(pairs + (0 if rows == 1 else 1e-9)).pvalue > LEVEL


def test_a_seed_makes_the_same_choice_again(db: Database, owned: Make) -> None:
    source = owned(telling([5] * 20))
    first, second, other = (chosen(db, source, 2, seed=seed)[1] for seed in (SEED, SEED, SEED + 1))
    assert first == second != other


def test_all_rows_are_numpys(db: Database, owned: Make) -> None:
    """With a row for each slot the seeded training is that of the rows in their order."""
    x, y = two_classes(90, 3)
    source = owned([(i // 3, y[i], x[i]) for i in range(90)])
    asked: dict[str, Any] = {"lambda": 0.1, "epochs": 3, "batch_size": 7, "seed": SEED}
    plain = db.train(source, algorithm="sgd", **asked)
    limited = db.train(source, algorithm="sgd", privacy_unit="p", unit_rows=3, **asked)
    np.testing.assert_array_equal(plain.weights, limited.weights)
    assert (plain.privacy_unit, limited.privacy_unit) == ("row", "p, at most 3 rows")


def test_missing_rows_are_rows_of_null(db: Database, owned: Make) -> None:
    """Slots that a unit has no rows for are like rows with a NULL at the end."""
    x, y = two_classes(60, 3)
    some = [(i // 3, y[i], x[i]) for i in range(60) if i % 7 > 1]
    missing = 60 - len(some)
    asked: dict[str, Any] = {"lambda": 0.1, "epochs": 3, "batch_size": 7, "seed": SEED}
    limited = db.train(owned(some), algorithm="sgd", privacy_unit="p", unit_rows=3, **asked)
    filled = db.train(owned([*some, *[(0, None, x[0])] * missing]), algorithm="sgd", **asked)
    assert limited.n == filled.n == 60
    np.testing.assert_array_equal(limited.weights, filled.weights)


def test_a_view_in_another_order_each_time_keeps_the_limit(db: Database, owned: Make, sql: Any) -> None:
    source = owned(telling([4] * 30))
    sql(f"CREATE VIEW shaken AS SELECT * FROM {source} ORDER BY random()")
    for rows in (1, 2):
        n, sums = chosen(db, "shaken", rows)
        assert n == 30 * rows
        assert all(len(bits(total)) <= rows for total in sums)
    sql("DROP VIEW shaken")


# ---- sensitivity: a whole unit is replaced ----

OTHERS = 39


def neighbour(rows: int, sign: float) -> list[tuple[Any, Any, Any]]:
    """Units with one row each along the second axis, and one unit, at the end, with so many along the first."""
    return [(u, 1.0, (0.0, 1.0)) for u in range(OTHERS)] + [(OTHERS, 1.0, (sign, 0.0))] * rows


def moved(db: Database, first: str, second: str, seed: int, **options: Any) -> tuple[float, Any]:
    """How far apart two models end that have the same order and the same noise, and the first of them."""
    asked: dict[str, Any] = {"loss": "huber", "epsilon": 1.0, "delta": 1e-6, "seed": seed, **options}
    one, other = (db.train(source, **asked) for source in (first, second))
    assert one.n == other.n
    return float(np.linalg.norm(one.weights - other.weights)), one


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_unit_moves_the_model_by_its_sensitivity_at_most(
    db: Database, owned: Make, rows: int, adjacency: str
) -> None:
    """A thousand rows become one, a thousand others, or null: the same coins for the others, the same order."""
    many = owned(neighbour(1000, 1.0))
    changes = [neighbour(1000, -1.0), neighbour(1, -1.0)]
    if adjacency == "zero-out":
        changes = [[*neighbour(0, 1.0), *[(OTHERS, None, (0.0, 0.0))] * count] for count in (1000, 1)]
    options: dict[str, Any] = {"lambda": 0.05, "batch_size": 4, "epochs": 3, "adjacency": adjacency}
    reached = []
    for changed in map(owned, changes):
        for seed in range(6):
            apart, model = moved(db, many, changed, seed, privacy_unit="p", unit_rows=rows, **options)
            assert model.n == rows * (OTHERS + 1)
            assert apart <= model.sensitivity + 2 * model.plan["grid"]
            reached.append(apart / model.sensitivity)
    assert max(reached) > 0.3


def test_all_rows_of_a_unit_would_move_it_further(db: Database, owned: Make) -> None:
    """What the limit is for: without it, the same tables end much further apart than is declared with it."""
    first, second = owned(neighbour(1000, 1.0)), owned(neighbour(1000, -1.0))
    options: dict[str, Any] = {"lambda": 0.05, "batch_size": 4, "epochs": 3}
    limited = moved(db, first, second, SEED, privacy_unit="p", **options)[1]
    assert moved(db, first, second, SEED, **options)[0] > 5 * limited.sensitivity


# ---- everything that reads a source ----


@pytest.mark.parametrize(("algorithm", "rows"), [("dpcd", 1), ("dpcd", 3), ("dpgcd", 3), ("dpsgd", 1), ("scs13", 3)])
def test_every_layout(db: Database, owned: Make, algorithm: str, rows: int) -> None:
    x, y = two_classes(200, 3)
    source = owned([(i % 50, y[i], x[i]) for i in range(200)])
    model = db.train(source, algorithm=algorithm, epsilon=5.0, delta=1e-6, privacy_unit="p", unit_rows=rows)
    assert (model.n, model.private, model.epsilon, model.delta) == (50 * rows, True, 5.0, 1e-6)
    priced = epsilon_of(Event.from_json(model.event), 1e-6, "replace").epsilon
    assert priced <= 5.0
    assert model.privacy["privacy_unit"] == model.plan["privacy_unit"]


def test_bounds_are_those_of_units(db: Database, owned: Make) -> None:
    """A unit with most of the rows has one vote."""
    rows = [(u, 1.0, (0.2,)) for u in range(50)] + [(50, -1.0, (1000.0,))] * 400
    source = owned(rows)
    asked: dict[str, Any] = {"epsilon": 1000.0, "scale": "quantile"}
    scale = db.train(source, privacy_unit="p", **asked).scale
    every = db.train(source, **asked).scale
    assert scale is not None
    assert every is not None
    assert scale.max() <= 512 < 1024 <= every.min()


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("rows", [1, 3])
def test_evaluations_count_units(db: Database, owned: Make, delta: float, rows: int) -> None:
    x, y = two_classes(100, 2)
    source = owned([*((i, y[i], x[i]) for i in range(100)), *[(0, y[0], x[0])] * 900])
    model = db.train(source, algorithm="sgd")
    found = db.evaluate(model, source, epsilon=200.0, delta=delta, privacy_unit="p", unit_rows=rows)
    assert found["n"] == pytest.approx(100 + rows - 1, abs=6 * (found["n_noise"] or 0.0) + 1e-9)
    assert (found["epsilon"], found["delta"]) == (200.0, delta)
    with pytest.raises(BismarckError, match="privacy_unit is for noisy evaluations"):
        db.evaluate(model, source, privacy_unit="p")


def test_tuning_takes_one_row_of_each(db: Database, owned: Make, table: Any) -> None:
    x, y = two_classes(400, 2)
    source = owned([(i % 200, y[i], x[i]) for i in range(400)])
    grid = {"lambda": [0.1, 1.0]}
    model = db.tune(source, grid=grid, epsilon=5.0, privacy_unit="p")
    assert model.tuning is not None
    assert (model.tuning["rows"], model.privacy_unit) == (200, "p, at most 1 row")
    stopped = db.tune(source, grid=grid, epsilon=5.0, privacy_unit="p", method="random_stopping", trials=2.0)
    assert stopped.tuning is not None
    assert stopped.tuning["rows"] == 200
    public = table(*two_classes(100, 2, seed=1))
    chosen_there = db.tune(source, grid=grid, epsilon=5.0, privacy_unit="p", public_source=public.name)
    assert (chosen_there.n, chosen_there.privacy_unit) == (200, "p, at most 1 row")
    with pytest.raises(BismarckError, match="tuning divides rows into portions, and unit_rows is 2"):
        db.tune(source, grid=grid, epsilon=5.0, privacy_unit="p", unit_rows=2)
    with pytest.raises(BismarckError, match='"privacy_unit" is the same for all candidates'):
        db.tune(source, grid={"privacy_unit": ["p"]}, epsilon=5.0)


def test_explain_counts_slots(db: Database, owned: Make, sql: Any) -> None:
    source = owned(telling(COUNTS))
    found = sql(
        f"SELECT * FROM dp_explain('{source}', 'm', 'y', '{{x}}', 1, 0, 'bolton', 'squared',"
        ' \'{"privacy_unit": "p", "unit_rows": 2}\')'
    )
    shown = {row["key"]: row["value"] for row in found}
    assert (shown["n"], shown["privacy_unit"]) == (str(2 * len(COUNTS)), "p, at most 2 rows")


# ---- refusals ----


@pytest.mark.parametrize("verb", ["train", "explain"])
def test_columns_that_are_no_unit_are_refused(db: Database, owned: Make, sql: Any, verb: str) -> None:
    source = owned(telling([2, 2]))
    sql(f"ALTER TABLE {source} ADD COLUMN ratio float8, ADD COLUMN code char(3), ADD COLUMN at timestamptz")
    ask = getattr(db, verb)
    with pytest.raises(BismarckError, match='column "nobody" of "owned_0" does not exist'):
        ask(source, epsilon=1.0, privacy_unit="nobody")
    for name, kind in (("ratio", "double precision"), ("code", "character"), ("at", "timestamp with time zone")):
        with pytest.raises(BismarckError, match=f'column "{name}" has type {kind}, which cannot be a') as refusal:
            ask(source, epsilon=1.0, privacy_unit=name)
        assert "cast it to bigint or text" in refusal.value.hint


def test_a_choice_that_does_not_fit_memory_is_refused(db: Database, sql: Any) -> None:
    sql("CREATE TABLE many AS SELECT i AS p, 1.0 AS y, 1.0 AS x FROM generate_series(1, 30000) AS i")
    options = '{"privacy_unit": "p", "unit_rows": 4}'
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET maintenance_work_mem = '1MB'")
        with pytest.raises(
            Exception, match=r"a choice of rows for so many units takes 2 MB, and maintenance_work_mem is 1 MB"
        ):
            connection.exec_driver_sql(f"SELECT dp_train('many', 'm', 'y', '{{x}}', 1, options => '{options}')")
    sql("DROP TABLE many")


@pytest.mark.parametrize("units", [12_287, 12_288, 12_289, 12_290])
def test_memory_depends_on_the_number_of_units_alone(db: Database, sql: Any, units: int) -> None:
    """Where the rows without a unit come, first, last or nowhere, must not show in a refusal."""
    said = set()
    for nameless in ("1", str(units), "0"):
        sql("DROP TABLE IF EXISTS crowd")
        sql(
            f"CREATE TABLE crowd AS SELECT 1.0 AS y, 2.0 AS a, NULLIF(i, {nameless})::text AS p"
            f" FROM generate_series(1, {units}) i"
        )
        with db.engine.connect() as connection:
            connection.exec_driver_sql("SET maintenance_work_mem = '1MB'")
            try:
                found = connection.exec_driver_sql(
                    "SELECT value FROM dp_explain('crowd', 'm', 'y', '{a}', 1.0,"
                    " options => '{\"privacy_unit\": \"p\"}') WHERE key = 'n'"
                ).scalar_one()
            except Exception as refusal:
                found = str(refusal).splitlines()[0]
            said.add(found)
            connection.rollback()
    sql("DROP TABLE crowd")
    assert len(said) == 1, said


def test_a_unit_has_no_more_say_in_the_coding_than_its_rows_that_count(db: Database, owned: Make) -> None:
    """A row alone makes no class, and so must a unit not, however many rows it has."""
    plain = [(f"p{i}", float(i % 2), [i / 1000]) for i in range(1000)]
    for more in ([("q", 2.0, [0.0])] * 600, [("q", 5.0, [0.0])] * 600):
        source = owned([*plain, *more], "text")
        assert db.train(source, epsilon=1.0, privacy_unit="p").classes.tolist() == [0.0, 1.0]


def test_computed_noise_of_more_sums_is_paid_for() -> None:
    """c slots of a unit are in c times as many noisy sums, each of which is as far from real noise as one."""
    spec = {"algorithm": "scs13", "loss": "logistic", "epsilon": 1.0, "delta": 1e-6}
    plans = [
        make_plan(Spec.create(*spec.values(), {"privacy_unit": "p", "unit_rows": rows}), 10_000, 50) for rows in (1, 40)
    ]
    slot = make_plan(Spec.create("scs13", "logistic", *units.slot_budget(1.0, 1e-6, 40)), 10_000, 50)
    assert plans[1].noise.excess == 40 * slot.noise.excess > 0
    assert math.exp(-plans[1].noise.rarity) == pytest.approx(40 * math.exp(-slot.noise.rarity))


def test_the_unit_takes_the_right_to_read_it(db: Database, analyst: Database, owned: Make, sql: Any) -> None:
    source = owned(telling([2, 2]))
    sql(f"GRANT SELECT (y, x) ON {source} TO analyst")
    analyst.train(source, algorithm="sgd", loss="squared")
    with pytest.raises(BismarckError, match="permission denied"):
        analyst.train(source, algorithm="sgd", loss="squared", privacy_unit="p")


def test_where_there_are_no_columns_there_are_no_units(db: Database) -> None:
    x, y = two_classes(50, 2)
    with pytest.raises(BismarckError, match="privacy_unit names a column of a table, and X has none"):
        bismarck_dp.DPClassifier(database=db, epsilon=1.0, privacy_unit="p").fit(x, y)
    with pytest.raises(BismarckError, match="an audit makes tables whose rows are nobody's"):
        db.audit(epsilon=1.0, privacy_unit="p")
