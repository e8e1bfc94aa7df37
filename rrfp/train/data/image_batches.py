"""Batches of text and images: documents packed end to end into one row per microbatch.

A document is an image with its caption, or a plain text. In the sequence of the language stages an
image takes one place per patch, followed by its caption; the loss counts text only.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from rrfp.train.data.batches import Batch
from rrfp.train.data.corpus import DOCUMENT_END
from rrfp.train.data.documents import Document, Documents, Part, Pixels
from rrfp.train.settings import TrainSettings

Integers = npt.NDArray[np.int64]


class ImageBatch(Batch):
    """One microbatch: a row of L places and the P patches of its I images; I may be 0. `tokens`,
    `labels`, `loss_mask` and `position_ids` are (1, L): the place of a patch has token 0, only text
    counts in the loss, and positions restart from 0 in each document."""

    patches: torch.Tensor
    """(P, 3 * patch_size**2) float32 in -1..1, image by image, row by row."""
    patch_counts: torch.Tensor
    """(I,) int64: the number of patches of each image."""
    patch_places: torch.Tensor
    """(P, 2) int64: row and column of each patch in its image."""
    image_slots: torch.Tensor
    """(P,) int64: the place of each patch in the row."""
    document_ids: torch.Tensor
    """(1, L) int64: the packed document that a place belongs to; -1 is padding."""


class ImageData:
    """Documents as training data of the multimodal model."""

    vocab_size = DOCUMENT_END + 1

    def __init__(self, documents: Documents, settings: TrainSettings) -> None:
        self._documents = documents
        self._settings = settings

    def batches(self, dp_rank: int) -> "ImageBatches":
        """The batches of a replica."""
        return ImageBatches(self._documents, self._settings, dp_rank)

    def heldout(self, index: int) -> ImageBatch:
        """A microbatch of held-out images. It has no plain texts, which no image helps to
        predict."""
        settings = self._settings
        first = index * settings.data.max_images
        documents = [
            self._documents.picture(Part.HELDOUT, first + image)
            for image in range(settings.data.max_images)
        ]
        return pack(documents, settings)


class ImageBatches:
    """The batches of one replica: 0 to `max_images` images each, and sometimes a plain text."""

    def __init__(self, documents: Documents, settings: TrainSettings, dp_rank: int) -> None:
        self._documents = documents
        self._settings = settings
        self._dp_rank = dp_rank

    def batch(self, step: int, microbatch: int) -> ImageBatch:
        """This microbatch of the step; equal arguments give equal batches, on every rank."""
        settings = self._settings
        number = (
            step * settings.layout.num_replicas + self._dp_rank
        ) * settings.data.microbatches + microbatch
        rng = np.random.default_rng((settings.run.seed, number))
        return pack(list(self._drawn(number, rng)), settings)

    def _drawn(self, number: int, rng: np.random.Generator) -> Iterator[Document]:
        most, has_texts = self._settings.data.max_images, self._documents.has_texts
        num_images = int(rng.integers(0 if has_texts else 1, most + 1))
        # Every microbatch has its own numbers, for as many images as it could have.
        for image in range(num_images):
            yield self._documents.picture(Part.TRAINING, number * most + image)
        if has_texts and (num_images == 0 or rng.random() < _TEXT_SHARE):
            yield self._documents.text(number)


_TEXT_SHARE = 0.25
"""The share of microbatches with images that also have a plain text."""


def pack(documents: list[Document], settings: TrainSettings) -> ImageBatch:
    """Pack one or more documents end to end. A text is cut after `seq_length` tokens."""
    rows: list[Integers] = []  # tokens, labels, counts, positions and document ids of each document
    patches, counts, places, slots = [], [], [], []
    start = 0
    for number, document in enumerate(documents):
        text = np.append(np.frombuffer(document.text, np.uint8).astype(np.int64), DOCUMENT_END)
        text = text[: settings.data.seq_length + 1]
        num_patches = 0
        if document.pixels is not None:
            own, own_places = cut(document.pixels, settings.data.patch_size)
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


def cut(pixels: Pixels, patch_size: int) -> tuple[Pixels, Integers]:
    """The patches of an image, row by row, and the row and column of each."""
    num_rows, num_columns = (edge // patch_size for edge in pixels.shape[:2])
    patches = pixels.reshape(num_rows, patch_size, num_columns, patch_size, 3).swapaxes(1, 2)
    places = np.indices((num_rows, num_columns)).reshape(2, -1).T
    return patches.reshape(-1, 3 * patch_size**2), places.astype(np.int64)
