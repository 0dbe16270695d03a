"""Megatron as it is released: its own CP groups, its own spelling, nothing bound.

The packs, the loss and the merge are ours; what runs between them is Megatron's code alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ..protocol import RankContext, Unsupported
from . import impl

if TYPE_CHECKING:
    from impl.groups import CPGroups
    from impl.thd import PackedRow

NAME = "stock"
STOCK = True
PRELOAD = impl.PRELOAD
WATCH = impl.WATCH
versions = impl.versions
index = impl.index


class Rank(impl.Rank):
    """Groups from Megatron where it makes them, and attention left alone."""

    binds = False

    def enter(self, context: RankContext) -> CPGroups:
        from impl.groups import create_cp_groups, destroy_cp_groups
        from impl.megatron.parallel import model_parallel
        from impl.megatron.probe import features

        if features().group_keyword is None:
            raise Unsupported(
                f"megatron-core {features().version} has no dynamic CP of its own; "
                "0.16.0 and later have"
            )
        groups = create_cp_groups(
            [range(context.world_size)], timeout=timedelta(seconds=context.timeout_s)
        )
        self.resources.callback(destroy_cp_groups, groups)
        # with one rank there is nothing to cut, and Megatron refuses the keyword
        self.resources.enter_context(model_parallel(megatron_groups=context.world_size > 1))
        return groups

    def spell(self, packed: PackedRow) -> None:
        """A group and its size, or no group and size 1: how Megatron's own schedule says it."""
        from impl.megatron.parallel import megatron_cp_group

        cp_size = packed.cp_group.size()
        packed.params.local_cp_size = cp_size
        packed.params.cp_group = megatron_cp_group(cp_size)


def open_rank(context: RankContext) -> Rank:
    return Rank(context)
