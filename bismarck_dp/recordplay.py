"""Record and play: the same order, the same sampling, no noise, neighbouring tables. How far apart do they end?

The distance may never exceed the declared sensitivity, on no pair and in no order; `worst` looks for the pair that
comes nearest to it. It is that of what noise is added to: the released weights, or the first sum that the differing row
is in. (Later sums are taken at weights which are the same on both sides, being made of noisy sums: they are no other.
Where rows are remembered it is the last sum, after sums that were the same: what a row remembers is its own.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import reference
from .coordinates import Rounds
from .losses import Array
from .neighbours import Pair, climb, pairs
from .plan import Plan
from .reference import Order, Rows

Orders = list[Order]

Play = Callable[[Plan, tuple[Array, Array], Orders], Array]
"""What a plan would release for a table without noise, its rows taken in one order for each pass."""

MOST_UPDATES = 100_000
"""Of each kind of search; more would take minutes."""


def play(plan: Plan, table: tuple[Array, Array], orders: Orders) -> Array:
    """In NumPy; tests have the same through the C kernels and through the server."""
    features, labels = reference.pack(*table, plan)
    return reference.PLAYERS[plan.perturbs](features, labels, plan, orders)


def released(plan: Plan, table: tuple[Array, Array], orders: Orders) -> Array:
    """The weights without noise."""
    return reference.train(*reference.pack(*table, plan), plan, orders)


def noise_alone(plan: Plan, rng: np.random.Generator, times: int) -> Array:
    """Weights made of noise on sums and nothing else, as rows that count for nothing leave them."""
    features, labels = np.zeros((plan.n, plan.row_width), np.float32), np.zeros(plan.n, np.float32)
    noise = reference.random_noise(plan, rng)
    return np.array([reference.train(features, labels, plan, orders(plan, rng), noise) for _ in range(times)])


def orders(plan: Plan, rng: np.random.Generator, place: int | None = None) -> Orders:
    """Random orders as the plan shuffles; `place` is where row 0, the differing one, comes in every pass."""

    if isinstance(plan.schedule, Rounds) and plan.schedule.distinct:
        return [rng.permutation(plan.width)[: plan.schedule.steps] for _ in range(plan.schedule.rounds)]
    if isinstance(plan.schedule, Rounds):
        return [rng.integers(plan.width, size=plan.schedule.steps) for _ in range(plan.schedule.rounds)]
    if plan.schedule.shuffle == "poisson":
        return [samples(plan, rng, place) for _ in range(plan.schedule.passes)]

    def order() -> Rows:
        others = rng.permutation(np.arange(1, plan.n))
        return np.insert(others, int(rng.integers(plan.n)) if place is None else place, 0)

    if plan.schedule.shuffle == "once":
        return [order()] * plan.schedule.passes
    return [order() for _ in range(plan.schedule.passes)]


def samples(plan: Plan, rng: np.random.Generator, place: int | None = None) -> list[Rows]:
    """Poisson samples for a pass; with a `place`, row 0 joins the batch there and no other."""
    steps, probability = plan.schedule.updates(plan.n), plan.schedule.probability
    assert probability is not None
    taken = rng.random((steps, plan.n)) < probability
    if place is not None:
        taken[:, 0] = np.arange(steps) == place // plan.schedule.batch_size
    return [np.flatnonzero(rows) for rows in taken]


def places(plan: Plan) -> list[int | None]:
    """Where bounds are attained: first, last, the start of the last batch, and anywhere."""
    last_batch = plan.n - 1 - (plan.n - 1) % plan.schedule.batch_size
    return [0, plan.n - 1, last_batch, None]


def distance(plan: Plan, pair: Pair, in_orders: Orders, by: Play = play) -> float:
    """Of vectors that get noise as vectors; of coordinates that get noise one by one, the farthest."""
    first, second = (by(plan, table, in_orders) for table in pair.tables())
    return float(np.linalg.norm(first - second, ord=np.inf if plan.perturbs == "coordinates" else 2))


def affordable(plan: Plan, wanted: int) -> int:
    """As many plays of two tables as are wanted, or fewer where one takes long; at least one."""
    updates = plan.schedule.total_updates
    return max(1, min(wanted, MOST_UPDATES // (2 * updates)))


def worst(plan: Plan, rng: np.random.Generator, by: Play = play) -> tuple[Pair, float]:
    """The pair, in the order, that comes nearest to the declared sensitivity, and how far apart it ends."""
    found: list[tuple[Pair, float, Orders]] = []
    for place in places(plan)[-affordable(plan, 4) :]:
        in_orders = orders(plan, rng, place)
        found += [(pair, distance(plan, pair, in_orders, by), in_orders) for pair in pairs(plan, rng)]
    pair, _, where = max(found, key=lambda one: one[1])
    return climb(pair, plan, lambda moved: distance(plan, moved, where, by), rng, affordable(plan, 200))
