"""The local protocol of BANCO: providers add noise to their own gradients, and a learner sees nothing else.

The learner publishes a state. A provider answers with one noisy negative gradient at its weights; the learner takes the
mean of a round's gradients (of one provider, in the paper) for one step of `banco`, and publishes the next state.

Claim: what a provider sends is epsilon-DP, or (epsilon, delta)-DP, for replacing her row by any other, whatever state
she was sent: that is local differential privacy. Proof: her row is clipped to the
state's feature bound and its gradient to norm L, both on her side, and the noise is that of `mechanisms.calibrate` for
L, worked out from her own epsilon and delta. She answers once; k answers cost k epsilon. The state's other numbers,
weights above all, only decide which gradient it is.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from .accounting import Event
from .banco import Bet, Learner
from .errors import BismarckError
from .losses import LOSSES
from .mechanisms import Noise, calibrate
from .noisy import Banco
from .plan import json_number, label_params, scales, shape_params
from .sgd import Setting
from .spec import OPTIONS, Spec

FORMAT = 1
MOST_FEATURES = 1_000_000


def start(d: int, epsilon: float, delta: float, loss: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """The first state, for d features."""
    if not 1 <= d <= MOST_FEATURES:
        raise BismarckError(f"d is {d}", f"it must be a number of features from 1 to {MOST_FEATURES}")
    spec = Spec.create("banco", loss, epsilon, delta, options)
    given = {name: value for name, value in spec.options.items() if value != OPTIONS[name].default}
    state = {"format": FORMAT, "loss": loss, "epsilon": spec.epsilon, "delta": spec.delta, "d": d, "options": given}
    setting, noise = _plan(_key(state))
    learner = Learner.start(_bet(setting, noise), setting.width)
    return {**state, "gradients": 0, "learner": _packed(learner)}


def gradient_params(state: Any, epsilon: float, delta: float) -> dict[str, Any]:
    """What a provider's server reads to make her gradient and its noise."""
    setting, noise = _checked(state)
    for name, offered in (("epsilon", epsilon), ("delta", delta)):
        if offered != state[name]:
            raise BismarckError(
                f"the state asks for {name} {state[name]:g}, and {offered:g} is offered",
                f"offer {name} {state[name]:g}, or do not answer",
            )
    return {
        "d": setting.d,
        **shape_params(setting.spec),
        **label_params(setting.spec),
        "loss": setting.spec.loss,
        "loss_param": json_number(setting.param),
        "clip": setting.lipschitz,
        "weights": _learner(state, setting).w.tolist(),
        **noise.params(),
    }


def learn(state: Any, total: Any, count: Any) -> dict[str, Any]:
    """The state after a round of `count` gradients with this sum."""
    setting, _ = _checked(state)
    if not isinstance(count, int) or count < 1 or not _numbers(total, setting.width):
        raise BismarckError(
            f"a gradient of this state has {setting.width} numbers, none beyond 1e300", "make it with dp_local_gradient"
        )
    learner = _learner(state, setting)
    learner.step(np.array(total, dtype=np.float64) / count, count)
    return {**state, "gradients": state["gradients"] + count, "learner": _packed(learner)}


def model(state: Any) -> dict[str, Any]:
    """The row of bismarck_dp.model for what was learned so far: the mean of the states' weights."""
    setting, noise = _checked(state)
    if state["gradients"] < 1:
        raise BismarckError("the state has no gradients yet", "run at least one round with dp_local_round")
    weights = _learner(state, setting).mean.tolist()
    spec = setting.spec
    facts = {
        "algorithm": "banco",
        "loss": spec.loss,
        "n": state["gradients"],
        "d": setting.d,
        "epsilon": spec.epsilon,
        "delta": spec.delta,
        "sensitivity": _sensitivity(setting),
        "noise_scale": noise.scale,
        "mechanism": noise.mechanism,
        "adjacency": spec.options["adjacency"],
        "privacy_unit": "row",
        "trust": "local",
        "passes": 1,
        "private": True,
        "note": "noise is added by each provider, in dp_local_gradient; this server cannot see whether it was",
        "feature_bound": spec.options["feature_bound"],
        "scale": scales(spec, setting.d),
        "normalize": spec.options["normalize"],
        "multiclass": None,
        "event": noise.event.to_json(),
    }
    classes = (spec.options["classes"] or [-1.0, 1.0]) if LOSSES[spec.loss].classification else []
    return {
        **facts,
        "weights": weights[: setting.d],
        "intercept": weights[setting.d :],
        "classes": classes,
        "seconds": 0.0,
        "source": "",
        "label": "",
        "features": [],
        "options": state["options"],
        "plan": {**facts, "grid": noise.grid, "lipschitz": setting.lipschitz, "accountant": noise.accountant},
    }


def event(state: Any) -> Event:
    """What one answer to this state costs its provider."""
    return _checked(state)[1].event


# ---- states from outside ----


def _key(state: dict[str, Any]) -> tuple[Any, ...]:
    options = tuple(sorted((name, _frozen(value)) for name, value in state["options"].items()))
    return state["loss"], state["epsilon"], state["delta"], state["d"], options


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        raise BismarckError("the local protocol knows no columns", "give numbers, or leave out scale and categories")
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=64)
def _plan(key: tuple[Any, ...]) -> tuple[Setting, Noise]:
    loss, epsilon, delta, d, options = key
    if dict(options).get("seed") is not None:
        raise BismarckError("a known seed voids privacy", "leave out the option seed")
    if dict(options).get("privacy_unit") is not None:
        raise BismarckError("the local protocol has no columns, and privacy_unit names one", "leave it out")
    if dict(options).get("project_dim") is not None:
        raise BismarckError("the local protocol has no project_dim", "let providers prepare their rows themselves")
    if dict(options).get("scale") == "quantile":
        raise BismarckError("the local protocol has no rows to measure quantiles of", "give scale as numbers")
    if dict(options).get("adjacency", "replace") != "replace":
        raise BismarckError("local privacy hides which row a provider has", "leave out the option adjacency")
    setting = Banco().setting(Spec.create("banco", loss, epsilon, delta, dict(options)), 1, d)
    return setting, calibrate(_sensitivity(setting), epsilon, delta, setting.width, setting.lipschitz)


def _sensitivity(setting: Setting) -> float:
    return setting.jump * (1 + 1e-6)


def _bet(setting: Setting, noise: Noise) -> Bet:
    if noise.mechanism == "gaussian":
        return Bet.gaussian(setting.lipschitz, noise.scale)
    return Bet.knorm(setting.lipschitz, noise.scale, setting.width)


def _packed(learner: Learner) -> dict[str, Any]:
    packed = learner.to_json()
    del packed["bet"]
    return packed


def _learner(state: dict[str, Any], setting: Setting) -> Learner:
    return Learner.from_json({**state["learner"], "bet": asdict(_bet(setting, _plan(_key(state))[1]))})


def _checked(state: Any) -> tuple[Setting, Noise]:
    """The plan of a state, or a refusal: nothing of a state is trusted to have the right shape."""
    if not _well_formed(state):
        raise BismarckError("model_state is not a state of this protocol", "make one with dp_local_start")
    setting, noise = _plan(_key(state))
    learner = state["learner"]
    vectors = all(_numbers(learner.get(name), setting.width) for name in ("q", "w", "total"))
    if not vectors or not all(_numbers([learner.get(name)], 1) for name in ("t", "x", "y", "squares")):
        raise BismarckError("the state's learner is malformed", "use the state as dp_local_round returns it")
    return setting, noise


def _well_formed(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and state.get("format") == FORMAT
        and isinstance(state.get("loss"), str)
        and isinstance(state.get("d"), int)
        and 1 <= state["d"] <= MOST_FEATURES
        and all(_numbers([state.get(name)], 1) for name in ("epsilon", "delta"))
        and isinstance(state.get("gradients"), int)
        and isinstance(state.get("options"), dict)
        and all(_simple(value) for value in state["options"].values())
        and isinstance(state.get("learner"), dict)
    )


def _simple(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, list) and _numbers(value, len(value)))


def _numbers(values: Any, length: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == length
        and all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values)
    )
