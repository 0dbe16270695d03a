"""Outputs of every micro-batch and group of a step → the whole batch, in input order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .pack import jagged
from .plan import GroupPlan

Outputs = Mapping[str, Tensor]


def collect_outputs(
    outputs: Sequence[Outputs],
    groups: Sequence[GroupPlan],
    *,
    seqlens: tuple[int, ...],
    dp_cp_group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """The outputs of a step on every DP×CP rank, without gradients.

    The first rank of each CP group writes its samples where they belong, and zeros elsewhere add
    nothing: one all-reduce for each output.

    Args:
        outputs: of each micro-batch of this rank, jagged [S, L, ...] by name, equal on the members
            of its group. groups: which samples they are of, and whose.
        seqlens: of the whole batch.
    Returns:
        jagged [whole batch, L, ...] by name.
    """
    starts = torch.tensor([0, *seqlens]).cumsum(0).tolist()
    collected = {}
    for name, like in outputs[0].items():
        rows = like.values().new_zeros(starts[-1], *like.values().shape[1:])
        for output, group in zip(outputs, groups, strict=True):
            if group.ranks[0] == dp_cp_group.rank():
                _write(rows, output[name], [(starts[s], seqlens[s]) for s in group.samples])
        dist.all_reduce(rows, group=dp_cp_group)
        collected[name] = jagged(rows, seqlens)
    return collected


def collect_sums(
    parts: Sequence[Outputs], groups: Sequence[GroupPlan], dp_cp_group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Scalars of every micro-batch and group added up, each group counted once.

    Returns:
        float64 scalars by name, on every DP×CP rank.
    """
    sums = torch.zeros(len(parts[0]), dtype=torch.float64)
    for part, group in zip(parts, groups, strict=True):
        if group.ranks[0] == dp_cp_group.rank():
            sums += torch.stack([value.detach().double() for value in part.values()])
    dist.all_reduce(sums, group=dp_cp_group)
    return dict(zip(parts[0], sums.unbind(), strict=True))


def _write(rows: Tensor, output: Tensor, places: Sequence[tuple[int, int]]) -> None:
    values = output.values().detach().split([seqlen for _, seqlen in places])
    for (start, seqlen), part in zip(places, values, strict=True):
        rows[start : start + seqlen] = part
