"""Attacks on dp_tune itself: from models that were tuned on one of two neighbouring tables, which one was it?

All rows but one count for nothing, so that the winner's one weight leans to the side of that row wherever it comes to:
in a candidate's portion it trains, in the last one it judges. What an attacker can prove at the claim's epsilon is
compared with the claim, and the same attack on releases that are worth far more has to break it: it is not idle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bismarck_dp.accounting import ADJACENCIES
from bismarck_dp.attacks import strongest
from bismarck_dp.controller.database import Database

CLAIM, FAR_MORE, TIMES = 0.3, 10.0, 400

ROWS = {"portions": 3, "random_stopping": 5}
"""As few as a method takes, so that the one row often matters."""


def neighbours(table: Any, rows: int, adjacency: str) -> tuple[str, str]:
    x = np.ones((rows, 1), np.float32)
    nothing = np.full(rows - 1, np.nan)
    other = -1.0 if adjacency == "replace" else np.nan
    return table(x, [1.0, *nothing]).name, table(x, [other, *nothing]).name


def releases(db: Database, source: str, epsilon: float, method: str, adjacency: str) -> Any:
    """The winner's weight, of many tunings; what they registered is rolled back."""
    options = f'{{"step": 1.0, "classes": [-1, 1], "adjacency": "{adjacency}"}}'
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET LOCAL client_min_messages = error")
        found = connection.exec_driver_sql(
            f"SELECT m.weights[1] FROM generate_series(1, {TIMES}) AS i, LATERAL dp_tune('{source}', 'm' || i, 'y',"
            f" '{{x}}', {epsilon}, grid => '{{\"epochs\": [1, 2]}}', options => '{options}', method => '{method}',"
            " trials => 3) AS m"
        )
        weights = np.array(found.scalars().all())
        connection.rollback()
    return weights


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("method", ROWS)
def test_an_attack_on_a_tuning_gets_no_more_than_epsilon(db: Database, table: Any, method: str, adjacency: str) -> None:
    tables = neighbours(table, ROWS[method], adjacency)
    proven = {}
    for epsilon in (CLAIM, FAR_MORE):
        first, second = [releases(db, name, epsilon, method, adjacency) for name in tables]
        proven[epsilon] = strongest({"weight": first}, {"weight": second}, 0.0, False).epsilon
    assert proven[CLAIM] <= CLAIM
    assert proven[FAR_MORE] > CLAIM, "the attack is not idle"
