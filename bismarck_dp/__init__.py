"""Differentially private model training inside PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import BismarckError
from .model import Model
from .plan import Plan
from .solvers import make_plan
from .spec import Spec
from .version import __version__

if TYPE_CHECKING:
    from .controller.audit import Audit
    from .controller.database import Database
    from .estimators import DPClassifier, DPRegressor

__all__ = [
    "BismarckError",
    "DPClassifier",
    "DPRegressor",
    "Model",
    "Plan",
    "Spec",
    "__version__",
    "audit",
    "connect",
    "embedded",
    "explain",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    """The estimators, once they are asked for: they need scikit-learn, and nothing else does."""
    if name in ("DPClassifier", "DPRegressor"):
        from . import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(url: str) -> Database:
    """A database with the extension, by its SQLAlchemy URL; a context manager."""
    from .controller.database import connect as open_database

    return open_database(url)


def embedded(path: str | None = None) -> Database:
    """A PostgreSQL of our own below `path`, started here and stopped with the context."""
    from .controller.database import embedded as open_database

    return open_database(path)


def explain(
    *,
    n: int,
    d: int,
    algorithm: str = "bolton",
    loss: str = "logistic",
    epsilon: float | None = None,
    delta: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """The plan for n rows of d features and its privacy arithmetic; needs no database."""
    return make_plan(Spec.create(algorithm, loss, epsilon, delta, options), n, d).explain()


def audit(database: Database | str | None = None, **spec: Any) -> Audit:
    """Attacks a spec on neighbouring tables and says whether its claim holds, in a database, at its URL, or, without
    either, in a PostgreSQL made for the occasion. Takes what `Database.audit` takes.
    """
    if database is None:
        from .controller.demo import temporary_database

        with temporary_database() as found:
            return found.audit(**spec)
    if isinstance(database, str):
        with connect(database) as found:
            return found.audit(**spec)
    return database.audit(**spec)
