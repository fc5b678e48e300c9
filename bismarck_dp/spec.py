"""What a user asks for, checked before anything is touched: every word is known, every number is in its range."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import BismarckError


def unknown(kind: str, name: object, known: Iterable[str]) -> BismarckError:
    """A refusal that names the nearest valid word."""
    names = sorted(known)
    word = _short(str(name))
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"? ' if near else ""
    return BismarckError(f'unknown {kind} "{word}"', f"{hint}valid: {', '.join(names)}")


def _short(text: str) -> str:
    """What a message shows of what it was given; comparing or printing megabytes would only cost time and memory."""
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…"


def _as_float(value: Any) -> float:
    """A number as a float, NaN for anything else; a whole number beyond all floats is infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def refuse(name: str, value: object, wanted: str) -> BismarckError:
    number = _as_float(value)
    shown = _short(json.dumps(value, default=str)) if math.isnan(number) else f"{number:.15g}"
    return BismarckError(f"{name} is {shown}", f"it must be {wanted}")


LONGEST_SHOWN = 60

SMALLEST, LARGEST = 1e-15, 1e15
"""No bound of a row, a label or a weight is outside; products of a few of them stay far from zero and infinity."""


def _number(low: float = SMALLEST, high: float = LARGEST, zero: bool = False) -> Callable[[str, Any], float]:
    wanted = f"{'0, or ' if zero else ''}a number from {low:g} to {high:g}"

    def parse(name: str, value: Any) -> float:
        number = _as_float(value)
        if not low <= number <= high and not (zero and number == 0):
            raise refuse(name, value, wanted)
        return number

    return parse


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    def parse(name: str, value: Any) -> int:
        number = _as_float(value)
        if not low <= number <= high or number != int(number):
            raise refuse(name, value, f"a whole number from {low} to {high}")
        return int(value)

    return parse


def _word(*words: str) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise unknown(name, value, words)
        return str(value)

    return parse


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def _column(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise refuse(name, value, "a column's name")
    return value


MOST_UNIT_ROWS = 10_000

STEP_WORDS = ("constant", "decreasing", "sqrt")


def _step(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        return _word(*STEP_WORDS)(name, value)
    return _number(high=sys.float_info.max)(name, value)


def _scale(name: str, value: Any) -> float | str | list[float] | dict[str, float]:
    """Bounds: one for all features, one for each, or by column; or a word for where they come from."""
    if isinstance(value, str):
        return _word("quantile")(name, value)
    if isinstance(value, Mapping):
        if not value:
            raise refuse(name, value, "a bound for each column")
        return {str(column): _number()(f'{name} of column "{column}"', bound) for column, bound in value.items()}
    return _constants(name, value)


def _range(name: str, value: Any) -> list[float]:
    wanted = "two numbers from 1e-15 to 1e15, the smaller first"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refuse(name, value, wanted)
    low, high = (_number()(name, number) for number in value)
    if not low < high:
        raise refuse(name, value, wanted)
    return [low, high]


def _constants(name: str, value: Any) -> float | list[float]:
    """One number for all features, or one for each."""
    parse = _number()
    if isinstance(value, str):
        raise refuse(name, value, "a number, or a list with one for each feature")
    if not isinstance(value, (list, tuple)):
        return parse(name, value)
    if not value:
        raise refuse(name, value, "a number, or one for each feature")
    return [parse(name, number) for number in value]


MOST_CLASSES = 1000


def _classes(name: str, value: Any) -> list[float]:
    """The labels; a number k stands for 0 to k - 1."""
    wanted = f"from 2 to {MOST_CLASSES} different numbers, of two the negative class first; or how many, counted from 0"
    if not isinstance(value, (list, tuple)):
        number = _as_float(value)
        if not 2 <= number <= MOST_CLASSES or number != int(number):
            raise refuse(name, value, wanted)
        return [float(label) for label in range(int(number))]
    labels = [_number(-LARGEST, zero=True)(name, number) for number in value]
    if not 2 <= len(labels) <= MOST_CLASSES or len(set(labels)) < len(labels):
        raise refuse(name, value, wanted)
    return labels


MOST_CATEGORIES = 100_000


def _categories(name: str, value: Any) -> dict[str, list[Any]]:
    """For each column its values, all words or all numbers."""
    wanted = 'an object with a list of words or numbers for each column, for example {"colour": ["red", "green"]}'
    if not isinstance(value, Mapping) or not value:
        raise refuse(name, value, wanted)
    return {str(column): _category(f'{name} of column "{column}"', values) for column, values in value.items()}


def _category(name: str, values: Any) -> list[Any]:
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= MOST_CATEGORIES:
        raise refuse(name, values, f"a list of 1 to {MOST_CATEGORIES} words or numbers")
    numbers = [float(value) if isinstance(value, bool) else _as_float(value) for value in values]
    words = all(isinstance(value, str) for value in values)
    if not words and not all(math.isfinite(number) for number in numbers):
        raise refuse(name, values, "a list of words, or of finite numbers, not of both")
    found = list(values) if words else numbers
    if len(set(found)) < len(found):
        raise BismarckError(f"{name} has a value twice", "list each value once")
    return found


@dataclass(frozen=True)
class Option:
    parse: Callable[[str, Any], Any]
    default: Any
    help: str
    trials: tuple[Any, ...]
    """values that every algorithm which takes the option is tested with; None leaves it out"""


OPTIONS: dict[str, Option] = {
    "lambda": Option(_number(zero=True), 0.0, "L2 regularisation", (None, 0.05, 1.0)),
    "radius": Option(_number(), math.inf, "project the weights onto a ball of this radius", (None, 0.3)),
    "epochs": Option(_whole(1, 1_000_000), 10, "passes over the data", (1, 3)),
    "batch_size": Option(
        _whole(1, 2**31 - 1), None, "rows per update; default 50, or all rows of a smaller table", (None, 1, 4, 7)
    ),
    "step": Option(
        _step, None, "a constant step, or constant, decreasing, sqrt", (None, 0.05, "constant", "decreasing", "sqrt")
    ),
    "average": Option(
        _word("none", "all", "suffix"),
        None,
        "release the last iterate (none), the mean of all, or of the last pass",
        (None, "all", "suffix"),
    ),
    "shuffle": Option(
        _word("once", "each_pass"),
        "once",
        "one random order for all passes, or a fresh one for each",
        (None, "each_pass"),
    ),
    "clip": Option(
        _number(),
        None,
        "squared loss: the largest residual that counts; noise on sums: the largest norm of what a row adds",
        (None, 0.5),
    ),
    "fit_intercept": Option(
        _flag, False, "append a constant feature, clipped and regularised like the others", (None, True)
    ),
    "huber_h": Option(_number(1e-9), 0.1, "half-width of the Huber loss's curve", (None, 0.5)),
    "adjacency": Option(
        _word("replace", "zero-out"), "replace", "what neighbouring tables differ in", (None, "zero-out")
    ),
    "privacy_unit": Option(
        _column, None, "the column that says whose a row is: the guarantee is for all its rows, not for one", (None,)
    ),
    "unit_rows": Option(
        _whole(1, MOST_UNIT_ROWS), 1, "rows of a privacy unit that count at most, chosen at random", (None,)
    ),
    "feature_bound": Option(_number(), 1.0, "rows are scaled down to this L2 norm", (None, 2.0)),
    "scale": Option(
        _scale,
        None,
        "divide features by these bounds, and cut them there: one number, one for each, or by column; or quantile",
        (None, 0.5, "quantile"),
    ),
    "quantile": Option(
        _number(0.01, 1.0), 0.95, "scale by quantile: the share of rows that a bound leaves as they are", (None,)
    ),
    "private_scale": Option(
        _number(1e-6, 0.99), 0.1, "scale by quantile: share of epsilon spent on measuring the bounds", (None, 0.3)
    ),
    "scale_range": Option(
        _range, [2.0**-10, 2.0**20], "scale by quantile: bounds are powers of two from here to there", (None,)
    ),
    "normalize": Option(_flag, False, "scale every row to the norm feature_bound, short ones up to it", (None, True)),
    "categories": Option(
        _categories, None, "columns to be coded as zeros and ones, each with the list of its values", (None,)
    ),
    "project_dim": Option(
        _whole(1, 100_000), None, "project features to so many numbers, by a random matrix", (None, 2)
    ),
    "project_seed": Option(
        _whole(0, 2**53), None, "what the projection's matrix is made from; public, and drawn unless given", (None,)
    ),
    "label_bound": Option(_number(), None, "squared loss: labels are cut to this magnitude", (None, 2.0)),
    "classes": Option(
        _classes,
        None,
        "the labels, of two the negative first, or how many there are from 0 on; without it they are found by looking",
        (None, [1, 2]),
    ),
    "multiclass": Option(
        _word("softmax", "ovr"),
        None,
        "more than two classes: one joint loss, or one against the rest for each",
        (None,),
    ),
    "workers": Option(_whole(1, 256), 1, "partitions trained side by side and averaged after each pass", (None, 3)),
    "tolerance": Option(
        _number(),
        None,
        "stop when the loss improves by less than this share, or, for scd, the duality gap is no more (not private)",
        (None, 0.1),
    ),
    "l1": Option(_number(zero=True), 0.0, "L1 regularisation: weights of little use become 0", (None, 0.02)),
    "box": Option(_number(), math.inf, "keep every weight between minus this and this", (None, 0.3)),
    "iterations": Option(
        _whole(1, 1_000_000),
        None,
        "cd: rounds of coordinate steps; gcd: passes, each with one choice; dpscd_primal: blocks",
        (1, 3),
    ),
    "inner_iterations": Option(
        _whole(1, 10**9),
        None,
        "coordinate steps in a round, by default one for each weight; dpscd_primal: coordinates of a block, 1",
        (None, 2),
    ),
    "rule": Option(_word("gs-s", "gs-r", "gs-q"), "gs-r", "what makes a coordinate the best", (None, "gs-s", "gs-q")),
    "top": Option(_whole(1, 1_000_000), 1, "gcd: coordinates chosen and moved in each pass", (None, 2)),
    "constants": Option(
        _constants, None, "smoothness along each weight, M_j: a number for all, or a list", (None, 0.2)
    ),
    "private_constants": Option(
        _number(1e-6, 0.99), None, "share of epsilon spent on measuring the constants M_j", (None, 0.2)
    ),
    "seed": Option(
        _whole(-(2**53), 2**53), None, "for tests by the table's owner: a known seed voids privacy", (None,)
    ),
}


ROWS = frozenset(
    {
        "fit_intercept",
        "feature_bound",
        "scale",
        "normalize",
        "quantile",
        "private_scale",
        "scale_range",
        "categories",
        "project_dim",
        "project_seed",
        "label_bound",
        "classes",
        "privacy_unit",
        "unit_rows",
        "seed",
    }
)
"""What becomes of rows, and who may know the randomness: options of all solvers."""

COORDINATE = frozenset({"l1", "box", "iterations", "inner_iterations", "rule", "top", "constants", "private_constants"})
"""Options of solvers that move one weight at a time."""


def parse_options(options: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """All options with their defaults; an unknown one, or one that the algorithm does not take, is refused by name."""
    names = set(allowed)
    parsed = {name: option.default for name, option in OPTIONS.items()}
    if {"lambda", "lambda_"} <= set(options):
        raise BismarckError("lambda is given twice, as lambda and as lambda_", "give it once")
    for key, value in options.items():
        name = "lambda" if key == "lambda_" else key
        if name in OPTIONS and name not in names:
            raise BismarckError(f'unknown option "{key}" for this algorithm', f"valid: {', '.join(sorted(names))}")
        if name not in names:
            raise unknown("option", key, names)
        if value is not None:
            parsed[name] = OPTIONS[name].parse(name, value)
    return parsed


def _real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise refuse(name, value, "a number") from None


def check_epsilon(value: Any) -> float:
    epsilon = _real("epsilon", value)
    if not SMALLEST <= epsilon <= LARGEST:
        hint = f"it must be a finite number above 0, from {SMALLEST:g} to {LARGEST:g}, for example 1"
        raise BismarckError(f"epsilon is {epsilon:g}", hint)
    return epsilon


SMALLEST_DELTA = 1e-300


def check_delta(value: Any) -> float:
    delta = _real("delta", value)
    if not (delta == 0 or SMALLEST_DELTA <= delta < 1):
        raise BismarckError(f"delta is {delta:g}", "it must be 0, or a number from 1e-300 to below 1, for example 1e-6")
    return delta


@dataclass(frozen=True)
class Spec:
    """algorithm, loss, privacy and options; `Spec.create` checks them all."""

    algorithm: str
    loss: str
    epsilon: float | None
    delta: float
    options: dict[str, Any] = field(hash=False)

    @classmethod
    def create(
        cls,
        algorithm: str = "bolton",
        loss: str = "logistic",
        epsilon: float | None = None,
        delta: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> Spec:
        from .losses import LOSSES
        from .solvers import SOLVERS
        from .units import check_unit

        if algorithm not in SOLVERS:
            raise unknown("algorithm", algorithm, SOLVERS)
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        solver = SOLVERS[algorithm]
        if options is not None and not isinstance(options, Mapping):
            raise refuse("options", options, 'an object, for example {"epochs": 10}')
        parsed = parse_options(options or {}, solver.options)
        if solver.private:
            if epsilon is None:
                raise BismarckError(
                    f'algorithm "{algorithm}" is private and needs an epsilon',
                    "pass epsilon, for example 1, or a non-private algorithm",
                )
            epsilon = check_epsilon(epsilon)
        elif epsilon is not None:
            raise BismarckError(
                f'algorithm "{algorithm}" is not private', "pass NULL as epsilon, or a private algorithm such as bolton"
            )
        check_unit(parsed, algorithm, solver.samples)
        return cls(algorithm, loss, epsilon, check_delta(0.0 if delta is None else delta), parsed)
