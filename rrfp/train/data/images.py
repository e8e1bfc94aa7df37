"""The documents of the multimodal model: images with captions, and plain texts.

They come from a folder of the user or are scenes drawn at run time. Imports no torch: the launcher
checks the data before it starts any process.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from rrfp.errors import UsageError
from rrfp.train.data.text_files import (
    check_link_inside,
    check_regular_file,
    files_under,
    parse_json_line,
)
from rrfp.train.data.tokens import sample_at
from rrfp.train.settings import TrainSettings

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
    """True if there are plain texts."""

    def picture(self, part: Part, index: int) -> Document:
        """Return the image with this number, and its caption; the sequence is endless."""
        ...

    def text(self, index: int) -> Document:
        """Return the plain text with this number, for training."""
        ...


_ONE_HELD_OUT_IN = 20
_MAX_PIXELS = 1 << 25
"""The largest image, in pixels, which takes 400 MB to read. A small file can claim to be larger."""
_BAND_PIXELS = 1 << 22
"""Pixels whose colors are converted at once."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The accepted formats. Pillow reads others too, some by starting other programs."""
_GROUND = (128, 128, 128)
"""The color behind transparent parts of an image: gray, with values around 0."""
_NUM_CACHED = 64
"""Number of decoded and scaled images in the cache."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A caption or plain text, its image's file, and the line's position, for errors."""

    text: bytes
    image: Path | None
    place: str


class PictureFolder:
    """A folder with images and captions; an image is read on request.

    Every `.jsonl` file under the folder is read. A line has a string `text` and, unless it is a
    plain text, `image`: the path of a file inside of the folder, relative to it. One image in 20,
    and at least one, is held out with all its captions.
    """

    def __init__(self, folder: Path, settings: TrainSettings) -> None:
        """Raises UsageError for fewer than two images, an invalid line or a missing file."""
        lines = list(_lines(folder))
        images = list(dict.fromkeys(line.image for line in lines if line.image is not None))
        if len(images) < 2:
            raise UsageError(
                f"the .jsonl files of {folder} name {len(images)} images; --model vlm needs at "
                "least 2, one to train on and one to hold out"
            )
        heldout = set(images[_ONE_HELD_OUT_IN - 1 :: _ONE_HELD_OUT_IN] or images[-1:])
        self._texts = [line for line in lines if line.image is None]
        self._captions = {
            Part.TRAINING: [line for line in lines if line.image and line.image not in heldout],
            Part.HELDOUT: [line for line in lines if line.image in heldout],
        }
        self.has_texts = bool(self._texts)
        self._lines = lines
        self._root = folder.resolve()
        self._seed = settings.run.seed
        self._image_size = settings.data.image_size
        self._patch_size = settings.data.patch_size
        self._pixels = lru_cache(maxsize=_NUM_CACHED)(self._read)

    def picture(self, part: Part, index: int) -> Document:
        """Return the image with this number in the endless sequence of the part's captions, and its
        caption. Decoded images are cached. Raise UsageError if it cannot be decoded."""
        captions = self._captions[part]
        line = captions[sample_at(index, len(captions), self._seed)]
        return Document(line.text, self._pixels(line))

    def text(self, index: int) -> Document:
        """Return the text with this number in the endless sequence of plain texts."""
        return Document(self._texts[sample_at(index, len(self._texts), self._seed)].text)

    def check(self) -> None:
        """Open all images, and raise UsageError for one whose header already shows that it cannot
        be used."""
        for captions in self._captions.values():
            for line in captions:
                with _open_image(line):
                    pass

    def digest(self) -> str:
        """Return the SHA-256 of the captions and texts, in order, and of the images' relative paths
        and sizes in bytes. Pixels are not read."""
        digest = hashlib.sha256()
        for line in self._lines:
            parts: list[object] = [hashlib.sha256(line.text).hexdigest()]
            if line.image is not None:
                parts += [str(line.image.relative_to(self._root)), line.image.stat().st_size]
            digest.update(json.dumps(parts).encode())
        return digest.hexdigest()

    def _read(self, line: _Line) -> Pixels:
        """Read an image, turned as its EXIF data say, scale it down to the largest size but at
        least a patch, and crop it around its center to whole patches. Raise UsageError if it is
        damaged or `_open_image` refuses it."""
        with _open_image(line) as opened:
            try:
                with _ignoring_warnings():
                    ImageOps.exif_transpose(opened, in_place=True)
                    image = _to_rgb(opened)
            except Exception as error:  # decoders raise anything for a damaged file
                raise UsageError(
                    f"{line.place}: the image {line.image} is damaged ({error}); replace or remove "
                    "it"
                ) from None
        scale = min(1.0, self._image_size / max(image.size))
        # At least one patch, even of a very long and thin image.
        width, height = (max(round(edge * scale), self._patch_size) for edge in image.size)
        pixels = np.asarray(image.resize((width, height)), np.float32) / 127.5 - 1.0
        rows, columns = (_whole_patches(edge, self._patch_size) for edge in (height, width))
        return pixels[rows, columns]


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to opaque RGB of 8 bits, in bands, so that intermediate images need little
    memory."""
    whole = Image.new("RGB", image.size)
    height = max(_BAND_PIXELS // image.width, 1)
    for top in range(0, image.height, height):
        band = image.crop((0, top, image.width, min(top + height, image.height)))
        whole.paste(_band_to_rgb(band), (0, top))
    return whole


def _band_to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB of 8 bits: 16-bit grays are scaled down, and transparent parts show a
    gray ground."""
    if image.mode.startswith("I;16"):
        grays, transparent = np.asarray(image), image.info.get("transparency")
        image = Image.fromarray(np.rint(grays / 257).astype(np.uint8))
        if transparent is not None:
            alpha = np.where(grays == transparent, 0, 255).astype(np.uint8)
            image.putalpha(Image.fromarray(alpha))
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, _GROUND)
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert("RGB")


def _whole_patches(edge: int, patch_size: int) -> slice:
    """Return the largest centered part of an edge that is a whole number of patches, in pixels."""
    spare = edge % patch_size
    return slice(spare // 2, spare // 2 + edge - spare)


@contextmanager
def _ignoring_warnings() -> Iterator[None]:
    """Ignore Pillow's warnings of large and damaged images in the block; these raise UsageError
    here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open_image(line: _Line) -> Image.Image:
    """Open the image of a line without decoding it. Raise UsageError for an unreadable file, an
    unknown format, over 32 Mi pixels, and values of more than 16 bits, or of more than 8 in a
    PPM."""
    assert line.image is not None
    try:
        with _ignoring_warnings():
            image = Image.open(line.image, formats=_FORMATS)
    except Exception as error:  # headers can be as damaged as image data
        raise UsageError(
            f"{line.place}: {line.image} is not an image that can be read ({error}); give one of "
            f"{', '.join(_FORMATS)}"
        ) from None
    if image.width * image.height > _MAX_PIXELS:
        image.close()
        raise UsageError(
            f"{line.place}: the image {line.image} claims {image.width} x {image.height} pixels; "
            f"at most {_MAX_PIXELS} are read, so scale it down"
        )
    if image.mode in ("I", "F"):  # Pillow would clip them to 8 bits
        image.close()
        raise UsageError(
            f"{line.place}: the image {line.image} has more than 16 bits per value, or is a PPM "
            "with more than 8; save it with 8"
        )
    return image


def _lines(folder: Path) -> Iterator[_Line]:
    """Read the lines of all `.jsonl` files under a folder, in the order of `files_under`, without
    blank ones. Raise UsageError without such files, and for an unreadable file or an invalid
    line."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder; with --model vlm, --data takes a folder with images and a "
            ".jsonl of captions"
        )
    files = [file for file in files_under(folder) if file.suffix == ".jsonl"]
    if not files:
        raise UsageError(
            f"the folder {folder} holds no .jsonl; give it one, with lines like "
            '{"image": "1.png", "text": "a dog"}'
        )
    root = folder.resolve()
    for file in files:
        check_link_inside(file, folder)
        check_regular_file(file)
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parse_line(line, f"{file}, line {number}", root)
        except OSError as error:
            raise UsageError(
                f"cannot read the data {file}: {error.strerror}; check --data"
            ) from None


def _parse_line(line: bytes, place: str, root: Path) -> _Line:
    """Read a line of JSON with a text and perhaps an image. Raise UsageError for an invalid line, a
    missing or empty text, or an image that is missing or outside of the folder `root`."""
    values, text = parse_json_line(line, place)
    if not text.strip():
        raise UsageError(f"{place}: the field 'text' is empty; write a caption or remove the line")
    name = values.get("image")
    if name is None:
        return _Line(text, None, place)
    if not isinstance(name, str) or not name:
        raise UsageError(f"{place}: the field 'image' is {name!r}; it takes the path of a file")
    try:
        image = (root / name).resolve(strict=True)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # Python 3.11 raises RuntimeError for a loop of links
        raise UsageError(
            f"{place}: there is no image {name!r} in {root}; add it or correct its path"
        ) from None
    if not image.is_relative_to(root) or not image.is_file():
        raise UsageError(f"{place}: the image {name!r} is not a file inside {root}; move it there")
    return _Line(text, image, place)


# Scenes drawn at run time: a colored form on a colored ground, with a caption that describes it.
# The picture alone determines the caption, and colors, form and side are equally likely. So a model
# that ignores the picture can only guess. Plain texts have such captions without a picture.


COLORS: Final = {
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
"""The half of the picture with the center of the form."""

_MAX_SENTENCES = 3
_RADIUS = (0.25, 0.33)
"""Range of the radius of a form, as a share of the shorter edge."""
_MIN_EDGE = 16
"""The shortest edge of a picture, in pixels."""
_NOISE = 0.1
"""Standard deviation of the noise added to every value."""

_PICTURES, _TEXTS = range(2)
"""Parts of a generator's seed: pictures and texts draw different random numbers."""


class Scenes:
    """An endless sequence of scenes. Training and held-out scenes draw different random numbers."""

    has_texts = True

    def __init__(self, settings: TrainSettings) -> None:
        """Raises UsageError if images are too small for scenes."""
        if settings.data.image_size < _MIN_EDGE:
            raise UsageError(
                f"--image-size is {settings.data.image_size}; scenes take at least {_MIN_EDGE} "
                "pixels"
            )
        self._settings = settings

    def picture(self, part: Part, index: int) -> Document:
        """Draw the scene with this number, the same every time, with its caption. Its edges are
        whole patches between half (at least 16 pixels) and all of `image_size`."""
        patch_size = self._settings.data.patch_size
        rng = np.random.default_rng((self._settings.run.seed, _PICTURES, part, index))
        most = self._settings.data.image_size // patch_size
        fewest = -(-max(self._settings.data.image_size // 2, _MIN_EDGE) // patch_size)
        height, width = (int(edge) * patch_size for edge in rng.integers(fewest, most + 1, 2))
        scene = draw_scene(rng)
        return Document(scene.caption, draw_picture(rng, scene, height, width))

    def text(self, index: int) -> Document:
        """Draw the plain text with this number, the same every time."""
        return Document(draw_text(np.random.default_rng((self._settings.run.seed, _TEXTS, index))))


@dataclass(frozen=True, slots=True)
class Scene:
    """The contents of a picture."""

    color: str
    form: str
    side: str
    ground: str

    @property
    def caption(self) -> bytes:
        """The caption, such as `blue, red disc left.`"""
        return f"{self.ground}, {self.color} {self.form} {self.side}.".encode()


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draw a random scene: color, form, side and ground. Form and ground have different colors."""
    color, ground = rng.choice(list(COLORS), 2, replace=False).tolist()
    return Scene(color, FORMS[rng.integers(len(FORMS))], SIDES[rng.integers(len(SIDES))], ground)


def draw_text(rng: np.random.Generator) -> bytes:
    """Draw a random plain text: 1 to 3 captions."""
    num_sentences = rng.integers(1, _MAX_SENTENCES + 1)
    return b" ".join(draw_scene(rng).caption for _ in range(num_sentences))


def draw_picture(rng: np.random.Generator, scene: Scene, height: int, width: int) -> Pixels:
    """Draw the picture of a scene, with a random size and vertical position of the form, and noise.
    `height` and `width` are in pixels."""
    picture = np.full((height, width, 3), COLORS[scene.ground])
    rows, columns = np.mgrid[0:height, 0:width] + 0.5
    radius = rng.uniform(*_RADIUS) * min(height, width)
    y = (rows - rng.uniform(radius, height - radius)) / radius
    x = (columns - (1 / 3 + SIDES.index(scene.side) / 3) * width) / radius
    picture[_covers(scene.form, y, x)] = COLORS[scene.color]
    picture += rng.normal(0.0, _NOISE, picture.shape)
    pixels: Pixels = np.clip(picture, -1.0, 1.0).astype(np.float32)
    return pixels


def _covers(
    form: str, y: npt.NDArray[np.float64], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Compute the mask of the points inside a form of radius 1 around the origin; any form but a
    square or disc is a cross."""
    match form:
        case "square":
            inside = np.maximum(abs(y), abs(x)) <= 1.0
        case "disc":
            inside = y**2 + x**2 <= 1.0
        case _:
            inside = (np.minimum(abs(y), abs(x)) <= 0.25) & (np.maximum(abs(y), abs(x)) <= 1.0)
    return inside
