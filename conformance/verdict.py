"""Verdicts: one per check of a case, the unit of every report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Only `PASS` is a pass: what could not run has not been verified."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"  # the implementation says so itself
    SKIPPED = "skipped"  # hardware or a package is missing


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report; `docs/report.md` describes the fields for other tools.

    Args:
        id: the case. check: what was compared.
        cp: CP size of every micro-batch, in order. padding: column of the matrix.
        error: largest error over all values compared, relative to the largest value of the truth.
        budget: what is allowed; 0 for exact checks.
        where: first place that is wrong: sequence, token, rank, or parameter.
        rerun: a command line that repeats this case alone.
    """

    id: str
    check: str
    lengths: tuple[int, ...]
    world: int
    cp: tuple[int, ...]
    padding: str
    verdict: Verdict
    error: float | None = None
    budget: float | None = None
    where: str = ""
    reason: str = ""
    rerun: str = ""


def count(results: Iterable[CheckResult]) -> dict[str, int]:
    """How many checks got each verdict; every verdict is a key."""
    seen = Counter(result.verdict for result in results)
    return {verdict.value: seen[verdict] for verdict in Verdict}


def exit_status(results: Iterable[CheckResult]) -> int:
    """0: all that ran passed and something ran; 1: a failure; 2: nothing could be verified."""
    counted = count(results)
    if counted["fail"]:
        return 1
    return 0 if counted["pass"] else 2
