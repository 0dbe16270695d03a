"""The layout of packed context parallelism: by hand, and as properties of any lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference import (
    alignment,
    next_token_labels,
    packed_positions,
    packed_rows,
    packed_tokens,
    padded_length,
    unpack,
)

SIZES = st.sampled_from([1, 2, 3, 4, 5, 8])
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
TENSOR_PARALLEL = st.sampled_from([1, 2, 3])
LAYOUTS = given(seqlens=LENGTHS, cp_size=SIZES, tp_size=TENSOR_PARALLEL)


def test_alignment_is_two_chunks_a_rank_times_tensor_parallel() -> None:
    assert alignment(1) == 1
    assert alignment(1, 4) == 4
    assert alignment(2) == 4
    assert alignment(3, 2) == 12


@pytest.mark.parametrize(
    ("seqlen", "cp_size", "tp_size", "padded"),
    [
        (1, 1, 1, 1),
        (7, 1, 1, 7),
        (7, 1, 4, 8),
        (1, 4, 1, 8),
        (8, 4, 1, 8),
        (9, 4, 1, 16),
        (9, 2, 3, 12),
        (13, 2, 3, 24),
        (13, 3, 1, 18),
    ],
)
def test_padded_length_by_hand(seqlen: int, cp_size: int, tp_size: int, padded: int) -> None:
    assert padded_length(seqlen, cp_size=cp_size, tp_size=tp_size) == padded


def test_one_rank_holds_whole_sequences_with_padding_for_tensor_parallel_only() -> None:
    assert packed_rows([3, 1], cp_size=1, cp_rank=0) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert packed_rows([1], cp_size=1, cp_rank=0, tp_size=2) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("cp_size", "positions"),
    [
        (2, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
        (3, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (6, [[0, 11], [1, 10], [2, 9], [3, 8], [4, 7], [5, 6]]),
    ],
)
def test_zigzag_of_twelve_tokens_by_hand(cp_size: int, positions: list[list[int]]) -> None:
    for cp_rank, expected in enumerate(positions):
        found = packed_positions([12], cp_size=cp_size, cp_rank=cp_rank)
        assert found.dtype == torch.int64
        assert found.tolist() == expected


def test_packs_of_uneven_sequences_by_hand() -> None:
    sequences = [torch.tensor(ids) for ids in ([10, 11, 12, 13, 14], [20], [30, 31, 32])]
    first, second = (
        packed_tokens(sequences, cp_size=2, cp_rank=rank, pad_value=-1) for rank in (0, 1)
    )
    assert first.tolist() == [10, 11, -1, -1, 20, -1, 30, -1]
    assert second.tolist() == [12, 13, 14, -1, -1, -1, 31, 32]
    assert packed_positions([5, 1, 3], cp_size=2, cp_rank=0).tolist() == [0, 1, 6, 7, 0, 3, 0, 3]
    assert packed_positions([5, 1, 3], cp_size=2, cp_rank=1).tolist() == [2, 3, 4, 5, 1, 2, 1, 2]


def test_tensor_parallel_makes_chunks_longer() -> None:
    assert packed_positions([5], cp_size=2, cp_rank=1, tp_size=2).tolist() == [2, 3, 4, 5]
    assert packed_positions([9], cp_size=2, cp_rank=0, tp_size=3).tolist() == [0, 1, 2, 9, 10, 11]


def test_labels_are_shifted_inside_a_sequence() -> None:
    assert next_token_labels(torch.tensor([5, 6, 7]), -100).tolist() == [6, 7, -100]
    assert next_token_labels(torch.tensor([5]), -100).tolist() == [-100]


def test_labels_shifted_before_the_split_cross_chunks_rightly() -> None:
    labels = [next_token_labels(torch.arange(10, 18), -100)]
    first, second = (packed_tokens(labels, cp_size=2, cp_rank=r, pad_value=-100) for r in (0, 1))
    assert first.tolist() == [11, 12, 17, -100]
    assert second.tolist() == [13, 14, 15, 16]


@LAYOUTS
def test_every_token_and_every_padding_row_is_on_exactly_one_rank(
    seqlens: list[int], cp_size: int, tp_size: int
) -> None:
    rows = [
        row
        for rank in range(cp_size)
        for row in packed_rows(seqlens, cp_size=cp_size, cp_rank=rank, tp_size=tp_size)
    ]
    padded = [padded_length(n, cp_size=cp_size, tp_size=tp_size) for n in seqlens]
    assert sorted(rows) == [(s, position) for s, n in enumerate(padded) for position in range(n)]


@LAYOUTS
def test_every_rank_holds_equally_much_of_every_sequence_and_equal_causal_work(
    seqlens: list[int], cp_size: int, tp_size: int
) -> None:
    for sequence, seqlen in enumerate(seqlens):
        padded = padded_length(seqlen, cp_size=cp_size, tp_size=tp_size)
        for rank in range(cp_size):
            rows = packed_rows(seqlens, cp_size=cp_size, cp_rank=rank, tp_size=tp_size)
            own = [position for s, position in rows if s == sequence]
            assert len(own) * cp_size == padded
            assert len(own) % tp_size == 0
            assert own == sorted(own)
            assert 2 * cp_size * sum(own) == padded * (padded - 1)


@LAYOUTS
def test_padding_is_less_than_one_alignment_unit(
    seqlens: list[int], cp_size: int, tp_size: int
) -> None:
    unit = alignment(cp_size, tp_size)
    for seqlen in seqlens:
        padded = padded_length(seqlen, cp_size=cp_size, tp_size=tp_size)
        assert padded % unit == 0
        assert 0 <= padded - seqlen < unit


@LAYOUTS
def test_unpack_undoes_pack(seqlens: list[int], cp_size: int, tp_size: int) -> None:
    total = sum(seqlens)
    sequences = torch.arange(2 * total).view(total, 2).split(seqlens)
    shards = [
        packed_tokens(sequences, cp_size=cp_size, cp_rank=rank, tp_size=tp_size, pad_value=-1)
        for rank in range(cp_size)
    ]
    unpacked = unpack(shards, seqlens, cp_size=cp_size, tp_size=tp_size)
    assert [own.tolist() for own in unpacked] == [own.tolist() for own in sequences]


def test_gradients_pass_through_pack_and_unpack() -> None:
    sequences = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (5, 2)]
    shards = [
        packed_tokens(sequences, cp_size=2, cp_rank=r, pad_value=float("nan")) for r in (0, 1)
    ]
    unpacked = unpack(shards, [5, 2], cp_size=2)
    weighted = torch.cat([own * torch.arange(1, len(own) + 1) for own in unpacked])
    gradients = torch.autograd.grad(weighted.sum(), sequences)
    assert [own.tolist() for own in gradients] == [[1, 2, 3, 4, 5], [1, 2]]
