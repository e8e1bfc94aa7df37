"""Slurm's lists of hosts: `node[01-03,7],gpu1` is node01, node02, node03, node7 and gpu1."""

import re
from collections.abc import Iterator

MOST_HOSTS = 2**16
"""More than any cluster has; a list of more is a mistake, and would fill the memory."""

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expanded(text: str) -> list[str]:
    """The hosts of a list, in its order. Raises ValueError, with the fact, for anything else."""
    hosts: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise ValueError(f"it has no host at its character {position + 1}")
        hosts += _of_item(item[0])
        _check_number(len(hosts))
        if item.end() == len(text):
            return hosts
        if text[item.end()] != ",":
            raise ValueError(f"it has a '{text[item.end()]}' without its counterpart")
        position = item.end() + 1


def _of_item(item: str) -> list[str]:
    """The hosts of `rack[1-2]n[01-02]`: the last brackets count fastest."""
    names = [""]
    for part in _PART.finditer(item):
        literal, brackets = part.groups()
        numbers = [""] if brackets is None else [*_numbers(brackets)]
        _check_number(len(names) * len(numbers))
        names = [f"{name}{literal}{number}" for name in names for number in numbers]
    return names


def _numbers(brackets: str) -> Iterator[str]:
    """The numbers of `01-03,7`, as wide as the first of their range."""
    for item in brackets.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"'{item}' in its brackets is not a number or a range")
        first, last = match[1], match[2] or match[1]
        num = int(last) - int(first) + 1
        if num < 1:
            raise ValueError(f"its range {item} ends before it begins")
        _check_number(num)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _check_number(num_hosts: int) -> None:
    if num_hosts > MOST_HOSTS:
        raise ValueError(f"it has more than {MOST_HOSTS} hosts")
