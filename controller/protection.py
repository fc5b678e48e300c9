"""What is known of a protected table: what its owner has said, what was spent on it, and who asks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from bismarck_dp.budget import Spent, Total
from bismarck_dp.errors import BismarckError

from . import queries
from .engines import Engine

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


def check_unit_column(found: Protection) -> None:
    if not found.unit_there:
        raise BismarckError(
            f'{found.name} has no column "{found.privacy_unit}", which is its privacy unit',
            "if it was renamed, give it back its name: releases for different units do not add up",
            "55000",
        )
