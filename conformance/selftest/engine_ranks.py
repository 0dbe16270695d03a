"""One rank of `test_engine`: an engine for every case of its world, results to a file."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import impl
from conformance.selftest.rank_worlds import LIMIT, serve_rank
from impl.config import DynamicCPConfig
from impl.engine import Engine, StepResult
from impl.groups import PlanMismatch
from impl.logprobs import logprobs_and_entropy
from impl.loss import prediction_weights, weighted_sum
from impl.megatron.model import GPTConfig
from impl.pack import jagged
from impl.parallel import ParallelLayout
from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.scale import MAIN_ROAD, Road
from impl.state import open_parallel_state
from impl.thd import PackedRow
from reference import ModelConfig, weight_shapes

ENTROPY_COEFF = 0.3
DP_ONLY = ParallelLayout()
TOP_K = 3
IMPL = Path(impl.__file__).parent
CONFIG = DynamicCPConfig(max_seqlen_per_dp_cp_rank=64, scheduler="balanced")

Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Of a micro-batch: ranks and samples of every group."""


@dataclass(frozen=True)
class Batch:
    """The same on every rank and in the parent: drawn from the seed."""

    seqlens: tuple[int, ...]
    masked: str = "some"  # or "all"; "first": every target of the first sample
    vocab_size: int = 48

    def draw(self) -> dict[str, Tensor]:
        tokens = sum(self.seqlens)
        draw = torch.Generator().manual_seed(7)
        mask = torch.rand(tokens, generator=draw) < 0.6
        if self.masked == "all":
            mask[:] = False
        if self.masked == "first":
            mask[: self.seqlens[0]] = False
        temperature = 0.5 + torch.rand(len(self.seqlens), generator=draw, dtype=torch.float64)
        return {
            "input_ids": torch.randint(self.vocab_size, (tokens,), generator=draw),
            "loss_mask": mask,
            "temperature": temperature.repeat_interleave(torch.tensor(self.seqlens)),
        }


@dataclass(frozen=True)
class Case:
    """A step: batch, how it is cut, and how the model is spread."""

    batch: Batch
    micro_batches: tuple[Groups, ...] | None  # if None, the engine plans by itself
    num_dp_cp_ranks: int = 4
    barriered: bool = True
    layout: ParallelLayout = DP_ONLY
    rules: Mapping[str, Any] = field(default_factory=dict)  # what is asked of packs
    model: Mapping[str, Any] = field(default_factory=dict)
    road: Road = MAIN_ROAD
    aggregation: str = "token-mean"

    @property
    def world_size(self) -> int:
        return self.layout.model_size * self.num_dp_cp_ranks

    @property
    def plan(self) -> Plan | None:
        if self.micro_batches is None:
            return None
        return Plan(
            world_size=self.num_dp_cp_ranks,
            seqlens=self.batch.seqlens,
            micro_batches=tuple(
                MicroBatchPlan(tuple(GroupPlan(*group) for group in groups))
                for groups in self.micro_batches
            ),
            scheduler="by hand",
            barriered=self.barriered,
        )

    def weights(self) -> dict[str, Tensor]:
        """The same in every process."""
        draw = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(shape, generator=draw, dtype=torch.float64) * 0.2
            + ("norm" in name and name.endswith("weight"))
            for name, shape in weight_shapes(ModelConfig(**self.model)).items()
        }


def run_rank(rank: int, folder: str, cases: Mapping[str, Case], kind: str = "cpu") -> None:
    """Every case of one world size; results go to `rank_N.pt`, by case.

    Args:
        kind: of device, "cpu" or "cuda".
    """
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    backends = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    serve_rank(rank, folder, cases, partial(_run, device), backends=backends)


def _run(device: torch.device, case: Case) -> dict[str, Any]:
    config = replace(CONFIG, **case.rules)
    with open_parallel_state(config, case.layout, device=device, timeout=LIMIT) as state:
        engine = Engine(
            state, model=GPTConfig(**case.model), weights=case.weights(), road=case.road
        )
        values = case.batch.draw()
        mask = jagged(values.pop("loss_mask"), case.batch.seqlens)
        values["weights"] = prediction_weights(mask, aggregation=case.aggregation)
        batch = {
            name: jagged(each.to(device), case.batch.seqlens) for name, each in values.items()
        }
        step = partial(engine.forward_backward_batch, batch, _loss, plan=case.plan)
        packs: list[PackedRow] = []
        result = step(logits_processor=_outputs, on_pack=packs.append)
        gradients = engine.gradients()
        synchronised = _synchronised(step) if device.type == "cuda" else ()
        without = step(logits_processor=_outputs, forward_only=True)
        return {
            "loss": result.loss,
            "loss_forward_only": without.loss,
            "metrics": dict(result.metrics),
            "outputs": {name: output.values() for name, output in result.outputs.items()},
            "gradients": gradients,
            "gradients_after_forward_only": engine.gradients(),
            "num_packs": len(packs),
            "synchronised": synchronised,
            "refused": {name: _words(engine, batch, plan) for name, plan in _wrong(case)},
            "no_optimizer": _words_of(engine.optimizer_step),
        }


def _synchronised(step: Callable[..., StepResult]) -> tuple[str, ...]:
    """Where the host waits for a GPU in a step whose index maps are known, in our own code.

    Calls of torch and what answers for Megatron's (`impl.megatron.cpu`) count for their callers.
    """
    places: list[str] = []

    def note(*_: Any) -> None:
        callers = [frame for frame in traceback.extract_stack()[:-1] if not _is_between(frame)]
        if Path(callers[-1].filename).is_relative_to(IMPL):
            places.append(f"{Path(callers[-1].filename).name}:{callers[-1].lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(logits_processor=_outputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return tuple(places)


def _is_between(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return "torch" in path.parts or path.name in ("warnings.py", "cpu.py")


def _wrong(case: Case) -> Iterator[tuple[str, Plan]]:
    """Plans that cannot be run, by what is wrong with them."""
    if case.plan is None:
        return
    micro_batches = case.plan.micro_batches
    yield "lengths", replace(case.plan, seqlens=(*case.plan.seqlens, 3))
    yield "sample", replace(case.plan, micro_batches=micro_batches[1:])
    yield "unbarriered", replace(case.plan, barriered=False)
    order = -1 if dist.get_rank() == 1 else 1
    yield "mismatch", replace(case.plan, micro_batches=micro_batches[::order])


def _words(engine: Engine, batch: Mapping[str, Tensor], plan: Plan) -> str:
    step = partial(engine.forward_backward_batch, batch, _loss, plan=plan)
    return _words_of(partial(step, logits_processor=_outputs))


def _words_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, PlanMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _outputs(
    logits: Tensor, labels: Tensor, temperature: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    best = logits.topk(TOP_K)  # [tokens, k], a floating and an integer output
    found = logprobs_and_entropy(logits, labels, temperature=temperature)
    return {**found, "top_values": best.values, "top_ids": best.indices}


def _loss(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    values = -outputs["logprobs"].values() - ENTROPY_COEFF * outputs["entropy"].values()
    weights = inputs["weights"].values()
    nothing = values.mean() * 0  # NaN where there is no sequence
    return weighted_sum(values, weights) + nothing, {"valid": weights.count_nonzero()}
