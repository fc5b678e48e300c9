"""The documentation against the code: everything has an entry, every example runs and prints what is shown.

In a Markdown file a ```sql block is run by psql, a ```python block by this interpreter, and the `$` lines of a
```console block by the shell, in order. A ```text block right behind shows the output: its words and its layout must be
those that come, its numbers may differ (noise is fresh each time) unless the block is marked `text exact`, where they
must agree to nine digits. A line with nothing but `…` stands for lines left out. ```sql fails must fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from bismarck_dp.controller.database import Database
from bismarck_dp.evaluation import EVALUATION_OPTIONS
from bismarck_dp.losses import LOSSES
from bismarck_dp.solvers import SOLVERS
from bismarck_dp.spec import OPTIONS, STEP_WORDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import audit  # noqa: E402

DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SQL_REFERENCE = (ROOT / "docs/sql.md").read_text()
PYTHON_REFERENCE = (ROOT / "docs/python.md").read_text()
SCRIPT = (ROOT / "sql/bismarck_dp.sql").read_text()
FUNCTIONS = sorted(set(re.findall(r"CREATE (?:FUNCTION|AGGREGATE) @extschema@\.(dp_\w+)", SCRIPT)))


# ---- blocks and their output ----


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    marks: tuple[str, ...]
    text: str
    shown: str | None = None
    """the output shown behind it"""
    exact: bool = False


FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(markdown: str) -> list[Block]:
    """The blocks that are run, each with the output shown right behind it."""
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(markdown):
        language, marks, text = match.group(1), tuple(match.group(2).split()), match.group(3)
        follows = found and not markdown[end : match.start()].strip()
        if language == "text" and follows and found[-1].shown is None:
            last = found.pop()
            found.append(Block(last.line, last.language, last.marks, last.text, text, "exact" in marks))
        elif language in ("sql", "python", "console"):
            found.append(Block(markdown.count("\n", 0, match.start()) + 1, language, marks, text))
        end = match.end()
    return found


NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w])", re.IGNORECASE)


def lines_of(output: str) -> list[tuple[str, list[float]]]:
    """Lines without their spacing and rulers, as words with # for each number, and the numbers."""
    lines = []
    for line in output.splitlines():
        words = " ".join(re.sub(r"[-─━]{2,}", " ", line).split())
        words = words.replace("[ ", "[").replace(" ]", "]")  # NumPy pads to the longest number
        if words and not set(words) <= {"+", " "}:
            lines.append((NUMBER.sub("#", words), [float(number) for number in NUMBER.findall(words)]))
    return lines


def same(shown: str, printed: str, exact: bool) -> bool:
    wanted, got = lines_of(shown), lines_of(printed)
    if ("…", []) in wanted:
        cut = wanted.index(("…", []))
        head, tail = wanted[:cut], wanted[cut + 1 :]
        if len(got) <= len(head) + len(tail):
            return False
        wanted, got = head + tail, got[: len(head)] + got[len(got) - len(tail) :]
    if [words for words, _ in wanted] != [words for words, _ in got]:
        return False
    return not exact or all(a == pytest.approx(b, rel=1e-9) for (_, a), (_, b) in zip(wanted, got))


def check(block: Block, printed: str) -> None:
    if block.shown is not None:
        message = f"line {block.line} shows\n{block.shown}\nand prints\n{printed}"
        assert same(block.shown, printed, block.exact), message


@pytest.mark.parametrize(
    ("shown", "printed", "exact", "equal"),
    [
        (" a | b \n---+---\n 1 | x\n", "  a  |  b \n-----+----\n 2.5e-3 | x\n\n", False, True),
        (" a | b \n 1 | x\n", " a | b \n 2 | x\n", True, False),
        (" a | b \n 1 | x\n", " a | b \n 1 | y\n", False, False),
        (" a \n 0.30000000000000004\n", " a \n 0.3\n", True, True),
        ("[1.25 2.5 ]\n", "[ 1.5 -2.75]\n", False, True),
        (" a \n 0.3001\n", " a \n 0.3\n", True, False),
        (" a \n 1\n 2\n", " a \n 1\n", False, False),
        ("a\n…\nz\n", "a\nb\nc\nz\n", False, True),
        ("a\n…\nz\n", "a\nb\nc\ny\n", False, False),
        ("a\n…\nz\n", "a\nz\n", False, False),
    ],
)
def test_the_comparison_itself(shown: str, printed: str, exact: bool, equal: bool) -> None:
    assert same(shown, printed, exact) is equal


def test_the_extraction_itself() -> None:
    text = "```sql\nA\n```\n\n```text exact\nB\n```\n```sql fails\nC\n```\nwords\n```text\nD\n```\n```sh\nE\n```\n"
    found = blocks_of(text)
    assert [(b.text, b.shown, b.exact, b.marks) for b in found] == [
        ("A\n", "B\n", True, ()),
        ("C\n", None, False, ("fails",)),
    ]


# ---- examples run ----


@pytest.fixture
def empty_database(server: Database) -> Iterator[list[str]]:
    """A database of its own without the extension: the psql command that opens it."""
    assert server.cluster is not None
    name = "documentation"
    with server.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    url = sqlalchemy.make_url(server.cluster.url(dbname=name))
    psql = shutil.which("psql")
    assert psql, "psql is needed to run the examples"
    yield [psql, "-X", "-h", str(url.query["host"]), "-p", str(url.query["port"]), "-U", "postgres", "-d", name]
    with server.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


def run_psql(psql: list[str], text: str) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    env["LC_ALL"] = "C.UTF-8"
    command = [*psql, "-v", "ON_ERROR_STOP=1", "-f", "-"]
    merged: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, input=text, env=env, check=False, timeout=120, **merged)
    return done.returncode, re.sub(r"^psql:<stdin>:\d+: ", "", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/sql.md"])
def test_sql_examples_run(empty_database: list[str], name: str) -> None:
    blocks = [block for block in blocks_of((ROOT / name).read_text()) if block.language == "sql"]
    assert blocks, f"{name} has no SQL"
    for block in blocks:
        code, printed = run_psql(empty_database, block.text)
        where = f"{name}, line {block.line}:\n{block.text}\n{printed}"
        assert (code != 0) == ("fails" in block.marks), where
        assert "Traceback" not in printed, where
        check(block, printed)


@pytest.fixture
def empty_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory of the examples, open to the server's user; no server runs in it afterwards."""
    from bismarck_dp.controller.embedded import Cluster

    path = Path(tempfile.mkdtemp(prefix="bdp_docs_", dir="/tmp"))
    path.chmod(0o755)
    monkeypatch.chdir(path)
    monkeypatch.delenv("BISMARCK_DP_URL", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield path
    if (path / "data").exists():
        Cluster(path / "data").stop()
    shutil.rmtree(path)


def run_python(block: Block, name: str, namespace: dict[str, Any]) -> str:
    """What a block prints; an exception at its end is printed as the interpreter would, in one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.text, name, "exec"), namespace)
    except Exception as error:
        if "fails" not in block.marks:
            raise
        printed.write("".join(traceback.format_exception_only(type(error), error)))
    else:
        assert "fails" not in block.marks, f"{name}, line {block.line} does not fail"
    return printed.getvalue()


def run_console(block: Block, name: str) -> None:
    """Runs the `$` lines of a block; the lines below each are its output."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        merged: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(["bash", "-c", command], check=False, timeout=120, **merged)
        printed = done.stdout if done.returncode == 0 else done.stderr
        assert done.returncode == 0 or shown.startswith("error: "), f"{name}: {command}\n{done.stderr}"
        check(Block(block.line, "console", (), command, shown or None), printed)


@pytest.mark.parametrize("name", ["docs/tutorial.md", "docs/python.md"])
def test_python_and_console_examples_run(empty_directory: Path, name: str) -> None:
    blocks = [block for block in blocks_of((ROOT / name).read_text()) if block.language != "sql"]
    assert any(block.language == "python" for block in blocks), f"{name} has no Python"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks:
            if block.language == "python":
                check(block, run_python(block, name, namespace))
            else:
                run_console(block, name)
    finally:
        if isinstance(namespace.get("db"), Database):
            namespace["db"].close()


# ---- everything has an entry ----


def table_rows(markdown: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by the name in their first cell."""
    parts = re.split(rf"^#+ {re.escape(heading)}$", markdown, maxsplit=1, flags=re.MULTILINE)
    assert len(parts) == 2, f"no heading {heading!r}"
    section = re.split(r"^#+ ", parts[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_every_option_is_documented_with_its_default() -> None:
    rows = table_rows(SQL_REFERENCE, "Options")
    assert set(rows) == set(OPTIONS)
    for name, option in OPTIONS.items():
        shown = rows[name][0].strip("`")
        if isinstance(option.default, bool):
            assert shown == str(option.default).lower(), name
        elif isinstance(option.default, (int, float)) and option.default < float("inf"):
            assert float(shown) == option.default, name
        elif isinstance(option.default, str):
            assert shown == option.default, name
        else:
            assert not re.fullmatch(r"[\d.]+", shown), f"{name} has no fixed default"


def test_every_option_of_evaluations_is_documented_with_its_default() -> None:
    rows = table_rows(SQL_REFERENCE, "Options of dp_evaluate")
    assert set(rows) == set(EVALUATION_OPTIONS)
    for name in ("adjacency", "bins"):
        assert rows[name][0].strip("`") == str(EVALUATION_OPTIONS[name].default)


def test_every_algorithm_and_loss_is_documented_and_no_other() -> None:
    assert set(table_rows(SQL_REFERENCE, "Algorithms")) == set(SOLVERS)
    assert set(table_rows(SQL_REFERENCE, "Losses")) == set(LOSSES)
    for word in STEP_WORDS:
        assert word in table_rows(SQL_REFERENCE, "Steps"), word


def test_every_function_is_documented_with_its_arguments(db: Database, sql: Any) -> None:
    found = sql(
        "SELECT proname AS name, pg_get_function_arguments(oid) AS arguments, pg_get_function_result(oid) AS result"
        " FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'dp\\_%'"
    )
    assert sorted(row["name"] for row in found) == FUNCTIONS
    text = " ".join(SQL_REFERENCE.split())
    for row in found:
        signature = f"{row['name']}({row['arguments']}) RETURNS {row['result']}"
        signature = signature.replace("double precision", "float8").replace("'::text", "'").replace("'::jsonb", "'")
        signature = re.sub(r"NULL::[a-z0-9]+(\[\])?", "NULL", signature)
        assert signature in text, signature


def test_no_other_function_is_documented() -> None:
    for file in DOCS:
        named = set(re.findall(r"\bdp_[a-z_]+(?=\()", file.read_text()))
        assert named <= set(FUNCTIONS), f"{file.name}: {named - set(FUNCTIONS)}"


def test_every_column_of_a_model_is_documented(db: Database, sql: Any) -> None:
    columns = sql(
        "SELECT attname AS name, format_type(atttypid, NULL) AS type FROM pg_attribute"
        " WHERE attrelid = 'bismarck_dp.model'::regclass AND attnum > 0"
    )
    rows = table_rows(SQL_REFERENCE, "Columns of a model")
    documented = {name: cells[0].strip("`") for name, cells in rows.items()}
    short = {"double precision": "float8", "integer": "int", "timestamp with time zone": "timestamptz"}
    short |= {"double precision[]": "float8[]", "integer[]": "int[]"}
    assert documented == {row["name"]: short.get(row["type"], row["type"]) for row in columns}


def test_every_key_of_explain_is_documented() -> None:
    import bismarck_dp

    assert set(table_rows(SQL_REFERENCE, "Keys of dp_explain")) == set(bismarck_dp.explain(n=100, d=3, epsilon=1.0))


def test_every_command_and_its_flags_are_documented() -> None:
    from bismarck_dp.controller.cli import main

    assert set(table_rows(PYTHON_REFERENCE, "Command line")) == set(main.commands)
    flags = {flag for command in main.commands.values() for option in command.params for flag in option.opts}
    options = {f"--{name.replace('_', '-')}" for name in OPTIONS}
    assert options < flags
    for flag in sorted(flag for flag in flags - options if flag.startswith("--")):
        assert re.search(rf"{flag}(?![\w-])", PYTHON_REFERENCE), flag


def test_python_methods_are_documented() -> None:
    import bismarck_dp
    from bismarck_dp.model import Model

    for name in bismarck_dp.__all__:
        assert f"bismarck_dp.{name}" in PYTHON_REFERENCE, name
    for kind, prefix, heading in ((Database, "db.", "Opening a database"), (Model, "model.", "Models")):
        documented = {row.partition("(")[0] for row in table_rows(PYTHON_REFERENCE, heading)}
        members = [name for name, value in vars(kind).items() if callable(value) or isinstance(value, property)]
        public = {prefix + name for name in members if not name.startswith("_")}
        assert public <= documented, public - documented


# ---- commands and links ----


def test_make_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for file in DOCS:
        named = set(re.findall(r"(?:^|`)\$? ?(?:sudo )?make ([a-z]+)", file.read_text(), re.MULTILINE))
        assert named <= targets, f"{file.name}: {named - targets}"
    assert {"demo", "test"} <= set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()))


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_relative_links_lead_somewhere(file: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", file.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_document_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for file in (ROOT / "docs").glob("*.md"):
        assert f"docs/{file.name}" in text, file.name


def test_the_audit_table_has_every_row_and_no_claim_is_broken() -> None:
    """`make audit` writes it; a new algorithm or loss makes it stale."""
    made = (ROOT / "docs/privacy.md").read_text().split(audit.BEGIN)[1].split(audit.END)[0]
    rows = [[cell.strip(" `≥") for cell in line.strip("|").split("|")] for line in made.splitlines() if "`" in line]
    shown = {(algorithm, loss, adjacency, float(delta)) for algorithm, loss, _, adjacency, *_, delta, _, _ in rows}
    assert shown == {(s["algorithm"], s["loss"], s["adjacency"], s["delta"]) for s in audit.specs()}
    for *_, declared, measured, claimed, _, found, verdict in rows:
        assert verdict == "pass"
        assert float(measured) <= float(declared)
        assert float(found) <= float(claimed)
    assert "5000 trainings" in made, "the long version"


def test_tests_that_are_named_exist() -> None:
    """docs/privacy.md tells the reader which tests check a claim."""
    for file in DOCS:
        for name, test in re.findall(r"`tests/(test_\w+\.py)(?:::(\w+))?`", file.read_text()):
            path = ROOT / "tests" / name
            assert path.exists(), name
            assert not test or f"def {test}(" in path.read_text(), f"{name}::{test}"


def test_every_attack_has_a_test_that_exists() -> None:
    """Each row of the table of attacks names one; and each test of an attack is in the table."""
    rows = table_rows((ROOT / "docs/security.md").read_text(), "Attacks")
    named = set()
    for attack, (_, test, outcome) in rows.items():
        found = re.fullmatch(r"`tests/(test_\w+\.py)::(\w+)`", test)
        assert outcome, attack
        assert found, attack
        named.add(found.groups())
        assert f"def {found[2]}(" in (ROOT / "tests" / found[1]).read_text(), test
    for file in (ROOT / "tests").glob("test_security*.py"):
        for test in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE):
            assert (file.name, test) in named | TRAPS, test


TRAPS = {
    ("test_security_traces.py", "test_the_same_rows_are_seen_by_their_owner"),
    ("test_security_traces.py", "test_what_stays_open_is_what_is_said_to_be"),
}
"""Tests that are no attacks: they show that an attack's trap works, and what is known to be open."""
