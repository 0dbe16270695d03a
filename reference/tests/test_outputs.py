"""Log-probs, entropy and loss against numbers worked out by hand."""

import math

import pytest
import torch

from reference import Batch, Loss, entropy, evaluate, evaluate_packed, logprobs, random_weights
from reference.evaluate import prediction_weights

from .small_models import random_batch, small_config

EVALUATIONS = pytest.mark.parametrize("compute", [evaluate, evaluate_packed])
CONFIG = small_config(num_layers=1)
WEIGHTS = random_weights(CONFIG, seed=0)


def test_logprob_is_that_of_the_next_token_at_its_position() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1, 1, 1]]).double())
    found = logprobs(logits, torch.tensor([0, 1, 2]), 1)
    assert found.tolist() == pytest.approx([math.log(0.25), math.log(0.7), 0])


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, 2 * math.log(3)], [0, 0]], dtype=torch.float64)
    assert logprobs(logits, torch.tensor([0, 1]), 2)[0] == pytest.approx(math.log(3 / 4))
    uneven = -math.log(1 / 4) / 4 - 3 * math.log(3 / 4) / 4
    assert entropy(logits, 2).tolist() == pytest.approx([uneven, math.log(2)])


def test_logprob_of_the_last_token_is_zero() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64)
    assert logprobs(logits, torch.tensor([1, 2, 3]), 0.5)[-1] == 0
    assert logprobs(logits[:1], torch.tensor([1]), 0.5).tolist() == [0]


def test_entropy_lies_between_certainty_and_the_uniform_distribution() -> None:
    certain = torch.tensor([[0.0, -2000.0, -2000.0]], dtype=torch.float64, requires_grad=True)
    found = entropy(certain, 1)
    found.sum().backward()
    assert found.tolist() == [0]
    assert certain.grad is not None
    assert torch.isfinite(certain.grad).all()
    assert entropy(torch.full((1, 8), 3.0), 0.7).tolist() == pytest.approx([math.log(8)])


@EVALUATIONS
@pytest.mark.parametrize("entropy_coeff", [0, 0.25])
def test_token_mean_is_the_mean_over_all_counting_tokens(compute, entropy_coeff) -> None:
    batch = random_batch((6, 1, 9), masked=0.4, temperature=(1, 1, 2))
    result = compute(CONFIG, WEIGHTS, batch, Loss("token-mean", entropy_coeff))
    counted = [
        -float(result.logprobs[s][t - 1]) - entropy_coeff * float(result.entropy[s][t - 1])
        for s, mask in enumerate(batch.loss_mask)
        for t in range(1, len(mask))
        if mask[t]
    ]
    assert float(result.loss) == pytest.approx(sum(counted) / len(counted), rel=1e-12)


@EVALUATIONS
def test_sequence_mean_weighs_every_counting_sequence_the_same(compute) -> None:
    ids = random_batch((5, 3, 2)).input_ids
    mask = (
        torch.tensor([True, True, False, True, False]),
        torch.tensor([True, False, False]),
        torch.tensor([False, True]),
    )
    result = compute(CONFIG, WEIGHTS, Batch(ids, mask, (1, 1, 1)), Loss("sequence-mean"))
    first = (result.logprobs[0][0] + result.logprobs[0][2]) / 2
    expected = -(first + result.logprobs[2][0]) / 2
    assert float(result.loss) == pytest.approx(float(expected), rel=1e-12)


@EVALUATIONS
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_nothing_that_counts_gives_a_loss_and_gradients_of_exactly_zero(
    compute, aggregation: str
) -> None:
    batch = random_batch((4, 1, 3), masked=1)
    result = compute(CONFIG, WEIGHTS, batch, Loss(aggregation, entropy_coeff=0.1))
    assert float(result.loss) == 0
    assert result.gradients.keys() == WEIGHTS.keys()
    assert all(bool((gradient == 0).all()) for gradient in result.gradients.values())


@EVALUATIONS
def test_the_mask_of_the_first_token_is_ignored(compute) -> None:
    ids = (torch.tensor([3, 5, 7]),)
    on, off = (torch.tensor([first, True, False]) for first in (True, False))
    with_first = compute(CONFIG, WEIGHTS, Batch(ids, (on,), (1,)), Loss())
    without = compute(CONFIG, WEIGHTS, Batch(ids, (off,), (1,)), Loss())
    assert float(with_first.loss) == float(without.loss)


@EVALUATIONS
def test_weights_are_left_as_they_were(compute) -> None:
    weights = random_weights(CONFIG, seed=0)
    result = compute(CONFIG, weights, random_batch((4, 3)), Loss())
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)
    assert not any(weight.requires_grad or weight.grad is not None for weight in weights.values())
    assert not any(gradient.requires_grad for gradient in result.gradients.values())


def test_a_token_changes_nothing_before_it() -> None:
    batch = random_batch((9, 4))
    changed = (batch.input_ids[0].clone(), batch.input_ids[1])
    changed[0][5] = (changed[0][5] + 1) % CONFIG.vocab_size
    before = evaluate(CONFIG, WEIGHTS, batch, Loss())
    after = evaluate(CONFIG, WEIGHTS, Batch(changed, batch.loss_mask, (1, 1)), Loss())
    assert torch.equal(before.logits[0][:5], after.logits[0][:5])
    assert torch.equal(before.logits[1], after.logits[1])
    assert (before.logits[0][5:] != after.logits[0][5:]).any(-1).all()


def test_a_lower_dtype_is_computed_on_request_only() -> None:
    batch = random_batch((9, 4))
    rounded = {name: weight.bfloat16() for name, weight in WEIGHTS.items()}
    promoted = {name: weight.double() for name, weight in rounded.items()}
    exact = evaluate(CONFIG, promoted, batch, Loss())
    low = evaluate(CONFIG, rounded, batch, Loss(), dtype=torch.bfloat16)
    assert low.logits[0].dtype == torch.bfloat16
    assert low.loss.dtype == torch.float64
    error = float((low.logits[0] - exact.logits[0]).abs().max() / exact.logits[0].abs().max())
    assert 1e-4 < error < 0.1


def test_prediction_weights_add_up_to_one() -> None:
    batch = random_batch((6, 1, 9), masked=0.4)
    counts = [int(mask[1:].sum()) for mask in batch.loss_mask]
    for aggregation in ("token-mean", "sequence-mean"):
        shares = prediction_weights(batch, Loss(aggregation))
        assert sum(n * share for n, share in zip(counts, shares, strict=True)) == pytest.approx(1)
