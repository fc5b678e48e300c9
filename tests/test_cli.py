"""The command line as a user meets it: on a real database, with its output, errors and exit codes."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

import bismarck_dp
from bismarck_dp.controller import audit, demo, flags, terminal
from bismarck_dp.controller.cli import main
from bismarck_dp.controller.database import embedded
from bismarck_dp.controller.embedded import Cluster
from bismarck_dp.spec import OPTIONS

BISMARCK_DP = str(Path(sys.prefix, "bin/bismarck-dp"))
TRAIN = ("train", "rows", "--epsilon", "1", "--lambda", "0.01", "--epochs", "3")


def make_room() -> Path:
    """A directory every user can enter, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    return path


@pytest.fixture
def room() -> Iterator[Path]:
    path = make_room()
    yield path
    for data in path.rglob("postmaster.pid"):
        Cluster(data.parent.parent).stop()
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A database with 400 rows of three features, labelled 0 and 1."""
    path = make_room()
    with embedded(str(path), durable=False) as database:
        random = np.random.default_rng(0)
        y = random.integers(0, 2, 400)
        database.load("rows", random.normal(size=(400, 3)) + 2.0 * y[:, None], y)
        assert database.cluster is not None
        yield database.cluster.url()
    shutil.rmtree(path)


@pytest.fixture
def run(url: str) -> Any:
    """Runs a command against the database, chosen by the environment."""

    def invoke(*words: str, code: int = 0, **more: Any) -> Result:
        result = CliRunner(env={"BISMARCK_DP_URL": url}).invoke(main, list(words), **more)
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def model(run: Any) -> str:
    """With so little noise that it tells the classes apart; at epsilon 1, one in 200 does not."""
    name = f"m{uuid.uuid4().hex}"
    run(*TRAIN, "--model", name, "--epsilon", "50")
    return name


def processes_with(mark: str) -> list[int]:
    """Processes whose command line or environment has `mark` in it."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            text = (directory / "cmdline").read_bytes() + (directory / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in text and int(directory.name) != os.getpid():
            found.append(int(directory.name))
    return found


# ------------------------------------------------------------------------------------------------------------ the whole


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    listed = result.stdout.partition("Commands:")[2]
    for command in ("demo", "up", "down", "load", "train", "predict", "explain", "models"):
        assert re.search(rf"^  {command} +[A-Z]", listed, re.MULTILINE)


@pytest.mark.parametrize("command", sorted(main.commands))
def test_help_of_each_command_has_an_example_that_parses(command: str) -> None:
    text = CliRunner().invoke(main, [command, "--help"]).stdout
    example = re.search(r"^ +bismarck-dp (.*?)(?: >.*)?$", text, re.MULTILINE)
    assert example is not None
    name, *words = shlex.split(example.group(1))
    assert name == command
    main.commands[command].make_context(command, words)


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"bismarck-dp, version {bismarck_dp.__version__}\n"


def test_the_installed_command_starts() -> None:
    done = subprocess.run([BISMARCK_DP, "--version"], capture_output=True, text=True, check=True)
    assert bismarck_dp.__version__ in done.stdout


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("command", ["train", "explain"])
def test_every_option_has_a_flag(command: str, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    found = [p for p in main.commands[command].params if isinstance(p, click.Option) and flag in p.opts]
    assert [p.name for p in found] == [name]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["frobnicate"], "No such command"),
        (["train"], "Missing argument 'SOURCE'"),
        (["train", "rows", "--epsilon", "much"], "not a valid float"),
        (["train", "rows", "--epoch", "3"], "--epochs"),
        (["train", "rows", "--batchsize", "3"], "--batch-size"),
        (["explain", "--n", "10"], "both --n and --d"),
        (["explain", "rows", "--n", "10", "--d", "2"], "both --n and --d"),
        (["demo", "--rows", "1"], "--rows"),
        (["models", "--url", "postgresql+psycopg2:///x", "--data", "/tmp/x"], "choose one"),
    ],
)
def test_usage_errors(words: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["train", "nowhere", "--epsilon", "1"], '"nowhere" does not exist', "check its name"),
        (["train", "rows"], "needs an epsilon", "pass epsilon"),
        (["train", "rows", "--epsilon", "1", "--algorithm", "bolten"], "bolten", '"bolton"'),
        (["train", "rows", "--epsilon", "1", "--epochs", "0"], "epochs is 0", "whole number"),
        (["train", "rows", "--epsilon", "1", "--json", "--loss", "hinge"], "hinge", "huber"),
        (["train", "rows", "--epsilon", "1", "--label", "z"], "z", ""),
        (["explain", "--n", "9", "--d", "2", "--epsilon", "-1"], "epsilon is -1", "above 0"),
        (["load", "new", "/nowhere.csv"], "/nowhere.csv is not a file", "path"),
        (["predict", "nobody", "-"], '"nobody" does not exist', "models()"),
        (["models", "--url", "nonsense://u:secret@h/x"], "URL", "postgresql"),
        (["models", "--url", "postgresql+psycopg2://u@127.0.0.1:1/x"], "refused", ""),
    ],
)
def test_failures_have_no_traceback(run: Any, words: list[str], error: str, hint: str) -> None:
    result = run(*words, code=1)
    assert result.stdout == ""
    first, _, rest = result.stderr.partition("\nhint: ")
    assert first.startswith("error: ")
    assert error in first
    assert hint in rest
    assert "Traceback" not in result.stderr
    assert "secret" not in result.stderr


# ---------------------------------------------------------------------------------------------------------- up and down


def test_up_and_down(room: Path) -> None:
    def invoke(*words: str) -> Any:
        result = CliRunner(env={"BISMARCK_DP_URL": ""}).invoke(main, [*words, "--data", str(room / "c"), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert invoke("models") == []
    assert not Cluster(room / "c").running, "a command stops what it started"
    first = invoke("up")
    assert first["started"] is True
    assert Cluster(room / "c").running
    with sa.create_engine(first["url"]).connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM bismarck_dp.models")) == 0
    assert invoke("up") == {**first, "started": False}
    assert invoke("models") == []
    assert Cluster(room / "c").running, "a command leaves what ran before"
    assert invoke("down")["stopped"] is True
    assert not Cluster(room / "c").running
    assert invoke("down")["stopped"] is False


# ----------------------------------------------------------------------------------------------------------------- load


def test_load(run: Any, url: str, room: Path) -> None:
    file = room / "rows.csv.gz"
    file.write_bytes(gzip.compress(b"a,b,label\n1,2,0\n3,4,1\n5,6,1\n"))
    assert run("load", "csv", str(file), "--label-column", "label").stdout == "3 rows loaded into csv\n"
    assert "exists already" in run("load", "csv", str(file), code=1).stderr
    again = run("load", "csv", str(file), "--label-column", "-1", "--replace", "--dtype", "float4", "--json")
    assert json.loads(again.stdout) == {"table": "csv", "rows": 3}
    with sa.create_engine(url).connect() as connection:
        rows = connection.execute(sa.text("SELECT y, x, pg_typeof(x)::text FROM csv ORDER BY id")).all()
    assert rows == [(0, [1, 2], "real[]"), (1, [3, 4], "real[]"), (1, [5, 6], "real[]")]


def test_load_without_header_and_libsvm(run: Any, room: Path) -> None:
    (room / "plain").write_text("1,2\n3,4\n")
    assert run("load", "one", str(room / "plain"), "--header").stdout.startswith("1 rows")
    assert run("load", "two", str(room / "plain"), "--no-header").stdout.startswith("2 rows")
    (room / "sparse").write_text("1 2:0.5\n-1 1:1\n")
    words = ("load", "sparse", str(room / "sparse"), "--format", "libsvm", "--n-features", "7")
    assert run(*words).stdout.startswith("2 rows")
    plan = run("explain", "sparse", "--epsilon", "1", "--json")
    assert json.loads(plan.stdout)["d"] == 7


# ---------------------------------------------------------------------------------------------------------------- train


def test_train_shows_a_table_and_plain_progress(run: Any) -> None:
    result = run(*TRAIN, "--model", "shown", "--delta", "1e-6")
    facts = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in result.stdout.strip().splitlines())
    expected = {"model": "shown", "algorithm": "bolton", "loss": "logistic", "epsilon": "1", "delta": "1e-06"}
    assert expected.items() <= facts.items()
    assert {"mechanism", "sensitivity", "noise scale", "passes", "seconds", "note"} <= facts.keys()
    assert float(facts["noise scale"]) > float(facts["sensitivity"]) > 0
    assert result.stderr == "pass 1 of 3\npass 2 of 3\npass 3 of 3\n"


def test_train_json_is_one_document_with_the_chosen_options(run: Any) -> None:
    words = ("--radius", "2.5", "--average", "all", "--classes", "0,1", "--step", "0.5", "--fit-intercept")
    result = run(*TRAIN, *words, "--json")
    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert answer["name"] == "rows_1"
    assert (answer["epsilon"], answer["n"], answer["d"], answer["classes"]) == (1, 400, 3, [0, 1])
    assert len(answer["intercept"]) == 1
    chosen = {"lambda": 0.01, "epochs": 3, "radius": 2.5, "average": "all", "step": 0.5, "fit_intercept": True}
    assert chosen.items() <= answer["options"].items()


def test_train_shows_the_support_of_a_sparse_model(run: Any) -> None:
    words = ("train", "rows", "--epsilon", "5", "--delta", "1e-6", "--algorithm", "dpgcd", "--constants", "0.1,0.2,0.3")
    result = run(*words, "--iterations", "1")
    assert re.search(r"^support +1 of 3 features: [012] *$", result.stdout, re.MULTILINE), result.stdout
    answer = json.loads(run(*words, "--iterations", "1", "--json").stdout)
    assert answer["weights"][answer["support"][0]] != 0
    assert answer["options"]["constants"] == [0.1, 0.2, 0.3]
    empty = run("train", "rows", "--algorithm", "gcd", "--l1", "1000")
    assert re.search(r"^support +none of 3 features *$", empty.stdout, re.MULTILINE), empty.stdout


def test_train_shows_the_gap_of_a_dual_model(run: Any) -> None:
    words = ("train", "rows", "--algorithm", "scd", "--lambda", "0.1", "--scale", "1,2,3", "--normalize")
    assert re.search(r"^gap +\d", run(*words).stdout, re.MULTILINE)
    answer = json.loads(run(*words, "--json").stdout)
    assert 0 <= answer["gap"] < 0.1
    assert (answer["scale"], answer["normalize"]) == ([1, 2, 3], True)


def test_train_with_columns_and_without_privacy(run: Any, url: str) -> None:
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("CREATE VIEW wide AS SELECT x[1] AS a, x[2] AS b, x[3] AS c, y > 0 AS t FROM rows"))
    words = ("train", "wide", "--label", "t", "--features", "a, b", "--features", "c", "--algorithm", "sgd")
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["features"] == ["a", "b", "c"]
    assert (answer["epsilon"], answer["private"]) == (None, False)


def test_a_note_is_shown_in_the_table_and_not_as_a_warning(url: str) -> None:
    """Outside pytest, which keeps warnings from stderr."""
    command = [BISMARCK_DP, *TRAIN, "--model", "noted", "--seed", "7", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "NOT PRIVATE" in done.stdout
    assert done.stderr == "pass 1 of 3\npass 2 of 3\npass 3 of 3\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("0,1", [0, 1]),
        ("-1,1.5", [-1, 1.5]),
        ("all", "all"),
    ],
)
def test_values_are_what_they_look_like(text: str, value: Any) -> None:
    assert flags.value_of(text) == value
    assert type(flags.value_of(text)) is type(value)


# -------------------------------------------------------------------------------------------------------------- explain


def test_explain_needs_no_database(run: Any) -> None:
    words = ("explain", "--n", "400", "--d", "3", "--epsilon", "1", "--lambda", "0.01")
    alone = CliRunner(env={"BISMARCK_DP_URL": "postgresql+psycopg2://u@127.0.0.1:1/x"}).invoke(main, [*words, "--json"])
    plan = bismarck_dp.explain(n=400, d=3, epsilon=1, lambda_=0.01)
    assert json.loads(alone.stdout) == plan
    table = json.loads(run("explain", "rows", "--epsilon", "1", "--lambda", "0.01", "--json").stdout)
    assert table == plan
    text = run(*words).stdout
    assert re.search(rf"^strong convexity +{plan['strong_convexity']:g} *$", text, re.MULTILINE)
    assert len(text.strip().splitlines()) == len(plan)


# -------------------------------------------------------------------------------------------------------------- predict


def test_predict(run: Any, model: str, room: Path) -> None:
    file = room / "new.csv"
    file.write_text("a,b,c\n9,9,9\n-9,-9,-9\n\n9,9,NA\n")
    assert run("predict", model, str(file)).stdout == "1\n0\nnan\n"
    assert json.loads(run("predict", model, str(file), "--json").stdout) == [1, 0, None]


def test_predict_from_stdin_gzipped_with_probabilities(run: Any, model: str) -> None:
    content = gzip.compress(b"9;9;9\n-9;-9;-9\n")
    lines = run("predict", model, "-", "--proba", input=content).stdout.splitlines()
    pairs = [[float(cell) for cell in line.split(",")] for line in lines]
    assert json.loads(run("predict", model, "-", "--proba", "--json", input=content).stdout) == pairs
    assert pairs[0][1] > 0.5 > pairs[1][1]
    assert [sum(pair) for pair in pairs] == pytest.approx([1, 1])


def test_predict_agrees_with_the_database_on_many_rows(run: Any, model: str, url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(terminal, "ROWS_AT_ONCE", 7)
    with sa.create_engine(url).connect() as connection:
        rows = connection.execute(sa.text("SELECT x, dp_predict(:m, x) FROM rows ORDER BY id"), {"m": model}).all()
    text = "\n".join(",".join(map(repr, x)) for x, _ in rows)
    lines = run("predict", model, "-", input=text).stdout.splitlines()
    assert [float(line) for line in lines] == [label for _, label in rows]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "no rows"),
        (b"1,2,3\n4,5\n", "line 2: 2 columns"),
        (b"1,2,3\n\n4,hush,6\n", "line 3, column 2"),
        (b"1,2\n", "3 features, not 2"),
        (gzip.compress(b"1,2,3\n")[:-9], "cannot be read"),
    ],
)
def test_predict_says_where_a_file_is_wrong(run: Any, model: str, content: bytes, error: str) -> None:
    result = run("predict", model, "-", input=content, code=1)
    assert error in result.stderr
    assert "hush" not in result.stderr


# --------------------------------------------------------------------------------------------------------------- models


def test_models(run: Any, model: str) -> None:
    listed = json.loads(run("models", "--json").stdout)
    assert listed[-1]["name"] == model
    assert len(listed[-1]["weights"]) == 3
    table = run("models").stdout
    assert re.search(r"model +algorithm +loss +epsilon +delta", table)
    for entry in listed:
        assert entry["algorithm"] in table


# ----------------------------------------------------------------------------------------------------------------- demo


def test_demo_end_to_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = tempfile.mkdtemp

    def remembered(*args: Any, **kwargs: Any) -> str:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", remembered)
    result = CliRunner(env={"BISMARCK_DP_URL": ""}).invoke(main, ["demo", "--rows", "5000"])
    assert result.exit_code == 0, result.output
    head, *lines = [line.split() for line in result.stdout.partition("Trained")[0].splitlines() if "─" not in line][1:]
    assert " ".join(head) == "algorithm loss epsilon delta sensitivity noise scale accuracy seconds"
    rows = [line for line in lines if line]
    assert [(row[0], row[1]) for row in rows] == [(trial.algorithm, trial.loss) for trial in demo.TRIALS]
    accuracy = [float(row[6]) for row in rows]
    assert accuracy[0] > 0.9, "without noise"
    assert accuracy[1] > 0.8, "epsilon 1"
    assert "SELECT * FROM dp_train('bismarck_dp_demo'," in result.stdout
    assert result.stderr.splitlines()[-1] == f"model {len(demo.TRIALS)} of {len(demo.TRIALS)}"
    assert len(made) >= 2, "the cluster and its socket"
    for path in made:
        assert not Path(path).exists()
        assert processes_with(path) == []


def test_demo_drops_what_it_made_and_nothing_else(run: Any, url: str) -> None:
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("CREATE TABLE bismarck_dp_demo AS SELECT 42 AS answer"))
    before = json.loads(run("models", "--json").stdout)
    result = run("demo", "--rows", "1000", "--json")
    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert answer["rows"] == 1000
    assert [trial["epsilon"] for trial in answer["trials"]] == [trial.epsilon for trial in demo.TRIALS]
    assert all(0 <= trial["accuracy"] <= 1 for trial in answer["trials"])
    assert "'bismarck_dp_demo_2'" in answer["sql"][0], "another name, where the first is taken"
    assert json.loads(run("models", "--json").stdout) == before
    with sa.create_engine(url).connect() as connection:
        query = "SELECT array_agg(relname::text) FROM pg_class WHERE relname LIKE 'bismarck_dp_demo%'"
        assert connection.scalar(sa.text(query)) == ["bismarck_dp_demo"]
        assert connection.scalar(sa.text("SELECT answer FROM bismarck_dp_demo")) == 42


def test_a_failed_demo_leaves_nothing(run: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRIALS", (*demo.TRIALS[:2], demo.Trial("bolton", "hinge", 1.0)))
    before = json.loads(run("models", "--json").stdout)
    assert "hinge" in run("demo", "--rows", "1000", code=1).stderr
    assert json.loads(run("models", "--json").stdout) == before
    with sa.create_engine(url).connect() as connection:
        query = "SELECT count(*) FROM pg_class WHERE relname ~ '^bismarck_dp_demo.*held_out'"
        assert connection.scalar(sa.text(query)) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, code: int) -> None:
    mark = uuid.uuid4().hex
    env = {**os.environ, "BISMARCK_DP_URL": "", "BISMARCK_DP_MARK": mark}
    with subprocess.Popen(
        [BISMARCK_DP, "demo", "--rows", "400000"],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    ) as child:
        assert child.stderr is not None
        assert child.stderr.readline().startswith("model 1 of")
        assert len(processes_with(mark)) >= 2, "the command and its server"
        server = next(Path(f"/proc/{pid}/cmdline") for pid in processes_with(mark) if pid != child.pid)
        directory = Path(server.read_bytes().split(b"\0-D\0")[1].split(b"\0")[0].decode())
        assert directory.is_dir()
        child.send_signal(number)
        assert child.wait(60) == code
    deadline = time.monotonic() + 5
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel buries a process a moment after it has closed everything
    assert processes_with(mark) == []
    assert not directory.parent.exists()


# ------------------------------------------------------------------------------------------------------------ terminals


def test_a_terminal_gets_a_bar(url: str) -> None:
    """`script` gives the command a terminal of its own; its stdout is both streams."""
    command = f"{BISMARCK_DP} train rows --epsilon 1 --model bar --epochs 50 --workers 1"
    env = {**os.environ, "BISMARCK_DP_URL": url, "TERM": "xterm", "COLUMNS": "100"}
    words = ["script", "-qec", command, "/dev/null"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    assert "━" in done.stdout
    assert "50/50" in done.stdout
    assert "pass 1 of 50" not in done.stdout


# ------------------------------------------------------------------------------------------------------------- audits

AUDIT = (
    "audit",
    "--epsilon",
    "1",
    "--delta",
    "0.01",
    "--loss",
    "huber",
    "--lambda",
    "0.1",
    "--n",
    "20",
    "--trials",
    "100",
)


def test_audit_prints_claim_bound_and_verdict(run: Any, room: Path) -> None:
    shown = run(*AUDIT, "--batch-size", "5", "--plot", str(room / "curve.png")).stdout
    facts = {line[:22].strip(): line[22:].strip() for line in shown.splitlines()}
    assert facts["verdict"] == "pass"
    assert facts["trials"] == "100"
    assert facts["epsilon"] == "1"
    assert float(facts["empirical epsilon"]) <= 1
    assert (room / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_audit_speaks_json(run: Any) -> None:
    found = json.loads(run(*AUDIT, "--json").stdout)
    assert found["verdict"] == "pass"
    assert found["empirical_epsilon"] <= found["epsilon"] == 1
    assert len(found["false_positive_rates"]) == len(found["false_negative_rates"]) == 201


def test_audit_fails_with_a_broken_claim(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's row that tells the tables apart is a broken claim, and an exit code of 1."""
    trained = audit.Subject.train

    def telling(self: Any, table: str, *how: Any, **more: Any) -> Any:
        models = trained(self, table, *how, **more)
        return [{**model, "n": model["n"] + ("second" in table)} for model in models]

    monkeypatch.setattr(audit.Subject, "train", telling)
    result = run(*AUDIT, code=1)
    assert "broken: column n tells neighbouring tables apart" in result.stdout


def test_audit_refuses_too_few_trials(run: Any) -> None:
    result = run("audit", "--epsilon", "1", "--trials", "3", code=1)
    assert "error: trials is 3" in result.stderr
