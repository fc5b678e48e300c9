"""`make bench`, second part: what bulk noise costs, for each instruction set this machine can be held to.

Against NumPy's standard_normal (no key, not cryptographic) and against the exact discrete Gaussian that releases use.
Every figure is the best of many short runs over a buffer that fits the first two caches. Needs tests/ on PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builds
import kernels
import numpy as np
from rich.console import Console
from rich.table import Table

NUMBERS = 4096
RUNS = 2000
EXACT_NUMBERS = 500
EXACT_RUNS = 300
EXACT_SIGMA = 2**16
WORDS_PER_BLOCK = 16


def nanoseconds(work: Callable[[], Any], runs: int = RUNS) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter_ns()
        work()
        best = min(best, time.perf_counter_ns() - start)
    return best


class Host:
    """A library's bulk functions, writing into one buffer; key 0 will do here."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.random = kernels.Random.start(bytes(kernels.KEY_BYTES))
        self.out = np.empty(NUMBERS)

    def per_number(self) -> float:
        where, sigma = kernels.pointer(self.out), ctypes.c_double(1.0)
        draw, random, count = self.library.dp_gaussians, ctypes.byref(self.random), ctypes.c_size_t(NUMBERS)
        return nanoseconds(lambda: draw(random, sigma, where, count)) / NUMBERS

    def per_byte(self) -> float:
        where, blocks = kernels.pointer(self.out), self.out.nbytes // (4 * WORDS_PER_BLOCK)
        draw, random, count = self.library.dp_random_fill, ctypes.byref(self.random), ctypes.c_size_t(blocks)
        return nanoseconds(lambda: draw(random, where, count)) / self.out.nbytes


def numpy_per_number() -> float:
    rng, out = np.random.default_rng(), np.empty(NUMBERS)
    return nanoseconds(lambda: rng.standard_normal(out=out)) / NUMBERS


def exact_per_number() -> float:
    """Less what a call from Python costs, measured with a draw of one word. Always the same numbers: how long one takes
    is random, and the best run must not be the luckiest.
    """

    def draw(one: Callable[[Any], Any]) -> None:
        at = ctypes.byref(kernels.Random.start(bytes(kernels.KEY_BYTES)))
        for _ in range(EXACT_NUMBERS):
            one(at)

    sigma, library = ctypes.c_uint64(EXACT_SIGMA), kernels.library
    exact = nanoseconds(lambda: draw(lambda at: library.dp_discrete_gaussian(at, sigma)), EXACT_RUNS)
    return (exact - nanoseconds(lambda: draw(lambda at: library.dp_random_u32(at)), EXACT_RUNS)) / EXACT_NUMBERS


def main() -> None:
    table = Table("library", "Gaussian, ns", "of NumPy's", "of the exact discrete one", "key stream, ns/byte",
                  title=f"bulk noise, {NUMBERS} numbers at a time")  # fmt: skip
    numpy, exact = numpy_per_number(), exact_per_number()
    with tempfile.TemporaryDirectory(prefix="bdp_bench_") as directory:
        hosts = {"as shipped": Host(kernels.library)}
        for name in builds.instruction_sets():
            hosts[name] = Host(builds.Build(Path(directory), name).library)
        for name, host in hosts.items():
            took = host.per_number()
            table.add_row(name, f"{took:.2f}", f"{took / numpy:.3f}", f"{took / exact:.4f}", f"{host.per_byte():.3f}")
    table.add_row("NumPy standard_normal", f"{numpy:.2f}", "1.000", f"{numpy / exact:.4f}", "")
    table.add_row(f"dp_discrete_gaussian, sigma {EXACT_SIGMA}", f"{exact:.2f}", f"{exact / numpy:.3f}", "1.0000", "")
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    main()
