"""Reads dumps of torch's flight recorder, one per rank, and finds which ranks of a hung job wait.

The format is that of `torch/csrc/distributed/c10d/FlightRecorder.hpp`, version 2, pickled or JSON:
`entries`, a rank's last operations with their process group, sequence number and state, and
`pg_config`, the groups. A pickled dump contains only built-in containers, numbers and texts; one
that needs any class is refused. The rank is the number at the end of a file's name
(`nccl_trace_rank_3`).
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from rrfp.errors import RrfpError

_MOST_BYTES = 1 << 28
_RANK = re.compile(r"(?<!\d)(\d{1,6})(?:\.(?:pkl|pickle|json|bin|dump))?\Z", re.ASCII)
_P2P = re.compile(r"(send|recv) (\d{1,6})(->|<-)(\d{1,6})", re.ASCII)
_OF_LIBRARIES = ("/torch/", "/threading.py", "/contextlib.py", "/functools.py")
_MOST_TEXT = 200
_MOST_SHAPES = 32
_MOST_NOTES = 5
_MOST_WHOLE = 1 << 63
_MOST_RANKS = 10_000_000


class _NoDumpError(RrfpError):
    """A file is not a dump. Such files in a directory of dumps are skipped."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """The ranks of the group; empty if they are not in the dump."""
    tells_ranks: bool = True
    """True if a dump contains them. Otherwise they are all ranks, or those that used the group."""

    @property
    def title(self) -> str:
        """The description and the name of the group for messages."""
        is_described = self.description not in ("", "undefined")
        return f"{self.description} ({self.name})" if is_described else f"group {self.name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, a send or a receive that a rank has begun."""

    group: str
    name: str
    """`all_reduce`, `send`, `recv`, ...; `coalesced` for the last entry of a batch of
    operations."""
    is_p2p: bool
    sequence: int
    """The number in its group, counted separately for collectives and for sends and receives. All
    operations of a batch have the same number."""
    peer: int | None
    """The other rank of a send or a receive."""
    is_done: bool
    state: str
    """`scheduled`, `started` or `completed`."""
    created_ns: int
    sizes: str
    place: str
    """The place of the call in the script; empty if it is not in the dump."""


@dataclass(slots=True)
class Dump:
    """The dump of one rank."""

    path: Path
    rank: int
    groups: dict[str, Group] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    """The operations that the dump still has, the oldest first."""


def read_dumps(paths: Sequence[Path], note: Callable[[str], object]) -> list[Dump]:
    """Read the dumps in files and directories of files, in the order of their ranks.

    Other files in a directory are skipped with a call of `note`, which is also called if dumps are
    not from one job. Raises RrfpError for a file that is not a dump, for a directory without dumps,
    and for two different dumps of one rank.
    """
    dumps: dict[int, Dump] = {}
    for path in paths:
        if not path.exists():
            raise RrfpError(f"there is nothing at {path}")
        if not path.is_dir() and not path.is_file():
            raise RrfpError(f"{path} is neither a file nor a directory; give the dumps themselves")
        for dump in _dumps_in(path, note) if path.is_dir() else [_dump(path)]:
            other = dumps.setdefault(dump.rank, dump)
            # A directory may contain the same dump pickled and as JSON.
            if _differ(dump, other):
                raise RrfpError(
                    f"{other.path} and {dump.path} are both of rank {dump.rank}, and differ; give "
                    "one dump a rank"
                )
    found = [dumps[rank] for rank in sorted(dumps)]
    _compare_groups(found, note)
    return found


def _compare_groups(dumps: Sequence[Dump], note: Callable[[str], object]) -> None:
    """Call `note` for the first group for which two dumps state different ranks, as they cannot be
    from one job."""
    found: dict[str, tuple[Path, Group]] = {}
    for dump in dumps:
        for name, group in dump.groups.items():
            path, other = found.setdefault(name, (dump.path, group))
            if not other.ranks:
                found[name] = dump.path, group
            elif group.ranks and group.ranks != other.ranks:
                note(
                    f"{path} and {dump.path} tell different ranks of {group.title}, so what is "
                    "said of it may be wrong; check that they are of one job"
                )
                return


def _differ(one: Dump, other: Dump) -> bool:
    """True if two dumps have different operations, by their numbers, names and times; their states
    may differ."""
    began, other_began = (
        [(*batch_of(each), each.name, each.created_ns) for each in dump.operations]
        for dump in (one, other)
    )
    return began != other_began


def _dumps_in(directory: Path, note: Callable[[str], object]) -> list[Dump]:
    """Read all dumps in a directory, not its subdirectories. Other files are skipped, with a call
    of `note` for each of the first 5 and one for the rest. Raises RrfpError if it has no dumps, or
    one of another version."""
    found: list[Dump] = []
    skipped: list[_NoDumpError] = []
    for file in sorted(file for file in directory.iterdir() if file.is_file()):
        try:
            found.append(_dump(file))
        except _NoDumpError as error:
            skipped.append(error)
    for why in skipped[:_MOST_NOTES]:
        note(f"skipped: {why}")
    if len(skipped) > _MOST_NOTES:
        note(f"skipped {len(skipped) - _MOST_NOTES} more files of {directory} that are no dumps")
    if not found:
        raise RrfpError(
            f"{directory} has no dump of torch's flight recorder, such as nccl_trace_rank_0; set "
            "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 in the job"
        )
    return found


def _rank_of(file: Path) -> int:
    """The rank at the end of a file's name. Raises _NoDumpError without one."""
    match = _RANK.search(file.name)
    if match is None:
        raise _NoDumpError(
            f"{file} has no number at the end of its name, which tells the rank of a dump; name it "
            "like nccl_trace_rank_0"
        )
    return int(match[1])


class _Unpickler(pickle._Unpickler):
    """Reads containers, numbers and texts, and loads no code.

    Derived from the unpickler in Python, whose memory grows with the file. The one in C allocates
    as much memory as a file of a few bytes demands.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]  # It allocates any size that a file states.
    }

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _content(file: Path) -> Mapping[str, Any]:
    """Decode a file, JSON or a pickle that loads no code. Raises _NoDumpError if it is not a dump
    or is too large, and RrfpError if it cannot be read or has another version."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise _NoDumpError(f"{file} is larger than {_MOST_BYTES >> 20} MiB; no dump is")
        data = file.read_bytes()
    except OSError as error:
        raise RrfpError(f"{file} cannot be read: {error.strerror}") from None
    try:
        if data.lstrip()[:1] == b"{":
            content = json.loads(data)
        else:
            content = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # A damaged pickle raises almost anything.
        reason = _text(" ".join(str(error).split())[:80]) or type(error).__name__
        raise _NoDumpError(
            f"{file} is no dump of torch's flight recorder ({reason}); give the files that the "
            "job wrote, one a rank"
        ) from None
    # The JSON dump of a rank without operations has no entries.
    if isinstance(content, dict) and isinstance(content.get("pg_config"), dict):
        content.setdefault("entries", [])
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise _NoDumpError(
            f"{file} is no dump of torch's flight recorder: it has no entries; give the files that "
            "the job wrote, one a rank"
        )
    version = _text(content.get("version", "2"))
    if version.partition(".")[0] != "2":
        raise RrfpError(
            f"{file} is a dump of version {version or 'unknown'}, and only version 2 is read; "
            "write it with a newer torch"
        )
    return content


def _dump(file: Path) -> Dump:
    """Read one dump. Entries that are no objects are skipped, invalid fields of others become empty
    or 0, and all operations of a batch get the state of its last one. Raises RrfpError as
    `_content` does, and _NoDumpError without a rank in its name."""
    dump = Dump(file, _rank_of(file))
    content = _content(file)
    groups = content.get("pg_config")
    for key, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            name = _text(group.get("name") or key)
            # gloo writes only one group, without a name, whose ranks may be those of any group.
            if not name:
                continue
            dump.groups[name] = Group(name, _text(group.get("desc")), _ranks(group.get("ranks")))
    for entry in content["entries"]:
        if isinstance(entry, dict):
            dump.operations.append(_operation(dump, entry))
    # torch only updates the state of a batch's last entry, so copy it to the others.
    ends = {batch_of(each): each for each in dump.operations if each.name == "coalesced"}
    for index, each in enumerate(dump.operations):
        if end := ends.get(batch_of(each)):
            dump.operations[index] = replace(each, is_done=end.is_done, state=end.state)
    return dump


def batch_of(operation: Operation) -> tuple[str, bool, int]:
    """The key that a rank's operations of one batch have in common: group, whether it is a send or
    receive, and sequence number."""
    return operation.group, operation.is_p2p, operation.sequence


def _operation(dump: Dump, entry: Mapping[str, Any]) -> Operation:
    """Decode an operation; invalid fields become empty or 0. It is done if it is completed or,
    except on NCCL, retired. Adds its group to the dump if it is new."""
    named = entry.get("process_group")
    parts = named if isinstance(named, list | tuple) and len(named) == 2 else (named, "")
    group = _text(parts[0])
    dump.groups.setdefault(group, Group(group, _text(parts[1]), ()))
    backend, _, name = _text(entry.get("profiling_name")).rpartition(":")
    peer = None
    if match := _P2P.fullmatch(name):
        name, peer = match[1], int(match[4])
        ranks = dump.groups[group].ranks
        peer = ranks[peer] if peer < len(ranks) else peer
    is_p2p = entry.get("is_p2p") is True or peer is not None
    state = _text(entry.get("state"))
    return Operation(
        group,
        name,
        is_p2p,
        _whole(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        peer,
        # On gloo the state never changes, but finished operations are retired. NCCL also retires
        # operations that failed or timed out.
        state == "completed" or (entry.get("retired") is True and backend != "nccl"),
        state,
        _whole(entry.get("time_created_ns")),
        _shapes(entry.get("output_sizes" if name == "recv" else "input_sizes")),
        _place(entry.get("frames")),
    )


def _place(frames: object) -> str:
    """Format the innermost frame that is not in torch or the standard library: `file:line
    function`. Empty without one."""
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            file = _text(frame.get("filename"))
            if not any(part in file for part in _OF_LIBRARIES):
                return f"{file}:{_whole(frame.get('line'))} {_text(frame.get('name'))}"
    return ""


def _ranks(value: object) -> tuple[int, ...]:
    """Decode ranks from a list or from torch's text, `"[0, 1]"`; what is no rank is left out, and
    any other value gives none."""
    if isinstance(value, str):
        return tuple(map(int, re.findall(r"\d{1,7}", value)))
    if isinstance(value, list):
        return tuple(rank for rank in value if type(rank) is int and 0 <= rank < _MOST_RANKS)
    return ()


def _shapes(value: object) -> str:
    """Format the shapes of a list of tensors: `[[2, 3], [4]]`, cut after 200 characters; `[]` for
    any other value."""
    shapes = value[:_MOST_SHAPES] if isinstance(value, list | tuple) else ()
    texts = (
        ", ".join(map(_text, shape[:_MOST_SHAPES])) if isinstance(shape, list | tuple) else ""
        for shape in shapes
    )
    return f"[{', '.join(f'[{shape}]' for shape in texts)}]"[:_MOST_TEXT]


def _text(value: object) -> str:
    """Format text or an integer in printable characters, at most 200, with `?` for others; empty
    for other values."""
    if type(value) is int and abs(value) < _MOST_WHOLE:
        return str(value)
    if not isinstance(value, str):
        return ""
    return "".join(each if each.isprintable() else "?" for each in value[:_MOST_TEXT])


def _whole(value: object) -> int:
    """The value if it is an integer of at most 63 bits; otherwise 0."""
    return value if type(value) is int and abs(value) < _MOST_WHOLE else 0


# The analysis of a hung job: for which ranks each rank waits.
#
# In each group a rank is in the first operation that has not ended. In a collective it waits for
# the ranks of the group that have not begun it. In a send or a receive it waits for its peer,
# unless the peer is in the matching receive or send. Operations between two ranks run one after the
# other, unless they are in a batch. In a batch it waits for all ranks that the batch's parts wait
# for. A rank that others wait for and that is in no operation never came, and is the one to look
# at. Without such a rank, ranks wait for each other in a circle.


_OF_ALL = "default_pg"
_OTHER_HALF = {"send": "recv", "recv": "send"}


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank's wait in an operation that has not ended."""

    rank: int
    group: Group
    operation: Operation
    waits_for: tuple[int, ...]
    """The ranks that have not begun it; empty if all have, and it does not end nevertheless."""
    parts: tuple[Operation, ...]
    """The operations of a batch that the dump still has."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks of one group whose operations with one number differ."""

    group: Group
    sequence: int
    operations: Mapping[str, tuple[int, ...]]
    """The ranks that began each operation, by its description. A batch's operations are joined by
    commas."""


@dataclass(frozen=True, slots=True)
class Hang:
    """The analysis of a job's dumps."""

    ranks: tuple[int, ...]
    """The ranks with a dump."""
    without_dump: tuple[int, ...]
    waits: tuple[Wait, ...]
    """The waits of all ranks, by rank; the longest wait of a rank is its first."""
    never_came: tuple[int, ...]
    """The ranks that others wait for, and that are in no operation."""
    circles: tuple[tuple[int, ...], ...]
    """Circles of ranks: each waits for the next, and the last for the first."""
    mismatches: tuple[Mismatch, ...]
    last: Mapping[int, Operation]
    """The last operation that each rank began."""
    groups: Mapping[str, Group]
    """The groups by name."""


def hang_of(dumps: Sequence[Dump]) -> Hang:
    """Analyze the dumps of a hung job: which ranks each rank waits for, which never came, circles
    of waits, and collectives that differ between ranks."""
    groups = _groups(dumps)
    with_dump = {dump.rank for dump in dumps}
    # Ranks have no gaps, so lower numbers exist too.
    numbered = range(max(with_dump, default=0))
    begun = _Begun(dumps)
    waits = [
        Wait(
            dump.rank,
            groups[operation.group],
            operation,
            begun.missing(dump.rank, parts or [operation], groups[operation.group]),
            tuple(parts),
        )
        for dump in dumps
        for *parts, operation in _first_pending(dump)
    ]
    waits.sort(key=lambda wait: (wait.rank, wait.operation.created_ns))
    edges: defaultdict[int, set[int]] = defaultdict(set)
    for wait in waits:
        edges[wait.rank].update(wait.waits_for)
    waited_for = set().union(*edges.values()) if edges else set()
    known = with_dump.union(numbered, *(group.ranks for group in groups.values()), waited_for)
    return Hang(
        tuple(sorted(with_dump)),
        tuple(sorted(known - with_dump)),
        tuple(waits),
        tuple(sorted(waited_for - {wait.rank for wait in waits})),
        tuple(_circles(edges)),
        tuple(_mismatches(dumps, groups)),
        {dump.rank: dump.operations[-1] for dump in dumps if dump.operations},
        groups,
    )


def _groups(dumps: Sequence[Dump]) -> dict[str, Group]:
    """All groups by name. If no dump has a group's ranks, as on gloo, they are the ranks that used
    it, or all ranks for the default group."""
    found: dict[str, Group] = {}
    used: defaultdict[str, set[int]] = defaultdict(set)
    for dump in dumps:
        for name, group in dump.groups.items():
            if name not in found or len(group.ranks) > len(found[name].ranks):
                found[name] = group
        for operation in dump.operations:
            used[operation.group].add(dump.rank)
    last_rank = max((dump.rank for dump in dumps), default=-1)
    for name, group in found.items():
        if not group.ranks:
            is_of_all = group.description == _OF_ALL
            ranks = range(1 + last_rank) if is_of_all else sorted(used[name])
            found[name] = replace(group, ranks=tuple(ranks), tells_ranks=False)
    return found


def _first_pending(dump: Dump) -> Iterator[list[Operation]]:
    """Yield the first operation of each group that has not ended, or all operations of its batch
    that have not, the `coalesced` one last."""
    first: dict[str, list[Operation]] = {}
    for operation in dump.operations:
        if not operation.is_done:
            batch = first.setdefault(operation.group, [operation])
            if operation is not batch[0] and batch_of(operation) == batch_of(batch[0]):
                batch.append(operation)
    for batch in first.values():
        # Without that last entry it is not a batch: on gloo all sends have the same number.
        yield batch if batch[-1].name == "coalesced" else batch[:1]


class _Begun:
    """The operations that each rank has begun."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self._last: dict[tuple[int, str], int] = {}
        """The highest sequence number of a rank's collectives in a group."""
        self._halves: set[tuple[int, str, str, int]] = set()
        """The sends and receives that ranks are in: rank, group, name and peer."""
        for dump in dumps:
            batches = {batch_of(each) for each in dump.operations if each.name == "coalesced"}
            first: dict[tuple[str, int], Operation] = {}
            for operation in dump.operations:
                group = operation.group
                if not operation.is_p2p:
                    last = self._last.get((dump.rank, group), -1)
                    self._last[dump.rank, group] = max(last, operation.sequence)
                elif operation.peer is not None and not operation.is_done:
                    before = first.setdefault((group, operation.peer), operation)
                    batch = batch_of(operation)
                    if operation is before or (batch == batch_of(before) and batch in batches):
                        self._halves.add((dump.rank, group, operation.name, operation.peer))

    def missing(self, rank: int, parts: Sequence[Operation], group: Group) -> tuple[int, ...]:
        """The ranks that a rank waits for in these operations: a peer that is not in the matching
        send or receive, and the members of the group that have not begun the collective."""
        found: set[int] = set()
        for each in parts:
            if each.peer is not None:
                if (each.peer, each.group, _OTHER_HALF[each.name], rank) not in self._halves:
                    found.add(each.peer)
            elif not each.is_p2p:
                last = {other: self._last.get((other, each.group), -1) for other in group.ranks}
                found.update(other for other in last if last[other] < each.sequence)
        return tuple(sorted(found - {rank}))


def _circles(edges: Mapping[int, set[int]]) -> Iterator[tuple[int, ...]]:
    """Yield circles of ranks that wait for each other, each from its smallest rank. Of the ranks
    that a rank waits for, only the smallest is followed."""
    visited: set[int] = set()
    for start in sorted(edges):
        path: dict[int, None] = {}
        rank = start
        while rank not in path and rank not in visited and edges.get(rank):
            path[rank] = None
            rank = min(edges[rank])
        if rank in path:
            ranks = list(path)
            circle = ranks[ranks.index(rank) :]
            first = circle.index(min(circle))
            yield tuple(circle[first:] + circle[:first])
        visited.update(path)


def _mismatches(dumps: Sequence[Dump], groups: Mapping[str, Group]) -> Iterator[Mismatch]:
    """Yield, for each group, the first sequence number for which its ranks began different
    collectives, or all-reduces of different sizes. A batch that is a dump's oldest is skipped, as
    it may have lost parts."""
    began: defaultdict[tuple[str, int], dict[int, list[Operation]]] = defaultdict(dict)
    for dump in dumps:
        for operation in dump.operations:
            if not operation.is_p2p:
                of_rank = began[operation.group, operation.sequence]
                of_rank.setdefault(dump.rank, []).append(operation)
    oldest = {dump.rank: dump.operations[0] for dump in dumps if dump.operations}
    reported = set()
    for (group, sequence), of_ranks in sorted(began.items()):
        found: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank, operations in of_ranks.items():
            is_batch = operations[-1].name == "coalesced"
            # The oldest batch of a dump may have lost its first parts.
            if not (is_batch and operations[0] is oldest[rank]):
                found[tuple(map(_signature, operations))].append(rank)
        if len(found) > 1 and group not in reported:
            reported.add(group)
            yield Mismatch(
                groups[group],
                sequence,
                {
                    ", ".join(
                        f"{each.name} of {each.sizes}"
                        for each in of_ranks[ranks[0]]
                        if each.name != "coalesced"
                    ): tuple(ranks)
                    for ranks in found.values()
                },
            )


def _signature(operation: Operation) -> str:
    """The part of an operation that must be equal on all ranks: its name, and the sizes of an
    all-reduce."""
    return operation.name + (operation.sizes if operation.name == "all_reduce" else "")
