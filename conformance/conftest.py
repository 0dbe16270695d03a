"""Options of the suite, its one session, and the report that a run leaves behind."""

from __future__ import annotations

import dataclasses
import json
import platform
import shlex
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from .batch_file import Document, batches, read_documents
from .build import TaskBuilder
from .case import Case, parse_case
from .contracts import Contract, Proof, contract_results
from .megatron_path import MegatronAt, find_megatron, import_from
from .pool import RankPools
from .profiles import PROFILES, profile_cases, rows, text_cases
from .protocol import load
from .report import Report
from .suite import Suite
from .terminal import print_reports
from .verdict import CheckResult, Verdict

IMPL = "conformance.adapters.impl"
STOCK = "conformance.adapters.stock"
ORACLE = "conformance.adapters.reference"
TEXTS = Path(__file__).parents[1] / "fixtures" / "texts" / "devils_dictionary.jsonl"
TEXT_TOKENS = 2048  # tokens of real text that run as one batch
_RESULTS = "conformance results"  # the names under which a test hands over what it found
_PROOF = "conformance proof"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--impl", default=None, help=f"module under test, default {IMPL}")
    group.addoption(
        "--megatron-path",
        type=Path,
        help="Megatron-LM checkout or unpacked wheel to verify instead of the installed one",
    )
    group.addoption("--stock", action="store_true", help="bind nothing: Megatron as released")
    group.addoption("--profile", choices=PROFILES, default="default", help="how much to run")
    group.addoption(
        "--case", action="append", default=[], help="run this case id; may be repeated"
    )
    group.addoption("--batch", type=Path, help="JSONL of your own documents")
    group.addoption("--report-dir", type=Path, default=Path("report"), help="where reports go")
    group.addoption("--case-timeout", type=float, default=60.0, help="seconds for one case")
    group.addoption("--seed", type=int, default=0, help="of weights, tokens and masks")


@dataclasses.dataclass
class _Run:
    """What was asked for, and what a run gathers for its report."""

    started: float
    implementation: ModuleType
    texts: tuple[tuple[Document, ...], ...]
    cases: tuple[Case, ...]
    megatron: MegatronAt | None = None
    results: list[CheckResult] = dataclasses.field(default_factory=list)
    recorded: set[str] = dataclasses.field(default_factory=set)
    proofs: list[Proof] = dataclasses.field(default_factory=list)
    is_conformance: bool = False


_RUN = pytest.StashKey[_Run]()


def pytest_configure(config: pytest.Config) -> None:
    """Check everything that was typed before anything runs."""
    try:
        megatron = _megatron(config)  # before anything imports the installed one
        implementation = load(_implementation(config))
        if megatron and _installed_megatron(implementation) == "none":
            raise ValueError(f"{implementation.__name__} is on no Megatron: no --megatron-path")
        texts = _texts(config)
        config.stash[_RUN] = _Run(
            started=time.monotonic(),
            implementation=implementation,
            texts=texts,
            cases=_cases(config, texts),
            megatron=megatron,
        )
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        run = metafunc.config.stash[_RUN]
        run.is_conformance = True
        metafunc.parametrize("case", run.cases, ids=[case.id for case in run.cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the contracts' cases keep those that were asked for."""
    asked = {case.id for case in config.stash[_RUN].cases}
    left_out = [item for item in items if _proves(item) not in (None, *asked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _proves(item: pytest.Item) -> str | None:
    """The case that a contract's test is about."""
    if "prove" not in getattr(item, "fixturenames", ()):
        return None
    return str(item.callspec.params["id"])  # type: ignore[attr-defined]


def _cases(config: pytest.Config, texts: tuple[tuple[Document, ...], ...]) -> tuple[Case, ...]:
    profile = config.getoption("profile")
    if config.getoption("case"):
        cases = tuple(map(parse_case, config.getoption("case")))
    elif config.getoption("batch"):
        cases = text_cases(len(texts), profile=profile)
    else:
        cases = profile_cases(profile, num_texts=len(texts))
    builder = TaskBuilder(load(ORACLE).oracle, texts=texts)
    for case in cases:
        builder.check(case)
    return cases


def _texts(config: pytest.Config) -> tuple[tuple[Document, ...], ...]:
    path = config.getoption("batch") or TEXTS
    return batches(read_documents(path), max_tokens=TEXT_TOKENS)


def _implementation(config: pytest.Config) -> str:
    if config.getoption("stock"):
        if config.getoption("impl") not in (None, IMPL):
            raise ValueError("--stock chooses the implementation itself; leave --impl out")
        return STOCK
    return str(config.getoption("impl") or IMPL)


def _megatron(config: pytest.Config) -> MegatronAt | None:
    path: Path | None = config.getoption("megatron_path")
    if path is None:
        return None
    megatron = find_megatron(path)
    import_from(megatron)
    return megatron


def _installed_megatron(module: ModuleType) -> str:
    return str(module.versions()["megatron"]) if hasattr(module, "versions") else ""


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    """The implementation under test and the oracle, with rank pools that live for the session."""
    config = request.config
    oracle = load(ORACLE).oracle
    name = _implementation(config)
    torch.set_num_threads(1)  # the ranks need the other cores, and toy matrices need no more
    with RankPools(timeout_s=config.getoption("case_timeout"), max_ranks=24) as pools:
        yield Suite(
            implementation=name,
            pools=pools,
            oracle=oracle,
            builder=TaskBuilder(oracle, config.getoption("seed"), config.stash[_RUN].texts),
            rerun=_rerun(config),
        )


def _rerun(config: pytest.Config) -> str:
    options = ["--stock"] if config.getoption("stock") else []
    options += (
        [f"--impl {_implementation(config)}"]
        if _implementation(config) not in (IMPL, STOCK)
        else []
    )
    if megatron := config.stash[_RUN].megatron:
        options += [f"--megatron-path {shlex.quote(str(megatron.folder))}"]
    options += [f"--batch {config.getoption('batch')}"] if config.getoption("batch") else []
    options += [f"--seed {config.getoption('seed')}"] if config.getoption("seed") else []
    return " ".join(["python -m tools verify", *options, "--case"])


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Any:
    """Hands results over to the report, from an xdist worker too; fails the test if one did."""

    def hand_over(results: list[CheckResult]) -> None:
        _hand_over(request, results)
        failed = [result for result in results if result.verdict is Verdict.FAIL]
        if failed:
            lines = [f"{r.id} {r.check}: {r.reason}; {r.where}\n  {r.rerun}" for r in failed]
            pytest.fail("\n".join(lines), pytrace=False)
        if not any(result.verdict is Verdict.PASS for result in results):
            pytest.skip("; ".join(f"{r.verdict.value}: {r.reason}" for r in results))

    return hand_over


@pytest.fixture
def prove(request: pytest.FixtureRequest, suite: Suite) -> Any:
    """Verifies a case, if nobody has, and fails the test if it breaks a contract."""

    def prove_by(contract: Contract, id: str) -> None:
        results = suite.verify(parse_case(id))
        _hand_over(request, results)
        proof = contract.proof(id, results)
        request.node.user_properties.append((_PROOF, json.dumps(dataclasses.asdict(proof))))
        if proof.verdict is Verdict.FAIL:
            rerun = f"{_rerun(request.config)} {id}"
            words = f"{contract.name}: {id}: {proof.reason}\n  {contract.promise}\n  {rerun}"
            pytest.fail(words, pytrace=False)
        if proof.verdict is not Verdict.PASS:
            pytest.skip(f"{proof.verdict.value}: {proof.reason}")

    return prove_by


def _hand_over(request: pytest.FixtureRequest, results: list[CheckResult]) -> None:
    plain = [dataclasses.asdict(result) for result in results]
    request.node.user_properties.append((_RESULTS, json.dumps(plain)))


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Collector(session.config.stash[_RUN]))


class _Collector:
    """Takes results out of test reports, wherever the tests ran."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == _RESULTS:
                self._record([_result(plain) for plain in json.loads(str(value))])
            elif name == _PROOF:
                plain = json.loads(str(value))
                self.run.proofs.append(Proof(**{**plain, "verdict": Verdict(plain["verdict"])}))

    def _record(self, results: list[CheckResult]) -> None:
        """Note what a case gave, once: contracts and other workers hand it over again."""
        self.run.is_conformance = True
        self.run.results += [one for one in results if one.id not in self.run.recorded]
        self.run.recorded.update(one.id for one in results)


def _result(plain: dict[str, Any]) -> CheckResult:
    sequences = {key: tuple(plain[key]) for key in ("lengths", "cp")}
    return CheckResult(**{**plain, **sequences, "verdict": Verdict(plain["verdict"])})


def _in_order(results: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """Reports list the rows of their matrix in one order, whichever ran first."""
    place = {row: number for number, row in enumerate(rows())}
    return tuple(sorted(results, key=lambda result: place.get(result.padding, len(place))))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash[_RUN]
    if not run.is_conformance or hasattr(config, "workerinput") or config.option.collectonly:
        return
    report = _report(config, run)
    folder: Path = config.getoption("report_dir")
    report.write(folder)
    terminalreporter.write_line("")
    print_reports([report], html=str(folder / "report.html"))


def _report(config: pytest.Config, run: _Run) -> Report:
    module = run.implementation
    return Report(
        implementation=getattr(module, "NAME", module.__name__),
        megatron=run.megatron.version if run.megatron else _installed_megatron(module),
        torch=version("torch"),
        python=platform.python_version(),
        transport="cpu",
        dtype="float64",
        stock=getattr(module, "STOCK", False),
        seconds=time.monotonic() - run.started,
        cases=_in_order(run.results),
        profile=config.getoption("profile"),
        seed=config.getoption("seed"),
        megatron_path=str(run.megatron.folder) if run.megatron else "",
        contracts=tuple(contract_results(run.proofs)),
    )
