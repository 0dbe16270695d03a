"""Megatron's model-parallel state and the CP groups: opened once, for any number of engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .config import DynamicCPConfig
from .groups import CPGroups, create_cp_groups, destroy_cp_groups
from .megatron import training
from .megatron.packed import check_layout
from .megatron.parallel import model_parallel
from .parallel import ParallelLayout
from .plan import Plan
from .planner import make_plan

DATA_PARALLEL = ParallelLayout()


@dataclass(frozen=True)
class ParallelState:
    """How this rank's models run, and with whom.

    Args:
        config: of dynamic CP. layout: how models are spread.
        groups: this rank's CP groups among its DP×CP ranks.
        device: where models are.
    """

    config: DynamicCPConfig
    layout: ParallelLayout
    groups: CPGroups
    device: torch.device

    def plan(self, seqlens: tuple[int, ...]) -> Plan:
        """The plan of a step, the same on every rank that is given the same lengths.

        Ranks meet only in their own CP groups, unless a pipeline needs every rank of every
        micro-batch.

        Raises:
            ValueError: nothing to plan, or a sample that fits no group.
            UnsupportedMegatron: scheduler="megatron", and its plan cannot be run.
        """
        return _plan(seqlens, self.config, self.layout, world_size=self.groups.world_size)


@contextmanager
def open_parallel_state(
    config: DynamicCPConfig,
    layout: ParallelLayout = DATA_PARALLEL,
    *,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
) -> Iterator[ParallelState]:
    """Set up Megatron and the CP groups on every rank of the default process group together.

    Megatron's state is global, so one can be open at a time. An actor and its reference model, for
    example, are two engines in one state.

    Args:
        device: "cpu", or this rank's GPU, which is made the current one. The default process group
            must do collectives of its tensors, and of the CPU's: "cpu:gloo,cuda:nccl".
        timeout: limit of a collective; Megatron's groups have it in whole minutes.
    Raises:
        UnsupportedMegatron: the installed one lacks something, before any collective.
        ValueError: world, layout and settings do not go together, likewise.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    training.check_megatron()
    _check_backends(device)
    places = layout.dp_cp_ranks(dist.get_world_size())
    num_ranks = len(places[0])
    check_layout(config.layout, cp_size=min(config.highest_cp_size or num_ranks, num_ranks))
    _plan((1,), config, layout, world_size=num_ranks)  # settings that leave no plan at all
    with model_parallel(layout, timeout=timeout):
        groups = create_cp_groups(places, timeout=timeout)
        try:
            yield ParallelState(config, layout, groups, device)
        finally:
            destroy_cp_groups(groups)


def _check_backends(device: torch.device) -> None:
    backends = dist.get_backend_config(dist.group.WORLD)
    for kind in {"cpu", device.type}:
        if f"{kind}:" not in backends:
            raise ValueError(
                f"the default process group has {backends} and none for {kind} tensors; "
                'use torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
            )


def _plan(
    seqlens: tuple[int, ...], config: DynamicCPConfig, layout: ParallelLayout, *, world_size: int
) -> Plan:
    return make_plan(
        seqlens,
        config=config,
        world_size=world_size,
        tp_size=layout.pack_tp_size,
        barriered=layout.pp_size > 1,
    )
