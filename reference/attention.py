"""Grouped-query attention of one sequence alone, so there is nothing to mask but the future.

Shapes: L tokens of the sequence, H query heads, G key-value heads, D head size.

Softmax is float64 whatever the dtype of queries and keys.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import rope
from .config import ModelConfig
from .layers import linear, rms_norm, softcap

QUERY_ROWS = 128  # scores exist for this many queries at a time, forward and backward


def attention(weights: Mapping[str, Tensor], config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Self-attention of one layer, [L, hidden] to [L, hidden].

    Source: GQA (arXiv:2305.13245); norms of queries and keys as in Qwen3 (arXiv:2505.09388),
        section 2.
    """
    heads = (len(x), -1, config.head_dim)
    query = linear(weights, "self_attn.q_proj", x).view(heads)
    key = linear(weights, "self_attn.k_proj", x).view(heads)
    value = linear(weights, "self_attn.v_proj", x).view(heads)
    if config.qk_norm:
        query = rms_norm(weights, config, "self_attn.q_norm", query)
        key = rms_norm(weights, config, "self_attn.k_norm", key)
    positions = torch.arange(len(x), device=x.device)
    mixed = causal_attention(
        rope.rotate(query, positions, config, layer),
        rope.rotate(key, positions, config, layer),
        value,
        scale=config.softmax_scale,
        window=config.window if config.has_window(layer) else 0,
        cap=config.attention_softcap,
        sinks=weights["self_attn.sinks"] if config.sinks else None,
    )
    return linear(weights, "self_attn.o_proj", mixed.flatten(1))


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, where a query sees the keys up to its own position.

    Scores are made for `QUERY_ROWS` queries at a time and made again in the backward pass,
    so that memory grows with L and not with its square.

    Args:
        query: [L, H, D].
        key, value: [L, G, D], the value of any other size; query head h reads key-value head
            `h // (H / G)`.
        scale: None for 1 / sqrt(D).
        window: keys that a query sees, its own being the last; 0 for all.
        cap: scores are bent to stay below it; 0 for no cap.
        sinks: [H], a score of each head that takes part in its softmax and carries no value.
    Returns:
        [L, H, size of a value].
    Source: Attention Is All You Need (arXiv:1706.03762), equation 1; windows as in Mistral 7B
        (arXiv:2310.06825); sinks as in gpt-oss (arXiv:2508.10925), section 2.2.
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    if len(query) <= QUERY_ROWS:
        return _attend(query, key, value, scale, window, cap, sinks)
    rows: list[Tensor] = []
    # Longest first, so that each block fits where the one before it was: half the peak memory.
    for start in reversed(range(0, len(query), QUERY_ROWS)):
        first = max(0, start - window + 1) if window else 0
        keys, values = key[first : start + QUERY_ROWS], value[first : start + QUERY_ROWS]
        block = query[start : start + QUERY_ROWS], keys, values, scale, window, cap, sinks
        rows.append(checkpoint(_attend, *block, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(rows[::-1])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of positions over keys, whose last ones are of the same positions."""
    scores = softcap(torch.einsum("qhd,khd->hqk", query * scale, key), cap)
    position = torch.arange(len(key), device=key.device)
    back = position[-len(query) :, None] - position  # how far back a key is
    hidden = (back < 0) | (back >= window) if window else back < 0
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], dim=-1)
    weight = scores.softmax(-1, dtype=torch.float64)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weight.to(value.dtype), value)
