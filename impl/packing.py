"""Samples → packs: the narrowest CP group for each sample, then best fit under cap and time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .config import DynamicCPConfig
from .cost import pack_seconds, sample_seconds
from .layout import alignment
from .plan import cp_blocks
from .schedule import check_seqlens


@dataclass(frozen=True)
class Pack:
    """Samples that a CP group runs together. work: modelled seconds without launches."""

    cp_size: int
    samples: tuple[int, ...]
    work: float

    @property
    def seconds(self) -> float:
        return pack_seconds(self.work, cp_size=self.cp_size)


@dataclass(frozen=True, eq=False)
class Samples:
    """What each sample weighs at each CP size that may be used.

    Args:
        sizes: ascending. max_samples: of a pack.
        capacity: int64 [sizes, 1], tokens that the sequences of a pack may take, so that with all
            padding its ranks keep to the cap.
        tokens: int64 [sizes, samples], padded length at that size.
        work: float64 [sizes, samples], `sample_seconds`.
    """

    world_size: int
    sizes: tuple[int, ...]
    max_samples: int
    capacity: NDArray[np.int64]
    tokens: NDArray[np.int64]
    work: NDArray[np.float64]

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """[sizes, samples], whether a sample keeps to the cap alone."""
        fits: NDArray[np.bool_] = self.tokens <= self.capacity
        return fits

    @cached_property
    def capacity_at(self) -> Mapping[int, int]:
        return dict(zip(self.sizes, self.capacity[:, 0].tolist(), strict=True))

    @cached_property
    def tokens_at(self) -> Mapping[int, list[int]]:
        return dict(zip(self.sizes, self.tokens.tolist(), strict=True))

    @cached_property
    def work_at(self) -> Mapping[int, list[float]]:
        return dict(zip(self.sizes, self.work.tolist(), strict=True))

    def fit(self, samples: Collection[int], *, cp_size: int) -> bool:
        """Whether some samples can be one pack."""
        tokens = self.tokens_at[cp_size]
        held = sum(tokens[sample] for sample in samples)
        return len(samples) <= self.max_samples and held <= self.capacity_at[cp_size]

    def pack(self, samples: Iterable[int], *, cp_size: int) -> Pack:
        chosen, work = tuple(sorted(samples)), self.work_at[cp_size]
        return Pack(cp_size, chosen, sum(work[sample] for sample in chosen))


def weigh_samples(
    seqlens: Sequence[int], *, config: DynamicCPConfig, world_size: int, tp_size: int = 1
) -> Samples:
    """Samples at every CP size.

    Raises:
        ValueError: nothing to plan, no CP size within bounds, a bucket that does not go with one,
            or a sample that fits none.
    """
    check_seqlens(seqlens)
    sizes = mixed_cp_sizes(config, world_size=world_size)
    rules, limit = config.rules, config.max_seqlen_per_dp_cp_rank
    units = [alignment(cp_size=size, tp_size=tp_size, rules=rules) for size in sizes]
    rows = [rules.rows_within(limit, cp_size=size, tp_size=tp_size) for size in sizes]
    unit = np.array(units)[:, None]
    tokens = -(-np.array(seqlens, dtype=np.int64) // unit) * unit
    work = [sample_seconds(row, cp_size=size) for row, size in zip(tokens, sizes, strict=True)]
    samples = Samples(
        world_size=world_size,
        sizes=sizes,
        max_samples=rules.max_sequences or len(seqlens),
        capacity=np.array(sizes)[:, None] * np.array(rows)[:, None],
        tokens=tokens,
        work=np.stack(work),
    )
    for index in np.flatnonzero(~samples.fits.any(0)).tolist():
        raise ValueError(
            f"sequence {index} has {seqlens[index]} tokens, which no CP size fits: "
            f"max_seqlen_per_dp_cp_rank={limit}{rules.asked}, padding included, on {world_size} "
            f"DP×CP ranks, CP sizes {', '.join(map(str, sizes))}; shorten it, raise the limit or "
            "use more ranks"
        )
    return samples


def mixed_cp_sizes(config: DynamicCPConfig, *, world_size: int) -> tuple[int, ...]:
    """CP sizes within bounds, if each rank can be given a group.

    >>> mixed_cp_sizes(DynamicCPConfig(max_seqlen_per_dp_cp_rank=9, min_cp_size=2), world_size=6)
    (2, 4, 6)
    """
    lowest, highest = config.min_cp_size, config.highest_cp_size or world_size
    every = sorted({len(block) for block in cp_blocks(world_size)})
    sizes = [size for size in every if lowest <= size <= highest]
    if sizes and world_size % sizes[0]:  # its blocks would leave the last ranks without a group
        sizes = [size for size in sizes if size == world_size]
    if not sizes:
        raise ValueError(
            f"no CP sizes from min_cp_size={lowest} to max_cp_size={highest} give each of "
            f"{world_size} DP×CP ranks a group; sizes are {', '.join(map(str, every))}"
        )
    return tuple(sizes)


def pack_samples(samples: Samples, *, limit: float) -> list[Pack]:
    """Packs that keep to the cap and, unless it is of one sample, to `limit` seconds of work.

    Samples of wide groups come first, long before short. Each goes into the fullest pack of its
    size that takes it, or into a wider one, or makes a pack of its own.
    """
    rows = _narrowest(samples, limit)
    weights = _weights(samples, limit)
    rooms: list[list[tuple[int, int]]] = [[] for _ in samples.sizes]  # ascending: room, pack
    packs: list[tuple[int, list[int]]] = []
    order = np.lexsort((np.arange(len(rows)), -samples.tokens[0], -rows))
    for sample, row in zip(order.tolist(), rows[order].tolist(), strict=True):
        for at in range(row, len(rooms)):
            fullest = bisect_left(rooms[at], (weights[at][sample], -1))
            if fullest < len(rooms[at]):
                room, pack = rooms[at].pop(fullest)
                break
        else:
            at, room, pack = row, int(samples.capacity[row, 0]), len(packs)
            packs.append((samples.sizes[row], []))
        packs[pack][1].append(sample)
        if len(packs[pack][1]) < samples.max_samples:
            insort(rooms[at], (room - weights[at][sample], pack))
    return [samples.pack(members, cp_size=size) for size, members in packs]


def _narrowest(samples: Samples, limit: float) -> NDArray[np.int64]:
    """[samples], row of the first size that fits and is fast enough, else of the fastest."""
    quick = samples.fits & (samples.work <= limit)
    fastest = np.where(samples.fits, samples.work, np.inf).argmin(0)
    return np.where(quick.any(0), quick.argmax(0), fastest)


def _weights(samples: Samples, limit: float) -> list[list[int]]:
    """[sizes][samples], what a sample takes of cap or time, whichever is more, in tokens."""
    time = np.ceil(samples.work / limit * samples.capacity)
    weights = np.maximum(samples.tokens, np.minimum(time, samples.capacity).astype(np.int64))
    table: list[list[int]] = weights.tolist()
    return table
