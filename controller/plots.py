"""Pictures, as PNG files. Matplotlib is looked for only here, when one is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bismarck_dp.attacks import claimed_trade_off
from bismarck_dp.errors import BismarckError

if TYPE_CHECKING:
    from .audit import Audit


def check(path: str | Path) -> None:
    """Refuses, before hours of work, a picture that could not be drawn or kept."""
    _figure()
    place = Path(path)
    if place.is_dir() or not place.resolve().parent.is_dir() or not os.access(place.resolve().parent, os.W_OK):
        raise BismarckError(f"{path} cannot be written", "name a file in a directory that you may write")


def trade_off(audit: Audit, path: str | Path) -> None:
    """The measured trade-off curve of the attack above the region that the claim forbids."""
    figure_class = _figure()
    rates = np.linspace(0, 1, 1001)
    figure = figure_class(figsize=(6, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    lowest = claimed_trade_off(rates, audit.epsilon, audit.delta)
    axes.fill_between(rates, lowest, color="0.85", label="forbidden by the claim")
    axes.plot(rates, 1 - rates, color="0.6", linestyle=":", label="guessing")
    axes.plot(audit.false_positive_rates, audit.false_negative_rates, color="C0", label="measured")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false positive rate", ylabel="false negative rate")
    axes.set_title(
        f"{audit.algorithm}, {audit.loss}, {audit.mechanism}: claimed ε = {audit.epsilon:g}, δ = {audit.delta:g}\n"
        f"lower bound {audit.empirical_epsilon:.3g} after 2 × {audit.trials} trainings: {audit.verdict}",
        fontsize=10,
    )
    axes.legend(loc="upper right")
    _save(figure, path)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BismarckError("a plot needs Matplotlib", "pip install matplotlib, or leave out the plot") from None
    return Figure


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BismarckError(f"{path} cannot be written: {error.strerror}", "name a file that you may write") from error
