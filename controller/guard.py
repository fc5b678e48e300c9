"""What stands before a protected table: who may train on what, and the debit before the rows are read.

Others than the owner train with the extension's rights: privately, on the columns they are allowed, and on nothing they
would not have to pay for. What is known of rows before a private run is paid is n; d and the labels' coding are what
the owner has said, not what rows say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bismarck_dp.budget import Price, Spent, largest_epsilon, three_digits
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.solvers import SOLVERS
from bismarck_dp.spec import LONGEST_SHOWN
from bismarck_dp.units import check_unit, described

from . import queries
from .engines import Engine, Request, Shape
from .protection import Protection, check_unit_column, find

LONGEST_SPEC = 10_000


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
            f"{now.total.delta:g}, which leaves epsilon {max(0.0, now.total.epsilon - epsilon):.4g} by that count; "
            "nothing was spent now",
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
    if bill.delta > left[1] and left[1] <= 0:
        fitting = three_digits(min(left[0], bill.epsilon)) if left[0] > 0 and left[1] == 0 else None
        more = ", and nothing was found that would fit"
        if fitting:
            more = f": epsilon {fitting:g} would fit with delta 0, and an algorithm that does without"
        return f"no delta is left to simple sums{more}"
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
                f"{found.name} was protected by another owner, or under another name of its owner",
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
    check_unit_column(found)
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
    if size <= LONGEST_SPEC:
        return spec
    short = {name: value for name, value in spec.items() if len(json.dumps(value)) <= LONGEST_SPEC / 20}
    return {**short, "omitted": f"of {size} characters"}


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
