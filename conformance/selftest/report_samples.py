"""Results and reports with everything filled in; a test names only what it is about."""

import dataclasses

from conformance.report import Report
from conformance.verdict import CheckResult, Verdict


def result(case: str = "short-2ranks", **changes) -> CheckResult:
    usual = CheckResult(
        id=case,
        check="logits",
        lengths=(5, 3),
        world=2,
        cp=(2,),
        padding="zero",
        verdict=Verdict.PASS,
        error=1e-12,
        budget=1e-9,
    )
    return dataclasses.replace(usual, **changes)


def failure(case: str = "bad-2ranks", **changes) -> CheckResult:
    usual = {
        "verdict": Verdict.FAIL,
        "error": 3e-2,
        "where": "sequence 1, token 2, rank 0",
        "reason": "error 3e-02, allowed 1e-09",
        "rerun": f"python -m tools verify --case {case}",
    }
    return result(case, **(usual | changes))


def report(*cases: CheckResult, **changes) -> Report:
    usual = Report(
        implementation="conformance.adapters.impl",
        megatron="0.19.2",
        torch="2.13.0",
        python="3.12.1",
        transport="cpu",
        dtype="float64",
        stock=False,
        seconds=1.25,
        cases=cases,
        profile="quick",
        seed=7,
    )
    return dataclasses.replace(usual, **changes)
