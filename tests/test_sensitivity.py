"""The sensitivity claim: the recursion against a brute-force one, and against neighbouring tables found by malice."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import kernels
import numpy as np
import pytest

import bismarck_dp
from bismarck_dp import Spec, make_plan, reference
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.penalties import L2
from bismarck_dp.sensitivity import Schedule, closed_form, output_sensitivity, recursion
from bismarck_dp.steps import Step

STEPS = {
    "constant": Step("constant", eta=0.1),
    "decreasing": Step("decreasing", beta=2.0, offset=4.0),
    "sqrt": Step("sqrt", beta=2.0, offset=4.0),
    "strongly-convex": Step("strongly-convex", beta=2.05, gamma=0.05),
}


def forward(schedule: Schedule, part: int, positions: list[int]) -> float:
    """The distance bound of the release, by playing the recursion forward with a jump at the given positions."""
    s, sizes = schedule, schedule.part_sizes()
    delta, average = 0.0, 0.0
    for j in range(s.passes):
        ends, means = [], []
        for p, rows in enumerate(sizes):
            updates, here, trail = s.updates(rows), delta, []
            for i in range(updates):
                eta = float(s.step.at(np.array([1.0 + j * updates + i]))[0])
                here = (1 - eta * s.penalty.strength) * here
                here += eta / s.batch_size if p == part and i == positions[j] else 0.0
                trail.append(here)
            ends.append(here)
            means.append(np.mean(trail))
        shares = np.array(sizes) / s.n
        delta = float(shares @ ends)
        average = float(shares @ means) + (average if s.average == "all" else 0.0)
    if s.average == "none":
        return delta
    return average / s.passes if s.average == "all" else average


GRID = list(product(STEPS, [0.0, 0.05], ["none", "all", "suffix"], [1, 3], [1, 2, 5], ["once", "each_pass"]))


@pytest.mark.parametrize(("rule", "strength", "average", "workers", "batch_size", "shuffle"), GRID)
def test_recursion_is_the_largest_over_positions(
    rule: str, strength: float, average: str, workers: int, batch_size: int, shuffle: str
) -> None:
    schedule = Schedule(11, batch_size, 3, workers, average, shuffle, STEPS[rule], L2(strength))
    sizes = schedule.part_sizes()
    best = 0.0
    for part, rows in enumerate(sizes):
        updates = range(schedule.updates(rows))
        paths = [[i] * 3 for i in updates] if shuffle == "once" else [list(path) for path in product(updates, repeat=3)]
        best = max(best, max(forward(schedule, part, path) for path in paths))
    ours = output_sensitivity(schedule, 1.0)
    assert ours == pytest.approx(recursion(schedule) / batch_size, rel=1e-12), (
        "the closed form is the recursion's value"
    )
    if shuffle == "each_pass" and len(set(sizes)) > 1:
        assert ours >= best * (1 - 1e-12), "a row may also change partition between passes"
    else:
        assert ours == pytest.approx(best, rel=1e-12)


def test_long_passes_are_cut_into_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(1000, 3, 2, 1, "all", "once", STEPS["strongly-convex"], L2(0.05))
    whole = recursion(schedule)
    monkeypatch.setattr("bismarck_dp.sensitivity.SEGMENT", 7)
    assert recursion(schedule) == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize("shuffle", ["once", "each_pass"])
@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("rule", sorted(STEPS))
def test_closed_form_equals_the_recursion_on_long_runs(rule: str, workers: int, shuffle: str) -> None:
    """Thousands of updates, through the constant region of the strongly convex steps and beyond."""
    for n, batch_size, passes, strength, average in product(
        [1003, 40_000], [1, 50], [1, 9], [0.0, 1e-4, 0.05], ["none", "all"]
    ):
        step = (
            Step("strongly-convex", beta=2 + strength, gamma=strength)
            if rule == "strongly-convex" and strength
            else STEPS[rule]
        )
        schedule = Schedule(n, batch_size, passes, workers, average, shuffle, step, L2(strength))
        gain = closed_form(schedule)
        if gain is not None:
            assert gain == pytest.approx(recursion(schedule), rel=1e-9)
        else:
            assert strength > 0
            assert average == "all" or rule not in ("constant", "strongly-convex")


def test_known_closed_forms() -> None:
    """2 k L eta / b without a regulariser (Corollary 1, with b), 2 L / (gamma m) with one, whatever b."""
    convex = bismarck_dp.explain(n=1000, d=3, epsilon=1, epochs=7, batch_size=20, step=0.1)
    assert convex["sensitivity"] == pytest.approx(2 * 7 * 0.1 / 20, rel=2e-6)
    for b in (1, 10, 50, 333):
        strong = bismarck_dp.explain(n=10_000, d=3, epsilon=1, epochs=30, batch_size=b, **{"lambda": 0.1})
        bound = 2 / (0.1 * b * math.ceil(10_000 / b))
        assert 0.97 * bound < strong["sensitivity"] <= bound * (1 + 1e-5)
    halves = [
        bismarck_dp.explain(n=1000, d=3, epsilon=1, batch_size=20, step=0.1, adjacency=a)["sensitivity"]
        for a in ("replace", "zero-out")
    ]
    assert halves[0] == pytest.approx(2 * halves[1], rel=1e-6)
    split = bismarck_dp.explain(n=1000, d=3, epsilon=1, epochs=7, batch_size=20, step=0.1, workers=4)
    assert split["sensitivity"] == pytest.approx(convex["sensitivity"] / 4, rel=2e-6)


def test_the_papers_division_by_b_is_not_made() -> None:
    ours = bismarck_dp.explain(
        loss="huber", n=60_000, d=50, epsilon=1, delta=0, epochs=10, batch_size=50, radius=1000, lambda_=1e-3
    )["sensitivity"]
    assert 40 * 6.7e-4 < ours < 2 / (1e-3 * 60_000) * 1.001


def test_averaging_costs_in_the_strongly_convex_case() -> None:
    """The paper's Lemma 10 says averaging is free; early iterates are further apart, and the recursion says so."""
    options: dict[str, Any] = {"n": 5000, "d": 3, "epsilon": 1, "epochs": 1, "batch_size": 1, "lambda": 0.01}
    last = bismarck_dp.explain(**options)["sensitivity"]
    mean = bismarck_dp.explain(**options, average="all")["sensitivity"]
    assert mean > 1.5 * last


# ---- neighbouring tables, played through the kernels with the noise off ----


def distance(plan: Any, tables: tuple[Any, Any], order: Any) -> float:
    """How far apart two tables' models are, in one order of the rows."""
    models = []
    for x, y in tables:
        features, labels = reference.pack(x, y, plan)
        rows = np.hstack([labels[:, None], features])[order]
        models.append(kernels.train(rows, plan.kernel_params(), plan.schedule.passes))
    return float(np.linalg.norm(models[0] - models[1]))


def random_pair(rng: np.random.Generator, loss: str, n: int, d: int, null: bool) -> tuple[Any, Any]:
    x = rng.normal(size=(n, d)) * rng.choice([0.2, 1.0, 5.0])
    y = np.where(rng.random(n) < 0.5, -1.0, 1.0) if LOSSES[loss].classification else rng.normal(size=n) * 2
    x2, y2 = x.copy(), y.copy()
    if null:
        x2[0] = np.nan
    else:
        x2[0], y2[0] = -x[0] if rng.random() < 0.5 else rng.normal(size=d) * 5, -y[0] if rng.random() < 0.5 else y[0]
    return (x, y), (x2, y2)


def worst_pair(n: int, null: bool) -> tuple[Any, Any]:
    """Along e_1 only the differing row has a gradient, so nothing but the shrink closes the gap."""
    x = np.zeros((n, 2))
    x[:, 1] = 1
    x[0] = [1, 0]
    x2 = x.copy()
    x2[0] = np.nan if null else [-1, 0]
    return (x, np.ones(n)), (x2, np.ones(n))


OPTIONS = [
    {"step": 0.3},
    {"step": "decreasing"},
    {"step": "sqrt", "average": "all"},
    {"lambda": 0.05},
    {"lambda": 0.05, "average": "all"},
    {"lambda": 0.05, "average": "suffix", "workers": 3},
    {"lambda": 0.2, "step": 0.1, "radius": 0.5},
    {"step": 0.2, "workers": 4, "average": "all"},
    {"lambda": 0.05, "fit_intercept": True, "feature_bound": 2.0},
]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 30])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss", ["logistic", "huber", "squared"])
def test_neighbours_stay_within_the_declared_sensitivity(
    loss: str, options: dict[str, Any], batch_size: int, adjacency: str
) -> None:
    n, d, null = 30, 4, adjacency == "zero-out"
    extra = {"huber_h": 0.5} if loss == "huber" else {}
    if loss == "squared" and options.get("step") == 0.3:
        extra = {"clip": 0.5}
    spec = Spec.create(
        "bolton", loss, 1.0, 0.0, {**options, **extra, "batch_size": batch_size, "epochs": 3, "adjacency": adjacency}
    )
    rng = np.random.default_rng(1)
    plan = make_plan(spec, n, d)
    for _ in range(12):
        measured = distance(plan, random_pair(rng, loss, n, d, null), rng.permutation(n))
        assert measured <= plan.sensitivity
    plan = make_plan(spec, n, 2)
    for order in (np.arange(n), np.roll(np.arange(n), 1), np.roll(np.arange(n), -(n // 2)), rng.permutation(n)):
        assert distance(plan, worst_pair(n, null), order) <= plan.sensitivity


@pytest.mark.parametrize("batch_size", [1, 7, 50])
@pytest.mark.parametrize(
    "options",
    [{"lambda": 1e-3}, {"step": 0.01}, {"lambda": 1e-3, "average": "all"}, {"step": 0.01, "workers": 2}],
    ids=str,
)
def test_the_bound_is_tight(options: dict[str, Any], batch_size: int) -> None:
    """Some order of the worst tables comes within 0.6 of the bound: half the bound, or a /b too much, would fail."""
    n = 2000
    spec = Spec.create("bolton", "huber", 1.0, 0.0, {**options, "batch_size": batch_size, "epochs": 5})
    plan = make_plan(spec, n, 2)
    orders = [np.roll(np.arange(n), shift) for shift in (0, n // 4, n // 2, n - 1)]
    measured = max(distance(plan, worst_pair(n, False), order) for order in orders)
    assert 0.6 * plan.sensitivity <= measured <= plan.sensitivity


# ---- what has no proof is refused ----


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"loss": "hinge"}, "not smooth"),
        ({"loss": "huber", "step": 0.5}, "above 2/beta"),
        ({"loss": "huber", "step": 0.3, "lambda": 0.1}, "above 1/beta"),
        ({"loss": "logistic", "tolerance": 0.1}, 'unknown option "tolerance"'),
    ],
)
def test_refuses_what_has_no_proof(what: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        bismarck_dp.explain(n=100, d=3, epsilon=1, **what)
    bismarck_dp.explain(n=100, d=3, algorithm="sgd", **what)
