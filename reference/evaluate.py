"""The answer by definition: one sequence at a time, then one sum."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import model, outputs
from .batch import Batch, Loss, Result, check_vocabulary, loss_weights
from .config import ModelConfig
from .weights import check_weights

__all__ = ["Batch", "Loss", "Result", "evaluate"]


def evaluate(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    batch: Batch,
    loss: Loss,
    *,
    packs: Sequence[Sequence[int]] = (),
    routing: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Logits, log-probs, entropy, loss and gradients of a batch.

    Each sequence goes through the model alone, and backward before the next one starts, so
    memory is that of the longest sequence. The batch alone says how much each prediction weighs
    in the loss, so that is known before the first one.

    Args:
        weights: exactly those of `weight_shapes(config)`, in `dtype`; they are left as they are.
        dtype: another one than float64 measures what rounding does to the same code. Log-probs,
            entropy and loss are float64 all the same.
    Raises:
        ValueError: weights or ids that do not fit the config, or a batch without the weights
            that the loss asks for.
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
            term = (share.to(objective.device) * objective[:-1][mask[1:]]).sum()
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


def prediction_weights(batch: Batch, loss: Loss) -> list[Tensor]:
    """What each prediction that counts weighs in the loss of the batch.

    Returns:
        for each sequence float64 [number of its predictions that count], in their order.

    >>> mask = (torch.tensor([False, True, True]), torch.tensor([True]), torch.tensor([True] * 2))
    >>> ids = tuple(torch.zeros(len(m), dtype=torch.int64) for m in mask)
    >>> batch = Batch(ids, mask, (1.0,) * 3)
    >>> [weights.tolist() for weights in prediction_weights(batch, Loss("sequence-mean"))]
    [[0.25, 0.25], [], [0.5]]
    """
    counting = [mask[1:] for mask in batch.loss_mask]
    if loss.aggregation == "own-weights":
        pairs = zip(loss_weights(batch), counting, strict=True)
        return [weights[:-1][counts].detach() for weights, counts in pairs]
    numbers = [int(counts.sum()) for counts in counting]
    num_sequences = sum(number > 0 for number in numbers)
    weights = []
    for number in numbers:
        divisor = {
            "token-mean": sum(numbers),
            "sequence-mean-token-mean": num_sequences * number,
            "sequence-mean-token-sum": num_sequences,
        }[loss.aggregation]
        weights.append(torch.full((number,), 1 / max(1, divisor), dtype=torch.float64))
    return weights


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf).detach() if leaf.grad is None else leaf.grad
