"""Attacks end to end: dp_train on neighbouring tables, thousands of times. No claim is broken, and the report is right.

test_mutations.py runs the named tests of this file on broken copies of the project, where they must fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from conftest import needed, plans, two_classes

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


@pytest.mark.parametrize("delta", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["softmax", "ovr"])
def test_the_claim_of_many_classes_holds(db: Database, kind: str, delta: float) -> None:
    """One noise for the weights of all classes; for one against the rest a pair comes up to the joint sensitivity."""
    loss = "logistic" if kind == "softmax" else "huber"
    found = attacked(db, **{**SMALL, "loss": loss}, classes=3, multiclass=kind, epsilon=1, delta=delta, trials=300)
    assert found.measured_sensitivity > (0.9 if kind == "ovr" else 0.3) * found.sensitivity


def test_the_claim_of_many_classes_is_not_idle(db: Database) -> None:
    found = attacked(db, **SMALL, classes=3, epsilon=1, delta=0.01, trials=2000)
    assert found.empirical_epsilon > 0.02, "the attack sees the row through the noise"


@pytest.mark.parametrize("algorithm", ["scs13", "dpsgd"])
def test_noisy_sums_of_many_classes_keep_their_claim(db: Database, algorithm: str) -> None:
    attacked(db, algorithm=algorithm, classes=3, epsilon=1, delta=0.01, epochs=2, n=20, trials=200)


def test_the_claim_of_projected_rows_holds(db: Database) -> None:
    """Rows far beyond their bound are among the neighbours: they are cut after they were projected."""
    attacked(db, **SMALL, d=3, project_dim=2, epsilon=1, delta=0.01, trials=300)


def test_measured_bounds_are_attacked_elsewhere(db: Database) -> None:
    with pytest.raises(BismarckError, match="measured bounds have noise of their own"):
        db.audit(**SMALL, scale="quantile", epsilon=1)


CLAIMS = [
    (name, delta, adjacency)
    for name, solver in SOLVERS.items()
    for delta in (0.0, 0.01)
    for adjacency in ("replace", "zero-out")
    if solver.private and plans(name, 1.0, delta, adjacency)
]


def test_every_private_algorithm_has_a_claim() -> None:
    assert {name for name, _, _ in CLAIMS} == {name for name, solver in SOLVERS.items() if solver.private}


@pytest.mark.parametrize(("algorithm", "delta", "adjacency"), CLAIMS)
def test_every_private_algorithm_keeps_its_claim(db: Database, algorithm: str, delta: float, adjacency: str) -> None:
    """A short run for whatever is registered: 200 trials prove little, but shape, play and noise are checked whole."""
    spec = {"algorithm": algorithm, "epsilon": 1, "delta": delta, "adjacency": adjacency}
    attacked(db, **spec, **needed(algorithm), trials=200)


OPERATOR = """
    CREATE TABLE hijacked (who text);
    CREATE FUNCTION hijack(text, int) RETURNS text LANGUAGE plpgsql AS
        'BEGIN INSERT INTO public.hijacked VALUES (current_user); RETURN $1; END';
    CREATE OPERATOR || (LEFTARG = text, RIGHTARG = int, FUNCTION = hijack);
"""


def test_an_odd_schema_and_foreign_operators_do_no_harm(server: Database) -> None:
    engine = server.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE odd")
    odd = sqlalchemy.create_engine(server.engine.url.set(database="odd"), poolclass=sqlalchemy.pool.NullPool)
    try:
        with odd.begin() as connection:
            connection.exec_driver_sql('CREATE SCHEMA "We%%ird; s(x)"')
            connection.exec_driver_sql('CREATE EXTENSION bismarck_dp SCHEMA "We%%ird; s(x)" CASCADE')
            connection.exec_driver_sql(OPERATOR)
        assert Database(odd).audit(**SMALL, epsilon=1, trials=100).passed
        with odd.connect() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM hijacked").scalar() == 0
    finally:
        odd.dispose()
        with engine.connect() as connection:
            connection.exec_driver_sql("DROP DATABASE odd")


def test_keeps_out_of_the_way_of_others(db: Database, table: Any) -> None:
    """Models named like its own, and temporary tables of the user's connection."""
    rows = table(*two_classes(50, 2))
    db.train(rows.name, model="audit 1", epsilon=1)
    with db.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TEMP TABLE mine (a int)")
    attacked(db, **SMALL, epsilon=1, trials=100)
    with db.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE mine")


def test_says_how_much_it_could_have_proven(db: Database) -> None:
    found = attacked(db, **SMALL, epsilon=5, trials=100)
    assert 2 < found.provable_epsilon < 2.5
    assert len(found.first_row) == len(found.second_row) == 3
    assert found.first_row != found.second_row


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
        ({"epsilon": 1, "trials": 5}, "trials is 5"),
        ({"epsilon": 1, "seed": 3}, "not private"),
        ({"epsilon": None, "algorithm": "sgd"}, "claims no privacy"),
        ({"epsilon": 1, "epoch": 3}, 'unknown option "epoch"'),
        ({"epsilon": 1, "n": 10}, "n is 10"),
        ({"epsilon": 1, "n": 20.5}, "n is 20.5"),
        ({"epsilon": 1, "trials": "100"}, "trials is '100'"),
        ({"epsilon": 1, "lambda": 0.1, "lambda_": 0.2}, "lambda is given twice"),
        ({"epsilon": 1, "n": 20, "batch_size": 50}, "larger than the table"),
        ({"epsilon": 1, "loss": "hinge"}, "not smooth"),
    ],
)
def test_refuses_what_it_cannot_audit(db: Database, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        db.audit(**spec)
