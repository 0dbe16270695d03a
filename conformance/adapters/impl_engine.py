"""The production implementation as a trainer meets it: `impl.engine` on Megatron's own schedule.

`conformance.adapters.impl` runs micro-batches one by one and adds up gradients itself. Here the
engine does all of that: Megatron's schedule, data parallelism and finalising of gradients.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pack import jagged

from ..protocol import MicroBatch, Outputs, Pack, Plan, RankContext, Task, Unsupported
from . import impl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from impl.thd import PackedRow

NAME = "impl_engine"
PRELOAD = (*impl.PRELOAD, "impl.engine")
WATCH = impl.WATCH
versions = impl.versions


class Rank:
    """One rank; every task has an engine of its own."""

    def __init__(self, context: RankContext) -> None:
        self.world_size = context.world_size
        self.timeout = timedelta(seconds=context.timeout_s)

    def close(self) -> None: ...

    def run(self, task: Task) -> tuple[Outputs, ...]:
        plans = [step_plan(task, plan, self.world_size) for plan in task.passes]
        run = _EngineRun(task, self.timeout)
        try:
            return tuple(run.one_pass(plan) for plan in plans)
        finally:
            run.engine.close()


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


@dataclass(frozen=True)
class Group:
    """A CP group in one micro-batch: its ranks run its samples as one pack."""

    ranks: tuple[int, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """All micro-batches of a pass as one step; in each, every rank has a group."""

    world_size: int
    seqlens: tuple[int, ...]
    micro_batches: tuple[tuple[Group, ...], ...]
    barriered: bool = True

    @property
    def hash(self) -> int:
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:7], "big")

    def for_rank(self, rank: int) -> tuple[Group, ...]:
        groups = (group for micro_batch in self.micro_batches for group in micro_batch)
        return tuple(group for group in groups if rank in group.ranks)


def step_plan(task: Task, plan: Plan, world_size: int) -> StepPlan:
    """The micro-batches that the suite asks for as one step, before any collective.

    Raises:
        ValueError: a micro-batch without samples, or a CP size that cannot be had.
    """
    micro_batches = tuple(_groups(task, micro_batch, world_size) for micro_batch in plan)
    return StepPlan(world_size, task.batch.seqlens, micro_batches)


def _groups(task: Task, micro_batch: MicroBatch, world_size: int) -> tuple[Group, ...]:
    from impl.schedule import split_samples

    seqlens, size = [task.batch.seqlens[one] for one in micro_batch.samples], micro_batch.cp_size
    places = split_samples(seqlens, world_size=world_size, cp_size=size)
    return tuple(
        Group(
            ranks=tuple(range(group * size, (group + 1) * size)),
            samples=tuple(micro_batch.samples[place] for place in mine),
        )
        for group, mine in enumerate(places)
    )


class _EngineRun:
    """One engine through the passes of one task."""

    def __init__(self, task: Task, timeout: timedelta) -> None:
        from impl.engine import Engine
        from impl.loss import prediction_weights
        from impl.megatron.model import GPTConfig
        from impl.parallel import ParallelLayout

        try:
            config = GPTConfig(**asdict(task.model))
        except ValueError as error:
            raise Unsupported(str(error)) from error
        seqlens = task.batch.seqlens
        self.task = task
        self.packed: list[PackedRow] = []
        self.engine = Engine(
            layout=ParallelLayout(),
            model=config,
            weights=task.weights,
            timeout=timeout,
        )
        self.engine.chunks[0].module.register_forward_hook(self.poison_padding, with_kwargs=True)
        mask = jagged(torch.cat(task.batch.loss_mask), seqlens)
        values = {
            "input_ids": torch.cat(task.batch.input_ids),
            "weights": prediction_weights(mask, aggregation=task.loss.aggregation),
            "temperature": torch.tensor(
                task.batch.temperature, dtype=torch.float64
            ).repeat_interleave(torch.tensor(seqlens)),
        }
        self.batch = {name: jagged(value, seqlens) for name, value in values.items()}

    def one_pass(self, plan: StepPlan) -> Outputs:
        self.packed.clear()
        fill = self.task.padding
        result = self.engine.forward_backward_batch(
            self.batch,
            self.loss,
            logits_processor=with_logits,
            plan=plan,
            fill={"input_ids": fill.token_id, "temperature": fill.side_value},
            on_pack=self.packed.append,
        )
        groups = plan.for_rank(dist.get_rank())
        return Outputs(
            **{name: output.unbind() for name, output in result.outputs.items()},
            loss=result.loss,
            gradients=self.engine.gradients(),
            packs=tuple(
                pack_seen(group.samples, packed)
                for group, packed in zip(groups, self.packed, strict=True)
            ),
        )

    def loss(
        self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from impl.loss import weighted_sum

        entropy = self.task.loss.entropy_coeff * outputs["entropy"].values()
        return weighted_sum(
            -outputs["logprobs"].values() - entropy, inputs["weights"].values()
        ), {}

    def poison_padding(
        self, model: object, inputs: object, keywords: Mapping[str, Any], logits: Tensor
    ) -> Tensor:
        value = self.task.padding.output_value
        if value is None:
            return logits
        (packed,) = [one for one in self.packed if one.params is keywords["packed_seq_params"]]
        poison = logits.new_zeros(logits.shape[1]).index_fill(0, packed.index.padding_rows, value)
        return logits + poison[:, None]  # not replaced: gradients still flow through these rows


def with_logits(
    logits: Tensor, labels: Tensor, temperature: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    from impl.logprobs import logprobs_and_entropy

    return {"logits": logits, **logprobs_and_entropy(logits, labels, temperature=temperature)}


def pack_seen(samples: tuple[int, ...], packed: PackedRow) -> Pack:
    return Pack(
        samples=samples,
        cp_ranks=tuple(dist.get_process_group_ranks(packed.cp_group)),
        tokens=packed.tensors["input_ids"],
        position_ids=packed.position_ids,
        labels=packed.tensors["labels"],
        cu_seqlens_padded=packed.index.cu_seqlens_padded,
    )
