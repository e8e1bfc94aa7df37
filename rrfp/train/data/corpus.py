"""The sources of training text: documents of tokens with random access.

Text becomes one token per byte (0..255), with `DOCUMENT_END` after each document; a Megatron
.bin/.idx pair keeps its own tokens. Imports no torch, and Megatron only when such a pair is opened,
because the launcher checks the data before it starts any process.
"""

import json
import os
import re
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError

DOCUMENT_END = 256

Tokens = npt.NDArray[np.int64]

_MAX_LIBRARY_BYTES = 8_000_000
"""How much of the standard library is read: little enough for a run to start at once."""

_LIBRARY_SKIPS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests", "turtledemo"}
)

_DEFINITION = re.compile(rb"\n\n+(?=[ \t]*(?:async def|def|class|@))")
"""Separates the definitions of a Python file. Each is a document, so that lengths vary as in real
text."""

_IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, type of the tokens, number of sequences, number of documents."""

_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""The size of a token, by Megatron's number of its type; 6 and 7 are floating point."""

_SCAN_TOKENS = 1 << 24


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


class IndexedCorpus:
    """A Megatron .bin/.idx pair, memory-mapped by Megatron-Core's own reader.

    A document is one or several sequences, as the index says. Opening a pair reads every token
    once, to find the vocabulary.
    """

    def __init__(self, prefix: Path) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._first_sequences, self.lengths = _indexed_documents(prefix)
        self._dataset: Any = IndexedDataset(str(prefix))
        data = _with_suffix(prefix, ".bin")
        lowest, highest = _token_range(data, self._dataset.index.dtype)
        if lowest < 0:
            raise UsageError(f"{data} holds the token {lowest}; tokens are 0 or more")
        self.vocab_size = highest + 1

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        # Sequences are end to end, so a read from the first one continues into the next.
        first = int(self._first_sequences[document])
        tokens: Tokens = self._dataset.get(first, start, stop - start).astype(np.int64)
        return tokens


def open_corpus(path: Path | None) -> Corpus:
    """Open the data of a run; None opens Python's own standard library.

    Raises UsageError if there is no text to train on.
    """
    if path is None:
        return ByteCorpus(tuple(_library_documents()))
    prefix = _indexed_prefix(path)
    return _byte_corpus(path) if prefix is None else IndexedCorpus(prefix)


def document_lengths(path: Path | None) -> Tokens:
    """The `lengths` of the corpus that `open_corpus` opens, found without torch.

    Raises UsageError where `open_corpus` does, as far as that is possible without torch.
    """
    prefix = None if path is None else _indexed_prefix(path)
    return open_corpus(path).lengths if prefix is None else _indexed_documents(prefix).lengths


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


def check_no_pipe(path: Path) -> None:
    """Raise UsageError for a pipe or a device, which might never end and can be read only once."""
    if path.exists() and not path.is_file():
        raise UsageError(f"the data {path} is not a regular file; save its text to one first")


def _byte_corpus(path: Path) -> ByteCorpus:
    try:
        documents = tuple(document for document in _documents(path) if document)
    except OSError as error:
        raise UsageError(
            f"cannot read the data {error.filename or path}: {error.strerror}; check --data"
        ) from None
    if not documents:
        raise UsageError(f"the data {path} holds no text; give --data something to train on")
    return ByteCorpus(documents)


def _documents(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        for file in files_under(path):
            if file.suffix in (".bin", ".idx"):
                raise UsageError(
                    f"the folder {path} holds {file.name}; give --data the .bin/.idx pair itself"
                )
            if file.suffix.lower() in _IMAGE_SUFFIXES:
                raise UsageError(
                    f"the folder {path} holds the image {file.name} and the model takes text; add "
                    "--model vlm"
                )
            yield from _documents(file)
        return
    check_no_pipe(path)
    if path.suffix == ".jsonl":
        yield from _json_documents(path)
    else:
        yield path.read_bytes()


def files_under(folder: Path, skips: frozenset[str] = frozenset()) -> Iterator[Path]:
    """All files that are not hidden, in the same order on every machine."""
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in skips and not name.startswith(".")
        )
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(where, name)


def _json_documents(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield json_line(line, f"{path}, line {number}")[1]


def json_line(line: bytes, place: str) -> tuple[dict[str, Any], bytes]:
    """The fields of a line of JSON, and the bytes of its string `text`. Raises UsageError, naming
    the place, if the line does not have it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: not JSON ({error}); correct or remove the line") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UsageError(f"{place}: no string field 'text'; each line takes one")
    return value, text.encode("utf-8", errors="surrogatepass")


def _library_documents() -> Iterator[bytes]:
    num_bytes = 0
    for file in files_under(Path(sysconfig.get_path("stdlib")), _LIBRARY_SKIPS):
        if file.suffix != ".py":
            continue
        text = file.read_bytes()
        num_bytes += len(text)
        if num_bytes > _MAX_LIBRARY_BYTES:
            return
        yield from filter(None, _DEFINITION.split(text))


def _indexed_prefix(path: Path) -> Path | None:
    """The common prefix of a pair's two files, if the path names a pair: either of its files, or
    the prefix itself, as in Megatron's own options."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and _with_suffix(path, ".bin").exists():
        return path
    return None


class _Documents(NamedTuple):
    """The non-empty documents of a pair."""

    first_sequences: Tokens
    """The first sequence of each document; its others follow."""
    lengths: Tokens
    """The number of tokens of each document, over all its sequences."""


def _indexed_documents(prefix: Path) -> _Documents:
    """The documents of a pair. Raises UsageError if the pair is incomplete."""
    data, index = (_with_suffix(prefix, suffix) for suffix in (".bin", ".idx"))
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


def _read_index(path: Path) -> tuple[_Documents, int]:
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
) -> _Documents:
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
    return _Documents(bounds[:-1][holds_text], num_tokens[holds_text])


def _with_suffix(prefix: Path, suffix: str) -> Path:
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
