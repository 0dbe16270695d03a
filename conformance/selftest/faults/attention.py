"""Faults inside the model: RoPE, attention over a CP group, gradients of its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch

from .fault import fault, wrap


@fault("Megatron-LM#6821", case="lens7_9-4ranks-cp4", says={"run": "rope_utils.py"})
def rope_with_the_group_of_build_time(patch: MonkeyPatch) -> None:
    """RoPE is not told the group of the micro-batch: an error in 0.16.1 to 0.19.2."""
    patch.setattr("conformance.adapters.impl.Rank.binds", False)


@fault(
    "Megatron-LM#6821",
    case="lens8_7-4ranks-cp4",
    says={"logits": "sequence 0, token 1, rank 1 of CP group [0, 1, 2, 3]"},
)
def rope_from_the_start_of_the_shard(patch: MonkeyPatch) -> None:
    """The same without an error, as on Megatron's main branch in August 2026."""
    wrap(
        patch,
        "megatron.core.models.common.embeddings.rope_utils._get_thd_freqs_on_this_cp_rank",
        lambda original, cp_rank, cp_size, *rest: original(0, 1, *rest),
    )


@fault(
    "Megatron-LM#5215",
    case="lens7_9_12-4ranks-cp2.1.2",
    says={"order": "pass 2 is not pass 0", "logits": "pass 2: sequence 0, token"},
)
def cp_stays_off(patch: MonkeyPatch) -> None:
    """A micro-batch at CP 1 takes the ring away, and nobody puts it back for the next."""
    wrap(patch, "impl.megatron.attention.ExactAttention.forward", _off_for_good)


def _off_for_good(
    original: Any, attention: Any, *args: Any, packed_seq_params: Any, **kwargs: Any
) -> Any:
    cp_size = packed_seq_params.cp_group.size()
    attention.is_off = cp_size == 1 or getattr(attention, "is_off", False)
    if attention.is_off:
        bounds = packed_seq_params.cu_seqlens_q_padded // cp_size
        packed_seq_params = replace(packed_seq_params, cu_seqlens_q_padded=bounds)
        packed_seq_params.cp_group = None
    return original(attention, *args, packed_seq_params=packed_seq_params, **kwargs)


@fault(
    "Megatron-LM#4092",
    case="lens5_6_7_8_9_10_11_12-4ranks-cp1",
    says={"logits": "sequence 4, token 0"},
)
def boundaries_do_not_arrive(patch: MonkeyPatch) -> None:
    """Attention takes the pack for one long sequence."""
    wrap(
        patch,
        "impl.megatron.attention.visible_blocks",
        lambda original, padded, **sizes: original((sum(padded),), **sizes),
    )


@fault("slime#1748", case="lens7_9-4ranks-cp4", says={"gradients": "model.layers.0."})
def gradients_of_other_ranks_lost(patch: MonkeyPatch) -> None:
    """The gather of keys and values keeps its own slice of the gradient and adds up nothing."""
    patch.setattr("impl.megatron.attention.gather_distinct", _gather_replicated)


def _gather_replicated(x: torch.Tensor, group: Any) -> torch.Tensor:
    from impl.collectives import gather_replicated

    return gather_replicated(x, group)


@fault(
    "Megatron-LM#7452",
    case="lens7_9-4ranks-cp4",
    says={"gradients": "norm.weight[", "merge": "norm.weight on rank 1 is not rank 0's"},
)
def gradient_of_norms_not_summed(patch: MonkeyPatch) -> None:
    """The parameters of norms are not marked, so each rank keeps a gradient of its own shard."""
    wrap(patch, "conformance.adapters.impl._ModelRun.summed", _without_norms)


def _without_norms(original: Any, run: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    own = {name: gradient for name, gradient in gradients.items() if "norm" in name}
    return {**original(run, gradients), **own}


@fault(
    "Megatron-LM#5215, the group stays bound",
    case="lens7_9-4ranks-cp2",
    says={"run": "a CP group is still bound to the model"},
)
def group_stays_bound(patch: MonkeyPatch) -> None:
    """The group of a micro-batch is not put back; the next one binds its own, so nothing shows."""
    wrap(patch, "impl.megatron.bind._bound_for_one_call", _never_restored)


def _never_restored(original: Any, module: Any, forward: Any) -> Any:
    def bound(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        module.pg_collection.cp = packed_seq_params.cp_group
        return forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    return bound
