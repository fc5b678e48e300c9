"""The privacy of Poisson-sampled Gaussian steps, by privacy loss distributions on a grid.

A step draws every row with probability q and releases the sum of the drawn rows' vectors, of norm at most C, plus
N(0, (zC)^2 I). Scale C to 1.

Claim. For neighbours under `replace` the step is dominated by P = (1-q) N(0, z^2) + q N(1, z^2) against
Q = (1-q) N(0, z^2) + q N(-1, z^2); under `zero-out` by P against N(0, z^2) in one direction and N(0, z^2) against Q
in the other. Dominating pairs compose, adaptively too (Zhu, Dong and Wang 2022, Theorem 10), so the privacy of a run
is the hockey-stick divergence of the product of its steps' pairs.

Proof, for `replace`. Condition on which other rows were drawn: the hockey-stick divergence is jointly convex. What
remains is (1-q) N(0) + q N(u) against (1-q) N(0) + q N(v), |u|, |v| <= 1. For e^epsilon >= 1 the divergence is the
largest value over sets S of  q N(u)(S) - (e^epsilon - 1)(1-q) N(0)(S) - e^epsilon q N(v)(S). Replace S by the half
line of the same mass p under N(1): it is the best test of size p against N(0) and against N(-1) at once
(Neyman-Pearson), and the masses it leaves there depend on the distances 1 >= |u| and 2 >= |u - v| only, and fall with
them. So the value does not fall. For e^epsilon < 1 swap the roles, which the pair allows by symmetry. `zero-out` is
v = 0, and a mixture with the same N(0) on both sides only moves epsilon.

Discretisation. Losses log(P/Q) grow with x, so a cell between neighbouring grid losses is an interval of x. Its masses
under P and under Q are put on the two ends of the cell such that both are kept ("connect the dots", Doroshenko et al.
2022): the result dominates the pair. Losses above the grid become infinite, losses below it move up to its lowest
point: both pessimistic.

Composition. The pmf is tilted by e^(theta x), with theta at the saddle point of the epsilon asked about, so that the
sum's mass lies around epsilon and tiny deltas keep their relative accuracy. It is raised to the power T by a cyclic
FFT. What wraps around from below only adds to delta; what lies above the window is bounded by Chernoff and added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_MULTIPLIER = 0.05
"""Below this the losses of a drawn row are in the hundreds: nothing is protected but by the draw itself."""

TAIL = 1e-7
"""The share of delta that the steps may lose to the ends of x; at the upper end it counts as infinite loss. Heavy tails
would otherwise rule the exponential moments, and with them the tilt, long before they matter to delta.
"""

NODES = 2001
"""Points of x by which a step is sketched; the trapezoid rule is exact to rounding for such smooth integrands."""

HEADROOM = 25.0
"""Losses this far above epsilon count as infinite. With R the loss of the other steps, 1 instead of 1 - e^(epsilon -
x - R) is counted, and E e^-R <= 1: at most e^-25 of their mass too much.
"""

MOST_LOSS = 500.0
"""Losses above this count as infinite before anything is known about epsilon."""

WRAPPED = 1e-6
"""The share of delta that may lie outside the window on either side."""

LOG_TAIL = -20.0
"""Log of the tilted mass outside the window that is small enough in any case."""

LEAST_DELTA = 1e-20
"""Smaller deltas are not told apart."""

LEAST_PRICED = 0.03
"""Noise below this has losses of e^(1 / (2 z^2)), beyond floating point."""

MOST_MULTIPLIER = 1e12
"""Losses of larger ones are too small to be told from rounding."""

LEAST_PRICED_DELTA = 1e-200
"""So that tails of delta, and their shares, are floating point numbers."""

RARE = 1e-9
"""The share of delta that may be spent on steps that hardly ever draw a row."""

MOST_FINE, SETTLED = 3, 0.99
"""Compositions on the fine grid per direction, and the share of its centre above which their epsilon needs no other."""

DEPTH = -60.0
"""Tilts whose Chernoff bound of delta is below e^-60 are not needed."""

ROUNDOFF = 2.0**-53

SUM_ROUNDOFF = 2e-15
"""A step's cumulant is the logarithm of a sum of a few thousand positive terms near 1: it errs by less than this."""


@dataclass(frozen=True, order=True)
class Step:
    """`count` steps with noise `multiplier` times the clip norm, each drawing rows with `probability`."""

    multiplier: float
    probability: float
    count: int


class Detail(NamedTuple):
    """How fine the grid is: widest cell, largest share of variance that cells may add, and the length of the FFT up to
    which the share is heeded.
    """

    width: float
    variance: float
    length: int


class Window(NamedTuple):
    """The tilt, the losses between which the FFT looks, and the Chernoff exponent for those above."""

    theta: float
    bottom: float
    top: float
    exponent: float


COARSE = Detail(math.inf, 1e-3, 1 << 16)
FINE = Detail(1e-4, 2e-4, 1 << 19)

FARTHEST = 600.0
"""Windows end before this, where e^x is no longer a floating point number."""

LONGEST = 1 << 21
"""Windows that need longer FFTs for cells of the widest width, some 200 wide, are left to Chernoff bounds."""


@dataclass(frozen=True)
class Pair:
    """P = (1-up) N(0, z^2) + up N(1, z^2) against Q = (1-down) N(0, z^2) + down N(-1, z^2)."""

    z: float
    up: float
    down: float

    def loss(self, x: Floats) -> Floats:
        """log P(x)/Q(x), which grows with x."""
        return log_mix(self.up, (x - 0.5) / self.z**2) - log_mix(self.down, (-x - 0.5) / self.z**2)

    def point(self, loss: Floats) -> Floats:
        """The x of a loss; -inf or inf where the loss is out of reach."""
        if self.down == 0:
            return _drawn_point(loss, self.z, self.up)
        if self.up == 0:
            return -_drawn_point(-loss, self.z, self.down)
        log_odds = _log_rest(self.up) - math.log(self.up) + 0.5 / self.z**2
        if log_odds + float(np.max(np.abs(loss))) / 2 < 600:
            return np.asarray(self.z**2 * (loss / 2 + np.arcsinh(math.exp(log_odds) * np.sinh(loss / 2))))
        half = np.maximum(np.abs(loss) / 2, 1e-300)
        log = log_odds + half + np.log(-np.expm1(-2 * half))  # of twice what arcsinh is taken of
        size = np.where(log > 40, log, np.arcsinh(np.exp(np.minimum(log, 40)) / 2))
        return np.asarray(self.z**2 * (loss / 2 + np.copysign(size, loss)))

    def masses(self, x: Floats) -> tuple[Floats, Floats]:
        """P and Q of the intervals between the points x."""
        centre = _normal(x / self.z)
        p = (1 - self.up) * centre + self.up * _normal((x - 1) / self.z) if self.up else centre
        q = (1 - self.down) * centre + self.down * _normal((x + 1) / self.z) if self.down else centre
        return p, q

    def ends(self, low: float, high: float, tail: float) -> Floats:
        """The x between two losses, without what P has at most `tail` of on either side."""
        from scipy.special import ndtri

        spread = -float(ndtri(tail)) * self.z
        return np.clip([-spread, spread + (self.up > 0)], *self.point(np.array([low, high])))


def log_mix(share: float, log: Floats) -> Floats:
    """log(1 - share + share e^log), accurate also where it is near zero."""
    if share <= 0.5:
        mixed = np.log1p(share * np.expm1(np.minimum(log, 500)))
        return np.asarray(np.where(log <= 500, mixed, log + math.log(max(share, 1e-300))))
    return np.asarray(np.logaddexp(_log_rest(share), math.log(share) + log))


def _drawn_point(loss: Floats, z: float, q: float) -> Floats:
    """The x at which log(1 - q + q e^((x - 1/2) / z^2)) is `loss`."""
    with np.errstate(divide="ignore"):
        log = np.log(np.maximum(np.expm1(np.minimum(loss, 40)) + q, 0) / q)
        return np.asarray(0.5 + z**2 * (log + np.maximum(loss - 40, 0)))


def _normal(x: Floats) -> Floats:
    """The standard normal mass between neighbouring points, from the tail on whose side they are."""
    from scipy.special import ndtr

    tail = ndtr(-np.abs(x))
    mass = np.abs(np.diff(tail))
    middle = int(np.searchsorted(x, 0.0))
    if 0 < middle < len(x):
        mass[middle - 1] = 1 - tail[middle - 1] - tail[middle]
    return np.asarray(mass)


def directions(steps: tuple[Step, ...], adjacency: str) -> list[list[Pair]]:
    """The steps' dominating pairs, once for each direction in which neighbours can be told apart."""
    if adjacency == "replace":
        return [[Pair(step.multiplier, step.probability, step.probability) for step in steps]]
    return [
        [Pair(step.multiplier, step.probability, 0.0) for step in steps],
        [Pair(step.multiplier, 0.0, step.probability) for step in steps],
    ]


class Sketch:
    """The moments of the summed loss, from a few thousand points of x per step.

    `cumulant` is a bound from above for theta >= 0, of the loss where it is finite: what P has below the points counts
    at the lowest loss, where it is larger than in truth. What P has above them counts at the highest loss, which is too
    little: `infinite` is the chance that any step gets there, and a bound of delta must add it. The trapezoid rule
    between is exact to rounding while the integrand's bends are wider than the gaps (`smooth`); with the ends at full
    weight it counts too much there, not too little.
    """

    def __init__(self, pairs: list[Pair], counts: tuple[int, ...], cap: float, tail: float) -> None:
        self.counts = counts
        self.losses: list[Floats] = []
        self.logs: list[Floats] = []
        self.bends: list[tuple[float, float]] = []
        log_finite = 0.0
        for pair in pairs:
            low, high = pair.ends(-cap, cap, tail)
            x = np.linspace(low, high, NODES)
            density = _log_mixture(x, pair.z, pair.up)
            logs = density + math.log(max(x[1] - x[0], 1e-300))
            losses = pair.loss(x)
            self.bends.append((float(np.diff(logs, 2).min()), float(np.diff(losses, 2).min())))
            above = _log_above(x[-1], pair)
            logs[-1] = np.logaddexp(logs[-1], above)
            logs[0] = np.logaddexp(logs[0], _log_below(x[0], pair))
            log_finite += counts[len(self.logs)] * _log_rest(math.exp(above))
            self.losses.append(losses)
            self.logs.append(logs)
        self.most = sum(count * float(loss[-1]) for count, loss in zip(counts, self.losses))
        self.infinite = -math.expm1(log_finite)

    def cumulant(self, theta: float) -> float:
        """log E e^(theta S) for the summed loss S under P."""
        parts = zip(self.counts, self.losses, self.logs)
        return sum(count * _log_sum(log + theta * loss) for count, loss, log in parts)

    def moments(self, theta: float) -> tuple[float, float]:
        """Mean and variance of S when P is tilted by e^(theta S)."""
        mean = variance = 0.0
        for count, loss, weight in zip(self.counts, self.losses, self._tilted(theta)):
            centre = float(weight @ loss)
            mean += count * centre
            variance += count * float(weight @ (loss - centre) ** 2)
        return mean, variance

    def added_variance(self, theta: float, h: float) -> float:
        """What moving losses to the ends of cells of width h adds to the variance of S."""
        added = 0.0
        for count, loss, weight in zip(self.counts, self.losses, self._tilted(theta)):
            place = loss / h - np.floor(loss / h)
            added += count * h * h * float(weight @ (place * (1 - place)))
        return added

    def floors(self, theta: float) -> list[float]:
        """Losses of each step below which its tilted mass is negligible, wherever it is moved up to them."""
        if theta == 0:
            return [-math.inf for _ in self.counts]
        total = math.log(sum(self.counts))
        return [(_log_sum(log + theta * x) + 2 * LOG_TAIL - total) / theta for x, log in zip(self.losses, self.logs)]

    def _tilted(self, theta: float) -> list[Floats]:
        tilted = [log + theta * loss for loss, log in zip(self.losses, self.logs)]
        return [np.asarray(np.exp(log - _log_sum(log))) for log in tilted]

    def saddle(self, epsilon: float) -> float:
        """The theta >= 0 whose tilt centres S at epsilon, or as near as delta's DEPTH allows, to a hundredth."""
        low, high, epsilon = 0.0, 1.0, min(epsilon, 0.9 * self.most)
        if self._enough(low, epsilon):
            return low
        while not self._enough(high, epsilon):
            low, high = high, 4 * high
        while high - low > 0.01 * high and high > 1e-6:
            middle = math.sqrt(low * high) if low > 0 else high / 16
            low, high = (low, middle) if self._enough(middle, epsilon) else (middle, high)
        return high

    def _enough(self, theta: float, epsilon: float) -> bool:
        mean = self.moments(theta)[0]
        return mean >= epsilon or self.cumulant(theta) - theta * mean < DEPTH

    def log_delta(self, epsilon: float) -> float:
        """Log of an upper bound of delta, by Chernoff: (1 - e^-y)_+ <= e^(t y) t^t / (1 + t)^(1 + t) for t >= 0."""
        theta = self.saddle(epsilon)
        return self.cumulant(theta) - theta * epsilon + _log_lift(theta)

    def smooth(self, theta: float) -> bool:
        """Whether no peak of the tilted density is narrower than sqrt(2) gaps between points.

        The trapezoid rule errs by 2 e^(-2 pi^2 (width / gap)^2) of a Gaussian peak: at most e^-38 then.
        """
        return all(log + theta * min(loss, 0.0) >= -0.5 for log, loss in self.bends)

    def bound(self, theta: float) -> float:
        """The cumulant, with what its rounding may hide."""
        return self.cumulant(theta) + SUM_ROUNDOFF * sum(self.counts)

    def epsilon(self, delta: float) -> float:
        """An upper bound of epsilon in the same way, over a list of tilts: what is infinite is taken off delta."""
        if self.infinite >= delta:
            return math.inf
        goal = math.log(delta - self.infinite)
        tilts: list[float] = np.geomspace(1e-2, 1e6, 81).tolist()
        bounds = [(self.bound(t) + _log_lift(t) - goal) / t for t in tilts if self.smooth(t)]
        return max(0.0, min(bounds, default=math.inf))

    def delta(self, epsilon: float) -> float:
        """An upper bound of delta, likewise."""
        theta = self.saddle(epsilon)
        if not self.smooth(theta):
            return 1.0
        log = self.bound(theta) - theta * epsilon + _log_lift(theta)
        return min(1.0, self.infinite + math.exp(min(0.0, log)))

    def window(self, theta: float, epsilon: float, tail: float) -> Window:
        """A window of S that serves the tilt theta, by Chernoff bounds on the tilted S; `tail` is a log of mass.

        At most so much lies below the window, and above epsilon plus the width, from where it would wrap around to
        losses above epsilon. Above the window itself the mass need only be small after the tilt is undone. Untilting by
        1 + theta always helps, since E e^-S <= 1.
        """
        at, scale = self.cumulant(theta), 1 / math.sqrt(max(self.moments(theta)[1], 1e-30))
        shifts = scale * np.geomspace(0.05, 60, 14)
        above = [self.cumulant(theta + s) - at - tail for s in shifts]
        bottom = min(epsilon, max((tail + at - self.cumulant(theta - s)) / s for s in [*shifts, 1 + theta]))
        upper = min(log / s for log, s in zip(above, shifts))
        top, exponent = min(((log + theta * epsilon) / (theta + s), theta + s) for log, s in zip(above, shifts))
        return Window(theta, float(bottom), float(max(top, epsilon, bottom + upper - epsilon)), float(exponent))

    def best_window(self, epsilon: float, delta: float) -> Window:
        """The narrowest window among tilts up to the saddle's that keep rounding errors small next to delta."""
        theta = self.saddle(epsilon)
        epsilon = min(epsilon, self.moments(theta)[0]) if theta > 0 else epsilon
        least = self.cumulant(theta) - theta * epsilon
        room = max(0.0, math.log(1e-11 / (ROUNDOFF * (sum(self.counts) + 100))))
        windows = []
        for tilt in (theta, 0.7 * theta, 0.4 * theta, 0.2 * theta):
            bound = self.cumulant(tilt) - tilt * epsilon
            if bound <= least + room:
                tail = min(LOG_TAIL, math.log(WRAPPED * delta) - bound)
                windows.append(self.window(tilt, epsilon, tail))
        return min(windows, key=lambda window: window.top - window.bottom)


def _log_mixture(x: Floats, z: float, up: float) -> Floats:
    """Log of the density of (1-up) N(0, z^2) + up N(1, z^2)."""
    centre = -0.5 * (x / z) ** 2 - math.log(z * math.sqrt(2 * math.pi))
    return np.asarray(centre + log_mix(up, (x - 0.5) / z**2))


def _log_above(x: float, pair: Pair) -> float:
    """Log of P's mass above x."""
    from scipy.special import log_ndtr

    centre = float(log_ndtr(-x / pair.z)) + _log_rest(pair.up)
    return float(np.logaddexp(centre, math.log(pair.up) + float(log_ndtr((1 - x) / pair.z)))) if pair.up else centre


def _log_below(x: float, pair: Pair) -> float:
    """Log of P's mass below x."""
    from scipy.special import log_ndtr

    centre = float(log_ndtr(x / pair.z)) + _log_rest(pair.up)
    return float(np.logaddexp(centre, math.log(pair.up) + float(log_ndtr((x - 1) / pair.z)))) if pair.up else centre


def _log_rest(mass: float) -> float:
    return math.log1p(-mass) if mass < 1 else -math.inf


def _log_lift(theta: float) -> float:
    return theta * math.log(theta) - (1 + theta) * math.log1p(theta) if theta > 0 else 0.0


def _log_sum(logs: Floats) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


@dataclass(frozen=True)
class Grid:
    """One step's loss on the grid h * i, i = first, first + 1, ...; `infinite` is the mass above it."""

    h: float
    first: int
    mass: Floats
    infinite: float

    @classmethod
    def of(cls, pair: Pair, h: float, low: float, high: float, tail: float) -> Grid:
        least, most = pair.loss(pair.ends(low, high, tail))
        first, last = math.floor(least / h), math.ceil(most / h)
        losses = h * np.arange(first, last + 1)
        points = np.concatenate(([-np.inf], pair.point(losses), [np.inf]))
        p, q = pair.masses(points)
        cell, growth = p[1:-1], np.exp(losses[:-1])
        upper = np.clip((cell - growth * q[1:-1]) / -math.expm1(-h), 0, cell)
        mass = np.zeros(len(losses))
        mass[:-1] = cell - upper
        mass[1:] += upper
        mass[0] += p[0]
        return cls(h, first, mass, float(p[-1]))

    def tilted(self, theta: float) -> tuple[Floats, float]:
        """The mass tilted by e^(theta x), and the log of what it was divided by."""
        with np.errstate(divide="ignore"):
            logs = np.log(self.mass) + theta * self.h * np.arange(self.first, self.first + len(self.mass))
        norm = _log_sum(logs)
        return np.asarray(np.exp(logs - norm)), norm

    def folded(self, mass: Floats, length: int) -> tuple[Floats, int]:
        """The mass without its peak, at index modulo length, both counted from the peak; and the peak's index."""
        peak = int(np.argmax(mass))
        start = -peak % length
        padded = np.zeros(-(-(start + len(mass)) // length) * length)
        padded[start : start + len(mass)] = mass
        padded[start + peak] = 0
        return np.asarray(padded.reshape(-1, length).sum(axis=0)), self.first + peak


@dataclass(frozen=True)
class Composed:
    """The summed loss on a window of the grid, from above: `mass` at `losses`, and `extra` of delta at any epsilon.

    Rounding adds at most `noise` e^(-theta epsilon) to delta at epsilon.
    """

    losses: Floats
    mass: Floats
    extra: float
    noise: float
    theta: float

    def delta(self, epsilon: float) -> float:
        above = self.losses > epsilon
        gaps = -np.expm1(epsilon - self.losses[above])
        return min(1.0, self.extra + self.rounding(epsilon) + float(gaps @ self.mass[above]))

    def rounding(self, epsilon: float) -> float:
        """What of that delta is there for rounding errors."""
        return self.noise * math.exp(min(-self.theta * epsilon, 600.0))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 with at most this delta; inf above the window.

        At a grid loss x_j, delta is A_j - e^x_j B_j with A and B the sums of mass and of e^-x mass from j on. Between
        two of them it is A_j - e^epsilon B_j with the upper one's j.
        """
        total = np.cumsum(self.mass[::-1])[::-1] + self.extra
        shrunk = np.cumsum((self.mass * np.exp(-self.losses))[::-1])[::-1]
        with np.errstate(over="ignore"):
            noise = self.noise * np.exp(np.minimum(-self.theta * self.losses, 600.0))
        enough = total - np.exp(self.losses) * shrunk + noise <= delta
        if not enough[-1]:
            return math.inf
        j = len(enough) - int(np.argmin(enough[::-1])) if not enough.all() else 0
        if j == 0 or shrunk[j] <= 0:
            return max(0.0, float(self.losses[j]))
        room = float(total[j] + noise[j - 1]) - delta
        return max(0.0, min(float(self.losses[j]), math.log(max(room, 1e-300) / float(shrunk[j]))))


NOTHING = Composed(np.zeros(1), np.zeros(1), 1.0, 0.0, 0.0)
"""What is known of any sum."""


def _quiet() -> None:
    """Nobody waits."""


_pulse: Callable[[], None] = _quiet


@contextmanager
def pulsing(pulse: Callable[[], None]) -> Iterator[None]:
    """Calls `pulse` before each composition, the longest thing done here, so that a server can be cancelled."""
    global _pulse
    before, _pulse = _pulse, pulse
    try:
        yield
    finally:
        _pulse = before


def compose(pairs: list[Pair], counts: tuple[int, ...], epsilon: float, delta: float, detail: Detail) -> Composed:
    """The sum of `counts` losses of each pair: an upper bound, and close around this epsilon and delta."""
    _pulse()
    if epsilon > MOST_LOSS:
        return NOTHING
    cap, tail = epsilon + HEADROOM, TAIL * delta / sum(counts)
    sketch = Sketch(pairs, counts, cap, tail)
    if sketch.most < 0.9 * epsilon:
        return Composed(np.array([sketch.most]), np.ones(1), sketch.infinite, 0.0, 0.0)
    theta, bottom, top, exponent = sketch.best_window(epsilon, delta)
    width = top - bottom
    length = _length(sketch, theta, width, detail)
    if length > LONGEST or max(top, -bottom) > FARTHEST:
        return NOTHING
    h = width / (length - 4)
    high = min(cap, top + max(0.0, -bottom))
    grids = [Grid.of(pair, h, max(low, -cap), high, tail) for pair, low in zip(pairs, sketch.floors(theta))]
    power, shift, norm, error = _power(grids, counts, theta, length)
    begin = math.floor(bottom / h)
    losses = h * np.arange(begin, begin + length, dtype=np.float64)
    mass = np.roll(power, (shift - begin) % length) * np.exp(np.minimum(norm - theta * losses, 600.0))
    beyond = sum(count * grid.tilted(exponent)[1] for count, grid in zip(counts, grids)) - exponent * losses[-1]
    infinite = -math.expm1(sum(count * _log_rest(grid.infinite) for count, grid in zip(counts, grids)))
    entries = min(float(length), 1 / -math.expm1(-2 * theta * h)) if theta > 0 else float(length)
    noise = error * math.sqrt(entries) * math.exp(min(norm, 600.0))
    return Composed(losses, mass, infinite + math.exp(min(0.0, beyond)), noise, theta)


def _length(sketch: Sketch, theta: float, width: float, detail: Detail) -> int:
    """The shortest FFT whose cells are fine enough; if it is their share of variance that is not, then the longest one
    that is allowed for that.
    """
    length = 1 << 10
    variance = detail.variance * sketch.moments(theta)[1]
    while length < detail.length and sketch.added_variance(theta, width / length) > variance:
        length *= 2
    while length <= LONGEST and width / (length - 4) > detail.width:
        length *= 2
    return length


def _power(grids: list[Grid], counts: tuple[int, ...], theta: float, length: int) -> tuple[Floats, int, float, float]:
    """The tilted pmf of the sum modulo `length`, its shift, the log of its divisor, and its rounding error in L2 norm.

    A step's transform f is 1 + the transform of what is not at the pmf's peak, of mass r, minus r: it errs by 4 u
    log2(length) r in every frequency, u the unit roundoff, and so does its logarithm, phase included. With g the
    product of the powers f^T, its error is thus at most 4 u log2(length) T r |g|^((T-1)/T), which the mean over the
    frequencies turns into the L2 norm of the pmf's error (Parseval, Jensen); the transform back adds 4 u log2(length).
    """
    product, shift, norm, weight = np.ones(length // 2 + 1, dtype=np.complex128), 0, 0.0, 1.0
    for count, grid in zip(counts, grids):
        mass, divisor = grid.tilted(theta)
        rest, peak = grid.folded(mass, length)
        spectrum = np.fft.rfft(rest)
        shift, norm, weight = shift + count * peak, norm + count * divisor, weight + count * spectrum[0].real
        product *= _exp_power(spectrum - spectrum[0].real, count)
    if counts == (1,):
        rest[0] += 1 - rest.sum()
        return rest, shift, norm, 0.0
    square = float(np.mean(product.real**2 + product.imag**2))
    error = 4 * ROUNDOFF * math.log2(length) * weight * square ** (0.5 - 0.5 / min(counts))
    return np.maximum(np.fft.irfft(product, length), 0), shift, norm, error


def _exp_power(base: npt.NDArray[np.complex128], count: int) -> npt.NDArray[np.complex128]:
    """(1 + base)^count, accurate also for small base, and zero below e^-100."""
    with np.errstate(divide="ignore"):
        log = 0.5 * np.log1p(np.maximum(2 * base.real + base.real**2 + base.imag**2, -1))
    alive = count * log > -100
    power = np.zeros_like(base)
    phase = count * np.arctan2(base.imag[alive], 1 + base.real[alive])
    size = np.exp(count * log[alive])
    power.real[alive] = size * np.cos(phase)
    power.imag[alive] = size * np.sin(phase)
    return power


@lru_cache(maxsize=256)
def delta(steps: tuple[Step, ...], adjacency: str, epsilon: float) -> float:
    """An upper bound of the delta that the composed steps have at epsilon; below LEAST_DELTA only LEAST_DELTA."""
    counts = tuple(step.count for step in steps)
    return max(_direction_delta(pairs, counts, epsilon) for pairs in directions(steps, adjacency))


def _direction_delta(pairs: list[Pair], counts: tuple[int, ...], epsilon: float) -> float:
    """Delta of one direction: its order of magnitude on the coarse grid, then its value on the fine one."""
    scale, best = 1.0, 0.0
    while best < scale / 10 and scale > LEAST_DELTA:
        scale = max(scale / 1e6, LEAST_DELTA)
        best = compose(pairs, counts, epsilon, scale, COARSE).delta(epsilon)
    chernoff = Sketch(pairs, counts, epsilon + HEADROOM, TAIL * scale / sum(counts)).delta(epsilon)
    return max(LEAST_DELTA, min(chernoff, compose(pairs, counts, epsilon, scale, FINE).delta(epsilon)))


@lru_cache(maxsize=256)
def epsilon(steps: tuple[Step, ...], adjacency: str, delta: float) -> float:
    """An upper bound of the epsilon that the composed steps have at delta.

    Steps that draw rows too rarely to matter are paid for with delta: unless they draw the row, neighbours look alike.
    Multipliers below LEAST_PRICED are not told from none, and those above MOST_MULTIPLIER not from that.
    """
    rare = [step for step in steps if step.count * step.probability <= RARE * delta / len(steps)]
    steps = tuple(
        Step(min(step.multiplier, MOST_MULTIPLIER), step.probability, step.count) for step in steps if step not in rare
    )
    delta -= sum(step.count * step.probability for step in rare)
    if sum(step.count * step.probability for step in steps) <= delta:
        return 0.0
    if min(step.multiplier for step in steps) < LEAST_PRICED or delta < LEAST_PRICED_DELTA:
        return math.inf
    counts = tuple(step.count for step in steps)
    return max(_direction_epsilon(pairs, counts, delta) for pairs in directions(steps, adjacency))


def _direction_epsilon(pairs: list[Pair], counts: tuple[int, ...], delta: float) -> float:
    """Epsilon of one direction: a Chernoff bound, or what the fine grid says around the epsilon that the coarse one
    finds, and once more around its own as long as that moves.
    """
    best = Sketch(pairs, counts, MOST_LOSS, TAIL * delta / sum(counts)).epsilon(delta)
    if math.isinf(best):
        return best
    centre = best
    for _ in range(2):
        centre = min(centre, compose(pairs, counts, centre, delta, COARSE).epsilon(delta))
    for _ in range(MOST_FINE):
        last, best = centre, min(best, compose(pairs, counts, centre, delta, FINE).epsilon(delta))
        centre = min(centre, best)
        if best >= SETTLED * last:
            break
    return best
