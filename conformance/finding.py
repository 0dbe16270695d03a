"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one check found. `error` is None for exact checks that hold."""

    check: str
    error: float
    budget: float
    where: str = ""
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.budget  # NaN is not
