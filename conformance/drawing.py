"""A pack as text, so that a person can see which token sits where."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

FIRST = 100
"""Token `p` of sequence `s` is `FIRST * (s + 1) + p`, in drawings as in `fixtures/layouts`."""

NO_TOKEN = -1


def place_of(token: int) -> tuple[int, int]:
    """Sequence and position of a token that says where it comes from.

    >>> place_of(212)
    (1, 12)
    """
    sequence, position = divmod(int(token), FIRST)
    return sequence - 1, position


def draw_rank(tokens: Tensor, shard_lengths: Sequence[int]) -> str:
    """One rank's pack: the positions it holds, sequence by sequence, a dot for padding.

    A token of another sequence than the one whose shard it sits in is drawn with its sequence.

    Args:
        tokens: int64 [T], `FIRST * (s + 1) + p`, or `NO_TOKEN` for padding.
        shard_lengths: rows that each sequence has on this rank.

    >>> draw_rank(torch.tensor([100, 101, -1, -1, 200, 103]), [4, 2])
    's0: 0 1 . . | s1: 0 s0.3'
    """
    shards = tokens.split([*shard_lengths, len(tokens) - sum(shard_lengths)])
    drawn = [
        f"s{sequence}: {' '.join(_draw_token(token, sequence) for token in shard.tolist())}"
        for sequence, shard in enumerate(shards[:-1])
    ]
    return " | ".join([*drawn, f"beyond: {shards[-1].tolist()}"] if len(shards[-1]) else drawn)


def draw_ranks(ranks: Sequence[Tensor], shard_lengths: Sequence[int]) -> str:
    """All ranks of a CP group, one line each."""
    return "\n".join(
        f"rank {rank} | {draw_rank(tokens, shard_lengths)}" for rank, tokens in enumerate(ranks)
    )


def _draw_token(token: int, sequence: int) -> str:
    if token == NO_TOKEN:
        return "."
    owner, position = place_of(token)
    return str(position) if owner == sequence else f"s{owner}.{position}"
