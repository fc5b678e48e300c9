"""What one row can do to a tuning: with known coins every step is done again in NumPy; laws are held against counts.

A tuning with a seed is played again from its parts: the partition, the models as dp_train makes them of a portion's
rows, errors in NumPy, and the choice from the same random words. If all of it agrees, then the claim can be checked on
neighbouring tables exactly, outcome by outcome, without a sample.
"""

from __future__ import annotations

import ctypes
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import kernels
import numpy as np
import pytest
from conftest import two_classes
from statistics_of import check_binomial, check_frequencies
from test_tune import contents, opened, shifted

from bismarck_dp import Model, Plan
from bismarck_dp.accounting import Event, epsilon_of
from bismarck_dp.choices import Exact
from bismarck_dp.controller import queries, tune
from bismarck_dp.controller.database import Database
from bismarck_dp.controller.engines import Request
from bismarck_dp.controller.evaluate import evaluate
from bismarck_dp.losses import LOSSES
from bismarck_dp.reference import pack
from bismarck_dp.solvers import make_plan
from bismarck_dp.spec import Spec
from bismarck_dp.stopping import Stopping, plan_trials
from bismarck_dp.tuning import UNITS, Candidate, equal_sizes, make_candidates, portions_event, selection

PORTIONS, WINNER, SCORE = 33 << 33, 35 << 33, 37 << 33
"""The streams of udf/bismarck_dp.h."""

SEEDS = range(6)


def words(seed: int, stream: int) -> Iterator[int]:
    generator = kernels.Random.start(seed.to_bytes(8, "little") + bytes(24), stream)
    draw = kernels.library.dp_random_u32
    draw.restype = ctypes.c_uint32
    while True:
        yield int(draw(ctypes.byref(generator)))


# ---- a tuning, played again ----


def drawn_portions(n: int, shares: list[int], fixed: bool, seed: int) -> list[int]:
    """The portion of every row, in the order of the table."""
    coins, left, places = Exact(words(seed, PORTIONS)), list(shares), []
    for _ in range(n):
        at = coins.below(sum(left))
        place = int(np.searchsorted(np.cumsum(left), at, side="right"))
        places.append(place)
        left[place] -= fixed
    return places


def errors(model: Any, plan: Plan, part: Any) -> tuple[float, Any]:
    """The number of errors of weights on raw rows, in NumPy, and those of each row."""
    features, labels = pack(part[:, 1:], part[:, 0], plan)
    z = features.astype(np.float64) @ model
    if LOSSES[plan.spec.loss].classification:
        each = (labels != 0) & (np.where(z > 0, 1, -1) != labels)
        return float(each.sum()), each
    bad = ~np.isfinite(part).all(axis=1)
    share = (z - labels) / (2 * plan.spec.options["label_bound"])
    each = np.where(bad, 0, np.floor(np.minimum(1, share**2) * UNITS))
    return float(each.sum()), each


def weights_of(model: Model) -> Any:
    return np.concatenate([model.weights, model.intercept])


def trained(db: Database, table: Any, part: Any, spec: Spec, **more: Any) -> Any:
    """The weights that dp_train makes of a portion's rows, which come in the same order."""
    return weights_of(trained_model(db, table, part, spec, **more))


def trained_model(db: Database, table: Any, part: Any, spec: Spec, **more: Any) -> Model:
    rows = table(part[:, 1:], part[:, 0], dtype="float8")
    plain = Spec.create(spec.algorithm, spec.loss, spec.epsilon).options
    given = {name: value for name, value in spec.options.items() if value != plain[name]}
    if LOSSES[spec.loss].classification and "classes" not in given:
        given["classes"] = [-1, 1]  # a few rows may not look binary
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = db.train(
            rows.name,
            epsilon=spec.epsilon,
            delta=spec.delta,
            algorithm=spec.algorithm,
            loss=spec.loss,
            **{**given, **more},
        )
    db.forget(model.name)
    return model


@dataclass(frozen=True)
class Replay:
    parts: list[Any]
    weights: list[Any]
    counts: Any
    probabilities: Any
    place: int


def replay(db: Database, table: Any, rows: Any, candidates: list[Candidate], seed: int, d: int) -> Replay:
    n, count = len(rows.y), len(candidates) + 1
    spec = candidates[0].spec
    fixed = spec.options["adjacency"] == "replace"
    with opened(db, rows.name) as (engine, request):
        request = Request(request.source, "m", "y", ["x"], spec)
        portions = engine.split(request, d, equal_sizes(n, count) if fixed else [1] * count, fixed)
        parts = contents(engine, portions, d)
    plans = [candidate.plan(len(part), d) for candidate, part in zip(candidates, parts)]
    weights = [trained(db, table, part, candidate.spec) for candidate, part in zip(candidates, parts)]
    counts = np.array([errors(w, plan, parts[-1])[0] for w, plan in zip(weights, plans)], dtype=np.int64)
    drawn = selection(plans)
    place = Exact(words(seed + 1, WINNER)).choose(-counts, drawn["numerator"], drawn["denominator"])
    odds = np.exp(-(counts - counts.min()) * (drawn["numerator"] / drawn["denominator"]))
    return Replay(parts, weights, counts, odds / odds.sum(), place)


def tuned(db: Database, name: str, **how: Any) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return db.tune(name, **how)


GRID = [{"epochs": 3, "lambda": 0.1}, {"algorithm": "dpsgd", "epochs": 1}, {"fit_intercept": True, "scale": 0.5}]
BUDGET = {"epsilon": 1.0, "delta": 1e-3}


def spoiled(n: int, d: int, seed: int) -> tuple[Any, Any]:
    """Two classes, with rows that count for nothing among them."""
    x, y = two_classes(n, d, seed)
    x[3], x[7, 0], y[11] = np.nan, np.inf, 7.0
    return x, y


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tuning_is_what_its_parts_make(db: Database, table: Any, seed: int, adjacency: str) -> None:
    rows = table(*spoiled(81, 2, seed))
    options = {"seed": seed, "adjacency": adjacency}
    candidates = make_candidates(GRID, **BUDGET, options=options)
    again = replay(db, table, rows, candidates, seed, 2)
    fixed = adjacency == "replace"
    places = np.array(drawn_portions(81, equal_sizes(81, 4) if fixed else [1] * 4, fixed, seed + 1))
    raw = np.column_stack([rows.y, rows.x]).astype(np.float64)
    raw[~np.isfinite(raw).all(axis=1)] = np.nan
    for place, part in enumerate(again.parts):
        np.testing.assert_array_equal(part, raw[places == place])
    model = tuned(db, rows.name, grid=GRID, **BUDGET, **options)
    np.testing.assert_array_equal(weights_of(model), again.weights[again.place])
    assert model.n == len(again.parts[again.place])


PREPARED = [
    {"multiclass": "softmax", "lambda": 0.1},
    {"multiclass": "ovr", "fit_intercept": True},
    {"project_dim": 2, "project_seed": 5},
    {"scale": "quantile", "private_scale": 0.3},
    {"algorithm": "dpsgd", "loss": "huber", "epochs": 2},
]


@pytest.mark.parametrize("seed", SEEDS)
def test_many_classes_and_prepared_rows_are_what_their_parts_make(db: Database, table: Any, seed: int) -> None:
    """Bounds are measured on the candidate's own portion, and errors are counted on rows prepared as it has them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(180, 3)).astype(np.float32)
    y = (x @ rng.normal(size=(3, 4))).argmax(axis=1).astype(float)
    x[3], x[7, 0], y[11] = np.nan, np.inf, 9.0
    rows, options = table(x, y), {"seed": seed, "classes": 4}
    candidates = make_candidates(PREPARED, **BUDGET, options=options)
    with opened(db, rows.name) as (engine, request):
        request = Request(request.source, "m", "y", ["x"], candidates[0].spec)
        parts = contents(engine, engine.split(request, 3, equal_sizes(180, 6), True), 3)
    models = [trained_model(db, table, part, candidate.spec) for candidate, part in zip(candidates, parts)]
    held = parts[-1][np.isfinite(parts[-1]).all(axis=1) & (parts[-1][:, 0] < 4)]
    counts = np.array([(model.predict(held[:, 1:]) != held[:, 0]).sum() for model in models], dtype=np.int64)
    drawn = selection([candidate.plan(30, 3) for candidate in candidates])
    place = Exact(words(seed + 1, WINNER)).choose(-counts, drawn["numerator"], drawn["denominator"])
    model = tuned(db, rows.name, grid=PREPARED, **BUDGET, **options)
    np.testing.assert_array_equal(weights_of(model), weights_of(models[place]))
    assert model.multiclass == models[place].multiclass
    np.testing.assert_array_equal(model.scale, models[place].scale)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_regression_is_what_its_parts_make(db: Database, table: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    rows = table(x, x @ [2.0, -1.0])
    options = {"seed": seed, "label_bound": 0.7}
    grid = [{"epochs": epochs} for epochs in (1, 5, 20, 50)]
    candidates = make_candidates(grid, "bolton", "squared", 3.0, 0.0, options)
    again = replay(db, table, rows, candidates, seed, 2)
    model = tuned(db, rows.name, grid=grid, epsilon=3.0, loss="squared", **options)
    np.testing.assert_array_equal(weights_of(model), again.weights[again.place])


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_moves_one_model_or_the_counts_by_one(db: Database, table: Any, seed: int, adjacency: str) -> None:
    """Outcome by outcome, with all coins but the choice's fixed: no odds move by more than e^epsilon."""
    x, y = spoiled(60, 2, seed)
    fixed = adjacency == "replace"
    places = drawn_portions(60, equal_sizes(60, 4) if fixed else [1] * 4, fixed, seed + 1)
    row = next(i for i in range(20, 60) if places[i] == (seed + 3) % 4)
    options = {"seed": seed, "adjacency": adjacency}
    candidates = make_candidates(GRID, **BUDGET, options=options)
    first = replay(db, table, table(x, y), candidates, seed, 2)
    x, y = x.copy(), y.copy()
    if fixed:
        x[row], y[row] = -5 * x[row], -y[row]
    else:
        x[row] = np.nan
    second = replay(db, table, table(x, y), candidates, seed, 2)
    assert [len(part) for part in first.parts] == [len(part) for part in second.parts]
    moved = [
        place
        for place, (one, other) in enumerate(zip(first.parts, second.parts))
        if not np.array_equal(one, other, equal_nan=True)
    ]
    assert moved == [(seed + 3) % 4]
    changed = [i for i in range(3) if not np.array_equal(first.weights[i], second.weights[i])]
    assert changed in ([], moved)
    if moved == [3]:
        assert np.abs(first.counts - second.counts).max() <= 1
        assert np.abs(np.log(first.probabilities / second.probabilities)).max() <= 1.0
    else:
        others = [i for i in range(3) if i != moved[0]]
        np.testing.assert_array_equal(first.counts[others], second.counts[others])


def test_the_event_covers_candidates_and_choice() -> None:
    plans = [candidate.plan(100, 2) for candidate in make_candidates(GRID, **BUDGET)]
    event = portions_event(plans)
    assert epsilon_of(event, 1e-3, "replace").epsilon <= 1.0 + 1e-9
    names = [branch["name"] for branch in event.to_json()["events"]]
    assert names[-1] == "LaplaceDpEvent"
    assert len(names) == 3
    assert Event.from_json(event.to_json()) == event


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 3.0, 10.0])
def test_the_laplace_mechanism_dominates_every_choice_of_bounded_range(epsilon: float) -> None:
    """The corner of a pair with losses t and t - epsilon lies on or above the Laplace mechanism's trade-off curve."""
    t = np.linspace(0, epsilon, 2001)[1:-1]
    alpha = -np.expm1(t - epsilon) / (np.exp(t) - np.exp(t - epsilon))
    beta = 1 - np.exp(t) * alpha
    low = math.exp(-epsilon)
    curve = np.where(alpha < low / 2, 1 - alpha / low, np.where(alpha <= 0.5, low / (4 * alpha), low * (1 - alpha)))
    assert (beta >= curve - 1e-12).all()


# ---- laws, in the server ----

LOOP = """
    CREATE FUNCTION pg_temp.held(runs bigint[], width int, params jsonb[], folds text[])
        RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        FOR i IN 1 .. cardinality(runs) LOOP
            PERFORM bismarck_dp.begin(runs[i], 'sgd', width, params[i]);
            PERFORM bismarck_dp.fold(runs[i], folds[i]);
            PERFORM bismarck_dp.hold(runs[i], '{"mechanism": "none"}');
        END LOOP;
    END $$;
    CREATE FUNCTION pg_temp.choices(times int, runs bigint[], width int, params jsonb[], folds text[],
        held_out regclass, judge jsonb) RETURNS SETOF int LANGUAGE plpgsql AS $$
    BEGIN
        FOR t IN 1 .. times LOOP
            PERFORM pg_temp.held(runs, width, params, folds);
            RETURN NEXT (SELECT winner FROM bismarck_dp.choose(held_out, runs, judge));
        END LOOP;
    END $$;
    CREATE FUNCTION pg_temp.trials(times int, runs bigint[], width int, params jsonb[], folds text[],
        held_out regclass, judge jsonb[]) RETURNS SETOF int LANGUAGE plpgsql AS $$
    BEGIN
        FOR t IN 1 .. times LOOP
            PERFORM pg_temp.held(runs, width, params, folds);
            FOR i IN 1 .. cardinality(runs) LOOP
                PERFORM bismarck_dp.score(held_out, runs[i], -1, judge[i]);
            END LOOP;
            RETURN NEXT (SELECT winner FROM bismarck_dp.winner(-1));
        END LOOP;
    END $$;
"""


@dataclass(frozen=True)
class Contest:
    """Models without noise, trained on tables of their own again and again, and rows to judge them by."""

    connection: Any
    runs: list[int]
    plans: list[Plan]
    folds: list[str]
    held_out: str
    counts: Any

    def call(self, function: str, times: int, judge: Any) -> Any:
        kind = "jsonb" if isinstance(judge, str) else "jsonb[]"
        return np.array(
            self.connection.exec_driver_sql(
                f"SELECT pg_temp.{function}(%(times)s, %(runs)s::bigint[], 1, %(params)s::jsonb[], %(folds)s,"
                f" %(held_out)s::regclass, %(judge)s::{kind})",
                {
                    "times": times,
                    "runs": self.runs,
                    "params": [queries.as_json(plan.kernel_params()) for plan in self.plans],
                    "folds": self.folds,
                    "held_out": self.held_out,
                    "judge": judge,
                },
            )
            .scalars()
            .all()
        )

    def judge(self, plans: list[Plan], units: int, **more: Any) -> str:
        return queries.as_json({"d": 1, "units": units, "codings": [p.pack_params() for p in plans], **more})


def contest(db: Database, table: Any, loss: str) -> Iterator[Contest]:
    """Three models of one weight, towards +1, towards -1 and next to 0; labels may be numbers."""
    options = {"step": 0.5, "epochs": 1, "batch_size": 5, "label_bound": 1.0 if loss == "squared" else None}
    spec = Spec.create("sgd", loss, None, 0.0, {key: value for key, value in options.items() if value is not None})
    label = [1.0, -1.0, 0.2] if loss == "squared" else [1.0, -1.0, -1.0]
    reach = [1.0, 1.0, 0.1] if loss == "squared" else [1.0, 1.0, math.nan]
    x = np.array([1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, np.nan])
    y = np.array([1, 1, 1, 1, -1, -1, -1, 1, 1, -1, -1, -1, 1])
    rows = table(x[:, None].astype(np.float32), y)
    with opened(db, rows.name) as (engine, request):
        held_out = engine.split(request, 1, [len(y)], True).tables[0]
        runs, plans, folds, counts = [], [], [], []
        for one, far in zip(label, reach):
            source = table(np.full((5, 1), far, np.float32), np.full(5, one))
            oid = engine.connection.exec_driver_sql(f"SELECT '{source.name}'::regclass::oid").scalar_one()
            plan = make_plan(spec, 5, 1)
            packed = engine.pack(Request(oid, "m", "y", ["x"], spec), plan)
            engine.begin(packed, plan)
            engine.epoch(packed, plan)
            weights = np.array(engine.release(packed, plan))
            counts.append(errors(weights, plan, np.column_stack([y, x]))[0])
            runs.append(packed.run)
            plans.append(plan)
            folds.append(queries.epoch(packed.run, packed.tables).values[1])
        engine.connection.exec_driver_sql(LOOP.replace("%", "%%"))
        yield Contest(engine.connection, runs, plans, folds, held_out, np.array(counts))


@pytest.fixture
def contest_of(db: Database, table: Any) -> Iterator[Any]:
    made: list[Iterator[Contest]] = []

    def make(loss: str) -> Contest:
        made.append(contest(db, table, loss))
        return next(made[-1])

    yield make
    for one in made:
        next(one, None)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_the_choice_has_the_law_of_the_exponential_mechanism(contest_of: Any, loss: str) -> None:
    """exp(-epsilon errors / 2): the factor 1/2 is what makes it epsilon-DP."""
    found = contest_of(loss)
    units = UNITS if loss == "squared" else 1
    errors_of = found.counts / units
    assert len(set(errors_of)) == 3
    private = [make_plan(Spec.create("bolton", loss, 1.0), 5, 1)]
    judge = found.judge(found.plans, units, **selection(private))
    winners = found.call("choices", 4000, judge)
    odds = np.exp(-1.0 * errors_of / 2)
    check_frequencies(np.bincount(winners, minlength=3), odds / odds.sum())


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_without_a_mechanism_the_fewest_errors_win(contest_of: Any, loss: str) -> None:
    found = contest_of(loss)
    judge = found.judge(found.plans, UNITS if loss == "squared" else 1, public=False)
    assert set(found.call("choices", 5, judge)) == {int(np.argmin(found.counts))}


@pytest.mark.parametrize(("mechanism", "scale", "units"), [("laplace", 3, 1), ("laplace", 24, 8), ("gaussian", 12, 4)])
def test_scores_have_their_noise(contest_of: Any, mechanism: str, scale: int, units: int) -> None:
    """How often each of three models has the least noisy count, against the law of the noise; ties stay."""
    found = contest_of("logistic")
    judges = [
        found.judge([plan], units, mechanism=mechanism, scale=scale, trial=i) for i, plan in enumerate(found.plans)
    ]
    winners = found.call("trials", 4000, judges)
    check_frequencies(np.bincount(winners, minlength=3), law_of_least(found.counts * units, mechanism, scale))


def law_of_least(counts: Any, mechanism: str, scale: int) -> Any:
    """P(score i is the first of the least), for independent noise."""
    k = np.arange(-60 * scale, 60 * scale + 1)
    mass = np.exp(-np.abs(k) / scale) if mechanism == "laplace" else np.exp(-(k**2) / (2 * scale**2))
    mass /= mass.sum()
    grid = np.arange(int(counts.min()) + k[0], int(counts.max()) + k[-1] + 1)
    masses = [np.interp(grid - count, k, mass, left=0, right=0) for count in counts]
    above = [1 - np.cumsum(m) for m in masses]
    chances = []
    for i, own in enumerate(masses):
        chance = own.copy()
        for j in range(len(counts)):
            if j != i:
                chance *= above[j] + (masses[j] if j > i else 0)
        chances.append(chance.sum())
    return np.array(chances) / sum(chances)


# ---- random stopping ----


@pytest.mark.parametrize("delta", [0.0, 1e-3])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_stopping_is_what_its_trials_make(db: Database, table: Any, seed: int, delta: float) -> None:
    rows = table(*spoiled(100, 2, seed))
    grid = [{"epochs": 3, "lambda": 0.1}, {"epochs": 1}]
    options = {
        "seed": seed,
        "batch_size": 80,
    }  # of all rows: their order, which trials share, changes the last bits only
    candidates = make_candidates(grid, epsilon=1.0, delta=delta, options=options)
    with opened(db, rows.name) as (engine, request):
        request = Request(request.source, "m", "y", ["x"], candidates[0].spec)
        parts = contents(engine, engine.split(request, 2, [80, 20], True), 2)
    planned = plan_trials([candidate.spec for candidate in candidates], 80, 2, 20, Stopping(6.0))
    coins = random.Random(seed + 1)
    best: tuple[float, Any, Any] | None = None
    for trial in range(min(Stopping(6.0).draw(coins.getrandbits), planned.most)):
        plan = planned.plans[coins.randrange(2)]
        own = plan.spec.options["seed"] + trial
        weights = trained(db, table, parts[0], plan.spec, seed=own)
        noise = kernels.Random.start(own.to_bytes(8, "little") + bytes(24), SCORE)
        draw = {"laplace": kernels.library.dp_discrete_laplace, "gaussian": kernels.library.dp_discrete_gaussian}
        function = draw[planned.score.mechanism]
        function.restype = ctypes.c_int64
        drawn = function(ctypes.byref(noise), ctypes.c_uint64(planned.score.scale))
        score = errors(weights, plan, parts[1])[0] * planned.score.unit + drawn
        if best is None or score < best[0]:
            best = (score, weights, plan)
    model = tuned(db, rows.name, grid=grid, epsilon=1.0, delta=delta, method="random_stopping", trials=6.0, **options)
    assert best is not None
    np.testing.assert_allclose(weights_of(model), best[1], rtol=0, atol=best[2].noise.grid)
    assert model.plan["epsilon"] == best[2].spec.epsilon
    assert (model.epsilon, model.delta) == (1.0, delta)


def test_the_good_candidate_wins_unless_it_was_never_tried(db: Database, table: Any) -> None:
    """With next to no noise the winner is the good one of two, if one of K trials was: E[2^-K] says how often not."""
    times, mean = 300, 3.0
    rows = table(*shifted(100))
    grid = '{"fit_intercept": [false, true]}'
    options = '{"epochs": 30, "lambda": 0.0001}'
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET LOCAL client_min_messages = error")
        found = connection.exec_driver_sql(
            f"SELECT cardinality(m.intercept) FROM generate_series(1, {times}) AS i, LATERAL dp_tune('{rows.name}',"
            f" 'm' || i, 'y', '{{x}}', 1e6, grid => '{grid}', options => '{options}', method => 'random_stopping',"
            f" trials => {mean}) AS m"
        )
        good = sum(found.scalars())
        connection.rollback()
    g = Stopping(mean).gamma
    check_binomial(int(good), times, 1 - math.log(1 - (1 - g) / 2) / math.log(g))


def test_what_random_stopping_stores_tells_nothing_of_the_trials(db: Database, table: Any) -> None:
    rows = table(*two_classes(200, 2))
    found = [
        tuned(db, rows.name, grid={"epochs": [1]}, epsilon=1.0, method="random_stopping", trials=50.0) for _ in range(8)
    ]
    assert len({str({**model.plan, **(model.tuning or {}), **model.event}) for model in found}) == 1
    assert max(model.seconds for model in found) < 2
    assert {model.passes for model in found} == {1.0}


# ---- the partition ----


@pytest.mark.parametrize("fixed", [True, False])
def test_every_partition_is_as_likely(db: Database, table: Any, fixed: bool) -> None:
    """Four rows into portions of sizes 2, 1 and 1, or by coins of 2 : 1 : 1."""
    rows = table(np.zeros((4, 1), np.float32), np.arange(4.0))
    seen: dict[tuple[int, ...], int] = {}
    with opened(db, rows.name) as (engine, request):
        portions = engine.split(request, 1, [2, 1, 1], fixed)
        for _ in range(1200):
            parts = contents(engine, portions, 1)
            place = tuple(next(p for p, part in enumerate(parts) if row in part[:, 0]) for row in range(4))
            seen[place] = seen.get(place, 0) + 1
            portions = engine.split_again(request, portions, 1, [2, 1, 1], fixed)
    if fixed:
        assert len(seen) == 12
        check_frequencies(np.array(list(seen.values())), np.full(12, 1 / 12))
        return
    law = {key: math.prod([0.5, 0.25, 0.25][p] for p in key) for key in np.ndindex(3, 3, 3, 3)}
    check_frequencies(np.array([seen.get(key, 0) for key in law]), np.array(list(law.values())))


def test_a_rows_portion_by_coins_does_not_depend_on_rows_behind_it(db: Database, table: Any) -> None:
    places = [drawn_portions(n, [1, 1, 1], False, 5) for n in (20, 50)]
    assert places[0] == places[1][:20]
    for n in (20, 50):
        rows = table(np.zeros((n, 1), np.float32), np.arange(float(n)))
        with opened(db, rows.name, seed=5) as (engine, request):
            parts = contents(engine, engine.split(request, 1, [1, 1, 1], False), 1)
        for place, part in enumerate(parts):
            assert [row for row in range(n) if places[n == 50][row] == place] == part[:, 0].tolist()


def test_halves_of_epsilon_are_not_lost(db: Database) -> None:
    """The exponent as a fraction: epsilon / 2 for an error, never more, and less by no more than 2^-41."""
    for epsilon in (1e-6, 0.1, 1.0, 1 / 3, 17.3, 1e5):
        for loss, unit in (("logistic", 1), ("squared", UNITS)):
            drawn = selection([make_plan(Spec.create("bolton", loss, epsilon), 50, 1)])
            exponent = drawn["numerator"] / drawn["denominator"] * unit
            assert 0 <= epsilon / 2 - exponent < 2.0**-40


# ---- lookups of what lies out of line ----

ODD = "y = CASE WHEN id > 7 THEN y END, x = CASE WHEN id < 55 THEN x ELSE array_append(x[1:399], NULL) END"


LOOKED_UP = (
    "SELECT sum(pg_stat_get_xact_numscans(i.indexrelid))::int FROM pg_index i JOIN pg_class c"
    " ON c.reltoastrelid = i.indrelid WHERE c.oid = 'out_of_line'::regclass"
)
"""In this session, as far as it was not told to the others yet."""


def looked_up(db: Database, way: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many arrays a run takes from where they lie, with PostgreSQL's counts switched on again."""
    monkeypatch.setattr(queries, "counting", lambda on: queries.Query("SELECT"))
    with opened(db, "out_of_line") as (engine, request):
        before = engine.connection.exec_driver_sql(LOOKED_UP).scalar_one()
        engine.connection.exec_driver_sql("SET LOCAL track_counts = on")
        if way == "tune":
            candidates = make_candidates({"lambda": [0.1, 1.0]}, epsilon=1.0, options={"classes": [-1, 1]})
            tune.tune(engine, tune.Tuning(replace(request, spec=candidates[0].spec), candidates))
        else:
            fields = {"model": "own", "source": str(request.source), "label": None, "features": None}
            evaluate(engine, {**fields, "epsilon": 1.0, "delta": 0.0, "options": {}})
        return int(engine.connection.exec_driver_sql(LOOKED_UP).scalar_one() - before)


@pytest.mark.parametrize("way", ["tune", "evaluate"])
def test_every_array_is_looked_up_once_whatever_else_its_row_holds(
    db: Database, sql: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A label that is missing spares no lookup, and an array that is none costs none: they could be counted."""
    sql(
        "CREATE TABLE out_of_line AS SELECT i AS id, (i % 2 * 2 - 1)::float8 AS y,"
        " ARRAY(SELECT random() FROM generate_series(1, 400) WHERE i > 0)::float8[] AS x FROM generate_series(1, 60) i"
    )
    try:
        db.train("out_of_line", model="own", epsilon=1.0, classes=[-1, 1])
        good = looked_up(db, way, monkeypatch)
        sql(f"UPDATE out_of_line SET {ODD}")
        assert looked_up(db, way, monkeypatch) == good >= 60
    finally:
        sql("DROP TABLE out_of_line")
