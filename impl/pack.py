"""Values of whole sequences ↔ packed rows of one rank: one `index_select` each way."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import RankIndex


def jagged(values: Tensor, seqlens: Tensor | tuple[int, ...]) -> Tensor:
    """Concatenated sequences [N, ...] as a jagged nested tensor, sharing their memory.

    >>> [row.tolist() for row in jagged(torch.arange(3), (1, 2)).unbind()]
    [[0], [1, 2]]
    """
    lengths = torch.as_tensor(seqlens, dtype=torch.int64)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    offsets = offsets.to(values.device, non_blocking=True)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def seqlens_of(batch: Tensor) -> tuple[int, ...]:
    """Lengths of a jagged tensor: the one place where they come to the host."""
    return tuple(offsets_of(batch).diff().tolist())


def offsets_of(batch: Tensor) -> Tensor:
    """Where each sequence of a jagged tensor begins, and the end: int64 [S + 1].

    Raises:
        ValueError: not jagged, or with holes between its sequences.
    """
    if batch.layout != torch.jagged:
        raise ValueError(
            f"{tuple(batch.shape)} is no jagged tensor; make one with impl.pack.jagged"
        )
    if batch.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError("a jagged tensor has holes between its sequences; pack its values first")
    offsets: Tensor = batch.offsets()  # type: ignore[attr-defined]
    return offsets


def pack_rows(values: Tensor, index: RankIndex, *, pad_value: float) -> Tensor:
    """A CP rank's packed rows.

    Args:
        values: [N, ...], the real tokens of all sequences, concatenated.
        pad_value: what padded rows hold.
    Returns:
        [T, ...]; gradients flow back from real rows alone.
    """
    if not len(values):
        return values.new_full((len(index.rows), *values.shape[1:]), pad_value)
    rows = values.index_select(0, index.rows)
    return rows.index_fill(0, index.padding_rows, pad_value) if len(index.padding_rows) else rows


def drop_padding(rows: Tensor, index: RankIndex) -> Tensor:
    """The real rows [R, ...] of a rank's packed rows [T, ...].

    Padded rows are left out, not multiplied by zero, so that nothing in them, NaN included,
    reaches a value or a gradient.
    """
    return rows.index_select(0, index.real_rows) if len(index.padding_rows) else rows


def next_token_labels(
    values: Tensor, seqlens: tuple[int, ...], *, fill: int, ahead: int = 1
) -> Tensor:
    """Labels [N] of concatenated sequences: the token `ahead` further in the same sequence.

    Shifted before any split: afterwards the neighbour may be on another rank. `fill` stands
    where a sequence ends.

    >>> next_token_labels(torch.tensor([5, 6, 7, 8]), (3, 1), fill=-100).tolist()
    [6, 7, -100, -100]
    """
    labels = values.roll(-ahead, 0)
    lengths = torch.tensor(seqlens, dtype=torch.int64)
    back = torch.arange(1, ahead + 1)  # from the end of a sequence
    ends = (lengths.cumsum(0)[:, None] - back)[back <= lengths[:, None]]
    return labels.index_fill_(0, ends.to(values.device, non_blocking=True), fill)
