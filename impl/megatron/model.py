"""A GPTModel in float64 from a plain description, with exact attention in its layer spec."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from ..parallel import ParallelLayout
from .attention import ExactAttention
from .norm import TorchNorm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder LM as Megatron can build it.

    Args:
        rope_fraction: the share of each head that rotates.
        qkv_bias, attention_out_bias, mlp_bias: all, or only the first, or none.
    Raises:
        ValueError: an unknown name, or biases that Megatron cannot switch apart.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "swiglu"
    rope_theta: float = 10000.0
    rope_interleaved: bool = False
    rope_fraction: float = 1.0
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if self.norm not in NORMS or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"norm={self.norm!r} must be one of {', '.join(NORMS)} and "
                f"activation={self.activation!r} one of {', '.join(ACTIVATIONS)}"
            )
        if self.attention_out_bias != self.mlp_bias or self.mlp_bias > self.qkv_bias:
            raise ValueError(
                f"qkv_bias={self.qkv_bias}, attention_out_bias={self.attention_out_bias}, "
                f"mlp_bias={self.mlp_bias}: Megatron has all three, the first alone, or none"
            )
        if self.qk_norm and self.norm != "rmsnorm":
            raise ValueError(
                "qk_norm=True needs norm='rmsnorm': Megatron norms q and k like the rest"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope_fraction)


def build_gpt_model(config: GPTConfig, *, max_seqlen: int) -> GPTModel:
    """The whole model on every rank; see `build_gpt_chunks`."""
    return build_gpt_chunks(config, max_seqlen=max_seqlen, layout=ParallelLayout())[0]


def build_gpt_chunks(
    config: GPTConfig, *, max_seqlen: int, layout: ParallelLayout
) -> list[GPTModel]:
    """This rank's model chunks on the CPU, one for each virtual pipeline stage.

    Every parameter, buffer and RoPE frequency is float64. Weights are not initialised to anything
    of use; `impl.megatron.weights` fills them. Call it inside `cpu_mode` and `model_parallel`; all
    chunks share one `TransformerConfig`.

    Raises:
        ValueError: sizes that do not divide evenly.
    """
    check_divisible(config, layout)
    settings = _transformer_config(config, layout)
    stages = range(layout.vpp_size) if layout.vpp_size > 1 else (None,)
    return [_chunk(config, settings, max_seqlen, vp_stage) for vp_stage in stages]


def check_divisible(config: GPTConfig, layout: ParallelLayout) -> None:
    """Whether layers divide evenly over stages and chunks, and all else over TP ranks.

    Raises:
        ValueError: the first size that does not, by name.
    """
    chunks = layout.pp_size * layout.vpp_size
    if config.num_layers % chunks:
        raise ValueError(
            f"num_layers={config.num_layers} is not a multiple of pp_size={layout.pp_size} * "
            f"vpp_size={layout.vpp_size}"
        )
    for name in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size"):
        if getattr(config, name) % layout.tp_size:
            raise ValueError(
                f"{name}={getattr(config, name)} is not a multiple of tp_size={layout.tp_size}"
            )


def _chunk(
    config: GPTConfig, settings: TransformerConfig, max_seqlen: int, vp_stage: int | None
) -> GPTModel:
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = GPTModel(
        settings,
        _block_spec(config, settings),
        vocab_size=config.vocab_size,
        max_sequence_length=max_seqlen,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=config.rope_fraction,
        share_embeddings_and_output_weights=config.tied,
        parallel_output=True,
        vp_stage=vp_stage,
    ).double()
    model.rotary_pos_emb.inv_freq = rope_frequencies(config)
    model.model_type = ModelType.encoder_or_decoder
    return model


def _block_spec(config: GPTConfig, settings: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization=NORMS[config.norm])
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ExactAttention
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    chunks = settings.pipeline_model_parallel_size * (
        settings.virtual_pipeline_model_parallel_size or 1
    )
    return TransformerBlockSubmodules([layer] * (config.num_layers // chunks), TorchNorm)


def rope_frequencies(config: GPTConfig) -> Tensor:
    """Float64 [rotary_dim / 2]; Megatron's own are float32, 1e-8 off.

    Source: RoFormer (arXiv:2104.09864).
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    return config.rope_theta**-exponents


def _transformer_config(config: GPTConfig, layout: ParallelLayout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_size,
        normalization=NORMS[config.norm],
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=config.activation == "swiglu",
        activation_func=ACTIVATIONS[config.activation],
        add_bias_linear=config.mlp_bias,
        add_qkv_bias=config.qkv_bias,
        rotary_interleaved=config.rope_interleaved,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        autocast_dtype=torch.float64,
        use_cpu_initialization=True,
        perform_initialization=False,
        # fused kernels need a GPU
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **_parallel_settings(layout),
    )


def _parallel_settings(layout: ParallelLayout) -> dict[str, Any]:
    settings: dict[str, Any] = {
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
