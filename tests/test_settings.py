from pathlib import Path
from typing import Any

import pytest

from rrfp.errors import UsageError
from rrfp.megatron.settings import DispatchMode, TrainSettings


def test_the_defaults_are_valid_and_fill_four_ranks() -> None:
    settings = TrainSettings()
    settings.validate()
    assert (settings.pp, settings.tp, settings.dp, settings.layers) == (4, 1, 1, 8)
    assert settings.world_size == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layers": 6}, "6 layers do not divide by 4 pipeline ranks"),
        ({"hidden": 100, "heads": 6}, "hidden size of 100 does not divide by 6 heads"),
        ({"hidden": 96, "heads": 6, "tp": 4}, "6 heads do not divide by 4 tensor-parallel ranks"),
        ({"hidden": 6, "heads": 6}, "make --hidden an even multiple of --heads"),
        ({"seq_length": 7, "tp": 2, "variable_lengths": True}, "sequence length of 7"),
        ({"limit": 0}, "--limit is 0; it must be at least 1"),
        ({"steps": 0}, "--steps is 0"),
        ({"microbatches": -1}, "--microbatches is -1"),
        ({"micro_batch_size": 0}, "--micro-batch-size is 0"),
        ({"pp": 0}, "--pp is 0"),
        ({"lr": 0.0}, "--lr is 0.0"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"seed": -1}, "--seed is -1"),
        ({"dispatch": "soon"}, "'soon' is not a dispatch (ready, fixed, megatron)"),
        ({"dispatch": "megatron", "hint": "bf"}, "megatron runs 1f1b only, not 'bf'"),
        ({"device": "cuda"}, "--device cuda has no transport"),
        ({"device": "abacus"}, "'abacus' is not a device"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        TrainSettings(**flags).validate()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("hint", "dispatch", "resolved"),
    [
        (None, DispatchMode.READY, "bf"),
        (None, DispatchMode.FIXED, "bf"),
        (None, DispatchMode.MEGATRON, "1f1b"),
        ("1f1b", DispatchMode.MEGATRON, "1f1b"),
        ("gpipe", DispatchMode.READY, "gpipe"),
    ],
)
def test_the_dispatch_chooses_a_hint_when_none_is_given(
    hint: str | None, dispatch: DispatchMode, resolved: str
) -> None:
    assert TrainSettings(hint=hint, dispatch=dispatch).resolved_hint == resolved


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
        ("microbatch = 4", "sets 'microbatch', which is not a setting (hint, dispatch, pp"),
        ("steps = 2.5", "sets steps to 2.5; it takes an integer"),
        ("steps = true", "sets steps to True; it takes an integer"),
        ('lr = "fast"', "sets lr to 'fast'; it takes a number"),
        ("force = 1", "sets force to 1; it takes true or false"),
        ("data = 3", "sets data to 3; it takes a path"),
        ("[train]\nsteps = 2", "sets 'train', which is not a setting"),
        ("seq-length = 8\nseq_length = 8", "sets 'seq-length' twice"),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_wrong_toml_file_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        TrainSettings.from_toml(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_missing_toml_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        TrainSettings.from_toml(tmp_path / "run.toml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"hint = \xff")
    with pytest.raises(UsageError, match="is not TOML"):
        TrainSettings.from_toml(path)
