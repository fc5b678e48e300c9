"""Every kernel against its NumPy twin, without a server: losses, steps, clipping, SGD, random numbers."""

from __future__ import annotations

import ctypes
from itertools import product
from typing import Any

import kernels
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels import library

from bismarck_dp import Spec, make_plan, reference
from bismarck_dp.losses import LOSSES
from bismarck_dp.steps import Step

PARAMS = {"logistic": [0.0], "huber": [0.1, 0.5, 2.0], "hinge": [0.0], "squared": [0.3, 1.0, np.inf]}
MARGINS = np.concatenate([np.linspace(-4, 4, 401), [-1e3, -40, 40, 1e3, 0.9, 1.1]])


def cases() -> list[tuple[str, float, float]]:
    return [
        (name, p, y)
        for name in LOSSES
        for p in PARAMS[name]
        for y in ((-1.0, 1.0) if LOSSES[name].classification else (-1.5, 0.0, 0.7))
    ]


@pytest.mark.parametrize(("name", "param", "y"), cases())
def test_loss_agrees_with_numpy(name: str, param: float, y: float) -> None:
    loss = library.dp_loss_named(name.encode()).contents
    value = [loss.value(z, y, param) for z in MARGINS]
    slope = [loss.slope(z, y, param) for z in MARGINS]
    labels = np.full_like(MARGINS, y)
    np.testing.assert_allclose(value, LOSSES[name].value(MARGINS, labels, param), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(slope, LOSSES[name].slope(MARGINS, labels, param), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "param", "y"), cases())
def test_loss_constants_hold(name: str, param: float, y: float) -> None:
    """slope is the derivative of value; |slope| <= steepness, reached; slope' in [0, curvature], reached."""
    loss = LOSSES[name]
    z = np.linspace(-6, 6, 120_001)
    labels = np.full_like(z, y)
    slope = loss.slope(z, labels, param)
    middle = (z[1:] + z[:-1]) / 2
    rise = np.diff(loss.value(z, labels, param)) / np.diff(z)
    if name != "hinge":
        np.testing.assert_allclose(rise, loss.slope(middle, labels[1:], param), atol=2e-4)
    assert np.abs(slope).max() <= loss.steepness(param) * (1 + 1e-12)
    assert np.isinf(param) or np.abs(slope).max() >= 0.99 * loss.steepness(param)
    bend = np.diff(slope) / np.diff(z)
    assert bend.min() >= -1e-9, "the loss must be convex"
    if (curvature := loss.curvature(param)) is not None:
        assert bend.max() <= curvature * (1 + 1e-6)
        assert bend.max() >= 0.99 * curvature


RULES = [
    Step("constant", eta=0.3),
    Step("decreasing", beta=2.0, offset=31.6),
    Step("sqrt", beta=2.0, offset=31.6),
    Step("strongly-convex", beta=5.0, gamma=0.01),
]


@pytest.mark.parametrize("step", RULES, ids=lambda step: step.rule)
def test_steps_agree_never_grow_and_have_a_bounded_sum(step: Step) -> None:
    number = {"constant": 0, "decreasing": 1, "sqrt": 2, "strongly-convex": 3}[step.rule]
    c_step = kernels.Step(number, 0, step.eta, step.beta, step.gamma, step.offset)
    t = np.concatenate([np.arange(1.0, 3000.0), [1e6, 1e9]])
    etas = step.at(t)
    np.testing.assert_allclose([library.dp_step(ctypes.byref(c_step), int(i)) for i in t], etas, rtol=1e-15)
    assert np.all(np.diff(etas) <= 0)
    for updates in (1, 7, 499, 2999):
        assert etas[:updates].sum() <= step.total(updates) * (1 + 1e-12)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    x=st.lists(st.one_of(finite, st.floats(-3, 3)), min_size=1, max_size=40),
    intercept=st.booleans(),
    bound=st.sampled_from([0.5, 1.0, 3.0]),
)
@example(x=[1.7e308, -1.7e308, 1.0], intercept=False, bound=1.0)
@example(x=[5e-324, 0.0], intercept=False, bound=1.0)
@example(x=[0.0] * 9, intercept=True, bound=0.5)
@settings(max_examples=400, deadline=None)
def test_clipped_row_obeys_the_bound_and_agrees_with_numpy(x: list[float], intercept: bool, bound: float) -> None:
    row = np.array(x)
    good, out = kernels.clip_row(row, intercept, bound)
    assert good
    norm = np.sqrt(np.sum(out.astype(np.longdouble) ** 2))
    assert norm <= bound * (1 + 1e-12)
    np.testing.assert_allclose(out, reference.clip_rows([x], bound, intercept)[0], rtol=2e-7, atol=1e-44)
    largest = np.abs(row).max() if not intercept else max(1.0, np.abs(row).max())
    if largest >= bound:
        assert norm >= bound * (1 - 1e-6), "a clipped row keeps as much length as it may"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_becomes_zeros(bad: float) -> None:
    for at in range(12):
        row = np.ones(12)
        row[at] = bad
        good, out = kernels.clip_row(row, True, 1.0)
        assert not good
        assert not out.any()


def plan_for(loss: str, n: int, d: int, options: dict[str, Any]) -> Any:
    return make_plan(Spec.create("sgd", loss, None, 0, options), n, d)


STEPS: list[dict[str, Any]] = [
    {"step": 0.3},
    {"step": "decreasing"},
    {"step": "sqrt"},
    {"step": "decreasing", "lambda": 0.05},
    {"step": 0.2, "lambda": 0.05},
]
GRID = list(
    product(
        sorted(LOSSES),
        range(len(STEPS)),
        [1, 3, 10, 53],
        ["none", "all", "suffix"],
        [None, 0.4],
        [1, 3],
    )
)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_sgd_agrees_with_numpy(loss: str) -> None:
    """Every step rule x batch size (dividing the 53 rows or not) x averaging x projection x partitions, to 1e-9."""
    rng = np.random.default_rng(5)
    n, d = 53, 11
    x = rng.normal(size=(n, d))
    y = np.where(rng.random(n) < 0.5, -1.0, 1.0) if LOSSES[loss].classification else rng.normal(size=n)
    for _, step, b, average, radius, workers in (case for case in GRID if case[0] == loss):
        options = {
            **STEPS[step],
            "batch_size": b,
            "average": average,
            "radius": radius,
            "workers": workers,
            "epochs": 3,
        }
        plan = plan_for(loss, n, d, options)
        features, labels = reference.pack(x, y, plan)
        w = kernels.train(np.hstack([labels[:, None], features]), plan.kernel_params(), 3)
        np.testing.assert_allclose(w, reference.train(features, labels, plan), rtol=0, atol=1e-9, err_msg=str(options))
        if radius is not None:
            assert np.linalg.norm(w) <= radius * (1 + 1e-12)


def test_projection_is_onto_the_ball_not_the_sphere() -> None:
    """One tiny step must stay tiny: rescaling to the sphere would push it out to the radius."""
    plan = plan_for("logistic", 1, 1, {"step": 1e-3, "radius": 5.0, "epochs": 1})
    w = kernels.train(np.array([[1.0, 1.0]], dtype=np.float32), plan.kernel_params(), 1)
    assert abs(w[0] - 5e-4) < 1e-9


def test_fold_refuses_more_rows_than_the_pass_has() -> None:
    solver = library.dp_solver_named(b"sgd").contents
    plan = plan_for("logistic", 5, 2, {"epochs": 1})
    host = kernels.host_of(plan.kernel_params())
    body = ctypes.create_string_buffer(solver.size(2))
    assert solver.start(body, 2, ctypes.byref(host)) is None
    assert solver.begin_pass(body, 0)
    rows = np.zeros((6, 3), dtype=np.float32)
    assert not solver.fold(body, kernels.pointer(rows), 6, None)
    assert solver.fold(body, kernels.pointer(rows), 4, None)
    assert not solver.complete(body)


def test_key_stream_is_chacha20() -> None:
    """The block function's first words for the all-zero key, counter and stream (published test vector)."""
    random = kernels.Random.start(bytes(32))
    words = [library.dp_random_u32(ctypes.byref(random)) for _ in range(40)]
    assert np.array(words[:4], dtype="<u4").tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    np.testing.assert_array_equal(words, reference.key_stream(bytes(32), 0, 40))


def test_streams_and_keys_do_not_repeat() -> None:
    seen = {
        tuple(library.dp_random_u32(ctypes.byref(random)) for _ in range(8))
        for random in (kernels.Random.start(bytes([k]) * 32, s) for k in range(20) for s in (0, 1, 2**32))
    }
    assert len(seen) == 60
