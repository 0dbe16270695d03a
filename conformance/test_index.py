"""The index logic alone, without Megatron: `pytest conformance/test_index.py`, or `tox -e index`.

`--impl my.module` puts another implementation to the test; it may offer `index` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .index_cases import IndexCase, index_cases, verify
from .protocol import load
from .suite import Suite
from .verdict import CheckResult

CASES = index_cases()


@pytest.mark.parametrize("index_case", CASES, ids=[case.id for case in CASES])
def test_index(
    index_case: IndexCase, suite: Suite, record: Callable[[list[CheckResult]], None]
) -> None:
    """Split, pack, unpack and merge of one batch equal the oracle's, exactly."""
    index = getattr(load(suite.implementation), "index", None)
    rerun = f"pytest conformance/test_index.py --impl {suite.implementation} -k"
    record(verify(index_case, index, suite.oracle.index, rerun=rerun))
