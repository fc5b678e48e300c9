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
from kernels import pointer

SOURCES = Path(__file__).parent.parent / "udf" / "kernels"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
SHIM = """
#include "random.c"
#include "bulk.c"
void transform(const uint32_t *words, double sigma, double *out) { box_muller(words, sigma, out); }
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

    def transform(self, words: npt.NDArray[np.uint32], sigma: float = 1.0) -> npt.NDArray[np.float64]:
        """Groups of 256 words into as many groups of 128 numbers."""
        out = np.empty((len(words), 128))
        for group, numbers in zip(words, out):
            self.library.transform(pointer(group), ctypes.c_double(sigma), pointer(numbers))
        return out
