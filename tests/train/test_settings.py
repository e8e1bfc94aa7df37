"""The settings of `rrfp train` are read, checked and written back, whether from flags or TOML."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rrfp.errors import UsageError
from rrfp.megatron.job.description import describe_dispatch
from rrfp.megatron.settings import DispatchSettings
from rrfp.schedule.policy import Dispatch
from rrfp.train.checks import check_settings
from rrfp.train.settings import TrainSettings


def test_the_defaults_are_valid_and_fill_four_ranks() -> None:
    settings = TrainSettings()
    check_settings(settings)
    assert (
        settings.layout.pp,
        settings.layout.tp,
        settings.layout.num_replicas,
        settings.model.layers,
    ) == (4, 1, 1, 8)
    assert settings.layout.world_size == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layers": 6}, "6 layers do not divide by 4 pipeline ranks"),
        ({"hidden": 100, "heads": 6}, "hidden size of 100 does not divide by 6 heads"),
        ({"hidden": 96, "heads": 6, "tp": 4}, "6 heads do not divide by 4 tensor-parallel ranks"),
        ({"hidden": 6, "heads": 6}, "make --hidden an even multiple of --heads"),
        ({"seq_length": 7, "tp": 2, "variable_lengths": True}, "sequence length of 7"),
        ({"limit": 0}, "the limit is 0; it must be a whole number, at least 1"),
        ({"steps": 0}, "--steps is 0"),
        ({"trace_mb": 31}, "--trace-mb 31 is too little for 4 ranks; give 8 a rank"),
        ({"model": "vlm", "variable_lengths": True}, "leave --variable-lengths out"),
        (
            {"model": "vlm", "image_size": 30},
            "--image-size 30 is not a whole number of patches of 8 pixels",
        ),
        ({"max_images": 0}, "--max-images is 0"),
        ({"blank_images": True}, "--model gpt sees none; add --model vlm"),
        ({"image_size": 64}, "are about images and --model gpt sees none; add --model vlm"),
        ({"heldout_every": 5, "model": "moe"}, "--model moe sees none; add --model vlm"),
        ({"microbatches": -1}, "--microbatches is -1"),
        ({"micro_batch_size": 0}, "--micro-batch-size is 0"),
        ({"pp": 0}, "--pp is 0"),
        ({"lr": 0.0}, "--lr is 0.0"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"seed": -1}, "--seed is -1"),
        ({"dispatch": "soon"}, "--dispatch is 'soon'; it must be one of ready, fixed, megatron"),
        ({"placement": "w"}, "--placement is 'w'; it must be one of loop, v"),
        ({"w": "never"}, "--w is 'never'; it must be one of idle, ranked"),
        ({"agreement": "none"}, "it must be one of intersection, unanimous"),
        ({"grad_order": "any"}, "--grad-order is 'any'; it must be one of canonical, arrival"),
        ({"dtype": "fp8"}, "--dtype is 'fp8'; it must be one of fp32, bf16"),
        ({"recompute": "some"}, "it must be one of none, selective, full"),
        ({"dispatch": "megatron", "hint": "bf"}, "megatron runs 1f1b only, not 'bf'"),
        (
            {"dispatch": "megatron", "hint": "1f1b", "chunks": 2},
            "megatron runs interleaved only, not '1f1b'",
        ),
        (
            {"dispatch": "megatron", "placement": "v", "chunks": 2},
            "--dispatch megatron has no placement v",
        ),
        (
            {"dispatch": "megatron", "pp": 2, "chunks": 2},
            "interleaves chunks over 3 or more pipeline ranks, not 2",
        ),
        ({"placement": "v"}, "--placement v takes 2 chunks per rank, not 1; add --chunks 2"),
        ({"chunks": 3}, "8 layers do not divide by 4 pipeline ranks of 3 chunks"),
        ({"chunks": 0}, "--chunks is 0"),
        ({"limit": 4, "hold": 3}, "exclude each other; keep the hold"),
        ({"hold": 0}, "the hold is 0; it must be a whole number, at least 1"),
        (
            {"w": "ranked", "hint": "zb-h1", "dispatch": "fixed"},
            "runs weight gradients where its order has them; leave --w out",
        ),
        ({"cp": 2}, "--cp 2 needs the attention of Transformer Engine"),
        ({"sequence_parallel": True}, "--sequence-parallel divides sequences among"),
        ({"sequence_parallel": True, "tp": 2, "seq_length": 7}, "sequence length of 7"),
        ({"experts": 1}, "--experts is 1; every token takes 2"),
        ({"experts": 0}, "--experts is 0; it must be at least 1"),
        ({"experts": 4, "tp": 2}, "add --sequence-parallel"),
        ({"ep": 2}, "--ep 2 shares out experts and the layers are dense; add --experts"),
        ({"ep": 2, "experts": 5}, "5 experts do not divide by 2 expert-parallel ranks"),
        ({"ep": 2, "experts": 4, "dp": 3}, "3 replicas do not divide by 2 expert-parallel ranks"),
        (
            {"ep": 2, "experts": 4, "tp": 2, "sequence_parallel": True},
            "--ep 2 with --tp 2 gathers tokens in unequal parts",
        ),
        (
            {"tie_embeddings": True, "chunks": 2, "placement": "v"},
            "--tie-embeddings with the first and the last stage on one rank",
        ),
        ({"tie_embeddings": True, "chunks": 2, "pp": 1}, "first and the last stage on one rank"),
        ({"dropout": 1.0}, "--dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "--dropout is nan"),
        ({"tls": True, "transport": "nixl", "nnodes": 2}, "--transport nixl does not encrypt"),
        ({"tls": True, "dispatch": "megatron"}, "--dispatch megatron sends by Megatron-Core's own"),
        ({"device": "abacus"}, "--device is 'abacus'; it must be one of cpu, cuda"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_settings(TrainSettings(**flags))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_drop_in_takes_numbers_of_any_library() -> None:
    plain = DispatchSettings(
        limit=4, outbox_mb=8, connect_s=2.5, stall_s=30, silence_s=9.0, admit="plan", plan_ms=1.5
    )
    numbers: dict[str, Any] = {
        "limit": torch.tensor(4),
        "outbox_mb": np.uint16(8),
        "connect_s": np.float32(2.5),
        "stall_s": torch.tensor(30),
        "silence_s": torch.tensor(9.0),
        "plan_ms": Fraction(3, 2),
    }
    given = DispatchSettings(admit="plan", **numbers)
    described = describe_dispatch(given).settings([], 1)
    assert json.dumps(described) == json.dumps(describe_dispatch(plain).settings([], 1))
    assert given.policy == plain.policy
    holds: dict[str, Any] = {"hold": np.int32(3), "patience": np.int64(5)}
    assert DispatchSettings(**holds).policy.hold == 3
    wrong: Any
    for wrong in (np.float64(3), torch.tensor([1, 2]), True):
        with pytest.raises(UsageError, match="the limit is"):
            DispatchSettings(limit=wrong)
    wrong = np.array([1.0, 2.0])
    with pytest.raises(UsageError, match="connect_s is"):
        DispatchSettings(connect_s=wrong)


@pytest.mark.parametrize(
    ("flags", "lacks", "words"),
    [
        ({"transport": "nixl"}, "is_installed", "needs the package nixl.*'\\.\\[nixl\\]'"),
        (
            {"transport": "cuda-ipc", "device": "cuda"},
            "has_bindings",
            "needs the package cuda-bindings.*'\\.\\[cuda\\]'",
        ),
        ({"transport": "cuda-ipc"}, "has_bindings", "--device is cpu; choose shm"),
        ({"tls": True}, "tls.is_installed", "needs the package cryptography.*'\\.\\[tls\\]'"),
    ],
)
def test_a_transport_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], lacks: str, words: str
) -> None:
    monkeypatch.setattr(f"rrfp.train.checks.{lacks}", lambda: False)
    with pytest.raises(UsageError, match=words):
        check_settings(TrainSettings(**flags))


@pytest.mark.parametrize(
    "flags",
    [
        {"chunks": 2, "placement": "v", "hint": "zb-v", "w": "ranked"},
        {"chunks": 2, "dispatch": "megatron", "tie_embeddings": True},
        {"pp": 1, "tie_embeddings": True},
        {"hold": 1, "chunks": 2, "hint": "bfw-deep"},
        {"tp": 2, "sequence_parallel": True, "experts": 4},
        {"ep": 2, "experts": 4, "dp": 4, "distributed_optimizer": True},
        {"dtype": "bf16", "recompute": "full", "dropout": 0.5, "grad_order": "arrival"},
    ],
    ids=" ".join,
)
def test_what_goes_together_is_accepted(flags: dict[str, Any]) -> None:
    check_settings(TrainSettings(**flags))


@pytest.mark.parametrize(
    ("flags", "replicas", "ranks"),
    [
        ({}, 1, 4),
        ({"ep": 2, "experts": 4}, 2, 8),
        ({"ep": 2, "experts": 4, "dp": 4}, 4, 16),
        ({"dp": 3, "tp": 2}, 3, 24),
    ],
)
def test_there_are_as_many_replicas_as_the_experts_need(
    flags: dict[str, Any], replicas: int, ranks: int
) -> None:
    settings = TrainSettings(**flags)
    assert settings.layout.num_replicas == replicas
    assert settings.layout.world_size == ranks
    assert settings.described()["dp"] == replicas
    assert TrainSettings.from_json(settings.to_json()).layout.world_size == ranks


@pytest.mark.parametrize(
    ("hint", "dispatch", "resolved"),
    [
        (None, Dispatch.READY, "bf"),
        (None, Dispatch.FIXED, "bf"),
        (None, Dispatch.MEGATRON, "1f1b"),
        ("1f1b", Dispatch.MEGATRON, "1f1b"),
        ("gpipe", Dispatch.READY, "gpipe"),
    ],
)
def test_the_dispatch_chooses_a_hint_when_none_is_given(
    hint: str | None, dispatch: Dispatch, resolved: str
) -> None:
    assert TrainSettings(hint=hint, dispatch=dispatch).hint.name == resolved


def test_megatron_interleaves_chunks() -> None:
    settings = TrainSettings(dispatch=Dispatch.MEGATRON, chunks=2)
    check_settings(settings)
    assert settings.hint.name == "interleaved"


def test_toml_takes_the_names_of_the_flags_and_flags_go_first(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'hint = "fb"\nmicro-batch-size = 2\nlr = 1\nsteps = 5\n'
        'variable_lengths = true\ndata = "text"\n'
    )
    assert TrainSettings.from_toml(path, steps=7) == TrainSettings(
        hint="fb",
        micro_batch_size=2,
        lr=1.0,
        variable_lengths=True,
        data=Path("text"),
        steps=7,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("microbatch = 4", "sets 'microbatch', which is not a setting (hint, dispatch, limit"),
        ("steps = 2.5", "sets steps to 2.5; it takes an integer"),
        ("steps = true", "sets steps to True; it takes an integer"),
        ('lr = "fast"', "sets lr to 'fast'; it takes a number"),
        ("force = 1", "sets force to 1; it takes true or false"),
        ("data = 3", "sets data to 3; it takes a path"),
        ("[train]\nsteps = 2", "sets 'train', which is not a setting"),
        ("seq-length = 8\nseq_length = 8", "sets 'seq-length' twice"),
        ("steps = ", "is not TOML"),
        (f"seed = {'1' * 5000}", "is not TOML"),
        (f"seed = {'[' * 9999}", "is nested too deeply"),
    ],
)
def test_a_wrong_toml_file_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        TrainSettings.from_toml(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_number_beyond_any_float_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"lr = 1{'0' * 400}")
    with pytest.raises(UsageError, match="--lr is inf"):
        check_settings(TrainSettings.from_toml(path))


def test_a_missing_toml_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        TrainSettings.from_toml(tmp_path / "run.toml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"hint = \xff")
    with pytest.raises(UsageError, match="is not TOML"):
        TrainSettings.from_toml(path)
