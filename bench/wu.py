"""The experiment of Wu et al. 2017 (section 4.5, figures 3 and 6) with the right noise, through the database.

    .venv/bin/python bench/wu.py DIRECTORY [--only mnist ...] [--repeats 3] [--workers 2] [--json FILE]

DIRECTORY holds the data sets as gzipped CSV without a header, the label first: mnist.train, mnist.test, covtype and
protein.

Four scenarios: convex or strongly convex, epsilon or (epsilon, delta) with delta = 1/m^2. For each epsilon of the paper
and each algorithm a model is tuned with `dp_tune`: on a public table, PUBLIC rows that are taken from the training rows
and counted as known; or privately, by the paper's Algorithm 3. Grids: passes and lambda as in the paper, batches of 50;
without a regulariser two steps instead of lambda. MNIST is projected to 50 numbers, and all rows are put on the unit
sphere, as in the paper: inside the database, by options. `sgd` is tuned on the public table, too. What is shown is the
median test accuracy (for protein, of which 1 % is positive, the AUC) over the repeats. The test rows never enter the
database. Writes tables and plots into docs/experiments.md and docs/wu.png when all data sets were run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from bismarck_dp.controller.database import Database
from bismarck_dp.controller.demo import temporary_database
from bismarck_dp.errors import BismarckError

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by bench/wu.py -->", "<!-- end of bench/wu.py -->"

PUBLIC = 5000
BATCH = 50
SEED = 7


@dataclass(frozen=True)
class Task:
    name: str
    file: str
    epsilons: tuple[float, ...]
    auc: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def measure(self) -> str:
        return "AUC" if self.auc else "accuracy"


MNIST = (("classes", 10), ("project_dim", 50))
LARGE, SMALL = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0), (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)

TASKS = {
    task.name: task
    for task in (
        Task("mnist", "mnist", LARGE, options=(*MNIST, ("multiclass", "softmax"))),
        Task("mnist-ovr", "mnist", LARGE, options=(*MNIST, ("multiclass", "ovr"))),
        Task("covtype", "covtype", SMALL, options=(("classes", (-1, 1)),)),
        Task("protein", "protein", SMALL, auc=True, options=(("classes", (-1, 1)),)),
    )
}

PURE, APPROXIMATE = ("bolton", "scs13"), ("bolton", "scs13", "bst14", "dpsgd")
SCENARIOS = {
    "convex, ε": (False, False, PURE),
    "convex, (ε, δ)": (False, True, APPROXIMATE),
    "strongly convex, ε": (True, False, PURE),
    "strongly convex, (ε, δ)": (True, True, APPROXIMATE),
}


def grid_of(algorithm: str, strong: bool) -> dict[str, list[Any]]:
    """The paper's grids; without a regulariser the step is tuned, where the algorithm has one."""
    passes = {"epochs": [5, 10]}
    if strong:
        return {**passes, "lambda": [1e-4, 1e-3, 1e-2]}
    steps = {"scs13": [None, 0.5], "bst14": None}.get(algorithm, [None, 0.5])
    return passes if steps is None else {**passes, "step": steps}


# ---- data ----


def read(directory: Path, name: str) -> np.ndarray[Any, Any]:
    with gzip.open(directory / f"{name}.csv.gz", "rt") as lines:
        return np.loadtxt(lines, delimiter=",", dtype=np.float32)


def split(directory: Path, task: Task) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Training and test rows, of the paper's sizes; those that come in one file are shuffled first."""
    if task.file == "mnist":
        return read(directory, "mnist.train"), read(directory, "mnist.test")
    rows = np.random.default_rng(SEED).permutation(read(directory, task.file))
    sizes = {"covtype": 498_010, "protein": 72_876}
    train, test = rows[: sizes[task.file]], rows[sizes[task.file] :]
    # Columns of very different size: to mean 0 and variance 1, by the public rows alone.
    known = train[:PUBLIC, 1:]
    centre, spread = known.mean(axis=0), known.std(axis=0)
    spread[spread == 0] = 1.0
    return tuple(np.column_stack([part[:, 0], (part[:, 1:] - centre) / spread]) for part in (train, test))  # type: ignore[return-value]


# ---- trials ----


def tuned(db: Database, task: Task, test: Any, private: bool, method: str, **asked: Any) -> float | None:
    """The measure on the test rows of a tuned model; None where no candidate has a plan."""
    public = {"public_source": "known"} if method == "public" else {}
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in task.options}
    try:
        model = db.tune("rows", loss="logistic", normalize=True, batch_size=BATCH, **public, **options, **asked)
    except BismarckError as refusal:
        print(f"  refused: {refusal}", flush=True)
        return None
    db.forget(model.name)
    x, y = test[:, 1:], test[:, 0]
    return float(roc_auc_score(y, model.decision_function(x)) if task.auc else model.score(x, y))


def cases(task: Task, n: int) -> list[tuple[str, str, str, float | None, dict[str, Any]]]:
    """Scenario, method, algorithm, epsilon, and what to ask for."""
    found: list[tuple[str, str, str, float | None, dict[str, Any]]] = []
    for scenario, (strong, approximate, algorithms) in SCENARIOS.items():
        plain = {"algorithm": "sgd", "grid": grid_of("sgd", strong)}
        found.append((scenario, "public", "sgd", None, plain))
        for algorithm in algorithms:
            for epsilon in task.epsilons:
                delta = 1 / n**2 if approximate else 0.0
                asked = {"algorithm": algorithm, "grid": grid_of(algorithm, strong), "epsilon": epsilon, "delta": delta}
                found += [(scenario, method, algorithm, epsilon, asked) for method in ("public", "private")]
    return found


def run_part(directory: Path, name: str, repeats: int, part: int, parts: int) -> list[dict[str, Any]]:
    """Every parts-th case of a task, in a server of its own."""
    task = TASKS[name]
    train, test = split(directory, task)
    known, rows = train[:PUBLIC], train[PUBLIC:]
    results = []
    with temporary_database() as db:
        db.load("known", known[:, 1:], known[:, 0])
        db.load("rows", rows[:, 1:], rows[:, 0])
        for scenario, method, algorithm, epsilon, asked in cases(task, len(rows))[part::parts]:
            values = [tuned(db, task, test, epsilon is not None, method, **asked) for _ in range(repeats)]
            good = [value for value in values if value is not None]
            median = statistics.median(good) if good else None
            found = {"task": name, "scenario": scenario, "method": method, "algorithm": algorithm, "epsilon": epsilon}
            results.append({**found, "value": median, "values": good})
            print(f"{name}: {scenario}, {method}, {algorithm}, {epsilon}: {median}", flush=True)
    return results


# ---- tables and plots ----


def table_of(results: list[dict[str, Any]], task: Task, scenario: str) -> list[str]:
    """One line for each algorithm and way of tuning, one column for each epsilon."""
    ours = [r for r in results if r["task"] == task.name and r["scenario"] == scenario]
    plain = next(r["value"] for r in ours if r["algorithm"] == "sgd")
    lines = [f"{scenario}; `sgd`, not private: {plain:.3f}", ""]
    lines += ["| algorithm | tuned on | " + " | ".join(f"ε = {e:g}" for e in task.epsilons) + " |"]
    lines += ["|---" * (2 + len(task.epsilons)) + "|"]
    for algorithm in SCENARIOS[scenario][2]:
        for method in ("public", "private"):
            row = {r["epsilon"]: r["value"] for r in ours if (r["algorithm"], r["method"]) == (algorithm, method)}
            cells = ["-" if row.get(e) is None else f"{row[e]:.3f}" for e in task.epsilons]
            rows = {"public": "public rows", "private": "private rows"}[method]
            lines.append(f"| `{algorithm}` | {rows} | " + " | ".join(cells) + " |")
    return [*lines, ""]


TITLES = {
    "mnist": "MNIST, ten classes by softmax",
    "mnist-ovr": "MNIST, ten classes one against the rest",
    "covtype": "Covertype",
    "protein": "Protein",
}


def written(results: list[dict[str, Any]]) -> str:
    lines = [BEGIN, "The rules are in `bench/wu.py`, which wrote this.", "", "![](wu.png)", ""]
    for name, task in TASKS.items():
        runs = max(len(r["values"]) for r in results if r["task"] == name)
        lines += [f"### {TITLES[name]}: test {task.measure}, {f'medians of {runs}' if runs > 1 else 'one run'}", ""]
        for scenario in SCENARIOS:
            lines += table_of(results, task, scenario)
    return "\n".join([*lines, END])


def draw(results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = dict(zip(APPROXIMATE, ("tab:blue", "tab:orange", "tab:green", "tab:red")))
    figure, axes = plt.subplots(len(TASKS), len(SCENARIOS), figsize=(15, 13), squeeze=False)
    for row, (name, task) in zip(axes, TASKS.items()):
        for axis, scenario in zip(row, SCENARIOS):
            ours = [r for r in results if r["task"] == name and r["scenario"] == scenario and r["value"] is not None]
            axis.axhline(next(r["value"] for r in ours if r["algorithm"] == "sgd"), color="grey", label="sgd")
            for algorithm in SCENARIOS[scenario][2]:
                for method, style in (("public", "-"), ("private", ":")):
                    points = [r for r in ours if (r["algorithm"], r["method"]) == (algorithm, method)]
                    at, values = [r["epsilon"] for r in points], [r["value"] for r in points]
                    label = f"{algorithm}, {method} tuning"
                    axis.plot(at, values, style, marker=".", color=colours[algorithm], label=label)
            axis.set_xscale("log")
            axis.set_title(f"{name}: {scenario}", fontsize=9)
            axis.set_ylabel(task.measure)
    axes[-1][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def update(page: Path, text: str) -> None:
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + text + rest.split(END)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("wu.json"), help="results are kept here, and added to")
    given = parser.parse_args()
    results = json.loads(given.json.read_text()) if given.json.exists() else []
    with ProcessPoolExecutor(given.workers) as pool:
        for name in given.only:
            calls = [
                pool.submit(run_part, given.directory, name, given.repeats, part, given.workers)
                for part in range(given.workers)
            ]
            results = [r for r in results if r["task"] != name] + [r for call in calls for r in call.result()]
            given.json.write_text(json.dumps(results))
    if {r["task"] for r in results} == set(TASKS):
        draw(results, ROOT / "docs/wu.png")
        update(ROOT / "docs/experiments.md", written(results))
    assert all(r["value"] is None or math.isfinite(r["value"]) for r in results)


if __name__ == "__main__":
    main()
