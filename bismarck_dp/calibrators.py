"""How much noise a release takes: each calibrator goes from (epsilon, delta) to a multiplier and back, and says what
event that is. Multipliers are those of the events (`accounting` has the convention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .accounting import (
    ComposedDpEvent,
    Event,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    ZCDpEvent,
    check_adjacency,
    doubling,
    epsilon_of,
    gaussian_epsilon,
    gaussian_multiplier,
    repeated,
    selection_epsilon,
    selection_rho,
    zcdp_epsilon,
    zcdp_rho,
)
from .errors import BismarckError


@dataclass(frozen=True)
class Gaussians:
    """`count` Gaussian releases of sensitivity 1 each, as one: exactly a Gaussian of sensitivity sqrt(count)
    (Dong, Roth and Su 2019, Corollary 3.3).
    """

    count: int = 1

    @property
    def accountant(self) -> str:
        return "analytic-gaussian" if self.count == 1 else "gdp"

    def multiplier(self, epsilon: float, delta: float) -> float:
        _check_privacy(epsilon, delta)
        return math.sqrt(self.count) * gaussian_multiplier(epsilon, delta)

    def epsilon(self, multiplier: float, delta: float) -> float:
        return gaussian_epsilon(multiplier / math.sqrt(self.count), delta)

    def event(self, multiplier: float) -> Event:
        return repeated(GaussianDpEvent(multiplier), self.count)


@dataclass(frozen=True)
class Laplaces:
    """`count` releases with Laplace or K-norm noise: epsilons add up, at delta = 0.

    Claim: K-norm noise in any dimension, of density proportional to e^(-|z| / b) with the L2 norm, is dominated by
    one-dimensional Laplace noise of scale b at the same sensitivity, so a LaplaceDpEvent(b / Delta) prices both.

    Proof. Condition on the noise across the shift: it has the same law on both sides, and the hockey-stick divergence
    is jointly convex. Along the shift the conditional density f is log-concave with |(log f)'| <= 1/b. So f(u) <=
    f(t) e^((t - u) / b) from below for u > t, hence 1 - F(t) >= b f(t), and likewise F(t) >= b f(t): the
    density-quantile function f(F^-1(u)) is at most min(u, 1 - u) / b, which is Laplace's. The best tests between f and
    f shifted by Delta are half lines (log-concavity), with errors a and F(F^-1(1 - a) - Delta); since the quantile
    function climbs at least as fast as Laplace's, going back by Delta loses at most as much mass: the trade-off curve
    lies above Laplace's, at every a.
    """

    count: int = 1
    accountant: ClassVar[str] = "pure"

    def multiplier(self, epsilon: float, delta: float = 0.0) -> float:
        _check_privacy(epsilon, delta, pure=True)
        return self.count / epsilon

    def epsilon(self, multiplier: float, delta: float = 0.0) -> float:
        return self.count / multiplier

    def event(self, multiplier: float) -> Event:
        return repeated(LaplaceDpEvent(multiplier), self.count)


@dataclass(frozen=True)
class PoissonGaussians:
    """`count` Gaussian sums over samples to which each row belongs with `probability`; the multiplier is the noise over
    the clip norm of one row, whatever the adjacency (`poisson` has the proof).
    """

    probability: float
    count: int
    adjacency: str

    accountant: ClassVar[str] = "pld"

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        self.event(1.0)

    def multiplier(self, epsilon: float, delta: float) -> float:
        _check_privacy(epsilon, delta)
        if self.probability == 1:
            return doubling(self.adjacency) * Gaussians(self.count).multiplier(epsilon, delta)
        from .poisson_search import multiplier

        return multiplier(epsilon, delta, self.probability, self.count, self.adjacency)

    def epsilon(self, multiplier: float, delta: float) -> float:
        return epsilon_of(self.event(multiplier), delta, self.adjacency).epsilon

    def event(self, multiplier: float) -> Event:
        return repeated(PoissonSampledDpEvent(self.probability, GaussianDpEvent(multiplier)), self.count)


@dataclass(frozen=True)
class ZcdpSum:
    """`count` Gaussian releases and `selections` exponential mechanisms, which get `share` of the total rho."""

    count: int
    selections: int = 0
    share: float = 0.0

    accountant: ClassVar[str] = "zcdp"

    def __post_init__(self) -> None:
        if not (0 <= self.share < 1 and (self.share > 0) == (self.selections > 0)):
            raise BismarckError(
                f"{self.selections} selections cannot have the share {self.share:g} of the privacy",
                "use a share above 0 and below 1 with selections, and 0 without",
            )

    def multiplier(self, epsilon: float, delta: float) -> float:
        _check_privacy(epsilon, delta)
        return math.sqrt(self.count / (2 * (1 - self.share) * zcdp_rho(epsilon, delta)))

    def rho(self, multiplier: float) -> float:
        """The total."""
        return self.count / (2 * multiplier**2 * (1 - self.share))

    def selection(self, multiplier: float) -> float:
        """The epsilon of each selection beside Gaussians of this multiplier."""
        return selection_epsilon(self.share * self.rho(multiplier) / self.selections) if self.selections else 0.0

    def epsilon(self, multiplier: float, delta: float) -> float:
        return zcdp_epsilon(self.rho(multiplier), delta)

    def event(self, multiplier: float) -> Event:
        gaussians = repeated(GaussianDpEvent(multiplier), self.count)
        if not self.selections:
            return gaussians
        each = ZCDpEvent(selection_rho(self.selection(multiplier)))
        return ComposedDpEvent((gaussians, repeated(each, self.selections)))


@dataclass(frozen=True)
class PureSum:
    """`count` Laplace releases and `selections` exponential mechanisms, which get `share` of epsilon; they add up.

    Claim: an exponential mechanism that is e-DP is dominated by Laplace noise of scale 1/e, and is priced as such.
    Proof: its log odds lie in an interval [t - e, t] (bounded range), so its hockey-stick divergence at x is at most
    that of the two ends, of which t has probability (exp(e) - exp(t)) / (exp(e) - 1) (Dong, Durfee and Rogers 2020).
    Over all t that is at most (1 - s)^2 / (1 - exp(-e)) with s = exp((x - e) / 2), at t = (e + x) / 2. Laplace noise
    has 1 - s for x between -e and e, which is no less: 1 - s <= 1 - exp(-e).
    """

    count: int
    selections: int
    share: float

    accountant: ClassVar[str] = "pure"

    def multiplier(self, epsilon: float, delta: float = 0.0) -> float:
        _check_privacy(epsilon, delta, pure=True)
        return self.count / ((1 - self.share) * epsilon)

    def epsilon(self, multiplier: float, delta: float = 0.0) -> float:
        return self.count / (multiplier * (1 - self.share))

    def selection(self, multiplier: float) -> float:
        """The epsilon of each selection beside Laplace noise of this multiplier."""
        return self.share * self.epsilon(multiplier) / self.selections

    def event(self, multiplier: float) -> Event:
        each = LaplaceDpEvent(1 / self.selection(multiplier))
        values = repeated(LaplaceDpEvent(multiplier), self.count)
        return ComposedDpEvent((values, repeated(each, self.selections)))


def _check_privacy(epsilon: float, delta: float, pure: bool = False) -> None:
    if not 0 < epsilon < math.inf:
        raise BismarckError(f"epsilon {epsilon:g} is out of range", "it must be a positive number")
    if not (0 <= delta < 1 if pure else 0 < delta < 1):
        raise BismarckError(
            f"delta {delta:g} is out of range", "it must be " + ("from 0 to below 1" if pure else "between 0 and 1")
        )
