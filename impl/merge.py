"""Outputs of every CP group → the whole batch, in input order, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_gather
from .pack import jagged
from .plan import GroupPlan, Plan

if TYPE_CHECKING:
    from .groups import CPGroups
    from .split import SubBatch

Outputs = Mapping[str, Tensor]


def dynamic_cp_merge_output(
    outputs: Outputs, batch: SubBatch, *, groups: CPGroups
) -> dict[str, Tensor]:
    """Put every group's outputs of one micro-batch back in order; see `merge_step`."""
    return merge_step([outputs], plan=batch.plan, dp_cp_group=groups.dp_cp_group)


def merge_step(
    outputs: Sequence[Outputs], *, plan: Plan, dp_cp_group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Put the outputs of all micro-batches and groups into the order of the whole batch.

    One tensor all-gather per output, in which each member of a CP group sends its share of the
    group's values. Every rank must go on to compute the same from the result: each group keeps the
    gradient of its own samples.

    Args:
        outputs: of each micro-batch of this rank in the order of its plan, then of any packs of
            padding; jagged [S, L, ...], equal on the members of the group.
    Returns:
        jagged [whole batch, L, ...], bit for bit the same on every rank.
    """
    if not outputs[0]:
        return {}
    device = next(iter(outputs[0].values())).device
    route = _route(plan, dp_cp_group, device)
    return {
        name: jagged(_merge([one[name].values() for one in outputs], route), plan.seqlens)
        for name in outputs[0]
    }


def merge_slots(plan: Plan) -> tuple[Tensor, int]:
    """Where each token of the batch lies after the gather, and how many rows each rank sends.

    A rank sends its shares of all its groups, in order, and fills them up to what the others send.

    Returns:
        int64 [tokens of the batch] into the gathered rows, and the rows per rank.

    >>> from impl.plan import MicroBatchPlan
    >>> groups = (GroupPlan((0,), (1,)), GroupPlan((1,), (0,)))
    >>> merge_slots(Plan(2, (2, 1), (MicroBatchPlan(groups),), "by hand", True))
    (tensor([2, 3, 0]), 2)
    """
    sent: list[list[Tensor]] = [[] for _ in range(plan.world_size)]
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    for group, tokens in zip(groups, _tokens_of(groups, plan), strict=True):
        for cp_rank, rank in enumerate(group.ranks):
            sent[rank].append(share_of(tokens, cp_size=group.cp_size, cp_rank=cp_rank))
    rows = max(sum(map(len, shares)) for shares in sent)
    slots = torch.empty(sum(plan.seqlens), dtype=torch.int64)
    for rank, shares in enumerate(sent):
        place = rank * rows
        for share in shares:
            slots[share] = torch.arange(place, place + len(share))
            place += len(share)
    return slots, rows


def share_of(values: Tensor, *, cp_size: int, cp_rank: int) -> Tensor:
    """What a member sends of its group's values [N, ...]: equal shares, the last ones shorter."""
    share = -(-len(values) // cp_size)
    return values[cp_rank * share :][:share]


def _tokens_of(groups: Iterable[GroupPlan], plan: Plan) -> list[Tensor]:
    """Which tokens of the batch each group holds, in the order it holds them."""
    sequences = torch.arange(sum(plan.seqlens)).split(list(plan.seqlens))
    nothing = sequences[0][:0]
    return [torch.cat([nothing, *(sequences[each] for each in one.samples)]) for one in groups]


@dataclass(frozen=True)
class _Route:
    """The way of every output of a step: `merge_slots`, and this rank's groups and tokens."""

    slots: Tensor
    rows: int
    groups: tuple[GroupPlan, ...]
    tokens: tuple[Tensor, ...]
    dp_cp_group: dist.ProcessGroup


def _route(plan: Plan, dp_cp_group: dist.ProcessGroup, device: torch.device) -> _Route:
    groups = plan.for_rank(dp_cp_group.rank())
    tokens = _tokens_of(groups, plan)
    slots, rows = merge_slots(plan)
    there = [one.to(device, non_blocking=True) for one in (slots, *tokens)]
    return _Route(there[0], rows, groups, tuple(there[1:]), dp_cp_group)


def _merge(values: Sequence[Tensor], route: _Route) -> Tensor:
    merged: Tensor = _Merge.apply(route, *values)  # type: ignore[no-untyped-call]
    return merged


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: _Route, *values: Tensor) -> Tensor:
        ctx.tokens, ctx.num_values = route.tokens, len(values)
        rank = route.dp_cp_group.rank()
        shares = [
            share_of(one, cp_size=group.cp_size, cp_rank=group.ranks.index(rank))
            for one, group in zip(values, route.groups, strict=False)
        ]
        sent = torch.cat([values[0][:0], *shares])
        level = torch.cat([sent, sent.new_zeros(route.rows - len(sent), *sent.shape[1:])])
        gathered = all_gather(level, route.dp_cp_group)
        return gathered.index_select(0, route.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = [grad.index_select(0, tokens) for tokens in ctx.tokens]
        of_padding = [grad[:0]] * (ctx.num_values - len(own))
        return None, *own, *of_padding
