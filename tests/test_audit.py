"""Attacks end to end: dp_train on neighbouring tables, thousands of times. No claim is broken, and the report is right.

test_mutations.py runs the named tests of this file on broken copies of the project, where they must fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bismarck_dp
from bismarck_dp.controller.audit import Audit
from bismarck_dp.controller.database import Database
from bismarck_dp.errors import BismarckError
from bismarck_dp.solvers import SOLVERS

SMALL: dict[str, Any] = {"loss": "huber", "lambda": 0.1, "epochs": 3, "batch_size": 5, "n": 20}
"""A run whose worst pair of tables comes up to the declared sensitivity, and that takes milliseconds."""


def attacked(db: Database, **spec: Any) -> Audit:
    found = db.audit(**spec)
    assert found.reasons == []
    assert found.verdict == "pass"
    assert found.empirical_epsilon <= found.epsilon
    assert found.measured_sensitivity <= found.sensitivity
    return found


def test_the_gaussian_claim_holds_and_is_not_idle(db: Database) -> None:
    found = attacked(db, **SMALL, epsilon=1, delta=0.01, trials=2500)
    assert found.mechanism == "gaussian"
    assert found.measured_sensitivity > 0.9 * found.sensitivity
    assert found.empirical_epsilon > 0.02, "the attack sees the row through the noise"


def test_the_l2_laplace_claim_holds_and_is_not_idle(db: Database) -> None:
    found = attacked(db, **SMALL, d=1, epsilon=1, trials=2000)
    assert found.mechanism == "l2-laplace"
    assert found.empirical_epsilon > 0.1


def test_the_batched_claim_holds(db: Database) -> None:
    """Ten rows a batch and a regulariser: where the paper divides by the batch size once too often."""
    attacked(db, **{**SMALL, "batch_size": 10}, epsilon=2, trials=300)


def test_bad_rows_are_no_tell(db: Database) -> None:
    """Neighbours where one row is missing, infinite, too long or mislabelled: nothing but the noise differs."""
    attacked(db, **{**SMALL, "batch_size": 4, "workers": 2, "shuffle": "each_pass"}, epsilon=1, trials=100)


PRIVATE = [name for name, solver in SOLVERS.items() if solver.private]


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("delta", [0.0, 0.01])
@pytest.mark.parametrize("algorithm", PRIVATE)
def test_every_private_algorithm_keeps_its_claim(db: Database, algorithm: str, delta: float, adjacency: str) -> None:
    try:
        bismarck_dp.explain(algorithm=algorithm, n=100, d=2, epsilon=1, delta=delta, adjacency=adjacency)
    except BismarckError as refusal:
        pytest.skip(str(refusal))
    attacked(db, algorithm=algorithm, epsilon=1, delta=delta, adjacency=adjacency, trials=200)


def test_leaves_nothing_behind(db: Database, sql: Any) -> None:
    before = sql("SELECT count(*) AS c FROM pg_class")[0]["c"]
    attacked(db, **SMALL, epsilon=1, trials=100)
    assert sql("SELECT count(*) AS c FROM pg_class")[0]["c"] == before
    assert db.models() == []


def test_works_for_a_user_without_special_rights(db: Database, sql: Any) -> None:
    sql("CREATE ROLE auditor LOGIN")
    try:
        url = db.engine.url.set(username="auditor")
        found = bismarck_dp.audit(url.render_as_string(hide_password=False), **SMALL, epsilon=1, trials=100)
        assert found.passed
    finally:
        sql("DROP ROLE auditor")


def test_draws_the_trade_off_curve(db: Database, tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    bismarck_dp.audit(db, **SMALL, epsilon=1, trials=100, plot=path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BismarckError, match="cannot be written"):
        bismarck_dp.audit(db, **SMALL, epsilon=1, trials=100, plot=tmp_path / "no" / "curve.png")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"epsilon": None}, "needs an epsilon"),
        ({"epsilon": 1, "trials": 5}, "5 trials are too few"),
        ({"epsilon": 1, "seed": 3}, "not private"),
        ({"epsilon": None, "algorithm": "sgd"}, "claims no privacy"),
        ({"epsilon": 1, "epoch": 3}, 'unknown option "epoch"'),
        ({"epsilon": 1, "n": 10}, "10 rows are too few"),
        ({"epsilon": 1, "n": 20, "batch_size": 50}, "larger than the table"),
        ({"epsilon": 1, "loss": "hinge"}, "not smooth"),
    ],
)
def test_refuses_what_it_cannot_audit(db: Database, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        db.audit(**spec)
