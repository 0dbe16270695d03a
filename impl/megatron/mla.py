"""Multi-head latent attention (DeepSeek-V2 and V3): settings, spec, names, exact positions."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from ..parallel import ParallelLayout
from .gpt_config import MLA, GPTConfig
from .names import Names, module
from .norm import TorchNorm
from .rope import rope_frequencies


def mla_settings(mla: MLA) -> dict[str, Any]:
    """Keywords of `MLATransformerConfig`, in place of those of grouped-query attention.

    `rope_type` is what Megatron calls a table of angles with a factor for cos and sin, whatever
    the angles are; `make_mla_exact` puts in the model's own.
    """
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn",
    }


def set_mla_norms(submodules: Any, mla: MLA) -> None:
    """The norms of the latent vectors in a layer spec; queries without one have none."""
    submodules.q_layernorm = TorchNorm if mla.q_lora_rank else IdentityOp
    submodules.kv_layernorm = TorchNorm


def mla_names(mla: MLA) -> Names:
    """`self_attention` of a layer."""
    if mla.q_lora_rank:
        yield from module("linear_q_down_proj", "q_a_proj")
        yield from module("q_layernorm", "q_a_layernorm")
        yield from module("linear_q_up_proj", "q_b_proj")
    else:
        yield from module("linear_q_proj", "q_proj")
    yield from module("linear_kv_down_proj", "kv_a_proj_with_mqa")
    yield from module("kv_layernorm", "kv_a_layernorm")
    yield from module("linear_kv_up_proj", "kv_b_proj")
    yield from module("linear_proj", "o_proj")


def check_mla_layout(config: GPTConfig, layout: ParallelLayout) -> None:
    """Whether a layout can be had with MLA.

    Raises:
        ValueError: it cannot.
    """
    if config.mla is not None and layout.tp_size > 1:
        raise ValueError(
            f"tp_size={layout.tp_size} with mla: in Megatron's layers without Transformer Engine "
            "each rank keeps the gradient of the shared part of the key that its own heads give; "
            "use tp_size=1"
        )


def knowing_of_te() -> AbstractContextManager[object]:
    """Inside, MLA can be built without Transformer Engine.

    `multi_latent_attention` of 0.16.1 takes it to be there whether it is or not, and asks whether
    a module is one of its classes, which then are None.
    """
    return patch.object(multi_latent_attention, "HAVE_TE", transformer_engine.HAVE_TE)


def make_mla_exact(model: nn.Module, config: GPTConfig) -> None:
    """Give every MLA of a model its angles in float64 and its own scale of scores.

    Megatron's angles are float32, and its scale follows from how YaRN is set up.
    """
    if config.mla is None:
        return
    scale = config.softmax_scale or 1 / math.sqrt(
        config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim
    )
    for attention in (each for each in model.modules() if isinstance(each, MLASelfAttention)):
        attention.rotary_pos_emb = ExactAngles(config)
        attention.softmax_scale = attention.core_attention.softmax_scale = scale


class ExactAngles(nn.Module):
    """Angles of all positions, in place of Megatron's `YarnRotaryEmbedding`."""

    frequencies: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        scaling = config.rope_scaling
        self.factor = 1.0 if scaling is None else scaling.attention_factor
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Length of the table: the longest sequence of the pack, before it is cut."""
        packed_seq_params = args[-1]
        if packed_seq_params is None:
            raise ValueError("MLA takes packed sequences only; give packed_seq_params")
        longest: int = packed_seq_params.max_seqlen_q
        return longest

    def forward(self, seqlen: int, **_: Any) -> tuple[Tensor, float]:
        """Angles float64 [seqlen, 1, 1, R], and what cos and sin are multiplied by."""
        positions = torch.arange(
            seqlen, dtype=self.frequencies.dtype, device=self.frequencies.device
        )
        angles = torch.outer(positions, self.frequencies)
        return torch.cat([angles, angles], 1)[:, None, None], self.factor
