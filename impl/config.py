"""Settings of dynamic CP, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from .rules import LAYOUTS

SCHEDULERS = ("uniform", "balanced", "megatron")


@dataclass(frozen=True, kw_only=True)
class DynamicCPConfig:
    """How dynamic context parallelism cuts a batch.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that a rank may hold. Of one sequence, before padding,
            for "uniform": a micro-batch gets the smallest CP size at which its longest sequence
            keeps to it. Of a whole pack, padding included, for the others.
        dynamic_context_parallel: off means that every micro-batch runs at `min_cp_size`.
        scheduler: "uniform", one micro-batch with one CP size for all its groups; "balanced",
            micro-batches of groups of mixed sizes; "megatron", what the installed one plans.
        layout: "zigzag", chunk r and its mirror on rank r; "contiguous", chunk r on rank r, which
            Megatron refuses above CP size 1. For `PackRules.layout`.
        min_cp_size, max_cp_size: bounds on the CP size; no upper bound if None.
    Raises:
        ValueError: a value that cannot be, by name.

    >>> DynamicCPConfig(max_seqlen_per_dp_cp_rank=4096).min_cp_size
    1
    """

    max_seqlen_per_dp_cp_rank: int
    dynamic_context_parallel: bool = True
    scheduler: str = "uniform"
    layout: str = "zigzag"
    min_cp_size: int = 1
    max_cp_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_seqlen_per_dp_cp_rank", "min_cp_size", "max_cp_size"):
            value = getattr(self, name)
            if value is None and name == "max_cp_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if not isinstance(self.dynamic_context_parallel, bool):
            raise ValueError(
                f"dynamic_context_parallel={self.dynamic_context_parallel!r} must be true or false"
            )
        if self.max_cp_size is not None and self.max_cp_size < self.min_cp_size:
            raise ValueError(
                f"max_cp_size={self.max_cp_size} is below min_cp_size={self.min_cp_size}"
            )
        for name, known in (("scheduler", SCHEDULERS), ("layout", LAYOUTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}"
                )

    @property
    def highest_cp_size(self) -> int | None:
        """Upper bound on the CP size: with dynamic CP off, the lower one."""
        return self.max_cp_size if self.dynamic_context_parallel else self.min_cp_size

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> DynamicCPConfig:
        """Settings from a mapping, for example a section of a trainer's configuration."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if "max_seqlen_per_dp_cp_rank" not in settings:
            raise ValueError("max_seqlen_per_dp_cp_rank is missing: tokens of a sequence per rank")
        return cls(**settings)

    @classmethod
    def from_yaml(cls, path: str | Path) -> DynamicCPConfig:
        """Settings from a YAML file whose top level is a mapping."""
        settings = yaml.safe_load(Path(path).read_text())
        if not isinstance(settings, Mapping):
            raise ValueError(f"{path}: expected a mapping of settings, got {settings!r}")
        return cls.from_mapping(settings)
