"""Text as tokens, encoded once: the tokens of files under a tokenizer lie in the user's cache, as a
Megatron .bin/.idx pair, and every rank of every run maps them from there.

Imports no torch: the launcher encodes before it starts any process.
"""

import hashlib
import json
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.inputs.text_files import sha256_of
from rrfp.json_text import parsed
from rrfp.trace.files.whole_file import create_new, write_whole
from rrfp.train.data.indexed import indexed_documents, token_type, with_suffix, write_index
from rrfp.train.data.text_files import text_files, texts
from rrfp.train.data.tokenizer import Tokenizer, named_end, tokenizer_file
from rrfp.train.setting_groups import DataSettings

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
