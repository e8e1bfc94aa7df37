"""Files about a run's steps that the ranks write while they train: planned orders and assignments,
one line per step, and the data planes in use.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import Store

from rrfp.errors import RrfpError, reason_of
from rrfp.runtime.planes.negotiation import AcceptedPlanes, PlaneChoice
from rrfp.schedule.admission import format_admission
from rrfp.schedule.balance import Hands, format_dealing
from rrfp.strict_json import integer, member, parsed
from rrfp.trace.run_dir import RunDir
from rrfp.trace.run_json import describe_transport
from rrfp.trace.safe_files import ReportFile, open_own, open_whole

_log = logging.getLogger(__name__)


class AssignmentFile:
    """The file, written by one rank of the run.

    A step without a line of its own, before the one that a run goes on from, has what the data
    give.
    """

    def __init__(
        self, path: Path, num_replicas: int, num_microbatches: int, first_step: int = 0
    ) -> None:
        """Keep the lines of the steps before `first_step`."""
        kept = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        # An interrupted write leaves half a line.
        whole = [line for line in kept if line.endswith("\n")][:first_step]
        firsts = range(0, num_replicas * num_microbatches, num_microbatches)
        given = format_dealing([range(first, first + num_microbatches) for first in firsts])
        with open_whole(path) as file:
            file.write(("".join(whole) + given * (first_step - len(whole))).encode())
        self._file = ReportFile(path)

    def write(self, hands: Hands) -> None:
        """Write the next step, which has ended."""
        self._file.write(format_dealing(hands))

    def close(self) -> None:
        self._file.close()


class AdmissionFile:
    """What one replica's first rank writes."""

    def __init__(self, path: Path, replica: int) -> None:
        """`path` is that of the joined file."""
        self._file = open_own(_part(path, replica), anew=True)

    def write(self, order: Sequence[int]) -> None:
        """The order of the next step."""
        self._file.write(format_admission([order]).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def join_admission_files(path: Path) -> None:
    """Join the files of all replicas, up to the last step that all of them have; without any, there
    is nothing to do."""
    parts: list[Path] = []
    while (part := _part(path, len(parts))).exists():
        parts.append(part)
    if not parts:
        return
    lines = [part.read_text("utf-8").splitlines() for part in parts]
    with open_whole(path) as file:
        for of_step in zip(*lines, strict=False):
            file.write(f"{'; '.join(of_step)}\n".encode())
    for part in parts:
        part.unlink()


def _part(path: Path, replica: int) -> Path:
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")


class TransportLog:
    """One rank's part of it: it tells what its links take, and one rank writes what all tell."""

    def __init__(
        self, store: Store, name: str, run: RunDir, rank: int, ranks: Sequence[int] = ()
    ) -> None:
        """`name` tells this run from others in the store; its directory need not have the same name
        on all hosts. `ranks` are those of the run, on the rank that writes."""
        self._store = store
        self._name = name
        self._run = run
        self._rank = rank
        self._ranks = ranks
        self._has_told = False

    def publish(self, taken: AcceptedPlanes) -> None:
        """Call it after each step until the last rank has told; it waits for nobody."""
        if not self._has_told:
            self._has_told = True
            links = {peer: settled.described() for peer, settled in sorted(taken.links.items())}
            told = {"links": links, "outbox_bytes": taken.outbox_bytes}
            self._store.set(self._key(self._rank), json.dumps(told))
        if self._ranks and self._store.check([self._key(rank) for rank in self._ranks]):
            try:
                self._write(taken)
            except (RrfpError, OSError) as error:
                _log.warning(
                    "%s does not say what carries the tensors of each link (%s)",
                    self._run.run_json,
                    reason_of(error),
                )
            self._ranks = ()

    def _write(self, own: AcceptedPlanes) -> None:
        """All ranks were asked for the same."""
        links: list[dict[str, object]] = []
        outbox_bytes = {}
        for rank in self._ranks:
            told = parsed(bytes(self._store.get(self._key(rank))))
            of_rank = member(told, "links")
            assert isinstance(of_rank, dict)
            links += [
                {"from": rank, "to": int(peer), **PlaneChoice.decode(each).described()}
                for peer, each in of_rank.items()
            ]
            outbox_bytes[str(rank)] = integer(member(told, "outbox_bytes"))
        described = {
            "asked": str(own.asked),
            "outbox_mb": own.outbox_mb,
            "links": links,
            "outbox_bytes": outbox_bytes,
        }
        describe_transport(self._run.run_json, described)

    def _key(self, rank: int) -> str:
        return f"rrfp/transport-of/{self._name}/{rank}"
