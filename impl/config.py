"""Settings of dynamic CP, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from .rules import PackRules, check_whole

SCHEDULERS = ("uniform", "balanced", "megatron")


@dataclass(frozen=True, kw_only=True)
class DynamicCPConfig(PackRules):
    """How dynamic context parallelism cuts a batch.

    Beside what is named here it takes all that `PackRules` does: layout, sequence_multiple,
    pack_multiple, pack_buckets, max_sequences. Megatron refuses layout "contiguous" above CP 1.

    Args:
        max_seqlen_per_dp_cp_rank: tokens that a rank may hold. Of one sequence, before padding,
            for "uniform": a micro-batch gets the smallest CP size at which its longest sequence
            keeps to it. Of a whole pack, padding included, for the others.
        dynamic_context_parallel: off means that every micro-batch runs at `min_cp_size`.
        scheduler: "uniform", micro-batches with one CP size for all their groups; "balanced",
            micro-batches of groups of mixed sizes; "megatron", what the installed one plans.
        micro_batch_samples: for "uniform", samples of a micro-batch of all ranks together, taken
            in input order, the last with what is left; verl's `micro_batch_size_per_gpu` where
            every rank has the whole batch. All samples are one micro-batch if None.
        min_cp_size, max_cp_size: bounds on the CP size; no upper bound if None.
    Raises:
        ValueError: a value that cannot be, by name.

    >>> DynamicCPConfig(max_seqlen_per_dp_cp_rank=4096).min_cp_size
    1
    """

    max_seqlen_per_dp_cp_rank: int
    dynamic_context_parallel: bool = True
    scheduler: str = "uniform"
    micro_batch_samples: int | None = None
    min_cp_size: int = 1
    max_cp_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_seqlen_per_dp_cp_rank", self.max_seqlen_per_dp_cp_rank)
        check_whole("min_cp_size", self.min_cp_size)
        for name in ("max_cp_size", "micro_batch_samples"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if not isinstance(self.dynamic_context_parallel, bool):
            raise ValueError(
                f"dynamic_context_parallel={self.dynamic_context_parallel!r} must be true or false"
            )
        if self.max_cp_size is not None and self.max_cp_size < self.min_cp_size:
            raise ValueError(
                f"max_cp_size={self.max_cp_size} is below min_cp_size={self.min_cp_size}"
            )
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler={self.scheduler!r} is not one of {', '.join(SCHEDULERS)}")
        if self.micro_batch_samples is not None and self.scheduler != "uniform":
            raise ValueError(
                f"micro_batch_samples={self.micro_batch_samples} is for scheduler='uniform'; "
                f"{self.scheduler!r} sizes its micro-batches itself, so leave it out"
            )

    @cached_property
    def rules(self) -> PackRules:
        """What is asked of packs, for whatever packs, unpacks or counts rows."""
        return PackRules(**{field.name: getattr(self, field.name) for field in fields(PackRules)})

    @property
    def highest_cp_size(self) -> int | None:
        """Upper bound on the CP size: with dynamic CP off, the lower one."""
        return self.max_cp_size if self.dynamic_context_parallel else self.min_cp_size

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> DynamicCPConfig:
        """Settings from a mapping, for example a section of a trainer's configuration.

        `pack_buckets` may be a list, as YAML and JSON have no tuples.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        if "max_seqlen_per_dp_cp_rank" not in settings:
            raise ValueError("max_seqlen_per_dp_cp_rank is missing: tokens of a sequence per rank")
        buckets = settings.get("pack_buckets", ())
        as_tuple = tuple(buckets) if isinstance(buckets, list) else buckets
        return cls(**{**settings, "pack_buckets": as_tuple})

    @classmethod
    def from_yaml(cls, path: str | Path) -> DynamicCPConfig:
        """Settings from a YAML file whose top level is a mapping."""
        settings = yaml.safe_load(Path(path).read_text())
        if not isinstance(settings, Mapping):
            raise ValueError(f"{path}: expected a mapping of settings, got {settings!r}")
        return cls.from_mapping(settings)
