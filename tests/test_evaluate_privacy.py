"""dp_evaluate with epsilon: sums, sensitivities, noise and their price, and an attack through the function itself."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from conftest import two_classes
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Random, library
from scipy import stats
from statistics_of import LEVEL, check_frequencies
from test_evaluate import many_classes

from bismarck_dp import BismarckError
from bismarck_dp.accounting import LaplaceDpEvent, NonPrivateDpEvent, ZCDpEvent
from bismarck_dp.attacks import epsilon_bound, strongest
from bismarck_dp.controller.database import Database
from bismarck_dp.evaluation import (
    MOST_UNITS,
    Evaluation,
    Subject,
    auc_of_cells,
    cost,
    noisy_metrics,
    plan_evaluation,
    sensitivity,
    sums,
)
from bismarck_dp.reference import seed_key

STREAM = 13 << 33
"""DP_STREAM_EVALUATION of udf/bismarck_dp.h."""

TWO = Subject((-1.0, 1.0), True, False, 1, True, 4.0, None)
HINGE = Subject((-1.0, 1.0), False, False, 1, True, 4.0, None)
MANY = Subject((0.0, 1.0, 2.0), True, True, 3, False, 4.0, None)
NUMBER = Subject((), False, False, 1, False, 4.0, 2.0)
SUBJECTS = {"two": TWO, "hinge": HINGE, "many": MANY, "number": NUMBER}
PURE, APPROXIMATE = 0.0, 1e-6
ADJACENCIES = ("replace", "zero-out")
cases = pytest.mark.parametrize(
    ("subject", "delta", "adjacency"),
    list(itertools.product(SUBJECTS.values(), (PURE, APPROXIMATE), ADJACENCIES)),
    ids=lambda value: next((name for name, subject in SUBJECTS.items() if subject is value), str(value)),
)


def planned(
    subject: Subject, delta: float, adjacency: str = "replace", epsilon: float = 1.0, **more: Any
) -> Evaluation:
    return plan_evaluation(subject, epsilon, delta, {"adjacency": adjacency, "bins": 4, **more})


# ---- sensitivities ----

MARGINS = (0.0, 1e-9, -1e-9, 0.3, -0.7, 3.9, -3.9, 1e4, -1e4, 1e300, -1e300)


def margin_rows(subject: Subject) -> list[Any]:
    if subject.outputs == 1:
        return [*MARGINS, math.nan]
    extremes = [[big if c == place else -big for c in range(3)] for place in range(3) for big in (0.5, 5.0, 1e4)]
    return [*extremes, [0.0, 0.0, 0.0], [math.nan] * 3]


def label_values(subject: Subject) -> list[float]:
    if subject.classes:
        return [*subject.classes, 7.0, math.nan]
    return [*np.linspace(-2, 2, 9), -1.0, 1.4142, 1e9, -1e9, math.inf, math.nan]


def vectors_of_rows(plan: Evaluation) -> Any:
    """What single rows add, for every margin and label of interest."""
    rows = list(itertools.product(margin_rows(plan.subject), label_values(plan.subject)))
    return np.array([sums(plan, np.array([z]), [y])[1:] for z, y in rows], dtype=float)


def farthest(plan: Evaluation) -> dict[str, float]:
    """By group: the longest way from one row to another, or to a row that counts for nothing."""
    vectors = vectors_of_rows(plan)
    assert not vectors[np.abs(vectors).sum(axis=1).argmin()].any(), "a bad row adds zeros"
    order = 1 if plan.delta == 0 else 2
    others = vectors if plan.options["adjacency"] == "replace" else np.zeros((1, vectors.shape[1]))
    found, at = {}, 0
    for group in plan.groups:
        part = slice(at, at + group.cells)
        apart = vectors[:, None, part] - others[None, :, part]
        found[group.name] = float(np.linalg.norm(apart, ord=order, axis=2).max())
        at += group.cells
    return found


@cases
def test_no_row_moves_a_group_further_than_declared_and_some_do(subject: Subject, delta: float, adjacency: str) -> None:
    plan = planned(subject, delta, adjacency)
    for group, found in zip(plan.groups, farthest(plan).values()):
        assert found <= group.sensitivity
        assert found >= 0.999 * group.sensitivity, group.name


@settings(max_examples=200, deadline=None)
@given(
    first=st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)),
    second=st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)),
    unit=st.sampled_from([1, 2, 64, MOST_UNITS]),
    name=st.sampled_from(["two", "number"]),
)
def test_any_two_rows_are_as_near_as_declared(first: Any, second: Any, unit: int, name: str) -> None:
    """Also in coarse units, where rounding counts."""
    for delta, adjacency in itertools.product((PURE, APPROXIMATE), ADJACENCIES):
        plan = planned(SUBJECTS[name], delta, adjacency)
        groups = tuple(
            type(g)(g.name, g.cells, unit, g.noise, sensitivity(g.name, g.cells, adjacency, delta == 0, unit))
            for g in plan.groups
        )
        plan = Evaluation(**{**vars(plan), "groups": groups})
        one = sums(plan, np.array([first[0]]), [first[1]])[1:].astype(float)
        other = sums(plan, np.array([second[0]]), [second[1]])[1:].astype(float)
        other = other if adjacency == "replace" else np.zeros_like(one)
        at = 0
        for group in groups:
            gap = (one - other)[at : at + group.cells]
            assert np.linalg.norm(gap, ord=1 if delta == 0 else 2) <= group.sensitivity
            at += group.cells


# ---- price ----


@cases
@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 8.0])
def test_a_release_costs_no_more_than_epsilon(subject: Subject, delta: float, adjacency: str, epsilon: float) -> None:
    plan = planned(subject, delta, adjacency, epsilon)
    assert cost(plan) <= epsilon
    assert cost(plan) >= (0.9999 if delta == 0 else 0.999) * epsilon, "and hardly less"
    event = plan.event.to_dp_event()
    if delta == 0:
        assert isinstance(plan.event, LaplaceDpEvent)
        assert 1 / event.noise_multiplier <= epsilon
        accountant = pld.PLDAccountant(value_discretization_interval=1e-4 * epsilon).compose(event)
        assert accountant.get_epsilon(1e-12) <= epsilon * (1 + 1e-3)
    else:
        assert isinstance(plan.event, ZCDpEvent)
        assert rdp.RdpAccountant().compose(event).get_epsilon(delta) <= epsilon * (1 + 5e-2)


@cases
def test_noise_is_what_the_sensitivity_asks_for(subject: Subject, delta: float, adjacency: str) -> None:
    """Shares add up to all, and the noise is that of the share, rounded up to a unit in thousands."""
    plan = planned(subject, delta, adjacency)
    spent = [(group.sensitivity / group.noise) ** (1 if delta == 0 else 2) for group in plan.groups]
    total = sum(spent)
    shares = np.array(spent) / total
    wanted = {"two": (1, 1, 2), "hinge": (1, 2), "many": (1, 1), "number": (1, 4, 3)}
    weights = np.array(next(wanted[name] for name, one in SUBJECTS.items() if one is subject))
    assert shares == pytest.approx(weights / weights.sum(), rel=1e-3)
    assert total == pytest.approx(1.0 if delta == 0 else 2 * plan.event.rho, rel=1e-3)
    assert all(group.noise <= MOST_UNITS for group in plan.groups)


@pytest.mark.parametrize("epsilon", [1e-15, 1e-5, 1e15])
def test_extreme_epsilons_are_paid_for(epsilon: float) -> None:
    for adjacency in ADJACENCIES:
        for subject in (TWO, NUMBER):
            plan = planned(subject, 0.0, adjacency, epsilon)
            assert cost(plan) <= epsilon
            assert all(group.noise >= 1 for group in plan.groups)
    with pytest.raises(BismarckError, match="epsilon is so small"):
        planned(TWO, 1e-6, epsilon=1e-7)


def test_a_seed_is_no_privacy() -> None:
    plan = planned(TWO, 0.0, seed=1)
    assert isinstance(plan.event, NonPrivateDpEvent)
    assert cost(plan) == math.inf
    assert plan.notes(100)[0].startswith("NOT PRIVATE")
    shown = noisy_metrics(plan, np.zeros(1 + sum(group.cells for group in plan.groups)))
    assert shown["epsilon"] is None


# ---- sums in the server are NumPy's ----


def craft(db: Database, table: Any, sql: Any, weights: str = "{8, -4}") -> str:
    """A model with weights of our own, and the name of its table."""
    x = np.array([[0.9, 0.1], [-0.5, 0.3], [0.2, -0.8], [0.01, 0.02]] * 5)
    rows = table(x, [1, -1, 1, -1] * 5)
    db.train(rows.name, model="m", algorithm="sgd")
    sql(f"UPDATE bismarck_dp.model SET weights = '{weights}' WHERE name = 'm'")
    return str(rows.name)


def plan_of(db: Database, name: str, epsilon: float, delta: float, **options: Any) -> Evaluation:
    return plan_evaluation(Subject.of(db.model(name)), epsilon, delta, options)


def released(sql: Any, name: str, source: str, plan: Evaluation, times: int = 1) -> Any:
    """Numbers of so many releases, straight from the server."""
    statement = (
        "SELECT bismarck_dp.noisy_sums(:name, CAST(:source AS regclass), 'y', '{x}', CAST(:params AS jsonb)) AS numbers"
        " FROM generate_series(1, :times)"
    )
    found = sql(statement, name=name, source=source, params=json.dumps(plan.params()), times=times)
    return np.array([row["numbers"] for row in found], dtype=np.int64)


def noise_of(plan: Evaluation, seed: int) -> Any:
    """What the server draws under a seed, one number after the other."""
    random = Random.start(seed_key(seed), STREAM)
    draw = library.dp_discrete_gaussian if plan.mechanism == "gaussian" else library.dp_discrete_laplace
    return np.array([draw(ctypes.byref(random), ctypes.c_uint64(g.noise)) for g in plan.groups for _ in range(g.cells)])


KINDS: dict[str, dict[str, Any]] = {
    "two": {},
    "projected": {"project_dim": 2, "project_seed": 3, "fit_intercept": True},
    "hinge": {"loss": "hinge"},
    "joint": {"multiclass": "softmax", "classes": [-1, 1]},
    "softmax": {"multiclass": "softmax"},
    "ovr": {"multiclass": "ovr"},
    "number": {"loss": "squared", "label_bound": 0.8},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [PURE, APPROXIMATE])
def test_sums_in_the_server_are_numpys(db: Database, table: Any, sql: Any, kind: str, delta: float) -> None:
    x, y = many_classes(400, 4, 3) if kind in ("softmax", "ovr") else two_classes(400, 4)
    y = x[:, 0] if kind == "number" else y
    rows = table(x, y, dtype="float8")
    model = db.train(rows.name, model="m", algorithm="sgd", **KINDS[kind])
    sql(
        f"INSERT INTO {rows.name} VALUES (901, NULL, '{{0,0,0,1}}'), (902, 1, '{{0,0,NaN,1}}'), (903, 1, '{{1,2}}'),"
        f" (904, 'Infinity', '{{0,0,0,1}}'), (905, 1, NULL), (906, 1, '{{{{1,2}},{{3,4}}}}'),"
        f" (907, 1, '{{0,0,0,NULL}}')"
    )
    plan = plan_of(db, "m", 1.0, delta, seed=5, loss_bound=0.6)
    wanted = sums(plan, model.decision_function(x), y)
    wanted[0] += 7
    found = released(sql, "m", rows.name, plan)[0]
    assert found[0] == 407
    assert (found[1:] - noise_of(plan, 5) == wanted[1:]).all()
    if kind != "number":
        cells = {group.name: group for group in plan.groups}["rows"]
        assert wanted[1:3].sum() == 400 * cells.unit


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_extreme_rows_add_no_more_in_the_server_either(db: Database, table: Any, sql: Any, loss: str) -> None:
    """The model, the features and the labels as far out as numbers go: still what NumPy says, and within its bound."""
    x = np.array([[1e300, -1e300], [1e-300, 0.0], [-1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    rows = table(x, np.ones(5), dtype="float8")
    db.train(rows.name, model="m", algorithm="sgd", loss=loss, label_bound=None if loss == "logistic" else 3.0)
    sql("UPDATE bismarck_dp.model SET weights = '{1e200, -1e307}' WHERE name = 'm'")
    plan, model = plan_of(db, "m", 1.0, 0.0, seed=2), db.model("m")
    for label in ("1", "-1", "1e308", "-1e308", "1e-308", "'Infinity'", "NULL"):
        sql(f"UPDATE {rows.name} SET y = {label}")
        found = released(sql, "m", rows.name, plan)[0][1:] - noise_of(plan, 2)
        y = np.full(5, float(label.strip("'").replace("NULL", "nan")))
        assert (found == sums(plan, model.decision_function(x), y)[1:]).all()
        at = 0
        for group in plan.groups:
            assert np.abs(found[at : at + group.cells]).sum() <= 5 * group.sensitivity
            at += group.cells


def test_dp_evaluate_shows_what_follows_from_the_released_numbers(db: Database, table: Any, sql: Any) -> None:
    source = craft(db, table, sql)
    for delta in (PURE, APPROXIMATE):
        plan = plan_of(db, "m", 1.0, delta, seed=9)
        with pytest.warns(UserWarning, match="NOT PRIVATE"):
            shown = db.evaluate("m", source, epsilon=1.0, delta=delta, seed=9)
        assert shown == noisy_metrics(plan, released(sql, "m", source, plan)[0])


# ---- the noise ----


def laplace_law(scale: int) -> tuple[Any, Any]:
    k = np.arange(-60 * scale, 60 * scale + 1)
    weights = np.exp(-np.abs(k) / scale)
    return k, weights / weights.sum()


def gaussian_law(sigma: int) -> tuple[Any, Any]:
    k = np.arange(-12 * sigma, 12 * sigma + 1)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    return k, weights / weights.sum()


TIMES = 4000


@pytest.mark.parametrize(("delta", "epsilon"), [(PURE, 2.0), (APPROXIMATE, 2.0)])
def test_every_number_has_its_own_noise(db: Database, table: Any, sql: Any, delta: float, epsilon: float) -> None:
    """The law of each sum's noise at release scale, and no two sums share any."""
    source = craft(db, table, sql)
    plan = plan_of(db, "m", epsilon, delta, bins=2)
    model = db.model("m")
    rows = sql(f"SELECT y, x FROM {source}")
    centre = sums(plan, model.decision_function([row["x"] for row in rows]), [row["y"] for row in rows])
    noise = released(sql, "m", source, plan, TIMES)[:, 1:] - centre[1:]
    scales = np.array([group.noise for group in plan.groups for _ in range(group.cells)])
    law = stats.laplace if delta == 0 else stats.norm
    for column, scale in zip(noise.T, scales):
        assert stats.kstest(column / scale, law.cdf).pvalue > LEVEL
    uniform = law.cdf(noise / scales)
    correlation = np.corrcoef(uniform.T)[np.triu_indices(len(scales), 1)]
    assert np.abs(correlation).max() < 6 / math.sqrt(TIMES)
    assert len(np.unique(noise[:, 0])) > TIMES / 2


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_small_noise_is_exactly_discrete(db: Database, table: Any, sql: Any, mechanism: str) -> None:
    """Chi-square, at noise of three units, where discrete and continuous differ."""
    source = craft(db, table, sql)
    plan = plan_of(db, "m", 1.0, 0.0 if mechanism == "laplace" else 1e-6, bins=4)
    groups = tuple(type(g)(g.name, g.cells, 1, 3, g.sensitivity) for g in plan.groups)
    plan = Evaluation(**{**vars(plan), "groups": groups})
    numbers = released(sql, "m", source, plan, TIMES)[:, 4:]
    noise = (numbers - np.rint(np.median(numbers, axis=0)).astype(np.int64)).ravel()
    k, probability = laplace_law(3) if mechanism == "laplace" else gaussian_law(3)
    check_frequencies(np.bincount(noise - k[0], minlength=len(k)), probability)


# ---- an attack ----


def neighbours(db: Database, table: Any, sql: Any) -> tuple[str, str]:
    """Two tables that differ in the row which tells most: right at no loss, or wrong at the largest."""
    first = craft(db, table, sql, "{20, 0}")
    second = table(np.vstack([[[0.9, 0.0]], np.full((19, 2), 0.1)]), [1.0] * 20)
    third = table(np.vstack([[[-0.9, 0.0]], np.full((19, 2), 0.1)]), [1.0] * 20)
    sql(f"DROP TABLE {first}")
    return second.name, third.name


def log_ratio(plan: Evaluation, numbers: Any, centres: tuple[Any, Any]) -> Any:
    """The best test there is (Neyman and Pearson), for the declared noise."""
    scales = np.array([group.noise for group in plan.groups for _ in range(group.cells)])
    power = 1 if plan.mechanism == "laplace" else 2
    ways = [np.abs((numbers[:, 1:] - centre[1:]) / scales) ** power / power for centre in centres]
    return (ways[1] - ways[0]).sum(axis=1)


def attack(db: Database, sql: Any, tables: tuple[str, str], plan: Evaluation, times: int) -> float:
    """The epsilon that releases of two tables prove."""
    model = db.model("m")
    data = [sql(f"SELECT y, x FROM {name}") for name in tables]
    centres = [sums(plan, model.decision_function([r["x"] for r in d]), [r["y"] for r in d]) for d in data]
    values = [log_ratio(plan, released(sql, "m", name, plan, times), (centres[0], centres[1])) for name in tables]
    found = strongest({"ratio": values[0]}, {"ratio": values[1]}, plan.delta, plan.mechanism == "gaussian")
    return found.epsilon


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("delta", [PURE, 0.01])
def test_attacks_do_not_beat_epsilon_and_are_not_idle(
    db: Database, table: Any, sql: Any, delta: float, adjacency: str
) -> None:
    """Which of two neighbours was it? Half the noise would be found. (A row of zeros is the other, for zero-out.)"""
    tables = neighbours(db, table, sql)
    if adjacency == "zero-out":
        sql(f"UPDATE {tables[1]} SET y = NULL WHERE x[1] < 0")
        sql(f"UPDATE {tables[0]} SET x = '{{-0.9,0}}' WHERE x[1] > 0.5")
    plan = plan_of(db, "m", 1.0, delta, bins=2, adjacency=adjacency)
    assert attack(db, sql, tables, plan, 8000) <= 1.0
    halved = tuple(type(g)(g.name, g.cells, g.unit, g.noise // 2, g.sensitivity) for g in plan.groups)
    assert attack(db, sql, tables, Evaluation(**{**vars(plan), "groups": halved}), 8000) > 1.0


def test_an_attack_through_dp_evaluate_gets_no_more(db: Database, table: Any, sql: Any) -> None:
    """What is shown follows from what is released: here accuracy alone, which gets all of epsilon."""
    tables = neighbours(db, table, sql)
    statement = (
        "SELECT max(value) FILTER (WHERE metric = 'accuracy') AS accuracy, max(value) FILTER (WHERE metric = 'n') AS n"
        " FROM generate_series(1, 800) AS i, LATERAL dp_evaluate('m', '{}', epsilon => 1.0 + 0 * i,"
        """ options => '{{"metrics": ["accuracy"]}}') GROUP BY i"""
    )
    shown = [[row for row in sql(statement.format(name)) if row["accuracy"] is not None] for name in tables]
    values = [np.array([2 * row["accuracy"] * row["n"] - row["n"] for row in rows]) for rows in shown]
    found = strongest({"right": values[0]}, {"right": values[1]}, 0.0, False)
    assert found.epsilon <= 1.0
    assert found.rates.true_positives / found.rates.of_first > found.rates.false_positives / found.rates.of_second
    assert epsilon_bound(found.rates, 0.0, 0.9) > 0, "the attack is not idle"


# ---- what is made of the numbers ----


def test_metrics_of_little_noise_are_the_exact_ones(db: Database, table: Any) -> None:
    rows = table(*two_classes(5000, 5))
    db.train(rows.name, model="m", algorithm="sgd")
    exact = db.evaluate("m", rows.name)
    with pytest.warns(UserWarning, match="epsilon 1e\\+06 is large"):
        noisy = db.evaluate("m", rows.name, epsilon=1e6, bins=128)
    for name in ("n", "accuracy", "auc", "log_loss"):
        assert noisy[name] == pytest.approx(exact[name], abs=1e-3), name
    x = rows.x
    db.train(table(x, x[:, 0]).name, model="r", algorithm="sgd", loss="squared", label_bound=2.0)
    numbers = table(x, x[:, 0] + 0.1)
    exact = db.evaluate("r", numbers.name)
    with pytest.warns(UserWarning, match="epsilon 1e\\+06 is large"):
        noisy = db.evaluate("r", numbers.name, epsilon=1e6)
    for name in ("n", "mse", "r2"):
        assert noisy[name] == pytest.approx(exact[name], abs=1e-3), name


@pytest.mark.parametrize("delta", [PURE, APPROXIMATE])
@pytest.mark.parametrize("kind", ["two", "number"])
def test_the_shown_noise_is_that_of_the_metric(db: Database, table: Any, sql: Any, delta: float, kind: str) -> None:
    """Over many releases: as many standard deviations as are shown, and no bias to speak of."""
    x, y = two_classes(2000, 3)
    how = {} if kind == "two" else {"loss": "squared", "label_bound": 1.0}
    rows = table(x, y)
    db.train(rows.name, model="m", algorithm="sgd", **how)
    plan = plan_of(db, "m", 1.0, delta)
    shown = [noisy_metrics(plan, numbers) for numbers in released(sql, "m", rows.name, plan, 1500)]
    exact = db.evaluate("m", rows.name)
    for name in ("accuracy", "log_loss", "auc") if kind == "two" else ("mse", "r2"):
        values = np.array([one[name] for one in shown])
        claimed = np.mean([one[f"{name}_noise"] for one in shown])
        assert values.std() == pytest.approx(claimed, rel=0.25), name
        slack = 0.003 if name == "auc" else 1e-4  # margins in one cell are ties
        assert abs(values.mean() - exact[name]) < 5 * claimed / math.sqrt(len(values)) + slack, name


def test_noisy_histograms_may_be_anything() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        auc, noise = auc_of_cells(rng.normal(scale=rng.choice([1e-3, 1.0, 1e6]), size=32), 1.0)
        assert auc is None or (0 <= auc <= 1 and noise is not None and noise >= 0)
    assert auc_of_cells(np.zeros(8), 1.0) == (None, None)
    assert auc_of_cells([5, 0, 0, 5], 1.0)[0] == 1.0
    assert auc_of_cells([0, 5, 5, 0], 1.0)[0] == 0.0
    assert auc_of_cells([0, 5, 0, 5], 1.0)[0] == 0.5


@cases
def test_any_numbers_give_metrics_within_their_range(subject: Subject, delta: float, adjacency: str) -> None:
    plan = planned(subject, delta, adjacency)
    rng = np.random.default_rng(0)
    size = sum(group.cells for group in plan.groups)
    for scale in (1, 2**20, 2**40):
        for _ in range(50):
            shown = noisy_metrics(plan, [100, *rng.integers(-scale, scale + 1, size=size)])
            for name in ("accuracy", "auc"):
                assert shown.get(name) is None or 0 <= shown[name] <= 1
            assert shown["n"] is None or 0 <= shown["n"] <= 100
            for name in ("log_loss", "mse"):
                assert shown.get(name) is None or 0 <= shown[name] <= plan.loss_bound
            assert shown.get("r2") is None or shown["r2"] <= 1
            assert all(value is None or math.isfinite(value) for value in shown.values())


def test_the_server_refuses_a_plan_without_noise(db: Database, table: Any, sql: Any) -> None:
    source = craft(db, table, sql)
    plan = plan_of(db, "m", 1.0, 0.0)
    for change in (
        {"noise": [0, 1, 1]},
        {"noise": [1, 1]},
        {"mechanism": "none"},
        {"loss_bound": 0},
        {"units": [1.5, 1, 1]},
        {"noise": [2, 2.5, 2]},
        {"mechanism": "gaussian", "noise": [2**21, 1, 1]},
        {"classes": [0, 1, 2]},
    ):
        params = json.dumps({**plan.params(), **change})
        with pytest.raises(Exception, match="the model cannot be evaluated so"):
            sql(
                "SELECT bismarck_dp.noisy_sums('m', CAST(:source AS regclass), 'y', '{x}', CAST(:params AS jsonb))",
                source=source,
                params=params,
            )
