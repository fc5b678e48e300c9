"""Engines: ways to send a statement. The verbs of a training are written once, on top of that.

No verb but `release` returns anything that was computed from rows beyond their number and shape (and `objective`,
which a private run refuses in the server, as it does `gap`), so that the controller cannot leak what it never holds.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.plan import Plan
from bismarck_dp.spec import Spec

from . import queries
from .queries import Query


@dataclass(frozen=True)
class Request:
    """What to train on, what to call it, and how."""

    source: int
    model: str
    label: str
    features: list[str]
    spec: Spec


@dataclass(frozen=True)
class Shape:
    n: int
    d: int
    classes: list[float]


@dataclass(frozen=True)
class Packed:
    """The packed copy of a run: its number, its rows, its tables, and empty ones for the next order."""

    run: int
    rows: int
    tables: list[str]
    spare: list[str]


class Engine(ABC):
    @abstractmethod
    def send(self, query: Query) -> list[dict[str, Any]]:
        """Runs one statement and returns its rows."""

    @abstractmethod
    def pulse(self) -> None:
        """Called now and then while planning takes long; lets the server notice that it was cancelled."""

    @abstractmethod
    def warn(self, message: str) -> None:
        """Tells the user something that is not an error."""

    def one(self, query: Query) -> dict[str, Any]:
        return self.send(query)[0]

    def describe(self, request: Request, labels: bool = True) -> Shape:
        """n, d and how labels are written. Part of a table's public shape; see docs/privacy.md."""
        spec = request.spec
        look = labels and LOSSES[spec.loss].classification and spec.options["classes"] is None
        facts = self.one(queries.describe(request.source, request.label, request.features, look))
        return Shape(facts["rows"], _features(facts, request), _classes(facts, request) if look else _given(spec))

    def check(self, request: Request) -> str:
        """Refuses a taken name and a stranger's seed; returns the source's name."""
        found = self.send(queries.source_facts(request.source))
        if not found:
            raise BismarckError("the source table does not exist", "check its name and schema", "42P01")
        facts = found[0]
        if request.spec.options["seed"] is not None and not facts["owned"]:
            raise BismarckError(
                f"only the owner of {facts['name']} may train on it with a seed",
                "leave out the option seed",
                "42501",
            )
        if self.send(queries.model_named(request.model)):
            raise _taken(request.model)
        return str(facts["name"])

    def check_memory(self, plan: Plan) -> None:
        """Refuses, before a row is packed, a plan that keeps more in memory than the user allows."""
        if plan.memory and plan.memory > (allowed := int(self.one(queries.memory())["bytes"])):
            other = "sgd" if plan.perturbs == "nothing" else "dpsgd"
            raise BismarckError(
                f'algorithm "{plan.spec.algorithm}" keeps 8 bytes for each of {plan.n} rows, {_in_mb(plan.memory)},'
                f" and maintenance_work_mem is {_in_mb(allowed)}",
                f"SET maintenance_work_mem = '{_in_mb(plan.memory).replace(' ', '')}', or use {other}",
                "53400",
            )

    def pack(self, request: Request, plan: Plan) -> Packed:
        """Packs the source, and makes room for a second copy where each pass has an order of its own."""
        run = self.one(queries.next_run())["run"]
        if plan.layout == "columns":
            return self._pack_columns(run, request, plan)
        copies = 2 if plan.schedule.shuffle == "each_pass" else 1
        tables, *spare = [queries.table_names(run, copy, plan.schedule.workers) for copy in range(copies)]
        for table in [*tables, *(spare[0] if spare else [])]:
            self.send(queries.create_blocks(table, plan.width))
        query = queries.pack(request.source, request.label, request.features, tables, plan.pack_params())
        return Packed(run, self.one(query)["rows"], tables, spare[0] if spare else [])

    def _pack_columns(self, run: int, request: Request, plan: Plan) -> Packed:
        (table,) = queries.table_names(run, 0, 1)
        self.send(queries.create_blocks(table, 1))
        query = queries.pack_columns(request.source, request.label, request.features, table, plan.pack_params())
        return Packed(run, self.one(query)["rows"], [table], [])

    def repack(self, packed: Packed, plan: Plan, done: int) -> Packed:
        """The same rows in a fresh order; the two copies take turns, so that locks and disk do not grow with passes."""
        self.send(queries.repack(packed.tables, packed.spare, {**plan.pack_params(), "pass": done}))
        return Packed(packed.run, packed.rows, packed.spare, packed.tables)

    def begin(self, packed: Packed, plan: Plan) -> None:
        self.send(queries.begin(packed.run, plan.kernel, plan.width, plan.kernel_params()))

    def epoch(self, packed: Packed, plan: Plan) -> None:
        if plan.layout == "columns":
            self.send(queries.descend(packed.run, packed.tables[0], plan.column_params()))
        elif plan.schedule.shuffle == "poisson" or plan.remembers:
            self.send(queries.sample(packed.run, packed.tables, plan.sample_params()))
        else:
            self.send(queries.epoch(packed.run, packed.tables))

    def objective(self, packed: Packed) -> float:
        return float(self.one(queries.objective(packed.run))["objective"])

    def gap(self, packed: Packed) -> float | None:
        """The duality gap, where there is a dual; a private run shows none."""
        found = self.one(queries.gap(packed.run))["gap"]
        return None if found is None else float(found)

    def release(self, packed: Packed, plan: Plan) -> list[float]:
        return list(self.one(queries.release(packed.run, plan.noise_params()))["weights"])

    def drop(self, packed: Packed) -> None:
        self.send(queries.drop_blocks(packed.tables + packed.spare))

    def register(self, model: dict[str, Any]) -> dict[str, Any]:
        """Stores the model; another training may have taken its name in the meantime."""
        rows = self.send(queries.register(model))
        if not rows:
            raise _taken(model["name"])
        return dict(json.loads(rows[0]["model"]))

    def forget(self, model: str) -> None:
        if not self.send(queries.forget(model)):
            raise BismarckError(f'model "{model}" does not exist', "the view bismarck_dp.models lists yours", "42704")


class PlpyEngine(Engine):
    """Inside the server, through PL/Python's SPI."""

    def __init__(self, plpy: Any) -> None:
        self.plpy = plpy

    def send(self, query: Query) -> list[dict[str, Any]]:
        types = ["pg_catalog.text[]" if isinstance(value, list) else "pg_catalog.text" for value in query.values]
        result = self.plpy.execute(self.plpy.prepare(query.text, types), list(query.values))
        return [dict(row) for row in result]

    def pulse(self) -> None:
        self.plpy.execute("SELECT")

    def warn(self, message: str) -> None:
        self.plpy.warning(message)


class SqlEngine(Engine):
    """From outside, through a SQLAlchemy connection in a transaction of its own."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        # Weights cross as text, with all their digits.
        connection.exec_driver_sql("SET LOCAL extra_float_digits = 1")

    def send(self, query: Query) -> list[dict[str, Any]]:
        text = re.sub(r"\$(\d+)", r"%(p\1)s", query.text.replace("%", "%%"))
        values = {f"p{i}": value for i, value in enumerate(query.values, 1)}
        result = self.connection.exec_driver_sql(text, values)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def pulse(self) -> None:
        """Nothing waits for a client that plans."""

    def warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=2)


def _in_mb(size: int) -> str:
    return f"{-(-size // 2**20)} MB"


def _taken(model: str) -> BismarckError:
    return BismarckError(f'model name "{model}" is taken', "choose another, or drop that model with dp_forget", "42710")


def _features(facts: dict[str, Any], request: Request) -> int:
    if facts["rows"] == 0:
        raise BismarckError("the table has no rows", "there is nothing to train on")
    shortest, longest = facts["shortest"], facts["longest"]
    column = request.features[0]
    if longest < 0:
        raise BismarckError(f'column "{column}" has no one-dimensional array in any row', "each row needs one")
    if shortest != longest:
        raise BismarckError(
            f'arrays in column "{column}" differ in length', "every row needs the same number of features"
        )
    return int(longest)


def _given(spec: Spec) -> list[float]:
    if not LOSSES[spec.loss].classification:
        return []
    return spec.options["classes"] or [-1.0, 1.0]


MOST_BAD_LABELS = 10
"""One label in this many may be outside the coding before the column is not binary at all."""


def _classes(facts: dict[str, Any], request: Request) -> list[float]:
    """How predictions are written: -1/1 or 0/1, whichever fits more labels. Training does not depend on it: there, 1 is
    the positive class, and 0 and -1 both mean the negative one.
    """
    wrong = {
        (-1.0, 1.0): facts["zero"] + facts["others"],
        (0.0, 1.0): facts["minus_one"] + facts["others"],
    }
    best = (0.0, 1.0) if facts["is_boolean"] else min(wrong, key=lambda pair: wrong[pair])
    labels = sum(facts[key] for key in ("minus_one", "zero", "one", "others"))
    if wrong[best] * MOST_BAD_LABELS > labels:
        raise BismarckError(
            f'label column "{request.label}" is not binary: it has other values than -1/1, 0/1 or true/false',
            'name its two values with the option classes, for example {"classes": [1, 2]}',
        )
    return list(best)
