"""`rrfp verify`: train under every hint and check that all learn the same, bit for bit."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.analyze.table import NAME, TEXT, Column, Table
from rrfp.cli.declared_options import hint_names
from rrfp.cli.options import PlainFormat
from rrfp.errors import RrfpError, UsageError
from rrfp.train.settings import DeviceKind

if TYPE_CHECKING:
    from rrfp.verify.sameness import Variant, Verdict


def verify(
    full: Annotated[
        bool, typer.Option("--full", help="Also fixed orders, and tight limits and holds.")
    ] = False,
    layout: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYOUT", help="Only this layout; repeatable. Default: all."),
    ] = None,
    hint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HINT",
            help="Only this hint; repeatable. Default: all.",
            autocompletion=hint_names,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 5,
    device: Annotated[
        DeviceKind,
        typer.Option(help="cpu, or cuda: skips layouts that need more GPUs than there are."),
    ] = DeviceKind.CPU,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several ranks share a GPU.")
    ] = False,
    output_format: Annotated[
        PlainFormat, typer.Option("--format", help="How to print the verdicts.")
    ] = PlainFormat.TABLE,
) -> None:
    """Check that no hint, agreement or timing changes what a model learns.

    On every layout (stages, chunks, tensor, data and expert parallelism) a small
    model is trained under each hint that the layout supports, with random delays
    before each task and message. Losses, gradient norms and final parameters
    must equal those of Megatron's own schedule bit for bit. The reference is
    Megatron's order on GPUs that ranks share, and zb-v as a fixed order on the
    V, which Megatron lacks. With dropout the runs of rrfp must equal each other.
    Takes some minutes; exits with 1 if anything differs.

    Example: rrfp verify --layout pp4 --hint bf --hint bfw
    """
    on_device = {"device": device, "share_gpu": share_gpu}
    variants = _chosen_variants(layout, hint, on_device, full=full)
    verdicts: list[Verdict] = []
    try:
        _train_all(variants, on_device, steps, verdicts)
    finally:
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


def _chosen_variants(
    layouts: list[str] | None, hints: list[str] | None, on_device: dict[str, object], *, full: bool
) -> "dict[str, list[Variant]]":
    """Return the runs of each layout, its reference first.

    Layouts that the device does not support are skipped with a note on stderr, and those with no
    run besides the reference silently. Raises UsageError if no layout is left, for an unknown name,
    and if the device supports no run at all, or not a named layout.
    """
    from rrfp.train.checks import check_settings
    from rrfp.train.settings import TrainSettings
    from rrfp.verify.sameness import CHOICES, LAYOUTS, layout_settings, variants_of

    check_settings(TrainSettings(pp=1, **on_device))
    chosen = {}
    for name in layouts or LAYOUTS:
        reference, *others = variants_of(
            name, tuple(hints or CHOICES), full=full, shares_gpu=bool(on_device["share_gpu"])
        )
        try:
            check_settings(layout_settings(name, on_device))
        except UsageError as error:
            if layouts:
                raise
            typer.echo(f"{name} is left out: {error}", err=True)
            continue
        if others:
            chosen[name] = [reference, *others]
    if not chosen:
        raise UsageError(
            f"{', '.join(hints or CHOICES)} goes with none of the layouts "
            f"{', '.join(layouts or LAYOUTS)}; choose another --hint or --layout"
        )
    return chosen


def _train_all(
    variants: "Mapping[str, list[Variant]]",
    on_device: dict[str, object],
    steps: int,
    verdicts: "list[Verdict]",
) -> None:
    """Train all variants in a temporary directory, which is removed, and append their verdicts to
    `verdicts`. If a run fails, the directory with its logs stays."""
    from rrfp.train.launch.launcher import launch
    from rrfp.verify.sameness import RANK_MODULE
    from rrfp.verify.sameness import verify as verify_layout

    directory = Path(tempfile.mkdtemp(prefix="rrfp-verify-"))
    keeps_logs = False
    try:
        for name, of_layout in variants.items():
            typer.echo(
                f"{name}: {len(of_layout)} runs of {steps} steps, {of_layout[0].name} is the "
                "reference",
                err=True,
            )
            run = directory / name
            run.mkdir()
            verdicts += verify_layout(
                name,
                of_layout,
                run,
                steps=steps,
                launch=lambda settings, run: launch(settings, run, RANK_MODULE),
                device=on_device,
            )
    except RrfpError:
        # The error names a log in the directory.
        keeps_logs = True
        raise
    finally:
        if not keeps_logs:
            shutil.rmtree(directory)


def _print(verdicts: "Sequence[Verdict]", output_format: PlainFormat) -> None:
    """Print the verdicts on stdout, as JSON or as a table; the table of no verdicts is not
    printed."""
    if output_format is PlainFormat.JSON:
        print(json.dumps({"verdicts": [_as_json(verdict) for verdict in verdicts]}))
    elif verdicts:
        from rrfp.cli.console import print_tables

        print_tables([_table(verdicts)], markdown=False)


def _as_json(verdict: "Verdict") -> dict[str, object]:
    """Return a verdict as JSON members."""
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


def _table(verdicts: "Sequence[Verdict]") -> Table:
    """Make a table with a row for each layout and variant, and a column for runs without and one
    with dropout. A cell is `same`, the difference, `reference` for the reference with dropout, or
    empty without such a run."""
    rows: dict[tuple[str, Variant], dict[bool, str]] = {}
    for verdict in verdicts:
        has_dropout = verdict.variant.dropout > 0
        if has_dropout:
            reference = (verdict.layout, replace(verdict.reference, dropout=0.0))
            rows.setdefault(reference, {})[True] = "reference"
        key = (verdict.layout, replace(verdict.variant, dropout=0.0))
        rows.setdefault(key, {})[has_dropout] = verdict.difference or "same"
    variants = [variant for _, variant in rows]
    return Table(
        "",
        [
            Column("layout", [layout for layout, _ in rows], NAME),
            Column("hint", [variant.hint for variant in variants], NAME),
            Column(
                "dispatch", [f"{each.dispatch} {each.bound}".strip() for each in variants], TEXT
            ),
            Column(
                "agreement", [each.agreement and str(each.agreement) for each in variants], TEXT
            ),
            Column("no dropout", [cells.get(False) for cells in rows.values()], TEXT),
            Column("dropout", [cells.get(True) for cells in rows.values()], TEXT),
        ],
        num_names=2,
    )
