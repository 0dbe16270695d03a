"""The oracle behind the suite's protocol, and as an implementation under test: the control.

As an implementation every rank computes the whole batch by itself, so it must pass everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

import reference
from reference import groups, zigzag

from ..model_spec import same_fields
from ..protocol import (
    Batch,
    IndexImplementation,
    Loss,
    MicroBatch,
    ModelSpec,
    Outputs,
    Pack,
    Padding,
    Plan,
    RankContext,
    Schedule,
    Task,
)

NAME = "reference"
SUPPORTS = ("mixed", "schedulers", "parallel", "interrupted")
NO_LABEL = -100


def versions() -> dict[str, str]:
    """No Megatron is under test here."""
    return {"megatron": "none"}


class Index:
    """Split, pack and merge by definition."""

    def choose_local_cp_size(
        self, seqlens: Sequence[int], *, world_size: int, max_seqlen_per_dp_cp_rank: int
    ) -> int:
        return groups.choose_local_cp_size(
            seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank
        )

    def split(self, seqlens: Sequence[int], *, world_size: int, cp_size: int) -> list[list[int]]:
        return groups.split(seqlens, world_size=world_size, cp_size=cp_size)

    def pack(
        self,
        sequences: Sequence[Tensor],
        *,
        cp_size: int,
        cp_rank: int,
        tp_size: int,
        pad_value: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        seqlens = [len(sequence) for sequence in sequences]
        rows = zigzag.packed_tokens(
            sequences, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size, pad_value=pad_value
        )
        positions = zigzag.packed_positions(
            seqlens, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size
        )
        return rows, positions, _boundaries(seqlens, cp_size, tp_size)

    def unpack(
        self, shards: Sequence[Tensor], seqlens: Sequence[int], *, cp_size: int, tp_size: int
    ) -> list[Tensor]:
        return zigzag.unpack(shards, seqlens, cp_size=cp_size, tp_size=tp_size)

    def labels(self, sequence: Tensor) -> Tensor:
        return zigzag.next_token_labels(sequence, NO_LABEL)

    def merge(
        self, outputs: Sequence[Sequence[Tensor]], samples: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        by_sample = {
            sample: output
            for group, group_outputs in zip(samples, outputs, strict=True)
            for sample, output in zip(group, group_outputs, strict=True)
        }
        return [by_sample[sample] for sample in range(len(by_sample))]


index = Index()


class Oracle:
    """The truth, in one process."""

    index: IndexImplementation = index

    def random_weights(self, model: ModelSpec, *, seed: int) -> dict[str, Tensor]:
        return reference.random_weights(_config(model), seed=seed)

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
        result = reference.evaluate(
            _config(model),
            weights,
            reference.Batch(batch.input_ids, batch.loss_mask, batch.temperature),
            reference.Loss(loss.aggregation, loss.entropy_coeff),
            packs=packs,
            routing=routing,
        )
        return Outputs(
            logits=result.logits,
            logprobs=result.logprobs,
            entropy=result.entropy,
            loss=result.loss,
            gradients=result.gradients,
            auxiliary=result.auxiliary,
            mtp_logprobs=result.mtp_logprobs,
            routing=result.routing,
            expert_counts=_expert_counts(model, result.routing),
        )

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
        sequences = [batch.input_ids[sample] for sample in samples]
        layout = {"cp_size": len(cp_ranks), "cp_rank": cp_rank, "tp_size": tp_size}
        seqlens = [len(sequence) for sequence in sequences]
        labels = [zigzag.next_token_labels(sequence, NO_LABEL) for sequence in sequences]
        return Pack(
            samples=tuple(samples),
            cp_ranks=tuple(cp_ranks),
            tokens=zigzag.packed_tokens(sequences, **layout, pad_value=padding.token_id),
            position_ids=zigzag.packed_positions(seqlens, **layout),
            labels=zigzag.packed_tokens(labels, **layout, pad_value=NO_LABEL),
            cu_seqlens_padded=_boundaries(seqlens, len(cp_ranks), tp_size),
        )


oracle = Oracle()


class Rank:
    """The control: the oracle on every rank, packs included.

    Each pass starts from the weights, so one that was interrupted could leave nothing behind.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context

    def run(self, task: Task) -> tuple[Outputs, ...]:
        (self.line,) = (
            line
            for line in task.parallel.dp_cp_ranks(self.context.world_size)
            if self.context.rank in line
        )
        plans = [self.plan(task, step) for step in task.passes]
        split = [[self.split(task, each) for each in plan] for plan in plans]  # may refuse
        return tuple(self.one_pass(task, *each) for each in zip(plans, split, strict=True))

    def plan(self, task: Task, step: Plan | Schedule) -> Plan:
        """A step of its own: every sample by itself, on all ranks, but for "uniform"."""
        if not isinstance(step, Schedule):
            return step
        samples, world_size = range(len(task.batch.seqlens)), len(self.line)
        if step.scheduler != "uniform":
            return tuple(MicroBatch((sample,), (world_size,)) for sample in samples)
        cp_size = groups.choose_local_cp_size(
            task.batch.seqlens,
            world_size=world_size,
            max_seqlen_per_dp_cp_rank=step.max_seqlen_per_dp_cp_rank,
        )
        return (MicroBatch(tuple(samples), (cp_size,) * (world_size // cp_size)),)

    def split(self, task: Task, micro_batch: MicroBatch) -> list[list[int]]:
        """Per group, places among the samples of the micro-batch."""
        seqlens = [task.batch.seqlens[sample] for sample in micro_batch.samples]
        sizes, world_size = micro_batch.cp_sizes, len(self.line)
        if len(set(sizes)) == 1:
            _check_cp_size(sizes[0], world_size)
            return groups.split(seqlens, world_size=world_size, cp_size=sizes[0])
        places: list[list[int]] = [[] for _ in sizes]
        for place in range(len(seqlens)):
            places[place % len(sizes)].append(place)
        return places

    def one_pass(self, task: Task, plan: Plan, split: list[list[list[int]]]) -> Outputs:
        outputs = oracle.evaluate(task.model, task.weights, task.batch, task.loss)
        packs = (self.pack(task, *each) for each in zip(plan, split, strict=True))
        return Outputs(**{**vars(outputs), "packs": tuple(packs)})

    def pack(self, task: Task, micro_batch: MicroBatch, split: list[list[int]]) -> Pack:
        """What this rank would hand to a model."""
        place = self.line.index(self.context.rank)
        starts = list(accumulate(micro_batch.cp_sizes, initial=0))
        group = bisect_right(starts, place) - 1
        members = self.line[starts[group] : starts[group + 1]]
        tp_size = task.parallel.tp_size if task.parallel.sequence_parallel else 1
        samples = [micro_batch.samples[each] for each in split[group]]
        if not samples:
            return _pack_of_padding(members, task.padding.token_id, tp_size)
        return oracle.pack(
            task.batch,
            samples,
            cp_ranks=members,
            cp_rank=place - starts[group],
            padding=task.padding,
            tp_size=tp_size,
        )

    def close(self) -> None:
        """Nothing was opened."""


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


def _config(model: ModelSpec) -> reference.ModelConfig:
    parts = {"rope_scaling": reference.RopeScaling, "mla": reference.MLA, "moe": reference.MoE}
    return reference.ModelConfig(**same_fields(model, parts))


def _expert_counts(model: ModelSpec, routing: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tokens of every expert, layer by layer."""
    if model.moe is None:
        return ()
    by_layer = torch.cat(list(routing)).unbind(1)
    return tuple(
        torch.bincount(layer.flatten(), minlength=model.moe.num_experts) for layer in by_layer
    )


def _pack_of_padding(members: Sequence[int], token_id: int, tp_size: int) -> Pack:
    """What a group without samples runs: one sequence of the smallest size, all padding."""
    bounds = _boundaries([1], len(members), tp_size)
    rows = torch.arange(int(bounds[-1]) // len(members))
    tokens = torch.full_like(rows, token_id)
    return Pack((), tuple(members), tokens, rows, torch.full_like(rows, NO_LABEL), bounds)


def _check_cp_size(cp_size: int, world_size: int) -> None:
    """Only sizes that `choose_local_cp_size` can answer with have groups."""
    powers_of_two = [1 << k for k in range(world_size.bit_length())]
    if cp_size != world_size and (cp_size not in powers_of_two or world_size % cp_size):
        raise ValueError(
            f"cp_size={cp_size} is neither a power of two that divides world_size={world_size} "
            "nor the whole world"
        )


def _boundaries(seqlens: Sequence[int], cp_size: int, tp_size: int) -> Tensor:
    padded = [zigzag.padded_length(seqlen, cp_size=cp_size, tp_size=tp_size) for seqlen in seqlens]
    return torch.tensor([0, *padded]).cumsum(0).int()
