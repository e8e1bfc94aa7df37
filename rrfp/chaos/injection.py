"""Injects a fault into a training session at its planned moment."""

import signal
import time
from dataclasses import dataclass

from rrfp.chaos.disk import Disk
from rrfp.chaos.plan import LINK_FAULTS, Fault, FaultKind, Stage
from rrfp.chaos.session import Process, TrainingSession
from rrfp.runtime.net.faults import LinkFault, list_links, order_fault

_SAVE_S = 0.15
"""Time to write a small checkpoint."""
_PROCESS_S = 30.0
"""Longest time until a rank's process exists."""
_LOOK_S = 0.05
_OBEY_S = 10.0
"""Longest time until a link executes an order; heartbeats make it check every second."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of the undisturbed training."""

    start_s: float
    """From the launch to the end of the first step."""
    step_s: float
    """Mean time of each further step."""
    close_s: float
    """From the last step to the end of the ranks."""
    end_s: float
    """From the last step to the end of the launcher."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was injected."""

    at_s: float
    """Time of injection by the monotonic clock."""
    num_finished: int
    """Number of training steps finished at that time."""
    rank: int | None = None
    """Rank whose process got a signal; None for the launcher."""
    link: tuple[int, int] | None = None
    """The two ranks of the disturbed link."""
    path: str | None = None
    """Path of the disk that was filled."""

    @property
    def victim(self) -> str:
        """Name of the target for messages: `rank 2`, `launcher`, `link 0-1` or `disk`."""
        if self.link is not None:
            return f"link {self.link[0]}-{self.link[1]}"
        if self.path is not None:
            return "disk"
        return "launcher" if self.rank is None else f"rank {self.rank}"


def wait_for_moment(session: TrainingSession, fault: Fault, pace: Pace, timeout_s: float) -> bool:
    """Wait for the moment of a fault; return False if the session ends first, or on timeout.

    The moment is a share of the stage's length: that in `pace`, or 0.15 s for a save. A START fault
    counts as a STEP fault once the session has finished a step. Other faults wait for that step.
    """
    match fault.stage:
        case Stage.START if session.num_finished == session.first_step:
            passed_s = time.monotonic() - session.began_s
            return session.sleep(max(0.0, fault.share * pace.start_s - passed_s))
        case Stage.SAVE:
            # A save seen before the first step may be one that the last session left unfinished.
            has_come = session.wait_until(
                lambda: (
                    session.num_finished > session.first_step
                    and session.checkpoints.is_saving(fault.after_step)
                ),
                timeout_s,
            )
            length_s = _SAVE_S
        case _:
            # A step begins as soon as the previous one is finished.
            num_finished = max(fault.after_step, session.first_step + 1)
            has_come = session.wait_until(lambda: session.num_finished >= num_finished, timeout_s)
            length_s = pace.close_s if fault.stage is Stage.CLOSE else pace.step_s
    return has_come and session.sleep(fault.share * length_s)


def inject(session: TrainingSession, fault: Fault, disk: Disk) -> Injected | None:
    """Inject a fault now; None if its target is gone.

    Waits for the end of a CONT or DISK fault, and for a link to begin its fault.
    """
    if fault.kind in LINK_FAULTS:
        return _disturb_link(session, fault)
    if fault.kind is FaultKind.DISK:
        return _fill(session, fault, disk)
    return _signal(session, fault)


def _signal(session: TrainingSession, fault: Fault) -> Injected | None:
    """Send the signal of a kill, otherwise SIGSTOP; return None if the process is gone.

    A CONT fault continues the process after `hold_s`, or as soon as the launcher ends.
    """
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
    """Return the process of the fault's rank, or the launcher for a fault without a rank.

    Waits up to 30 s for a rank's process. Returns None if it does not exist, or once the launcher
    has ended.
    """
    if fault.rank is None:
        return session.launcher
    deadline_s = time.monotonic() + _PROCESS_S
    while session.exit_code is None and time.monotonic() < deadline_s:
        process = session.processes.rank(fault.rank)
        if process is not None:
            return process
        time.sleep(_LOOK_S)
    return None


def _disturb_link(session: TrainingSession, fault: Fault) -> Injected | None:
    """Order a fault on one link and wait up to 10 s until the link executes it.

    The link's index is `fault.link` modulo the number of links. Returns None if there is no link,
    or if the order is not executed, which withdraws it.
    """
    links = list_links(session.orders)
    if not links:
        return None
    link = links[fault.link % len(links)]
    kind = LinkFault(fault.kind)
    number = fault.draw if kind is LinkFault.CORRUPT else fault.hold_s
    pending = order_fault(session.orders, link, kind, number)
    if not session.wait_until(lambda: not pending.exists(), _OBEY_S):
        pending.unlink(missing_ok=True)
        return None
    rank, peer = link.split("-")
    return Injected(time.monotonic(), session.num_finished, link=(int(rank), int(peer)))


def _fill(session: TrainingSession, fault: Fault, disk: Disk) -> Injected | None:
    """Fill the disk for `hold_s`, or until the session ends, and then empty it.

    May raise OSError.
    """
    injected = Injected(time.monotonic(), session.num_finished, path=str(disk.path))
    disk.fill(session.processes)
    try:
        session.sleep(fault.hold_s)
    finally:
        disk.empty(session.processes)
    return injected
