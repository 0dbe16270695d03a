"""Rotary positions: pairs of dims turn by an angle that grows with the position.

Angles are float64 whatever the dtype of what turns. Source: RoFormer (arXiv:2104.09864),
equation 34.
"""

import math

import torch
from torch import Tensor

from .config import ModelConfig, RopeScaling


def rotate(x: Tensor, positions: Tensor, config: ModelConfig, layer: int) -> Tensor:
    """Turn pair i of every head by `position * frequency[i]`.

    Args:
        x: queries or keys [L, heads, D].
        positions: [L], or [3, L] in time, height and width for `mrope_section`.
        layer: counted from 0; layers with a window can have frequencies of their own.
    Source: halves instead of neighbours as in GPT-NeoX (arXiv:2204.06745); a part of the dims
        as in GPT-J; cos and sin times `attention_factor` as in YaRN (arXiv:2309.00071),
        section 3.4.
    """
    turning, staying = x[..., : config.rotary_dim], x[..., config.rotary_dim :]
    if config.rope_interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)

    angle = _position_of_pairs(positions, config) * frequencies(config, layer).to(x.device)
    scaling = scaling_of(config, layer)
    factor = 1.0 if scaling is None else scaling.attention_factor
    cos, sin = ((factor * turn(angle)).to(x.dtype)[:, None] for turn in (torch.cos, torch.sin))
    turned = first * cos - second * sin, first * sin + second * cos

    if config.rope_interleaved:
        return torch.cat([torch.stack(turned, dim=-1).flatten(-2), staying], dim=-1)
    return torch.cat([*turned, staying], dim=-1)


def _position_of_pairs(positions: Tensor, config: ModelConfig) -> Tensor:
    """The position that each pair turns with, [L, 1] where all turn with the same, or [L, pairs].

    Source: Qwen2-VL (arXiv:2409.12191), section 2.1, "M-RoPE".
    """
    if positions.dim() == 1:
        return positions[:, None]
    sections = torch.tensor(config.mrope_section, device=positions.device)
    return positions.repeat_interleave(sections, dim=0).T


def scaling_of(config: ModelConfig, layer: int) -> RopeScaling | None:
    """How a layer's frequencies are slowed down."""
    return None if _is_local(config, layer) else config.rope_scaling


def _is_local(config: ModelConfig, layer: int) -> bool:
    return config.rope_local_theta is not None and config.has_window(layer)


def frequencies(config: ModelConfig, layer: int) -> Tensor:
    """Radians that every pair turns by from one position to the next, float64 [pairs].

    Source: `theta ** (-2 i / rotary_dim)` in RoFormer (arXiv:2104.09864), section 3.2.2; a theta
        of their own for layers with a window in Gemma 3 (arXiv:2503.19786), section 2.
    """
    theta = config.rope_theta
    if config.rope_local_theta is not None and _is_local(config, layer):
        theta = config.rope_local_theta
    pair = torch.arange(config.rotary_dim // 2, dtype=torch.float64)
    plain = theta ** (-2 * pair / config.rotary_dim)
    scaling = scaling_of(config, layer)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    slowed = (
        _llama3_share(plain, scaling) if scaling.kind == "llama3" else _yarn_share(config, scaling)
    )
    return slowed * plain / scaling.factor + (1 - slowed) * plain


def _llama3_share(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """How far each pair is slowed down, from 0 to 1: the fewer turns, the farther.

    A pair's turns are those over the length that the model was first trained on. From
    `high_freq_factor` turns on it stays, up to `low_freq_factor` it is slowed down fully.

    Source: `apply_scaling` of Meta's llama-models, models/llama3/model.py; the Llama 3 report
        (arXiv:2407.21783) has only the theta.
    """
    turns = plain * scaling.original_length / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((high - turns) / (high - low)).clamp(0, 1)


def _yarn_share(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """How far each pair is slowed down, from 0 to 1: in equal steps from pair to pair.

    The ramp begins at the pair that turns `beta_fast` times over the length that the model
    was first trained on and ends at the one that turns `beta_slow` times, both a fraction.

    Source: YaRN (arXiv:2309.00071), section 3.2, whose ramp over turns became one over pairs in
        its published code; ends that are not rounded as in gpt-oss (arXiv:2508.10925).
    """

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling.original_length / turns
        return dims / 2 * math.log(wavelength / (2 * math.pi)) / math.log(config.rope_theta)

    dims = config.rotary_dim
    first, last = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001  # a step
    pair = torch.arange(dims // 2, dtype=torch.float64)
    return ((pair - first) / (last - first)).clamp(0, 1)
