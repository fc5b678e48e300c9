"""The one loop: describe, plan, pack, epochs, release, register. It runs in the server and outside alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from bismarck_dp.errors import BismarckError
from bismarck_dp.plan import Plan, scales
from bismarck_dp.solvers import SOLVERS, make_plan
from bismarck_dp.spec import OPTIONS

from .engines import Engine, Packed, Request, Shape

LONGEST_NAME = 200

Progress = Callable[[int, int], None]
"""Called with the passes done and the passes planned."""


SHARED = (
    "algorithm",
    "loss",
    "n",
    "d",
    "epsilon",
    "delta",
    "sensitivity",
    "noise_scale",
    "mechanism",
    "adjacency",
    "trust",
)
"""What a model's row and its plan say in the same words."""


def _quiet(done: int, planned: int) -> None:
    pass


def train(engine: Engine, request: Request, progress: Progress = _quiet) -> dict[str, Any]:
    """Trains and registers a model; returns its row. Whatever fails, the caller's transaction takes everything back."""
    started = time.monotonic()
    _check_names(request)
    source = engine.check(request)
    shape = engine.describe(request)
    plan = make_plan(request.spec, shape.n, shape.d, engine.pulse)
    engine.check_memory(plan)
    packed = engine.pack(request, plan)
    if packed.rows != plan.n:
        # Rows came or went since they were counted. n is public: plan again for the rows that were packed.
        plan = make_plan(request.spec, packed.rows, shape.d, engine.pulse)
    engine.begin(packed, plan)
    packed, passes = _epochs(engine, packed, plan, progress)
    gap = engine.gap(packed) if plan.perturbs == "nothing" else None
    weights = engine.release(packed, plan)
    _check_finite([*weights, gap or 0.0], plan)
    engine.drop(packed)
    for note in plan.notes if request.spec.epsilon is not None else ():
        engine.warn(note)
    row = _model(request, source, plan, shape, weights, passes, time.monotonic() - started)
    return engine.register({**row, "gap": gap})


def _support(weights: list[float], plan: Plan) -> list[int] | None:
    """Positions of weights that are not zero, counted from 1 as SQL does; None where hardly any is ever zero."""
    if SOLVERS[plan.spec.algorithm].selects:
        return [j for j, weight in enumerate(weights[: plan.d], 1) if weight != 0]
    return None


def explain(engine: Engine, request: Request) -> dict[str, Any]:
    """The plan for a source: reads its n and d, and nothing else."""
    shape = engine.describe(request, labels=False)
    return make_plan(request.spec, shape.n, shape.d, engine.pulse).explain()


def check_model_name(name: str) -> None:
    if not name:
        raise BismarckError("the model has no name", "pass a name to register it under")
    if len(name) > LONGEST_NAME:
        raise BismarckError(f"the model's name has {len(name)} characters", f"use at most {LONGEST_NAME}")


def _check_names(request: Request) -> None:
    check_model_name(request.model)
    if len(request.features) > 1 and request.label in request.features:
        raise BismarckError(f'label column "{request.label}" is among the features', "leave it out of one of them")


def _epochs(engine: Engine, packed: Packed, plan: Plan, progress: Progress) -> tuple[Packed, int]:
    """All passes; fewer only with a tolerance, which no private algorithm takes."""
    planned = plan.schedule.passes
    tolerance = plan.spec.options["tolerance"]
    before = float("inf")
    for done in range(1, planned + 1):
        if done > 1 and plan.schedule.shuffle == "each_pass":
            packed = engine.repack(packed, plan, done - 1)
        engine.epoch(packed, plan)
        progress(done, planned)
        if tolerance is not None:
            now, gap = engine.objective(packed), engine.gap(packed)
            if (before - now if gap is None else gap) <= tolerance * abs(now):
                return packed, done
            before = now
    return packed, planned


def _check_finite(weights: list[float], plan: Plan) -> None:
    """Only a long step makes weights grow without bound. bolton accepts none; with noise on sums, whether it happens
    depends on noisy sums alone, and says no more about a row than they do.
    """
    if all(math.isfinite(weight) for weight in weights):
        return
    if plan.schedule.step.first == 0:
        raise BismarckError("training went beyond all numbers", "use smaller bounds, for features, labels or clip")
    raise BismarckError(
        f"training diverged with a first step of {plan.schedule.step.first:g}", "use a smaller step or a radius"
    )


def _model(
    request: Request, source: str, plan: Plan, shape: Shape, weights: list[float], passes: int, seconds: float
) -> dict[str, Any]:
    facts = plan.explain()
    return {
        **{name: facts[name] for name in SHARED},
        "name": request.model,
        "weights": weights[: plan.d],
        "intercept": weights[plan.d :],
        "classes": shape.classes,
        "support": _support(weights, plan),
        "passes": plan.schedule.data_passes(passes),
        "seconds": seconds,
        "private": plan.private,
        "note": plan.note,
        "source": source,
        "label": request.label,
        "features": request.features,
        "feature_bound": facts["feature_bound"],
        "scale": scales(plan.spec, plan.d),
        "normalize": plan.spec.options["normalize"],
        "options": _set_options(plan),
        "plan": facts,
        "event": facts["event"],
    }


def _set_options(plan: Plan) -> dict[str, Any]:
    """The options that differ from their defaults."""
    options = plan.spec.options
    return {
        name: options[name]
        for name, option in OPTIONS.items()
        if options[name] != option.default and _finite(options[name])
    }


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or value not in (float("inf"), float("-inf"))
