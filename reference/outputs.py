"""What training reads from logits: the log-prob of the next token, and the entropy.

Both are calculated in float64, whatever dtype the logits have.
"""

import math

import torch
from torch import Tensor


def logprobs(logits: Tensor, input_ids: Tensor, temperature: float) -> Tensor:
    """Entry t is log p(token t + 1 | tokens up to t), with p = softmax(logits / temperature).

    Args:
        logits: [L, V] of one sequence.
        input_ids: int64 [L].
        temperature: above 0; the logits are divided by it.
    Returns:
        float64 [L]. Nothing follows the last token, so the last entry is 0.

    >>> logprobs(torch.zeros(3, 4), torch.tensor([1, 2, 3]), 1.0)
    tensor([-1.3863, -1.3863,  0.0000], dtype=torch.float64)
    """
    _check(logits, temperature)
    if input_ids.shape != logits.shape[:1]:
        raise ValueError(
            f"input_ids have shape {tuple(input_ids.shape)} and logits {tuple(logits.shape)}; "
            f"give one id for each row of logits"
        )
    predicted = torch.log_softmax(logits[:-1].double() / temperature, dim=-1)
    of_next_token = predicted.gather(1, input_ids[1:, None]).squeeze(1)
    return torch.cat([of_next_token, of_next_token.new_zeros(1)])


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) at every position, in nats.

    Args:
        logits: [L, V] of one sequence.
        temperature: above 0; the logits are divided by it.
    Returns:
        float64 [L], the last position included.

    >>> entropy(torch.zeros(2, 4), 1.0)
    tensor([1.3863, 1.3863], dtype=torch.float64)
    """
    _check(logits, temperature)
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def _check(logits: Tensor, temperature: float) -> None:
    if logits.dim() != 2 or len(logits) == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; give [L, V] with L at least 1")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite")
