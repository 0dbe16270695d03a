"""One sequence at a time and one packed row are written apart and must say the same."""

import dataclasses

import pytest
import torch

from reference import Batch, Loss, attention, evaluate, evaluate_packed, packed, random_weights

from .agreement import assert_agree, errors
from .small_models import CONFIGS, random_batch, small_config

BUDGET = 1e-12
SEQLENS = (7, 1, 12, 3)
TEMPERATURES = (1, 0.7, 2, 1.3)

BATCHES = {
    "temperature_1": random_batch(SEQLENS),
    "temperature_int": random_batch(SEQLENS, temperature=(2, 2, 2, 2)),
    "temperature_per_sequence": random_batch(SEQLENS, temperature=TEMPERATURES),
    "nothing_masked": random_batch(SEQLENS, masked=0),
    "mostly_masked": random_batch(SEQLENS, masked=0.8, seed=3),
    "all_masked": random_batch(SEQLENS, masked=1),
    "one_target": dataclasses.replace(
        random_batch(SEQLENS, temperature=TEMPERATURES),
        loss_mask=tuple(torch.arange(n) == (5 if n == 12 else n) for n in SEQLENS),
    ),
    "one_sequence": random_batch((9,)),
    "one_token": random_batch((1,), masked=0),
    "only_one_token_sequences": random_batch((1, 1, 1), masked=0),
}
LOSSES = {
    "token_mean": Loss(),
    "mean_of_means": Loss("sequence-mean-token-mean"),
    "mean_of_sums": Loss("sequence-mean-token-sum"),
    "own_weights": Loss("own-weights"),
    "token_mean_entropy": Loss("token-mean", entropy_coeff=0.1),
    "mean_of_means_entropy": Loss("sequence-mean-token-mean", entropy_coeff=-0.3),
    "own_weights_entropy": Loss("own-weights", entropy_coeff=0.2),
}
MODEL_CHANGES = {
    "eps": {"norm_eps": 1e-4},
    "theta": {"rope_theta": 9000.0},
    "interleaved": {"rope_interleaved": True},
    "fraction": {"rope_fraction": 0.75},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_formulations_agree_for_every_model_option(name: str) -> None:
    config, batch = CONFIGS[name], random_batch(SEQLENS, temperature=TEMPERATURES)
    weights = random_weights(config, seed=1)
    loss = Loss("token-mean", entropy_coeff=0.1)
    expected = evaluate_packed(config, weights, batch, loss)
    assert_agree(evaluate(config, weights, batch, loss), expected, budget=BUDGET)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_formulations_agree_for_every_batch_and_loss(batch: Batch, loss: Loss) -> None:
    config = CONFIGS["everything"]
    weights = random_weights(config, seed=2)
    expected = evaluate_packed(config, weights, batch, loss)
    assert_agree(evaluate(config, weights, batch, loss), expected, budget=BUDGET)


@pytest.mark.parametrize("query_rows", [1, 5, 12])
def test_formulations_agree_when_attention_is_made_in_blocks(
    query_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERY_ROWS", query_rows)
    config, batch = small_config(), random_batch(SEQLENS)
    weights = random_weights(config, seed=3)
    expected = evaluate_packed(config, weights, batch, Loss())
    assert_agree(evaluate(config, weights, batch, Loss()), expected, budget=BUDGET)


@pytest.mark.parametrize("change", MODEL_CHANGES.values(), ids=MODEL_CHANGES)
def test_a_slightly_different_model_does_not_agree(change: dict[str, object]) -> None:
    config, batch = small_config(), random_batch(SEQLENS)
    weights = random_weights(config, seed=4)
    other = dataclasses.replace(config, **change)  # type: ignore[arg-type]
    expected = evaluate_packed(config, weights, batch, Loss())
    found = errors(evaluate(other, weights, batch, Loss()), expected)
    assert found["logits of sequence 0"] > 1e6 * BUDGET
    assert found["gradient of model.layers.0.self_attn.q_proj.weight"] > 1e6 * BUDGET


def test_the_two_gelus_do_not_agree() -> None:
    exact, approximate = small_config(activation="gelu"), small_config(activation="gelu_tanh")
    weights, batch = random_weights(exact, seed=4), random_batch(SEQLENS)
    expected = evaluate_packed(approximate, weights, batch, Loss())
    found = errors(evaluate(exact, weights, batch, Loss()), expected)
    assert found["logits of sequence 0"] > 1e6 * BUDGET


def test_a_packed_row_that_leaks_between_sequences_does_not_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def causal_only(row: packed._Row) -> torch.Tensor:
        return torch.ones(len(row.ids), len(row.ids), dtype=torch.bool).tril()

    monkeypatch.setattr(packed, "_visible", causal_only)
    config, batch = small_config(), random_batch(SEQLENS)
    weights = random_weights(config, seed=5)
    found = errors(
        evaluate_packed(config, weights, batch, Loss()), evaluate(config, weights, batch, Loss())
    )
    assert found["logits of sequence 0"] <= BUDGET
    assert found["logits of sequence 1"] > 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_matters(name: str) -> None:
    config = CONFIGS[name]
    result = evaluate(config, random_weights(config, seed=6), random_batch(SEQLENS), Loss())
    assert min(float(gradient.abs().max()) for gradient in result.gradients.values()) > 1e-5
