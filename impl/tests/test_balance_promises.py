"""Balanced plans of random batches keep every promise, counted here without `impl.validate`.

`PLAN_EXAMPLES=20000 pytest impl/tests/test_balance_promises.py` draws that many batches for each
promise, other ones each time; without it the same few hundred.
"""

import os
from collections import deque
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from impl.config import DynamicCPConfig
from impl.plan import Plan
from impl.planner import make_plan

PROMISE = settings(
    max_examples=int(os.environ.get("PLAN_EXAMPLES", "300")),
    derandomize="PLAN_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Step:
    seqlens: tuple[int, ...]
    config: DynamicCPConfig
    world_size: int
    tp_size: int

    def plan(self, *, barriered: bool) -> Plan:
        return make_plan(
            self.seqlens,
            config=self.config,
            world_size=self.world_size,
            tp_size=self.tp_size,
            barriered=barriered,
        )


WORLDS = st.integers(1, 16)


@st.composite
def steps(draw, *, bounded: bool = True, worlds=WORLDS) -> Step:
    """Batches that can be planned, a few long samples among short ones."""
    world_size, tp_size = draw(worlds), draw(st.sampled_from([1, 2]))
    lowest = draw(st.integers(1, world_size)) if bounded else 1
    highest = draw(st.none() | st.integers(lowest, world_size)) if bounded else None
    config = DynamicCPConfig(
        max_seqlen_per_dp_cp_rank=draw(st.integers(2 * tp_size, 60)),
        scheduler="balanced",
        min_cp_size=lowest,
        max_cp_size=highest,
    )
    every = [2**power for power in range(5) if 2**power <= world_size] + [world_size]
    sizes = [size for size in every if lowest <= size <= (highest or world_size)]
    assume(world_size in sizes or (sizes and world_size % min(sizes) == 0))
    part = 2 * tp_size if max(sizes) > 1 else tp_size
    longest = config.max_seqlen_per_dp_cp_rank // part * part * max(sizes)
    shortest = draw(st.sampled_from([1, min(longest, config.max_seqlen_per_dp_cp_rank)]))
    long, short = st.integers(1, longest), st.integers(1, shortest)
    seqlens = draw(st.lists(long, max_size=3)) + draw(st.lists(short, max_size=25))
    assume(seqlens)
    return Step(tuple(draw(st.permutations(seqlens))), config, world_size, tp_size)


def packs_of(plan: Plan) -> list[tuple[int, ...]]:
    return [group.samples for one in plan.micro_batches for group in one.groups]


def padded_tokens(seqlen: int, *, cp_size: int, tp_size: int) -> int:
    part = tp_size if cp_size == 1 else 2 * tp_size  # tokens of a rank come in parts
    return -(-seqlen // (cp_size * part)) * part


@PROMISE
@given(step=steps(), barriered=st.booleans())
def test_every_sample_runs_once_and_input_order_can_be_restored(step, barriered) -> None:
    order = np.array(
        [sample for pack in packs_of(step.plan(barriered=barriered)) for sample in pack]
    )
    as_run = np.array(step.seqlens)[order]
    assert sorted(order) == list(range(len(step.seqlens)))
    assert tuple(as_run[order.argsort()]) == step.seqlens


@PROMISE
@given(step=steps(), barriered=st.booleans())
def test_packs_keep_to_the_cap_after_padding(step, barriered) -> None:
    for micro_batch in step.plan(barriered=barriered).micro_batches:
        for group in micro_batch.groups:
            size = {"cp_size": len(group.ranks), "tp_size": step.tp_size}
            tokens = sum(padded_tokens(step.seqlens[sample], **size) for sample in group.samples)
            assert tokens <= step.config.max_seqlen_per_dp_cp_rank


@PROMISE
@given(step=steps(), barriered=st.booleans())
def test_groups_are_blocks_within_bounds_that_share_no_rank(step, barriered) -> None:
    highest = step.config.max_cp_size or step.world_size
    for micro_batch in step.plan(barriered=barriered).micro_batches:
        ranks = [rank for group in micro_batch.groups for rank in group.ranks]
        assert len(ranks) == len(set(ranks))
        for group in micro_batch.groups:
            first, size = group.ranks[0], len(group.ranks)
            assert group.ranks == tuple(range(first, first + size))
            assert group.ranks[-1] < step.world_size
            assert size == step.world_size or (size.bit_count() == 1 and first % size == 0)
            assert step.config.min_cp_size <= size <= highest


@PROMISE
@given(step=steps(bounded=False))
def test_barriered_ranks_all_have_a_sample_in_every_micro_batch(step) -> None:
    plan = step.plan(barriered=True)
    for rank in range(step.world_size):
        groups = plan.for_rank(rank)
        assert len(groups) == len(plan.micro_batches)
        assert all(group.samples for group in groups)


@PROMISE
@given(step=steps(bounded=False, worlds=st.sampled_from([1, 2, 4, 8, 16])))
def test_free_running_ranks_all_have_a_sample(step) -> None:
    plan = step.plan(barriered=False)
    assert all(plan.for_rank(rank) for rank in range(step.world_size))
    assert all(packs_of(plan))


@PROMISE
@given(step=steps())
def test_free_running_ranks_never_wait_for_each_other_in_a_circle(step) -> None:
    plan = step.plan(barriered=False)
    queues = [deque(plan.for_rank(rank)) for rank in range(step.world_size)]
    for _ in range(sum(len(one.groups) for one in plan.micro_batches)):
        ready = [
            queue[0]
            for queue in queues
            if queue
            and all(queues[rank] and queues[rank][0] == queue[0] for rank in queue[0].ranks)
        ]
        for rank in ready[0].ranks if ready else ():
            queues[rank].popleft()
    assert not any(queues)


@PROMISE
@given(step=steps(), barriered=st.booleans())
def test_plan_is_the_same_when_made_again_and_from_json(step, barriered) -> None:
    plan = step.plan(barriered=barriered)
    again = step.plan(barriered=barriered)
    assert again == plan == Plan.from_json(plan.to_json())
    assert again.hash == plan.hash == Plan.from_json(plan.to_json()).hash
