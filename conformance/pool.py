"""Pools of rank processes that import once and run many tasks, and say which rank went wrong.

`RankPool` is one world of an implementation; `RankPools` keeps the pools that were used last.
Ranks that hang, die or leave state changed are replaced before the next task.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .fork_server import ForkServer
from .protocol import ALONE, Outputs, Pack, Parallel, Task, load
from .rank_error import RankError, deed, waiting_in_words
from .ranks import Answers, Ranks
from .wire import decode, encode
from .worker import Done

_OPEN_LIMIT_S = 300.0  # a cold import on a busy machine
_Shared = dict[bytes, tuple[Outputs, ...]]  # outputs without packs, by digest


@dataclass(frozen=True)
class RankReply:
    """What one rank made of a task: outputs, or the reason why there are none.

    Ranks whose outputs are equal to the last bit share tensors; `packs` are always their own.
    `seconds` is the time inside the implementation.
    """

    rank: int
    outputs: tuple[Outputs, ...] | None
    error: RankError | None
    seconds: float


class RankPool:
    """`world_size` ranks of an implementation; processes start with the first `run`.

    Args:
        implementation: dotted name of a module with `open_rank`. Its optional `PRELOAD` names
            modules to import before ranks are forked, its optional `WATCH` modules and classes
            whose attributes no task may leave changed.
        timeout_s: limit of one task.
        open_timeout_s: limit of `open_rank`, imports included.
        options, parallel: handed to `open_rank`.
        server: forks the ranks; one of its own if not given.

    >>> with RankPool("my.implementation", 4) as pool:  # doctest: +SKIP
    ...     replies = pool.run(task)
    """

    def __init__(
        self,
        implementation: str,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        open_timeout_s: float = _OPEN_LIMIT_S,
        options: Mapping[str, str] | None = None,
        parallel: Parallel = ALONE,
        server: ForkServer | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not positive")
        self.implementation = implementation
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._open_timeout_s = open_timeout_s
        self._options = dict(options or {})
        self._parallel = parallel
        self._server = server or ForkServer(preload_of(implementation))
        self._owns_server = server is None
        self._ranks: Ranks | None = None
        self._fresh = False
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order; empty while no ranks live."""
        return tuple(self._ranks.pids) if self._ranks else ()

    def start(self) -> None:
        """Start the ranks now rather than in the first `run`; they open in the background."""
        if self._closed:
            raise RuntimeError(f"the pool of {self.implementation} is closed; make a new one")
        if self._ranks is None:
            self._ranks = Ranks(
                self._server,
                self.implementation,
                self.world_size,
                timeout_s=self._timeout_s,
                options=self._options,
                parallel=self._parallel,
            )
            self._fresh = True

    def run(
        self, task: Task, *, only_rank: int | None = None, timeout_s: float | None = None
    ) -> list[RankReply]:
        """Run a task on all ranks, or on one, and return their replies in rank order.

        What goes wrong on a rank is in its reply; nothing of it raises here.
        """
        ranks = range(self.world_size) if only_rank is None else [only_rank]
        message = encode(task)
        try:
            self.start()
            return self._run(message, ranks, self._timeout_s if timeout_s is None else timeout_s)
        except BaseException:
            self._discard()
            raise

    def close(self) -> None:
        """End all processes and remove all files; safe to call twice."""
        self._closed = True
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._owns_server:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._discard()
        self.close()

    def _run(self, message: bytes, ranks: Iterable[int], limit_s: float) -> list[RankReply]:
        assert self._ranks is not None
        if self._fresh and (errors := self._opening_errors()):
            return [_reply(rank, None, {}, errors) for rank in ranks]
        answers = self._ranks.run(message, ranks, limit_s=limit_s)
        done: dict[int, Done] = answers.messages
        errors = {rank: answer.error for rank, answer in done.items() if answer.error}
        outputs, lost = self._outputs(done)
        if answers.complete and lost.complete:
            self._check_health(errors)
        else:
            errors = self._blame(_merged(answers, lost), errors, limit_s)
        return [_reply(rank, done.get(rank), outputs, errors) for rank in ranks]

    def _opening_errors(self) -> dict[int, RankError]:
        """Wait until new ranks have opened; errors if only some did, and then they end.

        Ranks that all failed are kept: they answer every task with their error, at no cost.
        """
        assert self._ranks is not None
        self._fresh = False
        opened = self._ranks.opened(limit_s=self._open_timeout_s)
        errors = {rank: error for rank, error in opened.messages.items() if error}
        if opened.complete and len(errors) in (0, self.world_size):
            return {}
        return self._blame(opened, errors, self._open_timeout_s)

    def _outputs(self, done: Mapping[int, Done]) -> tuple[_Shared, Answers]:
        """Outputs by digest, each fetched from the first rank that has them."""
        assert self._ranks is not None
        holders: dict[bytes, int] = {}
        for rank in sorted(done):
            if done[rank].error is None:
                holders.setdefault(done[rank].digest, rank)
        answers = self._ranks.outputs(holders.values())
        fetched = {d: answers.messages[r] for d, r in holders.items() if r in answers.messages}
        return fetched, answers

    def _check_health(self, errors: Mapping[int, RankError]) -> None:
        """Replace ranks that raised and can no longer be trusted with another task."""
        assert self._ranks is not None
        if not errors:
            return
        leaked = any(error.type == "StateLeak" for error in errors.values())
        if leaked or not self._ranks.groups_agree():
            self._discard()

    def _blame(
        self, answers: Answers, errors: Mapping[int, RankError], limit_s: float
    ) -> dict[int, RankError]:
        """Errors of all ranks when some are gone or silent; the ranks end here."""
        assert self._ranks is not None
        waiting = self._ranks.waiting_errors(answers.silent)
        ended = self._discard()
        culprits = dict(errors) | {rank: ended[rank] for rank in answers.gone}
        finished = sorted(set(answers.messages) - set(errors))
        if answers.gone:
            victims = {r: e for r, e in errors.items() if e.kind == "raised" and e.collective}
            culprits = {r: e for r, e in culprits.items() if r not in victims}
            waiting |= victims
        return culprits | waiting_in_words(waiting, culprits, finished, limit_s)

    def _discard(self) -> dict[int, RankError]:
        """End the ranks at once; the next task gets new ones."""
        ranks, self._ranks = self._ranks, None
        return ranks.end() if ranks is not None else {}


class RankPools:
    """Pools by implementation, world size, options and layout, the most recently used ones alive.

    Args:
        max_ranks: processes that live at once; a larger world lives alone.
        timeout_s: limit of one task in every pool.
    """

    def __init__(self, *, max_ranks: int = 16, timeout_s: float = 60.0) -> None:
        self._max_ranks = max_ranks
        self._timeout_s = timeout_s
        self._servers: dict[tuple[str, ...], ForkServer] = {}
        self._pools: OrderedDict[tuple[object, ...], RankPool] = OrderedDict()

    def pool(
        self,
        implementation: str,
        world_size: int,
        *,
        options: Mapping[str, str] | None = None,
        parallel: Parallel = ALONE,
    ) -> RankPool:
        """The pool for these, made if there is none; pools used longest ago make room for it."""
        key = (implementation, world_size, parallel, *sorted((options or {}).items()))
        if key not in self._pools:
            self._make_room(world_size)
            self._pools[key] = RankPool(
                implementation,
                world_size,
                timeout_s=self._timeout_s,
                options=options,
                parallel=parallel,
                server=self._server(implementation),
            )
        self._pools.move_to_end(key)
        return self._pools[key]

    def close(self) -> None:
        """Close every pool and end all processes; safe to call twice."""
        while self._pools:
            self._pools.popitem()[1].close()
        while self._servers:
            self._servers.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _make_room(self, world_size: int) -> None:
        while self._pools and self._num_ranks() + world_size > self._max_ranks:
            self._pools.popitem(last=False)[1].close()

    def _num_ranks(self) -> int:
        return sum(pool.world_size for pool in self._pools.values())

    def _server(self, implementation: str) -> ForkServer:
        preload = preload_of(implementation)
        return self._servers.setdefault(preload, ForkServer(preload))


def preload_of(implementation: str) -> tuple[str, ...]:
    """The modules that an implementation wants imported once for all its ranks."""
    return tuple(getattr(load(implementation), "PRELOAD", ()))


def _merged(first: Answers, second: Answers) -> Answers:
    return Answers(first.messages, first.gone | second.gone, first.silent | second.silent)


def _reply(
    rank: int,
    done: Done | None,
    outputs: _Shared,
    errors: Mapping[int, RankError],
) -> RankReply:
    """The reply of a rank, with its own packs put back into the outputs it shares."""
    seconds = done.seconds if done else 0.0
    shared = outputs.get(done.digest) if done else None
    if rank in errors or done is None or shared is None:
        return RankReply(rank, None, errors.get(rank) or _bystander(errors), seconds)
    packs: list[tuple[Pack, ...]] = decode(done.packs)
    own = (dataclasses.replace(o, packs=p) for o, p in zip(shared, packs, strict=True))
    return RankReply(rank, tuple(own), None, seconds)


def _bystander(errors: Mapping[int, RankError]) -> RankError:
    """The error of a rank that did well but was ended before it could show its outputs."""
    rank, error = min(errors.items())
    message = f"was ended because of rank {rank}, which {deed(error)}"
    return RankError(kind="timeout", type="Timeout", message=message)
