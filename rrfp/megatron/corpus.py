"""Where training text comes from: documents of tokens, read at random.

Text becomes one token a byte (0..255) and `DOCUMENT_END` after each document; a Megatron
.bin/.idx pair keeps its own tokens. This file imports neither torch nor, until such a pair is
opened, Megatron: the launcher checks the data before it starts any process.
"""

import json
import os
import re
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError

DOCUMENT_END = 256

Tokens = npt.NDArray[np.int64]

_MAX_LIBRARY_BYTES = 8_000_000
"""How much of the standard library is read, so that a run starts at once."""

_LIBRARY_SKIPS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "site-packages", "test", "tests", "turtledemo"}
)

_DEFINITION = re.compile(rb"\n\n+(?=[ \t]*(?:async def|def|class|@))")
"""Between two definitions of a Python file. Each is a document, so that lengths differ as they do
in real text."""

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, type of the tokens, number of sequences, number of documents."""

_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""The size of a token by Megatron's number for its type; 6 and 7 are floating point."""

_SCAN_TOKENS = 1 << 24


class Corpus(Protocol):
    """Documents of tokens."""

    vocab_size: int
    """One more than the highest token."""
    lengths: Tokens
    """The number of tokens of each document, all of them at least 1."""

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        """A document's tokens from `start` up to `stop`."""
        ...


class ByteCorpus:
    """Documents of bytes, held in memory, with a document end after each."""

    vocab_size = DOCUMENT_END + 1

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents = documents
        self.lengths: Tokens = np.array([len(document) + 1 for document in documents], np.int64)

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        text = self._documents[document]
        tokens = np.frombuffer(text[start:stop], np.uint8).astype(np.int64)
        return np.append(tokens, DOCUMENT_END) if stop > len(text) else tokens


class IndexedCorpus:
    """A Megatron .bin/.idx pair, memory-mapped by Megatron-Core's own reader."""

    def __init__(self, prefix: str) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._dataset: Any = IndexedDataset(prefix)
        index = self._dataset.index
        self._rows = np.flatnonzero(index.sequence_lengths)
        self.lengths: Tokens = index.sequence_lengths[self._rows].astype(np.int64)
        lowest, highest = _token_range(prefix, index.dtype)
        if lowest < 0:
            raise UsageError(f"{prefix}.bin holds the token {lowest}; tokens are 0 or more")
        self.vocab_size = highest + 1

    def tokens(self, document: int, start: int, stop: int) -> Tokens:
        row = int(self._rows[document])
        tokens: Tokens = self._dataset.get(row, start, stop - start).astype(np.int64)
        return tokens


def open_corpus(path: Path | None) -> Corpus:
    """Open the data of a run; None opens Python's own standard library.

    Raises UsageError when there is no text to train on.
    """
    if path is None:
        return ByteCorpus(tuple(_library_documents()))
    prefix = _indexed_prefix(path)
    if prefix is not None:
        _indexed_lengths(prefix)
        return IndexedCorpus(str(prefix))
    return _byte_corpus(path)


def document_lengths(path: Path | None) -> Tokens:
    """The `lengths` of the corpus that `open_corpus` opens, found without torch.

    Raises UsageError where `open_corpus` does, as far as that can be told without torch.
    """
    prefix = None if path is None else _indexed_prefix(path)
    return open_corpus(path).lengths if prefix is None else _indexed_lengths(prefix)


def count_samples(lengths: Tokens, seq_length: int, *, variable_lengths: bool) -> int:
    """How many samples the documents give: windows of `seq_length` tokens and the next one, or
    documents of at least two. Raises UsageError when there is none."""
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
        for file in _files_under(path):
            if file.suffix in (".bin", ".idx"):
                raise UsageError(
                    f"the folder {path} holds {file.name}; give --data the .bin/.idx pair itself"
                )
            yield from _documents(file)
    elif path.suffix == ".jsonl":
        yield from _json_documents(path)
    else:
        yield path.read_bytes()


def _files_under(folder: Path, skips: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file that is not hidden, in the same order on every machine."""
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
                yield _json_text(line, f"{path}, line {number}")


def _json_text(line: bytes, place: str) -> bytes:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON ({error}); correct or remove the line") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UsageError(f"{place}: no string field 'text'; each line takes one")
    return text.encode("utf-8", errors="surrogatepass")


def _library_documents() -> Iterator[bytes]:
    num_bytes = 0
    for file in _files_under(Path(sysconfig.get_path("stdlib")), _LIBRARY_SKIPS):
        if file.suffix != ".py":
            continue
        text = file.read_bytes()
        num_bytes += len(text)
        if num_bytes > _MAX_LIBRARY_BYTES:
            return
        yield from filter(None, _DEFINITION.split(text))


def _indexed_prefix(path: Path) -> Path | None:
    """What the two files of a pair have in common, if the path names a pair (either file of it,
    or the prefix itself, as Megatron's own options do)."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and path.with_name(path.name + ".bin").exists():
        return path
    return None


def _indexed_lengths(prefix: Path) -> Tokens:
    """The lengths of the documents of a pair. Raises UsageError when the pair is not whole."""
    data, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    for file in (data, index):
        if not file.is_file():
            raise UsageError(f"{file} does not exist; a Megatron data set is a .bin and an .idx")
    try:
        lengths, starts, token_bytes = _read_index(index)
    except OSError as error:
        raise UsageError(f"cannot read the data {index}: {error.strerror}; check --data") from None
    is_used = lengths > 0
    if not is_used.any():
        raise UsageError(f"{data} holds no text; give --data something to train on")
    num_bytes = data.stat().st_size
    if num_bytes < (starts + lengths * token_bytes)[is_used].max():
        raise UsageError(
            f"{data} is cut off after {num_bytes} bytes; build the .bin/.idx pair again"
        )
    return lengths[is_used]


def _read_index(path: Path) -> tuple[Tokens, Tokens, int]:
    """Each sequence's length and its place in the data, and the bytes of a token.

    Megatron's own reader fails on a cut index in ways that cannot be caught whole.
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
                    f"{path} has tokens of type {token_type}, which are no integers; build the "
                    ".bin/.idx pair again"
                )
            # A length and a place for each sequence, a place for each document.
            if num_bytes >= _INDEX_HEAD.size + num_sequences * (4 + 8) + num_documents * 8:
                lengths = np.fromfile(index, np.int32, num_sequences).astype(np.int64)
                starts = np.fromfile(index, np.int64, num_sequences)
                return lengths, starts, _TOKEN_BYTES[token_type]
    raise UsageError(f"{path} is cut off after {num_bytes} bytes; build the .bin/.idx pair again")


def _token_range(prefix: str, dtype: npt.DTypeLike) -> tuple[int, int]:
    tokens = np.memmap(f"{prefix}.bin", dtype, mode="r")
    parts = [tokens[start : start + _SCAN_TOKENS] for start in range(0, len(tokens), _SCAN_TOKENS)]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
