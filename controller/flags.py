"""Flags that commands share, and what their words mean: the database, a spec, columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Callable, TypeVar

import click

from bismarck_dp.spec import OPTIONS, Option

from .terminal import cell

Command = TypeVar("Command", bound=Callable[..., Any])

json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
data_flag = click.option("--data", metavar="DIRECTORY", help="Where the embedded database lies.")
url_flag = click.option(
    "--url", envvar="BISMARCK_DP_URL", help="The database; without it, an embedded one.  [BISMARCK_DP_URL]"
)


def database_options(command: Command) -> Command:
    return url_flag(data_flag(json_flag(command)))


def value_of(text: str) -> Any:
    """What an option's text means: an object, a list, a truth value, a number, or the word itself."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"this is no JSON: {error}") from error
    if "," in text:
        return [value_of(part) for part in text.split(",")]
    truth = {"true": True, "false": False}
    if text.strip().lower() in truth:
        return truth[text.strip().lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def flag_of(name: str, option: Option) -> Callable[[Command], Command]:
    """The command-line flag of an option of dp_train, under the same name with dashes."""
    word = name.replace("_", "-")
    text = f"{option.help[0].upper()}{option.help[1:]}."
    if isinstance(option.default, bool):
        return click.option(f"--{word}/--no-{word}", name, default=None, help=text)
    default = "" if option.default in (None, math.inf) else f"  [default: {cell(option.default)}]"
    return click.option(f"--{word}", name, type=value_of, metavar="VALUE", help=f"{text}{default}")


def decorated(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for decorate in reversed(options):
        command = decorate(command)
    return command


def spec_options(command: Command) -> Command:
    """Privacy, algorithm, loss, and every option of dp_train."""
    words = (
        click.option("--epsilon", type=float, help="No default: privacy is always spelled out."),
        click.option("--delta", type=float, default=0.0, show_default=True),
        click.option("--algorithm", metavar="NAME", default="bolton", show_default=True),
        click.option("--loss", metavar="NAME", default="logistic", show_default=True),
    )
    return decorated(command, [*words, *(flag_of(name, option) for name, option in OPTIONS.items())])


def training_options(command: Command) -> Command:
    columns = (
        click.option("--model", metavar="NAME", help="Name to register the model under.  [default: SOURCE_1, ...]"),
        click.option("--label", metavar="COLUMN", default="y", show_default=True, help="The label's column."),
        click.option(
            "--features",
            metavar="COLUMN,...",
            default=("x",),
            multiple=True,
            show_default=True,
            help="One array column, or several numeric ones.",
        ),
    )
    return decorated(spec_options(command), columns)


def spec_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Algorithm, loss, privacy and those options that were given, as Python's functions take them."""
    chosen = {name: given[name] for name in ("epsilon", "delta", "algorithm", "loss")}
    return {**chosen, **{name: given[name] for name in OPTIONS if given[name] is not None}}


def columns_of(given: Mapping[str, Any]) -> dict[str, Any]:
    features = [name.strip() for item in given["features"] for name in item.split(",")]
    return {"label": given["label"], "features": features}
