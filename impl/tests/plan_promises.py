"""What a plan promises, counted anew without `impl.validate`, and batches to plan."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from impl.config import DynamicCPConfig
from impl.layout import pack_layout
from impl.merge import merge_slots, share_of
from impl.plan import GroupPlan, Plan
from impl.planner import make_plan

WORLDS = st.integers(1, 16)
POWERS = st.sampled_from([1, 2, 4, 8, 16])


@dataclass(frozen=True)
class Step:
    seqlens: tuple[int, ...]
    config: DynamicCPConfig
    world_size: int
    tp_size: int = 1

    def plan(self, *, barriered: bool) -> Plan:
        return make_plan(
            self.seqlens,
            config=self.config,
            world_size=self.world_size,
            tp_size=self.tp_size,
            barriered=barriered,
        )

    def rows(self, samples: Sequence[int], *, cp_size: int) -> int:
        """Rows that a rank really holds of some samples as one pack."""
        seqlens = tuple(self.seqlens[sample] for sample in samples)
        rules = self.config.rules
        layout = pack_layout(seqlens, cp_size=cp_size, tp_size=self.tp_size, rules=rules)
        return layout.tokens.shape[1]


@st.composite
def steps(draw: Any, scheduler: str, *, worlds: Any = WORLDS) -> Step:
    """Batches that the scheduler can plan, a few long samples among short ones."""
    world_size, tp_size = draw(worlds), draw(st.sampled_from([1, 2, 3]))
    every = _sizes(scheduler, world_size)
    lowest, highest, dynamic = 1, None, True
    if scheduler != "megatron" and draw(st.booleans()):
        narrowest = draw(st.sampled_from([size for size in every if world_size % size == 0]))
        below = max((size for size in every if size < narrowest), default=0)
        dynamic = draw(st.booleans())
        lowest = draw(st.integers(below + 1, narrowest)) if dynamic else narrowest
        highest = draw(st.none() | st.integers(narrowest, world_size))
    sizes = (
        [size for size in every if lowest <= size <= (highest or size)] if dynamic else [lowest]
    )

    layout = draw(st.sampled_from(["zigzag", "contiguous"]))
    sequence_multiple = draw(st.sampled_from([1, 1, 2, 3]))
    pack_multiple = draw(st.sampled_from([1, 1, 4, 5]))
    chunks = 2 if layout == "zigzag" and max(sizes) > 1 else 1
    unit = math.lcm(chunks * tp_size, sequence_multiple, pack_multiple)
    cap = draw(st.integers(unit, unit + 60))
    buckets = []
    if draw(st.booleans()):
        units = [draw(st.integers(1, cap // unit))]
        units += draw(st.lists(st.integers(1, 3 * cap // unit), max_size=3))
        buckets = [unit * each for each in units]
    most = max((rows for rows in buckets if rows <= cap), default=cap // unit * unit)

    longest = max(sizes) * (cap if scheduler == "uniform" else most)
    shortest = draw(st.sampled_from([1, min(longest, cap)]))
    long, short = st.integers(1, longest), st.integers(1, shortest)
    seqlens = draw(st.lists(long, max_size=3))
    seqlens += draw(st.lists(short, min_size=0 if seqlens else 1, max_size=25))
    max_sequences = draw(st.none() | st.integers(1, 6))
    micro_batch_samples = None
    if scheduler == "uniform":  # which keeps to these only if they are wide enough
        max_sequences = max_sequences and max_sequences + len(seqlens)
        buckets += [unit * (sum(seqlens) // unit + 1 + len(seqlens))] if buckets else []
        micro_batch_samples = draw(st.none() | st.integers(1, 8))
    config = DynamicCPConfig(
        max_seqlen_per_dp_cp_rank=cap,
        dynamic_context_parallel=dynamic,
        scheduler=scheduler,
        micro_batch_samples=micro_batch_samples,
        min_cp_size=lowest,
        max_cp_size=highest,
        layout=layout,
        sequence_multiple=sequence_multiple,
        pack_multiple=pack_multiple,
        pack_buckets=tuple(sorted(set(buckets))),
        max_sequences=max_sequences,
    )
    return Step(tuple(draw(st.permutations(seqlens))), config, world_size, tp_size)


def _sizes(scheduler: str, world_size: int) -> list[int]:
    powers = [2**power for power in range(5) if 2**power < world_size]
    if scheduler == "uniform":
        powers = [size for size in powers if world_size % size == 0]
    return [*powers, world_size]


def groups_of(plan: Plan) -> list[GroupPlan]:
    return [group for one in plan.micro_batches for group in one.groups]


def runs_every_sample_once(step: Step, plan: Plan) -> None:
    times = Counter(sample for group in groups_of(plan) for sample in group.samples)
    assert times == Counter(range(len(step.seqlens)))


def merges_into_input_order(step: Step, plan: Plan, *, ran: Plan | None = None) -> None:
    """By the slots of the merge, from what each rank sends of the samples that it ran."""
    tokens = torch.arange(sum(step.seqlens))
    sequences = tokens.split(list(step.seqlens))
    slots, rows = merge_slots(plan)
    gathered = torch.full((plan.world_size, rows), -1)
    for rank in range(plan.world_size):
        shares = [
            share_of(
                torch.cat([tokens[:0], *(sequences[sample] for sample in group.samples)]),
                cp_size=group.cp_size,
                cp_rank=group.ranks.index(rank),
            )
            for group in (ran or plan).for_rank(rank)
        ]
        sent = torch.cat([tokens[:0], *shares])
        gathered[rank, : len(sent)] = sent
    assert gathered.flatten()[slots].tolist() == tokens.tolist()


def keeps_packs_to_the_limits(step: Step, plan: Plan) -> None:
    """Rows are counted in the layout that the packs are really cut by."""
    config = step.config
    for group in groups_of(plan):
        rows = step.rows(group.samples, cp_size=group.cp_size)
        assert rows in config.pack_buckets or not config.pack_buckets
        assert rows % config.pack_multiple == 0
        assert len(group.samples) <= (config.max_sequences or len(step.seqlens))
        if plan.scheduler == "uniform":
            rows = max((step.seqlens[sample] for sample in group.samples), default=0)
            rows = math.ceil(rows / group.cp_size)
        assert rows <= config.max_seqlen_per_dp_cp_rank


def uses_blocks_within_bounds(step: Step, plan: Plan) -> None:
    lowest, highest = step.config.min_cp_size, step.config.max_cp_size or step.world_size
    if not step.config.dynamic_context_parallel:
        highest = lowest
    for group in groups_of(plan):
        first, size = group.ranks[0], len(group.ranks)
        assert group.ranks == tuple(range(first, first + size))
        assert group.ranks[-1] < step.world_size
        assert size == step.world_size or (size.bit_count() == 1 and first % size == 0)
        assert lowest <= size <= highest


def shares_no_rank_in_a_micro_batch(step: Step, plan: Plan) -> None:
    for micro_batch in plan.micro_batches:
        ranks = Counter(rank for group in micro_batch.groups for rank in group.ranks)
        assert set(ranks.values()) == {1}
        assert set(ranks) == set(range(step.world_size)) or not plan.barriered


def has_one_cp_size_if_uniform(step: Step, plan: Plan) -> None:
    for micro_batch in plan.micro_batches:
        sizes = {group.cp_size for group in micro_batch.groups}
        assert len(sizes) == 1 or plan.scheduler != "uniform"


def idles_only_where_nothing_fits(step: Step, plan: Plan) -> None:
    """Of balanced plans; those of the others follow rules of others."""
    config = step.config
    unbound = config.dynamic_context_parallel and (config.min_cp_size, config.max_cp_size) == (
        1,
        None,
    )
    for micro_batch in plan.micro_batches if plan.scheduler == "balanced" else ():
        spare = [
            sample
            for group in micro_batch.groups
            for sample in group.samples
            if len(group.samples) > 1
        ]
        for idle in [group for group in micro_batch.groups if not group.samples]:
            assert plan.barriered
            assert not unbound
            assert not any(_fits(step, sample, cp_size=idle.cp_size) for sample in spare)


def _fits(step: Step, sample: int, *, cp_size: int) -> bool:
    try:
        rows = step.rows([sample], cp_size=cp_size)
    except ValueError:  # no bucket holds it
        return False
    return rows <= step.config.max_seqlen_per_dp_cp_rank


def never_waits_in_a_circle(step: Step, plan: Plan) -> None:
    assert not stuck([plan.for_rank(rank) for rank in range(step.world_size)])


def stuck(queues: Sequence[Sequence[GroupPlan]]) -> bool:
    """Whether ranks that run their groups in order, all ranks of one together, come to a stop."""
    left = [deque(queue) for queue in queues]
    while ready := [
        queue[0]
        for queue in left
        if queue and all(left[rank] and left[rank][0] == queue[0] for rank in queue[0].ranks)
    ]:
        for rank in ready[0].ranks:
            left[rank].popleft()
    return any(left)


PROMISES = (
    runs_every_sample_once,
    merges_into_input_order,
    keeps_packs_to_the_limits,
    uses_blocks_within_bounds,
    shares_no_rank_in_a_micro_batch,
    has_one_cp_size_if_uniform,
    idles_only_where_nothing_fits,
    never_waits_in_a_circle,
)
