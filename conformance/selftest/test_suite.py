"""What the suite makes of ranks that have no outputs: one verdict, and the rank to look at."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters.reference import oracle
from conformance.build import TaskBuilder
from conformance.case import parse_case
from conformance.pool import RankReply
from conformance.rank_error import Kind, RankError
from conformance.suite import Suite
from conformance.verdict import CheckResult, Verdict, exit_status


class Pools:
    """Pools whose ranks always answer with the same errors."""

    def __init__(self, kinds: list[Kind], message: str) -> None:
        self.errors = [RankError(kind, kind.title(), message, where="a.py:1 f") for kind in kinds]

    def pool(self, *_: Any, **__: Any) -> Any:
        return self

    def run(self, task: Any, *, only_rank: int | None) -> list[RankReply]:
        replies = [RankReply(rank, None, error, 0.0) for rank, error in enumerate(self.errors)]
        return replies if only_rank is None else replies[:1]


def result(id: str, *kinds: Kind, message: str = "words") -> CheckResult:
    pools: Any = Pools(list(kinds), message)
    (line,) = Suite("fake", pools, oracle, TaskBuilder(oracle)).verify(parse_case(id))
    return line


@pytest.mark.parametrize(
    ("kinds", "rank"),
    [
        (("timeout", "died"), 1),
        (("timeout", "raised"), 1),
        (("raised", "raised"), 0),
        (("raised", "died"), 1),
        (("unsupported", "raised"), 1),
        (("timeout", "timeout"), 0),
    ],
)
def test_rank_that_went_wrong_by_itself_is_named(kinds: tuple[Kind, ...], rank: int) -> None:
    line = result("ragged-2ranks-cp2", *kinds)
    assert (line.check, line.verdict) == ("run", Verdict.FAIL)
    assert line.where == f"rank {rank}, a.py:1 f"
    assert line.reason == f"{kinds[rank].title()}: words"


def test_unsupported_is_no_pass() -> None:
    line = result("ragged-2ranks-cp2", "unsupported", "unsupported")
    assert (line.verdict, line.reason) == (Verdict.UNSUPPORTED, "words")
    assert exit_status([line]) == 2


def test_valueerror_with_words_is_a_refusal() -> None:
    line = result("refused_size-4ranks-cp3", "refused")
    assert (line.verdict, line.reason) == (Verdict.PASS, "refused: words")


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        ("refused", "", "raised a ValueError without a word"),
        ("raised", "3", "raised Raised, not ValueError: 3"),
        ("died", "gone", "raised Died, not ValueError: gone"),
        ("timeout", "waits", "not refused before the first collective: waits"),
    ],
)
def test_anything_else_is_no_refusal(kind: Kind, message: str, reason: str) -> None:
    line = result("refused_size-4ranks-cp3", kind, message=message)
    assert (line.verdict, line.reason) == (Verdict.FAIL, reason)
