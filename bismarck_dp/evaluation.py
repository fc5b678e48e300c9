"""What a model is worth on rows: accuracy, AUC and log loss, or MSE and R^2, exactly or with noise that is paid for.

A noisy evaluation is one release of a vector of whole numbers. Every row adds whole numbers to it, in groups; a row
that counts for nothing (a NULL, a NaN, another length, an unknown label) adds zeros. With U units to a group:

    rows     the row's cell of (right, wrong) gets U; for a number to predict there is one cell
    loss     round(U min(loss, bound) / bound): log loss of the true class, or squared residual
    scores   the row's cell of (true class) x (cells of the margin) gets U; two classes only
    labels   (round(U t), round(U t^2)) with t = y / label_bound cut to +-1; a number to predict only

and everything that is shown follows from these sums with noise. Which cell, and how much, is any function of the model
and the row alone: nothing else is asked of it, so how margins or losses are rounded does not matter.

Claim: the release is epsilon-DP (delta = 0) or (epsilon, delta)-DP, for replacing one row by any other, or for turning
it into one that counts for nothing (`zero-out`). Proof: the table below bounds how far one row moves each group. With
discrete Laplace noise of scale s_g on every number of group g, the log odds of an outcome move by at most the sum of
L1_g / s_g, which is at most epsilon. With discrete Gaussian noise of parameter s_g the release is rho-zCDP, rho = the
sum of L2_g^2 / (2 s_g^2) (Canonne, Kamath and Steinke 2020, Theorem 14: exact for noise on integers; independent
numbers add up), and rho is one whose epsilon at delta is at most epsilon (`accounting.zcdp_epsilon`). Sums, noise and
their sum are integers: nothing is rounded after noise is made, and no float can betray anything. With `privacy_unit` a
row is a slot, and all this holds for units (`units`).

             replace              zero-out             why
             L1         L2        L1       L2
    rows     2 U        sqrt2 U   U        U           from one cell to another; one cell: U always
    loss     U          U         U        U           a number from 0 to U
    scores   2 U        sqrt2 U   U        U           from one cell to another
    labels   9/4 U + 2  2 U + 2   2 U      sqrt2 U     see `labels_apart`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_expit, logsumexp

from .accounting import Event, LaplaceDpEvent, NonPrivateDpEvent, ZCDpEvent, epsilon_of, zcdp_rho
from .errors import BismarckError
from .losses import LOSSES, Array
from .model import Model
from .spec import OPTIONS, Option, _whole, check_delta, check_epsilon, refuse, unknown
from .units import check_unit, lifted, slot_budget, unit_params

Integers = npt.NDArray[np.int64]
Metrics = dict[str, Optional[float]]
"""A metric that there is none of, such as the AUC of many classes, is None."""

CLASSES, NUMBERS = ("accuracy", "auc", "log_loss"), ("mse", "r2")

NEEDS = {
    "accuracy": {"rows"},
    "auc": {"scores"},
    "log_loss": {"rows", "loss"},
    "mse": {"rows", "loss"},
    "r2": {"rows", "loss", "labels"},
}
"""The groups that a metric follows from."""

SHARES = {"classes": {"rows": 1, "loss": 1, "scores": 2}, "numbers": {"rows": 1, "loss": 4, "labels": 3}}
"""What groups get of epsilon, or of rho: those that are there, and together all of it. A mean loss and an AUC end up
with errors alike; an accuracy needs less.
"""

MOST_UNITS = 2**20
"""Of a row; and the most noise in units that the exact Gaussian sampler makes."""

DECADES = 8
"""Cells of margins reach from the largest possible margin down to 2^-8 of it, by equal factors."""

LOG_LOSS_BOUND = 5.0
"""A probability of 0.0067 for the true class, or less, counts as that."""


def _metrics(name: str, value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not value:
        raise refuse(name, value, f"a list of some of {', '.join(CLASSES + NUMBERS)}")
    for metric in value:
        if not isinstance(metric, str) or metric not in NEEDS:
            raise unknown("metric", metric, NEEDS)
    return list(value)


EVALUATION_OPTIONS = {
    "metrics": Option(_metrics, None, "those that epsilon is spent on; without it all that the model has", ()),
    "adjacency": OPTIONS["adjacency"],
    "privacy_unit": OPTIONS["privacy_unit"],
    "unit_rows": OPTIONS["unit_rows"],
    "bins": Option(_whole(1, 512), 16, "cells of margins on each side of 0, for auc", ()),
    "loss_bound": Option(OPTIONS["label_bound"].parse, None, "a row's log loss or squared residual is cut to this", ()),
    "label_bound": Option(OPTIONS["label_bound"].parse, None, "a number to predict is cut to this magnitude", ()),
    "seed": OPTIONS["seed"],
}


def parse_evaluation(options: Any) -> dict[str, Any]:
    """All options with their defaults."""
    if options is not None and not isinstance(options, Mapping):
        raise refuse("options", options, 'an object, for example {"bins": 32}')
    parsed = {name: option.default for name, option in EVALUATION_OPTIONS.items()}
    for name, value in (options or {}).items():
        if name not in EVALUATION_OPTIONS:
            raise unknown("option", name, EVALUATION_OPTIONS)
        if value is not None:
            parsed[name] = EVALUATION_OPTIONS[name].parse(name, value)
    check_unit(parsed)
    return parsed


# ---- the model ----


@dataclass(frozen=True)
class Subject:
    """What an evaluation depends on of a model, all of it public."""

    classes: tuple[float, ...]
    """empty for a number to predict"""
    is_logistic: bool
    is_softmax: bool
    outputs: int
    zero_is_negative: bool
    """labels 0 and -1 both mean the negative class, as in training without the option classes"""
    reach: float
    """no margin (of two classes: no difference of margins) is larger"""
    label_bound: float | None

    @classmethod
    def of(cls, model: Model) -> Subject:
        rows = model.matrix()
        apart = rows[1] - rows[0] if len(rows) == 2 else rows[0]
        largest = float(np.abs(apart).max())
        reach = largest * float(np.linalg.norm(apart / largest)) * model.feature_bound if largest > 0 else 1.0
        bound = model.options.get("label_bound")
        return cls(
            classes=tuple(model.classes.tolist()),
            is_logistic=model.loss == "logistic",
            is_softmax=model.multiclass == "softmax",
            outputs=len(rows),
            zero_is_negative=model.multiclass is None and "classes" not in model.options,
            reach=min(max(reach, 1e-300), 1e300),
            label_bound=None if LOSSES[model.loss].classification or bound is None else float(bound),
        )

    @property
    def kind(self) -> str:
        return "classes" if self.classes else "numbers"

    def metrics(self) -> list[str]:
        """Those there are: every name of its kind is shown, and None for those there are not."""
        if not self.classes:
            return list(NUMBERS)
        there = {"accuracy": True, "auc": len(self.classes) == 2, "log_loss": self.is_logistic}
        return [name for name in CLASSES if there[name]]

    def label_params(self) -> dict[str, Any]:
        if not self.classes:
            return {}
        if self.outputs > 1:
            return {"classes": list(self.classes)}
        if self.zero_is_negative:
            return {"negative": -1.0, "other_negative": 0.0, "positive": 1.0}
        return {"negative": self.classes[0], "other_negative": self.classes[0], "positive": self.classes[1]}


# ---- groups of sums, and their noise ----


@dataclass(frozen=True)
class Group:
    """Sums of one kind, in units, and the scale of the noise that each of them gets."""

    name: str
    cells: int
    unit: int
    noise: int
    sensitivity: float
    """L1 for Laplace noise, L2 for Gaussian, in units"""

    def std(self, mechanism: str) -> float:
        """Standard deviation of the noise, in rows."""
        if mechanism == "gaussian":
            return self.noise / self.unit
        tail = math.exp(-1 / self.noise)
        return math.sqrt(2 * tail) / -math.expm1(-1 / self.noise) / self.unit


def labels_apart(adjacency: str, pure: bool, unit: int) -> float:
    """How far one row moves (round(U t), round(U t^2)), |t| <= 1.

    From t to t' with p = |t - t'| and s = |t + t'| <= 2 - p: L1 = p + p s <= p (3 - p) <= 9/4, L2^2 = p^2 (1 + s^2) <=
    p^2 (1 + (2 - p)^2) <= 4 for p <= 2. Rounding moves each difference by at most 1, so L1 by 2 and L2 by sqrt 2. To
    nothing: each is at most U, exactly.
    """
    if adjacency == "zero-out":
        return 2.0 * unit if pure else math.sqrt(2) * unit
    return 2.25 * unit + 2 if pure else 2.0 * unit + 2


def sensitivity(name: str, cells: int, adjacency: str, pure: bool, unit: int) -> float:
    """How far one row moves a group, in units: L1 where that counts (pure), otherwise L2."""
    if name == "labels":
        return labels_apart(adjacency, pure, unit)
    if cells == 1 or adjacency == "zero-out":
        return float(unit)
    return 2.0 * unit if pure else math.sqrt(2) * unit


@dataclass(frozen=True)
class Evaluation:
    """A plan: what is summed, the noise, and what it costs; or, without epsilon, nothing but what is asked for."""

    subject: Subject
    metrics: tuple[str, ...]
    epsilon: float | None
    delta: float
    options: dict[str, Any]
    mechanism: str
    groups: tuple[Group, ...]
    loss_bound: float
    event: Event

    @property
    def private(self) -> bool:
        return self.epsilon is not None and self.options["seed"] is None

    @property
    def edges(self) -> list[float]:
        """Between cells of margins, from below: by equal factors on both sides of 0, which is one."""
        half = self.options["bins"]
        steps = [self.subject.reach * 2.0 ** (-DECADES * i / half) for i in range(1, half)]
        return [*(-step for step in steps), 0.0, *reversed(steps)]

    def params(self) -> dict[str, Any]:
        """What the server reads."""
        by_name = {group.name: group for group in self.groups}
        names = ("rows", "loss", "scores" if self.subject.classes else "labels")
        return {
            **self.subject.label_params(),
            **unit_params(self.options),
            "mechanism": self.mechanism,
            "units": [by_name[name].unit if name in by_name else 0 for name in names],
            "noise": [by_name[name].noise if name in by_name else 0 for name in names],
            "loss_bound": self.loss_bound,
            "label_bound": self.options["label_bound"],
            "edges": self.edges if "scores" in by_name else [],
            "seed": self.options["seed"],
        }

    def notes(self, n: int) -> list[str]:
        if self.epsilon is None:
            return []
        found = []
        if self.options["seed"] is not None:
            found.append("NOT PRIVATE: the seed is known, so the noise can be subtracted")
        if self.delta * n >= self.options["unit_rows"]:
            found.append(f"delta {self.delta:g} is at least 1/n: it allows a row to be shown whole")
        if self.epsilon > 10:
            found.append(
                f"epsilon {self.epsilon:g} is large: one row may change any outcome's odds by e^{self.epsilon:g}"
            )
        return found


def plan_evaluation(subject: Subject, epsilon: Any = None, delta: Any = 0.0, options: Any = None) -> Evaluation:
    """Checks what is asked for and works out the noise; depends on the model, never on rows."""
    parsed = parse_evaluation(options)
    delta = check_delta(0.0 if delta is None else delta)
    metrics = _chosen(subject, parsed["metrics"])
    if epsilon is None:
        _check_exact(delta, parsed)
        return Evaluation(subject, metrics, None, 0.0, parsed, "none", (), 0.0, NonPrivateDpEvent())
    epsilon = check_epsilon(epsilon)
    parsed, loss_bound = _bounds(subject, parsed)
    names = set().union(*(NEEDS[metric] for metric in metrics))
    mechanism = "laplace" if delta == 0 else "gaussian"
    rows = parsed["unit_rows"]
    slot = slot_budget(epsilon, delta, rows)
    groups = _groups(subject, [name for name in SHARES[subject.kind] if name in names], *slot, parsed)
    event = NonPrivateDpEvent() if parsed["seed"] is not None else lifted(event_of(groups, mechanism), rows)
    return Evaluation(subject, metrics, epsilon, delta, parsed, mechanism, groups, loss_bound, event)


def _chosen(subject: Subject, asked: list[str] | None) -> tuple[str, ...]:
    there = subject.metrics()
    for metric in asked or ():
        if metric not in there:
            raise BismarckError(f"the model has no {metric}", f"it has {', '.join(there)}")
    return tuple(metric for metric in there if asked is None or metric in asked)


def _check_exact(delta: float, options: dict[str, Any]) -> None:
    """What belongs to noise alone is refused without epsilon: somebody forgot it, or trusts in noise that is not."""
    if delta > 0:
        raise BismarckError(f"delta is {delta:g}, and there is no epsilon", "give epsilon, or leave out delta")
    for name, option in EVALUATION_OPTIONS.items():
        if name != "metrics" and options[name] != option.default:
            raise BismarckError(f"{name} is for noisy evaluations", f"give epsilon, or leave out {name}")


def _bounds(subject: Subject, options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The options with the label bound that holds, and the loss bound. All public: neither is taken from rows."""
    given = options["loss_bound"]
    if subject.classes:
        if options["label_bound"] is not None:
            raise BismarckError("label_bound is for numbers to predict", "leave it out")
        return options, LOG_LOSS_BOUND if given is None else given
    bound = options["label_bound"] if options["label_bound"] is not None else subject.label_bound
    if bound is None:
        raise BismarckError(
            "the model has no label_bound, and noise needs one",
            'give the largest label you expect, known without looking: options {"label_bound": 10}',
        )
    return {**options, "label_bound": bound}, 4 * bound**2 if given is None else given


def _groups(
    subject: Subject, names: list[str], epsilon: float, delta: float, options: dict[str, Any]
) -> tuple[Group, ...]:
    shares = SHARES[subject.kind]
    total = sum(shares[name] for name in names)
    rho = 0.0 if delta == 0 else zcdp_rho(epsilon, delta)
    groups = []
    for name in names:
        part = shares[name] / total
        multiplier = 1 / (part * epsilon) if delta == 0 else 1 / math.sqrt(2 * part * rho)
        groups.append(_group(name, _cells(subject, name, options), options["adjacency"], delta == 0, multiplier))
    return tuple(groups)


def _cells(subject: Subject, name: str, options: dict[str, Any]) -> int:
    if name == "scores":
        return 4 * int(options["bins"])
    return 2 if name == "labels" or (name == "rows" and subject.classes) else 1


def _group(name: str, cells: int, adjacency: str, pure: bool, multiplier: float) -> Group:
    """The finest units whose noise stays within the sampler's reach; the noise is rounded up to whole units."""
    unit = MOST_UNITS
    while True:
        apart = sensitivity(name, cells, adjacency, pure, unit)
        noise = math.ceil(apart * multiplier * (1 + 1e-12))
        if noise <= MOST_UNITS or (unit == 1 and pure):
            return Group(name, cells, unit, max(noise, 1), apart)
        if unit == 1:
            raise BismarckError(
                f"epsilon is so small that the noise would be more than {MOST_UNITS} rows",
                "use a larger epsilon, or delta 0",
            )
        unit //= 2


def event_of(groups: Iterable[Group], mechanism: str) -> Event:
    """Laplace: of a vector, whose density falls with the L1 norm, in units of each group's noise: one Laplace release
    (`calibrators.Laplaces`), but for discrete noise's 1 / (8 s^2) at other deltas. Gaussian: zCDP, which is exact.
    """
    if mechanism == "laplace":
        return LaplaceDpEvent(1 / sum(group.sensitivity / group.noise for group in groups))
    return ZCDpEvent(sum(group.sensitivity**2 / (2 * group.noise**2) for group in groups))


def cost(plan: Evaluation) -> float:
    """What the release costs at its delta: never more than its epsilon."""
    return epsilon_of(plan.event, plan.delta, plan.options["adjacency"]).epsilon


# ---- the sums, without noise: what the server adds up in C ----


def coded(subject: Subject, y: npt.ArrayLike) -> Integers:
    """Places of labels among the classes; -1 for one that is none of them."""
    labels = np.asarray(y, dtype=np.float64)
    places = np.full(len(labels), -1, dtype=np.int64)
    for place, label in enumerate(subject.classes):
        places[labels == label] = place
    if subject.zero_is_negative:
        places = np.select([labels == 1, (labels == 0) | (labels == -1)], [1, 0], -1)
    return places


def log_losses(subject: Subject, margins: Array, places: Integers) -> Array:
    """-log of the true class's probability."""
    if subject.outputs == 1:
        return np.asarray(-log_expit(np.where(places == 1, margins, -margins)))
    true = np.take_along_axis(margins, places[:, None], axis=1)[:, 0]
    if subject.is_softmax:
        return np.asarray(logsumexp(margins, axis=1) - true)
    return np.asarray(np.log(expit(margins).sum(axis=1)) - log_expit(true))


def sums(plan: Evaluation, margins: npt.ArrayLike, y: npt.ArrayLike) -> Integers:
    """The vector that gets the noise, by NumPy: of margins (by output, where there are several; NaN for a row that has
    none) and labels. The first number is that of all rows, which is public and gets none.
    """
    z = np.asarray(margins, dtype=np.float64)
    by_name = {group.name: group for group in plan.groups}
    values = _class_values(plan, z, y) if plan.subject.classes else _number_values(plan, z, y)
    return np.concatenate([[len(z)], *(values[name](group.unit) for name, group in by_name.items())]).astype(np.int64)


def _class_values(plan: Evaluation, z: Array, y: npt.ArrayLike) -> dict[str, Any]:
    subject = plan.subject
    places = coded(subject, y)
    good = (places >= 0) & np.isfinite(z.reshape(len(z), -1)).all(axis=1)
    z, places = z[good], places[good]
    answers = (z > 0).astype(np.int64) if subject.outputs == 1 else z.argmax(axis=1)
    right = int((answers == places).sum())
    bins = 2 * plan.options["bins"]

    def scores(unit: int) -> Integers:
        score = z if subject.outputs == 1 else z[:, 1] - z[:, 0]
        cells = places * bins + np.searchsorted(plan.edges, score, side="left")
        return unit * np.bincount(cells, minlength=2 * bins)

    def loss(unit: int) -> Array:
        return _whole_sum(log_losses(subject, z, places), plan.loss_bound, unit)

    return {"rows": lambda unit: unit * np.array([right, len(z) - right]), "loss": loss, "scores": scores}


def _number_values(plan: Evaluation, z: Array, y: npt.ArrayLike) -> dict[str, Any]:
    labels = np.asarray(y, dtype=np.float64)
    good = np.isfinite(labels) & np.isfinite(z)
    bound = plan.options["label_bound"]
    cut = np.clip(labels[good], -bound, bound)
    t = cut / bound
    return {
        "rows": lambda unit: np.array([unit * int(good.sum())]),
        "loss": lambda unit: _whole_sum(_squares(z[good] - cut), plan.loss_bound, unit),
        "labels": lambda unit: np.array([np.rint(unit * t).sum(), np.rint(unit * t**2).sum()]),
    }


def _squares(values: Array) -> Array:
    """Infinite where they are too large for a number, and then cut."""
    with np.errstate(over="ignore"):
        return np.asarray(values**2)


def _whole_sum(values: Array, bound: float, unit: int) -> Array:
    return np.array([np.rint(unit * (np.minimum(values, bound) / bound)).sum()])


# ---- from noisy sums to metrics: nothing below knows a row ----


def exact_metrics(plan: Evaluation, found: Mapping[str, float]) -> Metrics:
    """From what the server counted: {rows, counted, right, loss, auc, residuals, deviations}."""
    n = found["counted"]
    values: Metrics = {"accuracy": found["right"] / n, "log_loss": found["loss"] / n, "mse": found["residuals"] / n}
    values["auc"] = None if math.isnan(found["auc"]) else found["auc"]
    values["r2"] = 1 - found["residuals"] / found["deviations"] if found["deviations"] > 0 else None
    return {"n": n, **_shown(plan, values)}


def _shown(plan: Evaluation, values: Metrics) -> Metrics:
    """Every metric of its kind, unless some were asked for."""
    names = CLASSES if plan.subject.classes else NUMBERS
    asked = plan.options["metrics"]
    return {
        name: values[name] if name in plan.metrics else None for name in names if asked is None or name in plan.metrics
    }


def noisy_metrics(plan: Evaluation, numbers: npt.ArrayLike) -> Metrics:
    """From the released numbers: the metrics, the standard deviation of the noise in each (to first order, at the
    released numbers), and what it cost.
    """
    parts = _parts(plan, np.asarray(numbers, dtype=np.int64))
    std = {group.name: group.std(plan.mechanism) for group in plan.groups}
    rows = float(np.asarray(numbers)[0])
    values, noise = (_of_classes if plan.subject.classes else _of_numbers)(plan, parts, std, rows)
    counted: Metrics = {"n": values["n"]} if "rows" in std else {}
    shown = _shown(plan, {name: values.get(name) for name in NEEDS})
    errors = {f"{name}_noise": noise.get(name) for name in [*counted, *shown] if name == "n" or name in plan.metrics}
    bounds: Metrics = {"loss_bound": plan.loss_bound} if "loss" in std else {}
    spent: Metrics = {"epsilon": plan.epsilon if plan.private else None, "delta": plan.delta if plan.private else None}
    return {**counted, **shown, **errors, **bounds, **spent}


def _parts(plan: Evaluation, numbers: Integers) -> dict[str, Array]:
    """Released sums by group, in rows."""
    parts, at = {}, 1
    for group in plan.groups:
        parts[group.name] = numbers[at : at + group.cells] / group.unit
        at += group.cells
    return parts


def _of_classes(
    plan: Evaluation, parts: dict[str, Array], std: dict[str, float], rows: float
) -> tuple[Metrics, Metrics]:
    """Accuracy is a share of the rows that count, both with noise: less noise than in a share of all rows, and no bias
    where some rows do not count. How many count is shown cut to 0 and all, and used as it is: cutting would be a bias.
    """
    values: Metrics = {}
    noise: Metrics = {}
    if "rows" in parts:
        right, wrong = parts["rows"].tolist()
        counted = right + wrong
        values["n"], noise["n"] = min(max(counted, 0.0), rows), math.sqrt(2) * std["rows"]
        if counted >= 1:
            share = values["accuracy"] = min(max(right / counted, 0.0), 1.0)
            noise["accuracy"] = std["rows"] * math.hypot(share, 1 - share) / counted
        if "loss" in parts and counted >= 1:
            mean, error = _mean(plan, parts, std, counted, math.sqrt(2) * std["rows"])
            values["log_loss"], noise["log_loss"] = mean, error
    if "scores" in parts:
        values["auc"], noise["auc"] = auc_of_cells(parts["scores"], std["scores"])
    return values, noise


def _mean(
    plan: Evaluation, parts: dict[str, Array], std: dict[str, float], n: float, n_std: float
) -> tuple[float, float]:
    """The mean loss of n rows, and its noise."""
    mean = min(max(float(parts["loss"][0]) * plan.loss_bound / n, 0.0), plan.loss_bound)
    return mean, math.hypot(plan.loss_bound * std["loss"], mean * n_std) / n


def _of_numbers(
    plan: Evaluation, parts: dict[str, Array], std: dict[str, float], rows: float
) -> tuple[Metrics, Metrics]:
    counted = float(parts["rows"][0])
    values: Metrics = {"n": min(max(counted, 0.0), rows)}
    noise: Metrics = {"n": std["rows"]}
    if counted >= 1:
        values["mse"], noise["mse"] = _mean(plan, parts, std, counted, std["rows"])
        if "labels" in parts:
            values["r2"], noise["r2"] = _r2(plan, parts, std, counted)
    return values, noise


def _r2(
    plan: Evaluation, parts: dict[str, Array], std: dict[str, float], n: float
) -> tuple[float | None, float | None]:
    """1 - residuals / (squares - (sum of labels)^2 / n), in units of label_bound^2; None where noise left none."""
    scale = plan.loss_bound / plan.options["label_bound"] ** 2
    residuals = max(float(parts["loss"][0]), 0.0) * scale
    total, squares = parts["labels"].tolist()
    mean = total / n
    deviations = squares - total * mean
    if deviations <= 0:
        return None, None
    ratio = residuals / deviations
    apart = math.hypot(std["labels"], 2 * mean * std["labels"], mean**2 * std["rows"])
    return 1 - ratio, math.hypot(scale * std["loss"], ratio * apart) / deviations


def auc_of_cells(cells: Array, std: float) -> tuple[float | None, float | None]:
    """The AUC of two histograms of margins, negatives first, from below; ties count half.

    It is bilinear in them. Their noises are independent, so that the number of ordered pairs has no bias as long as
    negative cells stay negative: they are not cut. None where noise left none of a class.
    """
    negative, positive = np.asarray(cells, dtype=np.float64).reshape(2, -1)
    below = np.cumsum(negative) - negative / 2
    above = positive.sum() - (np.cumsum(positive) - positive / 2)
    n, p = negative.sum(), positive.sum()
    if n < 1 or p < 1:
        return None, None
    auc = min(max(float(positive @ below / (n * p)), 0.0), 1.0)
    moves = np.concatenate([(above / p - auc) / n, (below / n - auc) / p])
    return auc, std * float(np.linalg.norm(moves))
