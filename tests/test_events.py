"""Every model keeps its release as an event, which prices back to what the model claims."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import dp_accounting
import numpy as np
import pytest
from conftest import needed, plans, two_classes
from dp_accounting import pld, rdp

import bismarck_dp
from bismarck_dp.accounting import Event, epsilon_of
from bismarck_dp.controller.database import Database
from bismarck_dp.solvers import SOLVERS

BUDGETS = [(0.5, 0.0), (1.0, 1e-6), (4.0, 1e-3)]
CLAIMS = [
    (name, epsilon, delta, adjacency)
    for name, solver in SOLVERS.items()
    for epsilon, delta in BUDGETS
    for adjacency in ("replace", "zero-out")
    if solver.private and plans(name, epsilon, delta, adjacency)
]


@pytest.mark.parametrize(("algorithm", "epsilon", "delta", "adjacency"), CLAIMS)
def test_a_stored_event_costs_what_the_model_claims(
    db: Database, table: Any, algorithm: str, epsilon: float, delta: float, adjacency: str
) -> None:
    source = table(*two_classes(200, 3))
    spec = {"algorithm": algorithm, "epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    model = db.train(source.name, **spec, **needed(algorithm))
    stored = db.model(model.name)
    event = Event.from_json(stored.event)
    assert event.to_json() == stored.event == stored.privacy["event"] == model.event
    cost = epsilon_of(event, delta, adjacency).epsilon
    assert cost == pytest.approx(epsilon, rel=1e-3)
    assert cost <= epsilon * (1 + 1e-6)
    # At delta = 0 the library's truncated distributions have no answer. Only a sampled event wants its doubling.
    relation = dp_accounting.NeighboringRelation
    if "ZCDpEvent" in str(stored.event):  # which its loss distributions do not know
        orders = np.exp(np.linspace(0.01, 6, 2000))
        theirs = rdp.RdpAccountant(orders).compose(stored.to_dp_event()).get_epsilon(delta)
        assert theirs == pytest.approx(epsilon, rel=1e-2)
        return
    doubled = adjacency == "replace" and "PoissonSampledDpEvent" in str(stored.event)
    accountant = pld.PLDAccountant(relation.REPLACE_ONE if doubled else relation.ADD_OR_REMOVE_ONE)
    theirs = accountant.compose(stored.to_dp_event()).get_epsilon(delta or 1e-12)
    assert theirs == pytest.approx(epsilon, rel=1e-3)


def test_a_seed_or_no_noise_is_no_privacy(db: Database, table: Any, sql: Any) -> None:
    source = table(*two_classes(200, 3))
    db.train(source.name, model="seeded", epsilon=1, seed=4)
    db.train(source.name, model="exact", algorithm="sgd")
    for name in ("seeded", "exact"):
        model = db.model(name)
        assert model.event == {"name": "NonPrivateDpEvent"}
        assert epsilon_of(Event.from_json(model.event), 0.1, "replace").epsilon == math.inf
        assert isinstance(model.to_dp_event(), dp_accounting.NonPrivateDpEvent)
    stored = sql("SELECT event->>'name' AS name FROM bismarck_dp.models")
    assert {row["name"] for row in stored} == {"NonPrivateDpEvent"}


def test_the_noise_is_at_least_what_the_event_says() -> None:
    for epsilon, delta in BUDGETS:
        for d in (1, 50, 5000):
            spec = bismarck_dp.Spec.create("bolton", "logistic", epsilon, delta)
            plan = bismarck_dp.make_plan(spec, 1000, d)
            multiplier = plan.event.to_json()["noise_multiplier"]
            assert plan.noise.scale >= multiplier * plan.released_sensitivity
            assert plan.noise.scale <= multiplier * plan.released_sensitivity * 1.001


def test_the_server_needs_no_accounting_library(sql: Any, table: Any) -> None:
    """Its import would take longer than most trainings."""
    code = (
        "import bismarck_dp, sys;"
        "bismarck_dp.explain(n=1000, d=5, epsilon=1, delta=1e-6)['event'];"
        "print(sorted({'dp_accounting', 'matplotlib', 'bismarck_dp.poisson', 'scipy.stats'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
