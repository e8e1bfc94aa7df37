"""Megatron's .bin/.idx pairs: documents of tokens in a file, and the index of their sequences.

Imports Megatron only when a pair is opened: the launcher reads lengths alone.
"""

import struct
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError
from rrfp.trace.files.whole_file import create_new
from rrfp.train.data.corpus import Tokens

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
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._first_sequences, self.lengths = indexed_documents(prefix)
        with warnings.catch_warnings():
            # Outside of a run Megatron warns that it does not know the rank, which it only logs.
            warnings.simplefilter("ignore")
            self._dataset: Any = IndexedDataset(str(prefix))
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
