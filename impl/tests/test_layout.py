"""The layout table by hand, and as properties of any lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.layout import alignment, pack_layout, rank_index

LAYOUTS = given(
    seqlens=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    cp_size=st.sampled_from([1, 2, 3, 4, 5, 8]),
    tp_size=st.sampled_from([1, 2, 3]),
)


@pytest.mark.parametrize(
    ("cp_size", "tp_size", "unit"),
    [(1, 1, 1), (1, 2, 2), (2, 1, 4), (2, 2, 8), (3, 1, 6), (4, 3, 24)],
)
def test_alignment_is_two_chunks_a_rank_times_tensor_parallel(cp_size, tp_size, unit) -> None:
    assert alignment(cp_size=cp_size, tp_size=tp_size) == unit


def test_layout_by_hand() -> None:
    layout = pack_layout((5, 1), cp_size=2)

    assert layout.padded == (8, 4)
    assert layout.tokens.tolist() == [[0, 1, -1, -1, 5, -1], [2, 3, 4, -1, -1, -1]]
    assert layout.positions.tolist() == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    assert layout.sequences.tolist() == [[0, 0, 0, 0, 1, 1]] * 2


def test_rank_index_by_hand() -> None:
    first, second = (rank_index((5, 1), cp_size=2, cp_rank=rank) for rank in range(2))

    assert first.rows.tolist() == [0, 1, 0, 0, 5, 0]  # padding names token 0
    assert second.rows.tolist() == [2, 3, 4, 0, 0, 0]
    assert first.padding_rows.tolist() == [2, 3, 5]
    assert second.padding_rows.tolist() == [3, 4, 5]
    assert first.real_rows.tolist() == [0, 1, 4]
    assert second.real_rows.tolist() == [0, 1, 2]
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.position_ids.tolist() == [2, 3, 4, 5, 1, 2]


def test_rank_index_is_the_same_on_every_rank_where_it_speaks_of_all() -> None:
    for rank in range(2):
        index = rank_index((5, 1), cp_size=2, cp_rank=rank)
        assert (index.seqlens, index.padded) == ((5, 1), (8, 4))
        assert index.cu_seqlens_padded.tolist() == [0, 8, 12]
        assert index.cu_seqlens_padded.dtype == torch.int32
        # rank 0 sends tokens 0, 1, 5, rank 1 sends 2, 3, 4
        assert index.max_real_rows == 3
        assert index.token_slots.tolist() == [0, 1, 3, 4, 5, 2]


def test_cp_off_keeps_every_row_in_order() -> None:
    index = rank_index((5, 3), cp_size=1, cp_rank=0)

    assert index.rows.tolist() == list(range(8))
    assert index.padding_rows.tolist() == []
    assert index.token_slots.tolist() == list(range(8))


@pytest.mark.parametrize(("cp_size", "tp_size"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_pack_without_sequences_is_one_sequence_of_padding(cp_size, tp_size) -> None:
    index = rank_index((), cp_size=cp_size, cp_rank=cp_size - 1, tp_size=tp_size)
    unit = alignment(cp_size=cp_size, tp_size=tp_size)

    assert index.padded == (unit,)
    assert index.cu_seqlens_padded.tolist() == [0, unit]
    assert len(index.padding_rows) == len(index.rows) == unit // cp_size
    assert len(index.real_rows) == len(index.token_slots) == index.max_real_rows == 0


@LAYOUTS
@settings(deadline=None)
def test_every_token_has_one_row_over_all_ranks(seqlens, cp_size, tp_size) -> None:
    tokens = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size).tokens

    assert tokens[tokens >= 0].sort().values.tolist() == list(range(sum(seqlens)))


@LAYOUTS
@settings(deadline=None)
def test_padding_stands_behind_the_last_token_of_its_sequence(seqlens, cp_size, tp_size) -> None:
    layout = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size)

    assert torch.equal(
        layout.tokens < 0, layout.positions >= torch.tensor(seqlens)[layout.sequences]
    )


@LAYOUTS
@settings(deadline=None)
def test_ranks_hold_equally_many_rows_of_every_sequence(seqlens, cp_size, tp_size) -> None:
    layout = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size)
    shares = [[length // cp_size for length in layout.padded]] * cp_size

    assert [rank.bincount().tolist() for rank in layout.sequences] == shares
    assert layout.tokens.shape[1] % tp_size == 0


@LAYOUTS
@settings(deadline=None)
def test_causal_work_of_ranks_is_equal(seqlens, cp_size, tp_size) -> None:
    positions = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size).positions

    assert len(positions.sum(1).unique()) == 1


def test_devices_have_their_own_index() -> None:
    meta = rank_index((5, 1), cp_size=2, cp_rank=0, device=torch.device("meta"))

    assert meta.rows.device.type == meta.cu_seqlens_padded.device.type == "meta"
    assert rank_index((5, 1), cp_size=2, cp_rank=0).rows.device.type == "cpu"
