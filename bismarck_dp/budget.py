"""What a table may spend in its whole life, what a release costs, and when it is paid.

A table's total is (epsilon, delta). Requests are adaptive: each may depend on everything that was released before. So
what is spent is looked at as a filter does it: before a release, with that release counted in.

A release is paid if, with it,
  A  Renyi divergences add up to at most `rho` times the order, and what computed noise may go wrong with (`slack`)
     to at most `slack`; or
  B  epsilons add up to at most `epsilon`, and deltas to at most `summed_delta`; or
  C  it is the first, and within epsilon and delta by itself.
Composition "zcdp" has all three; composition "pure", and any total without delta, has the sums alone, and all of delta
for them.

Claim: all releases together are (epsilon, delta)-DP.

A alone. The order a is fixed before the first release. While the divergences of order a of the releases, given those
before, stay within a rho, the whole has a divergence of at most a rho (Feldman and Zrnic 2021, Theorem 3.1), which is
(epsilon, c delta)-DP for c = CONVERTED (`order_bound`; Canonne, Kamath and Steinke 2020, Proposition 12). That is so of
releases with laws R", from which what is computed is away by at most `slack` each in total variation (`stopping` has
the lemma). So all that is computed is at most the sum of slacks away, which costs (1 + e^epsilon) of it: a share of
LEFT_OVER of delta.

B alone. The simple sums are a filter too (Rogers, Roth, Ullman and Vadhan 2016): (epsilon, summed_delta)-DP.

A or B. Let E be the transcripts that end within A, and F the others. The sums only grow, so whatever is in F was
within B when its last release was paid. The mechanism that stops before A is exceeded gives those in E the same
probabilities, and the one that stops before B is exceeded those in F. For any set S of transcripts, therefore,
P(S) = P(S and E) + P(S and F) <= e^epsilon Q(S) + delta_A + delta_B, and (CONVERTED + LEFT_OVER + SUMMED) delta is
delta.

C. If the first release is within A or B, C adds nothing. If it is not, nothing follows it, because sums only grow: it
is the only release, and which one it is does not depend on rows. QED

Another total, set after something was spent, with the order kept. Every transcript has one total under which its last
release was paid, and ends within A or B of that one, or in C. The argument above holds for the transcripts of each
total, so that all releases together are (the largest epsilon, the sum of the deltas)-DP, if the totals were chosen
without looking at what came out. QED

Prices of sampled or computed noise: `renyi` and `stopping`. rho is the divergence over the order, which for a Gaussian
is the rho of zero-concentrated DP, whatever the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Context, Decimal

from .accounting import Event
from .errors import BismarckError
from .mechanisms import log1p_exp
from .plan import Plan
from .renyi import ORDERS, PAID, Curve, Orders, curve_of, largest
from .spec import SMALLEST, SMALLEST_DELTA
from .stopping import Trials, computed
from .tuning import portions_event

COMPOSITIONS = ("zcdp", "pure")

CONVERTED, LEFT_OVER, SUMMED = 0.4, 0.1, 0.5
"""Shares of delta: for converting divergences, for what computed noise leaves over, and for the sums."""

DIGITS = Context(prec=2000)

ROOM = 1e-3
"""What is paid beyond the price of a plan that may have to be made again."""

DOWN = 1 - 1e-9
"""Bounds are computed in doubles, and taken from below."""

MOST_EPSILON = 1e3

LEAST_SLACK = 1e-300
"""Below that doubles lose digits, or are 0: nothing that may go wrong is cheaper, and no total has less but none."""


@dataclass(frozen=True)
class Total:
    """What all releases may spend. Without rho there are simple sums alone."""

    epsilon: float
    delta: float
    composition: str = "zcdp"
    order: float | None = None
    rho: float | None = None
    slack: float | None = None
    summed_delta: float = 0.0

    @classmethod
    def create(cls, epsilon: float, delta: float, composition: str = "zcdp", order: float | None = None) -> Total:
        """The bounds that follow from a total. An `order` that releases were priced at is kept."""
        _check(epsilon, delta, composition)
        if composition == "pure" or delta == 0:
            return cls(epsilon, delta, composition, order, summed_delta=delta)
        order = _best_order(epsilon, delta) if order is None else order
        summed = SUMMED * delta
        if order is None or (bound := order_bound(order, epsilon, delta)) <= 0:
            return cls(epsilon, delta, composition, order, summed_delta=summed)
        slack = LEFT_OVER * delta * math.exp(-log1p_exp(epsilon)) * DOWN
        slack = slack if slack >= LEAST_SLACK else 0.0
        return cls(epsilon, delta, composition, order, bound / order * DOWN, slack, summed)

    def sums_left(self, spent: Spent) -> tuple[float, float]:
        """Epsilon and delta that simple sums would still pay; all of delta for the first release."""
        delta = self.summed_delta if spent.releases else self.delta
        return float(exact(self.epsilon) - spent.epsilon), float(exact(delta) - spent.delta)


def _check(epsilon: float, delta: float, composition: str) -> None:
    if not SMALLEST <= epsilon <= MOST_EPSILON:
        raise BismarckError(f"epsilon is {epsilon:g}", f"it must be from {SMALLEST:g} to {MOST_EPSILON:g}")
    if not (delta == 0 or SMALLEST_DELTA <= delta < 1):
        raise BismarckError(f"delta is {delta:g}", f"it must be 0, or from {SMALLEST_DELTA:g} to below 1")
    if composition not in COMPOSITIONS:
        raise BismarckError(f'unknown composition "{composition}"', f"choose one of {', '.join(COMPOSITIONS)}")


def order_bound(order: float, epsilon: float, delta: float) -> float:
    """The largest divergence of this order that is (epsilon, CONVERTED delta)-DP."""
    converted = math.log(CONVERTED * delta)
    return epsilon - math.log1p(-1 / order) + (converted + math.log(order)) / (order - 1)


def _best_order(epsilon: float, delta: float) -> float | None:
    """That at which most Gaussian releases fit; None where no order has room for any."""
    finite = [order for order in ORDERS if math.isfinite(order)]
    best = max(finite, key=lambda order: order_bound(order, epsilon, delta) / order)
    return best if order_bound(best, epsilon, delta) > 0 else None


@dataclass(frozen=True)
class Price:
    """What one release costs. Without an order, and where no divergence is known, there is no rho."""

    event: Event
    epsilon: float
    delta: float
    order: float | None = None
    rho: float | None = None
    slack: float = 0.0
    entry: int | None = None
    """of the ledger, once it is paid"""

    def with_room(self) -> Price:
        """A little more, for rows that come or go before they are read: plans for other numbers of rows, of the same
        epsilon and delta, differ in a fraction of a thousandth.
        """
        return replace(self, rho=None if self.rho is None else self.rho * (1 + ROOM), slack=self.slack * (1 + ROOM))

    def covers(self, other: Price) -> bool:
        """Whether who has paid this has paid for the other release too."""
        cheaper = self.rho is None or (other.rho is not None and other.rho <= self.rho)
        return cheaper and other.epsilon <= self.epsilon and other.delta <= self.delta and other.slack <= self.slack


def dearest(prices: Sequence[Price]) -> Price:
    """One price for releases of one epsilon and delta, of which any may happen; the event is the first one's."""
    known = [price.rho for price in prices if price.rho is not None]
    rho = max(known) if len(known) == len(prices) else None
    return replace(prices[0], rho=rho, slack=max(price.slack for price in prices))


def price_of_event(event: Event, epsilon: float, delta: float, adjacency: str, order: float | None) -> Price:
    """Of a release whose noise is exact."""
    if order is None:
        return Price(event, epsilon, delta)
    return Price(event, epsilon, delta, order, _rho(curve_of(event, adjacency, (order,)), order))


def price_of_plan(plan: Plan, order: float | None) -> Price:
    """Of one training."""
    return _price_of(plan.event, [plan], order)


def price_of_portions(plans: list[Plan], order: float | None) -> Price:
    """Of all candidates on portions of their own, and the choice among them. A row is in one portion, so that
    divergences are the largest; but every portion's noise is computed.
    """
    return _price_of(portions_event(plans), plans, order)


def _price_of(event: Event, plans: Sequence[Plan], order: float | None) -> Price:
    spec = plans[0].spec
    if spec.epsilon is None:
        raise ValueError("what is not private has no price")
    if order is None:
        return Price(event, spec.epsilon, spec.delta)
    excess = max(plan.noise.excess for plan in plans)
    curve = computed(curve_of(event, str(spec.options["adjacency"]), (order,)), excess)
    return Price(event, spec.epsilon, spec.delta, order, _rho(curve, order), sum(map(_rare, plans)))


def price_of_trials(trials: Trials, order: float | None, epsilon: float, delta: float) -> Price:
    """Of random stopping: every trial as computed, then the best of them. Trials are E[K] times as far from R" as one,
    and cutting K off is one more difference.
    """
    if order is None:
        return Price(trials.event, epsilon, delta)
    orders: Orders = ORDERS if order in ORDERS else (*ORDERS, order)
    adjacency = str(trials.plans[0].spec.options["adjacency"])
    made = [computed(curve_of(plan.event, adjacency, orders), plan.noise.excess) for plan in trials.plans]
    curve = trials.stopping.curve(largest([*made, curve_of(trials.score_event, adjacency, orders)]))
    at = Curve((order,), curve.divergences[[orders.index(order)]])
    slack = trials.stopping.mean * max(map(_rare, trials.plans)) + (_slack(trials.cut) if delta > 0 else 0.0)
    return Price(trials.event, epsilon, delta, order, _rho(at, order), slack)


def _rare(plan: Plan) -> float:
    """How far what is computed may be from R", in total variation."""
    return 0.0 if math.isinf(plan.noise.rarity) else _slack(3 * math.exp(-plan.noise.rarity) * (1 + PAID))


def _slack(probability: float) -> float:
    """Of something that may happen, however rarely."""
    return max(probability, LEAST_SLACK)


def _rho(curve: Curve, order: float) -> float | None:
    rho = float(curve.divergences[0]) / order * (1 + PAID)
    return rho if math.isfinite(rho) else None


@dataclass(frozen=True)
class Spent:
    """Sums over what was paid. Decimal numbers, as the ledger keeps them: thrice 0.1 is 0.3."""

    releases: int = 0
    unpriced: int = 0
    rho: Decimal = Decimal(0)
    slack: Decimal = Decimal(0)
    epsilon: Decimal = Decimal(0)
    delta: Decimal = Decimal(0)

    def plus(self, price: Price) -> Spent:
        return Spent(
            self.releases + 1,
            self.unpriced + (price.rho is None),
            added(self.rho, price.rho or 0.0),
            added(self.slack, price.slack),
            added(self.epsilon, price.epsilon),
            added(self.delta, price.delta),
        )

    def within(self, total: Total) -> bool:
        """Whether the last of these releases is paid: A, B or C."""
        return (
            self.diverges_within(total)
            or self.sums_within(total)
            or (self.releases == 1 and self._sums_within(total, total.delta))
        )

    def diverges_within(self, total: Total) -> bool:
        """A."""
        if total.rho is None or total.slack is None or self.unpriced > 0:
            return False
        return self.rho <= exact(total.rho) and self.slack <= exact(total.slack)

    def sums_within(self, total: Total) -> bool:
        """B."""
        return self._sums_within(total, total.summed_delta)

    def _sums_within(self, total: Total, delta: float) -> bool:
        return self.epsilon <= exact(total.epsilon) and self.delta <= exact(delta)

    def cost(self, total: Total) -> tuple[float, float]:
        """Epsilon and delta of all of it, as sums or as divergences say, whichever epsilon is the smaller; what nothing
        more can be paid by has no say. Divergences take all of the total's delta, or more if the total was lowered
        since.
        """
        if self.releases == 0:
            return 0.0, 0.0
        sums = float(self.epsilon), float(self.delta)
        if total.order is None or total.composition == "pure" or total.delta == 0 or self.unpriced:
            return sums
        if self.sums_within(total) and not self.diverges_within(total):
            return sums
        left = total.order * float(self.rho) - order_bound(total.order, 0.0, total.delta)
        wrong = float(self.slack) * (1 + math.exp(min(max(0.0, left), 700.0)))
        diverged = max(0.0, left), min(1.0, max(total.delta, CONVERTED * total.delta + wrong))
        return min(sums, diverged) if sums[1] <= total.delta else diverged


def exact(number: float) -> Decimal:
    """The shortest decimal that is read back as this double: what JSON says, and what the ledger keeps."""
    return Decimal(repr(float(number)))


def added(total: Decimal, number: float) -> Decimal:
    """The exact sum: with so many digits nothing is rounded that a double can be."""
    return DIGITS.add(total, exact(number))


TRIES, CLOSE = 8, 1.005


def largest_epsilon(total: Total, spent: Spent, asked: float, price_at: Callable[[float], Price]) -> float | None:
    """An epsilon below the one that was asked for, in three digits, whose release would be paid: nearly the largest.
    Plans take time, so the search begins where divergences, which grow with its square, or sums leave off. None if
    there is none above a ten thousandth of it, or of the total.
    """

    def fits(epsilon: float) -> bool:
        try:
            return spent.plus(price_at(epsilon)).within(total)
        except BismarckError:  # no plan at all
            return False

    lowest = min(asked, total.epsilon) / 10_000
    low, high = lowest, asked
    left = float(exact(total.epsilon) - spent.epsilon)
    guesses = [left, *(by * _guess(total, spent, asked, price_at) for by in (1 / CLOSE, CLOSE))]
    for guess in [three_digits(guess) for guess in guesses if low < guess < asked]:
        if low < guess < high:
            low, high = (guess, high) if fits(guess) else (low, guess)
    for _ in range(TRIES):
        if high <= low * CLOSE:
            break
        middle = three_digits(math.sqrt(low * high))
        low, high = (middle, high) if fits(middle) else (low, middle)
    low = three_digits(low)
    return low if low > lowest or fits(low) else None


def _guess(total: Total, spent: Spent, asked: float, price_at: Callable[[float], Price]) -> float:
    price = price_at(asked)
    if total.rho is None or not price.rho:
        return 0.0
    return asked * math.sqrt(max(0.0, total.rho - float(spent.rho)) / price.rho)


def three_digits(number: float) -> float:
    """Rounded down."""
    digits = 2 - math.floor(math.log10(number))
    return float(exact(number).quantize(Decimal(1).scaleb(-digits), ROUND_DOWN))
