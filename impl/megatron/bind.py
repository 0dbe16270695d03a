"""Make a model's attention follow the CP group of the micro-batch, one call at a time.

Megatron hands RoPE the CP group that was there when the model was built
(`SelfAttention.forward` and `MLASelfAttention.forward` read `pg_collection.cp`), whatever group
the micro-batch carries. With packed sequences that raises in 0.16.1 to 0.19.2 (unfused) or reads
out of bounds (fused), and was silently wrong on main in August 2026 (Megatron-LM #6821).

MLA also asks `config.context_parallel_size` whether to cut its table of angles to the rows of this
rank, which are fewer than the positions of a sequence that is shared.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn


def bind_packed_cp_group(model: nn.Module) -> None:
    """Wrap every attention of `model` so that it uses the group it is called with.

    The wrapper sits on the module that receives `packed_seq_params`, not around the model: with
    recomputation that module is called again in the backward pass, when a binding around the
    model would be gone. Only this model's instances change; the classes stay as they are.

    Raises:
        ValueError: the model has no attention that can be bound, so that it would go on with the
            group it was built with; or it runs multi-token prediction by itself.
    """
    modules = list(model.modules())
    attentions = [one for one in modules if isinstance(one, SelfAttention | MLASelfAttention)]
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no SelfAttention to bind; with another attention RoPE "
            "would keep the CP group that it was built with"
        )
    if any(getattr(one, "mtp_process", False) for one in modules):
        raise ValueError(
            "the model has an mtp_block_spec: Megatron would take the next ids and the weights of "
            "their loss from the group that the model was built with; build it without, and add "
            "impl.megatron.mtp.add_mtp"
        )
    for module in attentions:
        module.forward = _bound_for_one_call(module, module.forward)


def _bound_for_one_call(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def bound(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        group = getattr(packed_seq_params, "cp_group", None)
        with ExitStack() as binding:
            if group is not None:
                # one object, shared by the modules of a model
                binding.enter_context(_replaced(module.pg_collection, "cp", group))
            if group is not None and isinstance(module, MLASelfAttention):
                config = copy.copy(module.config)  # the model's own stays as it is
                config.context_parallel_size = group.size()
                binding.enter_context(_replaced(module, "config", config))
            return forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    return bound


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Inside, an attribute has another value; afterwards it has the one it had."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
