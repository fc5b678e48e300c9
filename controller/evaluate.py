"""Evaluations: look the model up, plan, read the source once. It runs in the server.

Nothing but noisy numbers comes back from the server where epsilon is given; where it is not, the facts are exact, and
for those who may read the rows, or, of a protected table, for its owner.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bismarck_dp.accounting import Event
from bismarck_dp.budget import Price, price_of_event
from bismarck_dp.errors import BismarckError
from bismarck_dp.evaluation import (
    Evaluation,
    Metrics,
    Subject,
    exact_metrics,
    noisy_metrics,
    parse_evaluation,
    plan_evaluation,
)
from bismarck_dp.model import Model

from . import queries
from .engines import Engine
from .guard import Bill, guard

FIELDS = {"source", "model", "label", "features", "epsilon", "delta", "options"}

FACTS = ("rows", "strange", "counted", "right", "loss", "auc", "residuals", "deviations")
"""What `bismarck_dp.evaluate` returns, in its order."""


@dataclass(frozen=True)
class Answer:
    metrics: Metrics
    event: Event
    """what it cost"""
    notes: tuple[str, ...] = ()


def evaluate(engine: Engine, fields: Any) -> Answer:
    """Metrics of a model on a source. `label` and `features` are the model's own where they are None."""
    _check(fields)
    model = _model(engine, fields["model"])
    label, features = _columns(model, fields)
    source, noisy = int(fields["source"]), fields["epsilon"] is not None
    options = parse_evaluation(fields["options"])
    found = guard(engine, source, label, features, noisy and options["seed"] is None, options)
    fields = {**fields, "options": found.with_unit(_given(fields["options"]))}
    plan = plan_evaluation(Subject.of(model), _number(fields["epsilon"]), _number(fields["delta"]), fields["options"])
    _check_source(engine, source, plan)
    if found.protection is not None:
        _check_fit(engine, source, model, label, features)
    found.pay(_bill(fields, plan, label, features))
    params = plan.params() if noisy else plan.subject.label_params()
    query = queries.evaluate(noisy, model.name, source, label, features, params)
    numbers = list(engine.one(query)["numbers"])
    if not noisy:
        return Answer(_exact(plan, numbers, features, model.d), plan.event)
    notes = plan.notes(max(int(numbers[0]), 1))
    return Answer(noisy_metrics(plan, [int(number) for number in numbers]), plan.event, tuple(notes))


def _check_fit(engine: Engine, source: int, model: Model, label: str, features: list[str]) -> None:
    """Refuses columns that are not there, or not as many as the model has: whoever mistypes must not pay."""
    params = {"categories": model.categories, "count_only": True}
    width = int(engine.one(queries.describe(source, label, features, False, params))["longest"])
    if width >= 0 and width != model.d:
        raise BismarckError(
            f"the columns have {width} features, and the model {model.d}", "name the columns it was trained on"
        )


def _given(options: Any) -> dict[str, Any]:
    return {} if options is None else dict(options)


def _bill(fields: dict[str, Any], plan: Evaluation, label: str, features: list[str]) -> Bill:
    """One evaluation, at its own epsilon or another."""
    delta = _number(fields["delta"]) or 0.0

    def price_at(epsilon: float, order: float | None) -> Price:
        other = plan_evaluation(plan.subject, epsilon, delta, fields["options"])
        return price_of_event(other.event, epsilon, delta, other.options["adjacency"], order)

    asked = {"label": label, "features": features, "options": fields["options"]}
    epsilon = plan.epsilon if plan.options["seed"] is None else None
    return Bill("evaluate", fields["model"], asked, epsilon, delta, price_at)


def _exact(plan: Evaluation, numbers: list[float], features: list[str], d: int) -> Metrics:
    facts = dict(zip(FACTS, (float(number) for number in numbers)))
    if facts["rows"] == 0:
        raise BismarckError("the table has no rows", "there is nothing to evaluate on")
    if facts["strange"] > 0:
        raise BismarckError(
            f'column "{features[0]}" has arrays of another length than the model\'s {d} features',
            "evaluate on rows like those it was trained on",
        )
    if facts["counted"] == 0:
        raise BismarckError(
            "no row has both all features and a label that the model knows", "check the columns and the labels' coding"
        )
    return exact_metrics(plan, facts)


def _check(fields: Any) -> None:
    if not isinstance(fields, dict) or set(fields) != FIELDS:
        raise BismarckError("malformed request", "use dp_evaluate")
    for name in ("model", "source"):
        if fields[name] is None:
            raise BismarckError(f"{name} is NULL", "it must be given", "22004")
    features = [] if fields["features"] is None else fields["features"]
    if not isinstance(features, list):
        raise BismarckError("malformed request", "use dp_evaluate")
    words = [fields["model"], "" if fields["label"] is None else fields["label"], *features]
    if None in features:
        raise BismarckError("features is NULL", "it must be given", "22004")
    numbers = [fields["epsilon"], fields["delta"]]
    if not (str(fields["source"]).isascii() and str(fields["source"]).isdigit()):
        raise BismarckError("malformed request", "use dp_evaluate")
    if not all(isinstance(word, str) for word in words) or not all(
        number is None or (isinstance(number, (str, int, float)) and not isinstance(number, bool)) for number in numbers
    ):
        raise BismarckError("malformed request", "use dp_evaluate")


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        raise BismarckError("malformed request", "use dp_evaluate") from None


def _model(engine: Engine, name: str) -> Model:
    found = engine.send(queries.usable_model(name))
    if not found:
        raise BismarckError(f'model "{name}" does not exist', "the view bismarck_dp.models lists yours", "42704")
    return Model.from_row(json.loads(found[0]["model"]))


def _columns(model: Model, fields: dict[str, Any]) -> tuple[str, list[str]]:
    label = model.label if fields["label"] is None else fields["label"]
    features = model.features if fields["features"] is None else fields["features"]
    for name, value in (("label", label), ("features", features)):
        if fields[name] is None and not value:
            raise BismarckError(f'model "{model.name}" was not trained on columns', f"give {name}")
    return label, list(features)


def _check_source(engine: Engine, source: int, plan: Evaluation) -> None:
    found = engine.send(queries.source_facts(source))
    if not found:
        raise BismarckError("the source table does not exist", "check its name and schema", "42P01")
    if plan.options["seed"] is not None and not found[0]["owned"]:
        raise BismarckError(
            f"only the owner of {found[0]['name']} may evaluate on it with a seed", "leave out the option seed", "42501"
        )
