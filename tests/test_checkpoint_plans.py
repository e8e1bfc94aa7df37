"""Plans of checkpoints travel between ranks as JSON, which holds plans and nothing else."""

import json
import os
import subprocess
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from rrfp.errors import RrfpError
from rrfp.train.checkpoints.plans import decoded, encoded, reason_of

pytestmark = pytest.mark.timeout(300)

PLAN = SavePlan(
    [
        WriteItem(
            MetadataIndex("weight", torch.Size([0, 4]), 1),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size([0, 4]), torch.Size([8, 4])),
                TensorProperties(torch.bfloat16),
                torch.Size([8, 8]),
            ),
        )
    ],
    planner_data={"weight": ("a", 1), 2: [None, 0.5, True]},
)


def test_plans_travel_as_json() -> None:
    again = decoded(json.loads(json.dumps(encoded(PLAN))))
    assert again == PLAN
    assert isinstance(again.items[0].type, WriteItemType)
    error, stack = decoded(
        json.loads(json.dumps(encoded((OSError(28, "No space"), StackSummary()))))
    )
    assert (type(error), str(error), type(stack)) == (
        RuntimeError,
        "OSError: [Errno 28] No space",
        StackSummary,
    )


def test_failures_of_ranks_travel_as_such() -> None:
    failed = CheckpointException("", {1: (OSError(28, "No space"), StackSummary())})
    again = decoded(json.loads(json.dumps(encoded(failed))))
    assert isinstance(again, CheckpointException)
    assert reason_of(again) == reason_of(failed) == "on rank 1: OSError: [Errno 28] No space"


@pytest.mark.parametrize("planted", [os.system, subprocess.Popen, torch.load, Path("x"), b"x"])
def test_a_plan_holds_nothing_else(planted: Any) -> None:
    with pytest.raises(RrfpError, match="which ranks do not exchange"):
        encoded([planted])


@pytest.mark.parametrize(
    "planted",
    [
        {"Popen": [["args", "true"]]},
        {"torch": "load"},
        {"torch": ["float32"]},
        {"WriteItemType": "SYSTEM"},
        {"SavePlan": [["unknown", 1]]},
        {"SavePlan": "items"},
        {"Size": ["1"]},
        {"tuple": 1, "list": 2},
        {"failures": []},
        [1],
        {},
    ],
)
def test_nothing_else_is_made_of_what_a_rank_sent(planted: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which one depends on what is wrong
        decoded(planted)
