"""A report in a terminal: a matrix that is legible in 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import matrix
from .matrix import NOTHING, SYMBOLS, Cell, Kind
from .verdict import CheckResult, Verdict, count

if TYPE_CHECKING:
    from .contracts import ContractResult
    from .report import Report

KINDS_SHOWN = 10
_CORNER = "padding \\ CP"

_STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.UNSUPPORTED: "yellow",
    Verdict.SKIPPED: "cyan",
}
_LEGEND = (
    f"{SYMBOLS[Verdict.PASS]} all passed   {SYMBOLS[Verdict.FAIL]} failed   "
    f"{SYMBOLS[Verdict.UNSUPPORTED]} unsupported   {SYMBOLS[Verdict.SKIPPED]} skipped   "
    f"{NOTHING} nothing ran"
)


def print_reports(
    reports: Sequence[Report],
    *,
    console: Console | None = None,
    html: str = "report/report.html",
    not_run: Mapping[str, str] | None = None,
) -> None:
    """Print one matrix for all reports, then for each its counts and its failures.

    Args:
        html: where the page is, for the line that sends the reader there.
        not_run: versions without a report, and why.
    """
    console = console or Console(highlight=False)
    if len(reports) == 1:
        _line(console, facts(reports[0]))
        console.print(_matrix_of_one(reports[0]))
        _print_layouts(console, reports)
        _line(console, f"{_LEGEND}\nn/m: so many of the cell's m cases")
    elif reports:
        for table in _matrix_of_versions(reports, console.width):
            console.print(table)
        _print_layouts(console, reports)
        _line(console, f"m: CP sizes mixed in one batch\n{_LEGEND}")
    for report, label in zip(reports, column_labels(reports), strict=True):
        _line(console)
        if len(reports) > 1:
            _line(console, f"{label}: {facts(report)}", "bold")
        _print_footer(console, report, html)
    if not_run:
        _line(console)
    for name, why in (not_run or {}).items():
        _line(console, f"not run: {name}: {why}", "bold red")


def facts(report: Report) -> str:
    """What was verified, and on what, in one line."""
    megatron = f"Megatron-Core {report.megatron}" if report.megatron else "no Megatron"
    place = f" from {report.megatron_path}" if report.megatron_path else ""
    stock = " as released (stock)" if report.stock else ""
    return (
        f"{report.implementation} on {megatron}{place}{stock}, torch {report.torch}, "
        f"Python {report.python}, {report.transport} {report.dtype}, "
        f"profile {report.profile}, seed {report.seed}"
    )


def column_labels(reports: Sequence[Report]) -> list[str]:
    """The shortest name of each report that tells it from the others: mostly the version."""
    described = [
        (
            report.megatron or "no Megatron",
            "stock" if report.stock else "bound",
            report.implementation,
            report.transport,
            report.dtype,
        )
        for report in reports
    ]
    telling = [len(set(values)) > 1 for values in zip(*described, strict=True)]
    if not any(telling):
        telling[:1] = [True]
    return [
        " ".join(word for word, tells in zip(words, telling, strict=True) if tells)
        for words in described
    ]


def _matrix_of_one(report: Report) -> Table:
    names = matrix.columns(report.cases)
    found = matrix.cells(report.cases)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(_CORNER, overflow="fold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for padding in matrix.paddings(report.cases):
        row = [found.get((padding, name), Cell()) for name in names]
        table.add_row(Text(padding), *(_styled(cell, cell.text) for cell in row))
    return table


def _matrix_of_versions(reports: Sequence[Report], width: int) -> Iterator[Table]:
    """One table if the width has room for all versions; else as few as can be, of like sizes."""
    everything = [result for report in reports for result in report.cases]
    names, paddings = matrix.columns(everything), matrix.paddings(everything)
    short = ["m" if name == matrix.MIXED else name for name in names]
    found = [matrix.cells(report.cases) for report in reports]
    heads = [f"{label}\n{' '.join(short)}" for label in column_labels(reports)]
    first = max(map(len, (_CORNER, *paddings)))
    widest = max(len(line) for head in heads for line in head.splitlines())
    fitting = max(1, (width - first - 3) // (widest + 2))  # 2 between columns, 1 before the first
    size = -(-len(heads) // -(-len(heads) // fitting))
    for start in range(0, len(heads), size):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(Text(f"\n{_CORNER}"), overflow="fold")
        for head in heads[start : start + size]:
            table.add_column(Text(head), no_wrap=True)
        for padding in paddings:
            rows = (
                [cells.get((padding, name), Cell()) for name in names]
                for cells in found[start : start + size]
            )
            table.add_row(Text(padding), *(_symbols(row, short) for row in rows))
        yield table


def _print_layouts(console: Console, reports: Sequence[Report]) -> None:
    """Schedulers and parallel layouts: a row for each, a column for every report."""
    found = [matrix.layout_cells(report.cases) for report in reports]
    names = dict.fromkeys(name for cells in found for name in cells)
    if not names:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layout", overflow="fold")
    for label in column_labels(reports) if len(reports) > 1 else ["cases"]:
        table.add_column(Text(label), no_wrap=True)
    for name in names:
        row = [cells.get(name, Cell()) for cells in found]
        table.add_row(Text(name), *(_styled(cell, cell.counted) for cell in row))
    console.print(table)


def _symbols(row: Sequence[Cell], headers: Sequence[str]) -> Text:
    return Text(" ").join(
        _styled(cell, cell.symbol.ljust(len(header)))
        for cell, header in zip(row, headers, strict=True)
    )


def _styled(cell: Cell, text: str) -> Text:
    return Text(text, style=_STYLES[cell.verdict] if cell.verdict else "dim")


def _print_footer(console: Console, report: Report, html: str) -> None:
    results = report.cases
    _line(console, counts(results) + f", {report.seconds:.1f} s")
    _line(console, worst_line(results))
    if report.contracts:
        _line(console, contracts_line(report.contracts))
    for verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED):
        _print_kinds(console, results, verdict, html)
    _print_kinds(console, results, Verdict.FAIL, html)


def counts(results: Sequence[CheckResult]) -> str:
    """Cases and checks in words; every verdict is named, so that none is overlooked."""
    words = {"pass": "passed", "fail": "failed"}
    by_verdict = ", ".join(
        f"{number} {words.get(name, name)}" for name, number in count(results).items()
    )
    cases = _plural(matrix.number_of_cases(results), "case")
    return f"{cases}, {_plural(len(results), 'check')}: {by_verdict}"


def contracts_line(contracts: Sequence[ContractResult]) -> str:
    """What became of each contract; one that is not kept names the first case."""
    return f"contracts: {', '.join(map(_contract, contracts))}"


def _contract(result: ContractResult) -> str:
    verdict, verdicts = result.verdict, list(result.cases.values())
    words = f"{result.name} {SYMBOLS[verdict]}"
    if verdict is Verdict.FAIL:
        return f"{words} {result.first}"
    if set(verdicts) == {verdict}:
        return words
    return f"{words} {verdicts.count(verdict)}/{len(verdicts)}"


def worst_line(results: Sequence[CheckResult]) -> str:
    """The check nearest to its budget or furthest above it."""
    worst = matrix.worst(results)
    if worst is None:
        return "worst error/budget: none was measured"
    where = f", {worst.where}" if worst.where else ""
    return f"worst error/budget {matrix.ratio(worst):.2g}: {worst.check} of {worst.id}{where}"


def _print_kinds(
    console: Console, results: Sequence[CheckResult], verdict: Verdict, html: str
) -> None:
    found = matrix.kinds(results, verdict)
    for kind in found[:KINDS_SHOWN]:
        _print_kind(console, kind, verdict)
    if len(found) > KINDS_SHOWN:
        _line(console, f"and {len(found) - KINDS_SHOWN} more kinds, see {html}")


def _print_kind(console: Console, kind: Kind, verdict: Verdict) -> None:
    """A failure takes a block with all that repeats it; what did not run takes a line."""
    cases = f"{SYMBOLS[verdict]} {_plural(kind.cases, 'case')} ({', '.join(kind.checks)})"
    result = kind.smallest
    if verdict is not Verdict.FAIL:
        _line(console, f"{cases}: {result.reason or 'no reason given'}", _STYLES[verdict])
        return
    _line(console)
    _line(console, cases, _STYLES[verdict])
    _line(console, f"  smallest: {result.id}, {shape(result)}")
    _line(console, f"  where:    {result.where or 'not said'}")
    _line(console, f"  reason:   {result.reason or 'not said'}")
    _line(console, f"  rerun:    {result.rerun or 'not said'}")


def shape(result: CheckResult) -> str:
    """Lengths, ranks and CP sizes of a case."""
    lengths = " ".join(map(str, result.lengths)) or "none"
    sizes = " ".join(map(str, result.cp)) or "none"
    return f"lengths {lengths}, {_plural(result.world, 'rank')}, CP {sizes}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _line(console: Console, text: str = "", style: str = "") -> None:
    """A line as it is: no markup, and not wrapped, so that a command can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)
