"""The command line: the verbs of Python and SQL, for people at a terminal and, with --json, for programs.

What a command answers goes to stdout and everything else to stderr. The exit code is 0, 1 when a command failed, or 2
when it was not understood.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

import bismarck_dp
from bismarck_dp.errors import BismarckError
from bismarck_dp.evaluation import EVALUATION_OPTIONS
from bismarck_dp.model import Model

from .flags import (
    Command,
    columns_of,
    data_flag,
    database_options,
    decorated,
    flag_of,
    json_flag,
    spec_of,
    spec_options,
    training_options,
    url_flag,
    value_of,
)
from .terminal import exact, feature_rows, print_facts, print_json, print_rows, show_progress

if TYPE_CHECKING:
    from .database import Database

MOST_SHOWN = 20  # features of a support


class _Failure(click.ClickException):
    """A refusal on stderr: what is wrong, and what would work."""

    def __init__(self, error: BismarckError) -> None:
        super().__init__(error.message)
        self.hint = error.hint

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", file=file, err=True)


class _Commands(click.Group):
    """Commands that fail without a traceback, and clean up when they are asked to end."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _orderly_end(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a model's notes, which the answer shows
                return super().invoke(ctx)
        except BismarckError as error:
            raise _Failure(error) from error


@contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that a server we started is stopped. Whoever ignores them still does."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


# ------------------------------------------------------------------------------------------------ databases and models


@contextmanager
def _open(url: str | None, data: str | None) -> Iterator[Database]:
    """The database of --url, or the embedded one, which is stopped again if it did not run before."""
    from .database import connect, embedded

    if url and data:
        raise click.UsageError("--url (or BISMARCK_DP_URL) and --data name two databases: choose one")
    with connect(url) if url else embedded(data) as database:
        yield database


def _pick(model: Model, *names: str) -> dict[str, Any]:
    return {"model": model.name, **{name: getattr(model, name) for name in names}}


def _support(model: Model) -> str:
    """Features that count, from 0, or the first of them."""
    assert model.support is not None
    first = ", ".join(str(j) for j in model.support[:MOST_SHOWN])
    more = ", ..." if len(model.support) > MOST_SHOWN else ""
    return f"{len(model.support)} of {model.d} features: {first}{more}" if first else f"none of {model.d} features"


# ------------------------------------------------------------------------------------------------------------ commands


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(bismarck_dp.__version__, prog_name="bismarck-dp")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Differentially private model training inside PostgreSQL.

    Commands work on the database of --url or BISMARCK_DP_URL. Without either they use an embedded PostgreSQL: the one
    that `up` started, or one that runs only as long as the command.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@main.command()
@click.option("--rows", type=click.IntRange(min=100), default=20_000, show_default=True, help="Rows to train on.")
@url_flag
@json_flag
def demo(rows: int, url: str | None, as_json: bool) -> None:
    """Train private models on made-up rows and show what privacy costs.

    Without --url this happens in a PostgreSQL made for the occasion and removed afterwards. With it, what was made in
    that database is dropped again.

    \b
    Example:
      bismarck-dp demo --rows 50000
    """
    from .demo import run, temporary_database

    with _open(url, None) if url else temporary_database() as database, show_progress("model", as_json) as progress:
        outcome = run(database, rows, progress)
    if as_json:
        print_json(dataclasses.asdict(outcome))
        return
    shown = ("algorithm", "loss", "epsilon", "delta", "sensitivity", "noise_scale", "accuracy", "seconds")
    print_rows([{name: row[name] for name in shown} for row in outcome.trials])
    click.echo(f"Trained on {outcome.rows} rows; accuracy is that on {outcome.held_out} others. What was run:\n")
    for statement in outcome.sql:
        click.echo(f"{statement};")


@main.command()
@data_flag
@json_flag
def up(data: str | None, as_json: bool) -> None:
    """Start the embedded database and leave it running.

    \b
    Example:
      bismarck-dp up --data ./data
    """
    from .database import embedded

    database = embedded(data)
    database.engine.dispose()
    assert database.cluster is not None
    cluster = database.cluster
    if as_json:
        print_json({"url": cluster.url(), "path": str(cluster.path), "started": cluster.started_here})
        return
    click.echo(f"{'started' if cluster.started_here else 'runs already'}: {cluster.path}")
    click.echo(f"url: {cluster.url()}")


@main.command()
@data_flag
@json_flag
def down(data: str | None, as_json: bool) -> None:
    """Stop the embedded database; its data stay.

    \b
    Example:
      bismarck-dp down --data ./data
    """
    from .embedded import Cluster

    cluster = Cluster(data)
    ran = cluster.running
    cluster.stop()
    if as_json:
        print_json({"path": str(cluster.path), "stopped": ran})
        return
    click.echo(f"{'stopped' if ran else 'does not run'}: {cluster.path}")


def _column(text: str) -> int | str:
    """A column's number, counted from 0 or with a minus from the end, or its name."""
    try:
        return int(text)
    except ValueError:
        return text


@main.command()
@click.argument("table")
@click.argument("file")
@click.option(
    "--label-column",
    type=_column,
    metavar="N|NAME",
    default="0",
    show_default=True,
    help="The label's column in a CSV file: its number, -1 for the last, or its name.",
)
@click.option("--header/--no-header", default=None, help="Whether the first line holds names.  [default: look]")
@click.option("--format", "kind", type=click.Choice(["csv", "libsvm"]), help="The file's format.  [default: look]")
@click.option(
    "--n-features", type=click.IntRange(min=1), help="Features of a LIBSVM file.  [default: the largest index]"
)
@click.option("--dtype", type=click.Choice(["float4", "float8"]), help="Type of the features.")
@click.option("--replace", is_flag=True, help="Drop a table of that name first.")
@database_options
def load(
    table: str,
    file: str,
    label_column: int | str,
    header: bool | None,
    kind: str | None,
    n_features: int | None,
    dtype: str | None,
    replace: bool,
    url: str | None,
    data: str | None,
    as_json: bool,
) -> None:
    """Load a CSV or LIBSVM file, gzipped or not, as TABLE(id, y, x).

    \b
    Example:
      bismarck-dp load rows adult.csv.gz --label-column income
    """
    how = {"header": header, "label_column": label_column, "format": kind, "n_features": n_features}
    with _open(url, data) as database:
        rows = database.load(table, file, **how, dtype=dtype, replace=replace, progress=False if as_json else None)
    if as_json:
        print_json({"table": table, "rows": rows})
        return
    click.echo(f"{rows} rows loaded into {table}")


@main.command()
@click.argument("source")
@training_options
@database_options
def train(source: str, url: str | None, data: str | None, as_json: bool, **given: Any) -> None:
    """Train a model on the table or view SOURCE.

    \b
    Example:
      bismarck-dp train rows --model m --epsilon 0.5 --delta 1e-6 --lambda 0.01 --epochs 10
    """
    with _open(url, data) as database, show_progress("pass", as_json) as progress:
        model = database.train(source, model=given["model"], progress=progress, **columns_of(given), **spec_of(given))
    _print_model(model, as_json)


def _print_model(model: Model, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(model))
        return
    privacy = ("epsilon", "delta", "privacy_unit", "mechanism", "sensitivity", "noise_scale")
    facts = _pick(model, "algorithm", "loss", *privacy, "passes", "seconds", "note")
    facts |= {} if model.support is None else {"support": _support(model)}
    facts |= {} if model.gap is None else {"gap": model.gap}
    print_facts(facts | ({} if model.tuning is None else {"options": model.options, "tuning": model.tuning}))


def _grid(ctx: click.Context, param: click.Parameter, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise click.BadParameter("it is not JSON", ctx, param) from None


@main.command()
@click.argument("source")
@click.option(
    "--grid",
    metavar="JSON",
    required=True,
    callback=_grid,
    help='What to try: an object of lists, {"lambda": [0.001, 0.01]}, for all combinations, or a list of objects.',
)
@click.option("--method", metavar="NAME", default="portions", show_default=True, help="Or random_stopping.")
@click.option("--public-source", metavar="TABLE", help="Choose by this table, whose rows are taken as public.")
@click.option("--trials", type=float, default=10.0, show_default=True, help="Of random_stopping, on average.")
@training_options
@database_options
def tune(
    source: str,
    grid: Any,
    method: str,
    public_source: str | None,
    trials: float,
    url: str | None,
    data: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train the candidates of a grid on the table or view SOURCE, and release one of them.

    Takes the options of `train`. Epsilon and delta cover everything: the candidates and the choice among them.

    \b
    Example:
      bismarck-dp tune rows --epsilon 1 --grid '{"lambda": [0.001, 0.01], "epochs": [5, 10]}'
    """
    how = {"grid": grid, "method": method, "public_source": public_source, "trials": trials}
    with _open(url, data) as database, show_progress("pass", as_json) as progress:
        spec = {**columns_of(given), **spec_of(given)}
        model = database.tune(source, model=given["model"], progress=progress, **how, **spec)
    _print_model(model, as_json)


@main.command()
@click.argument("source", required=False)
@click.option("--n", type=click.IntRange(min=1), help="Rows, instead of SOURCE.")
@click.option("--d", type=click.IntRange(min=1), help="Features, instead of SOURCE.")
@training_options
@database_options
def explain(
    source: str | None,
    n: int | None,
    d: int | None,
    url: str | None,
    data: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Show what `train` would do and why it is private, at no cost.

    Takes the options of `train` and either SOURCE, of which the number of rows and features is read, or --n and --d,
    which need no database.

    \b
    Example:
      bismarck-dp explain --n 20000 --d 20 --epsilon 0.5 --delta 1e-6 --lambda 0.01
    """
    if source is not None and n is None and d is None:
        with _open(url, data) as database:
            plan = database.explain(source, **columns_of(given), **spec_of(given))
    elif source is None and n is not None and d is not None:
        plan = bismarck_dp.explain(n=n, d=d, **spec_of(given))
    else:
        raise click.UsageError("name a SOURCE, or give both --n and --d")
    if as_json:
        print_json(plan)
        return
    print_facts(plan)


@main.command()
@click.argument("model")
@click.argument("file")
@click.option("--header/--no-header", default=None, help="Whether the first line holds names.  [default: look]")
@click.option("--proba", is_flag=True, help="The probabilities of both classes instead, negative first.")
@database_options
def predict(
    model: str,
    file: str,
    header: bool | None,
    proba: bool,
    url: str | None,
    data: str | None,
    as_json: bool,
) -> None:
    """Predict the rows of FILE, a CSV of features without label, gzipped or not; - is stdin.

    \b
    Example:
      bismarck-dp predict m new.csv > labels.txt
    """
    with _open(url, data) as database:
        found = database.model(model)
    apply = found.predict_proba if proba else found.predict
    answers = (apply(rows) for rows in feature_rows(file, header))
    if as_json:
        print_json([answer for chunk in answers for answer in chunk.tolist()])
        return
    for chunk in answers:
        click.echo("\n".join(",".join(map(exact, row)) for row in chunk.reshape(len(chunk), -1).tolist()))


def _evaluation_options(command: Command) -> Command:
    """Columns, privacy, and every option of dp_evaluate."""
    words = (
        click.option("--label", metavar="COLUMN", help="The label's column.  [default: the model's]"),
        click.option("--features", metavar="COLUMN,...", multiple=True, help="Columns.  [default: the model's]"),
        click.option("--epsilon", type=float, help="Add noise that is worth this; without it, metrics are exact."),
        click.option("--delta", type=float, default=0.0, show_default=True),
    )
    return decorated(command, [*words, *(flag_of(name, option) for name, option in EVALUATION_OPTIONS.items())])


@main.command()
@click.argument("model")
@click.argument("source")
@_evaluation_options
@database_options
def evaluate(model: str, source: str, url: str | None, data: str | None, as_json: bool, **given: Any) -> None:
    """What MODEL is worth on the table or view SOURCE: exact, or, with --epsilon, noisy.

    \b
    Example:
      bismarck-dp evaluate m held_out --epsilon 0.5
    """
    columns = {"label": given["label"], "features": columns_of(given)["features"] or None}
    privacy = {name: given[name] for name in ("epsilon", "delta")}
    options = {name: given[name] for name in EVALUATION_OPTIONS if given[name] is not None}
    if isinstance(options.get("metrics"), str):
        options["metrics"] = [options["metrics"]]
    with _open(url, data) as database:
        found = database.evaluate(model, source, **columns, **privacy, **options)
    if as_json:
        print_json(found)
        return
    print_facts(found)


@main.command()
@database_options
def models(url: str | None, data: str | None, as_json: bool) -> None:
    """List the models you may use.

    \b
    Example:
      bismarck-dp models --json
    """
    with _open(url, data) as database:
        found = database.models()
    if as_json:
        print_json([dataclasses.asdict(model) for model in found])
    elif found:
        shape = ("source", "n", "d", "passes", "seconds")
        print_rows([_pick(model, "algorithm", "loss", "epsilon", "delta", "mechanism", *shape) for model in found])
    else:
        click.echo("no models yet", err=True)


@main.command()
@click.argument("table")
@click.option("--epsilon", type=float, required=True, help="What all releases together may spend.")
@click.option("--delta", type=float, default=0.0, show_default=True)
@click.option("--composition", metavar="NAME", help="How releases add up: zcdp or pure.  [default: zcdp]")
@click.option("--adjacency", metavar="NAME", help="Of all releases: replace or zero-out.  [default: replace]")
@click.option("--privacy-unit", metavar="COLUMN", help="Whose a row is: promises are for all its rows.")
@click.option("--unit-rows", type=int, help="Rows of a unit that count at most.  [default: 1]")
@click.option("--analysts", metavar="ROLE,...", multiple=True, help="Who may train.  [default: dp_analyst]")
@click.option("--columns", metavar="COLUMN,...", multiple=True, help="What they may name.  [default: all]")
@click.option("--lengths", type=value_of, metavar="JSON", help="Numbers in each array column.  [default: measured]")
@click.option("--classes", type=value_of, metavar="JSON", help="Labels' values, by column.")
@database_options
def protect(
    table: str, epsilon: float, delta: float, url: str | None, data: str | None, as_json: bool, **given: Any
) -> None:
    """Give TABLE, which you own, a budget for its whole life.

    \b
    Example:
      bismarck-dp protect patients --epsilon 3 --delta 1e-6 --columns y,x
    """
    plain = ("composition", "adjacency", "privacy_unit", "unit_rows", "lengths", "classes")
    words = {name: given[name] for name in plain if given[name] is not None}
    lists = {name: _names(given[name]) for name in ("analysts", "columns") if given[name]}
    with _open(url, data) as database, warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        said = database.protect(table, epsilon, delta, **words, **lists)
    for note in notes:
        click.echo(f"warning: {note.message}", err=True)
    if as_json:
        print_json(said)
        return
    print_facts(said)


def _names(given: Sequence[str]) -> list[str]:
    """An empty list where nobody, or nothing, is named."""
    return [name.strip() for part in given for name in part.split(",") if name.strip()]


@main.command()
@click.argument("table")
@database_options
def unprotect(table: str, url: str | None, data: str | None, as_json: bool) -> None:
    """Enforce nothing on TABLE any more. The ledger remembers what was spent.

    \b
    Example:
      bismarck-dp unprotect patients
    """
    with _open(url, data) as database:
        database.unprotect(table)
    if as_json:
        print_json({"unprotected": table})
    else:
        click.echo(f"{table} is protected no more")


@main.command()
@click.argument("table")
@database_options
def budget(table: str, url: str | None, data: str | None, as_json: bool) -> None:
    """What the protected TABLE may spend, and has spent.

    \b
    Example:
      bismarck-dp budget patients --json
    """
    with _open(url, data) as database:
        found = database.budget(table)
    if as_json:
        print_json(found)
        return
    print_facts(found)


@main.command()
@click.option("--n", type=click.IntRange(min=1), default=100, show_default=True, help="Rows of the tables.")
@click.option("--d", type=click.IntRange(min=1), default=2, show_default=True, help="Features of the tables.")
@click.option("--trials", type=click.IntRange(min=1), default=1000, show_default=True, help="Trainings on each table.")
@click.option("--plot", metavar="FILE", help="Draw the trade-off curve into this PNG file.")
@spec_options
@database_options
def audit(
    n: int,
    d: int,
    trials: int,
    plot: str | None,
    url: str | None,
    data: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Attack the database with a spec of yours, and see whether its claim holds.

    Makes two temporary tables that differ in one row, trains on each of them many times through dp_train, and tries to
    tell from the models which was which. Exits with 1 when the claim is broken. Nothing is left behind.

    \b
    Example:
      bismarck-dp audit --epsilon 1 --delta 0.01 --loss huber --lambda 0.1 --plot audit.png
    """
    with _open(url, data) as database, show_progress("training", as_json) as progress:
        found = database.audit(n=n, d=d, trials=trials, plot=plot, progress=progress, **spec_of(given))
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        shown = {name: value for name, value in dataclasses.asdict(found).items() if not isinstance(value, list)}
        print_facts(shown)
        for reason in found.reasons:
            click.echo(f"broken: {reason}")
    if not found.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
