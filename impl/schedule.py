"""Lengths → CP size → samples per group: plain arithmetic, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def cp_sizes(world_size: int) -> tuple[int, ...]:
    """CP sizes that a DP×CP world can be cut into: powers of two that divide it, and itself.

    >>> cp_sizes(8), cp_sizes(6), cp_sizes(3)
    ((1, 2, 4, 8), (1, 2, 6), (1, 3))
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    sizes = [1]
    while world_size % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return tuple(sizes) if sizes[-1] == world_size else (*sizes, world_size)


def choose_local_cp_size(
    seqlens: Sequence[int],
    *,
    world_size: int,
    max_seqlen_per_dp_cp_rank: int,
    min_cp_size: int = 1,
    max_cp_size: int | None = None,
) -> int:
    """The smallest CP size at which the longest sequence keeps to its share per rank.

    Args:
        seqlens: tokens of each sequence of the micro-batch.
        world_size: DP×CP ranks.
        max_seqlen_per_dp_cp_rank: tokens of one sequence that a rank may hold.
    Returns:
        the smallest of `cp_sizes(world_size)` within bounds that fits.
    Raises:
        ValueError: nothing to schedule, an empty sequence, or no size that fits.
    Source: the rule of verl PR #5057, with whole worlds that are no power of two added.

    >>> choose_local_cp_size([5, 13, 24], world_size=4, max_seqlen_per_dp_cp_rank=12)
    2
    """
    check_seqlens(seqlens)
    highest = world_size if max_cp_size is None else max_cp_size
    allowed = [size for size in cp_sizes(world_size) if min_cp_size <= size <= highest]
    if not allowed:
        raise ValueError(
            f"no CP size from min_cp_size={min_cp_size} to max_cp_size={highest} can be had from "
            f"{world_size} DP×CP ranks; sizes are {', '.join(map(str, cp_sizes(world_size)))}"
        )
    longest = max(seqlens)
    for size in allowed:
        if longest <= size * max_seqlen_per_dp_cp_rank:
            return size
    raise ValueError(
        f"sequence {list(seqlens).index(longest)} has {longest} tokens, which no CP size fits: "
        f"max_seqlen_per_dp_cp_rank={max_seqlen_per_dp_cp_rank} on {world_size} DP×CP ranks, CP "
        f"sizes {', '.join(map(str, allowed))}; shorten it, raise the limit or use "
        "more ranks"
    )


def split_samples(seqlens: Sequence[int], *, world_size: int, cp_size: int) -> list[list[int]]:
    """Which samples each CP group takes.

    Longest first, each sample goes to the group with the fewest tokens so far, so groups end up
    with about equal work. One is left without any when there are fewer samples than groups.

    Returns:
        per group, in rank order, its sample indices in input order.
    Raises:
        ValueError: `world_size` cannot be cut into groups of `cp_size`; nothing to split.

    >>> split_samples([3, 9, 4, 2], world_size=4, cp_size=2)
    [[1], [0, 2, 3]]
    """
    check_seqlens(seqlens)
    check_cp_size(cp_size, world_size=world_size)
    return deal_samples(seqlens, cp_sizes=[cp_size] * (world_size // cp_size))


def deal_samples(seqlens: Sequence[int], *, cp_sizes: Sequence[int]) -> list[list[int]]:
    """Which samples each of some CP groups takes, whatever their sizes.

    Longest first, each sample goes to the group with the fewest tokens a rank so far.

    >>> deal_samples([3, 9, 4, 2], cp_sizes=[2, 1, 1])
    [[1], [2], [0, 3]]
    """
    samples: list[list[int]] = [[] for _ in cp_sizes]
    emptiest = [(0.0, group) for group in range(len(cp_sizes))]  # tokens a rank
    for index in sorted(range(len(seqlens)), key=lambda index: (-seqlens[index], index)):
        tokens, group = emptiest[0]
        samples[group].append(index)
        heapq.heapreplace(emptiest, (tokens + seqlens[index] / cp_sizes[group], group))
    return [sorted(group) for group in samples]


def check_seqlens(seqlens: Sequence[int]) -> None:
    """Refuse an empty batch and an empty sequence, by index."""
    if not len(seqlens):
        raise ValueError("the batch is empty: dynamic CP needs at least one sequence")
    for index, seqlen in enumerate(seqlens):
        if seqlen < 1:
            raise ValueError(f"sequence {index} has {seqlen} tokens; drop empty sequences first")


def check_cp_size(cp_size: int, *, world_size: int) -> None:
    """Refuse a CP size that has no groups, before any collective."""
    if cp_size not in cp_sizes(world_size):
        raise ValueError(
            f"cp_size={cp_size} cannot be had from {world_size} DP×CP ranks; "
            f"sizes are {', '.join(map(str, cp_sizes(world_size)))}"
        )
