"""Packing: what fills padding, and that nothing in it reaches a value or a gradient."""

import pytest
import torch
from torch import Tensor

from impl.layout import rank_index
from impl.pack import drop_padding, jagged, next_token_labels, pack_rows, seqlens_of

SEQLENS = (5, 1)  # rank 0 of 2 holds tokens 0 1 . . 5 .
INDEX = rank_index(SEQLENS, cp_size=2, cp_rank=0)
EMPTY = rank_index((), cp_size=2, cp_rank=0)
UNPADDED = rank_index((4, 8), cp_size=2, cp_rank=1)


@pytest.mark.parametrize("pad_value", [0, -100, 3])
def test_padded_rows_hold_the_fill_value(pad_value) -> None:
    rows = pack_rows(torch.arange(10, 16), INDEX, pad_value=pad_value)
    assert rows.tolist() == [10, 11, pad_value, pad_value, 15, pad_value]


def test_nan_may_fill_floats() -> None:
    rows = pack_rows(torch.arange(6.0), INDEX, pad_value=torch.nan)
    assert rows.isnan().tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.bool, torch.float64, torch.bfloat16]
)
def test_dtype_stays(dtype) -> None:
    values = torch.ones(6, dtype=dtype)

    assert pack_rows(values, INDEX, pad_value=0).dtype == dtype
    assert pack_rows(values[:0], EMPTY, pad_value=0).dtype == dtype
    assert drop_padding(pack_rows(values, INDEX, pad_value=0), INDEX).dtype == dtype


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_trailing_dimensions_stay_together(shape) -> None:
    values = torch.arange(6.0).reshape(-1, *[1] * len(shape)).expand(6, *shape)
    rows = pack_rows(values, INDEX, pad_value=-1)

    assert rows.shape == (6, *shape)
    expected = torch.tensor([0.0, 1, -1, -1, 5, -1]).reshape(-1, *[1] * len(shape))
    assert torch.equal(rows, expected.expand_as(rows))
    assert torch.equal(drop_padding(rows, INDEX), values[[0, 1, 5]])


@pytest.mark.parametrize("shape", [(), (3,)])
def test_pack_without_sequences_is_all_fill(shape) -> None:
    rows = pack_rows(torch.empty(0, *shape), EMPTY, pad_value=7)

    assert rows.shape == (2, *shape)
    assert (rows == 7).all()
    assert drop_padding(rows, EMPTY).shape == (0, *shape)


def test_pack_without_sequences_still_has_a_graph() -> None:
    """Its rows go through the model, and the backward pass must not stop there."""
    logits = pack_rows(torch.empty(0, 3), EMPTY, pad_value=1).requires_grad_()
    drop_padding(logits, EMPTY).sum().backward()

    assert logits.grad is not None
    assert logits.grad.tolist() == [[0] * 3] * 2


def test_values_are_not_changed() -> None:
    values = torch.arange(6)
    pack_rows(values, INDEX, pad_value=-1)
    pack_rows(values, rank_index((6,), cp_size=1, cp_rank=0), pad_value=-1).fill_(9)

    assert values.tolist() == list(range(6))


def test_gradients_flow_back_from_real_rows_alone() -> None:
    values = torch.arange(6.0, requires_grad=True)
    rows = pack_rows(values, INDEX, pad_value=0)
    rows.backward(torch.tensor([1.0, 2, torch.nan, torch.nan, 3, torch.nan]))

    assert values.grad is not None
    assert values.grad.tolist() == [1, 2, 0, 0, 0, 3]  # token 0 names the padding too


def test_nan_in_padded_rows_of_outputs_reaches_no_value_and_no_gradient() -> None:
    rows = torch.tensor([1.0, 2, torch.nan, torch.nan, 3, torch.inf], requires_grad=True)
    real = drop_padding(rows, INDEX)
    (real**2).sum().backward()

    assert real.tolist() == [1, 2, 3]
    assert rows.grad is not None
    assert rows.grad.tolist() == [2, 4, 0, 0, 6, 0]


def test_nothing_is_dropped_where_there_is_no_padding() -> None:
    rows = pack_rows(torch.arange(12), UNPADDED, pad_value=-1)

    assert rows.tolist() == [1, 2, 6, 7, 8, 9]
    assert torch.equal(drop_padding(rows, UNPADDED), rows)


def _double(values: Tensor) -> Tensor:
    return drop_padding(pack_rows(values, INDEX, pad_value=0), INDEX) * 2


def test_gradients_are_those_of_finite_differences() -> None:
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_double, (values,))


def test_labels_stay_inside_their_sequence() -> None:
    labels = next_token_labels(torch.tensor([5, 6, 7, 8, 9, 4]), (3, 1, 2), fill=-100)
    assert labels.tolist() == [6, 7, -100, -100, 4, -100]


def test_labels_of_nothing_are_nothing() -> None:
    labels = next_token_labels(torch.empty(0, dtype=torch.int64), (), fill=-100)
    assert labels.tolist() == []


def test_labels_leave_the_tokens_as_they_are() -> None:
    tokens = torch.tensor([5, 6, 7])
    next_token_labels(tokens, (3,), fill=-100)
    assert tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize("seqlens", [(3,), (1, 2), (2, 1), ()])
def test_jagged_tensor_knows_its_lengths_and_shares_memory(seqlens) -> None:
    values = torch.arange(sum(seqlens))
    batch = jagged(values, seqlens)

    assert seqlens_of(batch) == seqlens
    assert batch.values().data_ptr() == values.data_ptr()
