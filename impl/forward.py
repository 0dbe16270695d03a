"""One micro-batch through a Megatron GPTModel, at the CP size it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from .pack import drop_padding
from .split import SubBatch
from .thd import PackedRow, postprocess_thd_engine, preprocess_thd_engine

LogitsProcessor = Callable[..., Mapping[str, Tensor]]


def gptmodel_forward_model_engine(
    model: nn.Module,
    batch: SubBatch,
    *,
    tp_size: int = 1,
    mtp_depth: int = 0,
    logits_processor: LogitsProcessor | None = None,
    fill: Mapping[str, float] | None = None,
    on_pack: Callable[[PackedRow], None] | None = None,
) -> dict[str, Tensor]:
    """Run a sub-batch and return its outputs per sequence, on every member of its CP group.

    Padded rows are dropped from the logits and from every side input before the processor sees
    them, so nothing they hold reaches an output, a loss or a gradient.

    Args:
        model: a GPTModel whose attention follows the packed CP group (`impl.megatron.bind`).
        batch: "input_ids" int64, and side inputs of the same lengths.
        tp_size: with sequence parallelism, packs divide by it as well.
        mtp_depth: how many further tokens the model predicts.
        logits_processor: called as `f(logits [R, V], labels [R], **side inputs [R, ...])`;
            returns outputs [R, ...] by name. Without one, the logits themselves. With further
            predictions it gets `mtp_logits` [R, depth, V] and `mtp_labels` [R, depth] as well.
        fill: by name, what padded rows of the inputs hold; 0 where not named.
        on_pack: called with the packed row, for inspection.
    Returns:
        jagged [S, L, ...] by name, differentiable; see `postprocess_thd_engine` for how.
    """
    packed = preprocess_thd_engine(
        batch.tensors,
        cp_group=batch.cp_group,
        tp_size=tp_size,
        rules=batch.rules,
        fill=fill,
        labels_of="input_ids",
        mtp_depth=mtp_depth,
        seqlens=batch.seqlens,
    )
    if on_pack is not None:
        on_pack(packed)
    return process_logits(run_pack(model, packed), packed, logits_processor)


def run_pack(model: nn.Module, packed: PackedRow) -> Tensor:
    """A pack through a model or a pipeline stage of it.

    Returns:
        logits [1 + mtp_depth, T, V], or of an earlier stage the hidden states for the next.
    """
    output: Tensor = model(
        packed.tensors["input_ids"].unsqueeze(0),
        packed.position_ids.unsqueeze(0),
        None,
        packed_seq_params=packed.params,
    )
    return output


def process_logits(
    logits: Tensor, packed: PackedRow, logits_processor: LogitsProcessor | None
) -> dict[str, Tensor]:
    """Logits [1 + mtp_depth, T, V] of a pack → outputs per sequence.

    See `gptmodel_forward_model_engine`.
    """
    real = {name: drop_padding(rows, packed.index) for name, rows in packed.tensors.items()}
    del real["input_ids"]
    real_logits, further = drop_padding(logits[0], packed.index), {}
    if "mtp_labels" in real:
        further["mtp_logits"] = drop_padding(logits[1:].transpose(0, 1), packed.index)
    outputs = (
        logits_processor(real_logits, **real, **further)
        if logits_processor
        else {"logits": real_logits, **further}
    )
    if not isinstance(outputs, Mapping):
        raise ValueError(f"the logits processor returned {outputs!r}, not outputs by name")
    return {name: postprocess_thd_engine(rows, packed) for name, rows in outputs.items()}
