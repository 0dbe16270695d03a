"""Where every token of a batch lies after the gather over all groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.config import DynamicCPConfig
from impl.merge import merge_slots
from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.planner import make_plan


def _plan(seqlens, *micro_batches) -> Plan:
    """Micro-batches of groups, each ranks and samples."""
    groups = [MicroBatchPlan(tuple(GroupPlan(*group) for group in one)) for one in micro_batches]
    world_size = 1 + max(rank for one in micro_batches for ranks, _ in one for rank in ranks)
    return Plan(world_size, tuple(seqlens), tuple(groups), "by hand", barriered=False)


@pytest.mark.parametrize(
    ("plan", "slots", "rows"),
    [
        (_plan([3], [((0,), (0,))]), [0, 1, 2], 3),
        (_plan([2, 1], [((0,), (1,)), ((1,), (0,))]), [2, 3, 0], 2),
        # ranks 0 and 1 hold sample 1 in shares of 2 and 1, ranks 2 and 3 samples 0 and 2
        (_plan([1, 3, 2], [((0, 1), (1,)), ((2, 3), (0, 2))]), [4, 0, 1, 2, 5, 6], 2),
        # a group without samples still has its places
        (_plan([5], [((0, 1), (0,)), ((2, 3), ())]), [0, 1, 2, 3, 4], 3),
        (_plan([5], [((0, 1), ()), ((2, 3), (0,))]), [6, 7, 8, 9, 10], 3),
        # what rank 0 sends: two tokens of sample 1, then sample 0; rank 1: one, then sample 2
        (_plan([1, 3, 2], [((0, 1), (1,))], [((0,), (0,)), ((1,), (2,))]), [2, 0, 1, 3, 4, 5], 3),
    ],
)
def test_slots_by_hand(plan, slots, rows) -> None:
    found, sent = merge_slots(plan)

    assert found.tolist() == slots
    assert found.dtype == torch.int64
    assert sent == rows


@given(
    seqlens=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    world_size=st.integers(1, 12),
    scheduler=st.sampled_from(["uniform", "balanced"]),
)
@settings(deadline=None)
def test_every_token_has_a_place_of_its_own_on_its_group(seqlens, world_size, scheduler) -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=40, scheduler=scheduler)
    plan = make_plan(seqlens, config=config, world_size=world_size, barriered=False)
    slots, rows = merge_slots(plan)
    ranks_of = {
        sample: group.ranks
        for one in plan.micro_batches
        for group in one.groups
        for sample in group.samples
    }
    sequences = slots.split(list(seqlens))

    assert len(set(slots.tolist())) == sum(seqlens)
    for sample, own in enumerate(sequences):
        assert set((own // rows).tolist()) <= set(ranks_of[sample])
