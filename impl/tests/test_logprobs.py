"""Log-probs of labels and entropy, in nats."""

import math

import pytest
import torch
from torch import Tensor

from impl.logprobs import logprobs_and_entropy


def _random(rows: int = 4, vocab: int = 7) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, dtype=torch.float64, generator=draw)
    return logits, torch.randint(vocab, (rows,), generator=draw)


def test_equal_logits_are_the_uniform_distribution() -> None:
    outputs = logprobs_and_entropy(
        torch.full((1, 8), 5.0), torch.tensor([3]), temperature=torch.ones(1)
    )

    assert outputs["logprobs"].item() == pytest.approx(-math.log(8))
    assert outputs["entropy"].item() == pytest.approx(math.log(8))


def test_definition() -> None:
    logits, labels = _random()
    temperature = torch.tensor([1, 0.7, 2, 1.3], dtype=torch.float64)
    outputs = logprobs_and_entropy(logits, labels, temperature=temperature)

    for row, (label, t) in enumerate(zip(labels.tolist(), temperature.tolist(), strict=True)):
        weights = [math.exp(logit / t) for logit in logits[row].tolist()]
        shares = [weight / sum(weights) for weight in weights]
        entropy = -sum(share * math.log(share) for share in shares)
        assert outputs["logprobs"][row].item() == pytest.approx(math.log(shares[label]), rel=1e-12)
        assert outputs["entropy"][row].item() == pytest.approx(entropy, rel=1e-12)


def test_whole_number_temperature_is_as_good_as_a_float() -> None:
    logits, labels = _random()
    whole = logprobs_and_entropy(logits, labels, temperature=torch.full((4,), 2))
    real = logprobs_and_entropy(logits, labels, temperature=torch.full((4,), 2.0))

    assert torch.equal(whole["logprobs"], real["logprobs"])
    assert torch.equal(whole["entropy"], real["entropy"])


def test_negative_label_has_no_logprob_and_no_gradient() -> None:
    logits, _ = _random()
    logits.requires_grad_()
    labels = torch.tensor([2, -100, 0, -1])
    logprobs = logprobs_and_entropy(logits, labels, temperature=torch.ones(4))["logprobs"]
    logprobs.sum().backward()

    assert logprobs[[1, 3]].tolist() == [0, 0]
    assert logits.grad is not None
    assert logits.grad[[1, 3]].tolist() == [[0] * 7] * 2
    assert (logits.grad[[0, 2]] != 0).all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_low_precision_is_promoted_to_float32(dtype, expected) -> None:
    outputs = logprobs_and_entropy(
        torch.zeros(1, 8, dtype=dtype), torch.tensor([0]), temperature=torch.ones(1)
    )
    assert {output.dtype for output in outputs.values()} == {expected}


def test_float64_temperature_does_not_widen_low_precision_logits() -> None:
    outputs = logprobs_and_entropy(
        torch.zeros(1, 8), torch.tensor([0]), temperature=torch.ones(1, dtype=torch.float64)
    )
    assert outputs["logprobs"].dtype == torch.float32


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_huge_logits_give_no_nan(scale) -> None:
    logits = (scale * _random()[0]).requires_grad_()
    outputs = logprobs_and_entropy(
        logits, torch.tensor([0, 1, 2, -100]), temperature=torch.ones(4)
    )
    (outputs["logprobs"] + outputs["entropy"]).sum().backward()

    assert logits.grad is not None
    assert all(tensor.isfinite().all() for tensor in (*outputs.values(), logits.grad))


def test_no_rows_give_no_outputs() -> None:
    outputs = logprobs_and_entropy(
        torch.empty(0, 8), torch.empty(0, dtype=torch.int64), temperature=torch.empty(0)
    )
    assert {name: output.shape for name, output in outputs.items()} == {
        "logprobs": (0,),
        "entropy": (0,),
    }


def test_logits_are_left_as_they_are() -> None:
    logits, labels = _random()
    before = logits.clone()
    logprobs_and_entropy(logits, labels, temperature=torch.full((4,), 2.0))

    assert torch.equal(logits, before)


def test_gradients_are_those_of_finite_differences() -> None:
    logits, _ = _random()
    labels = torch.tensor([2, -100, 0, 6])
    temperature = torch.tensor([1, 0.7, 2, 1.3], dtype=torch.float64)

    def both(logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(logprobs_and_entropy(logits, labels, temperature=temperature).values())

    assert torch.autograd.gradcheck(both, (logits.requires_grad_(),))
