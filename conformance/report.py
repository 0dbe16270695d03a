"""One run of the suite as a file: what was verified, on what, with what outcome.

`docs/report.md` describes the JSON for other tools. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from .contracts import ContractResult
from .page import render_page
from .verdict import CheckResult, Verdict, count

SCHEMA = 1
JSON_NAME = "report.json"
HTML_NAME = "report.html"

T = TypeVar("T")


class ReportError(ValueError):
    """A file is no report; the words name the file and the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Everything one run says.

    Args:
        implementation: the name given with `--impl`.
        megatron: version; empty where no Megatron took part.
        megatron_path: the folder given with `--megatron-path`; empty for the installed one.
        transport: `cpu`, `gpu` and so on. dtype: of the model.
        stock: nothing of ours was bound to Megatron's modules.
        seconds: wall time of the run.
        cases: one entry a check, in the order they ran. contracts: those that were looked at.
    """

    implementation: str
    megatron: str
    torch: str
    python: str
    transport: str
    dtype: str
    stock: bool
    seconds: float
    cases: tuple[CheckResult, ...]
    profile: str = "default"
    seed: int = 0
    megatron_path: str = ""
    contracts: tuple[ContractResult, ...] = ()

    def to_json(self) -> str:
        return json.dumps(self._plain(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "report") -> Report:
        """Read what `to_json` wrote.

        Args:
            source: the name of the file, for the error.
        Raises:
            ReportError: no JSON, another schema, or a key that is missing or of another type.
        """
        return _report(_parse(text, source), source)

    def write(self, folder: str | Path) -> None:
        """Write `report.json` and `report.html`; neither is ever seen half written."""
        write_file(Path(folder) / JSON_NAME, self.to_json())
        write_file(Path(folder) / HTML_NAME, render_page([self]))

    def _plain(self) -> dict[str, object]:
        first = ("implementation", "megatron", "torch", "python", "transport", "dtype", "stock")
        return {
            "schema": SCHEMA,
            **{key: getattr(self, key) for key in first},
            "seconds": round(self.seconds, 3),
            "cases": [dataclasses.asdict(_finite(result)) for result in self.cases],
            "summary": count(self.cases),
            "profile": self.profile,
            "seed": self.seed,
            "megatron_path": self.megatron_path,
            "contracts": [
                {
                    "name": one.name,
                    "promise": one.promise,
                    "verdict": one.verdict,
                    "cases": dict(one.cases),
                    "reason": one.reason,
                }
                for one in self.contracts
            ],
        }


def read_reports(path: str | Path) -> list[Report]:
    """The reports in a file: one (`report.json`) or a list (`report-all.json`).

    Raises:
        ReportError: as `Report.from_json`. OSError: the file cannot be read.
    """
    data = _parse(Path(path).read_text(encoding="utf-8"), str(path))
    if not isinstance(data, list):
        return [_report(data, str(path))]
    return [_report(item, f"{path}: [{index}]") for index, item in enumerate(data)]


def reports_json(reports: Sequence[Report]) -> str:
    """The reports of several versions as one JSON list."""
    return json.dumps([report._plain() for report in reports], indent=1, allow_nan=False) + "\n"


def write_file(path: Path, text: str) -> None:
    """Write beside the file, then rename: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        Path(name).chmod(0o644)  # mkstemp gives 0600, and CI publishes these files
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _finite(result: CheckResult) -> CheckResult:
    """JSON has no NaN and no infinity: null, and the reason says what it was."""
    numbers = {"error": result.error, "budget": result.budget}
    lost = {
        name: number
        for name, number in numbers.items()
        if number is not None and not math.isfinite(number)
    }
    if not lost:
        return result
    words = ", ".join(f"{name} is {number}" for name, number in lost.items())
    return dataclasses.replace(
        result,
        error=None if "error" in lost else result.error,
        budget=None if "budget" in lost else result.budget,
        reason=f"{result.reason} ({words})" if result.reason else words,
    )


def _parse(text: str, source: str) -> object:
    def refuse(constant: str) -> NoReturn:
        raise ReportError(f"{source}: holds {constant}, which is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ReportError(f"{source}: not JSON: {error}") from error


def _report(data: object, source: str) -> Report:
    if not isinstance(data, dict):
        raise ReportError(f"{source}: holds {_short(data)}, not an object with the key 'schema'")
    schema = data.get("schema")
    if schema != SCHEMA:
        raise ReportError(f"{source}: 'schema' is {_short(schema)}; this version reads {SCHEMA}")
    cases = tuple(
        _check_result(item, f"{source}: cases[{index}]")
        for index, item in enumerate(_value(data, "cases", list, source))
    )
    summary = _value(data, "summary", dict, source)
    if summary != count(cases):
        raise ReportError(f"{source}: 'summary' is {summary}, but its cases give {count(cases)}")
    return Report(
        implementation=_value(data, "implementation", str, source),
        megatron=_value(data, "megatron", str, source),
        torch=_value(data, "torch", str, source),
        python=_value(data, "python", str, source),
        transport=_value(data, "transport", str, source),
        dtype=_value(data, "dtype", str, source),
        stock=_value(data, "stock", bool, source),
        seconds=_number(data, "seconds", source),
        cases=cases,
        profile=_value(data, "profile", str, source) if "profile" in data else "default",
        seed=_value(data, "seed", int, source) if "seed" in data else 0,
        megatron_path=(
            _value(data, "megatron_path", str, source) if "megatron_path" in data else ""
        ),
        contracts=tuple(
            _contract_result(item, f"{source}: contracts[{index}]")
            for index, item in enumerate(
                _value(data, "contracts", list, source) if "contracts" in data else ()
            )
        ),
    )


def _contract_result(data: object, source: str) -> ContractResult:
    if not isinstance(data, dict):
        raise ReportError(f"{source} is {_short(data)}, not an object")
    cases = _value(data, "cases", dict, source)
    result = ContractResult(
        name=_value(data, "name", str, source),
        promise=_value(data, "promise", str, source),
        cases={id: _verdict(cases, id, f"{source}: cases") for id in cases},
        reason=_value(data, "reason", str, source),
    )
    if _verdict(data, "verdict", source) is not result.verdict:
        said = _short(data["verdict"])
        raise ReportError(f"{source}: 'verdict' is {said}, but its cases give {result.verdict}")
    return result


def _check_result(data: object, source: str) -> CheckResult:
    if not isinstance(data, dict):
        raise ReportError(f"{source} is {_short(data)}, not an object")
    return CheckResult(
        id=_value(data, "id", str, source),
        check=_value(data, "check", str, source),
        lengths=_integers(data, "lengths", source),
        world=_value(data, "world", int, source),
        cp=_integers(data, "cp", source),
        padding=_value(data, "padding", str, source),
        verdict=_verdict(data, "verdict", source),
        error=_number_or_none(data, "error", source),
        budget=_number_or_none(data, "budget", source),
        where=_value(data, "where", str, source),
        reason=_value(data, "reason", str, source),
        rerun=_value(data, "rerun", str, source),
    )


def _verdict(data: Mapping[str, object], key: str, source: str) -> Verdict:
    verdict = _value(data, key, str, source)
    if verdict not in {known.value for known in Verdict}:
        raise ReportError(f"{source}: {key!r} is {_short(verdict)}, not {'/'.join(Verdict)}")
    return Verdict(verdict)


def _present(data: Mapping[str, object], key: str, source: str) -> object:
    if key not in data:
        raise ReportError(f"{source}: the key {key!r} is missing")
    return data[key]


def _value(data: Mapping[str, object], key: str, kind: type[T], source: str) -> T:
    value = _present(data, key, source)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ReportError(f"{source}: {key!r} is {_short(value)}, not of type {kind.__name__}")
    return value


def _number(data: Mapping[str, object], key: str, source: str) -> float:
    value = _present(data, key, source)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ReportError(f"{source}: {key!r} is {_short(value)}, not a number")
    return float(value)


def _number_or_none(data: Mapping[str, object], key: str, source: str) -> float | None:
    return None if _present(data, key, source) is None else _number(data, key, source)


def _integers(data: Mapping[str, object], key: str, source: str) -> tuple[int, ...]:
    values = _value(data, key, list, source)
    if not all(type(value) is int for value in values):
        raise ReportError(f"{source}: {key!r} is {_short(values)}, not a list of integers")
    return tuple(values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
