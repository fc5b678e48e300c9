"""A released model: weights, how they were made private, and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .accounting import Event
from .errors import BismarckError
from .losses import LOSSES, Array
from .reference import clip_rows, projection


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
    multiclass: str | None
    """softmax or ovr: the weights of each class, one after the other; None for two classes and for a number"""
    categories: dict[str, list[Any]] | None
    """columns coded as zeros and ones, and the values that count"""
    project_dim: int | None
    project_seed: int | None
    """what the projection's matrix is made from; public"""
    tuning: dict[str, Any] | None
    """what it was chosen from, and how; None for a model that was trained alone"""
    options: dict[str, Any] = field(repr=False)
    plan: dict[str, Any] = field(repr=False)
    event: dict[str, Any] = field(repr=False)
    owner: str = ""
    privacy_unit: str = "row"
    """what the guarantee is for: a row, or all rows of a unit"""
    ledger_id: int | None = None
    """the entry of the ledger that paid for it; None where the source is not protected"""

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
            "privacy_unit",
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
        """Margins of rows, scaled as they were in training: one for each row, or one for each of many classes."""
        rows = np.atleast_2d(np.asarray(x, dtype=np.float64))
        if rows.shape[1] != self.d:
            raise BismarckError(f'model "{self.name}" has {self.d} features, not {rows.shape[1]}')
        intercept = len(self.intercept) > 0
        matrix = None
        if self.project_dim is not None and self.project_seed is not None:
            matrix = projection(self.project_seed, self.project_dim, self.d)
        shape = (self.feature_bound, intercept, self.scale, self.normalize, matrix)
        margins = clip_rows(rows, *shape).astype(np.float64) @ self.matrix().T
        margins[~np.isfinite(rows).all(axis=1)] = np.nan
        return np.asarray(margins if self.multiclass else margins[:, 0], dtype=np.float64)

    def matrix(self) -> Array:
        """Weights by class, the intercept last."""
        outputs = len(self.classes) if self.multiclass else 1
        return np.hstack([self.weights.reshape(outputs, -1), self.intercept.reshape(outputs, -1)])

    def encode(self, rows: Any) -> Array:
        """Features of rows, see `encode_rows`."""
        return encode_rows(self.features, self.categories, rows)

    def predict(self, x: npt.ArrayLike) -> Array:
        """Classes in the labels' own coding, or values; NaN for a row that is not finite."""
        margins = self.decision_function(x)
        if not LOSSES[self.loss].classification:
            return margins
        if self.multiclass:
            return np.where(np.isnan(margins[:, 0]), np.nan, self.classes[margins.argmax(axis=1)])
        return np.where(np.isnan(margins), np.nan, self.classes[(margins > 0).astype(int)])

    def predict_proba(self, x: npt.ArrayLike) -> Array:
        """Probabilities of the classes, of two the negative first; for the logistic loss only. One against the rest:
        each class by itself, made to add up to 1.
        """
        if self.loss != "logistic":
            raise BismarckError(f'model "{self.name}" gives no probabilities', 'train it with loss="logistic"')
        from scipy.special import expit, softmax  # whoever only trains need not wait for it

        margins = self.decision_function(x)
        if self.multiclass == "softmax":
            return np.asarray(softmax(margins, axis=1))
        positive = np.asarray(expit(margins))
        if self.multiclass == "ovr":
            return np.asarray(positive / positive.sum(axis=1, keepdims=True))
        return np.column_stack([1 - positive, positive])

    def score(self, x: npt.ArrayLike, y: npt.ArrayLike) -> float:
        """Accuracy, or R² for regression."""
        labels = np.asarray(y, dtype=np.float64)
        predicted = self.predict(x)
        if LOSSES[self.loss].classification:
            return float(np.mean(predicted == labels))
        return 1 - float(np.sum((labels - predicted) ** 2) / np.sum((labels - labels.mean()) ** 2))


def encode_rows(features: Sequence[str], categories: Mapping[str, Sequence[Any]] | None, rows: Any) -> Array:
    """The features of rows, with categories as zeros and ones; a missing number is NaN. Rows are given as column:
    value, one or several, or as a DataFrame.
    """
    names = [(name, (categories or {}).get(name)) for name in features]
    if hasattr(rows, "to_dict"):
        rows = rows.to_dict("records")
    rows = [rows] if isinstance(rows, Mapping) else list(rows)
    for name in features:
        if any(name not in row for row in rows):
            raise BismarckError(f'a row has no column "{name}"', f"give all of: {', '.join(features)}")
    return np.array([[number for name, values in names for number in _coded(row[name], values)] for row in rows])


def _coded(value: Any, categories: Sequence[Any] | None) -> list[float]:
    if categories is not None:
        return [float(value == category) for category in categories]
    return [float("nan") if value is None else float(value)]
