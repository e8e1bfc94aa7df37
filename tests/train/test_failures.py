"""A failure of a rank reaches the launcher, which ends all other ranks and names the cause."""

import ast
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime import launchers as variables
from rrfp.strict_json import integers
from rrfp.trace.outcome import FaultOrigin, FoundBy, RunFailedError
from rrfp.trace.run_dir import RunDir
from rrfp.train.launch import processes as children
from rrfp.train.launch import rank_process as process
from rrfp.train.launch.collectives import broadcast_json, gather_tensors, no_object_collectives
from rrfp.train.launch.launcher import TRAINING, _first_failure
from rrfp.train.launch.processes import Failure, SignalledError, launcher_directory, supervise_ranks
from rrfp.train.launch.rank_status import ERROR_FILE, FailureReport, forwarding_warnings
from rrfp.train.launch.stopping import StopRequestedError
from rrfp.train.launch.watchdog import Hang, Why
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import run_ranks

# What a failing rank tells its launcher.


REPORT = FailureReport("rank 1 was lost", 1, is_consequence=True, is_silence=False)


def nobody() -> None:
    """No other host says why ranks of this one have lost its ranks."""


def test_a_report_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    REPORT.write()
    written = json.loads((tmp_path / "error.json").read_text())
    assert FailureReport.read(written) == REPORT
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_the_grid_of_a_stall_is_below_the_sentence(tmp_path: Path) -> None:
    grid = "rank  waits\n1     2.0 s"
    report = FailureReport("rank 1 waited", 1, False, False, detail=grid)
    failure, run = Failure(7, 1, 0.0, report), RunDir(tmp_path)
    told = str(_first_failure({1: failure}, run, nobody))
    assert told == f"rank 1 failed: rank 1 waited (see {run.rank_log(1)})\n{grid}"


LOST = FailureReport("rank 1 was lost", 1, is_consequence=True, is_silence=False)
OWN = FailureReport("no memory", 1, is_consequence=False, is_silence=False)
SILENT = FailureReport("rank 2 was silent", 1, is_consequence=False, is_silence=True)
REFUSED = FailureReport("--lr is -1", 2, is_consequence=False, is_silence=False)
OWN_FAULT, OF_LINK = FaultOrigin(FoundBy.RANK, 1), FaultOrigin(FoundBy.LINK, link=(0, 1))
ENDED, KILLED = -signal.SIGTERM - 100, -signal.SIGKILL - 100
"""Exit codes by a signal of the launcher's own."""


@pytest.mark.parametrize(
    ("failures", "elsewhere", "told"),
    [
        ({0: (1, LOST), 1: (-signal.SIGSEGV, None)}, "", "rank 1 (pid 7) was killed by SIGSEGV"),
        ({0: (1, LOST), 1: (1, OWN), 2: (ENDED, None)}, "", "rank 1 failed: no memory"),
        ({0: (1, LOST), 2: (-signal.SIGTERM, None)}, "", "rank 2 (pid 7) was killed by SIGTERM"),
        ({0: (1, OWN), 1: (1, REFUSED)}, "", "rank 0 failed: no memory"),
        ({1: (1, REFUSED)}, "", "--lr is -1"),
        ({0: (1, SILENT), 2: (KILLED, None)}, "", "rank 2 (pid 7) did not answer and was"),
        ({0: (1, LOST)}, "", "rank 0 failed: rank 1 was lost (see "),
        ({0: (1, LOST)}, "host 1 (b): rank 2 failed", "host 1 (b): rank 2 failed"),
        ({0: (1, SILENT)}, "host 1 (b) was silent", "host 1 (b) was silent"),
        ({0: (1, OWN)}, "host 1 (b) was silent", "rank 0 failed: no memory"),
        ({3: (9, None)}, "", "rank 3 exited with code 9; see "),
        ({3: (-40, None)}, "", "rank 3 (pid 7) was killed by signal 40; "),
    ],
)
def test_the_failure_that_caused_the_others_is_raised(
    failures: dict[int, tuple[int, FailureReport | None]],
    elsewhere: str,
    told: str,
    tmp_path: Path,
) -> None:
    """Each a second after the one before."""
    ended = {
        rank: Failure(7, code + 100 * was_ended, float(rank), report, was_ended)
        for rank, (code, report) in failures.items()
        for was_ended in [code < -100]
    }
    error = _first_failure(
        ended, RunDir(tmp_path), lambda: RrfpError(elsewhere) if elsewhere else None
    )
    assert str(error).startswith(told)
    assert error.exit_code == (2 if told == "--lr is -1" else 1)


STOPPED = Hang(Why.STOPPED, 15.2, "in step 7", "a.py:1 in f", [0, 3])
DUMP = 'Current thread 0x1 (most recent call first):\n  File "/b.py", line 2 in g\n'


@pytest.mark.parametrize(
    ("stacks", "at", "where"),
    [
        ("", "a.py:1 in f", "its output"),
        (DUMP, "/b.py:2 in g", "its stack"),
    ],
)
def test_a_hung_rank_is_named_with_its_place(
    tmp_path: Path, stacks: str, at: str, where: str
) -> None:
    run = RunDir(tmp_path)
    failures = {
        0: Failure(6, 1, 1.0, LOST),
        1: Failure(7, -signal.SIGKILL, 2.0, None, True, STOPPED, stacks),
        2: Failure(8, 1, 1.0, SILENT),
    }
    assert str(_first_failure(failures, run, nobody)) == (
        f"rank 1 (pid 7) stood still in step 7 for 15 s, at {at}, and was killed: a signal had "
        f"stopped it, while ranks 0, 3 waited; {where} is in {run.rank_log(1)}, and see who stops "
        "it"
    )


def test_a_deadlock_of_all_ranks_is_one_error(tmp_path: Path) -> None:
    deadlock = Hang(Why.DEADLOCK, 150.2, "in close", "a.py:1 in f", [1, 2])
    failures = {0: Failure(6, -signal.SIGKILL, 2.0, None, True, deadlock)}
    assert "killed: every rank of the run waited for another; its output" in str(
        _first_failure(failures, RunDir(tmp_path), nobody)
    )


def test_a_rank_s_own_failure_takes_precedence_over_a_hang(tmp_path: Path) -> None:
    failures = {
        0: Failure(6, 1, 1.0, OWN),
        1: Failure(7, -signal.SIGKILL, 0.5, None, True, STOPPED),
    }
    told = str(_first_failure(failures, RunDir(tmp_path), nobody))
    assert told.startswith("rank 0 failed: no memory")


def test_a_rank_ends_even_if_its_report_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: FailureReport) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(FailureReport, "write", full)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        process._fail(UsageError("no memory"))
    assert ended.value.code == UsageError.exit_code


def test_without_a_launcher_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    REPORT.write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "found",
    [
        *({}, {"message": "torch's own words"}, {"message": {}}, [], None, 7),
        {"message": {"report": []}},
        {"message": {"report": {}}},
        {"message": {"report": {**asdict(REPORT), "at_s": "now"}}},
        {"message": {"report": {**asdict(REPORT), "culprit": {"rank": 1}}}},
    ],
)
def test_what_is_no_report_of_ours_is_none(found: object) -> None:
    assert FailureReport.read(found) is None


def test_the_first_line_that_says_something() -> None:
    assert first_line("\n  the fact \nException raised from wait") == "the fact"
    assert first_line("\n") == "no reason given"


@pytest.mark.parametrize(
    ("failure", "culprit"),
    [
        (Failure(7, -signal.SIGSEGV, 1.0, None), FaultOrigin(FoundBy.LAUNCHER, 1)),
        (Failure(7, -9, 1.0, None, True, STOPPED), FaultOrigin(FoundBy.LAUNCHER, 1)),
        (Failure(7, 9, 1.0, None), FaultOrigin(FoundBy.LAUNCHER, 1)),
        (Failure(7, 1, 1.0, replace(OWN, culprit=OWN_FAULT)), OWN_FAULT),
        (Failure(7, 1, 1.0, replace(LOST, culprit=OF_LINK)), OF_LINK),
        (Failure(7, 1, 1.0, LOST), FaultOrigin(FoundBy.COLLECTIVE)),
    ],
)
def test_the_error_has_the_origin_of_the_fault(
    failure: Failure, culprit: FaultOrigin, tmp_path: Path
) -> None:
    error = _first_failure({1: failure}, RunDir(tmp_path), nobody)
    assert isinstance(error, RunFailedError)
    assert error.culprit == culprit


def test_a_report_has_the_origin_of_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    for culprit in (None, OF_LINK, OWN_FAULT):
        report = replace(REPORT, culprit=culprit)
        report.write()
        assert FailureReport.read(json.loads(path.read_bytes())) == report


# What ranks tell each other: JSON and tensors, and no object by any path.


ROOT = Path(__file__).parents[2]

FORBIDDEN_MODULES = re.compile(
    r"(pickle|_pickle|cPickle|cloudpickle|dill|marshal|shelve|multiprocessing"
    r"|torch\.multiprocessing|torch\.distributed\.(launcher|run|rpc|elastic))(\.|$)"
)
"""Modules that unpickle, or that listen for pickled objects."""

FORBIDDEN_NAMES = re.compile(
    r"pickle|_object(_list)?$|^(gather|scatter|all_gather|broadcast)_objects?\b|elastic_launch"
)
ALLOWED = {
    ("rrfp/train/launch/collectives.py", "all_gather_object"),
    ("rrfp/train/launch/collectives.py", "_unpickler"),
    ("rrfp/interchange/torch_flight_recorder.py", "pickle"),
    ("rrfp/interchange/torch_flight_recorder.py", "_Unpickler"),
    ("rrfp/interchange/torch_flight_recorder.py", "UnpicklingError"),
    ("rrfp/megatron/memory/activation_bytes.py", "torch.multiprocessing.reductions.StorageWeakRef"),
    ("rrfp/planning/planner_process.py", "pickle"),
    ("rrfp/train/checkpoints/reading.py", "pickle"),
    ("rrfp/train/checkpoints/reading.py", "Unpickler"),
    ("rrfp/train/checkpoints/reading.py", "_MetadataUnpickler"),
}
"""Exceptions: code that disables torch's object collectives, that reads torch's dumps without any
class, or the metadata of a checkpoint with torch's classes only; a weak reference beside torch's
pickling; and the pipe from a process to the planner that it started, to which nobody else can
write."""

OURS = {"append_object", "py_object"}
"""A function that writes a line of JSON to a file, and a type of ctypes."""


def forbidden(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (
            name for name in names if FORBIDDEN_MODULES.match(name) and (path, name) not in ALLOWED
        )
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        if FORBIDDEN_NAMES.search(name) and name not in OURS and (path, name) not in ALLOWED:
            yield name
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "torch.save"}:
            yield ast.unparse(node.func)
        if isinstance(node, ast.Constant) and node.value in ("c10d", "rdzv_backend"):
            yield repr(node.value)


@pytest.mark.parametrize("path", sorted((ROOT / "rrfp").rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_in_the_package_pickles_or_meets_by_elastic(path: Path) -> None:
    assert list(forbidden(str(path.relative_to(ROOT)), path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "from torch.distributed.elastic.rendezvous import RendezvousError",
        "from torch.distributed.launcher.api import elastic_launch",
        "import torch.multiprocessing as mp",
        "dist.all_gather_object(infos, own)",
        "dist.broadcast_object_list(told)",
        "dist.gather_object(own, found)",
        "dist.send_object_list([x])",
        "torch.load(path)",
        "LaunchConfig(rdzv_backend='c10d')",
    ],
)
def test_the_walk_finds_what_is_forbidden(source: str) -> None:
    assert list(forbidden("rrfp/train/loop.py", source))


def in_groups() -> dict[str, Any]:
    """The result of every helper on this rank of three."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = {f"w{rank}": torch.full((rank, 2), float(rank)), "b": torch.tensor(rank + 0.5)}
    found: dict[str, Any] = {
        "told": broadcast_json([7, 8] if rank == 0 else None, integers),
        "gathered": [
            {name: tensor.tolist() for name, tensor in of_rank.items()}
            for of_rank in gather_tensors(own if rank != 1 else {})
        ],
        "errors": [],
    }
    for attempt in (
        lambda: broadcast_json("7" if rank == 0 else None, integers),
        lambda: shut(lambda: dist.broadcast_object_list([print])),
        lambda: shut(lambda: dist.all_gather_object([None] * 3, {"a": print})),
    ):
        try:
            attempt()
        except RrfpError as error:
            found["errors"].append(str(error))
    with no_object_collectives():
        plain: list[Any] = [None] * 3
        dist.all_gather_object(plain, [((("wd_mult", 0.0), ("lr", None)), rank == 1), (None, True)])
    found["plain"] = plain
    assert dist.all_gather_object.__module__.startswith("torch")
    dist.destroy_process_group()
    return found


def shut(attempt: Any) -> None:
    with no_object_collectives():
        attempt()


@pytest.mark.timeout(120)
def test_json_and_tensors_go_between_ranks_and_objects_do_not() -> None:
    found = run_ranks(3, in_groups)
    gathered = [
        {"w0": [], "b": 0.5},
        {},
        {"w2": [[2.0, 2.0], [2.0, 2.0]], "b": 2.5},
    ]
    for rank, of_rank in enumerate(found):
        assert of_rank["told"] == (7, 8)
        assert of_rank["gathered"] == (gathered if rank == 0 else [])
        # Rank 0 has nothing to unpickle in a broadcast of its own.
        assert len(of_rank["errors"]) == (2 if rank == 0 else 3)
        assert "what rank 0 sent to the others cannot be read" in of_rank["errors"][0]
        assert "tried to unpickle an object" in of_rank["errors"][-1]
        assert of_rank["plain"] == [
            [((("wd_mult", 0.0), ("lr", None)), peer == 1), (None, True)] for peer in range(3)
        ]


def address_of_gloo() -> list[str]:
    """The address at which a rank's groups listen, despite gloo's own variables."""
    from tests.security.exposed import listeners_of

    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    from rrfp.train.launch.process_groups import one_device_at

    with one_device_at("127.0.0.1"):
        dist.init_process_group("gloo")
        # A rank that closed its group here would end the other's connecting to it.
        dist.barrier(dist.new_group([0, 1]))  # pyright: ignore[reportArgumentType]
        dist.destroy_process_group()
        return sorted({listener.address for listener in listeners_of(os.getpid())})


@pytest.mark.timeout(120)
def test_gloo_listens_at_the_given_address() -> None:
    assert run_ranks(2, address_of_gloo) == [["127.0.0.1"]] * 2


# What a killed launcher leaves, the next one removes, and nothing of anybody who lives.


HOLD = """
from rrfp.train.launch.processes import launcher_directory
with launcher_directory() as path:
    (path / "store").touch()
    print(path, flush=True)
    input()
"""


def test_an_abandoned_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        try:
            assert (theirs / "store").exists()
            with launcher_directory() as ours:
                assert {*tmp_path.iterdir()} == {ours, theirs}
                assert ours.stat().st_mode & 0o777 == 0o700
            assert [*tmp_path.iterdir()] == [theirs]
        finally:
            other.kill()
        other.wait()
        assert (theirs / "store").exists()
        # Neither what has another name, nor what a link leads to, is a launcher's.
        (tmp_path / "rrfp-other").mkdir()
        (tmp_path / "rrfp-run-link").symlink_to(tmp_path / "rrfp-other")
        with launcher_directory():
            assert not theirs.exists()
            assert (tmp_path / "rrfp-other").exists()


# What ranks warn of reaches their launcher, whole and in order, and holds up nobody.


RANK = """
import logging, sys
from rrfp.train.launch.rank_status import send_warnings_to_launcher
logging.basicConfig(format="%(message)s")
send_warnings_to_launcher(int(sys.argv[1]))
log = logging.getLogger("rrfp.somewhere")
for number in range(200):
    log.warning("warning %d\\nof several lines", number)
log.error("an error, which is reported otherwise")
logging.getLogger("torch").warning("not ours")
"""


def test_each_warning_of_a_rank_arrives_once(tmp_path: Path) -> None:
    heard: list[str] = []
    with forwarding_warnings(tmp_path, heard.append) as environment:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank)],
                env={**os.environ, **environment},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.wait(timeout=60) == 0
    for number in range(2):
        own = [each for each in heard if each.startswith(f"rank {number}: ")]
        assert own == [f"rank {number}: warning {each} of several lines" for each in range(200)]
    assert len(heard) == 400


def test_a_launcher_that_is_gone_holds_up_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rrfp.train.launch import rank_status as warnings

    with forwarding_warnings(tmp_path, lambda _: None) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        log = logging.getLogger("rrfp")
        before = [*log.handlers]
        warnings.send_warnings_to_launcher(0)
        (handler,) = [each for each in log.handlers if each not in before]
    try:
        for _ in range(10_000):
            log.warning("x" * 100)
    finally:
        log.removeHandler(handler)


PROGRAM = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as every rank does, whatever it inherits
rank, here = os.environ["RANK"], pathlib.Path(sys.argv[1])
how = sys.argv[2].split(",")[int(rank)]
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "abort-when-asked":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGABRT))
(here / f"own-{rank}").write_text(str(os.getpid()))
(here / f"own-{rank}").rename(here / f"pid-{rank}")
while len(list(here.glob("pid-*"))) < len(sys.argv[2].split(",")):
    time.sleep(0.01)
if how == "tell":
    report = dict(sentence="no memory", exit_code=1, is_consequence=False, is_silence=False)
    told = {"message": {"message": "no memory", "report": report}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))
if how == "garbage":
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("{")
if how == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("wait", "stubborn", "abort-when-asked"):
    time.sleep(60)
if how == "end":
    from rrfp.train.launch.rank_status import StatusPage
    StatusPage(int(os.environ["RRFP_LIVENESS"].partition(",")[0])).finish()
sys.exit(0 if how in ("end", "end-too-early") else 3)
"""


def run(
    directory: Path, *ways: str, lost: Callable[[], RrfpError | None] = lambda: None
) -> dict[int, Failure]:
    command = (sys.executable, "-c", PROGRAM, str(directory), ",".join(ways))
    environments = {rank: {"RANK": str(rank)} for rank in range(len(ways))}
    return supervise_ranks(command, environments, directory, lost=lost)


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(children, "_SHUTDOWN_S", 1.0)
    before = {each: signal.getsignal(each) for each in children._SIGNALS}
    yield
    assert before == {each: signal.getsignal(each) for each in children._SIGNALS}
    for path in tmp_path.glob("pid-*"):
        assert not Path("/proc", path.read_text()).exists()


def test_all_that_end_well_are_no_failures(tmp_path: Path) -> None:
    assert run(tmp_path, "end", "end") == {}


def test_exit_code_0_without_the_rank_s_note_is_a_failure(tmp_path: Path) -> None:
    failures = run(tmp_path, "end", "end-too-early")
    # The other one may not have ended yet.
    own = [(rank, each.exit_code) for rank, each in failures.items() if not each.was_ended]
    assert own == [(1, 0)]


def test_one_failure_ends_them_all_and_its_report_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_POLL_S", 1.0)  # both that fail have as long to do so
    failures = run(tmp_path, "wait", "tell", "stubborn", "garbage")
    assert {rank: failure.exit_code for rank, failure in failures.items()} == {
        0: -signal.SIGTERM,
        1: 3,
        2: -signal.SIGKILL,
        3: 3,
    }
    assert [rank for rank, failure in failures.items() if failure.was_ended] == [0, 2]
    assert failures[1].report is not None
    assert failures[1].report.sentence == "no memory"
    assert failures[3].report is None
    assert failures[1].ended_s <= failures[0].ended_s


def test_a_rank_whose_launcher_died_first_ends(tmp_path: Path) -> None:
    """It waits for a peer that never comes, and its parent is not its launcher."""
    settings = TrainSettings(pp=2)
    command = (sys.executable, "-m", "rrfp.train.launch.rank_process", TRAINING, str(tmp_path))
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    told = {"RANK": "0", "WORLD_SIZE": "2", "RRFP_LAUNCHER": str(launcher.pid)}
    store = {"RRFP_STORE": f"file:{tmp_path / 'store'}", "RRFP_ADDRESS": "127.0.0.1"}
    ended = subprocess.run(
        (*command, settings.to_json()),
        env=os.environ | told | store,
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert (ended.returncode, ended.stderr) == (RrfpError.exit_code, b"")


def test_a_killed_process_is_reported_as_killed(tmp_path: Path) -> None:
    failures = run(tmp_path, "die", "end")
    assert failures[0].exit_code == -signal.SIGKILL


def test_the_first_that_was_killed_stays_the_first(tmp_path: Path) -> None:
    """As C++ aborts where a peer is lost."""
    failures = run(tmp_path, "abort-when-asked", "die")
    assert failures[0].exit_code == -signal.SIGABRT
    assert failures[1].ended_s < failures[0].ended_s


def test_another_host_that_is_lost_ends_them_all(tmp_path: Path) -> None:
    lost = RrfpError("host 1 was silent")
    with pytest.raises(RrfpError, match="host 1 was silent"):
        run(tmp_path, "wait", lost=lambda: lost if [*tmp_path.iterdir()] else None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_them_all(tmp_path: Path, number: signal.Signals) -> None:
    def signal_soon() -> None:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=signal_soon)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, and is obeyed
    try:
        thread.start()
        with pytest.raises(SignalledError) as told:
            run(tmp_path, "wait", "stubborn")
    finally:
        thread.join()
        signal.signal(number, before)
    assert told.value.number == number


REQUESTED = """
import os, pathlib, signal, sys, time
from rrfp.train.launch.rank_status import StatusPage
rank, here, how = os.environ["RANK"], pathlib.Path(sys.argv[1]), sys.argv[2]
asked = []
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as every rank does, whatever it inherits
page = StatusPage(int(os.environ[sys.argv[3]].partition(",")[0]))
if how not in ("starting", "asked") and (how, rank) != ("half started", "1"):
    page.enter("in step 0")
(here / f"goes-{rank}").touch()
time.sleep(0.3)  # a request that comes now counts, too
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
(here / f"own-{rank}").write_text(str(os.getpid()))
(here / f"own-{rank}").rename(here / f"pid-{rank}")
if how == "fail" and rank == "0":
    sys.exit(3)
if how == "asked" and rank == "0":
    page.ask_to_end()
while not asked or how == "deaf":
    time.sleep(0.01)
if how == "slowly":
    time.sleep(3)
page.finish()
sys.exit(0)
"""


def run_requested(
    directory: Path, how: str, *signals: signal.Signals, is_whole: bool = True
) -> dict[int, Failure]:
    """Two ranks that take SIGTERM as a request; the launcher gets these signals at once."""
    command = (sys.executable, "-c", REQUESTED, str(directory), how, variables.LIVENESS)

    def signal_soon() -> None:
        while len([*directory.glob("goes-*")]) < 2:
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.6)

    thread = threading.Thread(target=signal_soon)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    environments = {rank: {"RANK": str(rank)} for rank in range(2)}
    try:
        return supervise_ranks(
            command, environments, directory, end_on_request=True, is_whole=is_whole
        )
    finally:
        thread.join()
        # How the ranks ended is settled, so a later request must not change it.
        assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN


def test_sigterm_can_be_a_request(tmp_path: Path) -> None:
    assert run_requested(tmp_path, "end", signal.SIGTERM) == {}


def test_a_request_before_the_first_step_ends_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(StopRequestedError):
        run_requested(tmp_path, "starting", signal.SIGTERM)
    with pytest.raises(StopRequestedError):
        run_requested(tmp_path, "asked")


def test_of_several_hosts_none_knows_that_no_step_has_begun(tmp_path: Path) -> None:
    assert run_requested(tmp_path, "starting", signal.SIGTERM, is_whole=False) == {}


def test_a_step_that_one_rank_has_begun_is_trained(tmp_path: Path) -> None:
    assert run_requested(tmp_path, "half started", signal.SIGTERM) == {}


def test_a_request_may_be_repeated(tmp_path: Path) -> None:
    """The ranks may be saving by then."""
    assert run_requested(tmp_path, "slowly", signal.SIGTERM, signal.SIGTERM) == {}


def test_a_second_signal_ends_ranks_that_do_not_follow_a_request(tmp_path: Path) -> None:
    with pytest.raises(SignalledError) as told:
        run_requested(tmp_path, "deaf", signal.SIGTERM, signal.SIGINT)
    assert told.value.number == signal.SIGINT


def test_a_request_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_REQUEST_S", 1.0)
    with pytest.raises(RrfpError, match="rank 0, 1 did not save and end within 1 s of SIGTERM"):
        run_requested(tmp_path, "deaf", signal.SIGTERM)


def test_a_failure_ends_ranks_that_take_requests(tmp_path: Path) -> None:
    failures = run_requested(tmp_path, "fail")
    assert {rank: failure.exit_code for rank, failure in failures.items()} == {
        0: 3,
        1: -signal.SIGINT,
    }


def test_a_process_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    own = subprocess.Popen

    def start_one(*args: object, **options: object) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(own(*args, **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(RrfpError, match="a rank's process cannot be started"):
        run(tmp_path, "wait", "wait")
    assert started[0].wait(10) == -signal.SIGKILL
