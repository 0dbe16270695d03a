"""One generation of rank processes: start them, talk to them against the clock, end them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from .fork_server import ForkServer, tail
from .protocol import Parallel
from .rank_error import RankError, from_exit_status, from_stack
from .wire import Channel, decode
from .worker import CHECK, CLOSE, OUTPUTS, RUN, Done, RankSetup

GRACE_S = 3.0
_CHECK_LIMIT_S = 3.0
_OUTPUTS_LIMIT_S = 60.0
_CLOSE_LIMIT_S = 1.0
_STACK_LIMIT_S = 1.0
# A rank gives up on a collective later than the suite gives up on the rank, so that the suite
# still finds it there.
_COLLECTIVE_MARGIN_S = 120.0


@dataclass
class Answers:
    """What ranks said: `messages` of those that answered, the `gone`, and the still `silent`."""

    messages: dict[int, Any] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return not self.gone and not self.silent


class Ranks:
    """The processes of one world; they open the implementation while the constructor returns."""

    def __init__(
        self,
        server: ForkServer,
        implementation: str,
        world_size: int,
        *,
        timeout_s: float,
        options: Mapping[str, str],
        parallel: Parallel,
    ) -> None:
        self._server = server
        self._directory = server.make_directory()
        self._setups = [
            RankSetup(
                implementation=implementation,
                rank=rank,
                world_size=world_size,
                timeout_s=timeout_s + _COLLECTIVE_MARGIN_S,
                options=dict(options),
                directory=str(self._directory),
                parallel=parallel,
            )
            for rank in range(world_size)
        ]
        self.pids: list[int] = []
        self._channels: list[Channel] = []
        try:
            self._fork()
        except BaseException:
            self.end()
            raise

    def _fork(self) -> None:
        for setup in self._setups:
            pid, channel = self._server.fork(setup)
            self.pids.append(pid)
            self._channels.append(channel)

    def opened(self, *, limit_s: float) -> Answers:
        """Whether each rank opened: a message of None, or the error."""
        return self._collect(
            range(len(self.pids)), limit_s, failed=lambda error: error is not None
        )

    def run(self, task: bytes, ranks: Iterable[int], *, limit_s: float) -> Answers:
        """Run an encoded task; messages are `Done`."""
        ranks = list(ranks)
        deadline = time.monotonic() + limit_s
        for rank in ranks:
            self._send(rank, RUN, limit_s=1.0)
            self._send(rank, task, limit_s=deadline - time.monotonic())
        return self._collect(ranks, deadline - time.monotonic(), failed=_has_error)

    def outputs(self, ranks: Iterable[int]) -> Answers:
        """Fetch the outputs of the task that ran last, without packs."""
        ranks = list(ranks)
        for rank in ranks:
            self._send(rank, OUTPUTS, limit_s=1.0)
        return self._collect(ranks, _OUTPUTS_LIMIT_S)

    def groups_agree(self) -> bool:
        """Whether every process group still works, told by a sum over each of them."""
        ranks = range(len(self.pids))
        for rank in ranks:
            self._send(rank, CHECK, limit_s=1.0)
        answers = self._collect(ranks, _CHECK_LIMIT_S, failed=lambda agrees: not agrees)
        return answers.complete and all(answers.messages.values())

    def waiting_errors(self, silent: Iterable[int]) -> dict[int, RankError]:
        """Where silent ranks are, from their Python stacks."""
        silent = sorted(silent)
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_LIMIT_S
        return {rank: from_stack(self._stack(rank, deadline)) for rank in silent}

    def end(self) -> dict[int, RankError]:
        """Kill every rank and remove their folder; errors for those that were gone already."""
        statuses = self._server.end(self.pids)
        errors = {
            rank: from_exit_status(statuses[pid], tail(self._setups[rank].log))
            for rank, pid in enumerate(self.pids)
        }
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        return errors

    def close(self) -> None:
        """Let every rank close its implementation, then end it in any case."""
        ranks = range(len(self.pids))
        for rank in ranks:
            self._send(rank, CLOSE, limit_s=0.1)
        self._collect(ranks, _CLOSE_LIMIT_S)
        self.end()

    def _send(self, rank: int, message: bytes, *, limit_s: float) -> None:
        """Send; that a rank is gone or stuck is found out where its answer is awaited."""
        with contextlib.suppress(OSError):
            self._channels[rank].send(message, timeout_s=limit_s)

    def _collect(
        self,
        ranks: Iterable[int],
        limit_s: float,
        *,
        failed: Callable[[Any], bool] = lambda _: False,
    ) -> Answers:
        """Wait until all have answered, the limit is over, or the grace after a first failure.

        The grace is at least as long as the failing rank took: others may only be slower.
        """
        answers = Answers(silent=set(ranks))
        started = time.monotonic()
        deadline = started + limit_s
        while answers.silent:
            channels = {self._channels[rank]: rank for rank in answers.silent}
            ready = wait(list(channels), max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            if not ready:
                break
            for channel in ready:
                if self._take(channels[channel], answers, failed):  # type: ignore[index]
                    now = time.monotonic()
                    deadline = min(deadline, now + max(GRACE_S, now - started))
        return answers

    def _take(self, rank: int, answers: Answers, failed: Callable[[Any], bool]) -> bool:
        """Read what a rank has sent; True if it is a failure."""
        try:
            message = self._channels[rank].read_available()
        except (EOFError, OSError):
            answers.silent.discard(rank)
            answers.gone.add(rank)
            return True
        if message is None:
            return False
        answers.silent.discard(rank)
        answers.messages[rank] = decode(message)
        return failed(answers.messages[rank])

    def _stack(self, rank: int, deadline: float) -> str:
        """A rank's stack dump, once it has stopped growing."""
        text, file = "", self._setups[rank].stack
        while time.monotonic() < deadline:
            time.sleep(0.02)
            read = file.read_text(errors="replace")
            if read and read == text:
                break
            text = read
        return text


def _has_error(done: Done) -> bool:
    return done.error is not None
