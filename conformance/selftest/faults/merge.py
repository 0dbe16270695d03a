"""Faults of the merge: the outputs of all groups, in input order, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import Tensor

from .fault import fault, wrap


@fault(
    "inclusionAI/AReaL c0489a200",
    case="lens5_13_9-4ranks-cp2",
    says={"logits": "sequence 0, token 0, rank 2 of CP group [2, 3]"},
)
def samples_in_the_order_of_groups(patch: MonkeyPatch) -> None:
    """Shards are laid side by side and not put back in input order."""
    wrap(patch, "impl.merge.merge_slots", _group_order)


def _group_order(original: Any, plan: Any) -> tuple[Tensor, int]:
    slots, rows = original(plan)
    by_sample = slots.split(list(plan.seqlens))
    (micro_batch,) = plan.micro_batches
    order = [sample for group in micro_batch.groups for sample in group.samples]
    return torch.cat([by_sample[sample] for sample in order]), rows


@fault(
    "Megatron-LM#7452",
    case="lens7_9-4ranks-cp2",
    says={"merge": "logits of sequence 1 on rank 2 is not rank 0's"},
)
def one_rank_differs_by_one_bit(patch: MonkeyPatch) -> None:
    """What a rank returns is not what the others do; checks that read rank 0 are blind to it."""
    wrap(patch, "conformance.adapters.impl._ModelRun.one_pass", _last_bit_on_rank_2)


def _last_bit_on_rank_2(original: Any, *args: Any) -> Any:
    outputs = original(*args)
    if dist.get_rank() != 2:
        return outputs
    first, second = outputs.logits
    return replace(outputs, logits=(first, second.nextafter(second + 1)))
