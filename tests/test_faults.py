"""Cancel, kill, rollback, concurrent runs: nothing stays behind, and packing keeps to its memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import psycopg2
import pytest
from conftest import two_classes
from scipy import stats

from bismarck_dp import Spec, make_plan
from bismarck_dp.controller.database import Database, embedded
from bismarck_dp.controller.engines import Request, SqlEngine


def session(db: Database) -> Any:
    """A connection outside SQLAlchemy, to be killed."""
    return psycopg2.connect(host=db.engine.url.query["host"], port=db.engine.url.query.get("port", "5432"),
                            user="postgres", dbname="bismarck")  # fmt: skip


def used_disk(db: Database) -> int:
    """Bytes that the cluster's tables take."""
    assert db.cluster is not None
    return sum(path.stat().st_blocks * 512 for path in (db.cluster.pgdata / "base").rglob("*") if path.exists())


LONG = (
    "SELECT * FROM dp_train('{}', 'long', 'y', '{{x}}', 1.0, options => '{{\"epochs\": 100000, \"batch_size\": 1000}}')"
)


class Running:
    """A long training in a thread, and how it ended."""

    def __init__(self, db: Database, statement: str) -> None:
        self.connection = session(db)
        self.pid = self.connection.info.backend_pid
        self.error: Exception | None = None
        self.ended = 0.0
        self.thread = threading.Thread(target=self._run, args=(statement,))
        self.thread.start()

    def _run(self, statement: str) -> None:
        try:
            self.connection.cursor().execute(statement)
        except psycopg2.Error as error:
            self.error = error
        self.ended = time.monotonic()

    def wait(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.connection.close()


def test_cancelling_works_at_once(db: Database, table: Any) -> None:
    """At several moments of a training; the fastest counts, because machines are noisy and a missing check is not."""
    rows = table(*two_classes(20_000, 20))
    delays = []
    for moment in (0.05, 0.2, 0.35, 0.5, 0.8):
        running = Running(db, LONG.format(rows.name))
        time.sleep(moment)
        asked = time.monotonic()
        running.connection.cancel()
        running.wait()
        assert isinstance(running.error, psycopg2.errors.QueryCanceled)
        delays.append(running.ended - asked)
    assert min(delays) < 0.1
    assert max(delays) < 5


def test_planning_can_be_cancelled(db: Database, table: Any) -> None:
    """A schedule without a closed form is planned by the recursion, which may take long; cancelling works there too."""
    rows = table(*two_classes(2000, 2))
    options = '{"lambda": 0.01, "average": "all", "batch_size": 1, "epochs": 1000000}'
    running = Running(db, f"SELECT * FROM dp_explain('{rows.name}', 'm', 'y', '{{x}}', 1.0, options => '{options}')")
    time.sleep(1.5)
    asked = time.monotonic()
    running.connection.cancel()
    running.wait()
    assert isinstance(running.error, psycopg2.errors.QueryCanceled)
    assert running.ended - asked < 2


def test_fresh_orders_do_not_pile_up_locks(db: Database, table: Any) -> None:
    rows = table(*two_classes(60, 2))
    model = db.train(rows.name, algorithm="sgd", shuffle="each_pass", epochs=1500, workers=8, batch_size=10)
    assert model.passes == 1500


def test_a_terminated_backend_leaves_nothing(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(20_000, 20))
    running = Running(db, LONG.format(rows.name))
    time.sleep(0.4)
    sql("SELECT pg_terminate_backend(:pid)", pid=running.pid)
    running.wait()
    assert running.error is not None


def test_rollback_and_exception_blocks_leave_nothing(db: Database, table: Any, sql: Any) -> None:
    rows = table(*two_classes(100, 3))
    train = f"dp_train('{rows.name}', 'gone', 'y', '{{x}}', 1.0)"
    with db.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT {train}")
        connection.rollback()
    sql(f"DO $$ BEGIN BEGIN PERFORM {train}; RAISE 'no'; EXCEPTION WHEN raise_exception THEN NULL; END; END $$")
    assert sql("SELECT count(*) AS n FROM bismarck_dp.model")[0]["n"] == 0


def test_a_caught_refusal_leaves_nothing(db: Database, table: Any, sql: Any) -> None:
    """The refusal is raised after tables were made; a caught error must still take them back."""
    rows = table(*two_classes(300, 3))
    train = (
        f"dp_train('{rows.name}', 'm', 'y', '{{x}}', NULL, algorithm => 'sgd', loss => 'squared',"
        ' options => \'{"step": 1e30, "batch_size": 1, "epochs": 50}\')'
    )
    sql(f"DO $$ BEGIN PERFORM {train}; RAISE 'not reached'; EXCEPTION WHEN invalid_parameter_value THEN NULL; END $$")


def test_concurrent_trainings_do_not_meet(db: Database, table: Any) -> None:
    x, y = two_classes(2000, 6)
    rows = table(x, y)
    want = db.train(rows.name, algorithm="sgd", seed=1, **{"lambda": 0.01}).weights
    got: list[Any] = []

    def one(number: int) -> None:
        got.append(db.train(rows.name, model=f"c{number}", algorithm="sgd", seed=1, **{"lambda": 0.01}).weights)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert all(np.array_equal(weights, want) for weights in got)


def test_a_name_taken_while_training(db: Database, table: Any) -> None:
    """Two trainings under one name: the later one is refused when it registers, and leaves nothing."""
    rows = table(*two_classes(100, 3))
    train = f"SELECT * FROM dp_train('{rows.name}', 'race', 'y', '{{x}}', 1.0)"
    with db.engine.connect() as first:
        first.exec_driver_sql(train)
        second = Running(db, train)
        time.sleep(0.5)
        first.commit()
    second.wait()
    assert isinstance(second.error, psycopg2.errors.DuplicateObject)
    assert second.error.diag.message_primary == 'model name "race" is taken'


def test_two_trainings_in_one_transaction(db: Database, table: Any) -> None:
    x, y = two_classes(500, 3)
    rows = table(x, y)
    options = "options => '{\"seed\": 1}'"
    with db.engine.begin() as connection:
        found = [
            connection.exec_driver_sql(
                f"SELECT weights FROM dp_train('{rows.name}', 'm{i}', 'y', '{{x}}', NULL, 0, 'sgd', {options})"
            ).scalar_one()
            for i in range(2)
        ]
    assert found[0] == found[1]


def test_packing_keeps_to_its_memory(db: Database, table: Any, sql: Any) -> None:
    """A table many times larger than maintenance_work_mem packs, spills, and gives a permutation of the same rows."""
    n, d = 60_000, 20
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d)).astype(np.float32) / 10
    y = np.where(rng.random(n) < 0.5, -1.0, 1.0)
    rows = table(x, y)
    options: dict[str, Any] = {"algorithm": "sgd", "batch_size": n, "epochs": 1, "step": 1.0}
    whole = db.train(rows.name, **options)
    assert n * (d + 1) * 4 > 4 * 2**20, "four times the memory below, and more"
    before = sql("SELECT temp_files FROM pg_stat_database WHERE datname = 'bismarck'")[0]["temp_files"]
    with db.engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL maintenance_work_mem = '1MB'")
        from bismarck_dp import Spec
        from bismarck_dp.controller.engines import Request, SqlEngine
        from bismarck_dp.controller.train import train

        spec = Spec.create("sgd", "logistic", None, 0, {k: v for k, v in options.items() if k != "algorithm"})
        oid = connection.exec_driver_sql(f"SELECT '{rows.name}'::regclass::oid").scalar_one()
        small = train(SqlEngine(connection), Request(oid, "small", "y", ["x"], spec))
    # One full batch: the order changes nothing but the rounding of the sum.
    np.testing.assert_allclose(small["weights"], whole.weights, atol=1e-9)
    for _ in range(50):
        after = sql("SELECT temp_files FROM pg_stat_database WHERE datname = 'bismarck'")[0]["temp_files"]
        if after > before:
            break
        time.sleep(0.1)
    assert after > before, "the small run went through temporary files"


@pytest.mark.parametrize("memory", ["64MB", "1MB"])
def test_the_order_is_uniform_and_fresh(db: Database, table: Any, sql: Any, memory: str) -> None:
    """Where a marked row lands, over many runs: with one row per batch and a constant step, the iterate right after the
    marked row is linear in its place, so averaging all iterates tells the place."""
    n = 600 if memory == "64MB" else 30_000
    runs = 60 if memory == "64MB" else 12
    width = 1 if memory == "64MB" else 40
    x = np.zeros((n, width), dtype=np.float32)
    x[n // 3, 0] = 1
    rows = table(x, np.ones(n))
    places = []
    with db.engine.connect() as connection:
        connection.exec_driver_sql(f"SET maintenance_work_mem = '{memory}'")
        for i in range(runs):
            weights = connection.exec_driver_sql(
                f"SELECT weights FROM dp_train('{rows.name}', 'place{i}', 'y', '{{x}}', NULL, algorithm => 'sgd',"
                ' options => \'{"epochs": 1, "batch_size": 1, "step": 1, "average": "all", "classes": [-1, 1]}\')'
            ).scalar_one()
            places.append(1 - weights[0] / 0.5)
        connection.rollback()
    assert len(set(places)) > 0.5 * runs, "each run draws its own order"
    assert stats.kstest(places, "uniform").pvalue > 1e-6


def test_a_fresh_order_each_pass_takes_no_more_disk(db: Database, table: Any) -> None:
    """Each pass writes its own packed copy; the copies before it give their space back at once."""
    rows = table(*two_classes(30_000, 20))
    packed = 30_000 * 21 * 4
    with db.engine.connect() as connection:
        before = used_disk(db)
        connection.exec_driver_sql(
            f"SELECT dp_train('{rows.name}', 'm', 'y', '{{x}}', 1.0,"
            ' options => \'{"epochs": 12, "shuffle": "each_pass"}\')'
        )
        connection.exec_driver_sql("CHECKPOINT")
        after = used_disk(db)
        connection.rollback()
    assert after - before < 4 * packed


def test_a_killed_server_recovers_with_nothing_left(tmp_path_factory: Any) -> None:
    """SIGKILL of a backend restarts the server; the packed copy of the run it was in is gone, and training works."""
    import shutil
    import tempfile

    home = tempfile.mkdtemp(prefix="bdp_kill_", dir="/tmp")
    os.chmod(home, 0o755)
    with embedded(os.path.join(home, "cluster"), durable=False) as db:
        db.load("rows", *two_classes(100_000, 20))
        with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("CHECKPOINT")
        before = used_disk(db)
        running = Running(db, LONG.format("rows"))
        deadline = time.monotonic() + 60
        while used_disk(db) - before < 100_000 * 21 * 4:
            assert time.monotonic() < deadline, "the run never packed its rows"
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        db.engine.dispose()
        for _ in range(100):
            try:
                left = session(db)
                break
            except psycopg2.OperationalError:
                time.sleep(0.1)
        with left, left.cursor() as cursor:
            cursor.execute("SELECT relname FROM pg_class WHERE relname LIKE 'run\\_%'")
            assert cursor.fetchall() == []
        left.close()
        assert used_disk(db) - before < 2**20, "nor are the packed rows left on disk"
        assert db.train("rows", epsilon=1.0).n == 100_000
    shutil.rmtree(home)


def test_a_run_that_is_rolled_back_gives_its_memory_back_at_once(db: Database, table: Any) -> None:
    """Sampling keeps rows in memory: a savepoint, or a block that catches an error, must not pile them up."""
    rows = table(np.zeros((20_000, 60)), np.resize([-1.0, 1.0], 20_000))
    spec = Spec.create("dpsgd", "logistic", 1.0, 1e-6, {"batch_size": 5000})
    plan = make_plan(spec, 20_000, 60)
    memory = "SELECT coalesce(sum(total_bytes), 0) FROM pg_backend_memory_contexts WHERE name IN ('run', 'sampling')"
    with db.engine.begin() as connection:
        engine = SqlEngine(connection)
        source = connection.exec_driver_sql(f"SELECT '{rows.name}'::regclass::oid").scalar_one()
        for _ in range(3):
            connection.exec_driver_sql("SAVEPOINT first")
            packed = engine.pack(Request(source, "m", "y", ["x"], spec), plan)
            connection.exec_driver_sql("SAVEPOINT second")
            engine.begin(packed, plan)
            engine.epoch(packed, plan)
            connection.exec_driver_sql("RELEASE second")
            assert connection.exec_driver_sql(memory).scalar_one() > 20_000 * 61 * 4
            connection.exec_driver_sql("ROLLBACK TO first")
            assert connection.exec_driver_sql(memory).scalar_one() == 0


def test_planning_for_samples_can_be_cancelled(db: Database, table: Any) -> None:
    """Calibrations of a second or so, between whose parts the server looks whether it should stop."""
    rows = table(*two_classes(1000, 2))
    plans = (
        "SELECT count(*) FROM generate_series(2.0, 3.0, 0.1) AS epsilon,"
        f" LATERAL dp_explain('{rows.name}', 'm', 'y', '{{x}}', epsilon, 1e-100, 'dpsgd',"
        ' options => \'{"batch_size": 1, "epochs": 1000, "adjacency": "zero-out"}\')'
    )
    with db.engine.connect() as connection:
        connection.exec_driver_sql("SET statement_timeout = '200ms'")
        started = time.monotonic()
        with pytest.raises(Exception, match="statement timeout"):
            connection.exec_driver_sql(plans)
        assert time.monotonic() - started < 60
        connection.rollback()
