"""Which ranks run which samples, in which order: plain data, equal on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


def cp_blocks(world_size: int) -> tuple[range, ...]:
    """Every set of ranks that can be a CP group, narrow ones first.

    For each power of two the aligned blocks of that size which fit wholly, and the whole world.
    Two blocks are apart or one holds the other, so groups of mixed sizes can share a micro-batch.

    >>> [tuple(block) for block in cp_blocks(3)]
    [(0,), (1,), (2,), (0, 1), (0, 1, 2)]
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    blocks = []
    size = 1
    while size < world_size:
        blocks += [range(start, start + size) for start in range(0, world_size - size + 1, size)]
        size *= 2
    return (*blocks, range(world_size))


@dataclass(frozen=True)
class GroupPlan:
    """One CP group in one micro-batch: its ranks run its samples as one pack.

    Args:
        ranks: consecutive places among the DP×CP ranks. samples: indices into the batch; none
            means a pack of padding only.
    """

    ranks: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def cp_size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Groups that share no rank, in the order of their ranks."""

    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True)
class Plan:
    """One step. Every rank walks through the micro-batches in order and runs its group of each.

    No order of arrival can deadlock it: two groups that share a rank are in different
    micro-batches, so a rank only ever waits for groups of earlier ones.

    Args:
        world_size: DP×CP ranks. seqlens: tokens of every sample of the batch.
        scheduler: whose plan it is.
        barriered: every micro-batch covers all ranks, so that they may meet in it (expert
            parallel layers, pipelines). If not, a rank can have fewer micro-batches than another.
    """

    world_size: int
    seqlens: tuple[int, ...]
    micro_batches: tuple[MicroBatchPlan, ...]
    scheduler: str
    barriered: bool

    def for_rank(self, rank: int) -> tuple[GroupPlan, ...]:
        """What a rank runs, in order: its group of each micro-batch in which it has one."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not one of {self.world_size} DP×CP ranks")
        return tuple(
            group
            for micro_batch in self.micro_batches
            for group in micro_batch.groups
            if rank in group.ranks
        )

    @property
    def hash(self) -> int:
        """63 bits that differ if any rank sees other lengths, another order or another plan."""
        return self.hash_with()

    def hash_with(self, *settings: object) -> int:
        """The same, and different if the `repr` of any setting is."""
        seen = "\n".join([self.to_json(), *map(repr, settings)])
        return int.from_bytes(hashlib.sha256(seen.encode()).digest()[:8], "big") >> 1

    def to_json(self) -> str:
        """One line, the same for equal plans; its keys are the names of the fields."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; `impl.validate` says whether it can be run.

        Raises:
            ValueError: not such a plan, naming the key.
        """
        try:
            plan = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the plan is not JSON: {error}") from error
        _check_keys(plan, cls, "the plan")
        return cls(
            world_size=_whole(plan["world_size"], "world_size"),
            seqlens=_wholes(plan["seqlens"], "seqlens"),
            micro_batches=tuple(
                _micro_batch(each, f"micro_batches[{index}]")
                for index, each in enumerate(_list(plan["micro_batches"], "micro_batches"))
            ),
            scheduler=_typed(plan["scheduler"], str, "scheduler", "a name"),
            barriered=_typed(plan["barriered"], bool, "barriered", "true or false"),
        )


def _micro_batch(value: Any, key: str) -> MicroBatchPlan:
    _check_keys(value, MicroBatchPlan, key)
    groups = enumerate(_list(value["groups"], f"{key}.groups"))
    return MicroBatchPlan(tuple(_group(each, f"{key}.groups[{index}]") for index, each in groups))


def _group(value: Any, key: str) -> GroupPlan:
    _check_keys(value, GroupPlan, key)
    return GroupPlan(
        ranks=_wholes(value["ranks"], f"{key}.ranks"),
        samples=_wholes(value["samples"], f"{key}.samples"),
    )


def _check_keys(value: Any, kind: type[Any], key: str) -> None:
    """Exactly the fields of a class."""
    names = {field.name for field in fields(kind)}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping with {', '.join(sorted(names))}, got {value!r}")
    for what, wrong in (("lacks", names - set(value)), ("has unknown", set(value) - names)):
        if wrong:
            raise ValueError(f"{key} {what} {', '.join(sorted(wrong))}")


def _typed(value: Any, kind: type[Any], key: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{key}={value!r} must be {what}")
    return value


def _list(value: Any, key: str) -> list[Any]:
    items: list[Any] = _typed(value, list, key, "a list")
    return items


def _whole(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key}={value!r} must be a whole number")
    return value


def _wholes(value: Any, key: str) -> tuple[int, ...]:
    return tuple(_whole(each, f"{key}[{index}]") for index, each in enumerate(_list(value, key)))
