"""The privacy of dual coordinate descent: exact small cases against the accountant, draws and noise against their laws,
memories against what must not reach them, and the accounting against dp-accounting.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import kernels
import numpy as np
import pytest
from conftest import two_classes
from dp_accounting import pld
from scipy import stats
from sqlalchemy.exc import DBAPIError
from statistics_of import LEVEL, check_moments
from test_dual import planned
from test_noisy import begun, noisy_binomial

from bismarck_dp import Spec, explain, poisson
from bismarck_dp.accounting import Event
from bismarck_dp.ascent import Dual
from bismarck_dp.controller.database import Database
from bismarck_dp.losses import LOSSES
from bismarck_dp.neighbours import aligned
from bismarck_dp.recordplay import distance, orders, worst

Floats = Any


# ---- the argument about hidden variables, on cases small enough for exact likelihoods ----


class Case:
    """One row in one dimension, T steps, squared loss: the law of the noisy sums by adding up over all histories of the
    row's own coins. What other rows add is the same on both sides, and left out.
    """

    def __init__(self, label: float, steps: int, rate: float, sigma: float, strength: float) -> None:
        self.label, self.steps, self.rate, self.sigma, self.strength = label, steps, rate, sigma, strength

    def move(self, a: Floats, v: Floats) -> Floats:
        """Clipped to 1, as the kernels do it; a row that counts for nothing has no label."""
        if math.isnan(self.label):
            return np.zeros(np.broadcast(a, v).shape)
        at = np.broadcast_arrays(a, v)
        dual = LOSSES["squared"].dual(at[1] / self.strength, np.full(at[0].shape, self.label), at[0],
                                      np.full(at[0].shape, 1 / self.strength), math.inf)  # fmt: skip
        return np.clip(dual - at[0], -1, 1)

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """The noisy sums of so many runs, and the coins."""
        a, v = np.zeros(count), np.zeros(count)
        sums, coins = np.empty((count, self.steps)), rng.random((count, self.steps)) < self.rate
        for t in range(self.steps):
            move = np.where(coins[:, t], self.move(a, v), 0.0)
            sums[:, t] = move + self.sigma * rng.normal(size=count)
            a, v = a + move, v + sums[:, t]
        return sums, coins

    def log_density(self, sums: Floats, coins: Floats | None = None) -> Floats:
        """Of noisy sums; with coins, of sums and coins."""
        histories = itertools.product([0.0, 1.0], repeat=self.steps)
        each = [self._with(sums, np.tile(h, (len(sums), 1))) for h in histories] if coins is None else []
        return np.logaddexp.reduce(each, axis=0) if coins is None else self._with(sums, coins.astype(float))

    def _with(self, sums: Floats, coins: Floats) -> Floats:
        a, v, log = np.zeros(len(sums)), np.zeros(len(sums)), np.zeros(len(sums))
        for t in range(self.steps):
            move = coins[:, t] * self.move(a, v)
            log += stats.norm.logpdf(sums[:, t], move, self.sigma)
            log += np.where(coins[:, t] > 0, math.log(self.rate), math.log1p(-self.rate))
            a, v = a + move, v + sums[:, t]
        return log


def delta_of(losses: Floats, epsilon: float) -> tuple[float, float]:
    """E (1 - e^(epsilon - loss))+, and its standard error."""
    shares = -np.expm1(np.minimum(epsilon - losses, 0.0))
    return float(shares.mean()), float(shares.std() / math.sqrt(len(shares)))


RUNS = 200_000


def hidden_delta(
    first: Case, second: Case, epsilon: float, seen: bool, rng: np.random.Generator
) -> tuple[float, float]:
    """By sampling; with the coins in view, or not. A row that counts for nothing flips coins as well."""
    sums, coins = first.draw(RUNS, rng)
    shown = coins if seen else None
    return delta_of(first.log_density(sums, shown) - second.log_density(sums, shown), epsilon)


CASES = [(3, 0.3, 0.7, 1e6), (3, 0.3, 0.7, 2.0), (4, 0.5, 1.0, 0.3), (4, 0.15, 0.5, 1.0), (5, 0.4, 1.5, 0.05)]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("steps", "rate", "sigma", "strength"), CASES)
def test_hidden_variables_cost_no_more_than_the_accountant_says(
    steps: int, rate: float, sigma: float, strength: float, adjacency: str
) -> None:
    """Either way round, at several deltas; where all moves are cut to the clip, the accountant is met as well."""
    rng = np.random.default_rng(steps)
    one = Case(10.0, steps, rate, sigma, strength)
    other = Case(-10.0 if adjacency == "replace" else math.nan, steps, rate, sigma, strength)
    for delta in (0.1, 0.01):
        epsilon = poisson.epsilon((poisson.Step(sigma, rate, steps),), adjacency, delta)
        found = [hidden_delta(*pair, epsilon, False, rng) for pair in ((one, other), (other, one))]
        for value, error in found:
            assert value <= delta + 4 * error
        if strength == 1e6:
            assert max(value for value, _ in found) >= 0.95 * delta


def test_variables_that_are_seen_cost_more() -> None:
    """They tell whose coins fell how, and then nothing is amplified: the reason why they must not leave."""
    rng = np.random.default_rng(0)
    one, other = (Case(label, 4, 0.15, 0.5, 1e6) for label in (10.0, math.nan))
    epsilon = poisson.epsilon((poisson.Step(0.5, 0.15, 4),), "zero-out", 0.01)
    value, error = hidden_delta(one, other, epsilon, True, rng)
    assert value - 4 * error > 5 * 0.01


def fixed_size_delta(epsilon: float, sigma: float) -> float:
    """Batches of exactly one of two rows, at q = 1/2: the differing row adds 1 or -1, the other one -1."""
    z = np.linspace(-12, 12, 200_001)
    first = 0.5 * stats.norm.pdf(z, 1, sigma) + 0.5 * stats.norm.pdf(z, -1, sigma)
    second = stats.norm.pdf(z, -1, sigma)
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum() * (z[1] - z[0]))


def test_batches_of_a_fixed_size_cost_more_than_poisson_samples() -> None:
    """Where a row is left out, another one comes in its place: they must not be accounted as Poisson samples."""
    epsilon = poisson.epsilon((poisson.Step(1.0, 0.5, 1),), "replace", 0.01)
    assert fixed_size_delta(epsilon, 1.0) > 5 * 0.01


PAPER = {"absent": math.sqrt(2), "zeroed": math.sqrt(5), "replaced": 2 * math.sqrt(2)}
"""Of (a, v) together, over C, where both are noised as in the paper: what each kind of neighbour takes."""


def paper_jump(kind: str) -> float:
    """The largest change of (a, v) in one step of the paper's variant, over C, by a search over states and rows."""
    case, largest = Case(0.0, 1, 1.0, 1.0, 100.0), 0.0
    for a, v in itertools.product((-3.0, 0.0, 3.0), (-900.0, 0.0, 900.0)):
        ends: list[tuple[float, float, float]] = []
        for x, y in itertools.product((-1.0, 0.0, 1.0), (-9.0, 9.0)):
            case.label = y
            ends.append((x, y, float(case.move(np.array(a), np.array(v * x)))))
        for (x, y, move), (x2, y2, move2) in itertools.product(ends, repeat=2):
            if kind == "absent":
                largest = max(largest, math.hypot(move, move * x))
            elif kind == "replaced" or (x2 == 0 and y == y2):
                largest = max(largest, math.hypot(move - move2, move * x - move2 * x2))
    return largest


@pytest.mark.parametrize("kind", sorted(PAPER))
def test_the_papers_variant_needs_its_roots(kind: str) -> None:
    """With variables that are noised and released, C alone, or sqrt(2) C for all neighbours, would be too little."""
    assert paper_jump(kind) == pytest.approx(PAPER[kind])


# ---- memories ----


def memories_of(plan: Any, rows: Any, batch: Any) -> Any:
    run = kernels.Run({**plan.kernel_params(), "noise": "none"}, plan.width, "scd")
    assert run.solver.begin_pass(run.state, 0)
    run.take(run.state, rows, batch)
    return run.memory


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("algorithm", ["dpscd", "dpscd_seq"])
def test_a_row_never_reaches_the_memories_of_others(algorithm: str, loss: str) -> None:
    """Given v: or batches without the row would tell of it, and no sampling would amplify anything."""
    plan = planned(algorithm, loss, 20, 3, batch_size=20, **{"lambda": 1e-3})
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(20, 3)), rng.choice([-1.0, 1.0], 20)
    first, second = (kernels.packed((np.vstack([r, x[1:]]), y), plan) for r in (x[:1], 0.1 * x[:1]))
    batch = np.arange(20)
    one, other = (memories_of(plan, rows, batch) for rows in (first, second))
    assert one[0] != other[0]
    np.testing.assert_array_equal(one[1:], other[1:])


def test_sequential_memories_would_carry_a_row_into_batches_without_it() -> None:
    """Two rows in a batch, then the second alone: had its variable kept what it saw, its next move would differ."""
    plan = planned("dpscd_seq", "squared", 2, 1, batch_size=1, **{"lambda": 0.1})
    moves = []
    for label in (1.0, -1.0):
        dual = Dual.of(np.ones((2, 1)), [label, 0.0], plan)
        saw = dual.moves(np.array([0]), dual.v)
        dual.a[1] += dual.moves(np.array([1]), dual.v + saw)[0]
        moves.append(dual.moves(np.array([1]), dual.v)[0])
    assert abs(moves[0] - moves[1]) > 0.05 * plan.clip


def test_a_sequential_batch_has_no_more_rows_than_are_paid_for() -> None:
    plan = planned("dpscd_seq", "hinge", 50, 1, batch_size=5, **{"lambda": 10.0})
    run = kernels.Run({**plan.kernel_params(), "noise": "none", "most": 3}, 1, "scd")
    rows = np.ones((50, 2), np.float32)
    rows[[0, 2]] = 0  # rows that count for nothing keep none out
    assert run.solver.begin_pass(run.state, 0)
    run.take(run.state, rows, np.arange(10))
    assert np.flatnonzero(run.memory).tolist() == [1, 3, 4]
    assert plan.extra["most"] >= 30


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("loss", ["hinge", "huber", "squared"])
def test_sequential_sums_stay_far_within_their_bound(loss: str, strength: float) -> None:
    """Moves that minimise exactly pull v together: no pair was found whose sums are further apart than C, where
    (2 |B| - 1) C is declared.
    """
    options: dict[str, Any] = {"batch_size": 30, "lambda": strength, "adjacency": "zero-out", "epochs": 1}
    plan = planned("dpscd_seq", loss, 30, 3, clip=1e-3, **options)
    _, reached = worst(plan, np.random.default_rng(0), kernels.play)
    assert plan.sensitivity is not None
    assert 0.9 * plan.clip < reached <= plan.clip * (1 + 1e-6)
    assert plan.sensitivity > 58 * plan.clip


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("block", [1, 3])
def test_noise_on_moves_is_tight(block: int, adjacency: str) -> None:
    """A row can turn every move of a block over, if the rest leaves it to it."""
    options: dict[str, Any] = {"inner_iterations": block, "iterations": 1, "clip": 1e-4, "adjacency": adjacency}
    plan = planned("dpscd_primal", "huber", 30, 3, **options)
    pair = aligned(plan)
    row = np.full(3, 0.5)
    rows, labels = np.zeros((30, 3)), pair.labels
    rows[1] = -0.2  # pulls the other way, and wins where the row counts for nothing
    second = (np.full(3, math.nan), math.nan) if adjacency == "zero-out" else (-row, labels[0])
    pair = type(pair)("turned", rows, labels, (row, labels[0]), second)
    assert plan.sensitivity is not None
    found = distance(plan, pair, orders(plan, np.random.default_rng(0)), kernels.play)
    assert 0.99 * plan.sensitivity <= found <= plan.sensitivity


# ---- what leaves ----


@pytest.mark.parametrize("function", ["gap", "objective"])
def test_a_private_run_shows_no_gap_and_no_objective(db: Database, table: Any, function: str) -> None:
    rows = table(*two_classes(100, 3))
    spec = Spec.create("dpscd", "logistic", 1.0, 1e-6, {"lambda": 0.1})
    said = ""
    with begun(db, rows.name, spec, 100, 3) as (engine, packed, plan):
        engine.epoch(packed, plan)
        try:
            engine.connection.exec_driver_sql(f"SELECT bismarck_dp.{function}({packed.run})")
        except DBAPIError as refused:
            said = str(refused)
    assert "a private run shows no training loss" in said


def trained(
    db: Database, name: str, times: int, algorithm: str, loss: str, epsilon: float, memory: str = "64MB", **options: Any
) -> Any:
    """The rows of models that are forgotten again."""
    with db.engine.connect() as connection:
        connection.exec_driver_sql(f"SET LOCAL maintenance_work_mem = '{memory}'")
        connection.exec_driver_sql("SET LOCAL client_min_messages = error")
        found = connection.exec_driver_sql(
            "SELECT m.weights, m.noise_scale, m.plan FROM generate_series(1, %(k)s) AS i,"
            " LATERAL dp_train(%(t)s::regclass, 'model ' || i, 'y', '{x}', %(e)s, 0.01, %(a)s, %(l)s, %(o)s::jsonb)"
            " AS m",
            {"k": times, "t": name, "e": epsilon, "a": algorithm, "l": loss, "o": json.dumps(options)},
        ).all()
        connection.rollback()
    return found


def level_of(found: Any, factor: float, sums: int) -> float:
    """Of the hypothesis that factor times the weights is that many numbers with the declared noise, added up. They lie
    on a grid: spread over its cells, they are nearly normal again.
    """
    grid = found[0].plan["grid"]
    noise = np.array([row.weights for row in found]).ravel() * factor
    noise += grid * (np.random.default_rng(0).random(len(noise)) - 0.5)
    sigma = math.sqrt(sums * (found[0].noise_scale ** 2 + grid**2 / 12) + grid**2 / 12)
    return float(stats.kstest(noise / sigma, "norm").pvalue)


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("algorithm", ["dpscd", "dpscd_seq"])
def test_v_has_the_noise_of_every_batch(db: Database, table: Any, algorithm: str, adjacency: str) -> None:
    """Rows that count for nothing leave the noise alone: lambda n w is the sum of all batches' noise."""
    n, strength = 60, 0.5
    rows = table(np.zeros((n, 40)), np.ones(n))
    options = {"lambda": strength, "adjacency": adjacency, "epochs": 3, "batch_size": 10}
    found = trained(db, rows.name, 60, algorithm, "huber", 1.0, **options)
    assert found[0].plan["updates"] == 18
    assert level_of(found, strength * n, 18) > LEVEL


def test_moves_have_their_noise(db: Database, table: Any) -> None:
    """Blocks of all weights, without a regulariser, on rows that count for nothing."""
    rows = table(np.zeros((20, 30)), np.ones(20))
    options = {"iterations": 6, "inner_iterations": 30, "clip": 0.2}
    found = trained(db, rows.name, 100, "dpscd_primal", "logistic", 1.0, **options)
    assert level_of(found, 1.0, 6) > LEVEL
    expected = 2 * 0.2 * math.sqrt(30 * 6) * dp_accounting.get_sigma_gaussian(1.0, 0.01)
    assert found[0].noise_scale == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("memory", ["64MB", "1MB"])
def test_rows_are_drawn_by_independent_coins(db: Database, table: Any, memory: str) -> None:
    """Every row has a feature of its own and moves by the clip whenever it is drawn: how often is binomial. In batches
    of a fixed size from a shuffled table it would be once in each pass.
    """
    n, b, clip = 600, 60, 0.01
    rows = table(np.eye(n, dtype=np.float32), np.ones(n))
    options = {"epochs": 1, "batch_size": b, "clip": clip, "lambda": 1.0, "classes": [0, 1], "adjacency": "zero-out"}
    found = trained(db, rows.name, 10, "dpscd", "hinge", 400.0, memory, **options)
    drawn = np.array([row.weights for row in found]) * n / clip
    steps = -(-n // b)
    sigma = math.sqrt(steps * (found[0].noise_scale ** 2 + found[0].plan["grid"] ** 2 / 12)) / clip
    assert sigma < 1
    check_moments(drawn.ravel(), noisy_binomial(steps, b / n, sigma))


# ---- accounting ----


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("n", "b", "epochs"), [(1000, 50, 5), (60_000, 500, 10)])
def test_noise_on_v_is_that_of_dpsgd_at_the_same_clip(n: int, b: int, epochs: int, adjacency: str) -> None:
    """C for a row that joins a batch, sampled as Poisson says, and priced by dp-accounting at no more than epsilon."""
    spec: dict[str, Any] = {"loss": "hinge", "n": n, "d": 9, "epsilon": 1.0, "delta": 1e-6, "batch_size": b}
    spec |= {"epochs": epochs, "clip": 0.01, "adjacency": adjacency, "lambda": 0.01}
    found, peer = (explain(algorithm=algorithm, **spec) for algorithm in ("dpscd", "dpsgd"))
    assert found["noise_scale"] == peer["noise_scale"]
    assert found["sensitivity"] == pytest.approx(0.01 * (2 if adjacency == "replace" else 1), rel=1e-5)
    relation = dp_accounting.NeighboringRelation
    which = relation.REPLACE_ONE if adjacency == "replace" else relation.ADD_OR_REMOVE_ONE
    accountant = pld.PLDAccountant(which, value_discretization_interval=1e-4)
    accountant.compose(Event.from_json(found["event"]).to_dp_event())
    assert accountant.get_epsilon(1e-6) <= 1.0 + 2e-3
    assert found["noise_scale"] >= 0.01 * _multiplier(found["event"])


def _multiplier(event: dict[str, Any]) -> float:
    while "noise_multiplier" not in event:
        event = event["event"]
    return float(event["noise_multiplier"])


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
def test_sequential_noise_is_that_of_whole_batches(adjacency: str) -> None:
    """(2 |B| - 1) C for the largest batch of the run, where a row that joins one moves it by C in the parallel one."""
    spec: dict[str, Any] = {"loss": "hinge", "n": 5000, "d": 9, "epsilon": 1.0, "delta": 1e-6, "batch_size": 50}
    spec |= {"epochs": 5, "clip": 0.01, "adjacency": adjacency, "lambda": 0.01}
    parallel, sequential = (explain(algorithm=algorithm, **spec) for algorithm in ("dpscd", "dpscd_seq"))
    most = planned("dpscd_seq", **{k: v for k, v in spec.items() if k != "lambda"}, **{"lambda": 0.01}).extra["most"]
    assert 50 < most < 200
    assert stats.binom(5000, 0.01).sf(most) * 500 < 1e-6 * 1e-6
    assert sequential["noise_scale"] / parallel["noise_scale"] == pytest.approx(2 * most - 1, rel=1e-5)
    times = 2 * most if adjacency == "replace" else 2 * most - 1
    assert sequential["sensitivity"] == pytest.approx(times * 0.01, rel=1e-5)


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("blocks", "size"), [(1, 1), (20, 1), (10, 5)])
def test_noise_on_moves_is_that_of_their_cut(blocks: int, size: int, adjacency: str) -> None:
    """2 C sqrt(L), sqrt(T) times, whatever n is and whichever the neighbours are."""
    for n in (100, 10_000):
        found = explain(algorithm="dpscd_primal", loss="huber", n=n, d=9, epsilon=1.0, delta=1e-6, iterations=blocks,
                        inner_iterations=size, clip=0.3, adjacency=adjacency)  # fmt: skip
        assert found["sensitivity"] == pytest.approx(2 * 0.3 * math.sqrt(size))
        expected = found["sensitivity"] * math.sqrt(blocks) * dp_accounting.get_sigma_gaussian(1.0, 1e-6)
        assert found["noise_scale"] == pytest.approx(expected, rel=1e-5)
        assert found["noise_scale"] >= expected * (1 - 1e-9)


def test_without_a_clip_the_first_move_is_not_cut() -> None:
    """Of a row at its bounds; a longer clip would only add noise there."""
    first: Callable[..., float] = lambda loss, **o: planned("dpscd", loss, 1000, 2, batch_size=50, **o).clip  # noqa: E731
    curvature = 50 / (0.02 * 1000)
    assert first("squared", label_bound=3.0) == pytest.approx(3 / (1 + curvature))
    assert first("hinge") == pytest.approx(1 / curvature)
    assert first("huber", huber_h=0.5) == pytest.approx(1.5 / (1 + curvature))
    assert first("hinge", feature_bound=2.0) == pytest.approx(2 / (4 * curvature))
    assert first("hinge", clip=5.0) == 1.0
