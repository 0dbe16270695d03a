"""What the suite says in the words of the production implementation, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ..protocol import Pack, Padding, Task, Unsupported

if TYPE_CHECKING:
    from impl.megatron.model import GPTConfig
    from impl.thd import PackedRow


def gpt_config(task: Task) -> GPTConfig:
    """The model of a task as Megatron can build it.

    Raises:
        Unsupported: it cannot.
    """
    from impl.megatron.model import GPTConfig

    try:
        return GPTConfig(**asdict(task.model))
    except ValueError as error:
        raise Unsupported(str(error)) from error


def poisoned(logits: Tensor, packed: PackedRow, padding: Padding) -> Tensor:
    """Logits [1, T, V] whose padded rows hold what the task asks for.

    It is added, not put in their place, so that gradients still flow through these rows.
    """
    if padding.output_value is None:
        return logits
    poison = logits.new_zeros(logits.shape[1])
    return logits + poison.index_fill(0, packed.index.padding_rows, padding.output_value)[:, None]


def pack_seen(samples: tuple[int, ...], packed: PackedRow) -> Pack:
    """What was handed to the model, in the protocol's form."""
    return Pack(
        samples=samples,
        cp_ranks=tuple(dist.get_process_group_ranks(packed.cp_group)),
        tokens=packed.tensors["input_ids"],
        position_ids=packed.position_ids,
        labels=packed.tensors["labels"],
        cu_seqlens_padded=packed.index.cu_seqlens_padded,
    )
