"""Boundaries and CP group of a pack in Megatron's form."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from ..layout import RankIndex
from .probe import UnsupportedMegatron, features

__all__ = ["PackedSeqParams", "packed_seq_params"]


def packed_seq_params(
    index: RankIndex, cp_group: dist.ProcessGroup, *, cu_seqlens: str = "padded"
) -> PackedSeqParams:
    """`PackedSeqParams` of one micro-batch.

    The real group is given at size 1 too, so that "no group" never has to mean "CP is off".

    Args:
        cu_seqlens: "padded", `cu_seqlens_q` holds the padded boundaries, like
            `cu_seqlens_q_padded`: as one object, since kernels tell by identity whether there is
            padding between sequences. "real", it holds those of the real tokens, so that kernels
            skip padding; `pad_between_seqs` tells them, since Transformer Engine's own guess
            leaves out the last sequence (TransformerEngine #3331). Megatron's multi-token
            prediction reads `cu_seqlens_q` as if padded and needs "padded".
    Raises:
        ValueError: unknown offsets, or a layout that Megatron does not compute with.
        UnsupportedMegatron: it has no field for real offsets.
    """
    if cu_seqlens not in ("padded", "real"):
        raise ValueError(f"cu_seqlens={cu_seqlens!r} is not one of padded, real")
    check_layout(index.layout, cp_size=cp_group.size())
    padded, longest = index.cu_seqlens_padded, max(index.padded)
    attended = padded if cu_seqlens == "padded" else index.cu_seqlens
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=attended,
        cu_seqlens_kv=attended,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.cp_group = cp_group
    params.padded_lengths = index.padded  # on the host, for `impl.megatron.attention`
    if features().size_beside_group:
        params.local_cp_size = cp_group.size()
    if cu_seqlens == "real":
        _tell_of_padding(params)
    return params


def check_layout(layout: str, *, cp_size: int) -> None:
    """Whether Megatron computes with a layout at a CP size.

    Raises:
        ValueError: it does not.
    """
    if layout != "zigzag" and cp_size > 1:
        raise ValueError(
            f"layout={layout!r} at CP size {cp_size}: Megatron's RoPE and attention "
            "take rank r to hold chunks r and 2 * cp_size - 1 - r of every sequence and cannot be "
            "given positions; use layout='zigzag'"
        )


def _tell_of_padding(params: PackedSeqParams) -> None:
    if not features().pad_between_seqs:
        raise UnsupportedMegatron(
            f"megatron-core {features().version}: PackedSeqParams has no pad_between_seqs, so "
            "attention would guess where padding is; 0.19.2 has it; use cu_seqlens='padded'"
        )
    params.pad_between_seqs = True
