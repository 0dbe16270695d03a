"""Per-token weights that make a masked loss a plain weighted sum, however the batch is cut.

Three aggregations are made from the mask alone (`prediction_weights`), any other is a user's own
weights (`own_weights`). Both are made of the whole batch, before it is cut, and travel with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pack import offsets_of

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")
_SYNONYMS = {"sequence-mean": "sequence-mean-token-mean"}


def prediction_weights(loss_mask: Tensor, *, aggregation: str) -> Tensor:
    """Weight of the prediction made at each token, for a whole batch before it is cut.

    With these weights the loss of the batch is the sum over all its tokens of weight times value,
    so micro-batches and ranks simply add up: no factor of the CP size, of the number of
    micro-batches or of their token counts is left to get wrong.

    | aggregation | weight of a valid prediction |
    | --- | --- |
    | `token-mean` | 1 / valid predictions of the batch |
    | `sequence-mean-token-mean`, or `sequence-mean` | 1 / (valid ones of its sequence × N) |
    | `sequence-mean-token-sum` | 1 / N |

    N counts the sequences that have a valid prediction. verl's `agg_loss` (`seq-mean-token-mean`,
    `seq-mean-token-sum`) does the same if it is given no `global_batch_size`; if it is, it divides
    by that, so that sequences without a valid prediction count as well. It also adds 1e-8 to the
    tokens of a sequence. `own_weights` shows how to get the former.

    Args:
        loss_mask: jagged bool [S, L]; entry i says that token i is a target, which is predicted
            at i - 1. Entry 0 weighs nothing.
        aggregation: one of `AGGREGATIONS`.
    Returns:
        float64 [N], concatenated; all 0 if nothing is valid.
    Raises:
        ValueError: an unknown aggregation, or a mask that is not jagged [S, L].
    """
    aggregation = _SYNONYMS.get(aggregation, aggregation)
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}; for another "
            "one make weights with own_weights"
        )
    valid, seqlens = _valid_predictions(loss_mask)
    if aggregation == "token-mean":
        return valid.double() / valid.sum().clamp(min=1)
    sequence = torch.repeat_interleave(seqlens)
    counts = torch.zeros_like(seqlens).index_add(0, sequence, valid.long())
    divisor = (counts > 0).sum()
    if aggregation == "sequence-mean-token-mean":
        divisor = divisor * counts[sequence]
    return valid / divisor.clamp(min=1).double()


def mtp_weights(loss_mask: Tensor, *, depth: int, coeff: float) -> Tensor:
    """Weights of multi-token prediction, for a whole batch before it is cut.

    With them its part of the loss is the sum over all tokens and depths of weight times
    `-logprob`, like that of `prediction_weights`: `coeff` times the mean over depths of the mean
    over the batch. The aggregation of the loss does not concern it. A depth that predicts nothing
    valid adds 0 to that mean.

    Args:
        loss_mask: jagged bool [S, L]; entry i says that token i is a target, which depth k
            predicts at i - k - 2.
    Returns:
        float64 [N, depth].
    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2, equations 24 and 25.
    """
    columns = []
    for ahead in range(2, depth + 2):
        valid, _ = _valid_predictions(loss_mask, ahead=ahead)
        columns.append(valid.double() * coeff / (depth * valid.sum().clamp(min=1)))
    return torch.stack(columns, 1)


def own_weights(weights: Tensor, *, loss_mask: Tensor) -> Tensor:
    """A user's own weight of the prediction made at each token, checked, for a whole batch.

    The loss is their sum of weight times value, with nothing to divide by: a mean is a matter of
    the weights. What the mask leaves out weighs 0, whatever `weights` holds there.

    Args:
        weights: jagged floating [S, L]; entry i weighs the prediction made at token i, which is
            that of token i + 1. The mask is shifted against it: its entry i + 1 says whether the
            same prediction is valid. The last entry of a sequence is 0.
        loss_mask: jagged bool [S, L], as in `prediction_weights`.
    Returns:
        float64 [N], concatenated.
    Raises:
        ValueError: not jagged or not floating, lengths unlike those of the mask, a weight of a
            valid prediction that is not finite, one of a last token, or weights with a graph.

    verl's `seq-mean-token-sum` with a `global_batch_size` of 4:

    >>> from impl.pack import jagged
    >>> mask = jagged(torch.tensor([True, True, True, False, False]), (3, 2))
    >>> fourth = jagged(torch.tensor([0.25, 0.25, 0, 0.25, 0]), (3, 2))
    >>> own_weights(fourth, loss_mask=mask).tolist()
    [0.25, 0.25, 0.0, 0.0, 0.0]
    """
    valid, seqlens = _valid_predictions(loss_mask)
    _check_jagged(weights, "weights")
    flat, offsets = weights.values(), offsets_of(weights)
    if not flat.is_floating_point():
        raise ValueError(f"weights are {flat.dtype}; give a floating dtype, best torch.float64")
    if flat.requires_grad:
        raise ValueError(
            "weights require a gradient, which would be taken once per rank; detach them, and put "
            "what depends on the model into the values"
        )
    if offsets.diff().tolist() != seqlens.tolist():
        raise ValueError(
            f"weights have lengths {offsets.diff().tolist()}, loss_mask has {seqlens.tolist()}; "
            "give one weight for each token"
        )
    last = flat[offsets[1:] - 1]
    if len(wrong := (last != 0).nonzero()):
        sequence = int(wrong[0])
        raise ValueError(
            f"sequence {sequence}: its last token has weight {last[sequence].item()} and predicts "
            "nothing; entry i weighs the prediction made at token i, of token i + 1, so weights "
            "of targets must be moved one to the left"
        )
    if len(wrong := (valid & ~flat.isfinite()).nonzero()):
        place = int(wrong[0])
        sequence = int(torch.searchsorted(offsets, place, right=True)) - 1
        raise ValueError(
            f"sequence {sequence}, token {place - int(offsets[sequence])}: weight "
            f"{flat[place].item()} of a valid prediction; give a finite one, or mask its target"
        )
    return torch.where(valid, flat, 0).double()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight times value over the tokens [N] that weigh something.

    What weighs nothing is left out rather than multiplied by zero: NaN there does not reach the
    sum. It reaches gradients if the model itself made it, since 0 * NaN is NaN on the way back.
    """
    return (torch.where(weights != 0, values, 0) * weights).sum()


def _valid_predictions(loss_mask: Tensor, *, ahead: int = 1) -> tuple[Tensor, Tensor]:
    """Whether the prediction made at each token, of the one `ahead` further, counts, bool [N].

    Returns:
        that, and lengths, int64 [S].
    """
    _check_jagged(loss_mask, "loss_mask")
    seqlens = offsets_of(loss_mask).diff()
    valid = loss_mask.values().roll(-ahead, 0).bool()
    back = torch.arange(1, ahead + 1, device=seqlens.device)
    valid[(seqlens.cumsum(0)[:, None] - back)[back <= seqlens[:, None]]] = False
    return valid, seqlens


def _check_jagged(tensor: Tensor, name: str) -> None:
    if tensor.layout != torch.jagged:
        raise ValueError(
            f"{name} is no jagged tensor but {tensor.layout} of shape {tuple(tensor.shape)}; make "
            "one with impl.pack.jagged"
        )
    if tensor.values().dim() != 1:
        shape = ", ".join(map(str, tensor.values().shape[1:]))
        raise ValueError(f"{name} has shape [S, L, {shape}]; give one entry for each token")
