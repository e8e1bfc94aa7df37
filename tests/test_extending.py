"""The examples of docs/extending.md work as they stand there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rrfp.cli import main as cli
from rrfp.interchange.assemble import assemble
from rrfp.runtime.protocols import Arrived, Inbox, Left, Message, Transport
from rrfp.schedule.named_hints import HINTS
from rrfp.schedule.tasks import Kind, Task
from tests.test_readme import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()


def example(of: str) -> dict[str, Any]:
    """What the Python under this heading defines."""
    section = PAGE.partition(f"\n## {of}\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"__name__": "example"}
    for block in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/extending.md", "exec", dont_inherit=True), names)
    return names


def test_a_hint_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(HINTS, "oldest", example("A hint")["Oldest"]())
    for command in (
        "rrfp hint show oldest --pp 2 --microbatches 3",
        "rrfp simulate --pp 4 --microbatches 8 --hint oldest --chunks 2",
    ):
        monkeypatch.setattr(sys, "argv", command.split())
        assert cli.main() == 0
    order = capsys.readouterr().out
    assert order.startswith("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"), order


def test_a_transport_carries_messages() -> None:
    store: dict[object, Inbox] = {}
    transport = example("A transport")["ThreadTransport"]
    inboxes = Inbox(), Inbox()
    here: Transport = transport(0, store, [1], [1], inboxes[0], num_credits=1)
    there: Transport = transport(1, store, [], [0], inboxes[1], num_credits=1)
    there.open()
    here.open()
    message = Message(0, Task(1, Kind.F, 3), (torch.ones(2),))
    here.send(1, message)
    here.close()
    here.close()
    assert inboxes[1].take() == (Arrived(0, message), Left(0))


def test_an_importer_reads_a_run(tmp_path: Path) -> None:
    file = tmp_path / "tasks.csv"
    file.write_text(
        "pp_rank,kind,microbatch,start_us,end_us\n0,F,0,0,10\n1,F,0,10,20\n1,B,0,20,40\n0,B,0,40,60\n"
    )
    run = assemble(*example("An importer")["read_tasks"](file))
    assert [len(rank.tasks) for rank in run.recording.ranks] == [2, 2]
    (wait,) = (wait for wait in run.recording.ranks[0].waits if wait.cause == "backward_input")
    assert (wait.start_ns, wait.end_ns) == (10_000, 40_000)


def test_the_files_to_touch_are_there() -> None:
    named = set(re.findall(r"`((?:rrfp|tests|docs|benchmarks)/[\w/.]+)`", PAGE))
    new = {"rrfp/interchange/tasks_table.py"}
    assert {path for path in named - new if not (ROOT / path).exists()} == set()
