"""Protected tables, as their owner sees them: what he says of them, and what is spent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bismarck_dp.accounting import ADJACENCIES
from bismarck_dp.budget import COMPOSITIONS, Total
from bismarck_dp.errors import BismarckError
from bismarck_dp.solvers import MOST_FEATURES
from bismarck_dp.spec import LONGEST_SHOWN, Spec, unknown
from bismarck_dp.spec import OPTIONS as SPEC_OPTIONS
from bismarck_dp.units import check_unit, described, unit_params

from . import queries
from .engines import Engine, coding, labels_of
from .protection import Protection, check_unit_column, find

DEFAULTS: dict[str, Any] = {
    "composition": "zcdp",
    "adjacency": "replace",
    "privacy_unit": None,
    "unit_rows": 1,
    "analysts": ["dp_analyst"],
    "columns": None,
    "lengths": None,
    "classes": None,
}
"""What dp_protect takes, and what a table has that was never protected; null means it, too."""

UNIT = ("privacy_unit", "unit_rows")


def protect(
    engine: Engine, source: int, epsilon: float, delta: float, options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Sets the budget of a table's whole life; what was said of it before and is not said anew stays, and what was
    spent stays spent. Returns what holds from here on, and what the owner should know.
    """
    _check_transaction(engine, "dp_protect")
    _own_table(engine, source)  # before anything of somebody else's is locked
    engine.send(queries.hold_source(source))
    facts = _own_table(engine, source)
    engine.send(queries.hold_protection(source))
    old = find(engine, source)
    options = _parse(engine, options, facts, old)
    used = old if old is not None and old.spent.releases > 0 else None
    if used is not None:
        _check_claim(used, options)
    # Divergences add up at one order: that of the first release.
    total = Total.create(epsilon, delta, options["composition"], used.total.order if used is not None else None)
    notes = _look(engine, facts, options)
    row = {
        **options,
        "source": source,
        "name": facts["name"],
        "owner": facts["owner"],
        "epsilon": total.epsilon,
        "delta": total.delta,
        "renyi_order": total.order,
        "rho": total.rho,
        "slack": total.slack,
        "summed_delta": total.summed_delta,
    }
    notes += [] if used is None else _changed(engine, used, total)
    if old is None:
        engine.send(queries.skip_numbers())
    engine.send(queries.protect(row))
    if facts["before"]:
        notes.append("a table of this name was protected before, and is gone: what was spent on it is in the ledger")
    return {**_said(row), "releases": 0 if old is None else old.spent.releases}, notes


def _changed(engine: Engine, old: Protection, total: Total) -> list[str]:
    """What holds for releases under several totals: each is one filter's, and a transcript ends in one of them."""
    paid = {(row["epsilon"], row["delta"], row["composition"]) for row in engine.send(queries.totals(old.id))}
    every = paid | {(total.epsilon, total.delta, total.composition)}
    if len(every) == 1:
        return []
    epsilon, delta = max(one[0] for one in every), math.fsum(one[1] for one in every)
    return [
        f"something was spent under {'another budget' if len(every) == 2 else f'{len(every) - 1} other budgets'}: all "
        f"releases together are worth epsilon {epsilon:g} and delta {delta:g} at most, if budgets were changed without "
        "looking at what came out"
    ]


def _check_transaction(engine: Engine, name: str) -> None:
    """It may write; and an old snapshot does not show what was spent since, nor whose the table is now."""
    transaction = engine.one(queries.transaction())
    if transaction["standby"] or transaction["read_only"]:
        where = "on a standby" if transaction["standby"] else "in a transaction that may only read"
        raise BismarckError(f"{name} writes, and cannot {where}", "call it where it may", "25006")
    if transaction["level"] != "read committed":
        raise BismarckError(
            f"{name} looks at what is there now, and this transaction at what was there before",
            "call it in a transaction of isolation level READ COMMITTED",
            "25001",
        )


def _check_claim(old: Protection, options: Mapping[str, Any]) -> None:
    """What was promised cannot be added up with another promise."""
    if options["adjacency"] != old.adjacency:
        raise BismarckError(
            f"{old.name} has releases under adjacency {old.adjacency}", f'keep "adjacency": "{old.adjacency}"'
        )
    if any(options[name] != value for name, value in old.unit.items()):
        raise BismarckError(
            f"{old.name} has releases whose privacy unit is {described(old.unit)}",
            f"keep {json.dumps(old.unit)}",
        )
    check_unit_column(old)


def _said(row: dict[str, Any]) -> dict[str, Any]:
    """What dp_protect answers."""
    names = ("name", "epsilon", "delta", "composition", "adjacency")
    return {
        **{("table" if name == "name" else name): row[name] for name in names},
        "privacy_unit": described(row),
        "analysts": row["analysts"],
        "columns": "all" if row["columns"] is None else row["columns"],
        "lengths": row["lengths"],
        "classes": row["classes"],
        "renyi_order": row["renyi_order"],
        "rho": row["rho"],
    }


def unprotect(engine: Engine, source: int) -> None:
    """Nothing is enforced from here on; the ledger remembers. Whatever the table has become, it can be let go."""
    _check_transaction(engine, "dp_unprotect")
    _owned(engine, source)
    found = find(engine, source)
    if found is None or not found.active:
        raise _not_protected(engine, source)
    engine.send(queries.unprotect(source))


def budget(engine: Engine, source: int) -> dict[str, Any]:
    """What a table may spend and has spent, for its owner and those who may train on it."""
    found = find(engine, source)
    if found is None or not (found.owned or (found.active and found.allowed)):
        raise _not_protected(engine, source)
    epsilon, delta = found.spent.cost(found.total)
    return {
        "epsilon_total": found.total.epsilon,
        "epsilon_spent": epsilon,
        "delta_total": found.total.delta,
        "delta_spent": delta,
        "releases": found.spent.releases,
    }


def _not_protected(engine: Engine, source: int) -> BismarckError:
    facts = _facts(engine, source)
    if facts["owned"]:
        return BismarckError(f"{facts['name']} is not protected", "protect it with dp_protect", "42501")
    what = f"{facts['name']} is not protected, or not for you"
    return BismarckError(what, "its owner protects it with dp_protect, and says there who may train on it", "42501")


def _facts(engine: Engine, source: int) -> dict[str, Any]:
    found = engine.send(queries.table_facts(source))
    if not found:
        raise BismarckError("the table does not exist", "check its name and schema", "42P01")
    return dict(json.loads(found[0]["facts"]))


def _owned(engine: Engine, source: int) -> dict[str, Any]:
    """Facts of a table that its owner asks about."""
    facts = _facts(engine, source)
    if not facts["owned"]:
        raise BismarckError(f"only the owner of {facts['name']} may protect it, or let it go", "ask its owner", "42501")
    return facts


def _own_table(engine: Engine, source: int) -> dict[str, Any]:
    """The same of a table that can be protected."""
    facts = _owned(engine, source)
    for refused, what in (
        (facts["system"], "belongs to the system or to an extension"),
        (facts["kind"] != "r", "is no plain table"),
        (not facts["heap"], "is not stored as a heap"),
        (facts["typed"], "is made of a type, and may go with it"),
        (facts["temporary"], "is temporary"),
        (facts["related"], "is a partition, or has or is an inheritance child"),
    ):
        if refused:
            raise BismarckError(
                f"{facts['name']} {what}", "only a plain table of rows, not temporary, can be protected", "42809"
            )
    return facts


def _parse(engine: Engine, options: Any, facts: dict[str, Any], old: Protection | None) -> dict[str, Any]:
    """Options of dp_protect, checked, with what was said before and with defaults."""
    if options is None or not isinstance(options, Mapping):
        raise BismarckError("options is no object", 'it must be one, for example {"composition": "pure"}')
    for name in options:
        if name not in DEFAULTS:
            raise unknown("option", name, DEFAULTS)
    given = {name: DEFAULTS[name] if value is None else value for name, value in options.items()}
    if old is not None and "privacy_unit" not in given:
        check_unit_column(old)
    found = {**DEFAULTS, **({} if old is None else _said_before(old, facts)), **given}
    for name, words in (("composition", COMPOSITIONS), ("adjacency", ADJACENCIES)):
        if found[name] not in words:
            raise unknown(name, found[name], words)
    found["analysts"] = _roles(engine, found["analysts"])
    if found["columns"] is not None:
        _check_columns("columns", _names("columns", found["columns"]), facts["columns"])
    _check_unit(engine, found, facts)
    if given.get("lengths") is not None:
        _check_lengths(given["lengths"], facts)
    if found["classes"] is not None:
        found["classes"] = _parse_classes(found["classes"], facts)
    return found


def _said_before(old: Protection, facts: dict[str, Any]) -> dict[str, Any]:
    """So that raising a budget opens nothing. Of columns that went nothing is known."""
    return {
        "composition": old.total.composition,
        "adjacency": old.adjacency,
        **old.unit,
        "analysts": old.analysts,
        "columns": old.columns,
        "lengths": {column: length for column, length in old.lengths.items() if column in facts["arrays"]},
        "classes": {column: values for column, values in old.classes.items() if column in facts["numbers"]},
    }


def _names(option: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BismarckError(f"{option} is no list of names", f'it must be one, for example {{"{option}": ["one"]}}')
    return value


def _roles(engine: Engine, value: Any) -> list[str]:
    names = _names("analysts", value)
    known = {row["name"] for row in engine.send(queries.roles(names))}
    for name in names:
        if name not in known:
            raise BismarckError(f'role "{name[:LONGEST_SHOWN]}" does not exist', "create it first", "42704")
    return names


def _check_columns(option: str, names: Any, there: list[str], kind: str = "column") -> None:
    for name in names:
        if name not in there:
            raise unknown(f"{kind} in {option}", name, there)


def _check_unit(engine: Engine, options: dict[str, Any], facts: dict[str, Any]) -> None:
    """The unit's column is there, and of a type whose values can be told apart."""
    for name in UNIT:
        if options[name] is not None:
            options[name] = SPEC_OPTIONS[name].parse(name, options[name])
    check_unit(options)
    if (column := options["privacy_unit"]) is None:
        return
    _check_columns("privacy_unit", [column], facts["columns"])
    if facts["numbers"]:
        params = {"unit": {"column": column, "rows": options["unit_rows"]}}
        engine.one(queries.describe(facts["source"], facts["numbers"][0], [facts["numbers"][0]], False, params))


def _check_lengths(lengths: Any, facts: dict[str, Any]) -> None:
    whole = isinstance(lengths, dict) and all(
        isinstance(length, int) and not isinstance(length, bool) and 0 < length <= MOST_FEATURES
        for length in lengths.values()
    )
    if not whole:
        raise BismarckError(
            f"lengths is no object of whole numbers from 1 to {MOST_FEATURES}",
            'it must be one, for example {"lengths": {"x": 50}}',
        )
    _check_columns("lengths", lengths, facts["arrays"], "array column")


def _parse_classes(classes: Any, facts: dict[str, Any]) -> dict[str, list[float]]:
    """By label column, as the option of a training would be read: a list of values, or how many there are."""
    if not isinstance(classes, dict) or None in classes.values():
        raise BismarckError(
            "classes is no object of lists, by label column", 'it must be one, for example {"classes": {"y": [0, 1]}}'
        )
    _check_columns("classes", classes, facts["numbers"], "column of numbers")
    return {column: _parse_coding(column, values) for column, values in classes.items()}


def _parse_coding(column: str, values: Any) -> list[float]:
    try:
        return list(Spec.create("sgd", "logistic", None, 0.0, {"classes": values}).options["classes"])
    except BismarckError as error:
        raise BismarckError(f'of column "{column}", {error.message}', error.hint) from None


def _look(engine: Engine, facts: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Puts lengths and classes that the owner has not said into the options, as the owner sees them; public from here
    on. Returns what the owner should know.
    """
    table = Look(engine, facts, options)
    said, notes = options["lengths"] or {}, []
    lengths = dict(said)
    for column in table.open(facts["arrays"]):
        length, note = table.length(column, said.get(column))
        if length is not None:
            lengths[column] = length
        notes += [] if note is None else [note]
    options["lengths"] = lengths
    if options["classes"] is None:
        options["classes"], note = table.classes()
        notes += [] if note is None else [note]
    return notes


@dataclass(frozen=True)
class Look:
    """At the rows of a table, on behalf of its owner."""

    engine: Engine
    facts: dict[str, Any]
    options: dict[str, Any]

    def open(self, columns: list[str]) -> list[str]:
        """Those that others may name."""
        allowed = self.options["columns"]
        return [column for column in columns if allowed is None or column in allowed]

    def length(self, column: str, said: int | None) -> tuple[int | None, str | None]:
        """How many numbers an array column holds, and a note; none if it has no one length: an array that nobody trains
        on is in nobody's way.
        """
        numbers = self.facts["numbers"]
        if not numbers:
            return said, None  # no label, no training
        shape = self.engine.one(queries.describe(self.facts["source"], numbers[0], [column], False, {}))
        shortest, longest = int(shape["shortest"]), int(shape["longest"])
        if said is not None:
            wrong = 0 <= shortest == longest != said
            note = f'arrays in column "{column}" hold {longest} numbers, not {said}: none of them counts'
            return said, note if wrong else None
        say = f'{{"lengths": {{"{column}": 50}}}}'
        if longest <= 0:
            return None, f'column "{column}" holds no list of numbers yet: protect again when it does, or say {say}'
        if shortest == longest <= MOST_FEATURES:
            return longest, None
        return None, f'arrays in column "{column}" differ in length, or are too long: say what counts, {say}'

    def classes(self) -> tuple[dict[str, list[float]], str | None]:
        """Which columns are written as -1/1, 0/1 or boolean; of a unit so many rows have a say as may count. How many
        classes there are of more than two would tell what is in the rows: it has to be named.
        """
        found, labels = {}, 0
        params = unit_params({**self.options, "seed": None})
        for column in self.open(self.facts["numbers"]):
            seen = self.engine.one(queries.describe(self.facts["source"], column, [column], True, params))
            classes, count = coding(seen), labels_of(seen)
            labels += count
            if count > 0 and classes is not None and len(classes) == 2:
                found[column] = classes
        note = 'there are no labels yet: once there are, say {"classes": null} to have them looked at'
        return found, note if labels == 0 and self.facts["numbers"] else None
