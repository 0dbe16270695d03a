"""Make a model's attention follow the CP group of the micro-batch, one call at a time.

Megatron hands RoPE the CP group that was there when the model was built
(`SelfAttention.forward` reads `pg_collection.cp`), whatever group the micro-batch carries. With
packed sequences that raises in 0.16.1 to 0.19.2 (unfused) or reads out of bounds (fused), and was
silently wrong on main in August 2026 (Megatron-LM #6821).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import nn


def bind_packed_cp_group(model: nn.Module) -> None:
    """Wrap every attention of `model` so that it uses the group it is called with.

    The wrapper sits on the module that receives `packed_seq_params`, not around the model: with
    recomputation that module is called again in the backward pass, when a binding around the
    model would be gone. Only this model's instances change; the classes stay as they are.

    Raises:
        ValueError: the model has no attention that can be bound, so that it would go on with the
            group it was built with.
    """
    attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no SelfAttention to bind; with another attention RoPE "
            "would keep the CP group that it was built with"
        )
    for module in attentions:
        module.forward = _bound_for_one_call(module, module.forward)


def _bound_for_one_call(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def bound(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        group = getattr(packed_seq_params, "cp_group", None)
        groups = module.pg_collection  # one object, shared by the modules of a model
        built_with = groups.cp
        groups.cp = built_with if group is None else group
        try:
            return forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            groups.cp = built_with

    return bound
