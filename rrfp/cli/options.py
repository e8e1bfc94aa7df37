"""Arguments that several reports take."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from rrfp.errors import UsageError

TracePath = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PATH]", help="A run's directory or its trace file; none means the newest run."
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(metavar="A:B", help="Only the steps from A up to, not including, B."),
]


def parse_steps(text: str) -> range:
    """Read `A:B`, either of which may be left out; UsageError for anything else."""
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None:
        raise UsageError(f"--steps takes a range such as 3:10, not '{text}'")
    start = int(match[1] or 0)
    stop = int(match[2]) if match[2] else sys.maxsize
    if start >= stop:
        raise UsageError(f"--steps {text} is empty; the second number must be the larger one")
    return range(start, stop)
