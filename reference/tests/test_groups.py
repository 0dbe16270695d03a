"""How large groups are and who computes what: by hand, and as properties of any lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import choose_local_cp_size, split

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
WORLDS = st.sampled_from([1, 2, 3, 4, 6, 8, 10, 12, 16])


@pytest.mark.parametrize(
    ("longest", "world_size", "expected"),
    [
        (100, 8, 1),
        (101, 8, 2),
        (200, 8, 2),
        (201, 8, 4),
        (401, 8, 8),
        (800, 8, 8),
        (250, 3, 3),
        (201, 6, 6),
        (200, 6, 2),
        (900, 10, 10),
        (301, 12, 4),
        (401, 12, 12),
        (100, 1, 1),
    ],
)
def test_cp_size_is_the_smallest_that_fits_the_longest_sequence(
    longest: int, world_size: int, expected: int
) -> None:
    found = choose_local_cp_size(
        [7, longest, 3], world_size=world_size, max_seqlen_per_dp_cp_rank=100
    )
    assert found == expected


@given(seqlens=LENGTHS, world_size=WORLDS, cap=st.integers(1, 5000))
def test_chosen_cp_size_divides_the_world_fits_and_is_minimal(
    seqlens: list[int], world_size: int, cap: int
) -> None:
    if max(seqlens) > world_size * cap:
        with pytest.raises(ValueError, match="shorten it, add ranks or raise"):
            choose_local_cp_size(seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=cap)
        return
    size = choose_local_cp_size(seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=cap)
    assert world_size % size == 0
    assert max(seqlens) <= size * cap
    smaller = [n for n in (1, 2, 4, 8, 16) if n < size and world_size % n == 0]
    assert all(max(seqlens) > n * cap for n in smaller)


@pytest.mark.parametrize(
    ("seqlens", "world_size", "cp_size", "expected"),
    [
        ([5, 3, 9, 4], 2, 1, [[1, 2], [0, 3]]),
        ([4, 4, 4, 4], 2, 1, [[0, 2], [1, 3]]),
        ([10, 1, 1, 1], 4, 2, [[0], [1, 2, 3]]),
        ([7], 4, 1, [[0], [], [], []]),
        ([3, 8], 6, 2, [[1], [0], []]),
        ([3, 8, 5], 4, 4, [[0, 1, 2]]),
    ],
)
def test_split_by_hand(
    seqlens: list[int], world_size: int, cp_size: int, expected: list[list[int]]
) -> None:
    assert split(seqlens, world_size=world_size, cp_size=cp_size) == expected


@given(seqlens=LENGTHS, num_groups=WORLDS, cp_size=st.sampled_from([1, 2, 3]))
def test_split_gives_every_sample_to_one_group_in_input_order(
    seqlens: list[int], num_groups: int, cp_size: int
) -> None:
    groups = split(seqlens, world_size=num_groups * cp_size, cp_size=cp_size)
    assert len(groups) == num_groups
    assert sorted(sample for group in groups for sample in group) == list(range(len(seqlens)))
    assert all(group == sorted(group) for group in groups)


@given(seqlens=LENGTHS, num_groups=WORLDS)
def test_split_keeps_groups_within_one_sequence_of_each_other(
    seqlens: list[int], num_groups: int
) -> None:
    groups = split(seqlens, world_size=num_groups, cp_size=1)
    tokens = [sum(seqlens[sample] for sample in group) for group in groups]
    assert max(tokens) - min(tokens) <= max(seqlens)


def test_a_sequence_that_cannot_fit_is_named_with_what_to_do() -> None:
    message = (
        "sequence 2 has 401 tokens, but world_size=4 ranks of max_seqlen_per_dp_cp_rank=100 "
        "take 400; shorten it, add ranks or raise max_seqlen_per_dp_cp_rank to 101"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        choose_local_cp_size([5, 90, 401], world_size=4, max_seqlen_per_dp_cp_rank=100)
