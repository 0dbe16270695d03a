"""What the installed Megatron-Core offers, found by looking at it and not at its version number.

The development branch calls itself 0.19.0 like a release, so a number decides nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from functools import lru_cache

import megatron.core
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams


class UnsupportedMegatron(RuntimeError):
    """The installed Megatron lacks something that was asked of it."""


@dataclass(frozen=True)
class MegatronFeatures:
    """What differs between versions and matters here.

    Args:
        version: as it calls itself.
        pad_between_seqs: `PackedSeqParams` can say that there is padding between sequences.
        size_beside_group: modules follow the packed group only if `local_cp_size` is given too.
        group_keyword: of `initialize_model_parallel`, makes Megatron's own groups; None if it
            has no dynamic CP.
        group_getter: of `parallel_state`, answers with such a group.
    """

    version: str
    pad_between_seqs: bool
    size_beside_group: bool
    group_keyword: str | None
    group_getter: str | None


@lru_cache(maxsize=1)
def features() -> MegatronFeatures:
    """Features of the Megatron that is imported."""
    packed = {field.name for field in fields(PackedSeqParams)}
    keywords = inspect.signature(parallel_state.initialize_model_parallel).parameters
    dynamic = "dynamic_context_parallel" in keywords
    hybrid = "hybrid_context_parallel" in keywords
    name = "dynamic" if dynamic else "hybrid" if hybrid else None
    return MegatronFeatures(
        version=megatron.core.__version__,
        pad_between_seqs="pad_between_seqs" in packed,
        size_beside_group=dynamic,
        group_keyword=f"{name}_context_parallel" if name else None,
        group_getter=f"get_{name}_data_context_parallel_groups" if name else None,
    )
