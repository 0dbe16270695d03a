"""Per-token weights that make a masked loss a plain weighted sum, however the batch is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from .pack import offsets_of

AGGREGATIONS = ("token-mean", "sequence-mean")


def prediction_weights(loss_mask: Tensor, *, aggregation: str) -> Tensor:
    """Weight of the prediction made at each token, for a whole batch before it is cut.

    With these weights the loss of the batch is the sum over all its tokens of weight times value,
    so micro-batches and ranks simply add up: no factor of the CP size, of the number of
    micro-batches or of their token counts is left to get wrong.

    Args:
        loss_mask: jagged bool [S, L]; entry i says that token i is a target, which is predicted
            at i - 1. Entry 0 weighs nothing.
        aggregation: "token-mean" over all valid predictions of the batch, or "sequence-mean", the
            mean over sequences that have a valid one of each sequence's own mean.
    Returns:
        float64 [N], concatenated; all 0 if nothing is valid.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
    seqlens = offsets_of(loss_mask).diff()
    valid = loss_mask.values().roll(-1, 0).bool()
    valid[seqlens.cumsum(0) - 1] = False
    if aggregation == "token-mean":
        return valid.double() / valid.sum().clamp(min=1)
    sequence = torch.repeat_interleave(seqlens)
    counts = torch.zeros_like(seqlens).index_add(0, sequence, valid.long())
    return valid / (counts[sequence] * (counts > 0).sum()).clamp(min=1).double()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight times value over the tokens [N] that weigh something.

    What weighs nothing is left out rather than multiplied by zero: NaN there does no harm.
    """
    valid = (weights != 0).nonzero().squeeze(-1)
    return (values.index_select(0, valid) * weights.index_select(0, valid)).sum()
