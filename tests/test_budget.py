"""Budgets: the filter's bounds against exact laws and other accountants, prices against dp-accounting, exact sums."""

from __future__ import annotations

import math
import random
from decimal import Context, Decimal, localcontext
from itertools import product

import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bismarck_dp import BismarckError, Spec, make_plan
from bismarck_dp.accounting import (
    Event,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
    epsilon_of,
    gaussian_epsilon,
    gaussian_multiplier,
)
from bismarck_dp.budget import (
    CONVERTED,
    LEFT_OVER,
    ROOM,
    SUMMED,
    Price,
    Spent,
    Total,
    dearest,
    exact,
    largest_epsilon,
    order_bound,
    price_of_event,
    price_of_plan,
    price_of_portions,
    price_of_trials,
)
from bismarck_dp.plan import Plan
from bismarck_dp.renyi import Curve
from bismarck_dp.stopping import Stopping, plan_trials

TOTALS = [(0.1, 1e-9), (1.0, 1e-6), (3.0, 1e-6), (10.0, 1e-5), (50.0, 1e-3)]


def rho_of(price: Price) -> float:
    assert price.rho is not None
    return price.rho


def total_of(epsilon: float, delta: float) -> Total:
    total = Total.create(epsilon, delta)
    assert total.order is not None
    assert total.rho is not None
    return total


# ---- the bounds ----


def test_the_shares_of_delta_are_all_of_it() -> None:
    assert CONVERTED + LEFT_OVER + SUMMED <= 1


@pytest.mark.parametrize(("epsilon", "delta"), TOTALS)
def test_the_bound_converts_to_the_total(epsilon: float, delta: float) -> None:
    """By our own curve, and by dp-accounting's."""
    total = total_of(epsilon, delta)
    divergence = total.order * total.rho
    assert Curve((total.order,), np.array([divergence])).epsilon(CONVERTED * delta) == pytest.approx(epsilon, rel=1e-6)
    theirs, _ = rdp.compute_epsilon([total.order], [divergence], CONVERTED * delta)
    assert theirs <= epsilon * (1 + 1e-9)
    assert (1 + math.exp(epsilon)) * total.slack <= LEFT_OVER * delta


@pytest.mark.parametrize(("epsilon", "delta"), TOTALS)
def test_gaussians_that_fill_a_total_stay_within_it(epsilon: float, delta: float) -> None:
    """Their composition is exact (one Gaussian): it keeps what was promised, and the filter is not idle."""
    total = total_of(epsilon, delta)
    spent = gaussian_epsilon(1 / math.sqrt(2 * total.rho), delta)
    assert 0.6 * epsilon < spent <= epsilon


@pytest.mark.parametrize(("epsilon", "delta"), TOTALS)
def test_the_order_is_the_best_one(epsilon: float, delta: float) -> None:
    total = total_of(epsilon, delta)
    assert all(
        order_bound(order, epsilon, delta) / order <= total.rho * 1.01 for order in 1 + np.geomspace(0.1, 1e6, 300)
    )


def test_a_kept_order_has_a_bound_of_its_own() -> None:
    total = Total.create(2.0, 1e-6, "zcdp", 20.0)
    assert total.order == 20.0
    assert total.rho == pytest.approx(order_bound(20.0, 2.0, 1e-6) / 20.0)
    assert Total.create(0.01, 1e-6, "zcdp", 1.5).rho is None, "no room at this order: there are sums"
    assert Total.create(2.0, 1e-6, "pure", 5.0).order == 5.0


@pytest.mark.parametrize(
    ("epsilon", "delta", "composition", "message"),
    [
        (0.0, 0.0, "zcdp", "epsilon is 0"),
        (1e-200, 0.0, "zcdp", "epsilon is 1e-200"),
        (-1.0, 0.0, "zcdp", "epsilon is -1"),
        (math.nan, 0.0, "zcdp", "epsilon is nan"),
        (math.inf, 0.0, "zcdp", "epsilon is inf"),
        (1001.0, 0.0, "zcdp", "epsilon is 1001"),
        (1.0, 1.0, "zcdp", "delta is 1"),
        (1.0, -1e-9, "zcdp", "delta is"),
        (1.0, math.nan, "zcdp", "delta is nan"),
        (1.0, 1e-320, "zcdp", "delta is"),
        (1.0, 1e-6, "renyi", "unknown composition"),
    ],
)
def test_totals_that_are_none(epsilon: float, delta: float, composition: str, message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        Total.create(epsilon, delta, composition)


# ---- an adversary who adapts ----


def coin(epsilon: float) -> tuple[tuple[float, float], ...]:
    """Randomised response: outcomes with their probabilities under both tables. Every epsilon-DP pair is made of it."""
    lie = 1 / (1 + math.exp(epsilon))
    return ((1 - lie, lie), (lie, 1 - lie))


def leak(delta: float) -> tuple[tuple[float, float], ...]:
    """Shows the row with probability delta, and nothing otherwise."""
    return ((delta, 0.0), (0.0, delta), (1 - delta, 1 - delta))


def delta_of(total: Total, choices: list[Price], laws: list[tuple[tuple[float, float], ...]], seed: int) -> float:
    """The exact delta at the total's epsilon of an adversary who picks each release by what came out before, as long
    as one is paid. Many transcripts are one where what was spent and how likely it is are the same.
    """
    found = 0.0
    open_ends: dict[tuple[Spent, float, float], int] = {(Spent(), 1.0, 1.0): 1}
    while open_ends:
        following: dict[tuple[Spent, float, float], int] = {}
        for (spent, p, q), count in open_ends.items():
            # The choice is any fixed function of the transcript's state.
            order = random.Random(f"{seed} {spent} {p / (p + q):.6f}").sample(range(len(choices)), len(choices))
            paid = [at for at in order if spent.plus(choices[at]).within(total)]
            if not paid:
                found += count * max(0.0, p - math.exp(total.epsilon) * q)
                continue
            for to_p, to_q in laws[paid[0]]:
                if p * to_p > 0:
                    end = (spent.plus(choices[paid[0]]), float(f"{p * to_p:.12g}"), float(f"{q * to_q:.12g}"))
                    following[end] = following.get(end, 0) + count
        open_ends = following
    return found


@pytest.mark.parametrize("composition", ["zcdp", "pure"])
@pytest.mark.parametrize("seed", range(6))
def test_an_adversary_who_adapts_gets_no_more_than_the_total(composition: str, seed: int) -> None:
    """Exact: every transcript of coins and leaks, in an order that depends on what came out."""
    total = Total.create(1.0, 0.1, composition)
    sizes = [(0.2, 0.0), (0.4, 0.0), (0.12, 0.0), (1e-9, 0.02)]
    laws = [coin(epsilon) if delta == 0 else leak(delta) for epsilon, delta in sizes]
    prices = [
        Price(NonPrivateDpEvent(), epsilon, delta, total.order)
        if delta
        else price_of_event(LaplaceDpEvent(1 / epsilon), epsilon, 0.0, "replace", total.order)
        for epsilon, delta in sizes
    ]
    some = [at for at in range(len(sizes)) if seed % 3 != 0 or sizes[at][1] == 0]
    assert delta_of(total, [prices[at] for at in some], [laws[at] for at in some], seed) <= total.delta


def test_coins_that_fill_the_total_are_not_far_below_it() -> None:
    """And four times as many go beyond it: the test above can fail."""
    total = total_of(1.0, 0.05)
    price = price_of_event(LaplaceDpEvent(1 / 0.1), 0.1, 0.0, "replace", total.order)

    lie = 1 / (1 + math.exp(0.1))

    def delta(coins: int) -> float:
        honest = [stats.binom.pmf(range(coins + 1), coins, p) for p in (1 - lie, lie)]
        return float(np.maximum(0.0, honest[0] - math.e * honest[1]).sum())

    fitting = int(total.rho / rho_of(price))
    assert fitting > 10
    assert 0.002 < delta(fitting) <= CONVERTED * total.delta
    assert delta(4 * fitting) > total.delta


# ---- prices ----


@pytest.mark.parametrize("order", [1.5, 3.3, 40.0])
@pytest.mark.parametrize(
    ("event", "right"),
    [
        (GaussianDpEvent(3.0), 1 / 18),
        (SelfComposedDpEvent(GaussianDpEvent(3.0), 7), 7 / 18),
        (ZCDpEvent(0.02), 0.02),
    ],
)
def test_rho_of_gaussians_is_rho(event: Event, right: float, order: float) -> None:
    assert price_of_event(event, 1.0, 0.0, "replace", order).rho == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("q", "z", "steps"), [(0.01, 1.0, 500), (0.2, 4.0, 30), (1.0, 5.0, 3)])
@pytest.mark.parametrize("order", [2.0, 9.0, 33.0])
def test_sampled_gaussians_are_priced_as_dp_accounting_does(
    adjacency: str, q: float, z: float, steps: int, order: float
) -> None:
    """Theirs adds and removes a row: for `replace`, never less; with all rows sampled, exactly four times."""
    event = SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(z)), steps)
    ours = rho_of(price_of_event(event, 1.0, 1e-6, adjacency, order))
    accountant = rdp.RdpAccountant([order])
    accountant.compose(event.to_dp_event())
    theirs = accountant._rdp[0] / order  # the library has no public way to a single order
    assert ours >= theirs * (1 - 1e-6)
    if adjacency == "zero-out":
        assert ours <= theirs * (1 + 1e-3)
    elif q == 1:
        assert ours == pytest.approx(4 * theirs, rel=1e-9)


SPECS = [
    ("bolton", 0.5, 1e-7, {}),
    ("bolton", 0.5, 0.0, {}),
    ("scs13", 0.5, 1e-7, {}),
    ("dpsgd", 0.5, 1e-7, {"batch_size": 20}),
    ("bst14", 0.5, 1e-7, {}),
    ("dpcd", 0.5, 1e-7, {"private_constants": 0.2}),
    ("dpgcd", 0.5, 1e-7, {}),
    ("dpscd", 0.5, 1e-7, {"lambda": 0.1}),
    ("banco", 0.5, 0.0, {}),
    ("bolton", 0.5, 1e-7, {"scale": "quantile", "private_scale": 0.2}),
]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(("algorithm", "epsilon", "delta", "options"), SPECS)
def test_a_release_within_its_claim_costs_about_as_much(
    algorithm: str, epsilon: float, delta: float, options: dict[str, object], adjacency: str
) -> None:
    """No price is below what the release's event says, nor far above what its epsilon allows."""
    total = total_of(3.0, 1e-6)
    spec = Spec.create(algorithm, "logistic", epsilon, delta, {**options, "adjacency": adjacency})
    plan = make_plan(spec, 1000, 5)
    price = price_of_plan(plan, total.order)
    pure = price_of_event(plan.event, epsilon, delta, adjacency, total.order)
    assert rho_of(pure) <= rho_of(price) <= rho_of(pure) * 1.01
    most = epsilon**2 / 2 if delta == 0 else 1 / (2 * gaussian_multiplier(epsilon, delta) ** 2)
    assert 0 < rho_of(price) <= 1.5 * most
    assert (price.slack > 0) == math.isfinite(plan.noise.rarity)
    assert price.slack < 1e-4 * max(delta, 1e-300)


def test_noise_that_is_computed_costs_more_than_its_event() -> None:
    """R" and R are factors exp(tau) apart: (2 a - 1) / (a - 1) tau more, and what is rare goes to the slack."""
    plan = make_plan(Spec.create("dpsgd", "logistic", 0.5, 1e-7, {"batch_size": 20}), 1000, 5)
    order = 7.0
    event = price_of_event(plan.event, 0.5, 1e-7, "replace", order)
    more = (rho_of(price_of_plan(plan, order)) - rho_of(event)) * order
    assert plan.noise.excess > 0
    assert more == pytest.approx(13 / 6 * plan.noise.excess, rel=1e-3)
    assert price_of_plan(plan, order).slack == pytest.approx(3 * math.exp(-plan.noise.rarity), rel=1e-9)


def noisy_plan(algorithm: str, epsilon: float, delta: float) -> Plan:
    options = {} if algorithm == "banco" else {"lambda": 0.01}
    return make_plan(Spec.create(algorithm, "logistic", epsilon, delta, options), 10_000, 5)


@pytest.mark.parametrize("algorithm", ["scs13", "dpcd", "dpgcd", "banco"])
@pytest.mark.parametrize("epsilon", [1.0, 705.0, 900.0])
def test_what_may_go_wrong_is_never_free(algorithm: str, epsilon: float) -> None:
    """Where doubles have no number for it either: e^epsilon of the total times nothing would be nothing."""
    huge = Total.create(1000.0, 1e-6)
    plan = noisy_plan(algorithm, epsilon, 1e-6)
    price = price_of_plan(plan, huge.order)
    assert huge.slack == 0 < price.slack
    assert not Spent().plus(price).diverges_within(huge)


@pytest.mark.parametrize("epsilon", [600.0, 640.0, 680.0, 700.0, 720.0])
def test_the_slack_of_a_total_is_no_more_than_its_share(epsilon: float) -> None:
    """Where doubles have no digits left it is none at all."""
    slack = Total.create(epsilon, 1e-6).slack
    assert slack is not None
    with localcontext(Context(prec=50)):
        assert (1 + Decimal(epsilon).exp()) * Decimal(slack) <= Decimal(LEFT_OVER) * Decimal("1e-6")
    assert (slack > 0) == (epsilon < 660)


@pytest.mark.parametrize("algorithm", ["scs13", "dpcd", "dpgcd", "banco"])
def test_what_may_go_wrong_leaves_room_where_the_total_is_large(algorithm: str) -> None:
    """As many releases as noise on weights has, in totals of an epsilon as statistics offices use it."""
    total = Total.create(20.0, 1e-6)
    plan = noisy_plan(algorithm, 0.5, 1e-8)
    price = price_of_plan(plan, total.order)
    many = int(total.rho / price.rho) if total.rho and price.rho else 0
    assert many > 500
    assert price.slack * many < (total.slack or 0.0)


def test_portions_cost_their_dearest_part() -> None:
    specs = [Spec.create("bolton", "logistic", 0.5, 1e-7), Spec.create("dpsgd", "logistic", 0.5, 1e-7)]
    plans = [make_plan(spec, 500, 5) for spec in specs]
    order = 13.0
    choice = price_of_event(LaplaceDpEvent(2.0), 0.5, 0.0, "replace", order)
    parts = [rho_of(price_of_plan(plan, order)) for plan in plans] + [rho_of(choice)]
    price = price_of_portions(plans, order)
    assert max(parts) <= rho_of(price) <= max(parts) * 1.01
    assert price.slack == sum(price_of_plan(plan, order).slack for plan in plans)


@pytest.mark.parametrize("delta", [0.0, 1e-7])
def test_random_stopping_costs_more_than_a_trial_and_no_more_than_its_epsilon(delta: float) -> None:
    specs = [Spec.create("bolton", "logistic", 0.8, delta, {"lambda": value}) for value in (0.1, 0.01)]
    trials = plan_trials(specs, 800, 5, 200, Stopping(5.0))
    order = 13.0
    price = price_of_trials(trials, order, 0.8, delta)
    trial = max(rho_of(price_of_plan(plan, order)) for plan in trials.plans)
    assert rho_of(price) > trial
    assert rho_of(price) <= 0.8**2 / 2
    assert price.slack >= trials.cut
    whole = trials.stopping.curve(Curve.zcdp(trial)).epsilon(1e-7)
    assert epsilon_of(ZCDpEvent(rho_of(price)), 1e-7, "replace").epsilon >= 0.5 * whole, "not far below all of them"


def test_what_is_not_private_has_no_price() -> None:
    plan = make_plan(Spec.create("sgd", "logistic"), 100, 3)
    with pytest.raises(ValueError, match="no price"):
        price_of_plan(plan, 5.0)


def test_the_dearest_of_several_prices() -> None:
    event = GaussianDpEvent(1.0)
    prices = [Price(event, 1.0, 1e-6, 5.0, rho, slack) for rho, slack in ((0.1, 2e-9), (0.3, 1e-9))]
    most = dearest(prices)
    assert (most.rho, most.slack) == (0.3, 2e-9)
    assert all(most.covers(price) for price in prices)
    assert dearest([*prices, Price(event, 1.0, 1e-6, 5.0)]).rho is None


def test_who_paid_less_has_not_paid() -> None:
    paid = Price(GaussianDpEvent(1.0), 1.0, 1e-6, 5.0, 0.1, 1e-9)
    for changes in ({"epsilon": 1.1}, {"delta": 2e-6}, {"rho": 0.11}, {"rho": None}, {"slack": 2e-9}):
        assert not paid.covers(Price(**{**vars(paid), **changes})), changes
    assert paid.covers(paid)
    assert paid.with_room().rho == 0.1 * (1 + ROOM)


@pytest.mark.parametrize("algorithm", ["bolton", "dpsgd", "scs13", "dpcd"])
@pytest.mark.parametrize("rows", [999, 1001, 1010])
def test_a_few_rows_more_or_less_are_paid_for(algorithm: str, rows: int) -> None:
    """Otherwise a table that somebody writes to could not be trained on."""
    spec = Spec.create(algorithm, "logistic", 0.5, 1e-7)
    paid, now = (price_of_plan(make_plan(spec, n, 5), 13.0) for n in (1000, rows))
    assert paid.with_room().covers(now)


# ---- sums ----


def test_sums_are_exact() -> None:
    total = Total.create(0.3, 0.0)
    spent = Spent()
    for _ in range(3):
        spent = spent.plus(Price(LaplaceDpEvent(10.0), 0.1, 0.0))
        assert spent.within(total)
    assert not spent.plus(Price(LaplaceDpEvent(1e12), 1e-12, 0.0)).within(total)
    assert spent.cost(total) == (0.3, 0.0)


def test_the_first_release_may_take_all_of_it() -> None:
    total = Total.create(1.0, 1e-6)
    whole = Price(GaussianDpEvent(gaussian_multiplier(1.0, 1e-6)), 1.0, 1e-6, total.order, 1.0)
    assert Spent().plus(whole).within(total)
    assert not Spent().plus(whole).plus(Price(LaplaceDpEvent(1e9), 1e-9, 0.0, total.order, 1e-18)).within(total)
    assert not Spent().plus(Price(whole.event, 1.001, 1e-6, total.order, 1.0)).within(total)


def test_a_release_of_unknown_divergence_leaves_sums_alone() -> None:
    total = total_of(1.0, 1e-6)
    unknown = Price(NonPrivateDpEvent(), 0.4, 0.0, total.order)
    small = Price(GaussianDpEvent(1e3), 0.4, 1e-9, total.order, 5e-7)
    assert Spent().plus(small).plus(small).plus(small).within(total), "as divergences"
    assert not Spent().plus(unknown).plus(small).plus(small).within(total), "as sums"


amounts = st.tuples(st.floats(1e-4, 2.0), st.sampled_from([0.0, 1e-9, 1e-7, 6e-7]), st.floats(1e-7, 0.2))


@given(st.lists(amounts, max_size=30), st.sampled_from(["zcdp", "pure"]))
@settings(max_examples=200, deadline=None)
def test_what_is_within_costs_no_more_than_the_total(
    releases: list[tuple[float, float, float]], composition: str
) -> None:
    total = Total.create(2.0, 1e-6, composition)
    spent = Spent()
    for epsilon, delta, rho in releases:
        after = spent.plus(
            Price(GaussianDpEvent(1.0), epsilon, delta, total.order, rho if composition == "zcdp" else None)
        )
        spent = after if after.within(total) else spent
    epsilon, delta = spent.cost(total)
    assert epsilon <= total.epsilon * (1 + 1e-9)
    assert delta <= total.delta * (1 + 1e-9)
    assert (epsilon, delta) >= (0.0, 0.0)


def test_a_total_that_was_lowered_says_what_was_really_spent() -> None:
    """The slack of computed noise costs 1 + e^epsilon of it, at the epsilon that was spent."""
    total = total_of(10.0, 1e-5)
    spent = Spent().plus(Price(GaussianDpEvent(1.0), 9.0, 1e-6, total.order, total.rho * 0.9, total.slack * 0.9))
    lower = Total.create(1.0, 1e-5, "zcdp", total.order)
    assert spent.cost(lower)[0] == pytest.approx(9.0), "the sum is less than what divergences say"
    assert not spent.within(lower)
    many = Spent(20, 0, exact(total.rho * 0.9), exact(total.slack * 0.9), Decimal(90), Decimal("2e-6"))
    epsilon, delta = many.cost(lower)
    assert 8.0 < epsilon < 10.0
    assert lower.delta >= delta >= CONVERTED * 1e-5 + total.slack * 0.9 * math.exp(epsilon)


@pytest.mark.parametrize("number", [0.1, 1e-300, 123456789.125, 1 / 3])
def test_decimals_are_read_back_as_the_double(number: float) -> None:
    assert float(exact(number)) == number
    assert exact(0.1) == Decimal("0.1")


# ---- what would fit ----


@pytest.mark.parametrize(("asked", "share"), list(product([0.9, 2.5, 50.0], [0.0, 0.5, 0.95])))
def test_an_epsilon_that_fits_is_found_and_a_larger_one_does_not(asked: float, share: float) -> None:
    total = total_of(1.0, 1e-6)
    spent = Spent(1, 0, exact(total.rho * share), Decimal(0), Decimal(5), Decimal(0))

    def price_at(epsilon: float) -> Price:
        multiplier = gaussian_multiplier(epsilon, 1e-7)
        return price_of_event(GaussianDpEvent(multiplier), epsilon, 1e-7, "replace", total.order)

    if spent.plus(price_at(asked)).within(total):
        return
    found = largest_epsilon(total, spent, asked, price_at)
    assert found is not None
    assert spent.plus(price_at(found)).within(total)
    assert not spent.plus(price_at(found * 1.03)).within(total)
    assert len(f"{found:g}".replace(".", "").strip("0")) <= 3


@pytest.mark.parametrize("spends", [0.5, 0.123, 0.3, 0.995])
def test_all_that_sums_leave_fits(spends: float) -> None:
    total = Total.create(1.0, 0.0)
    spent = Spent().plus(Price(LaplaceDpEvent(1 / spends), spends, 0.0))
    found = largest_epsilon(total, spent, 0.97, lambda epsilon: Price(LaplaceDpEvent(1 / epsilon), epsilon, 0.0))
    assert found is not None
    assert 0.998 * (1 - spends) <= found <= 1 - spends + 1e-15


def test_nothing_fits_once_all_is_spent() -> None:
    total = Total.create(1.0, 0.0)
    spent = Spent().plus(Price(LaplaceDpEvent(1.0), 1.0, 0.0))

    def price_at(epsilon: float) -> Price:
        return Price(LaplaceDpEvent(1 / epsilon), epsilon, 0.0)

    assert largest_epsilon(total, spent, 0.5, price_at) is None
