"""Record and play over every registered solver, loss and option: with the noise off, neighbours stay within the bound.

The options are tried in combinations that hold every pair of values at least once. A solver, loss or option is covered
on the day it is registered: its trial values are part of its registration.
"""

from __future__ import annotations

import zlib
from itertools import combinations
from typing import Any

import kernels
import numpy as np
import pytest

from bismarck_dp import Plan, Spec, make_plan
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.neighbours import Pair, aligned, label_range, pairs
from bismarck_dp.recordplay import distance, orders, places, play, worst
from bismarck_dp.solvers import SOLVERS
from bismarck_dp.spec import OPTIONS

N, D = 30, 3
PRIVATE = [name for name, solver in SOLVERS.items() if solver.private]
BUDGETS = (0.0, 1e-3)

Options = dict[str, Any]


def generator(*what: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def covering(values: dict[str, tuple[Any, ...]], rng: np.random.Generator) -> list[Options]:
    """Combinations that hold every pair of values of two options, each filled up greedily with pairs not yet held."""
    names = list(values)
    missing = {
        (a, i, b, j) for a, b in combinations(names, 2) for i in range(len(values[a])) for j in range(len(values[b]))
    }
    made = []
    while missing:
        a, i, b, j = min(missing)
        chosen = {a: i, b: j}
        for name in rng.permutation([name for name in names if name not in chosen]).tolist():
            chosen[name] = max(
                range(len(values[name])), key=lambda k: (_news(chosen, name, k, names, missing), rng.random())
            )
        missing -= set(_held(chosen, names))
        made.append({name: values[name][k] for name, k in chosen.items() if values[name][k] is not None})
    return made


def _held(chosen: dict[str, int], names: list[str]) -> list[tuple[str, int, str, int]]:
    present = [name for name in names if name in chosen]
    return [(a, chosen[a], b, chosen[b]) for a, b in combinations(present, 2)]


def _news(chosen: dict[str, int], name: str, k: int, names: list[str], missing: set[Any]) -> int:
    """How many pairs not yet held another choice brings."""
    with_it = {**chosen, name: k}
    return sum(pair in missing for pair in _held(with_it, names) if name in (pair[0], pair[2]))


def planned(algorithm: str, loss: str, options: Options, n: int = N, d: int = D) -> Plan | None:
    """The plan at the first budget the solver takes, or None where it refuses the options."""
    for delta in BUDGETS:
        try:
            return make_plan(Spec.create(algorithm, loss, 1.0, delta, options), n, d)
        except BismarckError:
            continue
    return None


def trials(algorithm: str) -> list[Options]:
    values = {name: option.trials for name, option in OPTIONS.items() if name in SOLVERS[algorithm].options}
    return covering(values, generator(algorithm))


def many_classes(algorithm: str, loss: str) -> list[Options]:
    """The same combinations once more for four classes, by turns one joint loss and one against the rest."""
    kinds = ("softmax", "ovr") if loss == "logistic" else ("ovr",)
    if not SOLVERS[algorithm].many or not LOSSES[loss].classification:
        return []
    classes = {"classes": [0, 1, 2, 5]}
    return [{**options, **classes, "multiclass": kinds[i % len(kinds)]} for i, options in enumerate(trials(algorithm))]


GRID = [
    (algorithm, loss, options)
    for algorithm in PRIVATE
    for loss in LOSSES
    for options in [*trials(algorithm), *many_classes(algorithm, loss)]
]
PLANS = [(a, loss, options, plan) for a, loss, options in GRID if (plan := planned(a, loss, options)) is not None]


def test_every_pair_of_option_values_is_tried() -> None:
    for algorithm in PRIVATE:
        tried = trials(algorithm)
        names = [name for name in OPTIONS if name in SOLVERS[algorithm].options]
        for a, b in combinations(names, 2):
            wanted = {(repr(v), repr(w)) for v in OPTIONS[a].trials for w in OPTIONS[b].trials}
            assert {(repr(options.get(a)), repr(options.get(b))) for options in tried} == wanted


def test_every_private_solver_has_plans_for_most_options() -> None:
    """A loss without a proof is refused whole; of the others, most combinations have a plan that can be tested."""
    for algorithm in PRIVATE:
        counts = {loss: sum(a == algorithm and name == loss for a, name, _, _ in PLANS) for loss in LOSSES}
        accepted = [loss for loss, count in counts.items() if count > 0]
        assert "logistic" in accepted
        tried = {loss: len(trials(algorithm)) + len(many_classes(algorithm, loss)) for loss in accepted}
        assert all(counts[loss] > tried[loss] / 2 for loss in accepted)


@pytest.mark.parametrize(
    ("algorithm", "loss", "options", "plan"), PLANS, ids=lambda value: "" if isinstance(value, Plan) else str(value)
)
def test_neighbours_stay_within_the_declared_sensitivity(
    algorithm: str, loss: str, options: Options, plan: Plan
) -> None:
    """Known bad pairs, awkward rows, random rows, and what a hill climb over the differing row finds."""
    rng = generator(algorithm, loss, options)
    assert plan.sensitivity is not None
    for place in places(plan):
        for pair in pairs(plan, rng):
            assert distance(plan, pair, orders(plan, rng, place), kernels.play) <= plan.sensitivity, pair.name
    pair, reached = worst(plan, rng, kernels.play)
    assert reached <= plan.sensitivity, pair.name


TIGHT: list[tuple[str, Options]] = [
    ("huber", {"lambda": 0.05, "batch_size": 4, "epochs": 3}),
    ("huber", {"step": 0.01, "batch_size": 7, "workers": 3}),
    ("huber", {"lambda": 0.05, "batch_size": 4, "average": "all"}),
    ("logistic", {"step": 2.0, "batch_size": 1, "epochs": 1}),
    ("logistic", {"step": 0.5, "batch_size": 1, "epochs": 2}),
    ("squared", {"lambda": 0.05, "batch_size": 1}),
    ("squared", {"step": 0.01, "batch_size": 4, "average": "suffix"}),
]


OUTPUT = [name for name in PRIVATE if SOLVERS[name].perturbs == "output"]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("loss", "options"), TIGHT, ids=str)
@pytest.mark.parametrize("algorithm", OUTPUT)
def test_output_perturbation_is_tight(algorithm: str, loss: str, options: Options, adjacency: str) -> None:
    """Half the bound, or a /b too much, would be found out: some pair reaches more than half of it."""
    plan = planned(algorithm, loss, {**options, "adjacency": adjacency})
    assert plan is not None
    assert plan.sensitivity is not None
    _, reached = worst(plan, generator(loss, options, adjacency), kernels.play)
    assert 0.5 * plan.sensitivity <= reached <= plan.sensitivity


SUMS = [name for name in PRIVATE if SOLVERS[name].perturbs == "sums" and name != "dpscd_seq"]
"""But for the one whose bound is for the worst that could be, not for what is (test_dual_privacy.py)."""


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(
    ("loss", "options"),
    [("hinge", {}), ("huber", {"feature_bound": 3.0}), ("squared", {"clip": 0.5}), ("logistic", {"clip": 0.2})],
    ids=str,
)
@pytest.mark.parametrize("algorithm", SUMS)
def test_noise_on_sums_is_tight(algorithm: str, loss: str, options: Options, adjacency: str) -> None:
    """Half the jump, or a clip that cuts too late, would be found out: some pair of sums is nearly as far apart."""
    # Moves are long at first, and where the regulariser leaves little to gain.
    strong = {"lambda": 10.0, "epochs": 1} if SOLVERS[algorithm].remembers else {}
    nearly_reached(algorithm, loss, {**options, **strong, "adjacency": adjacency})


def nearly_reached(algorithm: str, loss: str, options: Options) -> None:
    plan = planned(algorithm, loss, options)
    assert plan is not None
    assert plan.sensitivity is not None
    _, reached = worst(plan, generator(algorithm, loss, options), kernels.play)
    assert 0.9 * plan.sensitivity <= reached <= plan.sensitivity


COORDINATES = [name for name in PRIVATE if SOLVERS[name].perturbs == "coordinates"]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(
    ("loss", "options"),
    [("huber", {}), ("squared", {"clip": 0.5}), ("logistic", {"clip": 0.2, "private_constants": 0.2})],
    ids=str,
)
@pytest.mark.parametrize("algorithm", COORDINATES)
def test_noise_on_coordinates_is_tight(algorithm: str, loss: str, options: Options, adjacency: str) -> None:
    """Half the jump, or a cut that comes too late, would be found out: some coordinate moves nearly as far."""
    nearly_reached(algorithm, loss, {**options, "adjacency": adjacency})


@pytest.mark.parametrize("batch_size", [1, 50])
@pytest.mark.parametrize("options", [{"lambda": 1e-3}, {"lambda": 1e-3, "average": "all"}, {"step": 0.01}], ids=str)
def test_long_runs_are_tight(options: Options, batch_size: int) -> None:
    """Hundreds of updates, where the paper's formula for batches is 50 times too small."""
    plan = planned("bolton", "huber", {**options, "batch_size": batch_size, "epochs": 5}, n=2000, d=2)
    assert plan is not None
    assert plan.sensitivity is not None
    spots = (0, 500, 1000, 1999)
    reached = [distance(plan, aligned(plan), orders(plan, generator(spot), spot), kernels.play) for spot in spots]
    assert 0.6 * plan.sensitivity <= max(reached) <= plan.sensitivity


def test_c_and_numpy_play_alike() -> None:
    for algorithm, loss, options, plan in PLANS[::7]:
        rng = generator(algorithm, loss, options)
        table, in_orders = pairs(plan, rng)[-1].tables()[0], orders(plan, rng)
        np.testing.assert_allclose(
            kernels.play(plan, table, in_orders), play(plan, table, in_orders), rtol=0, atol=1e-9
        )


def stopping_pair(plan: Plan) -> Pair:
    """The pair on which stopping when the loss stops falling ends 20 apart: n - 1 rows s e, and one row e or -e."""
    base = aligned(plan)
    rows = np.zeros((plan.n, plan.d))
    rows[:, 0] = np.sqrt(5 / (3 * plan.n))
    return Pair("stopping", rows, base.labels, base.first, base.second)


def test_planned_passes_withstand_the_stopping_instance() -> None:
    plan = planned("bolton", "huber", {"lambda": 5e-5, "epochs": 4, "batch_size": 1}, n=20_000, d=1)
    assert plan is not None
    assert plan.sensitivity is not None
    for place in (0, 10_000, 19_999):
        in_orders = orders(plan, generator(place), place)
        assert distance(plan, stopping_pair(plan), in_orders, kernels.play) <= plan.sensitivity


def test_pairs_differ_in_one_row_and_keep_to_the_adjacency() -> None:
    for adjacency in ("replace", "zero-out"):
        plan = planned("bolton", "logistic", {"adjacency": adjacency})
        assert plan is not None
        for pair in pairs(plan, generator()):
            (x, y), (x2, y2) = pair.tables()
            assert np.array_equal(x[1:], x2[1:])
            assert np.array_equal(y[1:], y2[1:])
            assert not np.array_equal(x[0], x2[0], equal_nan=True) or y[0] != y2[0]
            assert adjacency == "replace" or np.isnan(x2[0]).all()
        assert label_range(plan) == (-1.0, 1.0)
