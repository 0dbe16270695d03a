"""What a person reads in a terminal."""

import io
import re

import pytest
from rich.console import Console

from conformance.report import Report
from conformance.selftest.report_samples import failure, report, result
from conformance.terminal import column_labels, print_reports
from conformance.verdict import Verdict


def _printed(*reports: Report, **options) -> str:
    """What the terminal shows, without colour, in 80 columns."""
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None, highlight=False)
    print_reports(reports, console=console, **options)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_one_report_in_a_terminal() -> None:
    written = report(
        result("zero-1", cp=(1,)),
        result("zero-2", cp=(2,), error=4e-10, where="sequence 0, token 4"),
        result("zero-2", cp=(2,), check="gradients"),
        failure("zero-21", cp=(2, 1), world=2),
        result("zero-42", cp=(4, 2)),
        result("nan-2", padding="nan", verdict=Verdict.UNSUPPORTED, error=None, reason="no NaN"),
        result("nan-8", padding="nan", cp=(8,), verdict=Verdict.SKIPPED, error=None,
                reason="needs 8 ranks"),
    )  # fmt: skip

    assert (
        _printed(written)
        == """\
conformance.adapters.impl on Megatron-Core 0.19.2, torch 2.13.0, Python 3.12.1, cpu float64, \
profile quick, seed 7

 padding \\ CP  1  2  3  4  6  8  mixed
 ─────────────────────────────────────
 zero          ✓  ✓  ·  ·  ·  ·  ✗ 1/2
 nan           ·  u  ·  ·  ·  s  ·

✓ all passed   ✗ failed   u unsupported   s skipped   · nothing ran
n/m: so many of the cell's m cases

6 cases, 7 checks: 4 passed, 1 failed, 1 unsupported, 1 skipped, 1.2 s
worst error/budget 3e+07: logits of zero-21, sequence 1, token 2, rank 0
u 1 case (logits): no NaN
s 1 case (logits): needs 8 ranks

✗ 1 case (logits)
  smallest: zero-21, lengths 5 3, 2 ranks, CP 2 1
  where:    sequence 1, token 2, rank 0
  reason:   error 3e-02, allowed 1e-09
  rerun:    python -m tools verify --case zero-21"""
    )


def test_megatron_of_the_user_is_named_with_its_folder() -> None:
    printed = _printed(report(result(), megatron="0.20.0", megatron_path="/my/megatron"))

    assert "on Megatron-Core 0.20.0 from /my/megatron, torch" in printed


def test_several_versions_in_a_terminal() -> None:
    old = report(failure("a"), result("b", cp=(2, 1)), megatron="0.16.1")
    new = report(result("a"), result("b", cp=(2, 1)), result("c", cp=(16,), padding="nan"))
    printed = _printed(old, new, not_run={"cpu-mcore0171": "no Python 3.12"})

    assert printed.startswith("""\

               0.16.1            0.19.2
 padding \\ CP  1 2 3 4 6 8 16 m  1 2 3 4 6 8 16 m
 ────────────────────────────────────────────────
 zero          · ✗ · · · · ·  ✓  · ✓ · · · · ·  ✓
 nan           · · · · · · ·  ·  · · · · · · ✓  ·

m: CP sizes mixed in one batch
""")
    assert "\n0.16.1: conformance.adapters.impl on Megatron-Core 0.16.1, " in printed
    assert "\n2 cases, 2 checks: 1 passed, 1 failed, 0 unsupported, 0 skipped, " in printed
    assert "\n3 cases, 3 checks: 3 passed, 0 failed, 0 unsupported, 0 skipped, " in printed
    assert printed.endswith("\n\nnot run: cpu-mcore0171: no Python 3.12")


def test_four_versions_fit_into_80_columns() -> None:
    reports = [report(result(padding="embedding-1e4"), megatron=f"0.1{n}.2") for n in "6789"]
    header = next(line for line in _printed(*reports).splitlines() if "padding" in line)

    assert header.count("1 2 3 4 6 8 m") == 4
    assert "embedding-1e4 " in _printed(*reports)


def test_more_versions_than_80_columns_hold_come_in_tables_of_like_sizes() -> None:
    reports = [
        report(failure(cp=(2,)) if n == 9 else result(cp=(2,)), megatron=f"0.1{n}.2")
        for n in range(5, 10)
    ]
    lines = _printed(*reports).splitlines()
    heads = [line.split() for line in lines if re.fullmatch(r"( +0\.1\d\.2)+", line)]
    rows = [line.split() for line in lines if line.startswith(" zero")]

    assert heads == [["0.15.2", "0.16.2", "0.17.2"], ["0.18.2", "0.19.2"]]
    assert [row.count("✓") for row in rows] == [3, 1]
    assert [row.count("✗") for row in rows] == [0, 1]


def test_no_more_than_ten_kinds_are_printed() -> None:
    results = [failure(f"case-{letter}", reason=f"kind {letter}") for letter in "abcdefghijkl"]
    printed = _printed(report(*results), html="here/report.html")

    assert printed.count("rerun:") == 10
    assert printed.endswith("\nand 2 more kinds, see here/report.html")
    assert "more kinds" not in _printed(report(*results[:10]))


def test_rerun_line_is_never_wrapped_nor_read_as_markup() -> None:
    command = "python -m tools verify --case [red]x[/red] " + "--padding " * 20 + "end"

    assert f"  rerun:    {command}\n" in _printed(report(failure(rerun=command))) + "\n"


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        (({}, {}), ["0.19.2", "0.19.2"]),
        (({}, {"megatron": "0.16.1"}), ["0.19.2", "0.16.1"]),
        (({}, {"stock": True}), ["bound", "stock"]),
        (({}, {"megatron": "0.16.1", "stock": True}), ["0.19.2 bound", "0.16.1 stock"]),
        (({}, {"implementation": "mine"}), ["conformance.adapters.impl", "mine"]),
        (({}, {"megatron": ""}), ["0.19.2", "no Megatron"]),
    ],
)
def test_column_is_named_by_what_tells_it_from_the_others(changes, labels: list[str]) -> None:
    assert column_labels([report(**change) for change in changes]) == labels


def test_layouts_have_a_table_of_their_own() -> None:
    older = report(result("a"), result("b", padding="tp2-sp"), megatron="0.16.1")
    newer = report(result("a"), failure("b", padding="tp2-sp"), result("c", padding="pp2"))

    assert " layout  cases\n ─────────────\n tp2-sp  ✓ 1\n" in _printed(older)
    assert (
        " layout  0.16.1  0.19.2\n"
        " ──────────────────────\n"
        " tp2-sp  ✓ 1     ✗ 1/1\n"
        " pp2     ·       ✓ 1\n"
    ) in _printed(older, newer)
