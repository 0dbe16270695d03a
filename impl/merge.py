"""Outputs of every CP group → the whole batch, in input order, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather
from .pack import jagged

if TYPE_CHECKING:
    from .groups import CPGroups
    from .split import SubBatch


def dynamic_cp_merge_output(
    outputs: Mapping[str, Tensor], batch: SubBatch, *, groups: CPGroups
) -> dict[str, Tensor]:
    """Put every group's outputs back into the order of the whole batch.

    One tensor all-gather per output, in which each member of a CP group sends its share of the
    group's values. Every rank must go on to compute the same from the result: each group keeps the
    gradient of its own samples.

    Args:
        outputs: jagged [S, L, ...] of this rank's group, equal on its members.
    Returns:
        jagged [whole batch, L, ...], bit for bit the same on every rank.
    """
    if groups.world_size == 1:
        return dict(outputs)
    cp_size = batch.local_cp_size
    slots, share = merge_slots(batch.batch_seqlens, batch.group_samples, cp_size=cp_size)
    start = groups.dp_cp_rank // cp_size * cp_size * share  # where this rank's group begins
    route = _Route(slots, share, start, batch.cp_group.rank(), groups.dp_cp_group)
    return {name: _merge(one, route, batch.batch_seqlens) for name, one in outputs.items()}


def merge_slots(
    seqlens: Sequence[int], group_samples: Sequence[Sequence[int]], *, cp_size: int
) -> tuple[Tensor, int]:
    """Where each token of the batch lies after the gather, and how many rows each rank sends.

    A group's values are its samples side by side, cut into `cp_size` equal shares, the last ones
    filled up.

    Returns:
        int64 [tokens of the batch] into the gathered rows, and the rows per rank.

    >>> merge_slots([2, 1], [[1], [0]], cp_size=1)
    (tensor([2, 3, 0]), 2)
    """
    sizes = [sum(seqlens[sample] for sample in samples) for samples in group_samples]
    share = -(-max(sizes) // cp_size)
    slots: dict[int, Tensor] = {}
    for group, samples in enumerate(group_samples):
        place = group * cp_size * share
        for sample in samples:
            slots[sample] = torch.arange(place, place + seqlens[sample])
            place += seqlens[sample]
    return torch.cat([slots[sample] for sample in range(len(seqlens))]), share


@dataclass(frozen=True)
class _Route:
    """The way of every output of a batch: `merge_slots`, and where this rank's group stands."""

    slots: Tensor
    share: int
    start: int
    cp_rank: int
    dp_cp_group: dist.ProcessGroup


def _merge(tensor: Tensor, route: _Route, seqlens: tuple[int, ...]) -> Tensor:
    merged: Tensor = _Merge.apply(tensor.values(), route)  # type: ignore[no-untyped-call]
    return jagged(merged, seqlens)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, route: _Route) -> Tensor:
        slots, share = route.slots.to(values.device), route.share
        mine = values[route.cp_rank * share :][:share]
        level = torch.cat([mine, mine.new_zeros(share - len(mine), *mine.shape[1:])])
        own = (slots >= route.start) & (slots < route.start + len(values))
        ctx.save_for_backward(own.nonzero()[:, 0])
        return all_gather(level, route.dp_cp_group).index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (own,) = ctx.saved_tensors
        return grad.index_select(0, own), None
