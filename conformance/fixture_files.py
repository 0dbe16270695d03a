"""Layouts and plans that were worked by hand, from `fixtures/`; its README explains every key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .drawing import place_of

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class LayoutFile:
    """Where every token of a batch goes; its `pack` and `labels` answer in the oracle's place.

    Args:
        rows: per CP rank what each row is: sequence and position, or None for padding.
        tokens, labels, position_ids: per CP rank int64 [T].
        cu_seqlens_padded: int32 [S + 1].
    """

    name: str
    lengths: tuple[int, ...]
    cp_size: int
    tp_size: int
    rows: tuple[tuple[tuple[int, int] | None, ...], ...]
    tokens: tuple[Tensor, ...]
    labels_of_ranks: tuple[Tensor, ...]
    position_ids: tuple[Tensor, ...]
    cu_seqlens_padded: Tensor

    def pack(
        self, sequences: Sequence[Tensor], *, cp_rank: int, pad_value: int, **_: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Anything that these sequences have per token, put where the file says."""
        padding = torch.full_like(sequences[0][0], pad_value)
        values = [padding if at is None else sequences[at[0]][at[1]] for at in self.rows[cp_rank]]
        return torch.stack(values), self.position_ids[cp_rank], self.cu_seqlens_padded

    def labels(self, sequence: Tensor) -> Tensor:
        """Labels of one of the file's own sequences, collected from all ranks."""
        number, _ = place_of(int(sequence[0]))
        labels = torch.zeros_like(sequence)
        for rows, of_rank in zip(self.rows, self.labels_of_ranks, strict=True):
            for at, label in zip(rows, of_rank, strict=True):
                if at is not None and at[0] == number:
                    labels[at[1]] = label
        return labels


@dataclass(frozen=True)
class PlanFile:
    """How one batch is spread over ranks with one CP size.

    Args:
        local_cp_size, samples: the answer; `samples` per group, groups in rank order.
        error: in place of an answer, a text that the refusal contains.
    """

    name: str
    lengths: tuple[int, ...]
    world_size: int
    max_seqlen_per_dp_cp_rank: int
    local_cp_size: int
    samples: tuple[tuple[int, ...], ...]
    error: str


def layout_files() -> list[LayoutFile]:
    """Those of the zigzag: the index protocol cannot ask for another layout."""
    return [_layout(data) for data in _read("layouts") if "layout" not in data]


def plan_files() -> list[PlanFile]:
    return [_plan(data) for data in _read("plans")]


def _read(folder: str) -> list[Any]:
    """Every file of a folder, by name.

    Raises:
        FileNotFoundError: there is none, so nothing would be checked.
    """
    paths = sorted((FIXTURES / folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{FIXTURES / folder} holds no .json; run from a whole checkout")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _layout(data: Any) -> LayoutFile:
    ranks = data["ranks"]
    return LayoutFile(
        name=data["name"],
        lengths=tuple(data["lengths"]),
        cp_size=data["cp_size"],
        tp_size=data["tp_size"],
        rows=tuple(tuple(at and (at[0], at[1]) for at in rank["rows"]) for rank in ranks),
        tokens=tuple(torch.tensor(rank["tokens"]) for rank in ranks),
        labels_of_ranks=tuple(torch.tensor(rank["labels"]) for rank in ranks),
        position_ids=tuple(torch.tensor(rank["position_ids"]) for rank in ranks),
        cu_seqlens_padded=torch.tensor(data["cu_seqlens_padded"], dtype=torch.int32),
    )


def _plan(data: Any) -> PlanFile:
    groups = data.get("groups", [])
    ranks = [rank for group in groups for rank in group["ranks"]]
    if ranks and ranks != list(range(data["world_size"])):
        raise ValueError(f"{data['name']}: groups are not consecutive ranks: {ranks}")
    return PlanFile(
        name=data["name"],
        lengths=tuple(data["lengths"]),
        world_size=data["world_size"],
        max_seqlen_per_dp_cp_rank=data["max_seqlen_per_dp_cp_rank"],
        local_cp_size=data.get("local_cp_size", 0),
        samples=tuple(tuple(group["samples"]) for group in groups),
        error=data.get("error", ""),
    )
