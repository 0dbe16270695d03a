"""CP sizes, who computes which sample, and refusals in words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.schedule import (
    check_cp_size,
    choose_local_cp_size,
    cp_sizes,
    split_samples,
)

WORLDS = st.integers(1, 24)
SEQLENS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 3)),
        (6, (1, 2, 6)),
        (8, (1, 2, 4, 8)),
        (10, (1, 2, 10)),
        (12, (1, 2, 4, 12)),
    ],
)
def test_cp_sizes_are_powers_of_two_that_divide_and_the_world(world_size, sizes) -> None:
    assert cp_sizes(world_size) == sizes


@pytest.mark.parametrize(
    ("longest", "cp_size"), [(1, 1), (12, 1), (13, 2), (24, 2), (25, 4), (48, 4), (49, 8), (96, 8)]
)
def test_smallest_size_that_fits_is_chosen(longest, cp_size) -> None:
    chosen = choose_local_cp_size([3, longest], world_size=8, max_seqlen_per_dp_cp_rank=12)
    assert chosen == cp_size


def test_whole_world_is_the_last_resort_where_no_power_of_two_fits() -> None:
    assert choose_local_cp_size([25], world_size=6, max_seqlen_per_dp_cp_rank=12) == 6
    assert choose_local_cp_size([13], world_size=3, max_seqlen_per_dp_cp_rank=12) == 3


def test_bounds_on_the_size_are_kept() -> None:
    limits = {"world_size": 8, "max_seqlen_per_dp_cp_rank": 12}

    assert choose_local_cp_size([1], **limits, min_cp_size=2) == 2
    assert choose_local_cp_size([20], **limits, min_cp_size=2, max_cp_size=2) == 2
    with pytest.raises(ValueError, match="which no CP size fits"):
        choose_local_cp_size([25], **limits, max_cp_size=2)


@pytest.mark.parametrize(
    ("seqlens", "options", "words"),
    [
        ([], {}, "the batch is empty: dynamic CP needs at least one sequence"),
        ([3, 0, 5], {}, "sequence 1 has 0 tokens; drop empty sequences first"),
        (
            [5, 97, 98, 98],
            {},
            "sequence 2 has 98 tokens, which no CP size fits: max_seqlen_per_dp_cp_rank=12 on 8 "
            "DP×CP ranks, CP sizes 1, 2, 4, 8; shorten it, raise the limit or use more ranks",
        ),
        (
            [25],
            {"max_cp_size": 2},
            "sequence 0 has 25 tokens, which no CP size fits: max_seqlen_per_dp_cp_rank=12 on 8 "
            "DP×CP ranks, CP sizes 1, 2; shorten it, raise the limit or use more ranks",
        ),
        (
            [5],
            {"min_cp_size": 3, "max_cp_size": 3},
            "no CP size from min_cp_size=3 to max_cp_size=3 can be had from 8 DP×CP ranks; sizes "
            "are 1, 2, 4, 8",
        ),
        ([5], {"world_size": 0}, "world_size=0 must be at least 1"),
    ],
)
def test_refusal_says_what_is_wrong_and_what_to_do(seqlens, options, words) -> None:
    keywords = {"world_size": 8, "max_seqlen_per_dp_cp_rank": 12, **options}
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        choose_local_cp_size(seqlens, **keywords)


@pytest.mark.parametrize(
    ("cp_size", "world_size", "sizes"),
    [(3, 4, "1, 2, 4"), (0, 4, "1, 2, 4"), (8, 4, "1, 2, 4"), (3, 6, "1, 2, 6"), (-2, 2, "1, 2")],
)
def test_size_that_has_no_groups_is_refused(cp_size, world_size, sizes) -> None:
    words = f"cp_size={cp_size} cannot be had from {world_size} DP×CP ranks; sizes are {sizes}"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        check_cp_size(cp_size, world_size=world_size)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        split_samples([5, 3], world_size=world_size, cp_size=cp_size)


def test_samples_go_longest_first_to_the_group_with_the_fewest_tokens() -> None:
    # 80 to 0; 70 to 1; 60 to 1 (130); 50 to 0 (130); 30 to 0, the lower of two equals
    samples = split_samples([70, 60, 80, 30, 50], world_size=4, cp_size=2)
    assert samples == [[2, 3, 4], [0, 1]]


def test_ties_go_to_the_lower_index_and_the_lower_group() -> None:
    assert split_samples([5] * 6, world_size=4, cp_size=1) == [[0, 4], [1, 5], [2], [3]]


def test_fewer_samples_than_groups_leave_groups_empty() -> None:
    assert split_samples([7], world_size=4, cp_size=1) == [[0], [], [], []]


@given(seqlens=SEQLENS, world_size=WORLDS)
def test_every_sample_is_in_one_group_at_every_size(seqlens, world_size) -> None:
    for cp_size in cp_sizes(world_size):
        samples = split_samples(seqlens, world_size=world_size, cp_size=cp_size)
        assert len(samples) == world_size // cp_size
        assert sorted(sample for group in samples for sample in group) == list(range(len(seqlens)))
        assert all(group == sorted(group) for group in samples)


@given(seqlens=SEQLENS, world_size=WORLDS)
def test_groups_differ_by_no_more_than_the_longest_sample(seqlens, world_size) -> None:
    samples = split_samples(seqlens, world_size=world_size, cp_size=1)
    tokens = [sum(seqlens[sample] for sample in group) for group in samples]
    assert max(tokens) - min(tokens) <= max(seqlens)
