"""Index maps as a person reads them: positions that each rank holds, a dot for padding.

The oracle and the implementation must both draw exactly this. After a change of the layout that is
meant, write the new drawings with one command and read the diff:

    EXPECTTEST_ACCEPT=1 pytest conformance/selftest/test_golden_maps.py

It leaves the old file beside it, with `.bak` added.
"""

import expecttest
import pytest
from expecttest import assert_expected_inline

from conformance.adapters import impl, reference
from conformance.drawing import draw_ranks
from conformance.index_checks import Packing


@pytest.fixture(autouse=True)
def _every_drawing_is_accepted():
    """expecttest 0.3.0 confuses tests when an edit moves one to the line of another."""
    expecttest.EDIT_HISTORY.seen.clear()


def _drawing(seqlens: tuple[int, ...], *, cp_size: int, tp_size: int = 1) -> str:
    """What the oracle and the implementation draw; both, if they differ."""
    packing = Packing(seqlens, cp_size, tp_size)
    drawings = []
    for index in (reference.index, impl.index):
        packs = packing.pack(index, packing.tokens)
        bounds = packs[0][2]
        shards = (bounds.diff() // cp_size).tolist()
        ranks = draw_ranks([rows for rows, _, _ in packs], shards)
        drawings.append(f"cu_seqlens_padded {bounds.tolist()}\n{ranks}")
    return "\nbut the implementation says\n".join(dict.fromkeys(drawings))


def test_cp_off_leaves_sequences_whole() -> None:
    assert_expected_inline(
        _drawing((5, 3), cp_size=1),
        """\
cu_seqlens_padded [0, 5, 8]
rank 0 | s0: 0 1 2 3 4 | s1: 0 1 2""",
    )


def test_tp_alone_pads_to_its_size() -> None:
    assert_expected_inline(
        _drawing((5, 2), cp_size=1, tp_size=2),
        """\
cu_seqlens_padded [0, 6, 8]
rank 0 | s0: 0 1 2 3 4 . | s1: 0 1""",
    )


def test_cp2_without_padding() -> None:
    assert_expected_inline(
        _drawing((8, 4), cp_size=2),
        """\
cu_seqlens_padded [0, 8, 12]
rank 0 | s0: 0 1 6 7 | s1: 0 3
rank 1 | s0: 2 3 4 5 | s1: 1 2""",
    )


def test_cp2_ragged() -> None:
    assert_expected_inline(
        _drawing((5, 13, 1), cp_size=2),
        """\
cu_seqlens_padded [0, 8, 24, 28]
rank 0 | s0: 0 1 . . | s1: 0 1 2 3 12 . . . | s2: 0 .
rank 1 | s0: 2 3 4 . | s1: 4 5 6 7 8 9 10 11 | s2: . .""",
    )


def test_cp2_with_tp2_pads_twice_as_far() -> None:
    assert_expected_inline(
        _drawing((9, 4), cp_size=2, tp_size=2),
        """\
cu_seqlens_padded [0, 16, 24]
rank 0 | s0: 0 1 2 3 . . . . | s1: 0 1 . .
rank 1 | s0: 4 5 6 7 8 . . . | s1: 2 3 . .""",
    )


def test_cp3_ragged() -> None:
    assert_expected_inline(
        _drawing((7, 6), cp_size=3),
        """\
cu_seqlens_padded [0, 12, 18]
rank 0 | s0: 0 1 . . | s1: 0 5
rank 1 | s0: 2 3 . . | s1: 1 4
rank 2 | s0: 4 5 6 . | s1: 2 3""",
    )


def test_cp4_one_token() -> None:
    assert_expected_inline(
        _drawing((1,), cp_size=4),
        """\
cu_seqlens_padded [0, 8]
rank 0 | s0: 0 .
rank 1 | s0: . .
rank 2 | s0: . .
rank 3 | s0: . .""",
    )


def test_cp4_padding_fills_whole_chunks_at_the_tail() -> None:
    assert_expected_inline(
        _drawing((17, 3), cp_size=4),
        """\
cu_seqlens_padded [0, 24, 32]
rank 0 | s0: 0 1 2 . . . | s1: 0 .
rank 1 | s0: 3 4 5 . . . | s1: 1 .
rank 2 | s0: 6 7 8 15 16 . | s1: 2 .
rank 3 | s0: 9 10 11 12 13 14 | s1: . .""",
    )
