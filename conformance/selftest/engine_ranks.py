"""One rank of `test_engine`: an engine for every case of its world, results to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from impl.config import DynamicCPConfig
from impl.engine import Engine
from impl.logprobs import logprobs_and_entropy
from impl.loss import prediction_weights, weighted_sum
from impl.megatron import training
from impl.megatron.model import GPTConfig
from impl.pack import jagged
from impl.parallel import ParallelLayout
from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.scale import MAIN_ROAD, Road
from impl.state import ParallelState, open_parallel_state
from impl.vocab_parallel import vocab_parallel_logprobs_and_entropy
from reference.config import ModelConfig, weight_shapes

ENTROPY_COEFF = 0.3
DP_ONLY = ParallelLayout()
ADAM = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0, "clip_grad": 0.5}
LIMIT = timedelta(seconds=60)
CONFIG = DynamicCPConfig(max_seqlen_per_dp_cp_rank=24, scheduler="balanced")

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
    micro_batches: tuple[Groups, ...]
    layout: ParallelLayout = DP_ONLY
    model: Mapping[str, Any] = field(default_factory=dict)
    road: Road = MAIN_ROAD
    aggregation: str = "token-mean"
    adam: bool = False  # go on to one step of Adam

    @property
    def num_dp_cp_ranks(self) -> int:
        return (
            max(rank for groups in self.micro_batches for ranks, _ in groups for rank in ranks) + 1
        )

    @property
    def world_size(self) -> int:
        return self.layout.model_size * self.num_dp_cp_ranks

    @property
    def plan(self) -> Plan:
        return Plan(
            world_size=self.num_dp_cp_ranks,
            seqlens=self.batch.seqlens,
            micro_batches=tuple(
                MicroBatchPlan(tuple(GroupPlan(*group) for group in groups))
                for groups in self.micro_batches
            ),
            scheduler="by hand",
            barriered=True,
        )

    def weights(self) -> dict[str, Tensor]:
        """The same in every process."""
        draw = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(shape, generator=draw, dtype=torch.float64) * 0.2
            + ("norm" in name and name.endswith("weight"))
            for name, shape in weight_shapes(ModelConfig(**self.model)).items()
        }


def run_rank(rank: int, folder: str, cases: Mapping[str, Case]) -> None:
    """Every case of one world size; results go to `rank_N.pt`, by case."""
    torch.set_num_threads(1)
    world_size = next(iter(cases.values())).world_size
    store = FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LIMIT)
    results = {name: _run(case) for name, case in cases.items()}
    torch.save(results, Path(folder) / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run(case: Case) -> dict[str, Any]:
    with open_parallel_state(CONFIG, case.layout, timeout=LIMIT) as state:
        return _step(case, state)


def _step(case: Case, state: ParallelState) -> dict[str, Any]:
    engine = Engine(
        state,
        model=GPTConfig(**case.model),
        weights=case.weights(),
        road=case.road,
        optimizer=ADAM if case.adam else None,
    )
    values = case.batch.draw()
    mask = jagged(values.pop("loss_mask"), case.batch.seqlens)
    values["weights"] = prediction_weights(mask, aggregation=case.aggregation)
    batch = {name: jagged(each, case.batch.seqlens) for name, each in values.items()}
    processor = partial(_outputs, case.layout.tp_size)
    result = engine.forward_backward_batch(
        batch, _loss, logits_processor=processor, plan=case.plan
    )
    return {
        "loss": result.loss,
        "metrics": dict(result.metrics),
        "outputs": {name: output.values() for name, output in result.outputs.items()},
        "gradients": engine.gradients(),
        "norm": engine.optimizer_step() if case.adam else None,
    }


def _outputs(
    tp_size: int, logits: Tensor, labels: Tensor, temperature: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    if tp_size == 1:
        return logprobs_and_entropy(logits, labels, temperature=temperature)
    return vocab_parallel_logprobs_and_entropy(
        logits, labels, temperature=temperature, tp_group=training.tensor_parallel_group()
    )


def _loss(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    values = -outputs["logprobs"].values() - ENTROPY_COEFF * outputs["entropy"].values()
    weights = inputs["weights"].values()
    return weighted_sum(values, weights), {"valid": weights.count_nonzero()}
