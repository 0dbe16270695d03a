"""Whether a CP group stays bound to a model, and how a pass of it is made to fail in a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn


class BoundGroups:
    """The CP group that every module of a model holds by itself, as it was when it was built.

    Args:
        chunks: the model, or this rank's chunks of it.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.chunks = chunks
        self.built_with = self.now()

    def now(self) -> list[object]:
        holders = (
            getattr(module, "pg_collection", None)
            for chunk in self.chunks
            for module in chunk.modules()
        )
        return [getattr(groups, "cp", None) for groups in holders]

    def check(self, after: str) -> None:
        """Whether all of them are back.

        Args:
            after: what has run since.
        Raises:
            RuntimeError: one is not.
        """
        if self.now() != self.built_with:
            raise RuntimeError(f"a CP group is still bound to the model after {after}")


class _InsideALayer(Exception):
    """Raised where nobody expects it, and by nobody else."""


def interrupt(chunks: Sequence[nn.Module], run: Callable[[], object]) -> None:
    """Begin a pass that fails in the core attention of the last layer; see `Task.interrupted`.

    Raises:
        RuntimeError: the exception did not come out.
    """
    *_, attention = (
        module for name, module in chunks[-1].named_modules() if name.endswith("core_attention")
    )
    hook = attention.register_forward_pre_hook(_fail)
    try:
        run()
    except _InsideALayer:
        return
    finally:
        hook.remove()
    raise RuntimeError("an exception inside the last layer did not come out of the pass")


def _fail(*_: object) -> None:
    raise _InsideALayer
