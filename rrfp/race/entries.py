"""The input and output of a race's ranks: entries, turns and their files.

A **race** is one launch of ranks. Its **entries** are the systems that are compared, each with its
settings. In **round** r every entry has a **turn**: it runs one training step under seed + r, so
that all turns of a round have the same data, costs and jitter. Every round shuffles the entries
anew, so that drift of the machine, and effects of one turn on the next, affect all of them alike.

Imports no torch: the command line writes and reads these files too.
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
    """A system in a race."""

    name: str
    """Unique among all entries."""
    settings: TrainSettings
    """Its steps are rounds; `pace` and `jitter` give the modelled times of its tasks."""
    peer: str | None = None
    """The peer that runs it, if one does (`rrfp.race.systems`)."""
    time_factor: float = 1.0
    """How many times longer its tasks take than the costs say."""
    costs_sha256: str | None = None
    """The SHA-256 of its file of costs, which every host reads; None for a preset."""

    def to_json(self) -> str:
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
    """The outcome of an entry's step in a round. Times of ranks are means over all ranks."""

    entry: str
    round: int
    step_time_s: float
    """From the first rank's entry into the schedule to the last rank's return, on one clock."""
    compute_s: float
    """Time in F, B and W."""
    blocking_s: float
    """Time with nothing to run: before the rank's call, waiting for inputs and transfers, and from
    its return to that of the last rank."""
    coordination_s: float
    """Time waiting for the agreement of ranks that share a collective."""
    peak_held: float
    """The most activations that a rank held, in microbatches of the whole rank."""
    num_tasks: int
    num_over: int
    """Tasks whose real work exceeded their modelled time."""
    peak_held_bytes: int | None = None
    """The most bytes that a rank held, by the sizes of the costs; None where they say nothing of
    memory."""
    gradient_difference: float | None = None
    """In round 0 only: the largest ||own - reference|| / ||reference|| of any parameter."""
    gradients_same: bool | None = None
    """In round 0 only: whether gradients equal the reference's to the last bit."""


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
        """What to race, one `Entry` per line."""
        return self.path / "entries.jsonl"

    @property
    def turns(self) -> Path:
        """The results, one `Turn` or `Failure` per line, in the order in which they ended."""
        return self.path / "turns.jsonl"

    @property
    def current_turn_file(self) -> Path:
        """Holds the entry and the round of the turn that began last."""
        return self.path / "under_way.json"

    def write_entries(self, entries: Sequence[Entry]) -> None:
        lines = "".join(f"{entry.to_json()}\n" for entry in entries)
        write_whole(self.entries, lines.encode())

    def read_entries(self) -> list[Entry]:
        return [Entry.from_json(line) for line in self.entries.read_text("utf-8").splitlines()]

    def append(self, ended: Turn | Failure) -> None:
        append_object(self.turns, asdict(ended))

    def read_turns(self) -> list[Turn | Failure]:
        """The turns and failures so far."""
        return [
            kind(**values)
            for values in read_objects(self.turns)
            for kind in (Turn, Failure)
            if _are_fields(values, kind)
        ]

    def ended(self) -> set[tuple[str, int]]:
        """Entry and round of every completed turn."""
        return {(each.entry, each.round) for each in self.read_turns() if isinstance(each, Turn)}

    def failed(self) -> set[str]:
        """The entries that failed and have not completed a turn since."""
        last = {each.entry: each for each in self.read_turns()}
        return {name for name, each in last.items() if isinstance(each, Failure)}

    def begin(self, entry: Entry, number: int) -> None:
        """Write down whose turn it is."""
        write_whole(self.current_turn_file, json.dumps([entry.name, number]).encode())

    def read_current_turn(self) -> tuple[str, int] | None:
        """The entry and the round of the turn that began last; None before the first one."""
        if not self.current_turn_file.exists():
            return None
        name, number = json.loads(self.current_turn_file.read_text(encoding="utf-8"))
        return name, number


def _are_fields(values: dict[str, Any], kind: type[Turn | Failure]) -> bool:
    """Whether these are the fields of a turn or a failure, all of their types."""
    types = get_type_hints(kind)
    return values.keys() == types.keys() and all(
        isinstance(value, types[name] if types[name] is not float else float | int)
        for name, value in values.items()
    )


def append_object(path: Path, values: dict[str, Any]) -> None:
    """Append an object to a file of JSON lines; an incomplete last line is ended first."""
    with open_own(path) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(f"{json.dumps(values)}\n".encode())


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, if it exists. Skips lines that are not objects, such as
    an interrupted write's half line."""
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
    """The turns to take, round after round, except those that have `ended`. A round's order depends
    only on its number and the entries."""
    num_rounds = max((entry.settings.num_steps for entry in entries), default=0)
    for number in range(num_rounds):
        order = list(entries)
        random.Random(f"{number}").shuffle(order)
        for entry in order:
            if number < entry.settings.num_steps and (entry.name, number) not in ended:
                yield number, entry
