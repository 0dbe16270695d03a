"""How large a micro-batch's context-parallel groups are, and which samples each group gets."""

from collections.abc import Sequence


def choose_local_cp_size(
    seqlens: Sequence[int], *, world_size: int, max_seqlen_per_dp_cp_rank: int
) -> int:
    """The smallest CP size at which the longest sequence fits.

    That is a power of two that divides the world; where none fits, the whole world.

    Args:
        seqlens: tokens of each sequence of the micro-batch, without padding.
        world_size: ranks that data and context parallelism share.
        max_seqlen_per_dp_cp_rank: tokens of one sequence that one rank can take.
    Raises:
        ValueError: a sequence is too long for the whole world.

    >>> choose_local_cp_size([100, 2500], world_size=8, max_seqlen_per_dp_cp_rank=1024)
    4
    >>> choose_local_cp_size([100, 2500], world_size=6, max_seqlen_per_dp_cp_rank=1024)
    6
    """
    _check_seqlens(seqlens)
    if world_size < 1 or max_seqlen_per_dp_cp_rank < 1:
        raise ValueError(
            f"world_size={world_size} and "
            f"max_seqlen_per_dp_cp_rank={max_seqlen_per_dp_cp_rank} must be at least 1"
        )
    longest = max(seqlens)
    powers_of_two = [1 << k for k in range(world_size.bit_length())]
    sizes = [n for n in powers_of_two if world_size % n == 0] + [world_size]
    for cp_size in sizes:
        if longest <= cp_size * max_seqlen_per_dp_cp_rank:
            return cp_size
    needed = -(-longest // world_size)
    raise ValueError(
        f"sequence {list(seqlens).index(longest)} has {longest} tokens, but "
        f"world_size={world_size} ranks of max_seqlen_per_dp_cp_rank={max_seqlen_per_dp_cp_rank} "
        f"take {world_size * max_seqlen_per_dp_cp_rank}; shorten it, add ranks or raise "
        f"max_seqlen_per_dp_cp_rank to {needed}"
    )


def split(seqlens: Sequence[int], *, world_size: int, cp_size: int) -> list[list[int]]:
    """Which samples each group computes.

    Group g is the ranks from `g * cp_size` to `(g + 1) * cp_size - 1`. The longest sample goes
    first, each to the group that has the fewest tokens so far; the lower index wins a tie
    between samples or between groups.

    Returns:
        For each group the indices of its samples in input order. A group is empty when there
        are fewer samples than groups.
    Source: longest processing time first (Graham 1969, doi:10.1137/0117039).

    >>> split([5, 3, 9, 4], world_size=4, cp_size=2)
    [[1, 2], [0, 3]]
    """
    _check_seqlens(seqlens)
    if world_size < 1 or cp_size < 1 or world_size % cp_size:
        raise ValueError(
            f"cp_size={cp_size} does not divide world_size={world_size}; "
            f"every rank must be in exactly one group"
        )
    groups: list[list[int]] = [[] for _ in range(world_size // cp_size)]
    tokens = [0 for _ in groups]
    for sample in sorted(range(len(seqlens)), key=lambda i: (-seqlens[i], i)):
        group = tokens.index(min(tokens))
        groups[group].append(sample)
        tokens[group] += seqlens[sample]
    return [sorted(group) for group in groups]


def _check_seqlens(seqlens: Sequence[int]) -> None:
    if not seqlens:
        raise ValueError("there is no sequence; give at least one length")
    for sequence, seqlen in enumerate(seqlens):
        if seqlen < 1:
            raise ValueError(f"sequence {sequence} has length {seqlen}; lengths are at least 1")
