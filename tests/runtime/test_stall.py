"""The error of a stall: a table of each rank's cause, its ready tasks and its missing inputs."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

from rrfp.errors import RrfpError
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.protocols import Links, Message
from rrfp.runtime.stall import StallBoard, StallRow, format_first, format_rows
from rrfp.runtime.worker import OutOfMemoryError, explain_out_of_memory
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task, parse_task
from rrfp.trace.records import NS_PER_S
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, Rig, on_rigs, ours
from tests.runtime.rank_rig import RankRig, Work, run_in_memory

STALL_S = 2.0
STALL_LATEST_S = STALL_S + 3.0
"""A machine that is busy may take its time too."""


DEBTS = "1F2 here; " + ", ".join(
    f"for 1F2 reports of what has arrived there from rank {peer}" for peer in (5, 6)
)


def row(rank: int, **changes: object) -> StallRow:
    cells: dict[str, object] = {
        "rank": rank,
        "pp_rank": rank,
        "waited_s": 600.0,
        "cause": "forward_input",
        "ready": "-",
        "best_waiting": "1F2",
        "lacks": "0F2 from rank 0",
    }
    return StallRow(**{**cells, **changes})  # type: ignore[arg-type]


def test_rows_are_shared_once_somebody_calls() -> None:
    store = HashStore()
    mine, theirs = (StallBoard(store, "p", [1, 0]) for _ in range(2))
    assert theirs.num_calls(3) == 0
    assert mine.call(3) == 1
    assert theirs.num_calls(3) == 1
    assert theirs.num_calls(4) == 0
    mine.publish(3, 1, row(0))
    theirs.publish(3, 1, row(1))
    theirs.publish(3, 1, row(1, waited_s=601.0))
    assert mine.rows(3, 1) == [row(0), row(1, waited_s=601.0)]
    assert mine.rows(4, 1) == []


def test_rows_that_answered_an_earlier_call_are_not_returned_again() -> None:
    """An answer to a later call is one to the earlier call too: two ranks may call at a time."""
    store = HashStore()
    mine, theirs = (StallBoard(store, "p", [0, 1]) for _ in range(2))
    first = mine.call(3)
    mine.publish(3, first, row(0))
    theirs.publish(3, first, row(1))
    second = theirs.call(3)
    assert theirs.rows(3, second) == []
    mine.publish(3, second, row(0, waited_s=601.0))
    assert theirs.rows(3, second) == [row(0, waited_s=601.0)]
    assert mine.rows(3, first) == [row(0, waited_s=601.0), row(1)]


class BrokenStore:
    """A store whose server has gone."""

    def _fail(self, *_: object) -> bool:
        raise RuntimeError("Connection reset by peer")

    set = check = get = add = _fail


def test_a_lost_store_costs_the_rows_of_the_others_only() -> None:
    store: Store = BrokenStore()  # type: ignore[assignment]
    board = StallBoard(store, "p", [0, 1])
    assert board.call(0) == 0
    board.publish(0, 1, row(0))
    assert board.num_calls(0) == 0
    assert board.rows(0, 0) == []


class SilentStore:
    """A store whose host has gone, with nothing to say so."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.num_calls = 0

    def add(self, *_: object) -> int:
        self.num_calls += 1
        self.end.wait(60)
        return 3


def test_a_store_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.runtime.stall._ANSWER_S", 0.05)
    silent = SilentStore()
    store: Store = silent  # type: ignore[assignment]
    board = StallBoard(store, "p", [0, 1])
    for _ in range(3):
        assert board.num_calls(0) == 0
        assert board.rows(0, 0) == []
    assert silent.num_calls == 1
    silent.end.set()  # the link is back
    assert board._asking is not None
    board._asking.join(20)
    assert board.num_calls(0) == 3


def test_the_grid(golden: Callable[[str, str], None]) -> None:
    rows = [
        row(0, cause="backward_input", best_waiting="0B0", lacks="1B0 from rank 4"),
        row(4, pp_rank=1, cause="coordination", ready="1F2, 1F3", waited_s=3.25, lacks=DEBTS),
    ]
    text = format_rows(rows, [0, 2, 4, 6])
    assert max(map(len, text.splitlines())) <= 80
    golden("stall_grid.txt", text + "\n")


def test_a_grid_of_long_cells_keeps_its_width_and_every_cell() -> None:
    many = format_first([f"11F{microbatch}" for microbatch in range(100, 200)])
    text = format_rows([row(1023, ready=many, lacks=DEBTS), row(1024)], range(1020, 1030))
    assert max(map(len, text.splitlines())) <= 80
    assert columns(text, 1023) == ["forward_input", many, "1F2", DEBTS]
    assert columns(text, 1024) == ["forward_input", "-", "1F2", "0F2 from rank 0"]


def test_long_lists_are_cut() -> None:
    assert format_first([]) == "-"
    assert format_first([1, 2]) == "1, 2"
    assert format_first(range(10)) == "0, 1, 2 and 7 more"


# On the ranks of a pipeline.


class Dropping:
    """Links that lose the message for one task, or a report of it."""

    def __init__(self, links: Links, lost: Task) -> None:
        self._links = links
        self._lost = lost
        self.consumed = links.consumed
        self.decide = links.decide

    def send(self, peer: int, message: Message) -> None:
        if message.task != self._lost:
            self._links.send(peer, message)

    def report(self, peer: int, step: int, task: Task) -> None:
        if task != self._lost:
            self._links.report(peer, step, task)

    def forecast(self, peer: int, step: int, task: Task, remaining_ns: int) -> None:
        self._links.forecast(peer, step, task, remaining_ns)


def stall(
    seed: int,
    num_pp_ranks: int,
    num_members: int,
    lost: str,
    loser: int | None,
    sleeper: int | None,
) -> list[tuple[str, str, float]]:
    """Run until each rank fails: the name and the text of its error, and how long it took. The rank
    `loser` loses what `lost` needs; the rank `sleeper` sleeps in its first task."""

    def wrap(rank: int, links: Links) -> Links:
        return Dropping(links, parse_task(lost)[0]) if rank == loser else links

    def run(rig: RankRig) -> tuple[str, str, float]:
        def act(_: Task) -> None:
            if rig.place.rank == sleeper:
                rig.sleep(STALL_LATEST_S)

        began_ns = rig.clock()
        try:
            rig.run_step(0, Shape(num_pp_ranks, 4), Work(act))
        except RrfpError as error:
            # The links close without a farewell, as those of a rank that fails.
            rig.transport.close(farewell=False)
            return type(error).__name__, str(error), (rig.clock() - began_ns) / NS_PER_S
        raise AssertionError("this rank did not stall")

    return run_in_memory(
        run,
        num_pp_ranks,
        num_members,
        seed=seed,
        longest_delay_ns=1_000_000,
        stall_s=STALL_S,
        wrap=wrap,
    )


seeds = pytest.mark.parametrize("seed", range(5))


def stalls(found: list[tuple[str, str, float]]) -> list[str]:
    """Check that at least one rank stalled, each in time; return their messages without the first
    sentence."""
    stalled = [(text, took_s) for name, text, took_s in found if name == "StallError"]
    assert {name for name, *_ in found} <= {"StallError", "PeerLostError"}
    assert all(STALL_S <= took_s < STALL_LATEST_S for _, took_s in stalled)
    assert stalled
    return [text for text, _ in stalled]


def columns(text: str, rank: int) -> list[str]:
    """A rank's row in a grid, from its cause on; its cells that stand below the others too."""
    row = re.search(rf"^{rank} +.*(\n      .*)*", text, re.MULTILINE)
    assert row is not None
    beside, *below = re.sub(r"\n      (?!ready: |best waiting: |lacks: )", " ", row[0]).split("\n")
    return re.split(r"  +", beside)[3:] + [cell.split(": ", 1)[1] for cell in below]


@seeds
def test_a_lost_message_is_reported_with_its_sender(seed: int) -> None:
    """On every rank that stalls, though only one of them lacks the message itself."""
    for text in stalls(stall(seed, 3, 1, "1F1", 0, None)):
        assert columns(text, 0) == ["backward_input", "-", "0B1", "1B1 from rank 1"]
        assert columns(text, 1) == ["forward_input", "-", "1F1", "0F1 from rank 0"]
        assert columns(text, 2) == ["forward_input", "-", "2F1", "1F1 from rank 1"]


@seeds
def test_a_lost_report_is_reported_with_its_member(seed: int) -> None:
    """Ranks 2 and 3 hold the last stage together; rank 2 leads and never hears what 3 has."""
    for text in stalls(stall(seed, 2, 2, "1F1", 3, None)):
        reports = "for 1F1 reports of what has arrived there from rank 3"
        decision = "for 1F1 the group's next decision from rank 2"
        assert columns(text, 2) == ["coordination", "1F1", "1B1", f"1F1 here; {reports}"]
        assert columns(text, 3) == ["coordination", "1F1", "1B1", f"1F1 here; {decision}"]
        assert columns(text, 1) == ["backward_input", "-", "0B1", "1B1 from rank 3"]


@seeds
def test_a_rank_that_does_not_wait_is_listed_as_silent(seed: int) -> None:
    for text in stalls(stall(seed, 3, 1, "1F1", None, 1)):
        assert columns(text, 2) == ["warmup", "-", "2F0", "1F0 from rank 1"]
        assert "\nno word of rank 1: " in text


def stall_in_training(layout: Any, settings: dict[str, Any]) -> tuple[str, str]:
    """Lose the message for 1F1 under the drop-in: the name and text of this rank's error."""
    send = SocketTransport.send

    def lossy(self: SocketTransport, peer: int, message: Message) -> None:
        if message.task != parse_task("1F1")[0]:
            send(self, peer, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketTransport, "send", lossy)
        try:
            Rig(settings, layout).run(ours(stall_s=STALL_S))
        except RrfpError as error:
            return type(error).__name__, str(error)
    raise AssertionError("this rank did not stall")


def test_the_drop_in_reports_the_table() -> None:
    found = run_ranks(2, on_rigs, stall_in_training, {**SMALL, "pp": 2}, timeout_s=110)
    (text, *_) = [text for name, text in found if name == "StallError"]
    assert columns(text, 0) == ["backward_input", "-", "0B1", "1B1 from rank 1"]
    assert columns(text, 1) == ["forward_input", "-", "1F1", "0F1 from rank 0"]


# What a rank says that runs out of memory.


TASK = Task(3, Kind.F, 7)
GIB = 2**30


def fail(error: BaseException, held_bytes: int, held: float) -> str:
    with (
        pytest.raises(OutOfMemoryError) as raised,
        explain_out_of_memory(5, TASK, held_bytes, held),
    ):
        raise error
    return str(raised.value)


def test_it_says_what_was_held_and_what_would_have_fitted() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert fail(error, 20 * GIB, 9.5) == (
        "rank 5 ran out of memory in 3F7, with 20 GiB of activations of 9.5 microbatches held; "
        "--hold 18GiB would have fitted (CUDA out of memory. Tried to allocate 2.00 GiB.)"
    )


def test_without_sizes_it_counts_microbatches() -> None:
    told = fail(MemoryError("no memory"), 0, 4)
    assert "with activations of 4 microbatches held; --hold 3 would have fitted" in told


def test_where_one_microbatch_does_not_fit_no_hold_helps() -> None:
    told = fail(torch.OutOfMemoryError("CUDA out of memory"), GIB, 1)
    assert "no hold is smaller: use --recompute, smaller microbatches, or more ranks" in told


def test_a_real_allocation_that_fails_on_the_cpu_is_explained() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="rank 5 ran out of memory in 3F7"),
        explain_out_of_memory(5, TASK, 3 * GIB, 2),
    ):
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nSearch for more",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_cuda_itself_does_not_get_is_explained(message: str) -> None:
    assert "ran out of memory in 3F7" in fail(torch.AcceleratorError(message), GIB, 2)


class LostPeerError(RuntimeError):
    """As torch's own errors of collectives and accelerators, which derive from RuntimeError."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        NotImplementedError("no kernel"),
        LostPeerError("NCCL: connection closed"),
    ],
)
def test_other_errors_pass(error: RuntimeError) -> None:
    with (
        pytest.raises(type(error), match=str(error)) as raised,
        explain_out_of_memory(5, TASK, 0, 1),
    ):
        raise error
    assert raised.value is error


# What is done when a process' main thread has ended: links say farewell, traces are merged.


SCRIPT = """
import queue, sys, threading
from rrfp.runtime.exit_hooks import at_end

told, done = queue.Queue(), queue.Queue()

def work():
    for what in iter(told.get, None):
        print(what, threading.main_thread().is_alive())
        done.put(what)

# Other threads still run. From Python 3.12 on none can be started any more.
threading.Thread(target=work).start()

def tell(what):
    told.put(what)
    done.get(timeout=30)

def fail():
    raise RuntimeError("not this one")

at_end.register(lambda: told.put(None))
at_end.register(lambda: tell("first"))
at_end.register(fail)
at_end.register(lambda: tell("last"))
print("main ends", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('broken')", 1)]
)
def test_the_last_is_done_first_once_the_main_thread_has_ended(end: str, code: int) -> None:
    script = SCRIPT.format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert done.stdout.splitlines() == ["main ends", "last False", "first False"]
    assert "a function registered for the end of the process failed" in done.stderr


def test_it_is_done_once() -> None:
    script = SCRIPT.format(end="at_end.run()")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["main ends", "last True", "first True"]


@pytest.mark.parametrize(
    "end",
    [
        "error = PeerLostError('rank 1 has ended'); at_end.note_step_error(error); raise error",
        "raise RuntimeError('[pair.cc:547] Connection closed by peer [127.0.0.1]:4711')",
        "at_end.note_step_error(PeerLostError('rank 1 has ended')); sys.exit(1)",
    ],
)
def test_one_that_has_lost_a_peer_waits_for_its_launcher(end: str) -> None:
    script = (
        "import sys\n"
        "from rrfp.runtime.exit_hooks import at_end\n"
        "from rrfp.runtime.protocols import PeerLostError\n"
        "at_end.register(lambda: print('the rest is done', flush=True))\n"
        f"{end}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "the rest is done\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.terminate()
    process.communicate()
    assert process.returncode == -signal.SIGTERM
