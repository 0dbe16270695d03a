"""The `balanced` scheduler: groups of mixed CP sizes, re-batched so that ranks finish together.

1. `packing`: given a limit on the time of a pack, each sample gets the narrowest group on which it
   keeps to the cap and to that limit, and samples are packed up to both.
2. `tiling`: packs of about equal time share a micro-batch. Ranks that are left over take half of
   the costliest pack, or widen its group. Without barriers packs are then put in the order in
   which ranks come free.
3. Several limits are tried, and the plan with the least modelled time is kept.

About N log N for N samples; the same lengths give the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter, itemgetter

import numpy as np

from .config import DynamicCPConfig
from .packing import Pack, Samples, pack_samples, weigh_samples
from .plan import GroupPlan, MicroBatchPlan, Plan
from .tiling import Placed, free_ranks, place, run_freely, spread, step_time, tile

LIMITS = (1.05, 0.9, 1.3, 0.7, 0.4)
"""Times of a pack that are tried, likely ones first, over that at which ranks are just full."""

LIMITS_OF_FEW = (inf, 3.2, 1.2, 5.0)
"""Tried as well with fewer than `FEW` samples a rank, of which one can take longer than that."""

FEW = 4

GOOD_ENOUGH = 1.04
"""No further limit is tried once a plan is that close to perfect balance without communication."""


def balanced_plan(
    seqlens: Sequence[int],
    *,
    config: DynamicCPConfig,
    world_size: int,
    tp_size: int = 1,
    barriered: bool = True,
) -> Plan:
    """Plan a step of any number of samples on any number of ranks.

    Args:
        barriered: every micro-batch covers all ranks, and each rank's group has a sample. A pack
            of padding only is planned where nothing else can be: where `max_cp_size`, or a cap of
            a token or two, keeps ranks from joining a group that has samples, and no group has
            a sample to spare. If not barriered, ranks meet in their own groups only.
    Raises:
        ValueError: nothing to plan, bounds that leave no CP size, or a sample that fits none.
    """
    samples = weigh_samples(seqlens, config=config, world_size=world_size, tp_size=tp_size)
    return Plan(
        world_size=world_size,
        seqlens=tuple(seqlens),
        micro_batches=tuple(map(_micro_batch, _quickest(samples, barriered=barriered))),
        scheduler="balanced",
        barriered=barriered,
    )


def _quickest(samples: Samples, *, barriered: bool) -> list[Placed]:
    """The plan with the least modelled time, among equals the one with the least work."""
    perfect = _rank_seconds(samples) / samples.world_size
    tokens, side_by_side = samples.tokens[0], samples.world_size / samples.sizes[0]
    packs = max(tokens.sum() / samples.capacity[0, 0], len(tokens) / samples.max_samples)
    full = perfect / max(1.0, packs / side_by_side)
    few = len(tokens) < FEW * samples.world_size
    tried: list[tuple[tuple[float, float], list[Placed]]] = []
    for limit in LIMITS + LIMITS_OF_FEW if few else LIMITS:
        plan = _arrange(pack_samples(samples, limit=limit * full), samples, barriered=barriered)
        tried.append((_score(plan, samples, barriered=barriered), plan))
        if tried[-1][0][0] <= GOOD_ENOUGH * perfect:
            break
    return min(tried, key=lambda one: one[0])[1]


def _rank_seconds(samples: Samples) -> float:
    """Work of all ranks together if each sample has the narrowest group that it fits."""
    narrowest = samples.fits.argmax(0)
    work = samples.work[narrowest, np.arange(len(narrowest))]
    return float(work @ np.array(samples.sizes)[narrowest])


def _score(plan: list[Placed], samples: Samples, *, barriered: bool) -> tuple[float, float]:
    def time(what: str) -> float:
        key = attrgetter(what)
        return step_time(plan, world_size=samples.world_size, barriered=barriered, time=key)

    return time("seconds"), time("work")


def _arrange(packs: list[Pack], samples: Samples, *, barriered: bool) -> list[Placed]:
    tiles = [spread(chosen, samples) for chosen in tile(packs, samples)]
    if barriered:
        return [placed for chosen in tiles for placed in _fill(chosen, samples)]
    return run_freely([pack for chosen in tiles for pack in chosen], samples)


def _fill(packs: list[Pack], samples: Samples) -> Iterator[Placed]:
    """The packs as one micro-batch, or if ranks would idle, all or each on the whole world.

    Only worlds such as 7 = 4 + 2 + 1 with two samples need the latter.
    """
    chosen = sorted(sample for pack in packs for sample in pack.samples)
    whole = samples.world_size
    full = not free_ranks(packs, samples)
    if full or whole not in samples.sizes or not samples.fits[-1, chosen].all():
        yield place(packs, samples)
    elif samples.fit(chosen, cp_size=whole):
        yield [(0, samples.pack(chosen, cp_size=whole))]
    else:
        yield from ([(0, samples.pack([sample], cp_size=whole))] for sample in chosen)


def _micro_batch(placed: Placed) -> MicroBatchPlan:
    groups = (
        GroupPlan(tuple(range(start, start + pack.cp_size)), pack.samples)
        for start, pack in sorted(placed, key=itemgetter(0))
    )
    return MicroBatchPlan(tuple(groups))
