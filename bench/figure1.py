"""Figure 1 of Damaskinos et al. 2021 once more: what privacy costs dual and primal algorithms, with the right noise.

    .venv/bin/python bench/figure1.py --data DATA --out DIR [--repeats 10] [--problems adult phishing ridge]

adult (hinge) and phishing (logistic) are files that this project does not contain: gzipped CSV without header, label -1
or 1 first. ridge (squared) is made up here. For every algorithm and epsilon the options of `GRIDS` are tried once each
and judged on a validation part; the best `FINALISTS` are tried `TRIALS` times more, and the best of these is trained
`repeats` times, and judged on a test part. As in the paper, tuning is not paid for. Everything is trained by `db.train`
in a PostgreSQL made for the occasion, with fresh randomness. DIR gets figure1-NAME.json (options and scores),
figure1.md (tables) and figure1.png, made of all the problems it holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from rich.console import Console
from run import server

from bismarck_dp import BismarckError, Model
from bismarck_dp.controller.database import Database
from bismarck_dp.solvers import SOLVERS

EPSILONS = (0.1, 0.5, 1.0, 2.0)
SEED = 0
PASSES = 10
FINALISTS, TRIALS = 12, 4

Floats = npt.NDArray[np.float64]
Options = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    name: str
    loss: str
    strength: float
    """lambda"""
    options: Options
    """how rows are scaled"""
    sizes: tuple[int, int, int]
    """rows to train on, to choose options by, and to test on"""
    coarse: bool = False
    """whether only a part of the grids is tried: a training takes a second"""

    @property
    def better(self) -> int:
        """Which way scores are good: accuracy up, mean squared errors down."""
        return -1 if self.loss == "squared" else 1

    @property
    def metric(self) -> str:
        return "MSE" if self.loss == "squared" else "accuracy"

    @property
    def smooth_loss(self) -> str:
        """For algorithms that have no proof, or no step, without a curvature."""
        return "huber" if self.loss == "hinge" else self.loss


def adult_bounds() -> list[float]:
    """Age, weight, years of education, gains, losses and hours have round bounds; the other columns are 0 or 1."""
    bounds = [1.0] * 105
    for column, bound in {1: 100, 10: 1_500_000, 27: 16, 62: 100_000, 63: 5_000, 64: 100}.items():
        bounds[column - 1] = float(bound)
    return bounds


PROBLEMS = {
    "adult": Problem("adult", "hinge", 1e-5, {"scale": adult_bounds(), "normalize": True}, (24_420, 8_141, 16_281)),
    "phishing": Problem("phishing", "logistic", 1e-4, {"normalize": True}, (6_218, 2_073, 2_764)),
    "ridge": Problem("ridge", "squared", 1e-4, {"normalize": True}, (347_786, 57_964, 51_630), True),
}


def read(problem: Problem, folder: Path) -> Floats:
    """All rows, label first, those to test on last."""
    if problem.name == "ridge":
        return made_up(sum(problem.sizes), 90)
    rng = np.random.default_rng(SEED)
    if problem.name == "adult":
        train, test = (np.loadtxt(folder / f"adult.{part}.csv.gz", delimiter=",") for part in ("train", "test"))
        return np.vstack([train[rng.permutation(len(train))], test])
    rows = np.loadtxt(folder / f"{problem.name}.csv.gz", delimiter=",")
    return rows[rng.permutation(len(rows))]


def made_up(n: int, d: int) -> Floats:
    """In the shape of YearPredictionMSD, which could not be had: features whose spread falls like 1/sqrt(j), of which a
    linear function explains a quarter of the label's variance; labels have a standard deviation of 0.2.
    """
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(n, d)) / np.sqrt(np.arange(1, d + 1))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    signal = unit @ rng.normal(size=d)
    noise = rng.normal(size=n) * signal.std() * np.sqrt(3)
    y = signal + noise
    return np.column_stack([0.2 * (y - y.mean()) / y.std(), x])


DECADES = [10.0**k for k in range(-8, 1)]
BATCHES = [5, 10, 50, 100, 200, 500, 1000, 1250, 1500, 1750, 2000]
STEPS = [10.0**k for k in range(-4, 4)]

GRIDS: dict[str, dict[str, list[Any]]] = {
    "scd": {"batch_size": [1]},
    "sgd": {"batch_size": [1, 10, 50], "step": STEPS},
    "dpscd": {"batch_size": BATCHES, "clip": DECADES},
    "dpscd_seq": {"batch_size": BATCHES, "clip": DECADES},
    "dpscd_primal": {"inner_iterations": [1, 5, 10, 50], "clip": DECADES},
    "dpsgd": {"batch_size": BATCHES, "clip": DECADES, "step": STEPS},
    "bolton": {"batch_size": [10, 50, 500], "lambda": [10.0**k for k in range(-5, 0)], "step": [None, "constant"]},
}
"""The paper's for C and L, up to a clip that cuts nothing any more, and for the step, without its ends."""

COARSE: dict[str, dict[str, list[Any]]] = {
    "scd": {"batch_size": [1]},
    "sgd": {"batch_size": [50], "step": [0.01, 0.1, 1.0]},
    "dpscd": {"batch_size": [50, 200, 500, 1000, 2000], "clip": [1e-4, 1e-3, 1e-2, 0.1, 1.0]},
    "dpscd_seq": {"batch_size": [50, 1000], "clip": [1e-6, 1e-4, 1e-2, 1.0]},
    "dpscd_primal": {"inner_iterations": [1, 10, 50], "clip": [1e-6, 1e-4, 1e-2]},
    "dpsgd": {"batch_size": [50, 200, 500, 1000, 2000], "clip": [1e-3, 1e-2, 0.1, 1.0], "step": [0.1, 1.0, 10.0]},
    "bolton": {"batch_size": [50], "lambda": [10.0**k for k in range(-5, 0)], "step": [None, "constant"]},
}
"""What is tried of them where a training takes a second; then two runs decide between the best three."""


class Experiment:
    """One problem in the database, and its validation and test rows here."""

    def __init__(self, db: Database, problem: Problem, rows: Floats, repeats: int) -> None:
        train, choose = problem.sizes[0], problem.sizes[0] + problem.sizes[1]
        self.db, self.problem, self.repeats = db, problem, repeats
        self.choose, self.test = rows[train:choose], rows[choose:]
        db.load("rows", rows[:train, 1:].astype(np.float32), rows[:train, 0])

    def model(self, algorithm: str, epsilon: float | None, options: Options) -> Model:
        problem, solver = self.problem, SOLVERS[algorithm]
        smooth = algorithm in ("bolton", "dpscd_primal")
        common: Options = {"lambda": problem.strength, **problem.options}
        common |= {"epochs": PASSES} if "epochs" in solver.options else {}
        common |= {"label_bound": 1.0} if problem.loss == "squared" else {"classes": [-1, 1]}
        model = self.db.train(
            "rows",
            algorithm=algorithm,
            loss=problem.smooth_loss if smooth else problem.loss,
            epsilon=epsilon,
            delta=0.0 if epsilon is None else float(problem.sizes[0]) ** -2,
            **{**common, **options},
        )
        self.db.forget(model.name)
        return model

    def score(self, model: Model, rows: Floats) -> float:
        found = model.decision_function(rows[:, 1:])
        if self.problem.loss == "squared":
            return float(np.mean((found - rows[:, 0]) ** 2))
        return float(np.mean((found > 0) == (rows[:, 0] > 0)))

    def validated(self, algorithm: str, epsilon: float | None, options: Options, times: int = 1) -> float:
        """The mean score on the validation rows, larger if better; what is refused is worst."""
        try:
            models = [self.model(algorithm, epsilon, options) for _ in range(times)]
        except BismarckError:
            return -np.inf
        return self.problem.better * float(np.mean([self.score(model, self.choose) for model in models]))

    def tuned(self, algorithm: str, epsilon: float | None) -> Options:
        """The options that did best on the validation rows; one lucky run is not enough."""
        grid, finalists, trials = (COARSE, 3, 2) if self.problem.coarse else (GRIDS, FINALISTS, TRIALS)
        every = list(settings(grid[algorithm]))
        every.sort(key=lambda options: self.validated(algorithm, epsilon, options), reverse=True)
        return max(every[:finalists], key=lambda options: self.validated(algorithm, epsilon, options, trials))

    def run(self, console: Console) -> dict[str, Any]:
        cells = []
        for algorithm in GRIDS:
            for epsilon in EPSILONS if SOLVERS[algorithm].private else (None,):
                start = time.perf_counter()
                options = self.tuned(algorithm, epsilon)
                models = [self.model(algorithm, epsilon, options) for _ in range(self.repeats)]
                scores = [self.score(model, self.test) for model in models]
                cells.append({"algorithm": algorithm, "epsilon": epsilon, "options": options, "scores": scores})
                took = time.perf_counter() - start
                at = "" if epsilon is None else f" at ε = {epsilon:g}"
                console.print(
                    f"{self.problem.name}: {algorithm}{at}: {np.median(scores):.5f}, {options} ({took:.0f} s)"
                )
        return {"n": self.problem.sizes[0], "d": self.test.shape[1] - 1, "constant": self.constant(), "cells": cells}

    def constant(self) -> float:
        """The score of a constant answer: zero, or the larger class."""
        labels = self.test[:, 0]
        if self.problem.loss == "squared":
            return float(np.mean(labels**2))
        return float(max(np.mean(labels > 0), np.mean(labels < 0)))


def settings(grid: dict[str, list[Any]]) -> Iterator[Options]:
    for values in itertools.product(*grid.values()):
        yield {name: value for name, value in zip(grid, values) if value is not None}


# ---------------------------------------------------------------------------------------------- reports


def median(outcome: dict[str, Any], algorithm: str, epsilon: float | None) -> float:
    cells = outcome["cells"]
    return float(np.median(next(c["scores"] for c in cells if (c["algorithm"], c["epsilon"]) == (algorithm, epsilon))))


def private(outcome: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(c["algorithm"] for c in outcome["cells"] if c["epsilon"] is not None))


def table(problem: Problem, outcome: dict[str, Any]) -> str:
    digits = 5 if problem.better < 0 else 4
    head = f"Test {problem.metric}, loss `{problem.loss}`, {outcome['n']:,} rows x {outcome['d']} features, "
    head += f"δ = {outcome['n'] ** -2:.1e}. Without privacy: `scd` {median(outcome, 'scd', None):.{digits}f}, "
    head += f"`sgd` {median(outcome, 'sgd', None):.{digits}f}. A constant answer: {outcome['constant']:.{digits}f}."
    rows = ["| ε | " + " | ".join(f"{epsilon:g}" for epsilon in EPSILONS) + " |", "|---" * (len(EPSILONS) + 1) + "|"]
    for algorithm in private(outcome):
        cells = [median(outcome, algorithm, epsilon) for epsilon in EPSILONS]
        rows.append(f"| `{algorithm}` | " + " | ".join(f"{cell:.{digits}f}" for cell in cells) + " |")
    return "\n".join([f"### {problem.name}\n", head, "", *rows])


def plot(outcomes: dict[str, dict[str, Any]], path: Path) -> None:
    """Medians, and the range of all runs as bars; what is far worse than a constant answer lies outside."""
    figure = Figure(figsize=(4 * len(outcomes), 3.6), dpi=90, layout="constrained")
    for number, (name, outcome) in enumerate(outcomes.items(), 1):
        problem, axes = PROBLEMS[name], figure.add_subplot(1, len(outcomes), number)
        best, guess = median(outcome, "scd", None), outcome["constant"]
        axes.axhline(best, color="black", linewidth=1, label="scd, not private")
        axes.axhline(guess, color="0.6", linewidth=1, linestyle=":", label="a constant answer")
        for color, algorithm in enumerate(private(outcome)):
            cells = [c["scores"] for c in outcome["cells"] if c["algorithm"] == algorithm]
            middle = np.median(cells, axis=1)
            bars = [middle - np.min(cells, axis=1), np.max(cells, axis=1) - middle]
            at = np.array(EPSILONS) * 1.03 ** (color - 2)
            axes.errorbar(at, middle, bars, color=f"C{color}", marker="o", markersize=3, linewidth=1, label=algorithm)
        axes.set_xscale("log")
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        axes.set(xlabel="ε", ylabel=f"test {problem.metric}", title=f"{name}, {problem.loss}")
        axes.set_ylim(*sorted((guess - (best - guess) / 2, best + (best - guess) / 10)))
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, format="png")


def report(folder: Path, repeats: int) -> str:
    """Of every problem that the folder holds."""
    files = {name: folder / f"figure1-{name}.json" for name in PROBLEMS}
    outcomes = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    plot(outcomes, folder / "figure1.png")
    parts = [table(PROBLEMS[name], outcome) for name, outcome in outcomes.items()]
    return "\n\n".join([f"Medians of {repeats} runs.", *parts]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory of the files")
    parser.add_argument("--out", type=Path, required=True, help="a directory for tables, plots and scores")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--problems", nargs="+", choices=sorted(PROBLEMS), default=sorted(PROBLEMS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # about noise that does not shrink: it is in the table
    console = Console(width=150, highlight=False)
    for name in arguments.problems:
        rows = read(PROBLEMS[name], arguments.data)
        with server() as db:
            outcome = Experiment(db, PROBLEMS[name], rows, arguments.repeats).run(console)
        (arguments.out / f"figure1-{name}.json").write_text(json.dumps(outcome, indent=1))
    text = report(arguments.out, arguments.repeats)
    (arguments.out / "figure1.md").write_text(text)
    console.print(text, markup=False)


if __name__ == "__main__":
    main()
