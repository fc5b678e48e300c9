"""What the server's one PL/Python function runs: verbs in, JSON out, and no traceback for what a user can mend."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from bismarck_dp import local
from bismarck_dp.errors import BismarckError
from bismarck_dp.spec import Spec
from bismarck_dp.tuning import make_candidates
from bismarck_dp.version import __version__

from . import queries
from .engines import Engine, PlpyEngine, Request
from .evaluate import evaluate
from .protect import budget, protect, unprotect
from .train import check_model_name, explain, train
from .tune import Tuning, tune


def serve(plpy: Any, verb: str, request: str) -> str:
    """Answers a request. A refusal comes back under "error": the door raises it, which undoes whatever was done."""
    engine = PlpyEngine(plpy)
    try:
        if verb not in VERBS:
            raise BismarckError(f'unknown verb "{verb}"')
        _check_objects(engine)
        answer = VERBS[verb](engine, _parse(request))
    except BismarckError as refusal:
        answer = _refusal(refusal.message, refusal.hint, refusal.sqlstate)
    except plpy.SPIError as error:
        details = getattr(error, "spidata", None) or (None, None, None)
        state = getattr(error, "sqlstate", None) or "XX000"
        answer = _hushed(state) if engine.hushed else _refusal(str(error), details[2] or "", state)
    except Exception as bug:
        said = f"internal error: {type(bug).__name__}: {bug}"
        answer = _hushed("XX000") if engine.hushed else _refusal(said, "this is a bug: please report it", "XX000")
    return json.dumps(answer, allow_nan=False)


def _check_objects(engine: Engine) -> None:
    """Refuses to work on objects of another version: tables may lack what this one pays with."""
    for found in engine.send(queries.objects()):
        if found["version"] != __version__:
            older = _numbers(found["version"]) < _numbers(__version__)
            raise BismarckError(
                f"the extension's objects are of version {found['version']}, and its library of {__version__}",
                "ALTER EXTENSION bismarck_dp UPDATE" if older else "connect again: this session keeps the old library",
                "55000",
            )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


HUSHED = {
    "57": "the run was cancelled",
    "53": "the server has too little memory, disk or connections for the run",
    "40": "the run met another transaction",
    "55": "the run met another transaction",
}
"""What someone who may not read the rows is told of an error, by the class of its code."""


def _hushed(state: str) -> dict[str, Any]:
    """One of a few fixed texts: what an error says, and its code, may depend on rows."""
    known = state[:2] in HUSHED
    message = HUSHED[state[:2]] if known else "the run failed, which the owner of the table can look into"
    return _refusal(message, "what was paid stays spent", state if known else "XX000")


def _parse(request: str) -> Any:
    try:
        return json.loads(request, parse_int=_parse_int)
    except RecursionError:
        raise BismarckError("malformed request", "nothing is nested so deeply") from None


def _parse_int(digits: str) -> int | float:
    """jsonb writes 1e400 out in full: beyond all floats it is infinite, and refused as such."""
    return int(digits) if len(digits) < 300 else float("inf")


def _refusal(message: str, hint: str, sqlstate: str) -> dict[str, Any]:
    return {"error": message, "hint": hint, "sqlstate": sqlstate}


Number = TypeVar("Number", int, float)

FIELDS = {"source", "model", "label", "features", "epsilon", "delta", "algorithm", "loss", "options"}


TUNING = {"grid", "method", "public_source", "trials"}
"""What dp_tune takes besides."""


def _request(fields: Any) -> Request:
    _check_fields(fields)
    return _request_for(fields, Spec.create(*_spec_of(fields)))


def _check_fields(fields: Any) -> None:
    if not isinstance(fields, dict) or set(fields) != FIELDS or not _well_formed(fields):
        raise BismarckError(
            "malformed request", "use dp_train, dp_tune or dp_explain, with the features' columns in one list"
        )
    for name in ("source", "label", "features"):
        if fields[name] is None or (name == "features" and None in fields[name]):
            raise BismarckError(f"{name} is NULL", "it must be given", "22004")


def _spec_of(fields: dict[str, Any]) -> tuple[Any, ...]:
    """What `Spec.create` takes."""
    for name in ("algorithm", "loss"):
        if fields[name] is None:
            raise BismarckError(f"{name} is NULL", "leave it out for the default", "22004")
    epsilon = None if fields["epsilon"] is None else _as(float, fields, "epsilon")
    delta = 0.0 if fields["delta"] is None else _as(float, fields, "delta")
    return fields["algorithm"], fields["loss"], epsilon, delta, fields["options"]


def _as(kind: type[Number], fields: dict[str, Any], name: str) -> Number:
    value = fields[name]
    try:
        if isinstance(value, bool):
            raise TypeError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise BismarckError(f"{name} is no number", "it must be one, for example 1") from None


def _request_for(fields: dict[str, Any], spec: Spec) -> Request:
    return Request(_as(int, fields, "source"), fields["model"] or "", fields["label"], list(fields["features"]), spec)


def _well_formed(fields: dict[str, Any]) -> bool:
    features = [] if fields["features"] is None else fields["features"]
    words = [fields[name] for name in ("model", "label", "algorithm", "loss")]
    numbers = [fields[name] for name in ("epsilon", "delta")]
    return (
        isinstance(features, list)
        and all(word is None or isinstance(word, str) for word in [*words, *features])
        and all(
            isinstance(number, (str, int, float, type(None))) and not isinstance(number, bool) for number in numbers
        )
    )


def _train(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    return train(engine, _request(fields))


def _tune(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(fields, dict) or not set(fields) >= TUNING:
        raise BismarckError("malformed request", "use dp_tune")
    if fields["trials"] is None:
        raise BismarckError("trials is NULL", "it must be given", "22004")
    public = None if fields["public_source"] is None else _as(int, fields, "public_source")
    trials = _as(float, fields, "trials")
    rest = {name: value for name, value in fields.items() if name not in TUNING}
    _check_fields(rest)
    candidates = make_candidates(fields["grid"], *_spec_of(rest))
    request = _request_for(rest, candidates[0].spec)
    return tune(engine, Tuning.create(request, candidates, fields["method"], public, trials))


def _explain(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    plan = explain(engine, _request(fields))
    return {"plan": plan, "explain": [{"key": key, "value": as_text(value)} for key, value in plan.items()]}


def _evaluate(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    """Metrics as rows; JSON has no infinity, and float8 reads the word."""
    answer = evaluate(engine, fields)
    for note in answer.notes:
        engine.warn(note)
    rows = [{"metric": name, "value": _as_json(value)} for name, value in answer.metrics.items()]
    return {"metrics": rows, "event": answer.event.to_json(), "notes": list(answer.notes)}


def _as_json(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _source(fields: Any, verb: str) -> int:
    if not isinstance(fields, dict):
        raise BismarckError("malformed request", f"use dp_{verb}")
    if fields.get("source") is None:
        raise BismarckError("source is NULL", "it must be given", "22004")
    return _as(int, fields, "source")


def _protect(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    source = _source(fields, "protect")
    if fields.get("epsilon") is None or fields.get("delta") is None:
        raise BismarckError(
            "epsilon or delta is NULL", "both must be given: a table's whole life has a budget", "22004"
        )
    epsilon, delta = _as(float, fields, "epsilon"), _as(float, fields, "delta")
    said, notes = protect(engine, source, epsilon, delta, fields.get("options"))
    for note in notes:
        engine.warn(note)
    rows = [{"key": key, "value": as_text(value)} for key, value in said.items()]
    return {"said": said, "protected": rows, "notes": notes}


def _unprotect(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    unprotect(engine, _source(fields, "unprotect"))
    return {}


def _budget(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    return budget(engine, _source(fields, "budget"))


def _forget(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str):
        raise BismarckError("model is NULL", "it must be given", "22004")
    engine.forget(fields["model"])
    return {}


def _number(value: Any) -> float:
    """A number, as text or as it is; NaN for none."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise BismarckError("malformed request", "use the functions named dp_local_*") from None


def _object(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise BismarckError("malformed request", "use the functions named dp_local_*")
    return fields


def _local_start(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    fields = _object(fields)
    d = fields.get("d")
    if not isinstance(d, int) or isinstance(d, bool):
        raise BismarckError("d is NULL", "it must be the number of features", "22004")
    if fields.get("epsilon") is None:
        raise BismarckError("epsilon is NULL", "it must be given", "22004")
    loss = fields.get("loss")
    if not isinstance(loss, str):
        raise BismarckError("loss is NULL", "it must be given", "22004")
    delta = 0.0 if fields.get("delta") is None else _number(fields["delta"])
    return {"state": local.start(d, _number(fields["epsilon"]), delta, loss, fields.get("options"))}


def _local_gradient(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    """What a provider's server needs to make a gradient and its noise; her row does not pass through here."""
    fields = _object(fields)
    return local.gradient_params(fields.get("state"), _number(fields.get("epsilon")), _number(fields.get("delta")))


def _local_round(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    fields = _object(fields)
    return {"state": local.learn(fields.get("state"), fields.get("sum"), fields.get("count"))}


def _local_register(engine: Engine, fields: dict[str, Any]) -> dict[str, Any]:
    fields = _object(fields)
    name = fields.get("model")
    check_model_name(name if isinstance(name, str) else "")
    return engine.register({"name": name, **local.model(fields.get("state"))})


def as_text(value: Any) -> str | None:
    """A value as SQL would print it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return None if value is None else str(value)


VERBS: dict[str, Callable[[Engine, dict[str, Any]], dict[str, Any]]] = {
    "train": _train,
    "tune": _tune,
    "explain": _explain,
    "evaluate": _evaluate,
    "protect": _protect,
    "unprotect": _unprotect,
    "budget": _budget,
    "forget": _forget,
    "local_start": _local_start,
    "local_gradient": _local_gradient,
    "local_round": _local_round,
    "local_register": _local_register,
}
