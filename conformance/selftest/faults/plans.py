"""Faults of schedulers: samples lost or run twice, packs above the cap, ranks out of step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytest import MonkeyPatch

from impl.plan import GroupPlan, MicroBatchPlan, Plan

from .fault import fault, wrap

_MAKE_PLAN = "impl.state.make_plan"


@fault(
    "meta-pytorch/data#788",
    case="lens7_5-2ranks-cpbalanced6",
    says={"layout": "pack 0 of rank 0: 8 rows are above the limit of 6"},
)
def cap_without_padding(patch: MonkeyPatch) -> None:
    """Samples are weighed as they are, and are longer once they are padded for their CP size."""
    wrap(patch, "impl.balance.weigh_samples", _as_they_are)
    patch.setattr("impl.planner.validate", _nothing)


def _as_they_are(original: Any, seqlens: Any, **kwargs: Any) -> Any:
    samples = original(seqlens, **kwargs)
    tokens = np.broadcast_to(np.array(seqlens, dtype=np.int64), samples.tokens.shape)
    return replace(samples, tokens=tokens)


def _nothing(*_: Any, **__: Any) -> None: ...


@fault(
    "Megatron-LM 9257c7b4d8, samples lost",
    case="lens5_9_7-2ranks-cpbalanced16",
    says={"layout": "samples [2] are in no pack of ranks [0, 1]", "gradients": "times the truth"},
)
def sample_lost(patch: MonkeyPatch) -> None:
    """The last sample is in no group, and nobody counts them."""
    _replan(patch, _without_the_last)


@fault(
    "Megatron-LM#2000, one list object shared by all slots",
    case="lens5_9_7-2ranks-cpbalanced16",
    says={"layout": "sample 0 was run by ranks [0] as well", "loss": "expected"},
)
def sample_run_twice(patch: MonkeyPatch) -> None:
    """Two micro-batches hold the same samples; gradients are averaged, so only the loss shows."""
    _replan(patch, _last_micro_batch_again)


def _replan(patch: MonkeyPatch, change: Any) -> None:
    """Change every plan after it was checked, and put up with it."""
    wrap(patch, _MAKE_PLAN, lambda original, *args, **kwargs: change(original(*args, **kwargs)))
    patch.setattr("impl.engine.check_runnable", _nothing)
    wrap(patch, "impl.merge.merge_slots", _any_slots)


def _without_the_last(plan: Plan) -> Plan:
    last = len(plan.seqlens) - 1
    kept = tuple(
        MicroBatchPlan(
            tuple(
                replace(group, samples=tuple(one for one in group.samples if one != last))
                for group in micro_batch.groups
            )
        )
        for micro_batch in plan.micro_batches
    )
    return replace(plan, micro_batches=kept)


def _last_micro_batch_again(plan: Plan) -> Plan:
    return replace(plan, micro_batches=(*plan.micro_batches, plan.micro_batches[-1]))


def _any_slots(original: Any, plan: Plan) -> tuple[torch.Tensor, int]:
    """What no rank sends has an arbitrary place, which must be one that exists."""
    slots, rows = original(plan)
    return slots.clamp(0, rows * plan.world_size - 1), rows


@fault(
    "verl#5591",
    case="lens9_9_9-4ranks-cpbalanced10-pp2",
    says={"layout": "micro-batches, but meet in each of them"},
)
def ranks_count_their_own_micro_batches(patch: MonkeyPatch) -> None:
    """A rank has as many micro-batches as it happens to need; its pipeline knows no others."""
    wrap(patch, _MAKE_PLAN, _samples_in_turn)
    patch.setattr("impl.engine.Engine._check_plan", _nothing)


def _samples_in_turn(original: Any, *args: Any, **kwargs: Any) -> Plan:
    plan: Plan = original(*args, **kwargs)
    samples, world_size = range(len(plan.seqlens)), plan.world_size
    turns = [samples[start : start + world_size] for start in samples[::world_size]]
    alone = tuple(
        MicroBatchPlan(tuple(GroupPlan((rank,), (one,)) for rank, one in enumerate(turn)))
        for turn in turns
    )
    return replace(plan, micro_batches=alone, barriered=False)


@fault(
    "verl#6786",
    case="lens3_5_7_9-3ranks-cpuniform16",
    says={
        "layout": "micro-batch 0: ranks [2] have no sample, though there are 4 for 3 groups",
    },
)
def last_group_gets_nothing(patch: MonkeyPatch) -> None:
    """Each group takes its share of the samples, rounded up, so the last one may find none."""
    patch.setattr("impl.planner.split_samples", _shares_in_a_row)


def _shares_in_a_row(seqlens: Sequence[int], *, world_size: int, cp_size: int) -> list[list[int]]:
    num_groups = world_size // cp_size
    share = -(-len(seqlens) // num_groups)
    samples = list(range(len(seqlens)))
    return [samples[group * share : (group + 1) * share] for group in range(num_groups)]


@fault(
    "Megatron-LM#5154, ranks without work",
    case="lens5_9_7-2ranks-cpbalanced32",
    says={"layout": "ranks [1] have no sample in any pack"},
)
def balanced_leaves_a_rank_idle(patch: MonkeyPatch) -> None:
    """All samples fit on the first rank, and the others run padding; every number is right."""
    wrap(patch, _MAKE_PLAN, lambda original, *args, **how: _on_rank_0(original(*args, **how)))


def _on_rank_0(plan: Plan) -> Plan:
    everything = GroupPlan((0,), tuple(range(len(plan.seqlens))))
    idle = (GroupPlan((rank,), ()) for rank in range(1, plan.world_size))
    return replace(plan, micro_batches=(MicroBatchPlan((everything, *idle)),))
