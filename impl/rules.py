"""What a user may ask of packs: how sequences are cut over ranks, and what rows are padded to."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True, kw_only=True)
class PackRules:
    """How packs are cut and padded, beside the CP and TP size.

    Hand the same object to whatever packs, unpacks or counts rows: every multiple is decided
    here, so no two of them can round differently.

    Args:
        layout: "zigzag", chunk r and its mirror on rank r; "contiguous", chunk r on rank r.
        sequence_multiple: of the rows of each sequence on one rank.
        pack_multiple: of the rows of a rank's pack. FP8 kernels need 16, MXFP8 32 and blockwise
            FP8 128; `tp_size` times that where sequence parallelism shares the rows out.
        pack_buckets: rows that a rank's pack may have, ascending; it takes the first that holds
            it. Any number if empty.
        max_sequences: that a pack may have. Offset arrays then have one length whatever the
            batch, the last offset repeated. As many as there are if None.
    Raises:
        ValueError: a value that cannot be, by name.

    >>> PackRules(pack_multiple=16).layout
    'zigzag'
    """

    layout: str = "zigzag"
    sequence_multiple: int = 1
    pack_multiple: int = 1
    pack_buckets: tuple[int, ...] = ()
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} is not one of {', '.join(LAYOUTS)}")
        for name in ("sequence_multiple", "pack_multiple"):
            check_whole(name, getattr(self, name))
        if self.max_sequences is not None:
            check_whole("max_sequences", self.max_sequences)
        if not isinstance(self.pack_buckets, tuple):
            raise ValueError(f"pack_buckets={self.pack_buckets!r} must be a tuple of row counts")
        for rows in self.pack_buckets:
            check_whole("a row count of pack_buckets", rows)
        if list(self.pack_buckets) != sorted(set(self.pack_buckets)):
            raise ValueError(
                f"pack_buckets={self.pack_buckets} must ascend and name each row count once"
            )

    @property
    def asked(self) -> str:
        """What differs from the defaults, to follow a limit in messages.

        >>> PackRules(pack_multiple=16, max_sequences=4).asked
        ' with pack_multiple=16, max_sequences=4'
        """
        values = {field: getattr(self, field.name) for field in fields(PackRules)}
        asked = [
            f"{field.name}={value!r}" for field, value in values.items() if value != field.default
        ]
        return f" with {', '.join(asked)}" if asked else ""

    def shard_multiple(self, *, cp_size: int, tp_size: int) -> int:
        """What the rows of a sequence on one rank are a multiple of.

        Each chunk of a rank's shard splits evenly over the TP ranks.
        """
        chunks = 2 if self.layout == "zigzag" and cp_size > 1 else 1
        return math.lcm(chunks * tp_size, self.sequence_multiple)

    def pack_rows(self, rows: int, *, cp_size: int, tp_size: int) -> int:
        """Rows of a rank's pack whose sequences take `rows`; of an empty one those of a shard.

        Raises:
            ValueError: no bucket holds them, or the first that does is not a multiple of what it
                has to be.

        >>> PackRules(pack_multiple=16).pack_rows(20, cp_size=2, tp_size=1)
        32
        >>> PackRules(pack_buckets=(24, 64)).pack_rows(20, cp_size=2, tp_size=1)
        24
        """
        shard = self.shard_multiple(cp_size=cp_size, tp_size=tp_size)
        unit = math.lcm(shard, self.pack_multiple)
        rows = max(rows, shard)
        if not self.pack_buckets:
            return -(-rows // unit) * unit
        for bucket in self.pack_buckets:
            if bucket >= rows:
                break
        else:
            raise ValueError(
                f"a pack of {rows} rows a rank is above the last of "
                f"pack_buckets={self.pack_buckets}; add a larger one or pack fewer tokens"
            )
        self._check_bucket(bucket, unit, cp_size=cp_size, tp_size=tp_size)
        return bucket

    def rows_within(self, limit: int, *, cp_size: int, tp_size: int) -> int:
        """Rows that the sequences of a pack may take if its `pack_rows` are to keep to a limit.

        Returns:
            0 if no pack does.
        Raises:
            ValueError: a bucket within the limit is not a multiple of what it has to be.

        >>> PackRules(pack_multiple=16).rows_within(40, cp_size=2, tp_size=1)
        32
        >>> PackRules(pack_buckets=(24, 64)).rows_within(40, cp_size=2, tp_size=1)
        24
        """
        shard = self.shard_multiple(cp_size=cp_size, tp_size=tp_size)
        unit = math.lcm(shard, self.pack_multiple)
        if not self.pack_buckets:
            return limit // unit * unit
        buckets = [bucket for bucket in self.pack_buckets if shard <= bucket <= limit]
        for bucket in buckets:
            self._check_bucket(bucket, unit, cp_size=cp_size, tp_size=tp_size)
        return max(buckets, default=0)

    def _check_bucket(self, bucket: int, unit: int, *, cp_size: int, tp_size: int) -> None:
        if bucket % unit:
            raise ValueError(
                f"{bucket} rows of pack_buckets={self.pack_buckets} are not a multiple of {unit}, "
                f"which layout={self.layout!r}, cp_size={cp_size}, tp_size={tp_size}, "
                f"sequence_multiple={self.sequence_multiple} and "
                f"pack_multiple={self.pack_multiple} ask for; take {-(-bucket // unit) * unit}"
            )

    def check_sequences(self, num_sequences: int) -> None:
        """Refuse a pack of more sequences than `max_sequences`."""
        if self.max_sequences is not None and num_sequences > self.max_sequences:
            raise ValueError(
                f"a pack of {num_sequences} sequences is above "
                f"max_sequences={self.max_sequences}; raise it or pack fewer"
            )

    def num_offsets(self, num_sequences: int, *, num_padded: int) -> int:
        """Entries of an offset array after its leading 0.

        Args:
            num_sequences: real ones of the pack. num_padded: with the one that is all padding.
        Raises:
            ValueError: more sequences than `max_sequences`.

        >>> PackRules(max_sequences=4).num_offsets(3, num_padded=3)
        4
        """
        self.check_sequences(num_sequences)
        if self.max_sequences is None:
            return num_padded
        has_tail = self.pack_multiple > 1 or bool(self.pack_buckets)
        return self.max_sequences + has_tail  # room for the padding, whether it is there or not


def check_whole(name: str, value: object) -> None:
    """Refuse, by its name, what is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


DEFAULT_RULES = PackRules()
