"""The oracle needs torch and nothing else, and its two formulations need nothing of each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
MODULES = sorted(FOLDER.glob("*.py"))
LIST_WHAT_REFERENCE_LOADS = """
import sys, torch, torch.utils.checkpoint
sys.modules["numpy"] = None
before = set(sys.modules)
import reference
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
config = reference.ModelConfig(num_layers=1, hidden_size=4, num_heads=1, num_kv_heads=1,
                               head_dim=4, ffn_size=4, vocab_size=5)
batch = reference.Batch((torch.tensor([1, 2]),), (torch.tensor([True, True]),), (1,))
for evaluate in reference.evaluate, reference.evaluate_packed:
    evaluate(config, reference.random_weights(config, seed=0), batch, reference.Loss())
"""


def _imports(source: str) -> set[str]:
    """Top-level names that a module imports; its own package's modules as `.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            found |= {f".{node.module or alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_imports_torch_and_the_standard_library_only(path: Path) -> None:
    outside = {name for name in _imports(path.read_text()) if not name.startswith(".")}
    assert outside <= {"torch", *sys.stdlib_module_names}


def test_the_packed_formulation_shares_only_data_with_the_other() -> None:
    ours = {name for name in _imports((FOLDER / "packed.py").read_text()) if name[0] == "."}
    assert ours == {".batch", ".config", ".weights"}


def test_import_check_sees_every_form_of_import() -> None:
    source = "import numpy.linalg as la\ndef f():\n  from impl.a import b\nfrom . import model\n"
    assert _imports(source) == {"numpy", "impl", ".model"}


def test_a_fresh_process_loads_and_runs_reference_without_numpy() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIST_WHAT_REFERENCE_LOADS],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) <= {"reference", "torch", *sys.stdlib_module_names}
