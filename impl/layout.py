"""Which token sits in which row of which rank: one table, from which all index maps follow.

Shape letters: `T` packed rows on one rank, `N` real tokens of the pack over all ranks,
`S` sequences, one of padding only included, `C` ranks of the CP group, `O` the offsets that
`PackRules.max_sequences` asks for, else `S + 1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .rules import DEFAULT_RULES, PackRules

_CPU = torch.device("cpu")


def alignment(*, cp_size: int, tp_size: int = 1, rules: PackRules = DEFAULT_RULES) -> int:
    """Tokens that every padded length is a multiple of.

    As many chunks for each CP rank as the layout has, within them equal parts for sequence
    parallelism, and what `rules` ask of a sequence.

    >>> alignment(cp_size=2), alignment(cp_size=2, rules=PackRules(layout="contiguous"))
    (4, 2)
    """
    return cp_size * rules.shard_multiple(cp_size=cp_size, tp_size=tp_size)


def padded_lengths(
    seqlens: Sequence[int], *, cp_size: int, tp_size: int = 1, rules: PackRules = DEFAULT_RULES
) -> tuple[int, ...]:
    """Tokens of every sequence of a pack with padding: all that decides its rows, on any side.

    Rows that the pack needs beyond its sequences are one more sequence at the end, of padding
    only. More padding behind the last real one would do too, but its chunks are cut from its
    padded length: a short one in a wide bucket would lie on rank 0 as a whole, its attention
    would grow with the bucket, and where it lies would depend on the sequences beside it. As a
    sequence of its own the padding moves no real token, `cu_seqlens_padded` still names every
    row, attention keeps it to itself, and its positions restart at 0, inside RoPE's table.

    >>> padded_lengths((5, 1), cp_size=2)
    (8, 4)
    >>> padded_lengths((5, 1), cp_size=2, rules=PackRules(pack_multiple=8))
    (8, 4, 4)
    """
    unit = alignment(cp_size=cp_size, tp_size=tp_size, rules=rules)
    padded = tuple(max(-(-seqlen // unit), 1) * unit for seqlen in seqlens)
    rows = sum(padded) // cp_size
    tail = rules.pack_rows(rows, cp_size=cp_size, tp_size=tp_size) - rows
    return (*padded, tail * cp_size) if tail else padded


@dataclass(frozen=True, eq=False)
class PackLayout:
    """Where the tokens of one pack lie over the ranks of a CP group, sequence by sequence.

    Zigzag: a padded sequence is cut into `2 * cp_size` equal chunks; rank r holds chunk r and
    then its mirror `2 * cp_size - 1 - r`, so that causal work is equal on every rank.
    Contiguous: it is cut into `cp_size` equal chunks, and rank r holds chunk r. Either way the
    shards of all sequences lie side by side.

    Args:
        seqlens: real tokens of each sequence. padded: the same after alignment, and the length
            of a last sequence of padding only where `padded_lengths` says that there is one.
        tokens: int64 [C, T], for each rank and row the index of its token in the concatenated
            real sequences, -1 for padding.
        positions: int64 [C, T], position inside the sequence; counts on through its padding.
        sequences: int64 [C, T], which sequence.
    Source: Llama 3 report (arXiv:2407.21783), context parallelism.
    """

    seqlens: tuple[int, ...]
    padded: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    sequences: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must serve training too
def pack_layout(
    seqlens: tuple[int, ...],
    *,
    cp_size: int,
    tp_size: int = 1,
    rules: PackRules = DEFAULT_RULES,
) -> PackLayout:
    """The layout of a pack, on the CPU.

    A pack without sequences (its group got no sample) holds one sequence of padding only, so
    that its ranks still take part in whatever the model does collectively.

    >>> pack_layout((3, 2), cp_size=2).tokens
    tensor([[ 0, -1,  3, -1],
            [ 1,  2,  4, -1]])
    """
    padded = padded_lengths(seqlens, cp_size=cp_size, tp_size=tp_size, rules=rules)
    real = _with_tail(seqlens, padded)
    shards = torch.tensor(padded) // cp_size  # rows of each sequence on one rank
    sequences = torch.repeat_interleave(torch.arange(len(padded)), shards)
    row = (
        torch.arange(len(sequences)) - _boundaries(shards.tolist())[sequences]
    )  # inside the shard
    ranks = torch.arange(cp_size).unsqueeze(-1)
    cut = _contiguous if rules.layout == "contiguous" else _zigzag
    positions = cut(row, shard=shards[sequences], cp_size=cp_size, cp_rank=ranks)
    tokens = _boundaries(real)[sequences] + positions
    tokens = tokens.masked_fill(positions >= torch.tensor(real)[sequences], -1)
    return PackLayout(seqlens, padded, tokens, positions, sequences.expand(cp_size, -1))


@dataclass(frozen=True, eq=False)
class RankIndex:
    """What one rank needs of a layout, on the device where it is needed.

    Args:
        rows: int64 [T], token of each row; padded rows name token 0 and are filled afterwards.
        padding_rows, real_rows: int64, together all rows, ascending.
        position_ids: int64 [T].
        token_slots: int64 [N], where each token lies once every rank's real rows are laid side
            by side, each rank taking `max_real_rows` places and filling the first of them.
        cu_seqlens, cu_seqlens_padded: int32 [O], of the whole pack, before the split over ranks:
            real tokens alone, and padding counted to the sequence before it.
        layout: how sequences are cut.
    """

    seqlens: tuple[int, ...]
    padded: tuple[int, ...]
    rows: Tensor
    padding_rows: Tensor
    real_rows: Tensor
    position_ids: Tensor
    token_slots: Tensor
    max_real_rows: int
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    layout: str


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must serve training too
def rank_index(
    seqlens: tuple[int, ...],
    *,
    cp_size: int,
    cp_rank: int,
    tp_size: int = 1,
    rules: PackRules = DEFAULT_RULES,
    device: torch.device = _CPU,
) -> RankIndex:
    """The index maps of one rank; the last few are kept, so a repeated batch costs nothing.

    >>> rank_index((3, 2), cp_size=2, cp_rank=1).real_rows
    tensor([0, 1, 2])
    """
    layout = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size, rules=rules)
    num_offsets = rules.num_offsets(len(seqlens), num_padded=len(layout.padded))
    real = layout.tokens >= 0
    max_real_rows = int(real.sum(-1).max())
    slots = torch.arange(cp_size).unsqueeze(-1) * max_real_rows + real.cumsum(-1) - 1
    token_slots = torch.empty(sum(seqlens), dtype=torch.int64)
    token_slots[layout.tokens[real]] = slots[real]
    return RankIndex(
        seqlens=layout.seqlens,
        padded=layout.padded,
        rows=layout.tokens[cp_rank].clamp(min=0).to(device),
        padding_rows=(~real[cp_rank]).nonzero().squeeze(-1).to(device),
        real_rows=real[cp_rank].nonzero().squeeze(-1).to(device),
        position_ids=layout.positions[cp_rank].to(device),
        token_slots=token_slots.to(device),
        max_real_rows=max_real_rows,
        cu_seqlens=_offsets(seqlens, num_offsets).to(device),
        cu_seqlens_padded=_offsets(layout.padded, num_offsets).to(device),
        layout=rules.layout,
    )


def _with_tail(seqlens: tuple[int, ...], padded: tuple[int, ...]) -> tuple[int, ...]:
    """Real lengths with a 0 for the sequence that is all padding, where there is one."""
    return seqlens + (0,) * (len(padded) - len(seqlens))


def _contiguous(row: Tensor, *, shard: Tensor, cp_size: int, cp_rank: Tensor) -> Tensor:
    """As `_zigzag`, one chunk a rank."""
    return cp_rank * shard + row


def _zigzag(row: Tensor, *, shard: Tensor, cp_size: int, cp_rank: Tensor) -> Tensor:
    """Positions in the padded sequence of rows of its shard, which has `shard` rows."""
    if cp_size == 1:
        return row.unsqueeze(0)
    chunk = shard // 2
    mirror = 2 * cp_size - 1 - cp_rank
    return torch.where(row < chunk, cp_rank * chunk + row, mirror * chunk + row - chunk)


def _boundaries(seqlens: Sequence[int]) -> Tensor:
    """Running sum from 0: int64 [S + 1]."""
    return torch.tensor([0, *seqlens]).cumsum(0)


def _offsets(seqlens: Sequence[int], num_offsets: int) -> Tensor:
    """Running sum from 0, the last one repeated: int32 [num_offsets + 1]."""
    return _boundaries([*seqlens, *[0] * (num_offsets - len(seqlens))]).int()
