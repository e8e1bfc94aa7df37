"""Documents of tokens: bytes, Megatron's .bin/.idx pairs, and text encoded by a tokenizer.

Imports no torch, and Megatron only when a pair is opened: the launcher checks the data before it
starts any process.
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
from rrfp.train.data.text_files import read_texts, text_files
from rrfp.train.settings import DataSettings

# The order of samples: each appears once per epoch, without a permutation in memory.


_GOLDEN_SECTION = (math.sqrt(5) - 1) / 2


def sample_at(index: int, num_samples: int, seed: int) -> int:
    """Return the number of the sample at an index of the endless sequence of samples. Each epoch
    visits all samples once, in long strides, from a start that the seed determines."""
    epoch, place = divmod(index, num_samples)
    start, stride = _start_and_stride(seed, epoch, num_samples)
    return (start + place * stride) % num_samples


@lru_cache(maxsize=8)
def _start_and_stride(seed: int, epoch: int, num_samples: int) -> tuple[int, int]:
    """Return the first sample and the stride of an epoch. The stride is coprime to the number of
    samples, so every sample appears once, and near the golden section, so successive samples are
    far apart."""
    stride = round(num_samples * _GOLDEN_SECTION)
    while math.gcd(stride, num_samples) != 1:
        stride += 1
    return int(np.random.default_rng((seed, epoch)).integers(num_samples)), stride


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
        """Return the tokens of a document from `start` up to, excluding, `stop`."""
        ...


class ByteCorpus:
    """Documents in memory with one token per byte, and `DOCUMENT_END` after each."""

    vocab_size = DOCUMENT_END + 1

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents = documents
        self.lengths: Tokens = np.array([len(document) + 1 for document in documents], np.int64)

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        """Return the bytes of a document from `start` up to `stop` as tokens, followed by
        `DOCUMENT_END` if `stop` lies beyond the text."""
        text = self._documents[document]
        tokens = np.frombuffer(text[start:stop], np.uint8).astype(np.int64)
        return np.append(tokens, DOCUMENT_END) if stop > len(text) else tokens


def count_samples(lengths: Tokens, seq_length: int, *, variable_lengths: bool) -> int:
    """Return the number of samples: windows of `seq_length` + 1 tokens that share one token with
    the next or, with variable lengths, documents of at least two tokens. Raise UsageError if it is
    0."""
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
"""Magic, version, token type, number of sequences, number of document bounds."""

_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Bytes per token, by Megatron's number of the token type; 6 and 7 are floating point."""

MAX_VOCAB_SIZE = 1 << 24
"""More than any vocabulary has. A model has a vector per token, so a single huge token would
require all memory."""

_SCAN_TOKENS = 1 << 24

_WRITTEN_TYPES: tuple[tuple[int, type[np.integer[Any]]], ...] = ((8, np.uint16), (4, np.int32))
"""The token types of pairs that rrfp writes, with Megatron's numbers, smallest first."""


class IndexedCorpus:
    """A Megatron .bin/.idx pair, memory-mapped by Megatron-Core's own reader.

    A document has one or several sequences. Unless the size of the vocabulary is given, opening a
    pair reads every token once to find it.
    """

    def __init__(self, prefix: Path, vocab_size: int | None = None) -> None:
        from rrfp.megatron.adapters.models import indexed_dataset

        self._first_sequences, self.lengths = indexed_documents(prefix)
        with warnings.catch_warnings():
            # Outside of a run Megatron warns that the rank, which it only logs, is unknown.
            warnings.simplefilter("ignore")
            self._dataset = indexed_dataset(prefix)
        self.vocab_size = self._find_vocab_size(prefix) if vocab_size is None else vocab_size

    def _find_vocab_size(self, prefix: Path) -> int:
        """Read every token of the pair and return one more than the highest. Raise UsageError for a
        negative or too large token."""
        data = with_suffix(prefix, ".bin")
        lowest, highest = _token_range(data, self._dataset.index.dtype)
        if lowest < 0 or highest >= MAX_VOCAB_SIZE:
            raise UsageError(
                f"{data} holds the token {highest if lowest >= 0 else lowest}; tokens are numbered "
                f"from 0 to at most {MAX_VOCAB_SIZE - 1}"
            )
        return highest + 1

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        """Read the tokens of a document from `start` up to, excluding, `stop`, across its
        sequences."""
        # Sequences are stored end to end, so a read may continue into the next one.
        first = int(self._first_sequences[document])
        tokens: Tokens = self._dataset.get(first, start, stop - start).astype(np.int64)
        return tokens


def indexed_prefix(path: Path) -> Path | None:
    """Return the prefix of a pair if the path is one of its files by suffix (which may not exist)
    or, as in Megatron's options, is no file itself but the prefix of an existing .bin; else
    None."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and with_suffix(path, ".bin").exists():
        return path
    return None


class IndexedDocuments(NamedTuple):
    """The non-empty documents of a pair."""

    first_sequences: Tokens
    """The index of the first sequence of each document."""
    lengths: Tokens
    """The number of tokens of each document."""


def indexed_documents(prefix: Path) -> IndexedDocuments:
    """Read the index of a pair and return its non-empty documents. Raise UsageError if the pair is
    incomplete, damaged or without text."""
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
    """Read a .idx; return its non-empty documents and the bytes per token. Raise UsageError for
    anything but a whole index with integer tokens. (Megatron's own reader fails on a truncated
    index in ways that cannot all be caught.)"""
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
            # A sequence has a length and a position. The bounds are the first sequence of each
            # document, and the end of the last.
            if num_bytes >= _INDEX_HEAD.size + num_sequences * (4 + 8) + num_documents * 8:
                lengths = np.fromfile(index, np.int32, num_sequences)
                starts = np.fromfile(index, np.int64, num_sequences)
                bounds = np.fromfile(index, np.int64, num_documents)
                token_bytes = _TOKEN_BYTES[token_type]
                return _group_sequences(path, lengths, starts, bounds, token_bytes), token_bytes
    raise UsageError(f"{path} is cut off after {num_bytes} bytes; build the .bin/.idx pair again")


def _group_sequences(
    path: Path,
    lengths: npt.NDArray[np.int32],
    starts_bytes: Tokens,
    bounds: Tokens,
    token_bytes: int,
) -> IndexedDocuments:
    """Group sequences into documents, and drop empty documents. Raise UsageError for an
    inconsistent index."""
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
    """Return the smallest token type, uint16 or int32, for a vocabulary of `vocab_size`."""
    return next(each for _, each in _WRITTEN_TYPES if vocab_size - 1 <= np.iinfo(each).max)


def write_index(
    prefix: Path,
    dtype: type[np.integer[Any]],
    lengths: npt.NDArray[np.int32],
    bounds: Tokens,
) -> None:
    """Write a new .idx for a .bin with tokens of `dtype`, uint16 or int32. `lengths` are the
    numbers of tokens of the sequences; `bounds` the first sequence of each document, and the end of
    the last."""
    (number,) = (number for number, each in _WRITTEN_TYPES if each is dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    with create_new(with_suffix(prefix, ".idx")) as index:
        index.write(_INDEX_HEAD.pack(_INDEX_MAGIC, 1, number, len(lengths), len(bounds)))
        for table in (lengths, starts * np.dtype(dtype).itemsize, bounds):
            index.write(table.tobytes())


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Append a suffix to a path's name; `Path.with_suffix` would replace the part after a dot."""
    return prefix.with_name(prefix.name + suffix)


def _token_range(data: Path, dtype: npt.DTypeLike) -> tuple[int, int]:
    """Read a whole .bin in parts; return its lowest and its highest token, counting 0 as one of
    them."""
    tokens = np.memmap(data, dtype, mode="r")
    lowest = highest = 0
    for start in range(0, len(tokens), _SCAN_TOKENS):
        part = tokens[start : start + _SCAN_TOKENS]
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    return lowest, highest


# Tokenizers of the library `tokenizers`, from local files only. The library is an optional extra
# and is imported when a tokenizer is opened.


_FILE = "tokenizer.json"

_CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside the tokenizer's that may name the token that ends a text."""

_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer:
    """Encodes text deterministically."""

    def __init__(self, path: Path, end_of_document: str | None) -> None:
        """`path` and `end_of_document` are the values of --tokenizer and --end-of-document.

        Raises UsageError if the file is no tokenizer or the token that ends a document is unknown,
        and RrfpError if the library is missing.
        """
        self.file = tokenizer_file(path)
        self._tokenizer = _open_tokenizer(self.file)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"the tokenizer {self.file} has no tokens; name another one")
        self.vocab_size = max(vocabulary.values()) + 1
        """One more than the highest token."""
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise UsageError(
                f"the tokenizer {self.file} has the token {self.vocab_size - 1}; "
                f"{MAX_VOCAB_SIZE - 1} is the largest that is taken"
            )
        self.end_of_document = _end_token(self.file, vocabulary, end_of_document)
        first, last = self._special_tokens(vocabulary)
        end = vocabulary[self.end_of_document]
        self.first = first
        """The tokens before a text, such as a beginning of sequence."""
        self.last = last if last[-1:] == [end] else [*last, end]
        """The tokens after a text, the last of which ends the document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as a list of tokens, without `first` and `last`. May raise any exception
        of the library."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def _special_tokens(self, vocabulary: dict[str, int]) -> tuple[list[int], list[int]]:
        """Find the special tokens that the tokenizer adds before and after a text, by encoding a
        trial text. Raise UsageError if it encodes none."""
        if self._tokenizer.num_special_tokens_to_add(is_pair=False) == 0:
            return [], []
        # Found by encoding a text that has at least one ordinary token.
        for probe in chain("a", vocabulary):
            encoding = self._tokenizer.encode(probe)
            is_text = [mask == 0 for mask in encoding.special_tokens_mask]
            if any(is_text):
                num_first, num_last = is_text.index(True), is_text[::-1].index(True)
                return encoding.ids[:num_first], encoding.ids[len(is_text) - num_last :]
        raise UsageError(f"the tokenizer {self.file} encodes no text; name another one")


def tokenizer_file(path: Path) -> Path:
    """Return the file of a tokenizer: the path itself, or the tokenizer.json in that folder. Raise
    UsageError if it does not exist; nothing is downloaded."""
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


def configured_end_token(file: Path) -> str | None:
    """Return the token that ends a text by the configuration files beside a tokenizer's file; None
    if none names one. Raise UsageError for a file that cannot be read."""
    for name in _CONFIGURATIONS:
        beside = file.with_name(name)
        if beside.is_file():
            token = _read_json_fields(beside).get("eos_token")
            # Some files have an object with the token's properties.
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


def _end_token(file: Path, vocabulary: dict[str, int], asked: str | None) -> str:
    """Return the token that ends a document: the one asked for, else the configured one, else one
    with a usual name. Raise UsageError if all are missing or the vocabulary lacks it."""
    token = configured_end_token(file) if asked is None else asked
    if token is None:
        token = next((each for each in _USUAL_END_TOKENS if each in vocabulary), None)
    if token is None:
        raise UsageError(
            f"the tokenizer {file} does not say which token ends a document; name it with "
            "--end-of-document"
        )
    if token not in vocabulary:
        raise UsageError(
            f"the tokenizer {file} has no token '{token}' to end a document with; name one with "
            "--end-of-document"
        )
    return token


def _read_json_fields(file: Path) -> dict[str, Any]:
    """Read the JSON object in a tokenizer's file. Raise UsageError if it cannot be read or is
    anything else."""
    text = read_text(str(file), "tokenizer")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the tokenizer {file} is not JSON ({error}); name another one") from None
    if not isinstance(found, dict):
        raise UsageError(f"the tokenizer {file} is no JSON object; name another one")
    return found


def _open_tokenizer(file: Path) -> Any:
    """Load a tokenizer, with truncation and padding off. Raise UsageError for a file of anything
    else or one that leaves merges out by chance, and RrfpError if the library is missing."""
    definition = _read_json_fields(file)
    model = definition.get("model")
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
        opened = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(
            f"{file} is no tokenizer of the library tokenizers ({first_line(str(error))}); name a "
            f"{_FILE}"
        ) from None
    # Both are for batches of a model, and would cut or extend texts.
    opened.no_truncation()
    opened.no_padding()
    return opened


# The cache of encoded text. The launcher encodes text once, into a Megatron .bin/.idx pair in the
# user's cache directory, and all ranks of all runs map it from there.


_VERSION = 1
"""Part of the key; a new number invalidates the cache."""

_PIECE_BYTES = 1 << 18
"""Texts are encoded in pieces of about this size, cut at ends of lines, to limit memory."""
_BATCH_BYTES = 1 << 22
"""The amount of text that the library's threads encode at once."""


class CachedTokens(NamedTuple):
    """An entry of the cache."""

    prefix: Path
    """The prefix of the pair's files."""
    vocab_size: int
    tokenizer: dict[str, Any]
    """The entry of `run.json`: path, digest, vocabulary and the token that ends a document."""


def cached_tokens(data: DataSettings, report: Callable[[str], None] | None = None) -> CachedTokens:
    """Return the tokens of text data from the user's cache, after encoding them into it if they are
    not there. `report` receives sentences before and after encoding.

    Raise UsageError for unusable data or an unusable tokenizer, and RrfpError if the library is
    missing or the cache cannot be written.
    """
    assert data.tokenizer is not None
    file = tokenizer_file(data.tokenizer)
    sha256 = _digest(file)
    prefix = _cache_directory() / _key(data, file, sha256)
    found = _find(prefix, data.tokenizer)
    if found is not None:
        return found
    tokenizer = Tokenizer(data.tokenizer, data.end_of_document)
    if report is not None:
        report(f"Encoding {_name(data.path)} with {file}, once: later runs find the tokens")
    start_s = time.monotonic()
    description = {
        "sha256": sha256,
        "vocabulary": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
    }
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix="unfinished-") as name:
            draft = Path(name, "tokens")
            num_tokens = _write(draft, data, tokenizer)
            write_whole(
                with_suffix(draft, ".json"), f"{json.dumps(description, indent=2)}\n".encode()
            )
            # The .json comes last: it marks the entry as complete.
            for suffix in (".bin", ".idx", ".json"):
                with_suffix(draft, suffix).replace(with_suffix(prefix, suffix))
    except OSError as error:
        raise RrfpError(
            f"cannot keep the tokens of {_name(data.path)} in {prefix.parent}: {error.strerror}; "
            "make room, or set XDG_CACHE_HOME to another folder"
        ) from None
    if report is not None:
        seconds = time.monotonic() - start_s
        report(
            f"Encoded {num_tokens} tokens in {seconds:.1f} s, into {with_suffix(prefix, '.bin')}"
        )
    return CachedTokens(prefix, tokenizer.vocab_size, {"path": str(data.tokenizer), **description})


def _find(prefix: Path, tokenizer: Path) -> CachedTokens | None:
    """Return the entry of the cache with this prefix; None if it is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, UsageError):
        found = parsed(with_suffix(prefix, ".json").read_bytes())
        indexed_documents(prefix)
        return CachedTokens(prefix, int(found["vocabulary"]), {"path": str(tokenizer), **found})
    return None


def _key(data: DataSettings, file: Path, sha256: str) -> str:
    """Return the name of a cache entry: a digest of everything on which the tokens depend, with the
    sizes and modification times of the data's files, not their contents. Raise UsageError if one
    cannot be read."""
    states = [(str(each.resolve()), _state(each)) for each in text_files(data.path)]
    end = data.end_of_document or configured_end_token(file)
    parts = (_VERSION, _library(), sha256, end, data.text_key, data.path is None, states)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _state(file: Path) -> tuple[int, int]:
    """Return the size and the modification time in ns of a file. Raise UsageError if it cannot be
    read."""
    try:
        state = file.stat()
    except OSError as error:
        raise UsageError(f"cannot read the data {file}: {error.strerror}; check --data") from None
    return state.st_size, state.st_mtime_ns


def _digest(file: Path) -> str:
    """Return the SHA-256 of the tokenizer's file. Raise UsageError if it cannot be read."""
    try:
        return sha256_of(file)
    except OSError as error:
        raise UsageError(
            f"cannot read the tokenizer {file}: {error.strerror}; check --tokenizer"
        ) from None


def _library() -> str | None:
    """Return the version of the library `tokenizers`, another version of which may encode
    differently; None if it is not installed."""
    try:
        return version("tokenizers")
    except PackageNotFoundError:
        return None


def _cache_directory() -> Path:
    """Return the directory of the cache, in XDG_CACHE_HOME or else ~/.cache, without creating it.
    Raise RrfpError if there is no home directory."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = asked if asked.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise RrfpError(
            "there is no home directory to keep tokens in; set XDG_CACHE_HOME to a folder"
        ) from None
    return cache / "rrfp" / "tokens"


def _name(path: Path | None) -> str:
    """Name the data for messages: its path, or Python's standard library for None."""
    return "Python's standard library" if path is None else str(path)


class _Piece(NamedTuple):
    """A part of a document."""

    text: str
    place: str
    begins: bool
    """True for the first piece of its document."""
    ends: bool
    """True for the last piece."""


def _write(prefix: Path, data: DataSettings, tokenizer: Tokenizer) -> int:
    """Encode all documents, with `first` before and `last` after each, into a new pair at `prefix`,
    with a sequence per piece; return the number of tokens. Raise UsageError if the texts have no
    tokens or one cannot be encoded."""
    dtype = token_type(tokenizer.vocab_size)
    lengths, bounds = array("i"), array("q", [0])
    num_text_tokens = 0
    with create_new(with_suffix(prefix, ".bin")) as file:
        for batch in _batches(_pieces(data)):
            for piece, tokens in zip(batch, _encode(tokenizer, batch), strict=True):
                num_text_tokens += len(tokens)
                first = tokenizer.first if piece.begins else []
                last = tokenizer.last if piece.ends else []
                whole = np.array([*first, *tokens, *last], dtype)
                file.write(whole.tobytes())
                lengths.append(len(whole))
                if piece.ends:
                    bounds.append(len(lengths))
    if num_text_tokens == 0:
        raise UsageError(
            f"the data {_name(data.path)} hold no text that {tokenizer.file} makes tokens of; give "
            "--data something to train on"
        )
    write_index(prefix, dtype, np.array(lengths, np.int32), np.array(bounds, np.int64))
    return sum(lengths)


def _encode(tokenizer: Tokenizer, batch: list[_Piece]) -> list[list[int]]:
    """Encode pieces of text together; on an error, encode them one by one, to raise a UsageError
    that names the one that fails."""
    try:
        return tokenizer.encode([piece.text for piece in batch])
    except Exception:
        # The library does not report which text failed.
        return [_encode_alone(tokenizer, piece) for piece in batch]


def _encode_alone(tokenizer: Tokenizer, piece: _Piece) -> list[int]:
    """Encode one piece of text. Raise UsageError with its place if the library raises anything."""
    try:
        (tokens,) = tokenizer.encode([piece.text])
    except Exception as error:
        raise UsageError(
            f"{piece.place}: the tokenizer {tokenizer.file} cannot encode this text "
            f"({first_line(str(error))}); change one of them"
        ) from None
    return tokens


def _pieces(data: DataSettings) -> Iterator[_Piece]:
    """Yield the documents that have text in pieces of about 256 KiB, cut at ends of lines, in
    order. Raise UsageError for text that is not UTF-8."""
    for place, stream in read_texts(data.path, data.text_key):
        start, begins = 0, True
        lines = stream.readlines(_PIECE_BYTES)
        while lines:
            text = b"".join(lines)
            lines = stream.readlines(_PIECE_BYTES)
            yield _Piece(_decode(text, place, start), place, begins, ends=not lines)
            start, begins = start + len(text), False


def _decode(text: bytes, place: str, start: int) -> str:
    """Decode UTF-8 that begins at byte `start` of a document. Raise UsageError with the place and
    byte of an error."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place}: not UTF-8 text ({error.reason} at byte {start + error.start}); convert it, "
            "or leave --tokenizer out to take bytes as tokens"
        ) from None


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Group pieces into batches of at least 4 Mi characters; the last may have fewer."""
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
