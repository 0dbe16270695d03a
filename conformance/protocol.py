"""What the suite asks of an implementation, and the plain data that passes between them.

An implementation under test is a module. It may offer two things, each optional:

- `index`: an object with the methods of `IndexImplementation`. One process, no model: split, pack,
  unpack and merge as pure index logic.
- `open_rank`: a function that turns one process of a `torch.distributed` world into a
  `ModelImplementation`, which runs whole batches through a real model.

`conformance/adapters/impl.py` is the production implementation behind this protocol, and
`conformance/adapters/reference.py` the oracle. Neither side imports the other, and the suite
imports neither: both are named on the command line and loaded by `load`.

Shape letters: `L` tokens of a sequence, `V` vocabulary, `T` packed rows on a rank, `S` sequences.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

from torch import Tensor


class Unsupported(Exception):
    """Raised by an implementation that knows it cannot run a task; the words become the reason."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder LM as plain data; weights carry their Hugging Face names, in float64."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm: str = "rmsnorm"  # or "layernorm"
    norm_eps: float = 1e-5
    activation: str = "swiglu"  # or "gelu", "gelu_tanh": one ungated matrix
    rope_theta: float = 10000.0
    rope_interleaved: bool = False  # adjacent pairs rotate together, not halves
    rope_fraction: float = 1.0  # the share of each head that rotates
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False  # the output matrix is the embedding


@dataclass(frozen=True)
class Batch:
    """A batch as a trainer holds it: whole, in input order, the same on every rank.

    Args:
        input_ids: per sequence int64 [L].
        loss_mask: per sequence bool [L]; entry i says that token i is a target, so it weighs the
            prediction made at token i - 1. Entry 0 weighs nothing.
        temperature: per sequence, positive; logits are divided by it before log-probs and entropy.
    """

    input_ids: tuple[Tensor, ...]
    loss_mask: tuple[Tensor, ...]
    temperature: tuple[float, ...]

    @property
    def seqlens(self) -> tuple[int, ...]:
        return tuple(len(ids) for ids in self.input_ids)


@dataclass(frozen=True)
class Loss:
    """What is differentiated: per valid prediction, `-logprob - entropy_coeff * entropy`.

    `token-mean` divides the sum over the whole batch by its number of valid predictions;
    `sequence-mean` averages each sequence first, then the sequences that have a valid one.
    """

    aggregation: str = "token-mean"
    entropy_coeff: float = 0.0


@dataclass(frozen=True)
class Padding:
    """What fills padded rows: an id, and a value for per-token side inputs and for outputs.

    Whatever it is, no real token, loss or gradient may change: NaN is allowed for `side_value`
    (labels aside) and for `output_value`, which is added to padded rows of logits before the loss.
    """

    token_id: int = 0
    side_value: float = 0.0
    output_value: float | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Samples (indices into the batch) that run together, and the CP size of their groups."""

    samples: tuple[int, ...]
    cp_size: int


Plan = tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Task:
    """One case as a rank sees it.

    `passes` are run one after another on one model, gradients cleared before each; every pass
    covers the batch once. Most tasks have one pass; A-B-A order is three.
    """

    model: ModelSpec
    weights: Mapping[str, Tensor]
    batch: Batch
    passes: tuple[Plan, ...]
    loss: Loss = Loss()
    padding: Padding = Padding()


@dataclass(frozen=True)
class Pack:
    """What a rank handed to the model for one micro-batch.

    Args:
        samples: indices into the batch, in pack order; empty for a pack of padding only.
        cp_ranks: global ranks of the CP group, in group order.
        tokens, position_ids, labels: int64 [T]; `labels` is -100 where there is none.
        cu_seqlens_padded: int32 [S + 1], before the split over CP ranks.
    """

    samples: tuple[int, ...]
    cp_ranks: tuple[int, ...]
    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens_padded: Tensor


@dataclass(frozen=True)
class Outputs:
    """Results of one pass, on every rank the whole batch in input order.

    Args:
        logits: per sequence [L, V]. logprobs, entropy: per sequence [L]; entry t of `logprobs`
            is that of token t + 1, and the last, which has no label, is 0.
        loss: scalar, of the whole batch. gradients: of that loss, by Hugging Face name, summed
            over all ranks, in absolute scale.
        packs: one per micro-batch; empty if the implementation does not show them.
    """

    logits: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]
    entropy: tuple[Tensor, ...]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    packs: tuple[Pack, ...] = ()


class ModelImplementation(Protocol):
    """One rank of an implementation that runs a model; lives as long as its pool."""

    def run(self, task: Task) -> tuple[Outputs, ...]:
        """Run every pass of a task; called on all ranks with the same task.

        Raises:
            ValueError: the task cannot be had (empty batch, a CP size without groups), before any
                collective.
            Unsupported: the implementation says so itself.
        """

    def close(self) -> None:
        """Undo what `open_rank` did; the process group is still there."""


class IndexImplementation(Protocol):
    """Split, pack, unpack and merge as pure functions of lengths."""

    def choose_local_cp_size(
        self, seqlens: Sequence[int], *, world_size: int, max_seqlen_per_dp_cp_rank: int
    ) -> int:
        """The CP size a micro-batch gets. Raises ValueError where no size fits."""

    def split(self, seqlens: Sequence[int], *, world_size: int, cp_size: int) -> list[list[int]]:
        """Sample indices of every CP group, groups in rank order."""

    def pack(
        self,
        sequences: Sequence[Tensor],
        *,
        cp_size: int,
        cp_rank: int,
        tp_size: int,
        pad_value: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A CP rank's rows [T, ...], position ids int64 [T], cu_seqlens_padded int32 [S + 1]."""

    def unpack(
        self, shards: Sequence[Tensor], seqlens: Sequence[int], *, cp_size: int, tp_size: int
    ) -> list[Tensor]:
        """The packed rows of all CP ranks → the real rows of every sequence."""

    def labels(self, sequence: Tensor) -> Tensor:
        """Next tokens of one sequence, int64 [L]; the last has none: -100."""

    def merge(
        self, outputs: Sequence[Sequence[Tensor]], samples: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Per group, outputs and whose they are (sample indices) → all samples, input order."""


class Oracle(Protocol):
    """What the suite asks of the reference: the truth in one process."""

    def random_weights(self, model: ModelSpec, *, seed: int) -> dict[str, Tensor]:
        """Float64 weights by Hugging Face name."""

    def evaluate(
        self, model: ModelSpec, weights: Mapping[str, Tensor], batch: Batch, loss: Loss
    ) -> Outputs:
        """Exact outputs, loss and gradients; `packs` stays empty."""

    def pack(
        self,
        batch: Batch,
        samples: Sequence[int],
        *,
        cp_ranks: Sequence[int],
        cp_rank: int,
        padding: Padding,
    ) -> Pack:
        """The pack that the CP rank must have handed to the model."""

    index: IndexImplementation


@dataclass(frozen=True)
class RankContext:
    """Where a rank finds itself when `open_rank` is called; torch.distributed is initialised."""

    rank: int
    world_size: int
    timeout_s: float
    options: Mapping[str, str] = field(default_factory=dict)


def load(name: str) -> ModuleType:
    """The module of an implementation under test, by dotted name.

    Raises:
        ValueError: no such module, or it offers neither `index` nor `open_rank`.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ValueError(
                f"no module named {name!r}; --impl takes the dotted name of a module that can be "
                "imported from here, for example conformance.adapters.impl"
            ) from error
        raise
    if not (hasattr(module, "index") or hasattr(module, "open_rank")):
        raise ValueError(
            f"{name} offers neither `index` nor `open_rank`; conformance/protocol.py says what "
            "they are"
        )
    return module
