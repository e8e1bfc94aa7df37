"""Jobs that are not ours, run by `rrfp run` and recorded: they learn the same, and leave a run."""

import errno
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.chosen import choose
from rrfp.analyze.frames import frames_of
from rrfp.analyze.path.critical_path import critical_path
from rrfp.analyze.report.page import report
from rrfp.errors import RrfpError, UsageError
from rrfp.megatron.job.meeting import Meeting
from rrfp.megatron.job.request import RecordingRequest
from rrfp.replay.whatif import what_if
from rrfp.schedule.hints.orders import ORDERS
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.trace.check import check_contents
from rrfp.trace.locate import resolve_trace
from rrfp.trace.perfetto.reader import TraceContents, read_contents
from rrfp.trace.records import Phase, PhaseRecord, Record, Recording, TaskRecord
from rrfp.trace.steps import evaluation_step
from tests.ranks import HOST, run_ranks

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests" / "megatron_job.py"
PLAIN = ("--dispatch", "megatron", "--no-trace")
"""`rrfp run` with these leaves everything alone."""


def run_script(options: list[str], arguments: list[str]) -> None:
    """Run the job by `rrfp run` on this rank; in a process of its own."""
    from rrfp.cli.main import main
    from rrfp.runtime.at_end import at_end

    sys.argv = ["rrfp", "run", *options, str(JOB), *arguments]
    assert main() == 0
    # The processes of a test end in another way than those of a job.
    at_end.run()


def seen(
    out: Path, settings: dict[str, Any], *arguments: str, options: tuple[str, ...] = PLAIN
) -> list[dict[str, Any]]:
    """What the ranks of a job saw of their training, by rank."""
    out.mkdir()
    num_ranks = settings["pp"]
    command = [str(out), json.dumps(settings), *arguments]
    run_ranks(num_ranks, run_script, [*options], command, timeout_s=200)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def read_whole(run: Path) -> TraceContents:
    contents = read_contents(resolve_trace(run))
    assert check_contents(contents) == []
    return contents


def steps_of(recording: Recording) -> set[tuple[int, ...]]:
    """The steps that each rank recorded, in the order in which they ended."""
    return {
        tuple(phase.step for phase in rank.phases if phase.phase == Phase.SCHEDULE)
        for rank in recording.ranks
    }


def check_analyses(contents: TraceContents, steps: list[int]) -> None:
    recording = contents.recording
    frames = choose(frames_of(recording))
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
    order = ORDERS["interleaved"].on(Shape(3, 6, 2))
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


def test_install_is_told_where_to_record() -> None:
    from rrfp.megatron import install

    with pytest.raises(UsageError, match="say where with out=DIRECTORY"):
        install(steps="3:")
    with pytest.raises(UsageError, match="the steps to record are '3'"):
        install(out="runs/x", steps="3")


# Who takes part.


class Model(SimpleNamespace):
    """What a recording asks of a model chunk."""

    def parameters(self) -> list[Any]:
        return []


def model() -> Model:
    return Model(config=SimpleNamespace(num_layers=2))


def record_some(
    out: Path,
    pipelines: list[list[int]],
    restarted: int | None = None,
    broken: int | None = None,
    full: bool = False,
    fails: bool = False,
) -> tuple[list[int | None], list[str]]:
    """On this rank of a job: the steps of its calls that were recorded, and what was said. Each
    pipeline in turn is called twice by its ranks, and by no others. The launcher of rank
    `restarted` says that it has started the job again, and rank `broken` cannot describe it. With
    `full`, the disk has no room for the run's description. With `fails`, the second call raises."""
    import torch.distributed as dist

    from rrfp.megatron.job import recording as module
    from rrfp.megatron.job.description import undispatched

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == restarted:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if rank == broken:
        vars(module)["program"] = lambda: 1 // 0
    if full:
        vars(module)["describe_run"] = no_room
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    steps: list[int | None] = []
    with redirect_stderr(io.StringIO()) as said:
        recording = module.JobRecording(RecordingRequest("test", out), undispatched())
        for ranks in pipelines:
            group = dist.new_group(ranks)
            if rank not in ranks:
                continue
            groups = SimpleNamespace(tp=alone, cp=alone, dp_cp=alone)
            for number in range(2):
                arguments = {
                    "model": model(),
                    "num_microbatches": 1,
                    "pg_collection": groups,
                    "p2p_communicator": SimpleNamespace(pp_group=group),
                }
                step = recording.begin(arguments)
                steps.append(step)
                if step is not None:
                    stage, now_ns = ranks.index(rank), time.monotonic_ns()
                    times = now_ns, now_ns + 1
                    task = TaskRecord(*times, step, "F", stage, 0, 0, 0, 1, 0, 1, 1, 1, 0)
                    recording.record(task)
                    if fails and number == 1:
                        break
                    recording.record(PhaseRecord(*times, step, Phase.SCHEDULE))
                recording.end(step)
        dist.barrier()
        recording.close()
    dist.destroy_process_group()
    return steps, said.getvalue().splitlines()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def recorded_in(run: Path, told: str = "2 steps") -> list[str]:
    return [f"rrfp: {told} recorded in {run}; open it with: rrfp trace view {run}"]


def test_ranks_that_are_in_no_pipeline_are_no_part_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(3, record_some, run, [[1, 2]], timeout_s=100)
    assert found == [([], []), ([0, 1], recorded_in(run)), ([0, 1], [])]
    recording = read_whole(run).recording
    assert [rank.info.rank for rank in recording.ranks] == [1, 2]
    frames = choose(frames_of(recording))
    assert bubbles(frames).steps == (0, 1)


def test_of_a_job_that_fails_amid_a_step_the_trace_has_that_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(2, record_some, run, [[0, 1]], None, None, False, True, timeout_s=100)
    contents = read_contents(resolve_trace(run))
    for rank in contents.recording.ranks:
        assert [task.step for task in rank.tasks] == [0, 1]
        assert [(each.doing, each.step) for each in rank.begun] == [("schedule", 1)]
    *_, told = check_contents(contents)
    assert told == (
        "unfinished: 2 ranks ended amid something (rank 0: schedule in step 1; rank 1: schedule "
        "in step 1)"
    )


def test_a_second_model_is_no_part_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(2, record_some, run, [[0, 1], [0], [1], [0, 1]], timeout_s=100)
    steps = [0, 1, None, None, 2, 3]
    assert found == [(steps, recorded_in(run, "4 steps")), (steps, [])]
    recording = read_whole(run).recording
    assert steps_of(recording) == {(0, 1, 2, 3)}
    for rank in recording.ranks:
        script = Counter(phase.step for phase in rank.phases if phase.phase == Phase.SCRIPT)
        # Before, between and after the calls of the second model, and not during them.
        assert script == {0: 1, 1: 3, 2: 1}


def test_a_second_pipeline_is_trained_and_not_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(2, record_some, run, [[0], [1]], timeout_s=100)
    (recorded,) = [rank for rank, (_, said) in enumerate(found) if said == recorded_in(run)]
    (sentence,) = found[1 - recorded][1]
    assert "the run is not recorded, the training goes on" in sentence
    assert f"rank {recorded} and others record a pipeline" in sentence
    ranks = read_whole(run).recording.ranks
    assert [rank.info.rank for rank in ranks] == [recorded]


@pytest.mark.timeout(50)  # less than ranks wait for each other
@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_record_tells_the_others(tmp_path: Path, broken: int) -> None:
    found = run_ranks(2, record_some, tmp_path / "run", [[0, 1]], None, broken, timeout_s=45)
    beginning = "rrfp: the run is not recorded, the training goes on: "
    for rank, (steps, (sentence,)) in enumerate(found):
        assert steps == [0, 1]
        reason = "integer division or modulo by zero"
        told = reason if rank == broken else f"rank {broken} cannot record: {reason}"
        assert sentence == f"{beginning}{told}"
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(50)  # less than ranks wait for each other
def test_nobody_records_a_run_that_cannot_be_described(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = run_ranks(2, record_some, run, [[0, 1]], None, None, True, timeout_s=45)
    reason = "[Errno 28] No space left on device"
    beginning = "rrfp: the run is not recorded, the training goes on: "
    assert found == [
        ([0, 1], [f"{beginning}{reason}"]),
        ([0, 1], [f"{beginning}rank 0 failed while the ranks met: {reason}"]),
    ]
    # Each file has its header and no record.
    for rank in range(2):
        assert len((run / "records" / f"rank-{rank}.jsonl").read_text().splitlines()) <= 1


Linked = dict[int, tuple[int, ...]]


def gathered(store: Store, linked: Linked, timeout_s: float = 60.0) -> list[Any]:
    """What these ranks of one start find, or the words of the error that ends their meeting. Each
    is linked to these others."""

    def one(rank: int) -> Any:
        try:
            with Meeting(store, rank, timeout_s) as meeting:
                meeting.gather(linked[rank])
        except RrfpError as error:
            return str(error)
        return meeting.ranks

    with ThreadPoolExecutor(len(linked)) as threads:
        return [*threads.map(one, linked)]


@pytest.mark.timeout(50)  # less than ranks wait for each other
@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param({0: (1,), 1: (0,)}, {0: (1,), 1: (0,)}, id="the same ranks"),
        pytest.param({0: (1,)}, {0: (1,), 1: (0,)}, id="one had not come to its first step"),
        pytest.param(
            {0: (1,), 1: (0,)}, {0: (1,), 1: (0, 2), 2: (1,)}, id="a rank more, a late one"
        ),
        pytest.param({0: (1,), 1: (0,)}, {2: (1,)}, id="a rank more, which comes first"),
    ],
)
def test_starts_that_share_a_store_are_not_mixed(first: Linked, again: Linked) -> None:
    """As torchrun's do on several nodes, where rrfp cannot keep them apart."""
    store = HashStore()
    is_whole = len(first) > 1
    said = gathered(store, first, 60.0 if is_whole else 0.05)
    assert said == [[0, 1]] * 2 if is_whole else "waited 0.05 s for rank 1" in said[0]
    used = (
        "the job's store holds what an earlier start of the job left there; "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )
    told = gathered(store, again)
    # A rank that reads why another failed in the earlier start, before that one comes, knows no
    # better than to repeat it. The other does.
    left = used if is_whole else f"rank 0 cannot record: {said[0]}"
    assert all(used in each or left in each for each in told), told
    assert any(used in each for each in told), told


def test_a_job_that_was_started_again_is_recorded_beside(tmp_path: Path) -> None:
    run, beside = tmp_path / "run", tmp_path / "run-restart-1"
    first = run_ranks(2, record_some, run, [[0, 1]], timeout_s=100)
    # Nothing is of an earlier start yet, so the directory is free for any.
    assert first == [([0, 1], recorded_in(run)), ([0, 1], [])]
    before = (run / "trace.pftrace").read_bytes()
    again = run_ranks(2, record_some, run, [[0, 1]], 1, timeout_s=100)
    told = f"rrfp: {run} holds the run of an earlier start of this job, so this one is recorded in "
    assert again == [([0, 1], [f"{told}{beside}", *recorded_in(beside)]), ([0, 1], [])]
    assert (run / "trace.pftrace").read_bytes() == before
    # Another job is no restart.
    (_, (refused,)), (_, (learned,)) = run_ranks(2, record_some, run, [[0, 1]], timeout_s=100)
    assert f"{run} exists; choose another directory with --out" in refused
    assert f"rank 0 failed while the ranks met: {run} exists; choose another" in learned


def test_what_arrives_as_an_evaluation_begins_is_kept() -> None:
    from rrfp.megatron.job.description import undispatched
    from rrfp.megatron.job.recording import JobRecording

    num = 3000
    recording = JobRecording(RecordingRequest("test"), undispatched())
    kept: list[Record] = []
    recording._recorder = SimpleNamespace(record=kept.append)  # type: ignore[assignment]

    def arrive() -> None:
        for number in range(num):
            recording.record(PhaseRecord(0, 1, evaluation_step(number), Phase.SCHEDULE))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=arrive)
        thread.start()
        for _ in range(num):
            recording._next_step(forward_only=True)
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
        recording._recorder = None
    assert {record.step for record in kept} == {evaluation_step(number) for number in range(num)}
    assert len(kept) == num


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
        "from tests.megatron_job import main\n"
        "main(sys.argv[1:])\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    done = launched(tmp_path, "--out", "run", "--steps", "1:", "--force", job=job, restarts=1)
    assert done.returncode == 0, done.stderr
    assert f"rrfp: {tmp_path}/run holds the run of an earlier start of this job" in done.stderr
    for run in (tmp_path / "run", tmp_path / "run-restart-1"):
        assert steps_of(read_whole(run).recording) == {(1, 2)}


@pytest.mark.slow
def test_a_window_that_no_step_reaches_is_told(tmp_path: Path) -> None:
    done = launched(tmp_path, "--out", "run", "--steps", "7:")
    assert done.returncode == 0, done.stderr
    assert "run has no steps: the job made 3 steps, and steps 7: were to be" in done.stderr


@pytest.mark.slow
def test_what_our_schedule_refuses_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    done = launched(tmp_path, "--placement", "v", settings='{"pp": 2, "chunks": 2}')
    assert done.returncode != 0
    assert "rrfp: chunk" in done.stderr
    assert "with placement v; build it for" in done.stderr
    # The tracebacks are torchrun's.
    assert f'"{JOB}", line' not in done.stderr
