"""`rrfp doctor`: what this machine can do for a run, measured, and what to do about it."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.options import PlainFormat
from rrfp.errors import RrfpError
from rrfp.train.settings import DeviceKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Group
    from rich.table import Table

    from rrfp.doctor.checks import Check


def doctor(
    device: Annotated[
        DeviceKind, typer.Option(help="The device of the run that is asked about.")
    ] = DeviceKind.CPU,
    output_format: Annotated[
        PlainFormat, typer.Option("--format", help="How to print the checks.")
    ] = PlainFormat.TABLE,
) -> None:
    """Try out what a run needs of this machine, and say what to do.

    Exits with 1 where a run on the device would fail. Whatever else is slow,
    absent or failing does not end a run. Takes some ten seconds.

    Example: rrfp doctor --device cuda
    """
    from rrfp.cli.progress import working
    from rrfp.doctor.diagnosis import diagnose

    with working("Trying out this machine"):
        checks = diagnose()
    if output_format is PlainFormat.JSON:
        print(json.dumps({"checks": [check.as_json() for check in checks]}))
    else:
        from rrfp.cli.console import console

        page = console()
        page.print(_table(checks) if page.width >= _TABLE_WIDTH else _list(checks))
    for check in checks:
        if check.prevents_runs_on(device):
            raise RrfpError(check.advice)


_TABLE_WIDTH = 60
"""On fewer columns nothing would be left for the last one."""


def _list(checks: "Iterable[Check]") -> "Group":
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[Text | Padding] = []
    for check in checks:
        lines.append(Text(f"{check.name}: {check.state} {_told_figure(check)}".rstrip()))
        lines.append(Padding(Text(check.advice), (0, 0, 0, 2)))
    return Group(*lines)


def _table(checks: "Iterable[Check]") -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("figure", no_wrap=True, justify="right")
    table.add_column("what was found, and what to do", overflow="fold")
    for check in checks:
        table.add_row(check.name, check.state, _told_figure(check), Text(check.advice))
    return table


def _told_figure(check: "Check") -> str:
    return "" if check.figure is None else f"{check.figure:.10g} {check.unit}".rstrip()
