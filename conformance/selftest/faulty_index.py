"""Index logic with one fault each: the oracle's, gone wrong the way real implementations do.

`FAULTS` says which check must catch each class, besides which others may.
"""

from __future__ import annotations

import torch

from conformance.adapters.reference import Index
from conformance.protocol import Unsupported


class ContiguousChunks(Index):
    def pack(self, sequences, *, cp_size, cp_rank, tp_size, pad_value):
        _, _, bounds = super().pack(
            sequences, cp_size=cp_size, cp_rank=cp_rank, tp_size=tp_size, pad_value=pad_value
        )
        rows, positions, _ = super().pack(
            sequences, cp_size=1, cp_rank=0, tp_size=2 * cp_size * tp_size, pad_value=pad_value
        )
        parts = [
            torch.arange(start, stop).chunk(cp_size)[cp_rank]
            for start, stop in bounds.unfold(0, 2, 1).tolist()
        ]
        mine = torch.cat(parts) if cp_size > 1 else torch.arange(len(rows))
        return rows[mine], positions[mine], bounds


class MirrorFirst(Index):
    """Both chunks of a rank in the wrong order."""

    def pack(self, sequences, *, cp_size, **sizes):
        packed = [super(MirrorFirst, self).pack([s], cp_size=cp_size, **sizes) for s in sequences]
        bounds = super().pack(sequences, cp_size=cp_size, **sizes)[2]
        swap = [torch.arange(len(rows)).roll(len(rows) // 2) for rows, _, _ in packed]
        if cp_size == 1:
            swap = [torch.arange(len(rows)) for rows, _, _ in packed]
        rows = torch.cat([rows[order] for (rows, _, _), order in zip(packed, swap, strict=True)])
        positions = torch.cat([p[order] for (_, p, _), order in zip(packed, swap, strict=True)])
        return rows, positions, bounds


class IgnoresTP(Index):
    def pack(self, sequences, *, tp_size, **sizes):
        return super().pack(sequences, tp_size=1, **sizes)


class DropsTheLastToken(Index):
    def pack(self, sequences, **sizes):
        pad = torch.full_like(sequences[-1][:1], sizes["pad_value"])
        return super().pack([*sequences[:-1], torch.cat([sequences[-1][:-1], pad])], **sizes)


class PadsWithZero(Index):
    def pack(self, sequences, *, pad_value, **sizes):
        return super().pack(sequences, pad_value=0, **sizes)


class Int32Rows(Index):
    def pack(self, sequences, **sizes):
        rows, positions, bounds = super().pack(sequences, **sizes)
        return rows if rows.is_floating_point() else rows.int(), positions, bounds


class KeepsOneFeature(Index):
    def pack(self, sequences, **sizes):
        rows, positions, bounds = super().pack(sequences, **sizes)
        return rows if rows.ndim == 1 else rows[:, :1].expand_as(rows), positions, bounds


class PositionsOfThePack(Index):
    """They count through the whole pack and never restart."""

    def pack(self, sequences, **sizes):
        rows, positions, bounds = super().pack(sequences, **sizes)
        return rows, torch.arange(len(positions)), bounds


class PaddingAtPositionZero(Index):
    def pack(self, sequences, **sizes):
        rows, positions, bounds = super().pack(sequences, **sizes)
        marks = [torch.ones(len(sequence), dtype=torch.int64) for sequence in sequences]
        real = super().pack(marks, **{**sizes, "pad_value": 0})[0]
        return rows, positions * real, bounds


class BoundariesOfTheShard(Index):
    def pack(self, sequences, *, cp_size, **sizes):
        rows, positions, bounds = super().pack(sequences, cp_size=cp_size, **sizes)
        return rows, positions, bounds // cp_size


class UnpaddedBoundaries(Index):
    def pack(self, sequences, **sizes):
        rows, positions, _ = super().pack(sequences, **sizes)
        seqlens = [len(sequence) for sequence in sequences]
        return rows, positions, torch.tensor([0, *seqlens]).cumsum(0).int()


class Int64Boundaries(Index):
    def pack(self, sequences, **sizes):
        rows, positions, bounds = super().pack(sequences, **sizes)
        return rows, positions, bounds.long()


class UnpacksRankByRank(Index):
    """Real rows in the order of ranks instead of positions."""

    def unpack(self, shards, seqlens, *, cp_size, tp_size):
        sequences = super().unpack(shards, seqlens, cp_size=cp_size, tp_size=tp_size)
        order = [self.chunk_order(len(sequence), cp_size, tp_size) for sequence in sequences]
        return [sequence[place] for sequence, place in zip(sequences, order, strict=True)]

    def chunk_order(self, seqlen, cp_size, tp_size):
        sizes = {"cp_size": cp_size, "tp_size": tp_size, "pad_value": -1}
        packed = [self.pack([torch.arange(seqlen)], cp_rank=r, **sizes)[0] for r in range(cp_size)]
        places = torch.cat(packed)
        return places[places >= 0]


class UnpackMultipliesPadding(Index):
    """Takes padding out by a sum with weights: NaN times zero is NaN."""

    def unpack(self, shards, seqlens, **sizes):
        poison = torch.stack([shard.double().sum() * 0 for shard in shards]).sum()
        sequences = super().unpack(shards, seqlens, **sizes)
        return [(sequence + poison).to(sequence.dtype) for sequence in sequences]


class LabelsThatWrap(Index):
    def labels(self, sequence):
        return sequence.roll(-1, 0)


class LabelsUnshifted(Index):
    def labels(self, sequence):
        return sequence


class AnyPowerOfTwo(Index):
    """Does not ask whether the size divides the world."""

    def choose_local_cp_size(self, seqlens, *, world_size, max_seqlen_per_dp_cp_rank):
        super().choose_local_cp_size(
            seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank
        )
        size = 1
        while size * max_seqlen_per_dp_cp_rank < max(seqlens):
            size *= 2
        return size


class FillsNoRankQuite(Index):
    """`<` for `<=`."""

    def choose_local_cp_size(self, seqlens, *, world_size, max_seqlen_per_dp_cp_rank):
        longer = [seqlen + 1 for seqlen in seqlens if seqlen > 0]
        return super().choose_local_cp_size(
            longer, world_size=world_size, max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank
        )


class NeverTooLong(Index):
    def choose_local_cp_size(self, seqlens, *, world_size, max_seqlen_per_dp_cp_rank):
        if min(seqlens, default=0) > 0 and max_seqlen_per_dp_cp_rank > 0:
            longest = world_size * max_seqlen_per_dp_cp_rank
            seqlens = [min(seqlen, longest) for seqlen in seqlens]
        return super().choose_local_cp_size(
            seqlens, world_size=world_size, max_seqlen_per_dp_cp_rank=max_seqlen_per_dp_cp_rank
        )


class RefusesByAssertion(Index):
    def split(self, seqlens, *, world_size, cp_size):
        assert cp_size
        assert world_size % cp_size == 0
        return super().split(seqlens, world_size=world_size, cp_size=cp_size)


class RefusesWithoutWords(Index):
    def split(self, seqlens, *, world_size, cp_size):
        try:
            return super().split(seqlens, world_size=world_size, cp_size=cp_size)
        except ValueError:
            raise ValueError from None


class PacksEmptySequences(Index):
    def pack(self, sequences, **sizes):
        return super().pack([s for s in sequences if len(s)], **sizes)


class DealsInTurn(Index):
    """Round robin, whatever the lengths."""

    def split(self, seqlens, *, world_size, cp_size):
        groups = super().split(seqlens, world_size=world_size, cp_size=cp_size)
        return [list(range(place, len(seqlens), len(groups))) for place in range(len(groups))]


class DropsTheRemainder(Index):
    """Samples that do not divide evenly are lost."""

    def split(self, seqlens, *, world_size, cp_size):
        groups = super().split(seqlens, world_size=world_size, cp_size=cp_size)
        return [group[: max(len(seqlens) // len(groups), 1)] for group in groups]


class MergesInGroupOrder(Index):
    def merge(self, outputs, samples):
        return [output for group in outputs for output in group]


class MergesAsIfAscending(Index):
    def merge(self, outputs, samples):
        return super().merge(outputs, [sorted(group) for group in samples])


FAULTS = {
    ContiguousChunks: "layout",
    MirrorFirst: "layout",
    IgnoresTP: "layout",
    DropsTheLastToken: "layout",
    PadsWithZero: "layout",
    Int32Rows: "layout",
    KeepsOneFeature: "layout",
    PacksEmptySequences: "layout",
    PositionsOfThePack: "positions",
    PaddingAtPositionZero: "positions",
    BoundariesOfTheShard: "boundaries",
    UnpaddedBoundaries: "boundaries",
    Int64Boundaries: "boundaries",
    UnpacksRankByRank: "unpack",
    UnpackMultipliesPadding: "unpack",
    LabelsThatWrap: "labels",
    LabelsUnshifted: "labels",
    AnyPowerOfTwo: "schedule",
    FillsNoRankQuite: "schedule",
    NeverTooLong: "schedule",
    RefusesByAssertion: "split",
    RefusesWithoutWords: "split",
    DealsInTurn: "split",
    DropsTheRemainder: "split",
    MergesInGroupOrder: "merge",
    MergesAsIfAscending: "merge",
}


class OnlyPacks:
    """Offers one method."""

    pack = Index.pack


class SaysNo(Index):
    """Has every method, and says of two that it does not support them."""

    def merge(self, outputs, samples):
        raise NotImplementedError

    def labels(self, sequence):
        raise Unsupported("labels are the trainer's business")


class Breaks(Index):
    def labels(self, sequence):
        raise KeyError("surprise")
