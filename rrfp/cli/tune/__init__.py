"""`rrfp tune`: settings, and a split of the layers, found by simulation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp.cli.console import print_rows
from rrfp.cli.declared_options import OUTPUT, Offer, cost_names, run_names, taking
from rrfp.cli.options import RowFormat
from rrfp.cli.output import NOT_WHOLE, WITHOUT_SIZES, note_left_out, note_warm_up, read_frames
from rrfp.cli.progress import progress, working
from rrfp.errors import UsageError
from rrfp.inputs import setting
from rrfp.schedule.policy import parse_hold
from rrfp.simulate.costs.model import Uneven

if TYPE_CHECKING:
    from rrfp.tune.source import Source

_COSTS, _SEARCH, _TRIALS = "Costs in a file", "Search", "Trials"
_COST_FILES = (".csv", ".toml")
_PER_TASK_MS, _PER_MESSAGE_MS = 0.3, 0.5
"""The runtime's own time in paced runs on two busy cores (docs/reference/tune.md)."""
_OWN_JITTER = "lognormal:0.01"
"""No machine is exact, and an order that is fast only without any noise must not win."""


def _named(incomplete: str) -> list[Offer]:
    return [*cost_names(incomplete), *run_names(incomplete)] if incomplete else run_names("")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of `rrfp tune`."""

    named: str | None = setting(
        None,
        "A run (its directory, its name in runs/, @-1 for the newest, or its trace), or "
        "costs: language, multimodal, uniform, a CSV or TOML file; none means the newest run.",
        is_argument=True,
        metavar="RUN|COSTS",
        completes=_named,
    )
    memory: str = setting(
        "1.0x",
        "Most activations that a rank may keep: 40GiB, 8 (microbatches), or 1.0x (of 1F1B's "
        "largest peak)",
        metavar="SIZE",
    )
    layers: str | None = setting(
        None,
        "How many layers the model has, or each stage as it is, where run or costs do not say it.",
        metavar="N|N,N,...",
    )
    uneven: Uneven = setting(
        Uneven.RANKS,
        "Why equally many layers take longer on some stages: slow ranks, or heavy layers",
        metavar="WHY",
    )
    megatron_lm: bool = setting(
        False, "Only what Megatron-LM's own scripts can build: no V of chunks."
    )
    pp: int | None = setting(None, "Pipeline ranks [required with costs].", least=1, panel=_COSTS)
    microbatches: int | None = setting(
        None,
        "Microbatches a step and replica, of the size in the costs [required with costs].",
        least=1,
        panel=_COSTS,
    )
    micro_batch_size: int | None = setting(
        None,
        "Sequences in a microbatch of the costs, to be divided or joined.",
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
        "The runtime's own time between two tasks, which costs do not have [0.3].",
        least=0,
        most=1000,
        metavar="MS",
        panel=_COSTS,
    )
    per_message_ms: float | None = setting(
        None,
        "The runtime's own time for a message [0.5].",
        least=0,
        most=1000,
        metavar="MS",
        panel=_COSTS,
    )
    simulations: int = setting(
        2000,
        "About how many steps the search may simulate",
        least=1,
        most=1_000_000,
        panel=_SEARCH,
    )
    budget_s: float | None = setting(
        None,
        "Longest time of the search; what was found by then counts.",
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
        "Steps that proposals are predicted for; the search sees others",
        least=2,
        most=1000,
        panel=_SEARCH,
    )
    best: int = setting(5, "Proposals", least=1, most=50, panel=_SEARCH)
    tried: int = setting(
        0,
        "Run the best of them for real, this many, with the run's own settings; of costs in a "
        "file, as paced runs",
        flag="try",
        least=0,
        most=50,
        panel=_TRIALS,
    )
    steps: int = setting(
        5, "Steps of each trial, after one to warm up", least=1, most=1000, panel=_TRIALS
    )
    output_format: RowFormat = setting(
        RowFormat.TABLE,
        "How to print the proposals",
        flag="format",
        metavar="FORMAT",
        panel=OUTPUT,
    )

    def of_costs(self) -> dict[str, Any]:
        """The options that only costs in a file need, by flag."""
        return {
            "pp": self.pp,
            "microbatches": self.microbatches,
            "micro-batch-size": self.micro_batch_size,
            "tp": self.tp,
            "dp": self.dp,
            "jitter": self.jitter,
            "per-task-ms": self.per_task_ms,
            "per-message-ms": self.per_message_ms,
        }


@taking(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Find the best settings, and split of the layers, within a memory.

    Searches hint, order of entry, bound, chunks and their placement, layers a
    stage, and the size of microbatches, by simulation with a run's measured
    costs or those in a file. Prints the best with the flags to paste.

    Example: rrfp tune @-1 --memory 40GiB --try 2
    """
    from rrfp.cli.tune.proposals import Trials, print_flags, proposal_table
    from rrfp.tune.search import tune as search

    named, uneven, tried = options.named, options.uneven, options.tried
    asked_memory = parse_hold(options.memory, "--memory", auto=False)
    split = None if options.layers is None else _layers(options.layers)
    is_costs = _is_costs(named)
    of_costs, loop_only = options.of_costs(), options.megatron_lm
    if is_costs:
        assert named is not None
        source = _costs_source(named, of_costs, split, uneven, loop_only=loop_only)
        settings: Mapping[str, object] = {}
    else:
        source, settings = _run_source(named, of_costs, split, uneven, loop_only=loop_only)
    costs, jitter = named if is_costs else None, options.jitter or "none"
    # What cannot be tried is refused before the search.
    trials = Trials(source, settings, uneven, options.steps, jitter, costs, num=tried)
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
    tries = [trials.run(number, each) for number, each in enumerate(found.proposals[:tried], 1)]
    table = proposal_table(source, found, tries)
    # Flags begin with a dash and are no formulas.
    print_rows(table, options.output_format, may_have_formulas=False)
    if options.output_format in (RowFormat.TABLE, RowFormat.MD):
        print_flags(source, found, markdown=options.output_format is RowFormat.MD)


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
    from rrfp.tune.from_costs import CostOptions, source_of_costs

    for name, what in (("pp", "pipeline ranks"), ("microbatches", "microbatches a step")):
        if of_costs[name] is None:
            raise UsageError(
                f"--{name} is missing; costs in a file do not say how many {what} there are, as "
                f"in --{name} 8"
            )
    asked = CostOptions(
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
