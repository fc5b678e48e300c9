"""Rows from NumPy, CSV and LIBSVM into a table, by binary COPY.

Every source (readers.py) becomes chunks (labels, features) of numbers; a chunk becomes bytes by one assignment into a
NumPy record array laid out as COPY wants it. No Python loop runs over values.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Union, cast

import numpy as np
import psycopg2
from sqlalchemy.engine import Connection

from bismarck_dp.errors import BismarckError

from .readers import Floats, Rows, array_rows, file_rows

PathLike = Union[str, "os.PathLike[str]"]
Report = Callable[[int, int], None]

CHUNK = 8 << 20  # bytes of COPY data built at once
NAME_BYTES = 63  # PostgreSQL would cut a longer name
ELEMENTS = {"float4": (700, ">f4"), "float8": (701, ">f8")}


def load(
    connection: Connection,
    table: str,
    source: Any,
    labels: Any = None,
    *,
    format: str | None = None,  # noqa: A002 (the word users know, and COPY's own)
    header: bool | None = None,
    label_column: int | str = 0,
    n_features: int | None = None,
    dtype: str | None = None,
    replace: bool = False,
    progress: bool | None = None,
) -> int:
    """Make table(id, y, x) of `source` and return its number of rows; ids count from 1 in the source's order.

    `source` is a 2-D array-like, with `labels`, or the path of a CSV or LIBSVM file, gzipped or not. Missing
    values (empty, NA) are kept as NaN. `dtype` is the type of x's elements, "float4" or "float8": by default
    float4 where that loses nothing, such as for float32 arrays, and float8 otherwise and for files.

    Runs in the connection's transaction and leaves the commit to the caller: a failed load leaves no table.
    """
    if isinstance(source, (str, os.PathLike)):
        if labels is not None:
            raise BismarckError("a file brings its own labels", "say which by label_column, and pass no labels")
        rows = file_rows(Path(source), format, header, label_column, n_features)
    else:
        rows = array_rows(source, labels, n_features)
    packer = _Packer(rows.width, _element(dtype, rows.element))
    with _meter(rows.total, progress) as report:
        return _copy(_Session(connection), table, replace, packer, rows, report)


def parse_name(table: str) -> tuple[str | None, str]:
    """Schema (or None) and name, as SQL splits them, except that unquoted parts keep their case.

    A part that starts with a double quote ends at the next single one; inside, a doubled quote means itself.
    """
    parts, rest = [], table
    while True:
        part, rest = _quoted_part(table, rest) if rest.startswith('"') else _plain_part(rest)
        parts.append(part)
        if not rest:
            break
        rest = rest[1:]
    for part in parts:
        if not part or "\0" in part or len(part.encode()) > NAME_BYTES:
            raise BismarckError(f"{table!r} is no name of a table", f"each part has 1 to {NAME_BYTES} bytes")
    if len(parts) > 2:
        raise BismarckError(f"{table!r} has too many dots", 'name or schema.name, and "a.b" for a dot in a name')
    return (parts[0] if len(parts) == 2 else None), parts[-1]


def _quoted_part(table: str, text: str) -> tuple[str, str]:
    match = re.match(r'"((?:[^"]|"")*)"(?=\.|\Z)', text)
    if match is None:
        raise BismarckError(f"the quotes of {table!r} do not pair up", "write a quote inside quotes twice")
    return match.group(1).replace('""', '"'), text[match.end() :]


def _plain_part(text: str) -> tuple[str, str]:
    part, dot, rest = text.partition(".")
    return part, dot + rest


def quote_ident(name: str) -> str:
    """A name as SQL reads it back unchanged."""
    return '"' + name.replace('"', '""') + '"'


def quote_name(table: str) -> str:
    """A table's name, schema-qualified or not, ready to be put into SQL."""
    return ".".join(quote_ident(part) for part in parse_name(table) if part is not None)


# ---------------------------------------------------------------------------------------------- the table


class _Session:
    """The psycopg2 side of the caller's connection, inside the caller's transaction."""

    def __init__(self, connection: Connection) -> None:
        # SQLAlchemy does not see what the driver is told, and would not commit what it did not begin.
        if not connection.in_transaction():
            connection.begin()
        driver = cast(Any, connection.connection)
        if driver.autocommit:
            raise BismarckError(
                "the connection commits by itself, so a failed load would leave half a table",
                "a connection without isolation level AUTOCOMMIT",
            )
        self.cursor = driver.cursor()

    def run(self, sql: str, *values: object) -> Any:
        """The first column of the first row, if any. Without values a % in `sql` is only a %."""
        self.cursor.execute(sql, values or None)
        row = self.cursor.fetchone() if self.cursor.description else None
        return row[0] if row else None


def _copy(session: _Session, table: str, replace: bool, packer: _Packer, rows: Rows, report: Report) -> int:
    name = _create(session, table, replace, packer.element)
    stream = _Stream(packer.pack(rows, report))
    try:
        session.cursor.copy_expert(f"COPY {name} FROM STDIN (FORMAT binary)", stream, CHUNK)
    except Exception:
        if stream.failure is not None:
            raise stream.failure from None
        raise
    session.run(f"ALTER TABLE {name} ADD PRIMARY KEY (id)")
    return packer.count


def _create(session: _Session, table: str, replace: bool, element: str) -> str:
    """Create the table and return its full name, so that the search path has its say only once."""
    given, name = parse_name(table)
    schema = given or session.run("SELECT current_schema()")
    if schema is None or session.run("SELECT 1 FROM pg_namespace WHERE nspname = %s", schema) is None:
        raise BismarckError(f"schema {given or ''} for table {table} does not exist", "CREATE SCHEMA makes one")
    full = f"{quote_ident(schema)}.{quote_ident(name)}"
    kind = session.run("SELECT relkind FROM pg_class WHERE oid = to_regclass(%s)", full)
    if kind is not None and not replace:
        raise BismarckError(f"table {table} exists already", "replace=True, or another name")
    if kind not in (None, "r"):
        raise BismarckError(f"{table} is not a plain table and will not be replaced", "another name")
    try:
        if kind is not None:
            session.run(f"DROP TABLE {full}")
        session.run(f"CREATE TABLE {full} (id bigint, y float8, x {element}[])")
    except psycopg2.Error as error:
        hint = error.diag.message_hint or "another name, or a user who may"
        raise BismarckError(f"table {table} cannot be made: {error.diag.message_primary}", hint) from error
    return full


class _Stream:
    """A file for COPY to read, fed by a generator; keeps the generator's error, which psycopg2 would drop."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces
        self.current = memoryview(b"")
        self.failure: Exception | None = None

    def read(self, size: int) -> bytes:
        if not self.current:
            try:
                self.current = memoryview(next(self.pieces, b""))
            except Exception as error:
                self.failure = error
                # psycopg2 sends the text of what is raised here to the server, which logs it.
                raise RuntimeError("the source failed") from None
        taken, self.current = bytes(self.current[:size]), self.current[size:]
        return taken


class _Packer:
    """Rows as binary COPY wants them: one NumPy record per row, its constant fields written once."""

    def __init__(self, width: int, element: str) -> None:
        oid, code = ELEMENTS[element]
        item = np.dtype([("size", ">i4"), ("value", code)])
        head = [("fields", ">i2"), ("id_size", ">i4"), ("id", ">i8"), ("y_size", ">i4"), ("y", ">f8")]
        array = [(name, ">i4") for name in ("x_size", "ndim", "flags", "oid", "dim", "lower")]
        record = np.dtype([*head, *array, ("x", item, (width,))])
        constants = {"fields": 3, "id_size": 8, "y_size": 8, "x_size": 20 + width * item.itemsize}
        constants.update(ndim=1, flags=0, oid=oid, dim=width, lower=1)
        self.element, self.count = element, 0
        self.records = np.zeros(max(1, CHUNK // record.itemsize), record)
        for name, value in constants.items():
            self.records[name] = value
        self.records["x"]["size"] = item["value"].itemsize

    def pack(self, rows: Rows, report: Report) -> Iterator[bytes]:
        yield b"PGCOPY\n\xff\r\n\0" + bytes(8)
        for y, x in rows.chunks:
            for start in range(0, len(y), len(self.records)):
                stop = start + len(self.records)
                yield self._pack(y[start:stop], x[start:stop])
                report(rows.position() if rows.position else self.count, self.count)
        yield b"\xff\xff"

    def _pack(self, y: Floats, x: Floats) -> bytes:
        records = self.records[: len(y)]
        records["id"] = np.arange(self.count + 1, self.count + 1 + len(y))
        records["y"] = y
        with np.errstate(over="ignore", invalid="ignore"):
            records["x"]["value"] = x
        if x.dtype.itemsize > records["x"]["value"].dtype.itemsize:
            self._check_range(x, records["x"]["value"])
        self.count += len(y)
        return records.tobytes()

    def _check_range(self, x: Floats, stored: Floats) -> None:
        """A finite value must not become infinite on its way into the table."""
        lost = np.argwhere(np.isinf(stored) & np.isfinite(x))
        if lost.size:
            row, column = lost[0] + (self.count + 1, 1)
            message = f"row {row}, feature {column}: a number too large for {self.element}"
            raise BismarckError(message, 'dtype="float8"')


def _element(dtype: str | None, natural: str) -> str:
    if dtype is not None and dtype not in ELEMENTS:
        raise BismarckError(f"dtype {dtype!r} is unknown", 'dtype is "float4" or "float8"')
    return dtype or natural


# ---------------------------------------------------------------------------------------------- progress


@contextlib.contextmanager
def _meter(total: int, progress: bool | None) -> Iterator[Report]:
    """report(done, rows) draws a bar on a terminal, or where asked to, and else does nothing."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda done, rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading"), BarColumn(), TextColumn("{task.fields[rows]}"), TimeRemainingColumn())
    begun = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=total, rows="")

        def report(done: int, rows: int) -> None:
            speed = rows / max(time.monotonic() - begun, 1e-9)
            bar.update(task, completed=done, rows=f"{rows:,} rows, {speed:,.0f} rows/s")

        yield report
