"""Where a main thread stands, and whom it waits for, by the frames of its stack."""

import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import rrfp
from rrfp.train.ranks.liveness.page import Waits

_OWN = str(Path(rrfp.__file__).parent)
_ROOT = f"{Path(_OWN).parent}/"
_STANDARD = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib"))})
_INSTALLED = tuple({*map(sysconfig.get_path, ("purelib", "platlib"))})

_FOR_OTHERS = re.compile(
    rf"/torch/distributed/(?!checkpoint/)|^{re.escape(_OWN)}/runtime/(?!recorder\.)"
)
"""The files in which a rank waits for others: torch's collectives, and what here awaits messages,
decisions of the group and addresses. Those that write to a disk are not among them."""

_KNOWN = re.compile(r"/(torch|megatron)/")
"""Libraries whose waits for others are among those above, or call something `wait`."""

_IN_DUMP = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    calls_wait: bool = False
    """Whether the function calls something `wait`, as what a collective of torch's returns."""


def frames_of(frame: FrameType | None) -> Iterator[Frame]:
    """The frames of a thread that runs, from the innermost on."""
    while frame is not None:
        code = frame.f_code
        yield Frame(code.co_filename, frame.f_lineno, code.co_name, "wait" in code.co_names)
        frame = frame.f_back


def frames_in_dump(dump: str) -> list[Frame]:
    """The frames of the main thread in what faulthandler wrote: it comes last."""
    *_, main_thread = _THREAD.split(dump)
    return [
        Frame(file, int(line), function) for file, line, function in _IN_DUMP.findall(main_thread)
    ]


def standing_at(frames: Iterable[Frame]) -> str:
    """The innermost frame that belongs to no library; of all libraries' the innermost one."""
    innermost: Frame | None = None
    for frame in frames:
        innermost = innermost or frame
        if not _is_librarys(frame.file):
            innermost = frame
            break
    if innermost is None:
        return ""
    return f"{innermost.file.removeprefix(_ROOT)}:{innermost.line} in {innermost.function}"


def waits_of(frames: Iterable[Frame]) -> Waits:
    """Whom a main thread that stands at these frames waits for, if it stands still."""
    waits = Waits.NOTHING
    for frame in frames:
        if _FOR_OTHERS.search(frame.file):
            return Waits.OTHERS
        # A lock, a queue, a socket; a library's own threads, as those of one that reads files; or
        # what a collective of torch's has returned.
        if frame.calls_wait or (_is_librarys(frame.file) and not _KNOWN.search(frame.file)):
            waits = Waits.PERHAPS
        if not _is_librarys(frame.file):
            break
    return waits


def _is_librarys(file: str) -> bool:
    return not file.startswith(_OWN) and (_is_standard(file) or file.startswith(_INSTALLED))


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (
        file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
    )
