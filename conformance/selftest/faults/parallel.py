"""Faults of parallel layouts: gradients of what ranks repeat, groups of mixed and static size."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from pytest import MonkeyPatch

from .fault import fault, wrap

_BOUND = "impl.megatron.bind._bound_for_one_call"


@fault(
    "Megatron-LM#7452, finding 11",
    case="lens7_9-2ranks-cp1-tp2-sp",
    says={"gradients": "norm.weight[", "merge": "norm.weight on rank 1 is not rank 0's"},
)
def gradient_of_norms_not_summed_over_tp(patch: MonkeyPatch) -> None:
    """With sequence parallelism a TP rank keeps a norm's gradient of its own rows."""
    wrap(patch, "impl.megatron.training.build_chunks", _unmarked)


def _unmarked(original: Any, *args: Any, **kwargs: Any) -> Any:
    chunks = original(*args, **kwargs)
    for parameter in (each for chunk in chunks for each in chunk.parameters()):
        parameter.sequence_parallel = False
    return chunks


@fault(
    "uw-syfi/piper#13",
    case="lens7_9-2ranks-cp1-qwen2-pp2",
    says={"gradients": "embed_tokens.weight["},
)
def gradient_of_tied_embedding_not_summed_over_stages(patch: MonkeyPatch) -> None:
    """The first and the last stage each keep what their own use of the tied matrix gave."""
    finalising = sys.modules["megatron.core.distributed.finalize_model_grads"]  # has a namesake
    patch.setattr(finalising, "_allreduce_word_embedding_grads", lambda *_, **__: None)


@fault(
    "uw-syfi/piper#13, the last stage",
    case="lens7_9-2ranks-cp1-qwen2-pp2",
    says={"gradients": "] on stage 1: got "},
)
def gradient_of_tied_embedding_summed_on_the_first_stage_only(patch: MonkeyPatch) -> None:
    """The last stage keeps what its own use gave, so the two copies drift apart."""
    finalising = sys.modules["megatron.core.distributed.finalize_model_grads"]  # has a namesake
    name = "_allreduce_word_embedding_grads"
    patch.setattr(finalising, name, partial(_first_stage_only, getattr(finalising, name)))


def _first_stage_only(original: Any, chunks: Any, *args: Any, **kwargs: Any) -> None:
    later = [chunk for chunk in chunks if not chunk.module.pre_process]
    copies = [
        one for chunk in later for one in chunk.parameters() if hasattr(one, "shared_embedding")
    ]
    own = [one.main_grad.clone() for one in copies]
    original(chunks, *args, **kwargs)
    for one, gradient in zip(copies, own, strict=True):
        one.main_grad.copy_(gradient)


@fault(
    "verl#5869, CP groups of mixed sizes",
    case="lens5_9_7-4ranks-cp2_1_1",
    says={"gradients": "times the truth"},
)
def groups_weigh_by_their_cp_size(patch: MonkeyPatch) -> None:
    """Each loss is multiplied by the CP size of its group; the loss that is reported is right."""
    wrap(patch, "impl.engine.Engine._loss", _times_cp_size)


def _times_cp_size(
    original: Any, engine: Any, processor: Any, loss_fn: Any, one: Any, logits: torch.Tensor
) -> Any:
    scaled, *rest = original(engine, processor, loss_fn, one, logits)
    return scaled * one.packed.cp_group.size(), *rest


@fault(
    "ISEEKYAN/Megatron-LM#140",
    case="lens5_9_7-4ranks-cp2_1_1",
    says={"loss": "expected", "gradients": "times the truth"},
)
def groups_divide_by_their_own_tokens(patch: MonkeyPatch) -> None:
    """The mean is that of a group, then of groups, however many tokens each of them has."""
    wrap(patch, "conformance.adapters.impl_engine._EngineRun.loss", _mean_of_the_group)


def _mean_of_the_group(original: Any, run: Any, outputs: Any, inputs: Any) -> Any:
    loss, metrics = original(run, outputs, inputs)
    share = inputs["weights"].values().sum()
    return loss / share.where(share > 0, 1) / run.engine.groups.world_size, metrics


@fault(
    "Megatron-LM#5355",
    case="lens7_9-2ranks-cp1-static2",
    says={"run": "RuntimeError: split_with_sizes expects split_sizes to sum exactly to 9"},
)
def static_group_at_cp_size_1(patch: MonkeyPatch) -> None:
    """A CP size of 1 is taken for no size at all, so RoPE has the group Megatron started with."""
    wrap(patch, _BOUND, _bound_above_size_1)


def _bound_above_size_1(original: Any, module: Any, forward: Any) -> Any:
    bound = original(module, forward)

    def bound_or_not(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        run = forward if packed_seq_params.cp_group.size() == 1 else bound
        return run(*args, packed_seq_params=packed_seq_params, **kwargs)

    return bound_or_not


@fault(
    "Megatron-LM#2574",
    case="lens3_5-2ranks-cp1-tp2-sp",
    says={"layout": "cu_seqlens_padded [0, 3, 8] should be [0, 4, 10]"},
)
def packs_not_padded_for_sequence_parallelism(patch: MonkeyPatch) -> None:
    """Sequences are padded for CP alone; here the whole pack happens to divide by the TP size."""
    wrap(
        patch,
        "impl.engine.preprocess_thd_engine",
        lambda original, inputs, **how: original(inputs, **{**how, "tp_size": 1}),
    )


@fault(
    "Megatron-LM#5215, an exception inside a layer",
    case="lens7_9-2ranks-cp2.2-interrupted",
    says={"run": "a CP group is still bound to the model after an exception inside a layer"},
)
def group_is_put_back_only_if_nothing_raises(patch: MonkeyPatch) -> None:
    """There is no `finally`; the next micro-batch binds its own group, so nothing shows."""
    wrap(patch, _BOUND, _without_finally)


@fault(
    "Megatron-LM#5215, an exception inside a layer of the engine",
    case="lens7_9_5-4ranks-cp2_1_1.2_1_1-interrupted",
    says={"run": "a CP group is still bound to the model after an exception inside a layer"},
)
def engine_puts_group_back_only_if_nothing_raises(patch: MonkeyPatch) -> None:
    """The same on Megatron's schedule."""
    wrap(patch, _BOUND, _without_finally)


def _without_finally(original: Any, module: Any, forward: Any) -> Any:
    def bound(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        built_with = module.pg_collection.cp
        module.pg_collection.cp = packed_seq_params.cp_group
        output = forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        module.pg_collection.cp = built_with
        return output

    return bound


@fault(
    "Megatron-LM#5215, the group stays bound in the engine",
    case="lens7_9_5-4ranks-cp2_1_1",
    says={"run": "a CP group is still bound to the model after its step"},
)
def group_stays_bound_in_the_engine(patch: MonkeyPatch) -> None:
    """The group of a micro-batch is not put back after the step either."""
    wrap(patch, _BOUND, _never_put_back)


def _never_put_back(original: Any, module: Any, forward: Any) -> Any:
    def bound(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        module.pg_collection.cp = packed_seq_params.cp_group
        return forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    return bound
