"""What a report shows, as plain data: padding case by CP size, layouts, and kinds of failure.

Terminal and page both draw from here, so they cannot disagree. Nothing here imports torch: a
report is read and drawn where no torch is installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .verdict import CheckResult, Verdict

MIXED = "mixed"
NO_SIZE = "-"
CP_SIZES = ("1", "2", "3", "4", "6", "8", MIXED)
SYMBOLS = {Verdict.PASS: "✓", Verdict.FAIL: "✗", Verdict.UNSUPPORTED: "u", Verdict.SKIPPED: "s"}
NOTHING = "·"

# What one bad check does to its case, and one bad case to its cell: the worst comes first.
_WORST_FIRST = (Verdict.FAIL, Verdict.UNSUPPORTED, Verdict.SKIPPED, Verdict.PASS)
_LAYOUT = re.compile(
    r"uniform|balanced|megatron|schedulers|"
    r"((^|-)(tp\d+|sp|pp\d+|vpp\d+|static\d+|recompute|distopt))+"
)
_NUMBER = re.compile(r"(?<![A-Za-z])[-+]?(?:nan|inf)(?![A-Za-z])|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The cases of one padding case and CP size.

    Args:
        verdict: the worst of any case; None where nothing ran.
        count: cases with that verdict. total: all cases of the cell.
        worst: the check nearest to its budget or furthest above it, if any has a number.
    """

    verdict: Verdict | None = None
    count: int = 0
    total: int = 0
    worst: CheckResult | None = None

    @property
    def symbol(self) -> str:
        return NOTHING if self.verdict is None else SYMBOLS[self.verdict]

    @property
    def text(self) -> str:
        """The symbol, and how many cases of how many where that is not all or is a failure."""
        if self.verdict is Verdict.FAIL or self.count < self.total:
            return f"{self.symbol} {self.count}/{self.total}"
        return self.symbol

    @property
    def counted(self) -> str:
        """The same, with the number of cases where all are alike."""
        return f"{self.symbol} {self.total}" if self.text == self.symbol != NOTHING else self.text


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Checks whose reasons differ in their numbers only.

    Args:
        smallest: the check of the case with the fewest ranks, then the fewest tokens.
        checks: what was compared, each once. cases: how many distinct cases.
    """

    smallest: CheckResult
    checks: tuple[str, ...]
    cases: int


def cp_column(result: CheckResult) -> str:
    """The column of the matrix that a check belongs to."""
    sizes = set(result.cp)
    if not sizes:
        return NO_SIZE
    return str(sizes.pop()) if len(sizes) == 1 else MIXED


def columns(results: Iterable[CheckResult]) -> tuple[str, ...]:
    """The usual CP sizes and any other that occurs: sizes in order, mixed after them."""
    return tuple(sorted({*CP_SIZES, *map(cp_column, results)}, key=_column_order))


def _column_order(column: str) -> tuple[int, int]:
    return (0, int(column)) if column.isdigit() else (1 if column == MIXED else 2, 0)


def paddings(results: Iterable[CheckResult]) -> tuple[str, ...]:
    """The rows of the matrix, in the order of the report."""
    names = dict.fromkeys(result.padding for result in results)
    return tuple(name for name in names if not _LAYOUT.fullmatch(name))


def layouts(results: Iterable[CheckResult]) -> tuple[str, ...]:
    """The schedulers and parallel layouts of a report, whose CP sizes are many."""
    names = dict.fromkeys(result.padding for result in results)
    return tuple(name for name in names if _LAYOUT.fullmatch(name))


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The one that counts: a pass needs all of them to pass."""
    seen = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in seen), None)


def cells(results: Iterable[CheckResult]) -> dict[tuple[str, str], Cell]:
    """Cells by padding case and column; places where nothing ran have no key."""
    inside: dict[tuple[str, str], list[CheckResult]] = {}
    for result in results:
        inside.setdefault((result.padding, cp_column(result)), []).append(result)
    return {place: _cell(members) for place, members in inside.items()}


def layout_cells(results: Iterable[CheckResult]) -> dict[str, Cell]:
    """One cell for every scheduler and parallel layout."""
    results = list(results)
    return {
        name: _cell([result for result in results if result.padding == name])
        for name in layouts(results)
    }


def _cell(results: Sequence[CheckResult]) -> Cell:
    by_case: dict[str, list[Verdict]] = {}
    for result in results:
        by_case.setdefault(result.id, []).append(result.verdict)
    cases = [worst_verdict(verdicts) for verdicts in by_case.values()]
    verdict = worst_verdict(result.verdict for result in results)
    return Cell(
        verdict=verdict, count=cases.count(verdict), total=len(cases), worst=worst(results)
    )


def ratio(result: CheckResult) -> float | None:
    """Error over budget; infinite for a NaN and for any error where none is allowed."""
    if result.error is None or result.budget is None:
        return None
    if not math.isfinite(result.error):
        return math.inf
    if result.budget == 0:
        return math.inf if result.error else 0.0
    return result.error / result.budget


def worst(results: Iterable[CheckResult]) -> CheckResult | None:
    """The check nearest to its budget or furthest above it; None if none has a number."""
    measured = [(value, result) for result in results if (value := ratio(result)) is not None]
    return max(measured, key=lambda pair: pair[0])[1] if measured else None


def number_of_cases(results: Iterable[CheckResult]) -> int:
    return len({result.id for result in results})


def kinds(results: Iterable[CheckResult], verdict: Verdict) -> list[Kind]:
    """The checks with a verdict, grouped by reason without its numbers; most cases first."""
    groups: dict[str, list[CheckResult]] = {}
    for result in results:
        if result.verdict is verdict:
            groups.setdefault(_without_numbers(result.reason) or result.check, []).append(result)
    found = [_kind(members) for members in groups.values()]
    return sorted(found, key=lambda kind: -kind.cases)


def _without_numbers(reason: str) -> str:
    """What reasons of one kind have in common: numbers, and how many in a list, differ by case."""
    return re.sub(r"#(?:, #)+", "#", _NUMBER.sub("#", reason))


def _kind(results: Sequence[CheckResult]) -> Kind:
    return Kind(
        smallest=min(results, key=lambda result: (result.world, sum(result.lengths))),
        checks=tuple(dict.fromkeys(result.check for result in results)),
        cases=number_of_cases(results),
    )
