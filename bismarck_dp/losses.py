"""Losses: scalar functions of the margin z = <w, x> and the label y, with the constants a privacy proof needs.

A loss never sees features. For rows of norm at most F it is `F * steepness` Lipschitz and `F**2 * curvature` smooth
in w. Adding one is an entry here and one in udf/kernels/losses.c; the contract tests pick it up.
"""

from __future__ import annotations

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


_ALL = [
    Loss("logistic", True, _logistic_value, _logistic_slope, lambda _: 1.0, lambda _: 0.25),
    Loss("huber", True, _huber_value, _huber_slope, lambda _: 1.0, lambda h: 1 / (2 * h)),
    Loss("hinge", True, _hinge_value, _hinge_slope, lambda _: 1.0, lambda _: None),
    Loss("squared", False, _squared_value, _squared_slope, lambda clip: clip, lambda _: 1.0),
]

LOSSES: dict[str, Loss] = {loss.name: loss for loss in _ALL}


def loss_param(name: str, options: dict[str, Any]) -> float:
    """The loss's one number, taken from the options."""
    return float({"huber": options["huber_h"], "squared": options["clip"]}.get(name, 0.0))
