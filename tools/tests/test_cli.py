"""What the commands hand on, and how they end."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tools import cli
from tools.suite import CHECKOUT
from tools.tests.test_suite import _write_report


def _arguments_of_pytest(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What `python -m tools verify WORDS` would start pytest with."""
    seen: list[str] = []

    def main(arguments: list[str]) -> int:
        seen.extend([os.getcwd(), *arguments])  # noqa: PTH109
        return 5

    monkeypatch.setattr("pytest.main", main)
    outcome = CliRunner().invoke(cli.app, ["verify", *words])

    assert outcome.exit_code == 2, outcome.output
    assert seen, outcome.output
    return seen


def _write_megatron(folder: Path) -> None:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = MINOR = PATCH = 1\nPRE_RELEASE = ''")


def test_verify_starts_the_suite_from_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    assert _arguments_of_pytest(monkeypatch) == [
        str(CHECKOUT),
        "conformance/test_conformance.py",
        "conformance/test_contracts.py",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-rN",
        f"--report-dir={tmp_path / 'report'}",
        "--impl=conformance.adapters.impl",
        "--profile=default",
        "--seed=0",
    ]
    assert Path.cwd() == tmp_path


def test_verify_hands_every_option_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text("")
    _write_megatron(tmp_path / "megatron-lm")
    seen = _arguments_of_pytest(
        monkeypatch,
        "--impl=mine", "--profile", "deep", "--case", "a-2ranks", "--case", "b", "-k", "x and y",
        "--batch", "mine.jsonl", "--megatron-path", "megatron-lm", "--stock",
        "--report-dir", "out", "--timeout", "2.5", "--seed", "7", "-x", "-rs", "--durations", "3",
    )  # fmt: skip

    assert seen[7:] == [
        f"--report-dir={tmp_path / 'out'}",
        "--impl=mine",
        "--profile=deep",
        "--seed=7",
        "--case=a-2ranks",
        "--case=b",
        "-k=x and y",
        f"--batch={tmp_path / 'mine.jsonl'}",
        f"--megatron-path={tmp_path / 'megatron-lm'}",
        "--stock",
        "--case-timeout=2.5",
        "-x",
        "-rs",
        "--durations",
        "3",
    ]


def test_verify_refuses_a_batch_that_is_not_there() -> None:
    outcome = CliRunner().invoke(cli.app, ["verify", "--batch", "nowhere.jsonl"])

    assert outcome.exit_code == 2
    assert "nowhere.jsonl" in outcome.output


def test_verify_refuses_a_megatron_that_is_not_there() -> None:
    words = ["verify", "--megatron-path", "nowhere"]
    outcome = CliRunner().invoke(cli.app, words, env={"COLUMNS": "400"})

    assert outcome.exit_code == 2
    assert "nowhere is no folder: --megatron-path takes the folder of" in outcome.output


def test_report_prints_the_matrix_and_draws_the_page(tmp_path: Path) -> None:
    path = _write_report(tmp_path, "pass fail")
    (tmp_path / "report.html").unlink()
    outcome = CliRunner().invoke(cli.app, ["report", str(path)])

    assert outcome.exit_code == 0, outcome.output
    assert "2 cases, 2 checks: 1 passed, 1 failed" in outcome.output
    assert "case1" in (tmp_path / "report.html").read_text()


def test_report_names_the_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"schema": 9}')
    outcome = CliRunner().invoke(cli.app, ["report", str(path)], env={"COLUMNS": "400"})

    assert outcome.exit_code == 2
    assert "broken.json: 'schema' is 9; this version reads 1" in outcome.output


def test_verify_all_keeps_the_folders_of_its_reports_to_itself() -> None:
    outcome = CliRunner().invoke(cli.app, ["verify-all", "--report-dir=x"])

    assert outcome.exit_code == 2
    assert "verify-all writes report/" in outcome.output


def test_verify_all_takes_no_megatron_of_the_user() -> None:
    words = ["verify-all", "--megatron-path=x"]
    outcome = CliRunner().invoke(cli.app, words, env={"COLUMNS": "400"})

    assert outcome.exit_code == 2
    assert "verify-all verifies released versions; give --megatron-path to verify" in (
        outcome.output
    )
