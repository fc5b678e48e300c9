"""Accounting: what a multiplier of the noise costs."""

from __future__ import annotations

from .mechanisms import gaussian_multiplier


class Gaussians:
    """One release with Gaussian noise."""

    def epsilon(self, multiplier: float, delta: float) -> float:
        """The epsilon delivered: where the analytic Gaussian's multiplier, which falls with epsilon, is this one."""
        low, high = 0.0, 1.0
        while gaussian_multiplier(high, delta) > multiplier:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if gaussian_multiplier(middle, delta) > multiplier else (low, middle)
        return high
