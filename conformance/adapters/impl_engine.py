"""The production implementation as a trainer meets it: `impl.engine` on Megatron's own schedule.

`conformance.adapters.impl` runs micro-batches one by one and adds up gradients itself. Here the
engine does all of that: Megatron's schedule, data parallelism and finalising of gradients.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pack import jagged
from impl.plan import GroupPlan, MicroBatchPlan
from impl.plan import Plan as StepPlan
from impl.schedule import split_samples

from ..protocol import MicroBatch, Outputs, Plan, RankContext, Task
from . import impl
from .impl_translate import gpt_config, pack_seen, poisoned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from impl.state import ParallelState
    from impl.thd import PackedRow

NAME = "impl_engine"
PRELOAD = (*impl.PRELOAD, "impl.engine")
WATCH = impl.WATCH
versions = impl.versions


class Rank:
    """One rank: Megatron's model-parallel state lives as long as it does, an engine for a task."""

    def __init__(self, context: RankContext) -> None:
        from impl.config import DynamicCPConfig
        from impl.state import open_parallel_state

        self.resources = ExitStack()
        config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=1)  # plans come with the tasks
        timeout = timedelta(seconds=context.timeout_s)
        self.state = self.resources.enter_context(open_parallel_state(config, timeout=timeout))

    def close(self) -> None:
        self.resources.close()

    def run(self, task: Task) -> tuple[Outputs, ...]:
        plans = [step_plan(task, plan, self.state.groups.world_size) for plan in task.passes]
        run = _EngineRun(task, self.state)
        return tuple(run.one_pass(plan) for plan in plans)


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


def step_plan(task: Task, plan: Plan, world_size: int) -> StepPlan:
    """The micro-batches that the suite asks for as one step, before any collective.

    Raises:
        ValueError: a micro-batch without samples, or a CP size that cannot be had.
    """
    return StepPlan(
        world_size=world_size,
        seqlens=task.batch.seqlens,
        micro_batches=tuple(_micro_batch(task, each, world_size) for each in plan),
        scheduler="uniform",
        barriered=True,
    )


def _micro_batch(task: Task, micro_batch: MicroBatch, world_size: int) -> MicroBatchPlan:
    seqlens, size = [task.batch.seqlens[one] for one in micro_batch.samples], micro_batch.cp_size
    places = split_samples(seqlens, world_size=world_size, cp_size=size)
    return MicroBatchPlan(
        tuple(
            GroupPlan(
                ranks=tuple(range(group * size, (group + 1) * size)),
                samples=tuple(micro_batch.samples[place] for place in mine),
            )
            for group, mine in enumerate(places)
        )
    )


class _EngineRun:
    """One engine through the passes of one task."""

    def __init__(self, task: Task, state: ParallelState) -> None:
        from impl.engine import Engine
        from impl.loss import prediction_weights

        seqlens = task.batch.seqlens
        self.task = task
        self.packed: list[PackedRow] = []
        self.engine = Engine(state, model=gpt_config(task), weights=task.weights)
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
        (packed,) = [one for one in self.packed if one.params is keywords["packed_seq_params"]]
        return poisoned(logits, packed, self.task.padding)


def with_logits(
    logits: Tensor, labels: Tensor, temperature: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    from impl.logprobs import logprobs_and_entropy

    return {"logits": logits, **logprobs_and_entropy(logits, labels, temperature=temperature)}
