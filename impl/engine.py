"""One training step with dynamic CP: the whole batch in, exact gradients and outputs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import all_gather
from .forward import LogitsProcessor, process_logits, run_pack
from .megatron import training
from .megatron.cpu import training_mode
from .megatron.model import GPTConfig, check_divisible
from .megatron.weights import hf_gradients, hf_parameters, split_dim
from .merge import merge_step
from .plan import GroupPlan, Plan
from .scale import MAIN_ROAD, Counts, Road, loss_factor
from .split import common_seqlens, select_samples
from .state import ParallelState, open_parallel_state
from .thd import PackedRow, preprocess_thd_engine
from .totals import Parts, parts_of, totals
from .validate import check_runnable, check_settings

__all__ = ["Engine", "LossFn", "StepResult", "open_parallel_state"]

LossFn = Callable[
    [Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]
]
"""Outputs and inputs of a CP group's sequences (jagged, by name) → its part of the loss of the
batch, and its parts of any metrics, scalars. Parts of all groups are added up, with nothing to
divide by: weights made by `impl.loss.prediction_weights` or `own_weights` before the batch is cut
see to that. It returns the same names for every pack. It is called for packs of padding too, which
have no sequence; what it returns of them is not used."""


@dataclass(frozen=True)
class StepResult:
    """What a step computed, for reading only.

    Args:
        loss: float64 scalar of the whole batch, on every rank; no factor of Megatron's is in it.
        metrics, outputs: of the whole batch in input order, jagged [S, L, ...], on the ranks of
            the last pipeline stage; elsewhere empty.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class _MicroBatch:
    inputs: Mapping[str, Tensor]
    packed: PackedRow
    counts: Counts


@dataclass(frozen=True)
class _Report:
    parts: Parts
    outputs: Mapping[str, Tensor]


class Engine:
    """A model that trains with dynamic CP on Megatron's schedules, in float64.

    Made on every rank of the state together.

    Args:
        state: from `open_parallel_state`, which says how batches are cut and the model is spread.
        model, weights: what is trained, from Hugging Face names of the whole model.
        road: how the loss reaches Megatron; gradients are the same on all of them.
        optimizer: keywords of Megatron's `OptimizerConfig`; none means gradients only.
    Raises:
        ValueError: model, layout or road do not go together, before any collective.

    >>> with open_parallel_state(config, layout) as state:  # doctest: +SKIP
    ...     engine = Engine(state, model=model, weights=weights, optimizer={"lr": 1e-3})
    ...     result = engine.forward_backward_batch(batch, loss_fn)
    ...     engine.optimizer_step()
    """

    def __init__(
        self,
        state: ParallelState,
        *,
        model: GPTConfig,
        weights: Mapping[str, Tensor],
        road: Road = MAIN_ROAD,
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        self.state, self.model, self.road = state, model, road
        self.layout, self.groups = state.layout, state.groups
        check_divisible(model, self.layout)
        if state.config.max_sequences is not None and model.rope_interleaved:
            raise ValueError(
                "max_sequences with rope_interleaved=True: Megatron's RoPE fails on the repeated "
                "offsets; leave max_sequences out"
            )
        one = Counts(local_tokens=1, total_tokens=1, num_microbatches=1, num_ranks=1)
        loss_factor(road, one)  # refuses roads that there are not
        if road.ddp_averages == road.per_token:
            raise ValueError(f"{road}: Megatron's data parallelism averages unless per_token")
        with training_mode(state.device):
            self.chunks = training.build_chunks(
                model, weights, layout=self.layout, road=road, device=state.device
            )
            self.optimizer = None
            if optimizer is not None:
                self.optimizer = training.build_optimizer(
                    self.chunks, optimizer, layout=self.layout
                )

    def forward_backward_batch(
        self,
        batch: Mapping[str, Tensor],
        loss_fn: LossFn,
        *,
        plan: Plan | None = None,
        logits_processor: LogitsProcessor | None = None,
        fill: Mapping[str, float] | None = None,
        on_pack: Callable[[PackedRow], None] | None = None,
        forward_only: bool = False,
    ) -> StepResult:
        """One step over a batch that every rank has; gradients of earlier steps are cleared.

        Afterwards `main_grad` holds the gradients of the loss of the unsharded batch, in absolute
        scale, reduced over ranks.

        Args:
            batch: jagged [S, L, ...] by name, equal on all ranks; "input_ids" int64. What else is
                in it goes to the logits processor (packed) and to `loss_fn` (per sequence).
            plan: how the batch is cut; if none is given, the one that the settings make.
            logits_processor: as in `gptmodel_forward_model_engine`; with tensor parallelism its
                logits are this rank's part of the vocabulary (`impl.vocab_parallel`).
            fill: by name, what padded rows of the inputs hold. on_pack: called with every pack of
                this rank before the first one runs, for inspection.
            forward_only: leave gradients alone.
        Raises:
            ValueError: a batch or a plan that cannot be run, before any collective.
            PlanMismatch: ranks have different lengths, plans or settings, before the model runs.
        """
        seqlens = common_seqlens(batch)
        if plan is None:
            plan = self.state.plan(seqlens)
        else:
            self._check_plan(plan, seqlens)
        self.groups.check_same_plan(plan, self.state.config, self.layout, forward_only)
        micro_batches = self._micro_batches(batch, plan, fill)
        if on_pack is not None:
            for one in micro_batches:
                on_pack(one.packed)
        with training_mode(self.state.device), torch.set_grad_enabled(not forward_only):
            if not forward_only:
                for chunk in self.chunks:
                    chunk.zero_grad_buffer()
            step = partial(self._forward_step, logits_processor, loss_fn)
            reports = training.run_schedule(
                self.chunks, step, micro_batches, forward_only=forward_only
            )
            return self._result(reports, plan)

    def optimizer_step(self) -> float | None:
        """Megatron's optimizer on the gradients that are there.

        Returns:
            their norm before clipping.
        Raises:
            ValueError: the engine was made without an optimizer.
        """
        if self.optimizer is None:
            raise ValueError("there is no optimizer: make the engine with optimizer={'lr': ...}")
        with training_mode(self.state.device):
            _, norm, _ = self.optimizer.step()
        return None if norm is None else float(norm)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by Hugging Face name, whole tensors, of the layers on this pipeline stage."""
        if self.layout.distributed_optimizer:
            training.gather_sharded_gradients(self.chunks)
        return self._whole(hf_gradients)

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name, whole tensors, of the layers on this pipeline stage."""
        return self._whole(hf_parameters)

    def _whole(self, read: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
        shard, group = training.tensor_shard(), training.tensor_parallel_group()
        whole = {}
        for chunk in self.chunks:
            for name, part in read(chunk.module, self.model, shard=shard).items():
                dim = split_dim(name)
                whole[name] = (
                    part.detach().clone()
                    if dim is None
                    else all_gather(part.detach().movedim(dim, 0), group).movedim(0, dim)
                )
        return whole

    def _check_plan(self, plan: Plan, seqlens: tuple[int, ...]) -> None:
        if (plan.seqlens, plan.world_size) != (seqlens, self.groups.world_size):
            raise ValueError(
                f"the plan is for lengths {list(plan.seqlens)} on {plan.world_size} ranks, the "
                f"batch has {list(seqlens)} on {self.groups.world_size}"
            )
        check_runnable(plan)
        tp_size = self.layout.pack_tp_size
        check_settings(plan, config=self.state.config, tp_size=tp_size)
        if self.layout.pp_size > 1 and not plan.barriered:
            raise ValueError("the plan is not barriered, as pp_size above 1 needs it to be")

    def _micro_batches(
        self, batch: Mapping[str, Tensor], plan: Plan, fill: Mapping[str, float] | None
    ) -> list[_MicroBatch]:
        """This rank's, at least one; a multiple of the stages if they are interleaved."""
        me = self.groups.dp_cp_rank
        groups: list[GroupPlan] = list(plan.for_rank(me))
        unit = self.layout.pp_size if self.layout.vpp_size > 1 else 1
        while not groups or len(groups) % unit:
            groups.append(GroupPlan((me,), samples=()))  # padding only
        micro_batches = []
        for group in groups:
            inputs = {
                name: select_samples(one, group.samples, plan.seqlens)
                for name, one in batch.items()
            }
            packed = preprocess_thd_engine(
                inputs,
                cp_group=self.groups.of_ranks(group.ranks),
                tp_size=self.layout.pack_tp_size,
                rules=self.state.config.rules,
                fill=fill,
                labels_of="input_ids",
                seqlens=tuple(plan.seqlens[sample] for sample in group.samples),
            )
            counts = self._counts(packed, plan, len(groups))
            micro_batches.append(_MicroBatch(inputs, packed, counts))
        return micro_batches

    def _counts(self, packed: PackedRow, plan: Plan, num_microbatches: int) -> Counts:
        return Counts(
            local_tokens=len(packed.index.real_rows),
            total_tokens=sum(plan.seqlens),  # each is a real row of one rank in one micro-batch
            num_microbatches=num_microbatches,
            num_ranks=self.groups.world_size,
            static_cp_size=self.layout.static_cp_size,
        )

    def _forward_step(
        self,
        logits_processor: LogitsProcessor | None,
        loss_fn: LossFn,
        micro_batches: Iterator[_MicroBatch],
        chunk: nn.Module,
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        one = next(micro_batches)
        return run_pack(chunk, one.packed), partial(self._loss, logits_processor, loss_fn, one)

    def _loss(
        self,
        logits_processor: LogitsProcessor | None,
        loss_fn: LossFn,
        one: _MicroBatch,
        logits: Tensor,
    ) -> tuple[Any, ...]:
        """What Megatron asks of a loss function: two values or three."""
        outputs = process_logits(logits, one.packed, logits_processor)
        is_padding = not one.packed.index.seqlens
        parts = parts_of(*loss_fn(outputs, one.inputs), is_padding=is_padding)
        detached = {name: output.detach() for name, output in outputs.items()}
        report = _Report(parts.detached, detached)
        # a constant 0 would hang the other stages
        connected = parts.loss + logits.flatten()[:0].sum()
        scaled = connected * loss_factor(self.road, one.counts)
        if self.road.num_values == 2:
            return scaled, report
        return scaled, torch.tensor(one.counts.local_tokens, dtype=torch.int32), report

    def _result(self, reports: Sequence[_Report], plan: Plan) -> StepResult:
        device, group = self.state.device, self.groups.dp_cp_group
        total = Parts(torch.zeros((), dtype=torch.float64, device=device), {})
        outputs: dict[str, Tensor] = {}
        if training.is_last_stage():
            parts = [report.parts for report in reports]
            total = totals(parts, plan=plan, dp_cp_group=group, device=device)
            found = [report.outputs for report in reports]
            outputs = merge_step(found, plan=plan, dp_cp_group=group)
        training.broadcast_from_last_stage(total.loss)
        return StepResult(total.loss, total.metrics, outputs)
