"""Engines: ways to send a statement. The verbs of a training are written once, on top of that.

No verb but `release` returns anything that was computed from rows beyond their number and shape (and `objective`,
which a private run refuses in the server, as it does `gap`; and `measure`, whose bounds are a private release of their
own), so that the controller cannot leak what it never holds.
Where candidates compete, `choose` and `winner` stand for it: they return one model, and nothing of the others.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from bismarck_dp.budget import Price
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.plan import Plan
from bismarck_dp.scaling import counted_bytes, measure_params, measures
from bismarck_dp.spec import Spec
from bismarck_dp.units import unit_params

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
    portion: bool = False
    """whether the source is a table of raw rows that `split` has made, and none of the caller's"""
    tells_bad: bool = False
    """whether it may be said how many rows count for nothing: to the owner of a protected table"""
    paid: Price | None = None
    """what was entered in the ledger for it, where the source is protected"""


@dataclass(frozen=True)
class Shape:
    n: int
    d: int
    classes: list[float]
    looked: bool
    """whether labels were counted to find the classes"""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the model should be told."""
        if self.looked and len(self.classes) > 2:
            return ("the number of classes was found by counting labels, and is not protected: name the classes",)
        return ()


@dataclass(frozen=True)
class Packed:
    """The packed copy of a run: its number, its rows, its tables, and empty ones for the next order."""

    run: int
    rows: int
    tables: list[str]
    spare: list[str]


Shelf = dict[str, list[str]]
"""Empty tables for packed rows that lie ready, by the type of their blocks."""


@dataclass(frozen=True)
class Portions:
    """Tables of raw rows, how many each has, and how many the source had."""

    tables: list[str]
    sizes: list[int]
    rows: int


class Engine(ABC):
    hushed = False
    """whether rows are read for someone who must not hear what may go wrong with them"""

    def send(self, query: Query) -> list[dict[str, Any]]:
        """Runs one statement and returns its rows."""
        if not query.counted:
            return self._send(query)
        self._send(queries.counting(True))
        rows = self._send(query)
        self._send(queries.counting(False))
        return rows

    @abstractmethod
    def _send(self, query: Query) -> list[dict[str, Any]]:
        """Runs one statement as it is."""

    @abstractmethod
    def pulse(self) -> None:
        """Called now and then while planning takes long; lets the server notice that it was cancelled."""

    @abstractmethod
    def warn(self, message: str) -> None:
        """Tells the user something that is not an error."""

    def one(self, query: Query) -> dict[str, Any]:
        return self.send(query)[0]

    def describe(self, request: Request, labels: bool = True) -> Shape:
        """n, d and how labels are written. Part of a table's public shape; see docs/privacy.md. Without `labels`, those
        that fit no coding are not refused.
        """
        spec = request.spec
        look = LOSSES[spec.loss].classification and spec.options["classes"] is None
        params = {"categories": spec.options["categories"], **unit_params(spec.options)}
        facts = self.one(queries.describe(request.source, request.label, request.features, look, params))
        classes = _classes(facts, request, labels) if look else _given(spec)
        return Shape(facts["rows"], _features(facts, request), classes, look)

    def public_shape(self, request: Request, length: int | None) -> Shape:
        """The same for someone who must learn nothing from rows but their number; `length` is that of an array."""
        spec = request.spec
        params = {"categories": spec.options["categories"], **unit_params(spec.options), "count_only": True}
        facts = self.one(queries.describe(request.source, request.label, request.features, False, params))
        if facts["rows"] == 0:
            raise _no_rows()
        classes = _given(spec)
        if LOSSES[spec.loss].classification and spec.options["classes"] is None:
            if not facts["is_boolean"]:
                raise BismarckError(
                    f'which values label column "{request.label}" has is not known',
                    'name them with the option classes, for example {"classes": [0, 1]}; the table\'s owner names them '
                    'for everyone with dp_protect, for example {"classes": {"y": [0, 1]}}',
                )
            classes = [0.0, 1.0]
        return Shape(facts["rows"], int(facts["longest"]) if length is None else length, classes, False)

    def admit(self, source: int) -> None:
        """From here on, the source is read with the extension's rights."""
        self.send(queries.admit(source))

    def debit(self, entry: dict[str, Any]) -> tuple[str, int | None]:
        """Enters a release in the ledger, for good: paid, refused or unprotected; and the entry's number."""
        found = self.one(queries.debit(entry))
        return str(found["outcome"]), found["entry"]

    def source_facts(self, request: Request) -> dict[str, Any]:
        found = self.send(queries.source_facts(request.source))
        if not found:
            raise BismarckError("the source table does not exist", "check its name and schema", "42P01")
        return found[0]

    def check(self, request: Request) -> str:
        """Refuses a taken name and a stranger's seed; returns the source's name."""
        facts = self.source_facts(request)
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
            what, other = _kept(plan)
            raise BismarckError(
                f"{what}, {_in_mb(plan.memory)}, and maintenance_work_mem is {_in_mb(allowed)}",
                f"SET maintenance_work_mem = '{_in_mb(plan.memory).replace(' ', '')}', or {other}",
                "53400",
            )
        if measures(plan.spec):
            self._check_counts(plan)

    def measure(self, request: Request, plan: Plan) -> list[float]:
        """Bounds of the features, chosen privately and paid for in the plan."""
        params = _of_request(request, {**unit_params(plan.spec.options), **measure_params(plan, request.features)})
        query = queries.bounds(request.source, request.label, request.features, params)
        return [float(bound) for bound in self.one(query)["bounds"]]

    def _check_counts(self, plan: Plan) -> None:
        """Refuses to count rows for more features and bounds than the user's memory has room for."""
        size = counted_bytes(plan)
        if size > (allowed := int(self.one(queries.memory())["bytes"])):
            raise BismarckError(
                f"measuring bounds of {plan.d} features takes {_in_mb(size)}, and maintenance_work_mem is "
                f"{_in_mb(allowed)}",
                f"SET maintenance_work_mem = '{_in_mb(size).replace(' ', '')}', or use a narrower scale_range",
                "53400",
            )

    def next_run(self) -> int:
        return int(self.one(queries.next_run())["run"])

    def check_held(self, size: int, models: int) -> None:
        """The same for models that wait to be chosen, with the matrices of their projections."""
        if size > (allowed := int(self.one(queries.memory())["bytes"])):
            raise BismarckError(
                f"{models} models take {_in_mb(size)}, and maintenance_work_mem is {_in_mb(allowed)}",
                f"SET maintenance_work_mem = '{_in_mb(size).replace(' ', '')}', or use fewer candidates",
                "53400",
            )

    def pack(self, request: Request, plan: Plan, shelf: Shelf | None = None) -> Packed:
        """Packs the source, and makes room for a second copy where each pass has an order of its own."""
        run = self.next_run()
        if plan.layout == "columns":
            return self._pack_columns(run, request, plan, shelf)
        copies = 2 if plan.schedule.shuffle == "each_pass" else 1
        tables, *spare = [
            self._blocks(queries.table_names(run, copy, plan.schedule.workers), plan.row_width, shelf)
            for copy in range(copies)
        ]
        query = queries.pack(
            request.source, request.label, request.features, tables, _of_request(request, plan.pack_params())
        )
        return Packed(run, self.one(query)["rows"], tables, spare[0] if spare else [])

    def _pack_columns(self, run: int, request: Request, plan: Plan, shelf: Shelf | None) -> Packed:
        (table,) = self._blocks(queries.table_names(run, 0, 1), 1, shelf)
        query = queries.pack_columns(
            request.source, request.label, request.features, table, _of_request(request, plan.pack_params())
        )
        return Packed(run, self.one(query)["rows"], [table], [])

    def _blocks(self, names: list[str], width: int, shelf: Shelf | None) -> list[str]:
        """Empty tables: those that lie ready, and new ones of these names."""
        ready = (shelf or {}).get(queries.block_type(width), [])
        tables = [ready.pop() if ready else name for name in names]
        for table in tables:
            if table in names:
                self.send(queries.create_blocks(table, width))
        return tables

    def repack(self, packed: Packed, plan: Plan, done: int) -> Packed:
        """The same rows in a fresh order; the two copies take turns, so that locks and disk do not grow with passes."""
        self.send(queries.repack(packed.tables, packed.spare, {**plan.pack_params(), "pass": done}))
        return Packed(packed.run, packed.rows, packed.spare, packed.tables)

    def begin(self, packed: Packed, plan: Plan) -> None:
        self.send(queries.begin(packed.run, plan.kernel, plan.row_width, plan.kernel_params()))

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

    def split(self, request: Request, d: int, shares: list[int], fixed: bool) -> Portions:
        """Every row of the source into one of as many portions as there are shares, in one scan."""
        run = self.next_run()
        tables = queries.table_names(run, 0, len(shares))
        for table in tables:
            self.send(queries.create_portion(table, d))
        return self.split_again(request, Portions(tables, [], 0), d, shares, fixed)

    def split_again(self, request: Request, old: Portions, d: int, shares: list[int], fixed: bool) -> Portions:
        """The same tables, emptied, with the rows there are now."""
        if old.rows:
            self.send(queries.empty(old.tables))
        options = request.spec.options
        params = {
            "d": d,
            "shares": shares,
            "fixed": fixed,
            "seed": options["seed"],
            "categories": options["categories"],
            **unit_params(options),
        }
        found = self.one(queries.split(request.source, request.label, request.features, old.tables, params))
        return Portions(old.tables, list(found["portions"]), int(found["rows"]))

    def portion(self, request: Request, portions: Portions, index: int, spec: Spec) -> Request:
        """A request for one portion."""
        source = int(self.one(queries.oid_of(portions.tables[index]))["oid"])
        return replace(request, source=source, spec=spec, portion=True)

    def hold(self, packed: Packed, plan: Plan) -> None:
        """Ends a training as `release` does, but the weights stay in the server's memory."""
        self.send(queries.hold(packed.run, plan.noise_params()))

    def choose(self, held_out: str, runs: list[int], params: dict[str, Any]) -> tuple[int, list[float]]:
        """The winner of models that are held, and its weights; the others are wiped."""
        found = self.one(queries.choose(held_out, runs, params))
        return int(found["winner"]), list(found["weights"])

    def score(self, held_out: str, run: int, best: int, params: dict[str, Any]) -> None:
        """Of two models that are held, `best` and this one, wipes the one with more errors, as noisy counts say."""
        self.send(queries.score(held_out, run, best, params))

    def winner(self, best: int) -> tuple[int, list[float]]:
        found = self.one(queries.winner(best))
        return int(found["winner"]), list(found["weights"])

    def shelve(self, packed: Packed, plan: Plan, shelf: Shelf) -> None:
        """Empties the tables of a run that is over, for the next one: locks and disk do not grow with trials."""
        tables = packed.tables + packed.spare
        self.send(queries.empty(tables))
        shelf.setdefault(queries.block_type(1 if plan.layout == "columns" else plan.row_width), []).extend(tables)

    def drop_tables(self, tables: list[str]) -> None:
        self.send(queries.drop_blocks(tables))

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

    def _send(self, query: Query) -> list[dict[str, Any]]:
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
        # As the door does: anyone may read these counts.
        connection.exec_driver_sql("SET LOCAL track_counts = off; SET LOCAL track_functions = none")

    def _send(self, query: Query) -> list[dict[str, Any]]:
        text = re.sub(r"\$(\d+)", r"%(p\1)s", query.text.replace("%", "%%"))
        values = {f"p{i}": value for i, value in enumerate(query.values, 1)}
        result = self.connection.exec_driver_sql(text, values)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def pulse(self) -> None:
        """Nothing waits for a client that plans."""

    def warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=2)


def _kept(plan: Plan) -> tuple[str, str]:
    """What a plan keeps in memory, and what would need less."""
    projected = plan.spec.options["project_dim"]
    if not plan.remembers:
        return f"a projection of {plan.d} features to {projected} keeps a matrix", "use a smaller project_dim"
    algorithm = plan.spec.algorithm
    what = f'algorithm "{algorithm}" keeps 8 bytes for each of {plan.n} rows{" and a matrix" if projected else ""}'
    return what, "use sgd" if plan.perturbs == "nothing" else "use dpsgd"


def _of_request(request: Request, params: dict[str, Any]) -> dict[str, Any]:
    """Only a request that was made here is for a portion, which is read with the extension's rights; or tells of rows
    that count for nothing.
    """
    tells = request.tells_bad and request.spec.options["privacy_unit"] is None
    return {**params, "portion": True} if request.portion else {**params, "tell_bad": True} if tells else params


def _in_mb(size: int) -> str:
    return f"{-(-size // 2**20)} MB"


def _taken(model: str) -> BismarckError:
    return BismarckError(f'model name "{model}" is taken', "choose another, or drop that model with dp_forget", "42710")


def _no_rows() -> BismarckError:
    return BismarckError("the table has no rows", "there is nothing to train on")


def _features(facts: dict[str, Any], request: Request) -> int:
    if facts["rows"] == 0:
        raise _no_rows()
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
"""One label in this many may be outside the coding before the column has no coding at all."""


def labels_of(facts: dict[str, Any]) -> int:
    return sum(int(facts[key]) for key in ("minus_one", "zero", "one", "others"))


def coding(facts: dict[str, Any]) -> list[float] | None:
    """How predictions are written: 0 to k - 1 where labels go beyond 1, otherwise -1/1 or 0/1, whichever fits more
    labels; None where none does. Of two classes training does not depend on it: there, 1 is the positive class, and 0
    and -1 both mean the negative one.
    """
    labels = labels_of(facts)
    if facts["classes"] > 2 and (labels - facts["whole"]) * MOST_BAD_LABELS <= labels:
        return [float(label) for label in range(facts["classes"])]
    best = _two_classes(facts)
    wrong = facts["others"] + facts["minus_one" if best[0] == 0 else "zero"]
    return best if wrong * MOST_BAD_LABELS <= labels else None


def _two_classes(facts: dict[str, Any]) -> list[float]:
    return [0.0, 1.0] if facts["is_boolean"] or facts["zero"] > facts["minus_one"] else [-1.0, 1.0]


def _classes(facts: dict[str, Any], request: Request, refuses: bool) -> list[float]:
    found = coding(facts)
    if found is None and refuses:
        raise BismarckError(
            f'label column "{request.label}" has other values than -1/1, 0/1, true/false or whole numbers from 0 on',
            'name its values with the option classes, for example {"classes": [1, 2]}, or use loss "squared"',
        )
    return found or _two_classes(facts)
