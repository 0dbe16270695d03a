"""Megatron's own hybrid context parallel schedule, run whole and on the CPU.

Hybrid is Megatron's word for dynamic CP up to 0.19. Its scheduler places whole samples on ranks;
a rank runs its samples one after another, each in the CP group of the ranks that share it, and
gradients are reduced once at the end. This is the part of `conformance.adapters.stock_schedule`
that speaks Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
from torch import Tensor, nn

IdGroups = list[list[list[int]]]
"""Groups of the schedule, between which all ranks meet; in each the sample ids of every rank."""

Sample = dict[str, Tensor]
ForwardStep = Callable[[Iterator[Sample], nn.Module], tuple[Tensor, Callable[[Tensor], Any]]]


def place_samples(seqlens: Mapping[int, int], *, max_seqlen_per_dp_cp_rank: int) -> IdGroups:
    """Where Megatron's scheduler runs each sample: on as many ranks as its CP size.

    Args:
        seqlens: padded length by sample id.
    """
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    scheduler = BalancedCPScheduler(max_seqlen_per_dp_cp_rank, everyone)
    _, id_groups = scheduler.get_groups_and_subsamples(list(seqlens.items()), None)
    return id_groups  # type: ignore[no-any-return]


def with_gradient_buffers(model: Any) -> Any:
    """The model in Megatron's data parallelism, configured as its training script would.

    The script insists on `calculate_per_token_loss`: gradients are summed over all ranks and
    divided by the number of tokens that the loss counted.
    """
    config = model.config
    config.hybrid_context_parallel = True
    config.calculate_per_token_loss = True
    data_parallel = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.no_sync_func = data_parallel.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return data_parallel


def run_step(
    model: Any, samples: Mapping[int, Sample], id_groups: IdGroups, forward_step: ForwardStep
) -> list[dict[str, Tensor]]:
    """One step over the samples of a global batch; its gradients are left in `main_grad`.

    What the schedule gets is what `HybridCPDataLoaderWrapper` hands it, less the journey of the
    samples from the rank that loaded them.

    Args:
        samples: by id, those of this rank at least.
    Returns:
        what the loss function reported of each sample that this rank ran.
    """
    model.zero_grad_buffer()
    reports: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([(samples, id_groups)]),
        model=model,
        num_microbatches=1,
        seq_length=0,  # without pipeline stages these two are not read
        micro_batch_size=1,
        forward_only=False,
    )
    return reports


def slice_sample(sample: Sample) -> tuple[Sample, PackedSeqParams]:
    """This rank's zigzag share of a sample, and the parameters that carry its CP group.

    Up to 0.17 one helper of Megatron's gives both. Later helpers only slice and the training
    script makes the parameters, but never gets there: the scheduled sample has one dimension and
    no `cu_seqlens`, and the script reads both. So they get here what they ask for, and the
    parameters that the earlier helper made.

    Args:
        sample: [s] each, and the `local_cp_size` that the schedule has added.
    Returns:
        [1, s / local_cp_size] each.
    """
    local_cp_size = sample["local_cp_size"]
    whole = {name: tensor for name, tensor in sample.items() if name != "local_cp_size"}
    if hasattr(utils, "get_batch_on_this_hybrid_cp_rank"):
        sliced: tuple[Sample, PackedSeqParams] = utils.get_batch_on_this_hybrid_cp_rank(
            whole, int(local_cp_size)
        )
        return sliced
    seqlen = len(whole["tokens"])
    bounds = torch.tensor([0, seqlen], dtype=torch.int32)
    batch = utils.get_batch_on_this_cp_rank(
        {
            **{name: tensor.unsqueeze(0) for name, tensor in whole.items()},
            "cu_seqlens": bounds.unsqueeze(0),
            "local_cp_size": local_cp_size,
        },
        is_hybrid_cp=True,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
    )
    params = PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=seqlen,
        max_seqlen_kv=seqlen,
        local_cp_size=int(local_cp_size),
        cp_group=batch.get("hybrid_cp_group"),
    )
    return {name: batch[name] for name in whole}, params
