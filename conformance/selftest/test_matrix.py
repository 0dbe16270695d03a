"""Which cell a case belongs to, and what the cell says."""

import math

import pytest

from conformance import matrix
from conformance.lengths import COLUMNS
from conformance.profiles import rows
from conformance.selftest.report_samples import failure, result
from conformance.verdict import Verdict


@pytest.mark.parametrize(
    ("verdicts_of_cases", "text"),
    [
        (["pass pass", "pass"], "✓"),
        (["pass fail", "pass", "skipped"], "✗ 1/3"),
        (["fail fail"], "✗ 1/1"),
        (["pass unsupported", "pass"], "u 1/2"),
        (["skipped", "unsupported"], "u 1/2"),
        (["skipped", "skipped"], "s"),
        (["pass", "skipped", "skipped"], "s 2/3"),
    ],
)
def test_cell_is_a_pass_only_if_every_check_passed(
    verdicts_of_cases: list[str], text: str
) -> None:
    results = [
        result(f"case{number}", verdict=Verdict(word))
        for number, words in enumerate(verdicts_of_cases)
        for word in words.split()
    ]

    assert matrix.cells(results)["zero", "2"].text == text


@pytest.mark.parametrize(
    ("cp", "column"), [((1,), "1"), ((4, 4), "4"), ((2, 1, 1), "mixed"), ((16,), "16"), ((), "-")]
)
def test_column_of_a_case(cp: tuple[int, ...], column: str) -> None:
    assert matrix.cp_column(result(cp=cp)) == column


def test_unusual_sizes_get_columns_in_order() -> None:
    results = [result(cp=(16,)), result(cp=()), result(cp=(5,)), result(cp=(2, 1))]

    assert matrix.columns(results) == ("1", "2", "3", "4", "5", "6", "8", "16", "mixed", "-")


def test_worst_is_by_error_over_budget() -> None:
    results = [
        result("large error, large budget", error=1e-2, budget=1.0),
        result("nearest", error=5e-10, budget=1e-9),
        result("exact", error=0.0, budget=0.0),
        result("not measured", error=None),
    ]

    assert matrix.worst(results) == results[1]
    assert matrix.worst(results[3:]) is None


@pytest.mark.parametrize(("error", "budget"), [(math.nan, 1e-9), (1.0, 0.0), (math.inf, 1e-9)])
def test_nothing_is_worse_than_nan_or_a_wrong_integer(error: float, budget: float) -> None:
    bad = failure(error=error, budget=budget)

    assert matrix.worst([failure(error=1e100), bad, failure(error=1e100)]) == bad


def test_failures_that_differ_in_numbers_are_one_kind() -> None:
    results = [
        failure("a", reason="dk of layer 3: error 3.1e-02, allowed 1e-09", world=4),
        failure("b", reason="dk of layer 0: error nan, allowed 1e-09", lengths=(9, 1)),
        failure("c", reason="dk of layer 0: error 7, allowed 1e-09", lengths=(5, 1)),
        failure("c", reason="dk of layer 0: error 8, allowed 1e-09", check="gradients"),
        failure("d", reason="dv of layer 0: error 7, allowed 1e-09"),
        result("e"),
    ]
    first, second = matrix.kinds(results, Verdict.FAIL)

    assert (first.cases, first.smallest.id, first.checks) == (3, "c", ("logits", "gradients"))
    assert (second.cases, second.smallest.id) == (1, "d")


def test_layouts_stand_apart_from_padding_cases_with_the_cases_they_have() -> None:
    results = [
        result("a", padding="ragged"),
        result("b", padding="tp2-sp"),
        result("c", padding="tp2-sp", cp=(4,)),
        result("d", padding="balanced", cp=(1, 4)),
        failure("e", padding="pp2-vpp2-static2"),
        result("f", padding="own"),
    ]
    cells = matrix.layout_cells(results)

    assert matrix.paddings(results) == ("ragged", "own")
    assert {name: cell.counted for name, cell in cells.items()} == {
        "tp2-sp": "✓ 2",
        "balanced": "✓ 1",
        "pp2-vpp2-static2": "✗ 1/1",
    }


def test_every_row_that_is_no_padding_case_is_a_layout() -> None:
    results = [result(padding=name) for name in rows()]
    assert set(matrix.paddings(results)) == {*COLUMNS, "own"}
