"""Verify every supported Megatron-Core, each in its own tox environment, and print one table."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance.page import render_page
from conformance.report import (
    HTML_NAME,
    JSON_NAME,
    Report,
    ReportError,
    read_reports,
    reports_json,
    write_file,
)
from conformance.terminal import print_reports
from conformance.verdict import exit_status

from .suite import CHECKOUT, NOTHING_VERIFIED

VERSIONS = ("0153", "0161", "0171", "0182", "0192")

# uv's refusal as tox-uv shows it, and tox's own.
_NO_PYTHON = re.compile(
    r"exit \d+ .* venv -p \D*(?P<uv>\d+\.\d+)"
    r"|could not find python interpreter\D*(?P<tox>\d+\.\d+)"
)


def verify_all(arguments: Sequence[str]) -> int:
    """Run the suite on every version, one after another: each may use all cores.

    Returns:
        0: verified on all; 1: wrong on one; 2: on one nothing could be verified.
    """
    folder = CHECKOUT / "report"
    reports: list[Report] = []
    not_run: dict[str, str] = {}
    for version in VERSIONS:
        outcome = _verify(version, arguments, folder / f"mcore{version}" / JSON_NAME)
        if isinstance(outcome, Report):
            reports.append(outcome)
        else:
            not_run[f"cpu-mcore{version}"] = outcome
    write_file(folder / "report-all.json", reports_json(reports))
    write_file(folder / HTML_NAME, render_page(reports, not_run=not_run))
    print_reports(reports, html=f"report/{HTML_NAME}", not_run=not_run)
    return status([exit_status(report.cases) for report in reports], not_run)


def status(of_versions: Iterable[int], not_run: Iterable[str]) -> int:
    """A failure outweighs a version that was not verified; that outweighs a pass."""
    found = set(of_versions) | {NOTHING_VERIFIED for _ in not_run}
    if 1 in found:
        return 1
    return 0 if found == {0} else NOTHING_VERIFIED


def _verify(version: str, arguments: Sequence[str], path: Path) -> Report | str:
    """The report of one version, or why there is none."""
    path.unlink(missing_ok=True)
    code, lines = _stream([*_tox(), "run", "-e", f"cpu-mcore{version}", "--", *arguments])
    try:
        (report,) = read_reports(path)
    except FileNotFoundError:
        return why_not_run(code, lines)
    except ReportError as error:
        return str(error)
    if code and exit_status(report.cases) == 0:
        return f"its checks passed, but tox ended with {code}; its output is above"
    return report


def why_not_run(code: int, lines: Iterable[str]) -> str:
    """The reason in tox's own output that an environment wrote no report."""
    for line in lines:
        if missing := _NO_PYTHON.search(line):
            return f"needs Python {missing['uv'] or missing['tox']}, and none was found"
    return f"tox ended with {code} and no report was written; its output is above"


def _tox() -> list[str]:
    if importlib.util.find_spec("tox"):
        return [sys.executable, "-m", "tox"]
    if found := shutil.which("tox"):
        return [found]
    raise SystemExit("verify-all needs tox: pip install tox tox-uv, or run tox -e cpu-all")


def _stream(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command, show its output as it comes, and keep it."""
    print("$", *command, flush=True)
    lines = []
    with subprocess.Popen(
        command,
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return process.returncode, lines
