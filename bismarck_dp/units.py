"""The privacy unit: whole persons, say, instead of rows.

With `privacy_unit` (a column) and `unit_rows` = c, the source is read as slots: of each unit at most c rows, chosen
uniformly at random and independently of other units (udf/units.c), and null rows for those that a unit lacks. All rows
without a unit are one together. U units make exactly c U slots, which are the n of the plan; U is public. Neighbours
are tables with the same U in which one unit's rows are any others (`replace`), or are all null (`zero-out`).

Claim: what a plan promises for a slot under some n = c U, it promises for a unit if c = 1; for c > 1 an algorithm that
is (epsilon / c, delta_row)-DP for a slot is (epsilon, delta)-DP for a unit, with

    delta_row = delta (e^(epsilon / c) - 1) / (e^epsilon - 1).

Proof. (1) The choice of a unit's rows is a function of its own rows and of coins that belong to nobody else; the law of
all choices together is the product. So both tables can be read with the same coins for all units but the one that
differs, and the two lists of slots differ in at most c of c U places, those of that unit: by any other rows, or by null
rows, which is what neighbouring lists of slots may differ in. (In a seeded test coins come from one stream, and a unit
with more rows takes more of it. That changes what is drawn for others, not its law.) (2) The places are in another
order where a unit has fewer rows. That does not matter: training shuffles slots uniformly, so that its law depends on
which slots there are and not on how they came; counts, noisy sums of an evaluation and of packed columns are sums of
whole numbers, or of numbers that add up without rounding (those of dpscd_primal are rounded, but its moves are cut,
whatever they are made of); and dividing slots into portions is uniform. (3) Given the coins, the promise for slots
holds, and c = 1 is done: a mixture over coins of the same law on both sides keeps it, for
P(S) <= e^epsilon Q(S) + delta is linear in P and Q. Where a source is read several times, each choice has coins of its
own, and the same holds given all of them. (4) For c > 1 walk from one list to the other, one slot at a time: with e =
epsilon / c and d = delta_row,

    P_0(S) <= e^e P_1(S) + d <= e^(2 e) P_2(S) + e^e d + d <= ... <= e^(c e) P_c(S) + d (e^(c e) - 1) / (e^e - 1).  QED

Numbers, dates and UUIDs are told apart exactly. Two texts are taken for one unit with a tiny probability that does not
depend on rows (udf/units.c), and comes on top of delta as the quality of the random numbers does.

Events. `lifted` says what an event of slots is for units. Distributions that a noise separates at a multiplier z are at
z / c after c steps: for Gaussian and Laplace noise, whose trade-off curves T(X, X + 1 / z) are those of a log-concave
shift, c of them one after the other make that of the shift c / z (Dong, Roth and Su 2019, Theorem 2.14: what is
dominated for neighbours by f is for groups by f one after the other). rho-zCDP is c^2 rho-zCDP (Bun and Steinke 2016,
Proposition 1.9). Compositions are compositions of what each part is for units. Samples are refused: several of a unit's
slots may come to one batch, and no event here is that of a group. So are events side by side: a unit may have slots in
several parts, and the dearest one alone is no bound for different parts together.

The computed noise of a plan (`Noise.excess`, `Noise.rarity`) is said of the sums that one slot may be in; on all others
both tables have the same law, as computed. c slots are in c times as many sums at most: c times the excess, and c times
what is rare. (In the walk both are paid for in (epsilon / c, delta_row), at each of its steps.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .accounting import (
    ComposedDpEvent,
    Event,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
)
from .errors import BismarckError
from .spec import SMALLEST, SMALLEST_DELTA, Spec

if TYPE_CHECKING:
    from .mechanisms import Noise
    from .plan import Plan

SPARED = 1e-12
"""Of what a slot may spend, relatively: for the rounding of this calculation, and of events."""

ROUNDING = 1e-13
"""Of events, on the safe side."""


def check_unit(options: Mapping[str, Any], algorithm: str = "", samples: bool = False) -> None:
    """Several rows need a unit, and an algorithm that does not sample: see the claim on events."""
    rows = options["unit_rows"]
    if rows > 1 and options["privacy_unit"] is None:
        raise BismarckError(
            f"unit_rows is {rows}, and there is no privacy_unit",
            "name the column that says whose a row is, or leave out unit_rows",
        )
    if rows > 1 and samples:
        raise BismarckError(
            f'algorithm "{algorithm}" samples rows, and unit_rows is {rows}',
            "use an algorithm that does not sample, such as bolton or scs13, or unit_rows 1 if the owner said no more",
        )


def unit_params(options: Mapping[str, Any]) -> dict[str, Any]:
    """What reading a source needs to know; the seed is a test's."""
    unit = {"column": options["privacy_unit"], "rows": options["unit_rows"]}
    return {} if options["privacy_unit"] is None else {"unit": unit, "seed": options["seed"]}


def described(options: Mapping[str, Any]) -> str:
    """What the guarantee is for, in words."""
    if options["privacy_unit"] is None:
        return "row"
    rows = options["unit_rows"]
    return f"{options['privacy_unit']}, at most {rows} row{'s' if rows > 1 else ''}"


def slot_budget(epsilon: float, delta: float, rows: int) -> tuple[float, float]:
    """What may be spent on a slot, where units have so many: rounded down."""
    if rows == 1:
        return epsilon, delta
    each = epsilon / rows * (1 - SPARED)
    # expm1(each) / expm1(epsilon), of numbers that never overflow
    ratio = math.exp(each - epsilon) * (math.expm1(-each) / math.expm1(-epsilon))
    share = delta * ratio * (1 - SPARED)
    if each < SMALLEST or (delta > 0 and share < SMALLEST_DELTA):
        raise BismarckError(
            f"epsilon {epsilon:g} for {rows} rows leaves too little for each", "use a smaller unit_rows"
        )
    return each, share


def slot_spec(spec: Spec) -> Spec:
    """The spec that a plan for slots is made of."""
    if spec.epsilon is None:
        return spec
    epsilon, delta = slot_budget(spec.epsilon, spec.delta, spec.options["unit_rows"])
    return replace(spec, epsilon=epsilon, delta=delta)


def lifted(event: Event, rows: int) -> Event:
    """What an event of slots is for units that have so many; never cheaper than the truth."""
    if rows == 1 or isinstance(event, (NoOpDpEvent, NonPrivateDpEvent)):
        return event
    if isinstance(event, (GaussianDpEvent, LaplaceDpEvent)):
        return replace(event, noise_multiplier=event.noise_multiplier / rows * (1 - ROUNDING))
    if isinstance(event, ZCDpEvent):
        return ZCDpEvent(event.rho * rows**2 * (1 + ROUNDING))
    if isinstance(event, SelfComposedDpEvent):
        return replace(event, event=lifted(event.event, rows))
    if isinstance(event, ComposedDpEvent):
        return ComposedDpEvent(tuple(lifted(part, rows) for part in event.events))
    raise BismarckError(f"{type(event).__name__} has no bound here for several rows of a unit", "use unit_rows 1")


PER_SLOT = ("scale_epsilon", "selection_epsilon", "constants_epsilon")
"""Details of a plan that are pure epsilons: they add up."""


def _noise_for_units(noise: Noise, rows: int) -> Noise:
    rarity = noise.rarity - math.log(rows)
    return replace(noise, event=lifted(noise.event, rows), excess=noise.excess * rows, rarity=rarity)


def for_units(plan: Plan, spec: Spec) -> Plan:
    """The plan for slots, as it is for units; `spec` is what was asked for. Sensitivities are c times those of a slot,
    by the triangle inequality; noise stays what it is.
    """
    rows = spec.options["unit_rows"]
    if rows == 1 or spec.epsilon is None:
        return plan
    details = {
        name: value * rows if name in PER_SLOT and value is not None else value for name, value in plan.details.items()
    }
    return replace(
        plan,
        spec=replace(plan.spec, epsilon=spec.epsilon, delta=spec.delta),
        sensitivity=None if plan.sensitivity is None else plan.sensitivity * rows,
        noise=_noise_for_units(plan.noise, rows),
        details=details,
    )
