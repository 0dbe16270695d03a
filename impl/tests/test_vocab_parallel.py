"""Log-probs and entropy with the vocabulary in one part; `test_engine` divides it over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from impl.logprobs import logprobs_and_entropy
from impl.vocab_parallel import vocab_parallel_entropy, vocab_parallel_logprobs

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.usefixtures("megatron")

LABELS = torch.tensor([3, -100, 0, 10, 7])
TEMPERATURE = torch.tensor([1.0, 0.5, 2.0, 0.7, 1.3], dtype=torch.float64)


@pytest.fixture
def logits() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(5, 11, dtype=torch.float64, generator=draw).requires_grad_()


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _logprobs(logits: Tensor) -> Tensor:
    return vocab_parallel_logprobs(logits, LABELS, temperature=TEMPERATURE, tp_group=_everyone())


def _entropy(logits: Tensor) -> Tensor:
    return vocab_parallel_entropy(logits, temperature=TEMPERATURE, tp_group=_everyone())


ORDERS = [(_logprobs, _entropy), (_entropy, _logprobs)]
FUNCTIONS = pytest.mark.parametrize(
    ("name", "function"), [("logprobs", _logprobs), ("entropy", _entropy)], ids=["log", "entropy"]
)


@FUNCTIONS
def test_value_is_that_of_the_whole_vocabulary(logits, name, function) -> None:
    expected = logprobs_and_entropy(logits, LABELS, temperature=TEMPERATURE)[name]

    torch.testing.assert_close(function(logits), expected, rtol=1e-14, atol=1e-14)


@FUNCTIONS
def test_gradient_is_that_of_the_whole_vocabulary(logits, name, function) -> None:
    weights = torch.arange(1, 6, dtype=torch.float64)
    expected = logprobs_and_entropy(logits, LABELS, temperature=TEMPERATURE)[name]
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    (found,) = torch.autograd.grad((function(logits) * weights).sum(), logits)

    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("order", ORDERS, ids=["entropy_last", "entropy_first"])
def test_logits_are_left_as_they_are_in_either_order(logits, order) -> None:
    before = logits.detach().clone()
    alone = [function(before.clone()) for function in order]
    together = [function(logits) for function in order]

    assert torch.equal(logits, before)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_huge_logits_stay_finite(logits) -> None:
    huge = (logits.detach() * 1e4).requires_grad_()
    total = _logprobs(huge).sum() + _entropy(huge).sum()
    (gradient,) = torch.autograd.grad(total, huge)

    assert total.isfinite()
    assert gradient.isfinite().all()
