"""Megatron as released, where it has no dynamic CP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.adapters import stock
from conformance.protocol import RankContext, Unsupported
from impl.megatron import probe


def test_stock_is_unsupported_where_megatron_has_no_dynamic_cp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = replace(probe.features(), version="0.15.3", group_keyword=None)
    monkeypatch.setattr(probe, "features", lambda: without)
    rank = object.__new__(stock.Rank)

    with pytest.raises(Unsupported, match=r"megatron-core 0\.15\.3 has no dynamic CP of its own"):
        rank.enter(RankContext(rank=0, world_size=1, timeout_s=1.0, options={}))
