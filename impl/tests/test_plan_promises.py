"""Plans of random batches keep every promise, whoever made them, and broken promises are seen.

`pytest impl/tests --hypothesis-profile=deep` draws many more batches, other ones each time.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from impl.config import DynamicCPConfig
from impl.megatron.probe import UnsupportedMegatron
from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.planner import make_plan
from impl.validate import validate

from . import plan_promises as promise
from .plan_promises import POWERS, PROMISES, Step, steps, stuck

DEEP = settings.get_current_profile_name() == "deep"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawing(examples: int) -> settings:
    return settings(
        max_examples=10 * examples if DEEP else examples,
        derandomize=not DEEP,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )


def plan_of(step: Step, *, barriered: bool) -> Plan:
    try:
        return step.plan(barriered=barriered)
    except UnsupportedMegatron:
        assume(False)  # it says so itself: test_megatron_scheduler.py
        raise


@drawing(1200)
@given(step=steps("balanced"), barriered=st.booleans())
def test_balanced_plan_keeps_every_promise(step, barriered) -> None:
    plan = plan_of(step, barriered=barriered)
    for keeps in PROMISES:
        keeps(step, plan)


@drawing(500)
@given(step=steps("uniform"))
def test_uniform_plan_keeps_every_promise(step) -> None:
    plan = plan_of(step, barriered=True)
    for keeps in PROMISES:
        keeps(step, plan)


@drawing(500)
@given(step=steps("megatron", worlds=POWERS), barriered=st.booleans())
def test_plan_of_megatron_keeps_every_promise(step, barriered) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    pytest.importorskip(
        "megatron.core.pipeline_parallel.hybrid_cp_schedule",
        reason="this megatron-core has no BalancedCPScheduler",
    )
    plan = plan_of(step, barriered=barriered)
    for keeps in PROMISES:
        keeps(step, plan)


@drawing(100)
@given(step=steps("balanced", worlds=POWERS))
def test_free_running_ranks_of_a_power_of_two_world_all_have_a_sample(step) -> None:
    assume(step.config.dynamic_context_parallel and step.config.max_cp_size is None)
    plan = plan_of(step, barriered=False)
    assert all(plan.for_rank(rank) for rank in range(step.world_size))


@drawing(100)
@given(step=st.sampled_from(["balanced", "uniform"]).flatmap(steps), barriered=st.booleans())
def test_plan_is_the_same_when_made_again_and_from_json(step, barriered) -> None:
    plan = step.plan(barriered=barriered)
    again = step.plan(barriered=barriered)
    assert again == plan == Plan.from_json(plan.to_json())
    assert again.hash == plan.hash == Plan.from_json(plan.to_json()).hash


@drawing(200)
@given(step=st.sampled_from(["balanced", "uniform"]).flatmap(steps), data=st.data())
def test_hash_differs_where_lengths_order_or_plan_do(step, data) -> None:
    plan = step.plan(barriered=True)
    first, second = (data.draw(st.sampled_from(range(len(step.seqlens)))) for _ in range(2))
    swapped = list(step.seqlens)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    lower = max(1, step.seqlens[first] - data.draw(st.integers(1, 3)))
    shortened = (*step.seqlens[:first], lower, *step.seqlens[first + 1 :])
    raised = 2 * step.config.max_seqlen_per_dp_cp_rank
    others = [
        dataclasses.replace(step, seqlens=tuple(swapped)),
        dataclasses.replace(step, seqlens=shortened),
        dataclasses.replace(
            step, config=dataclasses.replace(step.config, max_seqlen_per_dp_cp_rank=raised)
        ),
    ]
    for other in others:
        theirs = other.plan(barriered=True)
        assert (theirs.hash == plan.hash) == (theirs == plan)
        assert theirs != plan or other.seqlens == step.seqlens


HASHES = """
import json, sys
from impl.config import DynamicCPConfig
from impl.planner import make_plan
for seqlens, settings, world_size in json.load(sys.stdin):
    config = DynamicCPConfig.from_mapping(settings)
    print(make_plan(seqlens, config=config, world_size=world_size).hash)
"""


def test_every_process_computes_the_same_hash() -> None:
    settings_of_each: list[dict[str, Any]] = [
        {"scheduler": "balanced"},
        {"scheduler": "balanced", "pack_buckets": [16, 48], "max_sequences": 3},
        {"scheduler": "balanced", "layout": "contiguous", "pack_multiple": 4},
        {"scheduler": "uniform", "micro_batch_samples": 5},
    ]
    batches = [
        (
            [1 + seed * step % 97 for step in range(1, 30)],
            {**each, "max_seqlen_per_dp_cp_rank": 64},
        )
        for seed in (7, 31, 53)
        for each in settings_of_each
    ]
    asked = [(*batch, world_size) for batch in batches for world_size in (3, 8)]
    here = [
        make_plan(seqlens, config=DynamicCPConfig.from_mapping(each), world_size=world_size).hash
        for seqlens, each, world_size in asked
    ]
    there = subprocess.run(
        [sys.executable, "-c", HASHES],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [int(line) for line in there.stdout.split()] == here


STEP = Step(
    seqlens=(8, 8, 14, 3, 2),
    config=DynamicCPConfig(
        max_seqlen_per_dp_cp_rank=8, scheduler="balanced", max_cp_size=2, max_sequences=2
    ),
    world_size=4,
)


def by_hand(*micro_batches, scheduler="balanced", **fields) -> Plan:
    """Micro-batches as lists of (ranks, samples)."""
    groups = [MicroBatchPlan(tuple(GroupPlan(*group) for group in one)) for one in micro_batches]
    options = {"scheduler": scheduler, "barriered": True, **fields}
    return Plan(STEP.world_size, STEP.seqlens, tuple(groups), **options)


LONG = [((0, 1), (2,)), ((2,), (0,)), ((3,), (1,))]
SHORT = [((0, 1), (3,)), ((2, 3), (4,))]


def test_plan_by_hand_keeps_every_promise() -> None:
    plan = by_hand(LONG, SHORT)
    validate(plan, config=STEP.config)
    for keeps in PROMISES:
        keeps(STEP, plan)


@pytest.mark.parametrize(
    ("keeps", "micro_batches"),
    [
        (promise.runs_every_sample_once, [LONG, [((0, 1), (3,)), ((2, 3), (4, 0))]]),
        (promise.runs_every_sample_once, [LONG, [((0, 1), (3,)), ((2, 3), ())]]),
        # 10 rows a rank
        (promise.keeps_packs_to_the_limits, [[((0, 1), (2, 3)), *LONG[1:]], [((0, 1), (4,))]]),
        # three sequences
        (
            promise.keeps_packs_to_the_limits,
            [[((0, 1), (0, 3, 4)), ((2, 3), (2,))], [((0, 1), (1,)), ((2, 3), ())]],
        ),
        (promise.uses_blocks_within_bounds, [LONG, [((0,), (3,)), ((1, 2), (4,)), ((3,), ())]]),
        (promise.uses_blocks_within_bounds, [LONG, [((0, 1, 2, 3), (3, 4))]]),
        (promise.shares_no_rank_in_a_micro_batch, [LONG, [*SHORT, ((3,), ())]]),
        (promise.shares_no_rank_in_a_micro_batch, [LONG, [((0, 1), (3, 4))]]),
        (promise.idles_only_where_nothing_fits, [LONG, [((0, 1), (3, 4)), ((2, 3), ())]]),
    ],
)
def test_broken_promise_is_seen_and_refused(keeps, micro_batches) -> None:
    wrong = by_hand(*micro_batches)
    with pytest.raises(AssertionError):
        keeps(STEP, wrong)
    with pytest.raises(ValueError, match=r"^(sample|rank|micro-batch) "):
        validate(wrong, config=STEP.config)


@pytest.mark.parametrize(
    "asked", [{"pack_multiple": 16}, {"pack_buckets": (8, 10)}, {"sequence_multiple": 3}], ids=str
)
def test_padding_above_the_cap_is_seen_and_refused(asked) -> None:
    step = dataclasses.replace(STEP, config=dataclasses.replace(STEP.config, **asked))
    seven = dataclasses.replace(step, seqlens=(7, 8, 17, 3, 2))
    wrong = dataclasses.replace(by_hand(LONG, SHORT), seqlens=seven.seqlens)
    with pytest.raises(AssertionError):
        promise.keeps_packs_to_the_limits(seven, wrong)
    with pytest.raises(ValueError, match=r"^micro-batch 0, .* tokens a rank, padding included, "):
        validate(wrong, config=step.config)


def test_mixed_sizes_in_a_uniform_plan_are_seen_and_refused() -> None:
    wrong = by_hand(LONG, SHORT, scheduler="uniform")
    with pytest.raises(AssertionError):
        promise.has_one_cp_size_if_uniform(STEP, wrong)
    with pytest.raises(ValueError, match=r"^micro-batch 0 has CP sizes 1, 2, and a uniform plan "):
        validate(wrong, config=STEP.config)


def test_samples_run_in_another_order_than_planned_are_seen() -> None:
    plan, ran = (by_hand([((0, 1, 2, 3), pack)]) for pack in ((0, 1, 2, 3, 4), (0, 1, 2, 4, 3)))
    promise.merges_into_input_order(STEP, plan)
    with pytest.raises(AssertionError):
        promise.merges_into_input_order(STEP, plan, ran=ran)


def test_ranks_that_wait_in_a_circle_are_seen() -> None:
    plan = by_hand(LONG, SHORT)
    queues = [plan.for_rank(rank) for rank in range(4)]
    assert not stuck(queues)
    assert stuck([queues[0][::-1], *queues[1:]])
