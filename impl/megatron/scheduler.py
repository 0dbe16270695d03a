"""The `megatron` scheduler: the installed Megatron-Core's own placement of samples, as a plan.

Its `BalancedCPScheduler` gives rounds, between which all ranks meet; in each, every rank has a
queue of samples. Each sample is a forward pass of its own, on the ranks that have it in their
queues, and queues can differ in length. So the k-th samples of all queues become a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import DynamicCPConfig
from ..layout import alignment
from ..plan import GroupPlan, MicroBatchPlan, Plan
from ..schedule import check_seqlens
from ..validate import validate
from .probe import UnsupportedMegatron, features

Round = list[list[int]]
"""Sample ids of every rank, in the order in which it runs them."""


def megatron_plan(
    seqlens: Sequence[int],
    *,
    config: DynamicCPConfig,
    world_size: int,
    tp_size: int = 1,
    barriered: bool = True,
) -> Plan:
    """What the installed Megatron plans for these lengths.

    Args:
        barriered: ranks whose queue ends before others' get packs of padding only. If not, they
            go on to the next round.
    Raises:
        ValueError: nothing to plan, a sample that no group of a power of two ranks can hold, or
            bounds on the CP size, which it does not know.
        UnsupportedMegatron: there is no scheduler, it fails on these lengths, or its plan cannot
            be run: for worlds that are no power of two, and rarely from 8 ranks on.
    """
    check_seqlens(seqlens)
    _check_bounds(config)
    padded = [
        _padded(index, seqlen, config=config, world_size=world_size, tp_size=tp_size)
        for index, seqlen in enumerate(seqlens)
    ]
    rounds = _schedule(padded, limit=config.max_seqlen_per_dp_cp_rank, world_size=world_size)
    plan = Plan(
        world_size=world_size,
        seqlens=tuple(seqlens),
        micro_batches=tuple(
            micro_batch for one in rounds for micro_batch in _passes(one, barriered=barriered)
        ),
        scheduler="megatron",
        barriered=barriered,
    )
    try:
        validate(plan, config=config, tp_size=tp_size)
    except ValueError as error:
        raise _unsupported(f"gives a plan that cannot be run: {error}") from error
    return plan


def _check_bounds(config: DynamicCPConfig) -> None:
    if config.min_cp_size != 1 or config.highest_cp_size is not None:
        raise ValueError(
            f"scheduler='megatron' knows no bounds on the CP size, and was given "
            f"min_cp_size={config.min_cp_size}, max_cp_size={config.highest_cp_size}; leave them "
            "and dynamic_context_parallel at their defaults, or use scheduler='balanced'"
        )


def _padded(
    index: int, seqlen: int, *, config: DynamicCPConfig, world_size: int, tp_size: int
) -> int:
    """Length by which Megatron gives a sample the narrowest group on which the cap holds."""
    limit, rules, cp_size = config.max_seqlen_per_dp_cp_rank, config.rules, 1
    while cp_size <= world_size:
        unit = alignment(cp_size=cp_size, tp_size=tp_size, rules=rules)
        padded = -(-seqlen // unit) * unit
        if padded <= cp_size * rules.rows_within(limit, cp_size=cp_size, tp_size=tp_size):
            return max(padded, cp_size // 2 * limit + 1)  # too long for any narrower group
        cp_size *= 2
    raise ValueError(
        f"sequence {index} has {seqlen} tokens, which no group of a power of two ranks fits: "
        f"max_seqlen_per_dp_cp_rank={limit}{rules.asked}, padding included, on {world_size} "
        "DP×CP ranks; shorten it, raise the limit or use more ranks"
    )


@dataclass(frozen=True)
class _World:
    """All that Megatron's scheduler asks of a process group."""

    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


def _schedule(seqlens: Sequence[int], *, limit: int, world_size: int) -> list[Round]:
    scheduler = _scheduler_class()(limit, _World(world_size))
    try:
        _, rounds = scheduler.get_groups_and_subsamples(list(enumerate(seqlens)), None)
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        words = f"{type(error).__name__}: {error}"
        raise _unsupported(f"fails on these lengths for {world_size} ranks: {words}") from error
    return list(rounds)


def _scheduler_class() -> Any:
    try:
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        raise UnsupportedMegatron(
            f"megatron-core {features().version} has no BalancedCPScheduler; 0.16.0 to 0.19.2 do, "
            "and scheduler='balanced' needs none"
        ) from error
    return BalancedCPScheduler


def _passes(queues: Round, *, barriered: bool) -> Iterator[MicroBatchPlan]:
    """The k-th samples of all queues, for every k."""
    for index in range(max(map(len, queues))):
        now = [queue[index] if index < len(queue) else None for queue in queues]
        groups = [
            GroupPlan(tuple(rank for rank, other in enumerate(now) if other == sample), (sample,))
            for sample in dict.fromkeys(now)
            if sample is not None
        ]
        if barriered:
            groups += [GroupPlan((rank,), ()) for rank, sample in enumerate(now) if sample is None]
        yield MicroBatchPlan(tuple(sorted(groups, key=lambda group: group.ranks)))


def _unsupported(what: str) -> UnsupportedMegatron:
    return UnsupportedMegatron(
        f"megatron-core {features().version}: BalancedCPScheduler {what}; use scheduler='balanced'"
    )
