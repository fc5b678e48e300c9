"""A cluster of our own: made anywhere, found by CREATE EXTENSION, gone when it should be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

import bismarck_dp.errors
from bismarck_dp.controller import embedded
from bismarck_dp.controller.embedded import Cluster, default_home, extension_files
from bismarck_dp.errors import BismarckError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

PROBE = "CREATE FUNCTION probe() RETURNS int LANGUAGE sql AS 'SELECT {}';\n"
LOOK = """
CREATE FUNCTION look() RETURNS text LANGUAGE plpython3u AS $$
    import json, os, sys
    import numpy
    import bismarck_dp.errors
    files = {"numpy": numpy.__file__, "package": bismarck_dp.errors.__file__}
    return json.dumps({**os.environ, **files, "version": sys.version, "uid": os.getuid()})
$$"""


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory every user can enter, which pytest's own are not. What a test leaves running is stopped."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    for data in path.rglob("postmaster.pid"):
        Cluster(data.parent.parent).stop()
    shutil.rmtree(path)


@pytest.fixture
def files(room: Path) -> Path:
    """An extension nobody installed."""
    directory = room / "extension"
    directory.mkdir()
    (directory / "probe.control").write_text("default_version = '1.0'\nrequires = 'plpython3u'\n")
    (directory / "probe--1.0.sql").write_text(PROBE.format(42))
    return directory


@pytest.fixture
def cluster(room: Path, files: Path) -> Cluster:
    """In a place too long for a socket, with spaces in it."""
    return Cluster(room / ("a long name " * 12).strip(), durable=False, extension=files)


def ask(cluster: Cluster, *statements: str) -> Any:
    """The first value of the last statement."""
    engine = sa.create_engine(cluster.url(), poolclass=sa.NullPool)
    with engine.begin() as connection:
        for statement in statements[:-1]:
            connection.exec_driver_sql(statement)
        return connection.exec_driver_sql(statements[-1]).scalar()


def postmaster(cluster: Cluster) -> tuple[int, Path]:
    lines = (cluster.pgdata / "postmaster.pid").read_text().splitlines()
    return int(lines[0]), Path(lines[4])


def family(pid: int) -> list[int]:
    """The server and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def alive(pid: int) -> bool:
    """False for a zombie: it is dead, and only waits for its parent to look."""
    return Path(f"/proc/{pid}").exists() and not embedded._is_zombie(pid)


def wait_for_death(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"one of {pids} still runs"
        time.sleep(0.01)


def test_create_extension_finds_what_nobody_installed(cluster: Cluster) -> None:
    with cluster:
        assert ask(cluster, "CREATE EXTENSION probe CASCADE", "SELECT probe()") == 42
        assert ask(cluster, "SELECT current_database()") == "bismarck"
        assert ask(cluster, "SHOW shared_buffers") == "256MB"
    assert not list(embedded._Installation.find().sharedir.rglob("probe*"))


def test_python_in_the_server_is_ours(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "1", "PGHOST": "elsewhere", "PYTHONHOME": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    with cluster:
        seen = json.loads(ask(cluster, "CREATE EXTENSION plpython3u", LOOK, "SELECT look()"))
    assert seen["numpy"] == str(Path(np.__file__).resolve())
    assert seen["package"] == str(Path(bismarck_dp.errors.__file__).resolve())
    assert seen["version"] == sys.version
    assert seen["OPENBLAS_NUM_THREADS"] == seen["OMP_NUM_THREADS"] == "1"
    assert not {"PGPORT", "PGHOST", "PYTHONHOME"} & seen.keys()
    assert seen["uid"] != 0


def test_nothing_stays_behind(cluster: Cluster) -> None:
    def fail() -> None:
        with cluster:
            assert cluster.running
            pid, directory = postmaster(cluster)
            pids.extend(family(pid))
            seen.append(directory)
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert directory.stat().st_uid == cluster.pgdata.stat().st_uid
            assert ask(cluster, "SHOW listen_addresses") == ""
            raise KeyError

    pids: list[int] = []
    seen: list[Path] = []
    with pytest.raises(KeyError):
        fail()
    assert not cluster.running
    assert len(pids) > 1
    wait_for_death(pids)
    assert not seen[0].exists()
    with pytest.raises(BismarckError, match="does not run"):
        cluster.url()


def test_start_and_stop_twice(cluster: Cluster) -> None:
    cluster.stop()
    assert not cluster.path.exists()
    cluster.start()
    pid = postmaster(cluster)
    ask(cluster, "CREATE TABLE kept (a int)", "INSERT INTO kept VALUES (7) RETURNING a")
    cluster.start()
    assert postmaster(cluster) == pid
    assert cluster.started_here
    cluster.stop()
    assert not cluster.running
    assert not cluster.started_here
    cluster.stop()
    with cluster:
        assert ask(cluster, "SELECT a FROM kept") == 7


def test_attaching_leaves_it_running(cluster: Cluster) -> None:
    with cluster:
        with Cluster(cluster.path) as guest:
            assert not guest.started_here
            assert guest.url() == cluster.url()
            assert ask(guest, "SELECT 1") == 1
        assert cluster.running
    assert not cluster.running


def test_anybody_may_stop_it(cluster: Cluster) -> None:
    cluster.start()
    Cluster(cluster.path).stop()
    assert not cluster.running


def test_two_start_at_once(cluster: Cluster, files: Path) -> None:
    rivals = [cluster, Cluster(cluster.path, durable=False, extension=files)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(Cluster.start, rivals))
    assert sorted(rival.started_here for rival in rivals) == [False, True]
    cluster.stop()


def test_two_clusters_at_once(cluster: Cluster, room: Path, files: Path) -> None:
    with cluster, Cluster(room / "other", durable=False, extension=files) as other:
        ask(cluster, "CREATE TABLE here (a int)", "SELECT 1")
        assert ask(cluster, "SELECT to_regclass('here')::text") == "here"
        assert ask(other, "SELECT to_regclass('here')::text") is None
        cluster.stop()
        assert other.running


def test_new_files_arrive_with_the_next_start(cluster: Cluster, files: Path) -> None:
    (files / "old--1.0.sql").write_text("SELECT 1;")
    (files / "old.control").write_text("default_version = '1.0'\n")
    names = "SELECT name FROM pg_available_extensions WHERE name IN ('old', 'probe') ORDER BY name"
    listed = f"SELECT string_agg(name, ' ') FROM ({names}) AS ours"
    with cluster:
        assert ask(cluster, listed) == "old probe"
    (files / "old--1.0.sql").unlink()
    (files / "old.control").unlink()
    (files / "probe--1.0.sql").write_text(PROBE.format(43))
    with cluster:
        assert ask(cluster, listed) == "probe"
        assert ask(cluster, "CREATE EXTENSION probe CASCADE", "SELECT probe()") == 43


def test_a_crash_is_survived(cluster: Cluster) -> None:
    cluster.start()
    pid, directory = postmaster(cluster)
    pids = family(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for_death(pids)
    assert not cluster.running
    with cluster:
        assert ask(cluster, "SELECT 1") == 1
        assert postmaster(cluster)[1] != directory
    assert not directory.exists()


def test_a_zombie_is_not_taken_for_a_server(cluster: Cluster) -> None:
    """Killed in a container without init, the server stays in the list of processes for ever."""
    with cluster:
        account = (cluster.pgdata / "postmaster.pid").read_text()
    zombie = subprocess.Popen(["true"], **embedded._Account.of(cluster.pgdata).identity)
    while not embedded._is_zombie(zombie.pid):
        time.sleep(0.01)
    (cluster.pgdata / "postmaster.pid").write_text(f"{zombie.pid}\n" + account.partition("\n")[2])
    with cluster:
        assert ask(cluster, "SELECT 1") == 1
    zombie.wait()


def test_a_stranger_with_the_old_process_id_is_left_alone(cluster: Cluster) -> None:
    with cluster:
        account = (cluster.pgdata / "postmaster.pid").read_text()
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        (cluster.pgdata / "postmaster.pid").write_text(f"{bystander.pid}\n" + account.partition("\n")[2])
        assert not cluster.running
        cluster.stop()
        assert bystander.poll() is None
    finally:
        (cluster.pgdata / "postmaster.pid").unlink()
        bystander.kill()
        bystander.wait()


def test_a_failed_start_tells_why(cluster: Cluster) -> None:
    cluster.settings["shared_preload_libraries"] = "no_such_library"
    before = set(Path("/tmp").glob("bismarck_dp.*"))
    with pytest.raises(BismarckError, match=r"did not start:(.|\n)*no_such_library") as caught:
        cluster.start()
    assert "server.log" in caught.value.hint
    assert not cluster.running
    assert set(Path("/tmp").glob("bismarck_dp.*")) <= before
    del cluster.settings["shared_preload_libraries"]
    with cluster:
        assert ask(cluster, "SELECT 1") == 1


def test_settings(room: Path, files: Path) -> None:
    prefix = "it's 100 \\ % "
    with Cluster(room / "c", durable=False, extension=files, settings={"log_line_prefix": prefix}) as cluster:
        assert ask(cluster, "SHOW log_line_prefix") == prefix
        assert ask(cluster, "SHOW fsync") == "off"
    with Cluster(room / "c", extension=files, settings={"work_mem": "5MB"}) as cluster:
        assert ask(cluster, "SHOW work_mem") == "5MB"
        assert ask(cluster, "SHOW log_line_prefix") != prefix
        assert ask(cluster, "SHOW fsync") == "on"


@pytest.mark.parametrize("name", ["listen_addresses", "unix_socket_directories", "port", "a b", "x'"])
def test_settings_refused(name: str) -> None:
    with pytest.raises(BismarckError, match=name):
        Cluster("/tmp/never", settings={name: "*"})


def test_a_path_the_shell_would_read_is_refused() -> None:
    with pytest.raises(BismarckError, match="cannot live"):
        Cluster("/tmp/$HOME")


def test_missing_extension_files(room: Path) -> None:
    with pytest.raises(BismarckError, match="make env"):
        extension_files(room)
    with pytest.raises(BismarckError, match="make env"):
        Cluster(room / "c", extension=room).start()


def test_other_data_is_refused(room: Path, files: Path) -> None:
    (room / "foreign/pgdata").mkdir(parents=True)
    (room / "foreign/pgdata/PG_VERSION").write_text("15\n")
    with pytest.raises(BismarckError, match="not made by bismarck_dp"):
        Cluster(room / "foreign", extension=files).start()
    with pytest.raises(BismarckError, match="another PostgreSQL"):
        Cluster(room / "foreign/pgdata", extension=files).start()


def test_data_of_another_version_is_refused(cluster: Cluster) -> None:
    with cluster:
        pass
    (cluster.pgdata / "PG_VERSION").write_text("9\n")
    with pytest.raises(BismarckError, match="needs PostgreSQL 9"):
        cluster.start()


def test_a_missing_plpython_is_named(cluster: Cluster, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = embedded._Installation.find()
    fake = room / "pg_config"
    answers = f"{installed.bindir}\\n{installed.sharedir}\\n{room}\\nPostgreSQL 15.1\\n"
    fake.write_text(f"#!/bin/sh\nprintf '{answers}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PG_CONFIG", str(fake))
    with pytest.raises(BismarckError, match="postgresql-plpython3-15"):
        cluster.start()
    monkeypatch.setenv("PG_CONFIG", str(room / "nowhere"))
    with pytest.raises(BismarckError, match=r"nowhere.*PG_CONFIG"):
        cluster.start()


def test_default_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_home() == Path("/var/lib/bismarck_dp/cluster")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_home() == Path("/home/somebody/.local/share/bismarck_dp")


PLAIN_USER = """
import os, sys
from pathlib import Path
import psycopg2
from bismarck_dp.controller.embedded import Cluster

assert os.geteuid() == 65534
with Cluster(durable=False, extension=Path(sys.argv[1])) as cluster:
    url = cluster.url().replace("+psycopg2", "")
    connection = psycopg2.connect(url)
    with connection, connection.cursor() as cursor:
        cursor.execute("CREATE EXTENSION probe CASCADE")
        cursor.execute("SELECT probe()")
        assert cursor.fetchone() == (42,)
    connection.close()
assert not cluster.running
cluster.start()
print(cluster.path)
"""


@as_root
def test_a_plain_user_needs_nobody(room: Path, files: Path) -> None:
    home = room / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    packages = os.pathsep.join(map(str, embedded._python_path(embedded._Account.of(room / "none"))))
    outcome = subprocess.run(
        [str(Path(sys.prefix).resolve() / "bin" / "python"), "-c", PLAIN_USER, str(files)],
        user=65534,
        group=65534,
        extra_groups=[],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": packages},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    theirs = Cluster(outcome.stdout.strip())
    assert theirs.path == home / ".local/share/bismarck_dp"
    assert theirs.running
    pids = family(postmaster(theirs)[0])
    assert Path(f"/proc/{pids[0]}").stat().st_uid == 65534
    theirs.stop()
    wait_for_death(pids)


@as_root
def test_a_closed_directory_is_named(room: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = room / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(BismarckError, match=rf"^{closed},.*postgres"):
        Cluster(closed / "below/it", extension=files).start()
    assert not list(closed.iterdir())
    (closed / "site").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda scheme: str(closed / "site"))
    with pytest.raises(BismarckError, match=rf"^{closed},.*Python's packages"):
        Cluster(room / "open", extension=files).start()


@as_root
def test_root_may_hand_over_an_empty_directory(files: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as empty,
        Cluster(empty, durable=False, extension=files) as cluster,
    ):
        assert ask(cluster, "SELECT 1") == 1
        assert stat.S_IMODE(cluster.pgdata.stat().st_mode) == 0o700


def test_somebody_elses_file_is_named(cluster: Cluster) -> None:
    cluster.path.parent.mkdir(exist_ok=True)
    cluster.path.write_text("a file where a directory is wanted")
    with pytest.raises(BismarckError, match="cannot be used"):
        cluster.start()
