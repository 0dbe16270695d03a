"""The control: the oracle, run as an implementation, passes every case of the quick profile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.adapters.reference import oracle
from conformance.batch_file import batches, read_documents
from conformance.build import TaskBuilder
from conformance.case import parse_case
from conformance.conftest import TEXTS
from conformance.pool import RankPools
from conformance.profiles import profile_cases
from conformance.suite import Suite
from conformance.verdict import Verdict, exit_status

SHORT = sorted(read_documents(TEXTS), key=lambda document: len(document.input_ids))[80:86]
DOCUMENTS = batches(tuple(SHORT), max_tokens=1024)  # every rank runs the oracle on all of it
QUICK = profile_cases("quick", num_texts=len(DOCUMENTS))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    torch.set_num_threads(1)
    with RankPools(max_ranks=24, timeout_s=60.0) as pools:
        yield pools


def test_quick_profile_is_not_small() -> None:
    assert len(QUICK) > 60
    assert {case.world for case in QUICK} >= {1, 3, 4, 6, 8}
    assert any(case.column == "text" for case in QUICK)


@pytest.mark.parametrize("id", [case.id for case in QUICK])
def test_oracle_passes_as_an_implementation(pools: RankPools, id: str) -> None:
    builder = TaskBuilder(oracle, texts=DOCUMENTS)
    suite = Suite("conformance.adapters.reference", pools, oracle, builder)
    results = suite.verify(parse_case(id))
    assert [result for result in results if result.verdict is not Verdict.PASS] == []
    assert exit_status(results) == 0
