"""What goes into the oracle and what comes out of it."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

AGGREGATIONS = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "own-weights",
)


@dataclass(frozen=True)
class Batch:
    """Sequences of any lengths, what counts in their loss, and their temperatures.

    Attributes:
        input_ids: int64 [L_i] for each sequence, L_i at least 1.
        loss_mask: bool [L_i] for each sequence. Entry i says that token i counts as a target:
            the prediction made at i - 1 enters the loss. Nothing predicts token 0, so entry 0
            is ignored.
        temperature: above 0, one for each sequence; logits are divided by it.
        loss_weights: float64 [L_i] for each sequence, for the aggregation `own-weights`. Entry i
            is what the prediction made at i weighs if it counts, which `loss_mask` says in its
            entry i + 1. Where it does not, anything may stand; the last entry is 0.
    Raises:
        ValueError: no sequence, an empty one, or parts that do not match.
    """

    input_ids: tuple[Tensor, ...]
    loss_mask: tuple[Tensor, ...]
    temperature: tuple[float, ...]
    loss_weights: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError("the batch has no sequence; give at least one")
        for name in ("loss_mask", "temperature", "loss_weights"):
            if name == "loss_weights" and self.loss_weights is None:
                continue
            if len(getattr(self, name)) != len(self.input_ids):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {len(self.input_ids)} "
                    f"sequences; give one for each"
                )
        for sequence, (ids, mask, temperature) in enumerate(
            zip(self.input_ids, self.loss_mask, self.temperature, strict=True)
        ):
            _check_ids(sequence, ids)
            _check_mask(sequence, mask, len(ids))
            if not 0 < temperature < math.inf:
                raise ValueError(
                    f"sequence {sequence}: temperature={temperature} must be positive and finite"
                )
        for sequence, weights in enumerate(self.loss_weights or ()):
            _check_weights(sequence, weights, self.loss_mask[sequence])


@dataclass(frozen=True)
class Loss:
    """How the batch becomes one number.

    A prediction that counts has the objective `-logprob - entropy_coeff * entropy`.

    Attributes:
        aggregation: `token-mean` is the mean over all predictions of the batch that count;
            `sequence-mean-token-mean`, which may be written `sequence-mean`, is the mean of a
            sequence's mean, and `sequence-mean-token-sum` the mean of a sequence's sum, over the
            sequences in which at least one prediction counts; `own-weights` is the sum with the
            weights of the batch. Where nothing counts, the loss is 0.
        entropy_coeff: above 0 it rewards entropy.
    """

    aggregation: str = "token-mean"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        if self.aggregation == "sequence-mean":
            object.__setattr__(self, "aggregation", "sequence-mean-token-mean")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(
                f"aggregation={self.aggregation!r} is unknown; "
                f"choose one of {', '.join(AGGREGATIONS)}"
            )
        if not math.isfinite(self.entropy_coeff):
            raise ValueError(f"entropy_coeff={self.entropy_coeff} must be finite")


@dataclass(frozen=True)
class Result:
    """What the oracle says. Nothing in it has a graph.

    Attributes:
        logits: [L_i, V] for each sequence.
        logprobs: float64 [L_i] for each sequence; the last entry has no label and is 0.
        entropy: float64 [L_i] for each sequence, in nats.
        loss: float64 scalar, auxiliary losses included.
        gradients: of the loss, for every weight; zeros where it does not depend on one.
        auxiliary: the parts of the loss, coefficients included, that are not the predictions':
            "moe_aux", "moe_seq_aux", "moe_z" and "mtp", those that the model has.
        mtp_logprobs: float64 [L_i, mtp_depth] for each sequence; entry (t, k) is that of token
            t + k + 2, and 0 where there is none. Empty without MTP.
        routing: int64 [L_i, layers with experts, top_k] for each sequence, those of MTP last: the
            experts that every token went to, ascending. Empty without experts.
    """

    logits: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]
    entropy: tuple[Tensor, ...]
    loss: Tensor
    gradients: dict[str, Tensor]
    auxiliary: dict[str, Tensor] = field(default_factory=dict)
    mtp_logprobs: tuple[Tensor, ...] = ()
    routing: tuple[Tensor, ...] = ()


def check_vocabulary(batch: Batch, vocab_size: int) -> None:
    """Require every id to be one of the vocabulary.

    Raises:
        ValueError: an id below 0 or not below `vocab_size`, with its sequence and token.
    """
    for sequence, ids in enumerate(batch.input_ids):
        outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
        if len(outside):
            token = int(outside[0])
            raise ValueError(
                f"sequence {sequence}, token {token}: id {int(ids[token])} is outside the "
                f"vocabulary of {vocab_size}"
            )


def loss_weights(batch: Batch) -> tuple[Tensor, ...]:
    """The weights of the batch for the aggregation `own-weights`.

    Raises:
        ValueError: it has none.
    """
    if batch.loss_weights is None:
        raise ValueError(
            "aggregation='own-weights' needs weights; give the batch loss_weights, float64 [L] "
            "for each sequence"
        )
    return batch.loss_weights


def _check_ids(sequence: int, ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(
            f"sequence {sequence}: input_ids are {ids.dtype} of shape {tuple(ids.shape)}; "
            f"give int64 of shape [L]"
        )
    if len(ids) == 0:
        raise ValueError(f"sequence {sequence} is empty; leave it out of the batch")


def _check_mask(sequence: int, mask: Tensor, seqlen: int) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"sequence {sequence}: loss_mask is {mask.dtype}; give torch.bool")
    if mask.shape != (seqlen,):
        raise ValueError(
            f"sequence {sequence}: loss_mask has shape {tuple(mask.shape)} "
            f"for {seqlen} tokens; give one entry for each"
        )


def _check_weights(sequence: int, weights: Tensor, mask: Tensor) -> None:
    if weights.dtype != torch.float64 or weights.shape != mask.shape:
        raise ValueError(
            f"sequence {sequence}: loss_weights are {weights.dtype} of shape "
            f"{tuple(weights.shape)} for {len(mask)} tokens; give float64, one for each"
        )
    if float(weights[-1]) != 0:
        raise ValueError(
            f"sequence {sequence}: the last token has loss weight {float(weights[-1])} but "
            f"predicts nothing; give 0, and to each other token the weight of the prediction "
            f"made at it, not of itself as a target"
        )
    for token in range(len(mask) - 1):
        if mask[token + 1] and not math.isfinite(weights[token]):
            raise ValueError(
                f"sequence {sequence}, token {token}: loss weight {float(weights[token])} of a "
                f"prediction that counts must be finite"
            )
