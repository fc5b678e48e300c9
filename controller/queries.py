"""All SQL text of a training, and all quoting. Both engines send exactly these statements.

Parameters are $1, $2, …; every value travels as text (or a list of texts) and is cast in the statement, so that the
text is the same whoever sends it. Names are either ours, made from numbers, or travel as parameters. Every type,
function and operator is named with its schema: the search_path is pinned, and does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

from bismarck_dp.errors import BismarckError

Value = Union[str, list[str]]


@dataclass(frozen=True)
class Query:
    text: str
    values: tuple[Value, ...] = ()
    counted: bool = False
    """Whether PostgreSQL counts what it writes, so that autovacuum comes. What is read is never counted."""


def counting(on: bool) -> Query:
    return Query(f"SELECT pg_catalog.set_config('track_counts', '{'on' if on else 'off'}', true)")


MODEL_COLUMNS = (
    "name, algorithm, loss, weights, intercept, classes, n, d, epsilon, delta, sensitivity, noise_scale, mechanism, "
    "adjacency, support, trust, gap, passes, seconds, private, note, source, label, features, feature_bound, scale, "
    "normalize, multiclass, categories, project_dim, project_seed, tuning, options, plan, event, privacy_unit, "
    "ledger_id"
)

MAX_ROW_BYTES_ON_PAGE = 8128
"""A packed row wider than this does not fit a heap page and is stored out of line; pack.c draws the same line."""


def as_json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BismarckError(
            f"a value cannot be sent as JSON: {error}", "use text, finite numbers, truth values, lists and objects"
        ) from None


def objects() -> Query:
    """The version of the extension's SQL objects, where they are an extension's."""
    return Query(
        "SELECT extversion AS version FROM pg_catalog.pg_extension WHERE extname OPERATOR(pg_catalog.=) 'bismarck_dp'"
    )


def describe(source: int, label: str, features: list[str], labels: bool, params: dict[str, Any]) -> Query:
    return Query(
        "SELECT * FROM bismarck_dp.describe($1::pg_catalog.oid::pg_catalog.regclass, $2, $3::pg_catalog.text[],"
        " $4::pg_catalog.bool, $5::pg_catalog.jsonb)",
        (str(source), label, features, str(labels), as_json(params)),
    )


def bounds(source: int, label: str, features: list[str], params: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.bounds($1::pg_catalog.oid::pg_catalog.regclass, $2, $3::pg_catalog.text[],"
        " $4::pg_catalog.jsonb) AS bounds",
        (str(source), label, features, as_json(params)),
    )


def usable_model(name: str) -> Query:
    """The model's row, if the caller may use it."""
    return Query(
        "SELECT pg_catalog.to_jsonb(m)::pg_catalog.text AS model FROM bismarck_dp.model m"
        " WHERE m.name OPERATOR(pg_catalog.=) $1 AND pg_catalog.pg_has_role(bismarck_dp.caller(), m.owner, 'MEMBER')",
        (name,),
    )


def evaluate(noisy: bool, model: str, source: int, label: str, features: list[str], params: dict[str, Any]) -> Query:
    """The exact facts, or noisy sums; both under the name `numbers`."""
    function = "noisy_sums" if noisy else "evaluate"
    return Query(
        f"SELECT bismarck_dp.{function}($1, $2::pg_catalog.oid::pg_catalog.regclass, $3, $4::pg_catalog.text[],"
        " $5::pg_catalog.jsonb) AS numbers",
        (model, str(source), label, features, as_json(params)),
    )


def source_facts(source: int) -> Query:
    """The source's name as anyone would write it, and whether the caller owns its rows (a view's may be another's)."""
    return Query(
        "SELECT pg_catalog.format('%I.%I', n.nspname, c.relname) AS name,"
        " (NOT c.relkind OPERATOR(pg_catalog.=) ANY ('{v,m}'::pg_catalog.\"char\"[])"
        " AND pg_catalog.pg_has_role(bismarck_dp.caller(), c.relowner, 'MEMBER')"
        " OR (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid OPERATOR(pg_catalog.=) bismarck_dp.caller())) AS owned"
        " FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace"
        " WHERE c.oid OPERATOR(pg_catalog.=) $1::pg_catalog.oid",
        (str(source),),
    )


OWNED = (
    "(pg_catalog.pg_has_role(bismarck_dp.caller(), c.relowner, 'MEMBER')"
    " OR (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid OPERATOR(pg_catalog.=) bismarck_dp.caller()))"
)
"""Whether the caller owns the rows of the table c."""

HEARD = "pg_catalog.pg_has_role(SESSION_USER, c.relowner, 'MEMBER')"
"""Whether whoever logged in does: a function with the owner's rights may have been called by somebody else."""

COLUMNS = (
    "pg_catalog.to_jsonb(ARRAY(SELECT a.attname::pg_catalog.text FROM pg_catalog.pg_attribute a"
    " WHERE a.attrelid OPERATOR(pg_catalog.=) c.oid AND a.attnum OPERATOR(pg_catalog.>) 0 AND NOT a.attisdropped{}"
    " ORDER BY a.attnum))"
)
"""Names of the columns of c."""

OF_KIND = " AND bismarck_dp.number_kind(a.atttypid) OPERATOR(pg_catalog.=) '{}'"

COLUMNS_NOW = COLUMNS.format("")
ARRAYS = COLUMNS.format(OF_KIND.format("array"))
NUMBERS = COLUMNS.format(OF_KIND.format("number"))


def protection(source: int) -> Query:
    """What is remembered of a protected table, and what the caller is to it."""
    return Query(
        "SELECT (pg_catalog.to_jsonb(p) OPERATOR(pg_catalog.-) '{created,renyi_order}'::pg_catalog.text[]"
        " OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object('source', c.oid::pg_catalog.int8,"
        " 'name', pg_catalog.format('%I.%I', n.nspname, c.relname), 'order', p.renyi_order,"
        f" 'spent', pg_catalog.to_jsonb(s), 'owned', {OWNED}, 'heard', {HEARD}, 'arrays', {ARRAYS},"
        " 'owner_now', pg_catalog.pg_get_userbyid(c.relowner),"
        " 'unit_there', p.privacy_unit IS NULL"
        f" OR pg_catalog.to_jsonb(p.privacy_unit) OPERATOR(pg_catalog.<@) {COLUMNS_NOW},"
        " 'allowed',"
        " EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) ANY (p.analysts)"
        " AND pg_catalog.pg_has_role(bismarck_dp.caller(), r.oid, 'MEMBER'))))::pg_catalog.text AS facts"
        " FROM bismarck_dp.protected p"
        " JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) p.source::pg_catalog.oid"
        " JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace,"
        " LATERAL bismarck_dp.spent(p.id) s WHERE p.source::pg_catalog.oid OPERATOR(pg_catalog.=) $1::pg_catalog.oid",
        (str(source),),
    )


def table_facts(source: int) -> Query:
    """What decides whether a table can be protected."""
    return Query(
        "SELECT pg_catalog.jsonb_build_object('source', c.oid::pg_catalog.int8,"
        " 'name', pg_catalog.format('%I.%I', n.nspname, c.relname),"
        " 'owner', pg_catalog.pg_get_userbyid(c.relowner),"
        " 'typed', c.reloftype OPERATOR(pg_catalog.<>) 0::pg_catalog.oid,"
        f" 'owned', {OWNED}, 'kind', c.relkind, 'temporary', c.relpersistence OPERATOR(pg_catalog.=) 't',"
        " 'heap', c.relam OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_am"
        " WHERE amname OPERATOR(pg_catalog.=) 'heap'),"
        " 'system', n.nspname OPERATOR(pg_catalog.=) 'bismarck_dp' OR c.oid OPERATOR(pg_catalog.<) 16384 OR EXISTS"
        " (SELECT FROM pg_catalog.pg_depend d WHERE d.objid OPERATOR(pg_catalog.=) c.oid"
        " AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass"
        " AND d.deptype OPERATOR(pg_catalog.=) 'e'),"
        " 'related', EXISTS (SELECT FROM pg_catalog.pg_inherits i"
        " WHERE i.inhrelid OPERATOR(pg_catalog.=) c.oid OR i.inhparent OPERATOR(pg_catalog.=) c.oid),"
        " 'before', EXISTS (SELECT FROM bismarck_dp.protected p WHERE NOT EXISTS"
        " (SELECT FROM pg_catalog.pg_class o WHERE o.oid OPERATOR(pg_catalog.=) p.source::pg_catalog.oid)"
        " AND p.name OPERATOR(pg_catalog.=) pg_catalog.format('%I.%I', n.nspname, c.relname)),"
        f" 'columns', {COLUMNS_NOW}, 'arrays', {ARRAYS}, 'numbers', {NUMBERS}"
        ")::pg_catalog.text AS facts"
        " FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace"
        " WHERE c.oid OPERATOR(pg_catalog.=) $1::pg_catalog.oid",
        (str(source),),
    )


PROTECTED_COLUMNS = (
    "name, owner, epsilon, delta, composition, adjacency, privacy_unit, unit_rows, renyi_order, rho, slack,"
    " summed_delta, analysts, columns, lengths, classes"
)


def protect(row: dict[str, Any]) -> Query:
    return Query(
        f"INSERT INTO bismarck_dp.protected AS p (source, active, {PROTECTED_COLUMNS})"
        f" SELECT ($1::pg_catalog.jsonb OPERATOR(pg_catalog.->>) 'source')::pg_catalog.oid, true, {PROTECTED_COLUMNS}"
        " FROM pg_catalog.jsonb_populate_record(NULL::bismarck_dp.protected,"
        " $1::pg_catalog.jsonb OPERATOR(pg_catalog.-) 'source')"
        " ON CONFLICT (source) WHERE source::pg_catalog.oid OPERATOR(pg_catalog.<>) 0::pg_catalog.oid"
        " DO UPDATE SET active = true,"
        f" ({PROTECTED_COLUMNS}) = ROW({', '.join('excluded.' + one.strip() for one in PROTECTED_COLUMNS.split(','))})",
        (as_json(row),),
    )


def skip_numbers() -> Query:
    """Of tables that entries name and no protection has: a dump may have left them out, and nobody else spent that."""
    return Query(
        "SELECT pg_catalog.setval('bismarck_dp.protected_id_seq'::pg_catalog.regclass, e.most)"
        " FROM (SELECT max(protected)::pg_catalog.int8 AS most FROM bismarck_dp.entry) AS e,"
        " bismarck_dp.protected_id_seq AS s WHERE e.most OPERATOR(pg_catalog.>) s.last_value"
        " OR (e.most OPERATOR(pg_catalog.=) s.last_value AND NOT s.is_called)"
    )


def hold_source(source: int) -> Query:
    return Query("SELECT bismarck_dp.hold_source($1::pg_catalog.oid::pg_catalog.regclass)", (str(source),))


def transaction() -> Query:
    return Query(
        "SELECT pg_catalog.current_setting('transaction_isolation') AS level,"
        " pg_catalog.pg_is_in_recovery() AS standby,"
        " pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool AS read_only"
    )


def protected_now(source: int) -> Query:
    return Query("SELECT bismarck_dp.protected_now($1::pg_catalog.oid) AS now", (str(source),))


def totals(protected: int) -> Query:
    """The totals that something was paid under."""
    return Query(
        "SELECT DISTINCT composition, total_epsilon::pg_catalog.float8 AS epsilon,"
        " total_delta::pg_catalog.float8 AS delta"
        " FROM bismarck_dp.entry WHERE protected OPERATOR(pg_catalog.=) $1::pg_catalog.int4"
        " AND outcome OPERATOR(pg_catalog.=) 'paid'",
        (str(protected),),
    )


def hold_protection(source: int) -> Query:
    """From here to the end of the transaction, nothing is debited: what is known of a table stays so."""
    return Query(
        "SELECT p.id FROM bismarck_dp.protected p WHERE p.source::pg_catalog.oid OPERATOR(pg_catalog.=)"
        " $1::pg_catalog.oid FOR NO KEY UPDATE",
        (str(source),),
    )


def unprotect(source: int) -> Query:
    return Query(
        "UPDATE bismarck_dp.protected SET active = false"
        " WHERE source::pg_catalog.oid OPERATOR(pg_catalog.=) $1::pg_catalog.oid",
        (str(source),),
    )


def roles(names: list[str]) -> Query:
    return Query(
        "SELECT rolname::pg_catalog.text AS name FROM pg_catalog.pg_roles"
        " WHERE rolname::pg_catalog.text OPERATOR(pg_catalog.=) ANY ($1::pg_catalog.text[])",
        (names,),
    )


def admit(source: int) -> Query:
    return Query("SELECT bismarck_dp.admit($1::pg_catalog.oid::pg_catalog.regclass)", (str(source),))


def debit(entry: dict[str, Any]) -> Query:
    return Query(
        "SELECT * FROM bismarck_dp.debit($1::pg_catalog.jsonb OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object("
        "'who', pg_catalog.pg_get_userbyid(bismarck_dp.caller()), 'login', SESSION_USER))",
        (as_json(entry),),
    )


def model_named(name: str) -> Query:
    return Query("SELECT id FROM bismarck_dp.model WHERE name OPERATOR(pg_catalog.=) $1", (name,))


def next_run() -> Query:
    return Query("SELECT pg_catalog.nextval('bismarck_dp.run') AS run")


def table_names(run: int, generation: int, parts: int) -> list[str]:
    return [f"bismarck_dp.run_{run}_{generation}_{part}" for part in range(parts)]


def block_type(width: int) -> str:
    return "block" if 4 * (width + 1) <= MAX_ROW_BYTES_ON_PAGE else "wide_block"


def create_blocks(table: str, width: int) -> Query:
    """An unlogged table that lives and dies within the transaction; its one scan is never split among workers."""
    return Query(
        f"CREATE UNLOGGED TABLE {table} (block pg_catalog.int4 NOT NULL, rows bismarck_dp.{block_type(width)} NOT NULL)"
        " USING heap WITH (autovacuum_enabled = off, parallel_workers = 0)",
        counted=True,
    )


def drop_blocks(tables: Sequence[str]) -> Query:
    return Query("DROP TABLE " + ", ".join(tables), counted=True)


def pack(source: int, label: str, features: list[str], tables: list[str], params: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.pack($1::pg_catalog.oid::pg_catalog.regclass, $2, $3::pg_catalog.text[],"
        " $4::pg_catalog.text[]::pg_catalog.regclass[], $5::pg_catalog.jsonb) AS rows",
        (str(source), label, features, tables, as_json(params)),
    )


def pack_columns(source: int, label: str, features: list[str], table: str, params: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.pack_columns($1::pg_catalog.oid::pg_catalog.regclass, $2, $3::pg_catalog.text[],"
        " $4::pg_catalog.text::pg_catalog.regclass, $5::pg_catalog.jsonb) AS rows",
        (str(source), label, features, table, as_json(params)),
    )


def repack(old: list[str], new: list[str], params: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.repack($1::pg_catalog.text[]::pg_catalog.regclass[],"
        " $2::pg_catalog.text[]::pg_catalog.regclass[], $3::pg_catalog.jsonb) AS rows",
        (old, new, as_json(params)),
    )


def begin(run: int, kernel: str, width: int, params: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.begin($1::pg_catalog.int8, $2, $3::pg_catalog.int4, $4::pg_catalog.jsonb)",
        (str(run), kernel, str(width), as_json(params)),
    )


def epoch(run: int, tables: Sequence[str]) -> Query:
    """One aggregate per partition, side by side where PostgreSQL can, and their average in a fixed order."""
    arms = " UNION ALL ".join(
        f"SELECT {part} AS part, bismarck_dp.epoch($1, {part}, block, rows) AS state FROM {table}"
        for part, table in enumerate(tables)
    )
    return Query(
        "SELECT bismarck_dp.fold($1::pg_catalog.int8, $2)",
        (str(run), f"SELECT bismarck_dp.merge(state ORDER BY part) FROM ({arms}) AS parts"),
    )


def sample(run: int, tables: list[str], params: dict[str, Any]) -> Query:
    """One pass over Poisson samples, or over batches of rows that a solver remembers."""
    return Query(
        "SELECT bismarck_dp.sample($1::pg_catalog.int8, $2::pg_catalog.text[]::pg_catalog.regclass[],"
        " $3::pg_catalog.jsonb)",
        (str(run), tables, as_json(params)),
    )


def descend(run: int, table: str, params: dict[str, Any]) -> Query:
    """One round of coordinate steps."""
    return Query(
        "SELECT bismarck_dp.descend($1::pg_catalog.int8, $2::pg_catalog.text::pg_catalog.regclass,"
        " $3::pg_catalog.jsonb)",
        (str(run), table, as_json(params)),
    )


def objective(run: int) -> Query:
    return Query("SELECT bismarck_dp.objective($1::pg_catalog.int8) AS objective", (str(run),))


def gap(run: int) -> Query:
    return Query("SELECT bismarck_dp.gap($1::pg_catalog.int8) AS gap", (str(run),))


def memory() -> Query:
    """What the session may use, in bytes."""
    return Query("SELECT pg_catalog.pg_size_bytes(pg_catalog.current_setting('maintenance_work_mem')) AS bytes")


def oid_of(table: str) -> Query:
    return Query("SELECT $1::pg_catalog.text::pg_catalog.regclass::pg_catalog.oid AS oid", (table,))


def create_portion(table: str, d: int) -> Query:
    """Blocks of raw rows: a label and d features, in doubles."""
    return create_blocks(table, 2 * (d + 1) - 1)


def split(source: int, label: str, features: list[str], tables: list[str], params: dict[str, Any]) -> Query:
    return Query(
        "SELECT * FROM bismarck_dp.split($1::pg_catalog.oid::pg_catalog.regclass, $2, $3::pg_catalog.text[],"
        " $4::pg_catalog.text[]::pg_catalog.regclass[], $5::pg_catalog.jsonb)",
        (str(source), label, features, tables, as_json(params)),
    )


def empty(tables: list[str]) -> Query:
    return Query("SELECT bismarck_dp.empty($1::pg_catalog.text[]::pg_catalog.regclass[])", (tables,))


def hold(run: int, noise: dict[str, Any]) -> Query:
    return Query("SELECT bismarck_dp.hold($1::pg_catalog.int8, $2::pg_catalog.jsonb)", (str(run), as_json(noise)))


def choose(held_out: str, runs: list[int], params: dict[str, Any]) -> Query:
    return Query(
        "SELECT * FROM bismarck_dp.choose($1::pg_catalog.text::pg_catalog.regclass,"
        " $2::pg_catalog.text[]::pg_catalog.int8[], $3::pg_catalog.jsonb)",
        (held_out, [str(run) for run in runs], as_json(params)),
    )


def score(held_out: str, run: int, best: int, params: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.score($1::pg_catalog.text::pg_catalog.regclass, $2::pg_catalog.int8,"
        " $3::pg_catalog.int8, $4::pg_catalog.jsonb)",
        (held_out, str(run), str(best), as_json(params)),
    )


def winner(best: int) -> Query:
    return Query("SELECT * FROM bismarck_dp.winner($1::pg_catalog.int8)", (str(best),))


def release(run: int, noise: dict[str, Any]) -> Query:
    return Query(
        "SELECT bismarck_dp.release($1::pg_catalog.int8, $2::pg_catalog.jsonb) AS weights", (str(run), as_json(noise))
    )


def register(model: dict[str, Any]) -> Query:
    return Query(
        f"WITH registered AS (INSERT INTO bismarck_dp.model ({MODEL_COLUMNS}, owner)"
        f" SELECT {MODEL_COLUMNS}, bismarck_dp.caller()"
        " FROM pg_catalog.jsonb_populate_record(NULL::bismarck_dp.model, $1::pg_catalog.jsonb)"
        " ON CONFLICT (name) DO NOTHING RETURNING *)"
        " SELECT pg_catalog.to_jsonb(registered)::pg_catalog.text AS model FROM registered",
        (as_json(model),),
        counted=True,
    )


def forget(name: str) -> Query:
    return Query(
        "DELETE FROM bismarck_dp.model WHERE name OPERATOR(pg_catalog.=) $1"
        " AND pg_catalog.pg_has_role(bismarck_dp.caller(), owner, 'MEMBER') RETURNING id",
        (name,),
        counted=True,
    )
