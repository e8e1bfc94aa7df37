"""Scenes: a caption follows from its picture, and from nothing else."""

from collections import Counter

import numpy as np
import pytest

from rrfp.train.data.images import COLOURS, FORMS, SIDES, Document, Part, Scenes, draw_scene
from rrfp.train.settings import TrainSettings

SETTINGS = TrainSettings(model="vlm")


def read(document: Document) -> str:
    """The caption, from the pixels alone."""
    pixels = document.pixels
    assert pixels is not None
    names = list(COLOURS)
    distances = np.linalg.norm(pixels[..., None, :] - np.array(list(COLOURS.values())), axis=-1)
    seen = distances.argmin(axis=-1)
    (ground, _), (colour, _) = Counter(seen.ravel().tolist()).most_common(2)
    rows, columns = np.nonzero(seen == colour)
    width = pixels.shape[1]
    side = int(columns.mean() > width / 2 - 0.5)
    covered = len(rows) / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
    form = "square" if covered > 0.95 else "disc" if covered > 0.62 else "cross"
    return f"{names[ground]}, {names[colour]} {form} {SIDES[side]}."


@pytest.mark.parametrize(("image_size", "patch_size"), [(32, 8), (64, 16), (16, 4), (18, 1)])
def test_the_caption_can_be_read_from_the_pixels(image_size: int, patch_size: int) -> None:
    settings = TrainSettings(model="vlm", image_size=image_size, patch_size=patch_size)
    for part in Part:
        for index in range(50):
            document = Scenes(settings).picture(part, index)
            assert read(document) == document.text.decode()


def test_pictures_have_many_shapes_of_whole_patches() -> None:
    shapes = set()
    for index in range(100):
        pixels = Scenes(SETTINGS).picture(Part.TRAINING, index).pixels
        assert pixels is not None
        assert pixels.dtype == np.float32
        assert -1.0 <= pixels.min() < pixels.max() <= 1.0
        shapes.add(pixels.shape)
    assert shapes == {(height, width, 3) for height in (16, 24, 32) for width in (16, 24, 32)}


def test_one_can_only_guess_without_the_picture() -> None:
    """Every word comes as often as the others of its kind."""
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng) for _ in range(4000)]
    kinds = {"colour": COLOURS, "ground": COLOURS, "form": FORMS, "side": SIDES}
    for kind, words in kinds.items():
        counts = Counter(getattr(scene, kind) for scene in scenes)
        for word in words:
            assert counts[word] == pytest.approx(len(scenes) / len(words), rel=0.2)
    assert all(scene.colour != scene.ground for scene in scenes)


def test_the_seed_and_the_part_choose_the_scenes() -> None:
    def first(seed: int, part: Part) -> list[bytes]:
        scenes = Scenes(TrainSettings(model="vlm", seed=seed))
        pixels = [scenes.picture(part, index).pixels for index in range(20)]
        return [picture.tobytes() for picture in pixels if picture is not None]

    drawn = [first(seed, part) for seed in (1, 2) for part in Part]
    assert first(1, Part.TRAINING) == drawn[0]
    assert len({picture for pictures in drawn for picture in pictures}) == 4 * 20


def test_texts_have_many_lengths() -> None:
    texts = [Scenes(SETTINGS).text(index).text for index in range(50)]
    assert max(map(len, texts)) > 2 * min(map(len, texts))
    assert Scenes(SETTINGS).text(7) == Document(texts[7])
