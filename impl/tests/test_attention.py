"""The exact core attention, one rank at a time, against softmax attention of whole sequences.

A rank's query rows meet the key rows of all ranks, which the test hands over in the place of the
gather; blocks are made small, so that a few dozen rows already make many of them.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from impl.layout import pack_layout
from impl.megatron import attention
from impl.megatron.attention import ExactAttention, visible_blocks
from impl.rules import PackRules

H, G, D = 4, 2, 3  # query heads, KV heads, head size
SCALE = 0.7
CUTS = pytest.mark.parametrize(
    ("padded", "cp_size"),
    [((7, 1, 12), 1), ((8, 4, 20), 2), ((6, 12), 3), ((8, 24), 4)],
    ids=["cp1", "cp2", "cp3", "cp4"],
)


class FakeGroup:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


@pytest.fixture(params=[2, 5, 512])
def block(request, monkeypatch):
    """Rows of a block: one that divides shards, one that does not, one larger than all."""
    visible_blocks.cache_clear()
    monkeypatch.setattr(attention, "BLOCK", request.param)
    yield request.param
    visible_blocks.cache_clear()


def _random(padded: tuple[int, ...], heads: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sum(padded), heads, D, dtype=torch.float64, generator=draw)


def _inputs(padded: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of all sequences in order."""
    return _random(padded, H, 0), _random(padded, G, 1), _random(padded, G, 2)


def _plain(query: Tensor, key: Tensor, value: Tensor, padded: tuple[int, ...]) -> Tensor:
    """Causal softmax attention [N, H * D], each sequence by itself."""
    outs = []
    for q, k, v in zip(*(x.split(list(padded)) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    return torch.cat(outs)


def _module() -> ExactAttention:
    return ExactAttention(SimpleNamespace(kv_channels=D), 1, None, "self", softmax_scale=SCALE)


def _params(padded: tuple[int, ...], group: FakeGroup | None) -> SimpleNamespace:
    bounds = torch.tensor([0, *padded]).cumsum(0).int()
    return SimpleNamespace(qkv_format="thd", cp_group=group, cu_seqlens_q_padded=bounds)


def _by_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padded: tuple[int, ...],
    cp_size: int,
    monkeypatch,
    layout: str = "zigzag",
) -> Tensor:
    """The module's output [N, H * D] of all ranks, tokens back in order."""
    tokens = pack_layout(padded, cp_size=cp_size, rules=PackRules(layout=layout)).tokens
    everything = torch.cat([key, value], -1)[tokens.flatten()]
    monkeypatch.setattr(attention, "gather_distinct", lambda stacked, group: everything)
    out = torch.empty(len(query), H * D, dtype=query.dtype)
    for rank, mine in enumerate(tokens):
        group = FakeGroup(cp_size, rank)
        params = _params(padded, group)
        if layout != "zigzag":
            params.layout = layout
        rows = _module()(query[mine], key[mine], value[mine], None, packed_seq_params=params)
        out = out.index_copy(0, mine, rows)
    return out


@CUTS
def test_equals_softmax_attention_of_whole_sequences(padded, cp_size, block, monkeypatch) -> None:
    inputs = _inputs(padded)
    out = _by_ranks(*inputs, padded, cp_size, monkeypatch)
    torch.testing.assert_close(out, _plain(*inputs, padded), rtol=1e-13, atol=1e-14)


@CUTS
def test_gradients_are_those_of_softmax_attention(padded, cp_size, block, monkeypatch) -> None:
    q, k, v = inputs = [tensor.requires_grad_() for tensor in _inputs(padded)]
    dout = _random(padded, H, 3).flatten(1)
    out = _by_ranks(q, k, v, padded, cp_size, monkeypatch)
    found = torch.autograd.grad(out, inputs, dout)
    expected = torch.autograd.grad(_plain(q, k, v, padded), inputs, dout)
    for gradient, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("padded", "cp_size"), [((7, 1, 12), 1), ((8, 2, 22), 2), ((9, 3), 3)])
def test_contiguous_layout_equals_softmax_attention_too(
    padded, cp_size, block, monkeypatch
) -> None:
    q, k, v = inputs = [tensor.requires_grad_() for tensor in _inputs(padded)]
    out = _by_ranks(q, k, v, padded, cp_size, monkeypatch, layout="contiguous")
    torch.testing.assert_close(out, _plain(q, k, v, padded), rtol=1e-13, atol=1e-14)
    dout = _random(padded, H, 3).flatten(1)
    found = torch.autograd.grad(out, inputs, dout)
    expected = torch.autograd.grad(_plain(q, k, v, padded), inputs, dout)
    for gradient, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("group", [None, FakeGroup(1, 0)], ids=["no_group", "cp1"])
@pytest.mark.parametrize("lengths", [(5, 3, 0, 0), (5, 0, 3)], ids=["tail", "between"])
def test_repeated_offsets_are_no_sequences(lengths, group, block) -> None:
    inputs = _inputs((5, 3))
    out = _module()(*inputs, None, packed_seq_params=_params(lengths, group))
    assert torch.equal(out, _module()(*inputs, None, packed_seq_params=_params((5, 3), group)))


def test_repeated_offsets_are_no_sequences_on_any_rank(monkeypatch) -> None:
    """Rank 1 of 2 holds positions 2, 3, 4, 5 and 1, 2 of the two sequences."""
    q, k, v = _inputs((8, 4))
    tokens = pack_layout((8, 4), cp_size=2).tokens
    everything = torch.cat([k, v], -1)[tokens.flatten()]
    monkeypatch.setattr(attention, "gather_distinct", lambda stacked, group: everything)
    params = _params((8, 4, 0, 0, 0), FakeGroup(2, 1))
    mine = tokens[1]
    out = _module()(q[mine], k[mine], v[mine], None, packed_seq_params=params)

    expected = _plain(q, k, v, (8, 4))[mine]
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)


def test_gradients_are_those_of_finite_differences(monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 3)
    padded = (8, 4)
    inputs = [tensor.requires_grad_() for tensor in _inputs(padded)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        visible_blocks.cache_clear()
        return _by_ranks(query, key, value, padded, 2, monkeypatch)

    assert torch.autograd.gradcheck(attend, inputs)


def test_no_group_means_that_cp_is_off() -> None:
    padded = (5, 3)
    inputs = _inputs(padded)
    out = _module()(*inputs, None, packed_seq_params=_params(padded, None))
    torch.testing.assert_close(out, _plain(*inputs, padded), rtol=1e-13, atol=1e-14)


def test_huge_scores_give_no_nan(block) -> None:
    padded = (9,)
    inputs = [(1e4 * tensor).requires_grad_() for tensor in _inputs(padded)]
    out = _module()(*inputs, None, packed_seq_params=_params(padded, None))
    gradients = torch.autograd.grad(out.sum(), inputs)

    assert all(tensor.isfinite().all() for tensor in (out, *gradients))


def test_scale_defaults_to_one_over_the_root_of_the_head_size() -> None:
    module = ExactAttention(SimpleNamespace(kv_channels=16), 1, None, "self")
    assert module.softmax_scale == 0.25


@pytest.mark.parametrize("params", [None, SimpleNamespace(qkv_format="sbhd")])
def test_unpacked_sequences_are_refused(params) -> None:
    words = r"^ExactAttention takes packed sequences \(qkv_format='thd'\) only$"
    with pytest.raises(ValueError, match=words):
        _module()(*_inputs((4,)), None, packed_seq_params=params)


@CUTS
def test_blocks_cover_what_is_visible_and_no_row_pair_twice(padded, cp_size, block) -> None:
    layout = pack_layout(padded, cp_size=cp_size)
    sequences, positions = layout.sequences.flatten(), layout.positions.flatten()
    for rank in range(cp_size):
        q_sequences, q_positions = layout.sequences[rank], layout.positions[rank]
        same = q_sequences[:, None] == sequences
        seen = torch.zeros_like(same, dtype=torch.int64)
        for q, k, hidden in visible_blocks(padded, cp_size=cp_size, cp_rank=rank):
            seen[q, k] += 1 if hidden is None else ~hidden
        assert torch.equal(seen, (same & (q_positions[:, None] >= positions)).long())


def test_largest_block_of_scores_does_not_grow_with_the_keys(monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 8)
    sizes: list[int] = []
    real = attention._scores

    def counted(query: Tensor, key: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
        scores = real(query, key, scale, hidden)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(attention, "_scores", counted)
    largest = []
    for seqlen in (32, 64, 128):
        visible_blocks.cache_clear()
        sizes.clear()
        inputs = [tensor.requires_grad_() for tensor in _inputs((seqlen,))]
        _module()(*inputs, None, packed_seq_params=_params((seqlen,), None)).sum().backward()
        largest.append(max(sizes))
        assert len(sizes) == 2 * sum(range(1, seqlen // 8 + 1))  # forward and backward

    assert largest == [8 * 8 * H] * 3


def _bytes_of_masks(seqlen: int) -> int:
    visible_blocks.cache_clear()
    masks = {
        hidden.untyped_storage().data_ptr(): hidden.untyped_storage().nbytes()
        for _, _, hidden in visible_blocks((seqlen,), cp_size=1, cp_rank=0)
        if isinstance(hidden, Tensor)
    }
    return sum(masks.values())


def test_masks_grow_linearly_with_the_keys(monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 8)
    small, large = _bytes_of_masks(128), _bytes_of_masks(512)

    assert large <= 5 * small
