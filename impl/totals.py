"""Losses and metrics of every pack → those of the batch, apart from the scale of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .plan import Plan


@dataclass(frozen=True)
class Parts:
    """What a loss function found in one pack: scalars, parts of those of the batch."""

    loss: Tensor
    metrics: Mapping[str, Tensor]

    @property
    def detached(self) -> Parts:
        """The same without the graph of the pack."""
        metrics = {name: value.detach() for name, value in self.metrics.items()}
        return Parts(self.loss.detach(), metrics)


def parts_of(loss: object, metrics: Mapping[str, object], *, is_padding: bool) -> Parts:
    """What a loss function returned, checked; of a pack of padding zeros, whatever it was.

    Raises:
        ValueError: not one number each, by name.
    """
    found = {name: _scalar(f"metric {name}", value) for name, value in metrics.items()}
    parts = Parts(_scalar("the loss", loss), found)
    if not is_padding:
        return parts
    zeros = {name: torch.zeros_like(value) for name, value in found.items()}
    return Parts(torch.zeros_like(parts.loss), zeros)


def totals(
    parts: Sequence[Parts], *, plan: Plan, dp_cp_group: dist.ProcessGroup, device: torch.device
) -> Parts:
    """Sums over all micro-batches and groups, each group counted once.

    Args:
        parts: of each pack of this rank in the order of its plan, then of any packs of padding.
    Returns:
        float64 scalars, on every DP×CP rank.
    Raises:
        ValueError: packs have different metrics.
    """
    names = sorted(parts[0].metrics)
    rank = dp_cp_group.rank()
    sums = torch.zeros(1 + len(names), dtype=torch.float64, device=device)
    for part, group in zip(parts, plan.for_rank(rank), strict=False):
        if sorted(part.metrics) != names:
            raise ValueError(
                f"the loss function returned metrics {sorted(part.metrics)} of one pack and "
                f"{names} of another; return the same names for every pack"
            )
        if group.ranks[0] == rank:
            values = [part.loss, *(part.metrics[name] for name in names)]
            sums += torch.stack([value.to(sums) for value in values])
    dist.all_reduce(sums, group=dp_cp_group)
    loss, *metrics = sums.unbind()
    return Parts(loss, dict(zip(names, metrics, strict=True)))


def _scalar(what: str, value: object) -> Tensor:
    if not isinstance(value, Tensor | int | float) or torch.as_tensor(value).numel() != 1:
        raise ValueError(f"{what} is {value!r}; a loss function returns one number for each")
    return torch.as_tensor(value).reshape(())
