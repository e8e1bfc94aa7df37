"""The data of `rrfp train`, and its evaluations, are the same everywhere; wrong ones are named."""

import json
import math
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import RrfpError, UsageError
from rrfp.train.data.batches import TextBatches
from rrfp.train.data.sources import document_lengths, open_corpus
from rrfp.train.data.tokens import DOCUMENT_END, ByteCorpus, Corpus
from rrfp.train.loop import Evaluation
from rrfp.train.settings import DataSettings, TrainSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import RankRun, train_variants


def documents(corpus: Corpus) -> list[list[int]]:
    return [
        corpus.tokens(index, 0, int(length)).tolist() for index, length in enumerate(corpus.lengths)
    ]


def as_tokens(*texts: bytes) -> list[list[int]]:
    return [[*text, DOCUMENT_END] for text in texts]


def test_a_text_file_is_one_document_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"h\xff\n")
    assert documents(open_corpus(DataSettings(path=path))) == as_tokens(b"h\xff\n")


def test_a_folder_gives_its_files_in_order_and_skips_what_is_empty_or_hidden(
    tmp_path: Path,
) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {"c.txt": "c", "a.md": "a", "b/x": "x", ".hidden": "no", "e": ""}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "j.jsonl").write_text('{"text": "j"}\n')
    assert documents(open_corpus(DataSettings(path=tmp_path))) == as_tokens(b"a", b"c", b"j", b"x")


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": "zwö"}\n')
    assert documents(open_corpus(DataSettings(path=path))) == as_tokens(b"one", "zwö".encode())


@pytest.mark.parametrize("name", ["d.bin", "d.idx", "d"])
def test_a_megatron_pair_is_read_by_either_file_or_the_prefix(tmp_path: Path, name: str) -> None:
    write_pair(tmp_path / "d", [[5, 6, 7], [], [900]])
    data = DataSettings(path=tmp_path / name)
    corpus = open_corpus(data)
    assert document_lengths(data).tolist() == [3, 1]
    assert documents(corpus) == [[5, 6, 7], [900]]
    assert corpus.tokens(0, 1, 3).tolist() == [6, 7]
    assert corpus.vocab_size == 901


def test_a_document_of_a_pair_is_what_its_index_says(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", [[5, 6, 7], [8, 9], []], lengths=[[2, 0, 1], [0, 2], [0]])
    corpus = open_corpus(DataSettings(path=tmp_path / "d"))
    assert documents(corpus) == [[5, 6, 7], [8, 9]]
    assert corpus.tokens(0, 1, 3).tolist() == [6, 7]
    assert corpus.tokens(1, 1, 2).tolist() == [9]
    assert document_lengths(DataSettings(path=tmp_path / "d")).tolist() == [3, 2]


def test_padding_is_a_token_of_a_small_vocabulary(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", [[1, 2, 1, 2, 1], [2, 1]])
    corpus = open_corpus(DataSettings(path=tmp_path / "d"))
    settings = TrainSettings(seq_length=8, micro_batch_size=2, variable_lengths=True)
    batch = TextBatches(corpus, settings, 0).batch(0, 0)
    assert batch["loss_mask"].sum(1).tolist() in ([4, 1], [1, 4])
    for tokens in (batch["tokens"], batch["labels"]):
        assert tokens.shape == (2, 4)
        assert 0 <= tokens.min() <= tokens.max() < corpus.vocab_size == 3


def write_pair(
    prefix: Path, texts: list[list[int]], lengths: list[list[int]] | None = None
) -> None:
    """Documents of these tokens, each cut into sequences of these lengths."""
    from rrfp.megatron.cpu.patches import prepare_cpu

    prepare_cpu()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with warnings.catch_warnings():
        # The builder converts tensors in a way that numpy 2 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        for text, cuts in zip(texts, lengths or [[len(text)] for text in texts], strict=True):
            builder.add_document(torch.tensor(text, dtype=torch.int32), cuts)
        builder.finalize(f"{prefix}.idx")


def test_the_standard_library_gives_many_documents_of_many_lengths() -> None:
    corpus = open_corpus(DataSettings())
    assert len(corpus.lengths) > 1000
    assert np.percentile(corpus.lengths, 90) > 4 * np.percentile(corpus.lengths, 25)
    assert np.array_equal(corpus.lengths, open_corpus(DataSettings()).lengths)


def write_empty(folder: Path) -> Path:
    path = folder / "empty.txt"
    path.touch()
    return path


def write_lines(*lines: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "a.jsonl"
        path.write_text("\n".join(lines))
        return path

    return write


def write_lone_bin(folder: Path) -> Path:
    path = folder / "a.bin"
    path.write_bytes(b"1234")
    return path


def write_false_index(folder: Path) -> Path:
    write_lone_bin(folder)
    path = folder / "a.idx"
    path.write_bytes(b"not an index")
    return path


def write_folder_with_bin(folder: Path) -> Path:
    write_lone_bin(folder)
    return folder


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: folder / "missing.txt", "missing.txt: No such file"),
        (lambda folder: folder, "holds no text"),
        (write_empty, "holds no text"),
        (write_lines('{"text": "a"}', "{"), "a.jsonl, line 2: not JSON"),
        (write_lines('{"text": "a"}', '{"body": "b"}'), "a.jsonl, line 2: no string field 'text'"),
        (write_lines("[]"), "a.jsonl, line 1: no string field 'text'"),
        (write_lines("5"), "a.jsonl, line 1: no string field 'text'"),
        (write_lines("[null, [], 7]"), "a.jsonl, line 1: no string field 'text'"),
        (write_lines('{"text": 3}'), "a.jsonl, line 1: no string field 'text'"),
        (write_lone_bin, "a.idx does not exist"),
        (write_false_index, "is not a Megatron index"),
        (write_folder_with_bin, "holds a.bin; give --data the .bin/.idx pair itself"),
    ],
)
def test_wrong_data_is_refused_in_a_sentence_before_and_in_the_ranks(
    tmp_path: Path, write: Callable[[Path], Path], words: str
) -> None:
    assert_refused(write(tmp_path), words)


@pytest.mark.parametrize("num_bytes", [20, 45])
def test_a_truncated_index_is_refused(tmp_path: Path, num_bytes: int) -> None:
    write_pair(tmp_path / "d", [[5, 6, 7]])
    index = tmp_path / "d.idx"
    index.write_bytes(index.read_bytes()[:num_bytes])
    assert_refused(tmp_path / "d", f"idx is cut off after {num_bytes} bytes")


@pytest.mark.parametrize("num_bytes", [0, 8, 13, 16])
def test_a_bin_of_another_size_than_its_index_says_is_refused(
    tmp_path: Path, num_bytes: int
) -> None:
    write_pair(tmp_path / "d", [[5, 6, 7]])
    data = tmp_path / "d.bin"
    data.write_bytes((data.read_bytes() + bytes(4))[:num_bytes])
    assert_refused(tmp_path / "d", f"bin has {num_bytes} bytes where its .idx promises 12")


@pytest.mark.parametrize(
    ("lengths", "places", "bounds", "words"),
    [
        ([2, 1], [0, 9], [0, 2], "sequences end to end"),
        ([4, -1], [0, 16], [0, 2], "sequences end to end"),
        ([2, 1], [0, 8], [], "to which document"),
        ([2, 1], [0, 8], [0], "to which document"),
        ([2, 1], [0, 8], [0, 3, 2], "to which document"),
        ([2, 1], [0, 8], [1, 2], "to which document"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    tmp_path: Path, lengths: list[int], places: list[int], bounds: list[int], words: str
) -> None:
    np.array([5, 6, 7], np.int32).tofile(tmp_path / "d.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(lengths), len(bounds))
    tables = (np.array(lengths, np.int32), np.array(places), np.array(bounds, np.int64))
    (tmp_path / "d.idx").write_bytes(head + b"".join(table.tobytes() for table in tables))
    assert_refused(tmp_path / "d", words)


def assert_refused(path: Path, words: str) -> None:
    """In one sentence, in the launcher as in the ranks."""
    for read in (document_lengths, open_corpus):
        with pytest.raises(UsageError) as refused:
            read(DataSettings(path=path))
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", [[5, -6, 7]])
    with pytest.raises(UsageError, match="holds the token -6"):
        open_corpus(DataSettings(path=tmp_path / "d"))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UsageError, match="holds 4 tokens and needs 9"):
        TextBatches(ByteCorpus([b"abc"]), TrainSettings(seq_length=8), 0)


texts = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12)


@given(
    texts=texts,
    seq_length=st.integers(1, 16),
    microbatches=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    dp=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_an_epoch_of_packed_windows_covers_the_text_once(
    texts: list[bytes],
    seq_length: int,
    microbatches: int,
    micro_batch_size: int,
    dp: int,
    seed: int,
) -> None:
    stream = [token for text in texts for token in (*text, DOCUMENT_END)]
    num_windows = (len(stream) - 1) // seq_length
    if num_windows < 1:
        return
    settings = TrainSettings(
        seq_length=seq_length,
        microbatches=microbatches,
        micro_batch_size=micro_batch_size,
        dp=dp,
        seed=seed,
    )
    replicas = [TextBatches(ByteCorpus(texts), settings, dp_rank) for dp_rank in range(dp)]
    windows: list[tuple[list[int], list[int]]] = []
    step = 0
    while len(windows) < num_windows:
        for replica in replicas:
            for microbatch in range(microbatches):
                batch = replica.batch(step, microbatch)
                assert batch["tokens"].shape == (micro_batch_size, seq_length)
                assert batch["loss_mask"].min() == 1.0
                windows += zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
        step += 1
    expected = [
        (stream[start : start + seq_length], stream[start + 1 : start + seq_length + 1])
        for start in range(0, num_windows * seq_length, seq_length)
    ]
    assert sorted(windows[:num_windows]) == sorted(expected)


@given(
    texts=texts,
    half_length=st.integers(1, 10),
    micro_batch_size=st.integers(1, 3),
    step=st.integers(0, 100),
    seed=st.integers(0, 9),
)
def test_variable_lengths_follow_the_documents(
    texts: list[bytes], half_length: int, micro_batch_size: int, step: int, seed: int
) -> None:
    settings = TrainSettings(
        seq_length=2 * half_length,
        tp=2,
        micro_batch_size=micro_batch_size,
        variable_lengths=True,
        seed=seed,
    )
    batch = TextBatches(ByteCorpus(texts), settings, 0).batch(step, 1)
    counts = batch["loss_mask"].sum(1).int().tolist()
    length = batch["tokens"].shape[1]
    assert length == max(counts) + max(counts) % 2
    for row, count in enumerate(counts):
        tokens = [*batch["tokens"][row, :count].tolist(), int(batch["labels"][row, count - 1])]
        assert batch["labels"][row, : count - 1].tolist() == tokens[1:-1]
        whole = [document for document in as_tokens(*texts) if len(document) <= length + 1]
        inside = any(
            document[start : start + count + 1] == tokens
            for document in as_tokens(*texts)
            for start in range(len(document))
        )
        assert inside
        assert count == settings.data.seq_length or tokens in whole


def test_a_batch_does_not_depend_on_what_was_asked_before() -> None:
    settings = TrainSettings(seq_length=4, variable_lengths=True)
    corpus = ByteCorpus([bytes(range(n)) for n in range(2, 30)])
    asked = [TextBatches(corpus, settings, 0).batch(step, 2)["tokens"] for step in (5, 0)]
    batches = TextBatches(corpus, settings, 0)
    assert [batches.batch(step, 2)["tokens"].tolist() for step in (0, 5)] == [
        tokens.tolist() for tokens in reversed(asked)
    ]


def test_the_seed_chooses_the_samples() -> None:
    corpus = ByteCorpus([bytes(range(256))])
    first, other = (
        TextBatches(corpus, TrainSettings(seq_length=4, seed=seed), 0)
        .batch(0, 0)["tokens"]
        .tolist()
        for seed in (1, 2)
    )
    assert first != other


# Held-out data: looking at it tells the same under every dispatch, and disturbs no training.


SETTINGS: dict[str, Any] = {
    "model": "vlm",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "microbatches": 4,
    "steps": 3,
    "dropout": 0.1,
}
EVERY_STEP = {"heldout_every": 1}


def assert_same(rank: int, reference: RankRun, run: RankRun) -> None:
    assert run.losses == reference.losses, f"rank {rank}"
    assert run.parameters_sha256 == reference.parameters_sha256, f"rank {rank}"
    # After the last step all have looked.
    assert run.heldout_losses[-1:] == reference.heldout_losses[-1:], f"rank {rank}"


def assert_unrecorded(rank: int, run: RankRun, plain: RankRun) -> None:
    """The trace has the steps of the training alone, under their own numbers."""
    tasks, expected = (
        sorted((task.step, task.stage, task.kind, task.microbatch) for task in some.tasks())
        for some in (run, plain)
    )
    assert tasks == expected, f"rank {rank}"
    assert {record.step for record in run.records} == {0, 1, 2}, f"rank {rank}"


def test_an_evaluation_disturbs_no_training() -> None:
    """On one rank of two chunks, with dropout."""
    settings = {**SETTINGS, "pp": 1, "chunks": 2}
    ((plain, looked),) = run_ranks(1, train_variants, settings, [{}, EVERY_STEP], timeout_s=110)
    assert_same(0, plain, looked)
    assert_unrecorded(0, looked, plain)
    assert len(plain.heldout_losses) == 1
    assert len(set(looked.heldout_losses)) == 3


def test_damaged_heldout_data_is_refused_before_training() -> None:
    layout: Any = SimpleNamespace(dp=2, dp_rank=1)
    nothing: Any = None
    asked: list[int] = []

    def heldout(number: int) -> Any:
        asked.append(number)
        if number == 40:
            raise UsageError("the image is damaged")

    with pytest.raises(UsageError, match="is damaged"):
        Evaluation(TrainSettings(microbatches=12), layout, nothing, heldout, nothing)
    assert asked == [*range(12, 24), *range(36, 41)]


def test_an_infinite_loss_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Any = SimpleNamespace(
        dp=1, dp_rank=0, pp_rank=0, last_stage_pp_rank=1, first_rank=lambda pp_rank: pp_rank
    )
    model: Any = SimpleNamespace(chunks=[])
    nothing: Any = None
    evaluation = Evaluation(TrainSettings(), layout, model, lambda _: nothing, nothing)
    monkeypatch.setattr(evaluation, "_step", lambda _: torch.tensor([math.nan, 1.0]))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_: None)
    with pytest.raises(RrfpError, match=r"held-out loss is nan.*; try a smaller --lr"):
        evaluation.loss()


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_every_dispatch_sees_the_same_heldout_loss(dp: int) -> None:
    settings = {**SETTINGS, "pp": 2, "dp": dp, "dropout": 0.0}
    variants: list[dict[str, Any]] = [
        {"dispatch": "megatron"},
        {"dispatch": "megatron", **EVERY_STEP},
        {"hint": "bf", **EVERY_STEP},
        {"hint": "bfw", **EVERY_STEP},
        {"hint": "zb-h1", "w": "ranked", **EVERY_STEP},
        {"dispatch": "fixed", "hint": "zb-h1", **EVERY_STEP},
    ]
    by_rank = run_ranks(2 * dp, train_variants, settings, variants, timeout_s=240)
    for rank, (plain, looked, *runs) in enumerate(by_rank):
        assert_same(rank, plain, looked)
        assert_unrecorded(rank, looked, plain)
        for run in runs:
            assert_same(rank, looked, run)
            assert run.heldout_losses == looked.heldout_losses
            assert {record.step for record in run.records} == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_images_are_worth_something(tmp_path: Path) -> None:
    """With the default settings, images make held-out captions far more predictable."""
    losses = {}
    for name, flags in {"seen": [], "blank": ["--blank-images"]}.items():
        out = tmp_path / name
        command = (
            *(sys.executable, "-m", "rrfp", "train", "--model", "vlm", "--hint", "bfw"),
            *("--seed", "1", "--no-trace", "--out", str(out)),
            *flags,
        )
        said = subprocess.run(command, capture_output=True, text=True, timeout=580, check=True)
        last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        losses[name] = last["heldout_loss"]
        assert f"Held-out loss {losses[name]:.4f}" in said.stderr
    assert losses["seen"] < 0.8 * losses["blank"]
