"""Megatron's optimizers in float64 against torch's Adam on the oracle's gradients, step by step.

Two roads lead to the expected weights. Fed with the gradients that the ranks have, torch's Adam
must end where Megatron's does, to a few roundings. Fed with the oracle's, it must as well, to what
rounding of gradients can do: Adam divides by the root of a mean square, so that the rounding of
a gradient that is almost 0, about 1e-16, moves a weight by up to `lr` times 1e-16 / `adam_eps`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import Batch, Loss, ModelConfig, evaluate

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from conformance.selftest.optimizer_ranks import NUM_STEPS, SEQLENS, Training, run_rank
from conformance.selftest.rank_worlds import found_by_ranks
from impl.megatron.cpu import cpu_training_mode
from impl.megatron.training import build_optimizer
from impl.parallel import ParallelLayout

ROUNDINGS = 1e-14
BUDGET = 1e-12  # a step
pytestmark = pytest.mark.xdist_group("optimizer")  # its worlds of ranks start once

BIASED: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 24,
    "vocab_size": 48,
    "norm": "layernorm",
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}
NORMED = {**BIASED, "norm": "rmsnorm", "qk_norm": True, "tied": True}
ADAM = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.05}


def _training(
    world_size: int, *, model: dict[str, Any] = BIASED, adam: dict[str, Any] = ADAM, **layout: Any
) -> Training:
    return Training(world_size, ParallelLayout(**layout), model, adam)


ALL = {
    "plain": _training(4),
    "distributed": _training(4, distributed_optimizer=True),
    "plain-not_clipped": _training(2, adam={**ADAM, "clip_grad": 1e3}),
    "distributed-not_clipped": _training(
        2, adam={**ADAM, "clip_grad": 1e3}, distributed_optimizer=True
    ),
    "plain-norm_not_wanted": _training(2, adam={**ADAM, "clip_grad": 0.0}),
    "plain-coupled_decay": _training(2, adam={**ADAM, "decoupled_weight_decay": False}),
    "distributed-betas": _training(
        2,
        adam={**ADAM, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-5},
        distributed_optimizer=True,
    ),
    "plain-tp2-sp": _training(4, model=NORMED, tp_size=2, sequence_parallel=True),
    "distributed-tp2": _training(4, tp_size=2, distributed_optimizer=True),
    "plain-pp2-tied": _training(4, model=NORMED, pp_size=2),
    "distributed-tp2-pp2": _training(
        4, model=NORMED, tp_size=2, pp_size=2, distributed_optimizer=True
    ),
}
EVERY_TRAINING = pytest.mark.parametrize("name", ALL)


@dataclass(frozen=True)
class Step:
    """Of one process: the norm before clipping, and the weights after the step."""

    norm: float
    weights: dict[str, Tensor]


class TorchAdam:
    """Adam as torch has it, with clipping and groups written out."""

    def __init__(self, one: Training) -> None:
        settings = one.optimizer
        self.clip_grad = settings["clip_grad"]
        self.weights = one.weights()
        vectors = [weight for weight in self.weights.values() if weight.dim() == 1]
        matrices = [weight for weight in self.weights.values() if weight.dim() > 1]
        decoupled = settings.get("decoupled_weight_decay", True)
        self.optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
            [
                {"params": matrices, "weight_decay": settings["weight_decay"]},
                {"params": vectors, "weight_decay": 0.0},  # biases and norms
            ],
            lr=settings["lr"],
            betas=(settings.get("adam_beta1", 0.9), settings.get("adam_beta2", 0.999)),
            eps=settings.get("adam_eps", 1e-8),
        )

    def step(self, gradients: dict[str, Tensor]) -> Step:
        norm = torch.cat([each.flatten() for each in gradients.values()]).norm()
        factor = min(1.0, self.clip_grad / float(norm + 1e-6)) if self.clip_grad else 1.0
        for name, weight in self.weights.items():
            weight.grad = gradients[name] * factor
        self.optimizer.step()
        weights = {name: weight.detach().clone() for name, weight in self.weights.items()}
        return Step(float(norm), weights)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[list[dict[str, Any]]]]:
    """Of every training: what each rank found in each step."""
    return found_by_ranks(ALL, run_rank, tmp_path_factory.mktemp)


@functools.cache
def _from_the_oracle(name: str) -> list[Step]:
    one = ALL[name]
    drawn = one.draw()
    ids, mask = (drawn[key].split(SEQLENS) for key in ("input_ids", "loss_mask"))
    batch = Batch(ids, mask, (1.0,) * len(SEQLENS))
    adam = TorchAdam(one)
    config = ModelConfig(**one.model)
    return [
        adam.step(evaluate(config, adam.weights, batch, Loss()).gradients)
        for _ in range(NUM_STEPS)
    ]


def _from_the_ranks(name: str, ranks: list[list[dict[str, Any]]]) -> list[Step]:
    adam = TorchAdam(ALL[name])
    steps = zip(*ranks, strict=True)
    return [
        adam.step({key: each for rank in step for key, each in rank["gradients"].items()})
        for step in steps
    ]


def _largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    errors = [(each - expected[name]).abs().max() for name, each in found.items()]
    return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())


@EVERY_TRAINING
@pytest.mark.parametrize("step", [0, NUM_STEPS - 1], ids=["first", "last"])
def test_weights_are_those_of_float64_adam_on_the_same_gradients(results, name, step) -> None:
    expected = _from_the_ranks(name, results[name])[step].weights
    for rank in results[name]:
        assert _largest_error(rank[step]["weights"], expected) <= ROUNDINGS


@EVERY_TRAINING
@pytest.mark.parametrize("step", [0, NUM_STEPS - 1], ids=["first", "last"])
def test_weights_are_those_of_float64_adam_on_the_oracles_gradients(results, name, step) -> None:
    expected = _from_the_oracle(name)[step].weights
    for rank in results[name]:
        assert _largest_error(rank[step]["weights"], expected) <= BUDGET * (step + 1)


@EVERY_TRAINING
def test_every_weight_is_trained_on_some_stage(results, name) -> None:
    found = {key for rank in results[name] for key in rank[-1]["weights"]}

    assert found == set(_from_the_oracle(name)[-1].weights)


@pytest.mark.parametrize("name", [name for name, one in ALL.items() if one.optimizer["clip_grad"]])
def test_norm_is_exact_in_every_step(results, name) -> None:
    for rank in results[name]:
        norms = [step["norm"] for step in rank]
        expected = [step.norm for step in _from_the_oracle(name)]
        assert norms == pytest.approx(expected, rel=1e-13, abs=0)


def test_fused_kernels_are_not_taken_where_they_are_installed(monkeypatch) -> None:
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads

    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", "a kernel")
    with cpu_training_mode():
        assert optimizer.USING_PYTORCH_OPTIMIZER
        assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm

    assert (optimizer.USING_PYTORCH_OPTIMIZER, clip_grads.l2_norm_impl) == (False, "a kernel")


def test_float32_scalars_of_the_gpu_are_float64_inside_only() -> None:
    with cpu_training_mode():
        assert torch.zeros(1, dtype=torch.float, device="cuda").dtype == torch.float64
        assert torch.zeros(1, dtype=torch.float).dtype == torch.float32
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float64

    assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1, "learning_rate": 0.1}, r"OptimizerConfig of megatron-core .* has no learn"),
        ({"lr": 0.1, "params_dtype": torch.bfloat16}, "leave out params_dtype; it is float64"),
        ({"lr": 0.1, "use_distributed_optimizer": True}, "the layout's distributed_optimizer"),
        ({"optimizer": "adam"}, "lr=None must be a number of at least 0"),
        ({"lr": "1e-3"}, "lr='1e-3' must be a number of at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer([], settings, layout=ParallelLayout())
