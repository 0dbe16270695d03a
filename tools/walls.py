"""The import walls, checked by reading the code: `python -m tools.walls`.

A rule says what a folder may import beside the standard library. Imports inside functions count,
and so do `import_module`, `__import__` and `importorskip` with a literal name. The same walk finds
code in `fixtures/`, and files of more than 300 lines that do not say why.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

OURS = ("reference", "impl", "conformance", "tools", "examples")
MAX_LINES = 300

_MEGATRON = frozenset({"megatron", "transformer_engine", "transformer_engine_torch", "flash_attn"})
_IMPL = frozenset({"torch", "numpy", "yaml", "safetensors"})
_IMPORTERS = frozenset({"import_module", "__import__", "importorskip"})
_WHY_LONG = re.compile(r"longer than 300 lines: \S", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """What the files under `folder` may import beside the standard library.

    Args:
        names: top-level names; None allows every package that is not ours.
        ours: which of our own folders.
    """

    folder: str
    names: frozenset[str] | None
    ours: frozenset[str]


@dataclass(frozen=True)
class Import:
    line: int
    name: str  # absolute, such as `impl.megatron.groups`

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def _rule(folder: str, names: set[str] | frozenset[str] | None, *ours: str) -> Rule:
    return Rule(folder, None if names is None else frozenset(names), frozenset(ours))


# A file obeys the first rule whose folder holds it.
RULES = (
    _rule("reference/tests", None, "reference"),
    _rule("impl/tests", None, "impl"),
    _rule("impl/megatron/tests", None, "impl"),
    _rule("tools/tests", None, *OURS),
    _rule("examples/tests", None, "examples", "impl", "reference"),
    _rule("conformance/selftest", None, "conformance", "reference", "impl"),
    _rule("reference", {"torch"}, "reference"),
    _rule("impl/megatron", _IMPL | _MEGATRON, "impl"),
    _rule("impl", _IMPL, "impl"),
    _rule("conformance/adapters/reference", {"torch"}, "conformance", "reference"),
    _rule("conformance/adapters/impl", _IMPL, "conformance", "impl"),
    _rule("conformance/adapters/stock", _IMPL, "conformance", "impl"),
    _rule("conformance/adapters", None, "conformance"),
    _rule("conformance", {"torch", "pytest", "hypothesis", "rich", "jinja2"}, "conformance"),
    _rule("tools", None, *OURS),
    _rule("examples", {"torch", "yaml", "rich", "matplotlib"}, "examples", "impl", "reference"),
)


def problems(root: Path) -> list[str]:
    """Everything that is wrong under a checkout, one line each, in the order of the files."""
    found = [f"{path}: fixtures/ holds data only" for path in _files(root, "fixtures")]
    for folder in OURS:
        for path in _files(root, folder):
            found += _problems_of_file(root, path)
    return found


def _files(root: Path, folder: str) -> list[PurePosixPath]:
    paths = (path.relative_to(root) for path in (root / folder).rglob("*.py"))
    return sorted(PurePosixPath(path) for path in paths)


def _problems_of_file(root: Path, path: PurePosixPath) -> Iterator[str]:
    source = (root / path).read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"{path}:{error.lineno} cannot be parsed: {error.msg}"
        return
    rule = rule_of(path)
    for found in imports(tree, path):
        if not _allowed(rule, found):
            yield (
                f"{path}:{found.line} imports {found.top}; {_who_may(found.top)} "
                "(CONTRIBUTING.md, walls)"
            )
    lines = source.count("\n")
    if lines > MAX_LINES and not _WHY_LONG.search(_head(source, tree)):
        yield (
            f"{path} has {lines} lines; split it, or say why not in its docstring or first "
            f"comment: `# Longer than {MAX_LINES} lines: ...`"
        )


def rule_of(path: PurePosixPath) -> Rule:
    """The first rule that holds a file; an adapter `impl_low.py` obeys that of `impl.py`."""
    for rule in RULES:
        if path.is_relative_to(rule.folder) or _is_adapter_of(path, rule.folder):
            return rule
    raise ValueError(f"{path} is under none of {', '.join(OURS)}")


def _is_adapter_of(path: PurePosixPath, folder: str) -> bool:
    parent, _, name = folder.rpartition("/")
    if parent != "conformance/adapters" or not path.is_relative_to(parent):
        return False
    first = path.relative_to(parent).parts[0].removesuffix(".py")
    return first == name or first.startswith(f"{name}_")


def imports(tree: ast.AST, path: PurePosixPath) -> Iterator[Import]:
    """Every import of a file, by absolute name, in the order of its lines."""
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [Import(node.lineno, name) for name in _absolute(node, path)]
        elif isinstance(node, ast.Call) and (name := _literal_import(node)):
            found.append(Import(node.lineno, name))
    return iter(sorted(found, key=lambda one: one.line))


def _absolute(node: ast.ImportFrom, path: PurePosixPath) -> list[str]:
    """What `from X import a, b` names; above the top, `..tools` and `.. import tools` are ours."""
    if node.level == 0:
        return [node.module or ""]
    parts = path.parent.parts
    package = parts[: max(0, len(parts) - (node.level - 1))]
    if node.module:
        return [".".join([*package, node.module])]
    return [".".join([*package, alias.name]) for alias in node.names]


def _literal_import(node: ast.Call) -> str | None:
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    arguments = [*node.args, *(word.value for word in node.keywords if word.arg == "name")]
    if called not in _IMPORTERS or not arguments or not isinstance(arguments[0], ast.Constant):
        return None
    name = arguments[0].value
    return name if isinstance(name, str) and not name.startswith(".") else None


def _allowed(rule: Rule, found: Import) -> bool:
    if found.top in sys.stdlib_module_names:
        return True
    if found.top in OURS:
        return found.top in rule.ours
    return rule.names is None or found.top in rule.names


def _who_may(name: str) -> str:
    """The folders that may, tests and its own aside."""
    named = [
        rule.folder
        for rule in RULES
        if not rule.folder.endswith(("tests", "selftest"))
        and not PurePosixPath(rule.folder).is_relative_to(name)
        and (name in rule.ours or name in (rule.names or ()))
    ]
    return f"only {', '.join(named)} may" if named else "only tests, adapters and tools may"


def _head(source: str, tree: ast.Module) -> str:
    """The docstring and the comments above the first statement."""
    first = tree.body[0].lineno if tree.body else len(source)
    comments = [line for line in source.splitlines()[: first - 1] if line.startswith("#")]
    return "\n".join([ast.get_docstring(tree) or "", *comments])


def main() -> int:
    found = problems(Path(__file__).resolve().parents[1])
    for problem in found:
        print(problem)
    print(f"walls: {len(found)} problems" if found else "walls: nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
