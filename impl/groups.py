"""Process groups for every CP size: ours, since Megatron's lack sizes and can have wrong members.

For 10 ranks Megatron's group of "size 4" may hold two (megatron-core 0.16.1 to 0.19.2), and it has
none of size 1, so that "no group" means both "CP is off" and "use the default". Here every block
of `impl.plan.cp_blocks` is a real group, size 1 included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .plan import Plan, cp_blocks


class PlanMismatch(RuntimeError):
    """Ranks were given different lengths, orders or settings."""


@dataclass(frozen=True)
class CPGroups:
    """This rank's CP groups among its DP×CP ranks.

    Args:
        dp_cp_group: all DP×CP ranks. dp_cp_rank: this rank's place among them.
        by_size: the groups of `cp_blocks` that hold this rank, one of a size. The last of 6 ranks
            is in none of size 4.
    """

    dp_cp_group: dist.ProcessGroup
    by_size: Mapping[int, dist.ProcessGroup]

    @property
    def world_size(self) -> int:
        return self.dp_cp_group.size()

    @property
    def dp_cp_rank(self) -> int:
        return self.dp_cp_group.rank()

    def of_ranks(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these DP×CP ranks, of which this rank is one.

        Raises:
            ValueError: there is no such group.
        """
        group = self.by_size.get(len(ranks))
        first = self.dp_cp_rank - group.rank() if group is not None else 0
        if group is None or tuple(ranks) != tuple(range(first, first + len(ranks))):
            raise ValueError(
                f"{list(ranks)} is no CP group of rank {self.dp_cp_rank} among "
                f"{self.world_size} DP×CP ranks"
            )
        return group

    def check_same_plan(self, plan: Plan, *settings: object) -> None:
        """Compare a plan, and what else decides how it is run, over all ranks.

        Those of other TP and PP places too: with another plan they would wait for ever.

        Args:
            settings: anything whose `repr` says all of it, such as pack rules.
        Raises:
            PlanMismatch: on every rank, naming the first rank that differs from rank 0.
        """
        mine = torch.tensor([plan.hash_with(*settings)])
        hashes = torch.empty(dist.get_world_size(), dtype=torch.int64)
        dist.all_gather_into_tensor(hashes, mine)
        for rank, other in enumerate(hashes.tolist()):
            if other != hashes[0]:
                raise PlanMismatch(
                    f"rank {rank} has plan {other:x}, rank 0 has {hashes[0]:x}: every rank must "
                    "be given the same lengths and settings in the same order"
                )


def create_cp_groups(dp_cp_ranks: Sequence[Sequence[int]], *, timeout: timedelta) -> CPGroups:
    """Make every group of `cp_blocks`; a collective over the default group.

    Args:
        dp_cp_ranks: the DP×CP rank lists of the whole world (one for each TP, PP place), the
            same on every rank; together they hold every rank once.
        timeout: limit of each collective in these groups.
    """
    blocks = cp_blocks(len(dp_cp_ranks[0]))
    mine: dict[int, dist.ProcessGroup] = {}
    for block in blocks:
        for ranks in dp_cp_ranks:
            members = [ranks[place] for place in block]
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                mine[len(block)] = group
    return CPGroups(dp_cp_group=mine[len(blocks[-1])], by_size=mine)


def destroy_cp_groups(groups: CPGroups) -> None:
    """Give the groups back, on every rank."""
    for group in groups.by_size.values():
        dist.destroy_process_group(group)
