"""The suite: `pytest conformance/test_conformance.py`, or its front `python -m tools verify`."""

from __future__ import annotations

from collections.abc import Callable

from .case import Case
from .suite import Suite
from .verdict import CheckResult


def test_case(case: Case, suite: Suite, record: Callable[[list[CheckResult]], None]) -> None:
    """One run of a batch on a world of ranks equals the oracle, check by check."""
    record(suite.verify(case))
