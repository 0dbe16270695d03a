"""The scheduler that the settings name, and uniform plans against those worked by hand."""

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
