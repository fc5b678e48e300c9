"""Millions of draws at a time: a C host of the kernels, compiled when a test first asks for it."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kernels import pointer

HERE = Path(__file__).resolve().parent
LIBRARY = Path(sys.prefix) / "share" / "bismarck_dp" / "libbismarck_dp.so"
WIDE = np.dtype([("hi", "f8"), ("lo", "f8")])


@functools.cache
def host() -> Any:
    with tempfile.TemporaryDirectory(prefix="bdp_samplers_") as home:
        built = Path(home) / "samplers.so"
        flags = ["-O2", "-std=gnu11", "-Wall", "-Werror", "-ffp-contract=off", "-fPIC", "-shared"]
        headers = HERE.parent / "udf" / "kernels"
        command = ["gcc", *flags, f"-I{headers}", str(HERE / "samplers.c"), str(LIBRARY), "-lm", "-o", str(built)]
        subprocess.run([*command, f"-Wl,-rpath,{LIBRARY.parent}"], check=True)
        return ctypes.CDLL(str(built))


def call(name: str, *args: Any) -> None:
    """Doubles and arrays as they are, integers as 64 bits: what the host's functions take."""
    convert = {float: ctypes.c_double, int: ctypes.c_uint64, np.ndarray: pointer}
    getattr(host(), name)(*(convert[type(value)](value) for value in args))


def draw(name: str, *args: Any, count: int, dtype: Any = np.float64, width: int = 1) -> npt.NDArray[Any]:
    out = np.empty(count if width == 1 else (count, width), dtype=dtype)
    call(name, *args, out, count)
    return out
