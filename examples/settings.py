"""What `train.yaml` says, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from impl.config import DynamicCPConfig
from impl.megatron.model import GPTConfig, check_divisible
from impl.parallel import ParallelLayout
from impl.planner import make_plan
from reference import ModelConfig

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with clipping, under the names of Megatron's `OptimizerConfig`.

    Args:
        clip_grad: largest norm of the gradients; 0 for no clipping.
        decoupled_weight_decay: as in AdamW.
    """

    lr: float
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "decoupled_weight_decay":
                if not isinstance(value, bool):
                    raise ValueError(f"{name}={value!r} must be true or false")
            elif not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(
                    f"{name}={value!r} must be a number of at least 0 (YAML takes 1e-3 for text; "
                    "write 1.0e-3)"
                )
        if max(self.adam_beta1, self.adam_beta2) >= 1:
            raise ValueError(
                f"adam_beta1={self.adam_beta1} and adam_beta2={self.adam_beta2} must be below 1"
            )


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What a step learns from.

    Args:
        texts: JSON lines with `input_ids` and `loss_mask`; fixtures/README.md has the format.
        tokens: of a step, at most, unless one document alone has more.
        max_seqlen: tokens of a document, above which it is cut.
    """

    texts: str
    tokens: int
    max_seqlen: int

    def __post_init__(self) -> None:
        _check_text("texts", self.texts)
        _check_whole("tokens", self.tokens)
        _check_whole("max_seqlen", self.max_seqlen)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run; each section is what it configures."""

    model: GPTConfig
    dynamic_cp: DynamicCPConfig
    parallel: ParallelLayout
    optimizer: Adam
    batch: BatchSettings
    steps: int
    seed: int
    out: Path

    @property
    def oracle_model(self) -> ModelConfig:
        """The same model, as the reference takes it."""
        return ModelConfig(**asdict(self.model))

    def check_ranks(self, world_size: int) -> None:
        """Whether that many ranks can run it, as far as that is known before they meet.

        Raises:
            ValueError: what does not divide, or a document that may not fit.
        """
        places = self.parallel.num_dp_cp_ranks(world_size)
        check_divisible(self.model, self.parallel)
        make_plan(
            (self.batch.max_seqlen,),
            config=self.dynamic_cp,
            world_size=places,
            tp_size=self.parallel.pack_tp_size,
        )


def read_settings(path: Path, changes: Sequence[str] = ()) -> Settings:
    """Settings from a YAML file.

    Args:
        changes: such as `parallel.tp_size=2`, in place of what the file says.
    Raises:
        ValueError: what cannot be, by section and name.
    """
    values = _parsed(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"expected sections such as `model:`, got {values!r}")
    for change in changes:
        _apply(values, change)
    names = {field.name for field in fields(Settings)}
    _check_names("", values, known=names, needed=names)
    _check_whole("steps", values["steps"])
    _check_whole("seed", values["seed"], at_least=0)
    _check_text("out", values["out"])
    _section("model", ModelConfig, values)  # checks sizes more closely than the next
    return Settings(
        model=_section("model", GPTConfig, values),
        dynamic_cp=_section("dynamic_cp", DynamicCPConfig, values),
        parallel=_section("parallel", ParallelLayout, values),
        optimizer=_section("optimizer", Adam, values),
        batch=_section("batch", BatchSettings, values),
        steps=values["steps"],
        seed=values["seed"],
        out=Path(values["out"]),
    )


def _section(name: str, kind: type[Section], values: Mapping[str, Any]) -> Section:
    section = values[name]
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} must be a section of settings, got {section!r}")
    of_kind = fields(kind)  # type: ignore[arg-type]
    needed = {field.name for field in of_kind if field.default is MISSING}
    _check_names(f"{name}: ", section, known={field.name for field in of_kind}, needed=needed)
    try:
        return kind(**{key: _as_tuple(value) for key, value in section.items()})
    except (ValueError, TypeError) as error:  # the latter if text is compared with a number
        raise ValueError(f"{name}: {error}") from error


def _as_tuple(value: Any) -> Any:
    """YAML has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _check_names(where: str, found: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    if unknown := sorted(set(found) - known):
        raise ValueError(
            f"{where}unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    if missing := sorted(needed - set(found)):
        raise ValueError(f"{where}{', '.join(missing)} missing")


def _check_whole(name: str, value: Any, *, at_least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r} must be a path")


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error


def _apply(values: dict[str, Any], change: str) -> None:
    path, equals, value = change.partition("=")
    section, _, name = path.rpartition(".")
    target = values.get(section) if section else values
    if not equals or not isinstance(target, dict):
        raise ValueError(f"--set {change}: write section.name=value, or name=value")
    target[name] = _parsed(value)
