"""Tuning: split, train and hold every candidate, choose, register the winner. See bismarck_dp/tuning.py for the claims.

The controller knows what every candidate is, and nothing of how well one does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bismarck_dp.budget import Price, dearest, price_of_portions, price_of_trials
from bismarck_dp.errors import BismarckError
from bismarck_dp.plan import Plan
from bismarck_dp.scaling import measures
from bismarck_dp.sgd import replace_options
from bismarck_dp.spec import LONGEST_SHOWN, unknown
from bismarck_dp.stopping import Stopping, Trials, plan_trials
from bismarck_dp.tuning import (
    METHODS,
    SCORED,
    Candidate,
    check_errors,
    check_slots,
    coins_of,
    equal_sizes,
    held_bytes,
    judging,
    packing_of,
    portions_event,
    scored_sizes,
    scoring,
    selection,
    selection_epsilon,
    trial_plan,
)

from .engines import Engine, Packed, Portions, Request, Shape, Shelf
from .guard import Bill, Guard, check_paid, guard_of, refuse_protected
from .train import (
    Fitted,
    Progress,
    bill_for,
    check_names,
    fit,
    make_passes,
    model_row,
    prepared,
    priced,
    projection_seed,
    quiet,
    spec_of,
    warn_of,
)

FEWEST_TRIALS, MOST_TRIALS = 1.01, 10_000.0

LIKELY = 5.0
"""Standard deviations within which the sizes of portions are paid for."""

MOST_SPLITS, MOST_TOSSES = 5, 50
"""How often a source may change while it is read, and coins may divide it into portions that are too small."""

Planned = TypeVar("Planned")

PUBLIC = "tuned on {}, which is taken as public: that cost nothing, and says nothing of its rows' privacy"


@dataclass(frozen=True)
class Tuning:
    """What to tune on, and what to try. The request's spec is that of the first candidate."""

    request: Request
    candidates: list[Candidate]
    method: str = "portions"
    public_source: int | None = None
    trials: float = 10.0

    @classmethod
    def create(
        cls,
        request: Request,
        candidates: list[Candidate],
        method: Any = "portions",
        public_source: int | None = None,
        trials: Any = 10.0,
    ) -> Tuning:
        if method is None:
            raise BismarckError("method is NULL", f"it must be one of {', '.join(METHODS)}", "22004")
        if not isinstance(method, str) or method not in METHODS:
            raise unknown("method", method, METHODS)
        if public_source is not None and public_source == request.source:
            raise BismarckError(
                "public_source is the source itself", "name another table, or leave it out to tune privately"
            )
        if isinstance(trials, bool) or not isinstance(trials, (int, float)):
            raise BismarckError(f'trials is "{str(trials)[:LONGEST_SHOWN]}"', "it must be a number, for example 10")
        if method == "random_stopping":
            _check_stopping(request, candidates, public_source, float(trials))
        return cls(request, candidates, str(method), public_source, float(trials))

    def paid(self, price: Price | None) -> Tuning:
        return replace(self, request=replace(self.request, paid=price))

    def at(self, epsilon: float) -> Tuning:
        """The same tuning at another epsilon."""
        candidates = [replace(one, spec=replace(one.spec, epsilon=epsilon)) for one in self.candidates]
        return replace(self, request=replace(self.request, spec=candidates[0].spec), candidates=candidates)


def _check_stopping(request: Request, candidates: list[Candidate], public_source: int | None, trials: float) -> None:
    """Rows are packed once, before the first trial: what a trial would write, others could count."""
    if public_source is not None:
        raise BismarckError("random_stopping tunes on the source, and public_source is given", "leave one of them out")
    if request.spec.epsilon is None:
        raise BismarckError(
            f'algorithm "{request.spec.algorithm}" is not private, and random_stopping is about privacy',
            "use portions, which then takes the best candidate",
        )
    for candidate in candidates:
        if measures(candidate.spec) or candidate.spec.options["shuffle"] == "each_pass":
            what = "measure bounds" if measures(candidate.spec) else "shuffle rows"
            error = BismarckError(
                f"random_stopping packs rows once, and every trial would {what} anew",
                'give scale as numbers, leave out "shuffle": "each_pass", or use portions',
            )
            raise candidate.refusal(error)
    if not FEWEST_TRIALS <= trials <= MOST_TRIALS:
        raise BismarckError(f"trials is {trials:g}", f"it must be from {FEWEST_TRIALS:g} to {MOST_TRIALS:g} on average")


@dataclass(frozen=True)
class Winner:
    """A model that was chosen, with what its row says besides."""

    fitted: Fitted
    weights: list[float]
    notes: tuple[str, ...]
    paid: Price | None
    extra: dict[str, Any]


def tune(engine: Engine, tuning: Tuning, progress: Progress = quiet) -> dict[str, Any]:
    """Trains all candidates and registers one; returns its row."""
    started = time.monotonic()
    check_names(tuning.request)
    source = engine.check(tuning.request)
    guard = guard_of(engine, tuning.request)
    tuning, shape = _shaped(tuning, guard)
    tuner = TUNERS[tuning.method] if tuning.public_source is None else _on_public_rows
    winner = tuner(engine, tuning, shape, guard, progress)
    notes = (*winner.notes, *(shape.notes if winner.fitted.plan.private else ()))
    request = replace(tuning.request, paid=winner.paid)
    row = model_row(request, source, winner.fitted, shape, winner.weights, time.monotonic() - started)
    warn_of(engine, notes, tuning.request.spec)
    return engine.register({**row, "note": "; ".join(notes), **winner.extra})


def _shaped(tuning: Tuning, guard: Guard) -> tuple[Tuning, Shape]:
    """With the source's public shape, and the unit and the labels' coding that its owner has named."""
    request, shape = guard.shape(tuning.request)
    said = {name: request.spec.options[name] for name in ("classes", "privacy_unit", "unit_rows")}
    candidates = [replace(one, spec=replace_options(one.spec, said)) for one in tuning.candidates]
    check_slots(candidates[0].spec)
    return _prepared(replace(tuning, request=request, candidates=candidates), shape), shape


def _prepared(tuning: Tuning, shape: Shape) -> Tuning:
    """Every candidate with what follows from the source's public shape. All projections are made from one seed, so that
    candidates differ in what the grid says of them and not in their luck.
    """
    request, seed = tuning.request, projection_seed(tuning.request.spec)
    specs = [prepared(replace(request, spec=candidate.spec), shape, seed).spec for candidate in tuning.candidates]
    candidates = [replace(candidate, spec=spec) for candidate, spec in zip(tuning.candidates, specs)]
    return replace(tuning, request=replace(request, spec=specs[0]), candidates=candidates)


# ---- portions ----


def _by_portions(engine: Engine, tuning: Tuning, shape: Shape, guard: Guard, progress: Progress) -> Winner:
    count = len(tuning.candidates) + 1
    plans = _plans(engine, tuning, equal_sizes(shape.n, count), shape.d)
    _check_memory(engine, plans)
    tuning = tuning.paid(guard.pay(_bill(engine, tuning, shape, plans)))
    portions, plans = _split(engine, tuning, shape, plans)
    fitted = _hold_all(engine, tuning.request, plans, portions, list(range(len(plans))), progress)
    judged = judging([one.plan for one in fitted])
    place, weights = engine.choose(portions.tables[-1], _runs(fitted), {**judged, **selection(plans)})
    engine.drop_tables(portions.tables)
    facts = {
        "method": "portions",
        "candidates": len(plans),
        "portions": count,
        "rows": portions.rows,
        "selection_epsilon": selection_epsilon(tuning.request.spec),
    }
    extra = {"tuning": facts, "event": portions_event(plans).to_json()}
    return Winner(fitted[place], weights, fitted[place].plan.notes, tuning.request.paid, extra)


def _bill(engine: Engine, tuning: Tuning, shape: Shape, plans: list[Plan]) -> Bill:
    """All portions and the choice. Coins make portions of other sizes: the price is that of the dearest likely ones."""
    count, request = len(plans) + 1, tuning.request

    def plans_at(epsilon: float, sizes: list[int]) -> list[Plan]:
        if epsilon == request.spec.epsilon and sizes == [plan.n for plan in plans]:
            return plans
        return _plans(engine, tuning.at(epsilon), sizes, shape.d)

    def price_at(epsilon: float, order: float | None) -> Price:
        likely = [equal_sizes(shape.n, count)[:-1]]
        if request.spec.options["adjacency"] == "zero-out":
            spread = math.ceil(LIKELY * math.sqrt(shape.n / count))
            likely += [[max(1, size + by) for size in likely[0]] for by in (-spread, spread)]
        return dearest([price_of_portions(plans_at(epsilon, sizes), order) for sizes in likely])

    epsilon = priced(request.spec, plans)
    return Bill("tune", request.model, _asked(tuning), epsilon, request.spec.delta, price_at)


def _asked(tuning: Tuning) -> dict[str, Any]:
    """What was asked for, as the ledger keeps it: what all candidates are, and in what each differs."""
    specs = [spec_of(replace(tuning.request, spec=candidate.spec)) for candidate in tuning.candidates]
    options = [spec.pop("options") for spec in specs]
    same, grid = _shared(specs)
    same_options, grid_options = _shared(options)
    trials = {"trials": tuning.trials} if tuning.method == "random_stopping" else {}
    differs = [{**one, **others} for one, others in zip(grid, grid_options)]
    return {**same, "options": same_options, "method": tuning.method, **trials, "grid": differs}


def _shared(facts: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is the same in all, and the rest of each."""
    first, *others = facts
    shared = {name: value for name, value in first.items() if all(name in one and one[name] == value for one in others)}
    return shared, [{name: value for name, value in one.items() if name not in shared} for one in facts]


def _plans(engine: Engine, tuning: Tuning, sizes: list[int], d: int) -> list[Plan]:
    """Plans for portions of these sizes, before anything is split."""
    plans = [candidate.plan(size, d, engine.pulse) for candidate, size in zip(tuning.candidates, sizes)]
    check_errors(plans)
    engine.check_held(held_bytes(plans), len(plans))
    return plans


def _check_memory(engine: Engine, plans: Sequence[Plan]) -> None:
    """Before anything is paid."""
    for plan in plans:
        engine.check_memory(plan)


def _plan(engine: Engine, candidate: Candidate, plan: Plan, size: int) -> Plan:
    """The plan for the rows that a portion has: their number is made of coins and n, whatever the values."""
    return plan if plan.n == size else candidate.plan(size, plan.d, engine.pulse)


def _split(engine: Engine, tuning: Tuning, shape: Shape, plans: list[Plan]) -> tuple[Portions, list[Plan]]:
    """Equal portions, or, where a row's portion must not depend on other rows, equal chances; and plans for them."""
    count, request = len(plans) + 1, tuning.request

    def plans_for(portions: Portions) -> list[Plan]:
        found = [_plan(engine, *known) for known in zip(tuning.candidates, plans, portions.sizes)]
        check_paid(request, lambda order: price_of_portions(found, order))
        return found

    if request.spec.options["adjacency"] == "zero-out":
        return _split_by_coins(engine, request, shape.d, [1] * count, plans_for)
    portions = _split_fixed(engine, request, shape, lambda n: equal_sizes(n, count))
    return portions, plans_for(portions)


def _split_by_coins(
    engine: Engine, request: Request, d: int, shares: list[int], plan_for: Callable[[Portions], Planned]
) -> tuple[Portions, Planned]:
    """Portions with these chances, and the plans for them. Of few rows some may come out too small to train on: then
    coins are tossed again. Whether they are depends on sizes, which are made of coins and n, so the claim holds for the
    partition that is left as it does for every other.
    """
    portions = engine.split(request, d, shares, fixed=False)
    for _ in range(MOST_TOSSES):
        if min(portions.sizes) > 0:
            with suppress(BismarckError):  # of one portion; said below, of all of them
                return portions, plan_for(portions)
        portions = engine.split_again(request, portions, d, shares, fixed=False)
    raise BismarckError(
        f"portions of {portions.rows} rows, as coins divide them, are too small to train on",
        'use fewer candidates, a smaller batch_size, or "adjacency": "replace", whose portions have fixed sizes',
    )


def _split_fixed(engine: Engine, request: Request, shape: Shape, sizes_of: Callable[[int], list[int]]) -> Portions:
    """Portions of sizes that follow from the number of rows. If rows came or went since they were counted, begins
    again for as many as there were: n is public.
    """
    sizes = sizes_of(shape.n)
    portions = engine.split(request, shape.d, sizes, fixed=True)
    for _ in range(MOST_SPLITS):
        if portions.rows == sum(sizes):
            return portions
        sizes = sizes_of(portions.rows)
        portions = engine.split_again(request, portions, shape.d, sizes, fixed=True)
    raise BismarckError(
        "the source has another number of rows whenever it is read", "tune on a table that nobody writes to", "55006"
    )


def _hold_all(
    engine: Engine, request: Request, plans: list[Plan], portions: Portions, places: list[int], progress: Progress
) -> list[Fitted]:
    """Trains every candidate on its portion, one after the other; their weights stay in the server's memory."""
    shelf: Shelf = {}
    total, done, fitted = sum(plan.schedule.passes for plan in plans), 0, []
    for plan, place in zip(plans, places):
        fitted.append(_hold(engine, request, plan, portions, place, _after(progress, done, total), shelf))
        done += plan.schedule.passes
    engine.drop_tables(_on_shelf(shelf))
    return fitted


def _hold(
    engine: Engine, request: Request, plan: Plan, portions: Portions, place: int, progress: Progress, shelf: Shelf
) -> Fitted:
    one = fit(engine, engine.portion(request, portions, place, plan.spec), plan, progress, shelf)
    engine.hold(one.packed, one.plan)
    engine.shelve(one.packed, one.plan, shelf)
    return one


def _on_shelf(shelf: Shelf) -> list[str]:
    return [table for tables in shelf.values() for table in tables]


def _after(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, planned: progress(before + done, total)


def _runs(fitted: list[Fitted]) -> list[int]:
    return [one.packed.run for one in fitted]


# ---- a public table ----


def _on_public_rows(engine: Engine, tuning: Tuning, shape: Shape, guard: Guard, progress: Progress) -> Winner:
    """One half of the public table to train on, the other to count errors on; then the winner, on the source."""
    assert tuning.public_source is not None
    refuse_protected(engine, tuning.public_source, "public_source")
    request = _without_unit(replace(tuning.request, source=tuning.public_source))
    name, public = engine.source_facts(request)["name"], engine.describe(request)
    if public.d != shape.d:
        raise BismarckError(f"{name} has {public.d} features, and the source {shape.d}", "they must be the same")
    final = _plans(engine, tuning, [shape.n] * len(tuning.candidates), shape.d)
    halves = equal_sizes(public.n, 2)
    plans = _plans(engine, tuning, [halves[0]] * len(tuning.candidates), shape.d)
    portions = _split_fixed(engine, request, public, lambda n: equal_sizes(n, 2))
    plans = [_plan(engine, candidate, plan, portions.sizes[0]) for candidate, plan in zip(tuning.candidates, plans)]
    fitted = _hold_all(engine, request, plans, portions, [0] * len(plans), progress)
    judged = judging([one.plan for one in fitted])
    place, _ = engine.choose(portions.tables[1], _runs(fitted), {**judged, "public": True})
    engine.drop_tables(portions.tables)
    chosen = replace(tuning.request, spec=tuning.candidates[place].spec)
    engine.check_memory(final[place])
    chosen = replace(chosen, paid=guard.pay(bill_for(engine, "tune", chosen, final[place])))
    one = fit(engine, chosen, final[place], progress)
    weights = engine.release(one.packed, one.plan)
    engine.drop(one.packed)
    facts = {"method": "public", "candidates": len(plans), "rows": portions.rows, "public_source": name, "cost": 0}
    return Winner(one, weights, (*one.plan.notes, PUBLIC.format(name)), chosen.paid, {"tuning": facts})


def _without_unit(request: Request) -> Request:
    """Public rows need no limit, and may have no such column."""
    return replace(request, spec=replace_options(request.spec, {"privacy_unit": None, "unit_rows": 1}))


# ---- random stopping ----


def _by_random_stopping(engine: Engine, tuning: Tuning, shape: Shape, guard: Guard, progress: Progress) -> Winner:
    """Trials on four fifths of the rows, scores on the others. Nobody is told how many trials there are, so there is no
    progress to see, and a model says how long its own trial took. A trial writes nothing: rows are packed before, once
    for all candidates that want them packed alike. (Transactions are numbered when they write, as are runs, and anyone
    may count them. That trials see rows in one order is no matter: what is claimed holds for every order.)
    """
    stopping = Stopping(tuning.trials)
    whole = _plans(engine, tuning, [scored_sizes(shape.n)[0]] * len(tuning.candidates), shape.d)
    tuning, portions, planned = _planned_trials(engine, tuning, shape, guard, stopping)
    coins = coins_of(tuning.request.spec)
    count = stopping.draw(coins.getrandbits)
    best, run, made = engine.next_run(), engine.next_run(), []
    _check_memory(engine, planned.plans)  # of the rows there are
    packed = [_packed(engine, tuning.request, plan, portions) for plan in _packings(planned.plans).values()]
    copies = dict(zip(_packings(planned.plans), packed))
    for trial in range(count if planned.base.delta == 0 else min(count, planned.most)):
        place, started = coins.randrange(len(planned.plans)), time.monotonic()
        plan = planned.plans[place]
        copy = replace(copies[packing_of(plan)], run=run)
        one = make_passes(engine, copy, trial_plan(plan, trial))
        engine.hold(one.packed, one.plan)
        engine.score(portions.tables[1], one.packed.run, best, scoring(one.plan, planned.score, trial))
        made.append((place, one, time.monotonic() - started))
    trial, weights = engine.winner(best)
    engine.drop_tables([*portions.tables, *(table for copy in packed for table in copy.tables)])
    place, one, seconds = made[trial]
    facts = {
        "method": "random_stopping",
        "candidates": len(tuning.candidates),
        "rows": portions.rows,
        "trials": stopping.mean,
        "shape": stopping.shape,
        "trial_epsilon": planned.base.epsilon,
        "trial_delta": planned.base.delta,
        "score_mechanism": planned.score.mechanism,
        "score_scale": planned.score.scale / planned.score.unit,
    }
    spec = tuning.request.spec
    totals = {"epsilon": spec.epsilon, "delta": spec.delta, "event": planned.event.to_json()}
    return Winner(
        one, weights, whole[place].notes, tuning.request.paid, {"tuning": facts, **totals, "seconds": seconds}
    )


def _packings(plans: tuple[Plan, ...]) -> dict[str, Plan]:
    """The ways in which candidates want rows packed, and a plan for each."""
    return {packing_of(plan): plan for plan in plans}


def _packed(engine: Engine, request: Request, plan: Plan, portions: Portions) -> Packed:
    return engine.pack(engine.portion(request, portions, 0, plan.spec), plan)


def _planned_trials(
    engine: Engine, tuning: Tuning, shape: Shape, guard: Guard, stopping: Stopping
) -> tuple[Tuning, Portions, Trials]:
    """Planned and paid before the rows are split, and planned once more if the portions have other sizes."""
    sizes = scored_sizes(shape.n)

    def planned_at(tuning: Tuning, sizes: list[int]) -> Trials:
        specs = [candidate.spec for candidate in tuning.candidates]
        return plan_trials(specs, sizes[0], shape.d, sizes[1], stopping, engine.pulse)

    planned = planned_at(tuning, sizes)
    budget = (tuning.request.spec.epsilon or 0.0, tuning.request.spec.delta)
    _check_memory(engine, planned.plans)
    tuning = tuning.paid(guard.pay(_bill_of_trials(tuning, shape, planned, planned_at)))
    request = tuning.request

    def planned_for(portions: Portions) -> Trials:
        found = planned if portions.sizes == sizes else planned_at(tuning, portions.sizes)
        check_paid(request, lambda order: price_of_trials(found, order, *budget))
        return found

    if request.spec.options["adjacency"] == "zero-out":
        return tuning, *_split_by_coins(engine, request, shape.d, SCORED, planned_for)
    portions = _split_fixed(engine, request, shape, scored_sizes)
    return tuning, portions, planned_for(portions)


def _bill_of_trials(
    tuning: Tuning, shape: Shape, planned: Trials, planned_at: Callable[[Tuning, list[int]], Trials]
) -> Bill:
    """All trials; with coins, at the dearest likely sizes. Planning takes seconds: no epsilon that fits is sought."""
    spec, sizes = tuning.request.spec, scored_sizes(shape.n)

    def price_at(epsilon: float, order: float | None) -> Price:
        likely = [planned if epsilon == spec.epsilon else planned_at(tuning.at(epsilon), sizes)]
        if spec.options["adjacency"] == "zero-out":
            spread = math.ceil(LIKELY * math.sqrt(min(sizes)))
            others = [[sizes[0] + by, max(1, sizes[1] - by)] for by in (-spread, spread)]
            likely += [planned_at(tuning.at(epsilon), other) for other in others if min(other) > 0]
        return dearest([price_of_trials(one, order, epsilon, spec.delta) for one in likely])

    epsilon = spec.epsilon if all(plan.private for plan in planned.plans) else None
    return Bill("tune", tuning.request.model, _asked(tuning), epsilon, spec.delta, price_at, quick=False)


TUNERS: dict[str, Callable[[Engine, Tuning, Shape, Guard, Progress], Winner]] = {
    "portions": _by_portions,
    "random_stopping": _by_random_stopping,
}
