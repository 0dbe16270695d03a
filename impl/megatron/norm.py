"""Norms of torch as modules of Megatron's layer spec, with sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn


class TorchNorm:
    """The norm that a `TransformerConfig` asks for.

    Megatron's own wrapper of these refuses sequence parallelism. All there is to it are marked
    parameters: a rank sees its part of the rows, and `finalize_model_grads` adds up what it marks.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        kind = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}[config.normalization]
        norm: nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
