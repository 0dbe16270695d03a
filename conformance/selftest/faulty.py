"""The production implementation with one fault put back, chosen task by task.

So one pool of ranks serves all faults, and a task without one shows that nothing was left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pytest import MonkeyPatch

from conformance.adapters import impl as production
from conformance.build import TaskBuilder
from conformance.case import Case
from conformance.protocol import Outputs, RankContext, Task

from .faults import FAULTS

PRELOAD = production.PRELOAD
SUPPORTS = production.SUPPORTS
WATCH = (
    *production.WATCH,
    "megatron.core.models.common.embeddings.rope_utils",
    "impl.balance",
    "impl.engine",
    "impl.engine.Engine",
    "impl.forward",
    "impl.groups",
    "impl.groups.CPGroups",
    "impl.layout",
    "impl.logprobs",
    "impl.loss",
    "impl.megatron.attention",
    "impl.megatron.attention.ExactAttention",
    "impl.megatron.bind",
    "impl.megatron.training",
    "impl.merge",
    "impl.planner",
    "impl.schedule",
    "impl.split",
    "impl.state",
    "impl.thd",
    "impl.validate",
    "conformance.adapters.impl.Rank",
    "conformance.adapters.impl._ModelRun",
    "conformance.adapters.impl_engine._EngineRun",
)


@dataclass(frozen=True)
class FaultyTask(Task):
    """A task, and the name of the fault to run it with; none if empty."""

    fault: str = ""


@dataclass(frozen=True)
class FaultyBuilder(TaskBuilder):
    """Builds the same tasks as the suite, with a fault in them."""

    fault: str = ""

    def task(self, case: Case) -> FaultyTask:
        return FaultyTask(**vars(super().task(case)), fault=self.fault)


class Rank(production.Rank):
    """A rank of the production implementation that can be told to go wrong."""

    def run(self, task: Task) -> tuple[Outputs, ...]:
        assert isinstance(task, FaultyTask)
        with _without_cached_layouts(), MonkeyPatch.context() as patch:
            if task.fault:
                FAULTS[task.fault].put_back(patch)
            return super().run(task)


def open_rank(context: RankContext) -> Rank:
    return Rank(context)


@contextmanager
def _without_cached_layouts() -> Iterator[None]:
    """No layout from before is used inside, and none from inside afterwards."""
    from impl.layout import pack_layout, rank_index
    from impl.megatron.attention import visible_blocks

    cached = (pack_layout, rank_index, visible_blocks)
    for function in cached:
        function.cache_clear()
    try:
        yield
    finally:
        for function in cached:
            function.cache_clear()
