"""The index logic alone, without Megatron: `pytest conformance/test_index.py`, or `tox -e index`.

`--impl my.module` puts another implementation to the test; it may offer `index` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis.strategies import SearchStrategy

from .index_cases import IndexCase, index_cases, verify
from .index_search import COLUMN, PACKINGS, PLANS, search
from .protocol import load
from .suite import Suite
from .verdict import CheckResult

CASES = index_cases()


Record = Callable[[list[CheckResult]], None]


@pytest.mark.parametrize("index_case", CASES, ids=[case.id for case in CASES])
def test_index(index_case: IndexCase, suite: Suite, record: Record) -> None:
    """Split, pack, unpack and merge of one batch equal the oracle's, exactly."""
    record(verify(index_case, _index(suite), suite.oracle.index, rerun=_rerun(suite)))


@pytest.mark.parametrize("cases", [PACKINGS, PLANS], ids=["packing", "plan"])
def test_any(cases: SearchStrategy[IndexCase], suite: Suite, record: Record) -> None:
    """So do those of batches drawn at random; the smallest one that does not is shown."""
    results = search(cases, _index(suite), suite.oracle.index, rerun=_rerun(suite))
    record([replace(result, rerun=f"{_rerun(suite)} {COLUMN}") for result in results])


def _index(suite: Suite) -> object:
    """What the module under test offers; None if nothing."""
    return getattr(load(suite.implementation), "index", None)


def _rerun(suite: Suite) -> str:
    return f"pytest conformance/test_index.py --impl {suite.implementation} -k"
