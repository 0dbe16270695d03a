"""The production implementation behind the suite's protocol.

`conformance.adapters.stock` runs the same code without the binding, to show what a Megatron does
by itself.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pack import jagged

from ..protocol import Batch, MicroBatch, Outputs, Pack, Plan, RankContext, Task
from .impl_index import index
from .impl_translate import gpt_config, pack_seen, poisoned

if TYPE_CHECKING:
    from impl.groups import CPGroups
    from impl.split import SubBatch
    from impl.thd import PackedRow

    Spelling = Callable[[PackedRow], None]

__all__ = ["NAME", "PRELOAD", "WATCH", "index", "open_rank", "versions"]

NAME = "impl"
PRELOAD = (
    "impl.forward",
    "impl.merge",
    "impl.megatron.bind",
    "impl.megatron.model",
    "impl.megatron.parallel",
    "impl.megatron.weights",
)
WATCH = (
    "megatron.core.parallel_state",
    "megatron.core.packed_seq_params.PackedSeqParams",
    "megatron.core.transformer.attention.Attention",
    "megatron.core.transformer.attention.SelfAttention",
    "megatron.core.models.gpt.GPTModel",
)


def versions() -> dict[str, str]:
    """What is under test, found without importing it; the index logic needs no Megatron."""
    try:
        return {"megatron": importlib.metadata.version("megatron-core")}
    except importlib.metadata.PackageNotFoundError:
        return {"megatron": ""}


class Rank:
    """One rank: Megatron's model-parallel state and the CP groups live as long as it does."""

    binds = True

    def __init__(self, context: RankContext) -> None:
        from impl.groups import create_cp_groups, destroy_cp_groups

        self.resources = ExitStack()
        self.groups = create_cp_groups(
            [range(context.world_size)], timeout=timedelta(seconds=context.timeout_s)
        )
        self.resources.callback(destroy_cp_groups, self.groups)
        self.enter_megatron(context)

    def enter_megatron(self, context: RankContext) -> None:
        from impl.megatron.parallel import model_parallel

        self.resources.enter_context(model_parallel())

    def close(self) -> None:
        self.resources.close()

    def run(self, task: Task) -> tuple[Outputs, ...]:
        from impl.megatron.cpu import cpu_mode

        plans = [self.split(task, plan) for plan in task.passes]  # refuses before any collective
        with cpu_mode():
            run = _ModelRun(task, self.groups, binds=self.binds, spell=self.spell)
            return tuple(
                run.one_pass(plan, subs) for plan, subs in zip(task.passes, plans, strict=True)
            )

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
    batch = _jagged_batch(task.batch, micro_batch.samples)
    return dynamic_cp_split_batch(batch, config=config, groups=groups)


def _jagged_batch(batch: Batch, samples: Sequence[int]) -> dict[str, Tensor]:
    seqlens = tuple(batch.seqlens[sample] for sample in samples)
    ids = [batch.input_ids[sample] for sample in samples]
    temperature = torch.tensor(
        [batch.temperature[sample] for sample in samples], dtype=torch.float64
    )
    return {
        "input_ids": jagged(torch.cat([torch.empty(0, dtype=torch.int64), *ids]), seqlens),
        "temperature": jagged(
            temperature.repeat_interleave(torch.tensor(seqlens, dtype=torch.int64)), seqlens
        ),
        "probe": jagged(_probe(seqlens), seqlens),
    }


def _probe(seqlens: Sequence[int]) -> Tensor:
    """A side input that differs in every token: [tokens, 2], sequence and position."""
    places = [
        torch.stack([torch.full((seqlen,), sequence), torch.arange(seqlen)], 1)
        for sequence, seqlen in enumerate(seqlens)
    ]
    return torch.cat([torch.empty(0, 2, dtype=torch.float64), *places])


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
        self.built_with = self.bound_groups()
        self.packed: PackedRow | None = None
        self.model.register_forward_hook(self.poison_padding)
        mask = jagged(torch.cat(task.batch.loss_mask), task.batch.seqlens)
        weights = prediction_weights(mask, aggregation=task.loss.aggregation)
        self.weights = weights.split(list(task.batch.seqlens))

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
        if self.bound_groups() != self.built_with:
            raise RuntimeError("a CP group is still bound to the model after its micro-batch")
        order = range(len(self.task.batch.input_ids))
        return Outputs(
            **{name: tuple(found[sample] for sample in order) for name, found in outputs.items()},
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

        self.groups.check_same_plan(sub.plan.hash)
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
        probe, expected = outputs.pop("probe").values(), sub["probe"].values()
        if not torch.equal(probe, expected):
            token = int((probe != expected).any(1).nonzero()[0])
            raise RuntimeError(
                f"side inputs are not where their tokens are: token {token} of the CP group has "
                f"those of {probe[token].tolist()}, not {expected[token].tolist()} (sequence, "
                "position)"
            )
        return dynamic_cp_merge_output(outputs, sub, groups=self.groups)

    def bound_groups(self) -> list[object]:
        """The CP group that each module of the model holds by itself."""
        modules = (getattr(module, "pg_collection", None) for module in self.model.modules())
        return [getattr(groups, "cp", None) for groups in modules]

    def loss(self, merged: dict[str, Tensor], micro_batch: MicroBatch) -> Tensor:
        from impl.loss import weighted_sum

        entropy = self.task.loss.entropy_coeff * merged["entropy"].values()
        weights = torch.cat([self.weights[sample] for sample in micro_batch.samples])
        return weighted_sum(-merged["logprobs"].values() - entropy, weights)

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
