"""Checkpoints of `rrfp train`: a run that was stopped goes on as if it never had been."""

import errno
import json
import os
import re
import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rrfp.errors import RrfpError, UsageError
from rrfp.trace.run_dir import RunDir
from rrfp.train.checkpoints import saving as session
from rrfp.train.checkpoints.directory import METRICS, Checkpoint, CheckpointDir, Manifest
from rrfp.train.checkpoints.reading import differences, read_tensors
from rrfp.train.checkpoints.run_start import check_continues, start_or_resume
from rrfp.train.data.sources import data_contents
from rrfp.train.settings import TrainSettings
from tests.e2e.ranks import RankFailedError
from tests.train.checkpointed import (
    CUT_SHORT,
    FLAGS,
    forget_digests,
    made_up,
    newest,
    settings_in,
    tensors_of,
    train,
    train_prepared,
)
from tests.train.killed_runs import run_all
from tests.train.trained import read_metrics, rrfp, rrfp_here

pytestmark = pytest.mark.timeout(300)

STEPS = 6


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags that make the steps differ: dropout, and an order of admission for each step."""
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
    """The metrics of the training itself, one entry per step."""
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
    for name in (".run.json.1", ".metrics.jsonl.1"):  # as a killed process leaves them
        (tmp_path / "run" / name).touch()
    train(tmp_path, STEPS, **flags, resume=True, **changed)
    assert differences(tensors_of(newest(tmp_path)), tensors_of(newest(uninterrupted))) == []
    assert figures(tmp_path / "run") == figures(uninterrupted / "run")
    assert [*(tmp_path / "run").glob(".*")] == []


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
    ("place", "left"), [("_request", 2), ("finish", 2), ("_complete", 2), ("remove_older", 4)]
)
def test_a_save_that_is_cut_short_does_not_count(
    uninterrupted: Path, tmp_path: Path, flags: dict[str, Any], place: str, left: int
) -> None:
    with pytest.raises(RankFailedError, match=f"exit code {CUT_SHORT}"):
        train_prepared(tmp_path, STEPS, partial(cut_at, place, 2), **flags)
    assert newest(tmp_path).step == left
    if place == "finish":
        train(tmp_path, STEPS, **flags, resume=True, hint="bfw")
        assert differences(tensors_of(newest(tmp_path)), tensors_of(newest(uninterrupted))) == []
        assert figures(tmp_path / "run") == figures(uninterrupted / "run")
        assert [path.name for path in (tmp_path / "ck").glob(".saving-*")] == []


def test_without_a_checkpoint_a_run_starts_anew_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    settings = settings_in(tmp_path, resume=True)
    assert start_or_resume(settings, told.append).first_step == 0
    assert told == [f"No checkpoint in {tmp_path / 'ck'} is whole, so training starts anew"]
    # The same command again, as a scheduler would give it after a crash before the first save.
    assert start_or_resume(settings, told.append).run == RunDir(tmp_path / "run")


def test_no_host_waits_for_host_0_of_a_run_that_is_done(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    hosts = ("--nnodes=2", "--node-rank=1", "--rdzv-endpoint=127.0.0.1:9", "--out=run")
    again = (*FLAGS, *hosts, "--save=ck", "--resume")
    done = rrfp_here(tmp_path, "train", *again, "--steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "All 2 steps are trained, and --steps asks for more\n"
    other = rrfp_here(tmp_path, "train", *again, "--steps=2", "--seed=5")
    assert other.returncode == 2, other.stderr


def test_nothing_is_made_for_a_run_that_is_done_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made_up(tmp_path, 2)
    # Of a launcher that was killed as it closed.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "rrfp-run-abandoned").mkdir()
    done = rrfp_here(tmp_path, "train", *FLAGS, "--save=ck", "--resume", "--steps=2")
    assert done.returncode == 0, done.stderr
    assert f"The directory of the run, {tmp_path / 'run'}, is gone" in done.stderr
    metrics = tmp_path / "ck" / "step-00000002" / METRICS
    assert f"All 2 steps are trained; the metrics are in {metrics}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_up(tmp_path, 2)
    (tmp_path / "run").mkdir()
    beginning = start_or_resume(settings_in(tmp_path, resume=True, out=None), lambda _: None)
    assert (beginning.run.path, beginning.first_step) == (Path("run"), 2)


REFUSED = [
    ({"hidden": 64}, "--hidden is 64 and was 32"),
    ({"seed": 7}, "--seed is 7 and was 1234"),
    ({"dp": 2}, "(--dp x --microbatches) is 8 and was 4"),
    ({"lr": 0.5}, "--lr is 0.5 and was 0.002"),
    ({"steps": 1}, "--steps is 1 and the checkpoint"),
    ({"resume": False}, "has the checkpoint of step 2 of another run; go on from it with --resume"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_what_is_trained_must_stay(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    made_up(tmp_path, 2)
    with pytest.raises(UsageError) as raised:
        start_or_resume(settings_in(tmp_path, **{"resume": True, **changed}), lambda _: None)
    assert said in str(raised.value)


def test_data_are_what_they_hold_and_not_where_they_lie(tmp_path: Path) -> None:
    for name, text in (("here", "one two " * 50), ("there", "one two " * 50), ("other", "3" * 300)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    made_up(tmp_path, 2, data=str(tmp_path / "here" / "text.txt"))
    settings = settings_in(tmp_path, resume=True, data=str(tmp_path / "there"))
    assert start_or_resume(settings, lambda _: None).first_step == 2
    settings = settings.changed(data=tmp_path / "other")
    with pytest.raises(UsageError, match=r"content of --data is \w{12}\.\.\. and"):
        start_or_resume(settings, lambda _: None)


def test_a_tokenizer_is_what_it_holds(tmp_path: Path) -> None:
    made = made_up(tmp_path).begin(2)
    settings = settings_in(tmp_path, tokenizer="there/tokenizer.json")
    told = settings_in(tmp_path, tokenizer="here/tokenizer.json").described()
    contents = {"data": "a" * 64, "tokenizer": "b" * 64, "end_of_document": "</s>"}
    checkpoint = Checkpoint(made, Manifest(2, told, "run", {}, {}, contents))
    check_continues(settings, contents, checkpoint)
    for other, said in (
        ({"tokenizer": "c" * 64}, r"content of --tokenizer is c{12}\.\.\. and was b{12}\.\.\. for"),
        ({"end_of_document": "<s>"}, "token that ends a document is <s> and was </s> for"),
    ):
        with pytest.raises(UsageError, match=said):
            check_continues(settings, {**contents, **other}, checkpoint)


def test_images_are_identified_by_captions_names_and_sizes(tmp_path: Path) -> None:
    found = []
    for name, caption in (("here", "a dog"), ("there", "a dog"), ("other", "a cat")):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(2):
            Image.new("RGB", (16, 16)).save(folder / f"{number}.png")
        lines = [json.dumps({"image": f"{n}.png", "text": caption}) for n in range(2)]
        (folder / "captions.jsonl").write_text("\n".join(lines))
        found.append(data_contents(settings_in(tmp_path, model="vlm", layers=8, data=str(folder))))
    assert found[0] == found[1] != found[2]
    made_up(tmp_path, 2, model="vlm", layers=8)
    settings = settings_in(tmp_path, model="vlm", layers=8, data=str(folder), resume=True)
    with pytest.raises(UsageError, match="and was scenes drawn at run time for the checkpoint"):
        start_or_resume(settings, lambda _: None)


def test_replicas_may_share_the_batch_in_another_way(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    changed = {"dp": 2, "microbatches": 2, "tp": 2, "pp": 1, "chunks": 4}
    settings = settings_in(tmp_path, resume=True, **changed)
    assert start_or_resume(settings, lambda _: None).first_step == 2


def test_vision_layers_stay_vision_layers(tmp_path: Path) -> None:
    made_up(tmp_path, 2, model="vlm", pp=2, layers=8)
    start_or_resume(settings_in(tmp_path, resume=True, model="vlm", pp=4, layers=8), lambda _: None)
    with pytest.raises(UsageError, match=r"vision layers .* is 3 and was 4"):
        start_or_resume(
            settings_in(tmp_path, resume=True, model="vlm", pp=8, layers=8), lambda _: None
        )


def test_a_checkpoint_that_does_not_say_what_its_data_were_is_refused(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    forget_digests(tmp_path / "ck" / "step-00000002", "contents")
    with pytest.raises(UsageError, match="step-00000002 does not say what its data were"):
        start_or_resume(settings_in(tmp_path, resume=True), lambda _: None)


def test_a_run_goes_on_where_a_launcher_was_killed_before_it_described_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.123").write_text('{"settings": {"sa')
    settings = settings_in(tmp_path, resume=True)
    assert start_or_resume(settings, lambda _: None).run == RunDir(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(UsageError, match="is not the directory of a run that saves to"):
        start_or_resume(settings, lambda _: None)


def test_another_runs_directory_is_left_alone(tmp_path: Path) -> None:
    made_up(tmp_path, 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"settings": {"save": "elsewhere"}}')
    with pytest.raises(UsageError, match="is not the directory of a run that saves to"):
        start_or_resume(settings_in(tmp_path, resume=True), lambda _: None)


@pytest.mark.parametrize(("save", "out"), [("x/ck", "x"), ("x", "x/run"), ("x", "x")])
def test_checkpoints_and_the_run_may_be_in_one_directory(
    tmp_path: Path, save: str, out: str
) -> None:
    again = ("train", *FLAGS, f"--save={save}", f"--out={out}", "--no-trace")
    files = {"save": tmp_path / save, "out": tmp_path / out}
    assert start_or_resume(settings_in(tmp_path, **files), lambda _: None).run.path == files["out"]
    train(tmp_path, 2, **files, resume=True)
    refused = rrfp_here(tmp_path, *again, "--steps=2")
    assert (refused.returncode, "the checkpoint of step 2 of another run" in refused.stderr) == (
        2,
        True,
    )
    forced = rrfp_here(tmp_path, *again, "--steps=2", "--force")
    assert (forced.returncode, "the checkpoint of step 2 of another run" in forced.stderr) == (
        2,
        True,
    )
    train(tmp_path, 3, **files, resume=True)
    assert [line["step"] for line in read_metrics(tmp_path / out)] == [0, 1, 2]
    found = CheckpointDir(tmp_path / save).newest()
    assert found is not None
    assert found.step == 3


def test_a_new_run_and_its_checkpoints_in_it(tmp_path: Path) -> None:
    flags = ("--save=x/ck", "--out=x", "--no-trace", "--steps=1", *FLAGS)
    done = rrfp(tmp_path, "train", *flags)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        *("ck", "logs", "metrics.jsonl", "outcome.json", "run.json"),
    ]
    # What is there already is left alone.
    (tmp_path / "y").mkdir()
    refused = rrfp_here(tmp_path, "train", *FLAGS, "--save=y/ck", "--out=y", "--steps=1")
    assert (refused.returncode, "y exists; choose another" in refused.stderr) == (2, True)
    assert [*(tmp_path / "y").iterdir()] == []


@pytest.mark.parametrize(
    ("save", "out", "said"),
    [
        ("x/logs", "x", "--save {}/x/logs lies in logs, which the run in x makes and removes"),
        ("x/records/ck", "x", "--save {}/x/records/ck lies in records, which the run in x makes"),
        ("x", "x/step-00000002", "--out x/step-00000002 lies in step-00000002, which is the name"),
        ("x", "x/.saving-1/run", "--out x/.saving-1/run lies in .saving-1, which is the name of"),
    ],
)
def test_neither_is_removed_with_the_other(tmp_path: Path, save: str, out: str, said: str) -> None:
    for force in ((), ("--force",)):
        flags = (f"--save={save}", f"--out={out}", "--steps=1", *force, *FLAGS)
        refused = rrfp_here(tmp_path, "train", *flags)
        assert refused.returncode == 2
        assert said.format(tmp_path) in refused.stderr
        assert [*tmp_path.iterdir()] == []


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
    ("num_bytes", "reason"), [(100, "File too large"), (300_000, "File too large")]
)
def test_a_full_disk_names_the_directory_and_loses_nothing(
    tmp_path: Path, flags: dict[str, Any], num_bytes: int, reason: str
) -> None:
    with pytest.raises(RankFailedError) as raised:
        train_prepared(tmp_path, STEPS, partial(small_disk_later, num_bytes), **flags)
    assert re.search(
        rf"the checkpoint of step {STEPS} could not be written to {tmp_path / 'ck'} "
        rf"\((?:{reason})\); see whether it has room and is writable, then go on from the last one "
        "with --resume",
        str(raised.value),
    )
    assert newest(tmp_path).step == 2
    # The other files of that disk are whole as far as they go.
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(len(lines))]
    assert len(lines) == (STEPS if num_bytes > 1000 else 4)
    # The other rank may make the directory again before it is ended; the next session removes it.
    with CheckpointDir(tmp_path / "ck").locked():
        assert [*(tmp_path / "ck").glob(".saving-*")] == []


def full_disk(place: str) -> None:
    """The second checkpoint finds no room at this place."""
    from megatron.core.dist_checkpointing import serialization
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    owner = {
        "the plan of its files": (FileSystemWriter, "finish"),
        "the version of its format": (serialization, "save_config"),
        "its manifest": (CheckpointDir, "finish"),
    }
    of, name = owner[place]
    own, calls = getattr(of, name), iter(range(1, 100))

    def write(*args: Any) -> Any:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own(*args)

    setattr(of, name, write)


@pytest.mark.parametrize(
    "place", ["the plan of its files", "the version of its format", "its manifest"]
)
def test_a_disk_that_has_room_again_gets_the_next_checkpoint(tmp_path: Path, place: str) -> None:
    train_prepared(tmp_path, STEPS, partial(full_disk, place))
    saved = [path.name for path in sorted((tmp_path / "ck").glob("[!.]*"))]
    assert saved == ["step-00000002", "step-00000006"]
    assert newest(tmp_path).step == STEPS


def looking_together(directory: Path) -> None:
    """No rank has read the data before all of them read."""

    def look(settings: TrainSettings) -> dict[str, str]:
        (directory / f"looks-{os.environ['RANK']}").touch()
        deadline_s = time.monotonic() + 30.0
        while len([*directory.glob("looks-*")]) < 2:
            if time.monotonic() > deadline_s:
                raise RrfpError("this rank reads the data alone")
            time.sleep(0.02)
        return data_contents(settings)

    patched: Any = session
    patched.data_contents = look


def test_no_rank_waits_while_another_reads_the_data(tmp_path: Path) -> None:
    """A rank that waits in a collective gives the others up after 300 s."""
    train_prepared(tmp_path, 2, partial(looking_together, tmp_path))
    assert newest(tmp_path).manifest.contents == data_contents(settings_in(tmp_path))


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
    """`python -m tests.train.killed_runs --runs 100` kills more of them."""
    tally = run_all(tmp_path, num_runs=2, seed=3)
    assert tally["runs the same to the last bit"] == 2
