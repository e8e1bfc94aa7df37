"""Makes a `Source` for `rrfp tune` from a costs specification."""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.errors import UsageError
from rrfp.replay.cost_sources import RecordedCosts, resolve_costs
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.language_models import FlopCosts
from rrfp.simulate.costs.layer_costs import (
    Cut,
    CutCosts,
    Given,
    check_divided,
    check_split,
    even_cut,
    layered_of,
)
from rrfp.simulate.costs.model import Costs, Uneven
from rrfp.simulate.costs.unit_costs import Layered
from rrfp.simulate.jitter import Jitter
from rrfp.tune.source import Source

_MOST_CHUNKS = 8
MOST_FORWARDS = 2**14
"""Most forwards in a step, over all ranks; larger steps take seconds to simulate."""
_JOINED = (2, 4, 8)
_DIVIDED = (2, 4)

CHUNK_LAYOUTS = (
    (1, Placement.LOOP),
    (2, Placement.LOOP),
    (2, Placement.V),
    (3, Placement.LOOP),
    (4, Placement.LOOP),
)
"""The combinations of chunks and placement that the search tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Options that describe the pipeline behind user-given costs."""

    pp: int
    microbatches: int
    micro_batch_size: int | None = None
    layers: tuple[int, ...] | None = None
    """The total number of layers, or the number for each stage."""
    uneven: Uneven = Uneven.RANKS
    tp: int = 1
    dp: int = 1
    loop_only: bool = False
    """Skip the V placement, which Megatron-LM's scripts cannot build."""
    task_ns: int = 0
    """Runtime overhead between two tasks."""
    message_ns: int = 0
    """Runtime overhead per message."""


def source_of_costs(text: str, asked: CostOptions, jitter: Jitter) -> Source:
    """Make a source from text as `--costs` takes it. Raises UsageError if the text is invalid,
    names a recorded run or cut costs, or does not fit the options, and for a step of more than
    16,384 forwards."""
    costs = resolve_costs(text)
    check_divided(costs, text, asked.tp)
    if asked.pp * asked.microbatches * asked.tp * asked.dp > MOST_FORWARDS:
        raise UsageError(
            f"{asked.pp} ranks of {asked.microbatches} microbatches are more than the "
            f"{MOST_FORWARDS} forwards of a step that are searched; choose fewer"
        )
    if isinstance(costs, RecordedCosts):
        raise UsageError(
            f"{text} is a recorded run, whose shape and settings are its own; leave out 'drawn:'"
        )
    shape = _own_shape(costs, asked)
    if isinstance(costs, CutCosts):
        raise UsageError(f"{text} cuts other costs; tune on those that it names")
    layered, split, unsearched = _layers(costs, shape, asked)
    layouts = _layouts(costs, shape, layered, loop_only=asked.loop_only)
    if layered is None and len({chunks for chunks, _ in layouts}) > 1:
        unsearched.append("chunks: a rank's time is divided evenly over them")
    sizes = _sizes(layered, asked)
    if len(sizes) == 1:
        unsearched.append(
            "the size of microbatches: the costs do not tell what one of another size takes"
        )
    source = Source(
        costs=costs if layered is None or split is None else CutCosts(layered, split),
        shape=shape,
        layered=layered,
        split=split,
        layouts=layouts,
        sizes=sizes,
        micro_batch_size=asked.micro_batch_size,
        is_text=not (isinstance(costs, FlopCosts) and costs.vision is not None),
        jitter=jitter,
        num_members=asked.tp,
        num_replicas=asked.dp,
        task_ns=asked.task_ns,
        message_ns=asked.message_ns,
        unsearched=unsearched,
    )
    # Raises UsageError now, before the search, if the costs do not fit the shape.
    source.costs.step(shape, 0, 0)
    return source


def cut_of(text: str, source: Source, asked_uneven: Uneven, split: Sequence[int]) -> Cut:
    """The content of a costs file that divides the costs `text` by this split of layers. Unless the
    costs are a model with layers of its own, it also states the layout and split that they have."""
    given = None
    if source.split is not None and not isinstance(source.layered, FlopCosts):
        given = Given(
            layers=",".join(map(str, source.split)),
            pp=source.shape.num_ranks,
            microbatches=source.shape.num_microbatches,
            chunks=source.shape.num_chunks,
            placement=source.shape.placement,
            uneven=asked_uneven,
        )
    return Cut(costs=text, layers=",".join(map(str, split)), given=given)


def by_stage(layers: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, from one number per stage or from their total,
    which is divided evenly. Raises UsageError for a number that does not fit the stages."""
    if len(layers) > 1 or num_stages == 1:
        check_split(layers, sum(layers), num_stages, "--layers")
        return layers
    if layers[0] < num_stages:
        raise UsageError(
            f"--layers is {layers[0]} and the costs have {num_stages} stages; there must be as "
            "many at least"
        )
    return even_cut(layers[0], num_stages)


def _own_shape(costs: Costs, asked: CostOptions) -> Shape:
    """Return the shape with the fewest chunks, up to 8, for which the costs are valid. Raises the
    UsageError of one chunk if all are invalid."""
    whole: UsageError | None = None
    for chunks in range(1, _MOST_CHUNKS + 1):
        shape = Shape(asked.pp, asked.microbatches, chunks)
        try:
            costs.step(shape, 0, 0)
        except UsageError as error:
            whole = whole or error
        else:
            return shape
    assert whole is not None
    raise whole


def _layers(
    costs: Costs, shape: Shape, asked: CostOptions
) -> tuple[Layered | None, tuple[int, ...] | None, list[str]]:
    """Return the costs by layer and their own split, or None for both, and notes on what cannot be
    searched. Raises UsageError for `layers` that the model itself has, or that do not fit the
    stages."""
    if isinstance(costs, FlopCosts):
        if asked.layers is not None:
            raise UsageError("the model says how many layers it has; leave --layers out")
        return costs, costs.split_over(shape.num_stages), []
    if asked.layers is None:
        note = (
            "the split of layers: the costs do not say how many layers a stage has; --layers N does"
        )
        return None, None, [note]
    split = by_stage(asked.layers, shape.num_stages)
    return layered_of(costs, shape, split, asked.uneven), split, []


def _layouts(
    costs: Costs, shape: Shape, layered: Layered | None, *, loop_only: bool
) -> list[tuple[int, Placement]]:
    """The layouts of `CHUNK_LAYOUTS` that the costs allow: with a layer for each stage or, without
    costs by layer, if the costs are valid for them. The V placement needs two ranks, and
    `loop_only` excludes it."""
    found = []
    for chunks, placement in CHUNK_LAYOUTS:
        if loop_only and placement is Placement.V:
            continue
        if layered is not None:
            fits = shape.num_ranks * chunks <= layered.num_layers
        else:
            try:
                other = Shape(shape.num_ranks, shape.num_microbatches, chunks, placement)
                costs.step(other, 0, 0)
                fits = True
            except UsageError:
                fits = False
        if fits and not (placement is Placement.V and shape.num_ranks == 1):
            found.append((chunks, placement))
    return found


def _sizes(layered: Layered | None, asked: CostOptions) -> list[tuple[int, int]]:
    """Return the sizes of microbatches to try, as (joined, divided): only the given one unless the
    costs by layer know the time that does not depend on size; then also 2, 4 or 8 joined, if that
    divides their number, and 2 or 4 parts, if that divides the micro-batch size."""
    sizes = [(1, 1)]
    if layered is not None and layered.fixed_ns is not None:
        sizes += [(num, 1) for num in _JOINED if asked.microbatches % num == 0]
        size = asked.micro_batch_size or 1
        sizes += [(1, num) for num in _DIVIDED if size % num == 0]
    return sizes
