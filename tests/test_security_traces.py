"""Attacks that look for traces: settings, logs, plans, statistics, messages and refusals that depend on rows."""

from __future__ import annotations

import re
from typing import Any

import psycopg2
import pytest
from protected import ROWS, Secret, call, train

# ---- settings that make a server talk ----

SUPERUSERS = (
    "log_statement = 'all'",
    "log_min_messages = 'debug5'",
    "log_executor_stats = on",
    "log_planner_stats = on",
    "log_duration = on",
    "track_functions = 'all'",
    "track_activities = off",
    "session_preload_libraries = 'auto_explain'",
    "dynamic_library_path = '/tmp'",
    "bismarck_dp.python_path = '/tmp'",
    "session_replication_role = 'replica'",
    "allow_system_table_mods = on",
    "zero_damaged_pages = on",
    "plpgsql.extra_errors = 'all'",
    "lc_messages = 'C'",
)


def test_settings_of_the_superusers(secret: Secret) -> None:
    """What writes logs, loads code or turns triggers off is not the analyst's to set."""
    secret.analyst(train())
    for setting in SUPERUSERS:
        if not setting.startswith("plpgsql"):
            secret.analyst.refused(f"SET {setting}", "permission denied to set parameter|cannot be set after")
    secret.analyst.refused("LOAD '/tmp/mine.so'", r"access to library .* is not allowed")
    secret.analyst.refused("LOAD 'auto_explain'", r"access to library .* is not allowed|could not access file")
    secret.analyst.refused("ALTER SYSTEM SET log_statement = 'all'", "permission denied|must be superuser")
    secret.analyst.refused("ALTER ROLE analyst SET log_statement = 'all'", "permission denied to set parameter")
    with pytest.raises(psycopg2.Error, match=r"could not access file|access to library"):
        secret.session("analyst", "-c local_preload_libraries=bismarck_dp")
    with pytest.raises(psycopg2.Error, match="permission denied"):
        secret.session("analyst", "-c session_preload_libraries=auto_explain")


LOUD = (
    "SET client_min_messages = debug5; SET debug_print_plan = on; SET debug_print_parse = on;"
    " SET debug_print_rewritten = on; SET trace_sort = on"
)


def test_a_loud_client_hears_nothing_from_within(secret: Secret) -> None:
    """Plans and parse trees are printed for what the analyst runs, and not for what is run for her."""
    secret.analyst(train("warm"))
    secret.analyst("SELECT dp_forget('warm')")
    secret.analyst(LOUD)
    secret.analyst("SELECT 1")
    assert secret.analyst.heard().count("plan:") == 1
    secret.analyst("SELECT * FROM dp_budget('secret')")
    quiet = secret.analyst.heard()
    secret.analyst(train())
    heard = secret.analyst.heard()
    assert heard.count("plan:") == quiet.count("plan:"), "as many as the least of functions"
    assert not re.search(r"run_\d|bismarck_dp\.(pack|epoch|release)|AGGREF", heard)


def test_auto_explain_shows_nothing_from_within(secret: Secret) -> None:
    """Loaded by a superuser, with all it can show: the analyst's screen has her own statements only."""
    for setting in (
        "session_preload_libraries = 'auto_explain'", "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on", "auto_explain.log_analyze = on", "auto_explain.log_verbose = on",
    ):  # fmt: skip
        secret.root(f"ALTER ROLE analyst SET {setting}")
    try:
        analyst = secret.session("analyst")
        analyst("SET client_min_messages = log")
        analyst("SELECT count(*) FROM pg_class")
        assert "on pg_catalog.pg_class" in analyst.heard()
        analyst(train())
        heard = analyst.heard()
        assert "dp_train" in heard
        assert not re.search(r"run_\d|bismarck_dp\.(pack|describe|epoch|release|protected|entry)", heard)
    finally:
        secret.root("ALTER ROLE analyst RESET ALL")


def test_calls_of_functions_are_not_counted(secret: Secret) -> None:
    """Anyone may read how often a function was called; a superuser's setting counts hers, and not ours."""
    secret.root("ALTER ROLE analyst SET track_functions = 'all'")
    try:
        analyst = secret.session("analyst")
        analyst("BEGIN")
        analyst(train())
        counted = {row["funcname"] for row in analyst("SELECT funcname FROM pg_stat_xact_user_functions")}
        analyst("COMMIT")
        assert counted <= {"dp_train", "call"}
        assert "call" in counted
    finally:
        secret.root("ALTER ROLE analyst RESET ALL")


OUT_OF_LINE = (
    "CREATE TABLE wide AS SELECT i AS id, CASE WHEN i > 7 THEN (i % 2 * 2 - 1)::float8 END AS y, ARRAY(SELECT"
    " CASE WHEN i < 55 OR j > 1 THEN random() END FROM generate_series(1, 400) j WHERE i > 0)::float8[] AS x"
    " FROM generate_series(1, 60) i"
)
"""Arrays beyond a page's share: each that is read is looked up in a table of its own, by an index."""

LOOKED_UP = (
    "SELECT sum({count}(i.indexrelid))::int FROM pg_index i JOIN pg_class c ON c.reltoastrelid = i.indrelid"
    " WHERE c.oid = 'wide'::regclass"
)

COUNTED = {
    "train": call("dp_train", "wide", "m"),
    "tune": call("dp_tune", "wide", "m", more="grid => '[{}, {}]'"),
    "units": call("dp_train", "persons", "m"),
    "evaluate": "SELECT * FROM dp_evaluate('own', 'wide', 'y', '{x}', epsilon => 0.5)",
}


@pytest.mark.parametrize("way", COUNTED)
def test_lookups_of_arrays_out_of_line_are_not_counted(secret: Secret, way: str) -> None:
    """Anyone may read how often an index is used. Who knew that would know how many labels are missing, how many rows a
    person has, how many arrays are none.
    """
    secret.keeper(OUT_OF_LINE)
    secret.keeper("CREATE TABLE persons AS SELECT CASE WHEN id < 20 THEN id ELSE 20 END AS person, y, x FROM wide")
    secret.protect("wide", "100", '{"lengths": {"x": 400}, "classes": {"y": [-1, 1]}}')
    secret.protect(
        "persons", "100", '{"lengths": {"x": 400}, "classes": {"y": [-1, 1]}, "privacy_unit": "person", "unit_rows": 3}'
    )
    secret.analyst(
        "CREATE TABLE mine AS SELECT i % 2 AS y, array_fill(i / 100.0, ARRAY[400]) AS x FROM generate_series(1, 60) i"
    )
    secret.analyst(call("dp_train", "mine", "own"))
    table = "persons" if way == "units" else "wide"
    count = LOOKED_UP.replace("wide", table)
    try:
        assert secret.keeper(f"SELECT count(*) AS n FROM {table} WHERE x[2] > 0")[0]["n"] == 60
        secret.analyst("BEGIN")
        secret.analyst(COUNTED[way])
        seen = secret.analyst.one(count.format(count="pg_stat_get_xact_numscans"))
        secret.analyst("COMMIT; SELECT pg_stat_force_next_flush(); SELECT 1")
        assert seen == 0
        before = secret.root.one(count.format(count="pg_stat_get_numscans"))
        secret.analyst("SELECT dp_forget('m')" if way != "evaluate" else "SELECT 1")
        secret.analyst(COUNTED[way])
        secret.analyst("SELECT pg_stat_force_next_flush(); SELECT 1")
        assert secret.root.one(count.format(count="pg_stat_get_numscans")) == before
    finally:
        secret.keeper("DROP TABLE wide, persons")


def test_what_is_written_is_counted_so_that_autovacuum_comes(secret: Secret) -> None:
    counts = (
        "SELECT pg_stat_get_tuples_inserted('bismarck_dp.model'::regclass) AS inserted,"
        " pg_stat_get_tuples_deleted('bismarck_dp.model'::regclass) AS deleted,"
        " pg_stat_get_tuples_deleted('pg_class'::regclass) AS dropped, current_setting('track_counts') AS tracks"
    )
    (before,) = secret.root(counts)
    secret.analyst(train())
    secret.analyst("SELECT dp_forget('m')")
    secret.analyst("SELECT pg_stat_force_next_flush(); SELECT 1")
    assert secret.analyst.one("SELECT current_setting('track_counts')") == "on"
    (after,) = secret.root(counts)
    assert after["inserted"] == before["inserted"] + 1
    assert after["deleted"] == before["deleted"] + 1
    assert after["dropped"] > before["dropped"], "packed tables came and went"


def test_trials_of_a_tuning_are_not_counted(secret: Secret) -> None:
    """Each reads the packed rows once: who sees how often, in the transaction that tunes, knows how many there were."""
    counts = "pg_stat_get_xact_numscans(o::oid) + pg_stat_get_xact_tuples_returned(o::oid)"
    counts += " + pg_stat_get_xact_blocks_fetched(o::oid)"
    secret.analyst("BEGIN; CREATE TEMP TABLE mark (a int); INSERT INTO mark VALUES (1)")
    secret.analyst(call("dp_tune", "secret", "m", more="method => 'random_stopping', trials => 20, grid => '[{}, {}]'"))
    first = secret.analyst.one("SELECT 'mark'::regclass::oid::int8")
    found = secret.analyst(f"SELECT o FROM generate_series({first}, {first} + 200) AS o WHERE {counts} > 0")
    secret.analyst("COMMIT")
    assert [row["o"] for row in found] == [first], "the analyst's own table"


def buffers(secret: Secret, statement: str) -> int:
    (plan,) = secret.analyst(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {statement}")
    return sum(value for key, value in plan["QUERY PLAN"][0]["Plan"].items() if key.endswith("Blocks"))


def test_buffers_are_not_counted(secret: Secret) -> None:
    """Of what happens within; looking up the functions takes some, the same for every table."""
    secret.keeper("CREATE TABLE large AS SELECT s.* FROM secret s, generate_series(1, 200)")
    secret.protect("large", "100", "{}")
    secret.analyst(train("warm"))
    few = buffers(secret, call("dp_train", "secret", "a"))
    many = buffers(secret, call("dp_train", "large", "b"))
    assert few == many < 100
    secret.keeper("DROP TABLE large")


def test_explain_shows_one_function(secret: Secret) -> None:
    """With the time of all that it did in one sum; see docs/security.md for what that tells."""
    plan = secret.analyst(f"EXPLAIN (ANALYZE, VERBOSE, BUFFERS, SETTINGS, WAL) {train()}")
    shown = "\n".join(row["QUERY PLAN"] for row in plan)
    assert "Function Scan on public.dp_train" in shown
    assert shown.count("->") == 0
    assert not re.search(r"run_\d|bismarck_dp\.(pack|describe|epoch)", shown)
    assert secret.releases() == 1


def test_statistics_of_the_table_are_hidden(secret: Secret) -> None:
    secret.keeper("CREATE STATISTICS s ON y, z FROM secret; ANALYZE secret")
    for view, column in (("pg_stats", "tablename"), ("pg_stats_ext", "tablename")):
        assert secret.keeper(f"SELECT * FROM {view} WHERE {column} = 'secret'"), view
        assert secret.analyst(f"SELECT * FROM {view} WHERE {column} = 'secret'") == []
    secret.analyst.refused("SELECT * FROM pg_statistic")


def test_statements_of_others_are_hidden(secret: Secret) -> None:
    secret.keeper("SELECT 1 AS told_to_nobody")
    shown = "SELECT query FROM pg_stat_activity WHERE usename = 'keeper'"
    assert "told_to_nobody" in str(secret.root(shown))
    assert {row["query"] for row in secret.analyst(shown)} == {"<insufficient privilege>"}


# ---- randomness ----


def test_setseed_does_not_repeat_noise(secret: Secret) -> None:
    secret.analyst("SELECT setseed(0.5)")
    first = (secret.analyst.one("SELECT random()"), secret.analyst(train("a"))[0]["weights"])
    secret.analyst("SELECT setseed(0.5)")
    again = (secret.analyst.one("SELECT random()"), secret.analyst(train("b"))[0]["weights"])
    assert first[0] == again[0]
    assert first[1] != again[1]


# ---- neighbours: all but the noise is the same, whatever a row holds ----

ODD = {
    "nan": ("y", "'{NaN,1}'"),
    "infinity": ("y", "'{Infinity,-Infinity}'"),
    "null": ("y", "NULL"),
    "null_element": ("y", "'{NULL,1}'"),
    "shorter": ("y", "'{1}'"),
    "longer": ("y", "'{1,2,3}'"),
    "empty": ("y", "'{}'"),
    "square": ("y", "'{{1,2},{3,4}}'"),
    "from_zero": ("y", "'[0:1]={1,2}'"),
    "huge": ("y", "'{1e308,-1e308}'"),
    "tiny": ("y", "'{1e-320,1e-320}'"),
    "label_7": ("7", "x"),
    "label_nan": ("'NaN'", "x"),
    "label_infinite": ("'Infinity'", "x"),
    "label_null": ("NULL", "x"),
    "label_huge": ("1e308", "x"),
}

NOISY = ("weights", "intercept", "support", "seconds", "id", "created", "ledger_id", "scale")

WAYS = {
    "bolton": train(),
    "quantile": train(scale="quantile"),
    "softmax": train(classes=[-1, 1, 7]),
    "scs13": train(more="algorithm => 'scs13', loss => 'logistic'"),
    "dpsgd": train(more="algorithm => 'dpsgd', delta => 1e-6"),
    "squared": train(more="algorithm => 'dpsgd', loss => 'squared', delta => 1e-6", clip=1, label_bound=1),
    "dpgcd": train(more="algorithm => 'dpgcd', loss => 'squared'", iterations=2, label_bound=1, epochs=None),
    "dpscd": train(more="algorithm => 'dpscd', loss => 'hinge', delta => 1e-6", **{"lambda": 0.1}),
    "banco": train(more="algorithm => 'banco', loss => 'hinge'", epochs=None),
    "tune": call("dp_tune", "secret", "m", more="grid => '[{}, {}]'"),
    "stopping": call("dp_tune", "secret", "m", more="grid => '[{}, {}]', method => 'random_stopping', trials => 2"),
    "explain": call("dp_explain", "secret", "m"),
    "evaluate": "SELECT metric FROM dp_evaluate('own', 'secret', epsilon => 1)",
}


def without_noise(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_noise(value) if isinstance(value, dict) else value
        for key, value in row.items()
        if key not in NOISY
    }


def outcome(secret: Secret, statement: str) -> Any:
    """All that the analyst sees, but for the noisy weights: rows or an error, and notices."""
    try:
        rows = secret.analyst(statement)
        seen: Any = [without_noise(row) for row in rows]
    except psycopg2.Error as error:
        seen = (error.pgcode, str(error))
    if "m" in secret.models():
        secret.analyst("SELECT dp_forget('m')")
    return seen, secret.analyst.heard()


@pytest.mark.parametrize("way", WAYS)
def test_odd_rows_change_nothing_that_is_seen(secret: Secret, way: str) -> None:
    """Errors, notices and every column but the weights are the same for each neighbour as for the table itself."""
    secret.analyst("CREATE TABLE own AS SELECT i % 2 * 2 - 1 AS y, ARRAY[i, 1.0] AS x FROM generate_series(1, 60) AS i")
    secret.analyst(train("own", "own"))
    outcome(secret, WAYS[way])  # the first release may be the one that divergences end with
    plain = outcome(secret, WAYS[way])
    assert isinstance(plain[0], list), plain
    for odd, (label, features) in ODD.items():
        secret.keeper(f"UPDATE secret SET y = {label}, x = {features} WHERE id = 7")
        assert outcome(secret, WAYS[way]) == plain, odd
        secret.keeper("UPDATE secret SET y = 1, x = '{0.1,0.5}' WHERE id = 7")


def test_the_same_rows_are_seen_by_their_owner(secret: Secret) -> None:
    """Whom arrays of two lengths are told of: the trap of the test above."""
    secret.keeper("UPDATE secret SET x = '{1}' WHERE id = 7")
    secret.keeper.refused(train(epsilon="NULL", more="algorithm => 'sgd'"), "differ in length")


def test_numbers_of_all_sizes_change_nothing_that_is_seen(secret: Secret) -> None:
    """Columns of numerics, which may be larger than any double, and NULL."""
    statement = "SELECT * FROM dp_train('secret', 'm', 'y', '{z,id}', 1)"
    plain = outcome(secret, statement)
    for value in ("10::numeric ^ 1000", "-10::numeric ^ 1000", "'NaN'", "1e-400", "NULL"):
        secret.keeper(f"UPDATE secret SET z = {value} WHERE id = 7")
        assert outcome(secret, statement) == plain, value


def test_a_plan_says_nothing_of_labels_and_lengths(secret: Secret) -> None:
    """How labels are written, and how long arrays are, is what the owner has said, and not what rows say."""
    explain = call("dp_explain", "secret", "m")
    plain, owners = outcome(secret, explain), secret.keeper(explain)
    secret.keeper("UPDATE secret SET y = id % 5, x = ARRAY[id]")
    assert outcome(secret, explain) == plain
    assert secret.keeper(explain) == owners
    secret.protect(options='{"lengths": {"x": 3}}')
    assert secret.analyst.one(f"SELECT value FROM ({explain}) AS e WHERE key = 'd'") == "3"
    secret.analyst.refused("SELECT * FROM dp_explain('secret', 'e', 'y', '{}', 1)", "no feature columns")


def test_types_are_told_and_values_are_not(secret: Secret) -> None:
    """What is refused before it is paid for follows from catalogs, which anyone may read."""
    secret.keeper("ALTER TABLE secret ADD w text, ADD bad text[]; UPDATE secret SET w = 'told to nobody'")
    for features, message in (
        ("{w}", 'column "w" has type text'),
        ("{bad}", 'column "bad" has type text\\[\\], which is not an array of numbers'),
        ("{x,id}", 'column "x" has type double precision'),
        ("{nope}", 'column "nope" of "secret" does not exist'),
        ("{tableoid}", "does not exist"),
    ):
        said = secret.analyst.refused(f"SELECT * FROM dp_train('secret', 'm', 'y', '{features}', 1)", message)
        assert "told to nobody" not in said
    coded = 'options => \'{"categories": {"w": ["a", "b"]}}\''
    secret.analyst(f"SELECT * FROM dp_train('secret', 'm', 'y', '{{w}}', 1, {coded})")
    assert secret.releases() == 1


def test_what_fails_after_it_was_paid_says_one_thing(secret: Secret) -> None:
    """A cancelled run tells that it was cancelled, and not where; what was paid stays spent."""
    secret.keeper("INSERT INTO secret SELECT i, 1, 0, '{1,1}' FROM generate_series(100, 40000) AS i")
    secret.analyst(train("warm"))
    secret.analyst("SET statement_timeout = '700ms'")
    said = secret.analyst.refused(train(epochs=100000, batch_size=1), "the run was cancelled")
    assert "secret" not in said
    assert "CONTEXT" not in said.replace('SQL function "dp_train" statement 1', "").replace("CONTEXT:  \n", "")
    assert secret.releases() == 2
    assert secret.analyst.one("SELECT n FROM bismarck_dp.models") > ROWS


OPEN = (
    "SELECT pg_relation_size('secret') AS v",
    "SELECT relpages + reltuples AS v FROM pg_class WHERE relname = 'secret'",
    "SELECT n_tup_upd AS v FROM pg_stat_user_tables WHERE relname = 'secret'",
    "SELECT attname AS v FROM pg_attribute WHERE attrelid = 'secret'::regclass AND attnum = 1",
    f"SELECT value AS v FROM ({call('dp_explain', 'secret', 'e')}) AS e WHERE key = 'n'",
)


@pytest.mark.parametrize("statement", OPEN, ids=range(len(OPEN)))
def test_what_stays_open_is_what_is_said_to_be(secret: Secret, statement: str) -> None:
    """docs/security.md lists them; one that PostgreSQL closes should leave the list."""
    assert secret.analyst.one(statement) is not None
