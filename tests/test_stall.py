"""A stall is told as a grid: each rank's cause, its ready tasks, what the best lacks, from whom."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from rrfp.errors import RrfpError
from rrfp.runtime.net.transport import SocketTransport
from rrfp.runtime.protocols import Links, Message
from rrfp.runtime.stall import StallRow, StoreStallBoard, grid, listed
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Task, parse_task
from rrfp.trace.records import NS_PER_S
from tests.rank_rig import RankRig, Work, run_in_memory
from tests.ranks import run_ranks
from tests.rigs import Rig, on_rigs, ours
from tests.training import SMALL

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
    mine, theirs = (StoreStallBoard(store, "p", [1, 0]) for _ in range(2))
    assert theirs.num_calls(3) == 0
    assert mine.call(3) == 1
    assert theirs.num_calls(3) == 1
    assert theirs.num_calls(4) == 0
    mine.publish(3, 1, row(0))
    theirs.publish(3, 1, row(1))
    theirs.publish(3, 1, row(1, waited_s=601.0))
    assert mine.rows(3, 1) == [row(0), row(1, waited_s=601.0)]
    assert mine.rows(4, 1) == []


def test_what_answered_an_earlier_call_is_not_told_again() -> None:
    """An answer to a later call is one to the earlier call too: two ranks may call at a time."""
    store = HashStore()
    mine, theirs = (StoreStallBoard(store, "p", [0, 1]) for _ in range(2))
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
    board = StoreStallBoard(store, "p", [0, 1])
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
    board = StoreStallBoard(store, "p", [0, 1])
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
    text = grid(rows, [0, 2, 4, 6])
    assert max(map(len, text.splitlines())) <= 80
    golden("stall_grid.txt", text + "\n")


def test_a_grid_of_long_cells_keeps_its_width_and_every_cell() -> None:
    many = listed([f"11F{microbatch}" for microbatch in range(100, 200)])
    text = grid([row(1023, ready=many, lacks=DEBTS), row(1024)], range(1020, 1030))
    assert max(map(len, text.splitlines())) <= 80
    assert columns(text, 1023) == ["forward_input", many, "1F2", DEBTS]
    assert columns(text, 1024) == ["forward_input", "-", "1F2", "0F2 from rank 0"]


def test_long_lists_are_cut() -> None:
    assert listed([]) == "-"
    assert listed([1, 2]) == "1, 2"
    assert listed(range(10)) == "0, 1, 2 and 7 more"


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

    def forecast(self, peer: int, step: int, task: Task, left_ns: int) -> None:
        self._links.forecast(peer, step, task, left_ns)


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
    """What the ranks that stalled say, the first sentence apart; at least one did, all in time."""
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
def test_a_lost_message_is_told_with_its_sender(seed: int) -> None:
    """On every rank that stalls, though only one of them lacks the message itself."""
    for text in stalls(stall(seed, 3, 1, "1F1", 0, None)):
        assert columns(text, 0) == ["backward_input", "-", "0B1", "1B1 from rank 1"]
        assert columns(text, 1) == ["forward_input", "-", "1F1", "0F1 from rank 0"]
        assert columns(text, 2) == ["forward_input", "-", "2F1", "1F1 from rank 1"]


@seeds
def test_a_lost_report_is_told_with_the_member_that_owes_it(seed: int) -> None:
    """Ranks 2 and 3 hold the last stage together; rank 2 leads and never hears what 3 has."""
    for text in stalls(stall(seed, 2, 2, "1F1", 3, None)):
        reports = "for 1F1 reports of what has arrived there from rank 3"
        decision = "for 1F1 the group's next decision from rank 2"
        assert columns(text, 2) == ["coordination", "1F1", "1B1", f"1F1 here; {reports}"]
        assert columns(text, 3) == ["coordination", "1F1", "1B1", f"1F1 here; {decision}"]
        assert columns(text, 1) == ["backward_input", "-", "0B1", "1B1 from rank 3"]


@seeds
def test_a_rank_that_does_not_wait_is_told_as_silent(seed: int) -> None:
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


def test_the_drop_in_tells_the_grid() -> None:
    found = run_ranks(2, on_rigs, stall_in_training, {**SMALL, "pp": 2}, timeout_s=110)
    (text, *_) = [text for name, text in found if name == "StallError"]
    assert columns(text, 0) == ["backward_input", "-", "0B1", "1B1 from rank 1"]
    assert columns(text, 1) == ["forward_input", "-", "1F1", "0F1 from rank 0"]
