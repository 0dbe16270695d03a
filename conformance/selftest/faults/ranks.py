"""Faults of a process: it dies, hangs, or leaves something behind for the next task."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from .fault import fault, wrap

_FORWARD = "impl.forward.gptmodel_forward_model_engine"


@fault(
    "Megatron-LM#6821, fused RoPE",
    case="lens7_9-4ranks-cp4",
    says={"run": "rank 1 | Died: its process was ended by SIGSEGV"},
)
def illegal_access(patch: MonkeyPatch) -> None:
    """One rank reads out of bounds and is gone, while the others wait for it."""
    wrap(patch, _FORWARD, _die_on_rank_1)


def _die_on_rank_1(original: Any, *args: Any, **kwargs: Any) -> Any:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return original(*args, **kwargs)


@fault(
    "verl#5895",
    case="lens7_9-4ranks-cp2",
    says={"run": "waits in all_reduce"},
)
def collective_of_one_rank(patch: MonkeyPatch) -> None:
    """A reduction is entered by the first rank of a CP group alone."""
    wrap(patch, "conformance.adapters.impl._ModelRun.one_pass", _reduce_on_rank_0)


def _reduce_on_rank_0(original: Any, run: Any, *args: Any) -> Any:
    outputs = original(run, *args)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1), group=run.groups.dp_cp_group)
    return outputs


@fault(
    "Megatron-LM#5215",
    case="lens7_9-4ranks-cp2",
    says={"run": "StateLeak: megatron.core.transformer.attention.SelfAttention.forward"},
)
def class_left_patched(patch: MonkeyPatch) -> None:
    """The wrapper that rebinds the CP group stays on Megatron's class; the results are right."""
    wrap(patch, _FORWARD, _patch_for_good)


def _patch_for_good(original: Any, *args: Any, **kwargs: Any) -> Any:
    from megatron.core.transformer.attention import SelfAttention

    forward = SelfAttention.forward
    SelfAttention.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return original(*args, **kwargs)


@fault(
    "Megatron-LM 975a0c3b4c, ranks with other batches",
    case="lens7_9-4ranks-cp2",
    says={"run": "PlanMismatch: rank 1 has plan"},
)
def one_rank_plans_otherwise(patch: MonkeyPatch) -> None:
    """One rank has another plan; every rank must say so before the first collective of a model."""
    wrap(patch, "impl.groups.CPGroups.check_same_plan", _other_on_rank_1)


def _other_on_rank_1(original: Any, groups: Any, plan: Any, *settings: object) -> None:
    original(groups, plan, *settings, dist.get_rank() == 1)
