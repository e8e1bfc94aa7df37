"""Dumps of torch's flight recorder, as it writes them for NCCL."""

from typing import Any

WORLD, PIPELINE = "0", "18"
DESCRIPTIONS = {WORLD: "default_pg", PIPELINE: "PIPELINE_MODEL_PARALLEL_GROUP"}
DONE, STARTED = "completed", "started"

Entry = tuple[str, str, int, str]
"""An operation's name, its group, its number there and its state; `p2p:coalesced` ends a batch."""


def dump(entries: list[Entry], num_ranks: int = 4, sizes: Any = ((8,),)) -> dict[str, Any]:
    """A dump as torch writes it for NCCL."""
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(list(range(num_ranks)))}
            for name, desc in DESCRIPTIONS.items()
        },
        "entries": [
            {
                "record_id": number,
                "process_group": (group, DESCRIPTIONS[group]),
                "collective_seq_id": sequence,
                "p2p_seq_id": sequence,
                "is_p2p": "-" in name or name.startswith("p2p:"),
                "profiling_name": f"nccl:{name.removeprefix('p2p:')}",
                "time_created_ns": 1_795_398_104_000_000_000 + number,
                "input_sizes": sizes,
                "output_sizes": sizes,
                "state": state,
                "retired": state == DONE,
                "frames": [
                    {"name": "send", "filename": "/lib/torch/distributed/x.py", "line": 3},
                    {"name": "train", "filename": "/job/train.py", "line": 10 + number},
                ],
            }
            for number, (name, group, sequence, state) in enumerate(entries)
        ],
    }
