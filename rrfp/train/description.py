"""What a run of `rrfp train` is, as `run.json` tells it."""

from collections.abc import Sequence
from pathlib import Path

from rrfp.trace.description import describe_run
from rrfp.trace.records import RankInfo
from rrfp.train.settings import TrainSettings


def write_description(path: Path, settings: TrainSettings, ranks: Sequence[RankInfo]) -> None:
    """Describe a run; `ranks` is empty until they are known."""
    policy = settings.effective_policy.described()
    describe_run(path, settings.described(), policy, settings.layout.world_size, ranks)
