"""A database with the extension, from Python: load, train, predict, evaluate, explain, models, as in SQL."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import sqlalchemy
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, DBAPIError

from bismarck_dp.errors import BismarckError
from bismarck_dp.losses import Array
from bismarck_dp.model import Model
from bismarck_dp.scaling import measures
from bismarck_dp.spec import Spec
from bismarck_dp.tuning import make_candidates
from bismarck_dp.version import __version__

from . import queries
from .embedded import Cluster
from .engines import Request, SqlEngine
from .loaders import load, parse_name, quote_ident
from .train import Progress, explain, train
from .tune import Tuning, tune

if TYPE_CHECKING:
    from .audit import Audit


BUDGET = ("epsilon_total", "epsilon_spent", "delta_total", "delta_spent", "releases")
"""What dp_budget returns, in its order."""


class Database:
    """A context manager around a SQLAlchemy engine; an embedded cluster that it started is stopped with it."""

    def __init__(self, engine: Engine, cluster: Cluster | None = None) -> None:
        self.engine = engine
        self.cluster = cluster

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Database:
        """A copy is the same database; copies of an estimator share theirs."""
        return self

    def __reduce__(self) -> NoReturn:
        raise BismarckError(
            "a Database cannot be pickled: its connections stay in this process",
            "give an estimator the URL instead, or set_params(database=None) once it is fitted",
        )

    def close(self) -> None:
        self.engine.dispose()
        if self.cluster is not None and self.cluster.started_here:
            self.cluster.stop()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One transaction; what the server refuses is raised as a BismarckError, without values or SQL text."""
        try:
            with self.engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise translated(error) from error

    def load(self, table: str, source: Any, labels: Any = None, **how: Any) -> int:
        """Rows from arrays or a file into table(id, y, x); see loaders.load."""
        with self.transaction() as connection:
            return load(connection, table, source, labels, **how)

    def train(
        self,
        source: str,
        *,
        model: str | None = None,
        label: str = "y",
        features: str | Sequence[str] = "x",
        epsilon: float | None = None,
        delta: float = 0.0,
        algorithm: str = "bolton",
        loss: str = "logistic",
        progress: Progress | None = None,
        **options: Any,
    ) -> Model:
        """Trains a model on a table. Whoever may not drive the steps from outside calls dp_train in the server
        instead.
        """
        options = plain(options)
        spec = Spec.create(algorithm, loss, epsilon, delta, options)
        with self.transaction() as connection:
            name = _free_name(connection, source) if model is None else model
            request = Request(_oid(connection, source), name, label, _columns(features), spec)
            if not _may_drive(connection):
                return Model.from_row(_in_server(connection, "train", request, options))
            quiet = {} if progress is None else {"progress": progress}
            return Model.from_row(train(SqlEngine(connection), request, **quiet))

    def tune(
        self,
        source: str,
        *,
        grid: Any,
        model: str | None = None,
        label: str = "y",
        features: str | Sequence[str] = "x",
        epsilon: float | None = None,
        delta: float = 0.0,
        algorithm: str = "bolton",
        loss: str = "logistic",
        method: str = "portions",
        public_source: str | None = None,
        trials: float = 10.0,
        progress: Progress | None = None,
        **options: Any,
    ) -> Model:
        """Trains the candidates of a grid and releases one of them; epsilon and delta cover everything."""
        grid, options = plain(grid), plain(options)
        candidates = make_candidates(grid, algorithm, loss, epsilon, delta, options)
        with self.transaction() as connection:
            name = _free_name(connection, source) if model is None else model
            request = Request(_oid(connection, source), name, label, _columns(features), candidates[0].spec)
            public = None if public_source is None else _oid(connection, public_source)
            tuning = Tuning.create(request, candidates, method, public, trials)
            # Bounds that a candidate measures come back to whoever drives the steps: not for those that lose.
            if not _may_drive(connection) or any(measures(candidate.spec) for candidate in candidates):
                fields = {"grid": grid, "method": method, "public_source": public, "trials": trials}
                words = {"algorithm": algorithm, "loss": loss}
                return Model.from_row(_in_server(connection, "tune", request, options, {**words, **fields}))
            quiet = {} if progress is None else {"progress": progress}
            return Model.from_row(tune(SqlEngine(connection), tuning, **quiet))

    def explain(
        self,
        source: str,
        *,
        label: str = "y",
        features: str | Sequence[str] = "x",
        epsilon: float | None = None,
        delta: float = 0.0,
        algorithm: str = "bolton",
        loss: str = "logistic",
        **options: Any,
    ) -> dict[str, Any]:
        """The plan for a table; reads its n and d, counts classes unless they are named, and nothing else."""
        options = plain(options)
        spec = Spec.create(algorithm, loss, epsilon, delta, options)
        with self.transaction() as connection:
            request = Request(_oid(connection, source), "", label, _columns(features), spec)
            if not _may_drive(connection):
                return _explain_in_server(connection, request, options)
            return explain(SqlEngine(connection), request)

    def models(self) -> list[Model]:
        """The models this user may use, oldest first."""
        with self.transaction() as connection:
            rows = connection.exec_driver_sql(
                "SELECT pg_catalog.to_jsonb(m)::text FROM bismarck_dp.models AS m ORDER BY id"
            )
            return [Model.from_row(json.loads(row[0])) for row in rows]

    def model(self, name: str) -> Model:
        for model in self.models():
            if model.name == name:
                return model
        raise BismarckError(f'model "{name}" does not exist', "models() lists those you may use")

    def predict(self, model: str | Model, x: npt.ArrayLike) -> Array:
        """Classes or values for rows held here; `dp_predict` does the same for rows in the database."""
        return (model if isinstance(model, Model) else self.model(model)).predict(np.asarray(x, dtype=np.float64))

    def evaluate(
        self,
        model: str | Model,
        source: str,
        *,
        label: str | None = None,
        features: str | Sequence[str] | None = None,
        epsilon: float | None = None,
        delta: float = 0.0,
        **options: Any,
    ) -> dict[str, float | None]:
        """What a model is worth on a table, by metric: exactly, or, with epsilon, with noise that is paid for. Columns
        are the model's own unless given.
        """
        fields = {
            "model": model.name if isinstance(model, Model) else model,
            "label": label,
            "features": None if features is None else _columns(features),
            "epsilon": _as_text(epsilon),
            "delta": _as_text(delta),
            "options": plain(options),
        }
        with self.transaction() as connection:
            answer = _served(connection, "evaluate", {**fields, "source": _oid(connection, source)})
        for note in answer["notes"]:
            warnings.warn(note, stacklevel=2)
        return {row["metric"]: None if row["value"] is None else float(row["value"]) for row in answer["metrics"]}

    def protect(self, table: str, epsilon: float, delta: float, **options: Any) -> dict[str, Any]:
        """Sets the budget of a table's whole life, by its owner; returns what holds from here on."""
        fields = {"epsilon": _as_text(epsilon), "delta": _as_text(delta), "options": plain(options)}
        answer = self._of_table("protect", table, **fields)
        for note in answer["notes"]:
            warnings.warn(note, stacklevel=2)
        return {row["key"]: answer["said"][row["key"]] for row in answer["protected"]}

    def unprotect(self, table: str) -> None:
        """Nothing is enforced from here on; the ledger remembers."""
        self._of_table("unprotect", table)

    def budget(self, table: str) -> dict[str, Any]:
        """What a protected table may spend, and has spent."""
        found = self._of_table("budget", table)
        return {name: found[name] for name in BUDGET}

    def ledger(self) -> list[dict[str, Any]]:
        """Entries that this user made, and those of this user's tables, oldest first."""
        with self.transaction() as connection:
            rows = connection.exec_driver_sql(
                "SELECT pg_catalog.to_jsonb(e)::text FROM bismarck_dp.ledger AS e ORDER BY id"
            )
            return [json.loads(row[0]) for row in rows]

    def _of_table(self, verb: str, table: str, **fields: Any) -> Any:
        with self.transaction() as connection:
            return _served(connection, verb, {"source": _oid(connection, table), **fields})

    def audit(self, *, plot: str | Path | None = None, **spec: Any) -> Audit:
        """Attacks a spec on neighbouring tables of our own, through dp_train; see audit.audit. `plot` names a PNG."""
        from . import plots
        from .audit import audit

        if plot is not None:
            plots.check(plot)
        found = audit(self, **spec)
        if plot is not None:
            plots.trade_off(found, plot)
        return found

    def forget(self, model: str) -> None:
        with self.transaction() as connection:
            connection.exec_driver_sql(
                "SELECT bismarck_dp.call('forget', pg_catalog.jsonb_build_object('model', %(model)s::text))",
                {"model": model},
            )


def connect(url: str) -> Database:
    engine = _engine(url)
    database = Database(engine)
    try:
        with database.transaction() as connection:
            _check_extension(connection)
    except BaseException:
        engine.dispose()
        raise
    return database


def embedded(path: str | None = None, **how: Any) -> Database:
    """Starts the cluster below `path` (or attaches to it), with the extension created, of the files' version."""
    cluster = Cluster(path, **how)
    cluster.start()
    database = Database(sqlalchemy.create_engine(cluster.url()), cluster)
    try:
        with database.transaction() as connection:
            connection.exec_driver_sql("CREATE EXTENSION IF NOT EXISTS bismarck_dp CASCADE")
            connection.exec_driver_sql("ALTER EXTENSION bismarck_dp UPDATE")
    except BaseException:
        database.close()
        raise
    return database


def _engine(url: str) -> Engine:
    """An engine with our driver named: what plain postgresql:// means has changed between versions of SQLAlchemy."""
    try:
        parsed = sqlalchemy.engine.make_url(url)
        plain = parsed.drivername in ("postgres", "postgresql")
        return sqlalchemy.create_engine(parsed.set(drivername="postgresql+psycopg2") if plain else parsed)
    except (ArgumentError, ImportError):
        # Their texts may show the password.
        raise BismarckError(
            "the URL is not one of a database this can open", "write postgresql://user:password@host/database", "08001"
        ) from None


def _check_extension(connection: Connection) -> None:
    found = connection.exec_driver_sql("SELECT 1 FROM pg_catalog.pg_extension WHERE extname = 'bismarck_dp'")
    if found.first() is None:
        raise BismarckError(
            "this database has no extension bismarck_dp", "a superuser runs CREATE EXTENSION bismarck_dp CASCADE"
        )


def translated(error: DBAPIError) -> BismarckError:
    diagnostics = getattr(error.orig, "diag", None)
    message = getattr(diagnostics, "message_primary", None) or str(error.orig).strip()
    hint = getattr(diagnostics, "message_hint", None) or ""
    return BismarckError(message, hint, getattr(error.orig, "pgcode", None) or "08000")


def plain(value: Any) -> Any:
    """NumPy's numbers and arrays, and ranges, as Python's own; also within lists and objects."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple, range)) else value


def _columns(features: str | Sequence[str]) -> list[str]:
    return [features] if isinstance(features, str) else list(features)


def _oid(connection: Connection, table: str) -> int:
    if not isinstance(table, str):
        raise BismarckError("the table's name is no text", 'write it as SQL would, for example "public.patients"')
    name = ".".join(quote_ident(part) for part in parse_name(table) if part is not None)
    row = connection.exec_driver_sql("SELECT pg_catalog.to_regclass(%(name)s)::oid", {"name": name}).one()
    if row[0] is None:
        raise BismarckError(f'table "{table}" does not exist', "check its name and schema", "42P01")
    return int(row[0])


def _free_name(connection: Connection, source: str) -> str:
    """The source's name with the first free number behind."""
    stem = parse_name(source)[1]
    rows = connection.exec_driver_sql("SELECT name FROM bismarck_dp.models")
    taken = {row[0] for row in rows}
    return next(name for number in range(1, len(taken) + 2) if (name := f"{stem}_{number}") not in taken)


def _may_drive(connection: Connection) -> bool:
    """Driving the steps from outside takes a superuser with the extension owner's rights, and objects of this very
    version.
    """
    row = connection.exec_driver_sql(
        "SELECT pg_catalog.pg_has_role(extowner, 'USAGE')"
        " AND pg_catalog.current_setting('is_superuser')::pg_catalog.bool, extversion FROM pg_catalog.pg_extension"
        " WHERE extname = 'bismarck_dp'"
    ).one()
    return bool(row[0]) and row[1] == __version__


def _call(connection: Connection, verb: str, request: Request, options: dict[str, Any], more: Mapping[str, Any]) -> Any:
    fields = {
        "source": request.source,
        "model": request.model,
        "label": request.label,
        "features": request.features,
        "epsilon": request.spec.epsilon,
        "delta": request.spec.delta,
        "algorithm": request.spec.algorithm,
        "loss": request.spec.loss,
        "options": options,
        **more,
    }
    return _served(connection, verb, fields)


def _served(connection: Connection, verb: str, fields: dict[str, Any]) -> Any:
    row = connection.exec_driver_sql(
        "SELECT bismarck_dp.call(%(verb)s, %(request)s::jsonb)::text",
        {"verb": verb, "request": queries.as_json(fields)},
    ).one()
    return json.loads(row[0])


def _as_text(number: float | None) -> str | None:
    """JSON has no infinity; what is no number at all is refused by the server."""
    return None if number is None else str(number)


def _in_server(
    connection: Connection,
    verb: str,
    request: Request,
    options: dict[str, Any],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    model = _call(connection, verb, request, options, more)
    if request.spec.epsilon is not None and model["note"]:
        warnings.warn(model["note"], stacklevel=3)
    return model


def _explain_in_server(connection: Connection, request: Request, options: dict[str, Any]) -> dict[str, Any]:
    return dict(_call(connection, "explain", request, options, {})["plan"])
