"""DPClassifier and DPRegressor: dp_train with scikit-learn's manners. Fitting happens in a database, predicting here.

Claim: a fitted estimator is as private as the model that dp_train made for it. Assumptions: those of dp_train
(docs/privacy.md), and that the number of rows, the types of their values and, where `classes` is not given, the set of
labels are public. Proof: before dp_train, a row is changed by a function of itself and of what is public (`_codes`, and
numbers written as float4 or float8), so that tables which differ in one row still do, and n stays n. Afterwards there
is only the model. And whether there is one depends on no row's values: what is missing, infinite or no class is not
refused here, and dp_train gives such a row no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BismarckError
from .losses import LOSSES, Array
from .model import Model, encode_rows
from .scaling import scales_by_column
from .spec import OPTIONS, Spec, unknown

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        check_array,
        check_consistent_length,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError:
    raise BismarckError(
        "the estimators need scikit-learn, 1.6 or later", "pip install 'scikit-learn>=1.6'", "0A000"
    ) from None

if TYPE_CHECKING:
    from .controller.database import Database

OPTION_PARAMETERS = ["lambda_" if name == "lambda" else name for name in OPTIONS]
"""Parameters that are options of dp_train; None leaves one out."""


class _Estimator(BaseEstimator):  # type: ignore[misc]
    _default_loss: str
    columns_: list[str]
    """of the DataFrame that was fitted, where they are coded or scaled by name"""

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float = 0.0,
        algorithm: str = "bolton",
        loss: str | None = None,
        database: Database | str | None = None,
        model: str | None = None,
        lambda_: float | None = None,
        radius: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        step: float | str | None = None,
        average: str | None = None,
        shuffle: str | None = None,
        clip: float | None = None,
        fit_intercept: bool | None = None,
        huber_h: float | None = None,
        adjacency: str | None = None,
        privacy_unit: str | None = None,
        unit_rows: int | None = None,
        feature_bound: float | None = None,
        scale: float | str | Sequence[float] | Mapping[str, float] | None = None,
        quantile: float | None = None,
        private_scale: float | None = None,
        scale_range: Sequence[float] | None = None,
        normalize: bool | None = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        project_dim: int | None = None,
        project_seed: int | None = None,
        label_bound: float | None = None,
        classes: Sequence[Any] | int | None = None,
        multiclass: str | None = None,
        workers: int | None = None,
        tolerance: float | None = None,
        l1: float | None = None,
        box: float | None = None,
        iterations: int | None = None,
        inner_iterations: int | None = None,
        rule: str | None = None,
        top: int | None = None,
        constants: float | Sequence[float] | None = None,
        private_constants: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.algorithm = algorithm
        self.loss = loss
        self.database = database
        self.model = model
        self.lambda_ = lambda_
        self.radius = radius
        self.epochs = epochs
        self.batch_size = batch_size
        self.step = step
        self.average = average
        self.shuffle = shuffle
        self.clip = clip
        self.fit_intercept = fit_intercept
        self.huber_h = huber_h
        self.adjacency = adjacency
        self.privacy_unit = privacy_unit
        self.unit_rows = unit_rows
        self.feature_bound = feature_bound
        self.scale = scale
        self.quantile = quantile
        self.private_scale = private_scale
        self.scale_range = scale_range
        self.normalize = normalize
        self.categories = categories
        self.project_dim = project_dim
        self.project_seed = project_seed
        self.label_bound = label_bound
        self.classes = classes
        self.multiclass = multiclass
        self.workers = workers
        self.tolerance = tolerance
        self.l1 = l1
        self.box = box
        self.iterations = iterations
        self.inner_iterations = inner_iterations
        self.rule = rule
        self.top = top
        self.constants = constants
        self.private_constants = private_constants
        self.seed = seed

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.seed is None
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        """By the model: scikit-learn would take lambda_, a parameter, for something learned."""
        return hasattr(self, "model_")

    def _coded(self, x: Any) -> Any:
        """A DataFrame's rows with categories as zeros and ones, where columns are named; other rows as they are."""
        if hasattr(self, "columns_"):
            del self.columns_  # of an earlier fit
        if not isinstance(self.categories, Mapping) and not isinstance(self.scale, Mapping):
            return x
        if not hasattr(x, "columns"):
            raise BismarckError(
                "categories or scale name columns, and X has none", "pass a DataFrame, or fit_table a table"
            )
        self.columns_ = [str(name) for name in x.columns]
        for name in self.categories or {}:
            if name not in self.columns_:
                raise unknown("column in categories", name, self.columns_)
        return encode_rows(self.columns_, self.categories, x)

    def _fit_rows(self, x: Any, y: Array, classes: list[float] | None) -> None:
        from .controller import scratch

        spec = self._spec(classes)
        if self.privacy_unit is not None:
            raise BismarckError("privacy_unit names a column of a table, and X has none", "use fit_table")
        if hasattr(self, "columns_"):  # by now zeros and ones
            spec.pop("categories", None)
            if isinstance(self.scale, Mapping):
                spec["scale"] = scales_by_column(self.scale, self.columns_, self.categories or {})
        with scratch.opened(self.database) as database:
            self._keep(scratch.train_rows(database, x, y, self.model, **spec))

    def _fit_table(self, source: str, label: str, features: str | Sequence[str], classes: list[float] | None) -> None:
        from .controller import scratch

        if hasattr(self, "columns_"):
            del self.columns_  # of an earlier fit
        spec = self._spec(classes)
        with scratch.opened(self.database) as database:
            self._keep(scratch.train_table(database, source, self.model, label=label, features=features, **spec))
        self.n_features_in_ = self.model_.d
        if not isinstance(features, str) and len(features) == self.model_.d:
            self.feature_names_in_ = np.array(features, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_  # of an earlier fit

    def _spec(self, classes: list[float] | None) -> dict[str, Any]:
        """What to ask of db.train, checked before a row is sent."""
        given = {name: _plain(getattr(self, name)) for name in OPTION_PARAMETERS}
        options = {name: value for name, value in {**given, "classes": classes}.items() if value is not None}
        loss = self._loss()
        Spec.create(self.algorithm, loss, self.epsilon, self.delta, options)
        return {"epsilon": self.epsilon, "delta": self.delta, "algorithm": self.algorithm, "loss": loss, **options}

    def _loss(self) -> str:
        if self.loss is None:
            return self._default_loss
        classification = LOSSES[self._default_loss].classification
        if self.loss in LOSSES and LOSSES[self.loss].classification != classification:
            fitting = ", ".join(sorted(name for name in LOSSES if LOSSES[name].classification == classification))
            raise BismarckError(f'loss "{self.loss}" is not one of a {type(self).__name__}', f"valid: {fitting}")
        return self.loss

    def _keep(self, model: Model) -> None:
        self.model_ = model
        self.privacy_ = model.privacy
        self.n_iter_ = math.ceil(model.passes)

    def _rows(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Rows and labels of the right shape and of some type of number, whatever their values."""
        x = self._coded(x)
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        x = validate_data(self, x, ensure_all_finite=False)
        y = column_or_1d(y, warn=True)
        check_consistent_length(x, y)
        return x, y

    def _new_rows(self, x: Any) -> Any:
        """Rows to predict. They are nobody's secret here, so values that are not finite are refused."""
        check_is_fitted(self)
        if hasattr(self, "columns_") and hasattr(x, "columns"):
            return encode_rows(self.columns_, self.categories, x)
        if self.model_.categories and hasattr(x, "columns"):  # a DataFrame with the table's columns
            return self.model_.encode(x)
        return validate_data(self, x, reset=False)


class DPClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A linear classifier, trained privately: ε and δ are claimed for `fit` with the labels' set public."""

    _default_loss = "logistic"

    def fit(self, X: Any, y: Any) -> DPClassifier:  # noqa: N803 (scikit-learn's word)
        """Trains on rows held here. With `classes`, labels are not looked at; a row with another counts for nothing."""
        x, labels = self._rows(X, y)
        classes = self._given_classes()
        if classes is None:
            classes = _distinct(labels)
        if len(classes) < 2:
            raise ValueError(f"{type(self).__name__} needs more than one class")
        self._fit_rows(x, _codes(labels, classes), list(range(len(classes))))
        self.classes_ = classes
        self._spread()
        return self

    def fit_table(self, source: str, label: str = "y", features: str | Sequence[str] = "x") -> DPClassifier:
        """Trains on a table or view in the database; predictions are in the coding of its labels."""
        classes = self._given_classes()
        self._fit_table(source, label, features, None if classes is None else classes.tolist())
        self.classes_ = self.model_.classes
        self._spread()
        return self

    def predict(self, X: Any) -> Any:  # noqa: N803
        """Classes, as they were written in y."""
        rows = self._new_rows(X)
        codes = self.model_.predict(rows)
        return self.classes_[np.argmax(codes[:, None] == self.model_.classes, axis=1)]

    def decision_function(self, X: Any) -> Array:  # noqa: N803
        """Margins: above 0 is classes_[1]; with more than two classes, one for each."""
        rows = self._new_rows(X)
        return self.model_.decision_function(rows)

    @available_if(lambda self: self.loss in (None, "logistic"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probabilities of classes_; for loss "logistic" only."""
        rows = self._new_rows(X)
        return self.model_.predict_proba(rows)

    def _given_classes(self) -> Any:
        """Sorted, as scikit-learn's measures expect them; which class is the positive one makes no difference."""
        classes = _plain(self.classes)
        if isinstance(classes, int):
            return np.arange(classes)
        return None if classes is None else np.unique(np.asarray(classes))

    def _spread(self) -> None:
        outputs = len(self.classes_) if self.model_.multiclass else 1
        self.coef_ = self.model_.weights.reshape(outputs, -1)
        self.intercept_ = self.model_.intercept.reshape(-1) if self.model_.intercept.size else np.zeros(outputs)


class DPRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A linear regression, trained privately. Labels are cut to ± `label_bound`, 1 unless it is given."""

    _default_loss = "squared"

    def fit(self, X: Any, y: Any) -> DPRegressor:  # noqa: N803
        """Trains on rows held here."""
        x, labels = self._rows(X, y)
        numbers = check_array(labels, ensure_2d=False, dtype=np.float64, ensure_all_finite=False, input_name="y")
        self._fit_rows(x, numbers, None)
        self._spread()
        return self

    def fit_table(self, source: str, label: str = "y", features: str | Sequence[str] = "x") -> DPRegressor:
        """Trains on a table or view in the database."""
        self._fit_table(source, label, features, None)
        self._spread()
        return self

    def predict(self, X: Any) -> Array:  # noqa: N803
        rows = self._new_rows(X)
        return self.model_.predict(rows)

    def _spread(self) -> None:
        self.coef_ = self.model_.weights
        self.intercept_ = float(self.model_.intercept[0]) if self.model_.intercept.size else 0.0


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays, of which grids are made, as Python's own."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _distinct(labels: Any) -> Any:
    """The set of labels, which counts as public, so that it may be refused."""
    try:
        classes = np.unique(labels)
    except TypeError:
        raise ValueError("y mixes labels that cannot be put in order, or some are missing: give the classes") from None
    check_classification_targets(labels)
    return classes


def _codes(labels: Any, classes: Any) -> Array:
    """Places in `classes`; NaN, a label that counts for nothing, for what is not there."""
    places = {label: place for place, label in enumerate(classes.tolist())}
    return np.array([places.get(label, math.nan) for label in labels.tolist()], dtype=np.float64)
