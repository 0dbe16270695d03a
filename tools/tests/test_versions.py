"""One run over every version: what becomes of those that fail, and of those that do not run."""

import json
from pathlib import Path

import pytest

from conformance.report import read_reports
from tools import versions
from tools.tests.test_suite import _write_report


@pytest.mark.parametrize(
    ("of_versions", "not_run", "status"),
    [
        ([0, 0], [], 0),
        ([0, 2], [], 2),
        ([0, 0], ["cpu-mcore0171"], 2),
        ([0, 1], ["cpu-mcore0171"], 1),
        ([2, 1], [], 1),
        ([], [], 2),
    ],
)
def test_failure_outweighs_a_version_not_verified(
    of_versions: list[int], not_run: list[str], status: int
) -> None:
    assert versions.status(of_versions, not_run) == status


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "cpu-mcore0171: exit 2 (6.80 seconds) /x> /bin/uv venv -p cpython3.12 "
            "--allow-existing --python-preference system /x/.tox/cpu-mcore0171 pid=1",
            "needs Python 3.12, and none was found",
        ),
        (
            "cpu-mcore0171: failed with could not find python interpreter matching any of the "
            "specs python3.12",
            "needs Python 3.12, and none was found",
        ),
        ("other", "tox ended with 2 and no report was written; its output is above"),
    ],
)
def test_reason_comes_from_the_output_of_tox(line: str, why: str) -> None:
    assert versions.why_not_run(2, ["cpu-mcore0171: venv> uv venv -p cpython3.12", line]) == why


def _play_tox(monkeypatch: pytest.MonkeyPatch, root: Path, outcomes: dict[str, str]) -> list[str]:
    """Let every environment end as told, without tox; answers the commands as they are started."""
    started: list[str] = []

    def stream(command: list[str]) -> tuple[int, list[str]]:
        started.append(" ".join(command[-5:]))
        version = command[command.index("-e") + 1].removeprefix("cpu-mcore")
        verdicts = outcomes.get(version)
        if verdicts is None:
            return 2, []
        _write_report(root / "report" / f"mcore{version}", verdicts.removesuffix("!"))
        return int("fail" in verdicts or verdicts.endswith("!")), []

    monkeypatch.setattr(versions, "CHECKOUT", root)
    monkeypatch.setattr(versions, "_tox", lambda: ["tox"])
    monkeypatch.setattr(versions, "_stream", stream)
    return started


def test_every_version_runs_with_the_options_and_lands_in_one_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = _play_tox(monkeypatch, tmp_path, dict.fromkeys(versions.VERSIONS, "pass"))

    assert versions.verify_all(["-x"]) == 0
    assert started == [f"run -e cpu-mcore{version} -- -x" for version in versions.VERSIONS]
    assert len(read_reports(tmp_path / "report" / "report-all.json")) == len(started)
    assert (tmp_path / "report" / "report.html").exists()
    assert "not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("newest", "status", "words"),
    [
        (None, 2, "not run: cpu-mcore0192: tox ended with 2 and no report was written"),
        ("fail", 1, "1 case, 1 check: 0 passed, 1 failed"),
        ("skipped", 2, "0 passed, 0 failed, 0 unsupported, 1 skipped"),
        ("pass!", 2, "not run: cpu-mcore0192: its checks passed, but tox ended with 1"),
    ],
)
def test_one_version_that_is_not_verified_spoils_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    newest: str | None,
    status: int,
    words: str,
) -> None:
    good = dict.fromkeys(versions.VERSIONS[:-1], "pass")
    _play_tox(monkeypatch, tmp_path, good | ({"0192": newest} if newest else {}))

    assert versions.verify_all([]) == status
    assert words in capsys.readouterr().out


def test_old_report_of_a_version_that_does_not_run_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _write_report(tmp_path / "report" / "mcore0192", "fail")
    _play_tox(monkeypatch, tmp_path, {})

    assert versions.verify_all([]) == 2
    assert json.loads((tmp_path / "report" / "report-all.json").read_text()) == []


def test_every_version_has_an_environment_that_writes_where_it_is_looked_for() -> None:
    settings = (Path(__file__).resolve().parents[2] / "tox.ini").read_text()

    for version in versions.VERSIONS:
        assert f"mcore{version}: python -m tools verify --report-dir report/mcore{version} " in (
            settings
        )
