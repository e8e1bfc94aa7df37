"""What the multimodal model learns from: images with captions, and texts alone. No torch here: the
launcher checks the data before it starts any process."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.float32]
"""(height, width, 3): red, green and blue, each in -1..1."""


class Part(IntEnum):
    """What a document is drawn for. No image is in both parts."""

    TRAINING = 0
    HELDOUT = 1


@dataclass(frozen=True, slots=True)
class Document:
    """An image with its caption, or a text alone."""

    text: bytes
    pixels: Pixels | None = None
    """Both edges are multiples of the patch size."""


class Documents(Protocol):
    """Where documents come from: each is the same whenever and wherever it is asked for."""

    has_texts: bool
    """There are texts alone."""

    def picture(self, part: Part, index: int) -> Document:
        """The image of that number, from 0 on without an end."""
        ...

    def text(self, index: int) -> Document:
        """The text alone of that number, for training."""
        ...
