"""Case → task: the batch, the mask, the weights and the plan that its names stand for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch_file import Document
from .case import Case, Step
from .models import MODEL_SPECS
from .protocol import (
    Batch,
    Loss,
    MicroBatch,
    ModelSpec,
    Oracle,
    Padding,
    Parallel,
    Schedule,
    Task,
)

_LOSSES = {
    "tokenmean": Loss("token-mean"),
    "seqmean": Loss("sequence-mean-token-mean"),
    "seqsum": Loss("sequence-mean-token-sum"),
    "entropy": Loss("token-mean", entropy_coeff=0.1),
}
_TEMPERATURES: dict[str, tuple[float, ...]] = {
    "t1": (1.0,),
    "t0.7": (0.7,),
    "t2": (2,),
    "teach": (0.7, 1.0, 2, 1.3),
}
_HUGE = 1e4  # an embedding that no real token has


@dataclass(frozen=True)
class TaskBuilder:
    """Builds the tasks of a run.

    Args:
        oracle: draws the weights. seed: of everything drawn.
        texts: real documents by batch, for the cases `text0`, `text1`, …
    """

    oracle: Oracle
    seed: int = 0
    texts: Sequence[tuple[Document, ...]] = ()

    def check(self, case: Case) -> None:
        """Refuse a case that cannot be built.

        Raises:
            ValueError: a text that is not there, fewer samples than micro-batches, lengths that
                its world cannot have.
        """
        steps = [step for step in case.cp if not isinstance(step, Schedule)]
        samples, most = len(self.seqlens(case)), max(map(len, steps), default=1)
        if samples < most and not case.expects_refusal:
            raise ValueError(f"{case.id}: {samples} samples cannot fill {most} micro-batches")

    def seqlens(self, case: Case) -> tuple[int, ...]:
        if case.column == "text":
            return tuple(len(document.input_ids) for document in self._documents(case))
        return case.seqlens

    def task(self, case: Case) -> Task:
        """What every rank is told."""
        batch, spec = self._batch(case)
        weights = self.oracle.random_weights(spec, seed=self.seed)
        padding = Padding(token_id=spec.vocab_size - 1)
        if case.padding == "poisoned_ids":
            longest = max(batch.input_ids, key=len)
            padding = Padding(token_id=int(longest[-1]))  # a target under every mask but "none"
        elif case.padding == "poisoned_nan":
            padding = replace(padding, side_value=float("nan"), output_value=float("nan"))
        elif case.padding == "poisoned_huge":
            weights["model.embed_tokens.weight"][padding.token_id] = _HUGE
        passes = tuple(
            step
            if isinstance(step, Schedule)
            else micro_batches(len(batch.input_ids), step, num_ranks=case.num_dp_cp_ranks)
            for step in case.cp
        )
        return Task(
            spec,
            weights,
            batch,
            passes,
            _LOSSES[case.loss],
            padding,
            case.parallel,
            case.interrupted,
            _random_routing(spec, batch, seed=self.seed) if case.replay else (),
        )

    def _documents(self, case: Case) -> tuple[Document, ...]:
        number = int(case.padding.removeprefix("text") or 0)
        if number >= len(self.texts):
            raise ValueError(
                f"{case.id}: there are {len(self.texts)} batches of text, counted from 0"
            )
        return self.texts[number]

    def _batch(self, case: Case) -> tuple[Batch, ModelSpec]:
        spec = _divisible(MODEL_SPECS[case.model], case.parallel)
        if case.column == "text":
            documents = self._documents(case)
            input_ids, num_ids = _dense_ids(documents)
            spec = _divisible(replace(spec, vocab_size=num_ids + 1), case.parallel)
            loss_mask = tuple(torch.tensor(document.loss_mask) for document in documents)
        else:
            draw = torch.Generator().manual_seed(
                self.seed + zlib.crc32(repr(case.seqlens).encode())
            )
            input_ids = tuple(
                _distinct_ids(seqlen, spec.vocab_size - 1, draw) for seqlen in case.seqlens
            )
            loss_mask = _MASKS[case.mask](case, draw)
        each = _TEMPERATURES[case.temperature]
        temperature = tuple(each[place % len(each)] for place in range(len(input_ids)))
        return Batch(input_ids, loss_mask, temperature), spec


def micro_batches(samples: int, step: Step, *, num_ranks: int) -> tuple[MicroBatch, ...]:
    """Samples dealt out to the micro-batches of one step in turn.

    Args:
        num_ranks: DP×CP.
    """
    return tuple(
        MicroBatch(
            tuple(range(samples))[place :: len(step)],
            sizes if isinstance(sizes, tuple) else (sizes,) * max(num_ranks // sizes, 1),
        )
        for place, sizes in enumerate(step)
    )


def _distinct_ids(seqlen: int, num_ids: int, draw: torch.Generator) -> Tensor:
    """Ids that all differ while there are enough, so that no two rows can be taken for another."""
    rounds = [torch.randperm(num_ids, generator=draw) for _ in range(-(-seqlen // num_ids))]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rounds])[:seqlen]


def _divisible(spec: ModelSpec, parallel: Parallel) -> ModelSpec:
    """The model with a layer for every chunk, and heads and widths that TP ranks can share."""
    shared = ("num_heads", "num_kv_heads", "ffn_size", "vocab_size")
    wider = {name: math.lcm(getattr(spec, name), parallel.tp_size) for name in shared}
    layers = max(spec.num_layers, parallel.pp_size * parallel.vpp_size)
    moe = spec.moe
    if moe is not None:
        moe = replace(moe, num_experts=math.lcm(moe.num_experts, parallel.ep_size))
    return replace(spec, num_layers=layers, moe=moe, **wider)  # type: ignore[arg-type]


def _random_routing(spec: ModelSpec, batch: Batch, *, seed: int) -> tuple[Tensor, ...]:
    """Experts for every token and layer that has them, as no router would choose them."""
    moe = spec.moe
    assert moe is not None
    layers = spec.num_layers - moe.num_dense_layers + spec.mtp_depth
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        torch.rand(seqlen, layers, moe.num_experts, generator=draw)
        .topk(moe.top_k)
        .indices.sort()
        .values
        for seqlen in batch.seqlens
    )


def _dense_ids(documents: Sequence[Document]) -> tuple[tuple[Tensor, ...], int]:
    """Ids renumbered from 0 without gaps, so that the toy model needs no large vocabulary.

    What is verified depends on which ids are equal, not on their values.
    """
    known = sorted({token for document in documents for token in document.input_ids})
    number = {token: place for place, token in enumerate(known)}
    ids = tuple(
        torch.tensor([number[token] for token in document.input_ids]) for document in documents
    )
    return ids, len(known)


def _uneven(case: Case, draw: torch.Generator) -> tuple[Tensor, ...]:
    masks = tuple(torch.rand(seqlen, generator=draw) < 0.6 for seqlen in case.seqlens)
    return tuple(mask | last for mask, last in zip(masks, _single(case, draw), strict=True))


def _full(case: Case, draw: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(torch.ones(seqlen, dtype=torch.bool) for seqlen in case.seqlens)


def _none(case: Case, draw: torch.Generator) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(seqlen, dtype=torch.bool) for seqlen in case.seqlens)


def _single(case: Case, draw: torch.Generator) -> tuple[Tensor, ...]:
    """The last token of the longest sequence, and no other."""
    masks = _none(case, draw)
    if any(case.seqlens):
        masks[case.seqlens.index(max(case.seqlens))][-1] = True
    return masks


def _shard(case: Case, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Only predictions made in the first chunk, so that all CP ranks but the first have none."""
    chunks = 2 * max(case.cp_sizes)
    return tuple(
        (torch.arange(seqlen) > 0) & (torch.arange(seqlen) <= -(-seqlen // chunks))
        for seqlen in case.seqlens
    )


def _rank(case: Case, draw: torch.Generator) -> tuple[Tensor, ...]:
    """Only the longest sequence, so that the ranks of all other groups have none."""
    longest = case.seqlens.index(max(case.seqlens)) if case.seqlens else 0
    return tuple(
        torch.full((seqlen,), place == longest) for place, seqlen in enumerate(case.seqlens)
    )


_MASKS: Mapping[str, Callable[[Case, torch.Generator], tuple[Tensor, ...]]] = {
    "uneven": _uneven,
    "full": _full,
    "none": _none,
    "single": _single,
    "shard": _shard,
    "rank": _rank,
}
