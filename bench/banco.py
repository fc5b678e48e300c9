"""BANCO against SGD whose step was tuned in hindsight, on streams whose optimum has a norm that nobody told them.

Rows are uniform on the unit sphere, labels <w*, x> plus a little noise; the loss is squared with slopes clipped at 1:
G = 1. Each row's subgradient gets K-norm noise of scale 2 G / epsilon, by the kernels, and is asked for once. SGD has
batches of one row and the constant step, out of a geometric grid over almost five decades, whose median excess risk is
least; "last or mean" is the better of its last iterate and the mean of its iterates, each with its own best step.
Excess risk is over w*, on fresh rows, median of the seeds. Needs tests/ on PYTHONPATH.

Where nothing can be learned yet, all are as good as w = 0. Where something can, BANCO is many times worse, and must be:
a gambler moves by m only when x^2 / (4 y) reaches about L = ln m + ln(a y), ten or so, which leaves a slope of about
sqrt((s1^2 + 2 G^2) 2 L / n) along w*, while tuned SGD, on a risk that is curved at its minimum, leaves the slope of the
noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pools
from rich.console import Console
from rich.table import Table

from bismarck_dp.banco import Bet
from bismarck_dp.losses import LOSSES, Array
from bismarck_dp.mechanisms import grid_of

NORMS = (0.1, 1.0, 10.0, 100.0)
EPSILONS = (1.0, 4.0)
CLIP = 1.0
LABEL_NOISE = 0.1
FRESH = 100_000
STEPS = 26
GRID_STEPS = 64.0

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """Median excess risks."""

    zero: float
    """of w = 0: what learning nothing costs"""
    banco: float
    mean: float
    """of the mean iterate of SGD, with its best step"""
    last: float
    """of its last iterate, with its best step"""
    step: float
    """the best step for the mean"""

    @property
    def ratio(self) -> float:
        return self.banco / self.mean

    @property
    def ratio_to_best(self) -> float:
        return self.banco / min(self.mean, self.last)


def stream(rng: np.random.Generator, n: int, w: Array) -> Rows:
    x = rng.standard_normal((n, len(w)))
    x /= np.linalg.norm(x, axis=1)[:, None] * (1 + 1e-6)
    y = x @ w + LABEL_NOISE * rng.standard_normal(n)
    return np.ascontiguousarray(np.hstack([y[:, None], x]), dtype=np.float32)


def risk(rows: Rows, w: Array) -> float:
    return float(
        LOSSES["squared"].value(rows[:, 1:].astype(np.float64) @ w, rows[:, 0].astype(np.float64), CLIP).mean()
    )


def shared(n: int, scale: float) -> dict[str, Any]:
    noise = {"noise": "l2-laplace", "noise_scale": scale, "noise_grid": grid_of(scale, GRID_STEPS)}
    return {"loss": "squared", "loss_param": CLIP, "n": n, "epochs": 1, "workers": 1, **noise}


def banco(rows: Rows, scale: float, seed: int) -> Array:
    bet = Bet.knorm(CLIP, scale, rows.shape[1] - 1)
    params = {"lipschitz": bet.lipschitz, "variance": bet.variance, "reach": bet.reach, **shared(len(rows), scale)}
    return pools.one_pass("banco", rows, params, pool_of(seed))


def sgd(rows: Rows, scale: float, seed: int, eta: float, average: str) -> Array:
    step = {"step": "constant", "eta": eta, "beta": 1.0, "gamma": 0.0, "offset": 0.0}
    rest = {"average": average, "track": 0, "batch_size": 1, "lambda": 0.0, "radius": "inf", "clip": "inf"}
    return pools.one_pass("sgd", rows, {**shared(len(rows), scale), **step, **rest}, pool_of(seed))


def pool_of(seed: int) -> pools.Pool:
    return pools.Pool.start((seed + 1).to_bytes(32, "little"))


def steps(norm: float, n: int, d: int, scale: float) -> Array:
    """Around the step that is best for a linear risk, |w*| / sqrt(n E |g|^2): from 1/60 of it to 1000 times."""
    return np.asarray(norm / math.sqrt(n * (d * (d + 1) * scale**2 + CLIP**2)) * np.geomspace(1 / 60, 1000, STEPS))


def excesses(norm: float, epsilon: float, n: int, d: int, seed: int) -> Iterator[float]:
    """Of zero, of BANCO, and of the mean and last iterates of SGD by step."""
    rng, scale = np.random.default_rng(seed), 2 * CLIP / epsilon
    w = rng.standard_normal(d)
    w *= norm / np.linalg.norm(w)
    rows, fresh = stream(rng, n, w), stream(rng, FRESH, w)
    least = risk(fresh, w)
    yield risk(fresh, np.zeros(d)) - least
    yield risk(fresh, banco(rows, scale, seed)) - least
    for average in ("all", "none"):
        for eta in steps(norm, n, d, scale):
            yield risk(fresh, sgd(rows, scale, seed, eta, average)) - least


def compare(norm: float, epsilon: float, n: int, d: int, seeds: int) -> Case:
    zero, ours, *tuned = np.median(
        [list(excesses(norm, epsilon, n, d, seed)) for seed in range(seeds)], axis=0
    ).tolist()
    mean, last = tuned[:STEPS], tuned[STEPS:]
    return Case(zero, ours, min(mean), min(last), float(steps(norm, n, d, 2 * CLIP / epsilon)[int(np.argmin(mean))]))


def ratios(epsilon: float, n: int = 100_000, d: int = 5, seeds: int = 3) -> dict[float, Case]:
    """By norm of the optimum."""
    return {norm: compare(norm, epsilon, n, d, seeds) for norm in NORMS}


def main() -> None:
    table = Table("epsilon", "n", "|w*|", "w = 0", "SGD, mean", "its step", "SGD, last", "BANCO",
                  "of the mean", "of last or mean", title="excess risk, d = 5")  # fmt: skip
    for epsilon in EPSILONS:
        for n in (30_000, 300_000):
            for norm, case in ratios(epsilon, n).items():
                risks = [f"{number:.3g}" for number in (case.zero, case.mean, case.step, case.last, case.banco)]
                last = [f"{case.ratio:.2f}", f"{case.ratio_to_best:.2f}"]
                table.add_row(f"{epsilon:g}", str(n), f"{norm:g}", *risks, *last)
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
