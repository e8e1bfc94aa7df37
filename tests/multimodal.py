"""Batches of images and text made by hand, for tests of the multimodal model."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from rrfp.megatron.image_batches import ImageBatch

PATCH_SIZE = 4
VOCABULARY = SimpleNamespace(vocab_size=61)

SMALL: dict[str, Any] = {
    "model": "vlm",
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "microbatches": 4,
    "patch_size": PATCH_SIZE,
}

Edges = tuple[int, int]
"""Rows and columns of an image, in patches."""


def batch_of(
    documents: list[tuple[Edges | None, int]], seed: int = 0, multiple: int = 1
) -> ImageBatch:
    """Documents of an image, or none, and a number of text tokens, packed in this order and
    filled up to a multiple of `multiple`. What a document holds follows from the seed and its own
    place and sizes."""
    patches: list[torch.Tensor] = []
    places: list[Edges] = []
    counts: list[int] = []
    slots: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    document_ids: list[int] = []
    counted: list[float] = []
    for number, (edges, num_tokens) in enumerate(documents):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        num_rows, num_columns = edges or (0, 0)
        num_patches = num_rows * num_columns
        start = len(tokens)
        if edges is not None:
            values = torch.rand(num_patches, 3 * PATCH_SIZE**2, generator=generator)
            patches.append(2 * values - 1)
            places += [(row, column) for row in range(num_rows) for column in range(num_columns)]
            counts.append(num_patches)
            slots += range(start, start + num_patches)
        words = torch.randint(1, VOCABULARY.vocab_size, (num_tokens,), generator=generator)
        tokens += [0] * num_patches + words.tolist()
        positions += range(num_patches + num_tokens)
        document_ids += [number] * (num_patches + num_tokens)
        counted += [0.0] * num_patches + [1.0] * num_tokens
    padding = [0] * (-len(tokens) % multiple)
    row = torch.tensor([tokens + padding])
    return ImageBatch(
        patches=torch.cat([torch.zeros(0, 3 * PATCH_SIZE**2), *patches]),
        patch_counts=torch.tensor(counts, dtype=torch.int64),
        patch_places=torch.tensor(places, dtype=torch.int64).reshape(-1, 2),
        tokens=row,
        image_slots=torch.tensor(slots, dtype=torch.int64),
        labels=(row + 7) % VOCABULARY.vocab_size,
        loss_mask=torch.tensor([counted + padding]),
        position_ids=torch.tensor([positions + padding]),
        document_ids=torch.tensor([document_ids + [-1] * len(padding)]),
    )


def some_batches(num: int, *, multiple: int = 1) -> list[ImageBatch]:
    """Microbatches of 0 to 3 images of various sizes, the second of them without an image; lengths
    are multiples of that number."""
    batches = []
    for index in range(num):
        generator = random.Random(index)
        num_images = 0 if index == 1 else generator.randint(index % 2, 3)
        documents: list[tuple[Edges | None, int]] = [
            ((generator.randint(1, 4), generator.randint(1, 4)), generator.randint(1, 6))
            for _ in range(num_images)
        ]
        documents.append((None, generator.randint(2, 9)))
        batches.append(batch_of(documents, seed=index, multiple=multiple))
    return batches
