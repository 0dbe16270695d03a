"""What the suite asks of an implementation, and the plain data that passes between them.

An implementation under test is a module. It may offer these, each optional:

- `index`: an object with the methods of `IndexImplementation`. One process, no model: split, pack,
  unpack and merge as pure index logic.
- `open_rank`: a function that turns one process of a `torch.distributed` world into a
  `ModelImplementation`, which runs whole batches through a real model.
- `SUPPORTS`: names of what its ranks can do besides, see `Task.needs`; other tasks are
  unsupported.

`conformance/adapters/impl.py` is the production implementation behind this protocol, and
`conformance/adapters/reference.py` the oracle. Neither side imports the other, and the suite
imports neither: both are named on the command line and loaded by `load`.

Longer than 300 lines: all that the author of an implementation has to read, in one place.

Shape letters: `L` tokens of a sequence, `V` vocabulary, `T` packed rows on a rank, `S` sequences.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

from torch import Tensor

from .model_spec import ModelSpec as ModelSpec


class Unsupported(Exception):
    """Raised by an implementation that knows it cannot run a task; the words become the reason."""


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

    `token-mean` divides the sum over the whole batch by its number of valid predictions. The
    others average over the sequences that have a valid one: `sequence-mean-token-mean` the mean
    of each, `sequence-mean-token-sum` its sum.
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
    """Samples (indices into the batch) that run together.

    Args:
        cp_sizes: of every CP group, groups in rank order; the implementation says which samples
            each takes.
    """

    samples: tuple[int, ...]
    cp_sizes: tuple[int, ...]

    @property
    def cp_size(self) -> int:
        """The CP size of all groups.

        Raises:
            Unsupported: they differ, and the implementation has asked for one.
        """
        if len(set(self.cp_sizes)) > 1:
            raise Unsupported(f"CP groups of different sizes {self.cp_sizes} in one micro-batch")
        return self.cp_sizes[0]


Plan = tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Schedule:
    """A step that the implementation plans by itself.

    Whoever plans, each sample is run once, by one CP group, and ranks of tensor parallelism and
    of pipeline stages run the same packs.

    Args:
        scheduler: "uniform", one micro-batch in groups of one CP size, that which
            `IndexImplementation.choose_local_cp_size` gives for the whole batch: no group is
            without samples if there are enough. "balanced", groups of any sizes, in which every
            rank has a pack with samples. "megatron", what the installed Megatron plans.
        max_seqlen_per_dp_cp_rank: for "uniform", tokens of one sequence on a rank, without
            padding; for the others, rows of a pack on a rank, padding included.
    """

    scheduler: str
    max_seqlen_per_dp_cp_rank: int


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a model is spread besides dynamic CP; what is left of the world is DP×CP.

    Ranks are numbered as Megatron does, tp-cp-dp-pp, those of tensor parallelism side by side.

    Args:
        tp_size, pp_size: tensor and pipeline parallel. vpp_size: model chunks per stage.
        static_cp_size: the CP size that Megatron is initialised with.
        sequence_parallel: packs divide by `tp_size` as well.
        ep_size: experts are dealt out to so many ranks, side by side among those of DP×CP.
        recompute: every layer is computed again in the backward pass.
        distributed_optimizer: gradients are sharded over the DP×CP ranks.
    """

    tp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    ep_size: int = 1
    static_cp_size: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    distributed_optimizer: bool = False

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp_size * self.pp_size

    def dp_cp_ranks(self, world_size: int) -> tuple[tuple[int, ...], ...]:
        """For every place of a model copy, stages first, the ranks that share the samples.

        >>> Parallel(tp_size=2, pp_size=2).dp_cp_ranks(8)
        ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        stage = world_size // self.pp_size
        return tuple(
            tuple(range(pp * stage + tp, (pp + 1) * stage, self.tp_size))
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        )


ALONE = Parallel()


@dataclass(frozen=True)
class Task:
    """One case as a rank sees it.

    `passes` are run one after another on one model, gradients cleared before each; every pass
    covers the batch once. Most tasks have one pass; A-B-A order is three.

    Args:
        interrupted: before each pass but the first, the same pass is begun and fails: in its
            first micro-batch, on every rank, an exception is raised inside the core attention of
            the last layer, leaves the layers and whatever runs them, and is swallowed. The pass
            itself then runs on the same model as if nothing had been. Never with pipeline stages,
            of which all but the last would wait.
        routing: per sequence int64 [L, layers with experts, top_k], those of MTP last: the experts
            that every token goes to, whatever its router says, which only weighs them. Empty if
            routers choose.
    """

    model: ModelSpec
    weights: Mapping[str, Tensor]
    batch: Batch
    passes: tuple[Plan | Schedule, ...]
    loss: Loss = Loss()
    padding: Padding = Padding()
    parallel: Parallel = ALONE
    interrupted: bool = False
    routing: tuple[Tensor, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The passes, where the suite has planned all of them.

        Raises:
            Unsupported: it has not, and the implementation has asked for them.
        """
        plans = tuple(step for step in self.passes if not isinstance(step, Schedule))
        if len(plans) < len(self.passes):
            raise Unsupported("a pass that the implementation has to plan by itself")
        return plans

    @property
    def needs(self) -> frozenset[str]:
        """What a module must name in `SUPPORTS` before it is given this task.

        "mixed", CP groups of different sizes in a micro-batch; "schedulers", a `Schedule` among
        the passes; "parallel", more than data and context parallelism; "interrupted" and
        "routing", the fields.
        """
        plans = [step for step in self.passes if not isinstance(step, Schedule)]
        asked = {
            "schedulers": len(plans) < len(self.passes),
            "mixed": any(len(set(one.cp_sizes)) > 1 for plan in plans for one in plan),
            "parallel": self.parallel != ALONE,
            "interrupted": self.interrupted,
            "routing": bool(self.routing),
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


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

    With pipeline stages, `logits`, `logprobs` and `entropy` may be empty on all but the last, each
    by itself, and `gradients` may be those of the rank's own layers; what is there must be right.

    Args:
        logits: per sequence [L, V]. logprobs, entropy: per sequence [L]; entry t of `logprobs`
            is that of token t + 1, and the last, which has no label, is 0.
        loss: scalar, of the whole batch, with what `ModelSpec.moe` and MTP add to it.
        gradients: of that loss, by Hugging Face name, summed
            over all ranks, in absolute scale; whole tensors.
        packs: one per micro-batch, then any that hold padding only; empty if the implementation
            does not show them. What follows may be empty in the same way:
        auxiliary: the part of the loss, its coefficient included, that comes from "moe_aux",
            "moe_seq_aux", "moe_z" and "mtp", by these names.
        mtp_logprobs: per sequence [L, mtp_depth]; entry (t, k) is that of token t + k + 2, and 0
            where there is none. routing: per sequence, as `Task.routing`, ascending.
        expert_counts: per layer with experts int64 [num_experts], how many real tokens of the
            batch went to each, as the implementation counts for itself.
    """

    logits: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...]
    entropy: tuple[Tensor, ...]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    packs: tuple[Pack, ...] = ()
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    mtp_logprobs: tuple[Tensor, ...] = ()
    routing: tuple[Tensor, ...] = ()
    expert_counts: tuple[Tensor, ...] = ()


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
        self,
        model: ModelSpec,
        weights: Mapping[str, Tensor],
        batch: Batch,
        loss: Loss,
        *,
        packs: Sequence[Sequence[int]] = (),
        routing: Sequence[Tensor] = (),
    ) -> Outputs:
        """Exact outputs, loss and gradients; `Outputs.packs` stays empty.

        Args:
            packs: samples whose routers are balanced together, every sample once; none for all of
                them. routing: as `Task.routing`.
        """

    def pack(
        self,
        batch: Batch,
        samples: Sequence[int],
        *,
        cp_ranks: Sequence[int],
        cp_rank: int,
        padding: Padding,
        tp_size: int = 1,
    ) -> Pack:
        """The pack that the CP rank must have handed to the model.

        Args:
            tp_size: what its rows divide by besides, for sequence parallelism.
        """

    index: IndexImplementation


@dataclass(frozen=True)
class RankContext:
    """Where a rank finds itself when `open_rank` is called; torch.distributed is initialised.

    Args:
        parallel: how every task of this rank spreads its model.
    """

    rank: int
    world_size: int
    timeout_s: float
    options: Mapping[str, str] = field(default_factory=dict)
    parallel: Parallel = ALONE


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
