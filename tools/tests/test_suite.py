"""The exit status of a run: 0 verified, 1 wrong, 2 nothing verified."""

from pathlib import Path

import pytest

from conformance.report import Report
from conformance.verdict import CheckResult, Verdict
from tools import suite


def _write_report(folder: Path, verdicts: str) -> Path:
    results = tuple(
        CheckResult(
            id=f"case{number}",
            check="logits",
            lengths=(3,),
            world=1,
            cp=(1,),
            padding="zero",
            verdict=Verdict(word),
        )
        for number, word in enumerate(verdicts.split())
    )
    Report(
        implementation="mine",
        megatron="",
        torch="2.13.0",
        python="3.12.1",
        transport="cpu",
        dtype="float64",
        stock=False,
        seconds=0.0,
        cases=results,
    ).write(folder)
    return folder / "report.json"


@pytest.mark.parametrize(
    ("verdicts", "of_pytest", "status"),
    [
        ("pass", 0, 0),
        ("pass skipped", 0, 0),
        ("pass fail", 1, 1),
        ("pass fail", 0, 1),  # a failure reported is a failure, whatever pytest says
        ("pass fail", 2, 1),
        ("skipped", 0, 2),
        ("", 5, 2),
        ("pass", 1, 1),  # a test failed outside the checks that are reported
        ("pass", 2, 2),  # interrupted: the rest was not verified
        ("pass", 3, 2),
    ],
)
def test_report_decides_and_pytest_may_only_make_it_worse(
    tmp_path: Path, verdicts: str, of_pytest: int, status: int
) -> None:
    assert suite.status(_write_report(tmp_path, verdicts), of_pytest) == status


def test_missing_report_means_nothing_was_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.status(tmp_path / "report.json", 0) == 2
    assert f"no report was written to {tmp_path / 'report.json'}" in capsys.readouterr().err


def test_broken_report_means_nothing_was_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")

    assert suite.status(path, 0) == 2
    assert f"{path}: 'schema' is None" in capsys.readouterr().err


def test_old_report_is_not_taken_for_the_outcome_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write_report(tmp_path, "pass")
    monkeypatch.setattr("pytest.main", lambda arguments: 0)  # a run that reports nothing

    assert suite.run_suite([], report_dir=tmp_path) == 2
    assert not path.exists()
