"""Makes a `Source` for `rrfp tune` from a recorded run; its costs are the measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median_low

from rrfp.errors import UsageError
from rrfp.inputs import parse_layout
from rrfp.replay.change import W_SHARE
from rrfp.replay.cost_sources import RecordedCosts
from rrfp.replay.measured import MeasuredStep, measure
from rrfp.replay.recorded import RecordedRun, read_run
from rrfp.schedule.admission import Admit
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.policy import Auto, Dispatch, Policy, ShareOf1F1B
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.layer_costs import CutCosts, StageLayers, layered_of
from rrfp.simulate.costs.model import Uneven
from rrfp.trace.records import NS_PER_S, Recording
from rrfp.tune.from_costs import CHUNK_LAYOUTS, MOST_FORWARDS, by_stage
from rrfp.tune.source import Candidate, Source

_MOST_STEPS = 40
"""Most steps of a run that are measured; more would not improve the estimates."""


def source_of_run(
    recording: Recording,
    *,
    layers: tuple[int, ...] | None = None,
    uneven: Uneven = Uneven.RANKS,
    w_share: float = W_SHARE,
    loop_only: bool = False,
    num_vision_stages: int = 0,
) -> Source:
    """Make a source from a recorded run. The search uses every second one of at most 40 steps, and
    predictions are made for the others; a single step serves both.

    `layers` gives the number of layers by stage, or their total, if the run does not record it. The
    first `num_vision_stages` stages have vision layers. Raises RrfpError for a run that cannot be
    replayed, and UsageError for one that is too large or for `layers` that do not fit it.
    """
    run = read_run(recording)
    if run.shape.num_ranks * run.shape.num_microbatches * run.num_members > MOST_FORWARDS:
        raise UsageError(
            f"the run has {run.shape.num_ranks} ranks of {run.shape.num_microbatches} microbatches,"
            f" more than the {MOST_FORWARDS} forwards of a step that are searched"
        )
    settings = settings_of(recording)
    measured = measure(run)[:_MOST_STEPS]
    costs = RecordedCosts(run.shape, measured, run.left_out, run.without_sizes, False, w_share)
    split = _split(run, settings, layers)
    layered: StageLayers | None = None
    unsearched = []
    if split is not None:
        layered = replace(
            layered_of(costs, run.shape, split, uneven),
            towers=_towers(num_vision_stages, run.shape),
            seeds=range(len(measured)),
        )
    else:
        unsearched.append(
            "chunks and the split of layers: the run does not say how many layers a stage has; "
            "--layers N does"
        )
    moves_layers = settings.get("model") != "vlm"
    if not moves_layers:
        unsearched.append("the split of layers: --model vlm has as many on every stage")
    unsearched.append(
        "the size of microbatches: the run does not tell what one of another size takes"
    )
    admitted = _admitted(settings)
    if admitted is not None:
        unsearched.append(f"admission: the run's microbatches entered by --admit {admitted}")
    seeds = list(range(len(measured)))
    fresh = seeds[1::2] or seeds
    return Source(
        costs=costs if layered is None or split is None else CutCosts(layered, split),
        shape=run.shape,
        layered=layered,
        split=split,
        moves_layers=moves_layers,
        layouts=_layouts(run, layered, moves_layers=moves_layers, loop_only=loop_only),
        micro_batch_size=_whole(settings.get("micro_batch_size")),
        is_text=settings.get("model") != "vlm",
        is_uniform=settings.get("pace") is None and _is_uniform(recording),
        admitted=admitted,
        num_replicas=len(run.steps[0].replicas),
        task_ns=_overhead_ns(measured),
        message_ns=_beyond_median_ns(measured),
        tail_ns=median_low([step.tail_ns for step in measured]),
        seeds=seeds[::2],
        fresh_seeds=fresh,
        numbers=[each.step for each in run.steps[: len(measured)]],
        own=_baseline(run, split),
        measured_s=fmean(measured[seed].window_ns for seed in fresh) / NS_PER_S,
        unsearched=unsearched,
    )


def _is_uniform(recording: Recording) -> bool:
    """Return whether all messages, and so all microbatches, have the same size. Empty messages are
    ignored; False without others."""
    found = {send.num_bytes for records in recording.ranks for send in records.sends}
    return len(found - {0}) == 1


def settings_of(recording: Recording) -> Mapping[str, object]:
    """The settings given to the run, by flag; empty if unknown."""
    settings = recording.settings.get("settings")
    return settings if isinstance(settings, Mapping) else {}


def _overhead_ns(steps: Sequence[MeasuredStep]) -> int:
    """Return the mean time between two tasks, without waits for messages: the runtime's own work,
    and waits for a core. 0 if no time was measured."""
    found = [ns for step in steps for each in step.replicas for ns in each.overheads_ns.values()]
    return round(fmean(found)) if found else 0


def _beyond_median_ns(steps: Sequence[MeasuredStep]) -> int:
    """Return the mean minus the median message time, at least 0; the costs already contain the
    median. 0 without messages."""
    found = [ns for step in steps for each in step.replicas for ns in each.transfers_ns.values()]
    return max(0, round(fmean(found)) - median_low(found)) if found else 0


def _split(
    run: RecordedRun, settings: Mapping[str, object], layers: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return the layers by stage: the user's, the run's `--layout`, or the run's layers in equal
    parts. None if neither the user nor the run gives them, or if that layout has another number of
    stages. Raises UsageError for `layers` that do not fit the stages."""
    num_stages = run.shape.num_stages
    if layers is not None:
        return by_stage(layers, num_stages)
    layout = settings.get("layout")
    if isinstance(layout, str):
        found = parse_layout(layout, "the run's --layout")
        return found if len(found) == num_stages else None
    return None if run.layers is None else (run.layers // num_stages,) * num_stages


def _towers(num_vision_stages: int, shape: Shape) -> tuple[str | None, ...]:
    """The modality of each stage, `images` or `text`; empty without vision stages."""
    if not num_vision_stages:
        return ()
    return tuple(
        "images" if stage < num_vision_stages else "text" for stage in range(shape.num_stages)
    )


def _layouts(
    run: RecordedRun, layered: StageLayers | None, *, moves_layers: bool, loop_only: bool
) -> list[tuple[int, Placement]]:
    """Return the layouts to search that have a layer for each stage; only the run's own one without
    costs by layer. If layers cannot be moved, they must divide evenly. The V placement needs two
    ranks, and `loop_only` excludes it."""
    if layered is None:
        return [(run.shape.num_chunks, run.shape.placement)]
    ranks = run.shape.num_ranks
    return [
        (chunks, placement)
        for chunks, placement in CHUNK_LAYOUTS
        if ranks * chunks <= layered.num_layers
        and (moves_layers or layered.num_layers % (ranks * chunks) == 0)
        and not (placement is Placement.V and (loop_only or ranks == 1))
    ]


def _admitted(settings: Mapping[str, object]) -> str | None:
    """Return the run's `--admit`; None if its microbatches entered as the data gave them or it is
    unknown."""
    admit = settings.get("admit")
    return admit if isinstance(admit, str) and admit != Admit.GIVEN else None


def _baseline(run: RecordedRun, split: tuple[int, ...] | None) -> Candidate | None:
    """Return the run's own settings as a candidate, without bounds unless it dispatched by
    readiness; None if its order is not that of a known hint, or if its hold is `auto` or a share of
    1F1B's peak."""
    policy = run.policy
    hint = run.hint_name
    if hint not in HINTS or isinstance(policy.hold, Auto | ShareOf1F1B):
        return None
    is_bound = policy.dispatch is not Dispatch.READY
    own = Policy(
        hint=HINTS[hint],
        dispatch=policy.dispatch,
        limit=None if is_bound else policy.limit,
        hold=None if is_bound else policy.hold,
        w=policy.w,
        patience=policy.patience,
    )
    return Candidate(
        policy=own, chunks=run.shape.num_chunks, placement=run.shape.placement, split=split
    )


def _whole(value: object) -> int | None:
    """Return a value that is a positive integer; None for any other value."""
    return value if type(value) is int and value > 0 else None
