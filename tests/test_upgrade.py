"""The way from every earlier version: models stay, and the objects end up as a new database has them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kernels
import pytest
import sqlalchemy
from catalog import catalog, difference
from conftest import two_classes

from bismarck_dp import BismarckError
from bismarck_dp.controller.database import Database, connect, embedded
from bismarck_dp.controller.embedded import Cluster, extension_files
from bismarck_dp.version import __version__

ROOT = Path(__file__).parents[1]
FROZEN = {
    found.group(1): file
    for file in sorted((ROOT / "sql").iterdir())
    if (found := re.fullmatch(r"bismarck_dp--([\d.]+)\.sql", file.name))
}
"""The scripts of earlier versions, which are not installed, by version."""
CREATE = "CREATE EXTENSION bismarck_dp VERSION '{}' SCHEMA public CASCADE"
UPDATE = "ALTER EXTENSION bismarck_dp UPDATE"
X, Y = two_classes(400, 3)


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """What is installed, and the frozen scripts beside it."""
    with temporary() as path:
        for file in [*extension_files(kernels.extension()), *FROZEN.values()]:
            shutil.copy(file, path)
        yield path


@pytest.fixture(scope="module")
def cluster(files: Path) -> Iterator[Cluster]:
    with temporary() as path, Cluster(path / "cluster", durable=False, extension=files) as cluster:
        yield cluster


@contextmanager
def temporary() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bdp_upgrade_", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run(url: str, *statements: str) -> None:
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Any]:
    """Makes databases by statements; neither they nor the roles, which are the cluster's, are left."""
    with ExitStack() as stack:
        stack.callback(run, cluster.url(), "DROP ROLE IF EXISTS dp_owner, dp_analyst")

        def database(name: str, *statements: str) -> str:
            run(cluster.url(), f"CREATE DATABASE {name}")
            stack.callback(run, cluster.url(), f"DROP DATABASE {name} WITH (FORCE)")
            run(cluster.url(dbname=name), *statements)
            return cluster.url(dbname=name)

        yield database


@pytest.fixture(params=FROZEN)
def old(request: Any, make: Any, models: list[str]) -> Iterator[Database]:
    """A database of an earlier version, with models, and rows to train on."""
    database = connect(make("old", CREATE.format(request.param)))
    with database.transaction() as connection:
        for model in models:
            restore_model(connection, model)
    database.load("rows", X, Y)
    yield database
    database.close()


@pytest.fixture(scope="module")
def models(server: Database) -> Iterator[list[str]]:
    """Rows of models, of this version: the Python that trained the earlier ones is not here."""
    server.load("teachers", X, Y)
    classes = {"loss": "logistic", "algorithm": "sgd", "lambda": 0.1}
    server.train("teachers", model="private", epsilon=1.0, delta=1e-6)
    server.train("teachers", model="scaled", scale=[0.5, 1, 2], normalize=True, **classes)
    server.train("teachers", model="many", multiclass="softmax", classes=[-1, 0, 1], **classes)
    server.train("teachers", model="projected", project_dim=2, project_seed=7, **classes)
    server.train("teachers", model="value", loss="squared", algorithm="cd", l1=0.01)
    with server.engine.begin() as connection:
        found = connection.exec_driver_sql("SELECT to_jsonb(m)::text FROM bismarck_dp.model AS m ORDER BY id")
        rows = list(found.scalars())
        connection.exec_driver_sql("DELETE FROM bismarck_dp.model; DROP TABLE teachers")
    return rows  # type: ignore[return-value]


def restore_model(connection: sqlalchemy.Connection, model: str) -> None:
    """As much of a row as this version has columns for."""
    names = connection.exec_driver_sql(
        "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute"
        " WHERE attrelid = 'bismarck_dp.model'::regclass AND attnum > 0 AND NOT attisdropped AND attname <> 'id'"
    ).scalar_one()
    connection.exec_driver_sql(
        f"INSERT INTO bismarck_dp.model ({names})"
        f" SELECT {names} FROM jsonb_populate_record(NULL::bismarck_dp.model, %(model)s::jsonb)",
        {"model": model},
    )


def kept(connection: sqlalchemy.Connection) -> tuple[list[Any], list[Any]]:
    """Models, and what they say of each row."""
    models = connection.exec_driver_sql("SELECT to_jsonb(m) FROM bismarck_dp.model AS m ORDER BY id").scalars()
    said = connection.exec_driver_sql(
        "SELECT name, r.id, dp_predict(name, x), dp_predict_all(name, ARRAY[x]),"
        " CASE WHEN loss = 'logistic' THEN dp_predict_proba(name, x) END"
        " FROM bismarck_dp.model, rows AS r ORDER BY 1, 2"
    )
    return list(models), [tuple(row) for row in said]


def pay(database: Database, epsilon: float) -> None:
    database.train("rows", model=f"paid {epsilon}", epsilon=epsilon, delta=1e-6, classes=[-1, 1])


# ---- what there is ----


def test_every_release_has_a_frozen_script_and_a_way_from_it(make: Any) -> None:
    released = re.findall(r"^## ([\d.]+) \(\d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sorted(FROZEN) == sorted(set(released) - {__version__})
    engine = sqlalchemy.create_engine(make("ways"))
    query = "SELECT source, path FROM pg_extension_update_paths('bismarck_dp') WHERE target = %(to)s"
    with engine.connect() as connection:
        ways = dict(tuple(row) for row in connection.exec_driver_sql(query, {"to": __version__}))
    engine.dispose()
    assert set(ways) == set(FROZEN)
    for version, way in ways.items():
        assert way is not None, f"no upgrade script leads from {version} to {__version__}"


def test_upgrade_scripts_are_installed_and_frozen_scripts_are_not() -> None:
    scripts = {file.name for file in (ROOT / "sql").glob("bismarck_dp--*--*.sql")}
    installed = {file.name for file in extension_files(kernels.extension()) if file.suffix == ".sql"}
    assert installed == {f"bismarck_dp--{__version__}.sql", *scripts}


@pytest.mark.parametrize("schema", ["public", '"Mine; all"'])
@pytest.mark.parametrize("version", FROZEN)
def test_the_catalogs_are_those_of_a_new_database(make: Any, version: str, schema: str) -> None:
    begin = [f"CREATE SCHEMA IF NOT EXISTS {schema}", "CREATE EXTENSION plpython3u"]
    upgraded = make("upgraded", *begin, f"CREATE EXTENSION bismarck_dp VERSION '{version}' SCHEMA {schema}", UPDATE)
    new = make("new", *begin, f"CREATE EXTENSION bismarck_dp SCHEMA {schema}")
    found = []
    for url in (new, upgraded):
        engine = sqlalchemy.create_engine(url)
        with engine.begin() as connection:
            found.append(catalog(connection))
        engine.dispose()
    assert found[0] == found[1], (
        f"an update from {version} does not make what sql/bismarck_dp.sql makes (-: is missing, +: is too much):\n"
        + difference(*found)
    )


COMPARISONS = ("=", "<>", "<", "<=", ">", ">=", "||", "->", "->>")

TYPES = (
    "numeric",
    "int",
    "bigint",
    "text",
    "float8",
    "regclass",
    "regrole",
    "oid",
    "name",
    "jsonb",
    "boolean",
    "text[]",
)

STRANGERS = """
    SELECT pg_describe_object(d.classid, d.objid, d.objsubid) || ' uses '
        || pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid)
    FROM pg_depend d
    LEFT JOIN pg_operator o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
    LEFT JOIN pg_proc f ON d.refclassid = 'pg_proc'::regclass AND f.oid = d.refobjid
    WHERE coalesce(o.oprnamespace, f.pronamespace) = 'public'::regnamespace
    AND d.classid IN ('pg_constraint'::regclass, 'pg_rewrite'::regclass, 'pg_class'::regclass, 'pg_trigger'::regclass,
        'pg_attrdef'::regclass, 'pg_index'::regclass)
"""


def traps() -> list[str]:
    """Operators between any two types of ours, and overloads of our functions, where the script looks for names."""
    pairs = [(left, right) for left in TYPES for right in TYPES if left != right]
    body = "RETURNS boolean LANGUAGE sql AS 'SELECT 1 / 0 = 1'"
    made = [f"CREATE FUNCTION public.trap({left}, {right}) {body}" for left, right in pairs]
    made += [
        f"CREATE OPERATOR public.{sign} (FUNCTION = public.trap, LEFTARG = {left}, RIGHTARG = {right})"
        for left, right in pairs
        for sign in COMPARISONS
    ]
    return [*made, *(f"CREATE FUNCTION public.{name}(int) {body}" for name in ("dp_budget", "dp_train", "dp_forget"))]


@pytest.mark.parametrize("version", [None, *FROZEN])
def test_nothing_of_anybody_elses_is_built_in(make: Any, version: str | None) -> None:
    """Constraints are checked by the worker, as superuser: an operator of somebody's in them would be his way there."""
    create = CREATE.format(__version__) if version is None else CREATE.format(version)
    url = make("trapped", *traps(), create, *([] if version is None else [UPDATE]))
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("SET search_path = pg_catalog")
        assert connection.exec_driver_sql(STRANGERS).scalars().all() == []
        connection.exec_driver_sql("SET search_path = public")
        connection.exec_driver_sql("CREATE TABLE bait (a numeric CHECK (a > 0))")
        connection.exec_driver_sql("SET search_path = pg_catalog")
        assert len(connection.exec_driver_sql(STRANGERS).scalars().all()) == 1, "or the search finds nothing"
    engine.dispose()


GENEROUS = [
    f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO {whom}"
    for kind in ("TABLES", "SEQUENCES", "FUNCTIONS", "SCHEMAS")
    for whom in ("PUBLIC", "friend")
]

GIVEN = """
    SELECT relname::text, r.grantee, r.privilege_type FROM pg_class AS c, LATERAL aclexplode(relacl) AS r
        WHERE relnamespace = 'bismarck_dp'::regnamespace AND r.grantee <> relowner
    UNION SELECT proname::text, r.grantee, r.privilege_type FROM pg_proc AS p,
        LATERAL aclexplode(coalesce(proacl, acldefault('f', proowner))) AS r
        WHERE pronamespace = 'bismarck_dp'::regnamespace AND r.grantee <> proowner
    UNION SELECT nspname::text, r.grantee, r.privilege_type FROM pg_namespace AS n, LATERAL aclexplode(nspacl) AS r
        WHERE nspname = 'bismarck_dp' AND r.grantee <> nspowner
"""


@pytest.mark.parametrize("version", [None, *FROZEN])
def test_rights_that_are_given_with_everything_new_are_not_given_here(make: Any, version: str | None) -> None:
    """ALTER DEFAULT PRIVILEGES of an administrator means other things than the ledger."""
    create = CREATE.format(__version__) if version is None else CREATE.format(version)
    after = [] if version is None else [UPDATE]
    url = make("generous", "DROP ROLE IF EXISTS friend", "CREATE ROLE friend", *GENEROUS, create, *after)
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            f"SELECT relname, g.grantee::regrole::text, privilege_type FROM ({GIVEN}) AS g"
        )
        views = {(view, "-", "SELECT") for view in ("models", "ledger", "protections")}
        door = {("call", role, "EXECUTE") for role in ("-", "friend", "dp_owner", "dp_analyst")}
        assert {tuple(row) for row in found} == {*views, *door, ("bismarck_dp", "-", "USAGE")}
        connection.exec_driver_sql("DROP OWNED BY friend; DROP ROLE friend")
        connection.commit()
    engine.dispose()


def test_the_comparison_itself(make: Any) -> None:
    engine = sqlalchemy.create_engine(make("new", CREATE.format(__version__)))
    changes = {
        "ALTER TABLE bismarck_dp.model ADD COLUMN colour text NOT NULL DEFAULT 'red'": "colour text NOT NULL DEFAULT",
        "ALTER TABLE bismarck_dp.entry ENABLE TRIGGER append_only": "enabled O",
        "ALTER EVENT TRIGGER bismarck_dp_forget_dropped DISABLE": "enabled D",
        "ALTER TABLE bismarck_dp.entry DROP CONSTRAINT entry_rho_check": "-table bismarck_dp.entry | constraint",
        "DROP INDEX bismarck_dp.entry_paid": "-table bismarck_dp.entry | index",
        "ALTER FUNCTION bismarck_dp.pack CALLED ON NULL INPUT": "function bismarck_dp.pack",
        "ALTER FUNCTION public.dp_predict PARALLEL UNSAFE": "function public.dp_predict",
        "GRANT EXECUTE ON FUNCTION bismarck_dp.debit TO PUBLIC": "=X/postgres",
        "REVOKE SELECT ON bismarck_dp.ledger FROM PUBLIC": "view bismarck_dp.ledger",
        "ALTER VIEW bismarck_dp.models RESET (security_barrier)": "security_barrier",
        "ALTER SEQUENCE bismarck_dp.run CACHE 5": "seqcache",
        "ALTER EXTENSION bismarck_dp DROP VIEW bismarck_dp.ledger": "-view bismarck_dp.ledger | member",
        "DELETE FROM pg_init_privs WHERE objoid = 'bismarck_dp.debit'::regproc": "rights, as made",
        "UPDATE pg_extension SET extconfig = extconfig[1:1], extcondition = extcondition[1:1]": "| dumped",
    }
    with engine.connect() as connection:
        before = catalog(connection)
        assert len(before) > 500
        for change, told in changes.items():
            connection.rollback()
            connection.exec_driver_sql(change)
            assert told in difference(before, catalog(connection)), change
    engine.dispose()


# ---- what goes on ----


def test_models_survive_and_protected_tables_work(old: Database) -> None:
    with old.transaction() as connection:
        before, said = kept(connection)
        connection.exec_driver_sql(UPDATE)
        after, said_after = kept(connection)
    assert len(before) == 5
    assert [{name: row[name] for name in before[0]} for row in after] == before
    assert said_after == said
    assert [model.name for model in old.models()] == [row["name"] for row in before]
    old.protect("rows", 1.0, 1e-5)
    pay(old, 0.5)
    with pytest.raises(BismarckError, match="budget"):
        pay(old, 0.95)
    assert [entry["outcome"] for entry in old.ledger()] == ["paid", "refused"]
    assert old.budget("rows")["releases"] == 1


def test_an_upgraded_database_is_dumped_and_restored(old: Database, cluster: Cluster, make: Any) -> None:
    run(cluster.url(dbname="old"), UPDATE)
    old.protect("rows", 1.0, 1e-5)
    pay(old, 0.5)
    copy = connect(restored(cluster, make))
    assert copy.ledger() == old.ledger()
    with copy.transaction() as there, old.transaction() as here:
        assert kept(there) == kept(here)
    assert copy.budget("rows") == old.budget("rows")
    with pytest.raises(BismarckError, match="budget"):
        pay(copy, 0.95)
    pay(copy, 0.25)
    with copy.transaction() as connection, pytest.raises(sqlalchemy.exc.DBAPIError, match="never changed"):
        connection.exec_driver_sql("DELETE FROM bismarck_dp.entry")
    copy.close()


def test_a_dump_of_an_earlier_version_is_restored_into_this_one(old: Database, cluster: Cluster, make: Any) -> None:
    with old.transaction() as connection:
        _, said = kept(connection)
    copy = connect(restored(cluster, make))
    with copy.transaction() as connection:
        assert kept(connection)[1] == said
    copy.protect("rows", 1.0, 1e-5)
    pay(copy, 0.5)
    copy.close()


def restored(cluster: Cluster, make: Any) -> str:
    """A copy of the database `old`, through a dump."""
    where = sqlalchemy.make_url(cluster.url()).query
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    env.update(PGHOST=str(where["host"]), PGPORT=str(where["port"]), PGUSER="postgres")
    dump = subprocess.run(["pg_dump", "old"], env=env, check=True, capture_output=True).stdout
    url = str(make("restored"))
    command = ["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", "restored"]
    done = subprocess.run(command, env=env, input=dump, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return url


def test_rights_that_were_changed_stay_so_and_are_dumped(old: Database, cluster: Cluster, make: Any) -> None:
    """pg_dump writes what differs from the rights as made; the update grants, and must not take changes for them."""
    changes = (
        "REVOKE EXECUTE ON FUNCTION bismarck_dp.call FROM PUBLIC",
        "GRANT EXECUTE ON FUNCTION bismarck_dp.call TO pg_monitor",
        "REVOKE SELECT ON bismarck_dp.models FROM PUBLIC",
    )
    rights = (
        "SELECT array_agg(a::text ORDER BY a::text) FROM pg_class, unnest(relacl) AS a WHERE relname = 'models'"
        " UNION ALL SELECT array_agg(a::text ORDER BY a::text) FROM pg_proc, unnest(proacl) AS a WHERE proname = 'call'"
    )
    run(cluster.url(dbname="old"), *changes, UPDATE)
    copy = connect(restored(cluster, make))
    with old.transaction() as here, copy.transaction() as there:
        wanted, got = (list(one.exec_driver_sql(rights).scalars()) for one in (here, there))
    copy.close()
    assert wanted == got
    assert wanted[1] == ["dp_analyst=X/postgres", "dp_owner=X/postgres", "pg_monitor=X/postgres", "postgres=X/postgres"]


def test_there_is_nothing_to_update_in_a_new_database(make: Any) -> None:
    engine = sqlalchemy.create_engine(make("new", CREATE.format(__version__)))
    connection: Any = engine.raw_connection()
    connection.cursor().execute(UPDATE)
    (notice,) = connection.notices
    connection.close()
    engine.dispose()
    assert f'version "{__version__}" of extension "bismarck_dp" is already installed' in notice


# ---- between new files and the update ----


def test_the_new_library_predicts_with_old_objects_and_asks_for_the_update(old: Database) -> None:
    with old.transaction() as connection:
        version = connection.exec_driver_sql("SELECT extversion FROM pg_extension WHERE extname = 'bismarck_dp'")
        message = f"objects are of version {version.scalar_one()}, and its library of {__version__}"
        assert len(kept(connection)[1]) == 5 * len(X)
    for refused in (
        lambda: pay(old, 0.5),
        lambda: old.explain("rows", epsilon=1.0),
        lambda: old.evaluate("private", "rows"),
        lambda: old.protect("rows", 1.0, 1e-5),
        lambda: old.forget("private"),
    ):
        with pytest.raises(BismarckError, match=re.escape(message)) as refusal:
            refused()
        assert (refusal.value.hint, refusal.value.sqlstate) == (UPDATE, "55000")
    assert len(old.models()) == 5


def test_a_session_with_an_older_library_connects_again(make: Any) -> None:
    database = connect(make("new", CREATE.format(__version__)))
    with database.transaction() as connection:
        newer = "UPDATE pg_extension SET extversion = '10.0' WHERE extname = 'bismarck_dp'"
        connection.exec_driver_sql(newer)
        with pytest.raises(sqlalchemy.exc.DBAPIError, match=r"objects are of version 10\.0(.|\n)*connect again"):
            connection.exec_driver_sql("SELECT dp_forget('m')")
    database.close()


def test_a_session_that_began_with_0_1_0_trains_no_more(make: Any) -> None:
    """It has that version's `serve`, which looks at nothing."""
    engine = sqlalchemy.create_engine(make("new", CREATE.format(__version__)))
    with engine.connect() as connection:
        began = (
            "DO LANGUAGE plpython3u $$\nimport bismarck_dp.version\n"
            "bismarck_dp.version.__version__ = '0.1.0'\nGD['serve'] = lambda *request: '{}'\n$$"
        )
        connection.exec_driver_sql(began)
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="connect again"):
            connection.exec_driver_sql("SELECT dp_forget('m')")
    engine.dispose()


@pytest.mark.parametrize("version", FROZEN)
def test_an_embedded_database_is_updated_when_it_is_opened(files: Path, version: str) -> None:
    with temporary() as path, Cluster(path / "c", durable=False, extension=files) as cluster:
        run(cluster.url(), CREATE.format(version))
        with embedded(str(path / "c"), durable=False, extension=files) as database:
            database.load("rows", X, Y)
            pay(database, 0.5)
