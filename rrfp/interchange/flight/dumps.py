"""Reads dumps of torch's flight recorder, one a rank, pickled or as JSON.

Their form is that of `torch/csrc/distributed/c10d/FlightRecorder.hpp`, version 2: `entries`, a
rank's last operations with their process group, sequence number and state; `pg_config`, the groups.
A pickled dump holds nothing but built-in containers, numbers and texts, and one that asks for any
class is refused. The rank is the number at the end of a file's name (`nccl_trace_rank_3`).
"""

import io
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
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
    """A file that is no dump, which a directory of dumps may hold as well."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Empty where the dump does not tell them."""
    tells_ranks: bool = True
    """Whether a dump told them; otherwise they are those that used it, if it is not of all."""

    @property
    def title(self) -> str:
        told = self.description not in ("", "undefined")
        return f"{self.description} ({self.name})" if told else f"group {self.name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, a send or a receive that a rank has begun."""

    group: str
    name: str
    """`all_reduce`, `send`, `recv`, ...; `coalesced` is what ends a batch of them."""
    is_p2p: bool
    sequence: int
    """Counted in its group, apart for collectives and for sends and receives; one in a batch."""
    peer: int | None
    """The other rank of a send or a receive."""
    is_done: bool
    state: str
    """`scheduled`, `started` or `completed`."""
    created_ns: int
    sizes: str
    place: str
    """Where in the script it was called; empty where the dump does not tell."""


@dataclass(slots=True)
class Dump:
    """One rank's."""

    path: Path
    rank: int
    groups: dict[str, Group] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    """From the oldest that it still has."""


def read_dumps(paths: Sequence[Path], note: Callable[[str], object]) -> list[Dump]:
    """The dumps in files and directories of files, by rank.

    What else a directory holds is skipped. `note` is told, and also when dumps are not of one job.
    Raises RrfpError for a file that is no dump, for a directory without any, and for two dumps of
    one rank.
    """
    dumps: dict[int, Dump] = {}
    for path in paths:
        if not path.exists():
            raise RrfpError(f"there is nothing at {path}")
        if not path.is_dir() and not path.is_file():
            raise RrfpError(f"{path} is neither a file nor a directory; give the dumps themselves")
        for dump in _dumps_in(path, note) if path.is_dir() else [_dump(path)]:
            other = dumps.setdefault(dump.rank, dump)
            # A directory may hold both forms of the same dumps.
            if _differ(dump, other):
                raise RrfpError(
                    f"{other.path} and {dump.path} are both of rank {dump.rank}, and differ; give "
                    "one dump a rank"
                )
    found = [dumps[rank] for rank in sorted(dumps)]
    _compare_groups(found, note)
    return found


def _compare_groups(dumps: Sequence[Dump], note: Callable[[str], object]) -> None:
    """Say so if the dumps cannot be of one job."""
    told: dict[str, tuple[Path, Group]] = {}
    for dump in dumps:
        for name, group in dump.groups.items():
            path, other = told.setdefault(name, (dump.path, group))
            if not other.ranks:
                told[name] = dump.path, group
            elif group.ranks and group.ranks != other.ranks:
                note(
                    f"{path} and {dump.path} tell different ranks of {group.title}, so what is "
                    "said of it may be wrong; check that they are of one job"
                )
                return


def _differ(one: Dump, other: Dump) -> bool:
    began, other_began = (
        [(*batch_of(each), each.name, each.created_ns) for each in dump.operations]
        for dump in (one, other)
    )
    return began != other_began


def _dumps_in(directory: Path, note: Callable[[str], object]) -> list[Dump]:
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
    match = _RANK.search(file.name)
    if match is None:
        raise _NoDumpError(
            f"{file} has no number at the end of its name, which tells the rank of a dump; name it "
            "like nccl_trace_rank_0"
        )
    return int(match[1])


class _Unpickler(pickle._Unpickler):
    """Reads containers, numbers and texts, and loads no code.

    It is the one in Python, whose memory grows with what a file holds: the one in C makes room for
    as many values as a file of a few bytes asks for.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]  # It makes room for what a file merely announces.
    }

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _content(file: Path) -> Mapping[str, Any]:
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
    # As JSON, the dump of a rank that began nothing has no entries.
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
    dump = Dump(file, _rank_of(file))
    content = _content(file)
    groups = content.get("pg_config")
    for key, told in groups.items() if isinstance(groups, dict) else ():
        if isinstance(told, dict):
            name = _text(told.get("name") or key)
            # gloo tells one group without a name, whose ranks are those of any.
            if not name:
                continue
            dump.groups[name] = Group(name, _text(told.get("desc")), _ranks(told.get("ranks")))
    for entry in content["entries"]:
        if isinstance(entry, dict):
            dump.operations.append(_operation(dump, entry))
    # torch never changes the state of the entries of a batch, only that of what ends it.
    ends = {batch_of(each): each for each in dump.operations if each.name == "coalesced"}
    for index, each in enumerate(dump.operations):
        if end := ends.get(batch_of(each)):
            dump.operations[index] = replace(each, is_done=end.is_done, state=end.state)
    return dump


def batch_of(operation: Operation) -> tuple[str, bool, int]:
    """What the operations of a rank's batch have in common."""
    return operation.group, operation.is_p2p, operation.sequence


def _operation(dump: Dump, entry: Mapping[str, Any]) -> Operation:
    told = entry.get("process_group")
    parts = told if isinstance(told, list | tuple) and len(told) == 2 else (told, "")
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
        # On gloo no operation's state changes, but a finished one is retired. NCCL retires those
        # that failed or timed out as well.
        state == "completed" or (entry.get("retired") is True and backend != "nccl"),
        state,
        _whole(entry.get("time_created_ns")),
        _shapes(entry.get("output_sizes" if name == "recv" else "input_sizes")),
        _place(entry.get("frames")),
    )


def _place(frames: object) -> str:
    """The innermost frame that is not torch's."""
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            file = _text(frame.get("filename"))
            if not any(part in file for part in _OF_LIBRARIES):
                return f"{file}:{_whole(frame.get('line'))} {_text(frame.get('name'))}"
    return ""


def _ranks(told: object) -> tuple[int, ...]:
    """`"[0, 1]"` in what torch writes."""
    if isinstance(told, str):
        return tuple(map(int, re.findall(r"\d{1,7}", told)))
    if isinstance(told, list):
        return tuple(rank for rank in told if type(rank) is int and 0 <= rank < _MOST_RANKS)
    return ()


def _shapes(value: object) -> str:
    """Those of a list of tensors."""
    shapes = value[:_MOST_SHAPES] if isinstance(value, list | tuple) else ()
    told = (
        ", ".join(map(_text, shape[:_MOST_SHAPES])) if isinstance(shape, list | tuple) else ""
        for shape in shapes
    )
    return f"[{', '.join(f'[{shape}]' for shape in told)}]"[:_MOST_TEXT]


def _text(value: object) -> str:
    """A text or a number as it may be printed; anything else is empty."""
    if type(value) is int and abs(value) < _MOST_WHOLE:
        return str(value)
    if not isinstance(value, str):
        return ""
    return "".join(each if each.isprintable() else "?" for each in value[:_MOST_TEXT])


def _whole(value: object) -> int:
    return value if type(value) is int and abs(value) < _MOST_WHOLE else 0
