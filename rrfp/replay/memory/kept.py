"""What the microbatches of a recorded step kept in memory, and the bounds in force."""

from collections.abc import Iterable, Sequence

from rrfp.errors import RrfpError
from rrfp.replay.step_records import Members, RankStep
from rrfp.schedule.shape import Shape
from rrfp.schedule.sizes import Rows, Sizes
from rrfp.schedule.tasks import Kind
from rrfp.trace.kept_bytes import are_known, kept_changes, wrong_changes
from rrfp.trace.steps import step_name


def sizes_of_rank(shape: Shape, rank: RankStep) -> Sizes:
    """The sizes of one rank's chunks in a step; zeros where they are not known.

    Raises RrfpError for bytes that do not add up.
    """
    if wrong := wrong_changes(rank.tasks):
        raise RrfpError(
            f"the bytes that rank {rank.info.rank} held in {step_name(wrong[0].step)} do not add "
            "up; see 'rrfp trace check'"
        )
    kept = [[0] * shape.num_microbatches for _ in range(shape.num_chunks)]
    owed = [[0] * shape.num_microbatches for _ in range(shape.num_chunks)]
    for task, change, left in kept_changes(rank.tasks):
        chunk = shape.chunk_of(task.stage)
        if task.kind == Kind.F:
            kept[chunk][task.microbatch] = change
        elif task.kind == Kind.B:
            owed[chunk][task.microbatch] = left
            # Where W needs more than F kept, that is what a bound must leave room for.
            kept[chunk][task.microbatch] = max(kept[chunk][task.microbatch], left)
    return Sizes(kept, owed if shape.splits_backward else None)


def sizes_of_replica(shape: Shape, replica: Sequence[Members]) -> Sizes | None:
    """The sizes of a replica's stages in a step, the largest where several ranks run a stage; None
    where they are not known. Raises RrfpError for bytes that do not add up."""
    if not are_any_known(rank for members in replica for rank in members):
        return None
    of_ranks = [_largest([sizes_of_rank(shape, rank) for rank in members]) for members in replica]
    places = [(shape.rank_of(stage), shape.chunk_of(stage)) for stage in range(shape.num_stages)]
    kept = [of_ranks[rank].kept[chunk] for rank, chunk in places]
    owed = [(of_ranks[rank].owed or of_ranks[rank].kept)[chunk] for rank, chunk in places]
    return Sizes(kept, owed if shape.splits_backward else None)


def budgets_of(replica: Sequence[Members]) -> tuple[int, ...]:
    """The bounds in bytes of a step by pipeline rank, the least where several ranks run its tasks;
    empty if a rank had none."""
    found = tuple(min(rank.budget_bytes for rank in members) for members in replica)
    return found if all(found) else ()


def knows_sizes(replica: Sequence[Members]) -> bool:
    """Whether a step's sizes are those of its microbatches. Under a bound in bytes, one of a kind
    that was never measured is given all of the bound."""
    ranks = [rank for members in replica for rank in members]
    return are_any_known(ranks) and not any(rank.unknown_sizes for rank in ranks)


def are_any_known(ranks: Iterable[RankStep]) -> bool:
    """Whether any of these ranks tells the bytes that its tasks kept."""
    return any(are_known(rank.tasks) for rank in ranks)


def _largest(found: Sequence[Sizes]) -> Sizes:
    if len(found) == 1:
        return found[0]
    owed = [sizes.owed for sizes in found if sizes.owed is not None]
    return Sizes(_largest_rows([sizes.kept for sizes in found]), _largest_rows(owed) or None)


def _largest_rows(found: Sequence[Rows]) -> list[list[int]]:
    return [[max(each) for each in zip(*rows, strict=True)] for rows in zip(*found, strict=True)]
