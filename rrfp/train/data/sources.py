"""Finds and checks the data that the settings name, without torch, so that the launcher reports
problems before it starts any process."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from rrfp.errors import UsageError
from rrfp.train.data.images import Documents, PictureFolder, Scenes
from rrfp.train.data.text_files import texts
from rrfp.train.data.tokens import (
    ByteCorpus,
    Corpus,
    IndexedCorpus,
    Tokens,
    count_samples,
    encoded,
    indexed_documents,
    indexed_prefix,
)
from rrfp.train.settings import DataSettings, ModelKind, TrainSettings


def open_documents(settings: TrainSettings) -> Documents:
    """The images and texts of a multimodal run. Raises UsageError if the folder has none."""
    return (
        Scenes(settings)
        if settings.data.path is None
        else PictureFolder(settings.data.path, settings)
    )


def open_corpus(data: DataSettings) -> Corpus:
    """Open the text of a run: Python's own standard library if no path is given. Text becomes one
    token per byte, or what the tokenizer makes of it; a Megatron .bin/.idx pair keeps its own.

    Raises UsageError if there is no text to train on.
    """
    prefix = _pair_of(data)
    if prefix is not None:
        return IndexedCorpus(prefix)
    if data.tokenizer is None:
        return _byte_corpus(data)
    found = encoded(data)
    return IndexedCorpus(found.prefix, found.vocab_size)


def document_lengths(data: DataSettings, tell: Callable[[str], None] | None = None) -> Tokens:
    """The `lengths` of the corpus that `open_corpus` opens, found without torch; `tell` hears of
    text that has to be encoded first.

    Raises UsageError where `open_corpus` does, as far as that is possible without torch.
    """
    prefix = _pair_of(data)
    if prefix is not None:
        return indexed_documents(prefix).lengths
    if data.tokenizer is None:
        return _byte_corpus(data).lengths
    return indexed_documents(encoded(data, tell).prefix).lengths


def check_data(settings: TrainSettings, tell: Callable[[str], None] | None = None) -> None:
    """Raise UsageError if the data cannot be trained on, as far as headers show. Text for a
    tokenizer is encoded; `tell` hears of that."""
    if settings.model.kind == ModelKind.VLM:
        documents = open_documents(settings)
        if isinstance(documents, PictureFolder):
            documents.check()
        return
    count_samples(
        document_lengths(settings.data, tell),
        settings.data.seq_length,
        variable_lengths=settings.data.variable_lengths,
    )


def _pair_of(data: DataSettings) -> Path | None:
    """The prefix of the pair that the data are, if they are one."""
    prefix = None if data.path is None else indexed_prefix(data.path)
    if prefix is not None and data.tokenizer is not None:
        raise UsageError(
            f"{data.path} holds tokens, not text, and --tokenizer takes text; leave it out"
        )
    return prefix


def _byte_corpus(data: DataSettings) -> ByteCorpus:
    documents = (text.stream.read() for text in texts(data.path, data.text_key))
    found = tuple(document for document in documents if document)
    if not found:
        raise UsageError(f"the data {data.path} holds no text; give --data something to train on")
    return ByteCorpus(found)


# What the data of a run are, by content: two runs with the same contents train on the same items,
# wherever the files lie.
#
# Imports no torch: the launcher compares contents before it starts any process.


_DRAWN = "scenes drawn at run time"


def data_contents(settings: TrainSettings) -> dict[str, str]:
    """What identifies the data, by the flag of the setting that names it.

    `data` is a SHA-256 over an index of the documents, not over every byte: for text the number of
    tokens of each, for images their captions, paths and sizes in bytes. `tokenizer` is the SHA-256
    of its file, `end_of_document` the token. Scenes that are drawn follow from the settings and are
    only named. Raises UsageError for data that cannot be used.
    """
    if settings.model.kind is ModelKind.VLM:
        documents = open_documents(settings)
        return {"data": documents.digest() if isinstance(documents, PictureFolder) else _DRAWN}
    lengths = document_lengths(settings.data)
    found = {"data": hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()}
    if settings.data.tokenizer is not None:
        tokenizer = encoded(settings.data).tokenizer
        found["tokenizer"] = str(tokenizer["sha256"])
        found["end_of_document"] = str(tokenizer["end_of_document"])
    return found
