"""Faults of split and pack: which rank holds which token, with which position and label."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch

from impl.plan import GroupPlan, MicroBatchPlan

from .fault import fault, wrap


@fault(
    "Megatron-LM#5191",
    case="lens16_16-4ranks-cp4",
    says={"layout": "rank 0: position_ids", "logits": "sequence 0, token 2"},
)
def whole_stream_zigzag(patch: MonkeyPatch) -> None:
    """The pack is cut as one long stream, while attention expects each sequence cut by itself."""
    wrap(patch, "impl.layout.pack_layout", _one_stream)


def _one_stream(original: Any, seqlens: tuple[int, ...], **sizes: int) -> Any:
    each = original(seqlens, **sizes)
    starts = torch.tensor([0, *each.padded]).cumsum(0)
    place = (starts[each.sequences] + each.positions).flatten().argsort()
    whole = original((sum(each.padded),), **sizes).tokens
    in_stream = {
        name: getattr(each, name).flatten()[place][whole]
        for name in ("tokens", "positions", "sequences")
    }
    return replace(each, **in_stream)


@fault(
    "huggingface/nanoVLM#201",
    case="lens5_6_7_8_9-4ranks-cp2",
    says={"layout": "rank 0: position_ids"},
)
def positions_run_through_the_pack(patch: MonkeyPatch) -> None:
    """Positions are not reset at a sequence; Megatron's RoPE for packs does not read them."""
    wrap(patch, "impl.thd.rank_index", _running_positions)


def _running_positions(original: Any, *args: Any, **kwargs: Any) -> Any:
    index = original(*args, **kwargs)
    starts = (
        index.cu_seqlens_padded[:-1]
        .long()
        .repeat_interleave(torch.tensor(index.padded) // kwargs["cp_size"])
    )
    return replace(index, position_ids=index.position_ids + starts)


@fault(
    "verl#4250",
    case="lens16_16-4ranks-cp2",
    says={
        "layout": "rank 0: labels",
        "logprobs": "sequence 0, token 3, rank 0 of CP group [0, 1]",
    },
)
def labels_rolled_after_the_split(patch: MonkeyPatch) -> None:
    """The last token of a chunk gets a label from the rank's next chunk."""
    wrap(patch, "impl.forward.preprocess_thd_engine", _roll_here)


def _roll_here(original: Any, *args: Any, **kwargs: Any) -> Any:
    packed = original(*args, **kwargs)
    labels = packed.tensors["labels"]
    rolled = packed.tensors["input_ids"].roll(-1).where(labels >= 0, labels)
    return replace(packed, tensors={**packed.tensors, "labels": rolled})


@fault(
    "fla-org/flash-linear-attention#1092",
    case="lens8_9-4ranks-cp2",
    says={
        "layout": "rank 1: tokens",
        "logits": "sequence 1, token 8, rank 1 of CP group [0, 1]",
    },
)
def last_token_dropped(patch: MonkeyPatch) -> None:
    """A length that is no multiple of the number of chunks loses its last token to padding."""
    wrap(patch, "impl.forward.preprocess_thd_engine", _drop_last)


def _drop_last(original: Any, tensors: Any, *, fill: Any, **kwargs: Any) -> Any:
    ids = tensors["input_ids"]
    for start, end in ids.offsets().unfold(0, 2, 1).tolist():
        if (end - start) % (2 * kwargs["cp_group"].size()):
            ids.values()[end - 1] = fill["input_ids"]
    return original(tensors, fill=fill, **kwargs)


@fault(
    "verl#4656",
    case="lens3-4ranks-cp4",
    says={"run": "rank 3, "},
)
def short_sequence_crashes(patch: MonkeyPatch) -> None:
    """The slice of a rank that holds nothing but padding has a negative length."""
    wrap(patch, "impl.thd.pack_rows", _slice_real_tokens)


def _slice_real_tokens(original: Any, values: Any, index: Any, **kwargs: Any) -> Any:
    if len(index.real_rows):
        return original(values, index, **kwargs)
    start = int(index.position_ids[0])
    return values.narrow(0, start, len(values) - start)


@fault(
    "Megatron-LM#5679",
    case="lens9_11-4ranks-cp4",
    says={"layout": "rank 0: CP group is ranks [0, 1], not [0, 1, 2, 3]"},
)
def group_has_too_few_members(patch: MonkeyPatch) -> None:
    """A request for a group of four is answered with a group of two."""
    wrap(patch, "impl.groups.CPGroups.of_ranks", lambda original, groups, ranks: groups.by_size[2])


@fault(
    "verl#5869",
    case="few_one-4ranks-cp2",
    says={"layout": "holds samples [0, 0], not [0]", "gradients": "4 times the truth"},
)
def whole_batch_on_every_rank(patch: MonkeyPatch) -> None:
    """With fewer samples than ranks the split returns early, before it records its CP size."""
    wrap(patch, "impl.split.dynamic_cp_split_batch", _return_early)
    patch.setattr("impl.merge.dynamic_cp_merge_output", lambda outputs, batch, groups: outputs)


def _return_early(original: Any, batch: Any, *, config: Any, groups: Any) -> Any:
    sub = original(batch, config=config, groups=groups)
    everything = tuple(range(len(sub.plan.seqlens)))
    whole = tuple(GroupPlan((rank,), everything) for rank in range(groups.world_size))
    return replace(
        sub,
        tensors=batch,
        seqlens=sub.plan.seqlens,
        local_cp_size=1,
        cp_group=groups.by_size[1],
        plan=replace(sub.plan, micro_batches=(MicroBatchPlan(whole),)),
    )


@fault(
    "verl#5057, side inputs of a loss",
    case="lens7_9-4ranks-cp2",
    says={"run": "side inputs are not where their tokens are"},
)
def side_inputs_in_another_order(patch: MonkeyPatch) -> None:
    """Ids are packed zigzag, but what belongs to their tokens is packed backwards."""
    wrap(patch, "impl.thd.pack_rows", _floats_backwards)


def _floats_backwards(original: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    return original(values.flip(0) if values.is_floating_point() else values, *args, **kwargs)
