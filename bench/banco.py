"""BANCO against SGD with an oracle's step, on streams whose optimum has a norm that nobody told BANCO.

    PYTHONPATH=tests .venv/bin/python bench/banco.py

Rows are uniform on the unit sphere, labels <w*, x>, the loss is squared with slopes clipped at c (G = c). Each row's
gradient gets K-norm noise of scale 2 G / epsilon, by the kernels, and is asked for once: the same noise for all. SGD
takes one row at a time with a constant step and returns the mean of its iterates:

    oracle      the step |w*| / sqrt(n E |g|^2), best for what is known of a convex loss if |w*| is known: this is the
                tuned SGD that the paper compares with
    hindsight   the best of several times that step, chosen by the risk itself, for the mean and for the last iterate

Excess risk over w*, on fresh rows, median of the seeds. Two settings: c far below the residuals, where the loss is the
absolute one and no curvature helps; and c = 1 in few dimensions, where the risk is curved and SGD makes use of that.
BANCO's guarantee is about the former.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import kernels
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bismarck_dp.banco import Bet
from bismarck_dp.losses import LOSSES, Array

NORMS = (0.1, 1.0, 10.0, 100.0)
FACTORS = (1.0, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Steps, in the oracle's; the oracle's own first."""
FRESH = 100_000
CHUNK = 200_000

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    clip: float
    epsilon: float
    d: int
    n: int

    @property
    def scale(self) -> float:
        return 2 * self.clip / self.epsilon

    def params(self) -> dict[str, Any]:
        """What both kernels read."""
        grid = 2.0 ** math.floor(math.log2(self.scale * math.sqrt(self.d + 1) / 8))
        return {
            "loss": "squared",
            "loss_param": self.clip,
            "outputs": 1,
            "multiclass": "none",
            "clip": "inf",
            "n": self.n,
            "epochs": 1,
            "workers": 1,
            "noise": "l2-laplace",
            "noise_scale": self.scale,
            "noise_grid": grid,
        }


ABSOLUTE = Setting(clip=1e-3, epsilon=8.0, d=50, n=1_000_000)
CURVED = Setting(clip=1.0, epsilon=4.0, d=5, n=300_000)


def stream(rng: np.random.Generator, n: int, w: Array) -> Rows:
    rows = np.empty((n, len(w) + 1), np.float32)
    for start in range(0, n, CHUNK):
        x = rng.standard_normal((min(CHUNK, n - start), len(w)))
        x /= np.linalg.norm(x, axis=1)[:, None] * (1 + 1e-6)
        rows[start : start + len(x)] = np.column_stack([x @ w, x])
    return rows


def risk(rows: Rows, w: Array, clip: float) -> float:
    x, y = rows[:, 1:].astype(np.float64), rows[:, 0].astype(np.float64)
    return float(LOSSES["squared"].value(x @ w, y, clip).mean())


def one_pass(kernel: str, rows: Rows, params: dict[str, Any], seed: int) -> Array:
    run = kernels.Run(params, rows.shape[1] - 1, kernel, seed)
    run.fold(rows, 4096)
    return run.weights


def banco(rows: Rows, setting: Setting, seed: int) -> Array:
    bet = Bet.knorm(setting.clip, setting.scale, setting.d)
    return one_pass("banco", rows, {**setting.params(), **vars(bet)}, seed)


def sgd(rows: Rows, setting: Setting, seed: int, eta: float, average: str) -> Array:
    step = {"step": "constant", "eta": eta, "beta": 1.0, "gamma": 0.0, "offset": 0.0}
    rest = {"average": average, "track": 0, "batch_size": 1, "lambda": 0.0, "radius": "inf"}
    return one_pass("sgd", rows, {**setting.params(), **step, **rest}, seed)


def oracle_step(norm: float, setting: Setting) -> float:
    square = setting.d * (setting.d + 1) * setting.scale**2 + setting.clip**2
    return norm / math.sqrt(setting.n * square)


def excesses(norm: float, setting: Setting, seed: int, factors: tuple[float, ...]) -> Iterator[float]:
    """Of zero, of BANCO, and of SGD's mean and last iterates by step."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(setting.d)
    w *= norm / np.linalg.norm(w)
    rows, fresh = stream(rng, setting.n, w), stream(rng, FRESH, w)
    least = risk(fresh, w, setting.clip)
    yield risk(fresh, np.zeros(setting.d), setting.clip) - least
    yield risk(fresh, banco(rows, setting, seed), setting.clip) - least
    for average in ("all", "none"):
        for factor in factors:
            eta = factor * oracle_step(norm, setting)
            yield risk(fresh, sgd(rows, setting, seed, eta, average), setting.clip) - least


def oracle_ratio(norm: float, setting: Setting, seed: int) -> float:
    """How many times the excess risk of SGD with the oracle's step BANCO has."""
    _, ours, theirs, _ = excesses(norm, setting, seed, (1.0,))
    return ours / theirs


def main(seeds: int = 3) -> None:
    table = Table("c", "epsilon", "d", "n", "|w*|", "w = 0", "BANCO", "SGD, oracle", "hindsight, mean",
                  "hindsight, last", "BANCO / oracle", "/ mean", "/ last", title="excess risk")  # fmt: skip
    for setting in (ABSOLUTE, CURVED):
        for norm in NORMS:
            found = np.median([list(excesses(norm, setting, seed, FACTORS)) for seed in range(seeds)], axis=0)
            zero, ours, *tuned = found.tolist()
            mean, last = tuned[: len(FACTORS)], tuned[len(FACTORS) :]
            risks = (zero, ours, mean[0], min(mean), min(last))
            ratios = (ours / mean[0], ours / min(mean), ours / min(last))
            table.add_row(f"{setting.clip:g}", f"{setting.epsilon:g}", str(setting.d), f"{setting.n:,}", f"{norm:g}",
                          *(f"{one:.3g}" for one in risks), *(f"{one:.2f}" for one in ratios))  # fmt: skip
    Console(width=None if Console().is_terminal else 160).print(table)


if __name__ == "__main__":
    main()
