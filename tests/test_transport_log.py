"""What carries the tensors of each link, told in `run.json`."""

from pathlib import Path

import pytest
from torch.distributed import HashStore

from rrfp.megatron.transport_log import TransportLog
from rrfp.runtime.planes.negotiation import Taken
from rrfp.runtime.planes.registry import TransportName
from rrfp.trace.run_dir import RunDir


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_description_that_cannot_be_read_ends_no_training(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    run.run_json.write_text(content)
    taken = Taken(TransportName.AUTO, 256, {}, 0)
    TransportLog(HashStore(), "run", run, 0, [0]).tell(taken)
    assert f"{run.run_json} does not say what carries the tensors" in caplog.text
