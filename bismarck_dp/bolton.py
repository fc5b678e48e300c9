"""Bolt-on privacy: SGD as it is, then noise on what leaves."""

from __future__ import annotations

import math

from .errors import BismarckError
from .mechanisms import Noise, calibrate
from .sensitivity import Pulse, Schedule, output_sensitivity
from .sgd import Private, Setting

UNIT_ROUNDOFF = 2.0**-53


class Bolton(Private):
    """PSGD with output perturbation (Wu et al. 2017, Algorithms 1 and 2), at the corrected sensitivity.

    Claim: the released weights are epsilon-DP (delta = 0) or (epsilon, delta)-DP under the chosen adjacency, among
    tables of n rows with arrays of one length and labels of one coding (both public), because rows are clipped to the
    feature bound and labels checked in `pack`, the run's randomness does not depend on values, and the model's L2
    sensitivity is at most `output_sensitivity` (proof there) plus rounding (`_rounding`).
    """

    name = "bolton"
    perturbs = "output"

    def _check(self, setting: Setting, schedule: Schedule) -> None:
        if setting.smoothness is None:
            raise BismarckError(
                f'loss "{setting.loss.name}" is not smooth, so bolton has no proof for it',
                'use "huber", its smoothed form, or "logistic"',
            )
        strongly_convex = schedule.penalty.strength > 0
        limit = (1 if strongly_convex else 2) / setting.smoothness
        if schedule.step.first > limit:
            raise BismarckError(
                f"step {schedule.step.first:g} is above {1 if strongly_convex else 2}/beta = {limit:g}: "
                "updates could push models apart, and bolton has no proof",
                f"use a step of at most {limit:g}",
            )

    def _release(self, setting: Setting, schedule: Schedule, pulse: Pulse) -> tuple[float | None, Noise]:
        spec = setting.spec
        assert spec.epsilon is not None
        reach = _reach(schedule, setting.lipschitz, spec.options["radius"])
        # A row's norm is checked in doubles: at a step of exactly 2/beta an update may expand by 1e-13.
        sensitivity = output_sensitivity(schedule, setting.jump, pulse) * (1 + 1e-6 + 1e-13 * _step_sum(schedule)[0])
        sensitivity += _rounding(setting, schedule, reach)
        return sensitivity, calibrate(sensitivity, spec.epsilon, spec.delta, setting.width, reach)


def _step_sum(schedule: Schedule) -> tuple[int, float]:
    """The number of updates of the longest partition, and an upper bound of the sum of their steps."""
    updates = max(schedule.updates(rows) for rows in schedule.part_sizes()) * schedule.passes
    return updates, schedule.step.total(updates)


def _reach(schedule: Schedule, lipschitz: float, radius: float) -> float:
    """A norm the weights cannot exceed: the ball, L / lambda (the shrink balances the gradient), or all steps
    together.
    """
    strength = schedule.penalty.strength
    return min(radius, lipschitz / strength if strength > 0 else math.inf, _step_sum(schedule)[1] * lipschitz)


def _rounding(setting: Setting, schedule: Schedule, reach: float) -> float:
    """How far double rounding can push two runs apart, beyond the exact recursion.

    Per update, with u = 2^-53 and |w| <= R: a dot product in eight lanes errs by (d/8 + 8) u R F, so the average
    gradient by beta_d (d/8 + 8) u R; slopes and the batch sum by (b + 12) u L; shrink, subtraction and averaging by 4
    u R; a projection by (w/8 + 8) u R for w weights; averaging P partitions after a pass by 2 P u R. Updates do not
    expand, so errors add up over T updates, in each of the two runs. Never below T 2^-48 R.

    With k classes |w| is the norm of all weights, and so errors of dot products are together what they are for one.
    Softmax takes the largest margin off all of them, which errs by (1 + sqrt k) u R F; its exponentials are within
    1e-12 of themselves and k of them are added, so p errs by 2.1e-12 + (k + 3) u: less than (2^15 + k) u.
    """
    assert setting.smoothness is not None
    updates, step_sum = _step_sum(schedule)
    many = setting.outputs if setting.outputs > 1 else 0
    lanes = setting.row_width / 8 + 8 + (1 + math.sqrt(many) if many else 0)
    slopes = setting.batch_size + 12 + (2**15 + many if many else 0)
    per_norm = 4.0 * updates + 2 * schedule.workers * schedule.passes
    projects = math.isfinite(setting.spec.options["radius"])
    per_norm += setting.smoothness * lanes * step_sum + ((setting.width / 8 + 8) * updates if projects else 0)
    rounding = 2 * UNIT_ROUNDOFF * (per_norm * reach + slopes * setting.lipschitz * step_sum)
    return max(rounding, updates * 2.0**-48 * reach)
