"""Faults of what must be refused by a clear error, before any collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from .fault import fault, wrap


@fault(
    "Megatron-LM 0.16.0 to 0.19.0, hybrid_cp_schedule",
    case="refused_emptysequence-1ranks-cp1",
    says={"refusal": "it was accepted"},
)
def empty_sequence_accepted(patch: MonkeyPatch) -> None:
    """A sequence without tokens runs like any other."""
    patch.setattr("impl.schedule.check_seqlens", lambda seqlens: None)
    patch.setattr("impl.validate.check_seqlens", lambda seqlens: None)


@fault(
    "Megatron-LM#5679",
    case="refused_size-1ranks-cp2",
    says={"refusal": "it was accepted"},
)
def falls_back_to_another_size(patch: MonkeyPatch) -> None:
    """A CP size without groups is answered with one that has some, and nobody is told."""
    wrap(patch, "impl.planner.choose_local_cp_size", _any_size)
    patch.setattr("impl.planner.validate", _nothing)


def _nothing(*_: Any, **__: Any) -> None: ...


def _any_size(original: Any, seqlens: Any, *, world_size: int, **limits: Any) -> Any:
    return original(seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=max(seqlens))


@fault(
    "Megatron-LM#5679",
    case="refused_size-4ranks-cp3",
    says={"refusal": "raised KeyError, not ValueError: 3"},
)
def size_without_groups_is_a_key_error(patch: MonkeyPatch) -> None:
    """The table of groups is asked before anybody checks the size."""
    wrap(patch, "impl.planner.choose_local_cp_size", _asked_size)
    patch.setattr("impl.planner.validate", _nothing)
    patch.setattr("impl.schedule.check_cp_size", lambda cp_size, world_size: None)
    wrap(
        patch,
        "impl.groups.CPGroups.of_ranks",
        lambda original, groups, ranks: groups.by_size[len(ranks)],
    )


def _asked_size(original: Any, *args: Any, min_cp_size: int, **kwargs: Any) -> int:
    return min_cp_size


@fault(
    "Megatron-LM 975a0c3b4c",
    case="refused_emptybatch-4ranks-cp2",
    says={"refusal": "not refused before the first collective: no answer within"},
)
def batch_checked_after_a_collective(patch: MonkeyPatch) -> None:
    """Ranks agree on a number of micro-batches first: one that has none waits for ever."""
    wrap(patch, "impl.planner.choose_local_cp_size", _agree_first)


def _agree_first(original: Any, *args: Any, **kwargs: Any) -> Any:
    dist.all_reduce(torch.ones(1))
    return original(*args, **kwargs)
