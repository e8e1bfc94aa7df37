"""Batches of images and text made by hand, and a small multimodal model that runs on them."""

import hashlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from rrfp.train.checks import check_settings
from rrfp.train.data.batches import ImageBatch
from rrfp.train.settings import TrainSettings

PATCH_SIZE = 4
VOCABULARY = SimpleNamespace(vocab_size=61)

SMALL_SCENES: dict[str, Any] = {
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


Gradients = dict[str, str]
"""Digests by the parameters' names in the whole model."""


class Rig:
    """One rank's chunks of a small model."""

    def __init__(self, settings: dict[str, Any], layout: Any) -> None:
        from rrfp.train.models.model import build_model

        self.settings = TrainSettings(**settings)
        check_settings(self.settings)
        self.layout = layout
        self.model = build_model(self.settings, layout, VOCABULARY)  # pyright: ignore[reportArgumentType]
        self.batches = some_batches(
            self.settings.data.microbatches, multiple=self.settings.layout.tp
        )

    def losses(self, batch: Any) -> torch.Tensor:
        """The total over all labels. This rank runs all stages, one after the other."""
        output: Any = None
        for chunk in self.model.chunks:
            chunk.module.set_input_tensor([output])
            output = chunk(batch)
        return output  # type: ignore[no-any-return]

    def by_hand(self) -> tuple[list[float], Gradients]:
        """A step without any schedule."""
        self._clear()
        losses = []
        for batch in self.batches:
            loss = (self.losses(batch) * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
            losses.append(loss.item())
            (loss / len(self.batches)).backward()  # type: ignore[no-untyped-call]
        return losses, self.gradients()

    def step(self, schedule: Callable[..., Any]) -> tuple[list[float], Gradients]:
        """A step of a schedule."""
        self._clear()
        reduced = schedule(
            forward_step_func=self.model.forward_step,
            data_iterator=[iter(self.batches) for _ in self.model.chunks],
            model=self.model.chunks,
            num_microbatches=len(self.batches),
            seq_length=self.settings.data.seq_length,
            micro_batch_size=1,
        )
        return [item["loss"].item() for item in reduced], self.gradients()

    def _clear(self) -> None:
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()

    def gradients(self) -> Gradients:
        return {
            name: hashlib.sha256(parameter.main_grad.numpy().tobytes()).hexdigest()
            for name, parameter in self.parameters().items()
        }

    def parameters(self) -> dict[str, Any]:
        from rrfp.train.models.gpt import whole_name

        return {
            whole_name(name, chunk.module, self.settings, self.layout): parameter
            for chunk in self.model.chunks
            for name, parameter in chunk.module.named_parameters()
        }
