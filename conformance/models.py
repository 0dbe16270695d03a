"""The models of the `model` axis: small, and complete in what tells them from the others.

Windows, original lengths and vocabularies are small enough that sequences of a dozen tokens feel
them.
"""

from __future__ import annotations

from dataclasses import replace

from .model_spec import MLA, ModelSpec, MoE, RopeScaling

_BASE = ModelSpec(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=64,
)
_MLA = MLA(q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6)
MODEL_SPECS = {
    "llama": _BASE,
    "qwen2": replace(_BASE, qkv_bias=True, tied=True, rope_theta=1e6),
    "qwen3": replace(_BASE, qk_norm=True, head_dim=16, norm_eps=1e-6),
    "starcoder2": replace(
        _BASE,
        norm="layernorm",
        activation="gelu_tanh",
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    ),
    "gptj": replace(
        _BASE,
        norm="layernorm",
        activation="gelu",
        num_kv_heads=4,
        rope_interleaved=True,
        rope_fraction=0.5,
    ),
    "mqa": replace(_BASE, num_kv_heads=1, rope_fraction=0.5),
    "llama3": replace(
        _BASE,
        head_dim=16,
        rope_theta=5e5,
        rope_scaling=RopeScaling(kind="llama3", factor=8, original_length=64),
    ),
    "linear": replace(_BASE, rope_scaling=RopeScaling(kind="linear", factor=4)),
    "mrope": replace(_BASE, head_dim=16, qkv_bias=True, mrope_section=(2, 3, 3)),
    "mistral": replace(_BASE, window=5),
    "gemma2": replace(
        _BASE,
        num_layers=2,
        norm_eps=1e-6,
        norm_zero_centred=True,
        post_norms=True,
        activation="geglu_tanh",
        window=4,
        full_attention_every=2,
        softmax_scale=0.25,
        attention_softcap=5.0,
        logit_softcap=3.0,
        embedding_scale=32**0.5,
        tied=True,
    ),
    "gemma3": replace(
        _BASE,
        num_layers=3,
        norm_eps=1e-6,
        norm_zero_centred=True,
        post_norms=True,
        activation="geglu_tanh",
        rope_theta=1e6,
        rope_scaling=RopeScaling(kind="linear", factor=8),
        rope_local_theta=1e4,
        window=4,
        full_attention_every=3,
        softmax_scale=0.25,
        qk_norm=True,
        embedding_scale=32**0.5,
        tied=True,
    ),
    "qwen3moe": replace(
        _BASE,
        qk_norm=True,
        norm_eps=1e-6,
        moe=MoE(num_experts=4, top_k=2, ffn_size=24, normalise=True, aux_coeff=0.05),
    ),
    "mixtral": replace(
        _BASE,
        moe=MoE(
            num_experts=4,
            top_k=2,
            ffn_size=24,
            score="softmax_after",
            seq_aux_coeff=0.05,
            z_coeff=0.02,
        ),
    ),
    "gptoss": replace(
        _BASE,
        activation="swiglu_clamped",
        rope_theta=150000.0,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=8,
            original_length=32,
            truncate=False,
            attention_factor=1.2079441541679836,
        ),
        window=4,
        full_attention_every=2,
        sinks=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        moe=MoE(
            num_experts=4,
            top_k=2,
            ffn_size=24,
            score="softmax_after",
            router_bias=True,
            expert_bias=True,
        ),
    ),
    "mla": replace(_BASE, rope_interleaved=True, mla=_MLA),
    "mtp": replace(_BASE, mtp_depth=2),
    "deepseek": replace(
        _BASE,
        norm_eps=1e-6,
        rope_interleaved=True,
        rope_scaling=RopeScaling(kind="yarn", factor=4, original_length=32),
        softmax_scale=0.32,
        mla=_MLA,
        moe=MoE(
            num_experts=8,
            top_k=3,
            ffn_size=16,
            num_dense_layers=1,
            score="sigmoid",
            normalise=True,
            num_groups=4,
            top_groups=2,
            score_bias=True,
            routed_scale=2.5,
            shared_ffn_size=16,
            seq_aux_coeff=0.02,
        ),
        mtp_depth=1,
    ),
}
