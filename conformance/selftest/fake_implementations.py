"""An implementation without a model, which misbehaves as a task or an option asks.

`ModelSpec.norm` of a task names what happens in `run`, and the option `open` what happens in
`open_rank`; see `_BEHAVIOURS` and `_OPENINGS`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from conformance.protocol import (
    Batch,
    ModelSpec,
    Outputs,
    Pack,
    RankContext,
    Task,
    Unsupported,
)

PRELOAD = ("colorsys", "no_such_module")  # one that nothing else imports, and one that fails
WATCH = ("conformance.selftest.fake_implementations.Watched", "no_such_module.Thing")


class Watched:
    """A class that the tasks "patch a class" and "patch and restore" change."""

    def forward(self) -> int:
        return 1


class _PassThrough(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Rank:
    """One rank of the fake; its outputs hold the sum over all ranks of `rank + 1`."""

    def __init__(self, context: RankContext) -> None:
        self.context = context

    def run(self, task: Task) -> tuple[Outputs, ...]:
        behaviour = _BEHAVIOURS[task.model.norm]
        return tuple(behaviour(self.context.rank, task) for _ in task.passes)

    def close(self) -> None:
        if self.context.options.get("closed"):
            with Path(self.context.options["closed"]).open("a") as file:
                file.write(f"{self.context.rank}\n")


def open_rank(context: RankContext) -> Rank:
    _OPENINGS[context.options.get("open", "well")](context)
    return Rank(context)


def task(
    behaviour: str, *, weights: dict[str, torch.Tensor] | None = None, passes: int = 1
) -> Task:
    """A task that makes the fake do something."""
    model = ModelSpec(
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        ffn_size=1,
        vocab_size=1,
        norm=behaviour,
    )
    return Task(model, weights or {}, Batch((), (), ()), ((),) * passes)


def _outputs(rank: int, loss: float, gradients: dict[str, torch.Tensor] | None = None) -> Outputs:
    tokens = torch.full((2,), rank)
    pack = Pack((0,), (rank,), tokens, tokens, tokens, torch.tensor([0, 2], dtype=torch.int32))
    return Outputs((), (), (), torch.tensor(loss), gradients or {}, (pack,))


def _sum_over_ranks(rank: int) -> float:
    value = torch.tensor(rank + 1.0)
    dist.all_reduce(value)
    return value.item()


def _add_up(rank: int, task: Task) -> Outputs:
    return _outputs(rank, _sum_over_ranks(rank), dict(task.weights))


def _alone(rank: int, task: Task) -> Outputs:
    return _outputs(rank, float(rank))


def _odd_one_out(rank: int, task: Task) -> Outputs:
    return _outputs(rank, 7.0 if rank == 2 else 1.0)


def _draw(rank: int, task: Task) -> Outputs:
    return _outputs(rank, torch.rand(()).item() + random.random())


def _say_preloaded(rank: int, task: Task) -> Outputs:
    return _outputs(rank, float("colorsys" in sys.modules))


def _refuse(rank: int, task: Task) -> Outputs:
    raise ValueError("the batch is empty")


def _not_supported(rank: int, task: Task) -> Outputs:
    raise Unsupported("no packed sequences here")


def _raise_everywhere(rank: int, task: Task) -> Outputs:
    raise RuntimeError(f"boom on {rank}")


def _raise_on_1(rank: int, task: Task) -> Outputs:
    if rank == 1:
        raise RuntimeError("boom")
    return _add_up(rank, task)


def _raise_on_1_after_sending(rank: int, task: Task) -> Outputs:
    """Leaves the default group out of step, while every rank answers."""
    if rank == 0:
        dist.broadcast(torch.zeros(1), src=0, async_op=True)
    raise RuntimeError("boom")


def _sleep_on_1(rank: int, task: Task) -> Outputs:
    if rank == 1:
        time.sleep(600)
    return _add_up(rank, task)


def _return_early_on_1(rank: int, task: Task) -> Outputs:
    return _alone(rank, task) if rank == 1 else _add_up(rank, task)


def _wait_for_work_on_0(rank: int, task: Task) -> Outputs:
    if rank == 0:
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
    time.sleep(600)
    raise AssertionError


def _die_on_1(rank: int, task: Task) -> Outputs:
    if rank == 1:
        os.write(1, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return _add_up(rank, task)


def _exit_on_1(rank: int, task: Task) -> Outputs:
    if rank == 1:
        os._exit(3)
    return _add_up(rank, task)


def _leak_dtype(rank: int, task: Task) -> Outputs:
    torch.set_default_dtype(torch.float64)
    return _alone(rank, task)


def _leak_grad_mode_and_raise(rank: int, task: Task) -> Outputs:
    torch.set_grad_enabled(False)
    raise RuntimeError("boom")


def _leak_function_mode(rank: int, task: Task) -> Outputs:
    _PassThrough().__enter__()
    return _alone(rank, task)


def _patch_tensor(rank: int, task: Task) -> Outputs:
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    return _alone(rank, task)


def _patch_class(rank: int, task: Task) -> Outputs:
    Watched.forward = lambda self: 2  # type: ignore[method-assign]
    return _alone(rank, task)


def _patch_and_restore(rank: int, task: Task) -> Outputs:
    original = Watched.forward
    Watched.forward = lambda self: 2  # type: ignore[method-assign]
    Watched.forward = original  # type: ignore[method-assign]
    return _alone(rank, task)


def _return_nonsense(rank: int, task: Task) -> Outputs:
    return "outputs"  # type: ignore[return-value]


_BEHAVIOURS: dict[str, Callable[[int, Task], Outputs]] = {
    "add up": _add_up,
    "alone": _alone,
    "odd one out": _odd_one_out,
    "draw": _draw,
    "say preloaded": _say_preloaded,
    "refuse": _refuse,
    "not supported": _not_supported,
    "raise everywhere": _raise_everywhere,
    "raise on 1": _raise_on_1,
    "raise after sending": _raise_on_1_after_sending,
    "sleep on 1": _sleep_on_1,
    "return early on 1": _return_early_on_1,
    "wait for work on 0": _wait_for_work_on_0,
    "die on 1": _die_on_1,
    "exit on 1": _exit_on_1,
    "leak dtype": _leak_dtype,
    "leak grad mode and raise": _leak_grad_mode_and_raise,
    "leak a function mode": _leak_function_mode,
    "patch tensor": _patch_tensor,
    "patch a class": _patch_class,
    "patch and restore": _patch_and_restore,
    "return nonsense": _return_nonsense,
}


def _open_well(context: RankContext) -> None:
    pass


def _fail_to_open(context: RankContext) -> None:
    raise Unsupported("no such version")


def _fail_to_open_on_1(context: RankContext) -> None:
    if context.rank == 1:
        raise RuntimeError("no luck")
    dist.barrier()


def _die_at_open_on_1(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(4)


_OPENINGS: dict[str, Callable[[RankContext], None]] = {
    "well": _open_well,
    "fails": _fail_to_open,
    "fails on 1": _fail_to_open_on_1,
    "dies on 1": _die_at_open_on_1,
}
