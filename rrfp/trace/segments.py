"""The files of records of a rank: `rank-N.jsonl`, and in a run whose records are bounded then
`rank-N.2.jsonl` and so on, of which the oldest go (`rrfp.trace.spill`)."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"(rank-(\d+))(?:\.(\d+))?\.jsonl")


def segment_of(first: Path, number: int) -> Path:
    """The path of a rank's segment, counted from 1, by that of its first one."""
    return first if number == 1 else first.with_name(f"{first.stem}.{number}.jsonl")


def number_of(segment: Path) -> int:
    """The number of a segment, counted from 1."""
    match = _NAME.fullmatch(segment.name)
    return int(match[3] or 1) if match is not None else 1


def segments_in(records: Path) -> dict[int, list[Path]]:
    """The segments of each rank in a directory of records, by rank and in their order; empty where
    there is no such directory."""
    found: dict[int, list[Path]] = {}
    for path in _files_in(records):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[2]), []).append(path)
    return {rank: sorted(found[rank], key=number_of) for rank in sorted(found)}


def segment_after(segment: Path) -> Path | None:
    """The rank's next segment that is there; those between may have gone."""
    match = _NAME.fullmatch(segment.name)
    if match is None:
        return None
    following = segment.with_name(f"{match[1]}.{number_of(segment) + 1}.jsonl")
    if following.exists():
        return following
    if segment.exists():
        return None
    segments = segments_in(segment.parent).get(int(match[2]), [])
    return next((each for each in segments if number_of(each) > number_of(segment)), None)


def _files_in(directory: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from directory.iterdir()
