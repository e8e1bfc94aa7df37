"""`rrfp verify`: train under every hint and show that the same was learned, bit for bit."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.cli.declared_options import hint_names
from rrfp.cli.options import PlainFormat
from rrfp.errors import RrfpError, UsageError
from rrfp.train.settings import DeviceKind

if TYPE_CHECKING:
    from rich.table import Table

    from rrfp.verify.sameness import Variant, Verdict


def verify(
    full: Annotated[
        bool,
        typer.Option("--full", help="Also binding orders, and tight limits and holds."),
    ] = False,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT", help="Only this layout; may be given again. All of them by default."
        ),
    ] = None,
    hint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HINT",
            help="Only this hint; may be given again. All of them by default.",
            autocompletion=hint_names,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 5,
    device: Annotated[
        DeviceKind,
        typer.Option(
            help="cpu, or cuda: layouts that this machine's GPUs cannot run are left out."
        ),
    ] = DeviceKind.CPU,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several ranks share a GPU.")
    ] = False,
    output_format: Annotated[
        PlainFormat, typer.Option("--format", help="How to print the verdicts.")
    ] = PlainFormat.TABLE,
) -> None:
    """Show that no hint, agreement or timing changes what is learned.

    On every layout (stages, chunks, tensor, data and expert parallelism) a
    small model is trained under every hint that goes with it, with random
    delays before each task and message. Losses, gradient norms and final
    parameters must equal those of Megatron's own schedule (of its order on
    GPUs that ranks share, and of zb-v as a fixed order on the V, which
    Megatron lacks), to the last bit; with dropout on,
    ours must equal each other. Takes some minutes; exits with 1 when anything
    differs.

    Example: rrfp verify --layout pp4 --hint bf --hint bfw
    """
    from rrfp.train.checks import check_settings
    from rrfp.train.launch.launcher import launch
    from rrfp.train.settings import TrainSettings
    from rrfp.verify.sameness import CHOICES, LAYOUTS, RANK_MODULE, layout_settings, variants_of
    from rrfp.verify.sameness import verify as verify_layout

    on_device = {"device": device, "share_gpu": share_gpu}
    check_settings(TrainSettings(pp=1, **on_device))
    chosen = {}
    for name in layout or LAYOUTS:
        reference, *ours = variants_of(
            name, tuple(hint or CHOICES), full=full, shares_gpu=share_gpu
        )
        try:
            check_settings(layout_settings(name, on_device))
        except UsageError as error:
            if layout:
                raise
            typer.echo(f"{name} is left out: {error}", err=True)
            continue
        if ours:
            chosen[name] = [reference, *ours]
    if not chosen:
        raise UsageError(
            f"{', '.join(hint or CHOICES)} goes with none of the layouts "
            f"{', '.join(layout or LAYOUTS)}; choose another --hint or --layout"
        )
    verdicts = []
    directory = Path(tempfile.mkdtemp(prefix="rrfp-verify-"))
    keeps_logs = False
    try:
        for name, variants in chosen.items():
            typer.echo(
                f"{name}: {len(variants)} runs of {steps} steps, {variants[0].name} is the "
                "reference",
                err=True,
            )
            run = directory / name
            run.mkdir()
            verdicts += verify_layout(
                name,
                variants,
                run,
                steps=steps,
                launch=lambda settings, run: launch(settings, run, RANK_MODULE),
                device=on_device,
            )
    except RrfpError:
        # It names a log in the directory.
        keeps_logs = True
        raise
    finally:
        if not keeps_logs:
            shutil.rmtree(directory)
        _print(verdicts, output_format)
    different = [verdict for verdict in verdicts if verdict.difference is not None]
    if different:
        first = different[0]
        raise RrfpError(
            f"{len(different)} of {len(verdicts)} runs learned something else, the first on "
            f"{first.layout} under {first.variant.hint}: {first.difference}"
        )
    typer.echo(
        f"All {len(verdicts)} runs learned the same as their reference, bit for bit", err=True
    )


def _print(verdicts: "list[Verdict]", output_format: PlainFormat) -> None:
    if output_format is PlainFormat.JSON:
        print(json.dumps({"verdicts": [_as_json(verdict) for verdict in verdicts]}))
    elif verdicts:
        from rrfp.cli.console import console

        console().print(_table(verdicts))


def _as_json(verdict: "Verdict") -> dict[str, object]:
    variant = verdict.variant
    return {
        "layout": verdict.layout,
        "hint": variant.hint,
        "dispatch": variant.dispatch,
        "agreement": variant.agreement,
        "bound": variant.bound or None,
        "dropout": variant.dropout,
        "reference": verdict.reference.name,
        "same": verdict.difference is None,
        "difference": verdict.difference,
    }


def _table(verdicts: "list[Verdict]") -> "Table":
    """A row a combination; a column for the runs without dropout and one for those with it."""
    from dataclasses import replace

    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("layout", "hint", "dispatch", "agreement", "no dropout", "dropout"):
        table.add_column(heading, overflow="fold")
    rows: dict[tuple[str, Variant], dict[bool, str]] = {}
    for verdict in verdicts:
        has_dropout = verdict.variant.dropout > 0
        if has_dropout:
            reference = (verdict.layout, replace(verdict.reference, dropout=0.0))
            rows.setdefault(reference, {})[True] = "reference"
        key = (verdict.layout, replace(verdict.variant, dropout=0.0))
        rows.setdefault(key, {})[has_dropout] = verdict.difference or "same"
    layout_before = None
    for (layout, variant), cells in rows.items():
        if layout_before not in (None, layout):
            table.add_section()
        table.add_row(
            "" if layout == layout_before else layout,
            variant.hint,
            f"{variant.dispatch} {variant.bound}".strip(),
            variant.agreement or "",
            cells.get(False, ""),
            cells.get(True, ""),
        )
        layout_before = layout
    return table
