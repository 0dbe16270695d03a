"""The answer by definition: one sequence at a time, then one sum."""

from collections.abc import Mapping

import torch
from torch import Tensor

from . import model, outputs
from .batch import Batch, Loss, Result, check_vocabulary
from .config import ModelConfig, check_weights

__all__ = ["Batch", "Loss", "Result", "evaluate"]


def evaluate(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    batch: Batch,
    loss: Loss,
    *,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Logits, log-probs, entropy, loss and gradients of a batch.

    Each sequence goes through the model alone, and backward before the next one starts, so
    memory is that of the longest sequence. The masks alone say how much each sequence weighs
    in the loss, so that is known before the first one.

    Args:
        weights: exactly those of `weight_shapes(config)`, in `dtype`; they are left as they are.
        dtype: another one than float64 measures what rounding does to the same code. Log-probs,
            entropy and loss are float64 all the same.
    Raises:
        ValueError: weights or ids that do not fit the config.
    """
    check_weights(config, weights, dtype=dtype)
    check_vocabulary(batch, config.vocab_size)
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    shares = prediction_weights(batch, loss)
    total = torch.zeros((), dtype=torch.float64)
    results: list[tuple[Tensor, Tensor, Tensor]] = []

    for ids, mask, temperature, share in zip(
        batch.input_ids, batch.loss_mask, batch.temperature, shares, strict=True
    ):
        logits = model.logits(leaves, config, ids)
        logprobs = outputs.logprobs(logits, ids, temperature)
        entropy = outputs.entropy(logits, temperature)
        if mask[1:].any():
            objective = -logprobs - loss.entropy_coeff * entropy
            term = share * objective[:-1][mask[1:]].sum()
            torch.autograd.backward(term)
            total += term.detach().to(total.device)
        results.append((logits.detach(), logprobs.detach(), entropy.detach()))

    return Result(
        logits=tuple(result[0] for result in results),
        logprobs=tuple(result[1] for result in results),
        entropy=tuple(result[2] for result in results),
        loss=total,
        gradients={name: _gradient(leaf) for name, leaf in leaves.items()},
    )


def prediction_weights(batch: Batch, loss: Loss) -> list[float]:
    """What one counting prediction of each sequence weighs in the loss of the batch.

    >>> mask = (torch.tensor([False, True, True]), torch.tensor([True]), torch.tensor([True] * 2))
    >>> ids = tuple(torch.zeros(len(m), dtype=torch.int64) for m in mask)
    >>> prediction_weights(Batch(ids, mask, (1.0,) * 3), Loss("sequence-mean"))
    [0.25, 0.0, 0.5]
    """
    counts = [int(mask[1:].sum()) for mask in batch.loss_mask]
    if loss.aggregation == "token-mean":
        return [1 / sum(counts) if count else 0.0 for count in counts]
    num_counting = sum(count > 0 for count in counts)
    return [1 / (num_counting * count) if count else 0.0 for count in counts]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf).detach() if leaf.grad is None else leaf.grad
