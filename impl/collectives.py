"""Gathers whose backward is right, one for each way their result is used.

The same all-gather has two gradients. Where every member computes the *same* thing from the
result (a replicated loss), each keeps the gradient of its own part, and the sum over members
counts each token once. Where members compute *different* things from it (attention, each with its
own queries), the parts of all members must be summed. Mixing them up scales gradients by the group
size or loses them: Megatron-Bridge #4784 and slime #1748 are public examples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Equal-shaped [R, ...] of every member → [C * R, ...] in group order, used alike by all.

    Backward: the gradient of one's own part, no communication.
    """
    if group.size() == 1:
        return x
    gathered: Tensor = _GatherReplicated.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def gather_distinct(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Equal-shaped [R, ...] of every member → [C * R, ...] in group order, used differently.

    Backward: the sum over members of the gradients of one's part.
    """
    if group.size() == 1:
        return x
    gathered: Tensor = _GatherDistinct.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Equal-shaped [R, ...] of every member → [C * R, ...] in group order, without gradients."""
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_part(grad, ctx.group), None


class _GatherDistinct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)  # gloo has no reduce-scatter on every torch
        return _own_part(summed, ctx.group), None
