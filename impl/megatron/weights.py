"""Weights and gradients between Hugging Face names and Megatron's, fused matrices included.

Megatron keeps q, k and v of one KV head side by side in `linear_qkv`, and the gate on top of the
up projection in `linear_fc1`. All else is a change of name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .model import GPTConfig

_OUTER = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
_RENAMED = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}


def load_hf_weights(model: nn.Module, weights: Mapping[str, Tensor], config: GPTConfig) -> None:
    """Fill every parameter of a GPTModel from Hugging Face names.

    Raises:
        ValueError: a weight is missing, left over, or of another shape.
    """
    unused = set(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = _hf_names(name, config)
            missing = [part for part in parts if part not in weights]
            if missing:
                raise ValueError(f"no weight for {', '.join(missing)}, which {name} needs")
            fused = _fuse(name, config)([weights[part] for part in parts])
            if fused.shape != parameter.shape:
                raise ValueError(
                    f"{', '.join(parts)} make {tuple(fused.shape)}, {name} is "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(fused)
            unused -= set(parts)
    if unused:
        raise ValueError(f"weights that no parameter takes: {', '.join(sorted(unused))}")


def to_hf(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Tensors by Megatron's parameter names → by Hugging Face names, fused ones taken apart."""
    return {
        part: piece
        for name, tensor in tensors.items()
        for part, piece in zip(
            _hf_names(name, config), _take_apart(name, tensor, config), strict=True
        )
    }


def hf_gradients(model: nn.Module, config: GPTConfig) -> dict[str, Tensor]:
    """Gradients of a GPTModel by Hugging Face name; zero where none arrived."""
    return to_hf(
        {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
        },
        config,
    )


def _hf_names(name: str, config: GPTConfig) -> list[str]:
    """The Hugging Face names that one Megatron parameter holds, in the order it holds them."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return [f"{_OUTER[module]}.{kind}"]
    layer, _, module = module.removeprefix("decoder.layers.").partition(".")
    if module == "self_attention.linear_qkv":
        inner = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    elif module == "mlp.linear_fc1":
        inner = ["mlp.gate_proj", "mlp.up_proj"] if config.activation == "swiglu" else ["mlp.c_fc"]
    elif module == "mlp.linear_fc2":
        inner = ["mlp.down_proj"] if config.activation == "swiglu" else ["mlp.c_proj"]
    else:
        inner = [_RENAMED[module]]
    return [f"model.layers.{layer}.{part}.{kind}" for part in inner]


def _fuse(name: str, config: GPTConfig) -> Callable[[list[Tensor]], Tensor]:
    if "linear_qkv" not in name:
        return torch.cat  # of one part, or of gate and up
    return lambda parts: torch.cat(
        [part.unflatten(0, (config.num_kv_heads, -1)) for part in parts], 1
    ).flatten(0, 1)


def _take_apart(name: str, tensor: Tensor, config: GPTConfig) -> list[Tensor]:
    if "linear_qkv" in name:
        by_kv_head = tensor.unflatten(0, (config.num_kv_heads, -1))
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        sizes = [queries, config.head_dim, config.head_dim]
        return [part.flatten(0, 1) for part in by_kv_head.split(sizes, 1)]
    return list(tensor.chunk(len(_hf_names(name, config))))
