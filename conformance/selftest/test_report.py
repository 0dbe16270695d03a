"""What `report.json` promises to other tools, and the exit status to a shell."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.page import render_page
from conformance.report import Report, ReportError, read_reports, reports_json
from conformance.selftest.report_samples import failure, report, result
from conformance.verdict import Verdict, count, exit_status

CHECKOUT = Path(__file__).resolve().parents[2]


def test_json_has_exactly_the_promised_keys() -> None:
    data = json.loads(report(failure()).to_json())

    assert list(data) == [
        "schema", "implementation", "megatron", "torch", "python", "transport", "dtype", "stock",
        "seconds", "cases", "summary", "profile", "seed", "megatron_path",
        "contracts",
    ]  # fmt: skip
    assert data["schema"] == 1
    assert data["summary"] == {"pass": 0, "fail": 1, "unsupported": 0, "skipped": 0}
    assert data["cases"] == [
        {
            "id": "bad-2ranks",
            "check": "logits",
            "lengths": [5, 3],
            "world": 2,
            "cp": [2],
            "padding": "zero",
            "verdict": "fail",
            "error": 3e-2,
            "budget": 1e-9,
            "where": "sequence 1, token 2, rank 0",
            "reason": "error 3e-02, allowed 1e-09",
            "rerun": "python -m tools verify --case bad-2ranks",
        }
    ]


def test_json_comes_back_as_the_same_report() -> None:
    skipped = result("c", verdict=Verdict.SKIPPED, error=None, budget=None, cp=(), lengths=())
    unsupported = result("d", verdict=Verdict.UNSUPPORTED, cp=(2, 1, 1))
    written = report(
        result("a"), failure("b"), skipped, unsupported, stock=True, megatron_path="/m"
    )

    assert Report.from_json(written.to_json()) == written


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_error_that_is_no_number_becomes_null_and_a_reason(lost: float) -> None:
    text = report(failure(error=lost, reason="wrong"), failure(error=lost, reason="")).to_json()
    with_reason, without = Report.from_json(text).cases

    assert with_reason.error is None
    assert with_reason.reason == f"wrong (error is {lost})"
    assert without.reason == f"error is {lost}"
    assert "NaN" not in text
    assert "Infinity" not in text


def _broken(change) -> str:
    data = json.loads(report(result(), failure()).to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "holds [], not an object with the key 'schema'"),
        ("{}", "'schema' is None; this version reads 1"),
        ('{"schema": NaN}', "holds NaN, which is not JSON"),
        (_broken(lambda data: data.update(schema=2)), "'schema' is 2; this version reads 1"),
        (_broken(lambda data: data.pop("torch")), "the key 'torch' is missing"),
        (_broken(lambda data: data.update(stock=0)), "'stock' is 0, not of type bool"),
        (_broken(lambda data: data.update(seconds="1")), "'seconds' is '1', not a number"),
        (_broken(lambda data: data.update(cases={})), "'cases' is {}, not of type list"),
        (_broken(lambda data: data["cases"].pop()), "'summary' is {'pass': 1, 'fail': 1, "),
        (_broken(lambda data: data["cases"].append(3)), "cases[2] is 3, not an object"),
        (
            _broken(lambda data: data["cases"][1].update(verdict="ok")),
            "cases[1]: 'verdict' is 'ok', not pass/fail/unsupported/skipped",
        ),
        (
            _broken(lambda data: data["cases"][1].pop("where")),
            "cases[1]: the key 'where' is missing",
        ),
        (
            _broken(lambda data: data["cases"][0].update(cp=[2, True])),
            "cases[0]: 'cp' is [2, True], not a list of integers",
        ),
        (
            _broken(lambda data: data["cases"][0].update(world=True)),
            "cases[0]: 'world' is True, not of type int",
        ),
        (
            _broken(lambda data: data["cases"][0].update(error="small")),
            "cases[0]: 'error' is 'small', not a number",
        ),
    ],
)
def test_file_that_is_no_report_is_named_with_its_key(text: str, words: str) -> None:
    with pytest.raises(ReportError) as raised:
        Report.from_json(text, source="report/report.json")

    assert str(raised.value).startswith("report/report.json: ")
    assert words in str(raised.value)


def test_reports_of_several_versions_come_back_from_one_file(tmp_path: Path) -> None:
    reports = [report(result(), megatron="0.16.1"), report(failure())]
    path = tmp_path / "report-all.json"
    path.write_text(reports_json(reports))

    assert read_reports(path) == reports


def test_folder_gets_json_and_page_and_nothing_else(tmp_path: Path) -> None:
    written = report(result())
    written.write(tmp_path / "new" / "report")
    written.write(tmp_path / "new" / "report")  # again, over its own files

    folder = tmp_path / "new" / "report"
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]
    assert read_reports(folder / "report.json") == [written]
    assert (folder / "report.html").read_text() == render_page([written])


def test_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    report(result()).write(tmp_path)
    before = (tmp_path / "report.json").read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        report(result(), seconds=math.nan).write(tmp_path)

    assert (tmp_path / "report.json").read_text() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_write_that_fails_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()  # a file cannot take its place
    with pytest.raises(OSError, match=r"report\.json"):
        report(result()).write(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_report_is_read_and_drawn_without_torch() -> None:
    code = (
        "import sys, conformance.report, conformance.page, conformance.terminal\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ("pass", 0),
        ("pass skipped unsupported", 0),
        ("pass fail", 1),
        ("fail skipped", 1),
        ("skipped unsupported", 2),
        ("", 2),
    ],
)
def test_exit_status(verdicts: str, status: int) -> None:
    results = [result(verdict=Verdict(word)) for word in verdicts.split()]

    assert exit_status(results) == status
    assert count(results)["pass"] == verdicts.split().count("pass")
