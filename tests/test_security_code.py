"""Attacks with code: functions of users that wait for someone with more rights to run them.

The spies of protected.py write down who ran them. Each trap is shown to spring where it should; while rows are read
with the extension's rights, nobody's code runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from protected import ROWS, SPY, Secret, train

# ---- what is attached to the table ----

FOLDED = {
    "index": "CREATE INDEX ON secret ((public.spy(1)))",
    "partial_index": "CREATE INDEX ON secret (id) WHERE public.spy(1) = 1",
    "statistics": "CREATE STATISTICS s ON (public.spy(1) + id), (y + 1) FROM secret",
}


@pytest.mark.parametrize("statement", FOLDED.values(), ids=FOLDED.keys())
def test_expressions_that_a_planner_folds_do_not_run(secret: Secret, statement: str) -> None:
    """A call with constant arguments is run when a query is planned, as whoever reads the table."""
    secret.keeper(SPY)
    secret.keeper(statement)
    secret.keeper("GRANT SELECT ON secret TO outsider")
    secret.sprung()
    secret.outsider("SELECT y FROM secret")
    assert secret.sprung() == ["outsider"]
    assert secret.analyst(train())[0]["n"] == ROWS
    assert secret.sprung() == []
