"""A `GPTConfig` as Megatron's `TransformerConfig`: one set of keywords per concern."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from ..parallel import ParallelLayout
from .gpt_config import GATED, GPTConfig
from .mla import mla_settings

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}

Settings = dict[str, Any]


def transformer_config(config: GPTConfig, layout: ParallelLayout) -> TransformerConfig:
    """What Megatron's modules read, one object for all chunks of a model on this rank."""
    kind = TransformerConfig if config.mla is None else MLATransformerConfig
    return kind(
        **size_settings(config),
        **norm_settings(config),
        **attention_settings(config),
        **mlp_settings(config),
        **exact_settings(),
        **parallel_settings(config, layout),
    )


def size_settings(config: GPTConfig) -> Settings:
    return {"num_layers": config.num_layers, "hidden_size": config.hidden_size}


def norm_settings(config: GPTConfig) -> Settings:
    return {"normalization": NORMS[config.norm], "layernorm_epsilon": config.norm_eps}


def attention_settings(config: GPTConfig) -> Settings:
    if config.mla is not None:
        return {"num_attention_heads": config.num_heads, **mla_settings(config.mla)}
    return {
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "qk_layernorm": config.qk_norm,
        "add_qkv_bias": config.qkv_bias,
        "rotary_interleaved": config.rope_interleaved,
    }


def mlp_settings(config: GPTConfig) -> Settings:
    return {
        "ffn_hidden_size": config.ffn_size,
        "gated_linear_unit": config.activation in GATED,
        "activation_func": ACTIVATIONS[config.activation],
        "add_bias_linear": config.mlp_bias,
    }


def exact_settings() -> Settings:
    """No dropout, float64 throughout, and none of the fused kernels, which need a GPU."""
    return {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "autocast_dtype": torch.float64,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
    }


def parallel_settings(config: GPTConfig, layout: ParallelLayout) -> Settings:
    settings: Settings = {
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "context_parallel_size": layout.static_cp_size,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.pp_size > 1:  # packs differ in length; Megatron asks the dispatcher of dense models
        settings |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    if layout.vpp_size > 1:  # batched messages to one peer get mixed up where shapes differ
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        settings |= {"virtual_pipeline_model_parallel_size": layout.vpp_size}
    if layout.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        settings |= {"recompute_num_layers": 1}
    return settings
