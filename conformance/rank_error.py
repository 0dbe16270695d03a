"""What went wrong on a rank, as plain data: from an exception, a stack dump or an exit status."""

from __future__ import annotations

import linecache
import os
import re
import signal
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from .protocol import Unsupported

Kind = Literal["refused", "unsupported", "raised", "timeout", "died"]

_CHECKOUT = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).parent
_TORCH_FOLDER = f"{_TORCH}{os.sep}"
_COLLECTIVES_FOLDER = f"{_TORCH / 'distributed'}{os.sep}"
_NOT_TO_BLAME = (_TORCH_FOLDER, str(_TORCH.parent / "typing_extensions.py"), "<frozen ")
_LAUNCHER = {str(Path(__file__).with_name(name)) for name in ("worker.py", "wire.py")}
_DUMPED_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True)
class RankError:
    """Why a rank has no outputs.

    Args:
        kind: "refused" is a ValueError, "unsupported" the protocol's own exception, "raised" any
            other, "timeout" no answer in time, "died" a process that ended.
        type: name of the exception class, "StateLeak", "Timeout" or "Died".
        message: its words, or what the rank was waiting for.
        traceback: of the exception; for a dead rank the end of what it had printed.
        stack: the Python stack of a rank that did not answer, innermost frame first.
        where: `file:line function` of the innermost frame outside torch and the launcher.
        collective: the collective that the error or the wait is in; empty if in none.
    """

    kind: Kind
    type: str
    message: str
    traceback: str = ""
    stack: str = ""
    where: str = ""
    collective: str = ""


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short_path(self.file)}:{self.line} {self.function}"


def _short_path(file: str) -> str:
    """Inside a package or inside the checkout, without what differs from machine to machine."""
    _, installed, inside = file.rpartition("site-packages" + os.sep)
    return inside if installed else file.removeprefix(f"{_CHECKOUT}{os.sep}")


def from_exception(error: BaseException) -> RankError:
    """The error of a rank that raised."""
    summary = traceback.extract_tb(error.__traceback__)
    frames = [_Frame(f.filename, f.lineno or 0, f.name) for f in reversed(summary)]
    return RankError(
        kind=_kind(error),
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        where=_where(frames),
        collective=_collective(frames),
    )


def from_stack(stack: str) -> RankError:
    """The error of a rank that did not answer, from faulthandler's dump; the words come later."""
    frames = _dumped_frames(stack)
    return RankError(
        kind="timeout",
        type="Timeout",
        message="",
        stack=stack,
        where=_where(frames),
        collective=_collective(frames),
    )


def from_exit_status(status: int | None, printed: str) -> RankError:
    """The error of a rank whose process ended; a negative status is a signal's number."""
    if status is None:
        reason = "its process ended with an unknown status"
    elif status < 0:
        reason = f"its process was ended by {signal.Signals(-status).name}"
    else:
        reason = f"its process exited with status {status}"
    return RankError(kind="died", type="Died", message=reason, traceback=printed)


def waiting_in_words(
    waiting: Mapping[int, RankError],
    culprits: Mapping[int, RankError],
    finished: Iterable[int],
    limit_s: float,
) -> dict[int, RankError]:
    """Errors of ranks that got no further, in words that name the ranks they wait for.

    Args:
        waiting: from `from_stack`, or what a rank raised in a collective because another died.
        culprits: errors of the ranks that went wrong by themselves.
        finished: ranks that did well; if nobody went wrong, they left a collective out.
    """
    stuck = [rank for rank, error in waiting.items() if not error.collective]
    for_whom = [f"rank {r}, which {deed(e)}" for r, e in sorted(culprits.items())]
    if not culprits:
        for_whom = [f"rank {rank}, which is in no collective" for rank in stuck]
        for_whom += [f"rank {rank}, which has finished" for rank in finished]
    whom = f" for {', '.join(for_whom)}" if for_whom else ""
    late = "" if culprits else f"no answer within {limit_s:g} s: "
    return {rank: _worded(error, late, whom) for rank, error in waiting.items()}


def _worded(error: RankError, late: str, whom: str) -> RankError:
    where = error.where or "an unknown place"
    if error.collective:
        message = f"{late}waits in {error.collective} at {where}{whom}"
    elif late:
        message = f"{late}it is at {where}"
    else:
        message = f"has not finished at {where}; the ranks were ended because of {whom[5:]}"
    if error.kind == "raised":
        message += f"; its own error was {error.type}: {error.message}"
    return replace(error, kind="timeout", type="Timeout", message=message)


def deed(error: RankError) -> str:
    """What a rank did, as the end of a sentence."""
    if error.kind == "died":
        return f"died: {error.message}"
    if error.kind == "timeout":
        return f"gave {error.message}"
    return f"raised {error.type}: {error.message}"


def _kind(error: BaseException) -> Kind:
    if isinstance(error, Unsupported):
        return "unsupported"
    return "refused" if isinstance(error, ValueError) else "raised"


def _dumped_frames(stack: str) -> list[_Frame]:
    """Frames of the thread that took the signal, which is the main one, innermost first."""
    _, found, rest = stack.partition("Current thread")
    thread = (rest if found else stack).strip().split("\n\n")[0]
    matches = (_DUMPED_FRAME.match(line) for line in thread.splitlines())
    return [_Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m]


def _where(frames: list[_Frame]) -> str:
    outside = (
        f for f in frames if not f.file.startswith(_NOT_TO_BLAME) and f.file not in _LAUNCHER
    )
    return str(next(outside, frames[0] if frames else ""))


def _collective(frames: list[_Frame]) -> str:
    """The torch.distributed function that the innermost frames are in.

    `work.wait()` is no Python function, so an innermost line that calls it counts as "wait".
    """
    if not frames:
        return ""
    if frames[0].file.startswith(_COLLECTIVES_FOLDER):
        inside = [f for f in frames if f.file.startswith(_COLLECTIVES_FOLDER)]
        return next((f.function for f in inside if f.function != "wrapper"), "")
    source = linecache.getline(frames[0].file, frames[0].line)
    return "wait" if ".wait(" in source else ""
