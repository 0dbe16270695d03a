"""One rank of `test_collectives`: every loss in every group that it is in, results to a file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from impl.collectives import all_gather, gather_distinct, gather_replicated

WORLD = 4
GROUPS = ((0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3), (2,))
ROWS = 2

Weights = Callable[[int, int], Tensor]  # of members, of a member's place


class Scenario(NamedTuple):
    """A gather, and the loss that each member makes of its result: a weighted sum of squares."""

    gather: Callable[[Tensor, dist.ProcessGroup], Tensor]
    weights: Weights


def part_of(rank: int) -> Tensor:
    """What a rank gives to the gather: float64 [2, 3]."""
    return torch.arange(6, dtype=torch.float64).view(ROWS, 3) + 10 * (rank + 1)


def shared_weights(members: int, place: int) -> Tensor:
    """The same loss on every member."""
    return torch.arange(1, 1 + 3 * ROWS * members, dtype=torch.float64).view(-1, 3)


def different_weights(members: int, place: int) -> Tensor:
    """Another loss on every member."""
    return shared_weights(members, place) * (place + 2) + place


def one_has_a_loss(members: int, place: int) -> Tensor:
    """A loss on the first member only; the others take part with zero."""
    return shared_weights(members, place) * (place == 0)


SCENARIOS = {
    "replicated": Scenario(gather_replicated, shared_weights),
    "distinct": Scenario(gather_distinct, different_weights),
    "distinct_alike": Scenario(gather_distinct, shared_weights),
    "distinct_on_one": Scenario(gather_distinct, one_has_a_loss),
}


def run_rank(rank: int, folder: str) -> None:
    """Everything that one rank does; results go to `rank_N.pt`, by group and scenario."""
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), WORLD)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    results = {}
    for members in GROUPS:
        group = dist.new_group(list(members), timeout=limit)
        if rank in members:
            results[members] = {
                **{name: _run(scenario, rank, group) for name, scenario in SCENARIOS.items()},
                "all_gather": all_gather(part_of(rank).long().t(), group),
            }
    torch.save(results, Path(folder) / f"rank_{rank}.pt")
    dist.destroy_process_group()


def _run(scenario: Scenario, rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """What is gathered, and the gradient of this rank's part."""
    part = part_of(rank).requires_grad_()
    gathered = scenario.gather(part, group)
    loss = (scenario.weights(group.size(), group.rank()) * gathered**2).sum()
    (gradient,) = torch.autograd.grad(loss, part)
    return gathered.detach(), gradient
