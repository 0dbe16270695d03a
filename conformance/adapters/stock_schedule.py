"""Megatron's own dynamic CP from end to end: its scheduler, its schedule, its groups, its scaling.

`conformance.adapters.stock` keeps our packs and takes away the binding. Here Megatron goes its
own way from padded samples to reduced gradients, with its own data parallelism and
`finalize_model_grads`; ours are the weights, the exact attention in place of Transformer Engine,
the loss and the merge of the outputs.

A case's plan asks for CP sizes, while Megatron's scheduler chooses them by itself, sample by
sample. So every micro-batch becomes one step, with the `max_seqlen_per_dp_cp_rank` at which its
longest sample needs the size asked for; the others get what the scheduler gives them. Samples are
padded to a multiple of 2 * ranks, as the schedule demands of a data set. `packs` are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from impl.logprobs import logprobs_and_entropy
from impl.loss import prediction_weights, weighted_sum
from impl.megatron.attention import ExactAttention
from impl.pack import jagged

from ..protocol import MicroBatch, Outputs, Plan, RankContext, Task, Unsupported
from . import impl
from .impl_translate import gpt_config

if TYPE_CHECKING:
    from .megatron_schedule import IdGroups, Sample

NAME = "stock_schedule"
STOCK = True
PRELOAD = (*impl.PRELOAD, "conformance.adapters.megatron_schedule")
WATCH = impl.WATCH
versions = impl.versions


class Rank:
    """One rank; Megatron's model-parallel state lives as long as it does."""

    def __init__(self, context: RankContext) -> None:
        from impl.megatron.parallel import model_parallel
        from impl.megatron.probe import UnsupportedMegatron

        self.resources = ExitStack()
        try:
            self.resources.enter_context(model_parallel(megatron_groups=True))
        except (AssertionError, UnsupportedMegatron) as error:  # its own words on what it wants
            raise Unsupported(f"Megatron says: {error}") from error

    def close(self) -> None:
        self.resources.close()

    def run(self, task: Task) -> tuple[Outputs, ...]:
        from impl.megatron.cpu import cpu_training_mode

        steps = [[id_groups(task, micro_batch) for micro_batch in plan] for plan in task.plans]
        with cpu_training_mode():
            run = _ModelRun(task)
            return tuple(run.one_pass(*each) for each in zip(task.plans, steps, strict=True))


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


def id_groups(task: Task, micro_batch: MicroBatch) -> IdGroups:
    """What Megatron's scheduler makes of a micro-batch, before any collective.

    Raises:
        ValueError: Megatron has no group of the size asked for.
        Unsupported: there is no sample.
    """
    from impl.megatron.parallel import megatron_cp_group

    from .megatron_schedule import place_samples

    if not micro_batch.samples:
        raise Unsupported("the schedule asserts, behind a barrier, that there is a sample to run")
    megatron_cp_group(micro_batch.cp_size)
    padded = {sample: _padded(task.batch.seqlens[sample]) for sample in micro_batch.samples}
    limit = -(-max(padded.values()) // micro_batch.cp_size)
    return place_samples(padded, max_seqlen_per_dp_cp_rank=limit)


def _padded(seqlen: int) -> int:
    unit = 2 * dist.get_world_size()
    return -(-seqlen // unit) * unit


class SampleAttention(ExactAttention):
    """Exact attention of one sample, [s, 1, heads, D]: a pack of one sequence."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """query [s, 1, H, D], key and value [s, 1, G, D] → [s, 1, H * D]."""
        pack = replace(packed_seq_params, qkv_format="thd")
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        out = super().forward(query, key, value, attention_mask, packed_seq_params=pack)
        return out.unsqueeze(1)


class _ModelRun:
    """One model through the passes of one task."""

    def __init__(self, task: Task) -> None:
        from impl.megatron.model import build_gpt_model
        from impl.megatron.weights import load_hf_weights

        from .megatron_schedule import with_gradient_buffers

        self.config = gpt_config(task)
        self.task, self.seqlens = task, task.batch.seqlens
        model = build_gpt_model(self.config, max_seqlen=_padded(max(self.seqlens)))
        for layer in model.decoder.layers:
            attention = layer.self_attention
            attention.core_attention = SampleAttention(
                model.config, layer.layer_number, attention.attn_mask_type, "self"
            )
        load_hf_weights(model, task.weights, self.config)
        self.model = with_gradient_buffers(model)
        mask = jagged(torch.cat(task.batch.loss_mask), self.seqlens)
        weights = prediction_weights(mask, aggregation=task.loss.aggregation)
        self.num_valid = max(int(weights.count_nonzero()), 1)
        # Megatron divides by the number of valid predictions, so each weighs 1 in a token mean.
        self.weights = (weights * self.num_valid).split(list(self.seqlens))
        self.rows = torch.arange(sum(self.seqlens)).split(list(self.seqlens))

    def one_pass(self, plan: Plan, steps: Sequence[IdGroups]) -> Outputs:
        from impl.megatron.weights import to_hf

        tokens = sum(self.seqlens)
        self.outputs = {
            "logits": torch.zeros(tokens, self.task.model.vocab_size, dtype=torch.float64),
            "logprobs": torch.zeros(tokens, dtype=torch.float64),
            "entropy": torch.zeros(tokens, dtype=torch.float64),
        }
        loss = torch.zeros((), dtype=torch.float64)
        gradients = {
            name: torch.zeros_like(parameter)
            for name, parameter in self.model.module.named_parameters()
        }
        for micro_batch, placed in zip(plan, steps, strict=True):
            loss += self.step(micro_batch, placed) / self.num_valid
            share = self.valid_predictions(micro_batch) / self.num_valid
            for name, parameter in self.model.module.named_parameters():
                gradients[name] += share * parameter.main_grad
        for part in (*self.outputs.values(), loss):  # each row is filled on one rank alone
            dist.all_reduce(part)
        return Outputs(
            **{name: rows.split(list(self.seqlens)) for name, rows in self.outputs.items()},
            loss=loss,
            gradients=to_hf(gradients, self.config),
        )

    def step(self, micro_batch: MicroBatch, placed: IdGroups) -> Tensor:
        """Run Megatron's schedule on a micro-batch. Returns this rank's part of the loss."""
        from .megatron_schedule import run_step

        samples = {sample: self.padded_sample(sample) for sample in micro_batch.samples}
        reports = run_step(self.model, samples, placed, self.forward_step)
        return torch.stack([report["loss"] for report in reports]).sum()

    def valid_predictions(self, micro_batch: MicroBatch) -> int:
        return sum(int(self.weights[sample].count_nonzero()) for sample in micro_batch.samples)

    def padded_sample(self, sample: int) -> Sample:
        """A sample as Megatron's data set would give it; `rows` say where its outputs belong."""
        ids, fill = self.task.batch.input_ids[sample], self.task.padding
        padding = _padded(len(ids)) - len(ids)
        temperature = torch.full((len(ids),), self.task.batch.temperature[sample])
        return {
            "tokens": F.pad(ids, (0, padding), value=fill.token_id),
            "labels": F.pad(ids[1:], (0, 1 + padding), value=-100),
            "loss_mask": F.pad(self.weights[sample], (0, padding)),
            "position_ids": torch.arange(len(ids) + padding),
            "temperature": F.pad(temperature, (0, padding), value=fill.side_value),
            "rows": F.pad(self.rows[sample], (0, padding), value=-1),
        }

    def forward_step(self, data: Iterator[Sample], model: nn.Module) -> tuple[Tensor, Any]:
        from .megatron_schedule import slice_sample

        shard, params = slice_sample(next(data))
        logits = model(shard["tokens"], shard["position_ids"], None, packed_seq_params=params)
        return logits, partial(self.loss, shard)

    def loss(self, shard: Sample, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of losses and number of valid predictions of one shard, [1, s] each."""
        real = shard["rows"] >= 0  # padded rows end here, whatever they hold
        rows, labels, weights, temperature = (shard[name][real] for name in _PER_ROW)
        logits = logits[real]
        found = logprobs_and_entropy(logits, labels, temperature=temperature)
        for name, output in {"logits": logits, **found}.items():
            self.outputs[name].index_add_(0, rows, output.detach())
        values = -found["logprobs"] - self.task.loss.entropy_coeff * found["entropy"]
        loss = weighted_sum(values, weights)
        return loss, weights.count_nonzero().int(), {"loss": loss.detach()}


_PER_ROW = ("rows", "labels", "loss_mask", "temperature")
