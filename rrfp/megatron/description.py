"""What a run is, as `run.json` tells it. Imports no torch: the launcher writes it first."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rrfp.megatron.settings import TrainSettings
from rrfp.trace.records import RankInfo
from rrfp.trace.whole_file import open_whole

_PACKAGES = ("rrfp", "torch", "megatron-core", "perfetto")


def write_description(path: Path, settings: TrainSettings, ranks: Sequence[RankInfo]) -> None:
    """Write every setting, the versions, the world's size and who the ranks are, once they are
    known (`ranks` is empty until then). Who reads the file meanwhile finds it whole."""
    described = {
        "settings": settings.described(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "world": settings.world_size,
        "ranks": [
            {
                "rank": info.rank,
                "pp_rank": info.pp_rank,
                "tp_rank": info.tp_rank,
                "dp_rank": info.dp_rank,
                "stages": info.stages,
                "host": info.host,
                "pid": info.pid,
            }
            for info in ranks
        ],
    }
    with open_whole(path) as file:
        file.write(f"{json.dumps(described, indent=2)}\n".encode())
