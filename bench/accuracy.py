"""What privacy costs on real data: test accuracy, or AUC, against epsilon for every algorithm.

    .venv/bin/python bench/accuracy.py --data DATA --out DIR [--repeats 10] [--datasets covtype adult protein]

The data are files that this project does not contain: gzipped CSV without header, label -1 or 1 first. Every model is
trained in a PostgreSQL made for the occasion, by `db.train`. Private runs take fresh randomness from the operating
system, never a seed. DIR gets accuracy.md (rules and tables), accuracy.json (all scores) and accuracy-NAME.png.
`RULES` says how options are chosen, `Scale` how features are prepared. Both know n, d, epsilon, delta and the names of
columns; neither is given rows.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from rich.console import Console
from run import server
from sklearn.metrics import roc_auc_score

from bismarck_dp import Model, Spec, make_plan
from bismarck_dp.controller.database import Database
from bismarck_dp.solvers import SOLVERS

EPSILONS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
SPLIT_SEED = 0
RADIUS = 10.0
PASSES = 10
BATCH = 50
SAMPLES_PER_PASS = 500
SMOOTHNESS = 0.25
COMMON: dict[str, Any] = {"fit_intercept": True, "classes": [-1, 1]}

RULES = """\
All: loss `logistic`, `fit_intercept`, rows scaled to norm 1 (`feature_bound`), adjacency `replace`, δ = 1/n², 10 passes
except `banco`, options not named here at their defaults.

| algorithm | rule |
|---|---|
| `sgd` | b = 50, step 1/β, mean of the last pass |
| `bolton`, convex | b = 50, constant step S/T but at most 2/β |
| `bolton`, strongly convex | b = 50, λ = 1/S, its default step |
| `scs13` | b = (4 k² n w ρ² / (Rβ)²)^(1/3), step min(1/β, R/√(TV)), mean of the last pass |
| `bst14` | b = n/500, radius R, no regulariser, its own step, mean of the last pass |
| `dpsgd` | b = n/500, step min(1/β, R/√(TV)), mean of the last pass |
| `banco` | has nothing to choose; one pass |

- w = d + 1 weights, b the batch size, k = 10 passes, T = k ⌈n/b⌉ updates, β = 1/4 the smoothness of the loss.
- R = 10 guesses the norm of good weights; it is the default radius of `bst14`.
- ρ is the noise of one Gaussian release at (ε, δ) for sensitivity 1.
- S = (R n / (√2 ρ))^(2/3), the sum of all steps, minimises R²/(2S) + σ²/8, optimisation plus noise, for σ = 2Sρ/n. The
  same with λ for 1/S.
- V = 1/b + wσ²/b² bounds the variance of a batch's noisy mean gradient; σ is the noise of its sum, from the plan. The
  step is that of SGD on smooth losses. `scs13` takes the b at which noise no longer shortens it.

The rules use n, d, ε and δ only. They were written, and R, b, the step of `sgd`, the passes and the averages settled,
after looking at some 570 cells like those below, of one to three runs each, on these three data sets (covtype and
protein split in another way, adult on the same test file). So the figures flatter."""

Floats = npt.NDArray[np.float64]
Options = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """All that a rule may look at."""

    n: int
    d: int
    epsilon: float | None

    @property
    def delta(self) -> float:
        return 0.0 if self.epsilon is None else self.n**-2

    def noise(self, algorithm: str, options: Options) -> tuple[float, float]:
        """The noise that the plan would add, and the sensitivity it is for."""
        plan = make_plan(self.spec(algorithm, options), self.n, self.d)
        assert plan.sensitivity is not None
        return plan.noise.scale, plan.sensitivity

    def spec(self, algorithm: str, options: Options) -> Spec:
        return Spec.create(algorithm, "logistic", self.epsilon, self.delta, {**COMMON, **options})

    @property
    def multiplier(self) -> float:
        """ρ of the rules."""
        scale, sensitivity = self.noise("bolton", {})
        return scale / sensitivity

    @property
    def travel(self) -> float:
        """S of the rules, a sum of steps."""
        return float((RADIUS * self.n / (math.sqrt(2) * self.multiplier)) ** (2 / 3))

    def updates(self, batch: int) -> int:
        return PASSES * -(-self.n // batch)


# ---------------------------------------------------------------------------------------------- rules


def sgd(shape: Shape) -> Options:
    return {"batch_size": BATCH, "epochs": PASSES, "step": 1 / SMOOTHNESS, "average": "suffix"}


def bolton_convex(shape: Shape) -> Options:
    step = min(2 / SMOOTHNESS, shape.travel / shape.updates(BATCH))
    return {"batch_size": BATCH, "epochs": PASSES, "step": step}


def bolton_strongly_convex(shape: Shape) -> Options:
    return {"batch_size": BATCH, "epochs": PASSES, "lambda": 1 / shape.travel}


def scs13(shape: Shape) -> Options:
    noise = 2 * PASSES * shape.multiplier / (RADIUS * SMOOTHNESS)
    batch = math.ceil((noise**2 * shape.n * (shape.d + 1)) ** (1 / 3))
    return with_step(shape, "scs13", min(max(batch, BATCH), shape.n))


def bst14(shape: Shape) -> Options:
    return {"batch_size": sample(shape), "epochs": PASSES, "radius": RADIUS, "average": "suffix"}


def dpsgd(shape: Shape) -> Options:
    return with_step(shape, "dpsgd", sample(shape))


def banco(shape: Shape) -> Options:
    return {}


def sample(shape: Shape) -> int:
    return max(1, shape.n // SAMPLES_PER_PASS)


def with_step(shape: Shape, algorithm: str, batch: int) -> Options:
    options: Options = {"batch_size": batch, "epochs": PASSES, "average": "suffix"}
    scale, _ = shape.noise(algorithm, options)
    variance = 1 / batch + (shape.d + 1) * (scale / batch) ** 2
    return {**options, "step": min(1 / SMOOTHNESS, RADIUS / math.sqrt(shape.updates(batch) * variance))}


@dataclass(frozen=True)
class Line:
    """One line of the table and the plot."""

    title: str
    algorithm: str
    rule: Callable[[Shape], Options]


LINES = [
    Line("sgd", "sgd", sgd),
    Line("bolton, convex", "bolton", bolton_convex),
    Line("bolton, strongly convex", "bolton", bolton_strongly_convex),
    Line("scs13", "scs13", scs13),
    Line("bst14", "bst14", bst14),
    Line("dpsgd", "dpsgd", dpsgd),
    Line("banco", "banco", banco),
]


# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Scale:
    """Features made comparable by constants: (x - centre) / width, logs, then everything divided by `norm`.

    Columns count from 1, as in the files. The constants are public: written here, not computed from rows.
    """

    norm: float
    why: str
    centred: dict[int, tuple[float, float]]
    logs: dict[int, float]
    """ln(1 + x) over ln(1 + this)"""
    signed_logs: bool = False
    """sign(x) ln(1 + |x|), for all columns"""

    def __call__(self, x: Floats) -> npt.NDArray[np.float32]:
        x = x.copy()
        for column, (centre, width) in self.centred.items():
            x[:, column - 1] = (x[:, column - 1] - centre) / width
        for column, top in self.logs.items():
            x[:, column - 1] = np.log1p(x[:, column - 1]) / math.log1p(top)
        if self.signed_logs:
            x = np.sign(x) * np.log1p(np.abs(x))
        return (x / self.norm).astype(np.float32)


@dataclass(frozen=True)
class DataSet:
    name: str
    files: tuple[str, ...]
    """all rows, or training and test rows"""
    metric: str
    scale: Scale


COVTYPE = Scale(
    norm=3.0,
    why="covtype: the ten quantities minus a mean, over a standard deviation, as UCI's covtype.info publishes them, "
    "rounded (computed by UCI on the same rows; taken as public). All features / 3.",
    centred={
        1: (2960, 280),
        2: (156, 112),
        3: (14, 7.5),
        4: (270, 210),
        5: (46, 58),
        6: (2350, 1560),
        7: (212, 27),
        8: (223, 20),
        9: (143, 38),
        10: (1980, 1320),
    },
    logs={},
)
ADULT = Scale(
    norm=3.0,
    why="adult: (age - 40) / 15, (fnlwgt - 200000) / 100000, (education-num - 10) / 2.5, (hours-per-week - 40) / 12, "
    "ln(1 + gain) / ln(100001), ln(1 + loss) / ln(5001): round numbers for a working population. All features / 3.",
    centred={1: (40, 15), 10: (200_000, 100_000), 27: (10, 2.5), 64: (40, 12)},
    logs={62: 100_000, 63: 5_000},
)
PROTEIN = Scale(
    norm=28.0,
    why="protein: sign(x) ln(1 + |x|) / 28 for all 74 features, whose meaning is not published. 28 makes norms about "
    "1; it was chosen by looking at these rows and is assumed public.",
    centred={},
    logs={},
    signed_logs=True,
)
DATA_SETS = [
    DataSet("covtype", ("covtype.csv.gz",), "accuracy", COVTYPE),
    DataSet("adult", ("adult.train.csv.gz", "adult.test.csv.gz"), "accuracy", ADULT),
    DataSet("protein", ("protein.csv.gz",), "AUC", PROTEIN),
]


def read(data: DataSet, folder: Path) -> tuple[Floats, Floats]:
    """Training and test rows, label first: the data set's own split, or 80 to 20 after a fixed shuffle."""
    parts = [np.loadtxt(folder / file, delimiter=",", dtype=np.float64) for file in data.files]
    if len(parts) == 2:
        return parts[0], parts[1]
    rows = parts[0][np.random.default_rng(SPLIT_SEED).permutation(len(parts[0]))]
    cut = len(rows) * 4 // 5
    return rows[:cut], rows[cut:]


# ---------------------------------------------------------------------------------------------- trainings


@dataclass(frozen=True)
class Cell:
    """All runs of one line at one epsilon."""

    line: str
    epsilon: float | None
    options: Options
    noise_scale: float | None
    scores: list[float]
    seconds: float

    @property
    def median(self) -> float:
        return float(np.median(self.scores))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.scores, share))

    def to_json(self) -> dict[str, Any]:
        spread = {"median": self.median, "p10": self.quantile(0.1), "p90": self.quantile(0.9)}
        return {**vars(self), **spread}


@dataclass(frozen=True)
class Outcome:
    """All cells of one data set; `guess` is the score of a constant answer."""

    data: DataSet
    n: int
    d: int
    tested: int
    guess: float
    cells: list[Cell]

    def cell(self, line: str, epsilon: float | None) -> Cell:
        return next(cell for cell in self.cells if (cell.line, cell.epsilon) == (line, epsilon))

    @property
    def lines(self) -> list[str]:
        """Those of private algorithms, in the table's order."""
        return list(dict.fromkeys(cell.line for cell in self.cells if cell.epsilon is not None))

    def to_json(self) -> dict[str, Any]:
        head = {"n": self.n, "d": self.d, "tested": self.tested, "metric": self.data.metric, "guess": self.guess}
        return {**head, "delta": self.n**-2, "scaling": self.data.scale.why, "cells": [c.to_json() for c in self.cells]}


class Experiment:
    """One data set in the database, and its test rows here."""

    def __init__(self, db: Database, data: DataSet, folder: Path, repeats: int) -> None:
        train, test = read(data, folder)
        self.db, self.data, self.repeats = db, data, repeats
        self.n, self.d = len(train), train.shape[1] - 1
        self.x, self.y = data.scale(test[:, 1:]), test[:, 0]
        db.load(data.name, data.scale(train[:, 1:]), train[:, 0])

    def score(self, model: Model) -> float:
        margins = model.decision_function(self.x)
        if self.data.metric == "AUC":
            return float(roc_auc_score(self.y > 0, margins))
        return float(np.mean((margins > 0) == (self.y > 0)))

    def train(self, line: Line, epsilon: float | None) -> Cell:
        start = time.perf_counter()
        shape = Shape(self.n, self.d, epsilon)
        options = line.rule(shape)
        models = [self.model(line.algorithm, shape, options) for _ in range(self.repeats)]
        took = time.perf_counter() - start
        return Cell(line.title, epsilon, options, models[0].noise_scale, [self.score(m) for m in models], took)

    def model(self, algorithm: str, shape: Shape, options: Options) -> Model:
        budget: dict[str, Any] = {"epsilon": shape.epsilon, "delta": shape.delta}
        model = self.db.train(self.data.name, algorithm=algorithm, **budget, **COMMON, **options)
        self.db.forget(model.name)
        assert model.private == (shape.epsilon is not None), "a table of private results holds private models only"
        return model

    def cells(self) -> Iterator[Cell]:
        for line in LINES:
            if line.algorithm not in SOLVERS:
                continue
            for epsilon in EPSILONS if SOLVERS[line.algorithm].private else (None,):
                yield self.train(line, epsilon)

    def run(self, console: Console) -> Outcome:
        found = []
        for cell in self.cells():
            found.append(cell)
            at = "" if cell.epsilon is None else f" at ε = {cell.epsilon:g}"
            console.print(f"{self.data.name}: {cell.line}{at}: {cell.median:.4f} ({cell.seconds:.1f} s)")
        positive = float(np.mean(self.y > 0))
        guess = 0.5 if self.data.metric == "AUC" else max(positive, 1 - positive)
        return Outcome(self.data, self.n, self.d, len(self.y), guess, found)


# ---------------------------------------------------------------------------------------------- reports


def table(outcome: Outcome) -> str:
    """Medians; the first line says what they are to be compared with."""
    data, sgd_cell = outcome.data, outcome.cell("sgd", None)
    head = f"Test {data.metric}, {outcome.n:,} rows x {outcome.d} features, {outcome.tested:,} test rows, "
    head += f"δ = {outcome.n**-2:.1e}.\n"
    head += f"Without privacy (`sgd`): {sgd_cell.median:.4f}. A constant answer: {outcome.guess:.4f}."
    rows = ["| ε | " + " | ".join(f"{epsilon:g}" for epsilon in EPSILONS) + " |", "|---" * (len(EPSILONS) + 1) + "|"]
    for line in outcome.lines:
        medians = (f"{outcome.cell(line, epsilon).median:.4f}" for epsilon in EPSILONS)
        rows.append(f"| {line} | " + " | ".join(medians) + " |")
    return "\n".join([head, "", *rows])


def report(outcomes: list[Outcome], repeats: int, seconds: float) -> str:
    parts = [f"Median of {repeats} runs with fresh randomness. {seconds / 60:.0f} minutes in all.", RULES]
    parts.append("Features are scaled by constants:\n\n" + "\n".join(f"- {o.data.scale.why}" for o in outcomes))
    parts += [f"## {outcome.data.name}\n\n{table(outcome)}" for outcome in outcomes]
    return "\n\n".join(parts) + "\n"


def plot(outcome: Outcome, path: Path) -> None:
    """Medians as lines, the range from the 10 % to the 90 % quantile shaded; cut off well below a constant answer."""
    figure = Figure(figsize=(7, 4.2), dpi=90, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(outcome.cell("sgd", None).median, color="black", linewidth=1, label="sgd, not private")
    axes.axhline(outcome.guess, color="0.6", linewidth=1, linestyle=":", label="a constant answer")
    for number, line in enumerate(outcome.lines):
        cells = [outcome.cell(line, epsilon) for epsilon in EPSILONS]
        low, high = ([cell.quantile(share) for cell in cells] for share in (0.1, 0.9))
        axes.fill_between(EPSILONS, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
        axes.plot(EPSILONS, [cell.median for cell in cells], color=f"C{number}", marker="o", markersize=3, label=line)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set(xlabel="ε", ylabel=f"test {outcome.data.metric}", title=f"{outcome.data.name}, n = {outcome.n:,}")
    best = max(cell.median for cell in outcome.cells)
    axes.set_ylim(outcome.guess - (best - outcome.guess) / 4, best + (best - outcome.guess) / 20)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, format="png")


def main() -> None:
    names = [data.name for data in DATA_SETS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory of the files")
    parser.add_argument("--out", type=Path, required=True, help="a directory for tables, plots and scores")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--datasets", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    chosen = [data for data in DATA_SETS if data.name in arguments.datasets]
    missing = [file for data in chosen for file in data.files if not (arguments.data / file).exists()]
    if missing:
        parser.error(f"{arguments.data} has no {', '.join(missing)}: name another --data, or fewer --datasets")
    arguments.out.mkdir(parents=True, exist_ok=True)
    console, start = Console(width=150, highlight=False), time.perf_counter()
    with server() as db:
        outcomes = [Experiment(db, data, arguments.data, arguments.repeats).run(console) for data in chosen]
    text = report(outcomes, arguments.repeats, time.perf_counter() - start)
    (arguments.out / "accuracy.md").write_text(text)
    (arguments.out / "accuracy.json").write_text(json.dumps({o.data.name: o.to_json() for o in outcomes}, indent=1))
    for outcome in outcomes:
        plot(outcome, arguments.out / f"accuracy-{outcome.data.name}.png")
    console.print(text, markup=False)


if __name__ == "__main__":
    main()
