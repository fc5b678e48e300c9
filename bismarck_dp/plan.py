"""A plan: everything a run will do and why it is private, computed from the spec, n and d alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .accounting import Event, NonPrivateDpEvent
from .losses import LOSSES
from .mechanisms import NO_NOISE, Noise
from .sensitivity import Schedule
from .spec import Spec
from .units import described, unit_params


@dataclass(frozen=True)
class Plan:
    spec: Spec
    n: int
    d: int
    kernel: str
    schedule: Schedule
    loss_param: float
    lipschitz: float
    clip: float
    """rows' gradients are scaled down to this norm"""
    smoothness: float | None
    sensitivity: float | None
    """of what noise is added to: the weights, or the sum of a batch"""
    noise: Noise
    perturbs: str
    """nothing, output, sums, coordinates or moves"""
    layout: str
    """of the packed copy: rows or columns"""
    remembers: bool
    """whether the server keeps a number for each row while it trains"""
    private: bool
    notes: tuple[str, ...]
    extra: dict[str, Any]
    """numbers that only this solver's kernel reads"""
    details: dict[str, Any]
    """what only this solver has to explain"""

    @property
    def row_width(self) -> int:
        """Numbers of a packed row: the features, projected if they are, and the intercept."""
        return row_width(self.spec, self.d)

    @property
    def outputs(self) -> int:
        """Margins of a row, each with weights of its own: one, or one for each of many classes."""
        return outputs(self.spec)

    @property
    def width(self) -> int:
        """Numbers in the released vector."""
        return self.row_width * self.outputs

    @property
    def classifies(self) -> bool:
        return LOSSES[self.spec.loss].classification

    @property
    def released_sensitivity(self) -> float:
        """What the noise covers. Weights are rounded to the grid before noise is added, which moves two models at most
        grid * sqrt(width) further apart; sums are rounded after it, which costs nothing.
        """
        if self.perturbs != "output":
            return self.sensitivity or 0.0
        return (self.sensitivity or 0.0) + self.noise.grid * math.sqrt(self.width)

    @property
    def event(self) -> Event:
        """The release as an accountant sees it; a known seed is no privacy at all."""
        return self.noise.event if self.private else NonPrivateDpEvent()

    @property
    def note(self) -> str:
        return "; ".join(self.notes)

    def kernel_params(self) -> dict[str, Any]:
        """What the kernel reads at the start of training."""
        options = self.spec.options
        inside = self.noise if self.perturbs in ("sums", "moves") else NO_NOISE
        return {
            "private": self.noise.mechanism != "none",
            "loss": self.spec.loss,
            "loss_param": json_number(self.loss_param),
            "outputs": self.outputs,
            "multiclass": multiclass(self.spec) or "none",
            "clip": json_number(self.clip),
            "noise": inside.mechanism,
            "noise_scale": inside.scale,
            "noise_grid": inside.grid,
            "seed": options["seed"],
            "n": self.n,
            "batch_size": self.schedule.batch_size,
            "epochs": self.schedule.passes,
            "workers": self.schedule.workers,
            "average": self.schedule.average,
            "lambda": options["lambda"],
            "radius": json_number(options["radius"]),
            "track": options["tolerance"] is not None,
            **self.schedule.step.params(),
            **self.extra,
        }

    @property
    def memory(self) -> int:
        """Bytes that the server keeps while it trains, for the rows and for the matrix of a projection."""
        return (8 * self.n if self.remembers else 0) + 8 * self.d * (self.spec.options["project_dim"] or 0)

    def sample_params(self) -> dict[str, Any]:
        """What a pass over Poisson samples reads, or, without a probability, over batches of rows in their order."""
        schedule = self.schedule
        return {
            "n": self.n,
            "probability": schedule.probability,
            "updates": schedule.updates(self.n),
            "batch_size": schedule.batch_size,
        }

    def column_params(self) -> dict[str, Any]:
        """What a pass over columns reads: labels have a column of their own where they are not folded into the data."""
        return {"n": self.n, "labels": not LOSSES[self.spec.loss].classification}

    def pack_params(self) -> dict[str, Any]:
        """What packing reads: the shape, the bounds, what labels mean and, in a test, the seed.

        Unless `classes` names the labels, 1 is the positive class and both 0 and -1 are the negative one, whatever the
        other rows say: what a label means must not depend on another row.
        """
        options = self.spec.options
        params = {**shape_params(self.spec), **unit_params(options), "seed": options["seed"]}
        # How much is written must not depend on values where something is promised.
        params.update(n=self.n, d=self.d, sparse=self.noise.mechanism == "none")
        return {**params, **label_params(self.spec)}

    def noise_params(self) -> dict[str, Any]:
        """What the release reads: weights made of noisy sums need no further noise."""
        noise = self.noise if self.perturbs == "output" else NO_NOISE
        return {**noise.params(), "seed": self.spec.options["seed"]}

    def explain(self) -> dict[str, Any]:
        """The plan and its privacy arithmetic, under the keys that SQL, Python and the command line share."""
        schedule = self.schedule
        private = self.noise.mechanism != "none"
        return {
            "algorithm": self.spec.algorithm,
            "loss": self.spec.loss,
            "private": self.private,
            "mechanism": self.noise.mechanism,
            "perturbs": self.perturbs,
            "adjacency": self.spec.options["adjacency"] if private else None,
            "privacy_unit": described(self.spec.options),
            "trust": "central" if private else None,
            "sensitivity": self.sensitivity,
            "noise_scale": self.noise.scale if private else None,
            "grid": self.noise.grid if private else None,
            "epsilon": self.spec.epsilon,
            "delta": self.spec.delta if private else None,
            "accountant": self.noise.accountant,
            "event": self.event.to_json(),
            "n": self.n,
            "d": self.d,
            "lipschitz": self.lipschitz if math.isfinite(self.lipschitz) else None,
            "smoothness": self.smoothness,
            "strong_convexity": schedule.penalty.strong_convexity,
            "feature_bound": self.spec.options["feature_bound"],
            "classes": len(self.spec.options["classes"] or ("negative", "positive")) if self.classifies else None,
            "multiclass": multiclass(self.spec),
            "project_dim": self.spec.options["project_dim"],
            "passes": schedule.data_passes(schedule.passes),
            "updates": schedule.total_updates,
            "batch_size": schedule.batch_size,
            "sampling_probability": schedule.probability,
            "clip": self.clip if math.isfinite(self.clip) else None,
            "step": schedule.step.rule,
            "first_step": schedule.step.first or None,
            "average": schedule.average,
            "shuffle": schedule.shuffle,
            "workers": schedule.workers,
            "memory": self.memory or None,
            "scale_epsilon": self.details.get("scale_epsilon"),
            "selection_epsilon": self.details.get("selection_epsilon"),
            "constants_epsilon": self.details.get("constants_epsilon"),
            "note": self.note,
        }


def label_params(spec: Spec) -> dict[str, Any]:
    """What labels mean."""
    classes = spec.options["classes"]
    if not LOSSES[spec.loss].classification:
        return {"label_bound": json_number(spec.options["label_bound"])}
    if multiclass(spec):
        return {"classes": classes}
    negative, positive = classes or (-1.0, 1.0)
    return {"negative": negative, "other_negative": negative if classes else 0.0, "positive": positive}


def multiclass(spec: Spec) -> str | None:
    """How more than two classes are told apart; None for two, unless asked for, and for a number to predict."""
    many = LOSSES[spec.loss].classification and len(spec.options["classes"] or ()) > 2
    if spec.options["multiclass"] is None and many:
        return "softmax" if spec.loss == "logistic" else "ovr"
    asked: str | None = spec.options["multiclass"]
    return asked


def outputs(spec: Spec) -> int:
    return len(spec.options["classes"]) if multiclass(spec) else 1


def row_width(spec: Spec, d: int) -> int:
    return (spec.options["project_dim"] or d) + int(spec.options["fit_intercept"])


def shape_params(spec: Spec) -> dict[str, Any]:
    """What becomes of features. A noise's `scale` may travel with it, hence another word."""
    names = ("fit_intercept", "feature_bound", "normalize", "categories", "project_dim", "project_seed")
    scale = spec.options["scale"]
    return {**{name: spec.options[name] for name in names}, "scales": None if isinstance(scale, str) else scale}


def scales(spec: Spec, d: int) -> list[float] | None:
    """What each feature is divided by; None where it is not, or is yet to be measured."""
    scale = spec.options["scale"]
    return [scale] * d if isinstance(scale, float) else scale if isinstance(scale, list) else None


def json_number(value: float) -> float | str:
    """JSON has no infinity; the kernels read the word."""
    return "inf" if math.isinf(value) else value
