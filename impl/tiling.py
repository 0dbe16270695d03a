"""Packs → micro-batches in which no rank is idle, or the order in which free ranks run them.

Blocks of descending powers of two, laid side by side from rank 0, are all aligned. So packs fit a
micro-batch if there are ranks enough for all, and who gets which ranks can be settled last.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from .packing import Pack, Samples

Placed = list[tuple[int, Pack]]
"""One micro-batch: first rank and pack of every group."""

_by_work = attrgetter("work")


def tile(packs: Iterable[Pack], samples: Samples) -> Iterator[list[Pack]]:
    """Micro-batches of packs of about equal work.

    Each takes the costliest pack that is left, then the next costliest that fit beside it. What
    ranks wait at the end of micro-batches then adds up to little more than the costliest pack.
    """
    queues: dict[int, deque[Pack]] = {}
    for pack in sorted(packs, key=_by_work, reverse=True):
        queues.setdefault(pack.cp_size, deque()).append(pack)
    while queues:
        free = samples.world_size
        chosen: list[Pack] = []
        while heads := [queue[0] for size, queue in queues.items() if size <= free]:
            pack = max(heads, key=_by_work)
            chosen.append(queues[pack.cp_size].popleft())
            free -= pack.cp_size
            if not queues[pack.cp_size]:
                del queues[pack.cp_size]
        yield chosen


def free_ranks(packs: Iterable[Pack], samples: Samples) -> int:
    """Ranks that a micro-batch of these packs leaves without one."""
    return samples.world_size - sum(pack.cp_size for pack in packs)


def spread(packs: Sequence[Pack], samples: Samples) -> list[Pack]:
    """Use the ranks that are left, for the costliest pack first."""
    free = free_ranks(packs, samples)
    heap = [(-pack.work, pack.samples, pack) for pack in packs]
    heapq.heapify(heap)
    done: list[Pack] = []
    while heap and free:
        pack = heapq.heappop(heap)[-1]
        parts = (
            _halve(pack, free, samples)
            or _widen(pack, free, samples)
            or _shed(pack, free, samples)
        )
        for part in parts:
            heapq.heappush(heap, (-part.work, part.samples, part))
        if parts:
            free -= sum(part.cp_size for part in parts) - pack.cp_size
        else:  # nor will there be any later: free ranks only get fewer
            done.append(pack)
    return done + [pack for *_, pack in heap]


def place(packs: Sequence[Pack], samples: Samples) -> Placed:
    """Ranks for every pack, wide ones first; ranks that are left get packs of padding only."""
    narrowest = samples.sizes[0]
    idle = [Pack(narrowest, (), 0.0)] * (free_ranks(packs, samples) // narrowest)
    placed: Placed = []
    start = 0
    for pack in sorted([*packs, *idle], key=lambda pack: (-pack.cp_size, -pack.work)):
        placed.append((start, pack))
        start += pack.cp_size
    return placed


def run_freely(packs: Sequence[Pack], samples: Samples) -> list[Placed]:
    """Packs on the ranks that are free first, wide and costly ones before others.

    Returns:
        micro-batches in which ranks can be without a group; a rank's groups keep their order.
    """
    clock = [0.0] * samples.world_size  # when each rank is free
    done = [0] * samples.world_size  # micro-batches behind it
    rounds: list[Placed] = []
    for size in reversed(samples.sizes):
        # the ranks of a block are free together: wider groups, run before, hold all of it or none
        blocks = [(clock[at], at) for at in range(0, samples.world_size - size + 1, size)]
        heapq.heapify(blocks)
        for pack in sorted((one for one in packs if one.cp_size == size), key=_by_work)[::-1]:
            free_at, start = blocks[0]
            heapq.heapreplace(blocks, (free_at + pack.seconds, start))
            index, block = done[start], slice(start, start + size)
            clock[block], done[block] = [free_at + pack.seconds] * size, [index + 1] * size
            if index == len(rounds):
                rounds.append([])
            rounds[index].append((start, pack))
    return rounds


def step_time(
    micro_batches: Iterable[Placed],
    *,
    world_size: int,
    barriered: bool,
    time: Callable[[Pack], float],
) -> float:
    """When the last rank is done, if a group starts once its ranks, or all, are free."""
    clock = [0.0] * world_size
    for micro_batch in micro_batches:
        for start, pack in micro_batch:
            block = slice(start, start + pack.cp_size)
            clock[block] = [max(clock[block]) + time(pack)] * pack.cp_size
        if barriered:
            clock = [max(clock)] * world_size
    return max(clock)


def _halve(pack: Pack, free: int, samples: Samples) -> list[Pack]:
    """Two packs of the same size, or nothing."""
    if len(pack.samples) < 2 or pack.cp_size > free:
        return []
    return _cut(pack, pack.cp_size, samples)


def _widen(pack: Pack, free: int, samples: Samples) -> list[Pack]:
    """The same samples on the next wider group that can be had, or nothing."""
    for size in samples.sizes:
        wider = pack.cp_size < size <= pack.cp_size + free
        if wider and samples.fit(pack.samples, cp_size=size):
            return [samples.pack(pack.samples, cp_size=size)]
    return []


def _shed(pack: Pack, free: int, samples: Samples) -> list[Pack]:
    """The pack without some samples, and those on a narrower group; or nothing."""
    if len(pack.samples) > 1:
        for size in reversed(samples.sizes):
            if size <= free and (parts := _cut(pack, size, samples)):
                return parts
    return []


def _cut(pack: Pack, size: int, samples: Samples) -> list[Pack]:
    """Move samples to a pack of their own, short ones first, until it costs what the rest does."""
    own, new = samples.work_at[pack.cp_size], samples.work_at[size]
    tokens, capacity = samples.tokens_at[size], samples.capacity_at[size]
    order = sorted(pack.samples, key=lambda sample: (own[sample], tokens[sample], sample))
    moved, held, work, rest = 0, 0, 0.0, pack.work
    for sample in order[:-1][: samples.max_samples]:
        held, work, rest = held + tokens[sample], work + new[sample], rest - own[sample]
        if held > capacity or (moved and work > rest):
            break
        moved += 1
    if not moved:
        return []
    return [
        samples.pack(order[moved:], cp_size=pack.cp_size),
        samples.pack(order[:moved], cp_size=size),
    ]
