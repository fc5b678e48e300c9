"""The image's promises that can be checked without building it, and its entry point on a real PostgreSQL."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from bismarck_dp.controller.cli import main
from bismarck_dp.controller.database import Database, embedded

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "udf/Dockerfile").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()
ENTRYPOINT = ROOT / "udf/docker-entrypoint.sh"
PACKAGING = [ROOT / "udf/Dockerfile", ROOT / "docker-compose.yml", ENTRYPOINT, ROOT / ".dockerignore"]


def service(name: str) -> str:
    """The lines of one service of docker-compose.yml."""
    found = re.search(rf"^  {name}:\n((?:    .*\n|\n)+)", COMPOSE, re.MULTILINE)
    assert found is not None
    return found.group(1)


def health_query() -> str:
    found = re.search(r"^ +- --command=(.*)$", service("db"), re.MULTILINE)
    assert found is not None
    return found.group(1)


# ------------------------------------------------------------------------------------------------------------- the text


def test_the_base_image_is_debian_bookworm_slim() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases
    assert set(bases) == {"debian:bookworm-slim"}


def test_the_image_is_built_by_make_install_and_ships_no_compiler() -> None:
    build, final = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert "make -C /src install" in build
    assert re.search(r"^install:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for package in ("postgresql-15", "postgresql-plpython3-15"):
        assert re.search(rf"\b{package}\b", final)
    assert not re.search(r"\bgcc\b|server-dev", final)


def test_the_image_does_not_run_as_root() -> None:
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE) == ["postgres"]


def test_no_registry_is_named() -> None:
    """A reference whose first part has a dot or a port names the host of a registry."""
    references = re.findall(r"^(?:FROM|COPY --from=|\s+image:) ?(\S+)", DOCKERFILE + COMPOSE, re.MULTILINE)
    assert len(references) >= 6
    for reference in references:
        host, slash, _ = reference.partition("/")
        assert not slash or not re.search(r"[.:]|^localhost$", host)
    for file in PACKAGING:
        assert not re.search(r"docker\.io|ghcr|quay|gcr\.io|https?://", file.read_text())


def test_no_secret_is_baked_in() -> None:
    assert "PASSWORD" not in DOCKERFILE
    assert re.findall(r"PASSWORD.*", service("db")) == ["PASSWORD: ${POSTGRES_PASSWORD:-}"]
    assert "PASSWORD" not in service("demo")
    assert not re.search(r"://[^@\s\"]*:[^@\s\"]*@", DOCKERFILE + COMPOSE)


def test_what_the_image_needs_is_not_ignored() -> None:
    """COPY . must bring the sources, and must not bring what was built on another machine."""
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for needed in ("bismarck_dp", "controller", "sql", "udf", "Makefile", "pyproject.toml", "README.md"):
        assert needed not in ignored
        assert (ROOT / needed).exists()
    assert {".*", "**/*.o", "**/*.so"} <= set(ignored)


def test_the_demo_waits_for_a_healthy_database() -> None:
    assert re.search(r"depends_on:\n +db:\n +condition: service_healthy\n", service("demo"))
    assert "healthcheck:" in service("db")
    for part in ("CREATE EXTENSION IF NOT EXISTS bismarck_dp CASCADE", "bismarck_dp.models"):
        assert part in health_query()


def test_the_demo_runs_a_command_that_exists() -> None:
    found = re.search(r"^ +command: (\[.*\])$", service("demo"), re.MULTILINE)
    assert found is not None
    program, command, *words = json.loads(found.group(1))
    assert program == "bismarck-dp"
    context = main.commands[command].make_context(command, words)
    assert context.params["url"].startswith("postgresql+psycopg2://")
    assert context.params["url"].endswith("@db/bismarck")


def test_volumes_are_where_the_image_keeps_its_data() -> None:
    volumes = re.findall(r"^ +- (\w+):(/[^:\n]+)", service("db"), re.MULTILINE)
    declared = re.search(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    assert declared is not None
    assert [path for _, path in volumes] == declared.group(1).split()
    environment = dict(re.findall(r"(PGDATA|PGPASSFILE)=(\S+)", DOCKERFILE))
    assert {str(Path(path).parent) for path in environment.values()} == {path for _, path in volumes}
    for name, _ in volumes:
        assert re.search(rf"^volumes:\n(?:  \w+:\n)*  {name}:$", COMPOSE, re.MULTILINE)


# ------------------------------------------------------------------------------------------------------ the entry point


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    """Its private tree is a PostgreSQL with the extension installed, as in the image."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    with embedded(str(path), durable=False) as database:
        yield database
    shutil.rmtree(path)


@pytest.fixture
def volume() -> Iterator[Path]:
    """Holds a copy of the entry point too: the way to the project may be closed to the server's user."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    shutil.copy(ENTRYPOINT, path)
    if os.geteuid() == 0:
        shutil.chown(path, "postgres")
    yield path
    shutil.rmtree(path)


def as_server() -> dict[str, Any]:
    """The image's user, for subprocess: PostgreSQL does not run as root."""
    if os.geteuid() != 0:
        return {}
    entry = pwd.getpwnam("postgres")
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def environment(database: Database, volume: Path, **more: str) -> dict[str, str]:
    assert database.cluster is not None
    binaries = next(database.cluster.path.glob("server/**/bin/initdb")).parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "POSTGRES"))}
    # The image has the server's psql in front; here it may be anywhere.
    env.update(PATH=f"{binaries}:{env['PATH']}", PGPORT=str(port), TMPDIR=str(volume))
    return {**env, "PGDATA": f"{volume}/pgdata", "PGPASSFILE": f"{volume}/pgpass", **more}


@contextmanager
def container(env: dict[str, str], volume: Path) -> Iterator[None]:
    command = [str(volume / ENTRYPOINT.name), "postgres", "-c", f"unix_socket_directories={volume}"]
    with open(volume / "log", "a") as log:
        child = subprocess.Popen(command, env=env, cwd="/", stdout=log, stderr=log, **as_server())
    try:
        deadline = time.monotonic() + 60
        while not (volume / f".s.PGSQL.{env['PGPORT']}").exists():
            assert child.poll() is None, (volume / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        child.terminate()
        child.wait(30)


def connect(env: dict[str, str], password: str) -> Any:
    """Over TCP, once the server has opened its doors."""
    where = {"host": "127.0.0.1", "port": env["PGPORT"], "user": "postgres", "dbname": "bismarck"}
    for _ in range(100):
        try:
            return psycopg2.connect(**where, password=password)
        except psycopg2.OperationalError as error:
            if "starting up" not in str(error):
                raise
            time.sleep(0.05)
    raise AssertionError("the server does not come up")


def kept_password(volume: Path) -> str:
    assert (volume / "pgpass").stat().st_mode & 0o777 == 0o600
    fields = re.fullmatch(r"\*:\*:\*:postgres:(.*)\n", (volume / "pgpass").read_text())
    assert fields is not None
    return re.sub(r"\\(.)", r"\1", fields.group(1))


def test_the_entry_point_is_executable() -> None:
    assert os.access(ENTRYPOINT, os.X_OK)
    subprocess.run(["bash", "-n", str(ENTRYPOINT)], check=True)


def test_the_entry_point_runs_other_commands_as_they_are() -> None:
    done = subprocess.run([str(ENTRYPOINT), "echo", "a  b"], capture_output=True, text=True, check=True)
    assert done.stdout == "a  b\n"


def test_the_health_query_holds_on_a_database_with_the_extension_and_repairs_one_without(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql(health_query())
        connection.exec_driver_sql("DROP EXTENSION bismarck_dp")
        connection.exec_driver_sql(health_query())


def test_an_empty_volume_becomes_a_database_behind_a_random_password(database: Database, volume: Path) -> None:
    env = environment(database, volume)
    with container(env, volume):
        password = kept_password(volume)
        assert re.fullmatch("[0-9a-f]{32}", password)
        with connect(env, password) as connection, connection.cursor() as cursor:
            cursor.execute(health_query())
            cursor.execute("SELECT rolpassword ~ '^SCRAM-SHA-256' FROM pg_authid WHERE rolname = 'postgres'")
            assert cursor.fetchone() == (True,)
            cursor.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        connection.close()
        with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
            connect(env, "wrong")
    with container(env, volume):
        assert kept_password(volume) == password
        with connect(env, password) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT answer FROM kept")
            assert cursor.fetchone() == (42,)
        connection.close()


def test_a_given_password_may_hold_any_character(database: Database, volume: Path) -> None:
    password = "a:b\\c'd $e"
    env = environment(database, volume, POSTGRES_PASSWORD=password)
    with container(env, volume):
        assert kept_password(volume) == password
        connect(env, password).close()


def test_a_cluster_that_could_not_be_finished_is_not_used(database: Database, volume: Path) -> None:
    broken = volume / "broken"
    broken.mkdir()
    (broken / "psql").write_text("#!/bin/sh\nexit 3\n")
    (broken / "psql").chmod(0o755)
    env = environment(database, volume)
    broken_env = {**env, "PATH": f"{broken}:{env['PATH']}"}
    command = [str(volume / ENTRYPOINT.name), "postgres"]
    done = subprocess.run(command, env=broken_env, cwd="/", capture_output=True, **as_server())
    assert done.returncode == 3
    assert not (volume / "pgdata").exists()
    assert not (volume / "pgdata.new/postmaster.pid").exists(), "and its server does not run"
    with container(env, volume):
        connect(env, kept_password(volume)).close()
