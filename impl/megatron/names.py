"""What Megatron's parameters are made of: tables of names, one per concern.

A table says for each parameter of a layer which Hugging Face weights it holds, and how they lie in
it. Tables of what is not here stand beside what builds it: MLA, experts, multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .gpt_config import GATED, GPTConfig

WEIGHT_AND_BIAS = ("weight", "bias")


@dataclass(frozen=True)
class Stacked:
    """Parts of equal size, one on top of the other; or a single one."""

    def fuse(self, parts: Sequence[Tensor], num_shards: int) -> Tensor:
        return torch.cat(list(parts))

    def take_apart(self, tensor: Tensor, num_parts: int, num_shards: int) -> Sequence[Tensor]:
        return tensor.chunk(num_parts)


@dataclass(frozen=True)
class ByKVHead:
    """q, k and v of one KV head side by side.

    Args:
        num_heads, num_kv_heads: of the whole model.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def fuse(self, parts: Sequence[Tensor], num_shards: int) -> Tensor:
        kv_heads = self.num_kv_heads // num_shards
        return torch.cat([part.unflatten(0, (kv_heads, -1)) for part in parts], 1).flatten(0, 1)

    def take_apart(self, tensor: Tensor, num_parts: int, num_shards: int) -> Sequence[Tensor]:
        by_kv_head = tensor.unflatten(0, (self.num_kv_heads // num_shards, -1))
        queries = self.num_heads // self.num_kv_heads * self.head_dim
        sizes = [queries, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in by_kv_head.split(sizes, 1)]


STACKED = Stacked()


@dataclass(frozen=True)
class Source:
    """Where one Megatron parameter comes from.

    Args:
        parts: Hugging Face names, in the order the parameter holds them.
    """

    parts: tuple[str, ...]
    layout: Stacked | ByKVHead = STACKED


Names = Iterator[tuple[str, Source]]


def module(megatron: str, *hf: str, layout: Stacked | ByKVHead = STACKED) -> Names:
    """Weight and bias of a module; one that the model has not is never asked for."""
    for kind in WEIGHT_AND_BIAS:
        yield f"{megatron}.{kind}", Source(tuple(f"{name}.{kind}" for name in hf), layout)


def under(megatron: str, hf: str, names: Names) -> Names:
    """A table with both sides moved below a module."""
    for name, source in names:
        parts = tuple(f"{hf}.{part}" for part in source.parts)
        yield f"{megatron}.{name}", Source(parts, source.layout)


def attention_names(config: GPTConfig) -> Names:
    """`self_attention` of a layer."""
    by_kv_head = ByKVHead(config.num_heads, config.num_kv_heads, config.head_dim)
    yield from module("linear_qkv", "q_proj", "k_proj", "v_proj", layout=by_kv_head)
    yield from module("linear_proj", "o_proj")
    yield from module("q_layernorm", "q_norm")
    yield from module("k_layernorm", "k_norm")


def mlp_names(config: GPTConfig) -> Names:
    """`mlp` of a layer, or a module of experts that is built like one."""
    gated = config.activation in GATED
    yield from module("linear_fc1", *(("gate_proj", "up_proj") if gated else ("c_fc",)))
    yield from module("linear_fc2", "down_proj" if gated else "c_proj")


def norm_names(config: GPTConfig) -> Names:
    """The norms of a layer that are modules of its own."""
    yield from module("input_layernorm", "input_layernorm")
    yield from module("pre_mlp_layernorm", "post_attention_layernorm")
