"""The decoder by its formulas: one sequence alone, so there is nothing to mask but the future.

Shapes: L tokens of the sequence, H query heads, G key-value heads, D head size, V vocabulary.

Everything is calculated in the dtype of the weights, except angles, norms and softmax, which
are float64 whatever the weights are. With float64 weights this is the oracle; with bfloat16
weights it shows the error that rounding alone makes.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig

QUERY_ROWS = 128  # scores exist for this many queries at a time, forward and backward


def logits(weights: Mapping[str, Tensor], config: ModelConfig, input_ids: Tensor) -> Tensor:
    """Logits of the next token at every position of one sequence.

    Args:
        weights: as `weight_shapes(config)` names them, float64.
        input_ids: int64 [L].
    Returns:
        float64 [L, V], with a graph to the weights that need gradients.
    """
    hidden = weights["model.embed_tokens.weight"][input_ids]
    for layer in range(config.num_layers):
        own = _below(weights, f"model.layers.{layer}.")
        hidden = hidden + attention(own, config, norm(own, config, "input_layernorm", hidden))
        hidden = hidden + mlp(own, config, norm(own, config, "post_attention_layernorm", hidden))
    hidden = norm(weights, config, "model.norm", hidden)
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return hidden @ weights[head].T


def attention(weights: Mapping[str, Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    """Self-attention of one layer, [L, hidden] to [L, hidden]."""
    heads = (len(x), -1, config.head_dim)
    query = linear(weights, "self_attn.q_proj", x).view(heads)
    key = linear(weights, "self_attn.k_proj", x).view(heads)
    value = linear(weights, "self_attn.v_proj", x).view(heads)
    if config.qk_norm:
        query = rms_norm(query, config.norm_eps) * weights["self_attn.q_norm.weight"]
        key = rms_norm(key, config.norm_eps) * weights["self_attn.k_norm.weight"]
    positions = torch.arange(len(x), device=x.device)
    query = rotate(query, positions, config)
    key = rotate(key, positions, config)
    return linear(weights, "self_attn.o_proj", causal_attention(query, key, value).flatten(1))


def rotate(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """Turn pair i of every head by the angle `position * theta ** (-2 i / rotary_dim)`.

    Args:
        x: queries or keys [L, heads, D].
        positions: [L].
    Source: RoFormer (arXiv:2104.09864), equation 34; halves instead of neighbours as in
        GPT-NeoX (arXiv:2204.06745); a part of the dims as in GPT-J.
    """
    turning, staying = x[..., : config.rotary_dim], x[..., config.rotary_dim :]
    if config.rope_interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)

    pair = torch.arange(config.rotary_dim // 2, dtype=torch.float64, device=x.device)
    frequency = config.rope_theta ** (-2 * pair / config.rotary_dim)
    angle = positions[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    turned = first * cos - second * sin, first * sin + second * cos

    if config.rope_interleaved:
        return torch.cat([torch.stack(turned, dim=-1).flatten(-2), staying], dim=-1)
    return torch.cat([*turned, staying], dim=-1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where a query sees the keys up to its own position.

    Scores are made for `QUERY_ROWS` queries at a time and made again in the backward pass,
    so that memory grows with L and not with its square.

    Args:
        query: [L, H, D].
        key, value: [L, G, D]; query head h reads key-value head `h // (H / G)`.
    Returns:
        [L, H, D].
    Source: Attention Is All You Need (arXiv:1706.03762), equation 1; shared key-value heads
        as in GQA (arXiv:2305.13245).
    """
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    if len(query) <= QUERY_ROWS:
        return _attend(query, key, value)
    rows: list[Tensor] = []
    # Longest first, so that each block fits where the one before it was: half the peak memory.
    for start in reversed(range(0, len(query), QUERY_ROWS)):
        stop = start + QUERY_ROWS
        args = query[start:stop], key[:stop], value[:stop]
        rows.append(checkpoint(_attend, *args, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(rows[::-1])


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last `len(query)` positions of a sequence over all of `key`."""
    scores = torch.einsum("qhd,khd->hqk", query / math.sqrt(query.shape[-1]), key)
    position = torch.arange(len(key), device=key.device)
    future = position > position[-len(query) :, None]
    weight = scores.masked_fill(future, -math.inf).softmax(-1, dtype=torch.float64)
    return torch.einsum("hqk,khd->qhd", weight.to(value.dtype), value)


def mlp(weights: Mapping[str, Tensor], config: ModelConfig, x: Tensor) -> Tensor:
    """The feed-forward part of one layer, [L, hidden] to [L, hidden].

    Source: SwiGLU as in GLU Variants Improve Transformer (arXiv:2002.05202).
    """
    if config.activation == "swiglu":
        gate = linear(weights, "mlp.gate_proj", x)
        up = linear(weights, "mlp.up_proj", x)
        return linear(weights, "mlp.down_proj", gate * torch.sigmoid(gate) * up)
    activation = _GELU[config.activation]
    return linear(weights, "mlp.c_proj", activation(linear(weights, "mlp.c_fc", x)))


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function of x. Source: arXiv:1606.08415, section 2."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` by tanh. Source: arXiv:1606.08415, section 2."""
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


_GELU: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def norm(weights: Mapping[str, Tensor], config: ModelConfig, name: str, x: Tensor) -> Tensor:
    """The norm that `config` asks for, over the last dim of `x`, scaled by its own weights.

    Source: RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450).
    """
    if config.norm == "rmsnorm":
        return rms_norm(x, config.norm_eps) * weights[f"{name}.weight"]
    centred = x - x.double().mean(-1, keepdim=True)
    scaled = rms_norm(centred, config.norm_eps).to(x.dtype)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x divided by the root of its mean square, over the last dim."""
    mean_square = x.double().square().mean(-1, keepdim=True)
    return (x / torch.sqrt(mean_square + eps)).to(x.dtype)


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x W^T, plus the bias where the model has one."""
    product = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return product if bias is None else product + bias


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names start with `prefix`, without it."""
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
