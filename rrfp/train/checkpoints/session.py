"""A session: what one call of `rrfp train` adds to a run that saves checkpoints."""

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.runtime.decoding import integer, member, text
from rrfp.trace.files.whole_file import open_whole, remove_unfinished
from rrfp.trace.rundir import RunDir
from rrfp.trace.sessions import next_session
from rrfp.train.checkpoints.directory import Checkpoint, CheckpointDir
from rrfp.train.checkpoints.manifest import METRICS, Manifest
from rrfp.train.checkpoints.matching import check_continues, check_unused
from rrfp.train.data.contents import data_contents
from rrfp.train.ranks.exchange import broadcast_json
from rrfp.train.ranks.parallel import Layout
from rrfp.train.ranks.stopping import agree
from rrfp.train.settings import TrainSettings

_AGREE_S = 10.0
"""How often ranks hear from rank 0 while it reads a checkpoint: collectives give a rank up after
some minutes."""


@dataclass(frozen=True, slots=True)
class Session:
    """Where a session begins, and where it writes."""

    run: RunDir
    checkpoint: Checkpoint | None = None
    """What it goes on from; None for a start from the seed."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """What the data are, for the description of the checkpoints."""

    @property
    def first_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


@contextmanager
def session_of(run: RunDir, settings: TrainSettings, layout: Layout) -> Iterator[Session]:
    """Begin a session of the run in this directory; every rank calls this. Until the block ends no
    other run saves to the same checkpoints.

    Rank 0 decides for all which checkpoint to go on from, because only the holder of the
    directory's lock can be sure that no other is being finished.
    """
    if settings.run.save is None:
        yield Session(run)
        return
    # Only rank 0 needs them. But reading may take long, and if rank 0 read alone, the others would
    # give it up in their collective.
    contents = data_contents(settings)
    directory = CheckpointDir(settings.run.save)
    leads = layout.rank == 0
    with directory.locked() if leads else nullcontext():
        told: dict[str, object] = {}
        found = _newest(directory, leads=leads) if settings.run.resume else None
        if leads:
            if not settings.run.resume:
                check_unused(directory.path, directory.newest(with_content=False))
            elif found is not None:
                check_continues(settings, contents, found)
            for file in (run.run_json, run.metrics):
                remove_unfinished(file)
            run = next_session(run.path)
            restore_metrics(run, found)
            told = {"session": run.session, "name": "" if found is None else found.path.name}

        def decode(value: object) -> tuple[int, Path | None]:
            name = text(member(value, "name"))
            return integer(member(value, "session")), directory.path_of(name) if name else None

        number, path = broadcast_json(told, decode)
        checkpoint = None
        if path is not None:
            try:
                checkpoint = Checkpoint(path, Manifest.read(path))
            except (OSError, ValueError) as error:
                raise RrfpError(
                    f"rank {layout.rank} cannot read the checkpoint {path} ({error}); see whether "
                    "all hosts share that directory"
                ) from error
        yield Session(RunDir(run.path, number), checkpoint, contents)


def _newest(directory: CheckpointDir, *, leads: bool) -> Checkpoint | None:
    """The newest whole checkpoint, on rank 0, for which the other ranks wait."""
    with ThreadPoolExecutor(1, thread_name_prefix="rrfp-checkpoint") as pool:
        looking = [pool.submit(directory.newest)] if leads else []
        is_busy = True
        while is_busy:
            _, is_busy = agree(is_busy=bool(wait(looking, _AGREE_S).not_done))
        return looking[0].result() if leads else None


def restore_metrics(run: RunDir, checkpoint: Checkpoint | None) -> None:
    """Give a run the metrics of the steps that a checkpoint has, and no others.

    May raise OSError.
    """
    if checkpoint is None:
        if run.metrics.exists():
            with open_whole(run.metrics):
                pass
        return
    with (checkpoint.path / METRICS).open("rb") as saved, open_whole(run.metrics) as file:
        shutil.copyfileobj(saved, file)
