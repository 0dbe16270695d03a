"""Model chunks in Megatron's data parallelism, its optimizer, and its schedules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from ..parallel import ParallelLayout
from ..scale import Road
from .bind import bind_packed_cp_group
from .model import GPTConfig, build_gpt_chunks
from .probe import UnsupportedMegatron, features
from .weights import TensorShard, load_hf_weights

ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]

_NEEDED = (
    (SelfAttention, "pg_collection", "an attention that is given its process groups"),
    (GPTModel, "vp_stage", "model chunks that know their virtual pipeline stage"),
)

_MARK = "tensor_model_parallel"
_DIVIDED = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}  # dims


def check_megatron() -> None:
    """Whether the installed Megatron has what the engine builds on.

    Raises:
        UnsupportedMegatron: with its version, what is missing and the versions that have it.
    """
    for module, parameter, what in _NEEDED:
        if parameter not in inspect.signature(module.__init__).parameters:
            raise UnsupportedMegatron(
                f"megatron-core {features().version}: {module.__name__} takes no {parameter}, so "
                f"there is no {what}; 0.15.3 and later have it"
            )


def build_chunks(
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    *,
    layout: ParallelLayout,
    road: Road,
    device: torch.device,
) -> list[Any]:
    """This rank's model chunks with their weights and gradient buffers, in float64.

    Their attention follows the CP group of the pack. All share one `TransformerConfig`, on which
    the schedules find how gradients are finalised.
    """
    chunks = build_gpt_chunks(config, max_seqlen=1, layout=layout)  # RoPE has no longest sequence
    for chunk in chunks:
        chunk.to(device)
        load_hf_weights(chunk, weights, config, shard=tensor_shard())
        bind_packed_cp_group(chunk)
        _mark_divided_weights(chunk)
    settings = chunks[0].config
    settings.calculate_per_token_loss = road.per_token
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=layout.distributed_optimizer)
    wrapped = [
        DistributedDataParallel(settings, buffers, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    settings.finalize_model_grads_func = finalize_model_grads
    no_sync = [chunk.no_sync for chunk in wrapped]
    settings.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def _mark_divided_weights(chunk: nn.Module) -> None:
    """Tell divided weights from repeated ones, which the norm of gradients counts once.

    Up to 0.17.1 layers do so themselves only if they initialise their weights, and the optimizer
    takes what is not marked for repeated.
    """
    for module in chunk.modules():
        kind = next((kind for kind in _DIVIDED if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if kind is not None and weight is not None and not hasattr(weight, _MARK):
            set_tensor_model_parallel_attributes(weight, True, _DIVIDED[kind], 1)


def build_optimizer(
    chunks: list[Any], settings: Mapping[str, Any], *, layout: ParallelLayout
) -> Any:
    """Megatron's optimizer, its groups of parameters as Megatron's training loop sets them.

    The optimizer only notes what differs in a group: no weight decay for biases and norms, or
    `decoupled_lr`. It is the scheduler that acts on it, here one of constant rates.

    Args:
        settings: keywords of its `OptimizerConfig`, such as `optimizer`, `lr`, `clip_grad`.
    Raises:
        ValueError: no `lr`, or a keyword that the installed Megatron lacks or the layout decides.
    """
    _check_settings(settings)
    config = OptimizerConfig(
        **settings,
        params_dtype=torch.float64,
        use_distributed_optimizer=layout.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr,
        max_lr=config.lr,
        min_lr=config.lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(OptimizerConfig) if field.init}
    decided = {
        "params_dtype": "it is float64 throughout",
        "use_distributed_optimizer": "the layout's distributed_optimizer decides",
    }
    for name in settings:
        if name in decided:
            raise ValueError(f"optimizer: leave out {name}; {decided[name]}")
        if name not in known:
            raise ValueError(
                f"optimizer: the OptimizerConfig of megatron-core {features().version} has no "
                f"{name}; it has {', '.join(sorted(known - set(decided)))}"
            )
    lr = settings.get("lr")
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 <= lr < math.inf:
        raise ValueError(f"optimizer: lr={lr!r} must be a number of at least 0, and finite")


def run_schedule(
    chunks: list[Any],
    forward_step: ForwardStep,
    micro_batches: Sequence[Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule over this rank's micro-batches; finalised gradients are in `main_grad`.

    Returns:
        what the loss function reported of each, on the last pipeline stage; elsewhere nothing.
    """
    for parameter in (each for chunk in chunks for each in chunk.parameters()):
        # FP32Optimizer.prepare_grads left `main_grad` itself here. Megatron's training loop clears
        # it too (`zero_grad`); backward would add to it, and the hook of DDP add it to itself.
        parameter.grad = None
    several = len(chunks) > 1
    iterators = [iter(micro_batches) for _ in chunks]
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=0,  # shapes are exchanged between stages, so these two are not read
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return reports


def gather_sharded_gradients(chunks: list[Any]) -> None:
    """Fill in what the distributed optimizer leaves on other ranks, for inspection."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for bucket in (
        bucket for chunk in chunks for buffer in chunk.buffers for bucket in buffer.buckets
    ):
        mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def tensor_shard() -> TensorShard:
    """The part of divided matrices that this rank holds."""
    return TensorShard(
        size=parallel_state.get_tensor_model_parallel_world_size(),
        rank=parallel_state.get_tensor_model_parallel_rank(),
    )


def tensor_parallel_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def is_last_stage() -> bool:
    """Whether this rank has the logits."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def broadcast_from_last_stage(tensor: Tensor) -> None:
    """Give every pipeline stage what the last one has, in place."""
    group = parallel_state.get_pipeline_model_parallel_group()
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(tensor, src=source, group=group)
