"""A Megatron that the user brings: a source checkout, or a wheel unpacked into a folder.

It goes on the path of the suite's process, before what is installed. The fork server and its ranks
take that path over, so all of them import it.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_CORE = Path("megatron", "core", "__init__.py")
_OURS = Path(__file__).resolve().parents[1]
_INFO = Path("megatron", "core", "package_info.py")
_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


@dataclass(frozen=True)
class MegatronAt:
    """`folder` holds `megatron/core`; `version` is as it calls itself, `+commit` in git."""

    folder: Path
    version: str


def find_megatron(path: Path) -> MegatronAt:
    """What is in a folder, found without importing it.

    Raises:
        ValueError: no Megatron-Core, or one that does not say its version.
    """
    folder = path.resolve()
    if not (folder / _CORE).is_file():
        what = "holds no Megatron-Core" if folder.is_dir() else "is no folder"
        meant = [parent for parent in folder.parents if (parent / _CORE).is_file()]
        hint = f"; did you mean {meant[0]}?" if meant else ""
        raise ValueError(
            f"{path} {what}: --megatron-path takes the folder of a Megatron-LM checkout or of an "
            f"unpacked megatron-core wheel, which has {_CORE}{hint}"
        )
    return MegatronAt(folder, _version(folder / _INFO) + _commit(folder))


def import_from(megatron: MegatronAt) -> None:
    """Let every later import of `megatron.core`, here and in ranks, take this one.

    Raises:
        ValueError: another one is imported already, or is found first in spite of the path.
    """
    path = [Path(entry).resolve() for entry in sys.path]
    # after ours: Megatron-LM has a package `tools` too
    sys.path.insert(path.index(_OURS) + 1 if _OURS in path else 0, str(megatron.folder))
    spec = importlib.util.find_spec("megatron.core")  # runs none of its code
    origin = spec.origin if spec else None
    if origin is None or Path(origin).resolve() != (megatron.folder / _CORE).resolve():
        raise ValueError(
            f"--megatron-path {megatron.folder}: megatron.core would still be {origin}; uninstall "
            "what puts that first, or leave the option out"
        )


def _version(info: Path) -> str:
    try:
        body = ast.parse(info.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{info} does not say the version: {error}") from error
    parts = {
        target.id: node.value.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    missing = [name for name in _PARTS if name not in parts]
    if missing:
        raise ValueError(f"{info} does not say the version: it assigns no {', '.join(missing)}")
    major, minor, patch, pre_release = (str(parts[name]) for name in _PARTS)
    return f"{major}.{minor}.{patch}{pre_release}"


def _commit(folder: Path) -> str:
    """The commit of a git checkout: development branches share a number with releases."""
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"+{found.stdout.strip()}"
