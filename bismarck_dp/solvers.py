"""The solvers there are. Each states its claim and its proof where it is defined."""

from __future__ import annotations

from dataclasses import replace

from .bolton import Bolton
from .coordinates import Cd, Dpcd, Dpgcd, Gcd
from .dual import Dpscd, DpscdPrimal, DpscdSeq, Scd
from .errors import BismarckError
from .noisy import Banco, Bst14, Dpsgd, Scs13
from .plan import Plan
from .scaling import exponents, measures, training_spec, with_measuring
from .scaling import notes as bound_notes
from .sensitivity import Pulse
from .sgd import Sgd
from .spec import Spec
from .units import for_units, slot_spec

MOST_FEATURES = 1_000_000

_ALL: list[Sgd] = [
    Sgd(),
    Bolton(),
    Scs13(),
    Bst14(),
    Dpsgd(),
    Banco(),
    Cd(),
    Dpcd(),
    Gcd(),
    Dpgcd(),
    Scd(),
    Dpscd(),
    DpscdSeq(),
    DpscdPrimal(),
]

SOLVERS: dict[str, Sgd] = {solver.name: solver for solver in _ALL}


def make_plan(spec: Spec, n: int, d: int, pulse: Pulse = lambda: None) -> Plan:
    """The plan of a spec for n rows of d features; `pulse` is called now and then if that takes long."""
    if n < 1:
        raise BismarckError("the table has no rows", "there is nothing to train on")
    if d < 1:
        raise BismarckError("the rows have no features", "name a non-empty array column, or numeric columns")
    if d > MOST_FEATURES:
        raise BismarckError(f"the rows have {d} features", f"at most {MOST_FEATURES} are supported")
    plan = for_units(_plan_for_slots(slot_spec(spec), n, d, pulse), spec)
    notes = SOLVERS[spec.algorithm].notes(plan.spec, max(n // spec.options["unit_rows"], 1))
    return replace(plan, notes=(*notes, *bound_notes(plan)))


def _plan_for_slots(spec: Spec, n: int, d: int, pulse: Pulse) -> Plan:
    """A slot is a row, or one of a unit's."""
    solver = SOLVERS[spec.algorithm]
    if not measures(spec):
        return solver.plan(spec, n, d, pulse)
    exponents(spec)
    return with_measuring(solver.plan(training_spec(spec), n, d, pulse), spec)
