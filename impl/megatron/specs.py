"""Layer specs of a `GPTConfig`: Megatron's own, with the norms and the attention of ours."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from .attention import ExactAttention
from .gpt_config import GPTConfig
from .mla import set_mla_norms
from .norm import TorchNorm
from .settings import NORMS


def block_spec(
    config: GPTConfig, settings: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of a chunk of it."""
    stages = settings.pipeline_model_parallel_size
    chunks = stages * (settings.virtual_pipeline_model_parallel_size or 1)
    first = get_transformer_layer_offset(settings, vp_stage)
    layers = range(first, first + config.num_layers // chunks)
    return TransformerBlockSubmodules([layer_spec(config, layer) for layer in layers], TorchNorm)


def layer_spec(config: GPTConfig, layer: int) -> ModuleSpec:
    """One layer of the model, counted from 0."""
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_norm,
        normalization=NORMS[config.norm],
        multi_latent_attention=config.mla is not None,
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    _attention(spec.submodules.self_attention.submodules, config)
    return spec


def _attention(submodules: Any, config: GPTConfig) -> None:
    submodules.core_attention = ExactAttention
    if config.mla is not None:
        set_mla_norms(submodules, config.mla)
    elif config.qk_norm:
        submodules.q_layernorm = submodules.k_layernorm = TorchNorm
