"""The rank's side of a pool: open the implementation once, then run tasks until told to stop.

A rank opens as soon as it is forked and says how that went. Then it answers each command with one
message, in order, so the suite always knows which answer it reads.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import importlib
import logging
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .protocol import (
    ALONE,
    ModelImplementation,
    Outputs,
    Parallel,
    RankContext,
    Task,
    Unsupported,
)
from .rank_error import RankError, from_exception
from .state_watch import Snapshot, StateWatch
from .wire import Channel, decode, encode

RUN, OUTPUTS, CHECK, CLOSE = b"run", b"outputs", b"check", b"close"
_PROBE = 7919  # a number that no task reduces


@dataclass(frozen=True)
class RankSetup:
    """All that a rank is told. `directory` holds the rendezvous, its log and its stack dump."""

    implementation: str
    rank: int
    world_size: int
    timeout_s: float
    options: Mapping[str, str]
    directory: str
    parallel: Parallel = ALONE

    @property
    def log(self) -> Path:
        return Path(self.directory, f"rank{self.rank}.log")

    @property
    def stack(self) -> Path:
        return Path(self.directory, f"rank{self.rank}.stack")


@dataclass(frozen=True)
class Done:
    """Answer to a task. `digest` stands for the outputs without packs, which are sent on demand.

    `packs` is encoded, one entry per pass: a rank must survive packs that cannot be.
    """

    seconds: float
    error: RankError | None = None
    digest: bytes = b""
    packs: bytes = b""


def serve_rank(stream: socket.socket, setup: RankSetup) -> None:
    """Be one rank until the suite says so or is gone."""
    _prepare_process(setup)
    channel = Channel(stream)
    rank = _Rank(setup)
    try:
        channel.send(encode(rank.open()))
        while True:
            command = bytes(channel.receive())
            if command == CLOSE:
                break
            channel.send(rank.answer(command, channel))
        rank.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the suite is gone


class _Rank:
    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._model: ModelImplementation | None = None
        self._watch = StateWatch()
        self._open_error: RankError | None = None
        self._outputs = b""

    def open(self) -> RankError | None:
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the suite reports it
            self._open_error = from_exception(error)
        return self._open_error

    def answer(self, command: bytes, channel: Channel) -> bytes:
        if command == RUN:
            return encode(self._run(channel.receive()))
        if command == OUTPUTS:
            return self._outputs
        assert command == CHECK, command
        return encode(_groups_agree())

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _open(self) -> None:
        setup = self._setup
        timeout = timedelta(seconds=setup.timeout_s)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.directory}/rendezvous",
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=timeout,
        )
        module = importlib.import_module(setup.implementation)
        if not hasattr(module, "open_rank"):
            raise Unsupported(f"{setup.implementation} offers no open_rank: it runs no model")
        context = RankContext(
            setup.rank, setup.world_size, setup.timeout_s, setup.options, setup.parallel
        )
        self._model = module.open_rank(context)
        self._watch = StateWatch(getattr(module, "WATCH", ()))

    def _run(self, message: bytearray) -> Done:
        if self._open_error is not None:
            return Done(seconds=0.0, error=self._open_error)
        task = decode(message)
        torch.manual_seed(0)
        random.seed(0)
        before = self._watch.snapshot()
        started = time.perf_counter()
        try:
            done = self._outputs_of(task)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the suite reports it
            done = Done(0.0, from_exception(error))
        seconds = time.perf_counter() - started
        leak = _leak(before, self._watch.snapshot(), done.error)
        if leak is not None:
            return Done(seconds, leak)
        return dataclasses.replace(done, seconds=seconds)

    def _outputs_of(self, task: Task) -> Done:
        assert self._model is not None
        outputs = self._model.run(task)
        _check_outputs(outputs, len(task.passes))
        self._outputs = encode(tuple(dataclasses.replace(o, packs=()) for o in outputs))
        digest = hashlib.blake2b(self._outputs).digest()
        return Done(0.0, digest=digest, packs=encode([o.packs for o in outputs]))


def _prepare_process(setup: RankSetup) -> None:
    """A rank prints to its log, writes its Python stack on SIGUSR1 and leaves Ctrl-C alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    stack = setup.stack.open("w")  # stays open: the signal handler writes to it
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=False)
    be_quiet()
    torch.set_num_threads(1)


def be_quiet() -> None:
    """Warnings at import would bury the lines of a log that say why a rank died."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _check_outputs(outputs: object, num_passes: int) -> None:
    if not isinstance(outputs, tuple) or not all(isinstance(o, Outputs) for o in outputs):
        raise TypeError(f"run returned {outputs!r:.100}, not a tuple of Outputs")
    if len(outputs) != num_passes:
        raise TypeError(f"run returned {len(outputs)} Outputs for {num_passes} passes")


def _leak(before: Snapshot, after: Snapshot, raised: RankError | None) -> RankError | None:
    """An error if a task left state changed; an exception must put it back too."""
    changes = before.changes_to(after)
    if not changes:
        return None
    message = "; ".join(changes)
    if raised is None:
        return RankError(kind="raised", type="StateLeak", message=message)
    message += f" (after {raised.type}: {raised.message})"
    return dataclasses.replace(raised, kind="raised", type="StateLeak", message=message)


def _groups_agree() -> bool:
    """Whether a sum over every gloo group of this rank is what it must be.

    A task that raised between two collectives may have left a group one message out of step, which
    would hang or corrupt the next task. Groups are walked in the order they were made, the same on
    every rank, so this cannot deadlock by itself.
    """
    groups = [g for g, (name, _) in dist.distributed_c10d._world.pg_map.items() if "gloo" in name]
    for group in groups:
        probe = torch.tensor([_PROBE])
        dist.all_reduce(probe, group=group)
        if probe.item() != _PROBE * dist.get_world_size(group):
            return False
    return True
