"""Autograd of the oracle against differences of the oracle's own values."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reference import Loss, attention, evaluate, layers, model, random_weights, rope
from reference.batch import AGGREGATIONS
from reference.outputs import entropy, logprobs

from .small_models import random_batch, small_config

TINY = small_config(
    num_layers=1,
    hidden_size=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=5,
    vocab_size=7,
)
TINY_MODELS = {
    "swiglu": replace(TINY, qk_norm=True, qkv_bias=True),
    "gelu": replace(TINY, norm="layernorm", activation="gelu", rope_interleaved=True, tied=True),
    "gelu_tanh": replace(TINY, activation="gelu_tanh", rope_fraction=0.5, mlp_bias=True),
}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return normal.requires_grad_()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_gradcheck_passes_for_the_logits_of_a_tiny_model(name: str) -> None:
    config = TINY_MODELS[name]
    weights = random_weights(config, seed=0, std=0.5)
    ids = torch.tensor([3, 0, 6, 3])

    def logits(*values: Tensor) -> Tensor:
        return model.logits(dict(zip(weights, values, strict=True)), config, ids)

    leaves = [weight.requires_grad_() for weight in weights.values()]
    assert torch.autograd.gradcheck(logits, leaves)


@pytest.mark.parametrize("query_rows", [2, 128])
def test_gradcheck_passes_for_causal_attention(
    query_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERY_ROWS", query_rows)
    inputs = _normal(3, 4, 2), _normal(3, 2, 2, seed=1), _normal(3, 2, 2, seed=2)
    assert torch.autograd.gradcheck(attention.causal_attention, inputs)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_gradcheck_passes_for_rotation(name: str) -> None:
    positions = torch.tensor([0, 1, 5])

    def rotate(x: Tensor) -> Tensor:
        return rope.rotate(x, positions, TINY_MODELS[name], layer=0)

    assert torch.autograd.gradcheck(rotate, (_normal(3, 2, 4),))


@pytest.mark.parametrize("activation", [layers.gelu, layers.gelu_tanh])
def test_gradcheck_passes_for_activations(activation: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradcheck(activation, (_normal(8),))


def test_gradcheck_passes_for_logprobs_and_entropy() -> None:
    ids = torch.tensor([1, 0, 4])
    assert torch.autograd.gradcheck(lambda x: logprobs(x, ids, 0.7), (_normal(3, 5),))
    assert torch.autograd.gradcheck(lambda x: entropy(x, 0.7), (_normal(3, 5),))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_of_the_batch_match_finite_differences(aggregation: str) -> None:
    config, loss = TINY_MODELS["swiglu"], Loss(aggregation, entropy_coeff=0.2)
    batch = random_batch((4, 1, 6), seed=1, temperature=(1, 2, 0.7), vocab_size=7)
    weights = random_weights(config, seed=1, std=0.5)
    directions = random_weights(config, seed=2, std=0.5)
    gradients = evaluate(config, weights, batch, loss).gradients
    slope = sum(float((gradients[name] * directions[name]).sum()) for name in weights)

    def loss_at(step: float) -> float:
        moved = {name: weights[name] + step * directions[name] for name in weights}
        return float(evaluate(config, moved, batch, loss).loss)

    assert slope == pytest.approx((loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, rel=1e-6)
    assert abs(slope) > 0.01
