"""Megatron's .bin/.idx pairs: documents of tokens in a file, and the index of their sequences.

Imports Megatron only when a pair is opened: the launcher reads lengths alone.
"""

import hashlib
import json
import math
import os
import struct
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.inputs import read_text, sha256_of
from rrfp.requirements import install_hint
from rrfp.strict_json import parsed
from rrfp.trace.safe_files import create_new, write_whole
from rrfp.train.data.text_files import text_files, texts
from rrfp.train.settings import DataSettings

# The order of samples: each comes once per epoch, without a permutation in memory.


_GOLDEN_SECTION = (math.sqrt(5) - 1) / 2


def sample_at(index: int, num_samples: int, seed: int) -> int:
    """The sample at a place of the endless sequence. An epoch visits all samples in long strides,
    from a start of its own."""
    epoch, place = divmod(index, num_samples)
    start, stride = _strides_of_epoch(seed, epoch, num_samples)
    return (start + place * stride) % num_samples


@lru_cache(maxsize=8)
def _strides_of_epoch(seed: int, epoch: int, num_samples: int) -> tuple[int, int]:
    """Where an epoch starts, and its stride. The stride is coprime to the number of samples, so
    every sample comes once, and near the golden section, so successive samples are far apart in the
    data."""
    stride = round(num_samples * _GOLDEN_SECTION)
    while math.gcd(stride, num_samples) != 1:
        stride += 1
    return int(np.random.default_rng((seed, epoch)).integers(num_samples)), stride


# Documents of tokens with random access.
#
# Imports no torch, because the launcher checks the data before it starts any process.


DOCUMENT_END = 256
"""The token after each document whose other tokens are bytes."""

Tokens = npt.NDArray[np.int64]


class Corpus(Protocol):
    """Documents of tokens."""

    vocab_size: int
    """One more than the highest token."""
    lengths: Tokens
    """The number of tokens of each document, at least 1."""

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        """A document's tokens from `start` up to `stop`."""
        ...


class ByteCorpus:
    """Documents of bytes in memory, with a document end after each."""

    vocab_size = DOCUMENT_END + 1

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents = documents
        self.lengths: Tokens = np.array([len(document) + 1 for document in documents], np.int64)

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        text = self._documents[document]
        tokens = np.frombuffer(text[start:stop], np.uint8).astype(np.int64)
        return np.append(tokens, DOCUMENT_END) if stop > len(text) else tokens


def count_samples(lengths: Tokens, seq_length: int, *, variable_lengths: bool) -> int:
    """How many samples the documents give: windows of `seq_length` + 1 tokens or, with variable
    lengths, documents of at least two. Raises UsageError if there are none."""
    num_tokens = int(lengths.sum())
    if variable_lengths:
        num_samples = int((lengths > 1).sum())
        wanted = "a document of two tokens"
    else:
        num_samples = (num_tokens - 1) // seq_length
        wanted = f"{seq_length + 1}, one sequence and its next token"
    if num_samples < 1:
        raise UsageError(
            f"the data holds {num_tokens} tokens and needs {wanted}; give more text "
            "or a smaller --seq-length"
        )
    return num_samples


_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, type of the tokens, number of sequences, number of documents."""

_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""The size of a token, by Megatron's number of its type; 6 and 7 are floating point."""

MOST_TOKENS = 1 << 24
"""More than any vocabulary has. A model has a vector for each, so one token that is too large would
ask for all memory."""

_SCAN_TOKENS = 1 << 24

_WRITTEN_TYPES: tuple[tuple[int, type[np.integer[Any]]], ...] = ((8, np.uint16), (4, np.int32))
"""The types of the pairs that we write, by Megatron's numbers, the smallest first."""


class IndexedCorpus:
    """A Megatron .bin/.idx pair, memory-mapped by Megatron-Core's own reader.

    A document is one or several sequences, as the index says. Opening a pair reads every token
    once, to find the vocabulary, unless its size is known.
    """

    def __init__(self, prefix: Path, vocab_size: int | None = None) -> None:
        from rrfp.megatron.adapters.models import indexed_dataset

        self._first_sequences, self.lengths = indexed_documents(prefix)
        with warnings.catch_warnings():
            # Outside of a run Megatron warns that it does not know the rank, which it only logs.
            warnings.simplefilter("ignore")
            self._dataset = indexed_dataset(prefix)
        self.vocab_size = self._counted_vocabulary(prefix) if vocab_size is None else vocab_size

    def _counted_vocabulary(self, prefix: Path) -> int:
        data = with_suffix(prefix, ".bin")
        lowest, highest = _token_range(data, self._dataset.index.dtype)
        if lowest < 0 or highest >= MOST_TOKENS:
            raise UsageError(
                f"{data} holds the token {highest if lowest >= 0 else lowest}; tokens are numbered "
                f"from 0 to at most {MOST_TOKENS - 1}"
            )
        return highest + 1

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        # Sequences are end to end, so a read from the first one continues into the next.
        first = int(self._first_sequences[document])
        tokens: Tokens = self._dataset.get(first, start, stop - start).astype(np.int64)
        return tokens


def indexed_prefix(path: Path) -> Path | None:
    """The common prefix of a pair's two files, if the path names a pair: either of its files, or
    the prefix itself, as in Megatron's own options."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and with_suffix(path, ".bin").exists():
        return path
    return None


class IndexedDocuments(NamedTuple):
    """The non-empty documents of a pair."""

    first_sequences: Tokens
    """The first sequence of each document; its others follow."""
    lengths: Tokens
    """The number of tokens of each document, over all its sequences."""


def indexed_documents(prefix: Path) -> IndexedDocuments:
    """The documents of a pair. Raises UsageError if the pair is incomplete."""
    data, index = (with_suffix(prefix, suffix) for suffix in (".bin", ".idx"))
    for file in (data, index):
        if not file.is_file():
            raise UsageError(f"{file} does not exist; a Megatron data set is a .bin and an .idx")
    try:
        documents, token_bytes = _read_index(index)
    except OSError as error:
        raise UsageError(f"cannot read the data {index}: {error.strerror}; check --data") from None
    promised_bytes = int(documents.lengths.sum()) * token_bytes
    if promised_bytes == 0:
        raise UsageError(f"{data} holds no text; give --data something to train on")
    num_bytes = data.stat().st_size
    if num_bytes != promised_bytes:
        raise UsageError(
            f"{data} has {num_bytes} bytes where its .idx promises {promised_bytes}; build the "
            ".bin/.idx pair again"
        )
    return documents


def _read_index(path: Path) -> tuple[IndexedDocuments, int]:
    """The non-empty documents, and the bytes per token.

    Reads the index here because Megatron's own reader fails on a truncated one in ways that cannot
    all be caught.
    """
    with path.open("rb") as index:
        head = index.read(_INDEX_HEAD.size)
        if not head.startswith(_INDEX_MAGIC):
            raise UsageError(f"{path} is not a Megatron index; build the .bin/.idx pair again")
        num_bytes = path.stat().st_size
        if len(head) == _INDEX_HEAD.size:
            _, version, token_type, num_sequences, num_documents = _INDEX_HEAD.unpack(head)
            if version != 1:
                raise UsageError(f"{path} has index version {version}; this reader knows version 1")
            if token_type not in _TOKEN_BYTES:
                raise UsageError(
                    f"{path} has tokens of type {token_type}, which are not integers; build the "
                    ".bin/.idx pair again"
                )
            # Each sequence has a length and a position; each document has its first sequence, and
            # the last one also its end.
            if num_bytes >= _INDEX_HEAD.size + num_sequences * (4 + 8) + num_documents * 8:
                lengths = np.fromfile(index, np.int32, num_sequences)
                starts = np.fromfile(index, np.int64, num_sequences)
                bounds = np.fromfile(index, np.int64, num_documents)
                token_bytes = _TOKEN_BYTES[token_type]
                return _group(path, lengths, starts, bounds, token_bytes), token_bytes
    raise UsageError(f"{path} is cut off after {num_bytes} bytes; build the .bin/.idx pair again")


def _group(
    path: Path,
    lengths: npt.NDArray[np.int32],
    starts_bytes: Tokens,
    bounds: Tokens,
    token_bytes: int,
) -> IndexedDocuments:
    """Join the sequences between two bounds into a document."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if (lengths < 0).any() or not np.array_equal(starts_bytes, offsets[:-1] * token_bytes):
        raise UsageError(
            f"{path} does not have its sequences end to end; build the .bin/.idx pair again"
        )
    is_grouped = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(lengths)
    if not is_grouped or (bounds[1:] < bounds[:-1]).any():
        raise UsageError(
            f"{path} does not say to which document each of its {len(lengths)} sequences belongs; "
            "build the .bin/.idx pair again"
        )
    num_tokens = np.diff(offsets[bounds])
    holds_text = num_tokens > 0
    return IndexedDocuments(bounds[:-1][holds_text], num_tokens[holds_text])


def token_type(vocab_size: int) -> type[np.integer[Any]]:
    """The smallest type in which tokens below `vocab_size` are written."""
    return next(each for _, each in _WRITTEN_TYPES if vocab_size - 1 <= np.iinfo(each).max)


def write_index(
    prefix: Path,
    dtype: type[np.integer[Any]],
    lengths: npt.NDArray[np.int32],
    bounds: Tokens,
) -> None:
    """Write the .idx to a .bin of `dtype`: the number of tokens of each sequence, and the first
    sequence of each document, with the end of the last."""
    (number,) = (number for number, each in _WRITTEN_TYPES if each is dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    with create_new(with_suffix(prefix, ".idx")) as index:
        index.write(_INDEX_HEAD.pack(_INDEX_MAGIC, 1, number, len(lengths), len(bounds)))
        for table in (lengths, starts * np.dtype(dtype).itemsize, bounds):
            index.write(table.tobytes())


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Append a suffix; `Path.with_suffix` would replace what follows a dot in the prefix."""
    return prefix.with_name(prefix.name + suffix)


def _token_range(data: Path, dtype: npt.DTypeLike) -> tuple[int, int]:
    """The lowest token and the highest."""
    tokens = np.memmap(data, dtype, mode="r")
    lowest = highest = 0
    for start in range(0, len(tokens), _SCAN_TOKENS):
        part = tokens[start : start + _SCAN_TOKENS]
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    return lowest, highest


# Tokenizers of the library `tokenizers`, from their files alone: nothing is downloaded.
#
# Imports the library, which is an extra, only when a tokenizer is opened.


_FILE = "tokenizer.json"

_CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside it that may say which token ends a text."""

_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """Turns text into tokens, always into the same ones."""

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        """`path` is what --tokenizer names, `end_of_document` what --end-of-document does.

        Raises UsageError for what is no tokenizer, and for one that says nothing about the end of a
        document; RrfpError if the library is missing.
        """
        self.file = tokenizer_file(path)
        self._tokenizer = _opened(self.file)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"the tokenizer {self.file} has no tokens; name another one")
        self.vocab_size = max(vocabulary.values()) + 1
        """One more than the highest token."""
        if self.vocab_size > MOST_TOKENS:
            raise UsageError(
                f"the tokenizer {self.file} has the token {self.vocab_size - 1}; "
                f"{MOST_TOKENS - 1} is the largest that is taken"
            )
        self.end_of_document = _end_of(self.file, vocabulary, end_of_document)
        first, last = self._frame(vocabulary)
        end = vocabulary[self.end_of_document]
        self.first = first
        """What the tokenizer puts in front of a text, such as a beginning of sequence."""
        self.last = last if last[-1:] == [end] else [*last, end]
        """What it puts behind a text, and the end of the document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without `first` and `last`. Raises what the library raises for
        a text that it cannot encode."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def _frame(self, vocabulary: dict[str, int]) -> tuple[list[int], list[int]]:
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return [], []
        # Any text shows it that has a token of its own.
        for probe in chain("a", vocabulary):
            encoding = self._tokenizer.encode(probe)
            is_text = [mask == 0 for mask in encoding.special_tokens_mask]
            if any(is_text):
                num_first, num_last = is_text.index(True), is_text[::-1].index(True)
                return encoding.ids[:num_first], encoding.ids[len(is_text) - num_last :]
        raise UsageError(f"the tokenizer {self.file} encodes no text; name another one")


def tokenizer_file(path: Path) -> Path:
    """The file of the tokenizer that --tokenizer names: the file itself, or that of a folder.
    Raises UsageError if there is none."""
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {path}, and no tokenizer is downloaded by its name; give "
            f"--tokenizer a {_FILE}, or a folder that holds one (save_pretrained of a fast "
            "tokenizer)"
        )
    if not path.is_dir():
        return path
    file = path / _FILE
    if not file.is_file():
        raise UsageError(
            f"the folder {path} holds no {_FILE}; name the tokenizer's file, or save one there "
            "(save_pretrained of a fast tokenizer)"
        )
    return file


def named_end(file: Path) -> str | None:
    """The end of a text as the files beside the tokenizer's say it. Raises UsageError for a file
    that cannot be read."""
    for name in _CONFIGURATIONS:
        beside = file.with_name(name)
        if beside.is_file():
            told = _table(beside)
            token = told.get("eos_token")
            # Some write a token with its properties.
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


def _end_of(file: Path, vocabulary: dict[str, int], asked: str | None) -> str:
    named = named_end(file) if asked is None else asked
    if named is None:
        named = next((each for each in _USUAL_ENDS if each in vocabulary), None)
    if named is None:
        raise UsageError(
            f"the tokenizer {file} does not say which token ends a document; name it with "
            "--end-of-document"
        )
    if named not in vocabulary:
        raise UsageError(
            f"the tokenizer {file} has no token '{named}' to end a document with; name one with "
            "--end-of-document"
        )
    return named


def _table(file: Path) -> dict[str, Any]:
    text = read_text(str(file), "tokenizer")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the tokenizer {file} is not JSON ({error}); name another one") from None
    if not isinstance(told, dict):
        raise UsageError(f"the tokenizer {file} is no JSON object; name another one")
    return told


def _opened(file: Path) -> Any:
    told = _table(file)
    model = told.get("model")
    dropout = model.get("dropout") if isinstance(model, dict) else None
    if dropout:
        raise UsageError(
            f"the tokenizer {file} leaves merges out by chance (a dropout of {dropout}), so that "
            "no two runs would see the same tokens; set its model's dropout to null"
        )
    try:
        import tokenizers
    except ImportError:
        raise RrfpError(
            "--tokenizer needs the package tokenizers, which this installation lacks; "
            f"{install_hint('tokenizers')}"
        ) from None
    try:
        opened = tokenizers.Tokenizer.from_str(json.dumps(told))
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(
            f"{file} is no tokenizer of the library tokenizers ({first_line(str(error))}); name a "
            f"{_FILE}"
        ) from None
    # Both are meant for batches of a model, and would lose text or add to it.
    opened.no_truncation()
    opened.no_padding()
    return opened


# Text as tokens, encoded once: the tokens of files under a tokenizer lie in the user's cache, as a
# Megatron .bin/.idx pair, and every rank of every run maps them from there.
#
# Imports no torch: the launcher encodes before it starts any process.


_LAYOUT = 1
"""Part of the key; a new number makes every token anew."""

_PIECE_BYTES = 1 << 18
"""A text is encoded in pieces of about this size, cut at ends of lines, so that the memory for it
does not grow with its length."""
_BATCH_BYTES = 1 << 22
"""How much text is encoded at once, by the threads of the library."""


class Encoded(NamedTuple):
    """Tokens in the cache."""

    prefix: Path
    """Of the pair's two files."""
    vocab_size: int
    tokenizer: dict[str, Any]
    """What `run.json` says of it: its path, its digest, the vocabulary, the end of a document."""


def encoded(data: DataSettings, tell: Callable[[str], None] | None = None) -> Encoded:
    """The tokens of these data, from the cache if they are there. `tell` hears of it when a text
    has to be encoded, before and after.

    Raises UsageError for data or a tokenizer that cannot be used, and RrfpError if the library is
    missing or the cache cannot be written.
    """
    assert data.tokenizer is not None
    file = tokenizer_file(data.tokenizer)
    sha256 = _digest(file)
    prefix = _folder() / _key(data, file, sha256)
    found = _found(prefix, data.tokenizer)
    if found is not None:
        return found
    tokenizer = Tokenizer(data.tokenizer, data.end_of_document)
    if tell is not None:
        tell(f"Encoding {_name(data.path)} with {file}, once: later runs find the tokens")
    start_s = time.monotonic()
    told = {
        "sha256": sha256,
        "vocabulary": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
    }
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix="unfinished-") as name:
            draft = Path(name, "tokens")
            num_tokens = _write(draft, data, tokenizer)
            write_whole(with_suffix(draft, ".json"), f"{json.dumps(told, indent=2)}\n".encode())
            # The last one says that all are there.
            for suffix in (".bin", ".idx", ".json"):
                with_suffix(draft, suffix).replace(with_suffix(prefix, suffix))
    except OSError as error:
        raise RrfpError(
            f"cannot keep the tokens of {_name(data.path)} in {prefix.parent}: {error.strerror}; "
            "make room, or set XDG_CACHE_HOME to another folder"
        ) from None
    if tell is not None:
        seconds = time.monotonic() - start_s
        tell(f"Encoded {num_tokens} tokens in {seconds:.1f} s, into {with_suffix(prefix, '.bin')}")
    return Encoded(prefix, tokenizer.vocab_size, {"path": str(data.tokenizer), **told})


def _found(prefix: Path, tokenizer: Path) -> Encoded | None:
    """The tokens of this key, unless they are missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, UsageError):
        told = parsed(with_suffix(prefix, ".json").read_bytes())
        indexed_documents(prefix)
        return Encoded(prefix, int(told["vocabulary"]), {"path": str(tokenizer), **told})
    return None


def _key(data: DataSettings, file: Path, sha256: str) -> str:
    """What the tokens depend on, as a name: a file that was written to has another time."""
    states = [(str(each.resolve()), _state(each)) for each in text_files(data.path)]
    end = data.end_of_document or named_end(file)
    meant = (_LAYOUT, _library(), sha256, end, data.text_key, data.path is None, states)
    return hashlib.sha256(json.dumps(meant).encode()).hexdigest()[:32]


def _state(file: Path) -> tuple[int, int]:
    try:
        state = file.stat()
    except OSError as error:
        raise UsageError(f"cannot read the data {file}: {error.strerror}; check --data") from None
    return state.st_size, state.st_mtime_ns


def _digest(file: Path) -> str:
    try:
        return sha256_of(file)
    except OSError as error:
        raise UsageError(
            f"cannot read the tokenizer {file}: {error.strerror}; check --tokenizer"
        ) from None


def _library() -> str | None:
    """The version of the library: another one may encode otherwise."""
    try:
        return version("tokenizers")
    except PackageNotFoundError:
        return None


def _folder() -> Path:
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = asked if asked.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise RrfpError(
            "there is no home directory to keep tokens in; set XDG_CACHE_HOME to a folder"
        ) from None
    return cache / "rrfp" / "tokens"


def _name(path: Path | None) -> str:
    return "Python's standard library" if path is None else str(path)


class _Piece(NamedTuple):
    """A part of a document."""

    text: str
    place: str
    begins: bool
    """Whether it is the first of its document."""
    ends: bool
    """Whether it is the last."""


def _write(prefix: Path, data: DataSettings, tokenizer: Tokenizer) -> int:
    """Write the pair, with a sequence for each piece, and count its tokens."""
    dtype = token_type(tokenizer.vocab_size)
    lengths, bounds = array("i"), array("q", [0])
    num_of_text = 0
    with create_new(with_suffix(prefix, ".bin")) as file:
        for batch in _batches(_pieces(data)):
            for piece, tokens in zip(batch, _encode(tokenizer, batch), strict=True):
                num_of_text += len(tokens)
                first = tokenizer.first if piece.begins else []
                last = tokenizer.last if piece.ends else []
                whole = np.array([*first, *tokens, *last], dtype)
                file.write(whole.tobytes())
                lengths.append(len(whole))
                if piece.ends:
                    bounds.append(len(lengths))
    if num_of_text == 0:
        raise UsageError(
            f"the data {_name(data.path)} hold no text that {tokenizer.file} makes tokens of; give "
            "--data something to train on"
        )
    write_index(prefix, dtype, np.array(lengths, np.int32), np.array(bounds, np.int64))
    return sum(lengths)


def _encode(tokenizer: Tokenizer, batch: list[_Piece]) -> list[list[int]]:
    try:
        return tokenizer.encode([piece.text for piece in batch])
    except Exception:
        # One text was at fault; the library does not say which.
        return [_encode_alone(tokenizer, piece) for piece in batch]


def _encode_alone(tokenizer: Tokenizer, piece: _Piece) -> list[int]:
    try:
        (tokens,) = tokenizer.encode([piece.text])
    except Exception as error:
        raise UsageError(
            f"{piece.place}: the tokenizer {tokenizer.file} cannot encode this text "
            f"({first_line(str(error))}); change one of them"
        ) from None
    return tokens


def _pieces(data: DataSettings) -> Iterator[_Piece]:
    """The pieces of all documents that are not empty, in order."""
    for place, stream in texts(data.path, data.text_key):
        start, begins = 0, True
        lines = stream.readlines(_PIECE_BYTES)
        while lines:
            text = b"".join(lines)
            lines = stream.readlines(_PIECE_BYTES)
            yield _Piece(_decoded(text, place, start), place, begins, ends=not lines)
            start, begins = start + len(text), False


def _decoded(text: bytes, place: str, start: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place}: not UTF-8 text ({error.reason} at byte {start + error.start}); convert it, "
            "or leave --tokenizer out to take bytes as tokens"
        ) from None


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= _BATCH_BYTES:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
