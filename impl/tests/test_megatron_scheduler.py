"""Megatron's own placement as a plan, and its faults as errors in words."""

import re
import sys
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.config import DynamicCPConfig
from impl.megatron import scheduler
from impl.megatron.probe import UnsupportedMegatron
from impl.plan import Plan
from impl.planner import make_plan

needs_scheduler = pytest.mark.skipif(
    find_spec("megatron.core.pipeline_parallel.hybrid_cp_schedule") is None,
    reason="this megatron-core has no BalancedCPScheduler",
)


def plan_of(seqlens, *, cap, world_size, barriered=True, tp_size=1, **bounds) -> Plan:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=cap, scheduler="megatron", **bounds)
    return make_plan(
        seqlens, config=config, world_size=world_size, tp_size=tp_size, barriered=barriered
    )


def queues_of(plan: Plan, *, world_size: int) -> list[list[int]]:
    groups = [plan.for_rank(rank) for rank in range(world_size)]
    return [[sample for group in queue for sample in group.samples] for queue in groups]


@needs_scheduler
@pytest.mark.parametrize("barriered", [True, False])
@pytest.mark.parametrize(
    ("seqlens", "cap", "world_size", "queues"),
    [
        ((5, 13, 24, 1), 16, 4, [[2], [2], [1], [0, 3]]),
        ((5, 13, 24, 1), 16, 8, [[2], [2], [1], [1], [0], [0], [3], [3]]),
        ((16,), 16, 4, [[0]] * 4),
        ((64,) * 4, 16, 4, [[0, 1, 2, 3]] * 4),
        ((10, 10), 5, 4, [[0, 1]] * 4),  # on two ranks padding would make 6 tokens of 5
        ((100,) * 7 + (3000,), 1024, 4, [[7, 0, 4], [7, 1, 5], [7, 2, 6], [7, 3]]),
    ],
)
def test_ranks_run_the_queues_of_megatron(seqlens, cap, world_size, queues, barriered) -> None:
    plan = plan_of(seqlens, cap=cap, world_size=world_size, barriered=barriered)
    assert queues_of(plan, world_size=world_size) == queues


@needs_scheduler
@pytest.mark.parametrize(
    ("seqlens", "cap", "asked", "queues"),
    [
        # a bucket of 16 rows holds a sample on one rank, one of 8 on two
        ((13, 13, 13, 13), 16, {"pack_buckets": (16,)}, [[0], [1], [2], [3]]),
        ((13, 13, 13, 13), 16, {"pack_buckets": (8, 24)}, [[0, 2], [0, 2], [1, 3], [1, 3]]),
        # 25 tokens would be 13 on each of two ranks, and 16 if they come in eights
        ((25, 1), 14, {"sequence_multiple": 8}, [[0, 1]] * 4),
        ((25, 1), 14, {"layout": "contiguous"}, [[0], [0], [1], [1]]),
    ],
)
def test_samples_are_padded_as_asked_before_the_cap_is_taken(seqlens, cap, asked, queues) -> None:
    assert queues_of(plan_of(seqlens, cap=cap, world_size=4, **asked), world_size=4) == queues


@needs_scheduler
def test_each_sample_is_a_pass_of_its_own_and_barriers_are_filled_up() -> None:
    plan = plan_of((5, 13, 24, 1), cap=16, world_size=4)
    packs = [[group.samples for group in one.groups] for one in plan.micro_batches]
    assert packs == [[(2,), (1,), (0,)], [(), (), (), (3,)]]


@needs_scheduler
def test_rank_goes_on_alone_without_barriers() -> None:
    plan = plan_of((5, 13, 24, 1), cap=16, world_size=4, barriered=False)
    assert [len(plan.for_rank(rank)) for rank in range(4)] == [1, 1, 1, 2]


@needs_scheduler
@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    seqlens=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    world_size=st.sampled_from([1, 2, 4, 8]),
    barriered=st.booleans(),
    tp_size=st.sampled_from([1, 2]),
)
def test_every_batch_on_up_to_eight_ranks_makes_a_plan(
    seqlens, world_size, barriered, tp_size
) -> None:
    options = {"cap": 64, "world_size": world_size, "tp_size": tp_size, "barriered": barriered}
    plan = plan_of(seqlens, **options)
    queues = queues_of(plan, world_size=world_size)
    assert {sample for queue in queues for sample in queue} == set(range(len(seqlens)))
    assert plan == plan_of(seqlens, **options)


MISALIGNED = [3632, 15412, 223, 13656, 2130, 17, 5427, 3503, 5391, 3473, 3476, 1204, 9611, 5624]


@needs_scheduler
@pytest.mark.parametrize(
    ("seqlens", "world_size", "words"),
    [
        (
            [*MISALIGNED, 11858],
            16,
            "gives a plan that cannot be run: micro-batch 6, ranks 4..11: [4, 5, 6, 7, 8, 9, 10, "
            "11] is no CP group of 16 ranks; ",
        ),
        (
            [4096, 4096, 1886, 100],
            6,
            "gives a plan that cannot be run: micro-batch 1, ranks 2..5: [2, 3, 4, 5] is no CP "
            "group of 6 ranks; ",
        ),
        ([512, 44], 10, "fails on these lengths for 10 ranks: IndexError: "),
    ],
)
def test_fault_of_megatron_is_named(seqlens, world_size, words) -> None:
    with pytest.raises(UnsupportedMegatron, match=re.escape(words)) as error:
        plan_of(seqlens, cap=1024, world_size=world_size)
    assert str(error.value).endswith("; use scheduler='balanced'")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seqlens": [0, 8]}, "sequence 0 has 0 tokens; drop empty sequences first"),
        (
            {"seqlens": [100] * 7 + [9000]},
            "sequence 7 has 9000 tokens, which no group of a power of two ranks fits: "
            "max_seqlen_per_dp_cp_rank=1024, padding included, on 4 DP×CP ranks; shorten it, "
            "raise the limit or use more ranks",
        ),
        (
            {"seqlens": [3, 65], "cap": 20, "pack_multiple": 16},
            "sequence 1 has 65 tokens, which no group of a power of two ranks fits: "
            "max_seqlen_per_dp_cp_rank=20 with pack_multiple=16, padding included, ",
        ),
        (
            {"seqlens": [3], "max_cp_size": 2},
            "scheduler='megatron' knows no bounds on the CP size, and was given min_cp_size=1, "
            "max_cp_size=2; leave them and dynamic_context_parallel at their defaults, or use "
            "scheduler='balanced'",
        ),
        (
            {"seqlens": [3], "dynamic_context_parallel": False},
            "scheduler='megatron' knows no bounds on the CP size, and was given min_cp_size=1, "
            "max_cp_size=1; ",
        ),
    ],
)
def test_refusal_says_what_is_wrong_and_what_to_do(options, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        plan_of(**{"cap": 1024, "world_size": 4, **options})


def test_megatron_without_a_scheduler_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel.hybrid_cp_schedule", None)
    words = "has no BalancedCPScheduler; 0.16.0 to 0.19.2 do, and scheduler='balanced' needs none"
    with pytest.raises(UnsupportedMegatron, match=re.escape(words)):
        plan_of([3], cap=16, world_size=4)


@pytest.mark.parametrize("error", [AssertionError("no room"), TypeError("cannot unpack None")])
def test_exception_inside_megatron_becomes_words(monkeypatch, error) -> None:
    class Broken:
        def __init__(self, *arguments: object) -> None:
            pass

        def get_groups_and_subsamples(self, *arguments: object) -> None:
            raise error

    monkeypatch.setattr(scheduler, "_scheduler_class", lambda: Broken)
    words = f"fails on these lengths for 4 ranks: {type(error).__name__}: {error}; use "
    with pytest.raises(UnsupportedMegatron, match=re.escape(words)):
        plan_of([3], cap=16, world_size=4)
