"""An implementation that names the Megatron it got: of the suite in `NAME`, of ranks in words."""

from __future__ import annotations

from typing import NoReturn

import megatron.core

from conformance.protocol import RankContext, Unsupported

PRELOAD = ("megatron.core",)
NAME = f"suite: {megatron.core.__file__}"


def open_rank(context: RankContext) -> NoReturn:
    raise Unsupported(f"rank: {megatron.core.__file__}")
