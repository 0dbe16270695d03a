"""Layouts that cannot be are refused by name, and ranks lie where Megatron puts them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from impl.parallel import ParallelLayout


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 0}, "tp_size=0 must be a whole number of at least 1"),
        ({"pp_size": True}, "pp_size=True must be a whole number of at least 1"),
        ({"recompute": "false"}, "recompute='false' must be true or false"),
        ({"vpp_size": 2}, "vpp_size=2 needs pp_size of at least 2"),
        ({"sequence_parallel": True}, "sequence_parallel=True needs tp_size of at least 2"),
    ],
)
def test_layout_that_cannot_be_is_refused(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        ParallelLayout(**sizes)


def test_world_that_does_not_divide_is_refused() -> None:
    words = "world_size=12 is not a multiple of tp_size=2 * pp_size=2 * static_cp_size=2 = 8"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        ParallelLayout(tp_size=2, pp_size=2, static_cp_size=2).dp_cp_ranks(12)


def test_every_rank_has_one_place() -> None:
    places = ParallelLayout(tp_size=3, pp_size=2).dp_cp_ranks(24)

    assert sorted(rank for ranks in places for rank in ranks) == list(range(24))
    assert {len(ranks) for ranks in places} == {4}


def test_packs_divide_by_tp_only_with_sequence_parallelism() -> None:
    assert ParallelLayout(tp_size=2).pack_tp_size == 1
    assert ParallelLayout(tp_size=2, sequence_parallel=True).pack_tp_size == 2


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (ParallelLayout(pp_size=2, vpp_size=2), "num_layers=6 is not a multiple of pp_size=2 * "),
        (ParallelLayout(tp_size=3), "num_heads=4 is not a multiple of tp_size=3"),
        (ParallelLayout(tp_size=4), "num_kv_heads=2 is not a multiple of tp_size=4"),
    ],
    ids=["chunks", "heads", "kv_heads"],
)
def test_model_that_does_not_divide_is_refused(layout: ParallelLayout, words: str) -> None:
    from impl.megatron.model import GPTConfig, check_divisible

    model = GPTConfig(
        num_layers=6,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=24,
        vocab_size=48,
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        check_divisible(model, layout)
