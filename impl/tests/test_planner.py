"""The scheduler that the settings name, and uniform plans against those worked by hand."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from impl.config import DynamicCPConfig
from impl.planner import make_plan

PLANS = sorted((Path(__file__).parents[2] / "fixtures/plans").glob("*.json"))
BY_HAND = [json.loads(path.read_text()) for path in PLANS]
SOLVED = [plan for plan in BY_HAND if "error" not in plan]
REFUSED = [plan for plan in BY_HAND if "error" in plan]


def uniform_of(plan: dict[str, Any]) -> Any:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=plan["max_seqlen_per_dp_cp_rank"])
    return make_plan(plan["lengths"], config=config, world_size=plan["world_size"])


def test_plans_by_hand_were_found() -> None:
    assert len(SOLVED) >= 12
    assert len(REFUSED) >= 2


@pytest.mark.parametrize("by_hand", SOLVED, ids=lambda plan: plan["name"])
def test_uniform_plan_is_the_one_worked_by_hand(by_hand) -> None:
    (micro_batch,) = uniform_of(by_hand).micro_batches
    groups = [
        {"ranks": list(group.ranks), "samples": list(group.samples)}
        for group in micro_batch.groups
    ]
    assert groups == by_hand["groups"]


@pytest.mark.parametrize("by_hand", REFUSED, ids=lambda plan: plan["name"])
def test_uniform_plan_is_refused_as_by_hand(by_hand) -> None:
    with pytest.raises(ValueError, match=re.escape(by_hand["error"])):
        uniform_of(by_hand)


@pytest.mark.parametrize("scheduler", ["uniform", "balanced"])
def test_scheduler_of_the_settings_is_used(scheduler) -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=16, scheduler=scheduler)
    assert make_plan([5, 13], config=config, world_size=2).scheduler == scheduler


@pytest.mark.parametrize(
    "seqlens", [(5, 13, 24), np.array([5, 13, 24]), torch.tensor([5, 13, 24])], ids=type
)
def test_any_whole_numbers_make_the_same_plan(seqlens) -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=16, scheduler="balanced")
    plan = make_plan(seqlens, config=config, world_size=4)
    assert plan == make_plan([5, 13, 24], config=config, world_size=4)
    assert plan.hash == make_plan([5, 13, 24], config=config, world_size=4).hash


@pytest.mark.parametrize("scheduler", ["uniform", "balanced"])
def test_one_cp_size_is_left_when_dynamic_cp_is_off(scheduler) -> None:
    config = DynamicCPConfig(
        max_seqlen_per_dp_cp_rank=16,
        scheduler=scheduler,
        dynamic_context_parallel=False,
        min_cp_size=2,
    )
    plan = make_plan([5, 13, 24, 1, 1], config=config, world_size=4)
    assert {group.cp_size for one in plan.micro_batches for group in one.groups} == {2}


def test_uniform_plan_cuts_the_batch_in_input_order_and_sizes_each_micro_batch() -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=16, micro_batch_samples=2)
    plan = make_plan([40, 5, 20, 3, 7], config=config, world_size=4)
    assert [
        [(group.cp_size, group.samples) for group in one.groups] for one in plan.micro_batches
    ] == [
        [(4, (0, 1))],
        [(2, (2,)), (2, (3,))],
        [(1, (4,)), (1, ()), (1, ()), (1, ())],
    ]


def test_sample_that_fits_no_uniform_micro_batch_is_named_by_its_place_in_the_batch() -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=16, micro_batch_samples=2)
    with pytest.raises(ValueError, match=r"^sequence 3 has 65 tokens, which no CP size fits: "):
        make_plan([40, 5, 20, 65, 7], config=config, world_size=4)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"max_sequences": 2},
            "a pack of 3 sequences is above max_sequences=2; raise it or pack ",
        ),
        ({"pack_buckets": (8, 16)}, "a pack of 19 rows a rank is above the last of pack_buckets="),
    ],
)
def test_uniform_pack_that_is_asked_too_much_of_is_refused_and_smaller_ones_run(
    asked, words
) -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=16, **asked)
    seqlens = [9, 8, 7, 4, 6]  # 9, 6 and 4; 8 and 7
    with pytest.raises(ValueError, match=f"^micro-batch 0, rank 0: {re.escape(words)}"):
        make_plan(seqlens, config=config, world_size=2)
    smaller = dataclasses.replace(config, micro_batch_samples=3)
    assert len(make_plan(seqlens, config=smaller, world_size=2).micro_batches) == 2


@pytest.mark.parametrize(
    ("settings", "highest"),
    [
        ({}, None),
        ({"max_cp_size": 4}, 4),
        ({"min_cp_size": 2, "max_cp_size": 4, "dynamic_context_parallel": False}, 2),
    ],
)
def test_highest_cp_size_is_the_lowest_when_dynamic_cp_is_off(settings, highest) -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=16, **settings)
    assert config.highest_cp_size == highest
