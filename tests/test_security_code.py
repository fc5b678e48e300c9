"""Attacks with code: functions of users that wait for someone with more rights to run them.

The spies of protected.py write down who ran them. Each trap is shown to spring where it should; while rows are read
with the extension's rights, nobody's code runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from protected import ROWS, SPY, Secret, train

# ---- what is attached to the table ----

FOLDED = {
    "index": "CREATE INDEX ON secret ((public.spy(1)))",
    "partial_index": "CREATE INDEX ON secret (id) WHERE public.spy(1) = 1",
    "statistics": "CREATE STATISTICS s ON (public.spy(1) + id), (y + 1) FROM secret",
}


@pytest.mark.parametrize("statement", FOLDED.values(), ids=FOLDED.keys())
def test_expressions_that_a_planner_folds_do_not_run(secret: Secret, statement: str) -> None:
    """A call with constant arguments is run when a query is planned, as whoever reads the table."""
    secret.keeper(SPY)
    secret.keeper(statement)
    secret.keeper("GRANT SELECT ON secret TO outsider")
    secret.sprung()
    secret.outsider("SELECT y FROM secret")
    assert secret.sprung() == ["outsider"]
    assert secret.analyst(train())[0]["n"] == ROWS
    assert secret.sprung() == []


def test_an_index_makes_nobody_superuser(secret: Secret) -> None:
    """The whole way, as it once worked: the index's function changes a role when the extension's owner plans."""
    secret.keeper(
        "CREATE FUNCTION climb() RETURNS int LANGUAGE plpgsql AS"
        " $$ BEGIN IF current_user = 'postgres' THEN ALTER ROLE keeper SUPERUSER; END IF; RETURN 1; END $$;"
        " CREATE FUNCTION ladder(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN public.climb(); END $$; CREATE INDEX ON secret ((ladder(1)))"
    )
    secret.analyst(train())
    super_now = "SELECT rolsuper FROM pg_roles WHERE rolname = 'keeper'"
    assert secret.root.one(super_now) is False
    secret.root("SELECT y FROM secret; COMMIT")  # PostgreSQL's own: a superuser who reads plans with all rights
    assert secret.root.one(super_now) is True
    secret.root("ALTER ROLE keeper NOSUPERUSER")


def test_an_analyst_who_is_owner_and_stranger_at_once_gains_nothing(secret: Secret) -> None:
    """A member of dp_analyst owns a protected table, and trains on it as dp_analyst, which does not own it."""
    secret.analyst(SPY)
    secret.analyst("CREATE TABLE mine AS SELECT i % 2 AS y, ARRAY[i / 60.0] AS x FROM generate_series(1, 60) AS i")
    secret.analyst("CREATE INDEX ON mine ((public.spy(1)))")
    secret.analyst("SELECT * FROM dp_protect('mine', 10, 0, '{\"classes\": {\"y\": [0, 1]}}')")
    secret.sprung()
    secret.analyst("SET ROLE dp_analyst")
    secret.analyst(train(source="mine"))
    assert secret.sprung() == []
    assert secret.root.one("SELECT who FROM bismarck_dp.entry ORDER BY id DESC LIMIT 1") == "dp_analyst"


WAITING = {
    "REFRESH MATERIALIZED VIEW view": "CREATE MATERIALIZED VIEW view AS SELECT public.spend(1) AS a",
    "REINDEX TABLE heap": "CREATE INDEX ON heap (public.spend(a))",
    "ANALYZE heap": "CREATE INDEX ON heap (public.spend(a))",
}
"""What somebody else will do, and what lies there for him."""


@pytest.mark.parametrize("chore", WAITING)
def test_chores_of_others_pay_for_nothing(secret: Secret, chore: str) -> None:
    """Code of an analyst that a superuser runs without knowing: the ledger would say that he was logged in."""
    secret.analyst("CREATE TABLE armed (a int); CREATE TABLE heap AS SELECT 1 AS a")
    secret.analyst(
        "CREATE FUNCTION public.spend(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN"
        " IF EXISTS (SELECT FROM public.armed) THEN"
        " PERFORM public.dp_train('public.secret', 'spent', 'y', '{x}', 1); END IF; RETURN $1; END $$"
    )
    secret.analyst(WAITING[chore])
    secret.analyst("INSERT INTO armed VALUES (1)")
    secret.root.refused(chore, "no debit is made by what an index or a materialized view computes")
    assert secret.releases() == 0
    secret.analyst("SELECT public.spend(1)")
    assert secret.releases() == 1, "the trap works"


def test_row_policies_neither_run_nor_hide_rows(secret: Secret) -> None:
    """n is that of the table, whatever its policies say, forced or not."""
    secret.keeper(SPY)
    secret.keeper(
        "ALTER TABLE secret ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;"
        " CREATE POLICY few ON secret USING (id < 3 AND public.spy() = 1); GRANT SELECT ON secret TO outsider"
    )
    assert len(secret.outsider("SELECT y FROM secret")) == 2
    assert secret.sprung() == ["outsider"]
    assert secret.analyst(train())[0]["n"] == ROWS
    secret.analyst("SET row_security = off")
    assert secret.analyst(train("second"))[0]["n"] == ROWS
    assert secret.sprung() == []


def test_triggers_of_the_table_do_not_run(secret: Secret) -> None:
    secret.keeper(SPY)
    secret.keeper(
        "CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM spy(); RETURN NEW; END $$;"
        " CREATE TRIGGER fire BEFORE INSERT OR UPDATE OR DELETE ON secret FOR EACH STATEMENT EXECUTE FUNCTION fire();"
        " UPDATE secret SET y = y"
    )
    assert secret.sprung() == ["keeper"]
    secret.analyst(train())
    assert secret.sprung() == []


def test_an_analyst_makes_no_trigger_rule_or_index(secret: Secret) -> None:
    """Neither on the table nor on ours: code on them would run as whoever writes or reads."""
    secret.analyst("CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")
    secret.analyst("CREATE TABLE mine (id int); CREATE TRIGGER t BEFORE INSERT ON mine EXECUTE FUNCTION fire()")
    for table in ("secret", "bismarck_dp.model", "bismarck_dp.entry", "bismarck_dp.protected"):
        secret.analyst.refused(f"CREATE TRIGGER t BEFORE INSERT ON {table} EXECUTE FUNCTION fire()")
        for statement in (
            f"CREATE RULE r AS ON INSERT TO {table} DO ALSO SELECT 1",
            f"CREATE INDEX ON {table} (id)",
            f"CREATE POLICY p ON {table} USING (true)",
            f"CREATE STATISTICS s ON id, (id + 1) FROM {table}",
            f"ALTER TABLE {table} DISABLE TRIGGER ALL",
        ):
            secret.analyst.refused(statement, "permission denied|must be owner")


def test_event_triggers_are_the_superusers(secret: Secret) -> None:
    """One of a superuser's runs within a training, as the extension's owner: nobody else may make one."""
    secret.root(SPY)
    body = "RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM public.spy(); END $$"
    for one in (secret.keeper, secret.analyst):
        one(f"CREATE FUNCTION {one.one('SELECT current_user')}_event() {body}")
    secret.analyst.refused("CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION analyst_event()")
    secret.keeper.refused("CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION keeper_event()")
    secret.root("CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION analyst_event()")
    try:
        secret.analyst(train())
        assert "postgres" in secret.sprung()
    finally:
        secret.root("DROP EVENT TRIGGER e; DROP TABLE sprung CASCADE; DROP FUNCTION spy(), spy(anyelement)")


def test_generated_columns_and_defaults_do_not_run(secret: Secret) -> None:
    """A stored column was computed when its row was written; a default that is no constant, too."""
    secret.keeper(SPY)
    secret.keeper(
        "CREATE TABLE made (y float8, x float8 GENERATED ALWAYS AS (public.spy(y)) STORED);"
        " INSERT INTO made SELECT i % 2 FROM generate_series(1, 60) AS i;"
        " ALTER TABLE made ADD COLUMN once float8 DEFAULT 0.5, ADD COLUMN each int DEFAULT public.spy()"
    )
    assert secret.sprung() == ["keeper"]
    secret.protect("made")
    found = secret.analyst("SELECT * FROM dp_train('made', 'm', 'y', '{x,once,each}', 1)")
    assert (found[0]["n"], found[0]["d"]) == (60, 3)
    assert secret.sprung() == []


def test_rules_of_the_table_do_not_run(secret: Secret) -> None:
    secret.keeper(SPY)
    secret.keeper("CREATE RULE r AS ON UPDATE TO secret DO ALSO SELECT public.spy(); UPDATE secret SET y = y")
    assert secret.sprung() == ["keeper"]
    secret.analyst(train())
    assert secret.sprung() == []


def test_a_table_that_became_a_view_is_not_read(secret: Secret) -> None:
    """A rule ON SELECT once made a view of a table, and keeps its number; later servers refuse the rule."""
    secret.keeper(SPY)
    secret.keeper("CREATE TABLE turned (y float8, x float8[])")
    secret.protect("turned", options='{"lengths": {"x": 2}}')
    rule = 'CREATE RULE "_RETURN" AS ON SELECT TO turned DO INSTEAD SELECT y + public.spy() AS y, x FROM secret'
    if secret.root.one("SELECT current_setting('server_version_num')::int") >= 160000:
        secret.keeper.refused(rule, "cannot have ON SELECT rules")
        return
    secret.keeper(rule)
    secret.keeper("SELECT y FROM turned")
    assert secret.sprung() == ["keeper"]
    secret.analyst.refused(train(source="turned"), "the source is no plain table")
    assert secret.sprung() == []


# ---- what the analyst brings ----


def test_views_of_the_analysts_read_with_her_own_rights(secret: Secret) -> None:
    """A view, with or without a function that shows each row, is not the protected table."""
    secret.analyst(
        "CREATE TABLE shown (y float8); CREATE FUNCTION show(y float8) RETURNS float8 LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.shown VALUES (y); RETURN y; END $$;"
        " CREATE VIEW plain AS SELECT y, x FROM secret; CREATE VIEW leaky AS SELECT show(y) AS y, x FROM secret;"
        " CREATE TABLE own AS SELECT i % 2 AS y, ARRAY[i / 60.0] AS x FROM generate_series(1, 60) AS i;"
        " CREATE VIEW works AS SELECT show(y) AS y, x FROM own"
    )
    for view in ("plain", "leaky"):
        secret.analyst.refused(train(source=view), "permission denied for table secret")
    secret.analyst.refused("CREATE MATERIALIZED VIEW kept AS SELECT y, x FROM secret", "permission denied for table")
    assert secret.analyst("SELECT * FROM shown") == []
    secret.analyst(train(source="works"))
    assert len(secret.analyst("SELECT * FROM shown")) >= 60
    assert secret.releases() == 0


def test_a_view_read_within_a_tuning_reaches_nothing_of_it(secret: Secret) -> None:
    """public_source is read with the analyst's rights while the source is already open to the extension."""
    secret.analyst(
        "CREATE TABLE tried (what text, got text); CREATE TABLE own AS"
        " SELECT i % 2 * 2 - 1 AS y, ARRAY[i / 60.0, 0.5] AS x FROM generate_series(1, 60) AS i"
    )
    secret.analyst(
        """
        CREATE FUNCTION try(what text) RETURNS int LANGUAGE plpgsql AS $$ DECLARE got text; BEGIN
            EXECUTE what INTO got; INSERT INTO public.tried VALUES (what, got); RETURN 0;
            EXCEPTION WHEN OTHERS THEN INSERT INTO public.tried VALUES (what, SQLERRM); RETURN 0; END $$;
        CREATE FUNCTION reach() RETURNS int LANGUAGE plpgsql AS $$ DECLARE name text; BEGIN
            IF EXISTS (SELECT FROM public.tried)
                OR NOT EXISTS (SELECT FROM pg_class WHERE relname LIKE 'run\\_%') THEN RETURN 0; END IF;
            FOR name IN SELECT relname FROM pg_class WHERE relname LIKE 'run\\_%' LOOP
                PERFORM public.try('SELECT rows::text FROM bismarck_dp.' || name); END LOOP;
            PERFORM public.try('SELECT y FROM public.secret LIMIT 1');
            PERFORM public.try('SELECT bismarck_dp.admit(''public.secret'')');
            PERFORM public.try('SELECT bismarck_dp.winner(1)');
            PERFORM public.try('SET ROLE keeper');
            PERFORM public.try('SELECT current_user');
            PERFORM public.try('SELECT (bismarck_dp.call(''explain'', ''{}'')) ->> ''x''');
            RETURN 0; END $$;
        CREATE VIEW nosy AS SELECT y + public.reach() AS y, x FROM own
        """
    )
    secret.analyst(
        "SELECT * FROM dp_tune('secret', 'm', 'y', '{x}', 1, grid => '{\"epochs\": [1, 2]}', public_source => 'nosy')"
    )
    tried = {row["what"]: row["got"] for row in secret.analyst("SELECT * FROM tried")}
    assert tried.pop("SELECT current_user") == "analyst"
    assert any("bismarck_dp.run_" in what for what in tried), "portions are there to be reached"
    for what, got in tried.items():
        assert any(text in got for text in ("permission denied", "cannot set parameter", "malformed")), (what, got)
    assert secret.releases() == 1


SHADOWS = """
    CREATE SCHEMA {trap};
    CREATE FUNCTION {trap}.spring() RETURNS int LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO public.sprung VALUES (current_user); RETURN 1; END $$;
    CREATE FUNCTION {trap}.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT {trap}.spring()::bigint';
    CREATE FUNCTION {trap}.to_jsonb(anyelement) RETURNS jsonb LANGUAGE sql AS 'SELECT to_json({trap}.spring())::jsonb';
    CREATE FUNCTION {trap}.pg_has_role(oid, oid, text) RETURNS boolean LANGUAGE sql AS 'SELECT {trap}.spring() > 0';
    CREATE FUNCTION {trap}.pg_has_role(oid, text) RETURNS boolean LANGUAGE sql AS 'SELECT {trap}.spring() > 0';
    CREATE FUNCTION {trap}.sum(numeric) RETURNS numeric LANGUAGE sql AS 'SELECT {trap}.spring() * 0.0';
    CREATE FUNCTION {trap}.jsonb_populate_record(anyelement, jsonb) RETURNS anyelement LANGUAGE sql AS
        'SELECT $1 FROM {trap}.spring()';
    CREATE FUNCTION {trap}.same(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT {trap}.spring() > 0';
    CREATE OPERATOR {trap}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {trap}.same);
    CREATE FUNCTION {trap}.same(oid, oid) RETURNS boolean LANGUAGE sql AS 'SELECT {trap}.spring() > 0';
    CREATE OPERATOR {trap}.= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = {trap}.same);
    CREATE FUNCTION {trap}.less(numeric, numeric) RETURNS boolean LANGUAGE sql AS 'SELECT {trap}.spring() > 0';
    CREATE OPERATOR {trap}.<= (LEFTARG = numeric, RIGHTARG = numeric, FUNCTION = {trap}.less);
    CREATE FUNCTION {trap}.get(jsonb, text) RETURNS jsonb LANGUAGE sql AS 'SELECT to_json({trap}.spring())::jsonb';
    CREATE OPERATOR {trap}.-> (LEFTARG = jsonb, RIGHTARG = text, FUNCTION = {trap}.get);
    CREATE FUNCTION {trap}.checked(pg_catalog.text) RETURNS boolean LANGUAGE sql AS 'SELECT {trap}.spring() > 0';
    CREATE DOMAIN {trap}.text AS pg_catalog.text CHECK ({trap}.checked(VALUE));
    CREATE DOMAIN {trap}.jsonb AS pg_catalog.jsonb CHECK ({trap}.checked(VALUE::pg_catalog.text));
    CREATE DOMAIN {trap}.regclass AS pg_catalog.regclass CHECK ({trap}.checked(VALUE::pg_catalog.text));
    CREATE TABLE {trap}.model AS SELECT {trap}.spring() AS id;
    CREATE TABLE {trap}.entry AS SELECT 0 AS id; CREATE TABLE {trap}.protected AS SELECT 0 AS id;
    CREATE TABLE {trap}.pg_roles AS SELECT true AS rolsuper, 0::oid AS oid
"""
SPRINGS = ("SELECT nextval('s')", "SELECT 'a'::pg_catalog.text = 'b'::pg_catalog.text", "SELECT 'a'::text")


@pytest.mark.parametrize("schema", ["trap", "pg_temp"])
def test_shadowed_names_are_not_found(secret: Secret, schema: str) -> None:
    """In a schema before pg_catalog, and in the temporary one, which is looked at first for tables and types."""
    secret.keeper(SPY)
    secret.root("GRANT CREATE ON DATABASE bismarck TO analyst")
    text = SHADOWS.format(trap=schema)
    secret.analyst(text if schema == "trap" else text.replace("CREATE SCHEMA pg_temp;", ""))
    secret.analyst("CREATE SEQUENCE public.s")
    secret.analyst(f"SET search_path = {schema}, pg_catalog, public")
    secret.sprung()
    for spring in SPRINGS if schema == "trap" else SPRINGS[2:]:
        secret.analyst(spring)
        assert secret.sprung() == ["analyst"], spring
    secret.analyst(train(source="public.secret"))
    secret.analyst("SELECT * FROM public.dp_explain('public.secret', 'e', 'y', '{x}', 1)")
    secret.analyst("SELECT * FROM public.dp_evaluate('m', 'public.secret', epsilon => 1)")
    secret.analyst("SELECT * FROM public.dp_budget('public.secret')")
    secret.analyst("SELECT public.dp_forget('m')")
    assert set(secret.sprung()) <= {"analyst"}
    assert secret.releases() == 2
    secret.root("REVOKE CREATE ON DATABASE bismarck FROM analyst")


def test_names_shadowed_in_public_are_not_found(secret: Secret) -> None:
    """Functions of a better fit in the schema that everyone has in their path: not even the wrappers find them."""
    secret.keeper(SPY)
    for name, arguments in (("jsonb_build_object", "text, oid"), ("dp_debit", "jsonb"), ("caller", "")):
        secret.analyst(
            f"CREATE FUNCTION public.{name}({arguments}) RETURNS jsonb LANGUAGE sql AS 'SELECT spy()::text::jsonb'"
        )
    secret.analyst("CREATE FUNCTION public.nextval(text) RETURNS bigint LANGUAGE sql AS 'SELECT spy()::bigint'")
    secret.analyst("SELECT nextval('s'::text)")
    assert secret.sprung() == ["analyst"]
    secret.analyst(train())
    secret.keeper(train("own"))
    assert secret.sprung() == []


def test_a_better_fitting_namesake_is_what_is_called(secret: Secret) -> None:
    """Open where others may create functions in our schema: PostgreSQL calls what fits best. A schema's name helps not
    against that, but taking the right away does.
    """
    secret.keeper(SPY)
    secret.analyst(
        "CREATE FUNCTION public.dp_budget(text) RETURNS text LANGUAGE sql AS 'SELECT spy()::text';"
        "GRANT EXECUTE ON FUNCTION public.dp_budget(text) TO PUBLIC"
    )
    secret.keeper("SELECT dp_budget('secret'::text)")
    assert secret.sprung() == ["keeper"]
    secret.keeper("SELECT * FROM dp_budget('secret'::regclass)")
    assert secret.sprung() == []


def test_casts_and_domains_of_the_analysts_run_as_her(secret: Secret) -> None:
    """Arguments are converted before the door, with the rights of whoever calls."""
    secret.keeper(SPY)
    secret.analyst(
        "CREATE DOMAIN checked AS regclass CHECK (spy() = 1); CREATE DOMAIN asked AS jsonb CHECK (spy() = 1);"
        " CREATE TYPE mine AS (options jsonb); CREATE FUNCTION cast_mine(mine) RETURNS jsonb LANGUAGE sql AS"
        " 'SELECT $1.options FROM spy()'; CREATE CAST (mine AS jsonb) WITH FUNCTION cast_mine(mine) AS IMPLICIT"
    )
    for source, options in (("'secret'::checked", "'{}'::asked"), ("'secret'", "ROW('{}')::mine")):
        secret.analyst(f"SELECT * FROM dp_train({source}, 'm', 'y', '{{x}}', 1, options => {options})")
        assert secret.sprung() == ["analyst"]
        secret.analyst("SELECT dp_forget('m')")
    for statement in (
        "CREATE CAST (bismarck_dp.state AS bytea) WITHOUT FUNCTION",
        "CREATE CAST (bismarck_dp.block AS text) WITH INOUT",
        "CREATE CAST (text AS jsonb) WITH INOUT AS IMPLICIT",
    ):
        secret.analyst.refused(statement, "must be (superuser|owner)")


def test_a_domain_of_the_tables_own_is_not_checked(secret: Secret) -> None:
    """Columns of a domain are read as the type below: its check ran when the row was written."""
    secret.keeper(SPY)
    secret.keeper("CREATE DOMAIN watched AS float8 CHECK (public.spy() = 1); CREATE DOMAIN many AS float8[]")
    secret.keeper("CREATE TABLE kept AS SELECT y::watched AS y, x::many AS x FROM secret")
    assert secret.sprung() == ["keeper"]
    secret.protect("kept")
    secret.analyst(train(source="kept"))
    assert secret.sprung() == []


# ---- which rows ----


def test_children_are_not_read(secret: Secret) -> None:
    """Only the owner may add one; its rows are not the protected table's."""
    secret.analyst.refused("CREATE TABLE child () INHERITS (secret)", "must be owner of table secret")
    secret.keeper("CREATE TABLE child () INHERITS (secret); INSERT INTO child SELECT * FROM secret")
    assert secret.keeper.one("SELECT count(*) FROM secret") == 2 * ROWS
    assert secret.analyst(train())[0]["n"] == ROWS
    secret.keeper.refused(
        "SELECT * FROM dp_protect('child', 1, 0)", "is a partition, or has or is an inheritance child"
    )


def test_partitions_are_not_protected_and_show_nothing_through_their_parent(secret: Secret) -> None:
    secret.keeper(
        "CREATE TABLE parent (id int, y float8, z numeric, x float8[]) PARTITION BY LIST (id);"
        " ALTER TABLE parent ATTACH PARTITION secret DEFAULT; CREATE TABLE part PARTITION OF parent FOR VALUES IN (0)"
    )
    secret.keeper.refused("SELECT * FROM dp_protect('parent', 1, 0)", "is no plain table")
    secret.keeper.refused("SELECT * FROM dp_protect('part', 1, 0)", "is a partition")
    secret.analyst.refused(train(source="parent"), "permission denied for table parent")
    secret.keeper("INSERT INTO parent SELECT 0, y, z, x FROM secret")
    assert secret.analyst(train())[0]["n"] == ROWS


def test_what_is_no_table_is_not_protected(secret: Secret) -> None:
    """Foreign tables, views, temporary ones: their rows come from elsewhere, or from code."""
    secret.root("CREATE EXTENSION file_fdw; CREATE SERVER files FOREIGN DATA WRAPPER file_fdw")
    try:
        secret.root(
            "CREATE FOREIGN TABLE passwd (y text) SERVER files OPTIONS (filename '/etc/passwd', delimiter E'\\x01')"
        )
        secret.root("ALTER FOREIGN TABLE passwd OWNER TO keeper")
        assert secret.keeper("SELECT y FROM passwd")
        secret.keeper.refused("SELECT * FROM dp_protect('passwd', 1, 0)", "is no plain table")
        secret.analyst.refused("CREATE FOREIGN TABLE mine (y text) SERVER files OPTIONS (filename '/etc/passwd')")
    finally:
        secret.root("DROP EXTENSION file_fdw CASCADE")
    secret.keeper("CREATE VIEW seen AS SELECT y, x FROM secret; CREATE TEMP TABLE short AS SELECT y, x FROM secret")
    secret.keeper("CREATE MATERIALIZED VIEW kept AS SELECT y, x FROM secret; CREATE SEQUENCE counted")
    for source, why in (("seen", "no plain"), ("kept", "no plain"), ("counted", "no plain"), ("short", "temporary")):
        secret.keeper.refused(f"SELECT * FROM dp_protect('{source}', 1, 0)", f"is {why}")


PLANNER = "enable_seqscan = off; SET enable_bitmapscan = off; SET random_page_cost = 0.0001; SET cpu_tuple_cost = 1000"


def test_settings_of_the_planner_change_nothing(secret: Secret) -> None:
    """A covering index that hides half of the rows' pages from a plain scan is not used: no query is planned."""
    secret.keeper("CREATE INDEX covering ON secret (y, z)")
    secret.root("VACUUM ANALYZE secret")
    secret.keeper(f"SET {PLANNER}")
    plan = secret.keeper("EXPLAIN (COSTS OFF) SELECT y, z FROM secret")
    assert "Index Only Scan" in str(plan)
    parallel = (
        "force_parallel_mode"
        if secret.root.one("SELECT current_setting('server_version_num')::int") < 160000
        else "debug_parallel_query"
    )
    secret.analyst(
        f"SET {PLANNER}; SET {parallel} = on; SET min_parallel_table_scan_size = 0; SET parallel_setup_cost = 0;"
        " SET constraint_exclusion = on; SET jit_above_cost = 0; SET work_mem = '64kB'; SET transform_null_equals = on;"
        " SET array_nulls = off; SET quote_all_identifiers = on; SET standard_conforming_strings = off;"
        " SET default_tablespace = 'pg_global'; SET default_toast_compression = 'pglz'"
    )
    secret.analyst.refused("CREATE TABLE nowhere (a int)", "pg_global")
    secret.analyst("SET default_tablespace = ''")
    secret.analyst("BEGIN")
    found = secret.analyst("SELECT n, d FROM dp_train('secret', 'm', 'y', '{z}', 1)")
    used: Any = secret.analyst("SELECT pg_stat_get_xact_numscans('covering'::regclass) AS scans")
    secret.analyst("COMMIT")
    assert found == [{"n": ROWS, "d": 1}]
    assert used == [{"scans": 0}]
    assert secret.releases() == 1
