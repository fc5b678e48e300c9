"""The sensitivity's arithmetic: the recursion against a brute-force one; test_recordplay.py has the tables."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

import bismarck_dp
from bismarck_dp.errors import BismarckError
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
