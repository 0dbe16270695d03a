"""Log-probs and entropy of logits whose vocabulary is divided over the tensor parallel ranks.

Shape letters: `R` rows, `W` the part of the vocabulary that a rank holds: entries from
`rank * W` on.

With s = logits / temperature, p = softmax(s) over all ranks and H its entropy:

    logprob = s[label] - lse(s)         d logprob / d s_j = [j = label] - p_j
    H = lse(s) - sum_j p_j s_j          d H / d s_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs_and_entropy(
    logits: Tensor, labels: Tensor, *, temperature: Tensor, tp_group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Log-prob of each label and entropy of each distribution, in nats, equal on every TP rank.

    Every TP rank must go on to compute the same from them: each gets the gradient of its own
    logits. They are left as they are, so either function of this module may come first.

    Args:
        logits: [R, W], or [R, depth, W] of further predictions; promoted to float32 at least.
        labels: int64 [R] or [R, depth], of the whole vocabulary; a negative one has log-prob 0.
        temperature: [R] or [R, 1], positive; logits are divided by it for both outputs.
    Returns:
        `logprobs` and `entropy`, each [R] or [R, depth].
    """
    logprobs, entropy = _LogprobsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, tp_group
    )
    return {"logprobs": logprobs, "entropy": entropy}


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, *, temperature: Tensor, tp_group: dist.ProcessGroup
) -> Tensor:
    """Log-prob of each label, [R]; see `vocab_parallel_logprobs_and_entropy`."""
    return vocab_parallel_logprobs_and_entropy(
        logits, labels, temperature=temperature, tp_group=tp_group
    )["logprobs"]


def vocab_parallel_entropy(
    logits: Tensor, *, temperature: Tensor, tp_group: dist.ProcessGroup
) -> Tensor:
    """Entropy of each distribution, [R]; see `vocab_parallel_logprobs_and_entropy`."""
    no_labels = torch.full(logits.shape[:1], -1, device=logits.device)
    return vocab_parallel_logprobs_and_entropy(
        logits, no_labels, temperature=temperature, tp_group=tp_group
    )["entropy"]


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        scaled = _scaled(logits, temperature)
        highest = scaled.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        exp = (scaled - highest.unsqueeze(-1)).exp()
        local = _local_labels(labels, scaled.shape[-1], group.rank())
        chosen = scaled.gather(-1, local.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        sums = torch.stack([exp.sum(-1), (exp * scaled).sum(-1), chosen.where(local >= 0, 0)])
        dist.all_reduce(sums, group=group)
        total, weighted, of_label = sums
        lse = highest + total.log()
        entropy = lse - weighted / total
        ctx.save_for_backward(logits, temperature, local, labels, lse, entropy)
        return (of_label - lse).where(labels >= 0, 0), entropy

    @staticmethod
    def backward(
        ctx: Any, d_logprobs: Tensor, d_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, temperature, local, labels, lse, entropy = ctx.saved_tensors
        log_p = _scaled(logits, temperature) - lse.unsqueeze(-1)
        d_logprobs = d_logprobs.where(labels >= 0, 0)
        grad = -(d_logprobs + d_entropy * entropy).unsqueeze(-1) - d_entropy.unsqueeze(-1) * log_p
        grad *= log_p.exp()
        of_label = d_logprobs.where(local >= 0, 0).unsqueeze(-1)
        grad.scatter_add_(-1, local.clamp(min=0).unsqueeze(-1), of_label)
        return (grad / temperature.to(grad).unsqueeze(-1)).to(logits), None, None, None


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) / temperature.to(dtype).unsqueeze(-1)


def _local_labels(labels: Tensor, width: int, rank: int) -> Tensor:
    """Labels as entries of this rank's part, -1 for those that other ranks hold."""
    local = labels - rank * width
    return local.where((local >= 0) & (local < width), -1)
