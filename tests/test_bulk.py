"""Bulk random numbers: the same key stream as word by word, and Gaussians that are Gaussian, to the last bits."""

from __future__ import annotations

import ctypes
import secrets
from pathlib import Path
from typing import Any

import builds
import kernels
import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from kernels import library, pointer
from scipy import special, stats

from bismarck_dp import reference

SAMPLES = 10_000_000
LEVEL = 1e-6
"""A right sampler fails a test once in a million runs."""

Array = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


def fresh() -> kernels.Random:
    return kernels.Random.start(secrets.token_bytes(32))


def ordinary(groups: int) -> bytes:
    """A key whose first groups have no rare pair: 16 blocks are then all that each of them uses."""
    while True:
        key = secrets.token_bytes(32)
        if not rare_groups(kernels.Random.start(key), groups).size:
            return key


def rare_groups(random: kernels.Random, groups: int, tail: bool = True, centre: bool = True) -> npt.NDArray[np.intp]:
    """Which of the next groups of 16 blocks have a pair in the tail or at the centre."""
    high = fill(random, 16 * groups).reshape(groups, 16, 16)[:, :, 4:8]
    return np.flatnonzero(((tail & (high < 256)) | (centre & (high >= 2**32 - 256))).any(axis=(1, 2)))


def single(random: kernels.Random, count: int) -> Words:
    return np.array([library.dp_random_u32(ctypes.byref(random)) for _ in range(count)], dtype=np.uint32)


def fill(random: kernels.Random, blocks: int) -> Words:
    out = np.empty(16 * blocks, dtype=np.uint32)
    library.dp_random_fill(ctypes.byref(random), pointer(out), ctypes.c_size_t(blocks))
    return out


def gaussians(random: kernels.Random, count: int, sigma: float = 1.0, host: Any = library) -> Array:
    out = np.empty(count)
    host.dp_gaussians(ctypes.byref(random), ctypes.c_double(sigma), pointer(out), ctypes.c_size_t(count))
    return out


# ---- the key stream ----


@pytest.mark.parametrize("before", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 100])
def test_bulk_words_are_the_next_whole_blocks(before: int, blocks: int) -> None:
    """A begun block is given up; from there the stream goes on, through bulk and single draws alike."""
    key, stream = secrets.token_bytes(32), 2**40 + 3
    expected = reference.key_stream(key, stream, 16 * (blocks + 4))
    random = kernels.Random.start(key, stream)
    assert np.array_equal(single(random, before), expected[:before])
    start = -(-before // 16) * 16
    assert np.array_equal(fill(random, blocks), expected[start:][: 16 * blocks])
    assert np.array_equal(single(random, 20), expected[start + 16 * blocks :][:20])


@pytest.mark.parametrize("ahead", [0, 1, 15, 16, 17, 40])
def test_the_counter_carries(ahead: int) -> None:
    bulk, scalar = fresh(), kernels.Random()
    bulk.input[12], bulk.input[13] = (2**32 - ahead) % 2**32, 7
    ctypes.memmove(ctypes.byref(scalar), ctypes.byref(bulk), ctypes.sizeof(bulk))
    assert np.array_equal(fill(bulk, 40), single(scalar, 40 * 16))
    assert list(bulk.input) == list(scalar.input)
    assert bulk.input[13] == 7 + (ahead > 0)
    assert np.array_equal(single(bulk, 17), single(scalar, 17))


def test_draws_of_all_kinds_take_turns_without_overlap() -> None:
    key = ordinary(200)
    blocks = reference.key_stream(key, 0, 16 * 200).reshape(-1, 16)
    random = kernels.Random.start(key)
    assert np.array_equal(single(random, 3), blocks[0, :3])
    assert np.allclose(gaussians(random, 130), reference.gaussians(blocks[1:33], 1.0)[:130], rtol=1e-9, atol=1e-9)
    assert np.array_equal(fill(random, 5), blocks[33:38].reshape(-1))
    assert np.array_equal(single(random, 16), blocks[38])
    assert np.allclose(gaussians(random, 128), reference.gaussians(blocks[39:55], 1.0), rtol=1e-9, atol=1e-9)
    assert np.array_equal(single(random, 1), blocks[55, :1])


@pytest.mark.parametrize("draw", [lambda r: fill(r, 50_000), lambda r: gaussians(r, 400_000)])
def test_the_host_gets_its_pulse_and_a_generator_that_has_moved_on(draw: Any) -> None:
    random, seen = kernels.Random.start(ordinary(3125)), []
    beat = ctypes.CFUNCTYPE(None)(lambda: seen.append(random.input[12]))
    random.pulse = ctypes.cast(beat, ctypes.c_void_p).value
    draw(random)
    assert seen[-1] == random.input[12] == 50_000
    assert max(np.diff([0, *seen])) <= 16_384


# ---- the transform ----


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 127, 128, 129, 1000])
def test_any_count_equals_the_reference(count: int) -> None:
    key, sigma = ordinary(8), 0.37
    words = reference.key_stream(key, 0, 256 * 8)
    out = np.full(count + 1, np.nan)
    random = kernels.Random.start(key)
    library.dp_gaussians(ctypes.byref(random), ctypes.c_double(sigma), pointer(out), ctypes.c_size_t(count))
    assert np.allclose(out[:count], reference.gaussians(words, sigma)[:count], rtol=1e-9, atol=1e-9)
    assert np.isnan(out[count]), "nothing is written behind the end"


def chosen_words(groups: int) -> Words:
    """Random words; in half of the groups every other one is an end, a middle or an edge of a polynomial's range."""
    rng = np.random.default_rng()
    edges = [0, 1, 2, 3, 255, 65535, 0x5A827999, 0x5A82799A, 2**31 - 1, 2**31, 0xB504F333, 0xB504F334, 2**32 - 1]
    words = rng.integers(0, 2**32, size=(groups, 256), dtype=np.uint32)
    edgy = rng.choice(np.array(edges, dtype=np.uint32), size=words.shape)
    return np.where((rng.random(words.shape) < 0.5) & (np.arange(groups)[:, None] % 2 == 0), edgy, words)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, builds.Build]:
    directory: Path = tmp_path_factory.mktemp("builds")
    return {name: builds.Build(directory, name) for name in builds.instruction_sets()}


def test_every_instruction_set_gives_the_same_bits(built: dict[str, builds.Build]) -> None:
    key, words = secrets.token_bytes(32), chosen_words(2000)
    shipped = gaussians(kernels.Random.start(key), 100_001, 1.7)
    transformed = built["default"].transform(words)
    for name, build in built.items():
        own = gaussians(kernels.Random.start(key), 100_001, 1.7, build.library)
        assert np.array_equal(own.view(np.uint64), shipped.view(np.uint64)), name
        assert np.array_equal(build.transform(words).view(np.uint64), transformed.view(np.uint64)), name


def exact_pair(u: Any, turn: int, place: int, beside: int = 0) -> tuple[Any, Any]:
    """The transform, in as many digits as mpmath is set to: in the middle of the angle's cell, or 2^-64 beside it."""
    return placed(mpmath.sqrt(-2 * mpmath.log(u)), turn, place, beside)


def placed(radius: Any, turn: int, place: int, beside: int = 0) -> tuple[Any, Any]:
    signed = place - 2**32 if place >= 2**31 else place
    angle = mpmath.pi / 2 * (mpmath.mpf(signed * 2**32 + turn // 4 * 4 + 2 + beside) / 2**64)
    pair = radius * mpmath.cos(angle), radius * mpmath.sin(angle)
    return tuple(-x if turn & 2 else x for x in (pair[::-1] if turn & 1 else pair))


def test_each_number_is_within_its_error_bound(built: dict[str, builds.Build]) -> None:
    """What bulk.c's opening comment promises of rounding; u is the double nearest to its cell's middle."""
    words = chosen_words(120)
    out = built["default"].transform(words).reshape(-1, 2, 64)
    worst = 0.0
    with mpmath.workdps(40):
        for group, numbers in zip(words.reshape(-1, 4, 64).tolist(), out.tolist()):
            for low, high, turn, place, *pair in zip(*group, *numbers):
                u = mpmath.mpf(float(high) * 2.0**32 + (float(low) + 0.5)) / 2**64
                for got, exact in zip(pair, exact_pair(u, turn, place)):
                    worst = max(worst, float(abs(got / exact - 1)) if exact else abs(got))
    assert worst < 2**-50


def ends_of_the_ordinary() -> Words:
    """Groups whose pairs are ordinary, but as near to u = 0 and u = 1 as that allows."""
    words = np.random.default_rng().integers(0, 2**32, size=(40, 4, 64), dtype=np.uint32)
    words[::2, 1], words[1::2, 1] = 256, 2**32 - 257
    words[:2, 0], words[2:4, 0] = 0, 2**32 - 1
    return words.reshape(-1, 256)


def test_real_pairs_in_the_same_cells_are_near(built: dict[str, builds.Build]) -> None:
    """The coupling: where ordinary cells are coarsest, their corners are within 2^-42, and not within 2^-43."""
    words = ends_of_the_ordinary()
    out = built["default"].transform(words).reshape(-1, 2, 64)
    worst = mpmath.mpf(0)
    with mpmath.workdps(40):
        for group, numbers in zip(words.reshape(-1, 4, 64).tolist(), out.tolist()):
            for low, high, turn, place, *pair in zip(*group, *numbers):
                for edge, beside in ((0, -2), (0, 2), (1, -2), (1, 2)):
                    u = mpmath.mpf(high * 2**32 + low + edge) / 2**64
                    x, y = exact_pair(u, turn, place, beside)
                    worst = max(worst, mpmath.hypot(pair[0] - x, pair[1] - y))
    assert 2**-43 < worst < 2**-42


# ---- rare pairs ----


FIRST, LAST = range(256), range(2**32 - 256, 2**32)


def group_of(high: Any) -> Words:
    """Random groups, of these high words of u."""
    words = np.random.default_rng().integers(0, 2**32, size=(*np.shape(high)[:-1], 4, 64), dtype=np.uint32)
    words[..., 1, :] = high
    return words.reshape(-1, 256)


def rare_words(groups: int, high: range) -> Words:
    return group_of(np.random.default_rng().integers(high.start, high.stop, size=(groups, 64)))


@pytest.mark.parametrize("high", [0, 1, 255, 256, 257, 2**31, 2**32 - 258, 2**32 - 257, 2**32 - 256, 2**32 - 1])
def test_rare_pairs_are_found_and_no_others(built: dict[str, builds.Build], high: int) -> None:
    """Wherever in the group: the flag, and the pairs that are drawn again. Only u's high words count."""
    rare = high in FIRST or high in LAST
    for build in built.values():
        for j in range(64):
            highs = np.random.default_rng().integers(256, 2**32 - 256, size=(1, 64))
            highs[0, j] = high
            words = group_of(highs)
            words[0, :64], words[0, 128:192], words[0, 192:] = 0, 2**32 - 1, 0
            assert build.is_flagged(words[0]) == rare
            redone = build.redo(fresh(), words)[0]
            assert np.array_equal(np.flatnonzero(~np.isnan(redone)), [j, 64 + j] if rare else [])


@pytest.mark.parametrize("sigma", [1.0, 0.37])
def test_a_tail_has_the_right_law(built: dict[str, builds.Build], sigma: float) -> None:
    """Given u < 2^-24, half the square of the radius is 24 ln 2 plus an exponential number."""
    x, y = built["default"].redo(fresh(), rare_words(1600, FIRST), sigma).reshape(-1, 2, 64).transpose(1, 0, 2) / sigma
    over = ((x**2 + y**2) / 2).ravel() - 24 * np.log(2)
    assert stats.kstest(over, "expon").pvalue > LEVEL
    assert fits(np.bincount((100 * -np.expm1(-over)).astype(np.int64), minlength=100))


@pytest.mark.parametrize("sigma", [1.0, 0.37])
def test_a_centre_has_the_right_law(built: dict[str, builds.Build], sigma: float) -> None:
    """Given u > 1 - 2^-24, 1 - u is uniform on what is left, in its last bits too."""
    x, y = built["default"].redo(fresh(), rare_words(1600, LAST), sigma).reshape(-1, 2, 64).transpose(1, 0, 2) / sigma
    v = 2.0**24 * -np.expm1(-(x**2 + y**2) / 2).ravel()
    assert stats.kstest(v, "uniform").pvalue > LEVEL
    for bits in (0, 12, 24, 36):
        assert fits(np.bincount((100 * np.modf(v * 2.0**bits)[0]).astype(np.int64), minlength=100))


class Wide(ctypes.Structure):
    _fields_ = (("hi", ctypes.c_double), ("lo", ctypes.c_double))


def exact_radius(random: kernels.Random, high: int) -> Any:
    """A rare pair's, from the generator's next words."""
    if high in FIRST:
        library.dp_exponential.restype = Wide
        e = library.dp_exponential(ctypes.byref(random))
        return mpmath.sqrt(2 * (24 * mpmath.log(2) + mpmath.mpf(e.hi) + mpmath.mpf(e.lo)))
    v = mpmath.mpf(library.dp_random_u64(ctypes.byref(random)) + mpmath.mpf(0.5)) / 2**64
    return mpmath.sqrt(-2 * mpmath.log1p(-v / 2**24))


def error_of_rare_pairs(words: Words, out: Array, random: kernels.Random) -> float:
    """The largest error, relatively, of a group's numbers that were drawn again, from this generator."""
    worst = 0.0
    with mpmath.workdps(40):
        for _, high, turn, place, x, y in zip(*words.reshape(4, 64).tolist(), *out.reshape(2, 64).tolist()):
            if high in FIRST or high in LAST:
                for got, exact in zip((x, y), placed(exact_radius(random, high), turn, place)):
                    worst = max(worst, float(abs(got / exact - 1)))
    return worst


@pytest.mark.parametrize("high", [FIRST, LAST], ids=["tail", "centre"])
def test_a_rare_pair_is_within_its_error_bound(built: dict[str, builds.Build], high: range) -> None:
    """Radii from the next words in the order of the pairs, angles and signs from the group's."""
    key, words = secrets.token_bytes(32), rare_words(20, high)
    random, twin = kernels.Random.start(key), kernels.Random.start(key)
    for group, out in zip(words, built["default"].redo(random, words)):
        assert error_of_rare_pairs(group, out, twin) < 2**-50
    assert bytes(random) == bytes(twin)


def find_rare_group(tail: bool) -> tuple[bytes, int]:
    """A key, and the block at which a group with a pair in the tail (or at the centre) begins: one group in 2^18."""
    random, at = kernels.Random.start(key := secrets.token_bytes(32)), 0
    while not (found := rare_groups(random, 2**14, tail=tail, centre=not tail)).size:
        at += 2**14
    return key, 16 * (at + int(found[0]))


def started_at(key: bytes, block: int) -> kernels.Random:
    random = kernels.Random.start(key)
    random.input[12] = block
    return random


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "centre"])
def test_rare_pairs_are_drawn_from_words_behind_their_group(built: dict[str, builds.Build], tail: bool) -> None:
    """From the stream as it is, by the shipped library and by every build."""
    key, block = find_rare_group(tail)
    words = fill(started_at(key, block), 16).reshape(16, 4, 4).transpose(1, 2, 0).ravel()
    expected = reference.gaussians(fill(started_at(key, block), 16), 1.0)
    rare = np.isnan(expected)
    assert rare.any()
    random, twin = started_at(key, block), started_at(key, block + 16)
    out = gaussians(random, 128)
    assert np.allclose(out[~rare], expected[~rare], rtol=1e-9, atol=1e-9)
    assert error_of_rare_pairs(words, out, twin) < 2**-50
    assert bytes(random) == bytes(twin), "the stream goes on where the rare pairs' words end"
    for build in built.values():
        assert np.array_equal(gaussians(started_at(key, block), 128, 1.0, build.library), out)

    more = gaussians(started_at(key, block), 200)
    assert np.array_equal(more[:128], out)
    assert np.array_equal(more[128:], gaussians(started_at(key, random.input[12]), 72)), "from the next whole block"


def test_the_pulse_waits_for_rare_pairs(built: dict[str, builds.Build]) -> None:
    """In a server it may never return; then words of the group would be left behind."""
    seen = []
    beat = ctypes.CFUNCTYPE(None)(lambda: seen.append(random.input[12]))
    random = started_at(secrets.token_bytes(32), 16384 - 1)
    random.pulse = ctypes.cast(beat, ctypes.c_void_p).value
    built["default"].redo(random, rare_words(1, FIRST))
    assert random.input[12] > 16384
    assert not seen
    assert random.pulse == ctypes.cast(beat, ctypes.c_void_p).value


# ---- the distribution ----


@pytest.fixture(scope="module")
def sample() -> Array:
    return gaussians(fresh(), SAMPLES)


@pytest.fixture(scope="module")
def pairs(sample: Array) -> Array:
    """Both numbers of each pair, as two rows."""
    return sample.reshape(-1, 2, 64).transpose(1, 0, 2).reshape(2, -1)


def is_standard_normal(statistic: float) -> bool:
    return bool(2 * special.ndtr(-abs(statistic)) > LEVEL)


def fits(counts: npt.NDArray[np.intp]) -> bool:
    return bool(stats.chisquare(counts).pvalue > LEVEL)


def test_distribution(sample: Array) -> None:
    uniform = special.ndtr(sample)
    assert fits(np.bincount((200 * uniform).astype(np.int64), minlength=200))
    assert stats.kstest(uniform, "uniform", method="asymp").pvalue > LEVEL


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 6])
def test_moments(sample: Array, order: int) -> None:
    moment = {k: float(special.factorial2(k - 1)) if k % 2 == 0 else 0.0 for k in range(1, 13)}
    error = np.sqrt((moment[2 * order] - moment[order] ** 2) / len(sample))
    assert is_standard_normal((np.mean(sample**order) - moment[order]) / error)


@pytest.mark.parametrize("reach", [2.0, 3.0, 4.0, 4.5, 5.0, 6.0])
def test_tails(sample: Array, reach: float) -> None:
    for side in (sample, -sample):
        beyond = int(np.count_nonzero(side > reach))
        assert stats.binomtest(beyond, len(sample), special.ndtr(-reach)).pvalue > LEVEL


@pytest.mark.parametrize("lag", [1, 2, 8, 16, 64, 128])
def test_no_serial_correlation(sample: Array, lag: int) -> None:
    """Of neighbours, of the two halves of a pair (64 apart), of groups; of the numbers and of their squares."""
    first, second = sample[:-lag], sample[lag:]
    scale = np.sqrt(len(first))
    assert is_standard_normal(np.mean(first * second) * scale)
    assert is_standard_normal(np.mean((first**2 - 1) * (second**2 - 1)) / 2 * scale)
    assert is_standard_normal(np.mean((first**2 - 1) * second) / np.sqrt(2) * scale)
    assert is_standard_normal(np.mean(first * (second**2 - 1)) / np.sqrt(2) * scale)


def test_pairs_have_an_independent_radius_and_angle(pairs: Array) -> None:
    x, y = pairs
    cut = np.exp(-(x**2 + y**2) / 2)
    turn = np.arctan2(y, x) / (2 * np.pi) + 0.5
    assert fits(np.bincount((1000 * cut).astype(np.int64), minlength=1000))
    assert fits(np.bincount((1000 * turn).astype(np.int64).clip(max=999), minlength=1000))
    cells = 32 * (32 * cut).astype(np.int64) + (32 * turn).astype(np.int64).clip(max=31)
    assert fits(np.bincount(cells, minlength=1024))


@pytest.mark.parametrize("bits", [12, 20, 28, 36])
def test_uniforms_are_fine(pairs: Array, bits: int) -> None:
    """What lies behind the first bits of the radius' and of the angle's uniform is uniform too."""
    x, y = pairs[:, : SAMPLES // 10]
    for uniform in (np.exp(-(x**2 + y**2) / 2), np.arctan2(y, x) / (2 * np.pi) + 0.5):
        rest = np.modf(uniform * 2.0**bits)[0]
        assert fits(np.bincount((100 * rest).astype(np.int64), minlength=100))


def test_sigma_scales() -> None:
    key = secrets.token_bytes(32)
    unit, scaled = (gaussians(kernels.Random.start(key), 100_000, sigma) for sigma in (1.0, 12.34))
    assert np.allclose(scaled, 12.34 * unit, rtol=2**-50, atol=0)
    assert abs(np.std(scaled) / 12.34 - 1) < 6 / np.sqrt(2 * len(scaled))
    assert not gaussians(fresh(), 200, 0.0).any()
