"""BANCO (Jun and Orabona 2019, arXiv:1911.09564): SGD without a learning rate, from noisy subgradients.

A learner of directions q (projected SGD on the unit ball) and a learner of one magnitude m (a gambler that bets on
<g, q>) are multiplied: w = m q. Neither needs to know the norm of the optimum. With the t-th noisy negative subgradient
g_t, taken at w_t, and q_1 = w_1 = 0:

    x += <g_t, q_t>,  S += |g_t|^2,  y += s1^2 / 2 + G^2
    m = 1/(2a) int_{-a}^{a} u exp(u x - u^2 y) du
    q = Proj_{|q| <= 1}(q + sqrt(2 / S) g_t),  w = m q

and the mean of w_1 .. w_T is the result. Everything is made of noisy subgradients, so privacy is that of the noise;
the constants G, s1^2 and a (`Bet`) decide only how well it learns. udf/kernels/banco.c is the same in C.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .losses import Array

LARGEST = 1e280
"""No magnitude is larger: the iterates of 10^18 rows can be added up without overflow."""

LOG_ROOT = float.fromhex("0x1.5e1b60a3de2afp-1")
"""The largest double below 0.68380262375202068.., the root of ln(1 - u) = -u - u^2: ln(1 + u) >= u - u^2 for all
u >= -LOG_ROOT."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def magnitude(x: float, y: float, a: float) -> float:
    """m = 1/(2a) int_{-a}^{a} u exp(u x - u^2 y) du, cut to +-LARGEST; never NaN for finite x, y >= 0 and a > 0.

    Odd in x. With k = x / (2 sqrt(y)), the peak of the integrand in units of 1/sqrt(y), and A = a sqrt(y), the closed
    form is used if the peak is well inside (A - k >= 1), where its two terms differ by a factor of two or more;
    otherwise quadrature. Compared with mpmath for A <= 60, k <= 3000 and m < 1e260, the relative error is
    below 2e-14 + 3e-16 E, E being the logarithm that is factored out, at most k^2. Of that, the part with E is due to
    x and y being doubles: no formula in doubles avoids it. The closed form as the paper has it loses all digits where A
    is small, and overflows where A + k > 27.
    """
    if x == 0:
        return 0.0
    size, root = abs(x), math.sqrt(y)
    k = size / (2 * root) if root > 0 else math.inf
    log, rest = _closed(size, k, a, root) if a * root - k >= 1 else _quadrature(size, y, a)
    half = math.exp(min(log, 1400.0) / 2)
    return math.copysign(min(half * rest * half, LARGEST), x)


def _closed(x: float, k: float, a: float, root: float) -> tuple[float, float]:
    """The integral as (log, rest) for exp(log) * rest: k sqrt(pi)/2 (erf(A - k) + erf(A + k)) - (exp(-(A - k)^2) -
    exp(-(A + k)^2)) / 2, times exp(k^2) / y.
    """
    reach = a * root
    inside = k / reach * (math.sqrt(math.pi) / 2) * (math.erf(reach - k) + math.erf(reach + k))
    ends = math.exp(-min((reach - k) * (reach - k), 1400.0)) / 2 * math.expm1(-2 * a * x)
    return k * k, (inside + ends / reach) / (2 * root)


def _quadrature(x: float, y: float, a: float) -> tuple[float, float]:
    """The same as 1/(2a) int_0^a u exp(u x - u^2 y) (1 - exp(-2 u x)) du, whose integrand is never negative.

    The peak lies at most 1/sqrt(y) below a, or above it. Left of it the integrand falls like a Gaussian, and if the
    peak is above a, also at least exponentially: 9 standard deviations, or 38 e-foldings, below it nothing is left.
    24 nodes of Gauss and Legendre are enough; 22 would err by 1e-13, 20 by 8e-12.
    """
    peak = x / 2 / y if y > 0 else math.inf
    top = min(peak, a)
    slope = x - 2 * (a * y) if peak >= a else 0.0
    span = min(a, a - top + min(_over(9 / math.sqrt(2), math.sqrt(y)), _over(38.0, slope)))
    under = span / 2 * (1 + _NODES)
    u, above = a - under, a - top - under
    with np.errstate(over="ignore", under="ignore"):
        values = u / a * np.exp(above * (slope - above * y)) * -np.expm1(-2 * u * x)
    return top * (x - top * y), span / 4 * float(_WEIGHTS @ values)


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.inf


@dataclass(frozen=True)
class Bet:
    """The three constants of the gambler.

    Claim: if |g| <= G and the noise z has E exp(u <z, v>) <= exp(u^2 s1^2 / 2) for all unit vectors v and |u| <= 1/b_0,
    then for |u| <= a = min(LOG_ROOT / G, 1 / b_0)

        E exp(u <g + z, q> - u^2 (s1^2 / 2 + G^2)) <= exp(u <g, q> - u^2 G^2) <= 1 + u <g, q>,

    the second step being ln(1 + v) >= v - v^2 for |v| <= LOG_ROOT. Averaged over |u| <= a: the expected potential
    1/(2a) int exp(u x - u^2 y) du grows by no more than the expected winnings <g, q> m, which is all that the regret
    bound of the paper uses. A larger s1^2, and a smaller a, are also right, and only slower.
    """

    lipschitz: float
    """G, a bound on the norm of a subgradient without noise"""
    variance: float
    """s1^2"""
    reach: float
    """a"""

    @classmethod
    def knorm(cls, lipschitz: float, scale: float, d: int) -> Bet:
        """For noise of density proportional to exp(-|z| / s) in d dimensions: b_0 = 2 s, s1^2 = -4 ln(3/4) (d + 1) s^2.

        Such noise is s sqrt(V) N with V chi-square of d + 1 degrees of freedom and N standard normal
        (udf/kernels/sums.c), so E exp(u <z, v>) = E exp(u^2 s^2 V / 2) = (1 - s^2 u^2)^(-(d + 1)/2). Its logarithm
        over u^2 / 2 is (d + 1) s^2 (-ln(1 - r) / r), r = s^2 u^2, which grows with r; s1^2 is its value at r = 1/4,
        and so the smallest that is right for |u| <= 1 / (2 s). With s = 2 G / epsilon: 4.603 (d + 1) G^2 / epsilon^2.
        """
        return cls(lipschitz, -4 * math.log(0.75) * (d + 1) * scale**2, min(LOG_ROOT / lipschitz, 1 / (2 * scale)))

    @classmethod
    def gaussian(cls, lipschitz: float, sigma: float) -> Bet:
        """For N(0, sigma^2) in each coordinate: E exp(u <z, v>) = exp(u^2 sigma^2 / 2) for all u, so b_0 = 0."""
        return cls(lipschitz, sigma**2, LOG_ROOT / lipschitz)


@dataclass
class Learner:
    """One run, as far as it went; `w` is where the next subgradient is wanted."""

    bet: Bet
    q: Array
    w: Array
    total: Array
    """w_1 + .. + w_t"""
    t: int = 0
    x: float = 0.0
    y: float = 0.0
    squares: float = 0.0
    """S"""

    @classmethod
    def start(cls, bet: Bet, d: int) -> Learner:
        return cls(bet, np.zeros(d), np.zeros(d), np.zeros(d))

    @property
    def mean(self) -> Array:
        """The mean of the iterates at which subgradients were asked for."""
        return self.total / max(self.t, 1)

    def step(self, gradient: Array, count: int = 1) -> None:
        """Takes a noisy negative subgradient at `w`, or the mean of `count` of them with independent noise: then
        ln E exp(u <z, v>) <= count (u / count)^2 s1^2 / 2, so s1^2 / count takes the place of s1^2.
        """
        self.t += 1
        self.total = self.total + self.w
        self.x += float(gradient @ self.q)
        self.y += self.bet.variance / (2 * count) + self.bet.lipschitz**2
        self.squares += float(gradient @ gradient)
        if self.squares > 0:
            self.q = self.q + math.sqrt(2 / self.squares) * gradient
            self.q = self.q / max(1.0, math.sqrt(float(self.q @ self.q)))
        self.w = magnitude(self.x, self.y, self.bet.reach) * self.q

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists; floats survive JSON to the last bit."""
        vectors = {name: getattr(self, name).tolist() for name in ("q", "w", "total")}
        numbers = {name: getattr(self, name) for name in ("t", "x", "y", "squares")}
        return {"bet": asdict(self.bet), **vectors, **numbers}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Learner:
        q, w, total = (np.array(data[name], dtype=np.float64) for name in ("q", "w", "total"))
        x, y, squares = (float(data[name]) for name in ("x", "y", "squares"))
        return cls(Bet(**data["bet"]), q, w, total, int(data["t"]), x, y, squares)
