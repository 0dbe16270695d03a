"""Weights that turn a masked loss into a plain sum, however the batch is cut."""

import pytest
import torch

from impl.loss import AGGREGATIONS, prediction_weights, weighted_sum
from impl.pack import jagged

NAN = torch.nan


def _weights(masks, aggregation):
    seqlens = tuple(len(mask) for mask in masks)
    flat = torch.tensor([entry for mask in masks for entry in mask], dtype=torch.bool)
    return prediction_weights(jagged(flat, seqlens), aggregation=aggregation)


def test_token_mean_weighs_every_valid_prediction_alike() -> None:
    # entry i is predicted at i - 1; entry 0 weighs nothing
    weights = _weights([[1, 1, 0, 1], [0, 1]], "token-mean")
    assert weights.tolist() == [1 / 3, 0, 1 / 3, 0, 1 / 3, 0]


def test_sequence_mean_weighs_every_sequence_alike() -> None:
    weights = _weights([[1, 1, 0, 1], [0, 1]], "sequence-mean")
    assert weights.tolist() == [1 / 4, 0, 1 / 4, 0, 1 / 2, 0]


def test_sequence_without_a_valid_prediction_does_not_count_as_one() -> None:
    weights = _weights([[1, 1, 1], [1, 0, 0], [1, 1]], "sequence-mean")
    assert weights.tolist() == [1 / 4, 1 / 4, 0, 0, 0, 0, 1 / 2, 0]


def test_first_entry_of_a_mask_does_not_reach_the_sequence_before() -> None:
    assert _weights([[0, 0], [1, 0]], "token-mean").tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("masks", [[[0, 0, 0], [0]], [[1], [1], [1]], [[1, 0, 0]]])
def test_nothing_valid_weighs_nothing(masks, aggregation) -> None:
    weights = _weights(masks, aggregation)

    assert weights.tolist() == [0.0] * len(weights)
    assert weighted_sum(torch.full((len(weights),), NAN), weights).item() == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_token_sequences_have_no_prediction(aggregation) -> None:
    weights = _weights([[1], [1, 1, 1], [1]], aggregation)
    assert weights.tolist() == [0, 1 / 2, 1 / 2, 0, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_float64_and_sum_to_one(aggregation) -> None:
    weights = _weights([[1, 1, 0, 1, 1], [0, 1], [1, 0, 0], [1, 1, 1]], aggregation)

    assert weights.dtype == torch.float64
    assert weights.sum().item() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cuts", [[11], [5, 2, 1, 3], [5, 6], [1] * 11, [4, 4, 3]])
def test_sum_over_cuts_is_the_sum_over_the_batch(aggregation, cuts) -> None:
    weights = _weights([[1, 1, 0, 1, 1], [0, 1], [1], [1, 1, 1]], aggregation)
    values = torch.linspace(-3, 5, 11, dtype=torch.float64)
    parts = zip(values.split(cuts), weights.split(cuts), strict=True)

    whole = weighted_sum(values, weights)
    assert sum(weighted_sum(*part).item() for part in parts) == pytest.approx(
        whole.item(), rel=1e-14
    )


def test_sequence_mean_is_the_mean_of_means() -> None:
    weights = _weights([[1, 1, 0, 1], [0, 1]], "sequence-mean")
    loss = weighted_sum(torch.tensor([1.0, NAN, 3, NAN, 10, NAN], dtype=torch.float64), weights)
    assert loss.item() == ((1 + 3) / 2 + 10) / 2


def test_nan_that_weighs_nothing_reaches_no_gradient() -> None:
    weights = _weights([[1, 1, 0, 1]], "token-mean")
    values = torch.tensor([1.0, NAN, 3.0, NAN], dtype=torch.float64, requires_grad=True)
    weighted_sum(values, weights).backward()

    assert values.grad is not None
    assert values.grad.tolist() == [1 / 2, 0, 1 / 2, 0]


def test_unknown_aggregation_is_refused_with_the_known_ones() -> None:
    words = "^aggregation='mean' is not one of token-mean, sequence-mean$"
    with pytest.raises(ValueError, match=words):
        _weights([[1, 1]], "mean")
