"""Lengths → the plan of a step, by the scheduler that the settings name."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial

from .balance import balanced_plan
from .config import DynamicCPConfig
from .plan import GroupPlan, MicroBatchPlan, Plan
from .schedule import choose_local_cp_size, split_samples
from .validate import validate


def make_plan(
    seqlens: Sequence[int],
    *,
    config: DynamicCPConfig,
    world_size: int,
    tp_size: int = 1,
    barriered: bool = True,
) -> Plan:
    """Plan a step, the same on every rank that is given the same lengths and settings.

    Args:
        seqlens: tokens of each sample of the batch.
        world_size: DP×CP ranks. tp_size: multiplies the alignment, see `impl.layout.alignment`.
        barriered: every micro-batch covers all ranks, as layers or pipelines need in which all of
            them meet. A "uniform" plan does so anyway.
    Returns:
        a plan that has passed `impl.validate`.
    Raises:
        ValueError: nothing to plan, no CP size within bounds, or a sample that fits none.
        UnsupportedMegatron: the installed Megatron has no scheduler, or its plan cannot be run.

    >>> config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=56, scheduler="balanced")
    >>> plan = make_plan([16, 16, 16, 32, 224], config=config, world_size=4)
    >>> [[(group.cp_size, group.samples) for group in one.groups] for one in plan.micro_batches]
    [[(4, (4,))], [(2, (0, 3)), (1, (1,)), (1, (2,))]]
    """
    lengths = tuple(operator.index(seqlen) for seqlen in seqlens)
    if config.scheduler == "uniform":
        plan = uniform_plan(lengths, config=config, world_size=world_size)
    elif config.scheduler == "balanced":
        plan = balanced_plan(
            lengths, config=config, world_size=world_size, tp_size=tp_size, barriered=barriered
        )
    else:
        from .megatron.scheduler import megatron_plan  # the only one that needs Megatron

        return megatron_plan(  # which validates, to say whose fault it is
            lengths, config=config, world_size=world_size, tp_size=tp_size, barriered=barriered
        )
    validate(plan, config=config, tp_size=tp_size)
    return plan


def uniform_plan(seqlens: Sequence[int], *, config: DynamicCPConfig, world_size: int) -> Plan:
    """Micro-batches of `micro_batch_samples`, one CP size in each.

    It is the smallest at which the longest sample keeps to the limit. With fewer samples than
    groups, groups are without samples, as in verl.
    """
    choose = partial(
        choose_local_cp_size,
        world_size=world_size,
        max_seqlen_per_dp_cp_rank=config.max_seqlen_per_dp_cp_rank,
        min_cp_size=config.min_cp_size,
        max_cp_size=config.highest_cp_size,
    )
    choose(seqlens)  # refuses by index into the whole batch
    each = config.micro_batch_samples or len(seqlens)
    micro_batches = []
    for first in range(0, len(seqlens), each):
        lengths = seqlens[first : first + each]
        cp_size = choose(lengths)
        groups = split_samples(lengths, world_size=world_size, cp_size=cp_size)
        micro_batches.append(
            MicroBatchPlan(
                tuple(
                    GroupPlan(
                        ranks=tuple(range(index * cp_size, (index + 1) * cp_size)),
                        samples=tuple(first + sample for sample in samples),
                    )
                    for index, samples in enumerate(groups)
                )
            )
        )
    return Plan(
        world_size=world_size,
        seqlens=tuple(seqlens),
        micro_batches=tuple(micro_batches),
        scheduler="uniform",
        barriered=True,
    )
