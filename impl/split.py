"""The whole batch on every rank → the samples of this rank's CP group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from .config import DynamicCPConfig
from .groups import CPGroups
from .pack import jagged, offsets_of
from .plan import Plan
from .planner import make_plan
from .rules import DEFAULT_RULES, PackRules


@dataclass(frozen=True, eq=False)
class SubBatch:
    """What one CP group runs, and what is needed to put its results back in place.

    Args:
        tensors: jagged [S, L, ...], this group's samples only.
        seqlens: their lengths; empty if there are fewer samples than groups.
        local_cp_size: the size chosen, recorded whatever the number of samples.
        cp_group: the ranks that share these samples.
        plan: what every group runs, of which this is one; the same on all ranks if they were
            given the same lengths and settings.
        rules: how its sequences are cut over the ranks.
    """

    tensors: Mapping[str, Tensor]
    seqlens: tuple[int, ...]
    local_cp_size: int
    cp_group: dist.ProcessGroup
    plan: Plan
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
        ValueError: nothing to run, lengths that differ between tensors, no CP size that fits, a
            pack that the settings do not allow, or a scheduler that plans whole steps.
    """
    if config.scheduler != "uniform":
        raise ValueError(
            f"scheduler={config.scheduler!r} plans a whole step, not one micro-batch; use "
            "impl.planner.make_plan, or scheduler='uniform'"
        )
    seqlens = common_seqlens(batch)
    whole = replace(config, micro_batch_samples=None)  # the batch is one micro-batch
    plan = make_plan(seqlens, config=whole, world_size=groups.world_size)
    (mine,) = plan.for_rank(groups.dp_cp_rank)
    return SubBatch(
        tensors={
            name: select_samples(tensor, mine.samples, seqlens) for name, tensor in batch.items()
        },
        seqlens=tuple(seqlens[sample] for sample in mine.samples),
        local_cp_size=mine.cp_size,
        cp_group=groups.of_ranks(mine.ranks),
        plan=plan,
        rules=config.rules,
    )


def common_seqlens(batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Lengths of a batch of jagged tensors, which must be equal in all of them.

    They come to the host here, all at once.
    """
    if not batch:
        raise ValueError("the batch holds no tensors")
    offsets = [offsets_of(tensor) for tensor in batch.values()]
    if len({len(one) for one in offsets}) == 1:
        first, *others = torch.stack(offsets).diff().tolist()
    else:
        first, *others = (one.diff().tolist() for one in offsets)
    for name, other in zip(list(batch)[1:], others, strict=True):
        if other != first:
            raise ValueError(
                f"{name} has lengths {other}, {next(iter(batch))} has {first}; "
                "all tensors of a batch need the same"
            )
    return tuple(first)


def select_samples(tensor: Tensor, samples: Sequence[int], seqlens: Sequence[int]) -> Tensor:
    """Some sequences of a jagged tensor with these lengths."""
    values, starts = tensor.values(), list(accumulate(seqlens, initial=0))
    chosen = [values[starts[sample] : starts[sample + 1]] for sample in samples]
    return jagged(torch.cat([values[:0], *chosen]), tuple(map(len, chosen)))
