"""`make audit`: attacks every private algorithm, and writes what came out into docs/privacy.md.

    make audit                            5,000 trainings on each of two tables, for every row
    make audit AUDIT="--trials 20000"     more
    make audit AUDIT="--only dpscd"       the rows of some algorithms; the others stay as they are

Rows are made from the registries: private algorithms, the losses they take (two, with noise inside), pure and
approximate budgets, adjacencies. The options are such that the worst pair of tables comes near the declared
sensitivity. Trade-off curves go to the directory audit. Exits with 1 when a claim is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import bismarck_dp
from bismarck_dp.controller.audit import Audit
from bismarck_dp.controller.demo import temporary_database
from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import LOSSES
from bismarck_dp.solvers import SOLVERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/privacy.md"
BEGIN, END = "<!-- made by make audit -->", "<!-- end -->"

EPSILON = 1.0
DELTAS = (0.0, 0.01)
SHAPE = {"n": 30, "d": 2}
STRONG: dict[str, Any] = {"lambda": 0.1, "epochs": 3, "batch_size": 5}
OPTIONS: dict[str, dict[str, Any]] = {"logistic": {"step": 2.0, "epochs": 1, "batch_size": 1}}
"""by loss: the logistic loss is steep only far from zero, where a long step takes the weights"""
SUMS_LOSSES = ("hinge", "squared")
"""Noise on sums knows nothing of the loss but its bound, which these reach at once."""
SUMS: dict[str, Any] = {"step": 0.5, "epochs": 3, "batch_size": 15}
COORDINATES_LOSSES = ("huber", "squared")
COORDINATES: dict[str, Any] = {"iterations": 2, "inner_iterations": 2, "average": "none"}
MOVES: dict[str, Any] = {"iterations": 2, "inner_iterations": 2, "clip": 0.001}
INSIDE = {
    "sums": (SUMS_LOSSES, SUMS),
    "coordinates": (COORDINATES_LOSSES, COORDINATES),
    "moves": (COORDINATES_LOSSES, MOVES),
}
"""by what is perturbed: losses and options"""
DUAL: dict[str, Any] = {"lambda": 10.0, "epochs": 1}
"""where rows are remembered: what they add is long at first, and where the regulariser leaves little to gain"""

HEADER = (
    "| algorithm | loss | mechanism | adjacency | Δ declared | Δ measured | ε claimed | δ | ε measured | verdict |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def specs() -> Iterator[dict[str, Any]]:
    """Every combination of the registries that has a plan."""
    for algorithm, solver in SOLVERS.items():
        losses, fixed = INSIDE.get(solver.perturbs, (tuple(LOSSES), None))
        for loss in losses if solver.private else ():
            options = fixed or OPTIONS.get(loss, STRONG)
            options = {k: v for k, v in options.items() if k in solver.options} | (DUAL if solver.remembers else {})
            for delta in DELTAS:
                for adjacency in ("replace", "zero-out"):
                    spec = {"algorithm": algorithm, "loss": loss, "epsilon": EPSILON, "delta": delta}
                    spec |= {"adjacency": adjacency, **options, **SHAPE}
                    try:
                        bismarck_dp.explain(**spec)
                    except BismarckError:
                        continue
                    yield spec


def row(found: Audit) -> str:
    cells = (
        f"`{found.algorithm}`",
        f"`{found.loss}`",
        f"`{found.mechanism}`",
        f"`{found.adjacency}`",
        f"{found.sensitivity:.4g}",
        f"{found.measured_sensitivity:.4g}",
        f"{found.epsilon:g}",
        f"{found.delta:g}",
        f"≥ {found.empirical_epsilon:.2f}",
        found.verdict,
    )
    return f"| {' | '.join(cells)} |\n"


def kept(algorithms: list[str]) -> str:
    """The page's rows of these algorithms."""
    made = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    return "".join(f"{line}\n" for line in made.splitlines() if any(line.startswith(f"| `{a}` ") for a in algorithms))


def write(table: str, trials: int) -> None:
    """Puts the table between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    when = datetime.now(timezone.utc).date().isoformat()
    said = f"{when}, version {bismarck_dp.__version__}, {trials} trainings on each table, confidence 99.9 %:\n\n"
    PAGE.write_text(f"{before}{BEGIN}\n{said}{table}{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--only", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    arguments = parser.parse_args()
    trials = arguments.trials
    plots = ROOT / "audit"
    plots.mkdir(parents=True, exist_ok=True)
    table, passed = HEADER + kept([name for name in SOLVERS if name not in arguments.only]), True
    with temporary_database() as database:
        for spec in (spec for spec in specs() if spec["algorithm"] in arguments.only):
            name = "-".join(str(spec[key]) for key in ("algorithm", "loss", "delta", "adjacency"))
            found = database.audit(**spec, trials=trials, plot=plots / f"{name}.png")
            passed = passed and found.passed
            table += row(found)
            sys.stdout.write("".join([row(found), *(f"  broken: {reason}\n" for reason in found.reasons)]))
            sys.stdout.flush()
    write(table, trials)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
