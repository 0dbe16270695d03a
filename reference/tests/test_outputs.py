"""Log-probs, entropy and loss against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Batch, Loss, entropy, evaluate, evaluate_packed, logprobs, random_weights
from reference.batch import AGGREGATIONS
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


IDS_OF_THREE = random_batch((5, 3, 2)).input_ids
MASK_OF_THREE = (
    torch.tensor([True, True, False, True, False]),
    torch.tensor([True, False, False]),
    torch.tensor([False, True]),
)
WEIGHTS_OF_THREE = tuple(
    torch.tensor(weights, dtype=torch.float64)
    for weights in ([0.5, math.nan, -2, 7, 0], [5, math.inf, 0], [3, 0])
)


@EVALUATIONS
@pytest.mark.parametrize(
    ("aggregation", "by_hand"),
    [
        ("token-mean", lambda a, b, c: (a + b + c) / 3),
        ("sequence-mean-token-mean", lambda a, b, c: ((a + b) / 2 + c) / 2),
        ("sequence-mean", lambda a, b, c: ((a + b) / 2 + c) / 2),
        ("sequence-mean-token-sum", lambda a, b, c: ((a + b) + c) / 2),
        ("own-weights", lambda a, b, c: 0.5 * a - 2 * b + 3 * c),
    ],
)
def test_loss_is_what_its_aggregation_says(compute, aggregation, by_hand) -> None:
    batch = Batch(IDS_OF_THREE, MASK_OF_THREE, (1, 1, 1), WEIGHTS_OF_THREE)
    result = compute(CONFIG, WEIGHTS, batch, Loss(aggregation))
    a, b, c = (-float(result.logprobs[s][t]) for s, t in ((0, 0), (0, 2), (2, 0)))
    assert float(result.loss) == pytest.approx(by_hand(a, b, c), rel=1e-12)


@EVALUATIONS
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_that_counts_gives_a_loss_and_gradients_of_exactly_zero(
    compute, aggregation: str
) -> None:
    masked = random_batch((4, 1, 3), masked=1)
    own = tuple(torch.arange(n, dtype=torch.float64).flip(0) for n in (4, 1, 3))
    batch = Batch(masked.input_ids, masked.loss_mask, (1, 1, 1), own)
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


def test_sequence_mean_is_short_for_the_mean_of_means() -> None:
    assert Loss("sequence-mean") == Loss("sequence-mean-token-mean")


@st.composite
def _batches(draw) -> tuple[Batch, list[list[float]]]:
    """A batch with weights of its own, and a value for each prediction that counts."""
    seqlens = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    numbers = st.floats(-100, 100, allow_subnormal=False)
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in seqlens]
    own = [[*draw(st.lists(numbers, min_size=n - 1, max_size=n - 1)), 0] for n in seqlens]
    values = [[draw(numbers) for _ in range(sum(mask[1:]))] for mask in masks]
    batch = Batch(
        input_ids=tuple(torch.zeros(n, dtype=torch.int64) for n in seqlens),
        loss_mask=tuple(torch.tensor(mask) for mask in masks),
        temperature=(1.0,) * len(seqlens),
        loss_weights=tuple(torch.tensor(weights, dtype=torch.float64) for weights in own),
    )
    return batch, values


@settings(deadline=None, max_examples=100)
@given(drawn=_batches())
def test_weights_of_predictions_are_those_of_the_definition(drawn) -> None:
    batch, values = drawn
    some = [row for row in values if row]
    expected = {
        "token-mean": sum(map(sum, some)) / max(1, sum(map(len, some))),
        "sequence-mean-token-mean": sum(sum(row) / len(row) for row in some) / max(1, len(some)),
        "sequence-mean-token-sum": sum(map(sum, some)) / max(1, len(some)),
        "own-weights": sum(
            float(weights[token]) * row.pop(0)
            for weights, mask, row in zip(
                batch.loss_weights or (), batch.loss_mask, map(list, values), strict=True
            )
            for token in range(len(mask) - 1)
            if mask[token + 1]
        ),
    }
    found = {
        name: sum(
            float(weights @ torch.tensor(row, dtype=torch.float64))
            for weights, row in zip(prediction_weights(batch, Loss(name)), values, strict=True)
        )
        for name in AGGREGATIONS
    }
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-10)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_weights_of_predictions_add_up_to_one_where_the_loss_is_a_mean(aggregation) -> None:
    batch = random_batch((6, 1, 9), masked=0.4)
    total = torch.cat(prediction_weights(batch, Loss(aggregation))).sum()
    assert float(total) == pytest.approx(1)
