"""No two processes ever draw the same numbers: noise that is used twice cancels."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import kernels
import numpy as np
import pytest
from kernels import library

from bismarck_dp.controller.database import Database

WORDS = 100


def draw(random: kernels.Random, count: int = WORDS) -> list[int]:
    return [library.dp_random_u64(ctypes.byref(random)) for _ in range(count)]


def in_a_child(work: Callable[[], list[int]]) -> list[int]:
    """What `work` returns in a forked process, sent back through a pipe."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(into, np.array(work(), dtype=np.uint64).tobytes())
            status = 0
        finally:
            os._exit(status)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        sent = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return np.frombuffer(sent, dtype=np.uint64).tolist()


@pytest.mark.parametrize("already", [0, 3, 8, 1000])
def test_no_word_is_drawn_twice_after_a_fork(already: int) -> None:
    """Parent, three children and a grandchild go on with one generator, which has words left in its block."""
    random = kernels.Random.fresh()
    lists = [draw(random, already)]
    for _ in range(3):
        lists.append(in_a_child(lambda: draw(random)))
    lists.append(in_a_child(lambda: draw(random, 3) + in_a_child(lambda: draw(random)) + draw(random)))
    lists.append(draw(random))
    words = [word for one in lists for word in one]
    assert len(words) == already + 3 * WORDS + (2 * WORDS + 3) + WORDS
    assert len(set(words)) == len(words)


def test_bulk_draws_differ_after_a_fork() -> None:
    random = kernels.Random.fresh()

    def fill() -> list[int]:
        words = np.empty(64 * 16, dtype=np.uint32)
        library.dp_random_fill(ctypes.byref(random), kernels.pointer(words), ctypes.c_size_t(64))
        return words.view(np.uint64).tolist()

    lists = [in_a_child(fill), in_a_child(fill), fill()]
    assert len({word for one in lists for word in one}) == 3 * 512


def test_stocks_of_noise_and_of_words_are_thrown_away_after_a_fork() -> None:
    """A pool with numbers left, and words for waits with some left: no process goes on with what another may use."""
    pool, words, gaps = kernels.Pool.fresh(), kernels.Words(), kernels.Gaps()
    words.random = kernels.Random.fresh()
    assert library.dp_gap_start(ctypes.byref(gaps), ctypes.c_double(2.0**-40))
    noise = kernels.Noise(kernels.MECHANISMS.index("l2-laplace"), 0, 1.0, 2.0**-40)

    def draws() -> list[int]:
        out = np.zeros(9)
        library.dp_noise_add(ctypes.byref(noise), ctypes.byref(pool), kernels.pointer(out), 9)
        waits = [library.dp_gap(ctypes.byref(words), ctypes.byref(gaps)) for _ in range(5)]
        return [*np.abs(out / 2.0**-40).astype(np.uint64).tolist(), *waits]

    lists = [draws(), in_a_child(draws), in_a_child(draws), draws(), in_a_child(lambda: draws() + in_a_child(draws))]
    drawn = [number for one in lists for number in one]
    assert len(drawn) == 6 * 14
    assert len(set(drawn)) == len(drawn)
    assert pool.normals.left < 2048 - 9


def test_a_child_keeps_its_new_key() -> None:
    """It takes one fresh key, not one for each word, and goes on in the same stream."""
    random = kernels.Random.fresh(stream=2**32 + 5)

    def keys() -> list[int]:
        seen = set()
        for _ in range(40):
            draw(random, 1)
            seen.add(tuple(random.input[4:12]))
        return [len(seen), random.input[14], random.input[15]]

    assert in_a_child(keys) == [1, 5, 1]


def test_a_seed_gives_the_same_stream_in_a_child() -> None:
    random = kernels.Random.start(secrets.token_bytes(32))
    draw(random, 3)
    assert in_a_child(lambda: draw(random)) == draw(random)


def test_keys_and_streams_differ() -> None:
    one, other = kernels.Random.fresh(), kernels.Random.fresh()
    assert list(one.input[4:12]) != list(other.input[4:12])
    other.input[4:12] = one.input[4:12]
    other.input[14] = 1
    assert not set(draw(one)) & set(draw(other))


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("workers", [1, 4])
def test_sessions_never_share_noise(db: Database, table: Any, workers: int, delta: float) -> None:
    """Eight sessions train at once, each twice. All features are zero, so that the weights are the noise alone.

    Two weights of one model or another may agree by chance, one pair in 10^5; three in one pair of models may not.
    """
    source = table(np.zeros((200, 12)), np.resize([-1.0, 1.0], 200))

    def session(i: int) -> set[float]:
        model = db.train(source.name, model=f"m{i}", epsilon=1.0, delta=delta, workers=workers)
        return set(np.abs(model.weights))

    with ThreadPoolExecutor(8) as pool:
        noises = list(pool.map(session, range(16)))
    assert all(len(noise) >= 10 for noise in noises), "no noise at all"
    assert max(len(one & other) for one, other in combinations(noises, 2)) < 3
