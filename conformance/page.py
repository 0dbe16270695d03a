"""A report as one HTML page: self-contained, nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from . import matrix, terminal
from .matrix import Cell
from .verdict import CheckResult, Verdict

if TYPE_CHECKING:
    from .report import Report


Line = tuple[str, tuple[Cell, ...]]


def render_page(reports: Sequence[Report], *, not_run: Mapping[str, str] | None = None) -> str:
    """The page of one run, or of several versions side by side.

    Args:
        not_run: versions without a report, and why.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    everything = [result for report in reports for result in report.cases]
    labels = terminal.column_labels(reports)
    return environment.get_template("report.html.j2").render(
        versions=list(zip(labels, reports, strict=True)),
        columns=matrix.columns(everything),
        rows=list(_rows(reports, labels)),
        layouts=matrix.layouts(everything),
        layout_cells=[matrix.layout_cells(report.cases) for report in reports],
        nothing=Cell(),
        not_run=not_run or {},
        Verdict=Verdict,
        kinds=matrix.kinds,
        ratio=ratio_text,
        facts=terminal.facts,
        counts=terminal.counts,
        worst_line=terminal.worst_line,
        contracts_line=terminal.contracts_line,
        shape=terminal.shape,
    )


def _rows(reports: Sequence[Report], labels: Sequence[str]) -> Iterator[tuple[str, list[Line]]]:
    """Per padding case a line for every version; that of a lone one bears the padding's name."""
    everything = [result for report in reports for result in report.cases]
    names = matrix.columns(everything)
    found = [matrix.cells(report.cases) for report in reports]
    for padding in matrix.paddings(everything):
        lines = [tuple(cells.get((padding, name), Cell()) for name in names) for cells in found]
        yield padding, list(zip(labels if len(labels) > 1 else [padding], lines, strict=True))


def ratio_text(result: CheckResult | None, digits: int = 2) -> str:
    """Error over budget; empty where nothing was measured."""
    ratio = None if result is None else matrix.ratio(result)
    return "" if ratio is None else f"{ratio:.{digits}g}"
