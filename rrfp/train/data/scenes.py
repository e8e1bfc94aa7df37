"""Scenes drawn at run time: a coloured form on a coloured ground, and a caption describing it.

A caption follows from the picture and from nothing else: colours, form and side are equally likely,
so that a model that cannot see can only guess. Plain texts use the same words without a picture.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rrfp.errors import UsageError
from rrfp.train.data.documents import Document, Part, Pixels
from rrfp.train.settings import TrainSettings

COLOURS: Final = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
    "cyan": (-1.0, 1.0, 1.0),
    "magenta": (1.0, -1.0, 1.0),
    "white": (1.0, 1.0, 1.0),
    "orange": (1.0, 0.0, -1.0),
}

FORMS: Final = ("square", "disc", "cross")

SIDES: Final = ("left", "right")
"""Where in the picture the centre of the form is."""

_MAX_SENTENCES = 3
_RADIUS = (0.25, 0.33)
"""Radii of a form, as a share of the shorter edge."""
_MIN_EDGE = 16
"""The shortest edge of a picture, in pixels."""
_NOISE = 0.1
"""Standard deviation of the noise added to every value."""

_PICTURES, _TEXTS = range(2)
"""Part of a generator's seed, so that pictures and texts draw different random numbers."""


class Scenes:
    """An endless supply of scenes. The two parts draw from different random numbers."""

    has_texts = True

    def __init__(self, settings: TrainSettings) -> None:
        """Raises UsageError if images are too small to show anything."""
        if settings.data.image_size < _MIN_EDGE:
            raise UsageError(
                f"--image-size is {settings.data.image_size}; scenes take at least {_MIN_EDGE} "
                "pixels"
            )
        self._settings = settings

    def picture(self, part: Part, index: int) -> Document:
        """The scene of this number. Its edges are between half and all of `image_size`."""
        patch_size = self._settings.data.patch_size
        rng = np.random.default_rng((self._settings.run.seed, _PICTURES, part, index))
        most = self._settings.data.image_size // patch_size
        fewest = -(-max(self._settings.data.image_size // 2, _MIN_EDGE) // patch_size)
        height, width = (int(edge) * patch_size for edge in rng.integers(fewest, most + 1, 2))
        scene = draw_scene(rng)
        return Document(scene.caption, draw_picture(rng, scene, height, width))

    def text(self, index: int) -> Document:
        """The plain text of this number."""
        return Document(draw_text(np.random.default_rng((self._settings.run.seed, _TEXTS, index))))


@dataclass(frozen=True, slots=True)
class Scene:
    """The contents of a picture."""

    colour: str
    form: str
    side: str
    ground: str

    @property
    def caption(self) -> bytes:
        """`blue, red disc left.`"""
        return f"{self.ground}, {self.colour} {self.form} {self.side}.".encode()


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draw a scene; its form and its ground have different colours."""
    colour, ground = rng.choice(list(COLOURS), 2, replace=False).tolist()
    return Scene(colour, FORMS[rng.integers(len(FORMS))], SIDES[rng.integers(len(SIDES))], ground)


def draw_text(rng: np.random.Generator) -> bytes:
    """Draw a plain text: some sentences like captions."""
    num_sentences = rng.integers(1, _MAX_SENTENCES + 1)
    return b" ".join(draw_scene(rng).caption for _ in range(num_sentences))


def draw_picture(rng: np.random.Generator, scene: Scene, height: int, width: int) -> Pixels:
    """Paint a scene of this size in pixels; the form's size and height, and some noise, are random
    too."""
    picture = np.full((height, width, 3), COLOURS[scene.ground])
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    radius = rng.uniform(*_RADIUS) * min(height, width)
    y = (rows - rng.uniform(radius, height - radius)) / radius
    x = (columns - (1 / 3 + SIDES.index(scene.side) / 3) * width) / radius
    picture[_covers(scene.form, y, x)] = COLOURS[scene.colour]
    picture += rng.normal(0.0, _NOISE, picture.shape)
    pixels: Pixels = np.clip(picture, -1.0, 1.0).astype(np.float32)
    return pixels


def _covers(
    form: str, y: npt.NDArray[np.float64], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Which points are inside a form of radius 1 around the origin."""
    match form:
        case "square":
            inside = np.maximum(abs(y), abs(x)) <= 1.0
        case "disc":
            inside = y**2 + x**2 <= 1.0
        case _:
            inside = (np.minimum(abs(y), abs(x)) <= 0.25) & (np.maximum(abs(y), abs(x)) <= 1.0)
    return inside
