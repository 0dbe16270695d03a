"""A process that has imported the heavy modules once, and forks ranks on request.

The standard library's fork server does not fit: there is one per Python process with one list of
modules, it does not use the parent's `sys.path` before Python 3.13, it runs `__main__` again in
every rank, prints what the imports print to the user's terminal, and needs the environment of the
parent changed. This one belongs to an implementation, and is the parent of its ranks: it can end
them without racing for a process id, and does so by itself when the suite is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from .wire import Channel
from .worker import RankSetup, be_quiet, serve_rank

PRELOAD = ("torch", "torch.distributed")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_MAX_REQUEST = 1 << 16
_ANSWER_LIMIT_S = 300.0  # the first answer waits for the imports
_EXIT_LIMIT_S = 2.0
_TAIL_LINES = 20


class ForkServer:
    """Handle of the server process, which starts with the first rank and again after `close`.

    Args:
        preload: modules to import before the first fork. One that cannot be imported is left to
            the ranks, whose error says why.
    """

    def __init__(self, preload: Iterable[str] = ()) -> None:
        self._preload = (*PRELOAD, *preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._directory = ""

    @property
    def pid(self) -> int | None:
        """Process id of the server while it lives."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and alive else None

    def make_directory(self) -> Path:
        """A new private folder, which goes away with the server at the latest."""
        self._ensure_running()
        return Path(tempfile.mkdtemp(dir=self._directory))

    def fork(self, setup: RankSetup) -> tuple[int, Channel]:
        """Start a rank. Returns its process id and the channel to it."""
        self._ensure_running()
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._ask(("fork", setup), theirs)
        assert isinstance(pid, int)
        return pid, Channel(ours)

    def end(self, pids: Sequence[int]) -> dict[int, int | None]:
        """Kill ranks, with any process they started, and wait for them.

        Returns:
            their exit statuses, negative for a signal; a rank that had ended before keeps its own.
            None where the server that forked it is dead.
        """
        statuses: dict[int, int | None] = dict.fromkeys(pids)
        with contextlib.suppress(OSError):
            answer = self._ask(("end", tuple(pids)))
            assert isinstance(answer, dict)
            statuses |= answer
        for pid in (pid for pid, status in statuses.items() if status is None):
            _kill_group(pid)
        return statuses

    def close(self) -> None:
        """End the server and all its ranks, and remove their folders; safe to call twice."""
        if self._process is None or self._control is None:
            return
        self._control.close()  # the server sees it, ends its ranks and exits
        try:
            self._process.wait(_EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:  # still importing
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._process = self._control = None
        atexit.unregister(self.close)

    def _ensure_running(self) -> None:
        if self.pid is not None:
            return
        self.close()
        atexit.register(self.close)
        self._directory = tempfile.mkdtemp(prefix="conformance-")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_LIMIT_S)
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._program(theirs.fileno())],
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the suite alone
            )

    def _program(self, control: int) -> str:
        path = [entry or str(Path.cwd()) for entry in sys.path]
        return (
            f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; "
            f"serve({control}, {self._preload!r}, {self._directory!r})"
        )

    def _ask(self, request: object, stream: socket.socket | None = None) -> object:
        if self._control is None:
            raise ConnectionError("the fork server is closed")
        try:
            descriptors = [stream.fileno()] if stream else []
            socket.send_fds(self._control, [pickle.dumps(request)], descriptors)
            answer = self._control.recv(_MAX_REQUEST)
        except BaseException:  # a later answer would be taken for that of another request
            self.close()
            raise
        if not answer:
            printed = tail(self._log)
            self.close()
            raise ConnectionError(f"the fork server died; the end of what it printed:\n{printed}")
        return pickle.loads(answer)

    @property
    def _log(self) -> Path:
        return Path(self._directory, "server.log")


def serve(control_fd: int, preload: Sequence[str], directory: str) -> None:
    """The server process: import, then fork and end ranks until the suite is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    pids: set[int] = set()
    _import_all(preload)
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST, 1)
            if not message:
                return
            name, argument = pickle.loads(message)
            if name == "fork":
                pid = _fork_rank(argument, descriptors[0], control)
                pids.add(pid)
                answer: object = pid
            else:
                answer = _end_all(pids.intersection(argument))
                pids.difference_update(argument)
            control.send(pickle.dumps(answer))
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        _end_all(pids)
        shutil.rmtree(directory, ignore_errors=True)


def tail(log: Path) -> str:
    """The last lines of a log, or nothing if there is none."""
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return ""


def _import_all(names: Sequence[str]) -> None:
    be_quiet()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a rank meets it again and reports it
            traceback.print_exc()
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what is shared


def _fork_rank(setup: RankSetup, descriptor: int, control: socket.socket) -> int:
    pid = os.fork()
    if pid:
        os.close(descriptor)
        os.setpgid(pid, pid)  # so that what a rank starts ends with it
        return pid
    status = 1
    try:
        control.close()
        serve_rank(socket.socket(fileno=descriptor), setup)
        status = 0
    except BaseException:  # noqa: BLE001 - this process must not go on as a second server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_all(pids: Iterable[int]) -> dict[int, int]:
    for pid in pids:
        _kill_group(pid)
    return {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
