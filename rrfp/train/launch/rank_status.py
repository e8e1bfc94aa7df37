"""Reports of a rank to its launcher: its heartbeat, its failure and its warnings."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, NoReturn, Self

import rrfp
from rrfp import system as libc
from rrfp.errors import RrfpError
from rrfp.runtime import launchers as variables
from rrfp.strict_json import integer, mapping, member, number, text
from rrfp.trace.outcome import FaultOrigin
from rrfp.trace.safe_files import open_whole

# The status page of a rank: 1 KiB of memory that it shares with its launcher. The rank writes and
# the launcher reads, without locks or messages, so neither ever waits, and the page outlives a rank
# that was killed. It has no name in any directory.


_BYTES = 1024
_BEATS, _WAITS, _ASKED, _STACKS, _DONE, _STAGE, _PLACE = 0, 8, 9, 10, 11, 16, 144
_TEXT_BYTES = {_STAGE: _PLACE - _STAGE, _PLACE: _BYTES - _PLACE}


class Waits(IntEnum):
    """The target of a rank's main thread's wait, as inferred from its stack."""

    NOTHING = 0
    OTHERS = 1
    """Another rank."""
    PERHAPS = 2
    """Unknown: another rank, a thread or process of its own, a device or a server."""


class StatusPage:
    """The status page of one rank: memory that it shares with its launcher, in which it writes its
    state."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, _BYTES)

    @property
    def beats(self) -> int:
        """Number of heartbeats; 0 before the first."""
        (count,) = struct.unpack_from("<Q", self._bytes, _BEATS)
        return int(count)

    @property
    def waits(self) -> Waits:
        """The target of the main thread's wait at the last heartbeat."""
        return Waits(self._bytes[_WAITS])

    @property
    def place(self) -> str:
        """The source line of the main thread at the last heartbeat; empty before."""
        return self._text(_PLACE)

    @property
    def stage(self) -> str:
        """The current stage, such as `in step 7`, or `in start-up` before the first; up to date
        between heartbeats too."""
        return self._text(_STAGE) or "in start-up"

    @property
    def is_starting(self) -> bool:
        """True until it enters its first stage."""
        return not self._text(_STAGE)

    @property
    def is_asked_to_end(self) -> bool:
        """True if the rank itself received SIGTERM as a request to end."""
        return bool(self._bytes[_ASKED])

    @property
    def is_done(self) -> bool:
        """True once the rank has finished its work and left its process groups."""
        return bool(self._bytes[_DONE])

    @property
    def wants_stacks(self) -> bool:
        """True while the launcher requests the stacks of the rank's threads."""
        return bool(self._bytes[_STACKS])

    def request_stacks(self, *, wanted: bool) -> None:
        """Set or clear the launcher's request for the stacks of the rank's threads."""
        self._bytes[_STACKS] = wanted

    def finish(self) -> None:
        """Mark that the rank has finished its work and left its groups."""
        self._bytes[_DONE] = 1

    def enter(self, stage: str) -> None:
        """Write the rank's current stage, cut if it is too long."""
        self._write(_STAGE, stage)

    def ask_to_end(self) -> None:
        """Mark that the rank has received SIGTERM as a request to end."""
        self._bytes[_ASKED] = 1

    def beat(self, waits: Waits, place: str) -> None:
        """Write the main thread's wait and source line, and then count a heartbeat."""
        self._bytes[_WAITS] = waits
        self._write(_PLACE, place)
        struct.pack_into("<Q", self._bytes, _BEATS, self.beats + 1)

    def _text(self, start: int) -> str:
        """Read the text that begins at this byte of the page."""
        data = self._bytes[start : start + _TEXT_BYTES[start]]
        return data.partition(b"\0")[0].decode(errors="replace")

    def _write(self, start: int, text: str) -> None:
        """Write a text at this byte of the page, cut to its space and padded with zeros."""
        most = _TEXT_BYTES[start] - 1
        self._bytes[start : start + most + 1] = text.encode()[:most].ljust(most + 1, b"\0")


def page_file() -> IO[bytes]:
    """Create the file of an empty status page, without a name, for a rank to inherit."""
    file = anonymous_file()
    file.truncate(_BYTES)
    return file


def anonymous_file() -> IO[bytes]:
    """Create a file that no other process can open: in memory if the system supports it, because a
    disk may be full, else a temporary file."""
    # The system may lack the call, or refuse it.
    with suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("rrfp"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


# A main thread's position and the target of its wait, inferred from the frames of its stack.


_OWN = str(Path(rrfp.__file__).parent)
_ROOT = f"{Path(_OWN).parent}/"
_STANDARD = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib"))})
_INSTALLED = tuple({*map(sysconfig.get_path, ("purelib", "platlib"))})

_WAITS_FOR_RANKS = re.compile(
    rf"/torch/distributed/(?!checkpoint/)|^{re.escape(_OWN)}/runtime/(?!recorder\.)"
)
"""Files whose waits are for other ranks: torch's collectives, and rrfp's own code that awaits
messages, decisions and addresses. Files that write to a disk are excluded."""

_CLASSIFIED = re.compile(r"/(torch|megatron)/")
"""Libraries whose waits for other ranks match the pattern above, or call something `wait`."""

_IN_DUMP = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    calls_wait: bool = False
    """True if the function calls something named `wait`, as on the work of a torch collective."""


def stack_frames(frame: FrameType | None) -> Iterator[Frame]:
    """Yield the frames of a running thread from its innermost frame outwards; nothing for None."""
    while frame is not None:
        code = frame.f_code
        yield Frame(code.co_filename, frame.f_lineno, code.co_name, "wait" in code.co_names)
        frame = frame.f_back


def frames_in_dump(dump: str) -> list[Frame]:
    """Return the frames of the main thread, which is the last one in a dump of faulthandler,
    innermost first."""
    *_, main_thread = _THREAD.split(dump)
    return [
        Frame(file, int(line), function) for file, line, function in _IN_DUMP.findall(main_thread)
    ]


def format_position(frames: Iterable[Frame]) -> str:
    """Format `file:line in function` of the innermost frame outside of libraries, or else of the
    innermost frame; empty without frames."""
    found: Frame | None = None
    for frame in frames:
        found = found or frame
        if not _is_library(frame.file):
            found = frame
            break
    return f"{found.file.removeprefix(_ROOT)}:{found.line} in {found.function}" if found else ""


def infer_waits(frames: Iterable[Frame]) -> Waits:
    """Infer the target of a main thread's wait from its frames, up to the first one outside of
    libraries: OTHERS if one is in torch.distributed or rrfp's runtime (except their code that
    writes checkpoints and records), else PERHAPS if one calls `wait` or is in a library other than
    torch and Megatron, else NOTHING."""
    waits = Waits.NOTHING
    for frame in frames:
        if _WAITS_FOR_RANKS.search(frame.file):
            return Waits.OTHERS
        # A lock, a queue or a socket; a library's own threads, such as a file reader's; or the work
        # that a torch collective has returned.
        if frame.calls_wait or (_is_library(frame.file) and not _CLASSIFIED.search(frame.file)):
            waits = Waits.PERHAPS
        if not _is_library(frame.file):
            break
    return waits


def _is_library(file: str) -> bool:
    """True for files of the standard library and of installed libraries, except rrfp's."""
    return not file.startswith(_OWN) and (_is_standard(file) or file.startswith(_INSTALLED))


def _is_standard(file: str) -> bool:
    """True for files of the standard library, also frozen ones."""
    return file.startswith("<frozen") or (
        file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
    )


BEAT_S = 1.0
STACK_SIGNAL = signal.SIGUSR2
"""The signal on which a rank writes the stacks of its threads to its launcher's file, even while
none of them can run Python. It interrupts a sleep, so it is sent only before a kill."""

_PR_SET_PDEATHSIG = 1

_page: StatusPage | None = None


def end_with_launcher() -> None:
    """Make the kernel kill this process when its launcher ends, even while it is stopped; end it
    now if the launcher has ended already. Call this as early as possible."""
    with suppress(OSError):  # the heartbeat thread checks for the launcher, too
        libc.call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # The launcher may have ended before the call.
    if os.getppid() != _launcher():
        os._exit(RrfpError.exit_code)


def start_heartbeat(*, waits_on_device: bool) -> None:
    """Write heartbeats to the launcher's page, if it has passed one, from a daemon thread that also
    ends this process when the launcher is gone. With a page, STACK_SIGNAL writes the stacks of all
    threads from now on. `waits_on_device` states that this process may wait for a device, which its
    stack does not show."""
    global _page
    descriptors = os.environ.pop(variables.LIVENESS, None)
    stacks = -1
    if descriptors is not None:
        page, stacks = map(int, descriptors.split(","))
        _page = StatusPage(page)
        os.close(page)
        os.set_inheritable(stacks, False)
        faulthandler.register(STACK_SIGNAL, stacks)
    arguments = (_page, stacks, threading.main_thread().ident, _launcher(), waits_on_device)
    threading.Thread(target=_beat, args=arguments, name="rrfp-beat", daemon=True).start()


def enter(stage: str) -> None:
    """Record this rank's current stage, such as `in step 7`, on its status page; do nothing without
    one."""
    if _page is not None:
        _page.enter(stage)


def finish() -> None:
    """Record on the status page that this rank has finished its work and left its groups. A rank
    that ends without this has failed, whatever its exit code."""
    if _page is not None:
        _page.finish()


def show_request() -> None:
    """Record on the status page that this rank was asked to end."""
    if _page is not None:
        _page.ask_to_end()


def _beat(
    page: StatusPage | None, stacks: int, main_thread: int, launcher: int, waits_on_device: bool
) -> NoReturn:
    """Write a heartbeat every second, and stacks on request; end this process when its launcher is
    gone."""
    while os.getppid() == launcher:
        if page is not None:
            frames = [*stack_frames(sys._current_frames().get(main_thread))]
            waits = infer_waits(frames)
            if waits_on_device and waits is Waits.NOTHING:
                waits = Waits.PERHAPS
            page.beat(waits, format_position(frames))
            if page.wants_stacks:
                page.request_stacks(wanted=False)
                faulthandler.dump_traceback(stacks)
        time.sleep(BEAT_S)
    # The kernel may not have killed this process.
    os._exit(RrfpError.exit_code)


def _launcher() -> int:
    """Return the process number of the launcher, from the environment."""
    return int(os.environ[variables.LAUNCHER])


# A failure report: in the error file that the launcher names. The variable and the format are those
# of torch's elastic launcher, so that torchrun can read the report too.


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path of the error file."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A rank's own report of its failure."""

    sentence: str
    exit_code: int
    is_consequence: bool
    """True if another rank failed first, and this one only lost its peer."""
    is_silence: bool
    """True if another rank did not answer for too long; it may still be alive."""
    detail: str = ""
    """Lines to print below the sentence, such as the grid of a stall."""
    at_s: float = field(default=0.0, compare=False)
    """Time of the report, on the host's monotonic clock: the time of day may jump."""
    culprit: FaultOrigin | None = None
    """The origin of the fault."""

    @property
    def is_own(self) -> bool:
        """True if this rank caused its failure."""
        return not (self.is_consequence or self.is_silence)

    def write(self) -> None:
        """Write the report, with the current time, to the error file that the launcher has named,
        or nowhere without one. May raise OSError."""
        path = os.environ.get(ERROR_FILE)
        if path is None:
            return
        message = {
            "message": self.sentence,
            "extraInfo": {"timestamp": int(time.time())},
            "report": asdict(replace(self, at_s=time.monotonic())),
        }
        # Atomically: the launcher may end this process meanwhile, if another one has failed too.
        with open_whole(Path(path)) as file:
            file.write(json.dumps({"message": message}).encode())

    @classmethod
    def read(cls, error_file_data: object) -> Self | None:
        """Return the report in the JSON of an error file; None if another program wrote it, with
        anything else in it."""
        try:
            report = mapping(member(member(error_file_data, "message"), "report"))
            culprit = report.get("culprit")
            return cls(
                text(report["sentence"]),
                integer(report["exit_code"]),
                report["is_consequence"] is True,
                report["is_silence"] is True,
                text(report.get("detail", "")),
                number(report.get("at_s", 0.0)),
                None if culprit is None else FaultOrigin.decode(culprit),
            )
        except (KeyError, TypeError, ValueError):
            return None


# Warnings of ranks reach the user, not only the ranks' logs: they go to the launcher through a
# named pipe in its own directory. A pipe needs no disk space, so a warning of a full disk arrives
# too.


_POLL_S = 0.2
_MAX_WARNING_BYTES = select.PIPE_BUF
"""A larger write would not be atomic."""


@contextmanager
def forwarding_warnings(directory: Path, report: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """While the block runs, pass the warnings of ranks to `report`, on a thread and through a named
    pipe in `directory`. Yield the environment variable that names the pipe to the ranks."""
    path = directory / "warnings"
    os.mkfifo(path, 0o600)
    # Opened for writing too, so that the pipe does not end before the block does.
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    is_over = threading.Event()
    arguments = (pipe, report, is_over)
    thread = threading.Thread(target=_forward_warnings, args=arguments, name="rrfp-warnings")
    thread.start()
    try:
        yield {variables.WARNINGS: str(path)}
    finally:
        is_over.set()
        thread.join()
        os.close(pipe)


def _forward_warnings(pipe: int, report: Callable[[str], None], is_over: threading.Event) -> None:
    """Pass lines from the pipe to `report` until `is_over` is set and the pipe is empty."""
    rest = b""
    while True:
        was_over = is_over.is_set()
        ready, _, _ = select.select([pipe], [], [], 0 if was_over else _POLL_S)
        if ready:
            *lines, rest = (rest + os.read(pipe, 1 << 16)).split(b"\n")
            for line in lines:
                report(line.decode(errors="replace"))
        elif was_over:
            return


def send_warnings_to_launcher(rank: int) -> None:
    """Send rrfp's warnings on this rank to the launcher from now on; do nothing if no launcher
    reads them."""
    path = os.environ.get(variables.WARNINGS)
    if path is None:
        return
    with suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        logging.getLogger("rrfp").addHandler(_LauncherHandler(pipe, rank))


class _LauncherHandler(logging.Handler):
    """Writes warnings to the pipe of the launcher."""

    def __init__(self, pipe: int, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning as one line, with its rank, to the launcher's pipe, cut to what is
        written atomically. Records above WARNING are skipped, as failures go into the error file; a
        pipe that nobody reads is ignored."""
        # Failures go into the error file.
        if record.levelno > logging.WARNING:
            return
        line = f"rank {self._rank}: {record.getMessage()}".replace("\n", " ")
        # A launcher that does not read is gone; training goes on without it.
        with suppress(OSError):
            os.write(self._pipe, line.encode()[: _MAX_WARNING_BYTES - 1] + b"\n")
