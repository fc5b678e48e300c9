"""Wide numbers against exact fractions: the relative errors that knorm.c and gaps.c count with."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from samplers import WIDE, call

UNIT = Fraction(1, 2**102)
COUNT = 20_000


def wide_numbers(seed: int, spread: int) -> Any:
    """hi of any size within 2^+-spread, lo anywhere up to half a unit in hi's last place, ends included."""
    rng = np.random.default_rng(seed)
    hi = np.ldexp(rng.uniform(1, 2, COUNT), rng.integers(-spread, spread, COUNT)) * rng.choice([-1, 1], COUNT)
    hi[: COUNT // 4] = np.ldexp(np.round(np.ldexp(hi[: COUNT // 4], 3)), -3)
    hi[hi == 0] = 1.0
    half = np.spacing(np.abs(hi)) / 2
    share = rng.choice([-0.999, -0.5, 0.0, 0.5, 0.999, 2.0], COUNT)
    lo = half * np.where(share == 2.0, rng.uniform(-0.999, 0.999, COUNT), share) / 2
    return np.array(list(zip(hi, lo)), dtype=WIDE)


def fractions_of(x: Any) -> list[Fraction]:
    return [Fraction(hi) + Fraction(lo) for hi, lo in x.tolist()]


def check(result: Any, exact: list[Fraction]) -> None:
    for (hi, lo), right in zip(result.tolist(), exact):
        assert abs(Fraction(hi) + Fraction(lo) - right) <= UNIT * abs(right)
        assert hi + lo == hi, "not normalised"


def root(x: Fraction) -> Fraction:
    """To 2^-200 of itself."""
    shift = 2 * max(0, 220 - int(math.log2(x)) // 2)
    return Fraction(math.isqrt(int(x * 2**shift)), 2 ** (shift // 2))


@pytest.mark.parametrize("spread", [1, 10, 100])
def test_operations(spread: int) -> None:
    x, y = wide_numbers(1, spread), wide_numbers(2, spread)
    y["hi"][:1000], y["lo"][:1000] = -x["hi"][:1000], x["lo"][:1000]
    results = [np.empty(COUNT, dtype=WIDE) for _ in range(4)]
    call("operations", x, y, *results, COUNT)
    exact: list[Callable[[Fraction, Fraction], Fraction]] = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: a / b,
        lambda a, _: root(abs(a)),
    ]
    pairs = list(zip(fractions_of(x), fractions_of(y)))
    for result, operation in zip(results, exact):
        check(result, [operation(a, b) for a, b in pairs])


@pytest.mark.parametrize("spread", [1, 10, 40])
def test_operations_with_doubles_and_rounding(spread: int) -> None:
    x, y = wide_numbers(3, spread), wide_numbers(4, spread)["hi"].copy()
    x["hi"][:2000] = np.round(x["hi"][:2000]) + 0.5
    x["lo"][:2000] = np.resize([-1e-30, 1e-30, -1e-300], 2000)
    y[1000:3000] = -x["hi"][1000:3000]
    total, product = (np.empty(COUNT, dtype=WIDE) for _ in range(2))
    rounded = np.empty(COUNT, dtype=np.int64)
    call("mixed_operations", x, y, total, product, rounded, COUNT)
    exact = fractions_of(x)
    check(total, [a + Fraction(b) for a, b in zip(exact, y.tolist())])
    check(product, [a * Fraction(b) for a, b in zip(exact, y.tolist())])
    assert all(abs(a - k) <= Fraction(1, 2) for a, k in zip(exact, rounded.tolist()))


@pytest.mark.parametrize("words", [2, 4])
def test_fractions(words: int) -> None:
    """Also such as begin with many zeros, and such as are ones only."""
    rng = np.random.default_rng(5)
    word = rng.integers(0, 2**64, (COUNT, words), dtype=np.uint64)
    word[:1000, 0] = 0
    word[1000:2000, 0] >>= rng.integers(0, 64, 1000, dtype=np.uint64)
    word[2000:2010] = 2**64 - 1
    word[2010:2020] = 0
    out = np.empty(COUNT, dtype=WIDE)
    call("fractions", word, words, out, COUNT)
    exact = [Fraction(int.from_bytes(row.astype(">u8").tobytes(), "big"), 2 ** (64 * words)) for row in word]
    for (hi, lo), right in zip(out.tolist(), exact):
        assert abs(Fraction(hi) + Fraction(lo) - right) <= 2 * words * UNIT * right


def test_the_root_of_zero() -> None:
    x = np.zeros(1, dtype=WIDE)
    results = [np.empty(1, dtype=WIDE) for _ in range(4)]
    call("operations", x, np.array([(1.0, 0.0)], dtype=WIDE), *results, 1)
    assert [result["hi"][0] for result in results] == [1.0, 0.0, 0.0, 0.0]
