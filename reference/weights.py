"""What weights a model has: their Hugging Face names and shapes, and random ones that tell."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .config import GATED, MLA, ModelConfig, MoE

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's Hugging Face name and shape, in the order the model uses them.

    Names are those of Llama's checkpoints, and where a model has what Llama has not, of one that
    has it: Starcoder2 for an ungated MLP, Gemma 2 for `post_norms`, gpt-oss for sinks, DeepSeek-V3
    for MLA, experts and MTP, whose modules count on after the last layer. A matrix is
    [outputs, inputs], as `torch.nn.Linear` stores it. A tied model has no `lm_head.weight`.

    >>> config = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1,
    ...                      head_dim=4, ffn_size=16, vocab_size=32)
    >>> weight_shapes(config)["model.layers.0.self_attn.k_proj.weight"]
    (4, 8)
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes.update(_norm_shapes(config, "model.norm"))
    if not config.tied:
        shapes["lm_head.weight"] = vocabulary
    for layer in range(config.num_layers, config.num_layers + config.mtp_depth):
        for name, shape in _mtp_shapes(config, layer):
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    yield from _norm_shapes(config, "input_layernorm")
    yield from _attention_shapes(config) if config.mla is None else _mla_shapes(config, config.mla)
    yield from _norm_shapes(config, "post_attention_layernorm")
    if config.post_norms:
        yield from _norm_shapes(config, "pre_feedforward_layernorm")
    if config.moe is not None and config.has_experts(layer):
        yield from _moe_shapes(config, config.moe)
    else:
        yield from _mlp_shapes(config, "mlp", config.ffn_size, bias=config.mlp_bias)
    if config.post_norms:
        yield from _norm_shapes(config, "post_feedforward_layernorm")


def _attention_shapes(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    yield from _linear_shapes("self_attn.q_proj", heads, hidden, bias=config.qkv_bias)
    yield from _linear_shapes("self_attn.k_proj", kv_heads, hidden, bias=config.qkv_bias)
    yield from _linear_shapes("self_attn.v_proj", kv_heads, hidden, bias=config.qkv_bias)
    yield from _linear_shapes("self_attn.o_proj", hidden, heads, bias=config.attention_out_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    if config.sinks:
        yield "self_attn.sinks", (config.num_heads,)


def _mla_shapes(config: ModelConfig, mla: MLA) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        yield "self_attn.q_a_proj.weight", (mla.q_lora_rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (mla.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (queries, mla.q_lora_rank)
    else:
        yield "self_attn.q_proj.weight", (queries, hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    yield "self_attn.kv_a_layernorm.weight", (mla.kv_lora_rank,)
    keys_and_values = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield "self_attn.kv_b_proj.weight", (keys_and_values, mla.kv_lora_rank)
    values = heads * mla.v_head_dim
    yield from _linear_shapes("self_attn.o_proj", hidden, values, bias=config.attention_out_bias)


def _mlp_shapes(config: ModelConfig, name: str, ffn: int, *, bias: bool) -> Shapes:
    hidden = config.hidden_size
    if config.activation in GATED:
        yield from _linear_shapes(f"{name}.gate_proj", ffn, hidden, bias=bias)
        yield from _linear_shapes(f"{name}.up_proj", ffn, hidden, bias=bias)
        yield from _linear_shapes(f"{name}.down_proj", hidden, ffn, bias=bias)
    else:
        yield from _linear_shapes(f"{name}.c_fc", ffn, hidden, bias=bias)
        yield from _linear_shapes(f"{name}.c_proj", hidden, ffn, bias=bias)


def _moe_shapes(config: ModelConfig, moe: MoE) -> Shapes:
    experts = moe.num_experts
    yield from _linear_shapes("mlp.gate", experts, config.hidden_size, bias=moe.router_bias)
    if moe.score_bias:
        yield "mlp.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp_shapes(config, f"mlp.experts.{expert}", moe.ffn_size, bias=moe.expert_bias)
    if moe.shared_ffn_size:
        yield from _mlp_shapes(config, "mlp.shared_experts", moe.shared_ffn_size, bias=False)


def _mtp_shapes(config: ModelConfig, layer: int) -> Shapes:
    hidden = config.hidden_size
    yield from _norm_shapes(config, "enorm")
    yield from _norm_shapes(config, "hnorm")
    yield "eh_proj.weight", (hidden, 2 * hidden)
    yield from _layer_shapes(config, layer)
    yield from _norm_shapes(config, "shared_head.norm")


def _norm_shapes(config: ModelConfig, name: str) -> Shapes:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm == "layernorm":
        yield f"{name}.bias", (config.hidden_size,)


def _linear_shapes(name: str, outputs: int, inputs: int, *, bias: bool) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def random_weights(config: ModelConfig, *, seed: int, std: float = 0.15) -> dict[str, Tensor]:
    """Weights with which a mistake shows: the same for the same seed, float64, on the CPU.

    Matrices are normal with `std`; at 0.15 attention is neither flat nor one-hot at widths
    of 64 to 128, so a wrong mask or position moves the logits. Norm weights vary around 1 (around
    0 where 1 is added to them) and biases around 0, so that leaving one out moves them too. Sinks
    vary around 1, where they take a good part of the softmax.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("bias"):
            weights[name] = 0.1 * normal
        elif name.endswith("norm.weight"):
            weights[name] = (0 if config.norm_zero_centred else 1) + 0.2 * normal
        elif name.endswith("sinks"):
            weights[name] = 1 + 0.2 * normal
        elif name.endswith("mlp.gate.weight"):
            weights[name] = 3 * std * normal  # routers that choose
        else:
            weights[name] = std * normal
    return weights


def check_weights(
    config: ModelConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float64
) -> None:
    """Require exactly the weights of `config`, in `dtype`.

    Raises:
        ValueError: a weight that is missing, unknown, of another shape or of another dtype.
    """
    shapes = weight_shapes(config)
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ValueError(
            f"weights lack {', '.join(missing)}; weight_shapes(config) lists them all"
        )
    extra = [name for name in weights if name not in shapes]
    if extra:
        raise ValueError(f"this model has no {', '.join(extra)}; drop them or change the config")
    for name, shape in shapes.items():
        weight = weights[name]
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, the config needs {shape}")
        if weight.dtype != dtype:
            raise ValueError(f"{name} is {weight.dtype}, not {dtype}; convert every weight to it")
