"""Weights that turn a masked loss into a plain sum, however the batch is cut."""

import doctest
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import impl.loss
from impl.loss import AGGREGATIONS, own_weights, prediction_weights, weighted_sum
from impl.pack import jagged

NAN = torch.nan


def _jagged(rows, dtype):
    flat = torch.tensor([entry for row in rows for entry in row], dtype=dtype)
    return jagged(flat, tuple(len(row) for row in rows))


def _weights(masks, aggregation):
    return prediction_weights(_jagged(masks, torch.bool), aggregation=aggregation)


def _own(rows, masks, dtype=torch.float64):
    return own_weights(_jagged(rows, dtype), loss_mask=_jagged(masks, torch.bool))


def test_token_mean_weighs_every_valid_prediction_alike() -> None:
    # entry i is predicted at i - 1; entry 0 weighs nothing
    weights = _weights([[1, 1, 0, 1], [0, 1]], "token-mean")
    assert weights.tolist() == [1 / 3, 0, 1 / 3, 0, 1 / 3, 0]


def test_mean_of_means_weighs_every_sequence_alike() -> None:
    weights = _weights([[1, 1, 0, 1], [0, 1]], "sequence-mean-token-mean")
    assert weights.tolist() == [1 / 4, 0, 1 / 4, 0, 1 / 2, 0]


def test_mean_of_sums_divides_by_sequences_alone() -> None:
    weights = _weights([[1, 1, 0, 1], [0, 1], [1, 1, 1, 1]], "sequence-mean-token-sum")
    third = 1 / 3
    assert weights.tolist() == [third, 0, third, 0, third, 0, third, third, third, 0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence-mean-token-mean", [1 / 4, 1 / 4, 0, 0, 0, 0, 1 / 2, 0]),
        ("sequence-mean-token-sum", [1 / 2, 1 / 2, 0, 0, 0, 0, 1 / 2, 0]),
    ],
)
def test_sequence_without_a_valid_prediction_does_not_count_as_one(aggregation, expected) -> None:
    assert _weights([[1, 1, 1], [1, 0, 0], [1, 1]], aggregation).tolist() == expected


def test_sequence_mean_is_short_for_the_mean_of_means() -> None:
    masks = [[1, 1, 0, 1], [0, 1], [1, 0]]
    assert torch.equal(
        _weights(masks, "sequence-mean"), _weights(masks, "sequence-mean-token-mean")
    )


def test_first_entry_of_a_mask_does_not_reach_the_sequence_before() -> None:
    assert _weights([[0, 0], [1, 0]], "token-mean").tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("masks", [[[0, 0, 0], [0]], [[1], [1], [1]], [[1, 0, 0]]])
def test_nothing_valid_weighs_nothing(masks, aggregation) -> None:
    weights = _weights(masks, aggregation)

    assert weights.tolist() == [0.0] * len(weights)
    assert weighted_sum(torch.full((len(weights),), NAN), weights).item() == 0


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [("token-mean", 1 / 2), ("sequence-mean-token-mean", 1 / 2), ("sequence-mean-token-sum", 1)],
)
def test_one_token_sequences_have_no_prediction(aggregation, weight) -> None:
    weights = _weights([[1], [1, 1, 1], [1]], aggregation)
    assert weights.tolist() == [0, weight, weight, 0, 0]


@pytest.mark.parametrize(
    ("aggregation", "total"),
    [("token-mean", 1), ("sequence-mean-token-mean", 1), ("sequence-mean-token-sum", 6 / 3)],
)
def test_weights_are_float64_and_sum_to_one_where_the_loss_is_a_mean(aggregation, total) -> None:
    weights = _weights([[1, 1, 0, 1, 1], [0, 1], [1, 0, 0], [1, 1, 1]], aggregation)

    assert weights.dtype == torch.float64
    assert weights.sum().item() == pytest.approx(total, abs=1e-15)


@st.composite
def _cut_batches(draw):
    """A mask per sequence, a weight and a value per token, and where the tokens are cut."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
    num_tokens = sum(map(len, masks))
    numbers = st.floats(-100, 100, allow_subnormal=False)
    values, own = (
        draw(st.lists(numbers, min_size=num_tokens, max_size=num_tokens)) for _ in range(2)
    )
    ends = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=8)))
    sizes = [stop - start for start, stop in zip([0, *ends], [*ends, num_tokens], strict=True)]
    return masks, own, values, sizes


def _assert_parts_add_up(weights, values, sizes):
    values = torch.tensor(values, dtype=torch.float64)
    parts = zip(values.split(sizes), weights.split(sizes), strict=True)
    total = math.fsum(weighted_sum(*part).item() for part in parts)
    rounding = 1e-14 * (1 + float((weights * values).abs().sum()))
    assert total == pytest.approx(weighted_sum(values, weights).item(), rel=0, abs=rounding)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=60)
@given(batch=_cut_batches())
def test_parts_add_up_to_the_batch_however_it_is_cut(aggregation, batch) -> None:
    masks, _, values, sizes = batch
    _assert_parts_add_up(_weights(masks, aggregation), values, sizes)


@settings(deadline=None, max_examples=60)
@given(batch=_cut_batches())
def test_parts_add_up_with_weights_of_ones_own(batch) -> None:
    masks, own, values, sizes = batch
    ends = torch.tensor([len(mask) for mask in masks]).cumsum(0) - 1
    flat = torch.tensor(own, dtype=torch.float64).index_fill(0, ends, 0)
    seqlens = tuple(len(mask) for mask in masks)
    weights = own_weights(jagged(flat, seqlens), loss_mask=_jagged(masks, torch.bool))
    _assert_parts_add_up(weights, values, sizes)


@settings(deadline=None, max_examples=60)
@given(batch=_cut_batches())
def test_weights_say_what_the_definition_says(batch) -> None:
    masks, _, values, _ = batch
    flat = torch.tensor(values, dtype=torch.float64)
    rows = [row.tolist() for row in flat.split([len(mask) for mask in masks])]
    valid = [
        [value for value, counts in zip(row, mask[1:], strict=False) if counts]
        for row, mask in zip(rows, masks, strict=True)
    ]
    some = [row for row in valid if row]
    tokens = sum(map(len, some))
    expected = {
        "token-mean": sum(map(sum, some)) / tokens if some else 0,
        "sequence-mean-token-mean": sum(sum(row) / len(row) for row in some) / max(len(some), 1),
        "sequence-mean-token-sum": sum(map(sum, some)) / max(len(some), 1),
    }
    found = {name: weighted_sum(flat, _weights(masks, name)).item() for name in AGGREGATIONS}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 + 3 + 10) / 3),
        ("sequence-mean-token-mean", ((1 + 3) / 2 + 10) / 2),
        ("sequence-mean-token-sum", ((1 + 3) + 10) / 2),
    ],
)
def test_loss_by_hand(aggregation, expected) -> None:
    weights = _weights([[1, 1, 0, 1], [0, 1]], aggregation)
    loss = weighted_sum(torch.tensor([1.0, NAN, 3, NAN, 10, NAN], dtype=torch.float64), weights)
    assert loss.item() == pytest.approx(expected, rel=1e-15)


def test_own_weights_are_the_users_where_the_mask_counts() -> None:
    weights = _own([[0.5, NAN, -2, 0], [3, 0]], [[1, 1, 0, 1], [0, 1]])
    assert weights.tolist() == [0.5, 0, -2, 0, 3, 0]


def test_own_weights_become_float64() -> None:
    weights = _own([[0.5, 0]], [[0, 1]], dtype=torch.bfloat16)
    assert weights.dtype == torch.float64
    assert weights.tolist() == [0.5, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_own_weights_take_what_prediction_weights_made(aggregation) -> None:
    masks = [[1, 1, 0, 1], [0, 1], [1, 0], [1]]
    made = _weights(masks, aggregation)
    again = own_weights(jagged(made, (4, 2, 2, 1)), loss_mask=_jagged(masks, torch.bool))
    assert torch.equal(again, made)


def test_own_weights_of_a_wholly_masked_batch_weigh_nothing() -> None:
    weights = _own([[NAN, 7, 0], [0]], [[1, 0, 0], [1]])
    assert weights.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "masks", "words"),
    [
        (
            [[1, 0], [1, 1, 0.5]],
            [[0, 1], [0, 1, 1]],
            "sequence 1: its last token has weight 0.5 and predicts nothing; entry i weighs the "
            "prediction made at token i, of token i + 1, so weights of targets must be moved one "
            "to the left",
        ),
        (
            [[1, 0], [1, 0], [1, NAN, 0]],
            [[0, 1], [0, 1], [0, 1, 1]],
            "sequence 2, token 1: weight nan of a valid prediction; give a finite one, or mask "
            "its target",
        ),
        (
            [[1, 0], [1, 0, 0]],
            [[0, 1], [0, 1]],
            "weights have lengths [2, 3], loss_mask has [2, 2]; give one weight for each token",
        ),
    ],
    ids=["last", "nan", "lengths"],
)
def test_own_weights_that_cannot_be_meant_are_refused(rows, masks, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        _own(rows, masks)


def test_own_weights_of_whole_numbers_are_refused() -> None:
    words = "weights are torch.int64; give a floating dtype, best torch.float64"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        _own([[1, 0]], [[0, 1]], dtype=torch.int64)


def test_own_weights_with_a_graph_are_refused() -> None:
    flat = torch.ones(2, dtype=torch.float64, requires_grad=True) * torch.tensor([1.0, 0])
    with pytest.raises(ValueError, match=r"^weights require a gradient, .*; detach them, and put"):
        own_weights(jagged(flat, (2,)), loss_mask=_jagged([[0, 1]], torch.bool))


def test_weights_that_are_not_jagged_are_refused_by_name() -> None:
    mask = _jagged([[0, 1]], torch.bool)
    flat = torch.ones(1, 2)
    words = "is no jagged tensor but torch.strided of shape (1, 2); make one with impl.pack.jagged"
    with pytest.raises(ValueError, match=f"^weights {re.escape(words)}$"):
        own_weights(flat, loss_mask=mask)
    with pytest.raises(ValueError, match=f"^loss_mask {re.escape(words)}$"):
        prediction_weights(flat, aggregation="token-mean")
    with pytest.raises(ValueError, match=r"^weights has shape \[S, L, 3\]; give one entry for"):
        own_weights(jagged(torch.ones(2, 3), (2,)), loss_mask=mask)


def test_examples_run() -> None:
    assert doctest.testmod(impl.loss).failed == 0


def test_nan_that_weighs_nothing_reaches_no_gradient() -> None:
    weights = _weights([[1, 1, 0, 1]], "token-mean")
    values = torch.tensor([1.0, NAN, 3.0, NAN], dtype=torch.float64, requires_grad=True)
    weighted_sum(values, weights).backward()

    assert values.grad is not None
    assert values.grad.tolist() == [1 / 2, 0, 1 / 2, 0]


def test_unknown_aggregation_is_refused_with_the_known_ones() -> None:
    words = (
        "^aggregation='mean' is not one of token-mean, sequence-mean-token-mean, "
        "sequence-mean-token-sum; for another one make weights with own_weights$"
    )
    with pytest.raises(ValueError, match=words):
        _weights([[1, 1]], "mean")
