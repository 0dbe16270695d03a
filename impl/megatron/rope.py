"""Rotary frequencies in float64; Megatron's own are float32, 1e-8 off."""

from __future__ import annotations

import torch
from torch import Tensor

from .gpt_config import GPTConfig


def rope_frequencies(config: GPTConfig) -> Tensor:
    """Float64 [rotary_dim / 2].

    Source: RoFormer (arXiv:2104.09864).
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    return config.rope_theta**-exponents
