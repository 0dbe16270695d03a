"""Plans that cannot be run are refused in words: sample, ranks, values, and what to do."""

import dataclasses
import re
from collections.abc import Sequence

import pytest

from impl.config import DynamicCPConfig
from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.validate import validate

CONFIG = DynamicCPConfig(max_seqlen_per_dp_cp_rank=8)
SEQLENS = (8, 8, 14, 3, 2)

Group = tuple[Sequence[int], Sequence[int]]


def plan_of(*micro_batches: list[Group], seqlens=SEQLENS, world_size=4, **fields) -> Plan:
    """Micro-batches as lists of (ranks, samples)."""
    return Plan(
        world_size=world_size,
        seqlens=seqlens,
        micro_batches=tuple(
            MicroBatchPlan(
                tuple(GroupPlan(tuple(ranks), tuple(samples)) for ranks, samples in one)
            )
            for one in micro_batches
        ),
        **{"scheduler": "by hand", "barriered": True, **fields},
    )


GOOD: list[list[Group]] = [[([0, 1], [2]), ([2], [0]), ([3], [1])], [([0, 1], [3]), ([2, 3], [4])]]


def test_plan_that_keeps_its_promises_passes() -> None:
    validate(plan_of(*GOOD), config=CONFIG)


def test_rank_without_a_group_is_fine_without_barriers() -> None:
    validate(plan_of(GOOD[0], [([0, 1], [3, 4])], barriered=False), config=CONFIG)


@pytest.mark.parametrize(
    ("micro_batches", "words"),
    [
        (
            [*GOOD, [([0, 1, 2, 3], [0])]],
            "sample 0 is run twice, by micro-batch 0, rank 2 and by micro-batch 2, ranks 0..3; "
            "take it from one of them",
        ),
        ([GOOD[0], [([0, 1, 2, 3], [3])]], "sample 4 is in no micro-batch; add it to a group"),
        (
            [*GOOD, [([0, 1, 2, 3], [5])]],
            "micro-batch 2, ranks 0..3: there is no sample 5, the batch has 5",
        ),
        (
            [[([0], [0]), ([1, 2], [2]), ([3], [1])], GOOD[1]],
            "micro-batch 0, ranks 1..2: [1, 2] is no CP group of 4 ranks; groups are the whole "
            "world, and n ranks from a multiple of n for powers of two n",
        ),
        (
            [[([0], [0]), ([1], [1]), ([3, 2], [2])], GOOD[1]],
            "micro-batch 0, ranks 3..2: [3, 2] is no CP group of 4 ranks; ",
        ),
        ([[*GOOD[0], ([], [])], GOOD[1]], "micro-batch 0, no ranks: [] is no CP group of 4 ranks"),
        (
            [[*GOOD[0], ([1], [])], GOOD[1]],
            "rank 1 is in two groups of a micro-batch: micro-batch 0, ranks 0..1 and micro-batch "
            "0, rank 1; move one to a micro-batch of its own",
        ),
        (
            [GOOD[0], [([0, 1], [3, 4])]],
            "rank 2 has no group in micro-batch 1 and would never come to its barrier; widen a "
            "group to it, or plan without barriers",
        ),
        (
            [[([0, 1], [2, 3]), ([2], [0]), ([3], [1])], [([0, 1, 2, 3], [4])]],
            "micro-batch 0, ranks 0..1: samples [2, 3] are 10 tokens a rank, padding included, "
            "above max_seqlen_per_dp_cp_rank=8; move some to another group, widen this one or "
            "raise the limit",
        ),
        (
            [GOOD[0], [([0, 1], [3, 4]), ([2], []), ([3], [])]],
            "micro-batch 1, rank 2: no sample to run, though ranks 0..1 could leave it sample 4",
        ),
        (
            [GOOD[0], [([0], [3]), ([1], [4]), ([2], []), ([3], [])]],
            "micro-batch 1, rank 2: no sample to run, though each sample of the micro-batch fits "
            "the whole world",
        ),
        (
            [GOOD[0], [([0, 1], [3]), ([2], [4]), ([3], [])]],
            "micro-batch 1, rank 3: no sample to run, though rank 2 could be widened to ranks "
            "2..3",
        ),
        (
            [*GOOD, [([0, 1, 2, 3], [])]],
            "micro-batch 2, ranks 0..3: no sample to run, though no other group of the "
            "micro-batch has one; leave the micro-batch out",
        ),
    ],
)
def test_broken_promise_is_named(micro_batches, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        validate(plan_of(*micro_batches), config=CONFIG)


def test_cap_is_exact() -> None:
    validate(plan_of([([0], [0])], seqlens=(8,), world_size=1), config=CONFIG)
    with pytest.raises(ValueError, match=re.escape("samples [0] are 9 tokens a rank")):
        validate(plan_of([([0], [0])], seqlens=(9,), world_size=1), config=CONFIG)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"pack_multiple": 16}, "samples [2] are 16 tokens a rank, padding included, above "),
        ({"pack_buckets": (10,)}, "samples [2] are 10 tokens a rank, padding included, above "),
        ({"sequence_multiple": 3}, "samples [2] are 12 tokens a rank, padding included, above "),
        ({"sequence_multiple": 9, "layout": "contiguous"}, "samples [2] are 9 tokens a rank, "),
    ],
    ids=str,
)
def test_padding_of_every_kind_counts_towards_the_cap(asked, words) -> None:
    config = dataclasses.replace(CONFIG, **asked)
    with pytest.raises(ValueError, match=f"^micro-batch 0, ranks 0..1: {re.escape(words)}"):
        validate(plan_of(*GOOD), config=config)


def test_contiguous_layout_pads_to_less() -> None:
    plan = plan_of([([0, 1], [0])], seqlens=(13,), world_size=2)
    seven = dataclasses.replace(CONFIG, max_seqlen_per_dp_cp_rank=7)
    validate(plan, config=dataclasses.replace(seven, layout="contiguous"))
    with pytest.raises(ValueError, match=re.escape("samples [0] are 8 tokens a rank")):
        validate(plan, config=seven)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"max_sequences": 1},
            "a pack of 2 sequences is above max_sequences=1; raise it or pack ",
        ),
        (
            {"pack_buckets": (6,)},
            "a pack of 10 rows a rank is above the last of pack_buckets=(6,); add a larger one or "
            "pack fewer tokens",
        ),
        ({"pack_buckets": (11,)}, "11 rows of pack_buckets=(11,) are not a multiple of 2, which"),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheduler", ["uniform", "balanced", "megatron"])
def test_pack_that_cannot_be_asked_for_is_refused(asked, words, scheduler) -> None:
    plan = plan_of([([0, 1], [2, 4]), ([2, 3], [0])], [([0, 1], [1]), ([2, 3], [3])])
    config = dataclasses.replace(CONFIG, max_seqlen_per_dp_cp_rank=10, **asked)
    with pytest.raises(ValueError, match=f"^micro-batch 0, ranks 0..1: {re.escape(words)}"):
        validate(dataclasses.replace(plan, scheduler=scheduler), config=config)


def test_group_without_samples_is_refused_without_barriers() -> None:
    words = "micro-batch 1, ranks 2..3: no sample to run; leave the group out"
    plan = plan_of(GOOD[0], [([0, 1], [3, 4]), ([2, 3], [])], barriered=False)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        validate(plan, config=CONFIG)


def test_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sequence 1 has 0 tokens; drop empty sequences first$"):
        validate(plan_of([([0], [0, 1])], seqlens=(3, 0), world_size=1), config=CONFIG)


def test_tensor_parallel_ranks_widen_the_padding() -> None:
    with pytest.raises(ValueError, match=re.escape("samples [2] are 16 tokens a rank")):
        validate(plan_of(*GOOD), config=CONFIG, tp_size=8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_cp_size": 2}, "micro-batch 0, rank 2: CP size 1 is not from min_cp_size=2 to "),
        ({"max_cp_size": 1}, "micro-batch 0, ranks 0..1: CP size 2 is not from min_cp_size=1 to "),
        ({"dynamic_context_parallel": False}, "micro-batch 0, ranks 0..1: CP size 2 is not from "),
    ],
)
def test_size_out_of_bounds_is_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        validate(plan_of(*GOOD), config=dataclasses.replace(CONFIG, **settings))


@pytest.mark.parametrize(
    ("micro_batch", "settings"),
    [
        # both groups are as wide as they may be
        ([([0, 1], [0]), ([2, 3], [])], {"max_cp_size": 2}),
        # two tokens a rank are more than the cap, whichever group is widened
        ([([0], [0]), ([1], []), ([2], []), ([3], [])], {"max_seqlen_per_dp_cp_rank": 1}),
    ],
)
def test_padding_only_is_fine_where_nothing_else_can_be(micro_batch, settings) -> None:
    config = dataclasses.replace(CONFIG, **settings)
    validate(plan_of(micro_batch, seqlens=(1,)), config=config)


def test_uniform_plan_keeps_its_own_rules() -> None:
    micro_batch: list[Group] = [([0, 1], [0, 1, 2, 3, 4]), ([2, 3], [])]
    validate(plan_of(micro_batch, scheduler="uniform"), config=CONFIG)


@pytest.mark.parametrize(
    ("micro_batch", "words"),
    [
        (
            [([0, 1], [2, 3, 4]), ([2], [0]), ([3], [1])],
            "micro-batch 0 has CP sizes 1, 2, and a uniform plan one for all its groups; cut all "
            "alike, or use scheduler='balanced'",
        ),
        (
            [([0], [0, 1]), ([1], [2]), ([2], [3]), ([3], [4])],
            "micro-batch 0, rank 1: sample 2 has 14 tokens, above max_seqlen_per_dp_cp_rank=8 for "
            "each of 1 ranks; widen the group or raise the limit",
        ),
    ],
)
def test_uniform_plan_that_breaks_its_own_rules_is_refused(micro_batch, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        validate(plan_of(micro_batch, scheduler="uniform"), config=CONFIG)
