"""A third opinion: models that others wrote, in float64, with the oracle's weights."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from reference import Batch, Loss, ModelConfig, Result, evaluate, random_weights

from .agreement import assert_agree, errors
from .float64_transformers import float64_everywhere
from .small_models import random_batch

transformers = pytest.importorskip("transformers")

BUDGET = 1e-9
LOSS = Loss("token-mean", entropy_coeff=0.1)
BATCH = random_batch((19, 1, 33, 8), seed=7, temperature=(1, 2, 0.7, 1.3), vocab_size=97)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


class Family(NamedTuple):
    """A model of transformers, its own options, and the same options in our words."""

    module: str
    name: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


FAMILIES = {
    "llama": Family(
        "llama",
        "Llama",
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5},
    ),
    "llama_bias": Family(
        "llama",
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.01},
        {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "norm_eps": 0.01},
    ),
    "llama_tied_multi_query": Family(
        "llama",
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
        {"tied": True, "num_kv_heads": 1},
    ),
    "qwen2": Family(
        "qwen2", "Qwen2", {"rms_norm_eps": 1e-6}, {"qkv_bias": True, "norm_eps": 1e-6}
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3",
        {"head_dim": 32, "rms_norm_eps": 1e-6},
        {"head_dim": 32, "qk_norm": True, "norm_eps": 1e-6},
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2",
        {"hidden_act": "gelu_pytorch_tanh"},
        {"norm": "layernorm", "activation": "gelu_tanh", "qkv_bias": True}
        | {"attention_out_bias": True, "mlp_bias": True},
    ),
    "starcoder2_exact_gelu": Family(
        "starcoder2",
        "Starcoder2",
        {"hidden_act": "gelu", "use_bias": False},
        {"norm": "layernorm", "activation": "gelu"},
    ),
    "stablelm_partial_rope": Family(
        "stablelm",
        "StableLm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
        {"norm": "layernorm", "qkv_bias": True, "rope_fraction": 0.25},
    ),
    "ernie_interleaved_rope": Family(
        "ernie4_5",
        "Ernie4_5",
        {"head_dim": 16, "rms_norm_eps": 1e-5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_interleaved": True},
    ),
}


def _our_config(family: Family) -> ModelConfig:
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "vocab_size": 97,
    }
    return ModelConfig(**(sizes | family.ours))


def _modeling(family: Family) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")


def _build(family: Family, weights: dict[str, Tensor]) -> torch.nn.Module:
    config = getattr(transformers, f"{family.name}Config")(**(SIZES | family.theirs))
    model = getattr(_modeling(family), f"{family.name}ForCausalLM")(config).eval()
    state = dict(weights)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def _separate_logits(model: torch.nn.Module, batch: Batch) -> list[Tensor]:
    return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in batch.input_ids]


def _packed_logits(model: torch.nn.Module, batch: Batch) -> Sequence[Tensor]:
    ids = torch.cat(batch.input_ids)
    position_ids = torch.cat([torch.arange(len(own)) for own in batch.input_ids])
    row = model(input_ids=ids[None], position_ids=position_ids[None], use_cache=False).logits[0]
    return row.split([len(own) for own in batch.input_ids])


def _result(model: torch.nn.Module, logits: Sequence[Tensor], batch: Batch) -> Result:
    """The token-mean loss of `LOSS` from PyTorch's cross entropy and categorical entropy."""
    logprobs, entropy, objective = [], [], []
    for sequence, own in enumerate(logits):
        scaled = own / batch.temperature[sequence]
        nll = F.cross_entropy(scaled[:-1], batch.input_ids[sequence][1:], reduction="none")
        logprobs.append(F.pad(-nll, (0, 1)))
        entropy.append(torch.distributions.Categorical(logits=scaled).entropy())
        counted = batch.loss_mask[sequence][1:]
        objective.append((nll - LOSS.entropy_coeff * entropy[-1][:-1])[counted])
    loss = torch.cat(objective).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(
        logits=tuple(own.detach() for own in logits),
        logprobs=tuple(own.detach() for own in logprobs),
        entropy=tuple(own.detach() for own in entropy),
        loss=loss.detach(),
        gradients=gradients,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_model_agrees_with_transformers_run_on_each_sequence(name: str) -> None:
    family = FAMILIES[name]
    config = _our_config(family)
    weights = random_weights(config, seed=8)
    with float64_everywhere(_modeling(family)):
        model = _build(family, weights)
        theirs = _result(model, _separate_logits(model, BATCH), BATCH)
    assert_agree(evaluate(config, weights, BATCH, LOSS), theirs, budget=BUDGET)


@pytest.mark.parametrize("name", ["llama", "qwen3", "starcoder2"])
def test_model_agrees_with_transformers_run_on_a_packed_row(name: str) -> None:
    family = FAMILIES[name]
    config = _our_config(family)
    weights = random_weights(config, seed=9)
    with float64_everywhere(_modeling(family)):
        model = _build(family, weights)
        theirs = _result(model, _packed_logits(model, BATCH), BATCH)
    assert_agree(evaluate(config, weights, BATCH, LOSS), theirs, budget=BUDGET)


def test_the_budget_tells_float64_from_hidden_float32() -> None:
    family = FAMILIES["qwen3"]
    config = _our_config(family)
    weights = random_weights(config, seed=8)
    model = _build(family, weights).double()
    model.load_state_dict(weights)
    theirs = _result(model, _separate_logits(model, BATCH), BATCH)
    found = errors(evaluate(config, weights, BATCH, LOSS), theirs)
    assert found["logits of sequence 0"] > 10 * BUDGET
    assert found["gradient of model.embed_tokens.weight"] > 10 * BUDGET
