"""Injects a fault into a session of training, at its moment."""

import signal
import time
from dataclasses import dataclass

from rrfp.chaos.disk import Disk
from rrfp.chaos.plan import LINK_FAULTS, Fault, FaultKind, Stage
from rrfp.chaos.session import Process, TrainingSession
from rrfp.runtime.net.faults import LinkFault, order, shown_links

_SAVE_S = 0.15
"""What a small checkpoint takes."""
_PROCESS_S = 30.0
"""How long the process of a rank may take to be there."""
_LOOK_S = 0.05
_OBEY_S = 10.0
"""How long a link may take to obey: its heartbeats make it look every second."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the undisturbed training took."""

    start_s: float
    """For its start and its first step."""
    step_s: float
    """For another step."""
    close_s: float
    """For the end of its ranks, after the last step."""
    end_s: float
    """For the end of the launcher, too."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was injected."""

    at_s: float
    """When, by the monotonic clock."""
    num_finished: int
    """How many steps of the training were finished by then."""
    rank: int | None = None
    """Whose process was signalled, unless it was the launcher's."""
    link: tuple[int, int] | None = None
    """The ranks whose link was harmed."""
    path: str | None = None
    """Where the disk was full."""

    @property
    def victim(self) -> str:
        """In words."""
        if self.link is not None:
            return f"link {self.link[0]}-{self.link[1]}"
        if self.path is not None:
            return "disk"
        return "launcher" if self.rank is None else f"rank {self.rank}"


def wait_for_moment(session: TrainingSession, fault: Fault, pace: Pace, timeout_s: float) -> bool:
    """Wait for the moment of a fault; tells whether it came before the session ended."""
    match fault.stage:
        case Stage.START if session.num_finished == session.first_step:
            passed_s = time.monotonic() - session.began_s
            return session.sleep(max(0.0, fault.share * pace.start_s - passed_s))
        case Stage.SAVE:
            # Before its first step it may be one that the session before has left.
            has_come = session.wait_until(
                lambda: (
                    session.num_finished > session.first_step
                    and session.checkpoints.is_saving(fault.after_step)
                ),
                timeout_s,
            )
            length_s = _SAVE_S
        case _:
            # A step is under way as soon as the one before it is finished.
            num_finished = max(fault.after_step, session.first_step + 1)
            has_come = session.wait_until(lambda: session.num_finished >= num_finished, timeout_s)
            length_s = pace.close_s if fault.stage is Stage.CLOSE else pace.step_s
    return has_come and session.sleep(fault.share * length_s)


def inject(session: TrainingSession, fault: Fault, disk: Disk) -> Injected | None:
    """Inject a fault now, and end it if it passes; None if what it is for is not there any more."""
    if fault.kind in LINK_FAULTS:
        return _harm_link(session, fault)
    if fault.kind is FaultKind.DISK:
        return _fill(session, fault, disk)
    return _signal(session, fault)


def _signal(session: TrainingSession, fault: Fault) -> Injected | None:
    process = _process(session, fault)
    if process is None:
        return None
    injected = Injected(time.monotonic(), session.num_finished, rank=fault.rank)
    number = signal.Signals[fault.signal] if fault.kind is FaultKind.KILL else signal.SIGSTOP
    if not session.processes.send(process, number):
        return None
    if fault.kind is FaultKind.CONT:
        session.sleep(fault.hold_s)
        session.processes.send(process, signal.SIGCONT)
    return injected


def _process(session: TrainingSession, fault: Fault) -> Process | None:
    if fault.rank is None:
        return session.launcher
    deadline_s = time.monotonic() + _PROCESS_S
    while session.exit_code is None and time.monotonic() < deadline_s:
        process = session.processes.rank(fault.rank)
        if process is not None:
            return process
        time.sleep(_LOOK_S)
    return None


def _harm_link(session: TrainingSession, fault: Fault) -> Injected | None:
    links = shown_links(session.orders)
    if not links:
        return None
    link = links[fault.link % len(links)]
    kind = LinkFault(fault.kind)
    number = fault.draw if kind is LinkFault.CORRUPT else fault.hold_s
    pending = order(session.orders, link, kind, number)
    if not session.wait_until(lambda: not pending.exists(), _OBEY_S):
        pending.unlink(missing_ok=True)
        return None
    rank, peer = link.split("-")
    return Injected(time.monotonic(), session.num_finished, link=(int(rank), int(peer)))


def _fill(session: TrainingSession, fault: Fault, disk: Disk) -> Injected | None:
    injected = Injected(time.monotonic(), session.num_finished, path=str(disk.path))
    disk.fill(session.processes)
    try:
        session.sleep(fault.hold_s)
    finally:
        disk.empty(session.processes)
    return injected
