"""A protected table and the roles around it, for attacks: each role has a session, and hears all that is said to it."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import psycopg2
import psycopg2.extras
import pytest

from bismarck_dp.controller.database import Database


class Session:
    """Each statement commits by itself, unless it says BEGIN."""

    def __init__(self, db: Database, role: str, options: str = "") -> None:
        where = db.engine.url.query
        self.connection = psycopg2.connect(
            host=where["host"], port=where["port"], user=role, dbname="bismarck", options=options
        )
        self.connection.autocommit = True
        self.connection.notices = deque()  # of a list psycopg2 keeps the last fifty

    def __call__(self, text: str, *values: Any) -> list[dict[str, Any]]:
        with self.connection.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
            cursor.execute(text, values or None)
            return [dict(row) for row in cursor.fetchall()] if cursor.description else []

    def one(self, text: str, *values: Any) -> Any:
        """The one value of a query's one row."""
        ((value,),) = [row.values() for row in self(text, *values)]
        return value

    def refused(self, text: str, message: str = "permission denied") -> str:
        """Runs what must fail, and returns what it says."""
        with pytest.raises(psycopg2.Error, match=message) as caught:
            self(text)
        assert self.connection.closed == 0, "the server closed the connection"
        return str(caught.value)

    def heard(self) -> str:
        """Notices since the last time."""
        said = "".join(self.connection.notices)
        self.connection.notices.clear()
        return said

    def reset(self) -> None:
        if self.connection.closed == 0:
            self("ROLLBACK; RESET SESSION AUTHORIZATION")
            self("DISCARD ALL")
            self.heard()

    def close(self) -> None:
        self.connection.close()


def train(model: str = "m", source: str = "secret", epsilon: str = "1", more: str = "", **options: Any) -> str:
    """A call of dp_train; `more` are further arguments."""
    return call("dp_train", source, model, epsilon, more, **options)


def call(function: str, source: str, model: str, epsilon: str = "1", more: str = "", **options: Any) -> str:
    asked = json.dumps({name: value for name, value in {"epochs": 1, **options}.items() if value is not None})
    return (
        f"SELECT * FROM public.{function}('{source}', '{model}', 'y', '{{x}}', {epsilon}{more and ', ' + more},"
        f" options => '{asked}')"
    )


ROWS = 60

SPY = """
    CREATE TABLE sprung (who text);
    GRANT INSERT ON sprung TO PUBLIC;
    CREATE FUNCTION spy() RETURNS int LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO public.sprung VALUES (current_user); RETURN 1; END $$;
    CREATE FUNCTION spy(value anyelement) RETURNS anyelement IMMUTABLE LANGUAGE plpgsql AS
        $$ BEGIN PERFORM public.spy(); RETURN value; END $$;
"""
"""Functions that write down who runs them; the second may stand in an index."""


class Secret:
    """The table `secret` of keeper's, with columns id, y, z and x. `analyst` is a member of dp_analyst; `outsider` is
    not, and may read the table where a test says so; `root` is the superuser.
    """

    def __init__(self, db: Database) -> None:
        self.db = db
        self.root = Session(db, "postgres")
        self.root("CREATE ROLE keeper LOGIN; CREATE ROLE analyst LOGIN IN ROLE dp_analyst; CREATE ROLE outsider LOGIN")
        self.keeper, self.analyst, self.outsider = (Session(db, role) for role in ("keeper", "analyst", "outsider"))
        self.extra: list[Session] = []

    def make(self) -> None:
        self.root("GRANT CREATE ON SCHEMA public TO keeper, analyst, outsider")
        self.keeper(
            "CREATE TABLE secret AS SELECT i AS id, (i % 2 * 2 - 1)::float8 AS y, i::numeric / 60 AS z,"
            f" ARRAY[i / 60.0, 0.5]::float8[] AS x FROM generate_series(1, {ROWS}) AS i;"
            " ALTER TABLE secret ADD PRIMARY KEY (id)"
        )
        self.protect()

    def protect(self, source: str = "secret", epsilon: str = "1000", options: str = "{}") -> None:
        """With the labels' coding, which nobody looks up."""
        coded = '{"classes": {"y": [-1, 1]}}'
        self.keeper(f"SELECT * FROM public.dp_protect('{source}', {epsilon}, 1e-3, '{coded}'::jsonb || '{options}')")

    def session(self, role: str, options: str = "") -> Session:
        """One more session, closed with the test."""
        self.extra.append(Session(self.db, role, options))
        return self.extra[-1]

    def releases(self, source: str = "secret") -> int:
        """How many were paid for, as the owner is told."""
        return int(self.keeper.one(f"SELECT releases FROM public.dp_budget('{source}')"))

    def models(self) -> list[str]:
        return [str(row["name"]) for row in self.root("SELECT name FROM bismarck_dp.model ORDER BY id")]

    def sprung(self) -> list[str]:
        """Who ran a spy since the last time."""
        found = [str(row["who"]) for row in self.root("SELECT DISTINCT who FROM sprung ORDER BY who")]
        self.root("TRUNCATE sprung")
        return found

    def clean(self) -> None:
        for one in self.extra:
            one.close()
        self.extra.clear()
        for one in (self.keeper, self.analyst, self.outsider, self.root):
            one.reset()
        self.root("DROP OWNED BY keeper, analyst, outsider CASCADE")
        self.root.heard()

    def close(self) -> None:
        for one in (self.keeper, self.analyst, self.outsider):
            one.close()
        self.root("DROP OWNED BY keeper, analyst, outsider CASCADE; DROP ROLE keeper, analyst, outsider")
        self.root.close()


# ---- through Python ----


def protect(db: Database, name: str, epsilon: float, delta: float, **options: Any) -> dict[str, Any]:
    """With the labels' coding, which nobody looks up."""
    return db.protect(name, epsilon, delta, **{"classes": {"y": [-1, 1]}, **options})


def entry_of(db: Database, model: Any) -> dict[str, Any]:
    return next(entry for entry in db.ledger() if entry["id"] == model.ledger_id)


def notices(who: Database, statement: str) -> list[str]:
    """What the server says besides the answer."""
    with who.engine.connect() as connection:
        ours = connection.connection.driver_connection
        ours.notices.clear()
        ours.cursor().execute(statement)
        said = list(ours.notices)
        ours.commit()
    return [line.split(":  ", 1)[1].split("\n")[0] for line in said]
