"""The production implementation as a trainer meets it: `impl.engine` on Megatron's own schedule.

`conformance.adapters.impl` runs uniform micro-batches one by one and adds up gradients itself.
Here the engine does all of that, on every parallel layout: Megatron's schedule, data parallelism
and finalising of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from impl.pack import jagged
from impl.plan import GroupPlan, MicroBatchPlan
from impl.plan import Plan as StepPlan
from impl.schedule import deal_samples, split_samples

from ..protocol import MicroBatch, Outputs, Plan, RankContext, Schedule, Task, Unsupported
from .impl_binding import BoundGroups, interrupt
from .impl_translate import (
    PRELOAD,
    WATCH,
    check_probe,
    gpt_config,
    jagged_batch,
    pack_seen,
    poisoned,
    versions,
    weighted_loss,
)

if TYPE_CHECKING:
    from impl.state import ParallelState
    from impl.thd import PackedRow

__all__ = [
    "NAME",
    "PRELOAD",
    "SUPPORTS",
    "WATCH",
    "open_rank",
    "parallel_state",
    "versions",
]

NAME = "impl_engine"
NO_LIMIT = 1 << 30  # tokens a rank, where the suite plans
SUPPORTS = ("mixed", "schedulers", "parallel", "interrupted")


class Rank:
    """One rank: Megatron's model-parallel state lives as long as it does, an engine for a task."""

    def __init__(self, context: RankContext) -> None:
        self.resources = ExitStack()
        self.state = self.resources.enter_context(parallel_state(context))

    def close(self) -> None:
        self.resources.close()

    def run(self, task: Task) -> tuple[Outputs, ...]:
        return run(task, self.state)


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


@contextmanager
def parallel_state(context: RankContext) -> Iterator[ParallelState]:
    """The layout of a rank; settings of dynamic CP come with the tasks.

    Raises:
        Unsupported: this Megatron lacks something.
    """
    from impl.config import DynamicCPConfig
    from impl.megatron.probe import UnsupportedMegatron
    from impl.parallel import ParallelLayout
    from impl.state import open_parallel_state

    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=NO_LIMIT)
    sizes = asdict(context.parallel)
    if sizes.pop("ep_size") > 1:
        raise Unsupported("expert parallelism is not built yet")
    layout = ParallelLayout(**sizes)
    timeout = timedelta(seconds=context.timeout_s)
    with ExitStack() as resources:
        try:
            state = resources.enter_context(open_parallel_state(config, layout, timeout=timeout))
        except UnsupportedMegatron as error:
            raise Unsupported(str(error)) from error
        yield state


def run(task: Task, state: ParallelState) -> tuple[Outputs, ...]:
    """Every pass of a task on one engine."""
    plans = [step_plan(task, step, state) for step in task.passes]  # refuses before a collective
    return tuple(_EngineRun(task, state).passes(plans))


def step_plan(task: Task, step: Plan | Schedule, state: ParallelState) -> StepPlan:
    """The plan of a pass, before any collective.

    Raises:
        ValueError: a micro-batch without samples, a CP size that cannot be had, or a sample that
            does not fit.
        Unsupported: the installed Megatron cannot plan it.
    """
    if isinstance(step, Schedule):
        return _scheduled(task, step, state)
    return StepPlan(
        world_size=state.groups.world_size,
        seqlens=task.batch.seqlens,
        micro_batches=tuple(_micro_batch(task, each, state) for each in step),
        scheduler="by hand",
        barriered=True,
    )


def _scheduled(task: Task, step: Schedule, state: ParallelState) -> StepPlan:
    from impl.config import DynamicCPConfig
    from impl.megatron.probe import UnsupportedMegatron

    config = DynamicCPConfig(**asdict(step))
    try:
        return replace(state, config=config).plan(task.batch.seqlens)
    except UnsupportedMegatron as error:
        raise Unsupported(str(error)) from error


def _micro_batch(task: Task, micro_batch: MicroBatch, state: ParallelState) -> MicroBatchPlan:
    seqlens = [task.batch.seqlens[one] for one in micro_batch.samples]
    sizes, world_size = micro_batch.cp_sizes, state.groups.world_size
    if len(set(sizes)) == 1:
        held = split_samples(seqlens, world_size=world_size, cp_size=sizes[0])
    else:
        held = deal_samples(seqlens, cp_sizes=sizes)
    blocks = starmap(range, pairwise(accumulate(sizes, initial=0)))
    return MicroBatchPlan(
        tuple(
            GroupPlan(tuple(block), tuple(micro_batch.samples[each] for each in mine))
            for block, mine in zip(blocks, held, strict=True)
        )
    )


class _EngineRun:
    """One engine through the passes of one task."""

    def __init__(self, task: Task, state: ParallelState) -> None:
        from impl.engine import Engine
        from impl.loss import prediction_weights

        seqlens = task.batch.seqlens
        self.task, self.tp_size = task, state.layout.tp_size
        self.packed: list[PackedRow] = []
        self.engine = Engine(state, model=gpt_config(task), weights=task.weights)
        self.bound = BoundGroups(self.engine.chunks)
        last = self.engine.chunks[-1].module
        if last.post_process:
            last.register_forward_hook(self.poison_padding, with_kwargs=True)
        mask = jagged(torch.cat(task.batch.loss_mask), seqlens)
        weights = prediction_weights(mask, aggregation=task.loss.aggregation)
        everything = range(len(seqlens))
        self.batch = {**jagged_batch(task.batch, everything), "weights": jagged(weights, seqlens)}

    def passes(self, plans: Sequence[StepPlan]) -> Iterator[Outputs]:
        for number, plan in enumerate(plans):
            if number and self.task.interrupted:
                interrupt(self.engine.chunks, partial(self.one_pass, plan))
                self.bound.check("an exception inside a layer")
            yield self.one_pass(plan)

    def one_pass(self, plan: StepPlan) -> Outputs:
        self.packed.clear()
        fill = self.task.padding
        result = self.engine.forward_backward_batch(
            self.batch,
            self.loss,
            logits_processor=partial(with_logits, self.tp_size),
            plan=plan,
            fill={
                "input_ids": fill.token_id,
                "temperature": fill.side_value,
                "probe": fill.side_value,
            },
            on_pack=self.packed.append,
        )
        self.bound.check("its step")
        mine = plan.for_rank(self.engine.groups.dp_cp_rank)
        samples = [group.samples for group in mine] + [()] * (len(self.packed) - len(mine))
        whole = {name: output.unbind() for name, output in result.outputs.items()}
        return Outputs(
            logits=whole.get("logits", ()),
            logprobs=whole.get("logprobs", ()),
            entropy=whole.get("entropy", ()),
            loss=result.loss,
            gradients=self.engine.gradients(),
            packs=tuple(map(pack_seen, samples, self.packed)),
        )

    def loss(
        self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        check_probe(outputs["probe"], inputs)
        logprobs, entropy = outputs["logprobs"].values(), outputs["entropy"].values()
        return weighted_loss(self.task, logprobs, entropy, inputs["weights"].values()), {}

    def poison_padding(
        self, model: object, inputs: object, keywords: Mapping[str, Any], logits: Tensor
    ) -> Tensor:
        (packed,) = [one for one in self.packed if one.params is keywords["packed_seq_params"]]
        return poisoned(logits, packed, self.task.padding)


def with_logits(
    tp_size: int,
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    weights: Tensor,
    probe: Tensor,
) -> dict[str, Tensor]:
    """What the suite looks at; logits are of the whole vocabulary, whoever holds which part."""
    from impl.collectives import all_gather
    from impl.logprobs import logprobs_and_entropy
    from impl.megatron import training
    from impl.vocab_parallel import vocab_parallel_logprobs_and_entropy

    if tp_size == 1:
        found = logprobs_and_entropy(logits, labels, temperature=temperature)
        return {"logits": logits, "probe": probe, **found}
    group = training.tensor_parallel_group()
    found = vocab_parallel_logprobs_and_entropy(
        logits, labels, temperature=temperature, tp_group=group
    )
    whole = all_gather(logits.detach().t(), group).t()
    return {"logits": whole, "probe": probe, **found}
