"""Batches of real documents: JSONL, one `{"input_ids": [...], "loss_mask": [...]}` a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PROBLEMS_SHOWN = 10
MAX_ID = 2**31 - 1  # no vocabulary is larger; kernels take int32


@dataclass(frozen=True)
class Document:
    """One line: token ids, and for each whether it is a target."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class BadBatchFile(ValueError):
    """A file that cannot be used; says which lines are wrong, and nothing of it is."""


def read_documents(path: Path) -> tuple[Document, ...]:
    """Every document of a file, or none.

    `loss_mask` may be left out: then every token is a target. Other keys are ignored. Blank
    lines are allowed.

    Raises:
        BadBatchFile: unreadable, empty, or with any malformed line; the first ten are named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # U+2028 in a text ends no line
    except (OSError, UnicodeDecodeError) as error:
        raise BadBatchFile(f"{path}: cannot be read: {error}") from error
    documents, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            documents.append(_document(line))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = len(problems) - MAX_PROBLEMS_SHOWN
        shown = problems[:MAX_PROBLEMS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise BadBatchFile(
            "\n".join([*shown, "nothing was run; mend these lines or leave them out"])
        )
    if not documents:
        raise BadBatchFile(f"{path}: holds no documents")
    return tuple(documents)


def _document(line: str) -> Document:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entry, dict) or "input_ids" not in entry:
        raise ValueError('expected an object with "input_ids"')
    ids = entry["input_ids"]
    mask = entry.get("loss_mask")
    _check_integers("input_ids", ids, highest=MAX_ID)
    if not ids:
        raise ValueError('"input_ids" is empty')
    if mask is None:
        mask = [1] * len(ids)
    _check_integers("loss_mask", mask, highest=1)
    if len(mask) != len(ids):
        raise ValueError(f'"loss_mask" has {len(mask)} entries, "input_ids" has {len(ids)}')
    return Document(tuple(ids), tuple(map(bool, mask)))


def _check_integers(name: str, values: Any, *, highest: int) -> None:
    if not isinstance(values, list):
        raise ValueError(f'"{name}" is not a list but {type(values).__name__}')
    for place, value in enumerate(values):
        whole = isinstance(value, int) and (name == "loss_mask" or not isinstance(value, bool))
        if not whole or not 0 <= value <= highest:
            allowed = "0 or 1" if highest == 1 else f"from 0 to {highest}"
            raise ValueError(
                f'"{name}"[{place}] is {value!r:.40}; it must be a whole number, {allowed}'
            )


def batches(
    documents: tuple[Document, ...], *, max_tokens: int
) -> tuple[tuple[Document, ...], ...]:
    """Documents in file order, cut into batches of at most `max_tokens`, or of one."""
    cut: list[list[Document]] = []
    room = 0
    for document in documents:
        if len(document.input_ids) > room or not cut:
            cut.append([])
            room = max_tokens
        cut[-1].append(document)
        room -= len(document.input_ids)
    return tuple(map(tuple, cut))
