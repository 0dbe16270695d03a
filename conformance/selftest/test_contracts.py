"""Contracts: what proves them, what breaks them, and what a report says of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import test_contracts as promises
from conformance.contracts import (
    BIND_AND_RESTORE,
    CONTRACTS,
    GROUPS,
    SCALE,
    Contract,
    ContractResult,
    Proof,
    contract_results,
)
from conformance.page import render_page
from conformance.profiles import profile_cases
from conformance.report import Report, ReportError
from conformance.selftest.report_samples import failure, report, result
from conformance.terminal import contracts_line, print_reports
from conformance.verdict import Verdict

IDS = [contract.name for contract in CONTRACTS]


@pytest.mark.parametrize("contract", CONTRACTS, ids=IDS)
def test_every_profile_runs_the_cases_of_a_contract(contract: Contract) -> None:
    quick = {case.id for case in profile_cases("quick")}
    assert [id for id in contract.cases if id not in quick] == []


def test_every_contract_has_a_test_of_its_own() -> None:
    tests = [test for name, test in vars(promises).items() if name.startswith("test_")]
    assert [test.pytestmark[0].args[1] for test in tests] == [c.cases for c in CONTRACTS]


# What breaks one


@pytest.mark.parametrize(
    ("contract", "check", "verdict"),
    [
        (GROUPS, "layout", Verdict.FAIL),
        (GROUPS, "refusal", Verdict.FAIL),
        (GROUPS, "gradients", Verdict.PASS),
        (BIND_AND_RESTORE, "order", Verdict.FAIL),
        (SCALE, "gradients", Verdict.FAIL),
        (SCALE, "loss", Verdict.FAIL),
        (SCALE, "layout", Verdict.PASS),
        (SCALE, "run", Verdict.FAIL),
        (SCALE, "suite", Verdict.FAIL),
    ],
)
def test_only_its_own_checks_break_a_contract(
    contract: Contract, check: str, verdict: Verdict
) -> None:
    rest = [result(check=each) for each in contract.checks if each != check]
    proof = contract.proof("a", [failure(check=check, reason="too large", where="there"), *rest])
    assert proof.verdict is verdict
    assert proof.reason == ("" if verdict is Verdict.PASS else f"{check}: too large; there")


def test_unsupported_case_proves_nothing_and_says_why() -> None:
    lacks = result(check="run", verdict=Verdict.UNSUPPORTED, reason="no mixed groups")
    assert SCALE.proof("a", [lacks]) == Proof(
        "scale", "a", Verdict.UNSUPPORTED, "run: no mixed groups"
    )


def test_case_without_a_check_of_the_contract_proves_nothing() -> None:
    proof = GROUPS.proof("a", [result(check="loss")])
    assert proof.verdict is Verdict.UNSUPPORTED
    assert proof.reason.startswith("no check of layout or refusal: the implementation does not")


# What a report says


def proofs(**cases: Verdict) -> list[Proof]:
    """Of the scale, for its first cases in another order than its own."""
    pairs = zip(SCALE.cases, cases.items(), strict=False)
    return [Proof("scale", id, verdict, f"of {name}") for id, (name, verdict) in pairs][::-1]


def test_contracts_that_were_not_asked_for_are_not_there() -> None:
    assert list(contract_results([])) == []
    (scale,) = contract_results(proofs(a=Verdict.PASS))
    assert (scale.name, scale.promise, scale.first) == ("scale", SCALE.promise, SCALE.cases[0])


def test_first_case_in_the_order_of_the_contract_is_named() -> None:
    found = proofs(a=Verdict.PASS, b=Verdict.UNSUPPORTED, c=Verdict.FAIL, d=Verdict.FAIL)
    (scale,) = contract_results(found)
    assert (scale.verdict, scale.first, scale.reason) == (Verdict.FAIL, SCALE.cases[2], "of c")
    assert list(scale.cases) == list(SCALE.cases[:4])


P, F, U = Verdict.PASS, Verdict.FAIL, Verdict.UNSUPPORTED
SOME = (
    ContractResult("groups", "they agree", {"a-1": P, "a-2": P}),
    ContractResult("padding", "it stays out", {"b-1": P, "b-2": F, "b-3": F}, "loss: <too> large"),
    ContractResult("scale", "it is absolute", {"c-1": U, "c-2": P}, "run: no"),
    ContractResult("CP size 1", "it is off", {"d-1": U}, "run: no"),
)
LINE = "contracts: groups ✓, padding ✗ b-2, scale u 1/2, CP size 1 u"


def test_line_of_a_run_names_the_first_case_that_fails() -> None:
    assert contracts_line(SOME) == LINE


def test_page_shows_contracts_in_one_line() -> None:
    assert f"<p>{LINE}</p>" in render_page([report(result(), contracts=SOME)])
    assert "contracts" not in render_page([report(result())])


def test_contracts_come_back_from_json() -> None:
    written = report(result(), contracts=SOME)
    assert Report.from_json(written.to_json()) == written


def test_report_of_before_there_were_contracts_is_read() -> None:
    plain = json.loads(report(result(), contracts=SOME).to_json())
    del plain["contracts"]
    assert Report.from_json(json.dumps(plain)).contracts == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "pass"}, "contracts[1]: 'verdict' is 'pass', but its cases give fail"),
        ({"cases": {"b-1": "good"}}, "contracts[1]: cases: 'b-1' is 'good', not pass/fail/"),
        ({"cases": []}, "contracts[1]: 'cases' is [], not of type dict"),
        ({"name": None}, "contracts[1]: 'name' is None, not of type str"),
    ],
)
def test_contract_that_contradicts_itself_is_refused(
    change: dict[str, object], words: str
) -> None:
    plain = json.loads(report(result(), contracts=SOME).to_json())
    plain["contracts"][1] |= change
    with pytest.raises(ReportError, match=re.escape(words)):
        Report.from_json(json.dumps(plain))


def test_line_is_printed_below_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    print_reports([replace(report(result()), contracts=SOME)])
    assert f"\n{LINE}\n" in capsys.readouterr().out


# A run of the suite


def test_run_looks_at_the_contracts_of_the_cases_asked_for_and_records_them_once(
    tmp_path: Path,
) -> None:
    asked = ("--case=ragged-4ranks-cp2.1.2", "--case=lens3-1ranks-cp1")
    of_the_oracle = ("--impl=conformance.adapters.reference", f"--report-dir={tmp_path}")
    folder = Path(promises.__file__).parent
    files = (folder / "test_conformance.py", folder / "test_contracts.py")
    command = [sys.executable, "-m", "pytest", *map(str, files), *asked, *of_the_oracle]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=True)
    plain = json.loads((tmp_path / "report.json").read_text())
    found = {one["name"]: one["cases"] for one in plain["contracts"]}
    assert found == {"bind and restore": {"ragged-4ranks-cp2.1.2": "pass"}}
    checks = [(one["id"], one["check"]) for one in plain["cases"]]
    assert len(checks) == len(set(checks)) == 15
    assert "\ncontracts: bind and restore ✓\n" in done.stdout
