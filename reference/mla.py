"""Multi-head latent attention: keys and values of all heads come from one small vector a token.

Shapes: L tokens of the sequence, H heads, N dims of a query or key that stay, R that turn.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations 37 to 47; DeepSeek-V3
    (arXiv:2412.19437), section 2.1.1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from . import rope
from .attention import causal_attention
from .config import MLA, ModelConfig
from .layers import linear, rms_norm


def attention(weights: Mapping[str, Tensor], config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Self-attention of one layer, [L, hidden] to [L, hidden]."""
    assert config.mla is not None
    query = _queries(weights, config, config.mla, layer, x)
    key, value = _keys_and_values(weights, config, config.mla, layer, x)
    mixed = causal_attention(query, key, value, scale=config.softmax_scale)
    return linear(weights, "self_attn.o_proj", mixed.flatten(1))


def _queries(
    weights: Mapping[str, Tensor], config: ModelConfig, mla: MLA, layer: int, x: Tensor
) -> Tensor:
    """Queries [L, H, N + R]."""
    if mla.q_lora_rank:
        latent = linear(weights, "self_attn.q_a_proj", x)
        latent = rms_norm(weights, config, "self_attn.q_a_layernorm", latent)
        query = linear(weights, "self_attn.q_b_proj", latent)
    else:
        query = linear(weights, "self_attn.q_proj", x)
    query = query.view(len(x), config.num_heads, -1)
    staying, turning = query.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    return torch.cat([staying, _turned(turning, config, layer)], dim=-1)


def _keys_and_values(
    weights: Mapping[str, Tensor], config: ModelConfig, mla: MLA, layer: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys [L, H, N + R], whose turning part is the same for all heads, and values [L, H, D]."""
    both = linear(weights, "self_attn.kv_a_proj_with_mqa", x)
    latent, turning = both.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
    latent = rms_norm(weights, config, "self_attn.kv_a_layernorm", latent)
    heads = linear(weights, "self_attn.kv_b_proj", latent).view(len(x), config.num_heads, -1)
    staying, value = heads.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
    turned = _turned(turning[:, None], config, layer).expand(-1, config.num_heads, -1)
    return torch.cat([staying, turned], dim=-1), value


def _turned(x: Tensor, config: ModelConfig, layer: int) -> Tensor:
    return rope.rotate(x, torch.arange(len(x), device=x.device), config, layer)
