"""How far two models can be apart when one row differs: the exact recursion, for every schedule.

Claim. Let S and S' differ in one row (`replace`: its value; `zero-out`: it becomes a row without gradient), with m
rows, norms at most F, and a data loss that is convex, L-Lipschitz and beta_d-smooth. Fix the order of the rows, the
partition of each row and the steps, none of which may depend on values. Let every update be

    w <- Proj( (1 - eta_t lam) w - (eta_t / b) sum_{i in batch t} grad_i(w) ),   eta_t <= 1 / (beta_d + lam),

or eta_t <= 2 / beta_d when lam = 0. Then the distance of the two runs obeys

    delta_t <= (1 - eta_t lam) delta_{t-1} + [batch t has the row] J eta_t / b,     J = 2 L (replace) or L (zero-out).

Proof. An update is the average over the batch of the maps w -> (1 - eta lam) w - eta grad_i(w) =
(1 - eta lam) (w - eta / (1 - eta lam) grad_i(w)); with a step as above the inner map is non-expansive (co-coercivity
of a convex smooth gradient), so the average is (1 - eta lam)-Lipschitz, also when a short batch is filled up with
maps of zero gradient: hence the division by b. At the differing row insert the gradient at w': the regulariser
cancels and at most J remains, once per pass and 1/b of the average. Projection onto a ball does not expand. (Wu et
al. 2017, Lemmas 1, 2, 4; their /b for the strongly convex case, L with the regulariser in it, and free averaging are
wrong or loose: docs/privacy.md.)

Partitions that are averaged after each pass with weights a_p = m_p / m: the differing row is in one of them, and
delta after the pass is at most sum_p a_p (delta of p). The released vector is linear in the iterates (the last one,
or an average), so its bound is linear in the jumps, and is computed backwards: `influence` of an update is how much a
unit distance right after it adds to the bound of the release. The result is the largest total over where the row can
be: one position for all passes when the order is fixed (`once`), any position in each pass when it is fresh
(`each_pass`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .penalties import L2
from .steps import Step

Floats = npt.NDArray[np.float64]

SEGMENT = 1 << 18
"""Updates handled at once: memory stays bounded however long a pass is."""

PASS_OVERHEAD = 2000
"""A pass takes as long as this many updates before it does any."""

Pulse = Callable[[], None]


@dataclass(frozen=True)
class Schedule:
    """Everything about a run that the sensitivity depends on; nothing of it may depend on values."""

    n: int
    batch_size: int
    passes: int
    workers: int
    average: str
    shuffle: str
    step: Step
    penalty: L2

    @property
    def probability(self) -> float | None:
        """With which each row joins each batch, when batches are Poisson samples."""
        return self.batch_size / self.n if self.shuffle == "poisson" else None

    def part_sizes(self) -> list[int]:
        """Rows of each partition: shares differ by at most one."""
        return [self.n // self.workers + (p < self.n % self.workers) for p in range(self.workers)]

    def updates(self, rows: int) -> int:
        """Updates per pass of a partition."""
        return -(-rows // self.batch_size)

    @property
    def total_updates(self) -> int:
        """Of a partition, in all passes."""
        return max(self.updates(rows) for rows in self.part_sizes()) * self.passes

    def data_passes(self, done: int) -> float:
        """How often the data is read in so many passes."""
        return done

    def iterate_weight(self, rows: int, j: int) -> float:
        """The weight of each iterate of pass j (from 0) of a partition in the released average."""
        share = rows / self.n / self.updates(rows)
        if self.average == "all":
            return share / self.passes
        return share if self.average == "suffix" and j == self.passes - 1 else 0.0


def _no_pulse() -> None:
    pass


def output_sensitivity(schedule: Schedule, jump: float, pulse: Pulse = _no_pulse) -> float:
    """The largest L2 distance of two releases, for a gradient jump J: the module's claim."""
    gain = closed_form(schedule)
    return jump / schedule.batch_size * (recursion(schedule, pulse) if gain is None else gain)


def closed_form(schedule: Schedule) -> float | None:
    """The recursion's value in O(passes) time, where the worst position is the same in every pass; None elsewhere.

    Without a regulariser nothing shrinks and steps never grow: the first update of a pass matters most, also to an
    average. With one, and the last iterate released, eta_t times the product of later shrinks never falls along a pass
    with a constant step (each factor is at most 1) or with min(1/beta, 1/(gamma t)) (it is constant where 1/(gamma t)
    rules, because eta_t (1 - 1/(t+1)) = eta_{t+1}): the last update matters most.
    """
    if schedule.penalty.strength == 0:
        after, position = _shares_after_passes(schedule), 0
    elif schedule.average == "none" and (shrunk := _shrinks_after_passes(schedule)) is not None:
        after, position = shrunk, -1
    else:
        return None
    gains = []
    for rows in set(schedule.part_sizes()):
        updates = schedule.updates(rows)
        t = np.arange(schedule.passes, dtype=np.float64) * updates + (1 if position == 0 else updates)
        iterates = _iterate_weights(schedule, rows) * (updates if position == 0 else 1)
        gains.append(schedule.step.at(t) * (rows / schedule.n * after + iterates))
    return float(np.max(gains, axis=0).sum() if schedule.shuffle == "each_pass" else np.sum(gains, axis=1).max())


def _iterate_weights(schedule: Schedule, rows: int) -> Floats:
    """`iterate_weight` of every pass: only the last one may differ."""
    weights = np.full(schedule.passes, schedule.iterate_weight(rows, 0) if schedule.passes > 1 else 0.0)
    weights[-1] = schedule.iterate_weight(rows, schedule.passes - 1)
    return weights


def _shares_after_passes(schedule: Schedule) -> Floats:
    """Without a regulariser: what a unit distance right after each pass adds to the release, through later iterates."""
    last = 1.0 if schedule.average == "none" else 0.0
    shares = np.zeros(schedule.passes)
    for rows, count in Counter(schedule.part_sizes()).items():
        shares += count * _iterate_weights(schedule, rows) * schedule.updates(rows)
    return last + np.append(np.cumsum(shares[:0:-1])[::-1], 0.0)


def _shrinks_after_passes(schedule: Schedule) -> Floats | None:
    """With one: how much of a unit distance right after each pass is left at the end, or None without a closed form."""
    left = np.zeros(schedule.passes)
    for rows, count in Counter(schedule.part_sizes()).items():
        log = schedule.step.log_shrink(schedule.passes, schedule.updates(rows), schedule.penalty.strength)
        if log is None:
            return None
        left += count * rows / schedule.n * np.exp(log)
    return np.append(np.cumprod(left[:0:-1])[::-1], 1.0)


def recursion(schedule: Schedule, pulse: Pulse = _no_pulse) -> float:
    """The same by the recursion itself, in O(T) time, for every schedule; calls `pulse` every few milliseconds."""
    # Partitions of one size behave alike: there are at most two sizes, and all but one partition only contract.
    sizes = Counter(schedule.part_sizes())
    totals = {rows: np.zeros(schedule.updates(rows)) for rows in sizes}
    after_pass = 1.0 if schedule.average == "none" else 0.0
    fresh, work = 0.0, 0
    for j in reversed(range(schedule.passes)):
        largest, before_pass = 0.0, 0.0
        for rows, count in sizes.items():
            entry, gains = _pass(schedule, rows, j, after_pass, pulse)
            before_pass += count * entry
            largest = max(largest, _add_gains(totals[rows], gains))
            work += schedule.updates(rows) + PASS_OVERHEAD
        if work > SEGMENT:
            pulse()
            work = 0
        after_pass = before_pass
        fresh += largest
    fixed = max(float(total.max()) for total in totals.values())
    return fresh if schedule.shuffle == "each_pass" else fixed


def _add_gains(total: Floats, gains: list[tuple[int, Floats]]) -> float:
    """Adds one pass's gains to the totals by position; returns the largest of them."""
    for start, gain in gains:
        total[start : start + len(gain)] += gain
    return max(float(gain.max()) for _, gain in gains)


def _pass(
    schedule: Schedule, rows: int, j: int, after_pass: float, pulse: Pulse
) -> tuple[float, list[tuple[int, Floats]]]:
    """Backwards through pass j of a partition: the influence on entry, and eta_t * influence_t by position."""
    influence = rows / schedule.n * after_pass
    weight = schedule.iterate_weight(rows, j)
    gains = []
    for start, eta in _segments(schedule, rows, j):
        if len(eta) == SEGMENT:
            pulse()
        shrink = schedule.penalty.shrink(eta)
        after = _influences(shrink, influence, weight)
        gains.append((start, eta * after))
        influence = float(shrink[0] * after[0])
    return influence, gains


def _segments(schedule: Schedule, rows: int, j: int) -> Iterator[tuple[int, Floats]]:
    """The steps of pass j, last segment first, each with its first position."""
    updates = schedule.updates(rows)
    for start in reversed(range(0, updates, SEGMENT)):
        t = np.arange(start + 1, min(start + SEGMENT, updates) + 1, dtype=np.float64) + j * updates
        yield start, schedule.step.at(t)


def _influences(shrink: Floats, influence: float, weight: float) -> Floats:
    """Solves A_t = weight + shrink_{t+1} A_{t+1} backwards; `influence` is that of the end of the segment."""
    from scipy.linalg.lapack import dtbtrs  # compiled back substitution: the recursion itself, and stable

    count = len(shrink)
    bands = np.ones((2, count), order="F")
    bands[0, 1:] = -shrink[1:]
    right = np.full((count, 1), weight, order="F")
    right[-1, 0] += influence
    solution, info = dtbtrs(bands, right, uplo="U", diag="U", overwrite_b=1)
    if info != 0:
        raise ArithmeticError(f"back substitution failed with code {info}")
    return np.asarray(solution[:, 0], dtype=np.float64)
