"""Megatron's global model-parallel state, set up and taken down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding

from ..parallel import ParallelLayout
from .probe import UnsupportedMegatron, features

_DP_ONLY = ParallelLayout()


@contextmanager
def model_parallel(
    layout: ParallelLayout = _DP_ONLY,
    *,
    megatron_groups: bool = False,
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[None]:
    """Megatron's groups over the default process group.

    Args:
        layout: of the model; by default all ranks are data parallel.
        megatron_groups: have Megatron make its own dynamic CP groups as well.
        timeout: limit of a collective in Megatron's groups, which count it in minutes.
    Raises:
        ValueError: it is set up already, and there is one for all.
        UnsupportedMegatron: groups asked of a version that makes none.
    """
    keyword = features().group_keyword
    if megatron_groups and keyword is None:
        raise UnsupportedMegatron(
            f"megatron-core {features().version} makes no dynamic CP groups; 0.16.0 and later do"
        )
    keywords = {keyword: True} if megatron_groups and keyword else {}
    if parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "Megatron's model-parallel state is open already, and there is one for all; close it, "
            "or make another engine in the state that is open"
        )
    before = {name: value for name, value in vars(parallel_state).items() if name.isupper()}
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp_size,
            pipeline_model_parallel_size=layout.pp_size,
            virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
            context_parallel_size=layout.static_cp_size,
            distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
            **keywords,
        )
        yield
    finally:
        RotaryEmbedding.forward.cache_clear()  # it keeps modules, and they their CP groups
        for group in parallel_state._global_process_group_list or ():
            if group is not None:  # Megatron forgets them, and their threads would run on
                dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
        for name in ("_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"):
            # 0.16.1 to 0.19.2 leave them behind, for the next layout to find
            getattr(parallel_state, name, {}).clear()
        vars(parallel_state).update(before)  # rank lists and some groups are left behind too


def megatron_cp_group(cp_size: int) -> dist.ProcessGroup | None:
    """Megatron's own group of a size, None for size 1, its way of saying that CP is off.

    Raises:
        ValueError: Megatron has no such group, or one with other members.
    """
    if cp_size == 1:
        return None
    getter = getattr(parallel_state, str(features().group_getter))
    try:
        group: dist.ProcessGroup = getter(group_size=cp_size)
    except KeyError as error:
        raise ValueError(f"Megatron made no group of CP size {cp_size}") from error
    if group.size() != cp_size:
        raise ValueError(f"Megatron's group of CP size {cp_size} has {group.size()} members")
    return group
