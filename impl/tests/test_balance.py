"""Balanced plans of chosen batches, refusals in words, and modelled time near the best."""

import re

import numpy as np
import pytest

from impl.balance import balanced_plan
from impl.config import DynamicCPConfig
from impl.packing import mixed_cp_sizes, pack_samples, weigh_samples
from impl.plan import Plan
from impl.planner import make_plan


def sizes_and_samples(plan: Plan) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [[(group.cp_size, group.samples) for group in one.groups] for one in plan.micro_batches]


def plan_of(seqlens, *, cap, world_size, barriered=True, **bounds) -> Plan:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=cap, scheduler="balanced", **bounds)
    return make_plan(seqlens, config=config, world_size=world_size, barriered=barriered)


@pytest.mark.parametrize("barriered", [True, False])
@pytest.mark.parametrize(
    ("seqlens", "cap"), [((16, 16, 16, 32, 224), 56), ((2048, 2048, 2048, 4096, 28672), 7168)]
)
def test_long_sample_takes_all_ranks_and_short_ones_mixed_groups(seqlens, cap, barriered) -> None:
    plan = plan_of(seqlens, cap=cap, world_size=4, barriered=barriered)
    long, short = sizes_and_samples(plan)
    assert long == [(4, (4,))]
    assert [cp_size for cp_size, _ in short] == [2, 1, 1]


@pytest.mark.parametrize("barriered", [True, False])
@pytest.mark.parametrize(
    ("seqlens", "cap", "world_size", "sizes"),
    [
        ((5, 13, 24), 16, 4, [[2, 2]]),  # three samples on four ranks
        ((1,) * 3, 16, 4, [[2, 1, 1]]),
        ((7,), 16, 4, [[4]]),
        ((7,), 16, 6, [[6]]),
        ((4096, 2048), 1024, 6, [[4, 2]]),  # needs 4 of 6
        ((10240,), 1024, 10, [[10]]),
        ((64,) * 4, 16, 4, [[4]] * 4),
        ((100,) * 7 + (3000,), 1024, 4, [[4]]),
    ],
)
def test_batches_that_other_schedulers_break_on(
    seqlens, cap, world_size, sizes, barriered
) -> None:
    plan = plan_of(seqlens, cap=cap, world_size=world_size, barriered=barriered)
    assert [[group.cp_size for group in one.groups] for one in plan.micro_batches] == sizes


@pytest.mark.parametrize("barriered", [True, False])
@pytest.mark.parametrize(
    ("seqlens", "world_size"),
    [
        ((512, 44), 10),
        ((30000, 800, 900, 1200), 256),
        ((900, 40, 30, 20), 16),
        ((8192, 10, 10, 10, 10, 10), 64),
    ],
)
def test_few_samples_share_all_ranks_at_once(seqlens, world_size, barriered) -> None:
    plan = plan_of(seqlens, cap=8192, world_size=world_size, barriered=barriered)
    assert len(plan.micro_batches) == 1
    assert all(plan.for_rank(rank) for rank in range(world_size))


@pytest.mark.parametrize(
    ("seqlens", "sizes"),
    [((3, 4), [[7]]), ((50, 50, 13), [[7]] * 2), ((50, 90), [[7]] * 2)],
)
def test_whole_world_runs_what_its_blocks_cannot_share(seqlens, sizes) -> None:
    plan = plan_of(seqlens, cap=14, world_size=7)
    assert [[group.cp_size for group in one.groups] for one in plan.micro_batches] == sizes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"seqlens": (8, 11, 15, 1), "cap": 8, "world_size": 3, "max_cp_size": 2},
            [[(2, (2,)), (1, (0,))], [(2, (1,)), (1, (3,))]],
        ),
        # sample 3 would even the packs out, and is too long for one rank
        (
            {"seqlens": (96, 20, 6, 28), "cap": 16, "world_size": 11, "max_cp_size": 9},
            [[(8, (0, 3)), (2, (1,)), (1, (2,))]],
        ),
    ],
)
def test_wide_group_leaves_what_fits_to_an_idle_narrow_one(options, expected) -> None:
    assert sizes_and_samples(plan_of(**options)) == expected


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (
            {"seqlens": (3,), "cap": 16, "world_size": 4, "max_cp_size": 2},
            [(2, (0,)), (1, ()), (1, ())],
        ),
        ({"seqlens": (1,), "cap": 1, "world_size": 2}, [(1, (0,)), (1, ())]),
    ],
)
def test_padding_only_is_planned_where_nothing_else_can_be(options, idle) -> None:
    assert sizes_and_samples(plan_of(**options)) == [idle]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # a pack of 20 rows would be padded to 32
        (
            {"seqlens": (10,) * 4, "cap": 24, "world_size": 2, "pack_multiple": 16},
            [[(1, (0,)), (1, (1,))], [(1, (2,)), (1, (3,))]],
        ),
        # 48 rows are within the cap, not within a bucket that is
        (
            {"seqlens": (10,) * 4, "cap": 48, "world_size": 1, "pack_buckets": (20, 64)},
            [[(1, (0, 1))], [(1, (2, 3))]],
        ),
        (
            {"seqlens": (1,) * 5, "cap": 48, "world_size": 1, "max_sequences": 2},
            [[(1, (0, 1))], [(1, (2, 3))], [(1, (4,))]],
        ),
        # zigzag would hold 8 rows
        ({"seqlens": (13,), "cap": 7, "world_size": 2, "layout": "contiguous"}, [[(2, (0,))]]),
    ],
)
def test_packs_are_padded_as_asked_before_the_cap_is_taken(options, expected) -> None:
    assert sizes_and_samples(plan_of(**options)) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seqlens": ()}, "the batch is empty: dynamic CP needs at least one sequence"),
        ({"seqlens": (0, 8)}, "sequence 0 has 0 tokens; drop empty sequences first"),
        (
            {"seqlens": (100,) * 7 + (9000,), "cap": 1024, "world_size": 4},
            "sequence 7 has 9000 tokens, which no CP size fits: max_seqlen_per_dp_cp_rank=1024, "
            "padding included, on 4 DP×CP ranks, CP sizes 1, 2, 4; shorten it, raise the limit "
            "or use more ranks",
        ),
        (
            {"seqlens": (29,), "cap": 7, "world_size": 4, "max_cp_size": 2},
            "sequence 0 has 29 tokens, which no CP size fits: max_seqlen_per_dp_cp_rank=7, ",
        ),
        # 28 tokens are 7 a rank, but ranks hold an even number
        ({"seqlens": (28,), "cap": 7, "world_size": 4}, "sequence 0 has 28 tokens, which no CP "),
        (
            {"seqlens": (3,), "world_size": 6, "min_cp_size": 4, "max_cp_size": 5},
            "no CP sizes from min_cp_size=4 to max_cp_size=5 give each of 6 DP×CP ranks a group; "
            "sizes are 1, 2, 4, 6",
        ),
        (
            {"seqlens": (2, 9), "cap": 20, "world_size": 2, "pack_multiple": 16, "max_cp_size": 1}
            | {"pack_buckets": (16,), "sequence_multiple": 5},
            "16 rows of pack_buckets=(16,) are not a multiple of 80, ",
        ),
        (
            {"seqlens": (2, 65), "cap": 20, "pack_multiple": 16},
            "sequence 1 has 65 tokens, which no CP size fits: max_seqlen_per_dp_cp_rank=20 with "
            "pack_multiple=16, padding included, on 4 DP×CP ranks, CP sizes 1, 2, 4; shorten it, "
            "raise the limit or use more ranks",
        ),
        (
            {"seqlens": (2, 9), "cap": 64, "world_size": 2, "pack_buckets": (4,)},
            "sequence 1 has 9 tokens, which no CP size fits: max_seqlen_per_dp_cp_rank=64 with "
            "pack_buckets=(4,), padding included, ",
        ),
        ({"seqlens": (3,), "world_size": 0}, "world_size=0 must be at least 1"),
    ],
)
def test_refusal_says_what_is_wrong_and_what_to_do(options, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        plan_of(**{"cap": 16, "world_size": 4, **options})


@pytest.mark.parametrize(
    ("world_size", "bounds", "sizes"),
    [
        (8, {}, (1, 2, 4, 8)),
        (12, {}, (1, 2, 4, 8, 12)),
        (12, {"min_cp_size": 4}, (4, 8, 12)),
        (12, {"min_cp_size": 8}, (12,)),  # 8 of 12 would leave four without a group
        (7, {"max_cp_size": 4}, (1, 2, 4)),
        (8, {"min_cp_size": 2, "dynamic_context_parallel": False}, (2,)),
    ],
)
def test_sizes_within_bounds_give_every_rank_a_group(world_size, bounds, sizes) -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=8, **bounds)
    assert mixed_cp_sizes(config, world_size=world_size) == sizes


def test_packs_keep_to_the_time_limit_unless_of_one_sample() -> None:
    seqlens = np.random.default_rng(0).integers(1, 4000, 200).tolist()
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=2048)
    samples = weigh_samples(seqlens, config=config, world_size=8)
    packs = pack_samples(samples, limit=0.05)
    assert all(pack.work <= 0.05 for pack in packs if len(pack.samples) > 1)
    assert sum(len(pack.samples) > 1 for pack in packs) > 20


SKEWED = np.exp(np.random.default_rng(0).normal(np.log(1000), 1.3, 512)).clip(64, 65536)


@pytest.mark.parametrize(("barriered", "allowed"), [(True, 1.15), (False, 1.1)])
@pytest.mark.parametrize("world_size", [8, 12, 64])
def test_modelled_time_is_near_perfect_balance(world_size, barriered, allowed) -> None:
    plan = plan_of(
        SKEWED.astype(int).tolist(), cap=8192, world_size=world_size, barriered=barriered
    )
    assert rank_seconds(plan, barriered=barriered) <= allowed * perfect_seconds(plan)


def rank_seconds(plan: Plan, *, barriered: bool) -> float:
    """Time of the slowest rank, by the formula of `impl.cost` without communication."""
    clock = np.zeros(plan.world_size)
    for micro_batch in plan.micro_batches:
        for group in micro_batch.groups:
            ranks = list(group.ranks)
            lengths = np.array(plan.seqlens, dtype=float)[list(group.samples)]
            clock[ranks] = np.max(clock[ranks]) + seconds_alone(lengths) / len(ranks)
        clock = np.full_like(clock, np.max(clock)) if barriered else clock
    return float(np.max(clock))


def perfect_seconds(plan: Plan) -> float:
    return seconds_alone(np.array(plan.seqlens, dtype=float)) / plan.world_size


def seconds_alone(lengths) -> float:
    return float((5.8e-5 * lengths + 1.8e-9 * lengths**2).sum())


def test_thousand_ranks_are_planned() -> None:
    config = DynamicCPConfig(max_seqlen_per_dp_cp_rank=8192, scheduler="balanced")
    plan = balanced_plan(SKEWED.astype(int).tolist(), config=config, world_size=1024)
    assert all(group.samples for group in plan.for_rank(1023))
