"""The commands a person types; `python -m tools --help` lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conformance.megatron_path import find_megatron
from conformance.page import render_page
from conformance.report import HTML_NAME, ReportError, read_reports, write_file
from conformance.terminal import print_reports

from . import versions
from .suite import run_suite

app = typer.Typer(
    help="Tools for dynamic context parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# What a command does not know goes on to pytest, or to the suite of every version.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.callback()
def _commands() -> None:
    """Keeps commands named even while there is only one."""


def _with_megatron(path: Path | None) -> Path | None:
    """The absolute folder: the suite runs in another one than the user."""
    try:
        return path and find_megatron(path).folder
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command(context_settings=_PASS_ON)
def verify(
    context: typer.Context,
    impl: Annotated[
        str, typer.Option(help="Dotted name of the module under test.")
    ] = "conformance.adapters.impl",
    profile: Annotated[str, typer.Option(help="How much: quick, default or deep.")] = "default",
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case alone; may be repeated.")
    ] = None,
    expression: Annotated[
        str | None, typer.Option("-k", help="Only what matches, as in pytest.")
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(help="Your own batches, a JSON object a line.", exists=True, dir_okay=False),
    ] = None,
    megatron_path: Annotated[
        Path | None,
        typer.Option(
            help="Megatron-LM checkout or unpacked wheel to verify instead of the installed one.",
            callback=_with_megatron,
        ),
    ] = None,
    stock: Annotated[
        bool, typer.Option(help="Bind nothing of ours: what does Megatron do by itself?")
    ] = False,
    report_dir: Annotated[Path, typer.Option(help="Where report.json and report.html go.")] = Path(
        "report"
    ),
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that one case may take.", min=0)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything drawn at random.")] = 0,
) -> None:
    """Compare an implementation with the oracle. Exit 0: verified; 1: wrong; 2: nothing verified.

    Any other option goes to pytest: `python -m tools verify -x -rs`.
    """
    options = [f"--impl={impl}", f"--profile={profile}", f"--seed={seed}"]
    options += [f"--case={one}" for one in case or ()]
    options += [f"-k={expression}"] if expression else []
    options += [f"--batch={batch.resolve()}"] if batch else []
    options += [f"--megatron-path={megatron_path}"] if megatron_path else []
    options += ["--stock"] if stock else []
    options += [f"--case-timeout={timeout:g}"] if timeout is not None else []
    raise typer.Exit(run_suite([*options, *context.args], report_dir=report_dir.resolve()))


@app.command(context_settings=_PASS_ON)
def verify_all(context: typer.Context) -> None:
    """Run `verify` on every supported Megatron-Core, each in its tox environment; one table.

    Options are those of `verify`. Exit 0: all verified; 1: one is wrong; 2: one was not verified.
    """
    given = {word.partition("=")[0] for word in context.args}
    if "--report-dir" in given:
        raise typer.BadParameter("verify-all writes report/ and a folder in it for every version")
    if "--megatron-path" in given:
        raise typer.BadParameter(
            "verify-all verifies released versions; give --megatron-path to verify"
        )
    raise typer.Exit(versions.verify_all(context.args))


@app.command()
def report(
    files: Annotated[
        list[Path], typer.Argument(help="report.json files.", exists=True, dir_okay=False)
    ],
    report_dir: Annotated[
        Path | None,
        typer.Option(help="Where report.html goes; beside the first file if left out."),
    ] = None,
) -> None:
    """Print reports side by side as one matrix, and draw the page again."""
    try:
        reports = [one for path in files for one in read_reports(path)]
    except (ReportError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error)) from error
    page = (report_dir or files[0].parent) / HTML_NAME
    write_file(page, render_page(reports))
    print_reports(reports, html=str(page))
