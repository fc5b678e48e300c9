"""The kernels once more, in NumPy: the oracle that the C code is compared with, to 1e-9.

Written from the formulas, not from the C: whole batches instead of rows, Python integers instead of 128 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .losses import LOSSES, Array, loss_param
from .plan import Plan
from .sensitivity import Schedule

Floats = npt.NDArray[np.float32]

ORDER_STREAM = 1


def clip_rows(x: npt.ArrayLike, bound: float, intercept: bool = False) -> Floats:
    """Rows (with a constant 1 behind, when asked) scaled down to L2 norm `bound`; rows that are not finite become
    zeros.
    """
    rows = np.asarray(x, dtype=np.float64)
    if intercept:
        rows = np.hstack([rows, np.ones((len(rows), 1))])
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = np.where(finite, rows, 0.0)
    largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.finfo(float).tiny)
    unit = np.where((largest > 1e100) | (largest < 1e-100), largest, 1.0)
    norm = np.sqrt(((rows / unit) ** 2).sum(axis=1, keepdims=True))
    with np.errstate(divide="ignore"):
        scale = np.where(norm <= bound / unit, unit, bound / norm)
    return _toward_zero(rows / unit * scale)


def _toward_zero(values: Array) -> Floats:
    rounded = values.astype(np.float32)
    away = np.abs(rounded.astype(np.float64)) > np.abs(values)
    return np.where(away, np.nextafter(rounded, np.float32(0)), rounded).astype(np.float32)


def pack(x: npt.ArrayLike, y: npt.ArrayLike, plan: Plan) -> tuple[Floats, Floats]:
    """Features and labels as the packed copy holds them, in the source's order."""
    options = plan.spec.options
    labels = np.asarray(y, dtype=np.float64)
    if LOSSES[plan.spec.loss].classification:
        *negatives, positive = options["classes"] or [0.0, -1.0, 1.0]
        coded = np.where(labels == positive, 1.0, np.where(np.isin(labels, negatives), -1.0, np.nan))
    else:
        bound = options["label_bound"]
        coded = np.where(np.isfinite(labels), np.clip(labels, -bound, bound), np.nan)
    features = clip_rows(x, options["feature_bound"], options["fit_intercept"])
    raw = np.asarray(x, dtype=np.float64)
    bad = np.isnan(coded) | ~np.isfinite(raw).all(axis=1)
    features[bad] = 0
    return features, np.where(bad, 0.0, coded).astype(np.float32)


def train(features: Floats, labels: Floats, plan: Plan, orders: list[npt.NDArray[np.int64]] | None = None) -> Array:
    """The noiseless weights of a plan on packed rows; `orders` is one permutation per pass, or None for the rows as
    they are.
    """
    schedule = plan.schedule
    w = np.zeros(features.shape[1])
    average = np.zeros_like(w)
    for j in range(schedule.passes):
        order = np.arange(len(labels)) if orders is None else orders[j]
        models, means = _pass(features[order].astype(np.float64), labels[order].astype(np.float64), w, plan, j)
        shares = np.array(schedule.part_sizes()) / schedule.n
        w = shares @ models
        average += shares @ means
        if schedule.average == "suffix":
            average = shares @ means
    if schedule.average == "none":
        return w
    return average / schedule.passes if schedule.average == "all" else average


PLAYERS = {"sgd": train}
"""By kernel: what a plan would release without noise."""


def _pass(x: Array, y: Array, w: Array, plan: Plan, j: int) -> tuple[Array, Array]:
    """One pass: each partition's model, and the mean of its iterates."""
    models, means, start = [], [], 0
    for rows in plan.schedule.part_sizes():
        stop = start + rows
        iterates = _partition(x[start:stop], y[start:stop], w, plan, j)
        models.append(iterates[-1])
        means.append(np.mean(iterates, axis=0))
        start = stop
    return np.array(models), np.array(means)


def _partition(x: Array, y: Array, w: Array, plan: Plan, j: int) -> list[Array]:
    schedule, options = plan.schedule, plan.spec.options
    loss, param = LOSSES[plan.spec.loss], loss_param(plan.spec.loss, options)
    b = schedule.batch_size
    etas = _etas(schedule, len(y), j)
    iterates = []
    for i, eta in enumerate(etas):
        xb, yb = x[i * b : (i + 1) * b], y[i * b : (i + 1) * b]
        gradient = loss.slope(xb @ w, yb, param) @ xb / b + schedule.penalty.strength * w
        w = w - eta * gradient
        norm = float(np.linalg.norm(w))
        w = w * (options["radius"] / norm) if norm > options["radius"] else w
        iterates.append(w)
    return iterates


def _etas(schedule: Schedule, rows: int, j: int) -> Array:
    updates = schedule.updates(rows)
    return schedule.step.at(np.arange(1, updates + 1, dtype=np.float64) + j * updates)


# ---- the key stream, and the order of the rows under a seed ----


def key_stream(key: bytes, stream: int, words: int) -> npt.NDArray[np.uint32]:
    """ChaCha20 (RFC 8439's block function; 64-bit counter, then 64-bit stream number)."""
    blocks = -(-words // 16)
    state = np.empty((16, blocks), dtype=np.uint32)
    state[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    state[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    counter = np.arange(blocks, dtype=np.uint64)
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


def seed_key(seed: int) -> bytes:
    return seed.to_bytes(8, "little", signed=True) + bytes(24)


def order(seed: int, n: int, stream: int = ORDER_STREAM) -> npt.NDArray[np.int64]:
    """The permutation that packing n rows under a seed gives (in memory): Fisher and Yates with Lemire's bounded
    draws.
    """
    words = iter(key_stream(seed_key(seed), stream, 2 * n + 1000).tolist())
    result = list(range(n))
    for i in range(n - 1, 0, -1):
        j = _below(words, i + 1)
        result[i], result[j] = result[j], result[i]
    return np.array(result)


def _below(words: Iterator[int], n: int) -> int:
    while True:
        product = (next(words) | next(words) << 32) * n
        if product % 2**64 >= (2**64 - n) % n:
            return product >> 64
