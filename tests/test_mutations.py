"""The harness has teeth: on a copy of the project with one known mistake in it, a named test fails.

Each mutation (mutations.py, mutations_of_budgets.py) is an edit of the real source, compiled and installed aside; the
named test then runs against that copy in a process of its own, with its own server. It must fail by assertion: a copy
that does not build, start or train fails this test instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from mutations import OF_MODELS, Mutation
from mutations_of_budgets import OF_BUDGETS

from bismarck_dp.controller.embedded import _pg_config

ROOT = Path(__file__).resolve().parents[1]

NOTHING = Mutation(
    "nothing", "udf/pack.c", "pack.c: one pass", "pack.c: a single pass", "test_audit.py::test_the_batched_claim_holds"
)


def mutated(mutation: Mutation, home: Path) -> tuple[Path, Path]:
    """A package and a compiled extension with the mutation in them."""
    source, extension = home / "source", home / "extension"
    for part in ("bismarck_dp", "controller", "udf", "sql"):
        shutil.copytree(ROOT / part, source / part, symlinks=True)
    target = source / mutation.file
    text = target.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: the mutation no longer fits"
    target.write_text(text.replace(mutation.old, mutation.new))
    build = ["make", "-s", "-C", str(source / "udf"), f"PG_CONFIG={_pg_config()}", "stage", f"STAGE={extension}"]
    subprocess.run(build, check=True)
    return source, extension


def run_on(mutation: Mutation) -> subprocess.CompletedProcess[str]:
    """The named test on the mutated copy, which the server's user must be able to read."""
    home = Path(tempfile.mkdtemp(prefix="bdp_mutant_", dir="/tmp"))
    try:
        source, extension = mutated(mutation, home)
        subprocess.run(["chmod", "-R", "a+rX", str(home)], check=True)
        env = {**os.environ, "PYTHONPATH": str(source), "BISMARCK_DP_TEST_EXTENSION": str(extension)}
        pytest_of_ours = str(Path(sys.executable).with_name("pytest"))
        command = [pytest_of_ours, "-x", "-q", "-p", "no:cacheprovider", f"tests/{mutation.test}"]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("mutation", [*OF_MODELS, *OF_BUDGETS], ids=lambda mutation: mutation.name)
def test_mutation_makes_a_named_test_fail(mutation: Mutation) -> None:
    run = run_on(mutation)
    assert run.returncode == 1, run.stdout + run.stderr
    # Of several ways to fail, hypothesis shows a group of exceptions. A refusal that is missing is a failure, too.
    assert re.search(r"^(E| +\|) +(AssertionError|assert |Failed: DID NOT RAISE)", run.stdout, re.MULTILINE), run.stdout
    assert "1 failed" in run.stdout, run.stdout
    assert "error" not in run.stdout.splitlines()[-1], run.stdout


def test_a_copy_without_a_mistake_passes() -> None:
    run = run_on(NOTHING)
    assert run.returncode == 0, run.stdout + run.stderr
