"""The documents that the multimodal model learns from: images with captions, and plain texts.

Imports no torch: the launcher checks the data before it starts any process.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.float32]
"""(height, width, 3): red, green and blue, each in -1..1."""


class Part(IntEnum):
    """The use of a document. No image is in both parts."""

    TRAINING = 0
    HELDOUT = 1


@dataclass(frozen=True, slots=True)
class Document:
    """An image with its caption, or a plain text."""

    text: bytes
    pixels: Pixels | None = None
    """Both edges are multiples of the patch size."""


class Documents(Protocol):
    """A source of documents; equal arguments give equal documents, on every rank."""

    has_texts: bool
    """Whether there are plain texts."""

    def picture(self, part: Part, index: int) -> Document:
        """The image of this number, with its caption; numbers start at 0 and have no end."""
        ...

    def text(self, index: int) -> Document:
        """The plain text of this number, for training."""
        ...
