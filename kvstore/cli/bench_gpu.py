"""``kvstore bench gpu``: everything that needs a GPU, checked and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from kvstore.bench.gpu_check import STEPS, TESTS, CheckOptions, check
from kvstore.bench.report import print_tables
from kvstore.cli.daemon_process import own_daemon
from kvstore.cli.params import json_option
from kvstore.errors import DeviceError


@click.command()
@click.option(
    "--device", default="cuda:0", show_default=True, help="cuda:1, or simulated: the same steps without a GPU."
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=click.Choice([step.name for step in STEPS]),
    help="Only this; may be given several times.  [default: all]",
)
@click.option(
    "--tests", multiple=True, default=TESTS, show_default=True, help="What the step tests runs, in a checkout."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default="gpu-check.json",
    show_default=True,
    help="The JSON report, written after every step.",
)
@json_option
def gpu(device: str, steps: tuple[str, ...], tests: tuple[str, ...], report: Path, as_json: bool) -> None:
    """Check and measure all that needs a GPU, in at most seven minutes: its link by every way and size, the daemon's
    memory read by kernels, memory shared between processes, attention over host memory, the tests, the sanitizer.

    Exit code 1 if a step failed or a rate that is wanted was not reached.
    """
    options = CheckOptions(device=device, steps=steps, tests=tests, report=report)
    found = check(options, own_daemon, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_tables(_tables(found))
        click.echo(f"report: {report}", err=True)
    if not found["passed"]:
        failed = [name for name, each in found["steps"].items() if each["status"] not in ("passed", "skipped")]
        missed = [each["what"] for each in found["wanted"] if each["passed"] is False]
        raise DeviceError(f"{device} is not as it should be: {', '.join(failed + missed)}; {report} says more")


def _tables(found: dict[str, Any]) -> list[Table]:
    note = ", without a GPU: rates say nothing" if found["simulated"] else ""
    steps = Table("step", "result", "time", "because", title=f"{found['device']}{note}")
    for name, each in found["steps"].items():
        steps.add_row(name, each["status"], f"{each['took_s']:.1f} s", escape(each["reason"]))
    rates = Table("what", "wanted of the link", "got", "", title="Rates")
    for each in found["wanted"]:
        verdict = {True: "pass", False: "[bold red]fail[/bold red]", None: "not judged"}[each["passed"]]
        got = "-" if each["got"] is None else f"{each['got']:.2f}"
        rates.add_row(each["what"], f"{each['wanted_share_of_link']:.2f}", got, verdict)
    return [steps, rates] if found["wanted"] else [steps]
