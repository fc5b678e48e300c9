"""bulk.c built for one instruction set at a time, as the shipped library's clones are, and with its inside exported."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kernels import Random, pointer

SOURCES = Path(__file__).parent.parent / "udf" / "kernels"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
SHIM = """
#include "random.c"
#include "exact.c"
#include "bulk.c"
void transform(const uint32_t *words, double sigma, double *out) { box_muller(words, sigma, out); }
bool is_flagged(const uint32_t *words) { return has_rare_pair(words); }
void redo(DpRandom *r, const uint32_t *words, double sigma, double *out) { redo_rare_pairs(r, words, sigma, out); }
"""


def instruction_sets() -> list[str]:
    """Those this machine can run; "default" is what the compiler takes for granted."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    return [name for name in ("avx512f", "avx2") if name in flags] + ["default"]


class Build:
    """The library for one instruction set."""

    def __init__(self, directory: Path, instructions: str, source: str = SHIM) -> None:
        path = directory / f"bulk_{instructions}.so"
        marked = "" if instructions == "default" else f'__attribute__((target("{instructions}")))'
        command = [os.environ.get("CC", "gcc"), *FLAGS, f"-DDP_VECTORISED={marked}", "-I", str(SOURCES)]
        subprocess.run([*command, "-x", "c", "-", "-o", str(path), "-lm"], input=source.encode(), check=True)
        self.library: Any = ctypes.CDLL(str(path))
        self.library.is_flagged.restype = ctypes.c_bool

    def transform(self, words: npt.NDArray[np.uint32], sigma: float = 1.0) -> npt.NDArray[np.float64]:
        """Groups of 256 words into as many groups of 128 numbers."""
        out = np.empty((len(words), 128))
        for group, numbers in zip(words, out):
            self.library.transform(pointer(group), ctypes.c_double(sigma), pointer(numbers))
        return out

    def is_flagged(self, group: npt.NDArray[np.uint32]) -> bool:
        """Whether a group of 256 words has a rare pair."""
        return bool(self.library.is_flagged(pointer(group)))

    def redo(self, random: Random, words: npt.NDArray[np.uint32], sigma: float = 1.0) -> npt.NDArray[np.float64]:
        """Groups of 128 numbers in which rare pairs are drawn anew and the others are NaN."""
        out = np.full((len(words), 128), np.nan)
        for group, numbers in zip(words, out):
            self.library.redo(ctypes.byref(random), pointer(group), ctypes.c_double(sigma), pointer(numbers))
        return out
