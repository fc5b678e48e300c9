"""What is paid stays paid in copies of a database: dumps, whole and in parts, and standbys."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import psycopg2
import pytest
from ledgers import House, answer, check_nothing_is_left, durable_house, models, own_server

from bismarck_dp.controller.database import Database, connect
from bismarck_dp.controller.embedded import Cluster


@pytest.fixture(scope="module")
def own() -> Iterator[Database]:
    """A durable server, for what harms others."""
    with own_server() as db:
        yield db


@pytest.fixture
def durable(own: Database, request: Any) -> Iterator[House]:
    with durable_house(own, request.node.name) as found:
        yield found


def tool(name: str) -> str:
    bindir = subprocess.run([os.environ.get("PG_CONFIG", "pg_config"), "--bindir"], capture_output=True, text=True)
    return str(Path(bindir.stdout.strip(), name))


def run_tool(house: House, name: str, *arguments: str) -> None:
    query = house.db.engine.url.query
    where = ["-h", str(query["host"]), "-p", str(query["port"]), "-U", "postgres"]
    subprocess.run([tool(name), *where, *arguments], check=True, capture_output=True)


RESTORE = {
    "serial": ("pg_restore", "-e"),
    "parallel": ("pg_restore", "-e", "-j", "4"),
    "psql": ("psql", "-v", "ON_ERROR_STOP=1", "-f"),
}


@pytest.mark.parametrize("style", RESTORE)
def test_dump_and_restore(durable: House, style: str, tmp_path: Path) -> None:
    """Into another database of the cluster, tables in any order: budgets go on where they were, each for itself."""
    durable.train("m0")
    durable.ask(f"CREATE TABLE short_{style} AS TABLE {durable.table}")
    durable.ask(f"SELECT dp_protect('short_{style}', 1, 0); DROP TABLE short_{style}")
    file, name = str(tmp_path / "dump"), f"restored_{style}"
    run_tool(durable, "pg_dump", "-F", "p" if style == "psql" else "c", "-f", file, durable.database)
    durable.ask(f"CREATE DATABASE {name}")
    run_tool(durable, RESTORE[style][0], "-d", name, *RESTORE[style][1:], file)
    other = House(durable.db, durable.table, "ann", name)
    assert other.paid() == durable.paid()
    assert other.spent("ann") == durable.spent("ann")
    assert models(other) == ["m0"]
    assert other.ask("SELECT weights FROM bismarck_dp.model") == durable.ask("SELECT weights FROM bismarck_dp.model")
    gone = "SELECT name, source, active FROM bismarck_dp.protected WHERE name LIKE '%%short%%' ORDER BY id"
    assert other.ask(gone) == durable.ask(gone)
    assert other.ask(gone)[-1] == (f"public.short_{style}", None, False)
    ids = [row[0] for row in other.ask("SELECT id FROM bismarck_dp.entry")]
    assert other.train("m1", 0.9) > max(ids)
    with pytest.raises(psycopg2.Error, match="does not allow"):
        other.train("m2", 1e-3)
    with pytest.raises(psycopg2.Error, match="never changed"):
        other.ask("DELETE FROM bismarck_dp.entry")
    assert durable.spent() == pytest.approx((0.1, 0, 1)), "the other database is another one"
    other.ask(f"DROP TABLE {other.table}")
    assert other.ask("SELECT count(*) FROM bismarck_dp.protected WHERE active AND source IS NULL") == [(0,)]
    check_nothing_is_left(other)
    durable.ask(f"DROP DATABASE {name}")


def test_a_dump_that_leaves_tables_out(durable: House, tmp_path: Path) -> None:
    """Their entries stay, and mean no other table; the others' budgets go on."""
    durable.train("m0")
    for name in ("spare", "extra"):
        durable.ask(f"CREATE TABLE {name} AS TABLE {durable.table}; SELECT dp_protect('{name}', 1, 0)")
        durable.ask(f"SELECT dp_train('{name}', 'of {name}', 'y', '{{x}}', 0.5)")
    file = str(tmp_path / "dump")
    run_tool(durable, "pg_dump", "-T", "spare", "-T", "public.extra", "-f", file, durable.database)
    durable.ask("CREATE DATABASE fewer")
    run_tool(durable, "psql", "-d", "fewer", "-v", "ON_ERROR_STOP=1", "-f", file)
    other = House(durable.db, durable.table, "ann", "fewer")
    assert other.paid() == durable.paid()
    assert other.train("m1", 0.9) > 0
    ledger = 'SELECT source, "table", epsilon::text FROM bismarck_dp.ledger WHERE source IN (%s, %s) ORDER BY id'
    left_out = [(f"public.{name}", None, "0.5") for name in ("spare", "extra")]
    assert other.ask(ledger, "public.spare", "public.extra") == left_out
    with pytest.raises(psycopg2.errors.UniqueViolation):
        other.ask(
            "INSERT INTO bismarck_dp.protected (source, name, owner, active, epsilon, delta, composition, adjacency,"
            " unit_rows, summed_delta, analysts, lengths, classes) SELECT source, name, owner, active, epsilon, delta,"
            " composition, adjacency, unit_rows, summed_delta, analysts, lengths, classes FROM bismarck_dp.protected"
            " WHERE source::oid = %s::regclass",
            other.table,
        )
    owner = other.connect("postgres")
    answer(owner, f"CREATE TABLE spare AS TABLE {other.table}; SELECT dp_protect('spare', 1, 0)")
    assert any("was protected before, and is gone" in notice for notice in owner.notices)
    other.close()
    durable.ask("DROP DATABASE fewer")
    durable.ask("DROP TABLE spare, extra")


def test_a_dump_that_leaves_protections_out(durable: House, tmp_path: Path) -> None:
    """Entries whose table nobody knows are shown to who may see them all, and burden no other table."""
    durable.train("m0")
    file = str(tmp_path / "dump")
    run_tool(durable, "pg_dump", "--exclude-table-data=bismarck_dp.protected*", "-f", file, durable.database)
    durable.ask("CREATE DATABASE bare")
    run_tool(durable, "psql", "-d", "bare", "-v", "ON_ERROR_STOP=1", "-f", file)
    other = House(durable.db, durable.table, "ann", "bare")
    ledger = 'SELECT DISTINCT "table" FROM bismarck_dp.ledger'
    assert other.ask(ledger) == [(None,)]
    other.protect(1.0)
    assert other.spent() == (0, 0, 0)
    assert other.train("m1", 0.9) > 0
    assert set(other.ask(ledger)) == {(None,), (other.table,)}
    other.close()
    durable.ask("DROP DATABASE bare")


def test_a_standby(durable: House, tmp_path_factory: Any) -> None:
    """It answers from models, and trains none."""
    durable.train("m0")
    durable.ask("CREATE TABLE open AS SELECT 1 AS y, '{1,2,3}'::float8[] AS x")
    primary = durable.db.cluster
    assert primary is not None
    home = primary.path.parent / "standby"
    home.mkdir()
    run_tool(durable, "pg_basebackup", "-D", str(home / "pgdata"), "-c", "fast", "-R")
    owner = primary.pgdata.stat()
    for path in [home / "pgdata", *(home / "pgdata").rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid)
    with Cluster(home, extension=kernels.extension()) as cluster:
        standby = House(connect(cluster.url()), durable.table, "ann")
        assert standby.ask("SELECT pg_is_in_recovery()") == [(True,)]
        with pytest.raises(psycopg2.Error, match="standby") as caught:
            standby.train("m1")
        assert "primary" in (caught.value.diag.message_hint or "")
        assert standby.spent("ann") == pytest.approx((0.1, 0, 1))
        standby.ask("SELECT dp_predict('m0', x) FROM open", user="postgres")
        standby.db.close()
    assert durable.spent() == pytest.approx((0.1, 0, 1))
    durable.ask("DROP TABLE open")
