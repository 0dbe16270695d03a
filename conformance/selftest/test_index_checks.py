"""The index suite passes the oracle, and turns red for every fault by the check meant for it."""

import pytest
import torch

from conformance.adapters import reference
from conformance.fixture_files import layout_files, plan_files
from conformance.index_cases import index_cases, packing_case, plan_case, refusal_case, verify
from conformance.index_search import PACKINGS, PLANS, search
from conformance.selftest.faulty_index import (
    FAULTS,
    AnyPowerOfTwo,
    Breaks,
    DropsTheLastToken,
    LabelsThatWrap,
    MergesInGroupOrder,
    MirrorFirst,
    OnlyPacks,
    SaysNo,
)
from conformance.verdict import Verdict

CASES = index_cases()
FEW_CASES = [
    packing_case("ragged", 2, 1),
    packing_case("ragged", 4, 2),
    plan_case("ragged", 4),
    plan_case("uneven", 6),
    refusal_case(4),
]


def _results(index, cases=FEW_CASES):
    return [
        result
        for case in cases
        for result in verify(case, index, reference.index, rerun="pytest -k")
    ]


def _failures(index, cases=FEW_CASES):
    return [result for result in _results(index, cases) if result.verdict is Verdict.FAIL]


def test_there_are_cases_of_every_check_and_size() -> None:
    checks = {name for case in CASES for name in case.checks}
    sizes = {case.cp for case in CASES}

    assert checks == {
        "layout", "positions", "boundaries", "unpack", "labels", "schedule", "split", "merge",
    }  # fmt: skip
    assert {(size,) for size in (1, 2, 3, 4, 6, 8)} <= sizes
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_caught_by_its_check(fault) -> None:
    assert FAULTS[fault] in {failure.check for failure in _failures(fault())}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_failure_says_where_and_why_and_how_to_repeat(fault) -> None:
    for failure in _failures(fault()):
        assert failure.where
        assert failure.reason
        assert failure.rerun == f"pytest -k {failure.id}"


@pytest.mark.parametrize("index_case", CASES, ids=lambda index_case: index_case.id)
def test_oracle_meets_every_case_and_what_was_worked_by_hand(index_case) -> None:
    assert _failures(reference.index, [index_case]) == []


def test_every_fixture_is_a_case() -> None:
    names = [file.name for file in layout_files()] + [file.name for file in plan_files()]

    assert {f"index-fixture_{name}" for name in names} <= {case.id for case in CASES}
    assert len(names) == 11 + 14


@pytest.mark.parametrize("file", layout_files(), ids=lambda file: file.name)
def test_fixture_agrees_with_itself(file) -> None:
    """The tokens it spells out are those that its rows name."""
    sequences = [
        100 * (place + 1) + torch.arange(length) for place, length in enumerate(file.lengths)
    ]
    labels = [file.labels(sequence) for sequence in sequences]
    for cp_rank in range(file.cp_size):
        tokens, _, _ = file.pack(sequences, cp_rank=cp_rank, pad_value=0)
        of_rank, _, _ = file.pack(labels, cp_rank=cp_rank, pad_value=-100)
        assert torch.equal(tokens, file.tokens[cp_rank])
        assert torch.equal(of_rank, file.labels_of_ranks[cp_rank])


def test_wrong_row_is_named_and_drawn() -> None:
    (failure,) = [one for one in _failures(MirrorFirst(), FEW_CASES[:1]) if one.check == "layout"]

    assert failure.where == (
        "rank 0, row 0; expected [s0: 0 1 . . | s1: 0 1 2 3 12 . . . | "
        "s2: 0 1 2 3 4 5 18 19 20 21 22 . | s3: 0 .], got [s0: . . 0 1 | s1: 12 . . . 0 1 2 3 | "
        "s2: 18 19 20 21 22 . 0 1 2 3 4 5 | s3: . 0]"
    )
    assert failure.reason == "expected 100, got -1"


def test_lost_token_is_named() -> None:
    failure = _failures(DropsTheLastToken(), FEW_CASES[:1])[0]

    assert failure.where == "sequence 3, position 0"
    assert failure.reason == "held 0 times over all ranks, expected once"


def test_missing_method_is_unsupported_by_name() -> None:
    results = _results(OnlyPacks(), [packing_case("ragged", 1, 1)])
    reasons = {result.check: result.reason for result in results}

    assert {result.check for result in results if result.verdict is Verdict.UNSUPPORTED} == {
        "unpack",
        "labels",
    }
    assert reasons["labels"] == "its `index` has no method labels"


def test_module_without_index_is_unsupported() -> None:
    results = _results(None)

    assert {result.verdict for result in results} == {Verdict.UNSUPPORTED}
    assert {result.reason for result in results} == {"the module offers no `index`"}


def test_what_it_says_it_does_not_support_is_unsupported() -> None:
    results = _results(SaysNo())
    unsupported = {
        result.check: result.reason for result in results if result.verdict is Verdict.UNSUPPORTED
    }

    assert unsupported == {
        "labels": "labels are the trainer's business",
        "merge": "not implemented",
    }
    assert not [result for result in results if result.verdict is Verdict.FAIL]


def test_surprising_exception_is_a_failure_by_name() -> None:
    failures = _failures(Breaks())

    assert {failure.check for failure in failures} == {"labels"}
    assert {failure.reason for failure in failures} == {"raised KeyError: 'surprise'"}


@pytest.mark.parametrize(
    ("cases", "fault", "smallest"),
    [
        (PACKINGS, MirrorFirst, (1,)),
        (PACKINGS, LabelsThatWrap, (1,)),
        (PLANS, MergesInGroupOrder, (1, 1)),
        (PLANS, AnyPowerOfTwo, (2,)),  # on 3 ranks of 1
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_search_shows_the_smallest_batch_that_goes_wrong(cases, fault, smallest) -> None:
    results = search(cases, fault(), reference.index, rerun="pytest -k")
    failures = [result for result in results if result.verdict is Verdict.FAIL]

    assert FAULTS[fault] in {failure.check for failure in failures}
    assert failures[0].lengths == smallest


@pytest.mark.parametrize("cases", [PACKINGS, PLANS], ids=["packing", "plan"])
def test_search_finds_nothing_wrong_with_the_oracle(cases) -> None:
    results = search(cases, reference.index, reference.index, rerun="pytest -k")
    assert {result.verdict for result in results} == {Verdict.PASS}
