"""The answer a second time, by another road: all sequences side by side in one row.

This module shares no formula with `model`, `outputs` or `evaluate`, so that both agree only
if both are right: positions turn by complex multiplication, one mask over the whole row keeps
sequences apart, norms and activations are PyTorch's own, the loss is one dot product.

Shapes: T tokens of all sequences, S sequences, H query heads, G key-value heads, R = H / G,
D head size, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .batch import Batch, Loss, Result, check_vocabulary, loss_weights
from .config import ModelConfig
from .weights import check_weights


@dataclass(frozen=True)
class _Row:
    """The batch as one row.

    For lengths 3 and 2, `sequence` is 0 0 0 1 1 and `position` 0 1 2 0 1.
    """

    ids: Tensor  # int64 [T]
    sequence: Tensor  # int64 [T]
    position: Tensor  # int64 [T]
    temperature: Tensor  # float64 [T]
    has_label: Tensor  # bool [T]: the next token is of the same sequence
    counts: Tensor  # bool [T]: its prediction enters the loss


def evaluate_packed(
    config: ModelConfig, weights: Mapping[str, Tensor], batch: Batch, loss: Loss
) -> Result:
    """What `evaluate` answers, from one packed row and one backward pass.

    Memory grows with the square of all tokens together: for small batches only.
    """
    check_weights(config, weights)
    check_vocabulary(batch, config.vocab_size)
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    row = _pack(batch)
    logits = _logits(leaves, config, row)
    scaled = logits / row.temperature[:, None]
    log_z = scaled.logsumexp(-1)
    picked = scaled[torch.arange(len(row.ids)), row.ids.roll(-1)] - log_z
    logprobs = torch.where(row.has_label, picked, 0.0)
    entropy = log_z - torch.linalg.vecdot(scaled.softmax(-1), scaled)

    objective = torch.add(logprobs, entropy, alpha=loss.entropy_coeff).neg()
    total = objective[row.counts] @ _shares(row, batch, loss)[row.counts]
    gradients = torch.autograd.grad(
        total, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    seqlens = [len(ids) for ids in batch.input_ids]
    return Result(
        logits=torch.split(logits.detach(), seqlens),
        logprobs=torch.split(logprobs.detach(), seqlens),
        entropy=torch.split(entropy.detach(), seqlens),
        loss=total.detach(),
        gradients=dict(zip(leaves, gradients, strict=True)),
    )


def _pack(batch: Batch) -> _Row:
    seqlens = torch.tensor([len(ids) for ids in batch.input_ids])
    ends = seqlens.cumsum(0)
    sequence = torch.arange(len(seqlens)).repeat_interleave(seqlens)
    token = torch.arange(len(sequence))
    has_label = ~torch.isin(token, ends - 1)
    return _Row(
        ids=torch.cat(batch.input_ids),
        sequence=sequence,
        position=token - (ends - seqlens)[sequence],
        temperature=torch.tensor(batch.temperature, dtype=torch.float64)[sequence],
        has_label=has_label,
        counts=torch.cat(batch.loss_mask).roll(-1) & has_label,
    )


def _shares(row: _Row, batch: Batch, loss: Loss) -> Tensor:
    """What each token's prediction weighs in the loss if it counts, float64 [T]."""
    if loss.aggregation == "own-weights":
        return torch.cat(loss_weights(batch)).detach()
    if loss.aggregation == "token-mean":
        return torch.full(row.ids.shape, 1 / max(1, int(row.counts.sum())), dtype=torch.float64)
    per_sequence = torch.bincount(row.sequence, weights=row.counts.double())
    num_counting = per_sequence.count_nonzero().clamp(min=1)
    if loss.aggregation == "sequence-mean-token-mean":
        return (1 / (num_counting * per_sequence.clamp(min=1)))[row.sequence]
    return torch.full(row.ids.shape, 1 / int(num_counting), dtype=torch.float64)


def _logits(weights: Mapping[str, Tensor], config: ModelConfig, row: _Row) -> Tensor:
    turn = _turn(config, row.position)
    visible = _visible(row)
    stream = F.embedding(row.ids, weights["model.embed_tokens.weight"])
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = _norm(weights, config, f"{prefix}input_layernorm", stream)
        stream = stream + _attention(weights, config, f"{prefix}self_attn.", x, turn, visible)
        x = _norm(weights, config, f"{prefix}post_attention_layernorm", stream)
        stream = stream + _mlp(weights, config, f"{prefix}mlp.", x)
    final = _norm(weights, config, "model.norm", stream)
    output = weights["model.embed_tokens.weight"] if config.tied else weights["lm_head.weight"]
    return F.linear(final, output)


def _visible(row: _Row) -> Tensor:
    """bool [T, T]: the query of row i may read the key of row j."""
    same = row.sequence[:, None] == row.sequence
    return same & (row.position[:, None] >= row.position)


def _turn(config: ModelConfig, position: Tensor) -> Tensor:
    """exp(i * angle) of each token and pair of dims, complex128 [T, rotary_dim / 2].

    Source: RoFormer (arXiv:2104.09864), section 3.2.1, which writes pairs as complex numbers.
    """
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    frequency = torch.exp(-math.log(config.rope_theta) * exponent)
    angle = torch.outer(position.double(), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def _rotate(config: ModelConfig, x: Tensor, turn: Tensor) -> Tensor:
    """x [T, heads, D] with its first dims read as complex numbers and turned."""
    half = config.rotary_dim // 2
    turning, staying = x.tensor_split([config.rotary_dim], dim=-1)
    if config.rope_interleaved:
        pairs = turning.reshape(*x.shape[:2], half, 2)
    else:
        pairs = turning.reshape(*x.shape[:2], 2, half).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn[:, None])
    if not config.rope_interleaved:
        turned = turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), staying], dim=-1)


def _attention(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    prefix: str,
    x: Tensor,
    turn: Tensor,
    visible: Tensor,
) -> Tensor:
    size, groups = config.head_dim, config.num_kv_heads
    q = _linear(weights, f"{prefix}q_proj", x).view(len(x), -1, size)
    k = _linear(weights, f"{prefix}k_proj", x).view(len(x), -1, size)
    v = _linear(weights, f"{prefix}v_proj", x).view(len(x), -1, size)
    if config.qk_norm:
        q = F.rms_norm(q, (size,), weights[f"{prefix}q_norm.weight"], config.norm_eps)
        k = F.rms_norm(k, (size,), weights[f"{prefix}k_norm.weight"], config.norm_eps)
    q = _rotate(config, q, turn).view(len(x), groups, -1, size)
    k = _rotate(config, k, turn)
    scores = torch.einsum("tgrd,sgd->grts", q * size**-0.5, k)
    attended = torch.where(visible, scores, -torch.inf).softmax(-1)
    context = torch.einsum("grts,sgd->tgrd", attended, v)
    return _linear(weights, f"{prefix}o_proj", context.reshape(len(x), -1))


def _mlp(weights: Mapping[str, Tensor], config: ModelConfig, prefix: str, x: Tensor) -> Tensor:
    if config.activation == "swiglu":
        gate = F.silu(_linear(weights, f"{prefix}gate_proj", x))
        return _linear(
            weights, f"{prefix}down_proj", gate * _linear(weights, f"{prefix}up_proj", x)
        )
    approximate = "tanh" if config.activation == "gelu_tanh" else "none"
    inner = F.gelu(_linear(weights, f"{prefix}c_fc", x), approximate=approximate)
    return _linear(weights, f"{prefix}c_proj", inner)


def _norm(weights: Mapping[str, Tensor], config: ModelConfig, name: str, x: Tensor) -> Tensor:
    shape, weight = (config.hidden_size,), weights[f"{name}.weight"]
    if config.norm == "layernorm":
        return F.layer_norm(x, shape, weight, weights[f"{name}.bias"], config.norm_eps)
    return F.rms_norm(x, shape, weight, config.norm_eps)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
