"""What the suite says in the words of the production implementation, and back."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pack import jagged

from ..model_spec import same_fields
from ..protocol import Batch, Pack, Padding, Task, Unsupported

if TYPE_CHECKING:
    from impl.megatron.model import GPTConfig
    from impl.thd import PackedRow


PRELOAD = (
    "impl.engine",
    "impl.forward",
    "impl.merge",
    "impl.megatron.bind",
    "impl.megatron.model",
    "impl.megatron.parallel",
    "impl.megatron.weights",
)
WATCH = (
    "megatron.core.parallel_state",
    "megatron.core.packed_seq_params.PackedSeqParams",
    "megatron.core.transformer.attention.Attention",
    "megatron.core.transformer.attention.SelfAttention",
    "megatron.core.models.gpt.GPTModel",
)


def versions() -> dict[str, str]:
    """What is under test, found without importing it; the index logic needs no Megatron."""
    try:
        return {"megatron": importlib.metadata.version("megatron-core")}
    except importlib.metadata.PackageNotFoundError:
        return {"megatron": ""}


def gpt_config(task: Task) -> GPTConfig:
    """The model of a task as Megatron can build it.

    Raises:
        Unsupported: it cannot.
    """
    from impl.megatron import gpt_config as own

    parts = {"rope_scaling": own.RopeScaling, "mla": own.MLA, "moe": own.MoE}
    try:
        return own.GPTConfig(**same_fields(task.model, parts))
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


def jagged_batch(batch: Batch, samples: Sequence[int]) -> dict[str, Tensor]:
    """Some samples with their side inputs, and a probe that tells where each token went."""
    seqlens = tuple(batch.seqlens[sample] for sample in samples)
    ids = [batch.input_ids[sample] for sample in samples]
    temperature = torch.tensor(
        [batch.temperature[sample] for sample in samples], dtype=torch.float64
    )
    return {
        "input_ids": jagged(torch.cat([torch.empty(0, dtype=torch.int64), *ids]), seqlens),
        "temperature": jagged(
            temperature.repeat_interleave(torch.tensor(seqlens, dtype=torch.int64)), seqlens
        ),
        "probe": jagged(_probe(seqlens), seqlens),
    }


def _probe(seqlens: Sequence[int]) -> Tensor:
    """A side input that differs in every token: [tokens, 2], sequence and position."""
    places = [
        torch.stack([torch.full((seqlen,), sequence), torch.arange(seqlen)], 1)
        for sequence, seqlen in enumerate(seqlens)
    ]
    return torch.cat([torch.empty(0, 2, dtype=torch.float64), *places])


def check_probe(found: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Whether the side inputs that came with the outputs of a CP group are those of its tokens."""
    probe, expected = found.values(), inputs["probe"].values()
    if not torch.equal(probe, expected):
        token = int((probe != expected).any(1).nonzero()[0])
        raise RuntimeError(
            f"side inputs are not where their tokens are: token {token} of the CP group has "
            f"those of {probe[token].tolist()}, not {expected[token].tolist()} (sequence, "
            "position)"
        )


def weighted_loss(task: Task, logprobs: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    """What is differentiated: of some tokens [N] their part of the loss of the batch."""
    from impl.loss import weighted_sum

    return weighted_sum(-logprobs - task.loss.entropy_coeff * entropy, weights)


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
