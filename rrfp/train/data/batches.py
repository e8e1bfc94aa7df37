"""Open the data of a run and make its batches.

A microbatch is a pure function of (seed, step, replica, microbatch). Nothing is cached between
calls, so every rank finds any microbatch by itself, in any order.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from rrfp.train.data.images import Document, Documents, Part, Pixels
from rrfp.train.data.sources import open_corpus, open_documents
from rrfp.train.data.tokens import DOCUMENT_END, Corpus, Tokens, count_samples, sample_at
from rrfp.train.settings import ModelKind, TrainSettings


class Batch(TypedDict):
    """One microbatch; every tensor is (micro_batch_size, length)."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    """1.0 where the label counts, 0.0 where it is padding."""
    position_ids: torch.Tensor


class Batches(Protocol):
    """The batches of one data-parallel replica."""

    def batch(self, step: int, microbatch: int) -> Batch:
        """Return this microbatch of the step; equal arguments give equal batches, on every rank."""
        ...


class Data(Protocol):
    """The data that a run trains on."""

    vocab_size: int
    """One more than the highest token."""

    @property
    def heldout(self) -> Callable[[int], Batch] | None:
        """A function from a number to a microbatch of held-out data; None if nothing is held
        out."""

    def batches(self, dp_rank: int) -> Batches:
        """Return the batches of a replica. Raise UsageError if there is not enough data for one."""
        ...


# Batches of text. No sample appears twice in an epoch.


class TextData:
    """A corpus as training data; nothing is held out."""

    heldout: Callable[[int], Batch] | None = None

    def __init__(self, settings: TrainSettings) -> None:
        """Raises UsageError if there is no text to train on."""
        self._corpus = open_corpus(settings.data)
        self._settings = settings
        self.vocab_size = self._corpus.vocab_size

    def batches(self, dp_rank: int) -> "TextBatches":
        """Return the batches of a replica. Raise UsageError if the text is too short for one
        sample."""
        return TextBatches(self._corpus, self._settings, dp_rank)


class TextBatches:
    """The batches of text of one data-parallel replica.

    By default documents are packed end to end and cut into windows of `seq_length`. With
    `variable_lengths` a row is one document, or `seq_length` tokens of it from a random position,
    and the microbatch has the length of its longest row, rounded up to a multiple of `tp`.
    """

    def __init__(self, corpus: Corpus, settings: TrainSettings, dp_rank: int) -> None:
        """Raises UsageError if the corpus is too small for one sample."""
        self._corpus = corpus
        self._settings = settings
        self._dp_rank = dp_rank
        self._ends: Tokens = np.cumsum(corpus.lengths)
        self._long_enough: Tokens = np.flatnonzero(corpus.lengths > 1)
        self._num_samples = count_samples(
            corpus.lengths,
            settings.data.seq_length,
            variable_lengths=settings.data.variable_lengths,
        )

    def batch(self, step: int, microbatch: int) -> Batch:
        """Make this microbatch of the step from the next samples of the seeded order: windows of
        `seq_length` tokens or, with `variable_lengths`, documents, padded to the longest and to a
        multiple of --tp. Equal arguments give equal batches, on every rank."""
        settings = self._settings
        first = _number(settings, step, self._dp_rank, microbatch) * settings.data.micro_batch_size
        indices = range(first, first + settings.data.micro_batch_size)
        if settings.data.variable_lengths:
            rows = [self._document(index) for index in indices]
            longest = max(len(row) for row in rows) - 1
            length = -(-longest // settings.layout.tp) * settings.layout.tp
        else:
            rows = [self._window(index) for index in indices]
            length = settings.data.seq_length
        return _batch(rows, length)

    def _sample(self, index: int) -> int:
        """Return the number of the sample at an index of the endless, seeded sequence of
        samples."""
        return sample_at(index, self._num_samples, self._settings.run.seed)

    def _window(self, index: int) -> Tokens:
        """Return the `seq_length` + 1 tokens of the sample at an index; they may belong to several
        documents."""
        start = self._sample(index) * self._settings.data.seq_length
        stop = start + self._settings.data.seq_length + 1
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        parts = []
        for document in range(first, last + 1):
            length = int(self._corpus.lengths[document])
            begin = int(self._ends[document]) - length
            parts.append(
                self._corpus.tokens(document, max(start - begin, 0), min(stop - begin, length))
            )
        return np.concatenate(parts)

    def _document(self, index: int) -> Tokens:
        """Return at most `seq_length` + 1 tokens of the document at an index, from a seeded random
        start if it is longer."""
        document = int(self._long_enough[self._sample(index)])
        length = int(self._corpus.lengths[document])
        spare = length - (self._settings.data.seq_length + 1)
        start = 0
        if spare > 0:
            start = int(np.random.default_rng((self._settings.run.seed, index)).integers(spare + 1))
        stop = min(start + self._settings.data.seq_length + 1, length)
        return self._corpus.tokens(document, start, stop)


def _number(settings: TrainSettings, step: int, dp_rank: int, microbatch: int) -> int:
    """Number a microbatch over all steps and replicas of a run."""
    replicas = step * settings.layout.num_replicas + dp_rank
    return replicas * settings.data.microbatches + microbatch


def _batch(rows: list[Tokens], length: int) -> Batch:
    """Pad rows of tokens to `length` + 1 with token 0 and make inputs, labels (the next tokens) and
    mask of them. Padding does not count in the mask."""
    # Padding is token 0, which every vocabulary has.
    padded = np.zeros((len(rows), length + 1), np.int64)
    counts = np.zeros((len(rows), length), np.float32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
        counts[index, : len(row) - 1] = 1.0
    tokens = torch.from_numpy(padded)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.from_numpy(counts),
        position_ids=torch.arange(length).expand(len(rows), length),
    )


# Batches of text and images: documents packed end to end into one row per microbatch. A document is
# an image with its caption, or a plain text. In the row of the language stages an image has one
# position per patch, followed by its caption; the loss counts text only.


Integers = npt.NDArray[np.int64]


class ImageBatch(Batch):
    """One microbatch: a row of L positions and the P patches of its I images; I may be 0. `tokens`,
    `labels`, `loss_mask` and `position_ids` are (1, L): a patch has token 0, only text counts in
    the loss, and positions restart from 0 in each document."""

    patches: torch.Tensor
    """(P, 3 * patch_size**2) float32 in -1..1, image by image, row by row."""
    patch_counts: torch.Tensor
    """(I,) int64: the number of patches of each image."""
    patch_places: torch.Tensor
    """(P, 2) int64: row and column of each patch in its image."""
    image_slots: torch.Tensor
    """(P,) int64: the position of each patch in the row."""
    document_ids: torch.Tensor
    """(1, L) int64: the packed document of each position; -1 is padding."""


class ImageData:
    """Documents as training data of the multimodal model."""

    vocab_size = DOCUMENT_END + 1

    def __init__(self, documents: Documents, settings: TrainSettings) -> None:
        self._documents = documents
        self._settings = settings

    def batches(self, dp_rank: int) -> "ImageBatches":
        """Return the batches of a replica."""
        return ImageBatches(self._documents, self._settings, dp_rank)

    def heldout(self, index: int) -> ImageBatch:
        """Make a microbatch of `max_images` held-out images with captions, without plain texts,
        which images do not help predict."""
        settings = self._settings
        first = index * settings.data.max_images
        documents = [
            self._documents.picture(Part.HELDOUT, first + image)
            for image in range(settings.data.max_images)
        ]
        return pack_documents(documents, settings)


class ImageBatches:
    """The batches of one replica: 0 to `max_images` images each (at least 1 if the data have no
    plain texts), and sometimes a plain text."""

    def __init__(self, documents: Documents, settings: TrainSettings, dp_rank: int) -> None:
        self._documents = documents
        self._settings = settings
        self._dp_rank = dp_rank

    def batch(self, step: int, microbatch: int) -> ImageBatch:
        """Make this microbatch of the step; equal arguments give equal batches, on every rank."""
        settings = self._settings
        number = _number(settings, step, self._dp_rank, microbatch)
        rng = np.random.default_rng((settings.run.seed, number))
        return pack_documents(list(self._draw(number, rng)), settings)

    def _draw(self, number: int, rng: np.random.Generator) -> Iterator[Document]:
        """Draw the documents of a microbatch: a random number of images, up to `max_images`, and a
        plain text if there are no images or, otherwise, in a quarter of the cases. Data without
        plain texts give at least one image."""
        most, has_texts = self._settings.data.max_images, self._documents.has_texts
        num_images = int(rng.integers(0 if has_texts else 1, most + 1))
        # Every microbatch has its own range of image numbers.
        for image in range(num_images):
            yield self._documents.picture(Part.TRAINING, number * most + image)
        if has_texts and (num_images == 0 or rng.random() < _TEXT_SHARE):
            yield self._documents.text(number)


_TEXT_SHARE = 0.25
"""The share of microbatches with images that also have a plain text."""


def pack_documents(documents: list[Document], settings: TrainSettings) -> ImageBatch:
    """Pack one or more documents end to end into one row, padded to a multiple of --tp. Each text,
    with its end, is cut after `seq_length` + 1 tokens; --blank-images makes all patches gray."""
    rows: list[Integers] = []  # tokens, labels, counts, positions and document ids of each document
    patches, counts, places, slots = [], [], [], []
    start = 0
    for number, document in enumerate(documents):
        text = np.append(np.frombuffer(document.text, np.uint8).astype(np.int64), DOCUMENT_END)
        text = text[: settings.data.seq_length + 1]
        num_patches = 0
        if document.pixels is not None:
            own, own_places = cut_patches(document.pixels, settings.data.patch_size)
            num_patches = len(own)
            patches.append(np.zeros_like(own) if settings.data.blank_images else own)
            places.append(own_places)
            counts.append(num_patches)
            slots.append(np.arange(start, start + num_patches))
        padded = np.concatenate([np.zeros(num_patches, np.int64), text])
        length = len(padded) - 1
        positions = np.arange(length)
        counted = (positions + 1 >= num_patches).astype(np.int64)
        rows.append(
            np.stack([padded[:-1], padded[1:], counted, positions, np.full(length, number)])
        )
        start += length
    padding = np.zeros((5, -start % settings.layout.tp), np.int64)
    padding[4] = -1
    tokens, labels, loss_mask, position_ids, document_ids = torch.from_numpy(
        np.concatenate([*rows, padding], axis=1)
    ).unsqueeze(1)
    return ImageBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask.float(),
        position_ids=position_ids,
        document_ids=document_ids,
        patches=torch.from_numpy(
            np.concatenate([np.zeros((0, 3 * settings.data.patch_size**2), np.float32), *patches])
        ),
        patch_counts=torch.tensor(counts, dtype=torch.int64),
        patch_places=torch.from_numpy(np.concatenate([np.zeros((0, 2), np.int64), *places])),
        image_slots=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *slots])),
    )


def cut_patches(pixels: Pixels, patch_size: int) -> tuple[Pixels, Integers]:
    """Cut an image into patches, row by row; return their values, flattened, and the row and column
    of each."""
    num_rows, num_columns = (edge // patch_size for edge in pixels.shape[:2])
    patches = pixels.reshape(num_rows, patch_size, num_columns, patch_size, 3).swapaxes(1, 2)
    places = np.indices((num_rows, num_columns)).reshape(2, -1).T
    return patches.reshape(-1, 3 * patch_size**2), places.astype(np.int64)


def open_data(settings: TrainSettings) -> Data:
    """Open the training data: images with --model vlm, else text. Raise UsageError if they are
    unusable."""
    if settings.model.kind == ModelKind.VLM:
        return ImageData(open_documents(settings), settings)
    return TextData(settings)
