"""What is loaded is what is read back, bit for bit; what cannot is refused without telling values."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bismarck_dp.controller import loaders, readers
from bismarck_dp.controller.embedded import Cluster
from bismarck_dp.controller.loaders import load, parse_name, quote_ident, quote_name
from bismarck_dp.errors import BismarckError

SECRET = "s3cr3t"


@pytest.fixture(scope="module")
def engine() -> Iterator[sa.Engine]:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        os.chmod(home, 0o755)
        files = Path(home, "extension")
        files.mkdir()
        (files / "probe.control").write_text("default_version = '1.0'\n")
        (files / "probe--1.0.sql").write_text("SELECT 1;\n")
        with Cluster(Path(home, "cluster"), durable=False, extension=files) as cluster:
            engine = sa.create_engine(cluster.url())
            yield engine
            engine.dispose()


@pytest.fixture
def connection(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection whose tables vanish with the test."""
    with engine.connect() as connection:
        connection.begin()
        yield connection
        connection.rollback()


def read(connection: sa.Connection, table: str, code: str = "d") -> tuple[list[int], list[bytes], list[bytes]]:
    """ids, and the bytes of y and of each row of x, by a reader that shares nothing with the writer."""
    out = io.BytesIO()
    cursor: Any = connection.connection.cursor()
    cursor.copy_expert(f"COPY (SELECT id, y, x FROM {table} ORDER BY id) TO STDOUT (FORMAT binary)", out)
    data = memoryview(out.getvalue())[19:]
    ids, labels, rows = [], [], []
    size = struct.calcsize(code)
    while bytes(data[:2]) != b"\xff\xff":
        fields, _, number, _, label, length, ndim, nulls, oid, dim, lower = struct.unpack_from(">hiqi8siiiiii", data)
        assert (fields, ndim, nulls, lower) == (3, 1, 0, 1)
        assert oid == {"f": 700, "d": 701}[code]
        start = struct.calcsize(">hiqi8siiiiii")
        items = data[start : start + length - 20]
        assert len(items) == dim * (size + 4)
        ids.append(number)
        labels.append(bytes(label))
        rows.append(b"".join(bytes(items[at + 4 : at + 4 + size]) for at in range(0, len(items), size + 4)))
        data = data[start + length - 20 :]
    return ids, labels, rows


def wire(rows: Any, code: str = "d") -> list[bytes]:
    return [np.asarray(row).astype(f">{code}").tobytes() for row in rows]


def expect(connection: sa.Connection, table: str, y: Any, x: Any, code: str = "d") -> None:
    ids, labels, rows = read(connection, table, code)
    assert ids == list(range(1, len(x) + 1))
    assert labels == wire(y)
    assert rows == wire(x, code)


def written(tmp_path: Path, text: str, zipped: bool = False) -> Path:
    """A file whose name says nothing about what is in it."""
    path = tmp_path / "rows.dat"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


# arrays


@pytest.mark.parametrize(
    ("dtype", "element", "code"),
    [("f4", None, "f"), ("f8", None, "d"), ("f8", "float4", "f"), ("f4", "float8", "d"), ("i8", None, "d")],
)
def test_array_round_trip(connection: sa.Connection, dtype: str, element: str | None, code: str) -> None:
    x = (np.random.default_rng(1).normal(size=(37, 5)) * 100).astype(dtype)
    y = np.arange(37) % 2 == 0
    assert load(connection, "t", x, y, dtype=element) == 37
    expect(connection, "t", y, x, code)


BITS = st.tuples(st.integers(1, 5), st.integers(1, 7)).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.uint64, shape, elements=st.integers(0, 2**64 - 1)),
        hnp.arrays(np.uint64, shape[0], elements=st.integers(0, 2**64 - 1)),
    )
)
FLOATS = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=8),
    elements=st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True),
)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(bits=BITS, narrow=st.booleans())
def test_every_bit_of_every_float_survives(connection: sa.Connection, bits: Any, narrow: bool) -> None:
    x, y = bits[0].view(np.float32 if narrow else np.float64), bits[1].view(np.float64)
    load(connection, "t", x, y, replace=True)
    _, labels, rows = read(connection, "t", "f" if narrow else "d")
    assert labels == [value.byteswap().tobytes() for value in y]
    assert rows == [row.byteswap().tobytes() for row in x]


@QUICK
@given(x=FLOATS)
def test_csv_and_libsvm_keep_every_number(connection: sa.Connection, tmp_path: Path, x: Any) -> None:
    y = np.arange(len(x)) - 0.5
    lines = [",".join(map(repr, [float(label), *map(float, row)])) for label, row in zip(y, x)]
    load(connection, "c", written(tmp_path, "\n".join(lines)), replace=True, header=False)
    items = [[f"{j}:{float(v)!r}" for j, v in enumerate(row, 1)] for row in x]
    lines = [" ".join([repr(float(label)), *row]) for label, row in zip(y, items)]
    load(connection, "l", written(tmp_path, "\n".join(lines)), replace=True)
    plain = np.where(np.isnan(x), np.nan, x)  # text has one NaN only
    expect(connection, "c", y, plain)
    expect(connection, "l", y, plain)


def test_many_chunks(connection: sa.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "CHUNK", 1000)
    x, y = np.arange(3003.0).reshape(1001, 3), np.arange(1001.0)
    assert load(connection, "t", x, y) == 1001
    expect(connection, "t", y, x)


def test_strided_and_masked_arrays(connection: sa.Connection) -> None:
    x = np.arange(24.0).reshape(4, 6)
    load(connection, "a", x.T[::2], [1, 2, 3])
    expect(connection, "a", [1, 2, 3], x.T[::2])
    load(connection, "b", np.ma.masked_greater(x, 22), [1, 2, 3, 4])
    expect(connection, "b", [1, 2, 3, 4], np.where(x > 22, np.nan, x))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1.0, 2.0], [1, 2], "2-D"),
        (np.zeros((0, 3)), [], "2-D"),
        (np.zeros((3, 0)), [1, 2, 3], "2-D"),
        (np.zeros((3, 2)), [1, 2], "3 rows"),
        (np.zeros((2, 2)), [[1], [2]], "shape"),
        (np.zeros((2, 2)), None, "labels are missing"),
        (np.zeros((2, 2), complex), [1, 2], "complex"),
        (np.array([[1, None]], object), [1], "object"),
        ([[1, 2], [3]], [1, 2], "ragged"),
        (np.zeros((2, 2)), ["a", "b"], "labels holds"),
    ],
)
def test_arrays_refused(connection: sa.Connection, x: Any, y: Any, message: str) -> None:
    with pytest.raises(BismarckError, match=message):
        load(connection, "t", x, y)


def test_a_finite_number_never_becomes_infinite(connection: sa.Connection) -> None:
    load(connection, "fine", [[np.inf, 1e30]], [1], dtype="float4")
    with pytest.raises(BismarckError, match=r"row 2, feature 1.*float4.*float8"):
        load(connection, "t", [[1.0], [1e300]], [1, 2], dtype="float4")


# CSV

CSV = "1,0.5,-2\n0,1e-3,inf\n1,,NA\n-1,nan,4\n"
Y = [1, 0, 1, -1]
X = [[0.5, -2], [1e-3, np.inf], [np.nan, np.nan], [np.nan, 4]]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        CSV,
        CSV.rstrip("\n"),
        CSV.replace("\n", "\r\n"),
        "\ufeff" + CSV,
        "\n" + CSV.replace("\n", "\n  \n"),
        CSV.replace(",", " ,\t"),
        CSV.replace(",", ";"),
        CSV.replace(",", "\t"),
        '"1","0.5","-2"\n' + CSV.partition("\n")[2],
        "label,a,b\n" + CSV,
        '\nlabel,"a, or so",b\n' + CSV,
    ],
)
def test_csv_dialects(connection: sa.Connection, tmp_path: Path, text: str, zipped: bool) -> None:
    assert load(connection, "t", written(tmp_path, text, zipped)) == 4
    expect(connection, "t", Y, X)


@pytest.mark.parametrize("label", [2, -1, "b"])
def test_csv_label_elsewhere(connection: sa.Connection, tmp_path: Path, label: int | str) -> None:
    load(connection, "t", written(tmp_path, "l,a,b\n1,2,3\n4,5,6\n"), label_column=label)
    expect(connection, "t", [3, 6], [[1, 2], [4, 5]])
    load(connection, "m", written(tmp_path, "l,a,b\n1,2,3\n4,5,6\n"), label_column="a")
    expect(connection, "m", [2, 5], [[1, 3], [4, 6]])


def test_csv_header_by_order(connection: sa.Connection, tmp_path: Path) -> None:
    path = written(tmp_path, "1,2\n3,4\n")
    assert load(connection, "a", path, header=True) == 1
    assert load(connection, "b", path, header=False) == 2
    with pytest.raises(BismarckError, match="line 1, column 1"):
        load(connection, "c", written(tmp_path, "l,a\n1,2\n"), header=False)


def test_files_in_small_blocks(connection: sa.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines and numbers cut by the edge of a block are put together again, and still counted right."""
    monkeypatch.setattr(readers, "BLOCK", 7)
    x, y = np.arange(400.0).reshape(100, 4) * 1.25, np.arange(100.0)
    lines = [",".join(map(str, [label, *row])) for label, row in zip(y, x)]
    load(connection, "c", written(tmp_path, "\n".join(["y,a,b,c,d", *lines])))
    expect(connection, "c", y, x)
    lines = [" ".join([str(label), *(f"{j}:{v}" for j, v in enumerate(row, 1))]) for label, row in zip(y, x)]
    load(connection, "l", written(tmp_path, "\n".join(lines)))
    expect(connection, "l", y, x)
    lines[70] += f" 5:{SECRET}"
    with pytest.raises(BismarckError, match="line 71, column 6"):
        load(connection, "e", written(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (f"1,2\n3,{SECRET}\n", {}, "line 2, column 2: not a number"),
        (f"a,b\n\n1,2\n{SECRET},4\n", {}, "line 4, column 1: not a number"),
        ("1,2\n3,4,5\n6\n", {}, "line 2: 3 columns, where the first line has 2"),
        ("1,2,3\n3,4\n1,2,3,4\n", {}, "line 2: 2 columns"),
        ('1,2\n"3,4\n', {}, "line 2, column 1"),
        ("1,2 3\n", {"header": False}, "line 1, column 2"),
        ("1,0x10\n", {"header": False}, "line 1, column 2"),
        ("a,b\n", {}, "no rows"),
        ("", {}, "no rows"),
        ("\n\n", {}, "no rows"),
        ("a\n1\n", {}, "one column"),
        ("1 2 3\n", {}, "one column"),
        ("1,2\n", {"label_column": 2}, "no column 2"),
        ("1,2\n", {"label_column": -3}, "no column -3"),
        ("1,2\n", {"label_column": "y"}, "no header"),
        ("label,b\n1,2\n", {"label_column": "lable"}, "nearest is 'label'"),
        ("1,2\n", {"n_features": 2}, "1 features, not 2"),
        ("1,2\n", {"format": "arff"}, "'arff'"),
        ("1,2\n", {"dtype": "int"}, "'int'"),
        ("1,2\n", {"labels": [1]}, "its own labels"),
    ],
)
def test_csv_refused(connection: sa.Connection, tmp_path: Path, text: str, options: Any, message: str) -> None:
    with pytest.raises(BismarckError, match=message) as caught:
        load(connection, "t", written(tmp_path, text), **options)
    assert SECRET not in str(caught.value).replace(str(tmp_path), "")


def test_files_that_cannot_be_read(connection: sa.Connection, tmp_path: Path) -> None:
    with pytest.raises(BismarckError, match="not a file"):
        load(connection, "t", tmp_path)
    with pytest.raises(BismarckError, match=r"nowhere\.csv is not a file"):
        load(connection, "t", str(tmp_path / "nowhere.csv"))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(CSV.encode() * 10)[:-9])
    with pytest.raises(BismarckError, match=r"cut\.gz cannot be read"):
        load(connection, "t", cut)


# LIBSVM

LIBSVM = "# made up\n+1 1:0.5 3:-2 # first\n\n-1\n+1 2:1e-3 4:nan\n0 4:7"
LIBSVM_Y = [1, -1, 1, 0]
LIBSVM_X = [[0.5, 0, -2, 0], [0, 0, 0, 0], [0, 1e-3, 0, np.nan], [0, 0, 0, 7]]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("text", [LIBSVM, LIBSVM.replace("\n", "\r\n"), LIBSVM.replace(" ", "  \t") + "\n"])
def test_libsvm(connection: sa.Connection, tmp_path: Path, text: str, zipped: bool) -> None:
    assert load(connection, "t", written(tmp_path, text, zipped)) == 4
    expect(connection, "t", LIBSVM_Y, LIBSVM_X)


def test_libsvm_width_and_chunks(connection: sa.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "DENSE", 100)
    load(connection, "t", written(tmp_path, LIBSVM), n_features=6)
    expect(connection, "t", LIBSVM_Y, np.pad(np.array(LIBSVM_X), ((0, 0), (0, 2))))


def test_a_bare_label_first_is_libsvm(connection: sa.Connection, tmp_path: Path) -> None:
    load(connection, "t", written(tmp_path, "1\n2 1:5\n"))
    expect(connection, "t", [1, 2], [[0], [5]])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (f"1 1:2\n1 1:{SECRET}\n", {}, "line 2, column 2: not index:value"),
        (f"1 1:2\n{SECRET} 1:2\n", {}, "line 2, column 1: the label is not a number"),
        ("1 1:2\n1 1\n", {}, "line 2, column 2"),
        ("1 1:2\n1 1: 2:\n", {}, "line 2, column 2"),
        ("1 1:2\n1 1:2:3\n", {}, "line 2, column 2"),
        ("1 1:2\n1 0:2\n", {}, "line 2, column 2: indices must rise from 1"),
        ("1 1:2 2:3\n1 2:2 1:2\n", {}, "line 2, column 3: indices must rise"),
        ("1 2:2 2:2\n", {}, "line 1, column 3: indices must rise"),
        ("1 1:2 7:2\n", {"n_features": 6}, "line 1, column 3.*at most 6"),
        ("1 nan:2 3:4\n", {"format": "libsvm"}, "line 1, column 2"),
        ("1 1.5:2 3:4\n", {"format": "libsvm"}, "line 1, column 2"),
        ("1\n2\n", {}, "no feature"),
        ("# nothing\n", {"format": "libsvm", "n_features": 2}, "no rows"),
        ("1 999999999999:2\n", {}, "do not fit"),
    ],
)
def test_libsvm_refused(connection: sa.Connection, tmp_path: Path, text: str, options: Any, message: str) -> None:
    with pytest.raises(BismarckError, match=message) as caught:
        load(connection, "t", written(tmp_path, text), **options)
    assert SECRET not in str(caught.value).replace(str(tmp_path), "")


# names and tables


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("rows", None, "rows"),
        ("Rows", None, "Rows"),
        ("s.t", "s", "t"),
        ('Weird "table', None, 'Weird "table'),
        ('"a.b"', None, "a.b"),
        ('"a""b".c', 'a"b', "c"),
        ('s."T.x"', "s", "T.x"),
        ("per%cent", None, "per%cent"),
    ],
)
def test_names(connection: sa.Connection, text: str, schema: str | None, name: str) -> None:
    assert parse_name(text) == (schema, name)
    if schema:
        connection.exec_driver_sql(f"CREATE SCHEMA {quote_ident(schema)}")
    load(connection, text, [[1.0]], [1])
    expect(connection, quote_name(text), [1], [[1]])
    found = "SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE relname = :name"
    assert connection.execute(sa.text(found), {"name": name}).scalars().all() == [schema or "public"]


@pytest.mark.parametrize("text", ["", ".t", "s.", "a.b.c", '"a', '"a"b', '""', "x" * 64, "nul\0"])
def test_names_refused(text: str) -> None:
    with pytest.raises(BismarckError):
        parse_name(text)


def test_existing_tables(connection: sa.Connection) -> None:
    load(connection, "t", [[1.0]], [1])
    with pytest.raises(BismarckError, match="exists already"):
        load(connection, "t", [[2.0]], [2])
    load(connection, "t", [[3.0, 4.0]], [3], replace=True)
    expect(connection, "t", [3], [[3, 4]])
    connection.exec_driver_sql("CREATE VIEW v AS SELECT * FROM t")
    with pytest.raises(BismarckError, match="not a plain table"):
        load(connection, "v", [[1.0]], [1], replace=True)
    with pytest.raises(BismarckError, match=r"cannot be made.*depend"):
        load(connection, "t", [[1.0]], [1], replace=True)


def test_missing_schema(connection: sa.Connection) -> None:
    with pytest.raises(BismarckError, match="schema nowhere"):
        load(connection, "nowhere.t", [[1.0]], [1])


def test_id_is_the_primary_key(connection: sa.Connection) -> None:
    load(connection, "t", np.ones((3, 2), np.float32), [1, 2, 3])
    assert sa.inspect(connection).get_pk_constraint("t")["constrained_columns"] == ["id"]
    types = connection.exec_driver_sql("SELECT pg_typeof(id)::text, pg_typeof(y)::text, pg_typeof(x)::text FROM t")
    assert tuple(types.all()[0]) == ("bigint", "double precision", "real[]")


def test_the_caller_commits(engine: sa.Engine) -> None:
    """Also on a connection where nothing was said before, so that SQLAlchemy knows of no transaction."""
    with engine.connect() as connection:
        load(connection, "kept", [[1.0]], [1])
        connection.commit()
    with engine.connect() as connection:
        load(connection, "gone", [[1.0]], [1])
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["kept"]
        connection.exec_driver_sql("DROP TABLE kept")
        connection.commit()


def test_a_failed_load_leaves_no_table_and_no_value_in_the_log(engine: sa.Engine, tmp_path: Path) -> None:
    path = written(tmp_path, "1,2\n" * 1000 + f"3,{SECRET}\n")
    with pytest.raises(BismarckError, match="line 1001"), engine.begin() as connection:
        load(connection, "half", path)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == []
        log = connection.exec_driver_sql("SELECT pg_read_file(current_setting('data_directory') || '/../server.log')")
        text = str(log.scalar())
    assert "COPY from stdin failed" in text
    assert "not a number" not in text  # our messages stay on this side
    assert SECRET not in text


def test_autocommit_is_refused(engine: sa.Engine) -> None:
    loose = engine.execution_options(isolation_level="AUTOCOMMIT")
    with loose.connect() as connection, pytest.raises(BismarckError, match="commits by itself"):
        load(connection, "t", [[1.0]], [1])


# progress


def test_progress(connection: sa.Connection, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(connection, "quiet", written(tmp_path, CSV))
    assert capfd.readouterr() == ("", "")
    load(connection, "loud", written(tmp_path, CSV), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "4 rows" in err
