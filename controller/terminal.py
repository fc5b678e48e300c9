"""What the commands show and what they read: tables and facts for people, JSON for programs, rows to predict.

Answers go to stdout, progress to stderr: a bar on a terminal, lines elsewhere, nothing beside JSON.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import Array

if TYPE_CHECKING:
    from .train import Progress

PLAIN_WIDTH = 120  # of tables that go to a file or a pipe
ROWS_AT_ONCE = 10_000  # predicted together
MISSING = {"", "na"}


@contextmanager
def show_progress(word: str, quiet: bool) -> Iterator[Progress | None]:
    """A bar on a terminal, a line for each step otherwise, and nothing for programs."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        parts = (TextColumn(word), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*parts, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(word, total=None)
            yield lambda done, planned: bar.update(task, completed=done, total=planned)
    else:
        yield lambda done, planned: click.echo(f"{word} {done} of {planned}", err=True)


def _plain(value: Any) -> Any:
    """A value JSON can hold: arrays as lists, and null for what is no number."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    click.echo(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _console() -> Console:
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def print_facts(facts: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), cell(value))
    _console().print(table)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with numbers to the right; names are folded rather than cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key, value in rows[0].items():
        number = value is None or isinstance(value, (int, float))
        table.add_column(key.replace("_", " "), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row.values()))
    _console().print(table)


def exact(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return repr(value).removesuffix(".0")


def _text(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BismarckError(f"{file} cannot be read: {reason}", "a whole CSV file that you may read") from error
    return content.decode("utf-8-sig", errors="replace")


def feature_rows(file: str, header: bool | None) -> Iterator[Array]:
    """The rows of a CSV file, some at a time. Messages say where it is wrong and never show a value."""
    lines = [entry for entry in enumerate(io.StringIO(_text(file), newline=None), 1) if entry[1].strip()]
    if not lines:
        raise BismarckError(f"{file} has no rows", "a line of features for each row to predict")
    delimiter = next((mark for mark in ",;\t" if mark in lines[0][1]), ",")
    records = list(csv.reader((line for _, line in lines), delimiter=delimiter))
    width = len(records[0])
    if header is None:
        header = not all(_is_number(cell) for cell in records[0])
    numbered = islice(zip((number for number, _ in lines), records), int(header), None)
    parsed = (_numbers(f"{file}, line {number}", cells, width) for number, cells in numbered)
    while chunk := list(islice(parsed, ROWS_AT_ONCE)):
        yield np.array(chunk)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell.strip().lower() in MISSING
    return True


def _numbers(where: str, cells: list[str], width: int) -> list[float]:
    if len(cells) != width:
        message = f"{where}: {len(cells)} columns, where the first line has {width}"
        raise BismarckError(message, "as many on every line")
    wrong = next((column for column, cell in enumerate(cells, 1) if not _is_number(cell)), None)
    if wrong is not None:
        raise BismarckError(f"{where}, column {wrong}: not a number", "a missing value is empty or NA")
    return [math.nan if cell.strip().lower() in MISSING else float(cell) for cell in cells]
