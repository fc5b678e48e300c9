"""Who may do what: the source is read with the caller's rights, and nothing un-noised can be had besides."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
import pytest
import sqlalchemy
from conftest import two_classes

from bismarck_dp import Spec, make_plan
from bismarck_dp.controller.database import Database
from bismarck_dp.controller.engines import Request, SqlEngine


def run(db: Database, text: str) -> Any:
    with db.engine.begin() as connection:
        result = connection.execute(sqlalchemy.text(text))
        return result.mappings().all() if result.returns_rows else []


def refused(db: Database, text: str, message: str = "permission denied") -> None:
    with pytest.raises(Exception, match=message):
        run(db, text)


def train_sql(name: str, model: str = "mine", options: str = "{}", source: str = "") -> str:
    return f"SELECT * FROM dp_train('{source or name}', '{model}', 'y', '{{x}}', 1.0, options => '{options}')"


def test_a_table_the_caller_cannot_read(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    refused(analyst, train_sql(rows.name), f"permission denied for table {rows.name}")
    refused(analyst, f"SELECT * FROM dp_explain('{rows.name}', 'm', 'y', '{{x}}', 1.0)", "permission denied for table")
    with pytest.raises(Exception, match="permission denied"):
        analyst.train(rows.name, epsilon=1)
    assert sql("SELECT * FROM bismarck_dp.model") == []


def test_rights_on_the_named_columns_are_enough(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    sql(f"GRANT SELECT (y, x) ON {rows.name} TO analyst")
    assert run(analyst, train_sql(rows.name))[0]["owner"] == "analyst"
    model = analyst.train(rows.name, model="second", epsilon=1.0, epochs=3)
    assert model.private
    assert model.passes == 3
    assert [m.name for m in analyst.models()][:2] == ["mine", "second"]
    assert analyst.explain(rows.name, epsilon=1.0) == db.explain(rows.name, epsilon=1.0)
    with pytest.warns(UserWarning, match="epsilon 20 is large"):
        analyst.train(rows.name, epsilon=20.0)
    sql(f"REVOKE ALL ON {rows.name} FROM analyst")


def test_a_member_of_the_superusers_role_trains_in_the_server(db: Database, table: Any, sql: Any) -> None:
    """What a superuser may set is not inherited."""
    rows = table(*two_classes(100, 3))
    sql("CREATE ROLE deputy LOGIN; GRANT postgres TO deputy")
    deputy = Database(sqlalchemy.create_engine(db.engine.url.set(username="deputy")))
    try:
        assert deputy.train(rows.name, epsilon=1.0).private
        assert deputy.explain(rows.name, epsilon=1.0) == db.explain(rows.name, epsilon=1.0)
    finally:
        deputy.close()
        sql("DELETE FROM bismarck_dp.model; REVOKE postgres FROM deputy; DROP ROLE deputy")


def test_a_seed_is_for_the_owner_of_the_table(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    refused(analyst, train_sql(rows.name, options='{"seed": 1}'), "only the owner of")
    run(analyst, f"CREATE TABLE own AS SELECT * FROM {rows.name}")
    assert not run(analyst, train_sql("own", options='{"seed": 1}'))[0]["private"]
    run(analyst, f"CREATE VIEW seen AS SELECT * FROM {rows.name}")
    refused(analyst, train_sql("seen", "other", options='{"seed": 1}'), "only the owner of")


def test_models_belong_to_the_role_that_trained_them(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    db.train(rows.name, model="theirs", algorithm="sgd")
    assert run(analyst, "SELECT * FROM bismarck_dp.models") == []
    refused(analyst, "SELECT dp_predict('theirs', '{1,2,3}')", 'model "theirs" does not exist')
    refused(analyst, "SELECT dp_forget('theirs')", 'model "theirs" does not exist')
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    refused(analyst, train_sql(rows.name, "theirs"), "is taken")
    run(analyst, train_sql(rows.name))
    assert run(analyst, "SELECT dp_predict('mine', '{1,2,3}') AS p")[0]["p"] in (-1, 1)
    run(analyst, "SELECT dp_forget('mine')")
    assert [m.name for m in db.models()] == ["theirs"]


INTERNALS = [
    "SELECT * FROM bismarck_dp.model",
    "DELETE FROM bismarck_dp.model",
    "SELECT nextval('bismarck_dp.run')",
    "SELECT bismarck_dp.serve('train', '{}')",
    "SELECT bismarck_dp.caller()",
    "SELECT bismarck_dp.describe('pg_authid', 'oid', '{oid}', true, '{}')",
    "SELECT bismarck_dp.pack('pg_authid', 'oid', '{oid}', '{}', '{}')",
    "SELECT bismarck_dp.evaluate('m', 'pg_authid', 'oid', '{oid}', '{}')",
    "SELECT bismarck_dp.noisy_sums('m', 'pg_authid', 'oid', '{oid}', '{}')",
    "SELECT bismarck_dp.repack('{}', '{}', '{}')",
    "SELECT bismarck_dp.pack_columns('pg_authid', 'oid', '{oid}', 'pg_authid', '{}')",
    "SELECT bismarck_dp.descend(1, 'pg_authid', '{}')",
    "SELECT bismarck_dp.begin(1, 'sgd', 1, '{}')",
    "SELECT bismarck_dp.fold(1, 'SELECT 1')",
    "SELECT bismarck_dp.sample(1, '{}', '{}')",
    "SELECT bismarck_dp.objective(1)",
    "SELECT bismarck_dp.release(1, '{}')",
    "SELECT bismarck_dp.merge(NULL)",
    "SELECT bismarck_dp.epoch(NULL, 0, 0, NULL)",
    "CREATE TABLE bismarck_dp.mine (a int)",
]


@pytest.mark.parametrize("statement", INTERNALS)
def test_internals_are_closed(analyst: Database, statement: str) -> None:
    refused(analyst, statement)


def test_the_python_path_is_the_superusers(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    """Set before the module is loaded, or after: a stranger's directory is never imported from."""
    rows = table(*two_classes(60, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    with analyst.engine.begin() as connection:
        connection.exec_driver_sql("SET bismarck_dp.python_path = '/tmp/evil'")
        connection.exec_driver_sql(train_sql(rows.name))
        path = connection.exec_driver_sql("SELECT current_setting('bismarck_dp.python_path')").scalar_one()
        assert path.endswith("/bismarck_dp_python")
        with pytest.raises(Exception, match="permission denied to set parameter"):
            connection.exec_driver_sql("SET bismarck_dp.python_path = '/tmp/evil'")


def test_every_function_but_the_door_is_closed_to_others(db: Database, sql: Any) -> None:
    """A function added later without thought fails here."""
    rows = sql("SELECT proname FROM pg_proc WHERE pronamespace = 'bismarck_dp'::regnamespace"
               " AND has_function_privilege('public', oid, 'EXECUTE')")  # fmt: skip
    assert [row["proname"] for row in rows] == ["call"]


def test_a_views_function_runs_as_the_caller_with_the_callers_path(
    db: Database, analyst: Database, table: Any, sql: Any
) -> None:
    """A view of the caller's sees the caller's rights and search_path, not the extension's; nor can it change role."""
    rows = table(*two_classes(60, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    run(analyst, "CREATE TABLE whoami (who text, path text)")
    run(
        analyst,
        "CREATE FUNCTION spy() RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO whoami VALUES (current_user, current_setting('search_path')); RETURN 1; END $$",
    )
    run(analyst, f"CREATE VIEW nosy AS SELECT CASE WHEN y > 0 THEN spy() ELSE -1 END AS y, x FROM {rows.name}")
    run(analyst, train_sql("nosy"))
    seen = run(analyst, "SELECT DISTINCT who, path FROM whoami")
    assert [(row["who"], row["path"]) for row in seen] == [("analyst", '"$user", public')]
    run(
        analyst,
        "CREATE OR REPLACE FUNCTION spy() RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM set_config('role', 'postgres', true); RETURN 1; END $$",
    )
    refused(analyst, train_sql("nosy", "second"), 'cannot set parameter "role" within security-definer function')


def test_shadowed_names_in_the_callers_path_change_nothing(
    db: Database, analyst: Database, table: Any, sql: Any
) -> None:
    rows = table(*two_classes(60, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst")
    sql("GRANT CREATE ON DATABASE bismarck TO analyst")
    run(analyst, "CREATE SCHEMA trap")
    for name, arguments in (("pg_has_role", "oid, oid, text"), ("nextval", "regclass"), ("to_jsonb", "anyelement")):
        run(
            analyst,
            f"CREATE FUNCTION trap.{name}({arguments}) RETURNS boolean LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'sprung as %', current_user; END $$",
        )
    with analyst.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL search_path = trap, pg_catalog, public")
        row = connection.exec_driver_sql(f"SELECT * FROM public.dp_train('public.{rows.name}', 'm', 'y', '{{x}}', 1.0)")
        assert row.mappings().one()["private"]
    sql("REVOKE CREATE ON DATABASE bismarck FROM analyst")


def test_row_level_security_is_the_callers(db: Database, analyst: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    sql(f"GRANT SELECT ON {rows.name} TO analyst; ALTER TABLE {rows.name} ENABLE ROW LEVEL SECURITY")
    sql(f"CREATE POLICY quarter ON {rows.name} USING (id % 4 = 0)")
    assert run(analyst, train_sql(rows.name))[0]["n"] == 25


@contextmanager
def begun(db: Database, table: Any) -> Iterator[Any]:
    """A private run, packed and begun by hand as the superuser, who alone can: (engine, packed, plan), rolled back."""
    rows = table(*two_classes(100, 3))
    spec = Spec.create("bolton", "logistic", 1.0)
    with db.engine.connect() as connection:
        engine = SqlEngine(connection)
        oid = connection.exec_driver_sql(f"SELECT '{rows.name}'::regclass::oid").scalar_one()
        plan = make_plan(spec, 100, 3)
        packed = engine.pack(Request(oid, "m", "y", ["x"], spec), plan)
        engine.begin(packed, plan)
        yield engine, packed, plan
        connection.rollback()


def test_states_and_blocks_show_a_summary_and_nothing_else(db: Database, table: Any) -> None:
    """Text is a summary; binary output, casts and input are refused, and so is a way out without noise."""
    with begun(db, table) as (engine, packed, _):
        connection, blocks = engine.connection, packed.tables[0]
        assert connection.exec_driver_sql(f"SELECT rows::text FROM {blocks}").scalar_one() == "1600 bytes"

        def fails(statement: str, message: str) -> None:
            with pytest.raises(Exception, match=message), connection.begin_nested():
                connection.exec_driver_sql(statement)

        fails(f"COPY {blocks} TO '/dev/null' (FORMAT binary)", "no binary output function")
        fails(f"SELECT rows::bytea FROM {blocks}", "cannot cast")
        fails("SELECT 'x'::bismarck_dp.state", "cannot be typed in")
        fails("SELECT 'x'::bismarck_dp.block", "cannot be typed in")
        fails(f"SELECT bismarck_dp.objective({packed.run})", "a private run shows no training loss")
        fails(f'SELECT bismarck_dp.release({packed.run}, \'{{"mechanism": "none"}}\')', "released with noise")
        fold = (
            f"SELECT bismarck_dp.fold({packed.run}, 'SELECT bismarck_dp.epoch($1, 0, block, rows)::text FROM {blocks}')"
        )
        fails(fold, "must give one state")


def test_the_state_prints_a_summary(db: Database, table: Any) -> None:
    with begun(db, table) as (engine, packed, _):
        engine.connection.exec_driver_sql(
            "CREATE FUNCTION pg_temp.show(state bismarck_dp.state) RETURNS bismarck_dp.state LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'seen: %%', state; END $$"
        )
        query = f"SELECT pg_temp.show(bismarck_dp.epoch($1, 0, block, rows)) FROM {packed.tables[0]}"
        with pytest.raises(Exception, match="seen: sgd, 3 weights, 0 passes"):
            engine.connection.exec_driver_sql(f"SELECT bismarck_dp.fold({packed.run}, '{query}')")


def test_a_released_state_is_wiped(db: Database, table: Any) -> None:
    with begun(db, table) as (engine, packed, plan):
        engine.epoch(packed, plan)
        assert len(engine.release(packed, plan)) == 3
        with pytest.raises(Exception, match="was not begun"):
            engine.release(packed, plan)


class Notices(list[str]):
    """psycopg2 keeps the last fifty only, in a plain list; this one keeps all."""


def test_printed_plans_show_no_weights(db: Database, table: Any) -> None:
    """The state is a constant of the pass's plan; a caller who prints plans to his own screen must not see it."""
    rows = table(*two_classes(100, 3))
    url = db.engine.url
    connection = psycopg2.connect(host=url.query["host"], port=url.query["port"], user="postgres", dbname="bismarck")
    connection.notices = Notices()
    connection.cursor().execute("SET debug_print_plan = on; SET client_min_messages = log")
    connection.cursor().execute(train_sql(rows.name))
    notices = "".join(connection.notices)
    connection.close()
    assert "plan:" in notices, "printing works, or this test tests nothing"
    assert ":constvalue" in notices
    assert "AGGREF" not in notices


def test_a_views_function_cannot_leave_its_search_path_behind(db: Database, analyst: Database) -> None:
    """A kept search_path would make the extension's own statements resolve names in the caller's temporary schema."""
    url = analyst.engine.url
    connection = psycopg2.connect(host=url.query["host"], port=url.query["port"], user="analyst", dbname="bismarck")
    cursor = connection.cursor()
    cursor.execute(
        """
        CREATE TEMP TABLE t AS
            SELECT (i % 2)::float8 AS y, ARRAY[i / 100.0, 1.0]::float8[] AS x FROM generate_series(1, 100) i;
        CREATE FUNCTION pg_temp.climb(v pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
            IF current_user <> 'analyst' THEN EXECUTE 'ALTER ROLE analyst SUPERUSER'; END IF; RETURN true; END $$;
        CREATE DOMAIN pg_temp.oid AS pg_catalog.oid CHECK (pg_temp.climb(VALUE::pg_catalog.text));
        CREATE DOMAIN pg_temp.jsonb AS pg_catalog.jsonb CHECK (pg_temp.climb(VALUE::pg_catalog.text));
        CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (pg_temp.climb(VALUE));
        CREATE FUNCTION pg_temp.f() RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_catalog.set_config('search_path', 'pg_temp, pg_catalog', false); RETURN 1; END $$;
        CREATE TEMP VIEW v AS SELECT y * pg_temp.f() AS y, x FROM t;
        """
    )
    cursor.execute("SELECT name FROM public.dp_train('v', 'm', 'y', ARRAY['x'], 1.0)")
    cursor.execute("SELECT pg_catalog.current_setting('search_path')")
    assert cursor.fetchone() == ('"$user", public',)
    cursor.execute("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = 'analyst'")
    assert cursor.fetchone() == (False,)
    connection.close()


def test_a_source_exchanged_while_it_is_read(db: Database, analyst: Database) -> None:
    """Types are looked up before rows are read; a table put in its place meanwhile must not be read by them."""
    url = analyst.engine.url
    sessions = [
        psycopg2.connect(host=url.query["host"], port=url.query["port"], user="analyst", dbname="bismarck")
        for _ in "ab"
    ]
    trainer, swapper = (one.cursor() for one in sessions)
    sessions[0].autocommit = True
    trainer.execute(
        "CREATE TABLE swap_a AS SELECT (i % 2)::numeric AS y, ARRAY[i::float8] AS x FROM generate_series(1, 50) i"
    )
    trainer.execute("CREATE TABLE swap_b AS SELECT 1094795585::bigint AS y, x FROM swap_a")
    swapper.execute("ALTER TABLE swap_a RENAME TO swap_old; ALTER TABLE swap_b RENAME TO swap_a")
    outcome: list[Any] = []

    def train() -> None:
        try:
            trainer.execute("SELECT n FROM dp_train('swap_a', 'm', 'y', '{x}', NULL, algorithm => 'sgd')")
            outcome.append(trainer.fetchone())
        except psycopg2.Error as error:
            outcome.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.5)
    sessions[1].commit()
    thread.join(30)
    for one in sessions:
        one.close()
    assert len(outcome) == 1
    assert not isinstance(outcome[0], psycopg2.OperationalError), "the server went down"


def test_predictions_are_not_cached_across_roles_or_commands(
    db: Database, analyst: Database, table: Any, sql: Any
) -> None:
    """PL/pgSQL keeps a call site for a transaction; who asks, and what the name stands for, may change within it."""
    rows = table(*two_classes(200, 2))
    db.train(rows.name, model="mine", algorithm="sgd")
    sql(
        "CREATE FUNCTION ask() RETURNS float8[] LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN dp_predict_proba('mine', '{1,0}'); END $$"
    )
    sql(
        "CREATE FUNCTION ask_as_owner() RETURNS float8[] LANGUAGE plpgsql SECURITY DEFINER AS"
        " $$ BEGIN RETURN ask(); END $$"
    )
    with analyst.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT ask_as_owner()").scalar_one() is not None
        with pytest.raises(Exception, match='model "mine" does not exist'):
            connection.exec_driver_sql("SELECT ask()")
        connection.rollback()
    with db.engine.begin() as connection:
        first = connection.exec_driver_sql("SELECT ask()").scalar_one()
        again = (
            "DO $$ BEGIN PERFORM ask(); PERFORM dp_forget('mine');"
            f" PERFORM dp_train('{rows.name}', 'mine', 'y', '{{x}}', NULL, algorithm => 'sgd',"
            " options => '{\"epochs\": 1}');"
            " CREATE TEMP TABLE answers AS SELECT ask() AS a, dp_predict_proba('mine', '{1,0}') AS b; END $$"
        )
        connection.exec_driver_sql(again)
        answer, fresh = connection.exec_driver_sql("SELECT a, b FROM answers").one()
        connection.exec_driver_sql("DROP TABLE answers")
    sql("DROP FUNCTION ask, ask_as_owner")
    assert answer == fresh != first


def test_the_callers_output_settings_change_no_number(db: Database, table: Any) -> None:
    rows = table(*two_classes(200, 2))
    with db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL extra_float_digits = -15")
        connection.exec_driver_sql(
            f"CREATE TEMP TABLE got AS SELECT * FROM dp_train('{rows.name}', 'm', 'y', '{{x}}', 0.96, 1.49e-6)"
        )
        same = "SELECT g.weights = m.weights, g.epsilon = 0.96, g.delta = 1.49e-6 FROM got g JOIN bismarck_dp.model m"
        same += " USING (id)"
        assert connection.exec_driver_sql(same).one() == (True, True, True)
        connection.exec_driver_sql("DROP TABLE got")


def test_predictions_of_an_undone_model_are_refused(db: Database, table: Any, sql: Any) -> None:
    """A training rolled back within a PL/pgSQL block was never released: its call site must not remember it."""
    rows = table(*two_classes(200, 2))
    with pytest.raises(Exception, match='model "gone" does not exist'):
        sql(
            "DO $$ BEGIN FOR i IN 1..2 LOOP BEGIN"
            f" IF i = 1 THEN PERFORM dp_train('{rows.name}', 'gone', 'y', '{{x}}', 1.0); END IF;"
            " PERFORM dp_predict('gone', '{1,2}'); IF i = 1 THEN RAISE 'undo'; END IF;"
            " EXCEPTION WHEN raise_exception THEN NULL; END; END LOOP; END $$"
        )
