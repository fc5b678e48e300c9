"""What a release costs: events that say what happened, and their prices. How much noise it takes: `calibrators`.

Events mirror dp-accounting's classes, field by field, so that anybody can price them again; they are plain data and do
not need the library, whose import takes seconds.

Convention. `noise_multiplier` is the noise's scale over the sensitivity *under the release's own adjacency*: for
`replace` the sensitivity already has its factor 2, so a Gaussian or Laplace event is priced as it stands, never doubled
again. Only inside a PoissonSampledDpEvent is it the scale over the clip norm of one row, because there the adjacency
changes the mixture and not just the distance: `poisson` does the doubling, as dp-accounting's PLD accountant does for
REPLACE_ONE. So a sampled Gaussian with probability 1 under `replace` is a Gaussian of half the multiplier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

from .errors import BismarckError

ADJACENCIES = ("replace", "zero-out")

MOST_NESTED = 50
"""Events within events that are read from JSON."""

LEAST, MOST = 1e-100, 1e100
"""Numbers of events, which must have squares and reciprocals."""

MOST_COUNT = 10**15
"""How often anything may happen: whole numbers below have their own floating point number."""

LEAST_MEAN, MOST_MEAN = 1 + 1e-6, 1e6
"""Of the number of trials."""

LEAST_SHAPE, MOST_SHAPE, NEAREST_SHAPE = -0.9, 100.0, 1e-6
"""Of their distribution; one that is nearer to 0 than the last, and not 0, is not told from it."""

MOST_CHOICES = 256
"""Ways for a row to be in one branch each of events side by side that are priced one by one."""


class Event:
    """Something that happened to the data, as far as privacy is concerned."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: the class's name and its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"name": type(self).__name__, **{name: _plain(value) for name, value in values.items()}}

    @staticmethod
    def from_json(json: Any) -> Event:
        """The event of such JSON; refuses what it does not know."""
        return _read(json, MOST_NESTED)

    def to_dp_event(self) -> Any:
        """The same event as an object of dp-accounting, which this imports."""
        try:
            import dp_accounting
        except ImportError:
            raise BismarckError("the library dp-accounting is not installed", "pip install dp-accounting") from None
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        kind = getattr(dp_accounting.dp_event, type(self).__name__)
        return kind(**{name: _library(value) for name, value in values.items()})


@dataclass(frozen=True)
class NoOpDpEvent(Event):
    """Nothing that depends on the data."""


@dataclass(frozen=True)
class NonPrivateDpEvent(Event):
    """A release without any promise."""


@dataclass(frozen=True)
class GaussianDpEvent(Event):
    """Gaussian noise with standard deviation `noise_multiplier` times the L2 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _require(self, "noise_multiplier", LEAST <= self.noise_multiplier <= MOST, f"from {LEAST:g} to {MOST:g}")


@dataclass(frozen=True)
class LaplaceDpEvent(Event):
    """Laplace noise with scale `noise_multiplier` times the L1 sensitivity, or anything that it dominates
    (`calibrators.Laplaces`).
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _require(self, "noise_multiplier", LEAST <= self.noise_multiplier <= MOST, f"from {LEAST:g} to {MOST:g}")


@dataclass(frozen=True)
class ZCDpEvent(Event):
    """Something rho-zCDP."""

    rho: float

    def __post_init__(self) -> None:
        _require(self, "rho", self.rho == 0 or LEAST <= self.rho <= MOST, f"0, or from {LEAST:g} to {MOST:g}")


@dataclass(frozen=True)
class PoissonSampledDpEvent(Event):
    """The event on a sample to which every row belongs independently with `sampling_probability`."""

    sampling_probability: float
    event: Event

    def __post_init__(self) -> None:
        _require(self, "sampling_probability", LEAST <= self.sampling_probability <= 1, f"from {LEAST:g} to 1")


@dataclass(frozen=True)
class SelfComposedDpEvent(Event):
    """The event `count` times."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        _require(self, "count", 1 <= self.count <= MOST_COUNT, f"a whole number from 1 to {MOST_COUNT}")


@dataclass(frozen=True)
class ComposedDpEvent(Event):
    """All the events."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class RepeatAndSelectDpEvent(Event):
    """The event a random number of times, of which the best result leaves and nothing else (`repeats`)."""

    event: Event
    mean: float
    shape: float

    def __post_init__(self) -> None:
        _require(self, "mean", LEAST_MEAN <= self.mean <= MOST_MEAN, f"from {LEAST_MEAN:.6f} to {MOST_MEAN:g}")
        known = LEAST_SHAPE <= self.shape <= MOST_SHAPE and (self.shape == 0 or abs(self.shape) >= NEAREST_SHAPE)
        _require(self, "shape", known, f"0, or from {LEAST_SHAPE:g} to {MOST_SHAPE:g} and {NEAREST_SHAPE:g} from 0")


@dataclass(frozen=True)
class ParallelDpEvent(Event):
    """Events on parts of the table: a row is in one part, and which part that is depends neither on values nor on
    anything that was released before.
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not self.events:
            raise BismarckError("events of ParallelDpEvent are none", "it must have one event or more")

    def to_dp_event(self) -> Any:
        """The library has no such event: it is the branch, if all are the same one."""
        if len(set(self.events)) > 1:
            raise BismarckError(
                "the library dp-accounting has no event for different events side by side",
                "price it with epsilon_of, or take its dearest branch",
            )
        return self.events[0].to_dp_event()


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        NoOpDpEvent,
        NonPrivateDpEvent,
        GaussianDpEvent,
        LaplaceDpEvent,
        ZCDpEvent,
        PoissonSampledDpEvent,
        SelfComposedDpEvent,
        ComposedDpEvent,
        RepeatAndSelectDpEvent,
        ParallelDpEvent,
    )
}


def _require(event: Event, field: str, holds: bool, what: str) -> None:
    if not holds:
        value = getattr(event, field)
        raise BismarckError(f"{field} {value!r} of {type(event).__name__} is out of range", f"it must be {what}")


def _plain(value: Any) -> Any:
    if isinstance(value, Event):
        return value.to_json()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _library(value: Any) -> Any:
    if isinstance(value, Event):
        return value.to_dp_event()
    return [_library(item) for item in value] if isinstance(value, tuple) else value


def _read(json: Any, depth: int) -> Event:
    if not isinstance(json, dict) or not isinstance(json.get("name"), str):
        raise BismarckError(f"{_short(json)} is not an event", 'an event is an object with a "name"')
    if depth == 0:
        raise BismarckError("the event has too many events within events", f"at most {MOST_NESTED} are read")
    name = json["name"]
    if name not in EVENTS:
        raise BismarckError(f'unknown event "{_short(name)}"', "known are " + ", ".join(sorted(EVENTS)))
    known = [field.name for field in fields(EVENTS[name])]  # type: ignore[arg-type]
    if wrong := sorted(set(json) - {"name"} ^ set(known)):
        raise BismarckError(
            f'event {name}: field "{_short(wrong[0])}" is {"missing" if wrong[0] in known else "unknown"}',
            f"it has {', '.join(known) or 'no fields'}",
        )
    return EVENTS[name](**{field: READERS[field](name, field, json[field], depth - 1) for field in known})


def _number(name: str, field: str, value: Any, depth: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        raise BismarckError(f"{field} {_short(value)} of {name} is out of range", "it must be a finite number")
    return float(value)


def _whole(name: str, field: str, value: Any, depth: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_COUNT:
        raise BismarckError(f"{field} {_short(value)} of {name} is out of range", "it must be a whole number from 1")
    return value


def _one(name: str, field: str, value: Any, depth: int) -> Event:
    return _read(value, depth)


def _several(name: str, field: str, value: Any, depth: int) -> tuple[Event, ...]:
    if not isinstance(value, list):
        raise BismarckError(f"{field} of {name} is not a list", "it must be a list of events")
    return tuple(_read(item, depth) for item in value)


READERS = {
    "noise_multiplier": _number,
    "rho": _number,
    "sampling_probability": _number,
    "count": _whole,
    "mean": _number,
    "shape": _number,
    "event": _one,
    "events": _several,
}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "..."


# ---- Gaussian ----

LEAST_PRICED = 1e-6
"""Gaussian noise below this share of the sensitivity, with epsilons from 10^11, is not told from none."""


@lru_cache(maxsize=1024)
def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The smallest sigma / Delta of an (epsilon, delta)-DP Gaussian (Balle and Wang 2018, Theorem 8), from above.

    With mu = Delta / sigma, delta(mu) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) grows with mu.
    """
    low, high = 1e-12, 1.0
    while _gaussian_delta(epsilon, high) < delta:
        low, high = high, 2 * high
    while _gaussian_delta(epsilon, low) > delta:
        low, high = low / 2, low
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _gaussian_delta(epsilon, middle) <= delta else (low, middle)
    return 1 / low * (1 + 1e-12)


@lru_cache(maxsize=1024)
def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The smallest epsilon of a Gaussian with this sigma / Delta at delta, from above, by the same formula."""
    if delta <= 0 or multiplier < LEAST_PRICED:
        return math.inf
    mu = 1 / multiplier
    if _gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = turn(lambda epsilon: _gaussian_delta(epsilon, mu) > delta)[1]
    return high * (1 + 1e-12)


def turn(holds: Callable[[float], bool]) -> tuple[float, float]:
    """The neighbouring floats between which a condition, true at 0, turns false; it turns once."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _gaussian_delta(epsilon: float, mu: float) -> float:
    from scipy.special import log_ndtr

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(second - first) if second < first else 0.0


# ---- zCDP ----


@lru_cache(maxsize=1024)
def zcdp_epsilon(rho: float, delta: float) -> float:
    """The epsilon of a rho-zCDP release at delta: the least over orders alpha > 1 of

        alpha rho + log(1 - 1/alpha) - (log(delta) + log(alpha)) / (alpha - 1)

    (Canonne, Kamath and Steinke 2020, Proposition 12, with Renyi divergence alpha rho). Every alpha gives a valid
    epsilon. The derivative is rho - log(1 / (delta alpha)) / (alpha - 1)^2, which changes sign once.
    """
    if rho == 0:
        return 0.0
    if delta <= 0 or math.isinf(rho):
        return math.inf
    above = turn(lambda above: rho * above**2 < -math.log(delta) - math.log1p(above))[1]  # alpha - 1
    return max(
        0.0, (1 + above) * rho + math.log(above) - math.log1p(above) - (math.log(delta) + math.log1p(above)) / above
    )


@lru_cache(maxsize=1024)
def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest rho whose `zcdp_epsilon` is at most epsilon, from below."""
    return turn(lambda rho: zcdp_epsilon(rho, delta) <= epsilon)[0]


def selection_rho(epsilon: float) -> float:
    """rho of an exponential mechanism that is epsilon-DP: epsilon^2 / 8.

    Its log odds between neighbours range over an interval of length epsilon only, of all [-epsilon, epsilon] that
    epsilon-DP allows (bounded range: Durfee and Rogers 2019). A variable in an interval of length epsilon has variance
    at most epsilon^2 / 4 under every tilt, so its Renyi divergence of order alpha is at most alpha epsilon^2 / 8
    (Cesar and Rogers 2021, Theorem 3); the epsilon^2 / 2 of pure DP is four times too much.
    """
    return epsilon**2 / 8


def selection_epsilon(rho: float) -> float:
    """The epsilon of an exponential mechanism that may cost rho."""
    return math.sqrt(8 * rho)


def zcdp_of(event: Event) -> float:
    """The rho of a composition: 1 / (2 z^2) for a Gaussian, epsilon^2 / 2 for pure epsilon-DP (Bun and Steinke 2016,
    Propositions 1.4 and 1.6). It adds up, adaptively too. Of events side by side it is the largest.
    """
    return sum(count * _leaf_rho(leaf) for leaf, count in leaves(event).items())


def _leaf_rho(leaf: Event) -> float:
    if isinstance(leaf, (GaussianDpEvent, LaplaceDpEvent)):
        return 1 / (2 * leaf.noise_multiplier**2)
    if isinstance(leaf, ZCDpEvent):
        return leaf.rho
    if isinstance(leaf, NonPrivateDpEvent):
        return math.inf
    if isinstance(leaf, ParallelDpEvent):
        return max(zcdp_of(branch) for branch in leaf.events)
    raise BismarckError(f"{type(leaf).__name__} has no zCDP bound here", "price it with epsilon_of")


def repeated(event: Event, count: int) -> Event:
    return event if count == 1 else SelfComposedDpEvent(event, count)


def leaves(event: Event) -> Counter[Event]:
    """The events that release something, and how often."""
    total: Counter[Event] = Counter()
    if isinstance(event, SelfComposedDpEvent):
        total.update({leaf: count * event.count for leaf, count in leaves(event.event).items()})
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            total.update(leaves(part))
    elif not isinstance(event, NoOpDpEvent):
        total[event] = 1
    if total and max(total.values()) > MOST_COUNT:
        raise BismarckError("the event happens too often to be priced", f"at most {MOST_COUNT} times are")
    return total


# ---- any event ----


class Cost(NamedTuple):
    """What an event costs, and who says so."""

    epsilon: float
    accountant: str


@lru_cache(maxsize=256)
def epsilon_of(event: Event, delta: float, adjacency: str) -> Cost:
    """The epsilon of an event at delta.

    Only Laplace: pure, epsilons add up, or zCDP where that is less, for many small ones. Only Gaussians: exact, squares
    of 1 / z add up (Dong, Roth and Su 2019). Sampled Gaussians, with or without plain ones: privacy loss distributions.
    Anything else without sampling: zCDP. With sampling, the rest is priced on its own and added, at half the delta each
    unless the rest is pure (basic composition). Events side by side: the dearest choice of branches. With the best of
    repeated events: everything by Renyi divergences, at one order (`renyi`).
    """
    check_adjacency(adjacency)
    every = leaves(event)
    if any(isinstance(leaf, NonPrivateDpEvent) for leaf in every):
        return Cost(math.inf, "none")
    if any(isinstance(leaf, ParallelDpEvent) for leaf in every):
        return max((epsilon_of(choice, delta, adjacency) for choice in _choices(every)), key=lambda cost: cost.epsilon)
    if any(isinstance(leaf, RepeatAndSelectDpEvent) for leaf in every):
        from .renyi import curve_of

        return Cost(curve_of(event, adjacency).epsilon(delta), "rdp" if delta > 0 else "pure")
    gaussian: Counter[Event] = Counter()
    sampled: list[tuple[float, float, int]] = []
    rest: Counter[Event] = Counter()
    for leaf, count in every.items():
        if isinstance(leaf, PoissonSampledDpEvent):
            z, q = sampled_gaussian(leaf)
            if q == 1:
                gaussian[GaussianDpEvent(z / doubling(adjacency))] += count
            else:
                sampled.append((z, q, count))
        else:
            (gaussian if isinstance(leaf, GaussianDpEvent) else rest)[leaf] += count
    if sampled:
        return _with_sampling(sampled, gaussian, rest, delta, adjacency)
    if gaussian and not rest:
        return _gaussian_cost(gaussian, delta)
    return _unsampled_cost(gaussian, rest, delta)


def _choices(every: Counter[Event]) -> list[Event]:
    """All that can happen to a row, which is in one branch of each event side by side, and may be in another one each
    time. Given the parts, which depend on nothing, it is one of these; the largest cost is thus a bound.
    """
    parts: list[list[Event]] = []
    number = 1
    for leaf, count in every.items():
        branches = list(dict.fromkeys(leaf.events)) if isinstance(leaf, ParallelDpEvent) else [leaf]
        if len(branches) > 1:
            number *= math.comb(min(len(branches), MOST_CHOICES + 1) + count - 1, count)
        if number > MOST_CHOICES and sum(every.values()) > 1:
            raise BismarckError(
                f"a row can be in more than {MOST_CHOICES} combinations of events side by side (ParallelDpEvent)",
                "compose fewer of them, or price them on their own and add up both epsilon and delta",
            )
        if len(branches) == 1:
            parts.append([repeated(branches[0], count)])
        else:
            parts.append([ComposedDpEvent(choice) for choice in combinations_with_replacement(branches, count)])
    return [ComposedDpEvent(choice) for choice in product(*parts)]


def _gaussian_cost(gaussian: Counter[Event], delta: float) -> Cost:
    name = "analytic-gaussian" if sum(gaussian.values()) == 1 else "gdp"
    return Cost(gaussian_epsilon(1 / math.sqrt(2 * _total_rho(gaussian)), delta), name)


def _unsampled_cost(gaussian: Counter[Event], rest: Counter[Event], delta: float) -> Cost:
    """The least of: all by zCDP; Laplace noise by itself, which is pure, and what is left beside it."""
    costs = [_zcdp_cost(gaussian + rest, delta)]
    laplace: Counter[Event] = Counter({e: count for e, count in rest.items() if isinstance(e, LaplaceDpEvent)})
    pure = _pure_epsilon(laplace)
    left = gaussian + rest - laplace
    if not left:
        costs.append(Cost(pure, "pure"))
    else:
        beside = _gaussian_cost(left, delta) if left == gaussian else _zcdp_cost(left, delta)
        costs.append(Cost(beside.epsilon + pure, f"{beside.accountant}+pure") if laplace else beside)
    return min(reversed(costs), key=lambda cost: cost.epsilon)


def _pure_epsilon(laplace: Counter[Event]) -> float:
    return float(sum(count / leaf.noise_multiplier for leaf, count in laplace.items()))  # type: ignore[attr-defined]


def _zcdp_cost(every: Counter[Event], delta: float) -> Cost:
    return Cost(zcdp_epsilon(_total_rho(every), delta), "zcdp")


def _total_rho(every: Counter[Event]) -> float:
    return sum(count * _leaf_rho(leaf) for leaf, count in every.items())


def _with_sampling(
    sampled: list[tuple[float, float, int]],
    gaussian: Counter[Event],
    rest: Counter[Event],
    delta: float,
    adjacency: str,
) -> Cost:
    """Plain Gaussians are sampled ones with probability 1 whose multiplier is counted from the clip norm."""
    if delta <= 0:
        return Cost(math.inf, "pld")
    from . import poisson

    double = doubling(adjacency)
    plain = [(leaf.noise_multiplier * double, 1.0, count) for leaf, count in gaussian.items()]  # type: ignore[attr-defined]
    steps = tuple(poisson.Step(*part) for part in sorted(sampled + plain))
    if not rest:
        return Cost(poisson.epsilon(steps, adjacency, delta), "pld")
    beside = _unsampled_cost(Counter(), rest, delta / 2)
    costs = []
    if all(isinstance(leaf, LaplaceDpEvent) for leaf in rest):
        costs.append(Cost(poisson.epsilon(steps, adjacency, delta) + _pure_epsilon(rest), "pld+pure"))
    if beside.accountant != "pure":
        costs.append(Cost(poisson.epsilon(steps, adjacency, delta / 2) + beside.epsilon, f"pld+{beside.accountant}"))
    return min(costs, key=lambda cost: cost.epsilon)


def sampled_gaussian(event: PoissonSampledDpEvent) -> tuple[float, float]:
    if not isinstance(event.event, GaussianDpEvent):
        raise BismarckError(
            f"a sampled {type(event.event).__name__} has no accountant here", "only a GaussianDpEvent can be sampled"
        )
    return event.event.noise_multiplier, event.sampling_probability


def doubling(adjacency: str) -> float:
    """How many clip norms a replaced row can move a sum."""
    return 2.0 if adjacency == "replace" else 1.0


def check_adjacency(adjacency: str) -> None:
    if adjacency not in ADJACENCIES:
        raise BismarckError(f'unknown adjacency "{adjacency}"', "use " + " or ".join(ADJACENCIES))
