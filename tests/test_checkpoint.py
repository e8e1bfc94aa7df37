"""Checkpoints of `rrfp train`: a run that was stopped goes on as if it never had been."""

import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
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

from rrfp.analyze.cache import load_frames
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.locate import resolve_trace
from rrfp.trace.rundir import RunDir
from rrfp.train.checkpoints.beginning import beginning_of
from rrfp.train.checkpoints.directory import CheckpointDir
from rrfp.train.checkpoints.manifest import METRICS, Manifest
from rrfp.train.checkpoints.plans import decoded, encoded
from rrfp.train.checkpoints.reading import read_tensors
from rrfp.train.settings import TrainSettings
from tests.checkpointed import (
    CUT_SHORT,
    differences,
    newest,
    settings_in,
    tensors_of,
    train,
    train_cut_short,
)
from tests.killed_runs import run_all
from tests.ranks import RankFailedError
from tests.trained import ENDLESS, TINY, Training, read_metrics, rrfp_here

pytestmark = pytest.mark.timeout(300)

STEPS = 6


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What makes the steps differ: dropout, and an order of admission for each step."""
    lines = ["3 2 1 0", "0 2 1 3", "1 0 3 2", "2 3 0 1", "0 1 3 2"]
    orders = tmp_path_factory.mktemp("orders") / "orders.csv"
    orders.write_text("\n".join(lines))
    return {"dropout": 0.1, "admit": str(orders)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: dict[str, Any]) -> Path:
    """A run that was never stopped."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    train(directory, STEPS, **flags)
    return directory


def figures(run: Path) -> list[dict[str, Any]]:
    """What the metrics tell of the training itself."""
    return [
        {name: line[name] for name in ("step", "loss", "grad_norm", "tokens")}
        for line in read_metrics(run)
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"hint": "bfw", "hold": 2},
        pytest.param({"dispatch": "fixed", "hint": "1f1b"}, marks=pytest.mark.slow),
        pytest.param({"hint": "zb-h1", "w": "ranked", "save_async": True}, marks=pytest.mark.slow),
        pytest.param({"hint": "f-first", "limit": 1}, marks=pytest.mark.slow),
        pytest.param({"hint": "gpipe", "agreement": "unanimous"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_policy_to_the_last_bit(
    uninterrupted: Path, tmp_path: Path, flags: dict[str, Any], changed: dict[str, Any]
) -> None:
    train(tmp_path, 4, **flags)
    assert newest(tmp_path).step == 4
    train(tmp_path, STEPS, **flags, resume=True, **changed)
    assert differences(tensors_of(newest(tmp_path)), tensors_of(newest(uninterrupted))) == []
    assert figures(tmp_path / "run") == figures(uninterrupted / "run")


def test_saving_beside_the_training_saves_the_same(
    uninterrupted: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    train(tmp_path, STEPS, **flags, save_every=1, save_async=True, keep=3)
    saved = sorted((tmp_path / "ck").glob("step-*"))
    assert [path.name for path in saved] == ["step-00000004", "step-00000005", "step-00000006"]
    for name in ("step-00000004", "step-00000006"):
        ours, theirs = (directory / "ck" / name for directory in (tmp_path, uninterrupted))
        assert differences(read_tensors(ours), read_tensors(theirs)) == []
        assert len((ours / METRICS).read_text().splitlines()) == Manifest.read(ours).step


def cut_at(place: str, number: int, code: int = CUT_SHORT) -> None:
    """Have this rank end at the `number`th call of a function of the checkpoints."""
    from rrfp.train.checkpoints import directory, saving

    owner: Any = {"finish": directory.CheckpointDir, "remove_older": directory.CheckpointDir}.get(
        place, saving.Saver
    )
    own, calls = getattr(owner, place), iter(range(1, 100))

    def ends(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os._exit(code)
        return own(*args, **kwargs)

    setattr(owner, place, ends)


@pytest.mark.parametrize(
    ("place", "left"), [("_request", 2), ("finish", 2), ("_name", 2), ("remove_older", 4)]
)
def test_a_save_that_is_cut_short_does_not_count(
    uninterrupted: Path, tmp_path: Path, flags: dict[str, Any], place: str, left: int
) -> None:
    with pytest.raises(RankFailedError, match=f"exit code {CUT_SHORT}"):
        train_cut_short(tmp_path, STEPS, partial(cut_at, place, 2), **flags)
    assert newest(tmp_path).step == left
    if place == "finish":
        train(tmp_path, STEPS, **flags, resume=True, hint="bfw")
        assert differences(tensors_of(newest(tmp_path)), tensors_of(newest(uninterrupted))) == []
        assert figures(tmp_path / "run") == figures(uninterrupted / "run")
        assert [path.name for path in (tmp_path / "ck").glob(".saving-*")] == []


def made_up(directory: Path, *steps: int, **flags: Any) -> CheckpointDir:
    """Checkpoints as far as a launcher looks at them."""
    settings = settings_in(directory, steps=99, **flags)
    found = CheckpointDir(directory / "ck")
    found.prepare()
    for step in steps:
        saving = found.begin(step)
        (saving / "tensors").write_bytes(b"x" * 100)
        (saving / METRICS).write_text("".join(f'{{"step": {n}}}\n' for n in range(step)))
        run = str((directory / "run").resolve())
        found.finish(saving, Manifest(step, settings.described(), run, {}, {}))
    return found


def cut_off(path: Path) -> None:
    (path / "tensors").write_bytes(b"x" * 99)


def without(name: str, path: Path) -> None:
    (path / name).unlink()


def torn_description(path: Path) -> None:
    (path / "checkpoint.json").write_text('{"format": ')


def of_another_step(path: Path) -> None:
    told = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**told, "step": 5}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "tensors has 99 bytes and not 100"),
        (partial(without, "tensors"), "tensors is missing"),
        (partial(without, "checkpoint.json"), "checkpoint.json is missing"),
        (torn_description, "checkpoint.json is not JSON"),
        (of_another_step, "checkpoint.json is that of step 5"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    found = made_up(tmp_path, 2, 4, 6)
    damage(tmp_path / "ck" / "step-00000006")
    told: list[str] = []
    checkpoint = found.newest(told.append)
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert len(told) == 1
    assert said in told[0]
    # It is replaced when the run comes there again, and counts for nothing until then.
    found.remove_older(1)
    assert {path.name for path in (tmp_path / "ck").iterdir() if path.is_dir()} == {
        "step-00000004",
        "step-00000006",
    }
    made_up(tmp_path, 6)
    again = found.newest()
    assert again is not None
    assert again.step == 6


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    found = made_up(tmp_path, 2, 4, 6, 8)
    found.remove_older(3)
    assert [path.name[-1] for path in sorted((tmp_path / "ck").glob("step-*"))] == ["4", "6", "8"]


def test_without_a_checkpoint_a_run_starts_anew_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    settings = settings_in(tmp_path, resume=True)
    assert beginning_of(settings, told.append).first_step == 0
    assert told == [f"No checkpoint in {tmp_path / 'ck'} is whole, so training starts anew"]
    # The same command again, as a scheduler would give it after a crash before the first save.
    assert beginning_of(settings, told.append).run == RunDir(tmp_path / "run")


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_up(tmp_path, 2)
    (tmp_path / "run").mkdir()
    beginning = beginning_of(settings_in(tmp_path, resume=True, out=None), lambda _: None)
    assert (beginning.run.path, beginning.first_step) == (Path("run"), 2)


REFUSED = [
    ({"hidden": 64}, "--hidden is 64 and was 32"),
    ({"seed": 7}, "--seed is 7 and was 1234"),
    ({"data": "elsewhere.txt"}, "--data is elsewhere.txt and was not given"),
    ({"dp": 2}, "(--dp x --microbatches) is 8 and was 4"),
    ({"lr": 0.5}, "--lr is 0.5 and was 0.002"),
    ({"steps": 1}, "--steps is 1 and the checkpoint"),
    ({"resume": False}, "has the checkpoint of step 2 of another run; go on from it with --resume"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_what_is_trained_must_stay(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    made_up(tmp_path, 2)
    with pytest.raises(UsageError) as raised:
        beginning_of(settings_in(tmp_path, **{"resume": True, **changed}), lambda _: None)
    assert said in str(raised.value)


def test_replicas_may_share_the_batch_in_another_way(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    changed = {"dp": 2, "microbatches": 2, "tp": 2, "pp": 1, "chunks": 4}
    settings = settings_in(tmp_path, resume=True, **changed)
    assert beginning_of(settings, lambda _: None).first_step == 2


def test_vision_layers_stay_vision_layers(tmp_path: Path) -> None:
    made_up(tmp_path, 2, model="vlm", pp=2, layers=8)
    beginning_of(settings_in(tmp_path, resume=True, model="vlm", pp=4, layers=8), lambda _: None)
    with pytest.raises(UsageError, match=r"vision layers .* is 3 and was 4"):
        beginning_of(
            settings_in(tmp_path, resume=True, model="vlm", pp=8, layers=8), lambda _: None
        )


def test_another_runs_directory_is_left_alone(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"settings": {"save": "elsewhere"}}')
    with pytest.raises(UsageError, match="is not the directory of a run that saves to"):
        beginning_of(settings_in(tmp_path, resume=True), lambda _: None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--save-every", "2"), "--save-every is about checkpoints"),
        (("--resume",), "--resume is about checkpoints"),
        (("--resume", "--force", "--save", "ck"), "--force replaces the run that --resume"),
        (("--save", "file/ck"), "file/ck (Not a directory); choose another directory with --save"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "file").touch()
    refused = rrfp_here(tmp_path, "train", *flags)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert said in refused.stderr


def on_a_small_disk(num_bytes: int) -> None:
    """Files of this process cannot grow further, which fails as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def small_disk_later(num_bytes: int) -> None:
    from rrfp.train.checkpoints import saving

    own, calls = saving.Saver.save, iter(range(1, 100))

    def save(saver: Any, step: int) -> None:
        if next(calls) == 2:
            on_a_small_disk(num_bytes)
        own(saver, step)

    setattr(saving.Saver, "save", save)  # noqa: B010


@pytest.mark.parametrize(
    ("num_bytes", "reason"), [(100, "torch says: .*|File too large"), (100_000, "File too large")]
)
def test_a_full_disk_names_the_directory_and_loses_nothing(
    tmp_path: Path, flags: dict[str, Any], num_bytes: int, reason: str
) -> None:
    with pytest.raises(RankFailedError) as raised:
        train_cut_short(tmp_path, STEPS, partial(small_disk_later, num_bytes), **flags)
    assert re.search(
        rf"the checkpoint of step 4 could not be written to {tmp_path / 'ck'} "
        rf"\((?:{reason})\); make room there, then go on from the last one with --resume",
        str(raised.value),
    )
    assert newest(tmp_path).step == 2
    assert [*(tmp_path / "ck").glob(".saving-*")] == []


def test_sigterm_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ("--pp=2", "--dropout=0.1", f"--save={tmp_path / 'ck'}")
    with Training(run, *flags, *ENDLESS) as training:
        training.await_steps(2)
        training.process.send_signal(signal.SIGTERM)
        code, _, said = training.ended()
    assert code == 0, said
    num_steps = len(read_metrics(run))
    assert f"Stopped by SIGTERM after {num_steps} of 1000000 steps" in said
    assert newest(tmp_path).step == num_steps
    steps = f"--steps={num_steps + 2}"
    again = ("--hint=bfw", "--resume", steps)
    with Training(run, *flags, *again) as training:
        code, _, said = training.ended()
    assert code == 0, said
    assert f"Going on after step {num_steps}" in said
    assert [line["step"] for line in read_metrics(run)] == [*range(num_steps + 2)]
    assert newest(tmp_path).step == num_steps + 2
    # Both sessions in one picture, and each by itself.
    checked = rrfp_here(tmp_path, "trace", "check", str(run))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert {path.name for path in run.glob("*.pftrace")} == {
        "trace.pftrace",
        "trace-2.pftrace",
        "trace-joined.pftrace",
    }
    assert load_frames(resolve_trace(run)).steps == [*range(num_steps + 2)]
    assert load_frames(run / "trace-2.pftrace").steps == [num_steps, num_steps + 1]
    # Nothing is left to train.
    done = rrfp_here(tmp_path, "train", f"--out={run}", *TINY, *flags, *again)
    assert (done.returncode, "steps are trained" in done.stderr) == (0, True), done.stderr


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
        [1],
        {},
    ],
)
def test_nothing_else_is_made_of_what_a_rank_sent(planted: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which one depends on what is wrong
        decoded(planted)


def test_the_settings_of_checkpoints_stand_in_files_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nsave = "ck"\nsave-every = 3\nresume = true\n')
    settings = TrainSettings.from_toml(tmp_path / "run.toml")
    assert (settings.run.save, settings.run.save_every, settings.run.resume) == (
        Path("ck"),
        3,
        True,
    )


@pytest.mark.slow
def test_evaluations_go_on_at_their_steps(tmp_path: Path) -> None:
    vlm = {"model": "vlm", "layers": 8, "heldout_every": 2, "save_every": 3}
    for name in ("whole", "parts"):
        train(tmp_path / name, STEPS if name == "whole" else 3, **vlm)
    train(tmp_path / "parts", STEPS, resume=True, hint="bfw", **vlm)
    losses = [
        [line["heldout_loss"] for line in read_metrics(tmp_path / name / "run")]
        for name in ("whole", "parts")
    ]
    # The first part looked at its last step, too, and the checkpoint has that line.
    assert losses[1][2] is not None
    losses[1][2] = None
    assert losses[0] == losses[1]
    assert [loss is None for loss in losses[0]] == [True, False] * 3


@pytest.mark.slow
def test_killed_runs_come_out_the_same(tmp_path: Path) -> None:
    """`python -m tests.killed_runs --runs 100` kills more of them."""
    tally = run_all(tmp_path, num_runs=2, seed=3)
    assert tally["runs the same to the last bit"] == 2
