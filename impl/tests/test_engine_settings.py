"""Engines that cannot be, refused before any collective."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from impl.config import DynamicCPConfig
from impl.parallel import ParallelLayout
from impl.scale import Road

MODEL = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_size": 8,
    "vocab_size": 9,
}


@pytest.mark.parametrize(
    ("settings", "layout", "model", "road", "words"),
    [
        ({"max_sequences": 4}, {}, {"rope_interleaved": True}, Road(), "max_sequences with rope_"),
        ({}, {"tp_size": 2}, {}, Road(), "vocab_size=9 is not a multiple of tp_size=2"),
        ({}, {"pp_size": 3}, {}, Road(), "num_layers=2 is not a multiple of pp_size=3 * vpp_siz"),
        ({}, {}, {}, Road(num_values=5), "num_values=5: a loss function returns 2 or 3 values"),
        ({}, {}, {}, Road(per_token=False), "Road(num_values=3, per_token=False, ddp_averages=F"),
    ],
)
def test_engine_that_cannot_be_is_refused(settings, layout, model, road, words) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from impl.engine import Engine
    from impl.megatron.model import GPTConfig

    state: Any = SimpleNamespace(
        config=DynamicCPConfig(max_seqlen_per_dp_cp_rank=8, **settings),
        layout=ParallelLayout(**layout),
        groups=None,
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        Engine(state, model=GPTConfig(**{**MODEL, **model}), weights={}, road=road)
