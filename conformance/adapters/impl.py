"""The production implementation behind the suite's protocol.

Uniform micro-batches go by the functions that a trainer calls one by one; all else, with its other
parallel dimensions and mixed CP sizes, by the engine (`conformance.adapters.impl_engine`).
`conformance.adapters.stock` runs the same functions without the binding, to show what a Megatron
does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pack import jagged

from ..protocol import MicroBatch, Outputs, Pack, Plan, RankContext, Task
from . import impl_engine
from .impl_binding import BoundGroups, interrupt
from .impl_index import index
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
    from impl.groups import CPGroups
    from impl.split import SubBatch
    from impl.thd import PackedRow

    Spelling = Callable[[PackedRow], None]

__all__ = ["NAME", "PRELOAD", "SUPPORTS", "WATCH", "index", "open_rank", "versions"]

NAME = "impl"
SUPPORTS = impl_engine.SUPPORTS


class Rank:
    """One rank: Megatron's model-parallel state and the CP groups live as long as it does."""

    binds = True

    def __init__(self, context: RankContext) -> None:
        self.resources = ExitStack()
        self.groups = self.enter(context)

    def enter(self, context: RankContext) -> CPGroups:
        self.state = self.resources.enter_context(impl_engine.parallel_state(context))
        return self.state.groups

    def close(self) -> None:
        self.resources.close()

    def run(self, task: Task) -> tuple[Outputs, ...]:
        if task.needs - {"interrupted"}:
            return impl_engine.run(task, self.state)
        from impl.megatron.cpu import cpu_mode

        subs = [self.split(task, plan) for plan in task.plans]  # refuses before any collective
        with cpu_mode():
            run = _ModelRun(task, self.groups, binds=self.binds, spell=self.spell)
            return tuple(run.passes(subs))

    def spell(self, packed: PackedRow) -> None:
        """Last touch to the packed parameters; ours need none."""

    def split(self, task: Task, plan: Plan) -> list[SubBatch]:
        return [split_micro_batch(task, micro_batch, self.groups) for micro_batch in plan]


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


def split_micro_batch(task: Task, micro_batch: MicroBatch, groups: CPGroups) -> SubBatch:
    """This rank's part of a micro-batch, at the CP size that the suite asks for.

    A limit is set at which the rule itself must choose that size; where none can (a longest
    sequence of one token does not need CP 4), the size is pinned.
    """
    from impl.config import DynamicCPConfig
    from impl.schedule import cp_sizes
    from impl.split import dynamic_cp_split_batch

    size = micro_batch.cp_size
    longest = max((task.batch.seqlens[sample] for sample in micro_batch.samples), default=1)
    limit = max(-(-longest // size), 1)
    sizes = cp_sizes(groups.world_size)
    rule_decides = size in sizes and all(longest > fits * limit for fits in sizes if fits < size)
    config = DynamicCPConfig(
        max_seqlen_per_dp_cp_rank=limit,
        min_cp_size=1 if rule_decides else size,
        max_cp_size=None if rule_decides else size,
    )
    batch = jagged_batch(task.batch, micro_batch.samples)
    return dynamic_cp_split_batch(batch, config=config, groups=groups)


class _ModelRun:
    """One model through the passes of one task."""

    def __init__(self, task: Task, groups: CPGroups, *, binds: bool, spell: Spelling) -> None:
        from impl.loss import prediction_weights
        from impl.megatron.bind import bind_packed_cp_group
        from impl.megatron.model import build_gpt_model
        from impl.megatron.weights import load_hf_weights

        self.config = gpt_config(task)
        self.task, self.groups, self.spell = task, groups, spell
        self.model = build_gpt_model(self.config, max_seqlen=max(task.batch.seqlens))
        load_hf_weights(self.model, task.weights, self.config)
        if binds:
            bind_packed_cp_group(self.model)
        self.bound = BoundGroups([self.model])
        self.packed: PackedRow | None = None
        self.model.register_forward_hook(self.poison_padding)
        mask = jagged(torch.cat(task.batch.loss_mask), task.batch.seqlens)
        weights = prediction_weights(mask, aggregation=task.loss.aggregation)
        self.weights = weights.split(list(task.batch.seqlens))

    def passes(self, subs: Sequence[list[SubBatch]]) -> Iterator[Outputs]:
        for number, (plan, parts) in enumerate(zip(self.task.plans, subs, strict=True)):
            if number and self.task.interrupted:
                interrupt([self.model], partial(self.one_pass, plan, parts))
                self.bound.check("an exception inside a layer")
            yield self.one_pass(plan, parts)

    def one_pass(self, plan: Plan, subs: Sequence[SubBatch]) -> Outputs:
        from impl.megatron.weights import hf_gradients

        self.model.zero_grad()
        outputs: dict[str, dict[int, Tensor]] = {"logits": {}, "logprobs": {}, "entropy": {}}
        loss = torch.zeros((), dtype=torch.float64)
        packs = []
        for micro_batch, sub in zip(plan, subs, strict=True):
            merged = self.forward(sub)
            packs.append(self.pack_seen(micro_batch, sub))
            part = self.loss(merged, micro_batch)
            part.backward()
            loss += part.detach()
            for name, output in merged.items():
                outputs[name].update(
                    zip(micro_batch.samples, output.detach().unbind(), strict=True)
                )
        self.bound.check("its micro-batch")
        order = range(len(self.task.batch.input_ids))
        whole = {name: tuple(found[sample] for sample in order) for name, found in outputs.items()}
        return Outputs(
            logits=whole["logits"],
            logprobs=whole["logprobs"],
            entropy=whole["entropy"],
            loss=loss,
            gradients=self.summed(hf_gradients(self.model, self.config)),
            packs=tuple(packs),
        )

    def forward(self, sub: SubBatch) -> dict[str, Tensor]:
        from impl.forward import gptmodel_forward_model_engine
        from impl.logprobs import logprobs_and_entropy
        from impl.merge import dynamic_cp_merge_output

        def with_logits(
            logits: Tensor, labels: Tensor, temperature: Tensor, probe: Tensor
        ) -> dict[str, Tensor]:
            return {
                "logits": logits,
                "probe": probe,
                **logprobs_and_entropy(logits, labels, temperature=temperature),
            }

        self.groups.check_same_plan(sub.plan, sub.rules)
        outputs = gptmodel_forward_model_engine(
            self.model,
            sub,
            logits_processor=with_logits,
            fill={
                "input_ids": self.task.padding.token_id,
                "temperature": self.task.padding.side_value,
                "probe": self.task.padding.side_value,
            },
            on_pack=self.keep_packed,
        )
        check_probe(outputs.pop("probe"), sub.tensors)
        return dynamic_cp_merge_output(outputs, sub, groups=self.groups)

    def loss(self, merged: dict[str, Tensor], micro_batch: MicroBatch) -> Tensor:
        weights = torch.cat([self.weights[sample] for sample in micro_batch.samples])
        logprobs, entropy = merged["logprobs"].values(), merged["entropy"].values()
        return weighted_loss(self.task, logprobs, entropy, weights)

    def keep_packed(self, packed: PackedRow) -> None:
        self.spell(packed)
        self.packed = packed

    def poison_padding(self, model: object, inputs: object, logits: Tensor) -> Tensor:
        assert self.packed is not None
        return poisoned(logits, self.packed, self.task.padding)

    def pack_seen(self, micro_batch: MicroBatch, sub: SubBatch) -> Pack:
        assert self.packed is not None
        (mine,) = sub.plan.for_rank(self.groups.dp_cp_rank)
        samples = tuple(micro_batch.samples[place] for place in mine.samples)
        return pack_seen(samples, self.packed)

    def summed(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients added up over all ranks, in one collective."""
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        dist.all_reduce(flat, group=self.groups.dp_cp_group)
        parts = flat.split([gradient.numel() for gradient in gradients.values()])
        return {
            name: part.view_as(gradient)
            for (name, gradient), part in zip(gradients.items(), parts, strict=True)
        }
