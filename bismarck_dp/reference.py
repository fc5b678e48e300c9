"""The kernels once more, in NumPy: the oracle that the C code is compared with, to 1e-9.

Written from the formulas, not from the C: whole batches instead of rows, Python integers instead of 128 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Union

import numpy as np
import numpy.typing as npt

from . import ascent, descent
from .banco import Bet, Learner
from .choices import Choices, Drawn, Exact
from .coordinates import Rounds, score_jump
from .losses import LOSSES, Array, ovr_slopes, softmax_slopes
from .mechanisms import Noise
from .plan import Plan, multiclass, scales
from .sensitivity import Schedule

Floats = npt.NDArray[np.float32]

Rows = npt.NDArray[np.int64]

Order = Union[Rows, list[Rows]]
"""Of one pass: a permutation of the rows, or the rows of each batch; of a round of cd, the coordinates."""


@dataclass(frozen=True)
class Noises:
    """All randomness that must stay secret."""

    sums: Callable[[int, int], Iterator[Array]]
    """for a pass and a partition: the noise of one sum after the other"""
    choices: Callable[[int], Choices]
    """for a pass"""

    def __call__(self, j: int, part: int) -> Iterator[Array]:
        return self.sums(j, part)


ORDER_STREAM = 1
SUMS_STREAM = 1 << 33
SQUARES_STREAM = 3 << 33
SAMPLE_STREAM = 1 << 34
CHOICES_STREAM = 5 << 33
COORDINATES_STREAM = 7 << 33
PROJECTION_STREAM = 9 << 33


def clip_rows(
    x: npt.ArrayLike,
    bound: float,
    intercept: bool = False,
    scale: npt.ArrayLike | None = None,
    normalize: bool = False,
    matrix: Array | None = None,
) -> Floats:
    """Rows, divided by `scale` and cut to ±1, projected by `matrix`, and with a constant 1 behind, when asked; scaled
    down to L2 norm `bound`, or to it to be normalized; rows that are not finite become zeros.
    """
    rows = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = np.where(finite, rows, 0.0)
    if scale is not None:
        with np.errstate(over="ignore"):
            rows = np.clip(rows / np.asarray(scale, dtype=np.float64), -1.0, 1.0)
    if matrix is not None:
        longest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e200)
        rows = np.where(longest > 1e200, rows / longest * 1e200, rows) @ matrix.T
    if intercept:
        rows = np.hstack([rows, np.where(finite, 1.0, 0.0)])
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.finfo(float).tiny)
    unit = np.where((largest > 1e100) | (largest < 1e-100), largest, 1.0)
    norm = np.sqrt(((rows / unit) ** 2).sum(axis=1, keepdims=True))
    with np.errstate(divide="ignore"):
        longer = (norm > bound / unit) | (normalize & (norm > 0))
        factor = np.where(longer, bound / norm, unit)
    return _toward_zero(rows / unit * factor)


@lru_cache(maxsize=8)
def projection(seed: int, p: int, d: int) -> Array:
    """The matrix of a public seed: N(0, 1/p), by Box and Muller on pairs of uniform numbers of 53 bits."""
    pairs = (p * d + 1) // 2
    words = key_stream(seed_key(seed), PROJECTION_STREAM, 4 * pairs).reshape(-1, 2).astype(np.uint64)
    bits = (words[:, 0] | words[:, 1] << np.uint64(32)) >> np.uint64(11)
    radius, angle = ((bits.astype(np.float64) + 0.5) / 2**53).reshape(-1, 2).T
    radius, angle = np.sqrt(-2 * np.log(radius) / p), 2 * np.pi * angle
    numbers = np.column_stack([radius * np.cos(angle), radius * np.sin(angle)]).reshape(-1)
    return numbers[: p * d].reshape(p, d)


def _toward_zero(values: Array) -> Floats:
    rounded = values.astype(np.float32)
    away = np.abs(rounded.astype(np.float64)) > np.abs(values)
    return np.where(away, np.nextafter(rounded, np.float32(0)), rounded).astype(np.float32)


def pack(x: npt.ArrayLike, y: npt.ArrayLike, plan: Plan) -> tuple[Floats, Floats]:
    """Features and labels as the packed copy holds them, in the source's order."""
    options = plan.spec.options
    labels = np.asarray(y, dtype=np.float64)
    if multiclass(plan.spec):
        same = labels[:, None] == np.array(options["classes"])
        coded = np.where(same.any(axis=1), same.argmax(axis=1), np.nan)
    elif LOSSES[plan.spec.loss].classification:
        *negatives, positive = options["classes"] or [0.0, -1.0, 1.0]
        coded = np.where(labels == positive, 1.0, np.where(np.isin(labels, negatives), -1.0, np.nan))
    else:
        bound = options["label_bound"]
        cut = np.clip(labels, -bound, bound)
        with np.errstate(over="ignore"):
            coded = np.where(np.isfinite(labels) & np.isfinite(cut.astype(np.float32)), cut, np.nan)
    bounds = scales(plan.spec, plan.d)
    shape = (options["feature_bound"], options["fit_intercept"], bounds, options["normalize"])
    p, seed = options["project_dim"], options["project_seed"] or 0
    features = clip_rows(x, *shape, None if p is None else projection(seed, p, plan.d))
    raw = np.asarray(x, dtype=np.float64)
    bad = np.isnan(coded) | ~np.isfinite(raw).all(axis=1)
    features[bad] = 0
    return features, np.where(bad, 0.0, coded).astype(np.float32)


def train(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    """What a plan makes of packed rows; `orders` has one order per pass, or is None for the rows as they are. Without
    `noise` sums are exact, with it each gets its noise and is rounded to the plan's grid.
    """
    return KERNELS[plan.kernel](features, labels, plan, orders, noise)


def _sgd(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    schedule = plan.schedule
    w = np.zeros(plan.width)
    average = np.zeros_like(w)
    for j in range(schedule.passes):
        order = np.arange(len(labels)) if orders is None else orders[j]
        models, means = [], []
        for part, batches in enumerate(_batches(schedule, order)):
            noises = None if noise is None else noise(j, part)
            updates = _updates(features, labels, w, plan, j, batches, noises, plan.spec.options["radius"])
            iterates = [v for v, _ in updates]
            models.append(iterates[-1])
            means.append(np.mean(iterates, axis=0))
        shares = np.array(schedule.part_sizes()) / schedule.n
        w = shares @ np.array(models)
        mean = shares @ np.array(means)
        average = mean if schedule.average == "suffix" else average + mean
    if schedule.average == "none":
        return w
    return average / schedule.passes if schedule.average == "all" else average


def _banco(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    order = np.arange(len(labels)) if orders is None else orders[0]
    learner = Learner.start(Bet(**plan.extra), features.shape[1])
    noises = None if noise is None else noise(0, 0)
    for i in order:
        exact = -gradient_of(features, labels, [i], learner.w, plan)
        learner.step(exact if noises is None else snap(exact + next(noises), plan.noise.grid))
    return learner.mean


def _problem(features: Floats, labels: Floats, plan: Plan, noise: Noises | None) -> descent.Problem:
    return descent.Problem.of(features, labels, plan, None if noise is None else noise.choices(0))


def _passes(plan: Plan) -> range:
    """The passes with steps: the first may measure the constants."""
    assert isinstance(plan.schedule, Rounds)
    return range(int(plan.schedule.measures), plan.schedule.passes)


def _cd(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    """Without orders, coordinates come one after the other."""
    steps = np.arange(plan.schedule.updates(plan.n)) % plan.width
    rounds = [steps] * len(_passes(plan)) if orders is None else orders
    noises = [None if noise is None else noise(j, 0) for j in _passes(plan)]
    return descent.train_cd(_problem(features, labels, plan, noise), rounds, noises)


def _gcd(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    """The order of rows does not matter."""
    noises = [None if noise is None else noise(j, 0) for j in _passes(plan)]
    choices = [None if noise is None else noise.choices(j) for j in _passes(plan)]
    return descent.train_gcd(_problem(features, labels, plan, noise), noises, choices)


def _scd(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    dual = ascent.Dual.of(features, labels, plan)
    for j in range(plan.schedule.passes):
        noises = None if noise is None else noise(j, 0)
        for rows in _batches(plan.schedule, np.arange(len(labels)) if orders is None else orders[j])[0]:
            exact = dual.take(rows)
            dual.v += exact if noises is None else snap(exact + next(noises), plan.noise.grid)
    return dual.weights


def _primal(
    features: Floats, labels: Floats, plan: Plan, orders: list[Order] | None = None, noise: Noises | None = None
) -> Array:
    """Without orders, blocks come one after the other."""
    size = plan.schedule.updates(plan.n)
    blocks = [np.arange(j * size, (j + 1) * size) % plan.width for j in range(len(_passes(plan)))]
    w = np.zeros(plan.width)
    for j, block in zip(_passes(plan), blocks if orders is None else orders):
        assert not isinstance(block, list)
        moves = ascent.block_moves(features, labels, plan, w, block)
        w[block] += moves if noise is None else snap(moves + next(noise(j, 0)), plan.noise.grid)
    return w


KERNELS: dict[str, Callable[..., Array]] = {
    "sgd": _sgd,
    "banco": _banco,
    "cd": _cd,
    "gcd": _gcd,
    "scd": _scd,
    "primal": _primal,
}


def coordinate_sums(features: Floats, labels: Floats, plan: Plan, orders: list[Order]) -> Array:
    """What noise is added to, and scores, at weights that do not depend on row 0: those of a run without averages."""
    others = features.copy()
    others[0] = 0
    w = train(others, labels, replace(plan, schedule=replace(plan.schedule, average="none")), orders)
    constants = _problem(others, labels, plan, None).smoothness
    problem = descent.Problem(features.astype(np.float64), labels.astype(np.float64), plan, constants)
    u = problem.sums(w)
    return in_units(plan, u, problem.scores(w, u, plan.extra["rule"]) if plan.kernel == "gcd" else u[:0])


def in_units(plan: Plan, sums: Array, scores: Array) -> Array:
    """Both in units of which the declared sensitivity has J: computed scores move a little further than sums."""
    j = 2 if plan.spec.options["adjacency"] == "replace" else 1
    both = np.concatenate([sums, scores * j / score_jump(j)])
    return np.asarray(both * plan.clip / math.sqrt(plan.width) / plan.n)


def _batches(schedule: Schedule, order: Order) -> list[list[Rows]]:
    """The rows of each batch, by partition."""
    if isinstance(order, list):
        return [order]
    b, parts, start = schedule.batch_size, [], 0
    for rows in schedule.part_sizes():
        part = order[start : start + rows]
        parts.append([part[i : i + b] for i in range(0, rows, b)])
        start += rows
    return parts


def _updates(
    features: Floats,
    labels: Floats,
    w: Array,
    plan: Plan,
    j: int,
    batches: list[Rows],
    noises: Iterator[Array] | None = None,
    radius: float = math.inf,
) -> Iterator[tuple[Array, Array]]:
    """The iterates of a partition's pass, each with the sum that it was made of, before noise."""
    schedule = plan.schedule
    t = np.arange(1, len(batches) + 1, dtype=np.float64) + j * len(batches)
    for rows, eta in zip(batches, schedule.step.at(t)):
        exact = gradient_of(features, labels, rows, w, plan)
        total = exact if noises is None else snap(exact + next(noises), plan.noise.grid)
        w = w - eta * (total / schedule.batch_size + schedule.penalty.strength * w)
        norm = float(np.linalg.norm(w))
        w = w * (radius / norm) if norm > radius else w
        yield w, exact


def gradient_of(features: Floats, labels: Floats, rows: npt.ArrayLike, w: Array, plan: Plan) -> Array:
    """The sum of these rows' gradients, each scaled down to the plan's clip."""
    at = np.asarray(rows, dtype=np.int64)
    x, y = features[at].astype(np.float64), labels[at].astype(np.float64)
    if plan.outputs > 1:
        return _gradient_of_many(x, y, w, plan)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slopes = LOSSES[plan.spec.loss].slope(x @ w, y, plan.loss_param)
        most = plan.clip / np.sqrt((x**2).sum(axis=1))
        if math.isfinite(plan.clip):
            slopes = np.where(np.isnan(slopes) | np.isinf(most), 0.0, np.clip(slopes, -most, most))
        elif plan.perturbs == "sums":
            slopes = np.where(np.isfinite(slopes), slopes, 0.0)
        return np.asarray(slopes @ x)


def _gradient_of_many(x: Array, y: Array, w: Array, plan: Plan) -> Array:
    """The same for many classes: a gradient is the outer product of the classes' slopes and the row."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        z = x @ w.reshape(plan.outputs, -1).T
        if multiclass(plan.spec) == "softmax":
            slopes = softmax_slopes(z, y)
            slopes[~np.isfinite(slopes).all(axis=1)] = 0.0
        else:
            slopes = ovr_slopes(LOSSES[plan.spec.loss], z, y, plan.loss_param)
        if math.isfinite(plan.clip) or plan.perturbs == "sums":
            slopes = np.where(np.isfinite(slopes), slopes, 0.0)
        norms = np.sqrt((x**2).sum(axis=1) * (slopes**2).sum(axis=1))
        factors = np.where(norms > plan.clip, plan.clip / norms, 1.0)
    return np.asarray((slopes * factors[:, None]).T @ x).reshape(-1)


def snap(values: Array, grid: float) -> Array:
    return grid * np.rint(values / grid)


def first_sum(features: Floats, labels: Floats, plan: Plan, orders: list[Order]) -> Array:
    """The sum of the first batch that has row 0, before noise: what one row can change. The claim is about any weights;
    here they come of exact sums, without projection. Zeros if no batch has the row.
    """
    w = np.zeros(plan.width)
    if plan.kernel == "scd":
        return ascent.last_sum(features, labels, plan, [_batches(plan.schedule, order)[0] for order in orders])
    if plan.kernel == "banco":
        before = orders[0][: int(np.flatnonzero(orders[0] == 0)[0])]
        learner = Learner.start(Bet(**plan.extra), features.shape[1])
        for i in before:
            learner.step(-gradient_of(features, labels, [i], learner.w, plan))
        return gradient_of(features, labels, [0], learner.w, plan)
    for part in _batches(plan.schedule, orders[0]):
        for rows, (_, total) in zip(part, _updates(features, labels, w, plan, 0, part)):
            if 0 in rows:
                return total
    return w


def last_moves(features: Floats, labels: Floats, plan: Plan, orders: list[Order]) -> Array:
    """The moves of the last block, at weights that do not depend on row 0."""
    others = features.copy()
    others[0] = 0
    w = train(others, labels, plan, orders[:-1])
    assert not isinstance(orders[-1], list)
    return ascent.block_moves(features, labels, plan, w, orders[-1])


PLAYERS: dict[str, Callable[[Floats, Floats, Plan, list[Order]], Array]] = {
    "output": train,
    "sums": first_sum,
    "coordinates": coordinate_sums,
    "moves": last_moves,
}
"""By what a plan perturbs: that, without noise."""


# ---- the key stream, and the order of the rows under a seed ----


def key_stream(key: bytes, stream: int, words: int, first: int = 0) -> npt.NDArray[np.uint32]:
    """ChaCha20 (RFC 8439's block function; 64-bit counter, then 64-bit stream number), from block `first` on."""
    blocks = -(-words // 16)
    state = np.empty((16, blocks), dtype=np.uint32)
    state[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    state[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    counter = np.arange(first, first + blocks, dtype=np.uint64)
    state[12], state[13] = counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32)
    state[14:] = np.array([stream & 0xFFFFFFFF, stream >> 32], dtype=np.uint32)[:, None]
    x = state.copy()
    for _ in range(10):
        for a, b, c, d in _ROUNDS:
            _quarter(x, a, b, c, d)
    return (x + state).T.reshape(-1)[:words]


_ROUNDS = [
    *[(i, 4 + i, 8 + i, 12 + i) for i in range(4)],
    *[(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)],
]


def _quarter(x: npt.NDArray[np.uint32], a: int, b: int, c: int, d: int) -> None:
    for first, second, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[first] += x[second]
        mixed = x[third] ^ x[first]
        x[third] = (mixed << np.uint32(bits)) | (mixed >> np.uint32(32 - bits))


def gaussians(words: npt.NDArray[np.uint32], sigma: float) -> Array:
    """Box and Muller on whole groups of sixteen blocks of key stream, 128 numbers from each: first the groups' 64
    cosines, then their sines. Pairs whose radius is drawn again, from words behind the group, are NaN.
    """
    parts = words.reshape(-1, 16, 4, 4).transpose(2, 0, 3, 1).reshape(4, -1, 64)
    low, high, turn, place = parts.astype(np.float64)
    rare = (high < 2**8) | (high >= 2**32 - 2**8)
    radius = sigma * np.where(rare, np.nan, np.sqrt(-2 * np.log(high / 2**32 + (low + 0.5) / 2**64)))
    signed = np.where(place < 2**31, place, place - 2**32)
    angle = np.pi / 2 * (signed / 2**32 + (turn - turn % 4 + 2) / 2**64)
    angle = np.where(parts[2] & 1, np.pi / 2 - angle, angle) + np.where(parts[2] & 2, np.pi, 0.0)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def squared_lengths(words: npt.NDArray[np.uint32]) -> Array:
    """-2 ln u on whole groups of sixteen blocks, 128 numbers from each; those that are drawn again are NaN."""
    low, high = words.reshape(-1, 16, 2, 8).transpose(2, 0, 3, 1).reshape(2, -1).astype(np.float64)
    rare = (high < 2**8) | (high >= 2**32 - 2**8)
    return np.asarray(np.where(rare, np.nan, -2 * np.log(high / 2**32 + (low + 0.5) / 2**64)))


def seed_key(seed: int) -> bytes:
    return seed.to_bytes(8, "little", signed=True) + bytes(24)


def order(seed: int, n: int, stream: int = ORDER_STREAM) -> npt.NDArray[np.int64]:
    """The permutation that packing n rows under a seed gives (in memory): Fisher and Yates with Lemire's bounded
    draws.
    """
    exact = Exact(iter(key_stream(seed_key(seed), stream, 2 * n + 1000).tolist()))
    result = list(range(n))
    for i in range(n - 1, 0, -1):
        j = exact.below(i + 1)
        result[i], result[j] = result[j], result[i]
    return np.array(result)


# ---- noise and samples under a seed ----


def seeded_noise(plan: Plan, seed: int) -> Noises:
    """What the server adds to sums under a seed."""

    def of(j: int, part: int) -> Iterator[Array]:
        key, stream = seed_key(seed), 256 * j + part
        normals = _numbers(key, SUMS_STREAM + stream, lambda words: gaussians(words, 1.0))
        return noises_of(normals, _numbers(key, SQUARES_STREAM + stream, squared_lengths), plan)

    return Noises(of, lambda j: Exact(_words(seed_key(seed), CHOICES_STREAM + 256 * j)))


def random_noise(plan: Plan, rng: np.random.Generator) -> Noises:
    """Noise as the plan declares it, from NumPy."""

    def normals() -> Iterator[float]:
        while True:
            yield from rng.standard_normal(4096).tolist()

    def squares() -> Iterator[float]:
        while True:
            yield from rng.chisquare(2, 4096).tolist()

    return Noises(lambda j, part: noises_of(normals(), squares(), plan), lambda j: Drawn(rng))


def noises_of(normals: Iterator[float], squares: Iterator[float], plan: Plan) -> Iterator[Array]:
    """The noise of a plan's sums: of vectors, of a block's moves, or of one coordinate in units of its cut."""
    if plan.perturbs != "coordinates":
        width = plan.schedule.updates(plan.n) if plan.perturbs == "moves" else plan.width
        return noises_from(normals, squares, plan.noise, width)
    inside = replace(plan.noise, mechanism=plan.extra["noise"], scale=plan.extra["noise_scale"])
    return noises_from(normals, squares, inside, 1)


def noises_from(normals: Iterator[float], squares: Iterator[float], noise: Noise, d: int) -> Iterator[Array]:
    """Gaussian vectors, or K-norm ones: the length of d + 1 normal numbers times d others; pairs of the former come as
    squares of their lengths.
    """
    while True:
        stretch = 1.0
        if noise.mechanism == "l2-laplace":
            odd = next(normals) ** 2 if d % 2 == 0 else 0.0
            stretch = math.sqrt(odd + sum(next(squares) for _ in range((d + 1) // 2)))
        yield noise.scale * stretch * np.array([next(normals) for _ in range(d)])


def _numbers(
    key: bytes, stream: int, transform: Callable[[npt.NDArray[np.uint32]], Array], groups: int = 16
) -> Iterator[float]:
    for start in range(0, 1 << 40, groups):
        yield from transform(key_stream(key, stream, groups * 256, start * 16)).tolist()


def samples(seed: int, plan: Plan, j: int) -> list[Rows]:
    """The rows of each batch of pass j under a seed, by the packed rows' numbers."""
    schedule = plan.schedule
    assert schedule.probability is not None
    steps = schedule.updates(plan.n)
    words = _words(seed_key(seed), SAMPLE_STREAM + j)
    taken: list[list[int]] = [[] for _ in range(steps)]
    coins = wait_coins(schedule.probability)
    cell = wait(words, *coins)
    while cell < plan.n * steps:
        taken[cell % steps].append(cell // steps)
        cell += 1 + wait(words, *coins)
    return [np.array(rows, dtype=np.int64) for rows in taken]


def coordinates(seed: int, plan: Plan) -> list[Order]:
    """The coordinates of each round under a seed."""
    rounds: list[Order] = []
    every = np.arange(plan.width)
    assert isinstance(plan.schedule, Rounds)
    for j in _passes(plan):
        exact = Exact(_words(seed_key(seed), COORDINATES_STREAM + j))
        steps = range(plan.schedule.updates(plan.n))
        if plan.schedule.distinct:
            for i in steps:
                k = i + exact.below(plan.width - i)
                every[i], every[k] = every[k], every[i]
            rounds.append(every[: len(steps)].copy())
        else:
            rounds.append(np.array([exact.below(plan.width) for _ in steps]))
    return rounds


def _words(key: bytes, stream: int) -> Iterator[int]:
    for start in range(0, 1 << 40, 256):
        yield from key_stream(key, stream, 256 * 16, start).tolist()


def wait_coins(q: float) -> tuple[int, list[int]]:
    """Thresholds in units of 2^-64 of the coin for one more period, and of those for the binary digits of a wait."""
    power, digits = 1 - Fraction(q), []
    while power > Fraction(1, 2):
        digits.append(int(power / (1 + power) * 2**64))
        power = Fraction(round(power * power * 2**300), 2**300)
    return int(power * 2**64), digits


def wait(words: Iterator[int], above: int, digits: list[int]) -> int:
    """How many cells pass before the next that is drawn."""
    cells = 0
    while _coin(words, above):
        cells += 1
    for threshold in reversed(digits):
        cells = 2 * cells + _coin(words, threshold)
    return cells


def _coin(words: Iterator[int], threshold: int) -> bool:
    upper = next(words)
    return upper < threshold >> 32 if upper != threshold >> 32 else next(words) < threshold % 2**32
