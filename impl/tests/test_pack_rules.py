"""The layout table under every rule: worked by hand, and against the definition in plain loops."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.layout import alignment, pack_layout, padded_lengths, rank_index
from impl.pack import next_token_labels, pack_rows
from impl.rules import PackRules

FILES = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parents[2] / "fixtures" / "layouts").glob("*.json"))
]
EVERY_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file["name"])

BUCKETS = (60, 120, 240, 480, 960)  # multiples of all that the sizes below ask for
RULES = st.builds(
    PackRules,
    layout=st.sampled_from(["zigzag", "contiguous"]),
    sequence_multiple=st.sampled_from([1, 1, 4, 5]),
    pack_multiple=st.sampled_from([1, 2, 5, 12]),
    pack_buckets=st.sampled_from([(), (), BUCKETS]),
)
LAYOUTS = given(
    seqlens=st.lists(st.integers(1, 30), min_size=0, max_size=5).map(tuple),
    cp_size=st.sampled_from([1, 2, 3, 4, 5]),
    tp_size=st.sampled_from([1, 2, 3]),
    rules=RULES,
)


def _rules_of(file: dict) -> PackRules:
    return PackRules(
        layout=file.get("layout", "zigzag"), pack_multiple=file.get("pack_multiple", 1)
    )


@EVERY_FILE
def test_layout_is_that_of_the_fixture(file) -> None:
    seqlens, sizes = tuple(file["lengths"]), {"cp_size": file["cp_size"], "rules": _rules_of(file)}
    tokens = torch.cat([100 * (s + 1) + torch.arange(n) for s, n in enumerate(seqlens)])
    labels = next_token_labels(tokens, seqlens, fill=-100)

    for rank in file["ranks"]:
        index = rank_index(seqlens, cp_rank=rank["cp_rank"], tp_size=file["tp_size"], **sizes)
        assert index.padded == tuple(file["padded_lengths"])
        assert index.cu_seqlens_padded.tolist() == file["cu_seqlens_padded"]
        assert max(index.padded) == file["max_seqlen_padded"]
        assert index.position_ids.tolist() == rank["position_ids"]
        assert pack_rows(tokens, index, pad_value=0).tolist() == rank["tokens"]
        assert pack_rows(labels, index, pad_value=-100).tolist() == rank["labels"]


def test_fixtures_of_every_layout_are_there() -> None:
    assert len(FILES) == 15
    assert sum(file.get("layout") == "contiguous" for file in FILES) == 4


def _drawn(seqlens, **sizes) -> str:
    """Positions that every rank holds, a dot for padding."""
    layout = pack_layout(seqlens, **sizes)
    lines = []
    for rank, (tokens, positions) in enumerate(zip(layout.tokens, layout.positions, strict=True)):
        marks = [
            "." if token < 0 else str(position)
            for token, position in zip(tokens.tolist(), positions.tolist(), strict=True)
        ]
        shards = [length // sizes["cp_size"] for length in layout.padded]
        starts = [sum(shards[:place]) for place in range(len(shards))]
        parts = [
            " ".join(marks[start : start + shard])
            for start, shard in zip(starts, shards, strict=True)
        ]
        lines.append(f"rank {rank} | {' | '.join(parts)} |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("rules", "drawing"),
    [
        (PackRules(), "rank 0 | 0 1 . . | 0 . |\nrank 1 | 2 3 4 . | . . |"),
        (
            PackRules(layout="contiguous"),
            "rank 0 | 0 1 2 | 0 |\nrank 1 | 3 4 . | . |",
        ),
        (
            PackRules(sequence_multiple=6),
            "rank 0 | 0 1 2 . . . | 0 . . . . . |\nrank 1 | 3 4 . . . . | . . . . . . |",
        ),
        (
            PackRules(pack_multiple=8),
            "rank 0 | 0 1 . . | 0 . | . . |\nrank 1 | 2 3 4 . | . . | . . |",
        ),
        (
            PackRules(pack_multiple=6),  # 4 + 2 rows already are
            "rank 0 | 0 1 . . | 0 . |\nrank 1 | 2 3 4 . | . . |",
        ),
        (
            PackRules(layout="contiguous", pack_multiple=6),
            "rank 0 | 0 1 2 | 0 | . . |\nrank 1 | 3 4 . | . | . . |",
        ),
        (
            PackRules(pack_buckets=(4, 12, 16)),
            "rank 0 | 0 1 . . | 0 . | . . . . . . |\nrank 1 | 2 3 4 . | . . | . . . . . . |",
        ),
    ],
    ids=["plain", "contiguous", "sequence6", "pack8", "pack6", "contiguous_pack6", "bucket12"],
)
def test_drawing_of_five_and_one_tokens_on_two_ranks(rules, drawing) -> None:
    assert _drawn((5, 1), cp_size=2, rules=rules) == drawing


@pytest.mark.parametrize("rules", [PackRules(), PackRules(layout="contiguous")])
@pytest.mark.parametrize("rows", [16, 32, 128])
@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_pack_without_sequences_is_one_sequence_of_padding(rules, rows, tp_size) -> None:
    rules = PackRules(layout=rules.layout, pack_multiple=rows)
    index = rank_index((), cp_size=2, cp_rank=1, tp_size=tp_size, rules=rules)

    assert index.seqlens == ()
    assert len(index.padded) == 1
    assert len(index.rows) == len(index.padding_rows) == rows * (3 if tp_size == 3 else 1)


def test_offsets_are_of_one_length_and_repeat_the_last() -> None:
    rules = PackRules(max_sequences=4)
    index = rank_index((5, 1), cp_size=2, cp_rank=0, rules=rules)

    assert index.cu_seqlens_padded.tolist() == [0, 8, 12, 12, 12]
    assert index.cu_seqlens.tolist() == [0, 5, 6, 6, 6]
    assert index.cu_seqlens.dtype == index.cu_seqlens_padded.dtype == torch.int32


def test_offsets_have_room_for_padding_beside_the_most_sequences() -> None:
    rules = PackRules(max_sequences=2, pack_multiple=8)
    full, room, none = (
        rank_index(seqlens, cp_size=2, cp_rank=0, rules=rules)
        for seqlens in ((5, 1), (16, 16), ())
    )

    assert full.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    assert full.cu_seqlens.tolist() == [0, 5, 6, 6]  # the padding has no real token
    assert room.cu_seqlens_padded.tolist() == [0, 16, 32, 32]
    assert none.cu_seqlens_padded.tolist() == [0, 16, 16, 16]
    assert none.cu_seqlens.tolist() == [0, 0, 0, 0]


def test_more_sequences_than_there_is_room_for_are_refused() -> None:
    words = "^a pack of 3 sequences is above max_sequences=2; raise it or pack fewer$"
    with pytest.raises(ValueError, match=words):
        rank_index((5, 1, 2), cp_size=2, cp_rank=0, rules=PackRules(max_sequences=2))


def _by_definition(
    seqlens: tuple[int, ...], *, cp_size: int, tp_size: int, rules: PackRules
) -> list[list[tuple[int, int]]]:
    """Of every rank (sequence, position) of each row, by counting up and cutting lists."""
    halves = 2 if rules.layout == "zigzag" and cp_size > 1 else 1

    def grow(rows: int, *multiples: int) -> int:
        rows = max(rows, 1)
        while any(rows % multiple for multiple in multiples):
            rows += 1
        return rows

    shards = []
    for seqlen in seqlens:
        rows = -(-seqlen // cp_size)
        shards.append(grow(rows, halves * tp_size, rules.sequence_multiple))
    needed = grow(sum(shards), halves * tp_size, rules.sequence_multiple, rules.pack_multiple)
    if rules.pack_buckets:
        needed = next(bucket for bucket in rules.pack_buckets if bucket >= sum(shards))
    if needed > sum(shards):
        shards.append(needed - sum(shards))
    ranks = []
    for rank in range(cp_size):
        held = []
        for sequence, shard in enumerate(shards):
            positions = [(sequence, position) for position in range(shard * cp_size)]
            size = shard // halves
            chunks = [positions[start : start + size] for start in range(0, len(positions), size)]
            mine = [rank, 2 * cp_size - 1 - rank] if halves == 2 else [rank]
            held += [at for chunk in mine for at in chunks[chunk]]
        ranks.append(held)
    return ranks


@LAYOUTS
@settings(deadline=None)
def test_layout_is_that_of_the_definition(seqlens, cp_size, tp_size, rules) -> None:
    sizes = {"cp_size": cp_size, "tp_size": tp_size, "rules": rules}
    layout = pack_layout(seqlens, **sizes)
    starts = [sum(seqlens[:place]) for place in range(len(seqlens))]

    for rank, held in enumerate(_by_definition(seqlens, **sizes)):
        assert layout.sequences[rank].tolist() == [sequence for sequence, _ in held]
        assert layout.positions[rank].tolist() == [position for _, position in held]
        assert layout.tokens[rank].tolist() == [
            starts[s] + p if s < len(seqlens) and p < seqlens[s] else -1 for s, p in held
        ]


@LAYOUTS
@settings(deadline=None)
def test_every_token_has_one_row_over_all_ranks(seqlens, cp_size, tp_size, rules) -> None:
    tokens = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size, rules=rules).tokens

    assert tokens[tokens >= 0].sort().values.tolist() == list(range(sum(seqlens)))


@LAYOUTS
@settings(deadline=None)
def test_rows_keep_to_every_multiple(seqlens, cp_size, tp_size, rules) -> None:
    layout = pack_layout(seqlens, cp_size=cp_size, tp_size=tp_size, rules=rules)
    rows = layout.tokens.shape[1]

    assert rows > 0
    assert rows % rules.pack_multiple == rows % tp_size == 0
    assert not rules.pack_buckets or rows in rules.pack_buckets
    for length in layout.padded:
        assert length % alignment(cp_size=cp_size, tp_size=tp_size, rules=rules) == 0
        assert (length // cp_size) % rules.sequence_multiple == 0


@LAYOUTS
@settings(deadline=None)
def test_padding_of_the_pack_moves_no_other_row(seqlens, cp_size, tp_size, rules) -> None:
    sizes = {"cp_size": cp_size, "tp_size": tp_size}
    plain = PackRules(layout=rules.layout, sequence_multiple=rules.sequence_multiple)
    small, large = (pack_layout(seqlens, **sizes, rules=each) for each in (plain, rules))
    rows = sum(small.padded[: len(seqlens)]) // cp_size

    for name in ("tokens", "positions", "sequences"):
        assert torch.equal(getattr(large, name)[:, :rows], getattr(small, name)[:, :rows])
    assert (large.tokens[:, rows:] == -1).all()
    assert (large.sequences[:, rows:] == len(seqlens)).all()


@LAYOUTS
@settings(deadline=None)
def test_offsets_name_every_row_and_every_token(seqlens, cp_size, tp_size, rules) -> None:
    sizes = {"cp_size": cp_size, "tp_size": tp_size, "rules": rules}
    index = rank_index(seqlens, cp_rank=0, **sizes)
    padded = padded_lengths(seqlens, **sizes)

    assert index.padded == padded
    assert index.cu_seqlens_padded.diff().tolist() == list(padded)
    assert index.cu_seqlens_padded[-1] == len(index.rows) * cp_size
    assert index.cu_seqlens.diff().tolist()[: len(seqlens)] == list(seqlens)
    assert len(index.cu_seqlens) == len(index.cu_seqlens_padded)
    assert index.cu_seqlens[-1] == sum(seqlens)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_trailing_dimensions_stay_together(shape) -> None:
    values = torch.arange(6.0).reshape(-1, *[1] * len(shape)).expand(6, *shape)
    rules = PackRules(layout="contiguous", pack_multiple=6)
    rows = pack_rows(values, rank_index((5, 1), cp_size=2, cp_rank=0, rules=rules), pad_value=-1)

    expected = torch.tensor([0.0, 1, 2, 5, -1, -1]).reshape(-1, *[1] * len(shape))
    assert torch.equal(rows, expected.expand(6, *shape))
