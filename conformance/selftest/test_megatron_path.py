"""A Megatron that the user brings is the one that is verified, or is refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.megatron_path import find_megatron
from conformance.report import read_reports

CHECKOUT = Path(__file__).resolve().parents[2]
WITNESS = "conformance.selftest.megatron_witness"
CASE = "ragged-2ranks-cp2"


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """A checkout with as much of Megatron as the option looks at."""
    folder = tmp_path / "my megatron"
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    version = "MAJOR = 9\nMINOR = 8\nPATCH = 7\nPRE_RELEASE = 'rc6'\n"
    (core / "package_info.py").write_text(version + "raise RuntimeError('imported')")
    return folder


def _pytest(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["conformance/test_conformance.py", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, command)],
        cwd=CHECKOUT,
        env={**os.environ, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )


def _import_from(
    folder: Path, after: str = "", *, before: str = "", path: list[Path]
) -> subprocess.CompletedProcess[str]:
    """In a fresh process, since this one may have a Megatron already."""
    program = (
        f"{before}\nfrom pathlib import Path\nfrom conformance import megatron_path as m\n"
        f"m.import_from(m.find_megatron(Path({str(folder)!r})))\n{after}"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_suite_and_ranks_import_the_megatron_that_was_brought(
    brought: Path, tmp_path: Path
) -> None:
    options = ("--impl", WITNESS, "--case", CASE, "--report-dir", tmp_path)
    done = _pytest("--megatron-path", brought, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = read_reports(tmp_path / "report.json")
    core = brought / "megatron" / "core" / "__init__.py"

    assert report.implementation == f"suite: {core}"
    assert [case.reason for case in report.cases] == [f"rank: {core}"]
    assert (report.megatron, report.megatron_path) == ("9.8.7rc6", str(brought))
    assert f"on Megatron-Core 9.8.7rc6 from {brought}, " in done.stdout
    assert report.cases[0].rerun == (
        f"python -m tools verify --impl {WITNESS} --megatron-path '{brought}' --case {CASE}"
    )


def test_suite_refuses_a_path_without_megatron(tmp_path: Path) -> None:
    done = _pytest("--megatron-path", tmp_path, "--report-dir", tmp_path)

    assert done.returncode == 4
    assert f"{tmp_path} holds no Megatron-Core: --megatron-path takes the folder" in done.stderr


def test_suite_refuses_a_megatron_for_what_uses_none(brought: Path, tmp_path: Path) -> None:
    reference = "--impl=conformance.adapters.reference"
    done = _pytest("--megatron-path", brought, reference, "--report-dir", tmp_path)

    assert done.returncode == 4
    assert "conformance.adapters.reference is on no Megatron: no --megatron-path" in done.stderr


def test_version_is_read_and_not_imported(brought: Path) -> None:
    found = find_megatron(brought)

    assert (found.folder, found.version) == (brought, "9.8.7rc6")


def test_version_of_a_git_checkout_ends_with_its_commit(brought: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        command = ["git", "-C", str(brought), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--no-gpg-sign", "-m", "one")

    assert find_megatron(brought).version == f"9.8.7rc6+{git('rev-parse', '--short', 'HEAD')}"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nowhere", "nowhere is no folder: --megatron-path takes the folder of a Megatron-LM"),
        (".", "holds no Megatron-Core: --megatron-path takes the folder of a Megatron-LM"),
        ("my megatron/megatron", "holds no Megatron-Core: .*; did you mean .*/my megatron"),
        ("my megatron/megatron/core/__init__.py", "is no folder: .*; did you mean .*/my megatron"),
    ],
)
def test_wrong_path_is_refused(brought: Path, place: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_megatron(brought.parent / place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "package_info.py does not say the version: .*No such file"),
        ("MAJOR = 1\nMINOR = 2", "does not say the version: it assigns no PATCH, PRE_RELEASE"),
        ("MAJOR =", "does not say the version: invalid syntax"),
    ],
)
def test_megatron_without_a_version_is_refused(
    brought: Path, text: str | None, words: str
) -> None:
    info = brought / "megatron" / "core" / "package_info.py"
    if text is None:
        info.unlink()
    else:
        info.write_text(text)

    with pytest.raises(ValueError, match=words):
        find_megatron(brought)


def test_packages_beside_megatron_do_not_hide_ours(brought: Path) -> None:
    (brought / "tools").mkdir()
    (brought / "tools" / "__init__.py").touch()
    done = _import_from(brought, "import tools; print(tools.__file__)", path=[CHECKOUT])

    assert done.stdout.strip() == str(CHECKOUT / "tools" / "__init__.py"), done.stderr


@pytest.mark.parametrize("before", ["", "import megatron.core"])
def test_another_megatron_that_stays_first_is_refused(
    brought: Path, tmp_path: Path, before: str
) -> None:
    other = tmp_path / "other" / "megatron"
    (other / "core").mkdir(parents=True)
    (other / "core" / "__init__.py").touch()
    if not before:  # a regular package goes before a namespace package, in any order of the path
        (other / "__init__.py").touch()
    done = _import_from(brought, before=before, path=[other.parent, CHECKOUT])

    assert f"megatron.core would still be {other / 'core' / '__init__.py'}" in done.stderr
