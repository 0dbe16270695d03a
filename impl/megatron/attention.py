"""Exact causal attention over a CP group, as a core attention of Megatron's layer spec.

For machines without Transformer Engine, and for float64. Keys and values of all ranks are
gathered, in whatever order their ranks hold them: who may see whom is decided by sequence and
position, so nothing has to be put back in order. Scores exist one block at a time, so memory
grows linearly with the number of keys.

Shape letters: `T` packed rows here, `K` rows of all ranks, `H` query heads, `G` KV heads,
`R` query heads per KV head, `D` head size, `E` that of values where it is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import gather_distinct
from ..layout import pack_layout
from ..rules import PackRules

BLOCK = 512  # rows of a block of scores

Block = tuple[slice, slice, Tensor | None]


class ExactAttention(nn.Module):
    """Core attention for packed rows, `spec.submodules.self_attention.submodules.core_attention`.

    Takes the arguments of Megatron's `DotProductAttention` and ignores what does not concern it.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """query [T, H, D], key [T, G, D] and value [T, G, E] → [T, H * E].

        `packed_seq_params.layout` names the layout if it is not the zigzag, and `padded_lengths`
        has the lengths of `cu_seqlens_q_padded` where they are on the host already.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("ExactAttention takes packed sequences (qkv_format='thd') only")
        group = packed_seq_params.cp_group
        cp_size, cp_rank = (group.size(), group.rank()) if group is not None else (1, 0)
        padded = getattr(packed_seq_params, "padded_lengths", None)
        if padded is None:
            lengths = packed_seq_params.cu_seqlens_q_padded.diff().tolist()
            padded = tuple(each for each in lengths if each)  # a repeated offset is no sequence
        layout = getattr(packed_seq_params, "layout", "zigzag")
        if cp_size > 1:
            sizes = [key.shape[-1], value.shape[-1]]
            key, value = gather_distinct(torch.cat([key, value], -1), group).split(sizes, -1)
        out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
            query.unflatten(1, (key.shape[1], -1)),
            key,
            value,
            self.softmax_scale,
            visible_blocks(
                padded, cp_size=cp_size, cp_rank=cp_rank, layout=layout, device=query.device
            ),
        )
        return out.flatten(1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve training too
def visible_blocks(
    padded: tuple[int, ...],
    *,
    cp_size: int,
    cp_rank: int,
    layout: str = "zigzag",
    device: torch.device | str = "cpu",
) -> tuple[Block, ...]:
    """Blocks of (query rows, key rows, hidden [q, k]) in which any query sees any key.

    Query rows are this rank's, key rows those of all ranks side by side. A query sees the keys of
    its own sequence up to its own position. `hidden` is None where all is seen, so that masks too
    grow linearly with the number of keys.
    """
    table = pack_layout(padded, cp_size=cp_size, rules=PackRules(layout=layout))
    rows = table.positions.shape[1]
    keys = [
        (slice(rank * rows + block.start, rank * rows + block.stop), rank, block)
        for rank in range(cp_size)
        for block in _blocks(rows)
    ]
    visible = []
    for q in _blocks(rows):
        q_sequence, q_position = (
            table.sequences[cp_rank, q, None],
            table.positions[cp_rank, q, None],
        )
        for place, rank, k in keys:
            k_sequence, k_position = table.sequences[rank, k], table.positions[rank, k]
            if q_sequence[-1] < k_sequence[0] or k_sequence[-1] < q_sequence[0]:
                continue  # rows are in sequence order, so these two share none
            hidden = (q_sequence != k_sequence) | (q_position < k_position)
            if not hidden.all():
                visible.append((q, place, hidden.to(device) if hidden.any() else None))
    return tuple(visible)


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK))


class _BlockAttention(torch.autograd.Function):
    """Softmax attention one block of scores at a time; the backward computes them again.

    Source: FlashAttention (arXiv:2205.14135), the running maximum and the recomputation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        blocks: tuple[Block, ...],
    ) -> Tensor:
        """query [T, G, R, D], key [K, G, D] and value [K, G, E] → [T, G, R, E]."""
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        lse = query.new_full(query.shape[:-1], -math.inf)
        for q, k, hidden in blocks:
            scores = _scores(query[q], key[k], scale, hidden)
            new_lse = torch.logaddexp(lse[q], scores.logsumexp(-1))
            shift = new_lse.masked_fill(new_lse == -math.inf, 0)  # a query that saw no key so far
            weights = (scores - shift.unsqueeze(-1)).exp()
            rescale = (lse[q] - shift).exp().unsqueeze(-1)
            out[q] = out[q] * rescale + torch.einsum("qgrk,kgd->qgrd", weights, value[k])
            lse[q] = new_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale, ctx.blocks = scale, blocks
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        delta = (out * dout).sum(-1, keepdim=True)
        for q, k, hidden in ctx.blocks:
            weights = (_scores(query[q], key[k], ctx.scale, hidden) - lse[q].unsqueeze(-1)).exp()
            dv[k] += torch.einsum("qgrk,qgrd->kgd", weights, dout[q])
            dweights = torch.einsum("qgrd,kgd->qgrk", dout[q], value[k])
            dscores = weights * (dweights - delta[q]) * ctx.scale
            dq[q] += torch.einsum("qgrk,kgd->qgrd", dscores, key[k])
            dk[k] += torch.einsum("qgrk,qgrd->kgd", dscores, query[q])
        return dq, dk, dv, None, None


def _scores(query: Tensor, key: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """Scores [q, G, R, k], -inf where the key is hidden from the query."""
    scores = torch.einsum("qgrd,kgd->qgrk", query, key) * scale
    return scores if hidden is None else scores.masked_fill(hidden[:, None, None, :], -math.inf)
