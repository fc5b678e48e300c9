"""The kernels as a library without a server: the second host, for tests."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bismarck_dp import Plan, reference

KEY_BYTES = 32


class Random(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_uint32 * 16),
        ("block", ctypes.c_uint32 * 16),
        ("used", ctypes.c_int),
        ("generation", ctypes.c_uint32),
        ("seeded", ctypes.c_bool),
        ("pulse", ctypes.c_void_p),
    )

    @classmethod
    def start(cls, key: bytes, stream: int = 0) -> Random:
        random = cls()
        library.dp_random_start(ctypes.byref(random), key, ctypes.c_uint64(stream))
        return random

    @classmethod
    def fresh(cls, stream: int = 0) -> Random:
        random = cls()
        assert library.dp_random_fresh(ctypes.byref(random), ctypes.c_uint64(stream))
        return random


class Stock(ctypes.Structure):
    _fields_ = (
        ("random", Random),
        ("generation", ctypes.c_uint32),
        ("left", ctypes.c_int32),
        ("numbers", ctypes.c_double * 2048),
    )


class Pool(ctypes.Structure):
    _fields_ = (("normals", Stock), ("squares", Stock), ("choices", Random))

    @classmethod
    def start(cls, key: bytes, stream: int = 0) -> Pool:
        """Numbers as the server draws them under a seed, for pass stream // 256 of partition stream % 256."""
        pool = cls()
        pool.normals.random = Random.start(key, reference.SUMS_STREAM + stream)
        pool.squares.random = Random.start(key, reference.SQUARES_STREAM + stream)
        pool.choices = Random.start(key, reference.CHOICES_STREAM + stream)
        return pool

    @classmethod
    def fresh(cls) -> Pool:
        pool = cls()
        pool.normals.random, pool.squares.random, pool.choices = Random.fresh(), Random.fresh(), Random.fresh()
        return pool


class Noise(ctypes.Structure):
    _fields_ = (
        ("mechanism", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("grid", ctypes.c_double),
    )


MECHANISMS = ("none", "gaussian", "l2-laplace")


class Words(ctypes.Structure):
    _fields_ = (
        ("random", Random),
        ("generation", ctypes.c_uint32),
        ("left", ctypes.c_int32),
        ("words", ctypes.c_uint32 * 256),
    )


class Gaps(ctypes.Structure):
    _fields_ = (("digit", ctypes.c_uint64 * 44), ("above", ctypes.c_uint64), ("digits", ctypes.c_int))


_Scalar = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double, ctypes.c_double)


class Loss(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("value", _Scalar),
        ("slope", _Scalar),
        (
            "slopes",
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.c_double),
        ),
        ("conjugate", _Scalar),
        ("dual", ctypes.CFUNCTYPE(ctypes.c_double, *[ctypes.c_double] * 5)),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("rule", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("eta", ctypes.c_double),
        ("beta", ctypes.c_double),
        ("gamma", ctypes.c_double),
        ("offset", ctypes.c_double),
    )


_Number = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_char_p)
_Word = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)


_Numbers = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_double), ctypes.c_int)


class Params(ctypes.Structure):
    _fields_ = (("number", _Number), ("word", _Word), ("numbers", _Numbers), ("host", ctypes.c_void_p))


class Solver(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("size", ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)),
        ("start", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Params))),
        ("begin_pass", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int)),
        (
            "fold",
            ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Pool)),
        ),
        ("take", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
        ("step", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(Pool))),
        ("remembers", ctypes.c_bool),
        ("looks", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)),
        ("look", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double)),
        ("complete", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)),
        ("merge", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("weigh", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("end_pass", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Pool))),
        (
            "next",
            ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(Random), ctypes.POINTER(ctypes.c_int)),
        ),
        (
            "sum",
            ctypes.CFUNCTYPE(
                ctypes.c_double, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
            ),
        ),
        (
            "move",
            ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.POINTER(Pool)),
        ),
        ("observe", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("objective", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)),
        ("gap", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)),
        ("output", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("passes", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("noised", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)),
        ("many", ctypes.c_bool),
    )


def extension() -> Path:
    """Where the built extension lies: beside this Python, or a copy with a mutation in it."""
    return Path(os.environ.get("BISMARCK_DP_TEST_EXTENSION") or Path(sys.prefix) / "share" / "bismarck_dp")


def _load() -> Any:
    found = ctypes.CDLL(str(extension() / "libbismarck_dp.so"))
    for name, result in {
        "dp_loss_named": ctypes.POINTER(Loss),
        "dp_solver_named": ctypes.POINTER(Solver),
        "dp_step": ctypes.c_double,
        "dp_random_fresh": ctypes.c_bool,
        "dp_random_u32": ctypes.c_uint32,
        "dp_random_u64": ctypes.c_uint64,
        "dp_random_below": ctypes.c_uint64,
        "dp_discrete_laplace": ctypes.c_int64,
        "dp_discrete_gaussian": ctypes.c_int64,
        "dp_exponential_choice": ctypes.c_int,
        "dp_gap_start": ctypes.c_bool,
        "dp_gap": ctypes.c_uint64,
        "dp_clip_slope": ctypes.c_double,
        "dp_noised_slope": ctypes.c_double,
        "dp_clip_row": ctypes.c_bool,
    }.items():
        getattr(found, name).restype = result
    found.dp_step.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


library = _load()


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Shape(ctypes.Structure):
    _fields_ = (
        ("scale", ctypes.c_void_p),
        ("matrix", ctypes.c_void_p),
        ("projected", ctypes.c_int),
        ("intercept", ctypes.c_bool),
        ("normalize", ctypes.c_bool),
        ("bound", ctypes.c_double),
    )


def clip_row(
    x: npt.NDArray[np.float64],
    intercept: bool,
    bound: float,
    scale: Any = None,
    normalize: bool = False,
    matrix: Any = None,
) -> tuple[bool, npt.NDArray[np.float32]]:
    width = len(x) if matrix is None else len(matrix)
    out = np.full(width + intercept, np.nan, dtype=np.float32)
    row, room = np.ascontiguousarray(x, dtype=np.float64), np.empty(len(x) + width)
    scales = None if scale is None else np.ascontiguousarray(np.broadcast_to(scale, len(x)), dtype=np.float64)
    shape = Shape(
        None if scales is None else pointer(scales),
        None if matrix is None else pointer(matrix),
        width,
        intercept,
        normalize,
        bound,
    )
    good = library.dp_clip_row(pointer(row), len(row), ctypes.byref(shape), pointer(room), pointer(out))
    return good, out


def host_of(params: dict[str, Any]) -> Params:
    """Parameters as the kernels ask for them; "inf" stands for infinity, as in JSON."""
    words = {key: ctypes.create_string_buffer(str(value).encode()) for key, value in params.items()}

    def numbers(_: Any, key: bytes, out: Any, n: int) -> None:
        for j, number in enumerate(np.broadcast_to(params[key.decode()], n).tolist()):
            out[j] = number

    return Params(
        _Number(lambda _, key: float(params[key.decode()])),
        _Word(lambda _, key: ctypes.addressof(words[key.decode()])),
        _Numbers(numbers),
        None,
    )


class Run:
    """A kernel's state, taken through passes as the server would."""

    def __init__(self, params: dict[str, Any], d: int, kernel: str = "sgd", seed: int | None = None) -> None:
        self.solver = library.dp_solver_named(kernel.encode()).contents
        self.d, self.seed = d * int(params["outputs"]), seed
        self.state = ctypes.create_string_buffer(self.solver.size(self.d))
        self.host = host_of(params)
        assert self.solver.start(self.state, d, ctypes.byref(self.host)) is None
        self.parts = int(params["workers"])
        self.memory = np.zeros(int(params["n"]))

    def _pool(self, part: int) -> Any:
        if not self.solver.noised(self.state):
            return None
        assert self.seed is not None
        return ctypes.byref(Pool.start(reference.seed_key(self.seed), 256 * self.solver.passes(self.state) + part))

    def fold(self, rows: npt.NDArray[np.float32], cut: int = 7) -> None:
        """One pass over rows in blocks of `cut`."""
        bodies = [ctypes.create_string_buffer(self.state.raw, len(self.state)) for _ in range(self.parts)]
        for part, (body, part_rows) in enumerate(zip(bodies, np.array_split(rows, self.parts))):
            pool = self._pool(part)
            assert self.solver.begin_pass(body, part)
            for start in range(0, len(part_rows), cut):
                block = np.ascontiguousarray(part_rows[start : start + cut])
                assert self.solver.fold(body, pointer(block), len(block), pool)
        self._end(bodies)

    def sample(self, rows: npt.NDArray[np.float32], batches: list[npt.NDArray[np.int64]]) -> None:
        """One pass over batches."""
        body, pool = ctypes.create_string_buffer(self.state.raw, len(self.state)), self._pool(0)
        assert self.solver.begin_pass(body, 0)
        for batch in batches:
            self.take(body, rows, batch)
            assert self.solver.step(body, pool)
        self._end([body])
        for i in range(len(rows) if self.solver.remembers and self.solver.looks(self.state) else 0):
            self.solver.look(self.state, pointer(rows[i]), self.memory[i])

    def take(self, body: Any, rows: npt.NDArray[np.float32], batch: Any) -> None:
        """Rows of a batch, each with its memory."""
        for i in batch:
            self.solver.take(body, pointer(rows[i]), pointer(self.memory[i:]))

    def _end(self, bodies: list[Any]) -> None:
        assert all(self.solver.complete(body) for body in bodies)
        self.solver.weigh(bodies[0])
        for body in bodies[1:]:
            self.solver.merge(bodies[0], body)
        self.solver.end_pass(bodies[0], self._pool(0))
        ctypes.memmove(self.state, bodies[0], len(self.state))

    def descend(self, columns: Columns, order: Any = ()) -> None:
        """One pass over columns, whose margins move along; on coordinates in this order, or as the solver draws."""
        pool, random, j = self._pool(0), self._coordinates(), ctypes.c_int()
        assert self.solver.begin_pass(self.state, 0)
        for given in order:
            self._move(columns, int(given), pool)
        while self.solver.next(self.state, ctypes.byref(random), ctypes.byref(j)):
            self._move(columns, j.value, pool)
        self.solver.observe(self.state, pointer(columns.margins), len(columns.margins))
        assert self.solver.complete(self.state)
        self.solver.end_pass(self.state, pool)

    def _move(self, columns: Columns, j: int, pool: Any) -> None:
        by = self.solver.move(self.state, j, self.column_sum(columns, j), pool)
        columns.margins += by * columns.data[j].astype(np.float64)

    def column_sum(self, columns: Columns, j: int, cut: int = 1000) -> float:
        """What the runs of a column add up to."""
        column, n = columns.data[j], len(columns.margins)
        return sum(
            self.solver.sum(self.state, j, pointer(columns.margins[i:]), pointer(column[i:]), min(cut, n - i))
            for i in range(0, n, cut)
        )

    def _coordinates(self) -> Random:
        key = reference.seed_key(0 if self.seed is None else self.seed)
        return Random.start(key, reference.COORDINATES_STREAM + self.solver.passes(self.state))

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        w = np.empty(self.d)
        self.solver.output(self.state, pointer(w))
        return w


class Columns:
    """Packed rows by columns, with labels folded in, and the margins of weights that are all zero."""

    def __init__(self, rows: npt.NDArray[np.float32], regression: bool) -> None:
        labels = np.ones_like(rows[:, :1]) if regression else rows[:, :1]
        self.data = np.ascontiguousarray((rows[:, 1:] * labels).T)
        self.margins = -rows[:, 0].astype(np.float64) if regression else np.zeros(len(rows))


def packed(table: Any, plan: Plan) -> npt.NDArray[np.float32]:
    """Rows as the server packs them, in their own order."""
    features, labels = reference.pack(*table, plan)
    return np.ascontiguousarray(np.hstack([labels[:, None], features]))


def train(
    rows: npt.NDArray[np.float32],
    params: dict[str, Any],
    passes: int,
    cut: int = 7,
    orders: Any = None,
    kernel: str = "sgd",
    seed: int | None = None,
) -> npt.NDArray[np.float64]:
    """The weights after some passes over packed rows (label first): in their order, in one order for each pass, or in
    batches.
    """
    run = Run(params, rows.shape[1] - 1, kernel, seed)
    columns = Columns(rows, params.get("margin_label") == 0)
    for j in range(passes):
        if kernel in ("cd", "primal"):
            run.descend(columns)
            continue
        order = np.arange(len(rows)) if orders is None else orders[j]
        if kernel == "scd" and not isinstance(order, list):
            size = int(params["batch_size"])
            order = [order[i : i + size] for i in range(0, len(order), size)]
        if isinstance(order, list):
            run.sample(rows, order)
        else:
            run.fold(rows[order], cut)
    return run.weights


def play(plan: Plan, table: Any, orders: Any) -> npt.NDArray[np.float64]:
    """What a plan adds noise to, for a table: `recordplay.play`, by the C kernels."""
    rows, params = packed(table, plan), {**plan.kernel_params(), "noise": "none"}
    if plan.kernel == "banco":  # whose sums are single gradients, and cannot be read off its weights
        return reference.first_sum(rows[:, 1:], rows[:, 0], plan, orders)
    if plan.kernel == "scd":
        return last_sum(plan, rows, params, orders)
    if plan.perturbs == "sums":
        return first_sum(plan, rows, params, orders[0])
    if plan.perturbs == "moves":
        return last_moves(plan, rows, params, orders)
    if plan.perturbs == "coordinates":
        return coordinate_sums(plan, rows, params, orders)
    return train(rows, params, plan.schedule.passes, 7, orders, plan.kernel)


def first_sum(plan: Plan, rows: npt.NDArray[np.float32], params: dict[str, Any], order: Any) -> Any:
    """The sum of the first batch that has row 0, from where the weights go with it and with an empty batch instead."""
    schedule = plan.schedule
    for batches in reference._batches(schedule, order):
        at = next((i for i, batch in enumerate(batches) if 0 in batch), None)
        if at is not None:
            before, after = (_after(plan, rows, params, batches[:at], last) for last in ([], batches[at]))
            eta = float(schedule.step.at(np.array([at + 1.0]))[0])
            return (before - after) * schedule.batch_size / eta
    return np.zeros(plan.width)


def _after(plan: Plan, rows: Any, params: dict[str, Any], batches: Any, last: Any) -> npt.NDArray[np.float64]:
    """The weights after these batches and one more, without projection."""
    run = Run({**params, "workers": 1, "average": "none", "radius": "inf"}, rows.shape[1] - 1)
    assert run.solver.begin_pass(run.state, 0)
    for batch in [*batches, last]:
        run.take(run.state, rows, batch)
        assert run.solver.step(run.state, None)
    return run.weights


def last_sum(plan: Plan, rows: npt.NDArray[np.float32], params: dict[str, Any], orders: Any) -> Any:
    """The sum of the last batch that has row 0, given sums before it that do not depend on row 0."""
    others = rows.copy()
    others[0] = 0
    run = Run(params, plan.width, "scd")
    strength = plan.spec.options["lambda"] * plan.n
    found, own = np.zeros(plan.width), 0.0
    for order in orders:
        assert run.solver.begin_pass(run.state, 0)
        for batch in reference._batches(plan.schedule, order)[0]:
            if 0 in batch:
                before = run.weights
                kept, memory = run.state.raw, run.memory.copy()
                run.memory[0] = own
                run.take(run.state, rows, batch)
                assert run.solver.step(run.state, None)
                found, own = (run.weights - before) * strength, run.memory[0]
                ctypes.memmove(run.state, kept, len(run.state))
                run.memory[:] = memory
            run.take(run.state, others, batch)
            assert run.solver.step(run.state, None)
        run._end([run.state])
    return found


def last_moves(plan: Plan, rows: npt.NDArray[np.float32], params: dict[str, Any], orders: Any) -> Any:
    """The moves of the last block, at weights that do not depend on row 0."""
    others = rows.copy()
    others[0] = 0
    w = _after_blocks(plan, others, params, orders[:-1], np.zeros(plan.width))
    return (_after_blocks(plan, rows, params, orders[-1:], w) - w)[orders[-1]]


def _after_blocks(plan: Plan, rows: Any, params: dict[str, Any], blocks: Any, w: Any) -> npt.NDArray[np.float64]:
    """Where these blocks take the weights from w."""
    run, columns = Run(params, plan.width, "primal"), Columns(rows, params["margin_label"] == 0)
    run.descend(columns)
    vectors = np.frombuffer(run.state, offset=run.solver.size(0), dtype=np.float64).reshape(4, plan.width)
    vectors[0] = w
    columns.margins += w @ columns.data.astype(np.float64)
    for block in blocks:
        vectors[3] = np.append(block, np.setdiff1d(np.arange(plan.width), block))
        assert run.solver.begin_pass(run.state, 0)
        for j in [*block, *block]:
            run._move(columns, int(j), None)
        run.solver.end_pass(run.state, None)
    return run.weights


def coordinate_sums(plan: Plan, rows: npt.NDArray[np.float32], params: dict[str, Any], orders: Any) -> Any:
    """What noise is added to, and scores, at weights and with constants that do not depend on row 0."""
    others = rows.copy()
    others[0] = 0
    constants = reference._problem(others[:, 1:], others[:, 0], plan, None).smoothness
    rounds = len(reference._passes(plan))
    changed = {"epochs": rounds + 1, "average": "none", "measures": 0, "constants": constants}
    run = Run({**params, **changed}, plan.width, plan.kernel)
    if plan.kernel == "gcd":
        for _ in range(rounds):
            run.fold(others)
        return reference.in_units(plan, *_gcd_sums(run, rows))
    columns, every = (Columns(table, params["margin_label"] == 0) for table in (others, rows))
    for order in orders:
        run.descend(columns, order)
    every.margins += run.weights @ every.data.astype(np.float64)
    assert run.solver.begin_pass(run.state, 0)
    return reference.in_units(plan, np.array([run.column_sum(every, j) for j in range(plan.width)]), np.empty(0))


def _gcd_sums(run: Run, rows: npt.NDArray[np.float32]) -> Any:
    """Sums and scores after one more pass, of a single partition."""
    sums, scores = np.empty(run.d), np.empty(run.d)
    body = ctypes.create_string_buffer(run.state.raw, len(run.state))
    for part, part_rows in enumerate(np.array_split(rows, run.parts)):
        other = ctypes.create_string_buffer(run.state.raw, len(run.state))
        assert run.solver.begin_pass(other, part)
        block = np.ascontiguousarray(part_rows)
        assert run.solver.fold(other, pointer(block), len(block), None)
        if part == 0:
            ctypes.memmove(body, other, len(run.state))
        else:
            run.solver.merge(body, other)
    library.dp_gcd_scores(body, pointer(sums), pointer(scores))
    return sums, scores
