"""A model as plain data, in the words that the suite and its implementations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies slowed down; cos and sin are multiplied by `attention_factor`."""

    kind: str  # "linear", "llama3" or "yarn"
    factor: float
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention; a `q_lora_rank` of 0 makes queries from the stream itself."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A mixture of experts; the balance losses are those of a pack and of a sequence."""

    num_experts: int
    top_k: int
    ffn_size: int
    num_dense_layers: int = 0
    score: str = "softmax"  # or "softmax_after" the choice, or "sigmoid"
    normalise: bool = False
    num_groups: int = 1
    top_groups: int = 1
    score_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    routed_scale: float = 1.0
    shared_ffn_size: int = 0
    aux_coeff: float = 0.0
    seq_aux_coeff: float = 0.0
    z_coeff: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder LM as plain data; weights carry their Hugging Face names, in float64."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm: str = "rmsnorm"  # or "layernorm"
    norm_eps: float = 1e-5
    norm_zero_centred: bool = False  # scales by 1 plus its weight
    post_norms: bool = False  # what attention and MLP give is normed too
    activation: str = "swiglu"  # "geglu_tanh", "swiglu_clamped"; ungated "gelu", "gelu_tanh"
    rope_theta: float = 10000.0
    rope_interleaved: bool = False  # adjacent pairs rotate together, not halves
    rope_fraction: float = 1.0  # the share of each head that rotates
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None  # of layers with a window
    mrope_section: tuple[int, ...] = ()
    window: int = 0  # keys that a query sees, its own included; 0: all
    full_attention_every: int = 0  # every so manieth layer has no window
    sinks: bool = False
    softmax_scale: float | None = None  # 1 / sqrt(head size)
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    tied: bool = False  # the output matrix is the embedding
    mla: MLA | None = None
    moe: MoE | None = None
    mtp_depth: int = 0  # further tokens that modules of their own predict
    mtp_coeff: float = 0.3


def same_fields(model: ModelSpec, parts: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Keywords for a class of an implementation whose fields are named as those of `ModelSpec`.

    Args:
        parts: its classes for "rope_scaling", "mla" and "moe".
    """
    own = {field.name: getattr(model, field.name) for field in fields(model)}
    for name, build in parts.items():
        if own[name] is not None:
            own[name] = build(**asdict(own[name]))
    return own
