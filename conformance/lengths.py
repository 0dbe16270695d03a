"""Sequence lengths of every padding case, no multiple of anything unless that is the point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

COLUMNS = (
    "aligned",  # multiples of what every CP size of the world needs
    "unpadded",  # odd multiples of exactly what this CP size needs, one long, no padding row
    "ragged",  # no multiple of anything
    "short",  # shorter than 2 * cp, so that some chunks hold padding only
    "ones",  # runs of one-token sequences, which have no label
    "longtail",  # one long and many short
    "equal",  # all the same
    "few",  # fewer samples than ranks
    "uneven",  # a number of samples that no number of groups divides
    "poisoned",  # whatever padding holds: ids of real tokens, an embedding of 1e4, NaN
    "text",  # real documents
    "refused",  # what must be refused by a clear error, before any collective
)
POISONS = ("ids", "huge", "nan")
REFUSALS = ("emptysequence", "emptybatch", "size")

_RAGGED = (5, 13, 23, 1, 17, 7, 11, 3, 19, 9, 15, 6, 2, 21, 10, 14, 25, 4)


def case_lengths(padding: str, *, world: int, cp_sizes: Sequence[int]) -> tuple[int, ...]:
    """Lengths of a padding case.

    Raises:
        ValueError: no such case, or one that cannot be (fewer samples than one rank).
    """
    if padding.startswith("lens"):
        return _spelled_out(padding)
    if padding.startswith("text"):
        raise ValueError(f"{padding}: the lengths of a text are in its file")
    column = padding.partition("_")[0]
    if column not in _LENGTHS:
        raise ValueError(f"no padding case {padding!r}; there are {', '.join(COLUMNS)}")
    largest = max(cp_sizes)
    samples = max(world // min(cp_sizes), 1) + 2 * len(cp_sizes)
    return _LENGTHS[column](padding, world, largest, samples)


def _spelled_out(padding: str) -> tuple[int, ...]:
    parts = padding.removeprefix("lens").split("_")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{padding!r}: write lengths as lens5_13_1")
    return tuple(map(int, parts))


def _aligned(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    unit = 2 * math.lcm(world, cp)
    return tuple(unit * (1 + place % 2) for place in range(samples))


def _unpadded(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    unit = 2 * cp if cp > 1 else 3
    return (5 * unit, *(unit * (1 + 2 * (place % 2)) for place in range(samples)))


def _ragged(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    return _RAGGED[:samples]


def _short(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    longest = max(2 * cp - 1, 3)
    return tuple(longest - place % longest for place in range(samples))


def _ones(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    return tuple(9 if place == samples // 2 else 1 for place in range(samples + 2))


def _longtail(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    return (3, 97, *(2 + place % 5 for place in range(samples)))


def _equal(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    return (11,) * samples


def _few(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    if world == 1:
        raise ValueError(
            "few: one rank cannot have fewer samples than ranks; take 2 ranks or more"
        )
    one = padding.endswith("_one")
    return _RAGGED[1:2] if one else _RAGGED[1:world]


def _uneven(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    groups = max(world // cp, 2)
    return _RAGGED[2 : 2 + 2 * groups - 1]


def _refused(padding: str, world: int, cp: int, samples: int) -> tuple[int, ...]:
    return {"refused_emptysequence": (5, 0, 3), "refused_emptybatch": ()}.get(padding, (5, 9, 3))


_LENGTHS: dict[str, Callable[[str, int, int, int], tuple[int, ...]]] = {
    "aligned": _aligned,
    "unpadded": _unpadded,
    "ragged": _ragged,
    "short": _short,
    "ones": _ones,
    "longtail": _longtail,
    "equal": _equal,
    "few": _few,
    "uneven": _uneven,
    "poisoned": _ragged,
    "refused": _refused,
}
