"""Renyi divergences of events, order by order: they price repeat-and-select, which has no privacy loss distribution.

A curve bounds D_a(M(x) | M(x')) for all neighbours x and x', in both directions, at each order a of a list: a > 1, and
infinity, where it is the epsilon of pure DP. Divergences add up under adaptive composition (Mironov 2017), at each
order by itself, and of events side by side it is the largest one: given the parts, a row is in one of them.

Leaves. A Gaussian of multiplier z: a / (2 z^2). rho-zCDP: rho a. Pure e-DP, whatever the mechanism: that of a coin that
lies with odds e^e, log(cosh((a - 1/2) e) / cosh(e / 2)) / (a - 1), because every e-DP pair is a function of that coin's
result (Kairouz, Oh and Viswanath 2015). It is below both e and a e^2 / 2. (That of Laplace noise would be less, but
does not hold for the discrete noise and the choices that have a LaplaceDpEvent.) A Poisson-sampled Gaussian: that of
the pair that dominates it (`poisson`), because a pair that dominates at all e^epsilon, below 1 too, has the larger
f-divergences of all kinds.

Quadrature. With A = log(1 - up + up e^((x - 1/2) / z^2)) and B = log(1 - down + down e^((-x - 1/2) / z^2)), which are
log P/N and log Q/N for N = N(0, z^2), the moment is the integral I of f(x) = N(x) e^(a A(x) - (a - 1) B(x)).

Theorem: the trapezoid rule with gap h on all of the line errs by at most I times 2 e^(-E), where, for any 0 < t < pi,
E = 2 pi z^2 t / h - z^2 t^2 / 2 + (a - 1) log cos(t / 2)  (up to a factor 1 + e^-30 from E = 30 on).
Proof: f is analytic for |Im x| < pi z^2, where Q/N has its first zeros. At x + i t' z^2, |t'| <= t, N grows by a factor
e^(z^2 t'^2 / 2); |P/N| is at most its value at x, being a sum with positive weights; and |Q/N| is at least cos(t' / 2)
times its value at x, since |u + v e^(i t')| >= (u + v) cos(t' / 2) for u, v >= 0. So the integral of |f| along that
line is at most M = I e^(z^2 t^2 / 2) cos(t / 2)^-(a - 1), and the rule errs by at most 2 M / (e^(2 pi z^2 t / h) - 1)
(Trefethen and Weideman 2014, Theorem 5.1). QED

Ends. Q/N >= 1 - down and P/N <= 1 below 1/2, e^((x - 1/2) / z^2) above. So f is at most (1 - down)^(1 - a) N(x), times
e^(a (x - 1/2) / z^2) above 1/2 if up > 0; the ends are where what these bounds have left is e^-40, while I >= 1.
Quadrature and ends cost I at most a factor 1 + 1e-12, rounding in the exponents is added as well: all of it is paid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .accounting import (
    Event,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    ParallelDpEvent,
    PoissonSampledDpEvent,
    RepeatAndSelectDpEvent,
    ZCDpEvent,
    doubling,
    leaves,
    sampled_gaussian,
)
from .errors import BismarckError
from .poisson import Pair, Step, directions, log_mix

Floats = npt.NDArray[np.float64]
Orders = tuple[float, ...]

ORDERS: Orders = (*(1 + np.geomspace(1e-2, 1e8, 600)).tolist(), math.inf)
"""Neighbours are a factor 1.04 apart: the best of them costs less than a thousandth more than the best of all."""

LOG_ERROR = 34.0
"""E of the trapezoid rule."""

LOG_END = 40.0

PAID = 1e-12
"""for both, and for adding up"""

ROUNDING = 16 * 2.0**-52
"""of an exponent, as a share of the terms that it is made of"""

MOST_NODES = 1 << 14
"""Orders that need more have no bound: their divergences are enormous anyway."""

TURNS: Floats = np.linspace(0.05, 3.0, 60)
"""The t among which the widest gap is looked for."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Upper bounds of the Renyi divergence at a list of orders."""

    orders: Orders
    divergences: Floats

    @classmethod
    def zcdp(cls, rho: float, orders: Orders = ORDERS) -> Curve:
        return cls(orders, _times(rho, np.array(orders)))

    def epsilon(self, delta: float) -> float:
        """The least epsilon at delta, over the orders a, of  D_a + log(1 - 1/a) - (log(delta) + log(a)) / (a - 1)
        (Canonne, Kamath and Steinke 2020, Proposition 12); at infinity, and for delta = 0, it is D itself.
        """
        orders = np.array(self.orders)
        if delta <= 0:
            return float(np.min(self.divergences[np.isinf(orders)], initial=math.inf))
        with np.errstate(invalid="ignore"):
            inside = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
        bounds = self.divergences + np.where(np.isinf(orders), 0.0, inside)
        return max(0.0, float(np.min(bounds, initial=math.inf)) * (1 + PAID))


def largest(curves: Iterable[Curve]) -> Curve:
    """Of releases of which any one may happen, order by order."""
    every = list(curves)
    return Curve(every[0].orders, np.max([curve.divergences for curve in every], axis=0))


def curve_of(event: Event, adjacency: str, orders: Orders = ORDERS) -> Curve:
    """The curve of an event under an adjacency."""
    total = np.zeros(len(orders))
    for leaf, count in leaves(event).items():
        total = total + _times(count, _leaf(leaf, adjacency, orders))
    return Curve(orders, total)


def _times(factor: float, values: Floats) -> Floats:
    """A product in which nothing, however large the order, stays nothing."""
    return np.asarray(factor * values) if factor > 0 else np.zeros(len(values))


def _leaf(leaf: Event, adjacency: str, orders: Orders) -> Floats:
    every = np.array(orders)
    if isinstance(leaf, GaussianDpEvent):
        return np.asarray(every / (2 * leaf.noise_multiplier**2))
    if isinstance(leaf, ZCDpEvent):
        return _times(leaf.rho, every)
    if isinstance(leaf, LaplaceDpEvent):
        return _pure(1 / leaf.noise_multiplier, every)
    if isinstance(leaf, NonPrivateDpEvent):
        return np.full(len(orders), math.inf)
    if isinstance(leaf, ParallelDpEvent):
        return largest(curve_of(branch, adjacency, orders) for branch in leaf.events).divergences
    if isinstance(leaf, RepeatAndSelectDpEvent):
        from .repeats import Stopping  # which is made of curves

        return Stopping(leaf.mean, leaf.shape).curve(curve_of(leaf.event, adjacency, orders)).divergences
    if isinstance(leaf, PoissonSampledDpEvent):
        z, q = sampled_gaussian(leaf)
        if q == 1:
            return np.asarray(every / (2 * (z / doubling(adjacency)) ** 2))
        return np.array(sampled(z, q, adjacency, orders))
    raise BismarckError(f"{type(leaf).__name__} has no Renyi divergence here", "price it with epsilon_of, on its own")


def _pure(epsilon: float, orders: Floats) -> Floats:
    finite = np.isfinite(orders)
    a = np.where(finite, orders, 2.0)
    coin = (_log_cosh((a - 0.5) * epsilon) - _log_cosh(np.array([epsilon / 2]))) / (a - 1) * (1 + PAID)
    return np.where(finite, np.minimum(coin, np.minimum(epsilon, a * epsilon**2 / 2)), epsilon)


def _log_cosh(x: Floats) -> Floats:
    small = np.log1p(2 * np.sinh(np.minimum(x, 20.0) / 2) ** 2)
    return np.asarray(np.where(x <= 20, small, x - math.log(2) + np.exp(-2 * x)))


@lru_cache(maxsize=256)
def sampled(z: float, q: float, adjacency: str, orders: Orders) -> Orders:
    """The divergences of one Poisson-sampled Gaussian step, of multiplier z over the clip norm of one row."""
    every = np.array(orders)
    worst = np.zeros(len(orders))
    for (pair,) in directions((Step(z, q, 1),), adjacency):
        worst = np.maximum(worst, _divergences(pair, every))
    return tuple(worst.tolist())


def _divergences(pair: Pair, orders: Floats) -> Floats:
    """Orders go together as long as one gap and one range serve the largest of them: up to twice as much above 1."""
    found = np.full(len(orders), math.inf)
    with np.errstate(divide="ignore", over="ignore"):
        groups = np.floor(np.log2(orders - 1))
    for group in np.unique(groups[np.isfinite(orders)]):
        mine = groups == group
        most = float(orders[mine].max())
        gap, (low, high) = _gap(pair.z, most), _ends(pair, most)
        if (high - low) / gap <= MOST_NODES:
            found[mine] = _log_moments(pair, orders[mine], low, high, gap) / (orders[mine] - 1)
    return found


def _gap(z: float, order: float) -> float:
    """The widest gap with which the trapezoid rule errs by at most 2 e^-LOG_ERROR, for all orders up to this one."""
    cost = LOG_ERROR + z**2 * TURNS**2 / 2 - (order - 1) * np.log(np.cos(TURNS / 2))
    return float(np.max(2 * math.pi * z**2 * TURNS / cost))


def _ends(pair: Pair, order: float) -> tuple[float, float]:
    """Points beyond which the bounds of f have less than e^-LOG_END."""
    rest = LOG_END - (order - 1) * math.log1p(-pair.down)
    low = high = pair.z * math.sqrt(2 * rest)
    if pair.up > 0:
        high = order + pair.z * math.sqrt(2 * (rest + order * (order - 1) / (2 * pair.z**2)))
    return -low, max(high, 0.5)


def _log_moments(pair: Pair, orders: Floats, low: float, high: float, gap: float) -> Floats:
    """log I, from above."""
    x: Floats = gap * np.arange(math.floor(low / gap), math.ceil(high / gap) + 1, dtype=np.float64)
    centre = -0.5 * (x / pair.z) ** 2 + math.log(gap / (pair.z * math.sqrt(2 * math.pi)))
    up = _log_ratio(pair.up, x, pair.z)
    down = _log_ratio(pair.down, -x, pair.z)
    a = orders[:, None]
    logs = centre + a * up - (a - 1) * down
    error = ROUNDING * (1 + np.abs(centre) + a * np.abs(up) + (a - 1) * np.abs(down))
    top = logs.max(axis=1)
    weights = np.exp(logs - top[:, None])
    total = weights.sum(axis=1)
    # To first order, errors of exponents add up with their terms' weights; twice that is a bound, since all are small.
    rounding = 2 * (weights * error).sum(axis=1) / total
    return np.asarray(np.maximum(top + np.log(total) + rounding, 0.0) + PAID)


def _log_ratio(share: float, x: Floats, z: float) -> Floats:
    """log of (1 - share) N(0, z^2) + share N(1, z^2) over N(0, z^2)."""
    return log_mix(share, np.asarray((x - 0.5) / z**2)) if share > 0 else np.zeros(len(x))
