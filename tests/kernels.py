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


class Gaps(ctypes.Structure):
    _fields_ = (("digit", ctypes.c_uint64 * 44), ("above", ctypes.c_uint64), ("digits", ctypes.c_int))


_Scalar = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double, ctypes.c_double)


class Loss(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", _Scalar), ("slope", _Scalar))


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


class Params(ctypes.Structure):
    _fields_ = (("number", _Number), ("word", _Word), ("host", ctypes.c_void_p))


class Solver(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("size", ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)),
        ("start", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Params))),
        ("begin_pass", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)),
        ("fold", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)),
        ("complete", ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)),
        ("merge", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("weigh", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("end_pass", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("objective", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)),
        ("output", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("passes", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
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
        "dp_clip_row": ctypes.c_bool,
    }.items():
        getattr(found, name).restype = result
    found.dp_step.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


library = _load()


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def clip_row(x: npt.NDArray[np.float64], intercept: bool, bound: float) -> tuple[bool, npt.NDArray[np.float32]]:
    out = np.full(len(x) + intercept, np.nan, dtype=np.float32)
    row = np.ascontiguousarray(x, dtype=np.float64)
    good = library.dp_clip_row(pointer(row), len(row), ctypes.c_bool(intercept), ctypes.c_double(bound), pointer(out))
    return good, out


def host_of(params: dict[str, Any]) -> Params:
    """Parameters as the kernels ask for them; "inf" stands for infinity, as in JSON."""
    words = {key: ctypes.create_string_buffer(str(value).encode()) for key, value in params.items()}
    return Params(
        _Number(lambda _, key: float(params[key.decode()])),
        _Word(lambda _, key: ctypes.addressof(words[key.decode()])),
        None,
    )


def train(
    rows: npt.NDArray[np.float32],
    params: dict[str, Any],
    passes: int,
    cut: int = 7,
    orders: list[npt.NDArray[np.int64]] | None = None,
    kernel: str = "sgd",
) -> npt.NDArray[np.float64]:
    """Folds packed rows (label first) in blocks of `cut` rows, as the server would: in their order, or in one order for
    each pass.
    """
    solver = library.dp_solver_named(kernel.encode()).contents
    d = rows.shape[1] - 1
    host = host_of(params)
    bodies = [ctypes.create_string_buffer(solver.size(d)) for _ in range(int(params["workers"]))]
    state = ctypes.create_string_buffer(solver.size(d))
    assert solver.start(state, d, ctypes.byref(host)) is None
    for j in range(passes):
        ordered = np.ascontiguousarray(rows if orders is None else rows[orders[j]])
        for part, (body, part_rows) in enumerate(zip(bodies, np.array_split(ordered, len(bodies)))):
            ctypes.memmove(body, state, len(state))
            solver.begin_pass(body, part)
            for start in range(0, len(part_rows), cut):
                block = part_rows[start : start + cut]
                assert solver.fold(body, pointer(block), len(block))
            assert solver.complete(body)
        solver.weigh(bodies[0])
        for body in bodies[1:]:
            solver.merge(bodies[0], body)
        solver.end_pass(bodies[0])
        ctypes.memmove(state, bodies[0], len(state))
    w = np.empty(d)
    solver.output(state, pointer(w))
    return w


def play(plan: Plan, table: Any, orders: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
    """What a plan would release for a table without noise: `recordplay.play`, by the C kernels."""
    features, labels = reference.pack(*table, plan)
    rows = np.hstack([labels[:, None], features])
    return train(rows, plan.kernel_params(), plan.schedule.passes, 7, orders, plan.kernel)
