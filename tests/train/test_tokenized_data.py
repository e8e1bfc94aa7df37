"""Text through a tokenizer of the library `tokenizers`: its tokens, the cache that keeps them, and
what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from rrfp.errors import RrfpError, UsageError
from rrfp.train.checks import check_settings
from rrfp.train.data import tokens as token_cache
from rrfp.train.data.batches import TextData
from rrfp.train.data.sources import check_data, document_lengths, open_corpus
from rrfp.train.data.tokens import Corpus, token_type, write_index
from rrfp.train.settings import DataSettings, TrainSettings
from tests.train.trained import TINY, rrfp

TEXTS = [
    "the pipeline waits for nobody\nand nobody waits",
    "a ready stage runs",
    "die Rohrleitung wärmt 🚀",
]
END = "</s>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the token cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rrfp" / "tokens"


def train_tokenizer(folder: Path, *specials: str, frame: str = "") -> Path:
    """A byte-level BPE that knows any text; `frame` is what it puts around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        TEXTS * 2,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, special_tokens=[(each, tokenizer.token_to_id(each)) for each in specials]
        )
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return train_tokenizer(tmp_path, END)


def change(tokenizer: Path, **fields: Any) -> None:
    """Write other fields into a tokenizer's file."""
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | fields))


def write_jsonl(path: Path, texts: list[str] = TEXTS, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts))
    return path


def write_parquet(path: Path, texts: list[str] = TEXTS, key: str = "text") -> Path:
    pl.DataFrame({"id": range(len(texts)), key: texts}).write_parquet(path)
    return path


def documents(corpus: Corpus) -> list[list[int]]:
    return [
        corpus.tokens(index, 0, int(length)).tolist() for index, length in enumerate(corpus.lengths)
    ]


def library_tokens(tokenizer: Path, *texts: str) -> list[list[int | None]]:
    """As the library itself encodes them, each with its end."""
    library = Tokenizer.from_file(str(tokenizer))
    end = library.token_to_id(END)
    return [[*library.encode(text).ids, end] for text in texts]


def test_lines_rows_and_files_are_documents(tmp_path: Path, tokenizer: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    write_jsonl(texts / "a.jsonl", ["", *TEXTS])
    write_parquet(texts / "b.parquet", [*TEXTS, ""])
    (texts / "c.txt").write_text(TEXTS[0])
    (texts / "d.txt").touch()
    data = DataSettings(path=texts, tokenizer=tokenizer)
    lengths = document_lengths(data)
    corpus = open_corpus(data)
    assert documents(corpus) == library_tokens(tokenizer, *TEXTS, *TEXTS, TEXTS[0])
    assert corpus.lengths.tolist() == lengths.tolist()
    assert corpus.vocab_size == Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    first = documents(corpus)[0]
    assert corpus.tokens(0, 2, 7).tolist() == first[2:7]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_the_text_may_have_another_name(tmp_path: Path, write: Callable[..., Path]) -> None:
    suffix = write.__name__.removeprefix("write_")
    path = write(tmp_path / f"a.{suffix}", key="content")
    corpus = open_corpus(DataSettings(path=path, text_key="content"))
    assert documents(corpus) == [[*text.encode(), 256] for text in TEXTS]


@pytest.mark.parametrize(
    ("frame", "around"),
    [
        ("<s> $A", (["<s>"], [END])),
        (f"<s> $A {END}", (["<s>"], [END])),
        ("$A <s>", ([], ["<s>", END])),
    ],
)
def test_special_tokens_stand_around_a_document_however_long_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame: str, around: tuple[list[str], list[str]]
) -> None:
    monkeypatch.setattr(token_cache, "_PIECE_BYTES", 40)
    tokenizer = train_tokenizer(tmp_path, "<s>", END, frame=frame)
    lines = [f"line {number} of a text\n" for number in range(12)]
    corpus = open_corpus(
        DataSettings(
            path=write_jsonl(tmp_path / "a.jsonl", ["".join(lines), "b"]), tokenizer=tokenizer
        )
    )
    library = Tokenizer.from_file(str(tokenizer))
    begin, end = ([library.token_to_id(token) for token in tokens] for tokens in around)
    # Byte-level tokens do not reach over the end of a line that a letter follows.
    inner = [
        token for line in lines for token in library.encode(line, add_special_tokens=False).ids
    ]
    assert documents(corpus)[0] == [*begin, *inner, *end]
    assert documents(corpus)[1] == [*begin, library.token_to_id("b"), *end]


def test_a_tokenizer_that_cuts_and_pads_loses_nothing(tmp_path: Path, tokenizer: Path) -> None:
    whole = library_tokens(tokenizer, *TEXTS)
    library = Tokenizer.from_file(str(tokenizer))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tokenizer))
    data = DataSettings(path=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer)
    assert documents(open_corpus(data)) == whole


@pytest.mark.parametrize(
    ("beside", "asked", "expected"),
    [
        ({}, None, END),
        ({}, "<x>", "<x>"),
        ({"tokenizer_config.json": {"eos_token": "<x>"}}, None, "<x>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<x>"}}}, None, "<x>"),
        ({"special_tokens_map.json": {"eos_token": "<x>"}}, None, "<x>"),
        ({"tokenizer_config.json": {"eos_token": "<x>"}}, END, END),
        ({"tokenizer_config.json": {"eos_token": None}}, None, END),
    ],
)
def test_who_says_which_token_ends_a_document(
    tmp_path: Path, beside: dict[str, Any], asked: str | None, expected: str
) -> None:
    tokenizer = train_tokenizer(tmp_path, END, "<x>")
    for name, told in beside.items():
        (tmp_path / name).write_text(json.dumps(told))
    path = write_jsonl(tmp_path / "a.jsonl")
    corpus = open_corpus(DataSettings(path=path, tokenizer=tmp_path, end_of_document=asked))
    end = Tokenizer.from_file(str(tokenizer)).token_to_id(expected)
    assert [document[-1] for document in documents(corpus)] == [end] * len(TEXTS)


def test_text_is_encoded_once(
    tmp_path: Path, tokenizer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSettings(path=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer)
    told: list[str] = []
    document_lengths(data, told.append)
    assert [sentence.split()[0] for sentence in told] == ["Encoding", "Encoded"]
    expected = documents(open_corpus(data))
    kept = sorted(cache.iterdir())
    assert [file.suffix for file in kept] == [".bin", ".idx", ".json"]
    with monkeypatch.context() as without:
        # Ranks need no library: it is as if it were not installed.
        without.setitem(sys.modules, "tokenizers", None)
        document_lengths(data, told.append)
        assert documents(open_corpus(data)) == expected
    assert len(told) == 2
    # A truncated entry is written again.
    kept[0].write_bytes(kept[0].read_bytes()[:-2])
    assert documents(open_corpus(data)) == expected
    # Other text, and another tokenizer, have other tokens.
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:1])
    assert documents(open_corpus(data)) == expected[:1]
    train_tokenizer(tmp_path, "<x>", END)
    assert documents(open_corpus(data)) == library_tokens(tokenizer, TEXTS[0]) != expected[:1]
    assert len([*cache.iterdir()]) == 9


def test_a_large_vocabulary_takes_larger_tokens(tmp_path: Path) -> None:
    assert [token_type(size).__name__ for size in (2, 2**16, 2**16 + 1)] == [
        "uint16",
        "uint16",
        "int32",
    ]

    from rrfp.train.data.tokens import IndexedCorpus

    tokens = np.array([1, 2**17, 3], token_type(2**17 + 1))
    tokens.tofile(tmp_path / "d.bin")
    lengths, bounds = np.array([2, 1], np.int32), np.array([0, 1, 2])
    write_index(tmp_path / "d", token_type(2**17 + 1), lengths, bounds)
    assert documents(IndexedCorpus(tmp_path / "d")) == [[1, 2**17], [3]]


def test_batches_do_not_depend_on_what_was_asked_before(tmp_path: Path, tokenizer: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 3)
    settings = TrainSettings(data=path, tokenizer=tokenizer, seq_length=8)
    first, second = (TextData(settings).batches(0) for _ in range(2))
    in_order = [first.batch(step, 1)["tokens"].tolist() for step in range(4)]
    backwards = [second.batch(step, 1)["tokens"].tolist() for step in (3, 2, 1, 0)]
    assert in_order == backwards[::-1]
    assert in_order[0] != in_order[1]


def write_bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

    return write


def write_other_column(folder: Path) -> Path:
    return write_parquet(folder / "a.parquet", key="body")


def write_numbers(folder: Path) -> Path:
    pl.DataFrame({"text": [1, 2]}).write_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def write_null(folder: Path) -> Path:
    pl.DataFrame({"text": ["a", None]}).write_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def write_cut_parquet(folder: Path) -> Path:
    path = write_parquet(folder / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    return path


def write_damaged_parquet(folder: Path) -> Path:
    path = folder / "a.parquet"
    pl.DataFrame({"text": [f"text {number}" for number in range(99)]}).write_parquet(path)
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: folder / "no.jsonl", "no.jsonl: No such file"),
        (lambda folder: folder / "no.parquet", "no.parquet: No such file"),
        (write_bytes("a.jsonl", b'{"text": "a"}\n{"te'), "a.jsonl, line 2: not JSON"),
        (write_bytes("a.jsonl", b'\n{"body": "a"}'), "a.jsonl, line 2: no string field 'text'"),
        (write_bytes("a.jsonl", b'{"text": "\xff"}'), "a.jsonl, line 1: not UTF-8 text"),
        (write_bytes("a.jsonl", b'{"text": "\\ud800"}'), "a.jsonl, line 1: not UTF-8 text"),
        (write_bytes("a.txt", b"a\n" * 200_000 + b"\xff"), "start byte at byte 400000); convert"),
        (write_bytes("a.txt", b""), "a.txt hold no text"),
        (write_bytes("a.jsonl", b'{"text": ""}'), "a.jsonl hold no text"),
        (write_bytes("a.parquet", b"PAR1 and no more"), "a.parquet cannot be read as Parquet"),
        (write_bytes("a.parquet", b""), "a.parquet cannot be read as Parquet"),
        (write_cut_parquet, "a.parquet cannot be read as Parquet"),
        (write_damaged_parquet, "a.parquet cannot be read as Parquet"),
        (write_other_column, "no column 'text'; name one of id, body with --text-key"),
        (write_numbers, "the column 'text' of"),
        (write_null, "a.parquet, row 2: no text"),
        (write_bytes("a.bin", b"1234"), "holds tokens, not text, and --tokenizer takes text"),
    ],
)
def test_wrong_data_are_refused_in_a_sentence_before_anything_starts(
    tmp_path: Path, tokenizer: Path, cache: Path, write: Callable[[Path], Path], words: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    settings = TrainSettings(data=write(folder), tokenizer=tokenizer)
    with pytest.raises(UsageError) as refused:
        check_data(settings)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not cache.is_dir() or not [*cache.iterdir()]


def set_dropout(tokenizer: Path) -> None:
    change(tokenizer, model={**json.loads(tokenizer.read_text())["model"], "dropout": 0.1})


def empty_vocabulary(tokenizer: Path) -> None:
    Tokenizer(models.BPE()).save(str(tokenizer))


def know_few_words(tokenizer: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, END: 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tokenizer))


def beside(name: str, content: str) -> Callable[[Path], object]:
    return lambda tokenizer: tokenizer.with_name(name).write_text(content)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            Path.unlink,
            "tokenizer.json, and no tokenizer is downloaded by its name; give",
        ),
        (lambda file: file.write_bytes(b"\xff\xfe"), "it is not UTF-8 text"),
        (lambda file: file.write_text("{"), "tokenizer.json is not JSON"),
        (lambda file: file.write_text("[]"), "tokenizer.json is no JSON object"),
        (lambda file: file.write_text("{}"), "is no tokenizer of the library tokenizers"),
        (lambda file: change(file, model={"type": "none"}), "is no tokenizer of the library"),
        (set_dropout, "leaves merges out by chance (a dropout of 0.1)"),
        (empty_vocabulary, "has no tokens"),
        (know_few_words, "a.jsonl, line 1: the tokenizer"),
        (lambda file: train_tokenizer(file.parent, "<x>"), "does not say which token ends"),
        (beside("tokenizer_config.json", '{"eos_token": "<y>"}'), "has no token '<y>'"),
        (beside("tokenizer_config.json", "{"), "tokenizer_config.json is not JSON"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_a_sentence(
    tmp_path: Path, tokenizer: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(tokenizer)
    settings = TrainSettings(data=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer)
    with pytest.raises(UsageError) as refused:
        check_data(settings)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    data = DataSettings(path=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tmp_path)
    with pytest.raises(UsageError, match=r"holds no tokenizer\.json"):
        document_lengths(data)


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    data = DataSettings(path=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer)
    with pytest.raises(RrfpError, match=r"pip install '\.\[tokenizers\]'"):
        document_lengths(data)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    data = DataSettings(path=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer)
    with pytest.raises(RrfpError, match="Not a directory; make room, or set XDG_CACHE_HOME"):
        document_lengths(data)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": "vlm", "tokenizer": "t.json"}, "leave --tokenizer and --text-key out"),
        ({"model": "vlm", "text_key": "body"}, "leave --tokenizer and --text-key out"),
        ({"end_of_document": END}, "add --tokenizer or leave it out"),
    ],
)
def test_settings_that_do_not_go_together(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_settings(TrainSettings(**flags))


def test_a_run_on_tokens_says_whose_they_are(tmp_path: Path, tokenizer: Path) -> None:
    write_parquet(tmp_path / "a.parquet", TEXTS * 20)
    flags = ("--pp=2", "--steps=2", "--no-trace", "--tokenizer", "tokenizer.json", *TINY)
    done = rrfp(tmp_path, "train", "--data", "a.parquet", "--out", "run", *flags)
    assert done.returncode == 0, done.stderr
    assert "Encoding a.parquet with tokenizer.json, once" in done.stderr
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["tokenizer"]["path"] == "tokenizer.json"
    assert len(told["tokenizer"]["sha256"]) == 64
    size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    assert told["tokenizer"]["vocabulary"] == size
    assert told["tokenizer"]["end_of_document"] == END


def test_tokens_too_large_for_any_vocabulary_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    """The model would have a vector for each."""
    lengths, bounds = np.array([3], np.int32), np.array([0, 1])
    write_index(tmp_path / "pair", np.int32, lengths, bounds)
    (tmp_path / "pair.bin").write_bytes(np.array([1, 2**31 - 1, 2], np.int32).tobytes())
    with pytest.raises(UsageError, match=r"pair\.bin holds the token 2147483647"):
        open_corpus(DataSettings(path=tmp_path / "pair"))
    told = json.loads(tokenizer.read_text())
    model = told["model"]
    change(tokenizer, model={**model, "vocab": {**model["vocab"], "zz": 2**31}})
    with pytest.raises(UsageError, match="has the token"):
        open_corpus(DataSettings(path=write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer))
