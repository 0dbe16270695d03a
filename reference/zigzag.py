"""Packed context parallelism by definition: which rank holds which token, and in what order.

A sequence is padded at its end and cut into 2 * cp_size equal chunks. Rank r holds chunk r and
then its mirror, chunk 2 * cp_size - 1 - r, so that causal work is equal on every rank. The
shards of all sequences stand side by side in the rank's pack. With one rank nothing is cut.

Source: Llama 3 report (arXiv:2407.21783), section 3.3.2, context parallelism.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def alignment(cp_size: int, tp_size: int = 1) -> int:
    """What padded lengths are a multiple of.

    >>> alignment(4), alignment(4, 2), alignment(1, 2)
    (8, 16, 2)
    """
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"cp_size={cp_size} and tp_size={tp_size} must be at least 1")
    return 2 * cp_size * tp_size if cp_size > 1 else tp_size


def padded_length(seqlen: int, *, cp_size: int, tp_size: int = 1) -> int:
    """The length of one sequence with its padding.

    >>> padded_length(9, cp_size=2), padded_length(8, cp_size=2), padded_length(9, cp_size=1)
    (12, 8, 9)
    """
    unit = alignment(cp_size, tp_size)
    if seqlen < 1:
        raise ValueError(f"seqlen={seqlen} must be at least 1; leave empty sequences out")
    length = unit
    while length < seqlen:
        length += unit
    return length


def packed_rows(
    seqlens: Sequence[int], *, cp_size: int, cp_rank: int, tp_size: int = 1
) -> list[tuple[int, int]]:
    """What a rank's pack holds, row by row: (sequence, position).

    A position counts on through the padding: one that is not below its sequence's length is
    padding.

    >>> packed_rows([5, 2], cp_size=2, cp_rank=0)
    [(0, 0), (0, 1), (0, 6), (0, 7), (1, 0), (1, 3)]
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not one of the {cp_size} ranks of cp_size")
    rows = []
    for sequence, seqlen in enumerate(seqlens):
        positions = list(range(padded_length(seqlen, cp_size=cp_size, tp_size=tp_size)))
        if cp_size > 1:
            size = len(positions) // (2 * cp_size)
            chunks = [positions[i * size : (i + 1) * size] for i in range(2 * cp_size)]
            positions = chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]
        rows += [(sequence, position) for position in positions]
    return rows


def packed_positions(
    seqlens: Sequence[int], *, cp_size: int, cp_rank: int, tp_size: int = 1
) -> Tensor:
    """Position ids of a rank's pack, int64 [T]: they restart at 0 in every sequence.

    >>> packed_positions([5, 2], cp_size=2, cp_rank=0)
    tensor([0, 1, 6, 7, 0, 3])
    """
    rows = packed_rows(seqlens, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size)
    return torch.tensor([position for _, position in rows], dtype=torch.int64)


def packed_tokens(
    sequences: Sequence[Tensor],
    *,
    cp_size: int,
    cp_rank: int,
    tp_size: int = 1,
    pad_value: float,
) -> Tensor:
    """A rank's pack of anything that sequences have per token.

    Args:
        sequences: [L_i, ...] each, alike in everything but L_i.
        pad_value: fills every padding row.
    Returns:
        [T, ...], with a graph to the sequences.

    >>> packed_tokens([torch.tensor([10, 11, 12, 13, 14])], cp_size=2, cp_rank=0, pad_value=-1)
    tensor([10, 11, -1, -1])
    """
    if not sequences:
        raise ValueError("there is no sequence to pack; give at least one")
    seqlens = [len(sequence) for sequence in sequences]
    padding = torch.full_like(sequences[0][0], pad_value)
    rows = packed_rows(seqlens, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size)
    return torch.stack(
        [
            sequences[sequence][position] if position < seqlens[sequence] else padding
            for sequence, position in rows
        ]
    )


def next_token_labels(sequence: Tensor, pad_value: float) -> Tensor:
    """The token that each token predicts; the last one predicts nothing and gets `pad_value`.

    Shift before the split: on a rank, the next row of the pack is another chunk's or another
    sequence's.

    >>> next_token_labels(torch.tensor([5, 6, 7]), pad_value=-100)
    tensor([   6,    7, -100])
    """
    if len(sequence) == 0:
        raise ValueError("the sequence is empty; leave it out")
    return torch.cat([sequence[1:], torch.full_like(sequence[:1], pad_value)])


def unpack(
    shards: Sequence[Tensor], seqlens: Sequence[int], *, cp_size: int, tp_size: int = 1
) -> list[Tensor]:
    """The real tokens of every sequence in order, from the packs of all CP ranks.

    Args:
        shards: [T, ...] of rank 0, 1, ... in this order.
        seqlens: lengths without padding.
    Returns:
        [L_i, ...] for each sequence, with a graph to the shards.

    >>> unpack([torch.tensor([10, 11, -1, -1]), torch.tensor([12, 13, 14, -1])], [5], cp_size=2)
    [tensor([10, 11, 12, 13, 14])]
    """
    if len(shards) != cp_size:
        raise ValueError(f"{len(shards)} shards for cp_size={cp_size}; give one for each rank")
    found: dict[tuple[int, int], Tensor] = {}
    for cp_rank, shard in enumerate(shards):
        rows = packed_rows(seqlens, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size)
        if len(shard) != len(rows):
            raise ValueError(
                f"the shard of rank {cp_rank} has {len(shard)} rows; "
                f"lengths {list(seqlens)} at cp_size={cp_size} make {len(rows)}"
            )
        found.update(zip(rows, shard, strict=True))
    return [
        torch.stack([found[sequence, position] for position in range(seqlen)])
        for sequence, seqlen in enumerate(seqlens)
    ]
