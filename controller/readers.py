"""Sources of rows: arrays, CSV and LIBSVM files, each as chunks (labels, features) of numbers.

Files are read in blocks and parsed by NumPy, block by block; only where a block is wrong does a Python loop look for
the place. Messages name file, line and column, never the value: rows may be private, and messages end up in logs.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import re
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Callable, NoReturn, cast

import numpy as np
import numpy.typing as npt

from bismarck_dp.errors import BismarckError

Floats = npt.NDArray[np.floating[Any]]
Chunk = tuple[Floats, Floats]

BLOCK = 4 << 20  # bytes of text parsed at once
DENSE = 8 << 20  # bytes of sparse rows spread out at once
MAX_FEATURES = 1 << 26  # a field of COPY has less than 1 GB, and an element takes up to 12 bytes in it

NUMBER = rb"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|(?i:nan|inf(?:inity)?))"
IS_NUMBER = re.compile(NUMBER)
VALUE = rb"[ \t]*(?:" + NUMBER + rb"|(?i:NA))?[ \t]*"
IS_CELL = re.compile(VALUE + rb'|[ \t]*"' + VALUE + rb'"[ \t]*')


@dataclass
class Rows:
    """A source: `chunks` of (y, x), x being `width` wide, and how far we are: `position()` of `total`."""

    width: int
    chunks: Iterator[Chunk]
    element: str
    total: int
    position: Callable[[], int] | None = None  # by default, the rows copied so far

    def __post_init__(self) -> None:
        if self.width > MAX_FEATURES:
            raise BismarckError(f"{self.width} features do not fit a row", f"at most {MAX_FEATURES} do")


def array_rows(source: Any, labels: Any, n_features: int | None) -> Rows:
    if labels is None:
        raise BismarckError("labels are missing", "load(table, X, y), or the path of a file")
    x, y = _numbers(source, "X"), _numbers(labels, "labels")
    if x.ndim != 2 or 0 in x.shape:
        shape = f"X must be 2-D with at least one row and one column, and has shape {x.shape}"
        raise BismarckError(shape, "X.reshape(-1, 1) makes one column of a list")
    if y.shape != x.shape[:1]:
        raise BismarckError(f"X has {len(x)} rows and labels has shape {y.shape}", f"labels of shape ({len(x)},)")
    if n_features not in (None, x.shape[1]):
        raise BismarckError(f"X has {x.shape[1]} columns, and n_features is {n_features}", "leave n_features out")
    element = "float4" if np.can_cast(x.dtype, np.float32) else "float8"
    return Rows(x.shape[1], iter([(y, x)]), element, len(x))


def _numbers(values: Any, what: str) -> Floats:
    """An array of real numbers; those a masked array hides are NaN."""
    try:
        array = np.ma.filled(values.astype(float), np.nan) if np.ma.isMaskedArray(values) else np.asarray(values)
    except ValueError as error:
        raise BismarckError(f"{what} is ragged", "rows of equal length") from error
    if array.dtype.kind not in "biuf":
        raise BismarckError(f"{what} holds {array.dtype}, not real numbers", f"{what}.astype(float), or .toarray()")
    return cast(Floats, array)


def file_rows(
    path: Path, kind: str | None, header: bool | None, label_column: int | str, n_features: int | None
) -> Rows:
    if kind not in (None, "csv", "libsvm"):
        raise BismarckError(f"format {kind!r} is unknown", 'format is "csv" or "libsvm"')
    if not path.is_file():
        raise BismarckError(f"{path} is not a file", "the path of a CSV or LIBSVM file")
    text = _Text(path)
    if kind is None:
        kind = "libsvm" if _is_libsvm(text.first_line(comments=False)[1]) else "csv"
    if kind == "libsvm":
        width = n_features or _largest_index(text)
        return Rows(width, _libsvm_chunks(text, width), "float8", text.size, text.position)
    layout = _csv_layout(text, header, label_column)
    if n_features not in (None, layout.columns - 1):
        raise BismarckError(f"{path} has {layout.columns - 1} features, not {n_features}", "leave n_features out")
    return Rows(layout.columns - 1, _csv_chunks(text, layout), "float8", text.size, text.position)


class _Text:
    """A text file in blocks of whole lines, unzipped on the way if its first bytes say so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.raw: IO[bytes] | None = None

    def position(self) -> int:
        """Bytes of the file itself, zipped or not, read so far."""
        return self.raw.tell() if self.raw and not self.raw.closed else self.size

    def fault(self, line: int, what: str, hint: str = "") -> BismarckError:
        return BismarckError(f"{self.path}, line {line}{what}", hint)

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """(number of the first line, whole lines each ending in a newline)."""
        line = 1
        try:
            for block in self._cut():
                block = block.replace(b"\r\n", b"\n")
                yield line, block[3:] if line == 1 and block.startswith(b"\xef\xbb\xbf") else block
                line += block.count(b"\n")
        except (OSError, EOFError, zlib.error) as error:
            raise BismarckError(f"{self.path} cannot be read: {error}", "a whole file you may read") from error

    def _cut(self) -> Iterator[bytes]:
        rest = b""
        with open(self.path, "rb") as self.raw:
            zipped = self.raw.peek(2)[:2] == b"\x1f\x8b"
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=self.raw)) if zipped else self.raw
            while piece := stream.read(BLOCK):
                head, newline, tail = piece.rpartition(b"\n")
                if newline:
                    yield rest + head + newline
                    rest = b""
                rest += tail
        if rest:
            yield rest + b"\n"

    def first_line(self, comments: bool = True) -> tuple[int, bytes]:
        """The first line that is not blank, nor (without `comments`) a comment, and its number."""
        for start, block in self.blocks():
            for number, line in enumerate(block.split(b"\n"), start):
                if line.strip() and (comments or not line.lstrip().startswith(b"#")):
                    return number, line
        raise BismarckError(f"{self.path} has no rows", "a file with at least one")


def _parse(text: bytes) -> Floats | None:
    """Numbers between commas, or None if there is anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy before 2.3 warns where it now raises
        try:
            return np.fromstring(text, sep=",")
        except (ValueError, DeprecationWarning):
            return None


# --------------------------------------------------------------------------------------------------- CSV


@dataclass(frozen=True)
class _Layout:
    """What the first line tells about a CSV file; `skip` lines come before the data."""

    delimiter: bytes
    columns: int
    label: int
    skip: int


def _csv_layout(text: _Text, header: bool | None, label_column: int | str) -> _Layout:
    number, line = text.first_line()
    delimiter = next((mark for mark in (b",", b";", b"\t") if mark in line), b",")
    cells = line.split(delimiter)
    if header is None:
        header = not all(IS_CELL.fullmatch(cell) for cell in cells)
    names = next(csv.reader([line.decode(errors="replace")], delimiter=delimiter.decode())) if header else None
    columns = len(names or cells)
    if columns < 2:
        hint = "columns separated by comma, semicolon or tab; LIBSVM needs format='libsvm'"
        raise text.fault(number, ": one column, where a label and at least one feature are needed", hint)
    return _Layout(delimiter, columns, _label(text, label_column, names, columns), number if header else 0)


def _label(text: _Text, column: int | str, names: list[str] | None, columns: int) -> int:
    if isinstance(column, str):
        return _named(text, column, [name.strip() for name in names or []])
    if not -columns <= column < columns:
        raise BismarckError(f"{text.path} has no column {column}", f"it has {columns}, counted from 0")
    return column % columns


def _named(text: _Text, column: str, names: list[str]) -> int:
    if not names:
        raise BismarckError(f"{text.path} has no header to find column {column!r} in", "its number, from 0")
    if column not in names:
        near = difflib.get_close_matches(column, names, 1, 0) or names
        raise BismarckError(f"{text.path} has no column {column!r}", f"the nearest is {near[0]!r}")
    return names.index(column)


def _csv_chunks(text: _Text, layout: _Layout) -> Iterator[Chunk]:
    empty = True
    for line, block in text.blocks():
        if line <= layout.skip:
            block = block.split(b"\n", layout.skip - line + 1)[-1]
            line = layout.skip + 1
        if not block.strip(b"\n"):
            continue
        values = _csv_values(block, layout)
        if values is None:
            values = _csv_values(_tidied(block, layout.delimiter), layout)
        if values is None:
            _explain_csv(text, layout, line, block)
        empty = empty and len(values) == 0
        yield values[:, layout.label], _without(values, layout.label)
    if empty:
        raise BismarckError(f"{text.path} has a header and no rows", "header=False if the first line is data")


def _without(values: Floats, column: int) -> Floats:
    """All columns but one; a view where that one is at an end."""
    if column == 0:
        return values[:, 1:]
    return values[:, :-1] if column == values.shape[1] - 1 else np.delete(values, column, axis=1)


def _csv_values(block: bytes, layout: _Layout) -> Floats | None:
    """The block's numbers as (lines, columns), or None if it is not plain numbers, as many on each line."""
    raw = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    marks = np.searchsorted(np.flatnonzero(raw == ord(layout.delimiter)), ends)
    if np.any(np.diff(marks, prepend=0) != layout.columns - 1):
        return None
    values = _parse(block.translate(bytes.maketrans(b"\n" + layout.delimiter, b",,"))[:-1])
    if values is None or values.size != ends.size * layout.columns:
        return None
    return values.reshape(ends.size, layout.columns)


def _tidied(block: bytes, delimiter: bytes) -> bytes:
    """The same block with blank lines and quotes gone, and nan for empty and NA."""
    mark, space = re.escape(delimiter), b"[ ]*" if delimiter == b"\t" else b"[ \t]*"
    block = re.sub(rb"\n(?:" + space + rb"\n)+", b"\n", b"\n" + block)
    block = re.sub(rb'"([^"\n' + mark + rb']*)"', rb"\1", block)
    missing = rb"(?<=[\n" + mark + rb"])" + space + rb"(?i:NA)?" + space + rb"(?=[\n" + mark + rb"])"
    block = re.sub(missing, b"nan", block)
    return block[1:]


def _explain_csv(text: _Text, layout: _Layout, start: int, block: bytes) -> NoReturn:
    for number, line in enumerate(block.split(b"\n")[:-1], start):
        cells = line.split(layout.delimiter)
        if not line.strip():
            continue
        if len(cells) != layout.columns:
            what = f": {len(cells)} columns, where the first line has {layout.columns}"
            raise text.fault(number, what, "as many on every line")
        for column, cell in enumerate(cells, 1):
            if not IS_CELL.fullmatch(cell):
                raise text.fault(number, f", column {column}: not a number", "a missing value is empty or NA")
    raise text.fault(start, ": unreadable from here on", "plain numbers")


# ------------------------------------------------------------------------------------------------ LIBSVM


def _uncommented(block: bytes) -> bytes:
    return re.sub(rb"#[^\n]*", b"", block) if b"#" in block else block


def _is_libsvm(line: bytes) -> bool:
    """A label, then index:value for what is not zero, which may be nothing."""
    label, *items = _uncommented(line).split()
    return all(re.match(rb"\d+:", item) for item in items) and IS_NUMBER.fullmatch(label) is not None


def _largest_index(text: _Text) -> int:
    """By the last item of each line: those before it are smaller, or the line is refused later."""
    largest = 0
    for _, block in text.blocks():
        for line in _uncommented(block).split(b"\n"):
            index = line.rpartition(b":")[0].rsplit(None, 1)[-1:]
            if index and index[0].isdigit():
                largest = max(largest, int(index[0]))
    if largest == 0:
        raise BismarckError(f"{text.path} has no feature", "n_features, if all its rows are zero")
    return largest


@dataclass(frozen=True)
class _Sparse:
    """Rows without their zeros: row i has items bounds[i] to bounds[i+1] of `columns` and `values`."""

    labels: Floats
    bounds: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    values: Floats

    def dense(self, start: int, stop: int, width: int) -> Chunk:
        bounds = self.bounds[start : stop + 1]
        items = slice(bounds[0], bounds[-1])
        x = np.zeros((len(bounds) - 1, width))
        x[np.repeat(np.arange(len(x)), np.diff(bounds)), self.columns[items]] = self.values[items]
        return self.labels[start:stop], x


def _libsvm_chunks(text: _Text, width: int) -> Iterator[Chunk]:
    step = max(1, DENSE // (8 * width))
    empty = True
    for line, block in text.blocks():
        sparse = _libsvm_values(_uncommented(block), width)
        if sparse is None:
            _explain_libsvm(text, width, line, block)
        for start in range(0, len(sparse.labels), step):
            empty = False
            yield sparse.dense(start, start + step, width)
    if empty:
        raise BismarckError(f"{text.path} has no rows", "a file with at least one")


def _libsvm_values(block: bytes, width: int) -> _Sparse | None:
    """The block's rows, or None if anything is wrong: a line is a label and items, an item has one colon."""
    raw = np.frombuffer(block, np.uint8)
    blank = raw <= ord(" ")
    starts = np.flatnonzero(~blank & np.concatenate([[True], blank[:-1]]))  # of labels and items
    is_label = np.diff(np.searchsorted(np.flatnonzero(raw == ord("\n")), starts), prepend=-1) != 0
    colons = np.searchsorted(starts, np.flatnonzero(raw == ord(":")), side="right") - 1
    if not np.array_equal(colons, np.flatnonzero(~is_label)):
        return None
    numbers = _parse(b",".join(block.replace(b":", b" ").split()))
    if numbers is None or numbers.size != starts.size + colons.size:
        return None
    labels = np.flatnonzero(is_label)
    before = labels - np.arange(labels.size)  # items before each label, of two numbers each
    items = np.delete(numbers, labels + before).reshape(-1, 2)
    bounds = np.append(before, colons.size)
    if not _in_order(items[:, 0], bounds, width):
        return None
    return _Sparse(numbers[labels + before], bounds, items[:, 0].astype(np.intp) - 1, items[:, 1])


def _in_order(index: Floats, bounds: npt.NDArray[np.intp], width: int) -> bool:
    """Indices must be whole, in range, and rise along each row."""
    rises = np.diff(index, prepend=0) > 0
    rises[bounds[bounds < rises.size]] = True  # the first of a row follows nothing
    return bool(np.all(rises & (index >= 1) & (index <= width) & (index == np.floor(index))))


def _explain_libsvm(text: _Text, width: int, start: int, block: bytes) -> NoReturn:
    for number, line in enumerate(_uncommented(block).split(b"\n"), start):
        previous = 0
        for column, token in enumerate(line.split(), 1):
            where = f", column {column}: "
            if column == 1:
                if not IS_NUMBER.fullmatch(token):
                    raise text.fault(number, where + "the label is not a number", "label index:value …")
                continue
            index, _, value = token.partition(b":")
            if not index.isdigit() or not IS_NUMBER.fullmatch(value):
                raise text.fault(number, where + "not index:value", "label index:value …")
            if not previous < int(index) <= width:
                raise text.fault(number, where + f"indices must rise from 1 to at most {width}", "see n_features")
            previous = int(index)
    raise text.fault(start, ": unreadable from here on", "label index:value …")
