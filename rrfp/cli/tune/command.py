"""`rrfp tune`: settings, and a split of the layers, found by simulation."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.cli.console import print_rows
from rrfp.cli.declared_options import OUTPUT, Offer, cost_names, escaped, one_of, run_names
from rrfp.cli.options import RowFormat
from rrfp.cli.output import NOT_WHOLE, WITHOUT_SIZES, note_left_out, note_warm_up, read_frames
from rrfp.cli.progress import progress, working
from rrfp.errors import UsageError
from rrfp.schedule.knobs import parse_hold
from rrfp.simulate.costs.model import Uneven

if TYPE_CHECKING:
    from rrfp.tune.source import Source

_COSTS, _SEARCH, _TRIALS = "Costs in a file", "Search", "Trials"
_COST_FILES = (".csv", ".toml")
_PER_TASK_MS, _PER_MESSAGE_MS = 0.3, 0.5
"""What the runtime takes of paced runs on two busy cores (docs/reference/tune.md)."""
_OWN_JITTER = "lognormal:0.01"
"""No machine is exact. An order that is fast only without any noise is not to win."""


def _named(incomplete: str) -> list[Offer]:
    return [*cost_names(incomplete), *run_names(incomplete)] if incomplete else run_names("")


def _of_costs(help_text: str, least: int = 1, metavar: str = "N") -> Any:
    return typer.Option(min=least, help=escaped(help_text), metavar=metavar, rich_help_panel=_COSTS)


def tune(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|COSTS",
            help="A run (its directory, its name in runs/, @-1 for the newest, or its trace), or "
            "costs: language, multimodal, uniform, a CSV or TOML file; none means the newest run.",
            autocompletion=_named,
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Most activations that a rank may keep: 40GiB, 8 (microbatches), or 1.0x (of "
            "1F1B's largest peak).",
            metavar="SIZE",
        ),
    ] = "1.0x",
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N|N,N,...",
            help="How many layers the model has, or each stage as it is, where run or costs do not "
            "say it.",
        ),
    ] = None,
    uneven: Annotated[
        Uneven,
        typer.Option(
            help="Why equally many layers take longer on some stages: slow ranks, or heavy layers."
        ),
    ] = Uneven.RANKS,
    megatron_lm: Annotated[
        bool,
        typer.Option(
            "--megatron-lm", help="Only what Megatron-LM's own scripts can build: no V of chunks."
        ),
    ] = False,
    pp: Annotated[int | None, _of_costs("Pipeline ranks.")] = None,
    microbatches: Annotated[
        int | None, _of_costs("Microbatches a step and replica, of the size in the costs.")
    ] = None,
    micro_batch_size: Annotated[
        int | None, _of_costs("Sequences in a microbatch of the costs, to be divided or joined.")
    ] = None,
    tp: Annotated[int | None, _of_costs("Tensor-parallel ranks [1].")] = None,
    dp: Annotated[int | None, _of_costs("Data-parallel replicas [1].")] = None,
    jitter: Annotated[
        str | None,
        typer.Option(
            help=escaped(
                "none, J0 to J3, lognormal:0.5, ...: see docs/reference/costs.md "
                f"[{_OWN_JITTER}, a machine's own]."
            ),
            metavar="TEXT",
            rich_help_panel=_COSTS,
        ),
    ] = None,
    per_task_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1000,
            metavar="MS",
            help=escaped(
                "The runtime's own time between two tasks, which costs do not have [0.3]."
            ),
            rich_help_panel=_COSTS,
        ),
    ] = None,
    per_message_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1000,
            metavar="MS",
            help=escaped("The runtime's own time for a message [0.5]."),
            rich_help_panel=_COSTS,
        ),
    ] = None,
    simulations: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,
            metavar="N",
            help="About how many steps the search may simulate.",
            rich_help_panel=_SEARCH,
        ),
    ] = 2000,
    budget_s: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=86_400,
            metavar="S",
            help="Longest time of the search; what was found by then counts.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**31,
            metavar="N",
            help="Of the search, and the first seed of the costs.",
            rich_help_panel=_SEARCH,
        ),
    ] = 1234,
    seeds: Annotated[
        int,
        typer.Option(
            min=2,
            max=1000,
            metavar="N",
            help="Steps that proposals are predicted for; the search sees others.",
            rich_help_panel=_SEARCH,
        ),
    ] = 20,
    best: Annotated[
        int, typer.Option(min=1, max=50, metavar="N", help="Proposals.", rich_help_panel=_SEARCH)
    ] = 5,
    tried: Annotated[
        int,
        typer.Option(
            "--try",
            min=0,
            max=50,
            metavar="N",
            help="Run the best N for real, with the run's own settings; of costs in a file, as "
            "paced runs.",
            rich_help_panel=_TRIALS,
        ),
    ] = 0,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            max=1000,
            metavar="N",
            help="Steps of each trial, after one to warm up.",
            rich_help_panel=_TRIALS,
        ),
    ] = 5,
    output_format: Annotated[
        RowFormat,
        typer.Option(
            "--format",
            help="How to print the proposals.",
            rich_help_panel=OUTPUT,
            autocompletion=one_of(*RowFormat),
        ),
    ] = RowFormat.TABLE,
) -> None:
    """Find the best settings, and split of the layers, within a memory.

    Searches hint, order of entry, bound, chunks and their placement, layers a
    stage, and the size of microbatches, by simulation with a run's measured
    costs or those in a file. Prints the best with the flags to paste.

    Example: rrfp tune @-1 --memory 40GiB --try 2
    """
    from rrfp.cli.tune.proposals import print_flags, proposal_table
    from rrfp.cli.tune.trial import Trials
    from rrfp.tune.search import tune as search

    of_costs = {
        "pp": pp,
        "microbatches": microbatches,
        "micro-batch-size": micro_batch_size,
        "tp": tp,
        "dp": dp,
        "jitter": jitter,
        "per-task-ms": per_task_ms,
        "per-message-ms": per_message_ms,
    }
    asked_memory = parse_hold(memory, "--memory", auto=False)
    split = None if layers is None else _layers(layers)
    is_costs = _is_costs(named)
    if is_costs:
        assert named is not None
        source = _costs_source(named, of_costs, split, uneven, loop_only=megatron_lm)
        settings: Mapping[str, object] = {}
    else:
        source, settings = _run_source(named, of_costs, split, uneven, loop_only=megatron_lm)
    costs = named if is_costs else None
    # What cannot be tried is told before the search.
    trials = Trials(source, settings, uneven, steps, jitter or "none", costs, num=tried)
    with progress("Searching", simulations) as advance:
        found = search(
            source,
            asked_memory,
            seed=seed,
            simulations=simulations,
            budget_s=budget_s,
            num_best=best,
            num_predicted=seeds,
            told=lambda: advance(1),
        )
    tries = [trials.run(number, each) for number, each in enumerate(found.proposals[:tried], 1)]
    table = proposal_table(source, found, tries)
    # Flags begin with a dash and are no formulas.
    print_rows(table, output_format, may_have_formulas=False)
    if output_format in (RowFormat.TABLE, RowFormat.MD):
        print_flags(source, found, markdown=output_format is RowFormat.MD)


def _is_costs(named: str | None) -> bool:
    from rrfp.simulate.costs.toml_files import PRESETS

    if named is None:
        return False
    return named in PRESETS or (Path(named).suffix in _COST_FILES and not Path(named).is_dir())


def _layers(text: str) -> tuple[int, ...]:
    from rrfp.inputs import parse_layout

    found = parse_layout(text, "--layers")
    if not any(found):
        raise UsageError(f"--layers is '{text}'; a model has one or more")
    return found


def _ns(asked_ms: float | None, usual_ms: float) -> int:
    return round((usual_ms if asked_ms is None else asked_ms) * 1e6)


def _costs_source(
    text: str,
    of_costs: dict[str, Any],
    layers: tuple[int, ...] | None,
    uneven: Uneven,
    *,
    loop_only: bool,
) -> "Source":
    from rrfp.simulate.jitter import parse_jitter
    from rrfp.tune.from_costs import Asked, source_of_costs

    for name, what in (("pp", "pipeline ranks"), ("microbatches", "microbatches a step")):
        if of_costs[name] is None:
            raise UsageError(
                f"--{name} is missing; costs in a file do not say how many {what} there are, as "
                f"in --{name} 8"
            )
    asked = Asked(
        pp=of_costs["pp"],
        microbatches=of_costs["microbatches"],
        micro_batch_size=of_costs["micro-batch-size"],
        layers=layers,
        uneven=uneven,
        tp=of_costs["tp"] or 1,
        dp=of_costs["dp"] or 1,
        loop_only=loop_only,
        task_ns=_ns(of_costs["per-task-ms"], _PER_TASK_MS),
        message_ns=_ns(of_costs["per-message-ms"], _PER_MESSAGE_MS),
    )
    return source_of_costs(text, asked, parse_jitter(of_costs["jitter"] or _OWN_JITTER))


def _run_source(
    named: str | None,
    of_costs: dict[str, Any],
    layers: tuple[int, ...] | None,
    uneven: Uneven,
    *,
    loop_only: bool,
) -> "tuple[Source, Mapping[str, object]]":
    """The source, and the run's settings."""
    given = [name for name, value in of_costs.items() if value is not None]
    if given:
        raise UsageError(
            f"--{given[0]} is about costs in a file, and a run says it itself; leave it out"
        )
    from rrfp.analyze.frames import recording_of
    from rrfp.replay.recorded import read_run
    from rrfp.train.settings import num_vision_stages
    from rrfp.tune.from_run import settings_of, source_of_run

    frames = read_frames(None if named is None else Path(named), None, evaluations=False)
    note_warm_up(frames)
    with working("Measuring the run"):
        recording = recording_of(frames)
        run = read_run(recording)
        settings = settings_of(recording)
        is_vlm = settings.get("model") == "vlm"
        source = source_of_run(
            recording,
            layers=layers,
            uneven=uneven,
            loop_only=loop_only,
            num_vision_stages=num_vision_stages(run.shape.num_stages) if is_vlm else 0,
        )
    note_left_out(run.left_out, NOT_WHOLE)
    note_left_out(run.without_sizes, WITHOUT_SIZES)
    return source, {} if "imported" in recording.settings else settings
