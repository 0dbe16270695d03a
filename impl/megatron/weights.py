"""Weights and gradients between Hugging Face names and Megatron's, fused matrices included.

Megatron keeps q, k and v of one KV head side by side in `linear_qkv`, and the gate on top of the
up projection in `linear_fc1`. All else is a change of name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model import GPTConfig

_LAYERS = "decoder.layers."
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
_SPLIT_OUTPUTS = (
    "embed_tokens",
    "lm_head",
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "c_fc",
)
_SPLIT_INPUTS = ("o_proj", "down_proj", "c_proj")


@dataclass(frozen=True)
class TensorShard:
    """Which part of every divided matrix a rank holds: the `rank`-th of `size` equal ones."""

    size: int = 1
    rank: int = 0

    def part_of(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a tensor by its Hugging Face name; of one that is not divided, all."""
        dim = split_dim(name)
        return tensor if dim is None else tensor.chunk(self.size, dim)[self.rank]


WHOLE = TensorShard()


def split_dim(name: str) -> int | None:
    """The dim along which tensor parallelism divides a weight by Hugging Face name, None if none.

    >>> split_dim("model.layers.0.mlp.down_proj.weight"), split_dim("model.norm.weight")
    (1, None)
    """
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if module in _SPLIT_OUTPUTS:
        return 0
    return 1 if module in _SPLIT_INPUTS and kind == "weight" else None


def load_hf_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    config: GPTConfig,
    *,
    shard: TensorShard = WHOLE,
) -> None:
    """Fill every parameter of a GPTModel from Hugging Face names.

    Args:
        model: the whole model or a pipeline stage of it.
        weights: of the whole model.
    Raises:
        ValueError: a weight is missing, left over, or of another shape.
    """
    unused = set(weights)
    with torch.no_grad():
        for name, parameter in _global_parameters(model):
            parts = _hf_names(name, config)
            missing = [part for part in parts if part not in weights]
            if missing:
                raise ValueError(f"no weight for {', '.join(missing)}, which {name} needs")
            local = [shard.part_of(part, weights[part]) for part in parts]
            fused = _fuse(name, config, shard)(local)
            if fused.shape != parameter.shape:
                raise ValueError(
                    f"{', '.join(parts)} make {tuple(fused.shape)}, {name} is "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(fused)
            unused -= set(parts)
    if unused and model.pre_process and model.post_process:
        raise ValueError(f"weights that no parameter takes: {', '.join(sorted(unused))}")


def to_hf(
    tensors: Mapping[str, Tensor], config: GPTConfig, *, shard: TensorShard = WHOLE
) -> dict[str, Tensor]:
    """Tensors by Megatron's parameter names → by Hugging Face names, fused ones taken apart.

    Args:
        shard: the part that `tensors` are of the whole; what comes out is that part too.
    """
    return {
        part: piece
        for name, tensor in tensors.items()
        for part, piece in zip(
            _hf_names(name, config), _take_apart(name, tensor, config, shard), strict=True
        )
    }


def hf_gradients(
    model: nn.Module, config: GPTConfig, *, shard: TensorShard = WHOLE
) -> dict[str, Tensor]:
    """Gradients of a GPTModel by Hugging Face name; zero where none arrived.

    Inside Megatron's data parallelism they are in `main_grad`.
    """
    return to_hf(
        {name: _gradient(parameter) for name, parameter in _global_parameters(model)},
        config,
        shard=shard,
    )


def hf_parameters(
    model: nn.Module, config: GPTConfig, *, shard: TensorShard = WHOLE
) -> dict[str, Tensor]:
    """Weights of a GPTModel by Hugging Face name."""
    return to_hf(dict(_global_parameters(model)), config, shard=shard)


def _gradient(parameter: Tensor) -> Tensor:
    gradient: Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return torch.zeros_like(parameter) if gradient is None else gradient


def _global_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by the names they have in the whole model: layers of a stage start at 0."""
    layers: Any = model.get_submodule("decoder.layers")
    first = layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        if name.startswith(_LAYERS):
            layer, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{int(layer) + first}.{rest}"
        yield name, parameter


def _hf_names(name: str, config: GPTConfig) -> list[str]:
    """The Hugging Face names that one Megatron parameter holds, in the order it holds them."""
    module, _, kind = name.rpartition(".")
    if module == "output_layer" and config.tied:  # a later pipeline stage has a copy
        return ["model.embed_tokens.weight"]
    if module in _OUTER:
        return [f"{_OUTER[module]}.{kind}"]
    layer, _, module = module.removeprefix(_LAYERS).partition(".")
    if module == "self_attention.linear_qkv":
        inner = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    elif module == "mlp.linear_fc1":
        inner = ["mlp.gate_proj", "mlp.up_proj"] if config.activation == "swiglu" else ["mlp.c_fc"]
    elif module == "mlp.linear_fc2":
        inner = ["mlp.down_proj"] if config.activation == "swiglu" else ["mlp.c_proj"]
    else:
        inner = [_RENAMED[module]]
    return [f"model.layers.{layer}.{part}.{kind}" for part in inner]


def _fuse(name: str, config: GPTConfig, shard: TensorShard) -> Callable[[list[Tensor]], Tensor]:
    if "linear_qkv" not in name:
        return torch.cat  # of one part, or of gate and up
    kv_heads = config.num_kv_heads // shard.size
    return lambda parts: torch.cat(
        [part.unflatten(0, (kv_heads, -1)) for part in parts], 1
    ).flatten(0, 1)


def _take_apart(name: str, tensor: Tensor, config: GPTConfig, shard: TensorShard) -> list[Tensor]:
    if "linear_qkv" in name:
        by_kv_head = tensor.unflatten(0, (config.num_kv_heads // shard.size, -1))
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        sizes = [queries, config.head_dim, config.head_dim]
        return [part.flatten(0, 1) for part in by_kv_head.split(sizes, 1)]
    return list(tensor.chunk(len(_hf_names(name, config))))
