"""The noise that Poisson-sampled Gaussian steps need: a search over what `poisson` says they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from . import poisson
from .errors import BismarckError

MARGIN = 1e-4
"""Calibration aims at an epsilon this share below the target, give or take as much, and at a delta below the target by
once more what is there for rounding.
"""

TIGHT = 1e-4
"""Multipliers are not searched for more closely than to this share."""

ROOM = 1e-3
"""A multiplier that could be smaller by this share is worth another try, of which there are so many."""

MOST_SETTLING = 6

INSIDE = 1 / 8
"""The share of a bracket that a next point keeps from its ends: where reports waver, a secant would stay at one end."""

MOST_TRIES = 6


@lru_cache(maxsize=256)
def multiplier(epsilon: float, delta: float, probability: float, count: int, adjacency: str) -> float:
    """The smallest noise multiplier of `count` steps that are (epsilon, delta)-DP together, to a few parts in 10^4.

    The search goes by log(-log delta) at the target epsilon as a function of log z, which is nearly straight: Chernoff
    bounds give a start, the coarse grid a slope, and a few evaluations on the fine grid the result.
    """
    search = Search(epsilon, delta, probability, count, adjacency)
    start = search.start()
    found = search.fine(*search.coarse(start)) if epsilon < poisson.MOST_LOSS else start
    return math.exp(search.settled(min(found, start)))


@dataclass(frozen=True)
class Search:
    """The state of a calibration: what is asked for. Points are log z."""

    epsilon: float
    delta: float
    probability: float
    count: int
    adjacency: str

    @property
    def goal(self) -> float:
        return math.log(-math.log(self.delta))

    def directions(self, point: float) -> list[list[poisson.Pair]]:
        return poisson.directions((poisson.Step(math.exp(point), self.probability, self.count),), self.adjacency)

    def start(self) -> float:
        """The point at which Chernoff bounds promise the delta, to a hundredth."""
        drawn = -math.expm1(self.count * math.log1p(-self.probability)) if self.probability < 1 else 1.0
        low, high = math.log(poisson.LEAST_MULTIPLIER), 1.0
        if self.delta >= drawn:
            raise BismarckError(
                f"delta {self.delta:g} is no less than the chance {drawn:g} that a row is drawn at all",
                "almost no noise would do for it: use a smaller delta",
            )
        if self._chernoff(low) <= math.log(self.delta):
            raise BismarckError(
                f"epsilon {self.epsilon:g} and delta {self.delta:g} ask for almost no noise",
                "use a smaller epsilon or delta",
            )
        while self._chernoff(high) > math.log(self.delta):
            low, high = high, high + 2
        while high - low > 0.01:
            middle = (low + high) / 2
            low, high = (low, middle) if self._chernoff(middle) <= math.log(self.delta) else (middle, high)
        return high

    def _chernoff(self, point: float) -> float:
        cap, tail = self.epsilon + poisson.HEADROOM, poisson.TAIL * self.delta / self.count
        return max(
            poisson.Sketch(pairs, (self.count,), cap, tail).log_delta(self.epsilon) for pairs in self.directions(point)
        )

    def coarse(self, point: float) -> tuple[float, float, list[int]]:
        """The point that the coarse grid finds, the slope there, and the directions by falling delta."""
        slope, last = 2.0, (point, self.goal)
        for _ in range(MOST_TRIES):
            deltas = [self._delta(self._compose(pairs, poisson.COARSE), 1.0) for pairs in self.directions(point)]
            height = _height(max(deltas))
            slope = _slope(last, (point, height), slope)
            last, point = (point, height), point + _move(self.goal - height, slope)
            if abs(self.goal - height) < 1e-3:
                break
        return point, slope, sorted(range(len(deltas)), key=lambda i: -deltas[i])

    def fine(self, point: float, slope: float, order: list[int]) -> float:
        """The point that the fine grid finds: in the worst direction, and then checked in the other one.

        Where the cells' spread and the rounding leave no safe point that is tight too, it is the best one seen.
        """
        last, wanted = (point, self.goal), order[:1]
        low, high = -math.inf, math.inf
        for _ in range(MOST_TRIES):
            composed = [self._compose(self.directions(point)[i], poisson.FINE) for i in wanted]
            safe = self._safe(composed)
            if safe and (self._tight(composed) or high - low < TIGHT):
                rest = [self.directions(point)[i] for i in order if i not in wanted]
                if self._safe([self._compose(pairs, poisson.FINE) for pairs in rest]):
                    return point
                wanted, low, high = order, point, math.inf
                continue
            low, high = (low, min(high, point)) if safe else (max(low, point), high)
            height = _height(max(self._delta(one, 1.0) for one in composed))
            slope = _slope(last, (point, height), slope)
            last, point = (point, height), point + _move(self.goal - height, slope)
            if not low < point < high:
                point = (low + high) / 2 if math.isfinite(high - low) else low + 0.1 if low > point else high - 0.1
        return high if math.isfinite(high) else point

    def settled(self, point: float) -> float:
        """The point, moved up until `epsilon` agrees that it is safe, and down while `epsilon` finds much room.

        All grids and Chernoff are upper bounds, but not equal ones, and those of `epsilon` are not centred at the
        target: reports should not contradict, so the last word is theirs. Epsilon falls at least as fast as 1/z does.
        """
        low, high, fall = -math.inf, math.inf, 1.0
        last: tuple[float, float] | None = None
        for tries in range(MOST_SETTLING):
            excess = math.log(min(max(self._reported(point), 1e-3 * self.epsilon), 1e3 * self.epsilon) / self.epsilon)
            if last and point != last[0]:
                fall = min(max((excess - last[1]) / (last[0] - point), 1.0), 50.0)
            low, high = (low, min(high, point)) if excess <= 0 else (max(low, point), high)
            if (excess <= 0 and -excess < ROOM * fall) or high - low < ROOM:
                return high
            first = 0.25 if tries == 0 else 1.0
            last, point = (point, excess), point + min(max(first * (excess + ROOM / 2 * fall) / fall, -0.1), 0.5)
            if math.isfinite(high - low):
                point = min(max(point, low + INSIDE * (high - low)), high - INSIDE * (high - low))
            elif not low < point < high:
                point = low + 2 * ROOM
        step = 0.05
        while math.isinf(high):
            point, step = max(point, low) + step, 2 * step
            if point > math.log(poisson.MOST_MULTIPLIER):
                raise BismarckError(
                    f"epsilon {self.epsilon:g} and delta {self.delta:g} are too small to be told from rounding",
                    "use larger ones",
                )
            high = point if self._reported(point) <= self.epsilon else high
        return high

    def _reported(self, point: float) -> float:
        return poisson.epsilon(
            (poisson.Step(math.exp(point), self.probability, self.count),), self.adjacency, self.delta
        )

    def _delta(self, composed: poisson.Composed, share: float) -> float:
        """Delta with a share of the margins."""
        shrunk = self.epsilon * (1 - share * MARGIN)
        return max(composed.delta(shrunk), composed.delta(self.epsilon) + share * composed.rounding(self.epsilon))

    def _safe(self, composed: list[poisson.Composed]) -> bool:
        return all(self._delta(one, 0.2) <= self.delta for one in composed)

    def _tight(self, composed: list[poisson.Composed]) -> bool:
        return any(self._delta(one, 2.0) > self.delta for one in composed)

    def _compose(self, pairs: list[poisson.Pair], detail: poisson.Detail) -> poisson.Composed:
        return poisson.compose(pairs, (self.count,), self.epsilon, self.delta, detail)


def _height(delta: float) -> float:
    """log(-log delta), finite."""
    return math.log(-math.log(min(max(delta, 1e-300), 1 - 1e-9)))


def _slope(last: tuple[float, float], this: tuple[float, float], default: float) -> float:
    """The slope between two points if it says anything."""
    run, rise = this[0] - last[0], this[1] - last[1]
    return rise / run if run != 0 and rise / run > 0.1 else default


def _move(rise: float, slope: float) -> float:
    return min(max(rise / slope, -0.5), 0.5)
