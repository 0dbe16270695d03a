"""The logits processor of a trainer: log-probs of the labels, and entropy."""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_and_entropy(
    logits: Tensor, labels: Tensor, *, temperature: Tensor
) -> dict[str, Tensor]:
    """Log-prob of each label and entropy of each distribution, in nats.

    Args:
        logits: [R, V], or [R, depth, V] of further predictions; left as they are; promoted to
            float32 at least.
        labels: int64 [R], or [R, depth]; a negative one has no log-prob: 0.
        temperature: [R], or [R, 1], positive; logits are divided by it for both outputs.
    Returns:
        `logprobs` and `entropy`, each [R], or [R, depth].
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits.to(dtype) / temperature.to(dtype).unsqueeze(-1)
    all_logprobs = scaled.log_softmax(-1)
    chosen = all_logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return {
        "logprobs": chosen.where(labels >= 0, 0),
        "entropy": -(all_logprobs.exp() * all_logprobs).sum(-1),
    }
