"""Losses: scalar functions of the margin z = <w, x> and the label y, with the constants a privacy proof needs.

A loss never sees features. For rows of norm at most F it is `F * steepness` Lipschitz and `F**2 * curvature` smooth
in w. Adding one is an entry here and one in udf/kernels/losses.c; the contract tests pick it up.

A dual variable a belongs to a row; with two classes y a lies between 0 and 1. A row that counts for nothing has the
label 0 there: its loss is a constant, and its dual variable is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Loss:
    """`param` is the loss's one number: the half-width h of huber, the clip of squared; others ignore it."""

    name: str
    classification: bool
    value: Callable[[Array, Array, float], Array]
    slope: Callable[[Array, Array, float], Array]
    steepness: Callable[[float], float]
    """sup |slope|"""
    curvature: Callable[[float], float | None]
    """sup |slope'|, None where the slope jumps"""
    conjugate: Callable[[Array, Array, float], Array]
    """of a dual variable a and y: sup over z of -a z - value(z)"""
    dual: Callable[[Array, Array, Array, Array, float], Array]
    """of z, y, a and c: the b near which conjugate(b) + z (b - a) + c (b - a)^2 / 2 is least; exact but for logistic"""


def _logistic_value(z: Array, y: Array, _: float) -> Array:
    return np.logaddexp(0.0, -y * z)


def _logistic_slope(z: Array, y: Array, _: float) -> Array:
    with np.errstate(over="ignore"):
        return -y / (1.0 + np.exp(y * z))


def _huber_value(z: Array, y: Array, h: float) -> Array:
    m = y * z
    return np.where(m > 1 + h, 0.0, np.where(m < 1 - h, 1 - m, (1 + h - m) ** 2 / (4 * h)))


def _huber_slope(z: Array, y: Array, h: float) -> Array:
    m = y * z
    return np.where(m > 1 + h, 0.0, np.where(m < 1 - h, -y, -y * (1 + h - m) / (2 * h)))


def _hinge_value(z: Array, y: Array, _: float) -> Array:
    return np.asarray(np.maximum(0.0, 1 - y * z))


def _hinge_slope(z: Array, y: Array, _: float) -> Array:
    return np.where(y * z < 1, -y, np.zeros_like(y))


def _squared_value(z: Array, y: Array, clip: float) -> Array:
    r = np.abs(z - y)
    beyond = np.maximum(r - clip, 0.0)
    return np.asarray(0.5 * np.minimum(r, clip) ** 2 + np.where(beyond > 0, clip, 0.0) * beyond)


def _squared_slope(z: Array, y: Array, clip: float) -> Array:
    return np.clip(z - y, -clip, clip)


def _constant(y: Array, otherwise: Array, value: float) -> Array:
    return np.where(y == 0, -value, otherwise)


def _logistic_conjugate(a: Array, y: Array, _: float) -> Array:
    b = np.clip(y * a, 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = [np.where(p > 0, p * np.log(p), 0.0) for p in (b, 1 - b)]
    return _constant(y, entropy[0] + entropy[1], math.log(2))


def _logistic_dual(z: Array, y: Array, a: Array, c: Array, _: float) -> Array:
    """One Newton step, from the share 4 / (4 + c) of the way to the slope's own dual variable, kept on that way."""
    m, before = y * z, np.clip(y * a, 0.0, 1.0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        u = 1 / (1 + np.exp(m))
        b = before + (u - before) * 4 / (4 + c)
        rise = np.log(b / (1 - b)) + m + c * (b - before)
        step = np.where((b > 0) & (b < 1), rise / (1 / (b * (1 - b)) + c), 0.0)
    return y * np.clip(b - step, np.minimum(before, u), np.maximum(before, u))


def _huber_conjugate(a: Array, y: Array, h: float) -> Array:
    b = np.clip(y * a, 0.0, 1.0)
    return _constant(y, h * b**2 - (1 + h) * b, float(_huber_value(np.zeros(1), np.zeros(1), h)[0]))


def _huber_dual(z: Array, y: Array, a: Array, c: Array, h: float) -> Array:
    before = np.clip(y * a, 0.0, 1.0)
    with np.errstate(divide="ignore"):
        return y * np.clip(before + (1 + h - y * z - 2 * h * before) / (2 * h + c), 0.0, 1.0)


def _hinge_conjugate(a: Array, y: Array, _: float) -> Array:
    return _constant(y, -np.clip(y * a, 0.0, 1.0), 1.0)


def _hinge_dual(z: Array, y: Array, a: Array, c: Array, _: float) -> Array:
    return _huber_dual(z, y, a, c, 0.0)


def _squared_conjugate(a: Array, y: Array, _: float) -> Array:
    return 0.5 * a**2 - a * y


def _squared_dual(z: Array, y: Array, a: Array, c: Array, clip: float) -> Array:
    return np.clip(a + (y - z - a) / (1 + c), -clip, clip)


_ALL = [
    Loss(
        "logistic",
        classification=True,
        value=_logistic_value,
        slope=_logistic_slope,
        steepness=lambda _: 1.0,
        curvature=lambda _: 0.25,
        conjugate=_logistic_conjugate,
        dual=_logistic_dual,
    ),
    Loss(
        "huber",
        classification=True,
        value=_huber_value,
        slope=_huber_slope,
        steepness=lambda _: 1.0,
        curvature=lambda h: 1 / (2 * h),
        conjugate=_huber_conjugate,
        dual=_huber_dual,
    ),
    Loss(
        "hinge",
        classification=True,
        value=_hinge_value,
        slope=_hinge_slope,
        steepness=lambda _: 1.0,
        curvature=lambda _: None,
        conjugate=_hinge_conjugate,
        dual=_hinge_dual,
    ),
    Loss(
        "squared",
        classification=False,
        value=_squared_value,
        slope=_squared_slope,
        steepness=lambda clip: clip,
        curvature=lambda _: 1.0,
        conjugate=_squared_conjugate,
        dual=_squared_dual,
    ),
]

LOSSES: dict[str, Loss] = {loss.name: loss for loss in _ALL}


# ---- many classes: a slope for each, and their gradient is the outer product with the row ----


def softmax_slopes(z: Array, y: Array) -> Array:
    """p - e_y, of margins (rows by classes) and places of classes: of norm at most sqrt 2, since the p of other classes
    add up to 1 - p_y, and sqrt(2) (1 - p_y) is the most that leaves.
    """
    e = np.exp(z - z.max(axis=1, keepdims=True))
    slopes = e / e.sum(axis=1, keepdims=True)
    slopes[np.arange(len(y)), y.astype(int)] -= 1.0
    return np.asarray(slopes)


def ovr_slopes(loss: Loss, z: Array, y: Array, param: float) -> Array:
    """Each class against the rest, by a loss of two classes: of norm at most sqrt k times its steepness."""
    sides = np.where(np.arange(z.shape[1]) == y[:, None], 1.0, -1.0)
    return loss.slope(z, sides, param)


def many_steepness(kind: str, classes: int) -> float:
    """sup |slopes| over that of a single slope of at most 1."""
    return math.sqrt(2) if kind == "softmax" else math.sqrt(classes)


SOFTMAX_CURVATURE = 0.5
"""The Hessian in the margins is diag(p) - p p': for a unit v, v'Hv is the variance of v under p, at most a quarter of
the square of its range, which is at most sqrt 2: so H is at most 1/2 (p = 1/2 at two classes attains it)."""


def loss_param(name: str, options: dict[str, Any]) -> float:
    """The loss's one number, taken from the options."""
    return float({"huber": options["huber_h"], "squared": options["clip"]}.get(name, 0.0))
