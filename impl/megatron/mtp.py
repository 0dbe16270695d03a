"""Multi-token prediction (DeepSeek-V3): Megatron's layers on ids that are moved before the split.

Megatron's own way needs what cannot be had from outside: `MultiTokenPredictionLayer.forward` takes
the next ids from the CP group that the model was built with (0.15.3 refuses packs altogether), and
its loss is weighted by how many tokens of a shard have a target, so that gradients depend on the
CP size. Its layers themselves are right on every version.

A model built here therefore tells Megatron nothing of them. They run after the decoder, and what
they give joins its output along the batch dim, which packs leave at 1. Everything behind, output
matrix included, takes them for further sequences: logits are [1 + depth, T, V].
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from ..parallel import ParallelLayout
from .gpt_config import GPTConfig
from .names import Names, Source, module
from .norm import TorchNorm
from .specs import layer_spec

_TAKEN_OVER = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


def check_mtp_layout(config: GPTConfig, layout: ParallelLayout) -> None:
    """Whether a layout can be had with multi-token prediction.

    Raises:
        ValueError: it cannot.
    """
    if config.mtp_depth and layout.pp_size > 1:
        raise ValueError(
            f"pp_size={layout.pp_size} with mtp_depth={config.mtp_depth}: the last stage has no "
            "embedding for the next ids; use pp_size=1"
        )


def mtp_names(layer: Iterable[tuple[str, Source]]) -> Names:
    """One module of the prediction.

    Args:
        layer: the table of the layer within it, which 0.16.1 and 0.18.2 call differently.
    """
    yield from module("enorm", "enorm")
    yield from module("hnorm", "hnorm")
    yield from module("eh_proj", "eh_proj")
    yield from module("final_layernorm", "shared_head.norm")
    for name, source in layer:
        yield f"transformer_layer.{name}", source
        yield f"mtp_model_layer.{name}", source


def add_mtp(model: GPTModel, config: GPTConfig) -> None:
    """Give a model `mtp_depth` further predictions; see the head of this module for its logits.

    Its packs must carry the next ids of every row, `packed_seq_params.next_ids`, as
    `impl.thd.preprocess_thd_engine` makes them.
    """
    settings = copy.copy(model.config)  # Megatron's model itself has no such layers
    settings.mtp_num_layers = config.mtp_depth
    layers = range(config.num_layers, config.num_layers + config.mtp_depth)
    specs = [_spec(layer_spec(config, layer)) for layer in layers]
    model.mtp = MultiTokenPredictionBlock(
        settings,
        MultiTokenPredictionBlockSubmodules(layer_specs=specs),
        vp_stage=model.vp_stage,
        pg_collection=model.pg_collection,
    )
    model.decoder.register_forward_hook(
        functools.partial(_append_predictions, model.embedding, model.mtp), with_kwargs=True
    )


def _spec(layer: ModuleSpec) -> ModuleSpec:
    spec = get_mtp_layer_spec_for_backend(layer, LocalSpecProvider())
    norms = spec.submodules
    norms.enorm = norms.hnorm = norms.layer_norm = TorchNorm
    return spec


def _append_predictions(
    embedding: nn.Module,
    mtp: MultiTokenPredictionBlock,
    decoder: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    hidden: Tensor,
) -> Tensor:
    """Hook on the decoder: hidden states [T, 1, H] → [T, 1 + depth, H], the decoder's own first.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 21 to 23; Megatron feeds the
        first module with what the final norm gives.
    """
    packed_seq_params = keywords["packed_seq_params"]
    next_ids = getattr(packed_seq_params, "next_ids", ())
    if len(next_ids) != len(mtp.layers):
        raise ValueError(
            f"the model predicts {len(mtp.layers)} further tokens, the pack has next ids for "
            f"{len(next_ids)}; give preprocess_thd_engine the mtp_depth of the model"
        )
    shared = {name: keywords.get(name) for name in _TAKEN_OVER}
    shared["packed_seq_params"] = packed_seq_params
    found = [hidden]
    for layer, ids in zip(mtp.layers, next_ids, strict=True):
        embedded = embedding(input_ids=ids.unsqueeze(0), position_ids=None)
        found.append(_run(layer, found[-1], embedded, shared))
    return torch.cat(found, dim=1)


def _run(layer: Any, hidden: Tensor, embedded: Tensor, shared: Mapping[str, Any]) -> Tensor:
    """One module; 0.17.1 and 0.18.2 fail to recompute packs in it by themselves."""

    def run(hidden: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = layer._proj_and_transformer_layer(hidden, embedded, **shared)
        return out

    if layer.config.recompute_granularity == "full" and layer.training:
        out: Tensor = tensor_parallel.checkpoint(run, False, hidden, embedded)
        return out
    return run(hidden, embedded)
