"""Faults of the loss: temperature, entropy, what is counted, and the scale of gradients."""

from __future__ import annotations

from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from .fault import fault, wrap

_LOSS = "conformance.adapters.impl._ModelRun.loss"
_PROCESSOR = "impl.logprobs.logprobs_and_entropy"


@fault(
    "SkyRL#1751",
    case="lens7_9-4ranks-cp4",
    says={"gradients": "all gradients together are 4 times the truth"},
)
def gradients_times_cp_size(patch: MonkeyPatch) -> None:
    """The caller multiplies by the CP size, as the schedule does; the loss is right."""
    wrap(patch, _LOSS, _scaled_backward)


def _scaled_backward(original: Any, run: Any, merged: Any, micro_batch: Any) -> Tensor:
    loss: Tensor = original(run, merged, micro_batch)
    return micro_batch.cp_size * loss - (micro_batch.cp_size - 1) * loss.detach()


@fault(
    "NVIDIA-NeMo/RL d7da0ad6f",
    case="lens7_9-4ranks-cp2",
    says={"gradients": "all gradients together are 2 times the truth"},
)
def gather_sums_duplicates(patch: MonkeyPatch) -> None:
    """The outputs are gathered for a loss that all members repeat, and its gradients added up."""
    wrap(patch, "impl.thd.gather_replicated", _summing_gather)


def _summing_gather(original: Any, x: Tensor, group: Any) -> Tensor:
    from impl.collectives import gather_distinct

    return gather_distinct(x, group)


@fault(
    "Megatron-LM#7513",
    case="lens16-4ranks-cp4-single",
    says={"gradients": "all gradients together are 0.25 times the truth", "loss": "expected"},
)
def mean_of_local_means(patch: MonkeyPatch) -> None:
    """Each rank divides by the valid tokens of its shard, then ranks are averaged."""
    wrap(patch, _LOSS, _local_means)


def _local_means(original: Any, run: Any, merged: Any, micro_batch: Any) -> Tensor:
    from impl.layout import pack_layout

    seqlens = tuple(len(run.weights[sample]) for sample in micro_batch.samples)
    valid = torch.cat([run.weights[sample] for sample in micro_batch.samples]) != 0
    loss = torch.zeros((), dtype=torch.float64)
    for tokens in pack_layout(seqlens, cp_size=micro_batch.cp_size).tokens:  # one group only
        own = tokens[tokens >= 0]
        own = own[valid[own]]
        loss = loss - merged["logprobs"].values()[own].sum() / max(len(own), 1)
    return loss / micro_batch.cp_size


@fault(
    "verl#5869",
    case="lens4_17_5_23-4ranks-cp4+2",
    says={"gradients": "times the truth", "loss": "expected"},
)
def micro_batches_weigh_the_same(patch: MonkeyPatch) -> None:
    """Each micro-batch is divided by its own valid tokens, however many the others have."""
    wrap(patch, _LOSS, _own_mean)


def _own_mean(original: Any, run: Any, merged: Any, micro_batch: Any) -> Tensor:
    share = torch.cat([run.weights[sample] for sample in micro_batch.samples]).sum()
    loss: Tensor = original(run, merged, micro_batch)
    return loss / share / len(run.task.passes[0])


@fault(
    "Megatron-LM#1764",
    case="lens7_9-4ranks-cp2-none",
    says={"loss": "got nan, expected 0", "gradients": "got nan, expected 0"},
)
def divides_by_no_tokens(patch: MonkeyPatch) -> None:
    """A batch without a valid token is 0 / 0."""
    wrap(
        patch,
        "impl.loss.weighted_sum",
        lambda original, values, weights: (values * weights).sum() / (weights.sum() > 0),
    )


@fault(
    "NVIDIA-NeMo/Megatron-Bridge#3117",
    case="poisoned_nan-4ranks-cp4",
    says={"loss": "got nan, expected"},
)
def nan_times_zero(patch: MonkeyPatch) -> None:
    """Padded rows reach the loss and are multiplied by a mask of 0, which keeps NaN."""
    wrap(patch, "conformance.adapters.impl._ModelRun.poison_padding", _keep_logits)
    wrap(patch, _LOSS, _add_masked_padding)


def _keep_logits(original: Any, run: Any, *args: Any) -> Tensor:
    run.all_logits = original(run, *args)
    return run.all_logits


def _add_masked_padding(original: Any, run: Any, merged: Any, micro_batch: Any) -> Tensor:
    padding = run.all_logits[:, run.packed.index.padding_rows]
    loss: Tensor = original(run, merged, micro_batch)
    return loss + (0 * padding).sum()


@fault(
    "NVIDIA-NeMo/Megatron-Bridge#4660",
    case="poisoned_ids-4ranks-cp1",
    says={"loss": "expected", "gradients": "times the truth"},
)
def padding_told_by_its_id(patch: MonkeyPatch) -> None:
    """A real token whose id is that of padding is no target any more."""
    wrap(patch, _LOSS, _mask_by_id)


def _mask_by_id(original: Any, run: Any, merged: Any, micro_batch: Any) -> Tensor:
    run.weights = tuple(
        weights.where(ids.roll(-1) != run.task.padding.token_id, 0)
        for weights, ids in zip(run.weights, run.task.batch.input_ids, strict=True)
    )
    loss: Tensor = original(run, merged, micro_batch)
    return loss


@fault(
    "verl#3133",
    case="lens7_9-4ranks-cp2-t0.7",
    says={"logprobs": "sequence 0, token 0", "entropy": "sequence 0, token 0", "loss": "got"},
)
def temperature_ignored(patch: MonkeyPatch) -> None:
    """Log-probs and entropy are those of temperature 1."""
    wrap(patch, _PROCESSOR, _at_temperature(torch.ones_like))


@fault(
    "verl#3133, with an integer",
    case="lens7_9-4ranks-cp2-teach",
    says={"logprobs": "sequence 0, token 0", "entropy": "sequence 0, token 0"},
)
def temperature_cut_to_an_integer(patch: MonkeyPatch) -> None:
    """0.7 becomes 1."""
    wrap(patch, _PROCESSOR, _at_temperature(lambda t: t.trunc().clamp(min=1)))


@fault(
    "OpenRLHF#1319",
    case="lens7_9-4ranks-cp2-t0.7",
    says={"entropy": "sequence 0, token 0"},
)
def entropy_at_temperature_1(patch: MonkeyPatch) -> None:
    """Only the path of the log-probs divides by the temperature."""
    wrap(patch, _PROCESSOR, _one_path("entropy"))


@fault(
    "radixark/miles#68",
    case="lens7_9-4ranks-cp2-t0.7",
    says={"logprobs": "sequence 0, token 0", "loss": "got"},
)
def logprobs_at_temperature_1(patch: MonkeyPatch) -> None:
    """Only the path of the entropy divides by the temperature."""
    wrap(patch, _PROCESSOR, _one_path("logprobs"))


def _at_temperature(change: Any) -> Any:
    def processor(original: Any, logits: Tensor, labels: Tensor, temperature: Tensor) -> Any:
        return original(logits, labels, temperature=change(temperature))

    return processor


def _one_path(name: str) -> Any:
    def processor(original: Any, logits: Tensor, labels: Tensor, temperature: Tensor) -> Any:
        cold = original(logits, labels, temperature=torch.ones_like(temperature))
        return {**original(logits, labels, temperature=temperature), name: cold[name]}

    return processor


@fault(
    "verl#1672",
    case="lens7_9-4ranks-cp2-t2",
    says={"logits": "sequence 0, token 0"},
)
def logits_divided_in_place(patch: MonkeyPatch) -> None:
    """Whoever reads the logits after the log-probs finds them divided by the temperature."""
    wrap(patch, _PROCESSOR, _in_place)


def _in_place(original: Any, logits: Tensor, labels: Tensor, temperature: Tensor) -> Any:
    logits.div_(temperature.unsqueeze(-1))
    return original(logits, labels, temperature=torch.ones_like(temperature))


@fault(
    "d2l-ai/d2l-en#2707",
    case="lens7_9_5-4ranks-cp2-seqsum",
    says={"loss": "expected", "gradients": "times the truth"},
)
def sum_of_a_sequence_averaged(patch: MonkeyPatch) -> None:
    """Sequences are averaged over their tokens, though their sums were asked for."""
    _aggregate(patch, "sequence-mean-token-mean")


@fault(
    "google/tunix#1662",
    case="lens7_9_5-4ranks-cp4-seqmean",
    says={"loss": "expected", "gradients": "times the truth"},
)
def pack_taken_for_one_sequence(patch: MonkeyPatch) -> None:
    """A mean over sequences knows packs only, so all tokens of a pack weigh the same."""
    _aggregate(patch, "token-mean")


def _aggregate(patch: MonkeyPatch, aggregation: str) -> None:
    wrap(
        patch,
        "impl.loss.prediction_weights",
        lambda original, mask, **_: original(mask, aggregation=aggregation),
    )
