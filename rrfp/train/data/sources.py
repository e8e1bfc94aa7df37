"""Finds, checks and identifies the data of a run.

Imports no torch: the launcher reports problems before it starts any process.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.train.data.images import Documents, PictureFolder, Scenes
from rrfp.train.data.text_files import read_texts
from rrfp.train.data.tokens import (
    ByteCorpus,
    Corpus,
    IndexedCorpus,
    Tokens,
    cached_tokens,
    count_samples,
    indexed_documents,
    indexed_prefix,
)
from rrfp.train.settings import DataSettings, ModelKind, TrainSettings


def open_documents(settings: TrainSettings) -> Documents:
    """Open the images and texts of a multimodal run: the folder of --data or, without it, scenes
    drawn at run time. Raise UsageError if these cannot be used, without opening the images."""
    return (
        Scenes(settings)
        if settings.data.path is None
        else PictureFolder(settings.data.path, settings)
    )


def open_corpus(data: DataSettings) -> Corpus:
    """Open the text of a run; without a path, Python's standard library. Text has one token per
    byte, or those of its tokenizer, encoded now if the cache lacks them; a Megatron .bin/.idx pair
    has its own. Raise UsageError for unusable data, and RrfpError as `cached_tokens` does."""
    prefix = _pair_of(data)
    if prefix is not None:
        return IndexedCorpus(prefix)
    if data.tokenizer is None:
        return _byte_corpus(data)
    found = cached_tokens(data)
    return IndexedCorpus(found.prefix, found.vocab_size)


def document_lengths(data: DataSettings, report: Callable[[str], None] | None = None) -> Tokens:
    """Return the `lengths` of the corpus of `open_corpus`, without torch. Text for a tokenizer is
    encoded first, if the cache lacks it; `report` receives sentences about that. Raise as
    `open_corpus` does, except for tokens of a pair that are out of range."""
    prefix = _pair_of(data)
    if prefix is not None:
        return indexed_documents(prefix).lengths
    if data.tokenizer is None:
        return _byte_corpus(data).lengths
    return indexed_documents(cached_tokens(data, report).prefix).lengths


def check_data(settings: TrainSettings, report: Callable[[str], None] | None = None) -> None:
    """Raise UsageError if the data are unusable, as far as headers of images and pairs show, or if
    there is too little text for a sample. Text for a tokenizer is encoded into the cache; `report`
    receives sentences about that. Raise RrfpError as `cached_tokens` does."""
    if settings.model.kind == ModelKind.VLM:
        documents = open_documents(settings)
        if isinstance(documents, PictureFolder):
            documents.check()
        return
    count_samples(
        document_lengths(settings.data, report),
        settings.data.seq_length,
        variable_lengths=settings.data.variable_lengths,
    )


def _pair_of(data: DataSettings) -> Path | None:
    """Return the prefix of the .bin/.idx pair that --data names, or None for text. Raise UsageError
    for a pair with a tokenizer."""
    prefix = None if data.path is None else indexed_prefix(data.path)
    if prefix is not None and data.tokenizer is not None:
        raise UsageError(
            f"{data.path} holds tokens, not text, and --tokenizer takes text; leave it out"
        )
    return prefix


def _byte_corpus(data: DataSettings) -> ByteCorpus:
    """Read all text into memory, with a token per byte; empty documents are dropped. Raise
    UsageError if no text is left or some cannot be read."""
    documents = (text.stream.read() for text in read_texts(data.path, data.text_key))
    found = tuple(document for document in documents if document)
    if not found:
        raise UsageError(f"the data {data.path} holds no text; give --data something to train on")
    return ByteCorpus(found)


_DRAWN = "scenes drawn at run time"


def data_contents(settings: TrainSettings) -> dict[str, str]:
    """Return digests that identify the data by content, by flag, wherever the files lie. `data` is
    a SHA-256 of the number of tokens of each document or, for images, of captions, paths and sizes,
    not of every byte; drawn scenes are only named. A tokenizer adds the SHA-256 of its file and the
    token `end_of_document`. Raise UsageError for unusable data, and RrfpError as `cached_tokens`
    does."""
    if settings.model.kind is ModelKind.VLM:
        documents = open_documents(settings)
        return {"data": documents.digest() if isinstance(documents, PictureFolder) else _DRAWN}
    lengths = document_lengths(settings.data)
    found = {"data": hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()}
    if settings.data.tokenizer is not None:
        tokenizer = cached_tokens(settings.data).tokenizer
        found["tokenizer"] = str(tokenizer["sha256"])
        found["end_of_document"] = str(tokenizer["end_of_document"])
    return found
