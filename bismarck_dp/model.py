"""A released model: weights, how they were made private, and predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .accounting import Event
from .errors import BismarckError
from .losses import LOSSES, Array
from .reference import clip_rows


@dataclass(frozen=True)
class Model:
    """One row of bismarck_dp.models, under the same names."""

    id: int
    name: str
    algorithm: str
    loss: str
    weights: Array
    intercept: Array
    classes: Array
    n: int
    d: int
    epsilon: float | None
    delta: float | None
    sensitivity: float | None
    noise_scale: float | None
    mechanism: str
    adjacency: str | None
    support: npt.NDArray[np.int64] | None
    """places of the weights that are not zero, counted from 0 as NumPy does (the database counts from 1)"""
    trust: str | None
    gap: float | None
    """how far the training objective is from its minimum at most (scd)"""
    passes: float
    seconds: float
    created: Any
    private: bool
    note: str
    source: str
    label: str
    features: list[str]
    feature_bound: float
    scale: Array | None
    """features are divided by these, and cut to ±1"""
    normalize: bool
    """rows are scaled to the feature bound, short ones too"""
    options: dict[str, Any] = field(repr=False)
    plan: dict[str, Any] = field(repr=False)
    event: dict[str, Any] = field(repr=False)
    owner: str = ""

    @classmethod
    def from_row(cls, row: Any) -> Model:
        values = dict(row)
        for name in ("weights", "intercept", "classes"):
            values[name] = np.array(values[name], dtype=np.float64)
        if values["support"] is not None:
            values["support"] = np.array(values["support"], dtype=np.int64) - 1
        if values["scale"] is not None:
            values["scale"] = np.array(values["scale"], dtype=np.float64)
        # JSON writes a whole number without its point.
        for name in ("epsilon", "delta", "sensitivity", "noise_scale", "gap", "passes", "seconds", "feature_bound"):
            values[name] = None if values[name] is None else float(values[name])
        return cls(**values)

    @property
    def privacy(self) -> dict[str, Any]:
        """What the model claims: everything an expert needs to check it."""
        names = (
            "private",
            "epsilon",
            "delta",
            "adjacency",
            "trust",
            "mechanism",
            "sensitivity",
            "noise_scale",
            "event",
            "note",
        )
        return {name: getattr(self, name) for name in names}

    def to_dp_event(self) -> Any:
        """The release as an object of the library dp-accounting, for whoever wants to price it again."""
        return Event.from_json(self.event).to_dp_event()

    def decision_function(self, x: npt.ArrayLike) -> Array:
        """Margins of rows, scaled as they were in training."""
        rows = np.atleast_2d(np.asarray(x, dtype=np.float64))
        if rows.shape[1] != self.d:
            raise BismarckError(f'model "{self.name}" has {self.d} features, not {rows.shape[1]}')
        intercept = len(self.intercept) > 0
        packed = clip_rows(rows, self.feature_bound, intercept, self.scale, self.normalize).astype(np.float64)
        margins = packed @ np.concatenate([self.weights, self.intercept])
        margins[~np.isfinite(rows).all(axis=1)] = np.nan
        return np.asarray(margins, dtype=np.float64)

    def predict(self, x: npt.ArrayLike) -> Array:
        """Classes in the labels' own coding, or values; NaN for a row that is not finite."""
        margins = self.decision_function(x)
        if not LOSSES[self.loss].classification:
            return margins
        return np.where(np.isnan(margins), np.nan, self.classes[(margins > 0).astype(int)])

    def predict_proba(self, x: npt.ArrayLike) -> Array:
        """Probabilities of the two classes, negative first; for the logistic loss only."""
        if self.loss != "logistic":
            raise BismarckError(f'model "{self.name}" gives no probabilities', 'train it with loss="logistic"')
        with np.errstate(over="ignore"):
            positive = 1 / (1 + np.exp(-self.decision_function(x)))
        return np.column_stack([1 - positive, positive])

    def score(self, x: npt.ArrayLike, y: npt.ArrayLike) -> float:
        """Accuracy, or R² for regression."""
        labels = np.asarray(y, dtype=np.float64)
        predicted = self.predict(x)
        if LOSSES[self.loss].classification:
            return float(np.mean(predicted == labels))
        return 1 - float(np.sum((labels - predicted) ** 2) / np.sum((labels - labels.mean()) ** 2))
