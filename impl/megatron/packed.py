"""Boundaries and CP group of a pack in Megatron's form."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from ..layout import RankIndex
from .probe import features

__all__ = ["PackedSeqParams", "packed_seq_params"]


def packed_seq_params(index: RankIndex, cp_group: dist.ProcessGroup) -> PackedSeqParams:
    """`PackedSeqParams` of one micro-batch.

    The real group is given at size 1 too, so that "no group" never has to mean "CP is off".
    `cu_seqlens_q` holds the padded boundaries, like `cu_seqlens_q_padded`: as one object, since
    kernels tell by identity whether there is padding between sequences.
    """
    bounds, longest = index.cu_seqlens_padded, max(index.padded)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.cp_group = cp_group
    if features().size_beside_group:
        params.local_cp_size = cp_group.size()
    return params
