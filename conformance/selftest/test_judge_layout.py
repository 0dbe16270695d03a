"""The layout check: what the oracle would run passes, and each tampered plan is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from conformance.adapters.reference import Rank, oracle
from conformance.build import TaskBuilder
from conformance.case import parse_case
from conformance.judge import check_merge
from conformance.judge_layout import check_layout
from conformance.protocol import Outputs, Pack, RankContext, Schedule

BUILDER = TaskBuilder(oracle)
MIXED = "lens9_5_13_3_8-4ranks-cp4+2_1_1"
PLANNED = "lens9_5_13-4ranks-cpbalanced8"
STAGES = "lens9_5_13-4ranks-cp2-pp2"
TENSOR = "lens9_5_13-4ranks-cp2-tp2-sp"
UNIFORM = "lens9_5_13-4ranks-cpuniform8"
PLANNED_STAGES = "lens9_5_13-4ranks-cpbalanced8-pp2"
PLANNED_TENSOR = "lens9_5_13-4ranks-cpbalanced8-tp2-sp"

Packs = list[list[Pack]]


def packs_of(case: str) -> Packs:
    """Of every rank, as the oracle would run the only pass of a case."""
    task, world = BUILDER.task(parse_case(case)), parse_case(case).world
    return [list(Rank(RankContext(rank, world, 1.0)).run(task)[0].packs) for rank in range(world)]


def outputs_of(packs: Packs) -> list[Outputs]:
    return [Outputs((), (), (), torch.tensor(1.0), {}, tuple(each)) for each in packs]


def found(case: str, packs: Packs) -> str:
    """Where the check says that packs are wrong; nothing if they are right."""
    task = BUILDER.task(parse_case(case))
    (step,) = task.passes
    return check_layout(task, step, outputs_of(packs), oracle).where


@pytest.mark.parametrize(
    "asked", [MIXED, PLANNED, STAGES, TENSOR, UNIFORM, PLANNED_STAGES, PLANNED_TENSOR]
)
def test_oracle_passes(asked: str) -> None:
    assert found(asked, packs_of(asked)) == ""


def without_last(packs: Packs) -> None:
    for each in packs:
        each.pop()


def on_rank(rank: int, number: int, **changed: object) -> Callable[[Packs], None]:
    def change(packs: Packs) -> None:
        packs[rank][number] = replace(packs[rank][number], **changed)  # type: ignore[arg-type]

    return change


def again(ranks: Sequence[int], number: int) -> Callable[[Packs], None]:
    """Some ranks run one of their packs once more, at the end."""

    def change(packs: Packs) -> None:
        for rank in ranks:
            packs[rank].append(packs[rank][number])

    return change


def run_as(case: str) -> Callable[[Packs], None]:
    """What was run is the plan of another case."""
    return lambda packs: packs.__setitem__(slice(None), packs_of(case))


def in_turn(ranks: Sequence[int]) -> Callable[[Packs], None]:
    """Some ranks run their packs the other way round."""

    def change(packs: Packs) -> None:
        for rank in ranks:
            packs[rank].reverse()

    return change


def dealt(*held: tuple[int, ...]) -> Callable[[Packs], None]:
    """Every rank runs one pack, alone, with these samples of the case."""

    def change(packs: Packs) -> None:
        task = BUILDER.task(parse_case(PLANNED))
        padding = packs_of("lens5-2ranks-cp1")[1][0]
        for rank, samples in enumerate(held):
            pack = (
                oracle.pack(task.batch, samples, cp_ranks=(rank,), cp_rank=0, padding=task.padding)
                if samples
                else replace(padding, cp_ranks=(rank,))
            )
            packs[rank][:] = [pack]

    return change


TAMPERED = {
    "micro-batch left out": (MIXED, without_last, "rank 0 ran 1 micro-batches of 2"),
    "micro-batch too many": (MIXED, again([3], 0), "rank 3 ran 3 micro-batches of 2"),
    "wider group than asked": (
        MIXED,
        on_rank(2, 1, cp_ranks=(2, 3)),
        "micro-batch 1, rank 2: CP group is ranks [2, 3], not [2]",
    ),
    "group of other samples": (
        MIXED,
        on_rank(1, 0, samples=(0, 2)),
        "micro-batch 0, rank 1: samples (0, 2), rank 0 has (0, 2, 4)",
    ),
    "other samples on a stage": (
        STAGES,
        on_rank(2, 0, samples=(0,)),
        "micro-batch 0 holds samples [0], not [0, 1, 2]",
    ),
    "group across stages": (
        STAGES,
        on_rank(0, 0, cp_ranks=(0, 2)),
        "micro-batch 0, rank 0: CP group is ranks [0, 2], not [0, 1]",
    ),
    "sample left out": (PLANNED, without_last, "samples [2] are in no pack of ranks [0, 1, 2, 3]"),
    "sample twice": (
        PLANNED,
        again(range(4), 0),
        "pack 3 of rank 0: sample 0 was run by ranks [0, 1, 2, 3] as well",
    ),
    "unknown sample": (
        PLANNED,
        on_rank(0, 2, samples=(9,)),
        "pack 2 of rank 0: samples [9] are not of the batch",
    ),
    "one member less": (
        PLANNED,
        lambda packs: packs[2].pop(0),
        "pack 0 of rank 0: rank 2 of its CP group did not run samples (0,)",
    ),
    "group left idle": (
        "lens9_5_13-2ranks-cp1",
        dealt((0, 1, 2), ()),
        "micro-batch 0: ranks [1] have no sample, though there are 3 for 2 groups",
    ),
    "uniform with a group left idle": (
        "lens9_5_13-2ranks-cpuniform16",
        dealt((0, 1, 2), ()),
        "micro-batch 0: ranks [1] have no sample, though there are 3 for 2 groups",
    ),
    "balanced on one rank": (
        "lens9_5_13-2ranks-cpbalanced32",
        dealt((0, 1, 2), ()),
        "ranks [1] have no sample in any pack",
    ),
    "uniform with groups too wide": (
        UNIFORM,
        run_as("lens9_5_13-4ranks-cp4"),
        "pack 0 of rank 0: CP group [0, 1, 2, 3], but the CP size is 2",
    ),
    "uniform in two micro-batches": (
        UNIFORM,
        run_as("lens9_5_13-4ranks-cp2+2"),
        "rank 0 ran 2 micro-batches of 1",
    ),
    "stages in another order": (
        PLANNED_STAGES,
        in_turn([2, 3]),
        "rank 2 did not run the plan of rank 0, which has its place",
    ),
    "tensor ranks in another order": (
        PLANNED_TENSOR,
        in_turn([1, 3]),
        "rank 1 did not run the plan of rank 0, which has its place",
    ),
    "foreign group": (
        PLANNED,
        on_rank(1, 0, cp_ranks=(0, 2, 3)),
        "rank 1 of its CP group did not run samples (0,)",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_plan_is_named(name: str) -> None:
    case, tamper, words = TAMPERED[name]
    packs = packs_of(case)
    tamper(packs)

    assert words in found(case, packs)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule("balanced", 4), ""),
        (Schedule("balanced", 3), "pack 0 of rank 0: 4 rows are above the limit of 3"),
        (Schedule("megatron", 4), ""),
        (Schedule("megatron", 3), "pack 0 of rank 0: 4 rows are above the limit of 3"),
        (
            Schedule("uniform", 3),
            "there is no such plan, and yet one was run: sequence 2 has 13 tokens, but world",
        ),
    ],
)
def test_packs_keep_to_the_limit(schedule: Schedule, words: str) -> None:
    packs = packs_of(PLANNED)
    task = replace(BUILDER.task(parse_case(PLANNED)), passes=(schedule,))
    where = check_layout(task, schedule, outputs_of(packs), oracle).where

    assert where.startswith(words)
    assert bool(where) == bool(words)


def test_packs_of_padding_may_follow_the_plan() -> None:
    packs = packs_of(MIXED)
    fill = BUILDER.task(parse_case(MIXED)).padding.token_id
    filled = replace(packs[0][0], samples=(), tokens=torch.full((4,), fill))
    packs[0].append(filled)

    assert found(MIXED, packs) == ""


@pytest.mark.parametrize(
    ("rank", "changed", "words"),
    [
        (1, {"gradients": {"a": torch.ones(2)}}, "gradient of a on rank 1 is not rank 0's"),
        (3, {"logits": (torch.ones(2),)}, "logits of sequence 0 on rank 3 is not rank 2's"),
        (1, {"loss": torch.tensor(2.0)}, "loss on rank 1 is not rank 0's"),
        (1, {"logits": (torch.ones(2),)}, "logits of sequence 0 on rank 1 is not rank 2's"),
        (1, {"logits": (torch.zeros(2),)}, ""),  # an earlier stage has those of the last, or none
    ],
)
def test_each_stage_must_agree_with_itself(rank: int, changed: dict, words: str) -> None:
    zeros = {"a": torch.zeros(2)}
    loss, logits = torch.tensor(1.0), (torch.zeros(2),)
    outputs = [Outputs(held, (), (), loss, zeros) for held in ((), (), logits, logits)]
    outputs[rank] = replace(outputs[rank], **changed)

    assert check_merge(outputs, num_stages=2).where == words
