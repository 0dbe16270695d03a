"""The suite turns red for every fault, for the right reason, and green again without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from conformance.adapters.reference import oracle
from conformance.build import TaskBuilder
from conformance.case import parse_case
from conformance.contracts import CONTRACTS, Contract
from conformance.pool import RankPools
from conformance.selftest.faults import FAULTS, Fault
from conformance.selftest.faulty import FaultyBuilder
from conformance.suite import Suite
from conformance.verdict import CheckResult, Verdict, exit_status

FAULTY = "conformance.selftest.faulty"
PASSING = (
    "ragged-4ranks-cp2",
    "ragged-4ranks-cp4+2+1",
    "ragged-4ranks-cp2.4.2",
    "few_one-4ranks-cp4",
    "short-4ranks-cp4-single",
    "poisoned_nan-4ranks-cp4",
    "uneven-4ranks-cp2-teach-entropy-qwen3",
    "refused_emptysequence-4ranks-cp2",
)
BROKEN_BY = {
    "groups": "group_has_too_few_members",
    "bind and restore": "group_is_put_back_only_if_nothing_raises",
    "positions": "positions_run_through_the_pack",
    "padding": "nan_times_zero",
    "scale": "groups_weigh_by_their_cp_size",
    "CP size 1": "static_group_at_cp_size_1",
}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    torch.set_num_threads(1)
    with RankPools(timeout_s=10.0) as pools:
        yield pools


@pytest.fixture
def suite(pools: RankPools) -> Suite:
    return Suite(FAULTY, pools, oracle, FaultyBuilder(oracle))


def with_fault(suite: Suite, fault: Fault) -> Suite:
    return dataclasses.replace(suite, builder=FaultyBuilder(oracle, fault=fault.name))


def failed(results: list[CheckResult]) -> dict[str, str]:
    """Where and why, by name of the check that failed."""
    return {
        result.check: f"{result.where} | {result.reason}"
        for result in results
        if result.verdict is Verdict.FAIL
    }


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_is_caught_and_named(suite: Suite, fault: Fault) -> None:
    case = parse_case(fault.case)
    wrong = with_fault(suite, fault).verify(case)
    assert exit_status(wrong) == 1
    for check, words in fault.says.items():
        assert words in failed(wrong).get(check, f"{check} passed")
    right = suite.verify(case)
    assert failed(right) == {}
    assert exit_status(right) == 0


@pytest.mark.parametrize("contract", CONTRACTS, ids=BROKEN_BY)
def test_contract_is_broken_by_a_fault(suite: Suite, contract: Contract) -> None:
    fault = FAULTS[BROKEN_BY[contract.name]]
    results = with_fault(suite, fault).verify(parse_case(fault.case))
    proof = contract.proof(fault.case, results)
    assert (proof.verdict, bool(proof.reason)) == (Verdict.FAIL, True)


@pytest.mark.parametrize("id", PASSING)
def test_production_implementation_passes(pools: RankPools, id: str) -> None:
    suite = Suite("conformance.adapters.impl", pools, oracle, TaskBuilder(oracle))
    results = suite.verify(parse_case(id))
    assert failed(results) == {}
    assert exit_status(results) == 0
