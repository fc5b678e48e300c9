"""Private tuning: many candidates, of which one is released.

Portions (Wu et al. 2017, Algorithm 3). The rows are split into l + 1 portions. Candidate i is trained on portion i,
with all of epsilon and delta. On the last portion, which no candidate was trained on, the errors k_i of each are
counted, and candidate i is released with probability proportional to exp(-epsilon k_i / 2).

Claim: what is released, the winner's options and its weights, is (epsilon, delta)-DP under the chosen adjacency: the
epsilon and delta of one candidate, however many there are. Proof. Which portion a row comes to is drawn from coins and
the number of rows, before its values are looked at; so it is enough to prove the claim for every partition. Fix one.
Two neighbouring tables differ in one row, which is in one portion. If that is portion i, then w_i is (epsilon,
delta)-DP by the claim of its algorithm for the rows of that portion, whose number is public as n is; the other models
and the rows of the last portion are the same in both tables, and the winner is made of them and w_i, without another
look at portion i. If it is the last portion, all models are the same in both, and the counts k_i, as functions of the
portion, each move by at most 1: a row adds 0 or 1 to each (0 if it counts for nothing). The choice is the exponential
mechanism on -k_i of sensitivity 1, which is epsilon-DP (McSherry and Talwar 2007), and the weights of the one that is
chosen do not depend on the row. QED

The choice is exact: counts are whole numbers, epsilon is rounded down to a multiple of 2^-40, and the sampler uses
fair coins alone (`dp_exponential_choice`). For regression an error is min(1, (z - y)^2 / B^2) with B twice the label
bound, in whole units of 2^-20: a row adds at most 2^20 units, and the exponent is divided by as many.

As an event it is the worst of the candidates' events and a Laplace mechanism's of noise 1 / epsilon. An exponential
mechanism of epsilon has bounded range: the loss ln(P/Q) takes values in an interval of length epsilon around 0. The
worst such pair has two outcomes, of losses t and t - epsilon for a t in [0, epsilon] (Dong, Durfee and Rogers 2020);
its trade-off curve has one corner, and that of the Laplace mechanism is nowhere above it.

Random stopping is planned and proven in `stopping`. Its trials are trained on four fifths of the rows and scored on the
others, which are split as portions are. A trial's number, its candidate and its score are drawn from coins of the
operating system and the models' own noise; what is stored does not depend on how many trials there were.

A public table. The candidates are trained on one half of a table that the caller takes as public, with the noise that
they take for so many rows, and the one with the fewest errors on the other half is trained on the source with all of
epsilon and delta. Claim: as for that candidate alone. Proof: of the source, the choice knows n, d and how labels are
written, which are public; the rest is the claim of the algorithm. It is nobody's claim but the caller's that the table
is public.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .accounting import Event, LaplaceDpEvent, NonPrivateDpEvent, ParallelDpEvent
from .errors import BismarckError
from .losses import LOSSES
from .plan import Plan
from .sensitivity import Pulse
from .sgd import replace_options
from .solvers import SOLVERS, make_plan
from .spec import LONGEST_SHOWN, Spec, refuse, unknown
from .stopping import ScoreNoise

METHODS = ("portions", "random_stopping")

FIXED = (
    "epsilon",
    "delta",
    "seed",
    "adjacency",
    "privacy_unit",
    "unit_rows",
    "classes",
    "label_bound",
    "categories",
)
"""What is the same for all candidates: the claim, and what a label or a column means."""

MOST_CANDIDATES = 1000

EXAMPLE = '{"lambda": [0.001, 0.01], "epochs": [5, 10]}'

EXPONENTS = 2**40
"""Steps of the choice's epsilon, which is rounded down."""

MOST_SELECTION = 2.0**20
"""An epsilon beyond which the choice is as good as certain."""

UNITS = 2**20
"""Of an error that is not a whole number."""


@dataclass(frozen=True)
class Candidate:
    number: int
    """from 1"""
    settings: dict[str, Any]
    """what the grid says of it"""
    spec: Spec

    def plan(self, n: int, d: int, pulse: Pulse = lambda: None) -> Plan:
        """The plan for a portion of n rows; a refusal names the candidate."""
        try:
            return make_plan(self.spec, n, d, pulse)
        except BismarckError as error:
            raise self.refusal(error) from error

    def refusal(self, error: BismarckError) -> BismarckError:
        return _refusal(self.number, self.settings, error)


def _refusal(number: int, settings: Mapping[str, Any], error: BismarckError) -> BismarckError:
    shown = json.dumps(settings, default=str)
    if len(shown) > LONGEST_SHOWN:
        shown = shown[:LONGEST_SHOWN] + "…"
    return BismarckError(f"candidate {number} {shown}: {error.message}", error.hint, error.sqlstate)


# ---- candidates ----


def make_candidates(
    grid: Any,
    algorithm: str = "bolton",
    loss: str = "logistic",
    epsilon: float | None = None,
    delta: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """All candidates of a grid, each checked as a spec of its own; the grid's words come before the arguments'."""
    if options is not None and not isinstance(options, Mapping):
        raise refuse("options", options, 'an object, for example {"epochs": 10}')
    settings = _settings(grid)
    for name in sorted({key for one in settings for key in one}):
        _check_key(name, options or {})
    made = []
    for number, one in enumerate(settings, 1):
        try:
            words = {"algorithm": algorithm, "loss": loss, **_words(one)}
            rest = {name: value for name, value in one.items() if name not in words}
            spec = Spec.create(words["algorithm"], words["loss"], epsilon, delta, {**(options or {}), **rest})
        except BismarckError as error:
            raise _refusal(number, one, error) from error
        made.append(Candidate(number, one, _with_seed(spec, number)))
    _check_losses(made)
    check_slots(made[0].spec)
    return made


def _settings(grid: Any) -> list[dict[str, Any]]:
    if grid is None:
        raise BismarckError("grid is NULL", f"say what to try, for example {EXAMPLE}", "22004")
    found = _combinations(grid) if isinstance(grid, Mapping) else grid
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, Mapping) for one in found):
        raise BismarckError(
            "grid is neither an object of lists nor a list of objects",
            f'for example {EXAMPLE}, or [{{"lambda": 0.01}}, {{"algorithm": "dpsgd"}}]',
        )
    if not found:
        raise BismarckError("the grid has no candidates", f"say what to try, for example {EXAMPLE}")
    if len(found) > MOST_CANDIDATES:
        raise _too_many(len(found))
    return [dict(one) for one in found]


def _too_many(count: int) -> BismarckError:
    return BismarckError(f"the grid has {count} candidates", f"use at most {MOST_CANDIDATES}")


def _combinations(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    for name, values in grid.items():
        if not isinstance(values, (list, tuple)) or not values:
            raise BismarckError(
                f'"{str(name)[:LONGEST_SHOWN]}" of the grid has no list of values', f"for example {EXAMPLE}"
            )
    if (count := math.prod(len(values) for values in grid.values())) > MOST_CANDIDATES:
        raise _too_many(count)
    # In the order of names, which is not lost on the way through jsonb.
    names = sorted(grid)
    return [dict(zip(names, values)) for values in product(*(grid[name] for name in names))] if grid else []


def _check_key(name: str, options: Mapping[str, Any]) -> None:
    if name in FIXED:
        how = "an argument" if name in ("epsilon", "delta") else "an option"
        raise BismarckError(f'"{name}" is the same for all candidates', f"pass it as {how}, not in the grid")
    if name in options or {name, *options} >= {"lambda", "lambda_"}:
        raise BismarckError(f'"{name}" is an option and in the grid', "give it once")


def _words(one: Mapping[str, Any]) -> dict[str, str]:
    """Algorithm and loss, where a candidate has its own."""
    words = {name: one[name] for name in ("algorithm", "loss") if name in one}
    for name, known in (("algorithm", SOLVERS), ("loss", LOSSES)):
        if name in words and not isinstance(words[name], str):
            raise unknown(name, words[name], known)
    return words


def _with_seed(spec: Spec, number: int) -> Spec:
    """In a test: another seed for each, or else all would have the same noise."""
    seed = spec.options["seed"]
    return spec if seed is None else replace_options(spec, {"seed": seed + number})


def check_slots(spec: Spec) -> None:
    """One slot is in one portion; several of a unit may be in any."""
    if (rows := spec.options["unit_rows"]) > 1:
        raise BismarckError(
            f"tuning divides rows into portions, and unit_rows is {rows}",
            "several rows of a unit would lie in several portions: use unit_rows 1, or dp_train if the owner said more",
        )


def _check_losses(candidates: list[Candidate]) -> None:
    kinds = {LOSSES[candidate.spec.loss].classification for candidate in candidates}
    if len(kinds) > 1:
        raise BismarckError(
            "the grid mixes losses for classes with the squared loss", "their errors cannot be compared"
        )


# ---- portions ----


def equal_sizes(n: int, portions: int) -> list[int]:
    if n < portions:
        raise BismarckError(
            f"{n} rows cannot be split into {portions} portions", "use fewer candidates, or a table with more rows"
        )
    return [n // portions + (i < n % portions) for i in range(portions)]


def check_errors(plans: list[Plan]) -> None:
    """Errors of a regression are counted in shares of a bound, which is the same for all."""
    bounds = {plan.spec.options["label_bound"] for plan in plans if not LOSSES[plan.spec.loss].classification}
    if any(bound is None or math.isinf(bound) for bound in bounds):
        raise BismarckError(
            "candidates of a regression are compared by errors up to a bound, and label_bound is not given",
            'pass it as an option, for example {"label_bound": 1}',
        )
    if len(bounds) > 1:
        raise BismarckError("candidates have label bounds of their own", "pass label_bound as an option")


def units(plans: list[Plan]) -> int:
    return 1 if LOSSES[plans[0].spec.loss].classification else UNITS


def judging(plans: list[Plan]) -> dict[str, Any]:
    """What counting errors reads: how each model has rows and labels written."""
    return {"d": plans[0].d, "units": units(plans), "codings": [plan.pack_params() for plan in plans]}


def selection_epsilon(spec: Spec) -> float | None:
    return None if spec.epsilon is None else min(spec.epsilon, MOST_SELECTION)


def selection(plans: list[Plan]) -> dict[str, Any]:
    """What the choice reads: the exponent of one unit, as a fraction."""
    epsilon = selection_epsilon(plans[0].spec)
    if epsilon is None:
        return {"numerator": None, "public": False, "seed": None}
    return {
        "numerator": math.floor(epsilon * EXPONENTS),
        "denominator": 2 * EXPONENTS * units(plans),
        "seed": plans[0].spec.options["seed"],
    }


def portions_event(plans: list[Plan]) -> Event:
    """Of all candidates and the choice: a row is in one portion."""
    epsilon = selection_epsilon(plans[0].spec)
    if epsilon is None or not all(plan.private for plan in plans):
        return NonPrivateDpEvent()
    return ParallelDpEvent((*dict.fromkeys(plan.event for plan in plans), LaplaceDpEvent(1 / epsilon)))


# ---- random stopping ----


SCORED = [4, 1]
"""Shares of the rows that models are trained on, and scored on."""


def scored_sizes(n: int) -> list[int]:
    scored = n * SCORED[1] // sum(SCORED)
    if scored < 1:
        raise BismarckError(f"{n} rows are too few to train on some and score on others", f"use {sum(SCORED)} or more")
    return [n - scored, scored]


def coins_of(spec: Spec) -> random.Random:
    """What trials are drawn from: the operating system, or a test's seed."""
    seed = spec.options["seed"]
    return random.SystemRandom() if seed is None else random.Random(seed)


def packing_of(plan: Plan) -> str:
    """How rows are packed for a plan: plans that agree in it can share a copy."""
    return json.dumps([plan.layout, plan.schedule.workers, plan.pack_params()], sort_keys=True)


def trial_plan(plan: Plan, trial: int) -> Plan:
    """In a test: another seed for each trial."""
    return replace(plan, spec=_with_seed(plan.spec, trial))


def scoring(plan: Plan, noise: ScoreNoise, trial: int) -> dict[str, Any]:
    """What a trial's score reads: as many units for an error as its noise is counted in."""
    drawn = {"mechanism": noise.mechanism, "scale": noise.scale, "seed": plan.spec.options["seed"]}
    return {**judging([plan]), "units": noise.unit, "trial": trial, **drawn}


def held_bytes(plans: list[Plan]) -> int:
    """Memory of all models together, while they wait, and of the matrices that their rows are projected with."""
    options = [plan.spec.options for plan in plans]
    matrices = {(one["project_dim"] or 0, one["project_seed"]) for one in options}
    return sum(8 * plan.width for plan in plans) + sum(8 * plans[0].d * p for p, _ in matrices)
