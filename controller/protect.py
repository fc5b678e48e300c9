"""Protected tables: what their owner has said, who may do what, and the debit before the rows are read.

On a protected table, others than its owner train with the extension's rights: privately, on the columns they are
allowed, and on nothing they would not have to pay for. What they are told before they pay is n, d and the labels'
coding, which are public; d and the coding are what the owner has said, not what rows say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from bismarck_dp.accounting import ADJACENCIES
from bismarck_dp.budget import COMPOSITIONS, Price, Spent, Total, largest_epsilon, three_digits
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.solvers import MOST_FEATURES, SOLVERS
from bismarck_dp.spec import LONGEST_SHOWN, Spec, unknown
from bismarck_dp.spec import OPTIONS as SPEC_OPTIONS
from bismarck_dp.units import check_unit, described

from . import queries
from .engines import Engine, Request, Shape, coding, labels_of

DEFAULTS: dict[str, Any] = {
    "composition": "zcdp",
    "adjacency": "replace",
    "privacy_unit": None,
    "unit_rows": 1,
    "analysts": ["dp_analyst"],
    "columns": None,
    "lengths": {},
    "classes": None,
}
"""What dp_protect takes, and what a table has that was never protected; null means it, too."""

UNIT = ("privacy_unit", "unit_rows")

LONGEST_SPEC = 10_000

BOUNDS = ("epsilon", "delta", "rho", "slack", "summed_delta", "order")


@dataclass(frozen=True)
class Protection:
    """What is known about a table that is, or was, protected; and about the caller."""

    id: int
    source: int
    name: str
    owner: str
    """who owned it when it was protected"""
    owner_now: str
    active: bool
    total: Total
    adjacency: str
    privacy_unit: str | None
    unit_rows: int
    analysts: list[str]
    columns: list[str] | None
    lengths: dict[str, int]
    classes: dict[str, list[float]]
    spent: Spent
    mixed: bool
    """whether releases have promised different things: then nothing more is released"""
    owned: bool
    """whether the caller owns the table's rows"""
    heard: bool
    """whether whoever logged in does, and may be told of them"""
    allowed: bool
    """whether he may train"""
    arrays: list[str]
    """columns that are arrays now"""
    unit_there: bool
    """whether the unit's column still has its name"""

    @property
    def told(self) -> bool:
        """Whether the caller may hear what rows do: their owner, and nobody who acts for him."""
        return self.owned and self.heard

    @property
    def unit(self) -> dict[str, Any]:
        """What the guarantee of every release is for, as options."""
        return {"privacy_unit": self.privacy_unit, "unit_rows": self.unit_rows}

    @classmethod
    def from_json(cls, text: str) -> Protection:
        facts = json.loads(text, parse_float=Decimal)
        numbers: dict[str, Any] = {name: _float(facts.pop(name)) for name in BOUNDS}
        total = Total(composition=facts.pop("composition"), **numbers)
        sums = facts.pop("spent")
        amounts: dict[str, Any] = {name: Decimal(sums[name]) for name in ("rho", "slack", "epsilon", "delta")}
        spent = Spent(int(sums["releases"]), int(sums["unpriced"]), **amounts)
        classes = {column: [float(value) for value in values] for column, values in facts.pop("classes").items()}
        return cls(
            total=total, spent=spent, mixed=bool(sums["mixed"]), classes=classes, arrays=facts.pop("arrays"), **facts
        )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def find(engine: Engine, source: int) -> Protection | None:
    """What is remembered of a table, protected now or not."""
    found = engine.send(queries.protection(source))
    return Protection.from_json(found[0]["facts"]) if found else None


# ---- what an owner does ----


def protect(
    engine: Engine, source: int, epsilon: float, delta: float, options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Sets the budget of a table's whole life; what was said of it before and is not said anew stays, and what was
    spent stays spent. Returns what holds from here on, and what the owner should know.
    """
    _check_isolation(engine, "dp_protect")
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
    measured, notes = _measured_lengths(engine, source, facts, options)
    lengths = {**measured, **options.pop("lengths")}
    if options["classes"] is None:
        options["classes"] = _found_classes(engine, source, facts, options)
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
        "lengths": lengths,
    }
    notes += [] if used is None else _changed(engine, used, total)
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


def _check_isolation(engine: Engine, name: str) -> None:
    """An old snapshot does not show what was spent since, nor whose the table is now."""
    if engine.one(queries.isolation())["level"] != "read committed":
        raise BismarckError(
            f"{name} looks at what is there now, and this transaction at what was there before",
            "call it in a transaction of isolation level READ COMMITTED",
            "25001",
        )


def _check_claim(old: Protection, options: Mapping[str, Any]) -> None:
    """What was promised cannot be added up with another promise."""
    if options["adjacency"] != old.adjacency:
        raise BismarckError(
            f"{old.name} has releases under adjacency {old.adjacency}", f'leave "adjacency": "{old.adjacency}"'
        )
    if any(options[name] != value for name, value in old.unit.items()):
        raise BismarckError(
            f"{old.name} has releases whose privacy unit is {described(old.unit)}",
            f"leave {json.dumps(old.unit)}",
        )
    _check_unit_column(old)


def _check_unit_column(found: Protection) -> None:
    if not found.unit_there:
        raise BismarckError(
            f'{found.name} has no column "{found.privacy_unit}", which is its privacy unit',
            "if it was renamed, give it back its name: releases for different units do not add up",
            "55000",
        )


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
    """Nothing is enforced from here on; the ledger remembers."""
    _check_isolation(engine, "dp_unprotect")
    _own_table(engine, source)
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
    name = _facts(engine, source)["name"]
    return BismarckError(f"{name} is not protected, or not for you", "its owner protects it with dp_protect", "42501")


def _facts(engine: Engine, source: int) -> dict[str, Any]:
    found = engine.send(queries.table_facts(source))
    if not found:
        raise BismarckError("the table does not exist", "check its name and schema", "42P01")
    return dict(json.loads(found[0]["facts"]))


def _own_table(engine: Engine, source: int) -> dict[str, Any]:
    """Facts of a table that its owner asks about, and that can be protected."""
    facts = _facts(engine, source)
    if not facts["owned"]:
        raise BismarckError(f"only the owner of {facts['name']} may protect it", "ask its owner", "42501")
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
        _check_unit_column(old)
    found = {**DEFAULTS, **({} if old is None else _said_before(old, facts)), **given}
    for name, words in (("composition", COMPOSITIONS), ("adjacency", ADJACENCIES)):
        if found[name] not in words:
            raise unknown(name, found[name], words)
    found["analysts"] = _roles(engine, found["analysts"])
    if found["columns"] is not None:
        _check_columns("columns", _names("columns", found["columns"]), facts["columns"])
    _check_unit(engine, found, facts)
    _check_lengths(found["lengths"], facts)
    if found["classes"] is not None:
        found["classes"] = _parse_classes(found["classes"], facts)
    return found


def _said_before(old: Protection, facts: dict[str, Any]) -> dict[str, Any]:
    """So that raising a budget opens nothing. Lengths are measured anew; of columns that went nothing is known."""
    return {
        "composition": old.total.composition,
        "adjacency": old.adjacency,
        **old.unit,
        "analysts": old.analysts,
        "columns": old.columns,
        "classes": {column: values for column, values in old.classes.items() if column in facts["columns"]},
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


def _check_columns(option: str, names: Any, there: list[str]) -> None:
    for name in names:
        if name not in there:
            raise unknown(f"column in {option}", name, there)


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
            f"lengths is no object of whole numbers from 1 to {MOST_FEATURES}", 'it must be one, for example {"x": 50}'
        )
    _check_columns("lengths", lengths, facts["arrays"])


def _parse_classes(classes: Any, facts: dict[str, Any]) -> dict[str, list[float]]:
    """By label column, as the option of a training would be read: a list of values, or how many there are."""
    if not isinstance(classes, dict) or None in classes.values():
        raise BismarckError("classes is no object of lists", 'it must be one, for example {"y": [0, 1]}')
    _check_columns("classes", classes, facts["columns"])
    return {
        column: Spec.create("sgd", "logistic", None, 0.0, {"classes": values}).options["classes"]
        for column, values in classes.items()
    }


def _found_classes(
    engine: Engine, source: int, facts: dict[str, Any], options: dict[str, Any]
) -> dict[str, list[float]]:
    """Which columns are written as -1/1, 0/1 or boolean, as their owner sees them; public from here on, as a check of
    the table would be. How many classes there are of more than two would tell what is in the rows: it has to be named.
    """
    found = {}
    for column in facts["numbers"]:
        if options["columns"] is not None and column not in options["columns"]:
            continue
        seen = engine.one(queries.describe(source, column, [column], True, {}))
        classes = coding(seen)
        if labels_of(seen) > 0 and classes is not None and len(classes) == 2:
            found[column] = classes
    return found


def _measured_lengths(
    engine: Engine, source: int, facts: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """How many numbers each array column holds, as the owner sees it; public from here on. And which have no
    length: an array that nobody trains on is in nobody's way.
    """
    found, notes = {}, []
    for column in facts["arrays"]:
        allowed = options["columns"] is None or column in options["columns"]
        if column in options["lengths"] or not allowed or not facts["numbers"]:
            continue
        shape = engine.one(queries.describe(source, facts["numbers"][0], [column], False, {}))
        if shape["longest"] < 0:
            continue  # no row, or no array: its length can be given
        if shape["shortest"] == shape["longest"]:
            found[column] = int(shape["longest"])
        else:
            notes.append(
                f'arrays in column "{column}" differ in length: to train on it, say what counts, '
                f'{{"lengths": {{"{column}": 50}}}}'
            )
    return found, notes


# ---- what a training asks ----


@dataclass(frozen=True)
class Guard:
    """Stands before a source. Without a protection it lets everyone through, with their own rights."""

    engine: Engine
    protection: Protection | None
    private: bool = False
    """whether something is promised, and paid for"""

    @property
    def stranger(self) -> bool:
        """Whether rows are read for someone who does not own them."""
        return self.protection is not None and not self.protection.owned

    def shape(self, request: Request, labels: bool = True) -> tuple[Request, Shape]:
        """n, d and the labels' coding; and the request, with the unit and the coding that the owner has named. Of what
        is paid for nothing else is known, whoever asks: a look at rows would have a price.
        """
        request = replace(request, spec=replace(request.spec, options=self.with_unit(request.spec.options)))
        check_unit(request.spec.options, request.spec.algorithm, SOLVERS[request.spec.algorithm].samples)
        request = replace(request, tells_bad=self.protection is not None and self.protection.told)
        if self.protection is None or not self.private:
            return request, self.engine.describe(request, labels)
        spec = request.spec
        named = self.protection.classes.get(request.label)
        if LOSSES[spec.loss].classification and spec.options["classes"] is None and named is not None:
            request = replace(request, spec=replace(spec, options={**spec.options, "classes": named}))
        return request, self.engine.public_shape(request, self._length(request))

    def with_unit(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of a release, whose promise is for the unit that the owner has named."""
        return {**options, **self.protection.unit} if self.protection is not None and self.private else options

    def _length(self, request: Request) -> int | None:
        """d, where the features are one array."""
        assert self.protection is not None
        if len(request.features) != 1 or request.features[0] not in self.protection.arrays:
            return None
        (column,) = request.features
        if column not in self.protection.lengths:
            raise BismarckError(
                f'how many numbers column "{column}" holds is not known',
                f'the owner of {self.protection.name} says it in dp_protect: {{"lengths": {{"{column}": 50}}}}',
            )
        return self.protection.lengths[column]

    def pay(self, bill: Bill) -> Price | None:
        """Enters the release in the ledger before its rows are read; raises if it is not paid. What is not private is
        free for the owner, and for nobody else.
        """
        found = self.protection
        if found is None or (bill.epsilon is None and not self.stranger):
            return None
        if bill.epsilon is None:
            raise BismarckError(f"nothing on {found.name} is free but for its owner", "give an epsilon", "42501")
        price = bill.price_at(bill.epsilon, found.total.order).with_room()
        # No row is read yet: what goes wrong here may be told to anyone.
        outcome, number = self.engine.debit(_entry(found, bill, price))
        if outcome == "paid":
            self.engine.hushed = not found.told
            self._tell_end_of_divergences(price)
            return replace(price, entry=number)
        if outcome == "refused":
            raise self._refusal(bill)
        raise BismarckError(
            f"the protection of {found.name} is not committed yet, or was changed meanwhile: nothing was spent",
            "try again, after COMMIT",
            "55000",
        )

    def _tell_end_of_divergences(self, price: Price) -> None:
        """Simple sums have paid for this one, and will have to pay for all that follow."""
        assert self.protection is not None
        total, before = self.protection.total, self.protection.spent
        after = before.plus(price)
        if before.diverges_within(total) and not after.diverges_within(total) and after.sums_within(total):
            self.engine.warn(
                f"from here on epsilons and deltas of {self.protection.name} simply add up: this release was within "
                f"them, but beyond what divergences may come to"
            )

    def _refusal(self, bill: Bill) -> BismarckError:
        """How much is left, and what would fit."""
        assert self.protection is not None
        assert bill.epsilon is not None
        now = find(self.engine, self.protection.source) or self.protection
        epsilon, delta = now.spent.cost(now.total)
        return BismarckError(
            f"the budget of {now.name} does not allow epsilon {bill.epsilon:g} and delta {bill.delta:g}: "
            f"{_releases(now.spent)} spent epsilon {epsilon:.4g} of {now.total.epsilon:g} and delta {delta:.4g} of "
            f"{now.total.delta:g}, so that epsilon {max(0.0, now.total.epsilon - epsilon):.4g} is left; nothing was "
            "spent now",
            _what_fits(bill, now),
            "53400",
        )


def _what_fits(bill: Bill, now: Protection) -> str:
    def price_at(epsilon: float) -> Price:
        return bill.price_at(epsilon, now.total.order).with_room()

    assert bill.epsilon is not None
    left = now.total.sums_left(now.spent)
    if bill.quick:
        fitting = largest_epsilon(now.total, now.spent, bill.epsilon, price_at)
    else:  # simple sums are the same for all plans
        fitting = three_digits(left[0]) if 0 < left[0] < bill.epsilon and bill.delta <= left[1] else None
    if fitting is not None:
        return f"epsilon {fitting:g} would fit, with delta {bill.delta:g} and all else the same"
    if bill.delta > left[1]:
        return f"a delta of at most {left[1]:.3g} may fit: no epsilon was found that does with delta {bill.delta:g}"
    return f"nothing was found that would fit with delta {bill.delta:g}"


def _releases(spent: Spent) -> str:
    return f"{spent.releases} release{'' if spent.releases == 1 else 's'}"


@dataclass(frozen=True)
class Bill:
    """A release to be paid for: what it is, and what it costs at any epsilon."""

    verb: str
    model: str
    spec: dict[str, Any]
    epsilon: float | None
    """None: it is not private"""
    delta: float
    price_at: Callable[[float, float | None], Price]
    """at an epsilon, and at the order that the table's divergences add up at"""
    quick: bool = True
    """whether prices are found fast enough to look for one that fits"""


def guard(
    engine: Engine, source: int, label: str, features: list[str], private: bool, options: Mapping[str, Any]
) -> Guard:
    """Refuses what a stranger may not do, before anything is read; lets him in if he may."""
    found = _active(engine, source)
    if found is None:
        return Guard(engine, None)
    if private:
        _check_promise(found, options)
    if not found.owned:
        _check_stranger(found, label, features, private)
        engine.admit(source)
    return Guard(engine, found, private)


def _active(engine: Engine, source: int) -> Protection | None:
    """What protects a table now, even if the transaction's snapshot is older than that."""
    found = find(engine, source)
    if found is not None and found.active:
        if found.owner_now != found.owner:
            raise BismarckError(
                f"{found.name} was protected by another owner",
                "its owner protects it again with dp_protect, or lets it go with dp_unprotect",
                "55000",
            )
        return found
    if engine.one(queries.protected_now(source))["now"]:
        raise BismarckError(
            "the table was protected after this transaction began", "begin another transaction", "25001"
        )
    return None


def _check_promise(found: Protection, options: Mapping[str, Any]) -> None:
    """A release promises what all others do."""
    if found.mixed:
        raise BismarckError(
            f"{found.name} has releases under two adjacencies or privacy units", "nothing more can be released", "55000"
        )
    _check_unit_column(found)
    if options["adjacency"] != found.adjacency:
        raise BismarckError(
            f"{found.name} is protected under adjacency {found.adjacency}",
            f'use the option "adjacency": "{found.adjacency}"',
            "42501",
        )
    if options["privacy_unit"] is not None and any(options[name] != value for name, value in found.unit.items()):
        raise BismarckError(
            f"{found.name} is protected, and its privacy unit is {described(found.unit)}",
            "leave out privacy_unit and unit_rows",
            "42501",
        )


def check_paid(request: Request, price_at: Callable[[float | None], Price]) -> None:
    """Refuses a run that costs more than was paid for it, because it was planned anew."""
    if request.paid is not None and not request.paid.covers(price_at(request.paid.order)):
        raise BismarckError(
            "rows came or went while they were read, and what is there now would cost more than was paid",
            "train on a table that nobody writes to meanwhile; what was paid stays spent",
            "55006",
        )


def guard_of(engine: Engine, request: Request) -> Guard:
    """The guard of a training."""
    spec = request.spec
    private = spec.epsilon is not None and spec.options["seed"] is None
    return guard(engine, request.source, request.label, request.features, private, spec.options)


def _check_stranger(found: Protection, label: str, features: list[str], private: bool) -> None:
    if not found.allowed:
        raise BismarckError(
            f"permission denied for {found.name}, which is protected",
            f"its owner lets members of {', '.join(found.analysts) or 'no role'} train on it",
            "42501",
        )
    if not private:
        raise BismarckError(
            f"{found.name} is protected: only its owner may do without epsilon, or with a seed",
            "give an epsilon and no seed",
            "42501",
        )
    for column in [label, *features] if found.columns is not None else []:
        if column not in (found.columns or []):
            raise BismarckError(
                f'column "{column[:LONGEST_SHOWN]}" of {found.name} is not open to training',
                f"use {', '.join(found.columns or []) or 'none'}",
                "42501",
            )


def refuse_protected(engine: Engine, source: int, what: str) -> None:
    found = _active(engine, source)
    if found is not None:
        raise BismarckError(
            f"{what} is {found.name}, which is protected", "name a table whose rows are public", "42501"
        )


def _shown(spec: dict[str, Any]) -> dict[str, Any]:
    """What the ledger keeps of a request: nobody may delete it, so that it must not be megabytes."""
    size = len(json.dumps(spec))
    return spec if size <= LONGEST_SPEC else {"omitted": f"{size} characters"}


def _entry(found: Protection, bill: Bill, price: Price) -> dict[str, Any]:
    return {
        "protected": found.id,
        "table": str(found.source),
        "terms": {"analysts": found.analysts, "columns": found.columns},
        "source": found.name,
        "verb": bill.verb,
        "model": bill.model,
        "spec": _shown(bill.spec),
        "event": price.event.to_json(),
        "adjacency": found.adjacency,
        **found.unit,
        "renyi_order": price.order,
        "rho": price.rho,
        "slack": price.slack,
        "epsilon": price.epsilon,
        "delta": price.delta,
    }
