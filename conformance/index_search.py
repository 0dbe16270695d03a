"""Batches that nobody thought of: drawn, and shrunk to the smallest one that goes wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from .index_cases import IndexCase, packing_case, plan_case, verify
from .protocol import IndexImplementation
from .verdict import CheckResult, Verdict

COLUMN = "any"
_SEQLENS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)
PACKINGS = st.builds(
    partial(packing_case, COLUMN), st.integers(1, 8), st.integers(1, 4), seqlens=_SEQLENS
)
PLANS = st.builds(partial(plan_case, COLUMN), st.integers(1, 12), seqlens=_SEQLENS)


def search(
    cases: SearchStrategy[IndexCase], index: object, oracle: IndexImplementation, *, rerun: str
) -> list[CheckResult]:
    """Results of the smallest case with a failure, or of no case in particular if none fails.

    The same cases are drawn every time.
    """
    results: list[CheckResult] = []

    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(case=cases)
    def verify_one(case: IndexCase) -> None:
        results[:] = verify(case, index, oracle, rerun=rerun)
        if any(result.verdict is Verdict.FAIL for result in results):
            raise _Found

    try:
        verify_one()
    except _Found:
        return results  # hypothesis runs the smallest case last
    return [
        replace(result, id=f"index-{COLUMN}", lengths=(), world=0, cp=()) for result in results
    ]


class _Found(Exception):
    """A case with a failure."""
