"""Protected tables: who may train on what, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import needed, plans, two_classes
from protected import entry_of, notices, protect

from bismarck_dp import BismarckError, Spec, make_plan
from bismarck_dp.accounting import Event
from bismarck_dp.budget import price_of_event
from bismarck_dp.controller.database import Database
from bismarck_dp.controller.engines import Request, SqlEngine
from bismarck_dp.controller.train import train
from bismarck_dp.solvers import SOLVERS

PRIVATE = [name for name in SOLVERS if plans(name, 1.0, 1e-6, "replace") and name not in ("sgd", "cd", "gcd", "scd")]


@pytest.fixture
def rows(table: Any) -> Any:
    return table(*two_classes(400, 3))


# ---- what is paid ----


@pytest.mark.parametrize("algorithm", PRIVATE)
def test_every_private_algorithm_pays_for_its_event(db: Database, allowed: Database, rows: Any, algorithm: str) -> None:
    protect(db, rows.name, 8.0, 1e-4)
    model = allowed.train(rows.name, epsilon=0.5, delta=1e-8, algorithm=algorithm, **needed(algorithm))
    entry = entry_of(db, model)
    assert entry["event"] == model.event
    assert (entry["verb"], entry["outcome"], entry["model"], entry["who"]) == ("train", "paid", model.name, "analyst")
    assert (entry["epsilon"], entry["delta"], entry["adjacency"]) == (0.5, 1e-8, "replace")
    event = Event.from_json(model.event)
    assert entry["rho"] >= price_of_event(event, 0.5, 1e-8, "replace", entry_order(db, rows)).rho
    assert model.private


def entry_order(db: Database, rows: Any) -> float:
    with db.engine.begin() as connection:
        query = f"SELECT renyi_order FROM bismarck_dp.protected WHERE source = '{rows.name}'::regclass"
        return float(connection.exec_driver_sql(query).scalar_one())


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("method", ["portions", "random_stopping"])
def test_a_tuning_pays_once_for_everything(
    db: Database, allowed: Database, rows: Any, method: str, adjacency: str
) -> None:
    protect(db, rows.name, 3.0, 1e-6, adjacency=adjacency)
    grid = {"lambda": [0.1, 0.01]}
    model = allowed.tune(
        rows.name, grid=grid, epsilon=1.0, delta=1e-8, method=method, trials=3.0, adjacency=adjacency, batch_size=10
    )
    entry = entry_of(db, model)
    assert [one["outcome"] for one in db.ledger() if one["table"] == rows.name] == ["paid"]
    assert (entry["verb"], entry["spec"]["method"], entry["spec"].get("trials")) == (
        "tune",
        method,
        3.0 if method == "random_stopping" else None,
    )
    assert entry["spec"]["grid"] == [{"lambda": 0.1}, {"lambda": 0.01}]
    assert (entry["spec"]["algorithm"], entry["spec"]["options"]["batch_size"]) == ("bolton", 10)
    assert 0 < entry["rho"] <= 0.5
    assert db.budget(rows.name)["releases"] == 1


def test_a_tuning_by_coins_pays_for_the_portions_it_may_get(db: Database, allowed: Database, rows: Any) -> None:
    """Samples cost more where a portion is smaller: the price is that of the dearest likely sizes."""
    protect(db, rows.name, 20.0, 1e-4, adjacency="zero-out")
    for _ in range(5):
        allowed.tune(
            rows.name,
            grid={"batch_size": [5, 10]},
            epsilon=1.0,
            delta=1e-8,
            algorithm="dpsgd",
            adjacency="zero-out",
            epochs=2,
        )
    assert db.budget(rows.name)["releases"] == 5


def test_tuning_on_public_rows_pays_for_the_winner(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    protect(db, rows.name, 3.0, 1e-6)
    with allowed.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE seen AS SELECT 2.0 * (i %% 2) - 1 AS y, ARRAY[i %% 2, 0.1, 0.2]::float4[] AS x"
            " FROM generate_series(1, 300) i"
        )
    with pytest.warns(UserWarning, match="taken as public"):
        model = allowed.tune(
            rows.name, grid={"lambda": [0.1, 0.01]}, epsilon=1.0, delta=1e-8, public_source="seen", batch_size=10
        )
    entry = entry_of(db, model)
    assert entry["event"] == model.event
    assert entry["epsilon"] == 1.0
    protect(db, rows.name, 3.0, 1e-6)
    with pytest.raises(BismarckError, match=f"public_source is public.{rows.name}, which is protected"):
        allowed.tune("seen", grid={"lambda": [0.1]}, epsilon=1.0, public_source=rows.name)


def test_evaluations_are_paid_for(db: Database, allowed: Database, rows: Any) -> None:
    protect(db, rows.name, 3.0, 1e-6)
    model = allowed.train(rows.name, epsilon=0.5, model="judged")
    assert allowed.evaluate(model, rows.name, epsilon=0.5)["accuracy"] is not None
    assert [(entry["verb"], entry["epsilon"]) for entry in db.ledger() if entry["table"] == rows.name] == [
        ("train", 0.5),
        ("evaluate", 0.5),
    ]
    with pytest.raises(BismarckError, match="only its owner may do without epsilon"):
        allowed.evaluate(model, rows.name)
    with pytest.raises(BismarckError, match="does not allow epsilon 3 and"):
        allowed.evaluate(model, rows.name, epsilon=3.0)
    assert db.evaluate("judged", rows.name)["n"] == 400, "the owner looks for free"
    assert db.budget(rows.name)["releases"] == 2


def test_the_owner_pays_for_private_models_and_for_no_other(db: Database, rows: Any) -> None:
    protect(db, rows.name, 1.0, 0.0)
    assert db.train(rows.name, algorithm="sgd").ledger_id is None
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        assert db.train(rows.name, epsilon=0.5, seed=1).ledger_id is None
    assert db.train(rows.name, epsilon=0.75).ledger_id is not None
    assert db.budget(rows.name) == {
        "epsilon_total": 1.0,
        "epsilon_spent": 0.75,
        "delta_total": 0.0,
        "delta_spent": 0.0,
        "releases": 1,
    }
    with pytest.raises(BismarckError, match=r"does not allow epsilon 0\.5") as refusal:
        db.train(rows.name, epsilon=0.5)
    assert refusal.value.hint == "epsilon 0.25 would fit, with delta 0 and all else the same"
    assert db.train(rows.name, epsilon=0.25).ledger_id is not None


def test_a_table_that_is_not_protected_is_nobodys_business(db: Database, rows: Any) -> None:
    before = len(db.ledger())
    assert db.train(rows.name, epsilon=1.0).ledger_id is None
    assert len(db.ledger()) == before


def test_a_refusal_before_the_debit_spends_nothing(db: Database, allowed: Database, rows: Any) -> None:
    protect(db, rows.name, 3.0, 1e-6, columns=["y", "x"])
    allowed.train(rows.name, epsilon=0.5, model="taken")
    for wrong, message in (
        ({"epsilon": 0.5, "model": "taken"}, "is taken"),
        ({"epsilon": 0.5, "loss": "hinge"}, "hinge"),
        ({"epsilon": 0.5, "features": "z"}, "not open to training"),
        ({"epsilon": 0.5, "label": "id"}, "not open to training"),
        ({"epsilon": 0.5, "batch_size": 401}, "batch_size"),
        ({"epsilon": 0.5, "adjacency": "zero-out"}, "protected under adjacency replace"),
        ({"epsilon": 1e-9}, "rounding alone"),
        (
            {"epsilon": 0.5, "scale": "quantile", "scale_range": [1e-15, 1e15], "delta": 1e-8, "seed": 1},
            "only the owner",
        ),
    ):
        with pytest.raises(BismarckError, match=message):
            allowed.train(rows.name, **wrong)
    assert db.budget(rows.name)["releases"] == 1


def test_too_little_memory_spends_nothing(db: Database, allowed: Database, table: Any) -> None:
    """Counts of measured bounds, too: that is looked at before the debit."""
    rows = table(*two_classes(60, 1500))
    protect(db, rows.name, 3.0, 1e-6)
    with allowed.engine.connect() as connection:
        connection.exec_driver_sql("SET maintenance_work_mem = '1MB'")
        options = '{"scale": "quantile", "private_scale": 0.5, "scale_range": [1e-15, 1e15]}'
        with pytest.raises(Exception, match="measuring bounds of 1500 features takes"):
            connection.exec_driver_sql(
                f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 1.0, 1e-8, options => '{options}')"
            )
    assert db.budget(rows.name)["releases"] == 0


# ---- who may ----


def test_members_of_the_named_roles_alone(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    sql("CREATE ROLE team")
    try:
        protect(db, rows.name, 3.0, 0.0, analysts=["team"])
        with pytest.raises(BismarckError, match=r"permission denied for .*, which is protected"):
            allowed.train(rows.name, epsilon=0.5)
        sql(f"GRANT SELECT ON {rows.name} TO analyst")
        with pytest.raises(BismarckError, match=r"permission denied for .*, which is protected"):
            allowed.train(rows.name, epsilon=0.5)
        for call in (allowed.explain, allowed.train):
            with pytest.raises(BismarckError, match="permission denied"):
                call(rows.name, epsilon=0.5)
        with pytest.raises(BismarckError, match="not protected, or not for you"):
            allowed.budget(rows.name)
        sql(f"REVOKE ALL ON {rows.name} FROM analyst; GRANT team TO analyst")
        assert allowed.train(rows.name, epsilon=0.5).private
        assert allowed.budget(rows.name)["epsilon_spent"] == 0.5
        protect(db, rows.name, 3.0, 0.0, analysts=[])
        with pytest.raises(BismarckError, match="permission denied"):
            allowed.train(rows.name, epsilon=0.5)
    finally:
        db.unprotect(rows.name)
        sql("DROP ROLE team")


def test_unprotected_again_the_callers_own_rights_count(db: Database, allowed: Database, rows: Any) -> None:
    protect(db, rows.name, 3.0, 0.0)
    allowed.train(rows.name, epsilon=0.5)
    db.unprotect(rows.name)
    with pytest.raises(BismarckError, match="permission denied for table"):
        allowed.train(rows.name, epsilon=0.5)
    with pytest.raises(BismarckError, match="not protected"):
        db.unprotect(rows.name)
    assert db.budget(rows.name)["epsilon_spent"] == 0.5, "the owner still sees it"
    assert protect(db, rows.name, 1.0, 0.0)["releases"] == 1
    with pytest.raises(BismarckError, match="does not allow"):
        allowed.train(rows.name, epsilon=0.6)


def test_the_ledger_shows_everyone_their_own(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    protect(db, rows.name, 3.0, 0.0)
    db.train(rows.name, model="ours", epsilon=0.25)
    allowed.train(rows.name, model="theirs", epsilon=0.5)
    assert {entry["who"] for entry in allowed.ledger()} == {"analyst"}
    assert {entry["who"] for entry in db.ledger() if entry["table"] == rows.name} == {"postgres", "analyst"}
    sql(f"ALTER TABLE {rows.name} OWNER TO analyst")
    assert {entry["who"] for entry in allowed.ledger() if entry["table"] == rows.name} == {"postgres", "analyst"}
    sql(f"ALTER TABLE {rows.name} OWNER TO postgres")


# ---- what may go wrong for those who mean well, and for others ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"label": "typo"}, 'column "typo" of'),
        ({"features": "nothing"}, 'column "nothing" of'),
        ({"features": []}, "no feature columns are named"),
        ({"features": ["y", "id"]}, "the columns have 2 features, and the model 3"),
    ],
)
def test_evaluations_that_cannot_be_made_cost_nothing(
    db: Database, allowed: Database, rows: Any, wrong: dict[str, Any], message: str
) -> None:
    protect(db, rows.name, 3.0, 0.0)
    allowed.train(rows.name, model="m", epsilon=0.5)
    for who in (allowed, db):
        with pytest.raises(BismarckError, match=message):
            who.evaluate("m", rows.name, epsilon=0.5, **wrong)
    assert db.budget(rows.name)["releases"] == 1


def test_long_requests_are_not_kept(db: Database, allowed: Database, rows: Any) -> None:
    protect(db, rows.name, 3.0, 0.0)
    allowed.train(rows.name, model="m", epsilon=0.5)
    with pytest.raises(BismarckError, match="does not exist"):
        allowed.evaluate("m", rows.name, features=[f"column {i}" for i in range(1600)], epsilon=5.0)
    with pytest.raises(BismarckError, match="does not allow"):
        allowed.train(rows.name, epsilon=5.0, classes=[i + 0.123456789012 for i in range(1000)])
    refused = [entry for entry in db.ledger() if entry["table"] == rows.name and entry["outcome"] == "refused"]
    assert [sorted(entry["spec"]) for entry in refused] == [["algorithm", "features", "label", "loss", "omitted"]]


def test_a_drop_with_an_old_snapshot_is_seen(db: Database, sql: Any) -> None:
    """Protected after the snapshot was taken: its number is forgotten all the same."""
    sql("CREATE TABLE going AS SELECT 1.0::float8 AS y, ARRAY[1.0]::float8[] AS x")
    with db.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.exec_driver_sql("SELECT count(*) FROM pg_class")
        protect(db, "going", 3.0, 0.0)
        connection.exec_driver_sql("DROP TABLE going; COMMIT")
    found = sql("SELECT source, active FROM bismarck_dp.protected WHERE name = 'public.going' ORDER BY id DESC LIMIT 1")
    assert (found[0]["source"], found[0]["active"]) == (None, False)


def test_a_table_that_is_being_dropped_is_waited_for(db: Database, sql: Any) -> None:
    sql("CREATE TABLE leaving AS SELECT 1.0::float8 AS y, 2.0::float8 AS a")
    with db.engine.connect() as connection:
        connection.exec_driver_sql("DROP TABLE leaving")
        with db.engine.connect() as other:
            other.exec_driver_sql("SET lock_timeout = '200ms'")
            with pytest.raises(Exception, match="lock timeout"):
                other.exec_driver_sql("SELECT dp_protect('leaving', 1, 0)")
            other.rollback()
        connection.commit()
    with pytest.raises(BismarckError, match="does not exist"):
        protect(db, "leaving", 1.0, 0.0)


def test_the_owner_alone_hears_of_rows_that_count_for_nothing(
    db: Database, allowed: Database, rows: Any, sql: Any
) -> None:
    sql(f"UPDATE {rows.name} SET x = '{{NaN,0,0}}' WHERE id <= 7; UPDATE {rows.name} SET y = NULL WHERE id = 400")
    protect(db, rows.name, 9.0, 1e-6)
    train = f"SELECT dp_train('{rows.name}', '%s', 'y', '{{x}}', 0.5, 1e-8, '%s')"
    for algorithm in ("bolton", "dpsgd", "dpcd"):
        assert notices(db, train % (f"ours {algorithm}", algorithm)) == ["8 of 400 rows count for nothing"]
        assert notices(allowed, train % (f"theirs {algorithm}", algorithm)) == []
    db.unprotect(rows.name)
    assert notices(db, train % ("free", "bolton")) == []


def test_who_is_lent_the_owners_rights_hears_nothing(db: Database, allowed: Database, rows: Any, sql: Any) -> None:
    """A function of the owner's that runs with the owner's rights: its caller is somebody else."""
    sql(f"UPDATE {rows.name} SET x = '{{NaN,0,0}}' WHERE id <= 7")
    protect(db, rows.name, 9.0, 0.0)
    body = f"SELECT name FROM dp_train(''{rows.name}'', $1, ''y'', ''{{x}}'', 0.5)"
    sql(f"CREATE FUNCTION lent(text) RETURNS text LANGUAGE sql SECURITY DEFINER AS '{body}'")
    try:
        assert notices(db, "SELECT lent('ours')") == ["7 of 400 rows count for nothing"]
        assert notices(allowed, "SELECT lent('theirs')") == []
    finally:
        sql("DROP FUNCTION lent(text)")


# ---- the unit ----


@pytest.fixture
def visits(db: Database, sql: Any) -> Any:
    """Forty patients, the i-th with i % 5 + 1 visits."""
    sql(
        "CREATE TABLE visits AS SELECT p AS patient, 'p' || p AS name, 2.0 * (p % 2) - 1 AS y,"
        " ARRAY[p % 2, v / 10.0]::float8[] AS x FROM generate_series(1, 40) p, LATERAL generate_series(0, p % 5) v"
    )
    yield "visits"
    sql("DROP TABLE visits")


@pytest.mark.parametrize(("column", "count"), [("patient", 1), ("name", 1), ("patient", 3)])
def test_releases_are_for_the_unit_that_the_owner_named(
    db: Database, allowed: Database, visits: str, column: str, count: int
) -> None:
    said = protect(db, visits, 3.0, 1e-6, privacy_unit=column, unit_rows=count)
    assert said["privacy_unit"] == f"{column}, at most {count} row{'s' if count > 1 else ''}"
    for who in (allowed, db):
        model = who.train(visits, model=f"of {column} {who is db}", epsilon=0.5, delta=1e-8, batch_size=5)
        assert model.n == 40 * count
        assert model.privacy_unit == said["privacy_unit"]
        entry = entry_of(db, model)
        assert (entry["privacy_unit"], entry["unit_rows"], entry["event"]) == (column, count, model.event)
        assert who.explain(visits, epsilon=0.5, batch_size=5)["n"] == 40 * count
    named = {"privacy_unit": column, "unit_rows": count}
    assert allowed.train(visits, model="named", epsilon=0.5, delta=1e-8, batch_size=5, **named).n == 40 * count
    assert "accuracy" in allowed.evaluate("named", visits, epsilon=0.5, delta=1e-8)
    assert db.ledger()[-1]["unit_rows"] == count
    assert db.train(visits, algorithm="sgd", batch_size=5).n == 120, "what is not private takes all rows"


def test_a_unit_costs_what_its_event_says(db: Database, allowed: Database, visits: str) -> None:
    """Three rows of a unit: the event is that of units, nine times a slot's rho."""
    protect(db, visits, 3.0, 1e-6, privacy_unit="patient", unit_rows=3)
    model = allowed.train(visits, epsilon=0.5, delta=1e-8, batch_size=5)
    order = 7.0
    price = price_of_event(Event.from_json(model.event), 0.5, 1e-8, "replace", order)
    slots = model.sensitivity / 3 + model.plan["grid"] * np.sqrt(2)
    assert price.rho == pytest.approx((3 * slots / model.noise_scale) ** 2 / 2, rel=1e-3)


def test_other_units_are_refused(db: Database, allowed: Database, visits: str, rows: Any) -> None:
    """Also where a row is the unit: a promise for units is none for rows, and would show how many units there are."""
    protect(db, visits, 3.0, 1e-6, privacy_unit="patient", unit_rows=2)
    for other in ({"privacy_unit": "name", "unit_rows": 2}, {"privacy_unit": "patient"}):
        for who in (allowed, db):
            with pytest.raises(BismarckError, match="its privacy unit is patient, at most 2 rows"):
                who.train(visits, epsilon=0.5, **other)
    with pytest.raises(BismarckError, match="samples rows, and unit_rows is 2"):
        allowed.train(visits, epsilon=0.5, delta=1e-8, algorithm="dpsgd")
    with pytest.raises(BismarckError, match="tuning divides rows into portions"):
        allowed.tune(visits, grid={"lambda": [0.1]}, epsilon=0.5)
    protect(db, rows.name, 3.0, 1e-6)
    with pytest.raises(BismarckError, match="its privacy unit is row"):
        allowed.train(rows.name, epsilon=0.5, privacy_unit="id")
    with pytest.raises(BismarckError, match="its privacy unit is row"):
        allowed.explain(rows.name, epsilon=0.5, privacy_unit="id")
    assert db.budget(visits)["releases"] == db.budget(rows.name)["releases"] == 0


def test_the_unit_stays_once_something_was_spent(db: Database, visits: str) -> None:
    protect(db, visits, 3.0, 1e-6)
    protect(db, visits, 3.0, 1e-6, privacy_unit="patient")
    db.train(visits, epsilon=0.5, batch_size=5)
    for other in ({"privacy_unit": None}, {"privacy_unit": "name"}, {"privacy_unit": "patient", "unit_rows": 2}):
        with pytest.raises(BismarckError, match="has releases whose privacy unit is patient, at most 1 row"):
            protect(db, visits, 3.0, 1e-6, **other)
    assert protect(db, visits, 9.0, 1e-6, privacy_unit="patient")["releases"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy_unit": "nobody"}, 'unknown column in privacy_unit "nobody"'),
        ({"privacy_unit": "x"}, "x"),
        ({"privacy_unit": 7}, "privacy_unit is 7"),
        ({"unit_rows": 2}, "there is no privacy_unit"),
        ({"privacy_unit": "patient", "unit_rows": 0}, "unit_rows is 0"),
    ],
)
def test_units_that_are_none(db: Database, visits: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        protect(db, visits, 3.0, 1e-6, **options)
    with pytest.raises(BismarckError, match="not protected"):
        db.budget(visits)


def test_tuning_is_for_units_of_one_row(db: Database, allowed: Database, visits: str) -> None:
    protect(db, visits, 3.0, 1e-6, privacy_unit="patient")
    for method in ("portions", "random_stopping"):
        model = allowed.tune(
            visits, model=method, grid={"lambda": [0.1, 1.0]}, epsilon=0.5, delta=1e-8, batch_size=2, method=method
        )
        assert model.tuning["rows"] == 40
        assert model.privacy_unit == "patient, at most 1 row"


# ---- rows that come between the count and the packing ----


class Busy(SqlEngine):
    """Somebody writes to the table right after the debit."""

    database: Database
    statement: str

    def debit(self, entry: dict[str, Any]) -> tuple[str, int | None]:
        answer = super().debit(entry)
        with self.database.engine.begin() as other:
            other.exec_driver_sql(self.statement)
        return answer


def train_busily(db: Database, rows: Any, statement: str, algorithm: str) -> dict[str, Any]:
    with db.engine.begin() as connection:
        engine = Busy(connection)
        engine.database, engine.statement = db, statement
        oid = connection.exec_driver_sql(f"SELECT '{rows.name}'::regclass::oid").scalar_one()
        spec = Spec.create(algorithm, "logistic", 0.5, 1e-8, {"batch_size": 5})
        return train(engine, Request(oid, "busy", "y", ["x"], spec))


@pytest.mark.parametrize("algorithm", ["bolton", "dpsgd", "scs13"])
def test_a_few_rows_more_are_paid_for(db: Database, rows: Any, algorithm: str) -> None:
    protect(db, rows.name, 3.0, 1e-6)
    more = f"INSERT INTO {rows.name} (id, y, x) VALUES (1000, 1, '{{0,0,0}}')"
    assert train_busily(db, rows, more, algorithm)["n"] == 401


def test_rows_that_went_and_make_it_dearer_are_refused(db: Database, table: Any) -> None:
    """Of few rows a sample of five is a larger share: its divergence at one order is larger, for the same epsilon."""
    rows = table(*two_classes(20_000, 3))
    protect(db, rows.name, 3.0, 1e-6)
    spec = Spec.create("dpsgd", "logistic", 0.5, 1e-8, {"batch_size": 5})
    order = entry_order(db, rows)
    costs = [price_of_event(make_plan(spec, n, 3).event, 0.5, 1e-8, "replace", order).rho for n in (20_000, 400)]
    assert costs[1] > costs[0] * 1.002, f"or this test shows nothing: {costs}"
    with pytest.raises(BismarckError, match="rows came or went while they were read"):
        train_busily(db, rows, f"DELETE FROM {rows.name} WHERE id > 400", "dpsgd")
    assert db.budget(rows.name)["releases"] == 1, "paid all the same"
    assert db.models() == []
