"""Dumps of torch's flight recorder: the report on which ranks wait for which."""

import json
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rrfp.cli import main as cli
from rrfp.errors import RrfpError
from rrfp.interchange.torch_flight_recorder import hang_of, read_dumps
from tests.e2e.ranks import run_ranks
from tests.interchange.made_profiles import DONE, PIPELINE, STARTED, WORLD, Entry, dump


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    def write(dumps: dict[int, list[Entry]], *, as_json: bool = False) -> Path:
        for rank, entries in dumps.items():
            content = dump(entries)
            if as_json:
                (tmp_path / f"trace_{rank}.json").write_text(json.dumps(content))
            else:
                path = tmp_path / f"nccl_trace_rank_{rank}"
                path.write_bytes(pickle.dumps(content, protocol=2))
        return tmp_path

    return write


def rrfp(*arguments: str) -> int:
    with patch("sys.argv", ["rrfp", *arguments]):
        return cli.main()


def report_of(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """Run the command on the dumps of a hang. Returns its output as text and as JSON."""
    capsys.readouterr()
    assert rrfp("trace", "import", "--flight-recorder", str(path)) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 24
    assert rrfp("trace", "import", "--flight-recorder", str(path), "--format", "json") == 0
    return text, json.loads(capsys.readouterr().out)


REDUCED = ("all_reduce", WORLD, 1, DONE)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_rank_that_never_came_to_a_collective_is_named(
    as_json: bool, put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    late = [REDUCED, ("all_reduce", WORLD, 2, STARTED)]
    text, found = report_of(put({0: late, 1: late, 2: [REDUCED], 3: late}, as_json=as_json), capsys)
    assert text.startswith("Rank 2 never came: ranks 0, 1, 3 wait for it in all_reduce #2 of")
    assert "/job/train.py:10 train" in " ".join(text.split())
    assert found["never_came"] == [2]
    assert {wait["rank"]: wait["waits_for"] for wait in found["waits"]} == {0: [2], 1: [2], 3: [2]}
    assert found["waits"][0]["place"] == "/job/train.py:11 train"


def test_a_chain_of_receives_ends_at_the_rank_that_does_not_send(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline that waits for a gradient which the last rank never sends."""
    text, found = report_of(
        put(
            {
                0: [("send 0->1", PIPELINE, 1, DONE), ("recv 0<-1", PIPELINE, 2, STARTED)],
                1: [("recv 1<-0", PIPELINE, 1, DONE), ("recv 1<-2", PIPELINE, 2, "scheduled")],
                2: [("recv 2<-1", PIPELINE, 1, DONE), ("recv 2<-3", PIPELINE, 2, "scheduled")],
                3: [("recv 3<-2", PIPELINE, 1, DONE)],
            }
        ),
        capsys,
    )
    assert text.startswith("Rank 3 never came: rank 2 waits for it")
    assert found["never_came"] == [3]
    assert [wait["waits_for"] for wait in found["waits"]] == [[1], [2], [3]]


def test_ranks_that_wait_for_each_other_are_a_circle(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {rank: [(f"recv {rank}<-{(rank + 1) % 4}", PIPELINE, 1, STARTED)] for rank in range(4)}
    text, found = report_of(put(waits), capsys)
    assert text.startswith("Ranks wait for each other in a circle: 0 -> 1 -> 2 -> 3 -> 0.")
    assert found["circles"] == [[0, 1, 2, 3]]
    assert found["never_came"] == []


def test_two_ranks_that_both_send_first_are_a_circle(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has begun its receive too, but it runs only after its send."""
    both = {
        rank: [
            (f"send {rank}->{1 - rank}", PIPELINE, 1, STARTED),
            (f"recv {rank}<-{1 - rank}", PIPELINE, 2, "scheduled"),
        ]
        for rank in range(2)
    }
    text, _ = report_of(put({**both, 2: [REDUCED], 3: [REDUCED]}), capsys)
    assert text.startswith("Ranks wait for each other in a circle: 0 -> 1 -> 0.")


def test_different_operations_with_one_number_are_reported(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = ("all_reduce", WORLD, 1, STARTED), ("all_gather", WORLD, 1, STARTED)
    text, found = report_of(put({0: [one], 1: [one], 2: [other], 3: [one]}), capsys)
    assert "different operations as number 1" in text
    assert "rank 2 all_gather" in " ".join(text.split())
    assert found["mismatches"][0]["sequence"] == 1


def test_a_rank_without_a_dump_may_have_died(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = [("all_reduce", WORLD, 1, STARTED)]
    text, found = report_of(put({0: waiting, 1: waiting, 2: waiting}), capsys)
    assert "Rank 3 left no dump: look at its log" in text
    assert found["ranks_without_dump"] == [3]


def test_a_rank_that_is_late_comes_before_one_without_a_dump(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = [REDUCED, ("all_reduce", WORLD, 2, STARTED)]
    text, found = report_of(put({0: waiting, 1: [REDUCED], 2: waiting}), capsys)
    assert text.startswith("Rank 1 never came: ranks 0, 2 wait for it in all_reduce #2 of")
    assert "Rank 3 left no dump: look at its log" in text
    assert found["never_came"] == [1, 3]
    text, _ = report_of(put({1: waiting}), capsys)
    assert text.startswith("Rank 3 left no dump, and ranks 0, 1, 2 wait for it in all_reduce #2 of")


def without_config(
    content: dict[str, Any], backend: str = "gloo", ranks: str = "[]"
) -> dict[str, Any]:
    """A dump as on gloo: a group without a name, and no state except that finished operations are
    retired."""
    content["pg_config"] = {"": {"name": "", "desc": "", "ranks": ranks}}
    for entry in content["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("nccl", backend)
        entry["state"] = "scheduled"
    return content


@pytest.mark.parametrize("as_json", [False, True])
def test_without_groups_in_the_dumps_all_ranks_belong_to_the_default_group(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 began nothing, and rank 2 left no dump. As JSON, torch then writes no entries."""

    def write(rank: int, entries: list[Entry]) -> None:
        content = without_config(dump(entries), ranks=f"[{rank}, {rank + 1}]")
        if as_json and not entries:
            del content["entries"]
        path = tmp_path / f"trace_rank_{rank}{'.json' if as_json else ''}"
        path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content))

    waiting = [("all_reduce", WORLD, 1, STARTED)]
    for rank, entries in ((0, waiting), (1, []), (3, waiting)):
        write(rank, entries)
    text, found = report_of(tmp_path, capsys)
    assert text.startswith("Rank 1 never came: ranks 0, 3 wait for it in all_reduce #1 of")
    assert "Look at rank 1: it began no operation at all." in text
    assert found["ranks_without_dump"] == [2]
    write(1, waiting)
    write(2, waiting)
    text, _ = report_of(tmp_path, capsys)
    said = " ".join(text.split())
    assert "to which all that left a dump have come, and it does not end: look for a rank" in said


def test_an_operation_that_nccl_aborted_has_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL retires it like a finished operation, which on gloo is the only sign that it
    finished."""
    for backend, begins in (("nccl", "Ranks 0, 1 are in all_reduce #1"), ("gloo", "No rank waits")):
        for rank in range(2):
            content = without_config(dump([REDUCED], num_ranks=2), backend)
            (tmp_path / f"trace_rank_{rank}").write_bytes(pickle.dumps(content))
        assert report_of(tmp_path, capsys)[0].startswith(begins)


def test_both_halves_of_a_transfer_wait_for_nobody(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text, found = report_of(
        put(
            {
                0: [("send 0->1", PIPELINE, 1, STARTED)],
                1: [("recv 1<-0", PIPELINE, 1, STARTED)],
                2: [REDUCED],
                3: [REDUCED],
            }
        ),
        capsys,
    )
    assert "it does not end: look at the network" in " ".join(text.split())
    assert all(wait["waits_for"] == [] for wait in found["waits"])


def batch(rank: int, peer: int, number: int, state: str) -> list[Entry]:
    """A batch as torch writes it: only the state of its last entry changes."""
    return [
        (f"send {rank}->{peer}", PIPELINE, number, "scheduled"),
        (f"recv {rank}<-{peer}", PIPELINE, number, "scheduled"),
        ("p2p:coalesced", PIPELINE, number, state),
    ]


def test_the_parts_of_a_batch_end_with_it(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    done = {0: batch(0, 1, 1, DONE), 1: batch(1, 0, 1, DONE), 2: [REDUCED], 3: [REDUCED]}
    text, found = report_of(put(done), capsys)
    assert text.startswith("No rank waits")
    text, found = report_of(put({0: [*done[0], *batch(0, 1, 2, STARTED)]}), capsys)
    assert text.startswith("Rank 1 never came: rank 0 waits for it in batch #2 of")
    assert "the last that it began was batch #1 of PIPELINE_MODEL_PARALLEL_GROUP (18)" in " ".join(
        text.split()
    )
    assert [(wait["rank"], wait["waits_for"]) for wait in found["waits"]] == [(0, [1])]
    assert [part["operation"] for part in found["waits"][0]["parts"]] == ["send", "recv"]
    _, found = report_of(put({1: [*done[1], *batch(1, 0, 2, STARTED)]}), capsys)
    assert [wait["waits_for"] for wait in found["waits"]] == [[], []]


def test_a_batch_of_collectives_is_compared_as_a_whole(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*names: str) -> list[Entry]:
        return [REDUCED, *((name, WORLD, 2, DONE) for name in (*names, "coalesced"))]

    same = ends("all_gather", "all_reduce")
    _, found = report_of(put(dict.fromkeys(range(4), same)), capsys)
    assert found["mismatches"] == []
    # A dump that no longer has the first part of its oldest batch.
    _, found = report_of(put({2: same[2:]}), capsys)
    assert found["mismatches"] == []
    _, found = report_of(put({2: ends("all_gather", "all_gather")}), capsys)
    assert found["mismatches"][0]["operations"] == {
        "all_gather of [[8]], all_reduce of [[8]]": [0, 1, 3],
        "all_gather of [[8]], all_gather of [[8]]": [2],
    }


def test_ranks_in_a_hung_operation_differ_from_ranks_behind_them(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    late, inner = [("all_reduce", WORLD, 1, STARTED)], [("send 1->2", PIPELINE, 1, STARTED)]
    text, _ = report_of(
        put({0: late, 1: inner, 2: [("recv 2<-1", PIPELINE, 1, STARTED)], 3: late}), capsys
    )
    said = " ".join(text.split())
    assert said.startswith("Rank 1 is in send #1 of PIPELINE_MODEL_PARALLEL_GROUP (18) to rank 2,")
    assert "look at the network. Ranks 0, 3 wait for it." in said
    text, _ = report_of(put({1: [], 2: []}), capsys)
    assert text.startswith("Ranks 1, 2 never came: ranks 0, 3 wait for them in all_reduce #1 of")


def test_a_job_that_does_not_hang_is_reported(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text, found = report_of(put({rank: [REDUCED] for rank in range(4)}), capsys)
    assert text.startswith("No rank waits")
    assert found["waits"] == []


def test_many_ranks_fit_on_a_screen(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of 100 ranks waits in an operation of its own."""
    report_of(
        put({rank: [(f"recv {rank}<-{rank + 1}", PIPELINE, 1, STARTED)] for rank in range(100)}),
        capsys,
    )


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("nccl_trace_rank_0", pickle.dumps({"entries": [Harmful()]}), "it asks for posix.mkdir"),
        ("nccl_trace_rank_0", pickle.dumps({"entries": 3}), "it has no entries"),
        ("nccl_trace_rank_0", pickle.dumps([1]), "it has no entries"),
        ("nccl_trace_rank_0", b"", "is no dump of torch's flight recorder"),
        ("nccl_trace_rank_0", b"\x80\x02}q\x00(", "is no dump of torch's flight recorder"),
        ("trace_0.json", b'{"entries": [', "is no dump of torch's flight recorder"),
        ("trace", b"{}", "has no number at the end of its name"),
        ("trace_0.json", b'{"version": "1.5", "entries": []}', "only version 2 is read"),
        ("trace_0.json", b'{"version": [], "entries": []}', "of version unknown"),
    ],
)
def test_a_file_that_is_not_a_dump_is_refused(
    name: str,
    content: bytes,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert rrfp("trace", "import", "--flight-recorder", str(tmp_path / name)) == 1
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "harmed").exists()


def test_odd_entries_are_read_all_the_same(tmp_path: Path) -> None:
    content = {"pg_config": 3, "entries": [3, {}, {"process_group": "x", "frames": 7, "state": 2}]}
    (tmp_path / "trace_rank_5").write_bytes(pickle.dumps(content))
    hang = hang_of(read_dumps([tmp_path], pytest.fail))
    assert hang.ranks == (5,)


def test_two_dumps_of_a_rank_are_refused(put: Callable[..., Path]) -> None:
    path = put({0: [REDUCED]})
    (path / "other_rank_0").write_bytes(pickle.dumps(dump([REDUCED, REDUCED])))
    with pytest.raises(RrfpError, match="are both of rank 0"):
        read_dumps([path], pytest.fail)
    with pytest.raises(RrfpError, match="there is nothing at"):
        read_dumps([path / "none"], pytest.fail)


def test_two_jobs_are_not_mixed_silently(tmp_path: Path) -> None:
    """Neither by files of one name, nor by dumps that cannot be of one job."""
    for job, num_ranks in (("one", 2), ("other", 4)):
        (tmp_path / job).mkdir()
        content = dump([REDUCED] * num_ranks, num_ranks)
        for rank in range(num_ranks):
            (tmp_path / job / f"trace_rank_{rank}").write_bytes(pickle.dumps(content))
    with pytest.raises(RrfpError, match="are both of rank 0, and differ"):
        read_dumps([tmp_path / "one", tmp_path / "other"], pytest.fail)
    notes: list[str] = []
    read_dumps([tmp_path / "one", *(tmp_path / "other").glob("*_[23]")], notes.append)
    assert len(notes) == 1
    assert "check that they are of one job" in notes[0]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace_rank_0")
    with pytest.raises(RrfpError, match="neither a file nor a directory"):
        read_dumps([tmp_path / "trace_rank_0"], pytest.fail)


def test_other_files_of_a_directory_are_skipped_and_named(put: Callable[..., Path]) -> None:
    path = put({0: [REDUCED]})
    for name in ("train_1.log", "rank0_config.yaml", "config_7.json"):
        (path / name).write_text("{}")
    notes: list[str] = []
    assert [dump.rank for dump in read_dumps([path], notes.append)] == [0]
    assert len(notes) == 3
    (path / "nccl_trace_rank_0").unlink()
    with pytest.raises(RrfpError, match="has no dump of torch's flight recorder"):
        read_dumps([path], notes.append)


def nested(depth: int) -> list[Any]:
    """A value of few objects whose text has 2 ** depth parts."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found, found]
    return found


@pytest.mark.parametrize(
    "odd",
    [
        {"input_sizes": nested(40)},
        {"process_group": (10**5000, nested(40)), "collective_seq_id": 10**5000},
        {"profiling_name": "nccl:\ud800\x1b[31m", "time_created_ns": -(10**5000)},
    ],
)
def test_unprintable_text_is_replaced(
    odd: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = dump([("all_reduce", WORLD, 1, STARTED)], num_ranks=1)
    content["entries"][0].update(odd)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(content))
    text, _ = report_of(tmp_path, capsys)
    assert text.isascii()
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "content",
    [b"\x80\x04]r\xff\xff\xff\x7f.", b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"."],
    ids=["memo", "bytearray"],
)
def test_a_dump_gets_no_more_memory_than_it_fills(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(RrfpError, match="is no dump"):
            read_dumps([tmp_path / "nccl_trace_rank_0"], pytest.fail)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_the_options_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rrfp("trace", "import", "--flight-recorder", "x", "-o", str(tmp_path / "run")) == 2
    assert "makes no run" in capsys.readouterr().err
    for form in ("json", "text"):
        assert rrfp("trace", "import", str(tmp_path), "-o", "run", "--format", form) == 2
        sentence = f"--format {form} is for what --flight-recorder finds"
        assert sentence in capsys.readouterr().err
    assert rrfp("trace", "import", str(tmp_path)) == 2
    assert "add -o runs/NAME" in capsys.readouterr().err


def hang_on_gloo(directory: str) -> None:
    """All ranks but one begin a second reduction; all of them dump what torch recorded."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(8))
    work = dist.all_reduce(torch.ones(8), async_op=True) if rank != 1 else None
    own: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    deadline = time.monotonic() + 20
    while not pickle.loads(own._dump_fr_trace())["entries"][0]["retired"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (Path(directory) / f"trace_rank_{rank}").write_bytes(own._dump_fr_trace())
    while len(list(Path(directory).iterdir())) < dist.get_world_size():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if work is None:
        dist.all_reduce(torch.ones(8))
    else:
        work.wait()
    dist.destroy_process_group()


def test_torchs_own_dumps_are_read(tmp_path: Path) -> None:
    run_ranks(3, hang_on_gloo, str(tmp_path), timeout_s=60)
    hang = hang_of(read_dumps([tmp_path], pytest.fail))
    assert hang.never_came == (1,)
    assert [(wait.rank, wait.operation.name, wait.operation.sequence) for wait in hang.waits] == [
        (0, "all_reduce", 2),
        (2, "all_reduce", 2),
    ]
