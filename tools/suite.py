"""Run the conformance suite in this process, and turn what it reported into an exit status."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.report import JSON_NAME, ReportError, read_reports
from conformance.verdict import exit_status

CHECKOUT = Path(__file__).resolve().parents[1]
NOTHING_VERIFIED = 2


def run_suite(arguments: Sequence[str], *, report_dir: Path) -> int:
    """Run pytest on the suite and answer 0, 1 or 2 as `conformance.verdict.exit_status` does.

    Args:
        arguments: options of the suite and of pytest.
        report_dir: absolute; an older report in it is removed first, so that it is never taken for
            the outcome of this run.
    """
    import pytest  # not at the top: `verify-all` and `report` work without it

    path = report_dir / JSON_NAME
    path.unlink(missing_ok=True)
    with contextlib.chdir(CHECKOUT):
        of_pytest = pytest.main(
            [
                "conformance/test_conformance.py",
                "conformance/test_contracts.py",
                "-p",
                "no:cacheprovider",
                "--tb=no",  # the table says what failed; both come back with --tb=short -rf
                "-rN",
                f"--report-dir={report_dir}",
                *arguments,
            ]
        )
    return status(path, int(of_pytest))


def status(path: Path, of_pytest: int) -> int:
    """The exit status of a run: the report decides, and pytest may only make it worse.

    Args:
        path: the report, if one was written.
        of_pytest: 0 passed, 1 failed, 2 interrupted, 3 internal error, 4 usage, 5 nothing ran.
    """
    try:
        (report,) = read_reports(path)
    except FileNotFoundError:
        print(f"no report was written to {path}: nothing was verified", file=sys.stderr)
        return NOTHING_VERIFIED
    except ReportError as error:
        print(error, file=sys.stderr)
        return NOTHING_VERIFIED
    reported = exit_status(report.cases)
    if reported == 0 and of_pytest != 0:
        print(
            f"every check passed, but pytest ended with {of_pytest}; --tb=short says why",
            file=sys.stderr,
        )
        return 1 if of_pytest == 1 else NOTHING_VERIFIED
    return reported
