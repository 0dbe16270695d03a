"""The walls stand where CONTRIBUTING.md says: each rule has an import that it refuses."""

from pathlib import Path, PurePosixPath

import pytest

from tools import walls

CHECKOUT = Path(__file__).resolve().parents[2]


def _checkout(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


REFUSED = [
    ("reference/rope.py", "import numpy"),
    ("reference/rope.py", "from impl.thd import pack"),
    ("reference/rope.py", "import transformers"),
    ("reference/tests/test_rope.py", "import impl"),
    ("impl/pack.py", "import megatron.core"),
    ("impl/pack.py", "import reference"),
    ("impl/pack.py", "import conformance.case"),
    ("impl/pack.py", "import tools"),
    ("impl/megatron/rope.py", "import reference"),
    ("impl/megatron/rope.py", "import transformers"),
    ("impl/tests/test_pack.py", "from reference import zigzag"),
    ("impl/megatron/tests/test_rope.py", "from conformance import case"),
    ("conformance/pool.py", "import impl.plan"),
    ("conformance/pool.py", "import reference"),
    ("conformance/pool.py", "import numpy"),
    ("conformance/pool.py", "import tools.cli"),
    ("conformance/adapters/impl.py", "import reference"),
    ("conformance/adapters/impl.py", "import megatron.core"),
    ("conformance/adapters/impl_low.py", "import reference"),
    ("conformance/adapters/stock.py", "import reference"),
    ("conformance/adapters/reference.py", "import impl"),
    ("conformance/adapters/reference.py", "import megatron"),
    ("conformance/adapters/verl.py", "import impl"),
    ("conformance/selftest/test_mutants.py", "import tools"),
    ("examples/train.py", "import megatron.core"),
    ("examples/train.py", "from conformance import case"),
    ("examples/tests/test_train.py", "import tools"),
    ("impl/engine.py", "import examples.train"),
]


@pytest.mark.parametrize(("name", "source"), REFUSED)
def test_import_across_a_wall_is_refused(tmp_path: Path, name: str, source: str) -> None:
    (problem,) = walls.problems(_checkout(tmp_path, {name: source}))

    assert problem.startswith(f"{name}:1 imports {source.split()[1].partition('.')[0]}; ")


def test_every_rule_has_an_import_that_it_refuses() -> None:
    covered = {walls.rule_of(PurePosixPath(name)).folder for name, _ in REFUSED}

    # A tool, and a test of a tool, may import everything.
    assert covered == {rule.folder for rule in walls.RULES} - {"tools", "tools/tests"}


ALLOWED = [
    ("reference/rope.py", "import math, torch.nn"),
    ("reference/tests/test_rope.py", "import transformers, pytest, reference"),
    ("impl/pack.py", "import torch, numpy, yaml, safetensors.torch, impl.plan"),
    ("impl/pack.py", "from .megatron import groups"),
    ("impl/megatron/rope.py", "import megatron.core, transformer_engine, flash_attn, torch"),
    ("impl/megatron/rope.py", "from ..plan import Plan"),
    ("conformance/pool.py", "import torch, pytest, rich, jinja2, hypothesis"),
    ("conformance/adapters/impl.py", "import impl, torch"),
    ("conformance/adapters/reference.py", "import reference, torch"),
    ("conformance/adapters/verl.py", "import verl, conformance.protocol"),
    ("conformance/selftest/test_mutants.py", "import reference, impl, conformance, expecttest"),
    ("tools/cli.py", "import reference, impl, conformance, typer, megatron"),
    ("examples/train.py", "import impl.engine, reference, torch, yaml, rich, matplotlib.figure"),
]


@pytest.mark.parametrize(("name", "source"), ALLOWED)
def test_import_inside_the_walls_is_allowed(tmp_path: Path, name: str, source: str) -> None:
    assert walls.problems(_checkout(tmp_path, {name: source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import reference",
        "def f():\n    from reference.rope import rotate",
        "if True:\n    from ..reference import rope",
        "if True:\n    from .. import reference",
        "import importlib\nimportlib.import_module('reference.rope')",
        "from importlib import import_module\nimport_module(name='reference')",
        "def f():\n    return __import__('reference')",
        "import os, \\\n    sys\nimport reference",
    ],
)
def test_no_way_of_importing_is_overlooked(tmp_path: Path, source: str) -> None:
    (problem,) = walls.problems(_checkout(tmp_path, {"impl/pack.py": source}))

    line = 3 if "sys" in source else 2
    assert problem.startswith(f"impl/pack.py:{line} imports reference; ")


@pytest.mark.parametrize(
    ("module", "who"),
    [
        ("megatron.core", "only impl/megatron may"),
        ("reference.rope", "only conformance/adapters/reference, tools, examples may"),
        ("rich.table", "only conformance, examples may"),
        ("transformers", "only tests, adapters and tools may"),
    ],
)
def test_message_says_where_what_and_who_may(tmp_path: Path, module: str, who: str) -> None:
    root = _checkout(tmp_path, {"impl/pack.py": "\n" * 11 + f"import {module}"})

    assert walls.problems(root) == [
        f"impl/pack.py:12 imports {module.partition('.')[0]}; {who} (CONTRIBUTING.md, walls)"
    ]


def test_code_in_fixtures_is_refused(tmp_path: Path) -> None:
    root = _checkout(tmp_path, {"fixtures/plans/make.py": "", "fixtures/plans/a.json": "{}"})

    assert walls.problems(root) == ["fixtures/plans/make.py: fixtures/ holds data only"]


def test_code_that_cannot_be_parsed_is_reported(tmp_path: Path) -> None:
    (problem,) = walls.problems(_checkout(tmp_path, {"impl/pack.py": "x = 1\ndef f(:"}))

    assert problem.startswith("impl/pack.py:2 cannot be parsed: ")


@pytest.mark.parametrize(
    ("source", "accepted"),
    [
        ("x = 1\n" * 300, True),
        ("x = 1\n" * 301, False),
        ("# Longer than 300 lines: one table.\n" + "x = 1\n" * 300, True),
        ('"""A table.\n\nLonger than 300 lines: it is one table.\n"""\n' + "x = 1\n" * 300, True),
        ("# Longer than 300 lines:\n" + "x = 1\n" * 300, False),
        ("x = 1\n" * 300 + "# Longer than 300 lines: too late to be read.\n", False),
    ],
    ids=["300", "301", "comment", "docstring", "no-reason", "reason-at-the-end"],
)
def test_long_file_says_why(tmp_path: Path, source: str, accepted: bool) -> None:
    found = walls.problems(_checkout(tmp_path, {"impl/pack.py": source}))

    assert (found == []) is accepted


def test_this_checkout_keeps_its_walls() -> None:
    assert walls.problems(CHECKOUT) == []
