"""The ranks of files that tell theirs only by their names, if at all."""

import re
from collections.abc import Sequence
from pathlib import Path

_RANK = re.compile(r"(?<![a-z])rank[_.-]?(\d{1,7})(?!\d)", re.ASCII | re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)\D*$", re.ASCII)
_DIGITS = re.compile(r"(\d+)", re.ASCII)


def ranks_by_name(paths: Sequence[Path]) -> tuple[list[int], list[str]]:
    """The rank of each file, and a note if it is no more than the file's place among the others.

    A number is a rank if it follows the word, as in `trace_rank3.json`, or if the files end in 0,
    1, 2 and so on. Any other is a job's, a process's or a count from 1.
    """
    stems = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    told = [match for stem in stems if (match := _RANK.search(stem))]
    if len(told) == len(paths):
        return [int(match[1]) for match in told], []
    ends = [int(match[1]) for stem in stems if (match := _LAST_NUMBER.search(stem))]
    if sorted(ends) == list(range(len(paths))):
        return ends, []
    in_order = sorted(paths, key=_by_number)
    return [in_order.index(path) for path in paths], [
        "the files' names do not tell ranks: ranks are numbered from 0 in the order of the names; "
        "call the files rank0, rank1, ... if that is not theirs"
    ]


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A key to sort by that puts report9 before report10."""
    parts = _DIGITS.split(str(path))
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]
