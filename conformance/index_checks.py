"""Checks of index logic against the oracle, all exact: what a rank holds, and who computes what.

A check takes the implementation and the oracle, returns nothing if they agree, and raises
`Wrong` at the first place where they do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .drawing import FIRST, NO_TOKEN, draw_rank, place_of
from .protocol import IndexImplementation as Index
from .protocol import Unsupported

NO_LABEL = -100
Check = Callable[[Index, Index], None]
RankPack = tuple[Tensor, Tensor, Tensor]  # rows, position ids, cu_seqlens_padded


class Wrong(Exception):
    """What an implementation gets wrong, and where."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


@dataclass(frozen=True)
class Packing:
    """A batch and how it is packed."""

    seqlens: tuple[int, ...]
    cp_size: int
    tp_size: int

    @property
    def tokens(self) -> list[Tensor]:
        """Per sequence int64 [L]: tokens that say where they come from."""
        return tokens_of(self.seqlens)

    @property
    def features(self) -> list[Tensor]:
        """Per sequence float64 [L, 3]."""
        return [_features(tokens) for tokens in self.tokens]

    def pack(
        self, index: Index, sequences: Sequence[Tensor], *, pad_value: int = NO_TOKEN
    ) -> list[RankPack]:
        """What every CP rank gets."""
        sizes = {"cp_size": self.cp_size, "tp_size": self.tp_size}
        return [
            index.pack(sequences, cp_rank=rank, pad_value=pad_value, **sizes)
            for rank in range(self.cp_size)
        ]


def tokens_of(seqlens: Sequence[int]) -> list[Tensor]:
    assert max(seqlens) <= FIRST, "positions of two sequences would share a token"
    return [FIRST * (place + 1) + torch.arange(seqlen) for place, seqlen in enumerate(seqlens)]


def check_layout(packing: Packing, index: Index, oracle: Index) -> None:
    """Rows of every rank, whatever a token carries and whatever fills the padding."""
    _expect_each_token_once([rows for rows, _, _ in packing.pack(index, packing.tokens)], packing)
    shards = _shard_lengths(packing, oracle)
    for pad_value in (NO_TOKEN, FIRST):  # the second is a real token
        both = _both(packing, index, oracle, packing.tokens, pad_value=pad_value)
        for rank, ((rows, _, _), (truth, _, _)) in enumerate(both):
            try:
                _expect_equal(rows, truth, what=f"rank {rank}, row")
            except Wrong as wrong:
                drawn = [_draw(tokens, shards) for tokens in (truth, rows)]
                where = f"{wrong.where}; expected [{drawn[0]}], got [{drawn[1]}]"
                raise Wrong(where, wrong.reason) from None
    both = _both(packing, index, oracle, packing.features)
    for rank, ((rows, _, _), (truth, _, _)) in enumerate(both):
        _expect_equal(rows, truth, what=f"rank {rank}, float64 [T, 3], row")


def check_positions(packing: Packing, index: Index, oracle: Index) -> None:
    """Position ids of every row, padding included."""
    both = _both(packing, index, oracle, packing.tokens)
    for rank, ((_, positions, _), (_, truth, _)) in enumerate(both):
        _expect_equal(positions, truth, what=f"rank {rank}, position id of row")


def check_boundaries(packing: Packing, index: Index, oracle: Index) -> None:
    """`cu_seqlens_padded`, the same on every rank."""
    both = _both(packing, index, oracle, packing.tokens)
    for rank, ((_, _, bounds), (_, _, truth)) in enumerate(both):
        _expect_equal(bounds, truth, what=f"rank {rank}, cu_seqlens_padded at")


def check_unpack(packing: Packing, index: Index, oracle: Index) -> None:
    """Unpacking gives back what was packed, whatever padded rows hold by then."""
    own = [rows for rows, _, _ in packing.pack(index, packing.tokens, pad_value=FIRST)]
    _expect_sequences(_unpack(packing, index, own), packing.tokens, "own pack")
    padded = [rows == NO_TOKEN for rows, _, _ in packing.pack(oracle, packing.tokens)]
    shards = [rows for rows, _, _ in packing.pack(oracle, packing.features)]
    for shard, padding in zip(shards, padded, strict=True):
        shard[padding] = torch.nan
    _expect_sequences(_unpack(packing, index, shards), packing.features, "NaN in padding")


def check_labels(packing: Packing, index: Index, oracle: Index) -> None:
    """Next tokens inside each sequence, and where they lie after the split."""
    tokens = packing.tokens
    got = [index.labels(sequence.clone()) for sequence in tokens]
    truth = [oracle.labels(sequence) for sequence in tokens]
    for sequence, (labels, expected) in enumerate(zip(got, truth, strict=True)):
        _expect_equal(labels, expected, what=f"sequence {sequence}, label of position")
    both = zip(
        packing.pack(index, got, pad_value=NO_LABEL),
        packing.pack(oracle, truth, pad_value=NO_LABEL),
        strict=True,
    )
    for rank, ((rows, _, _), (expected, _, _)) in enumerate(both):
        _expect_equal(rows, expected, what=f"rank {rank}, label of row")


def check_schedule(seqlens: tuple[int, ...], world_size: int, index: Index, oracle: Index) -> None:
    """The CP size, at every limit where it changes and beside it; too long is refused."""
    longest = max(seqlens)
    shares = {-(-longest // size) for size in range(1, world_size + 1)}
    limits = {share + step for share in shares for step in (-1, 0, 1)}
    for limit in sorted(limits - {0}):
        keywords = {"world_size": world_size, "max_seqlen_per_dp_cp_rank": limit}
        where = f"max_seqlen_per_dp_cp_rank={limit}, world_size={world_size}"
        if limit * world_size < longest:
            choose = partial(index.choose_local_cp_size, seqlens, **keywords)
            expect_refusal(choose, where, mentions=str(longest))
        else:
            got = index.choose_local_cp_size(seqlens, **keywords)
            expected = oracle.choose_local_cp_size(seqlens, **keywords)
            if got != expected:
                raise Wrong(where, f"CP size: expected {expected}, got {got}")


def check_split(seqlens: tuple[int, ...], world_size: int, index: Index, oracle: Index) -> None:
    """The samples of every group, at every CP size that the world has."""
    for cp_size in cp_sizes(world_size):
        sizes = {"world_size": world_size, "cp_size": cp_size}
        expect_samples(index.split(seqlens, **sizes), oracle.split(seqlens, **sizes), cp_size)


def expect_samples(
    got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], cp_size: int
) -> None:
    """Raise `Wrong` at the first group whose samples differ."""
    if len(got) != len(expected):
        raise Wrong(f"CP size {cp_size}", f"expected {len(expected)} groups, got {len(got)}")
    for group, pair in enumerate(zip(got, expected, strict=True)):
        samples, truth = map(list, pair)
        if samples != truth:
            where = f"CP size {cp_size}, group {group}"
            raise Wrong(where, f"samples: expected {truth}, got {samples}")


def check_merge(seqlens: tuple[int, ...], world_size: int, index: Index, oracle: Index) -> None:
    """All samples in input order, whatever the order in a group and whatever a token carries."""
    tokens = tokens_of(seqlens)
    for cp_size in cp_sizes(world_size):
        ascending = oracle.split(seqlens, world_size=world_size, cp_size=cp_size)
        for samples in (ascending, [group[::-1] for group in ascending]):
            for values in (tokens, [_features(sequence) for sequence in tokens]):
                outputs = [[values[sample] for sample in group] for group in samples]
                what = f"CP size {cp_size}, groups {samples}"
                _expect_sequences(index.merge(outputs, samples), values, what)


def cp_sizes(world_size: int) -> tuple[int, ...]:
    """CP sizes that every implementation must have: powers of two that divide, and the world."""
    powers = [1 << power for power in range(world_size.bit_length())]
    return tuple(dict.fromkeys([n for n in powers if world_size % n == 0] + [world_size]))


def expect_refusal(call: Callable[[], object], where: str, *, mentions: str = "") -> None:
    """Raise `Wrong` unless a call raises ValueError with words, and with this one among them."""
    try:
        answer = call()
    except ValueError as error:
        words = str(error)
        if len(words.split()) < 3:
            raise Wrong(where, f"refused without a reason: {words!r}") from None
        if mentions not in words:
            raise Wrong(where, f"refused without naming {mentions}: {words!r}") from None
        return
    except (NotImplementedError, Unsupported):
        raise
    except Exception as error:  # noqa: BLE001 whatever it is, it is no refusal
        raise Wrong(where, f"raised {type(error).__name__}, not ValueError: {error}") from None
    raise Wrong(where, f"accepted, answer {answer!r:.80}; a ValueError is expected")


def _both(
    packing: Packing,
    index: Index,
    oracle: Index,
    sequences: Sequence[Tensor],
    *,
    pad_value: int = NO_TOKEN,
) -> Iterator[tuple[RankPack, RankPack]]:
    """For every CP rank what the implementation gets, and the oracle."""
    packs = (packing.pack(each, sequences, pad_value=pad_value) for each in (index, oracle))
    return zip(*packs, strict=True)


def _features(tokens: Tensor) -> Tensor:
    return tokens.double().unsqueeze(-1) + torch.tensor([0.0, 0.25, 0.5])


def _unpack(packing: Packing, index: Index, shards: list[Tensor]) -> list[Tensor]:
    return index.unpack(
        shards, list(packing.seqlens), cp_size=packing.cp_size, tp_size=packing.tp_size
    )


def _shard_lengths(packing: Packing, oracle: Index) -> list[int]:
    """Rows of each sequence on one rank."""
    _, _, bounds = packing.pack(oracle, packing.tokens)[0]
    return [int(length) // packing.cp_size for length in bounds.diff()]


def _draw(tokens: Tensor, shard_lengths: Sequence[int]) -> str:
    fits = tokens.ndim == 1 and len(tokens) >= sum(shard_lengths)
    return draw_rank(tokens, shard_lengths) if fits else str(tokens.tolist())


def _expect_each_token_once(ranks: Sequence[Tensor], packing: Packing) -> None:
    held = Counter(token for rows in ranks for token in rows.flatten().tolist())
    for token in torch.cat(packing.tokens).tolist():
        if held[token] != 1:
            where = "sequence {}, position {}".format(*place_of(token))
            raise Wrong(where, f"held {held[token]} times over all ranks, expected once")


def _expect_sequences(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    if len(got) != len(expected):
        raise Wrong(what, f"expected {len(expected)} sequences, got {len(got)}")
    for sequence, (rows, truth) in enumerate(zip(got, expected, strict=True)):
        _expect_equal(rows, truth, what=f"{what}, sequence {sequence}, position")


def _expect_equal(got: Tensor, expected: Tensor, *, what: str) -> None:
    """Raise `Wrong` unless type, shape and every value are the same.

    `what` and the first row that differs say where.
    """
    if not isinstance(got, Tensor):
        raise Wrong(what, f"expected a tensor, got {type(got).__name__}")
    for name in ("dtype", "shape"):
        pair = [getattr(tensor, name) for tensor in (expected, got)]
        if pair[0] != pair[1]:
            pair = [list(one) if name == "shape" else one for one in pair]
            raise Wrong(
                what.rpartition(",")[0] or what, f"{name}: expected {pair[0]}, got {pair[1]}"
            )
    if not torch.equal(got, expected):
        place = int((got != expected).nonzero()[0, 0])
        pair = [tensor[place].tolist() for tensor in (expected, got)]
        raise Wrong(f"{what} {place}", f"expected {pair[0]}, got {pair[1]}")
