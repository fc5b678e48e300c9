"""What SQL sees, through pg_regress: tests/regress/sql against tests/regress/expected."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from bismarck_dp.controller.database import Database
from bismarck_dp.controller.embedded import _Installation

REGRESS = Path(__file__).parent / "regress"


def test_sql_output_is_as_expected(db: Database) -> None:
    installation = _Installation.find()
    names = sorted(path.stem for path in (REGRESS / "sql").glob("*.sql"))
    assert {path.stem for path in (REGRESS / "expected").glob("*.out")} == set(names)
    url = db.engine.url
    with tempfile.TemporaryDirectory() as output:
        command = [
            str(installation.pkglibdir / "pgxs/src/test/regress/pg_regress"),
            f"--inputdir={REGRESS}",
            f"--outputdir={output}",
            f"--bindir={installation.bindir}",
            f"--host={url.query['host']}",
            f"--port={url.query['port']}",
            "--user=postgres",
            f"--dbname={url.database}",
            "--use-existing",
            *names,
        ]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PGTZ": "UTC"}, check=False)
        difference = Path(output, "regression.diffs")
        assert result.returncode == 0, difference.read_text() if difference.exists() else result.stdout + result.stderr
