"""`rrfp doctor`: check what this machine offers for a run, and print advice."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.analyze.table import NAME, TEXT, Column, Table, Unit
from rrfp.cli.options import PlainFormat
from rrfp.errors import RrfpError
from rrfp.train.settings import DeviceKind

if TYPE_CHECKING:
    from rrfp.doctor.checks import Check


def doctor(
    device: Annotated[
        DeviceKind, typer.Option(help="The device of the planned run.")
    ] = DeviceKind.CPU,
    output_format: Annotated[
        PlainFormat, typer.Option("--format", help="How to print the checks.")
    ] = PlainFormat.TABLE,
) -> None:
    """Check what a run needs of this machine, and print advice.

    Exits with 1 if a run on the device would fail. Other warnings do not prevent
    a run. Takes about ten seconds.

    Example: rrfp doctor --device cuda
    """
    from rrfp.cli.console import print_tables
    from rrfp.cli.progress import working
    from rrfp.doctor.diagnosis import diagnose

    with working("Checking this machine"):
        checks = diagnose()
    if output_format is PlainFormat.JSON:
        print(json.dumps({"checks": [check.as_json() for check in checks]}))
    else:
        print_tables([_table(checks)], markdown=False)
    for check in checks:
        if check.prevents_runs_on(device):
            raise RrfpError(check.advice)


def _table(checks: "Sequence[Check]") -> Table:
    """Make the table of the checks: name, state, figure with unit, and advice."""
    figures = [
        "" if check.figure is None else f"{check.figure:.10g} {check.unit}".rstrip()
        for check in checks
    ]
    return Table(
        "",
        [
            Column("check", [check.name for check in checks], NAME),
            Column("state", [str(check.state) for check in checks], NAME),
            Column("figure", figures, Unit(str)),
            Column("what was found, and what to do", [check.advice for check in checks], TEXT),
        ],
        num_names=2,
    )
