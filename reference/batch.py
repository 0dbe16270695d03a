"""What goes into the oracle and what comes out of it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "sequence-mean")


@dataclass(frozen=True)
class Batch:
    """Sequences of any lengths, what counts in their loss, and their temperatures.

    Attributes:
        input_ids: int64 [L_i] for each sequence, L_i at least 1.
        loss_mask: bool [L_i] for each sequence. Entry i says that token i counts as a target:
            the prediction made at i - 1 enters the loss. Nothing predicts token 0, so entry 0
            is ignored.
        temperature: above 0, one for each sequence; logits are divided by it.
    Raises:
        ValueError: no sequence, an empty one, or parts that do not match.
    """

    input_ids: tuple[Tensor, ...]
    loss_mask: tuple[Tensor, ...]
    temperature: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError("the batch has no sequence; give at least one")
        for name in ("loss_mask", "temperature"):
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


@dataclass(frozen=True)
class Loss:
    """How the batch becomes one number.

    A prediction that counts has the objective `-logprob - entropy_coeff * entropy`.

    Attributes:
        aggregation: `token-mean` is the mean over all predictions of the batch that count;
            `sequence-mean` is the mean of a sequence's mean, over the sequences in which
            at least one prediction counts. Where nothing counts, the loss is 0.
        entropy_coeff: above 0 it rewards entropy.
    """

    aggregation: str = "token-mean"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
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
        loss: float64 scalar.
        gradients: of the loss, for every weight; zeros where it does not depend on one.
    """

    logits: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]
    entropy: tuple[Tensor, ...]
    loss: Tensor
    gradients: dict[str, Tensor]


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
