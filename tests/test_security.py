"""Attacks on the door: internals called directly, verbs and requests forged, rights taken from others.

Nothing may be read, spent wrongly or escalated, and each trap is shown to work where it should.
"""

from __future__ import annotations

import io
import json
from typing import Any

import psycopg2
import pytest
from protected import ROWS, Secret, call, train

from bismarck_dp.controller.server import VERBS

# ---- internals ----

FUNCTIONS = """
    SELECT oid::regprocedure::text AS name, proname,
        ARRAY(SELECT format_type(t, NULL) FROM unnest(proargtypes) WITH ORDINALITY AS a (t, i) ORDER BY i) AS types
    FROM pg_proc WHERE pronamespace = 'bismarck_dp'::regnamespace AND proname <> 'call'
"""


def test_no_internal_function_can_be_called(secret: Secret) -> None:
    """Each with arguments of its own types; those with internal ones cannot be written at all."""
    found = secret.root(FUNCTIONS)
    assert len(found) > 30
    for function in found:
        assert not secret.analyst.one(f"SELECT has_function_privilege('{function['name']}', 'EXECUTE')"), function
        if "internal" not in function["types"]:
            arguments = ", ".join(f"(SELECT NULL::{kind})" for kind in function["types"])
            secret.analyst.refused(f"SELECT bismarck_dp.{function['proname']}({arguments})")
    assert secret.root("SELECT bismarck_dp.caller()") == [{"caller": "postgres"}]


def test_no_internal_relation_can_be_read_or_written(secret: Secret) -> None:
    """But for three views, which show one's own; all of them are the superuser's to read."""
    found = secret.root(
        "SELECT oid::regclass::text AS name, relkind FROM pg_class WHERE relnamespace = 'bismarck_dp'::regnamespace"
        " AND relkind IN ('r', 'v', 'S')"
    )
    assert {row["name"] for row in found if row["relkind"] != "S"} == {
        f"bismarck_dp.{name}" for name in ("model", "models", "protected", "protections", "entry", "ledger")
    }
    for row in found:
        name, view = row["name"], row["relkind"] == "v"
        secret.root(f"SELECT * FROM {name}")
        if not view:
            secret.analyst.refused(f"SELECT * FROM {name}")
        if row["relkind"] == "S":
            secret.analyst.refused(f"SELECT nextval('{name}')")
            secret.analyst.refused(f"SELECT setval('{name}', 1)")
            secret.analyst.refused(f"SELECT last_value FROM {name}")
            continue
        for statement in (
            f"INSERT INTO {name} DEFAULT VALUES",
            f"DELETE FROM {name}",
            f"UPDATE {name} SET epsilon = 0",
        ):
            secret.analyst.refused(statement, "permission denied|cannot (insert|delete|update)")
        secret.analyst.refused(f"BEGIN; LOCK {name} IN ACCESS EXCLUSIVE MODE", "permission denied")
        secret.analyst("ROLLBACK")
    secret.analyst.refused("CREATE TABLE bismarck_dp.mine (a int)")
    secret.analyst.refused("TRUNCATE bismarck_dp.entry")


def test_types_of_states_and_blocks_hold_nothing_of_an_analysts(secret: Secret) -> None:
    """A column may have such a type; no value can be typed in, sent in, or made by a cast."""
    secret.analyst("CREATE TABLE own (s bismarck_dp.state, b bismarck_dp.block, w bismarck_dp.wide_block)")
    for kind in ("state", "block", "wide_block"):
        secret.analyst.refused(f"SELECT 'x'::bismarck_dp.{kind}", "permission denied|cannot be typed in")
        secret.analyst.refused(f"SELECT '\\x00'::bytea::bismarck_dp.{kind}", "cannot cast")
        secret.analyst.refused(
            f"CREATE CAST (bytea AS bismarck_dp.{kind}) WITHOUT FUNCTION", "must be (superuser|owner)"
        )
        secret.analyst.refused(f"ALTER TYPE bismarck_dp.{kind} SET SCHEMA public", "must be owner")


def test_a_protected_table_cannot_be_read_around_the_door(secret: Secret) -> None:
    ways = (
        "SELECT * FROM secret",
        "SELECT count(*) FROM secret",
        "EXPLAIN SELECT * FROM secret WHERE y > 0",
        "COPY secret TO STDOUT",
        "CREATE TABLE mine (LIKE secret)",
        "CREATE TABLE mine (id int REFERENCES secret (id))",
        "LOCK secret IN ACCESS SHARE MODE",
        "SELECT table_to_xml('secret', true, true, '')",
        "SELECT currtid2('secret', '(0,1)'::tid)",
        "SELECT id FROM secret FOR UPDATE",
        "SELECT * FROM secret TABLESAMPLE SYSTEM (100)",
        "SELECT stavalues1 FROM pg_statistic",
        "SELECT * FROM pg_statistic_ext_data",
        "SELECT lo_import('/etc/passwd')",
        "COPY (SELECT 1) TO PROGRAM 'cat'",
        "COPY (SELECT 1) TO '/tmp/mine'",
    )
    for way in ways:
        secret.analyst.refused(f"BEGIN; {way}", "permission denied|must be (owner|superuser)")
        secret.analyst("ROLLBACK")
    assert secret.keeper.one("SELECT count(*) FROM secret") == ROWS


# ---- forged requests ----


def door(verb: str, request: Any) -> str:
    return f"SELECT bismarck_dp.call($q${verb}$q$, $q${json.dumps(request)}$q$)"


def asked(secret: Secret, **fields: Any) -> dict[str, Any]:
    """What dp_train sends."""
    source = int(secret.root.one("SELECT 'secret'::regclass::oid"))
    words = {"model": "m", "label": "y", "features": ["x"], "algorithm": "bolton", "loss": "logistic"}
    return {"source": source, **words, "epsilon": "1", "delta": "0", "options": {}, **fields}


def test_verbs_that_are_none(secret: Secret) -> None:
    for verb in (
        "admit",
        "debit",
        "serve",
        "pack",
        "release",
        "",
        "Train",
        "train ",
        "__class__",
        "train;",
        "x" * 10**6,
    ):
        secret.analyst.refused(door(verb, asked(secret)), "unknown verb")
    assert secret.analyst(door("train", asked(secret)))
    assert secret.releases() == 1


def test_requests_with_words_of_ours(secret: Secret) -> None:
    """What the controller says to itself cannot be said from outside."""
    for words in ({"portion": True}, {"paid": True}, {"admitted": True}, {"owned": True}, {"caller": "keeper"}):
        secret.analyst.refused(door("train", asked(secret, **words)), "malformed request")
        secret.analyst.refused(door("train", asked(secret, options=words)), "unknown option")
        secret.analyst.refused(door("train", asked(secret, options={"categories": words})), "categories")
    assert secret.releases() == 0


STRANGE: list[Any] = [
    None, True, 1, -1, 0.5, 10**400, "x", "", "-1", "1e999", "nan", "٣", "²", [], [[]], ["x"], [None], {}, {"x": 1},
    {"source": None}, {"source": "²"}, {"source": 10**30}, {"options": []}, "x" * 10**5, list(range(10**4)),
]  # fmt: skip


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_requests_that_make_no_sense_are_refused(secret: Secret, verb: str) -> None:
    """Whole requests, and single fields of one that is right; never an internal error, and nothing is spent."""
    whole = {
        **asked(secret),
        "grid": {"epochs": [1]}, "method": "portions", "public_source": None, "trials": "10",
        "d": 3, "state": {}, "sum": [0.0], "count": 1,
    }  # fmt: skip
    fields = {
        "train": asked(secret), "explain": asked(secret),
        "evaluate": {key: value for key, value in asked(secret).items() if key not in ("algorithm", "loss")},
        "tune": {key: value for key, value in whole.items() if key not in ("d", "state", "sum", "count")},
    }.get(verb, whole)  # fmt: skip
    secret.keeper.refused(door(verb, "x"), "malformed|must be given|NULL|does not exist|no name")
    for strange in STRANGE:
        attempts = [strange, *({**fields, name: strange} for name in fields if verb != "explain")]
        for request in attempts:
            said = ""
            try:
                secret.analyst(door(verb, request))
            except psycopg2.Error as error:
                said = str(error)
            assert "internal error" not in said, request
            assert "Traceback" not in said, request
            assert secret.analyst.connection.closed == 0
            if "m" in secret.models():
                secret.analyst("SELECT dp_forget('m')")


def test_a_request_nested_deeper_than_the_stack(secret: Secret) -> None:
    for depth in (500, 3000, 10**5):
        text = "[" * depth + "]" * depth
        secret.analyst.refused(f"SELECT bismarck_dp.call('train', '{text}')", "malformed|stack depth")
        secret.analyst.refused(f"SELECT bismarck_dp.call('train', '{{\"options\": {text}}}')", "malformed|stack depth")


NUMBERS = """
    SELECT attname AS name FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0
        AND atttypid IN ('int4'::regtype, 'float4'::regtype, 'int8'::regtype)
"""


def test_sources_that_are_not_the_analysts(secret: Secret) -> None:
    """Catalogs, the ledger, numbers of nothing; by number, as the wrappers never would."""
    for table in ("pg_authid", "bismarck_dp.entry", "bismarck_dp.model", "bismarck_dp.protected", "pg_statistic"):
        columns = secret.root(NUMBERS, table)
        if not columns:
            continue
        oid, name = int(secret.root.one("SELECT %s::regclass::oid", table)), columns[0]["name"]
        found = secret.root(f"SELECT * FROM bismarck_dp.describe({oid}, '{name}', '{{{name}}}', false, '{{}}')")
        assert found, "the superuser can"
        for verb in ("train", "explain"):
            request = asked(secret, source=oid, label=name, features=[name])
            secret.analyst.refused(door(verb, request), "permission denied for")
        secret.analyst.refused(
            door("protect", {"source": oid, "epsilon": 1, "delta": 0, "options": {}}), "only the owner"
        )
    for oid in (0, 1, 4294967295):
        secret.analyst.refused(door("train", asked(secret, source=oid)), "does not exist")
    for oid in (-1, 4294967296, 10**30):
        secret.analyst.refused(door("train", asked(secret, source=oid)), "does not exist|out of range")


def test_an_owners_verbs_are_refused_to_others(secret: Secret) -> None:
    for session in (secret.analyst, secret.outsider):
        session.refused("SELECT * FROM dp_protect('secret', 1e9, 0.5)", "only the owner of")
        session.refused("SELECT dp_unprotect('secret')", "only the owner of")
    secret.outsider.refused("SELECT * FROM dp_budget('secret')", "is not protected, or not for you")
    assert secret.analyst.one("SELECT epsilon_total FROM dp_budget('secret')") == 1000


# ---- who ----


def test_roles_that_are_not_the_analysts(secret: Secret) -> None:
    secret.analyst.refused("SET ROLE keeper")
    secret.analyst.refused("SET ROLE postgres")
    secret.analyst.refused("SET SESSION AUTHORIZATION keeper")
    secret.root("SET SESSION AUTHORIZATION analyst; SET SESSION AUTHORIZATION keeper; RESET SESSION AUTHORIZATION")
    for statement in (
        "GRANT keeper TO analyst",
        "GRANT dp_owner TO analyst",
        "GRANT SELECT ON secret TO analyst",
        "GRANT SELECT ON bismarck_dp.entry TO analyst",
        "GRANT EXECUTE ON FUNCTION bismarck_dp.admit TO analyst",
        "ALTER TABLE secret OWNER TO analyst",
        "REASSIGN OWNED BY keeper TO analyst",
        "ALTER DEFAULT PRIVILEGES FOR ROLE postgres GRANT SELECT ON TABLES TO analyst",
        "ALTER FUNCTION bismarck_dp.call OWNER TO analyst",
        "ALTER EXTENSION bismarck_dp DROP TABLE bismarck_dp.entry",
        "CREATE OR REPLACE FUNCTION public.dp_train() RETURNS int LANGUAGE c AS 'bismarck_dp', 'dp_admit'",
        "CREATE FUNCTION mine() RETURNS int LANGUAGE plpython3u AS 'return 1'",
        "DROP OWNED BY keeper",
        "ANALYZE bismarck_dp.entry; DROP EXTENSION bismarck_dp",
    ):
        secret.analyst.refused(statement, "permission denied|must (be|have|own)|no privileges")


def test_functions_with_the_rights_of_their_owner_are_their_owner(secret: Secret) -> None:
    """An analyst's wrapper makes her the caller, whoever is lured into it: no superuser's rights, and her budget."""
    secret.analyst(
        "CREATE FUNCTION lure(epsilon float8, algorithm text) RETURNS text SECURITY DEFINER LANGUAGE sql AS"
        " $$ SELECT owner::text FROM dp_train('secret', 'm', 'y', '{x}', epsilon, algorithm => algorithm) $$"
    )
    for session in (secret.root, secret.keeper):
        session.refused("SELECT lure(NULL, 'sgd')", "only its owner may do without epsilon")
    assert secret.root.one("SELECT lure(1, 'bolton')") == "analyst"
    assert secret.root("SELECT who, login FROM bismarck_dp.entry ORDER BY id DESC LIMIT 1") == [
        {"who": "analyst", "login": "postgres"}
    ]
    assert secret.releases() == 1


def test_a_reader_who_is_no_analyst_is_refused(secret: Secret) -> None:
    """SELECT lets him read; on a table that is protected, training, tuning and evaluating are for analysts."""
    secret.keeper("GRANT SELECT ON secret TO outsider")
    secret.outsider("CREATE TABLE own AS SELECT y, x FROM secret")
    secret.outsider(train(source="own"))
    for statement in (
        train("second"),
        train("second", epsilon="NULL", more="algorithm => 'sgd'"),
        call("dp_explain", "secret", "e"),
        call("dp_tune", "secret", "t", more="grid => '{\"batch_size\": [1, 2]}'"),
        "SELECT * FROM dp_evaluate('m', 'secret')",
        "SELECT * FROM dp_evaluate('m', 'secret', epsilon => 1)",
    ):
        secret.outsider.refused(statement, "permission denied for public.secret, which is protected")
    assert secret.releases() == 0


def test_an_owner_pays_for_what_is_private_only(secret: Secret) -> None:
    secret.keeper(train("free", epsilon="NULL", more="algorithm => 'sgd'"))
    secret.keeper(train("seeded", seed=1))
    secret.keeper("SELECT * FROM dp_evaluate('free', 'secret')")
    assert secret.releases() == 0
    secret.keeper(train())
    secret.keeper("SELECT * FROM dp_evaluate('free', 'secret', epsilon => 1)")
    assert secret.releases() == 2


def test_what_is_not_private_is_refused_to_analysts(secret: Secret) -> None:
    secret.analyst("CREATE TABLE own AS SELECT i % 2 AS y, ARRAY[i, 1.0] AS x FROM generate_series(1, 60) AS i")
    secret.analyst(train("own", "own", "NULL", "algorithm => 'sgd'", seed=1, tolerance=0.1))
    sgd = "algorithm => 'sgd'"
    for statement, message in (
        (train(seed=1), "only the owner of"),
        (train(epsilon="NULL", more=sgd), "only its owner may do without epsilon"),
        (train(epsilon="NULL", more=sgd, tolerance=0.1), "only its owner may do without epsilon"),
        (train(tolerance=0.1), 'unknown option "tolerance"'),
        (train(more=sgd), 'algorithm "sgd" is not private'),
        (train(epsilon="NULL"), "needs an epsilon"),
        (call("dp_explain", "secret", "e", "NULL", sgd), "only its owner may do without epsilon"),
        (call("dp_tune", "secret", "t", more="grid => '{\"seed\": [1, 2]}'"), '"seed" is the same for all'),
        (call("dp_tune", "secret", "t", more="grid => '{\"algorithm\": [\"bolton\", \"sgd\"]}'"), "is not private"),
        (call("dp_tune", "own", "t", more="grid => '[{}]', public_source => 'secret'"), "which is protected"),
        (train(adjacency="zero-out"), "protected under adjacency replace"),
        ("SELECT * FROM dp_evaluate('own', 'secret')", "only its owner may do without epsilon"),
        ("SELECT * FROM dp_evaluate('own', 'secret', epsilon => 1, options => '{\"seed\": 1}')", "or with a seed"),
    ):  # fmt: skip
        secret.analyst.refused(statement, message)
    assert secret.releases() == 0
    secret.keeper.refused(
        call("dp_tune", "secret", "t", more="grid => '{\"batch_size\": [1, 2]}', public_source => 'secret'"),
        "public_source is the source itself",
    )


def test_columns_that_are_not_open_are_refused(secret: Secret) -> None:
    secret.protect(options='{"columns": ["y", "x"]}')
    secret.analyst("CREATE TABLE own AS SELECT 1.0 AS y, 1.0 AS z FROM generate_series(1, 60)")
    secret.analyst("SELECT * FROM dp_train('own', 'mine', 'y', '{z}', 1)")
    secret.analyst.refused("SELECT * FROM dp_train('secret', 'm', 'y', '{z}', 1)", 'column "z" of .* is not open')
    secret.analyst.refused("SELECT * FROM dp_train('secret', 'm', 'id', '{x}', 1)", 'column "id" of .* is not open')
    secret.analyst.refused("SELECT * FROM dp_train('secret', 'm', 'y', '{ctid}', 1)", 'column "ctid" of .* is not open')
    secret.analyst.refused("SELECT * FROM dp_evaluate('mine', 'secret', epsilon => 1)", 'column "z" of .* is not open')
    secret.analyst(train())
    assert secret.releases() == 1


def test_an_old_snapshot_does_not_keep_a_right(secret: Secret) -> None:
    """A transaction that began before the owner closed a column, or let an analyst go, sees the table as it was."""
    other = secret.session("analyst")
    for options in ('{"analysts": []}', '{"columns": ["id"]}'):
        secret.protect(options='{"analysts": null, "columns": null}')
        other("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        secret.protect(options=options)
        secret.analyst.refused(train(), "permission denied|is not open")
        other.refused(train(), "was changed meanwhile: nothing was spent")
        other("ROLLBACK")
    assert secret.releases() == 0
    secret.protect(options='{"analysts": null, "columns": null}')
    secret.analyst(train())


# ---- models, budgets and entries of others ----


def test_models_of_others_are_out_of_reach(secret: Secret) -> None:
    secret.keeper(train("theirs", epsilon="NULL", more="algorithm => 'sgd'"))
    assert secret.keeper.one("SELECT dp_predict('theirs', '{1,1}')") in (-1.0, 1.0)
    assert secret.analyst("SELECT * FROM bismarck_dp.models") == []
    for statement in (
        "SELECT dp_predict('theirs', '{1,1}')",
        "SELECT dp_predict_proba('theirs', '{1,1}')",
        "SELECT dp_predict_all('theirs', '{1,1}')",
        "SELECT dp_encode('theirs', ROW(1, 2))",
        "SELECT dp_forget('theirs')",
        "SELECT * FROM dp_evaluate('theirs', 'secret', epsilon => 1)",
    ):
        secret.analyst.refused(statement, "does not exist")
    secret.analyst.refused(train("theirs"), "is taken")
    assert secret.models() == ["theirs"]
    assert secret.releases() == 0


def test_entries_of_others_are_not_shown(secret: Secret) -> None:
    secret.root("GRANT dp_analyst TO outsider")
    secret.analyst(train("mine"))
    secret.outsider(train("hidden"))
    secret.root("REVOKE dp_analyst FROM outsider")
    shown = "SELECT model FROM bismarck_dp.ledger ORDER BY id DESC LIMIT 2"
    assert {row["model"] for row in secret.keeper(shown)} == {"mine", "hidden"}
    assert "hidden" not in {row["model"] for row in secret.analyst(shown)}
    secret.outsider.refused("SELECT * FROM dp_budget('secret')", "not for you")
    leaky = "CREATE FUNCTION leak(text) RETURNS boolean COST 0.0001 LANGUAGE plpgsql AS"
    secret.analyst(f"{leaky} $$ BEGIN RAISE NOTICE 'seen %', $1; RETURN true; END $$")
    secret.analyst("SELECT 1 FROM bismarck_dp.ledger WHERE leak(model)")
    said = secret.analyst.heard()
    assert "seen mine" in said
    assert "seen hidden" not in said


@pytest.mark.parametrize("view", ["ledger", "models"])
def test_guesses_about_others_are_not_counted(secret: Secret, view: str) -> None:
    """How many rows a condition of hers leaves out, as the server counts them, is the same for right and wrong ones."""
    secret.keeper(train("of the keeper"))
    secret.analyst(train("mine"))
    column = "model" if view == "ledger" else "name"
    plan = "EXPLAIN (ANALYZE, VERBOSE, BUFFERS OFF, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT 1 FROM bismarck_dp."
    plans = {
        str(secret.analyst(f"{plan}{view} WHERE {column} = '{guess}'")).replace(guess, "")
        for guess in ("of the keeper", "of nobody")
    }
    assert len(plans) == 1
    assert "Rows Removed" in plans.pop()


def test_more_columns_than_a_row_has_are_refused(secret: Secret) -> None:
    many = "{" + ",".join(["id"] * 70_000) + "}"
    for who in (secret.keeper, secret.analyst):
        for function in ("dp_train", "dp_explain"):
            who.refused(f"SELECT * FROM {function}('secret', 'm', 'y', '{many}', 1)", "70000 feature columns are named")
    assert secret.releases() == 0


def test_a_role_made_again_has_no_models_of_its_namesake(secret: Secret) -> None:
    """A name is all that an owner gave, and all that the ledger keeps: whoever makes roles hands those on."""
    secret.root("CREATE ROLE twice LOGIN")
    secret.protect(options='{"analysts": ["twice"]}')
    first = secret.session("twice")
    first(train("first"))
    first.close()
    secret.root("DROP ROLE twice; CREATE ROLE twice LOGIN")
    second = secret.session("twice")
    assert second("SELECT * FROM bismarck_dp.models") == []
    second.refused("SELECT dp_predict('first', '{1,1}')", "does not exist")
    assert [row["model"] for row in second("SELECT model FROM bismarck_dp.ledger")] == ["first"]
    second(train("second"))
    assert secret.releases() == 2
    second.close()
    secret.root("DROP ROLE twice")
    secret.analyst.refused("CREATE ROLE twice", "permission denied to create role")


# ---- statements that run a training in another way ----


def test_each_way_of_running_pays_once(secret: Secret) -> None:
    """Cursors, COPY, prepared statements, a row spread into columns, many in one statement: models are paid for."""
    secret.analyst(f"BEGIN; DECLARE c SCROLL CURSOR FOR {train('a')}")
    forth = secret.analyst("FETCH NEXT FROM c")
    back = secret.analyst("FETCH FIRST FROM c")
    secret.analyst("COMMIT")
    assert (secret.releases(), forth) == (1, back)
    with secret.analyst.connection.cursor() as cursor:
        cursor.copy_expert(f"COPY (SELECT name FROM ({train('b')}) AS t) TO STDOUT", io.StringIO())
    assert secret.releases() == 2
    secret.analyst("PREPARE p (text) AS SELECT n FROM dp_train('secret', $1, 'y', '{x}', 1)")
    secret.analyst("EXECUTE p ('c')")
    secret.analyst("EXECUTE p ('d')")
    assert secret.releases() == 4
    secret.analyst.refused("SELECT (dp_train('secret', 'e', 'y', '{x}', 1)).*", "is taken")
    assert secret.models() == ["a", "b", "c", "d"]
    assert secret.releases() == 5, "the first copy's training was paid before the second failed"
    secret.analyst("SELECT dp_train('secret', 'f' || i, 'y', '{x}', 1) FROM generate_series(1, 3) AS i")
    assert secret.releases() == 8


AWKWARD = ['a"b', "it's", "x; DROP TABLE secret; --", "back\\slash\\", "naïve ☃", "%s %(p)s {}", "$1", "ROW", "y" * 63]


@pytest.mark.parametrize("name", AWKWARD, ids=range(len(AWKWARD)))
def test_awkward_names_name_what_they_are(secret: Secret, name: str) -> None:
    """Of a schema, a table, its columns, a role and a model: quoted wherever they go, and found in the ledger."""

    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    secret.root(f"CREATE SCHEMA {quoted(name)}; CREATE ROLE {quoted(name)} LOGIN IN ROLE dp_analyst")
    table = f"{quoted(name)}.{quoted(name)}"
    secret.root(f"CREATE TABLE {table} AS SELECT y AS {quoted(name)}, x AS {quoted(name[1:])} FROM secret")
    try:
        secret.root("SELECT * FROM dp_protect(%s, 10, 0, %s)", table, json.dumps({"classes": {name: [-1, 1]}}))
        secret.root(f"GRANT USAGE ON SCHEMA {quoted(name)} TO {quoted(name)}")
        role = secret.session(name)
        values = (table, name, name, [name[1:]])
        found = role("SELECT * FROM dp_train(%s, %s, %s, %s, 1)", *values)[0]
        evaluated = role("SELECT * FROM dp_evaluate(%s, %s, epsilon => 1)", name, table)
        (entry,) = secret.root("SELECT who, model, source FROM bismarck_dp.entry ORDER BY id DESC OFFSET 1 LIMIT 1")
        shown = "SELECT format('%%I.%%I', %s::text, %s::text)"
        assert evaluated
        assert found["features"] == [name[1:]]
        assert entry == {"who": name, "model": name, "source": secret.root.one(shown, name, name)}
        role.close()
    finally:
        secret.root(f"DROP SCHEMA {quoted(name)} CASCADE; DROP ROLE {quoted(name)}")
    assert secret.keeper.one("SELECT count(*) FROM secret") == ROWS
