"""Interpreter-wide state that a task must leave as it found it.

Dynamic CP binds a group, a dtype or a function for one call; what it fails to put back changes
the next case, far from the code that is wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

_TENSOR_METHODS = ("float", "double", "half", "bfloat16", "to", "type", "cuda", "cpu")
# Written by the interpreter itself, whatever a task does.
_INTERPRETER_NAMES = {
    "__annotations__",
    "__annotations_cache__",
    "__slotnames__",  # cached by the first copy.copy of an instance
    "__warningregistry__",
}
_ABSENT = object()


@dataclass(frozen=True)
class Snapshot:
    """`settings` are compared by value, `objects` by identity; it keeps the objects alive."""

    settings: dict[str, object]
    objects: dict[str, object]

    def changes_to(self, later: Snapshot) -> list[str]:
        """What differs later, one line each, in words."""
        settings = [
            f"{name} {value} -> {later.settings[name]}"
            for name, value in self.settings.items()
            if value != later.settings[name]
        ]
        names = dict.fromkeys([*self.objects, *later.objects])
        pairs = ((n, self.objects.get(n, _ABSENT), later.objects.get(n, _ABSENT)) for n in names)
        return settings + [
            f"{name} {_words(old)} -> {_words(new)}" for name, old, new in pairs if old is not new
        ]


class StateWatch:
    """Takes snapshots of torch's global state and of the attributes of named objects.

    Args:
        names: dotted names of modules or classes whose attributes are compared by identity. A name
            that this version of a package lacks is passed over, since one list serves many.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        found = {name: _find(name) for name in names}
        self._watched = {name: value for name, value in found.items() if value is not _ABSENT}

    def snapshot(self) -> Snapshot:
        objects = _torch_objects()
        for name, watched in self._watched.items():
            objects |= _attributes(name, watched)
        return Snapshot(_torch_settings(), objects)


def _torch_settings() -> dict[str, object]:
    return {
        "torch default dtype": torch.get_default_dtype(),
        "torch default device": torch.get_default_device(),
        "torch threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "autocast on cuda": torch.is_autocast_enabled("cuda"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def _torch_objects() -> dict[str, object]:
    objects: dict[str, object] = {
        f"torch.Tensor.{name}": getattr(torch.Tensor, name) for name in _TENSOR_METHODS
    }
    objects["torch.cuda.current_device"] = torch.cuda.current_device
    objects["default process group"] = dist.group.WORLD
    return objects


def _attributes(name: str, watched: object) -> dict[str, object]:
    """Attributes of a module or class; submodules appear when something imports them."""
    return {
        f"{name}.{key}": value
        for key, value in vars(watched).items()
        if key not in _INTERPRETER_NAMES and not isinstance(value, ModuleType)
    }


def _find(name: str) -> object:
    """The object of a dotted name, or `_ABSENT`."""
    parent, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        owner = _find(parent) if parent else _ABSENT
        return getattr(owner, last, _ABSENT)


def _words(value: object) -> str:
    if value is _ABSENT:
        return "(absent)"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    module = getattr(value, "__module__", type(value).__module__)
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"
