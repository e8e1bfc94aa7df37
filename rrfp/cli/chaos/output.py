"""What `rrfp chaos` says of each fault."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rrfp.chaos.plan import Stage
from rrfp.cli.options import PlainFormat
from rrfp.cli.output import print_sheets
from rrfp.errors import RrfpError

if TYPE_CHECKING:
    from rrfp.chaos.judging import Verdict
    from rrfp.cli.tables.sheet import Sheet

_NAMED = {True: "right", False: "wrong", None: "-"}
_SAME = {True: "yes", False: "no", None: "-"}


def tell(verdict: "Verdict") -> None:
    """Say what became of a fault as soon as it is seen."""
    seen = verdict.seen
    became = "the run went on" if verdict.has_survived else f"found by {verdict.found_by}"
    typer.echo(
        f"fault {verdict.fault.number}: {_what(verdict)} of {seen.injected.victim} in "
        f"{_when(verdict)}: {became} after {seen.seconds:.1f} s",
        err=True,
    )


def print_verdicts(verdicts: "list[Verdict]", output_format: PlainFormat) -> None:
    """Print them on stdout, in the order of the plan."""
    # Those that came too late were injected again at the end.
    verdicts.sort(key=lambda verdict: verdict.fault.number)
    if output_format is PlainFormat.JSON:
        print(json.dumps({"faults": [_as_json(verdict) for verdict in verdicts]}))
    elif verdicts:
        print_sheets([_sheet(verdicts)], markdown=False)


def check(verdicts: "Sequence[Verdict]", keep: Path | None) -> None:
    """Say what was not as it must be. Raises RrfpError unless all faults passed."""
    failed = [verdict for verdict in verdicts if not verdict.has_passed]
    for verdict in failed:
        for complaint in verdict.complaints:
            typer.echo(f"fault {verdict.fault.number}: {complaint}", err=True)
    if failed:
        where = "--keep-failed DIR keeps them" if keep is None else f"they are in {keep}"
        raise RrfpError(
            f"{len(failed)} of {len(verdicts)} faults did not pass; the trainings that met them "
            f"tell more, and {where}"
        )
    typer.echo(f"All {len(verdicts)} faults passed", err=True)


def _as_json(verdict: "Verdict") -> dict[str, object]:
    fault, seen = verdict.fault, verdict.seen
    return {
        "number": fault.number,
        "kind": fault.kind,
        "signal": fault.signal or None,
        "hold_s": fault.hold_s or None,
        "of": seen.injected.victim,
        "stage": fault.stage,
        "after_step": seen.injected.num_finished,
        "has_survived": verdict.has_survived,
        "found_by": verdict.found_by or None,
        "seconds": seen.seconds,
        "named_right": verdict.named_right,
        "steps_lost": seen.steps_lost,
        "is_same": verdict.is_same,
        "complaints": verdict.complaints,
        "said": None if seen.went_on else seen.sentence,
    }


def _sheet(verdicts: "Sequence[Verdict]") -> "Sheet":
    from rrfp.cli.tables.sheet import Column, Sheet

    def column(heading: str, of: "Callable[[Verdict], str]", *, is_text: bool = True) -> Column:
        return Column(heading, [of(verdict) for verdict in verdicts], is_text)

    failed = {row for row, verdict in enumerate(verdicts) if not verdict.has_passed}
    return Sheet(
        f"{len(verdicts)} faults, and what became of the training",
        [
            Column("#", [str(verdict.fault.number) for verdict in verdicts], marked=failed),
            column("fault", _what),
            column("of", lambda verdict: verdict.seen.injected.victim),
            column("when", _when),
            column("found by", lambda verdict: verdict.found_by or "survived"),
            column("s", lambda verdict: f"{verdict.seen.seconds:.1f}", is_text=False),
            column("named", lambda verdict: _NAMED[verdict.named_right]),
            column("lost", lambda verdict: str(verdict.seen.steps_lost), is_text=False),
            column("same", lambda verdict: _SAME[verdict.is_same]),
        ],
        notes=[
            "s: from the fault to the end of the last process, or until the run went on. "
            "lost: finished steps that no checkpoint had. same: parameters at the end, and all "
            "losses, to the last bit."
        ],
        mark_told="did not pass",
    )


def _what(verdict: "Verdict") -> str:
    fault = verdict.fault
    if fault.signal:
        return fault.signal
    return f"{fault.kind} {fault.hold_s:.1f} s" if fault.hold_s else str(fault.kind)


def _when(verdict: "Verdict") -> str:
    stage = verdict.fault.stage
    if stage in (Stage.START, Stage.CLOSE):
        return str(stage)
    return f"{stage} {verdict.seen.injected.num_finished}"
