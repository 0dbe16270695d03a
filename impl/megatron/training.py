"""Model chunks in Megatron's data parallelism, its optimizer, and its schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megatron.core.pipeline_parallel import get_forward_backward_func
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
    config: GPTConfig, weights: Mapping[str, Tensor], *, layout: ParallelLayout, road: Road
) -> list[Any]:
    """This rank's model chunks with their weights and gradient buffers, in float64 on the CPU.

    Their attention follows the CP group of the pack. All share one `TransformerConfig`, on which
    the schedules find how gradients are finalised.
    """
    chunks = build_gpt_chunks(config, max_seqlen=1, layout=layout)  # RoPE has no longest sequence
    for chunk in chunks:
        load_hf_weights(chunk, weights, config, shard=tensor_shard())
        bind_packed_cp_group(chunk)
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


def build_optimizer(
    chunks: list[Any], settings: Mapping[str, Any], *, layout: ParallelLayout
) -> Any:
    """Megatron's optimizer.

    Args:
        settings: keywords of its `OptimizerConfig`, such as `optimizer`, `lr`, `clip_grad`.
    """
    return get_megatron_optimizer(
        OptimizerConfig(
            **settings,
            params_dtype=torch.float64,
            use_distributed_optimizer=layout.distributed_optimizer,
        ),
        chunks,
    )


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
