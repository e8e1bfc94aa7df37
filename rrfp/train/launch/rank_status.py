"""What a rank reports to its launcher: its heartbeat, its failure and its warnings."""

import faulthandler
import json
import logging
import mmap
import os
import re
import select
import signal
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn, Self

import rrfp
from rrfp import system as libc
from rrfp.errors import RrfpError
from rrfp.runtime import launchers as variables
from rrfp.trace.outcome import FaultOrigin
from rrfp.trace.safe_files import open_whole

# A rank's status page: a few hundred bytes that it shares with its launcher.
#
# The rank writes and the launcher reads, without a lock and without a question: so nothing can wait
# for anything, and the page says where a rank stood after that was killed. It has no name in any
# directory.


_BYTES = 1024
_BEATS, _WAITS, _ASKED, _STACKS, _DONE, _STAGE, _PLACE = 0, 8, 9, 10, 11, 16, 144
_TEXT_BYTES = {_STAGE: _PLACE - _STAGE, _PLACE: _BYTES - _PLACE}


class Waits(IntEnum):
    """What a rank's main thread waits for, as far as its stack tells."""

    NOTHING = 0
    OTHERS = 1
    """Another rank."""
    PERHAPS = 2
    """It may be another rank, a thread or process of its own, a device or somebody's server."""


class StatusPage:
    """One rank's page, on either side."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, _BYTES)

    @property
    def beats(self) -> int:
        """How often the rank has looked at itself; 0 before it begins to."""
        (count,) = struct.unpack_from("<Q", self._bytes, _BEATS)
        return int(count)

    @property
    def waits(self) -> Waits:
        return Waits(self._bytes[_WAITS])

    @property
    def place(self) -> str:
        """Where its main thread stood at the last beat."""
        return self._text(_PLACE)

    @property
    def stage(self) -> str:
        """What it does: `in step 7`. Unlike the rest, written as soon as it begins."""
        return self._text(_STAGE) or "in start-up"

    @property
    def is_starting(self) -> bool:
        """Whether it has not begun its first step."""
        return not self._text(_STAGE)

    @property
    def is_asked_to_end(self) -> bool:
        """Whether a request to end came to the rank itself."""
        return bool(self._bytes[_ASKED])

    @property
    def is_done(self) -> bool:
        """Whether the rank has done all its work and left its groups."""
        return bool(self._bytes[_DONE])

    @property
    def wants_stacks(self) -> bool:
        """Whether the launcher asks for the stacks of the rank's threads."""
        return bool(self._bytes[_STACKS])

    def ask_for_stacks(self, *, wanted: bool) -> None:
        self._bytes[_STACKS] = wanted

    def finish(self) -> None:
        self._bytes[_DONE] = 1

    def enter(self, stage: str) -> None:
        self._write(_STAGE, stage)

    def ask_to_end(self) -> None:
        self._bytes[_ASKED] = 1

    def beat(self, waits: Waits, place: str) -> None:
        self._bytes[_WAITS] = waits
        self._write(_PLACE, place)
        struct.pack_into("<Q", self._bytes, _BEATS, self.beats + 1)

    def _text(self, start: int) -> str:
        data = self._bytes[start : start + _TEXT_BYTES[start]]
        return data.partition(b"\0")[0].decode(errors="replace")

    def _write(self, start: int, text: str) -> None:
        most = _TEXT_BYTES[start] - 1
        self._bytes[start : start + most + 1] = text.encode()[:most].ljust(most + 1, b"\0")


def page_file() -> IO[bytes]:
    """An empty page, to be inherited by its rank."""
    file = nameless_file()
    file.truncate(_BYTES)
    return file


def nameless_file() -> IO[bytes]:
    """A file that no other process can open: on no disk, which could be full, where the system
    can."""
    # The system may lack the call, or refuse it.
    with suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("rrfp"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


# Where a main thread stands, and whom it waits for, by the frames of its stack.


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


BEAT_S = 1.0
STACK_SIGNAL = signal.SIGUSR2
"""On which a rank writes the stacks of its threads to the file that its launcher gave it, even
while no thread of it can run Python. It interrupts a sleep, so only a rank that is then killed gets
it."""

_PR_SET_PDEATHSIG = 1

_page: StatusPage | None = None


def end_with_launcher() -> None:
    """Have the kernel kill this process when its launcher ends, even while it is stopped. Called as
    early as can be."""
    with suppress(OSError):  # the thread that beats looks for it, too
        libc.call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # It may have ended before.
    if os.getppid() != _launcher():
        os._exit(RrfpError.exit_code)


def show_life(*, waits_on_device: bool) -> None:
    """Beat from now on, in a thread that ends with the process, so also while that closes. With
    `waits_on_device` this process waits for a device without a sign of it in its stack."""
    global _page
    told = os.environ.pop(variables.LIVENESS, None)
    stacks = -1
    if told is not None:
        page, stacks = map(int, told.split(","))
        _page = StatusPage(page)
        os.close(page)
        os.set_inheritable(stacks, False)
        faulthandler.register(STACK_SIGNAL, stacks)
    arguments = (_page, stacks, threading.main_thread().ident, _launcher(), waits_on_device)
    threading.Thread(target=_beat, args=arguments, name="rrfp-beat", daemon=True).start()


def enter(stage: str) -> None:
    """Note what this rank does from now on: `in step 7`."""
    if _page is not None:
        _page.enter(stage)


def finish() -> None:
    """Note that this rank has done all its work and left its groups: whatever its exit code, a rank
    that ends without this note has failed."""
    if _page is not None:
        _page.finish()


def show_request() -> None:
    """Note that this rank was asked to end."""
    if _page is not None:
        _page.ask_to_end()


def _beat(
    page: StatusPage | None, stacks: int, main_thread: int, launcher: int, waits_on_device: bool
) -> NoReturn:
    while os.getppid() == launcher:
        if page is not None:
            frames = [*frames_of(sys._current_frames().get(main_thread))]
            waits = waits_of(frames)
            if waits_on_device and waits is Waits.NOTHING:
                waits = Waits.PERHAPS
            page.beat(waits, standing_at(frames))
            if page.wants_stacks:
                page.ask_for_stacks(wanted=False)
                faulthandler.dump_traceback(stacks)
        time.sleep(BEAT_S)
    # Where the kernel does not do it.
    os._exit(RrfpError.exit_code)


def _launcher() -> int:
    return int(os.environ[variables.LAUNCHER])


# A failure.


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file's path."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a rank ended, in its own words."""

    sentence: str
    exit_code: int
    is_consequence: bool
    """Whether another rank failed first, and this one only lost its peer."""
    is_silence: bool
    """Whether another rank did not answer for too long; it may still be alive."""
    detail: str = ""
    """Further lines below the sentence: the grid of a stall."""
    at_s: float = field(default=0.0, compare=False)
    """When it was written, on the host's monotonic clock: the time of day may jump."""
    culprit: FaultOrigin | None = None
    """Whose fault it was, and who found that."""

    @property
    def is_own(self) -> bool:
        """Whether the cause is this rank's own."""
        return not (self.is_consequence or self.is_silence)

    def write(self) -> None:
        """Write the report to where the launcher of this process looks for it."""
        path = os.environ.get(ERROR_FILE)
        if path is None:
            return
        message = {
            "message": self.sentence,
            "extraInfo": {"timestamp": int(time.time())},
            "report": asdict(replace(self, at_s=time.monotonic())),
        }
        # Atomically, because the launcher ends this process if another one has failed too.
        with open_whole(Path(path)) as file:
            file.write(json.dumps({"message": message}).encode())

    @classmethod
    def read(cls, error_file_data: Mapping[str, Any]) -> Self | None:
        """The report in a rank's error file; None if it is not one of ours."""
        message = error_file_data.get("message")
        if isinstance(message, dict) and "report" in message:
            report = cls(**message["report"])
            culprit = message["report"].get("culprit")
            return (
                report if culprit is None else replace(report, culprit=FaultOrigin.decode(culprit))
            )
        return None


# What ranks warn of reaches the person who started them, and not their logs alone.
#
# A rank's warnings go to its launcher through a pipe with a name, in the launcher's own directory.
# A pipe takes no room, so it works where a full disk is what they warn of.


_LOOK_S = 0.2
_MOST_BYTES = select.PIPE_BUF
"""Of a warning: it arrives in one piece."""


@contextmanager
def hearing(directory: Path, tell: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """While the block runs, `tell` what ranks with these environment variables warn of."""
    path = directory / "warnings"
    os.mkfifo(path, 0o600)
    # For writing, too, so that it has no end before the block's.
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    is_over = threading.Event()
    thread = threading.Thread(target=_hear, args=(pipe, tell, is_over), name="rrfp-warnings")
    thread.start()
    try:
        yield {variables.WARNINGS: str(path)}
    finally:
        is_over.set()
        thread.join()
        os.close(pipe)


def _hear(pipe: int, tell: Callable[[str], None], is_over: threading.Event) -> None:
    rest = b""
    while True:
        was_over = is_over.is_set()
        ready, _, _ = select.select([pipe], [], [], 0 if was_over else _LOOK_S)
        if ready:
            *lines, rest = (rest + os.read(pipe, 1 << 16)).split(b"\n")
            for line in lines:
                tell(line.decode(errors="replace"))
        elif was_over:
            return


def warn_launcher(rank: int) -> None:
    """Send the launcher what this rank's own modules warn of, from now on; without a launcher that
    listens this does nothing."""
    path = os.environ.get(variables.WARNINGS)
    if path is None:
        return
    with suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        logging.getLogger("rrfp").addHandler(_ToLauncher(pipe, rank))


class _ToLauncher(logging.Handler):
    def __init__(self, pipe: int, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        # How a rank fails is reported otherwise.
        if record.levelno > logging.WARNING:
            return
        told = f"rank {self._rank}: {record.getMessage()}".replace("\n", " ")
        # A launcher that hears nothing is gone, and holds up no training.
        with suppress(OSError):
            os.write(self._pipe, told.encode()[: _MOST_BYTES - 1] + b"\n")
