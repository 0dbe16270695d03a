"""Where every token of a batch lies after the gather over all groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.merge import merge_slots
from impl.schedule import cp_sizes, split_samples


@pytest.mark.parametrize(
    ("seqlens", "samples", "cp_size", "slots", "share"),
    [
        ([3], [[0]], 1, [0, 1, 2], 3),
        ([2, 1], [[1], [0]], 1, [2, 3, 0], 2),
        # group 0 holds sample 1 in two shares of 2 (one place unused), group 1 samples 0 and 2
        ([1, 3, 2], [[1], [0, 2]], 2, [4, 0, 1, 2, 5, 6], 2),
        # an empty group still has its places
        ([5], [[0], []], 2, [0, 1, 2, 3, 4], 3),
        ([5], [[], [0]], 2, [6, 7, 8, 9, 10], 3),
    ],
)
def test_slots_by_hand(seqlens, samples, cp_size, slots, share) -> None:
    found, rows = merge_slots(seqlens, samples, cp_size=cp_size)

    assert found.tolist() == slots
    assert found.dtype == torch.int64
    assert rows == share


@given(seqlens=st.lists(st.integers(1, 30), min_size=1, max_size=8), world_size=st.integers(1, 12))
@settings(deadline=None)
def test_every_token_has_a_place_of_its_own_in_its_group(seqlens, world_size) -> None:
    for cp_size in cp_sizes(world_size):
        samples = split_samples(seqlens, world_size=world_size, cp_size=cp_size)
        slots, share = merge_slots(seqlens, samples, cp_size=cp_size)
        group_of = {sample: group for group, some in enumerate(samples) for sample in some}
        expected = [
            group_of[sample] for sample, seqlen in enumerate(seqlens) for _ in range(seqlen)
        ]

        assert len(set(slots.tolist())) == sum(seqlens)
        assert (slots // (cp_size * share)).tolist() == expected
