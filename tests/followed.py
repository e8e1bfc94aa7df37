"""Recordings written as their ranks would, a step at a time, and followers of them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp.schedule.shape import Shape
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RunDir
from rrfp.trace.spill import SpillWriter, row_of
from rrfp.watch.alarms import Kind
from rrfp.watch.follow import Follower
from tests.watched import Setting, step_of

SETTING = Setting(Shape(4, 8), replicas=1, hint="bf", seed=1, onset=12, scatter=0.05)
SLOW = replace(SETTING, cause=Kind.RANK, stage=2, times=1.5)


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Makes followers, and closes them."""
    made: list[Follower] = []

    def make(*arguments: Any) -> Follower:
        made.append(Follower(*arguments))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


class Live:
    """A recording that is written as its ranks would write it, a step at a time."""

    def __init__(
        self,
        path: Path,
        recording: Recording,
        session: int = 1,
        most_bytes: int | None = None,
    ) -> None:
        self.run = RunDir(path, session)
        self._recording = recording
        path.mkdir(exist_ok=True)
        described = {**recording.settings, "settings": {"steps": 30}}
        self.run.run_json.write_text(json.dumps(described))
        self._writers = {
            records.info.rank: SpillWriter(
                self.run.rank_records(records.info.rank), records.info, most_bytes
            )
            for records in recording.ranks
        }

    def write(self, *steps: int, ranks: tuple[int, ...] | None = None) -> None:
        for step in steps:
            for records in step_of(self._recording, step):
                if ranks is None or records.info.rank in ranks:
                    writer = self._writers[records.info.rank]
                    for of_kind in records.by_name().values():
                        writer.append(map(row_of, of_kind))
                    writer.flush()

    def end(self) -> None:
        for writer in self._writers.values():
            writer.close()
