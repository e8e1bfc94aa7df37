"""A rank's spill file: what was written is read back, and only a torn last line is forgiven."""

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest

from rrfp.errors import RrfpError
from rrfp.trace.records import RankInfo, RankRecords, WaitRecord
from rrfp.trace.spill import SpillWriter, is_being_written, read_spill, row_of
from tests.recordings import make_recording

INFO = RankInfo(3, 1, 1, 0, (1, 6), "node", 77, -5, 2)


def _write(path: Path, *flushes: list[WaitRecord]) -> None:
    writer = SpillWriter(path, INFO)
    for records in flushes:
        writer.append(map(row_of, records))
        writer.flush()
    writer.close()


def test_every_record_comes_back(tmp_path: Path) -> None:
    expected = make_recording(2, 3, 2).ranks[1]
    path = tmp_path / "records" / "rank-1.jsonl"
    writer = SpillWriter(path, expected.info)
    for found in expected.by_name().values():
        writer.append(map(row_of, found))
        writer.flush()
    writer.close()
    assert read_spill(path) == expected


def test_a_flush_of_any_length_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    waits = [WaitRecord(number, number + 1, 0, "drain") for number in range(2500)]
    writer = SpillWriter(path, INFO)
    writer.append(map(row_of, waits[:2100]))
    writer.append(map(row_of, waits[2100:]))
    writer.flush()
    writer.flush()
    writer.append(map(row_of, waits[:1]))
    writer.close()
    whole = path.read_bytes()
    # What no flush has ended is taken back.
    assert [line.endswith(b"\n") for line in whole.splitlines(keepends=True)] == [True, True]
    assert read_spill(path) == RankRecords(INFO, waits=waits)


def test_a_torn_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.jsonl"
    first, second = WaitRecord(0, 5, 0, "drain"), WaitRecord(7, 9, 1, "drain")
    _write(path, [first], [second])
    whole = path.read_bytes()
    second_line_bytes = len(whole.splitlines(keepends=True)[-1])
    for num_lost in range(2, second_line_bytes + 1):
        path.write_bytes(whole[:-num_lost])
        assert read_spill(path) == RankRecords(INFO, waits=[first])
    path.write_bytes(whole[:-1])
    assert read_spill(path) == RankRecords(INFO, waits=[first, second])


@pytest.mark.parametrize("left", [b"", b'{"format": "rr'])
def test_a_rank_that_died_at_once_left_nothing(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(left)
    assert read_spill(path) is None


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("[[", "is not JSON"),
        ("{}", "is not a list of records"),
        ('["wait"]', "has a row that is not a record"),
        ('[["nap",0,1,2,"drain"]]', "has a row that is not a record"),
        ('[["wait",0,1,2]]', "has a 'wait' with wrong fields"),
        ('[["wait",0,1,"2","drain"]]', "has a 'wait' with wrong fields"),
        ("[" * 100_000, "is not JSON"),
        ('[["wait",9,8,2,"drain"]]', "has a 'wait' that ends before it begins"),
        (f'[["wait",0,{2**70},2,"drain"]]', "has a 'wait' at a time that no clock shows"),
        (f'[["wait",{-(2**63)},0,2,"drain"]]', "has a 'wait' at a time that no clock shows"),
        (f'[["wait",0,1,{2**64 - 1},"drain"]]', "has a 'wait' whose step is 18446744073709551615"),
        (f'[["loss",0,1,{-(2**63)}]]', "has a 'loss' whose num_lost is -9223372036854775808"),
        ('[["agreement",0,1,2,"Q",0,0,0]]', "has a 'agreement' of the kind 'Q'"),
        ('[["agreement",0,1,2,"F",9999999,0,0]]', "has a 'agreement' whose stage is 9999999"),
    ],
)
def test_anything_else_corrupt_is_told_with_its_line(tmp_path: Path, line: str, fact: str) -> None:
    path = tmp_path / "rank-3.jsonl"
    _write(path, [WaitRecord(0, 5, 0, "drain")])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RrfpError, match=rf"rank-3\.jsonl, line 3 {fact}"):
        read_spill(path)


def rank_header(**fields: object) -> dict[str, object]:
    return {"format": "rrfp records", "version": 1, "rank": {**asdict(INFO), **fields}}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"format": "other"},
        {"format": "rrfp records", "version": 1, "rank": {"rank": 0}},
        rank_header(rank=2**70),
        rank_header(rank="3"),
        rank_header(stages=[1, -6]),
        rank_header(stages=["1"]),
        rank_header(host=None),
        rank_header(clock_offset_ns=-(2**63)),
    ],
)
def test_a_foreign_header_is_told(tmp_path: Path, header: object) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(RrfpError, match="line 1 "):
        read_spill(path)


def test_a_file_is_known_to_be_written_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    writer = SpillWriter(path, INFO)
    assert is_being_written(path)
    writer.close()
    assert not is_being_written(path)


def test_a_forked_child_does_not_keep_a_run_open(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    writer = SpillWriter(path, INFO)
    # As in a child, another descriptor of the same open file.
    kept = os.dup(writer._file.fileno())
    assert is_being_written(path)
    writer.close()
    writer.close()
    assert not is_being_written(path)
    os.close(kept)


def test_locks_are_taken_on_files_open_for_what_nfs_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing for an exclusive lock, and reading for a shared one, which any reader has."""
    modes = []

    def flock(file: IO[Any], operation: int) -> None:
        modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "rank-0.jsonl"
    SpillWriter(path, INFO).close()
    is_being_written(path)
    assert modes == [os.O_RDWR, os.O_RDWR, os.O_RDONLY]
