"""What one group takes of a micro-batch, and what is refused before any collective."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impl.config import DynamicCPConfig
from impl.pack import jagged
from impl.rules import PackRules
from impl.split import SubBatch, dynamic_cp_split_batch

SEQLENS = (9, 8, 7, 4, 6)
IDS = torch.arange(sum(SEQLENS))
BATCH = {"input_ids": jagged(IDS, SEQLENS)}


def split(*, rank: int, batch=BATCH, **settings: Any) -> SubBatch:
    config = DynamicCPConfig(**{"max_seqlen_per_dp_cp_rank": 16, **settings})
    groups: Any = SimpleNamespace(world_size=2, dp_cp_rank=rank, of_ranks=lambda ranks: ranks)
    return dynamic_cp_split_batch(batch, config=config, groups=groups)


def test_groups_take_their_samples_and_all_have_the_same_plan() -> None:
    first, second = split(rank=0), split(rank=1)
    assert (first.seqlens, second.seqlens) == ((9, 4, 6), (8, 7))
    assert second["input_ids"].values().tolist() == IDS[9:24].tolist()
    groups: list[Any] = [first.cp_group, second.cp_group]
    assert groups == [(0,), (1,)]
    assert first.plan == second.plan


def test_batch_is_one_micro_batch_though_a_step_has_several() -> None:
    assert split(rank=0, micro_batch_samples=2).plan == split(rank=0).plan


def test_packs_are_cut_as_the_settings_ask() -> None:
    asked: dict[str, Any] = {"layout": "contiguous", "pack_multiple": 16, "max_sequences": 3}
    assert split(rank=0, **asked).rules == PackRules(**asked)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_sequences": 2}, "micro-batch 0, rank 0: a pack of 3 sequences is above max_"),
        ({"pack_buckets": (8, 16)}, "micro-batch 0, rank 0: a pack of 19 rows a rank is above "),
        ({"max_seqlen_per_dp_cp_rank": 4}, "sequence 0 has 9 tokens, which no CP size fits: "),
        ({"scheduler": "balanced"}, "scheduler='balanced' plans a whole step, not one micro-"),
        ({"batch": {}}, "the batch holds no tensors"),
        (
            {"batch": {**BATCH, "labels": jagged(torch.arange(3), (1, 2))}},
            "labels has lengths [1, 2], input_ids has [9, 8, 7, 4, 6]; all tensors of a batch ",
        ),
    ],
)
def test_every_rank_refuses_what_one_of_them_cannot_run(options, words, rank) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        split(rank=rank, **options)
