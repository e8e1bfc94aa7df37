"""A recording made of what another program's trace tells.

What the trace does not tell is derived (`rrfp.interchange.derived`), and nothing else is made up.
Where transfers do not block, the recording also gets what a dispatcher that is bound to the run's
order would have taken in, so that the run can be replayed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rrfp.errors import RrfpError
from rrfp.interchange.derived import records_of
from rrfp.interchange.evaluations import tell_evaluations
from rrfp.interchange.imported_order import is_steady, stimuli_of
from rrfp.interchange.imported_settings import settings_of
from rrfp.interchange.run_spans import RunSpans, listed
from rrfp.interchange.spans import RankSpans, Source
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.records import Recording


@dataclass(frozen=True, slots=True)
class Imported:
    """A recording, and what the user should know of how it was made, a sentence each."""

    recording: Recording
    notes: tuple[str, ...]


def assemble(ranks: list[RankSpans], source: Source) -> Imported:
    """Make a recording of spans, one `RankSpans` a rank. Raises RrfpError when they cannot be of
    one run, or have no task."""
    ranks = sorted(ranks, key=lambda rank: rank.info.rank)
    if not any(rank.tasks for rank in ranks):
        raise RrfpError(f"the {source.name} has no task; import one that was taken in a step")
    _check_places(ranks, source)
    tell_evaluations(ranks)
    notes = [*source.notes, *_missing(ranks, source)]
    run = RunSpans(ranks)
    notes += run.put_clocks_right()
    run.begin_with_the_input()
    run.count_from_the_start()
    records = records_of(run)
    if not source.transfers_block and is_steady(records):
        for rank in records:
            rank.stimuli = list(stimuli_of(rank))
    return Imported(Recording(settings_of(run, records, source), records), tuple(notes))


def _check_places(ranks: list[RankSpans], source: Source) -> None:
    """Raise RrfpError unless every rank has a place of its own in a possible run."""
    found: dict[tuple[int, int, int], int] = {}
    for rank in ranks:
        info = rank.info
        place = info.pp_rank, info.tp_rank, info.dp_rank
        most = max(
            *(info.rank, *place, *info.stages),
            *(max(task.stage, task.microbatch) for task in rank.tasks),
        )
        if most >= MOST_OF_A_KIND:
            raise RrfpError(
                f"the {source.name} has the number {most} for a rank, a stage or a microbatch; "
                f"no run has as many as {MOST_OF_A_KIND}, so it is damaged"
            )
        if source.world_size is not None and info.rank >= source.world_size:
            raise RrfpError(
                f"the {source.name} is of rank {info.rank}, of a run of {source.world_size} ranks; "
                "import the files of one run"
            )
        if place in found:
            raise RrfpError(
                f"ranks {found[place]} and {info.rank} both say that they are pp {place[0]}, tp "
                f"{place[1]}, dp {place[2]}; import one run at a time"
            )
        found[place] = info.rank


def _missing(ranks: list[RankSpans], source: Source) -> Iterator[str]:
    present = {rank.info.rank for rank in ranks}
    missing = [rank for rank in range(source.world_size or 0) if rank not in present]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        yield (
            f"{len(missing)} of {source.world_size} ranks {are} missing ({listed(missing)}): what "
            "is said of waits for them, and of the run as a whole, is said without them"
        )
