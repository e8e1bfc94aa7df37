"""Jobs that are not ours, run by `rrfp run` and recorded: they learn the same, and leave a run."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.critical_path import critical_path
from rrfp.analyze.frames import choose_steps, frames_of
from rrfp.analyze.report import report
from rrfp.errors import UsageError
from rrfp.replay.whatif import what_if
from rrfp.schedule.named_hints import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.perfetto.reader import TraceContents
from rrfp.trace.records import Phase
from tests.e2e.ranks import HOST, run_ranks
from tests.megatron.native_runs import (
    JOB,
    ROOT,
    read_whole,
    run_script,
    run_script_beside,
    steps_of,
)
from tests.megatron.user_job import run_example
from tests.train.trained import rrfp_here

pytestmark = pytest.mark.timeout(400)

PLAIN = ("--dispatch", "megatron", "--no-trace")
"""`rrfp run` with these leaves everything alone."""


def seen(
    out: Path, settings: dict[str, Any], *arguments: str, options: tuple[str, ...] = PLAIN
) -> list[dict[str, Any]]:
    """The training results of a job, by rank."""
    out.mkdir()
    num_ranks = settings["pp"]
    command = [str(out), json.dumps(settings), *arguments]
    run_ranks(num_ranks, run_script, [*options], command, timeout_s=200)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def check_analyses(contents: TraceContents, steps: list[int]) -> None:
    recording = contents.recording
    frames = choose_steps(frames_of(recording))
    assert bubbles(frames).steps == tuple(steps)
    assert critical_path(frames).step in steps
    assert what_if(recording, lambda _: []).replay_error < 0.2
    assert "The trace is whole" in report("job", contents, None, evaluations=False)


TWO_STAGES = {"pp": 2, "steps": 5}


def test_a_job_runs_under_either_dispatch_and_leaves_a_run(tmp_path: Path) -> None:
    run, native = tmp_path / "run", tmp_path / "native"
    plain = seen(tmp_path / "a", TWO_STAGES, "--evaluate")
    for where, name, options in (
        (run, "b", ("--hint", "fb", "--hold", "3", "--steps", "2:4")),
        (native, "c", ("--dispatch", "megatron", "--steps", "2:4")),
    ):
        out = ("--out", str(where))
        assert seen(tmp_path / name, TWO_STAGES, "--evaluate", options=(*options, *out)) == plain
        contents = read_whole(where)
        # The evaluation after step 2, evaluation 2, lies between the two.
        assert steps_of(contents.recording) == {(2, -3, 3)}
        check_analyses(contents, [2, 3])
        for rank in contents.recording.ranks:
            tasks = Counter((task.step, task.kind) for task in rank.tasks)
            assert set(tasks.values()) == {4}
            assert set(tasks) == {(2, "F"), (2, "B"), (-3, "F"), (3, "F"), (3, "B")}
            script = [phase for phase in rank.phases if phase.phase == Phase.SCRIPT]
            assert [phase.step for phase in script] == [2, -3, 3]
    described = json.loads((run / "run.json").read_text())
    check_description(described, "--evaluate")
    assert described["policy"]["hint"] == "fb"
    assert described["policy"]["hold"] == 3
    links = [(link["from"], link["to"], link["plane"]) for link in described["transport"]["links"]]
    assert links == [(0, 1, "shm"), (1, 0, "shm")]
    assert described["transport"]["outbox_bytes"] == {"0": 2**28, "1": 2**28}
    described = json.loads((native / "run.json").read_text())
    check_description(described, "--evaluate")
    assert described["policy"]["dispatch"] == "megatron"
    assert "transport" not in described


def check_description(described: dict[str, Any], *arguments: str) -> None:
    """What `run.json` says of the job."""
    settings = described["settings"]
    expected = {
        "pp": 2,
        "tp": 1,
        "cp": 1,
        "dp": 1,
        "ep": 1,
        "chunks": 1,
        "placement": "loop",
        "model": "GPTModel",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "dtype": "float32",
        "microbatches": 4,
        "micro_batch_size": 1,
        "seq_length": 32,
        "device": "cpu",
        "recorded_by": "rrfp run",
        "recorded_steps": "2:4",
        "script": str(JOB),
    }
    assert expected.items() <= settings.items()
    assert settings["arguments"][2:] == [*arguments]
    assert len(settings["parameters"]) == 2
    assert min(settings["parameters"]) > 10_000
    assert {"torch", "megatron"} <= settings.keys()
    assert [(rank["rank"], rank["stages"]) for rank in described["ranks"]] == [(0, [0]), (1, [1])]


@pytest.mark.slow
def test_chunks_are_recorded(tmp_path: Path) -> None:
    # Over gloo, Megatron's own interleaving is right from three ranks on.
    settings = {"pp": 3, "chunks": 2, "layers": 6, "microbatches": 6}
    plain = seen(tmp_path / "a", settings)
    order = ORDERS["interleaved"].for_shape(Shape(3, 6, 2))
    for name, options in (("b", ("--hint", "bfw")), ("c", ("--dispatch", "megatron"))):
        out = tmp_path / f"run-{name}"
        assert seen(tmp_path / name, settings, options=(*options, "--out", str(out))) == plain
        contents = read_whole(out)
        assert [rank.info.stages for rank in contents.recording.ranks] == [(0, 3), (1, 4), (2, 5)]
        check_analyses(contents, [0, 1, 2])
    for rank in contents.recording.ranks:
        tasks = [Task(t.stage, Kind(t.kind), t.microbatch) for t in rank.tasks if t.step == 1]
        assert tuple(tasks) == order.rows[rank.info.pp_rank]


def test_a_function_that_is_imported_by_name_is_ours(tmp_path: Path) -> None:
    plain = seen(tmp_path / "a", {"pp": 2}, "--by-name")
    options = ("--hint", "bfw", "--out", str(tmp_path / "run"))
    assert seen(tmp_path / "b", {"pp": 2}, "--by-name", options=options) == plain
    # Megatron's own has no weight gradients of their own.
    kinds = {task.kind for task in read_whole(tmp_path / "run").recording.ranks[0].tasks}
    assert kinds == {"F", "B", "W"}


def test_install_records_as_well(tmp_path: Path) -> None:
    plain = seen(tmp_path / "a", {"pp": 2})
    assert seen(tmp_path / "b", {"pp": 2}, "--install", str(tmp_path / "run")) == plain
    contents = read_whole(tmp_path / "run")
    assert steps_of(contents.recording) == {(1, 2)}
    described = contents.recording.settings["settings"]
    assert isinstance(described, dict)
    assert described["recorded_by"] == "install()"


@pytest.mark.parametrize("installs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_loads_what_megatron_needs_and_no_more(tmp_path: Path, installs: bool) -> None:
    run = tmp_path / "run"
    assert run_ranks(
        2, partial(run_example, installs=installs), str(run), timeout_s=200, fresh=True
    ) == [[], []]
    # Another process has made it.
    assert (run / "trace.pftrace").exists()
    assert steps_of(read_whole(run).recording) == {(1, 2)}


def test_a_job_whose_environment_has_no_trace_writer_leaves_its_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, seen_at = tmp_path / "run", tmp_path / "a"
    seen_at.mkdir()
    arguments = [str(seen_at), '{"pp": 2}']
    options = ["--out", str(run)]
    run_ranks(2, run_script_beside, "4.25.9", options, arguments, timeout_s=200)
    assert sorted(path.name for path in run.iterdir()) == [*("outcome.json", "records", "run.json")]
    told = [line for line in capfd.readouterr().err.splitlines() if "rrfp:" in line]
    assert told == [
        f"rrfp: 3 steps recorded in {run}; this environment lacks protobuf>=6.33,<7 (4.25.9 is "
        "installed), so the first rrfp command that opens the run in another one makes its trace"
    ]
    assert steps_of(read_whole(run).recording) == {(0, 1, 2)}


def test_install_records_in_a_given_directory() -> None:
    from rrfp.megatron import install

    with pytest.raises(UsageError, match="say where with out=DIRECTORY"):
        install(steps="3:")
    with pytest.raises(UsageError, match="the steps to record are '3'"):
        install(out="runs/x", steps="3")


def launched(
    tmp_path: Path,
    *options: str,
    settings: str = '{"pp": 2}',
    job: Path = JOB,
    restarts: int = 0,
) -> Any:
    """A job under torchrun, from its start to its end."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:0", "--local-addr", HOST),
            *("--max-restarts", str(restarts)),
            *("--no-python", sys.executable, "-m", "rrfp", "run", *options),
            *(job, tmp_path, settings),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # Or gloo finds the addresses of a job's first start again, and fails by itself.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ready", "megatron"])
def test_a_job_under_torchrun_says_once_where_its_run_is(tmp_path: Path, dispatch: str) -> None:
    done = launched(tmp_path, "--dispatch", dispatch, "--steps", "1:")
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert run.name.endswith("-native" if dispatch == "megatron" else "-bf")
    told = f"rrfp: 2 steps recorded in {run}; open it with: rrfp trace view {run}"
    assert [line for line in done.stderr.splitlines() if "rrfp:" in line] == [told]
    assert (run / "trace.pftrace").exists()
    assert not (run / "records").exists()
    assert steps_of(read_whole(run).recording) == {(1, 2)}


@pytest.mark.slow
def test_a_job_that_torchrun_starts_again_goes_on(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys\n"
        "from tests.megatron.user_job import main\n"
        "main(sys.argv[1:])\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    done = launched(tmp_path, "--out", "run", "--steps", "1:", "--force", job=job, restarts=1)
    assert done.returncode == 0, done.stderr
    assert f"rrfp: {tmp_path}/run holds the run of an earlier start of this job" in done.stderr
    for run in (tmp_path / "run", tmp_path / "run-restart-1"):
        assert steps_of(read_whole(run).recording) == {(1, 2)}


@pytest.mark.slow
def test_a_window_without_steps_is_reported(tmp_path: Path) -> None:
    done = launched(tmp_path, "--out", "run", "--steps", "7:")
    assert done.returncode == 0, done.stderr
    why = "the job began 3 steps, and those from 7 on were to be recorded"
    assert f"run has no steps: {why}" in done.stderr


@pytest.mark.slow
def test_what_our_schedule_refuses_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    done = launched(tmp_path, "--placement", "v", settings='{"pp": 2, "chunks": 2}')
    assert done.returncode != 0
    assert "rrfp: chunk" in done.stderr
    assert "with placement v; build it for" in done.stderr
    # The tracebacks are torchrun's.
    assert f'"{JOB}", line' not in done.stderr


FAILING = """
import os, sys
from megatron.core.pipeline_parallel import schedules

forward_step, calls = schedules.forward_step, []

def failing(*arguments, **more):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 6:
        {end}
    return forward_step(*arguments, **more)

schedules.forward_step = failing
from tests.megatron.user_job import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        pytest.param("os._exit(3)", 3, marks=pytest.mark.slow),
        pytest.param("raise ValueError('rank 1 is at fault')", 1, marks=pytest.mark.slow),
    ],
)
def test_torchrun_reports_the_rank_that_failed_and_not_its_peer(
    tmp_path: Path, end: str, code: int
) -> None:
    job = tmp_path / "job.py"
    job.write_text(FAILING.format(end=end))
    done = launched(tmp_path, "--no-trace", job=job)
    assert done.returncode == 1
    _, _, root_cause = done.stderr.partition("Root Cause")
    assert re.search(r"rank +: 1 ", root_cause), done.stderr
    assert re.search(rf"exitcode +: {code} ", root_cause), done.stderr
    # The other one has said why it failed, and waits.
    assert "rank 1 closed its connection without a farewell (seen by rank 0)" in done.stderr
    assert "(SIGTERM)" in done.stderr


def listed_after(directory: Path, *command: str | Path) -> list[dict[str, Any]]:
    """What `rrfp runs` lists after a job of one rank and one step."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST}
    subprocess.run(
        [sys.executable, *command, directory, '{"pp": 1, "steps": 1}'],
        env={**os.environ, **one, "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)},
        cwd=directory,
        capture_output=True,
        timeout=200,
    )
    runs: list[dict[str, Any]] = json.loads(
        rrfp_here(directory, "runs", "--format", "json").stdout
    )["runs"]
    return runs


ENDS = {
    "ends": ("finished", None),
    "raise ValueError('no good')": ("failed", "ValueError: no good"),
    "sys.exit(3)": ("failed", "the script exited with code 3"),
    "os.kill(os.getpid(), 2); time.sleep(60)": ("interrupted", None),
    "os.kill(os.getpid(), 9)": ("killed", None),
}


@pytest.mark.parametrize(
    ("end", "flags", "expected"),
    [
        ("raise ValueError('no good')", (), ENDS["raise ValueError('no good')"]),
        ("ends", ("--placement", "v"), None),
        *(
            pytest.param(end, (), expected, marks=pytest.mark.slow)
            for end, expected in ENDS.items()
            if not end.startswith("raise")
        ),
    ],
)
def test_runs_lists_how_a_job_ended(
    tmp_path: Path, end: str, flags: tuple[str, ...], expected: tuple[str, str | None] | None
) -> None:
    """A job that is refused leaves no directory."""
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys, time\n"
        "from tests.megatron.user_job import main\n"
        "main(sys.argv[1:])\n"
        f"{'' if end == 'ends' else end}\n"
    )
    listed = listed_after(tmp_path, "-m", "rrfp", "run", *flags, job)
    assert [(each["outcome"], each["error"]) for each in listed] == [expected] * (
        expected is not None
    )


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("sys.exit(3)", ("failed", "the script exited with code 3")),
        pytest.param(
            "try:\n    sys.exit(3)\nexcept SystemExit:\n    main(sys.argv[1:])",
            ("recorded", None),
            marks=pytest.mark.slow,
        ),
        pytest.param("sys.exit()", ("recorded", None), marks=pytest.mark.slow),
    ],
)
def test_runs_lists_how_a_job_that_installs_ended(
    tmp_path: Path, end: str, expected: tuple[str, str | None]
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import sys\n"
        "from rrfp.megatron import install\n"
        "install(out='runs/run')\n"
        "from tests.megatron.user_job import main\n"
        "main(sys.argv[1:])\n"
        f"{end}\n"
    )
    (run,) = listed_after(tmp_path, job)
    assert (run["outcome"], run["error"]) == expected


@pytest.mark.slow
def test_a_rank_that_fails_after_its_last_step_fails_the_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import os, sys\n"
        "from tests.megatron.user_job import main\n"
        "main(sys.argv[1:])\n"
        "sys.exit(3 * (os.environ['RANK'] == '1'))\n"
    )
    assert launched(tmp_path, job=job).returncode
    (run,) = json.loads(rrfp_here(tmp_path, "runs", "--format", "json").stdout)["runs"]
    assert (run["outcome"], run["error"]) == ("failed", "the script exited with code 3")
