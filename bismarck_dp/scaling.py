"""Bounds of features, measured privately: for each feature a quantile of its magnitudes, by the exponential mechanism.

The candidates are powers of two in a public range. A candidate c scores minus how far the number of rows with
|x_j| <= c is from q n:

    score(c) = -| #{i: |x_ij| <= c} - ceil(q n) |,      chosen with probability proportional to exp(e score / 2) / 2^i

for the i-th candidate from below. The factor 1 / 2^i does not depend on rows: of candidates that are larger than all
rows, which all score the same, it takes one of the first. Where e q n / 2 is less than the log of all these factors a
bound may be far too small, and the plan says so (`notes`).

Claim: choosing a bound for each of m features costs m e, and is paid for out of epsilon: e = share epsilon / m.
Proof: replacing a row, or turning it into one that counts for nothing, moves each count by at most 1, and so each
score; hence the choice is e-DP (McSherry and Talwar 2007, with a measure of their own on the candidates, and half the
exponent since scores go both ways). m choices and the training compose: (m e + epsilon', delta), with epsilon' = (1 -
share) epsilon what the training is planned for. The training itself asks nothing of the bounds: rows are cut after they
were scaled.

A choice that is e-DP is dominated by Laplace noise of scale 1 / e (`calibrators.PureSum`), and is stored as that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .accounting import ComposedDpEvent, Event, LaplaceDpEvent, SelfComposedDpEvent
from .errors import BismarckError
from .plan import Plan
from .spec import Spec, unknown
from .units import slot_spec

EXPONENTS = 2**20
"""Steps of a choice's epsilon, which is rounded down."""


MOST_EPSILON = 64.0
"""Of a choice; more would hardly change it, and products with scores would not fit 64 bits."""

MOST_ROWS = 2**35


def measures(spec: Spec) -> bool:
    return bool(spec.options["scale"] == "quantile")


def features_measured(spec: Spec, d: int) -> int:
    """Those that are numbers: zeros and ones of categories have a bound."""
    return d - sum(len(values) for values in (spec.options["categories"] or {}).values())


def training_spec(spec: Spec) -> Spec:
    """What is left for the training."""
    if spec.epsilon is None:
        return spec
    return replace(spec, epsilon=spec.epsilon * (1 - spec.options["private_scale"]))


def with_measuring(plan: Plan, spec: Spec) -> Plan:
    """The plan of the training, with what measuring costs beside it; spec is what was asked for."""
    count = features_measured(spec, plan.d)
    asked = replace(plan.spec, epsilon=spec.epsilon)
    if spec.epsilon is None or count == 0:
        return replace(plan, spec=asked)
    each = LaplaceDpEvent(1 / (spec.epsilon * spec.options["private_scale"] / count))
    choices: Event = each if count == 1 else SelfComposedDpEvent(each, count)
    noise = replace(
        plan.noise,
        event=ComposedDpEvent((plan.noise.event, choices)),
        accountant=plan.noise.accountant if plan.noise.accountant == "pure" else f"{plan.noise.accountant}+pure",
    )
    details = {**plan.details, "scale_epsilon": spec.epsilon * spec.options["private_scale"]}
    return replace(plan, spec=asked, noise=noise, details=details)


def exponents(spec: Spec) -> tuple[int, int]:
    """The powers of two that lie in the range, as exponents."""
    low, high = spec.options["scale_range"]
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    if first > last:
        raise BismarckError(f"there is no power of two from {low:g} to {high:g}", "make scale_range wider")
    return first, last


def counted_bytes(plan: Plan) -> int:
    """Memory of the counts: for each feature, of rows by candidate and beyond all."""
    first, last = exponents(plan.spec)
    return 8 * plan.d * (last - first + 2)


def notes(plan: Plan) -> list[str]:
    """What a reader should know of the bounds: where rows or epsilon are too few to tell candidates apart."""
    spec, count = slot_spec(plan.spec), features_measured(plan.spec, plan.d)
    if not measures(spec) or spec.epsilon is None or count == 0:
        return []
    first, last = exponents(spec)
    each = spec.epsilon * spec.options["private_scale"] / count
    if each * spec.options["quantile"] * plan.n / 2 >= math.log(2) * (last - first + 1):
        return []
    return [f"epsilon {each:.3g} for each feature's bound tells little of {plan.n} rows: give scale as numbers"]


def scales_by_column(
    given: Mapping[str, float], features: Sequence[str], categories: Mapping[str, Sequence[Any]]
) -> list[float]:
    """A bound for each feature, of those given by column; zeros and ones of categories need none."""
    for column in given:
        if column not in features or column in categories:
            raise unknown("column in scale", column, [name for name in features if name not in categories])
    scales: list[float] = []
    for column in features:
        if column not in categories and column not in given:
            raise BismarckError(f'scale has no bound for column "{column}"', "give one for each column of numbers")
        scales += [1.0] * len(categories[column]) if column in categories else [given[column]]
    return scales


def coded_features(spec: Spec, features: Sequence[str]) -> list[int]:
    """The places of zeros and ones of categories among the features of these columns."""
    lists, place = spec.options["categories"] or {}, 0
    coded: list[int] = []
    for name in features if lists else ():
        width = len(lists[name]) if name in lists else 1
        coded += range(place, place + width) if name in lists else []
        place += width
    return coded


def measure_params(plan: Plan, features: Sequence[str] = ()) -> dict[str, Any]:
    """What the server reads: half of e, the exponent's factor, as a fraction that is never more; none where nothing is
    promised, and then the best score is taken.
    """
    spec = slot_spec(plan.spec)
    first, last = exponents(spec)
    if plan.n > MOST_ROWS:
        raise BismarckError(f"{plan.n} rows are too many to measure quantiles of", "give scale as numbers")
    numerator = 0
    if spec.epsilon is not None and (count := features_measured(spec, plan.d)) > 0:
        each = min(spec.epsilon * spec.options["private_scale"] / count, MOST_EPSILON)
        numerator = math.floor(each * EXPONENTS)
    return {
        "n": plan.n,
        "d": plan.d,
        "categories": spec.options["categories"],
        "coded": coded_features(spec, features),
        "rank": math.ceil(spec.options["quantile"] * plan.n),
        "first": first,
        "last": last,
        "private": spec.epsilon is not None,
        "numerator": numerator,
        "denominator": 2 * EXPONENTS,
        "prior": round(math.log(2) * 2 * EXPONENTS),
        "seed": spec.options["seed"],
    }


def with_bounds(plan: Plan, bounds: list[float]) -> Plan:
    """The plan with its features' bounds: the release depends on them, the promise does not."""
    return replace(plan, spec=replace(plan.spec, options={**plan.spec.options, "scale": bounds}))
