"""The local protocol: what a provider sends is private whatever she is asked, and the learner sees nothing else."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from conftest import two_classes
from scipy import stats
from sqlalchemy.exc import DBAPIError
from statistics_of import LEVEL

from bismarck_dp import local
from bismarck_dp.accounting import Event, epsilon_of
from bismarck_dp.banco import Learner
from bismarck_dp.controller.database import Database
from bismarck_dp.errors import BismarckError


@pytest.fixture
def ask(sql: Any) -> Any:
    """One noisy gradient after the other, through SQL."""

    def gradients(state: Any, x: Any, y: Any, epsilon: float, delta: float = 0.0, count: int = 1) -> Any:
        rows = sql(
            "SELECT dp_local_gradient(CAST(:s AS jsonb), CAST(:x AS float8[]), :y, :e, :d) AS g"
            " FROM generate_series(1, :n)",
            s=json.dumps(state),
            x=None if x is None else list(map(float, x)),
            y=y,
            e=epsilon,
            d=delta,
            n=count,
        )
        return np.array([row["g"] for row in rows])

    return gradients


def moved(state: dict[str, Any], weights: list[float]) -> dict[str, Any]:
    """The state at other weights, as a learner might send it."""
    other = copy.deepcopy(state)
    other["learner"]["w"] = weights
    return other


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (2.0, 1e-5)])
def test_a_gradient_has_its_noise(ask: Any, epsilon: float, delta: float) -> None:
    """At w = 0 the negative gradient of the logistic loss is y x / 2; around it lies the declared noise, on a grid."""
    state = local.start(3, epsilon, delta, "logistic", {})
    x, y = np.array([0.6, 0.0, -0.8]), 1.0
    params = local.gradient_params(state, epsilon, delta)
    sample = ask(state, x, y, epsilon, delta, count=4000)
    assert np.array_equal(sample / params["grid"], np.rint(sample / params["grid"]))
    noise = sample - y * x / 2
    if delta == 0:
        assert params["scale"] == pytest.approx(2 / epsilon, rel=1e-3)
        assert stats.kstest(np.linalg.norm(noise, axis=1), stats.gamma(3, scale=params["scale"]).cdf).pvalue > LEVEL
    else:
        assert stats.kstest(noise.ravel(), stats.norm(scale=params["scale"]).cdf).pvalue > LEVEL
    assert len(np.unique(sample, axis=0)) == len(sample)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, [1, 1]),
        ({"scale": [2, 0.5]}, [0.5, 2]),
        ({"scale": 0.5}, [2, 2]),
        ({"normalize": True}, [2.5, 2.5]),
        ({"normalize": True, "feature_bound": 2.0}, [5, 5]),
    ],
    ids=str,
)
def test_a_row_is_scaled_as_the_state_says(ask: Any, options: dict[str, Any], factor: list[float]) -> None:
    """A huge epsilon shows the gradient at w = 0, y x / 2."""
    state = local.start(2, 1e6, 0.0, "logistic", options)
    x = np.array([0.32, 0.24])
    gradient = ask(state, x.tolist(), -1.0, 1e6)[0]
    np.testing.assert_allclose(gradient, -x * factor / 2, atol=1e-3)


@pytest.mark.parametrize(
    "row",
    [
        (None, 1.0),
        ([math.nan, 0.0], 1.0),
        ([math.inf, 0.0], 1.0),
        ([0.5, 0.5], None),
        ([0.5, 0.5], 7.0),
        ([0.5, 0.5], math.nan),
    ],
    ids=str,
)
def test_a_row_that_is_no_row_answers_with_noise(ask: Any, row: tuple[Any, Any]) -> None:
    """Otherwise the answer, or its absence, would tell that the row is unusable."""
    state = local.start(2, 1.0, 0.0, "logistic", {})
    sample = ask(state, *row, 1.0, count=500)
    norms = np.linalg.norm(sample, axis=1)
    assert stats.kstest(norms, stats.gamma(2, scale=local.gradient_params(state, 1.0, 0.0)["scale"]).cdf).pvalue > LEVEL


STATES: list[tuple[str, dict[str, Any]]] = [
    ("logistic", {}),
    ("hinge", {"feature_bound": 5.0}),
    ("huber", {"fit_intercept": True}),
    ("squared", {"label_bound": 3.0}),
    ("squared", {"clip": 0.2, "label_bound": 100.0}),
]


@pytest.mark.parametrize(("loss", "options"), STATES, ids=str)
def test_no_state_makes_a_gradient_longer_than_the_noise_covers(ask: Any, loss: str, options: dict[str, Any]) -> None:
    """A huge epsilon shows the gradient: whatever weights a learner sends, it is at most half the sensitivity long."""
    state = local.start(2, 1e6, 0.0, loss, options)
    width = 2 + int(options.get("fit_intercept", False))
    sensitivity = local._sensitivity(local._checked(state)[0])
    longest = 0.0
    for weights in ([0.0] * width, [1e6] * width, [-1e250] * width):
        for x in ([1.0, 0.0], [1e200, -3.0], [-1e-200, 0.0], [-0.6, 0.8]):
            for y in (1.0, -1.0, 1e9):
                gradient = ask(moved(state, weights), x, y, 1e6)[0]
                assert np.isfinite(gradient).all()
                longest = max(longest, float(np.linalg.norm(gradient)))
    assert 0.9 * sensitivity / 2 <= longest <= sensitivity / 2 * (1 + 1e-3)


def test_a_provider_spends_what_she_offers_and_nothing_else(ask: Any) -> None:
    state = local.start(2, 4.0, 0.0, "logistic", {})
    for epsilon, delta, message in [(1.0, 0.0, "asks for epsilon 4"), (4.0, 1e-5, "asks for delta 0")]:
        with pytest.raises(DBAPIError, match=message):
            ask(state, [0.0, 0.0], 1.0, epsilon, delta)
    careless = local.start(2, 4.0, 0.5, "logistic", {})
    with pytest.raises(DBAPIError, match=r"asks for delta 0\.5, and 0 is offered"):
        ask(careless, [0.0, 0.0], 1.0, 4.0)


def broken_states() -> list[Any]:
    good = local.start(2, 1.0, 0.0, "logistic", {})
    changes: list[tuple[str, Any]] = [
        ("format", 2),
        ("loss", "cubic"),
        ("loss", 3),
        ("epsilon", -1),
        ("epsilon", "1"),
        ("d", 0),
        ("d", 3),
        ("d", True),
        ("options", []),
        ("options", {"seed": 1}),
        ("options", {"adjacency": "zero-out"}),
        ("options", {"feature_bound": 0}),
        ("options", {"feature_bound": {"a": 1}}),
        ("options", {"unknown": 1}),
        ("learner", {}),
        ("learner", {**good["learner"], "w": [0.0]}),
        ("learner", {**good["learner"], "w": ["a", 0.0]}),
        ("learner", {**good["learner"], "y": None}),
    ]
    return [{}, [], "state", None, 1, *({**good, key: value} for key, value in changes)]


@pytest.mark.parametrize("state", broken_states(), ids=str)
def test_a_malformed_state_is_refused_in_words(ask: Any, state: Any) -> None:
    with pytest.raises((BismarckError, ValueError)):
        local.gradient_params(state, 1.0, 0.0)
    with pytest.raises(DBAPIError) as refused:
        ask(state, [0.0, 0.0], 1.0, 1.0)
    assert "internal error" not in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_rounds_are_steps_of_the_learner(sql: Any, ask: Any) -> None:
    """The aggregate takes the mean of a round's gradients for one step, as NumPy does; one gradient is the paper's."""
    state = local.start(2, 3.0, 0.0, "logistic", {})
    learner = Learner.from_json({**state["learner"], "bet": vars(local._bet(*local._checked(state)))})
    rng = np.random.default_rng(0)
    for count in (1, 1, 5, 1, 40):
        gradients = rng.normal([1.0, -0.5], size=(count, 2))
        state = sql(
            "SELECT dp_local_round(CAST(:s AS jsonb), g) AS s FROM (SELECT ARRAY[a, b] AS g FROM"
            " unnest(CAST(:a AS float8[]), CAST(:b AS float8[])) AS t (a, b)) AS r",
            s=json.dumps(state),
            a=gradients[:, 0].tolist(),
            b=gradients[:, 1].tolist(),
        )[0]["s"]
        learner.step(gradients.mean(axis=0), count)
        np.testing.assert_allclose(state["learner"]["w"], learner.w, rtol=1e-9)
    assert state["gradients"] == 48
    np.testing.assert_allclose(local.model(state)["weights"], learner.mean, rtol=1e-9)


PROTOCOL = """
    DO $$
    DECLARE s jsonb := dp_local_start(4, 10);
            provider record;
    BEGIN
        FOR provider IN SELECT x, y FROM {table} LOOP
            s := (SELECT dp_local_round(s, dp_local_gradient(s, provider.x, provider.y, 10)));
        END LOOP;
        PERFORM dp_local_register(s, 'locally');
    END $$
"""


def test_the_whole_protocol_learns_and_says_whom_it_trusted(db: Database, table: Any, sql: Any) -> None:
    x, y = two_classes(3000, 4)
    rows = table(x, y, "float8")
    sql(PROTOCOL.format(table=rows.name))
    model = db.model("locally")
    assert (model.trust, model.private, model.algorithm, model.epsilon, model.n) == ("local", True, "banco", 10.0, 3000)
    assert model.score(x, y) > 0.75
    assert epsilon_of(Event.from_json(model.event), 0.0, "replace").epsilon == pytest.approx(10.0)
    assert "noise is added by each provider" in model.note
    central = db.train(rows.name, model="centrally", epsilon=10, algorithm="banco")
    assert central.trust == "central"
    assert db.train(rows.name, model="plainly", algorithm="sgd").trust is None


def test_bad_rounds_are_refused(sql: Any) -> None:
    state = json.dumps(local.start(2, 1.0, 0.0, "logistic", {}))
    other = json.dumps(local.start(2, 2.0, 0.0, "logistic", {}))
    for values, message in [
        (f"('{state}', '{{1,2,3}}')", "a gradient of this state has 2 numbers"),
        (f"('{state}', '{{1,NULL}}')", "have a NULL"),
        (f"('{state}', '{{1,NaN}}')", "not finite"),
        (f"('{state}', '{{1,2}}'), ('{state}', '{{1}}')", "differ in length"),
        (f"('{state}', '{{1,2}}'), ('{other}', '{{1,2}}')", "a round has one state"),
        (f"('{state}', NULL)", "gradient is NULL"),
        ("(NULL, '{1,2}')", "model_state or gradient is NULL"),
        ("('{}', '{1,2}')", "not a state of this protocol"),
    ]:
        with pytest.raises(DBAPIError, match=message):
            sql(f"SELECT dp_local_round(s::jsonb, g::float8[]) FROM (VALUES {values}) AS r (s, g)".replace(":", "\\:"))
    assert sql("SELECT dp_local_round(NULL, NULL) AS state WHERE false")[0]["state"] is None
    with pytest.raises(DBAPIError, match="no gradients yet"):
        sql("SELECT dp_local_register(CAST(:s AS jsonb), 'm')", s=state)
    with pytest.raises(DBAPIError, match="no name"):
        sql("SELECT dp_local_register(CAST(:s AS jsonb), NULL)", s=state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("dp_local_start(0, 1)", "d is 0"),
        ("dp_local_start(NULL, 1)", "d is NULL"),
        ("dp_local_start(2, NULL)", "epsilon is NULL"),
        ("dp_local_start(2, -1)", "epsilon is -1"),
        ("dp_local_start(2, 1, 2)", "delta is 2"),
        ("dp_local_start(2, 1, loss => 'cubic')", "unknown loss"),
        ("dp_local_start(2, 1, options => '{\"epochs\": 3}')", "unknown option"),
        ("dp_local_start(2, 1, options => '{\"seed\": 3}')", "voids privacy"),
        ('dp_local_start(2, 1, options => \'{"adjacency": "zero-out"}\')', "hides which row"),
        ("dp_local_gradient(NULL, '{1}', 1, 1)", "model_state, epsilon or delta is NULL"),
        ("dp_local_gradient(dp_local_start(2, 1), '{1}', 1, 1)", "not a list of 2 numbers"),
        ("dp_local_gradient(dp_local_start(2, 1), '{{1,2}}', 1, 1)", "not a list of 2 numbers"),
        ("dp_local_gradient(dp_local_start(2, 1), '{1,2}', 1, NULL)", "model_state, epsilon or delta is NULL"),
        ("dp_local_gradient(dp_local_start(2, 1), '{1,2}', 1, 'NaN')", "asks for epsilon 1"),
    ],
)
def test_bad_calls_are_refused_in_words(db: Database, call: str, message: str) -> None:
    with db.engine.begin() as connection, pytest.raises(DBAPIError, match=message):
        connection.exec_driver_sql("SELECT " + call.replace("%", "%%"))


def test_anybody_may_answer_and_learn(db: Database, sql: Any) -> None:
    """A provider needs no rights on anything."""
    sql("CREATE ROLE provider LOGIN")
    try:
        with db.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL ROLE provider")
            state = connection.exec_driver_sql("SELECT dp_local_start(2, 1)").scalar_one()
            connection.exec_driver_sql(
                "SELECT dp_local_round(%(s)s::jsonb, dp_local_gradient(%(s)s::jsonb, '{1,0}', 1, 1))",
                {"s": json.dumps(state)},
            )
    finally:
        sql("DROP ROLE provider")
