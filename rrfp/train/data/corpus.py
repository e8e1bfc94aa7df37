"""Documents of tokens with random access.

Imports no torch, because the launcher checks the data before it starts any process.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError

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
