"""What the engine asks of the plan of a step; any frozen plain data will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StepGroup(Protocol):
    """One CP group in one micro-batch, whose ranks run its samples as one pack.

    Attributes:
        ranks: consecutive places among the DP×CP ranks. samples: indices into the batch.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def samples(self) -> tuple[int, ...]: ...


class StepPlan(Protocol):
    """Which ranks run which samples, in which order, equal on every rank.

    Attributes:
        world_size: DP×CP ranks. seqlens: tokens of every sample of the batch.
        barriered: every micro-batch covers all ranks, as pipelines need it.
        hash: 63 bits that differ if any rank has another plan.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def seqlens(self) -> tuple[int, ...]: ...

    @property
    def barriered(self) -> bool: ...

    @property
    def hash(self) -> int: ...

    def for_rank(self, rank: int) -> tuple[StepGroup, ...]:
        """What a rank runs, in order."""


@dataclass(frozen=True)
class PaddingOnly:
    """A micro-batch of one rank that holds nothing, where there has to be one."""

    ranks: tuple[int, ...]
    samples: tuple[int, ...] = ()
