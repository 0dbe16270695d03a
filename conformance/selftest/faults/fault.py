"""What a fault is, and how it is put back into the production implementation."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest import MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A wrong implementation that the suite must turn down, and how it must say so.

    Args:
        name: of the function that puts it back.
        source: the public issue, pull request or commit it is taken from.
        case: id of the cheapest case that catches it.
        says: for each check that must fail, words of its `where` or its reason.
        put_back: patches the implementation, on every rank, for one task.
    """

    name: str
    source: str
    case: str
    says: Mapping[str, str]
    put_back: Callable[[MonkeyPatch], None]


def fault(
    source: str, *, case: str, says: Mapping[str, str]
) -> Callable[[Callable[[MonkeyPatch], None]], Fault]:
    """Make a fault of the function that puts it back."""

    def declare(put_back: Callable[[MonkeyPatch], None]) -> Fault:
        return Fault(put_back.__name__, source, case, says, put_back)

    return declare


def wrap(patch: MonkeyPatch, target: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(original, ...)` in the place of a function or method, by its dotted name."""
    original = pkgutil.resolve_name(target)
    patch.setattr(target, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
