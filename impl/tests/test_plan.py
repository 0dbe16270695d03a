"""Plans as data: what each rank runs, JSON and back, a hash that tells plans apart."""

import dataclasses
import json
import re

import pytest

from impl.plan import GroupPlan, MicroBatchPlan, Plan, cp_blocks
from impl.rules import PackRules
from impl.schedule import cp_sizes

FIRST = MicroBatchPlan((GroupPlan((0, 1), (2,)), GroupPlan((2,), (0, 3))))
SECOND = MicroBatchPlan((GroupPlan((0, 1, 2), (1,)),))
PLAN = Plan(3, (5, 40, 9, 2), (FIRST, SECOND), "by hand", barriered=True)
DATA = json.loads(PLAN.to_json())


@pytest.mark.parametrize(
    ("world_size", "blocks"),
    [
        (1, ["0..0"]),
        (2, ["0..0", "1..1", "0..1"]),
        (3, ["0..0", "1..1", "2..2", "0..1", "0..2"]),
        (6, [*(f"{rank}..{rank}" for rank in range(6)), "0..1", "2..3", "4..5", "0..3", "0..5"]),
    ],
)
def test_blocks_are_aligned_powers_of_two_and_the_world(world_size, blocks) -> None:
    assert [f"{block[0]}..{block[-1]}" for block in cp_blocks(world_size)] == blocks


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_for_powers_of_two_blocks_have_the_sizes_of_uniform_groups(world_size) -> None:
    assert {len(block) for block in cp_blocks(world_size)} == set(cp_sizes(world_size))


def test_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^world_size=0 must be at least 1$"):
        cp_blocks(0)


def test_rank_runs_its_groups_in_order() -> None:
    assert PLAN.for_rank(1) == (GroupPlan((0, 1), (2,)), GroupPlan((0, 1, 2), (1,)))
    assert PLAN.for_rank(2) == (GroupPlan((2,), (0, 3)), GroupPlan((0, 1, 2), (1,)))


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rank=3 is not one of 3 DP×CP ranks$"):
        PLAN.for_rank(3)


def test_plan_is_the_same_after_json() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.hash == PLAN.hash


def test_json_has_the_names_of_the_fields() -> None:
    assert PLAN.to_json() == (
        '{"world_size":3,"seqlens":[5,40,9,2],"micro_batches":[{"groups":['
        '{"ranks":[0,1],"samples":[2]},{"ranks":[2],"samples":[0,3]}]},{"groups":['
        '{"ranks":[0,1,2],"samples":[1]}]}],"scheduler":"by hand","barriered":true}'
    )


def test_hash_fits_an_int64_and_is_the_same_in_every_process() -> None:
    assert PLAN.hash == 2828918224297874655
    assert 0 <= PLAN.hash < 2**63


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 4},
        {"seqlens": (5, 40, 9, 3)},
        {"micro_batches": (SECOND, FIRST)},
        {"scheduler": "balanced"},
        {"barriered": False},
    ],
    ids=str,
)
def test_hash_differs_with_every_field(change) -> None:
    assert dataclasses.replace(PLAN, **change).hash != PLAN.hash


GROUP = {"ranks": [0], "samples": [0]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the plan is not JSON: Expecting property name"),
        (
            "[]",
            "the plan must be a mapping with barriered, micro_batches, scheduler, seqlens, "
            "world_size, got []",
        ),
        ("{}", "the plan lacks barriered, micro_batches, scheduler, seqlens, world_size"),
        (json.dumps({**DATA, "lengths": []}), "the plan has unknown lengths"),
        (json.dumps({**DATA, "world_size": "3"}), "world_size='3' must be a whole number"),
        (json.dumps({**DATA, "world_size": True}), "world_size=True must be a whole number"),
        (json.dumps({**DATA, "seqlens": [5, 4.0]}), "seqlens[1]=4.0 must be a whole number"),
        (json.dumps({**DATA, "seqlens": 5}), "seqlens=5 must be a list"),
        (json.dumps({**DATA, "scheduler": None}), "scheduler=None must be a name"),
        (json.dumps({**DATA, "barriered": 1}), "barriered=1 must be true or false"),
        (json.dumps({**DATA, "micro_batches": {}}), "micro_batches={} must be a list"),
        (
            json.dumps({**DATA, "micro_batches": [{"groups": []}, []]}),
            "micro_batches[1] must be a mapping with groups, got []",
        ),
        (
            json.dumps({**DATA, "micro_batches": [{"groups": [GROUP, {"ranks": [1]}]}]}),
            "micro_batches[0].groups[1] lacks samples",
        ),
        (
            json.dumps({**DATA, "micro_batches": [{"groups": [{**GROUP, "ranks": [0, -1]}]}]}),
            "micro_batches[0].groups[0].ranks[1]=-1 must be a whole number",
        ),
    ],
)
def test_malformed_json_is_refused_by_key(text, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        Plan.from_json(text)


def test_hash_differs_with_the_settings_a_plan_is_run_with() -> None:
    rules = [PackRules(), PackRules(pack_multiple=16), PackRules(layout="contiguous")]
    hashes = {PLAN.hash, *(PLAN.hash_with(each) for each in rules)}

    assert len(hashes) == 4
    assert PLAN.hash_with(PackRules()) == PLAN.hash_with(PackRules())
