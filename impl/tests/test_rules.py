"""What may be asked of packs: refusals in words, multiples worked out by hand."""

import dataclasses
import re
from typing import Any

import pytest

from impl.rules import PackRules


def test_nothing_is_asked_by_default() -> None:
    assert PackRules() == PackRules(
        layout="zigzag", sequence_multiple=1, pack_multiple=1, pack_buckets=(), max_sequences=None
    )


def test_rules_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PackRules().pack_multiple = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layout": "stripes"}, "layout='stripes' is not one of zigzag, contiguous"),
        ({"sequence_multiple": 0}, "sequence_multiple=0 must be a whole number of at least 1"),
        ({"sequence_multiple": 2.0}, "sequence_multiple=2.0 must be a whole number of at least 1"),
        ({"pack_multiple": True}, "pack_multiple=True must be a whole number of at least 1"),
        ({"pack_multiple": None}, "pack_multiple=None must be a whole number of at least 1"),
        ({"max_sequences": 0}, "max_sequences=0 must be a whole number of at least 1"),
        ({"pack_buckets": [16]}, "pack_buckets=[16] must be a tuple of row counts"),
        (
            {"pack_buckets": (0, 16)},
            "a row count of pack_buckets=0 must be a whole number of at least 1",
        ),
        (
            {"pack_buckets": (32, 16)},
            "pack_buckets=(32, 16) must ascend and name each row count once",
        ),
        (
            {"pack_buckets": (16, 16)},
            "pack_buckets=(16, 16) must ascend and name each row count once",
        ),
    ],
)
def test_value_that_cannot_be_is_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        PackRules(**asked)


@pytest.mark.parametrize(
    ("asked", "cp_size", "tp_size", "rows"),
    [
        ({}, 1, 1, 1),
        ({}, 1, 2, 2),
        ({}, 2, 1, 2),
        ({}, 4, 3, 6),
        ({"layout": "contiguous"}, 1, 2, 2),
        ({"layout": "contiguous"}, 4, 1, 1),
        ({"layout": "contiguous"}, 4, 3, 3),
        ({"sequence_multiple": 16}, 2, 1, 16),
        ({"sequence_multiple": 16}, 2, 3, 48),
        ({"sequence_multiple": 16}, 1, 3, 48),
        ({"sequence_multiple": 3}, 2, 1, 6),
        ({"sequence_multiple": 3, "layout": "contiguous"}, 2, 1, 3),
        ({"pack_multiple": 16}, 2, 1, 2),  # of the pack, not of each sequence
    ],
)
def test_shard_multiple_by_hand(asked, cp_size, tp_size, rows) -> None:
    assert PackRules(**asked).shard_multiple(cp_size=cp_size, tp_size=tp_size) == rows


@pytest.mark.parametrize(
    ("asked", "held", "cp_size", "tp_size", "rows"),
    [
        ({}, 6, 2, 1, 6),
        ({}, 0, 2, 1, 2),  # an empty pack still has a row for each chunk
        ({"pack_multiple": 16}, 0, 2, 1, 16),
        ({"pack_multiple": 16}, 16, 2, 1, 16),
        ({"pack_multiple": 16}, 18, 2, 1, 32),
        ({"pack_multiple": 16}, 18, 2, 3, 48),
        ({"pack_multiple": 5}, 6, 2, 1, 10),  # two chunks of the zigzag
        ({"pack_multiple": 5, "layout": "contiguous"}, 6, 2, 1, 10),
        ({"pack_multiple": 7, "layout": "contiguous"}, 6, 2, 1, 7),
        ({"pack_multiple": 4, "sequence_multiple": 6}, 6, 2, 1, 12),
        ({"pack_buckets": (16, 24, 64)}, 0, 2, 1, 16),
        ({"pack_buckets": (1, 16)}, 0, 2, 1, 16),  # a row is no shard
        ({"pack_buckets": (16, 24, 64)}, 16, 2, 1, 16),
        ({"pack_buckets": (16, 24, 64)}, 18, 2, 1, 24),
        ({"pack_buckets": (16, 24, 64)}, 26, 2, 1, 64),
        ({"pack_buckets": (16, 24, 64), "pack_multiple": 8}, 18, 2, 1, 24),
    ],
)
def test_pack_rows_by_hand(asked, held, cp_size, tp_size, rows) -> None:
    assert PackRules(**asked).pack_rows(held, cp_size=cp_size, tp_size=tp_size) == rows


@pytest.mark.parametrize(
    ("asked", "rows", "words"),
    [
        (
            {"pack_buckets": (16, 64)},
            66,
            "a pack of 66 rows a rank is above the last of pack_buckets=(16, 64); "
            "add a larger one or pack fewer tokens",
        ),
        (
            {"pack_buckets": (7, 64)},
            6,
            "7 rows of pack_buckets=(7, 64) are not a multiple of 2, which layout='zigzag', "
            "cp_size=2, tp_size=1, sequence_multiple=1 and pack_multiple=1 ask for; take 8",
        ),
        (
            {"pack_buckets": (24,), "pack_multiple": 16},
            6,
            "24 rows of pack_buckets=(24,) are not a multiple of 16, which layout='zigzag', "
            "cp_size=2, tp_size=1, sequence_multiple=1 and pack_multiple=16 ask for; take 32",
        ),
    ],
)
def test_bucket_that_cannot_be_is_refused_by_its_rows(asked, rows, words) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        PackRules(**asked).pack_rows(rows, cp_size=2, tp_size=1)


@pytest.mark.parametrize(
    ("asked", "limit", "cp_size", "tp_size", "rows"),
    [
        ({}, 7, 1, 1, 7),
        ({}, 7, 2, 1, 6),
        ({}, 1, 2, 1, 0),
        ({"layout": "contiguous"}, 7, 2, 1, 7),
        ({"sequence_multiple": 4}, 7, 1, 1, 4),
        ({"pack_multiple": 16}, 40, 2, 1, 32),
        ({"pack_multiple": 16}, 15, 2, 1, 0),
        ({"pack_buckets": (16, 24, 64)}, 63, 2, 1, 24),
        ({"pack_buckets": (16, 24, 64)}, 64, 2, 1, 64),
        ({"pack_buckets": (16, 24, 64)}, 99, 2, 1, 64),
        ({"pack_buckets": (16, 24, 64)}, 15, 2, 1, 0),
        ({"pack_buckets": (1, 16, 63)}, 40, 2, 1, 16),  # neither 1 nor 63 can come into use
    ],
)
def test_rows_within_a_limit_by_hand(asked, limit, cp_size, tp_size, rows) -> None:
    assert PackRules(**asked).rows_within(limit, cp_size=cp_size, tp_size=tp_size) == rows


def test_bucket_within_the_limit_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^7 rows of pack_buckets=\(7, 64\) are not a multiple"):
        PackRules(pack_buckets=(7, 64)).rows_within(40, cp_size=2, tp_size=1)


@pytest.mark.parametrize(
    "asked", [{}, {"pack_multiple": 6}, {"pack_buckets": (8, 24, 60)}], ids=str
)
@pytest.mark.parametrize("limit", range(1, 80, 3))
def test_rows_within_a_limit_are_the_most_whose_pack_keeps_to_it(asked, limit) -> None:
    rules, size = PackRules(**asked), {"cp_size": 2, "tp_size": 2}
    most = rules.rows_within(limit, **size)
    last = max(rules.pack_buckets, default=limit + 24)
    keeping = [rows for rows in range(4, last + 1, 4) if rules.pack_rows(rows, **size) <= limit]
    assert most == max(keeping, default=0)


@pytest.mark.parametrize(
    ("asked", "num_sequences", "num_padded", "num_offsets"),
    [
        ({}, 3, 3, 3),
        ({}, 3, 4, 4),
        ({"max_sequences": 4}, 3, 3, 4),
        ({"max_sequences": 4}, 4, 4, 4),
        ({"max_sequences": 4}, 0, 1, 4),
        ({"max_sequences": 4, "pack_multiple": 16}, 4, 4, 5),  # whether there is padding or not
        ({"max_sequences": 4, "pack_multiple": 16}, 4, 5, 5),
        ({"max_sequences": 4, "pack_buckets": (16,)}, 4, 5, 5),
    ],
)
def test_number_of_offsets_by_hand(asked, num_sequences, num_padded, num_offsets) -> None:
    assert PackRules(**asked).num_offsets(num_sequences, num_padded=num_padded) == num_offsets


def test_more_sequences_than_there_is_room_for_are_refused() -> None:
    words = "a pack of 5 sequences is above max_sequences=4; raise it or pack fewer"
    with pytest.raises(ValueError, match=f"^{words}$"):
        PackRules(max_sequences=4).num_offsets(5, num_padded=5)
