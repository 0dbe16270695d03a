"""Every batch of up to three sequences of up to 20 tokens comes back as it was, at small sizes.

A proof by going through all cases with the functions that production uses: split into groups, the
rows of every rank, pack, drop the padding, gather, unpack, and merge of the groups. Only the two
all-gathers are played by `_gathered`. Tokens are never walked one by one; all cases take about
45 s on one core, half of that with `-n 2`.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from impl.layout import rank_index
from impl.merge import merge_slots, share_of
from impl.pack import drop_padding, pack_rows
from impl.plan import GroupPlan, MicroBatchPlan, Plan
from impl.rules import PackRules
from impl.schedule import split_samples

LONGEST = 20
LONGEST_OTHERWISE = 12  # under other rules than the default ones
PADDING = -1
_rank_index = lru_cache(maxsize=4096)(rank_index)  # small groups come again and again

WORLDS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (3, 3), (4, 4), (8, 4)]  # ranks, CP size
RULES = {
    "contiguous": PackRules(layout="contiguous"),
    "sequence4": PackRules(sequence_multiple=4),
    "pack16": PackRules(pack_multiple=16),
    "buckets": PackRules(layout="contiguous", pack_buckets=(6, 12, 30, 60)),
}


def _batches(longest: int) -> Iterator[tuple[int, ...]]:
    lengths = range(1, longest + 1)
    for num_sequences in (1, 2, 3):
        yield from product(lengths, repeat=num_sequences)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(("world_size", "cp_size"), WORLDS)
def test_every_small_batch_survives_the_journey(
    world_size: int, cp_size: int, tp_size: int
) -> None:
    sizes = {"world_size": world_size, "cp_size": cp_size, "tp_size": tp_size}
    _prove(LONGEST, **sizes, rules=PackRules())


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_so_does_it_under_other_rules(rules: PackRules, cp_size: int) -> None:
    _prove(LONGEST_OTHERWISE, world_size=cp_size, cp_size=cp_size, tp_size=1, rules=rules)


def _prove(longest: int, *, world_size: int, cp_size: int, tp_size: int, rules: PackRules) -> None:
    num_batches = 0
    for seqlens in _batches(longest):
        tokens = torch.arange(sum(seqlens))
        groups = split_samples(seqlens, world_size=world_size, cp_size=cp_size)
        merged = _journey(tokens, seqlens, groups, cp_size=cp_size, tp_size=tp_size, rules=rules)
        assert torch.equal(merged, tokens), seqlens
        num_batches += 1
    assert num_batches == longest + longest**2 + longest**3


def _journey(
    tokens: Tensor,
    seqlens: tuple[int, ...],
    groups: Sequence[Sequence[int]],
    *,
    cp_size: int,
    tp_size: int,
    rules: PackRules,
) -> Tensor:
    """The batch through the ranks of every group, and out of the merge."""
    sequences = tokens.split(list(seqlens))
    slots, rows = merge_slots(_plan(seqlens, groups, cp_size=cp_size))
    sent: list[Tensor] = []
    for samples in groups:
        values = torch.cat([tokens[:0], *(sequences[sample] for sample in samples)])
        lengths = tuple(seqlens[sample] for sample in samples)
        found = _through_a_group(values, lengths, cp_size=cp_size, tp_size=tp_size, rules=rules)
        sent += [share_of(found, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    return _gathered(sent, rows).index_select(0, slots)


def _plan(seqlens: tuple[int, ...], groups: Sequence[Sequence[int]], *, cp_size: int) -> Plan:
    placed = tuple(
        GroupPlan(tuple(range(group * cp_size, (group + 1) * cp_size)), tuple(samples))
        for group, samples in enumerate(groups)
    )
    return Plan(len(groups) * cp_size, seqlens, (MicroBatchPlan(placed),), "by hand", True)


def _through_a_group(
    values: Tensor, seqlens: tuple[int, ...], *, cp_size: int, tp_size: int, rules: PackRules
) -> Tensor:
    """A group's tokens through the packs of its ranks and back.

    As many rows hold a token as there are tokens; that all of them come back says that none was
    left out, so each sits in exactly one row.
    """
    ranks = [
        _rank_index(seqlens, cp_size=cp_size, cp_rank=rank, tp_size=tp_size, rules=rules)
        for rank in range(cp_size)
    ]
    packs = [pack_rows(values, index, pad_value=PADDING) for index in ranks]
    held = torch.cat(packs)
    assert (held != PADDING).sum() == len(values), seqlens
    real = [drop_padding(rows, index) for rows, index in zip(packs, ranks, strict=True)]
    return _gathered(real, ranks[0].max_real_rows).index_select(0, ranks[0].token_slots)


def _gathered(parts: Sequence[Tensor], level: int) -> Tensor:
    """What an all-gather of parts makes, each filled up to `level` rows."""
    missing = [part.new_full((level - len(part),), PADDING) for part in parts]
    return torch.cat([piece for pair in zip(parts, missing, strict=True) for piece in pair])
