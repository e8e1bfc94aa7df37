"""`rrfp tune`: search settings and a split of the layers by simulation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp.cli.console import print_rows
from rrfp.cli.declared_options import OUTPUT, Offer, cost_names, run_names, with_options
from rrfp.cli.options import RowFormat
from rrfp.cli.output import NOT_WHOLE, WITHOUT_SIZES, note_left_out, note_warm_up, read_frames
from rrfp.cli.progress import progress, working
from rrfp.errors import UsageError
from rrfp.inputs import declared_in, setting
from rrfp.schedule.policy import parse_hold
from rrfp.simulate.costs.model import Uneven

if TYPE_CHECKING:
    from rrfp.tune.source import Source

_COSTS, _SEARCH, _TRIALS = "Costs in a file", "Search", "Trials"
_COST_FILES = (".csv", ".toml")
_PER_TASK_MS, _PER_MESSAGE_MS = 0.3, 0.5
"""The overhead of the runtime in paced runs on two busy cores (docs/reference/tune.md)."""
_OWN_JITTER = "lognormal:0.01"
"""Default jitter, so that no order wins that is fast only without any noise."""


def _complete_source(incomplete: str) -> list[Offer]:
    """Complete the name of costs or of a run; an empty word is completed by runs only."""
    return cost_names(incomplete) if incomplete else run_names("")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of `rrfp tune`."""

    named: str | None = setting(
        None,
        "A run (its directory, its name in runs/, @-1 for the newest, or its trace), or "
        "costs: language, multimodal, uniform, a CSV or TOML file; none means the newest run.",
        is_argument=True,
        metavar="RUN|COSTS",
        completes=_complete_source,
    )
    memory: str = setting(
        "1.0x",
        "Most activations that a rank may hold: 40GiB, 8 (microbatches), or 1.0x (of 1F1B's "
        "largest peak)",
        metavar="SIZE",
    )
    layers: str | None = setting(
        None,
        "Number of layers of the model, or of each stage now, if the run or costs lack it.",
        metavar="N|N,N,...",
    )
    uneven: Uneven = setting(
        Uneven.RANKS,
        "How to read uneven stage times: ranks (slow device) or layers (expensive layers)",
        metavar="WHY",
    )
    megatron_lm: bool = setting(
        False, "Only propose what Megatron-LM's own scripts support: no V of chunks."
    )
    pp: int | None = setting(None, "Pipeline ranks [required with costs].", least=1, panel=_COSTS)
    microbatches: int | None = setting(
        None, "Microbatches per step and replica [required with costs].", least=1, panel=_COSTS
    )
    micro_batch_size: int | None = setting(
        None,
        "Sequences per microbatch in the costs; allows other sizes to be searched.",
        least=1,
        panel=_COSTS,
    )
    tp: int | None = setting(None, "Tensor-parallel ranks [1].", least=1, panel=_COSTS)
    dp: int | None = setting(None, "Data-parallel replicas [1].", least=1, panel=_COSTS)
    jitter: str | None = setting(
        None,
        "none, J0 to J3, lognormal:0.5, ...: see docs/reference/costs.md "
        f"[{_OWN_JITTER}, a machine's own].",
        panel=_COSTS,
    )
    per_task_ms: float | None = setting(
        None,
        "Runtime overhead between two tasks, which costs do not include [0.3].",
        least=0,
        most=1000,
        metavar="MS",
        panel=_COSTS,
    )
    per_message_ms: float | None = setting(
        None, "Runtime overhead of a message [0.5].", least=0, most=1000, metavar="MS", panel=_COSTS
    )
    simulations: int = setting(
        2000, "Approximate number of steps to simulate", least=1, most=1_000_000, panel=_SEARCH
    )
    budget_s: float | None = setting(
        None,
        "Stop searching after this time and report the best so far.",
        least=0.1,
        most=86_400,
        metavar="SECONDS",
        panel=_SEARCH,
    )
    seed: int = setting(
        1234,
        "Seed of the search, and the first seed of the costs",
        least=0,
        most=2**31,
        panel=_SEARCH,
    )
    seeds: int = setting(
        20,
        "Held-out steps (seeds) on which proposals are scored",
        least=2,
        most=1000,
        panel=_SEARCH,
    )
    best: int = setting(5, "Proposals", least=1, most=50, panel=_SEARCH)
    tried: int = setting(
        0,
        "Train with this many of the best, with the run's own settings; for costs in a file, "
        "as paced runs",
        flag="try",
        least=0,
        most=50,
        panel=_TRIALS,
    )
    steps: int = setting(
        5, "Steps of each trial, after one warm-up step", least=1, most=1000, panel=_TRIALS
    )
    output_format: RowFormat = setting(
        RowFormat.TABLE, "How to print the proposals", flag="format", metavar="FORMAT", panel=OUTPUT
    )


@with_options(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find the best settings and split of the layers within a memory budget.

    Searches the hint, order of entry, bound, chunks and their placement, layers
    per stage, and microbatch size, by simulation with the measured costs of a
    run or costs in a file. Prints the best with flags to paste.

    Example: rrfp tune @-1 --memory 40GiB --try 2
    """
    from rrfp.cli.tune.proposals import TrialRunner, print_flags, proposal_table
    from rrfp.tune.search import tune as search

    asked_memory = parse_hold(options.memory, "--memory", auto=False)
    is_costs = _is_costs(options.named)
    settings: Mapping[str, object] = {}
    if is_costs:
        source = _costs_source(options)
    else:
        source, settings = _run_source(options)
    # Invalid --try options are refused before the search.
    trials = TrialRunner(
        source,
        settings,
        options.uneven,
        options.steps,
        options.jitter or "none",
        options.named if is_costs else None,
        num=options.tried,
    )
    with progress("Searching", options.simulations) as advance:
        found = search(
            source,
            asked_memory,
            seed=options.seed,
            simulations=options.simulations,
            budget_s=options.budget_s,
            num_best=options.best,
            num_predicted=options.seeds,
            on_simulation=lambda: advance(1),
        )
    tried = found.proposals[: options.tried]
    results = [trials.run(number, each) for number, each in enumerate(tried, 1)]
    table = proposal_table(source, found, results)
    # Flags begin with a dash and are no formulas.
    print_rows(table, options.output_format, may_have_formulas=False)
    if options.output_format in (RowFormat.TABLE, RowFormat.MD):
        print_flags(source, found, markdown=options.output_format is RowFormat.MD)


def _is_costs(named: str | None) -> bool:
    """Return True if the argument names costs and not a run: a preset, or a path in .csv or .toml
    that is no directory. False for None."""
    from rrfp.simulate.costs.toml_files import PRESETS

    if named is None:
        return False
    return named in PRESETS or (Path(named).suffix in _COST_FILES and not Path(named).is_dir())


def _layers(text: str | None) -> tuple[int, ...] | None:
    """Parse --layers into the layers of each stage, or one number for the model; None stays None.
    Raises UsageError for an invalid text and for a model without layers."""
    from rrfp.inputs import parse_layout

    found = None if text is None else parse_layout(text, "--layers")
    if found is not None and not any(found):
        raise UsageError(f"--layers is '{text}'; a model has one or more")
    return found


def _ns(given_ms: float | None, default_ms: float) -> int:
    """Convert a time in ms to a whole number of ns; None takes the default."""
    return round((default_ms if given_ms is None else given_ms) * 1e6)


def _costs_source(options: TuneOptions) -> "Source":
    """Make the source of the search from costs in a file or a preset. Raises UsageError without
    --pp or --microbatches, and for invalid costs."""
    from rrfp.simulate.jitter import parse_jitter
    from rrfp.tune.from_costs import CostOptions, source_of_costs

    layers = _layers(options.layers)
    if options.pp is None or options.microbatches is None:
        name, what = "microbatches", "microbatches a step"
        if options.pp is None:
            name, what = "pp", "pipeline ranks"
        raise UsageError(
            f"--{name} is missing; costs in a file do not say how many {what} there are, as "
            f"in --{name} 8"
        )
    asked = CostOptions(
        pp=options.pp,
        microbatches=options.microbatches,
        micro_batch_size=options.micro_batch_size,
        layers=layers,
        uneven=options.uneven,
        tp=options.tp or 1,
        dp=options.dp or 1,
        loop_only=options.megatron_lm,
        task_ns=_ns(options.per_task_ms, _PER_TASK_MS),
        message_ns=_ns(options.per_message_ms, _PER_MESSAGE_MS),
    )
    jitter = parse_jitter(options.jitter or _OWN_JITTER)
    return source_of_costs(str(options.named), asked, jitter)


def _run_source(options: TuneOptions) -> "tuple[Source, Mapping[str, object]]":
    """Read a run. Returns the source of the search and the run's settings, empty for an imported
    run.

    Prints on stderr which steps are left out. Raises UsageError for an option that is about costs
    in a file.
    """
    layers = _layers(options.layers)
    for each in declared_in("", TuneOptions):
        if each.panel == _COSTS and getattr(options, each.field) is not None:
            raise UsageError(
                f"--{each.spelled} is about costs in a file, and a run says it itself; leave it out"
            )
    from rrfp.analyze.frames import recording_of
    from rrfp.replay.recorded import read_run
    from rrfp.train.settings import num_vision_stages
    from rrfp.tune.from_run import settings_of, source_of_run

    path = None if options.named is None else Path(options.named)
    frames = read_frames(path, None, evaluations=False)
    note_warm_up(frames)
    with working("Measuring the run"):
        recording = recording_of(frames)
        run = read_run(recording)
        settings = settings_of(recording)
        is_vlm = settings.get("model") == "vlm"
        source = source_of_run(
            recording,
            layers=layers,
            uneven=options.uneven,
            loop_only=options.megatron_lm,
            num_vision_stages=num_vision_stages(run.shape.num_stages) if is_vlm else 0,
        )
    note_left_out(run.left_out, NOT_WHOLE)
    note_left_out(run.without_sizes, WITHOUT_SIZES)
    return source, {} if "imported" in recording.settings else settings
