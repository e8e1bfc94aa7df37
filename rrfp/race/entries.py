"""Entries and turns of a race, and the files that the launcher and the ranks exchange.

A **race** is one launch of ranks. Its **entries** are the compared systems with their settings. In
**round** r every entry has a **turn**: it runs one training step under seed + r, so that all turns
of a round have the same data, costs and jitter. Every round shuffles the entries, so that drift of
the machine, and effects of one turn on the next, affect all entries alike.

Imports no torch, because the command line also writes and reads these files.
"""

import json
import os
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from rrfp.trace.safe_files import open_own, write_whole
from rrfp.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Entry:
    """A system in a race, with its settings."""

    name: str
    """Unique among all entries."""
    settings: TrainSettings
    """Training settings. `steps` is the number of rounds; `pace` and `jitter` give the modeled
    task times."""
    peer: str | None = None
    """Name of the peer whose schedule runs it (`rrfp.race.systems.PEERS`); None for rrfp or
    Megatron."""
    time_factor: float = 1.0
    """Factor between its task times and those of the costs."""
    costs_sha256: str | None = None
    """SHA-256 of its costs file, which every host reads; None for a preset."""

    def to_json(self) -> str:
        """Format the entry as a line of JSON."""
        described = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(described | {"settings": self.settings.described()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        settings = TrainSettings.from_json(json.dumps(values.pop("settings")))
        return cls(settings=settings, **values)


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of an entry's step in a round. Times of ranks are means over all ranks."""

    entry: str
    round: int
    step_time_s: float
    """Time from the first rank's entry into the schedule to the last rank's return."""
    compute_s: float
    """Time in F, B and W."""
    blocking_s: float
    """Idle time: from the first rank's entry to this rank's, waits for inputs and transfers, and
    from this rank's return to the last rank's."""
    coordination_s: float
    """Time waiting for the agreement of ranks that share a collective."""
    peak_held: float
    """Peak number of activations of any rank, in microbatches of the whole rank."""
    num_tasks: int
    num_over: int
    """Number of tasks whose real work exceeded their modeled time."""
    peak_held_bytes: int | None = None
    """Peak bytes of any rank by the costs' sizes; None if the costs have no sizes."""
    gradient_difference: float | None = None
    """In round 0 only: the largest ||own - reference|| / ||reference|| of any parameter."""
    gradients_same: bool | None = None
    """In round 0 only: True if gradients are bit-identical to the reference's."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A turn that failed."""

    entry: str
    round: int
    error: str


@dataclass(frozen=True, slots=True)
class RaceFiles:
    """The files of a race in its directory."""

    path: Path

    @property
    def entries(self) -> Path:
        """The file of entries, one `Entry` per line."""
        return self.path / "entries.jsonl"

    @property
    def turns(self) -> Path:
        """The file of results, one `Turn` or `Failure` per line, in the order of completion."""
        return self.path / "turns.jsonl"

    @property
    def current_turn_file(self) -> Path:
        """The file with the entry and the round of the last turn that began."""
        return self.path / "under_way.json"

    def write_entries(self, entries: Sequence[Entry]) -> None:
        """Write the file of entries, in the place of an earlier one."""
        lines = "".join(f"{entry.to_json()}\n" for entry in entries)
        write_whole(self.entries, lines.encode())

    def read_entries(self) -> list[Entry]:
        return [Entry.from_json(line) for line in self.entries.read_text("utf-8").splitlines()]

    def append(self, ended: Turn | Failure) -> None:
        """Append a turn or failure to the file of results."""
        append_object(self.turns, asdict(ended))

    def read_turns(self) -> list[Turn | Failure]:
        """Read the turns and failures so far, in the order of completion. Invalid lines are
        skipped; a missing file gives an empty list."""
        return [
            kind(**values)
            for values in read_objects(self.turns)
            for kind in (Turn, Failure)
            if _are_fields(values, kind)
        ]

    def ended(self) -> set[tuple[str, int]]:
        """Return the entry name and the round of every completed turn; failures do not count."""
        return {(each.entry, each.round) for each in self.read_turns() if isinstance(each, Turn)}

    def failed(self) -> set[str]:
        """Names of the entries that failed and have not completed a turn since."""
        last = {each.entry: each for each in self.read_turns()}
        return {name for name, each in last.items() if isinstance(each, Failure)}

    def write_current_turn(self, entry: Entry, number: int) -> None:
        """Store the entry and the round of the turn that begins now, in the place of the last
        one."""
        write_whole(self.current_turn_file, json.dumps([entry.name, number]).encode())

    def read_current_turn(self) -> tuple[str, int] | None:
        """The entry name and the round of the last turn that began; None before the first."""
        if not self.current_turn_file.exists():
            return None
        name, number = json.loads(self.current_turn_file.read_text(encoding="utf-8"))
        return name, number


def _are_fields(values: dict[str, Any], kind: type[Turn | Failure]) -> bool:
    """Return whether the values are the fields of `kind`, with the right types."""
    types = get_type_hints(kind)
    return values.keys() == types.keys() and all(
        isinstance(value, types[name] if types[name] is not float else float | int)
        for name, value in values.items()
    )


def append_object(path: Path, values: dict[str, Any]) -> None:
    """Append an object to a JSON lines file, after terminating an incomplete last line."""
    with open_own(path) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(f"{json.dumps(values)}\n".encode())


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON lines file; none if it is missing. Skips lines that are not
    objects, such as the rest of an interrupted write."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield values


def rounds(
    entries: Sequence[Entry], ended: Collection[tuple[str, int]]
) -> Iterator[tuple[int, Entry]]:
    """Yield the turns by round, as (round, entry), except those in `ended`. The entries of a round
    are shuffled; their order depends only on its number and the entries."""
    num_rounds = max((entry.settings.num_steps for entry in entries), default=0)
    for number in range(num_rounds):
        order = list(entries)
        random.Random(f"{number}").shuffle(order)
        for entry in order:
            if number < entry.settings.num_steps and (entry.name, number) not in ended:
                yield number, entry
