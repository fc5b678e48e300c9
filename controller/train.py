"""The one loop: describe, plan, pack, epochs, release, register. It runs in the server and outside alike."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bismarck_dp.budget import Price, price_of_plan
from bismarck_dp.errors import BismarckError
from bismarck_dp.plan import Plan, scales
from bismarck_dp.scaling import measures, scales_by_column, with_bounds
from bismarck_dp.solvers import SOLVERS, make_plan
from bismarck_dp.spec import OPTIONS, Spec, unknown

from .engines import Engine, Packed, Request, Shape, Shelf
from .guard import Bill, check_paid, guard_of

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
    "privacy_unit",
    "trust",
)
"""What a model's row and its plan say in the same words."""


def quiet(done: int, planned: int) -> None:
    pass


def train(engine: Engine, request: Request, progress: Progress = quiet) -> dict[str, Any]:
    """Trains and registers a model; returns its row. Whatever fails, the caller's transaction takes everything back."""
    started = time.monotonic()
    check_names(request)
    source = engine.check(request)
    guard = guard_of(engine, request)
    request, shape = guard.shape(request)
    request = prepared(request, shape, projection_seed(request.spec))
    plan = make_plan(request.spec, shape.n, shape.d, engine.pulse)
    engine.check_memory(plan)
    request = replace(request, paid=guard.pay(bill_for(engine, "train", request, plan)))
    fitted = fit(engine, request, plan, progress)
    weights = engine.release(fitted.packed, fitted.plan)
    engine.drop(fitted.packed)
    row = model_row(request, source, fitted, shape, weights, time.monotonic() - started)
    notes = (*fitted.plan.notes, *(shape.notes if fitted.plan.private else ()))
    warn_of(engine, notes, request.spec)
    return engine.register({**row, "note": "; ".join(notes)})


def bill_for(engine: Engine, verb: str, request: Request, plan: Plan) -> Bill:
    """One training, at its own epsilon or another."""

    def price_at(epsilon: float, order: float | None) -> Price:
        spec = replace(request.spec, epsilon=epsilon)
        same = epsilon == request.spec.epsilon
        return price_of_plan(plan if same else make_plan(spec, plan.n, plan.d, engine.pulse), order)

    return Bill(verb, request.model, spec_of(request), priced(request.spec, [plan]), request.spec.delta, price_at)


def priced(spec: Spec, plans: Sequence[Plan]) -> float | None:
    """The epsilon that is to be paid for; None where nothing is private."""
    return spec.epsilon if all(plan.private for plan in plans) else None


def spec_of(request: Request) -> dict[str, Any]:
    """What was asked for, as the ledger keeps it."""
    spec = request.spec
    return {
        "algorithm": spec.algorithm,
        "loss": spec.loss,
        "label": request.label,
        "features": request.features,
        "options": set_options(spec),
    }


@dataclass(frozen=True)
class Fitted:
    """A training that is over, but for its release: the weights are in the server."""

    packed: Packed
    plan: Plan
    passes: int
    gap: float | None


def fit(engine: Engine, request: Request, plan: Plan, progress: Progress = quiet, shelf: Shelf | None = None) -> Fitted:
    """Measures the features' bounds where that is asked for, packs the source and makes all passes."""
    engine.check_memory(plan)
    bounds = engine.measure(request, plan) if measures(request.spec) else None
    packed = engine.pack(request, plan if bounds is None else with_bounds(plan, bounds), shelf)
    if packed.rows != plan.n:
        # Rows came or went since they were counted. n is public: plan again for the rows that were packed.
        plan = make_plan(request.spec, packed.rows, plan.d, engine.pulse)
        check_paid(request, lambda order: price_of_plan(plan, order))
    return make_passes(engine, packed, plan if bounds is None else with_bounds(plan, bounds), progress)


def make_passes(engine: Engine, packed: Packed, plan: Plan, progress: Progress = quiet) -> Fitted:
    """All passes over rows that are packed."""
    engine.begin(packed, plan)
    packed, passes = _epochs(engine, packed, plan, progress)
    return Fitted(packed, plan, passes, engine.gap(packed) if plan.perturbs == "nothing" else None)


def warn_of(engine: Engine, notes: tuple[str, ...], spec: Spec) -> None:
    """Whoever asks for no privacy need not hear that there is none."""
    for note in notes if spec.epsilon is not None else ():
        engine.warn(note)


def projection_seed(spec: Spec) -> int:
    """What a projection is made from, unless it is given; public."""
    seed = spec.options["seed"]
    return secrets.randbits(52) if seed is None else abs(int(seed))


def prepared(request: Request, shape: Shape, project_seed: int) -> Request:
    """The request with everything that follows from the table's public shape: many classes, whose number is part of it;
    bounds by feature where they are given by column; and the seed of a projection where it has none.
    """
    options = request.spec.options
    changes: dict[str, Any] = {}
    if options["classes"] is None and (len(shape.classes) > 2 or options["multiclass"] is not None):
        changes["classes"] = shape.classes
    if isinstance(options["scale"], dict):
        changes["scale"] = scales_by_column(options["scale"], request.features, options["categories"] or {})
    if options["project_dim"] is not None and options["project_seed"] is None:
        changes["project_seed"] = project_seed
    _check_categories(request)
    return replace(request, spec=replace(request.spec, options={**options, **changes}))


def _check_categories(request: Request) -> None:
    for column in request.spec.options["categories"] or {}:
        if column not in request.features:
            raise unknown("column in categories", column, request.features)


def _support(weights: list[float], plan: Plan) -> list[int] | None:
    """Positions of weights that are not zero, counted from 1 as SQL does; None where hardly any is ever zero."""
    if SOLVERS[plan.spec.algorithm].selects:
        return [j for j, weight in enumerate(_split(weights, plan)["weights"], 1) if weight != 0]
    return None


def explain(engine: Engine, request: Request) -> dict[str, Any]:
    """The plan for a source: reads its n and d, counts classes unless they are named, and nothing else."""
    request, shape = guard_of(engine, request).shape(request, labels=False)
    spec = prepared(request, shape, projection_seed(request.spec)).spec
    return make_plan(spec, shape.n, shape.d, engine.pulse).explain()


def check_model_name(name: str) -> None:
    if not name:
        raise BismarckError("the model has no name", "pass a name to register it under")
    if len(name) > LONGEST_NAME:
        raise BismarckError(f"the model's name has {len(name)} characters", f"use at most {LONGEST_NAME}")


def check_names(request: Request) -> None:
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


def model_row(
    request: Request, source: str, fitted: Fitted, shape: Shape, weights: list[float], seconds: float
) -> dict[str, Any]:
    """What is stored; weights that are no numbers are refused."""
    plan = fitted.plan
    _check_finite([*weights, fitted.gap or 0.0], plan)
    facts = plan.explain()
    return {
        **{name: facts[name] for name in SHARED},
        "name": request.model,
        **_split(weights, plan),
        "classes": shape.classes,
        "support": _support(weights, plan),
        "gap": fitted.gap,
        "passes": plan.schedule.data_passes(fitted.passes),
        "seconds": seconds,
        "private": plan.private,
        "note": plan.note,
        "source": source,
        "label": request.label,
        "features": request.features,
        "feature_bound": facts["feature_bound"],
        "scale": scales(plan.spec, plan.d),
        "normalize": plan.spec.options["normalize"],
        "multiclass": facts["multiclass"],
        "categories": plan.spec.options["categories"],
        "project_dim": facts["project_dim"],
        "project_seed": None if facts["project_dim"] is None else plan.spec.options["project_seed"],
        "options": set_options(plan.spec),
        "plan": facts,
        "event": facts["event"],
        "ledger_id": None if request.paid is None else request.paid.entry,
    }


def _split(weights: list[float], plan: Plan) -> dict[str, list[float]]:
    """Weights of all outputs, one after the other, and their intercepts."""
    width, intercept = plan.row_width, plan.spec.options["fit_intercept"]
    rows = [weights[start : start + width] for start in range(0, len(weights), width)]
    return {
        "weights": [weight for row in rows for weight in row[: width - intercept]],
        "intercept": [row[-1] for row in rows] if intercept else [],
    }


def set_options(spec: Spec) -> dict[str, Any]:
    """The options that differ from their defaults."""
    return {
        name: spec.options[name]
        for name, option in OPTIONS.items()
        if spec.options[name] != option.default and _finite(spec.options[name])
    }


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or value not in (float("inf"), float("-inf"))
