"""A progress bar that says what a step was like."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Advance:
    """One bar, moved on by a call after every step."""

    def __init__(self, bars: Progress, name: str, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task(f"{name:10}", total=total, text="")
        self._since = time.perf_counter()

    def __call__(self, loss_of_step: float, tokens: int, what: str) -> None:
        now = time.perf_counter()
        rate, self._since = tokens / (now - self._since), now
        text = f"loss {loss_of_step:.4f}  {rate:,.0f} tokens/s  {what}"
        self._bars.update(self._task, advance=1, text=text)


@contextmanager
def progress(console: Console, name: str, total: int) -> Iterator[Advance]:
    """A bar on rank 0; what it yields takes the loss, tokens and kind of a step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console) as bars:
        yield Advance(bars, name, total)
