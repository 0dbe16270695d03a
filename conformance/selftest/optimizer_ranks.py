"""One rank of `test_optimizer`: some steps of every training of its world, results to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.selftest.rank_worlds import LIMIT, serve_rank
from impl.config import DynamicCPConfig
from impl.engine import Engine
from impl.loss import prediction_weights, weighted_sum
from impl.megatron import training
from impl.megatron.model import GPTConfig
from impl.pack import jagged
from impl.parallel import ParallelLayout
from impl.state import open_parallel_state
from impl.vocab_parallel import vocab_parallel_logprobs
from reference import ModelConfig, random_weights

NUM_STEPS = 5
SEQLENS = (5, 13, 24, 1, 9, 17, 11, 2)


@dataclass(frozen=True)
class Training:
    """Steps on one batch, the same in every process.

    Args:
        model: keywords of either model config. optimizer: of Megatron's `OptimizerConfig`.
    """

    world_size: int
    layout: ParallelLayout
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    @property
    def dynamic_cp(self) -> DynamicCPConfig:
        """The longest sequence needs two ranks, where there are two."""
        alone = self.layout.num_dp_cp_ranks(self.world_size) == 1
        limit = max(SEQLENS) if alone else 16
        return DynamicCPConfig(max_seqlen_per_dp_cp_rank=limit, scheduler="balanced")

    def weights(self) -> dict[str, Tensor]:
        return random_weights(ModelConfig(**self.model), seed=3)

    def draw(self) -> dict[str, Tensor]:
        """Ids and mask of all sequences, concatenated."""
        draw = torch.Generator().manual_seed(7)
        tokens = sum(SEQLENS)
        return {
            "input_ids": torch.randint(self.model["vocab_size"], (tokens,), generator=draw),
            "loss_mask": torch.rand(tokens, generator=draw) < 0.6,
        }


def run_rank(rank: int, folder: str, trainings: Mapping[str, Training]) -> None:
    """Every training of one world size; results go to `rank_N.pt`, by name."""
    serve_rank(rank, folder, trainings, _train)


def _train(one: Training) -> list[dict[str, Any]]:
    drawn = one.draw()
    mask = jagged(drawn["loss_mask"], SEQLENS)
    weights = prediction_weights(mask, aggregation="token-mean")
    batch = {
        "input_ids": jagged(drawn["input_ids"], SEQLENS),
        "weights": jagged(weights, SEQLENS),
    }
    with open_parallel_state(one.dynamic_cp, one.layout, timeout=LIMIT) as state:
        engine = Engine(
            state,
            model=GPTConfig(**one.model),
            weights=one.weights(),
            optimizer=one.optimizer,
        )
        return [_step(engine, batch) for _ in range(NUM_STEPS)]


def _step(engine: Engine, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    processor = partial(_logprobs, training.tensor_parallel_group())
    engine.forward_backward_batch(batch, _loss, logits_processor=processor)
    return {
        "gradients": engine.gradients(),
        "norm": engine.optimizer_step(),
        "weights": engine.weights(),
    }


def _logprobs(
    tp_group: dist.ProcessGroup, logits: Tensor, labels: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    ones = torch.ones(len(logits), dtype=torch.float64)
    return {
        "logprobs": vocab_parallel_logprobs(logits, labels, temperature=ones, tp_group=tp_group)
    }


def _loss(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    return weighted_sum(-outputs["logprobs"].values(), inputs["weights"].values()), {}
