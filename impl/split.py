"""The whole batch on every rank → the samples of this rank's CP group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .config import DynamicCPConfig
from .groups import CPGroups
from .pack import jagged, offsets_of, seqlens_of
from .rules import DEFAULT_RULES, PackRules
from .schedule import choose_local_cp_size, plan_hash, split_samples


@dataclass(frozen=True, eq=False)
class SubBatch:
    """What one CP group runs, and what is needed to put its results back in place.

    Args:
        tensors: jagged [S, L, ...], this group's samples only.
        seqlens: their lengths; empty if there are fewer samples than groups.
        local_cp_size: the size chosen, recorded whatever the number of samples.
        cp_group: the ranks that share these samples.
        batch_seqlens: lengths of the whole batch. group_samples: sample indices of every group.
        plan_hash: equal on all ranks if they were given the same lengths and settings.
        rules: how its sequences are cut over the ranks.
    """

    tensors: Mapping[str, Tensor]
    seqlens: tuple[int, ...]
    local_cp_size: int
    cp_group: dist.ProcessGroup
    batch_seqlens: tuple[int, ...]
    group_samples: tuple[tuple[int, ...], ...]
    plan_hash: int
    rules: PackRules = DEFAULT_RULES

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def dynamic_cp_split_batch(
    batch: Mapping[str, Tensor], *, config: DynamicCPConfig, groups: CPGroups
) -> SubBatch:
    """Choose the CP size of a micro-batch and take this rank's samples of it.

    No communication: every rank computes the same plan from the same lengths.

    Args:
        batch: jagged tensors [S, L, ...] with equal lengths, the whole micro-batch.
    Raises:
        ValueError: nothing to run, lengths that differ between tensors, no CP size that fits, or
            a scheduler that plans whole steps.
    """
    if config.scheduler != "uniform":
        raise ValueError(
            f"scheduler={config.scheduler!r} plans a whole step, not one micro-batch; use "
            "impl.planner.make_plan, or scheduler='uniform'"
        )
    seqlens = common_seqlens(batch)
    lowest = config.min_cp_size
    cp_size = choose_local_cp_size(
        seqlens,
        world_size=groups.world_size,
        max_seqlen_per_dp_cp_rank=config.max_seqlen_per_dp_cp_rank,
        min_cp_size=lowest,
        max_cp_size=config.max_cp_size if config.dynamic_context_parallel else lowest,
    )
    samples = split_samples(seqlens, world_size=groups.world_size, cp_size=cp_size)
    mine = samples[groups.dp_cp_rank // cp_size]
    return SubBatch(
        tensors={name: select_samples(tensor, mine) for name, tensor in batch.items()},
        seqlens=tuple(seqlens[index] for index in mine),
        local_cp_size=cp_size,
        cp_group=groups.of_size(cp_size),
        batch_seqlens=seqlens,
        group_samples=tuple(tuple(group) for group in samples),
        plan_hash=plan_hash(seqlens, cp_size=cp_size, samples=samples),
        rules=PackRules(layout=config.layout),
    )


def common_seqlens(batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Lengths of a batch of jagged tensors, which must be equal in all of them."""
    if not batch:
        raise ValueError("the batch holds no tensors")
    (first, tensor), *others = batch.items()
    seqlens = seqlens_of(tensor)
    for name, other in others:
        if seqlens_of(other) != seqlens:
            raise ValueError(
                f"{name} has lengths {list(seqlens_of(other))}, {first} has {list(seqlens)}; "
                "all tensors of a batch need the same"
            )
    return seqlens


def select_samples(tensor: Tensor, samples: Sequence[int]) -> Tensor:
    """Some sequences of a jagged tensor."""
    values, offsets = tensor.values(), offsets_of(tensor).tolist()
    parts = [values[offsets[index] : offsets[index + 1]] for index in samples]
    return jagged(torch.cat([values[:0], *parts]), tuple(len(part) for part in parts))
