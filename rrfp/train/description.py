"""Writes the `run.json` of a run of `rrfp train`."""

from collections.abc import Sequence
from pathlib import Path

from rrfp.trace.description import describe_run
from rrfp.trace.records import RankInfo
from rrfp.train.settings import TrainSettings


def write_description(path: Path, settings: TrainSettings, ranks: Sequence[RankInfo]) -> None:
    """Describe a run; `ranks` is empty as long as they are unknown."""
    policy = settings.effective_policy.described()
    describe_run(path, settings.described(), policy, settings.layout.world_size, ranks)
