"""Weights and gradients between Hugging Face names and Megatron's, fused matrices included.

Megatron keeps q, k and v of one KV head side by side in `linear_qkv`, and the gate on top of the
up projection in `linear_fc1`. All else is a change of name; `impl.megatron.names` has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .gpt_config import GPTConfig
from .mla import mla_names
from .mtp import mtp_names
from .names import Names, Source, attention_names, mlp_names, module, norm_names, under

_LAYERS = "decoder.layers."
_SPLIT_OUTPUTS = (
    "embed_tokens",
    "lm_head",
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "c_fc",
    "eh_proj",
)
_SPLIT_INPUTS = ("o_proj", "down_proj", "c_proj")


@lru_cache(maxsize=4)
def parameter_names(config: GPTConfig) -> Mapping[str, Source]:
    """What every parameter of the whole model is made of, by Megatron's name."""
    output = "model.embed_tokens" if config.tied else "lm_head"  # a later stage has a copy
    names = {
        **dict(module("embedding.word_embeddings", "model.embed_tokens")),
        **dict(module("decoder.final_layernorm", "model.norm")),
        **dict(module("output_layer", output)),
    }
    for layer in range(config.num_layers):
        names.update(
            under(f"{_LAYERS}{layer}", f"model.layers.{layer}", layer_names(config, layer))
        )
    for depth in range(config.mtp_depth):
        layer = config.num_layers + depth
        own = mtp_names(layer_names(config, layer))
        names.update(under(f"mtp.layers.{depth}", f"model.layers.{layer}", own))
    return names


def layer_names(config: GPTConfig, layer: int) -> Names:
    """The parameters of one layer, counted from 0, by their names within it."""
    yield from norm_names(config)
    attention = attention_names(config) if config.mla is None else mla_names(config.mla)
    yield from under("self_attention", "self_attn", attention)
    yield from under("mlp", "mlp", mlp_names(config))


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
    names, unused = parameter_names(config), set(weights)
    with torch.no_grad():
        for name, parameter in _global_parameters(model):
            source = names[name]
            parts = source.parts
            missing = [part for part in parts if part not in weights]
            if missing:
                raise ValueError(f"no weight for {', '.join(missing)}, which {name} needs")
            local = [shard.part_of(part, weights[part]) for part in parts]
            fused = source.layout.fuse(local, shard.size)
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
    names = parameter_names(config)
    pieces: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        source = names[name]
        apart = source.layout.take_apart(tensor, len(source.parts), shard.size)
        pieces.update(zip(source.parts, apart, strict=True))
    return pieces


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
