"""A folder of images and captions: what is read, what is held out, and what is refused."""

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rrfp.errors import UsageError
from rrfp.train.data import images as picture_folder
from rrfp.train.data.batches import ImageBatch, ImageData, cut_patches, open_data, pack_documents
from rrfp.train.data.images import (
    COLORS,
    FORMS,
    SIDES,
    Document,
    Part,
    PictureFolder,
    Scenes,
    draw_scene,
)
from rrfp.train.data.sources import check_data
from rrfp.train.data.tokens import DOCUMENT_END
from rrfp.train.settings import TrainSettings
from tests.properties.cases import examples

SETTINGS = TrainSettings(model="vlm")


def write_images(folder: Path, *sizes: tuple[int, int]) -> list[dict[str, str]]:
    """Images of these widths and heights, each of one color, and their lines."""
    lines = []
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (number, 0, 255)).save(folder / f"{number}.png")
        lines.append({"image": f"{number}.png", "text": f"number {number}"})
    return lines


def write_lines(folder: Path, lines: Sequence[object], name: str = "captions.jsonl") -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / name).write_text(text, encoding="utf-8")


def texts_of(folder: PictureFolder, part: Part, count: int) -> list[bytes]:
    return [folder.picture(part, index).text for index in range(count)]


def test_every_line_comes_once_an_epoch_in_its_own_part(tmp_path: Path) -> None:
    lines = write_images(tmp_path, *[(16, 16)] * 41)
    second = [{**line, "text": f"again {line['image']}"} for line in lines]
    write_lines(tmp_path, lines, "a.jsonl")
    write_lines(tmp_path, [*second, {"text": "alone"}], "b.jsonl")
    folder = PictureFolder(tmp_path, SETTINGS)
    assert folder.has_texts
    assert folder.text(5).text == b"alone"
    assert folder.text(5).pixels is None
    heldout = texts_of(folder, Part.HELDOUT, 4)
    assert sorted(heldout) == [b"again 19.png", b"again 39.png", b"number 19", b"number 39"]
    training = texts_of(folder, Part.TRAINING, 78)
    assert sorted([*training, *heldout]) == sorted(
        line["text"].encode() for line in (*lines, *second)
    )
    assert texts_of(folder, Part.TRAINING, 156)[78:] != training


def test_of_few_images_one_is_held_out(tmp_path: Path) -> None:
    write_lines(tmp_path, write_images(tmp_path, (16, 16), (16, 16), (16, 16)))
    folder = PictureFolder(tmp_path, SETTINGS)
    assert not folder.has_texts
    assert set(texts_of(folder, Part.HELDOUT, 5)) == {b"number 2"}
    assert set(texts_of(folder, Part.TRAINING, 6)) == {b"number 0", b"number 1"}
    batches = open_data(TrainSettings(model="vlm", data=tmp_path, max_images=2)).batches(0)
    for index in range(16):
        assert batches.batch(0, index)["loss_mask"].sum() > 0


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ((64, 32), (16, 32)),
        ((30, 50), (32, 16)),
        ((17, 20), (16, 16)),
        ((3, 5), (8, 8)),
        ((2000, 10), (8, 32)),
    ],
)
def test_images_are_scaled_down_and_cut_to_whole_patches(
    tmp_path: Path, size: tuple[int, int], shape: tuple[int, int]
) -> None:
    write_lines(tmp_path, write_images(tmp_path, size, size))
    pixels = PictureFolder(tmp_path, SETTINGS).picture(Part.TRAINING, 0).pixels
    assert pixels is not None
    assert pixels.shape == (*shape, 3)
    assert np.allclose(pixels, (-1.0, -1.0, 1.0))


def test_other_modes_and_turned_photographs_are_read(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("L", (32, 16), 255).save(tmp_path / "0.jpg", exif=exif)
    Image.new("P", (16, 16)).save(tmp_path / "1.gif")
    Image.new("RGBA", (16, 16)).save(tmp_path / "2.png")
    lines = [{"image": name, "text": name} for name in ("0.jpg", "1.gif", "2.png")]
    write_lines(tmp_path, lines)
    folder = PictureFolder(tmp_path, SETTINGS)
    shapes = {}
    for part in Part:
        for index in range(2):
            document = folder.picture(part, index)
            assert document.pixels is not None
            shapes[document.text.decode()] = document.pixels.shape
    assert shapes == {"0.jpg": (32, 16, 3), "1.gif": (16, 16, 3), "2.png": (16, 16, 3)}


@pytest.mark.parametrize(
    ("image", "value"),
    [
        (Image.fromarray(np.full((16, 16), 257 * 64, np.uint16)), 64),
        (Image.new("RGBA", (16, 16), (255, 0, 0, 0)), 128),
        (Image.new("LA", (16, 16), (0, 0)), 128),
        (Image.new("L", (16, 16), 200), 200),
    ],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_deep_and_transparent_images_keep_their_grey(
    tmp_path: Path, image: Image.Image, value: int
) -> None:
    for name in ("0.png", "1.png"):
        image.save(tmp_path / name)
    write_lines(tmp_path, [image_line(name) for name in ("0.png", "1.png")])
    check_data(TrainSettings(model="vlm", data=tmp_path))
    pixels = PictureFolder(tmp_path, SETTINGS).picture(Part.TRAINING, 0).pixels
    assert pixels is not None
    assert np.allclose(pixels, value / 127.5 - 1, atol=1e-6)


def test_a_deep_image_is_grey_where_it_is_transparent(tmp_path: Path) -> None:
    values = np.full((16, 16), 257 * 64, np.uint16)
    values[:, 8:] = 257 * 200
    for name in ("0.png", "1.png"):
        Image.fromarray(values).save(tmp_path / name, transparency=257 * 200)
    write_lines(tmp_path, [image_line(name) for name in ("0.png", "1.png")])
    pixels = PictureFolder(tmp_path, SETTINGS).picture(Part.TRAINING, 0).pixels
    assert pixels is not None
    assert np.allclose(pixels[:, :8], 64 / 127.5 - 1, atol=1e-6)
    assert np.allclose(pixels[:, 8:], 128 / 127.5 - 1, atol=1e-6)


def image_line(value: object) -> dict[str, object]:
    return {"image": value, "text": "a"}


def write_damaged_line(line: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        good = "".join(f"{json.dumps(line)}\n" for line in write_images(folder, *[(16, 16)] * 2))
        (folder / "a.jsonl").write_bytes(good.encode() + line + b"\n")

    return write


def write_third(value: object) -> Callable[[Path], None]:
    return write_damaged_line(json.dumps(value).encode())


def write_link_out(folder: Path) -> None:
    outside = folder.parent / "outside.png"
    Image.new("RGB", (16, 16)).save(outside)
    (folder / "link.png").symlink_to(outside)
    write_third(image_line("link.png"))(folder)


def write_link_loop(folder: Path) -> None:
    (folder / "loop.png").symlink_to("loop.png")
    write_third(image_line("loop.png"))(folder)


def write_bytes(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)
        write_third(image_line(name))(folder)

    return write


def write_deep_image(folder: Path) -> None:
    Image.new("F", (16, 16)).save(folder / "deep.tiff")
    write_third(image_line("deep.tiff"))(folder)


def write_pipe(folder: Path) -> None:
    os.mkfifo(folder / "a.jsonl")


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims this size and has no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: None, "holds no .jsonl"),
        (lambda folder: write_lines(folder, [{"text": "a"}]), "name 0 images"),
        (lambda folder: write_lines(folder, write_images(folder, (9, 9))), "name 1 images"),
        (write_damaged_line(b"{"), "a.jsonl, line 3: not JSON"),
        (write_damaged_line(b'{"text": "\xff"}'), "a.jsonl, line 3: not UTF-8 text"),
        (write_damaged_line(b"[" * 100_000), "a.jsonl, line 3: not JSON"),
        (write_third({"image": "0.png"}), "a.jsonl, line 3: no string field 'text'"),
        (write_third({"image": "0.png", "text": " "}), "line 3: the field 'text' is empty"),
        (write_third(image_line(7)), "line 3: the field 'image' is 7"),
        (write_third(image_line("")), "line 3: the field 'image' is ''"),
        (write_third(image_line("no.png")), "line 3: there is no image 'no.png'"),
        (write_third(image_line("a\0b")), "line 3: there is no image"),
        (write_third(image_line("x" * 9999)), "line 3: there is no image"),
        (write_third(image_line(".")), "line 3: the image '.' is not a file inside"),
        (write_third(image_line("/etc/hostname")), "line 3: the image '/etc/hostname' is not"),
        (write_third(image_line("../../../../etc/passwd")), "line 3: "),
        (write_deep_image, "line 3: the image"),
        (write_pipe, "a.jsonl is not a regular file"),
        (write_link_out, "line 3: the image 'link.png' is not a file inside"),
        (write_link_loop, "line 3: there is no image 'loop.png'"),
        (write_bytes("a.png", b"no image"), "line 3: "),
        (write_bytes("a.png", b""), "line 3: "),
        (write_bytes("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "line 3: "),
        (write_bytes("a.png", png_of(15_000, 9_000)), "claims 15000 x 9000 pixels"),
        (write_bytes("a.png", png_of(60_000, 60_000)), "line 3: "),
    ],
)
def test_wrong_folders_are_refused_in_a_sentence_before_anything_starts(
    tmp_path: Path, write: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    with pytest.raises(UsageError) as refused:
        check_data(TrainSettings(model="vlm", data=folder))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_captions_lie_anywhere_in_the_folder(tmp_path: Path) -> None:
    lines = write_images(tmp_path, (16, 16), (16, 16), (16, 16))
    write_lines(tmp_path, lines[:2])
    (tmp_path / "more").mkdir()
    write_lines(tmp_path / "more", lines[2:])
    folder = PictureFolder(tmp_path, SETTINGS)
    texts = {*texts_of(folder, Part.TRAINING, 2), *texts_of(folder, Part.HELDOUT, 1)}
    assert texts == {b"number 0", b"number 1", b"number 2"}


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(UsageError, match="is not a folder; with --model vlm"):
            check_data(TrainSettings(model="vlm", data=path))
        (tmp_path / "file").touch()


def test_a_cut_off_image_is_refused_when_its_turn_comes(tmp_path: Path) -> None:
    lines = write_images(tmp_path, (16, 16), (16, 16))
    whole = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(whole).save(tmp_path / "0.png")
    content = (tmp_path / "0.png").read_bytes()
    (tmp_path / "0.png").write_bytes(content[: len(content) // 2])
    write_lines(tmp_path, lines)
    settings = TrainSettings(model="vlm", data=tmp_path)
    check_data(settings)
    with pytest.raises(UsageError, match=r"captions.jsonl, line 1: the image .*0.png is damaged"):
        PictureFolder(tmp_path, settings).picture(Part.TRAINING, 0)


_READ = """
import resource, sys
from pathlib import Path
from rrfp.train.data.images import Part
from rrfp.train.data.images import PictureFolder
from rrfp.train.settings import TrainSettings

folder = PictureFolder(Path(sys.argv[1]), TrainSettings(model="vlm"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
folder.picture(Part.TRAINING, 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_small_file_of_a_large_image_takes_little_memory(tmp_path: Path) -> None:
    """The largest there may be, of a palette with transparency, which is made several others."""
    edge = math.isqrt(picture_folder._MAX_PIXELS)
    lines = write_images(tmp_path, (16, 16), (16, 16))
    image = Image.new("P", (edge, edge), 1)
    image.putpalette(range(48))
    image.save(tmp_path / "0.png", transparency=3)
    assert (tmp_path / "0.png").stat().st_size < 100_000
    write_lines(tmp_path, lines)
    command = [sys.executable, "-c", _READ, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert int(told) << 10 < 450 << 20


def test_an_image_larger_than_any_that_is_read_is_refused(tmp_path: Path) -> None:
    lines = write_images(tmp_path, (16, 16), (16, 16))
    (tmp_path / "0.png").write_bytes(png_of(10_000, 10_000))
    write_lines(tmp_path, lines)
    with pytest.raises(UsageError, match="claims 10000 x 10000 pixels; at most 33554432 are read"):
        check_data(TrainSettings(model="vlm", data=tmp_path))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_bands_of_an_image_have_its_colors(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (13, 7, 4), np.uint8)
    image = Image.fromarray(numbers)
    if mode == "I;16":
        image = Image.fromarray(numbers[..., 0].astype(np.uint16) * 257)
        image.info["transparency"] = 257 * int(numbers[3, 3, 0])
    elif mode == "P":
        image = image.convert("RGB").quantize(16)
        image.info["transparency"] = 3
    else:
        image = image.convert(mode)
    whole = np.asarray(picture_folder._to_rgb(image))
    monkeypatch.setattr(picture_folder, "_BAND_PIXELS", 20)
    assert np.array_equal(np.asarray(picture_folder._to_rgb(image)), whole)


# Microbatches of images and text: what is packed, where it lies, and what counts.


PATCH = 2


@st.composite
def documents(draw: st.DrawFn) -> Document:
    text = draw(st.binary(min_size=1, max_size=12))
    if draw(st.booleans()):
        return Document(text)
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    pixels = rng.uniform(-1, 1, (rows * PATCH, columns * PATCH, 3)).astype(np.float32)
    return Document(text, pixels)


@examples(quick=60, thorough=2000)
@given(
    given_documents=st.lists(documents(), min_size=1, max_size=5),
    seq_length=st.integers(1, 14),
    tp=st.integers(1, 4),
    blank_images=st.booleans(),
)
def test_a_packed_row_holds_every_document_in_its_own_places(
    given_documents: list[Document], seq_length: int, tp: int, blank_images: bool
) -> None:
    settings = TrainSettings(
        model="vlm",
        seq_length=seq_length,
        tp=tp,
        patch_size=PATCH,
        image_size=3 * PATCH,
        blank_images=blank_images,
    )
    batch = pack_documents(given_documents, settings)
    check_form(batch, settings)
    images = iter(torch.split(batch["patches"], batch["patch_counts"].tolist()))
    ids = batch["document_ids"][0]
    for number, document in enumerate(given_documents):
        here = torch.nonzero(ids == number)[:, 0]
        assert torch.equal(batch["position_ids"][0, here], torch.arange(len(here)))
        tokens, labels = batch["tokens"][0, here], batch["labels"][0, here]
        assert torch.equal(tokens[1:], labels[:-1])
        num_patches = 0
        if document.pixels is not None:
            own = next(images)
            num_patches = len(own)
            expected, _ = cut_patches(document.pixels, PATCH)
            assert np.array_equal(own.numpy(), 0 * expected if blank_images else expected)
        text = [*document.text, DOCUMENT_END][: seq_length + 1]
        # Every token of a caption is a label once, also the first one, which follows the image.
        counted = labels[batch["loss_mask"][0, here] == 1].tolist()
        assert counted == (text if num_patches else text[1:])
        slots = set(batch["image_slots"].tolist()) & set(here.tolist())
        assert slots == set(here[:num_patches].tolist())
        assert not tokens[:num_patches].any()
    assert next(images, None) is None


def check_form(batch: ImageBatch, settings: TrainSettings) -> None:
    """Check the invariants of every batch."""
    length = batch["tokens"].shape[1]
    num_patches = len(batch["patches"])
    assert length >= 1
    assert length % settings.layout.tp == 0
    for name in ("tokens", "labels", "position_ids", "document_ids"):
        assert batch[name].shape == (1, length)
        assert batch[name].dtype == torch.int64
    assert batch["loss_mask"].shape == (1, length)
    assert batch["loss_mask"].dtype == torch.float32
    assert batch["loss_mask"].sum() > 0
    is_padding = batch["document_ids"] < 0
    assert not batch["loss_mask"][is_padding].any()
    assert is_padding.sum() < settings.layout.tp
    assert batch["patches"].shape == (num_patches, 3 * settings.data.patch_size**2)
    assert batch["patches"].dtype == torch.float32
    assert batch["patch_counts"].sum() == num_patches
    assert batch["patch_places"].shape == (num_patches, 2)
    assert batch["image_slots"].shape == (num_patches,)
    assert torch.equal(batch["image_slots"], batch["image_slots"].sort().values)


def test_patches_are_cut_row_by_row() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.float32).reshape(4, 6, 3)
    patches, places = cut_patches(pixels, 2)
    assert places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    for patch, (row, column) in zip(patches, places, strict=True):
        part = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert np.array_equal(patch, part.ravel())


def test_microbatches_have_every_number_of_images_and_depend_on_their_place_alone() -> None:
    settings = TrainSettings(model="vlm", dp=2, max_images=3)
    replicas = [open_data(settings).batches(dp_rank) for dp_rank in range(2)]
    counts = []
    captions = set()
    for step in range(8):
        for replica in replicas:
            for microbatch in range(settings.data.microbatches):
                batch = replica.batch(step, microbatch)
                counts.append(len(batch["patch_counts"]))  # type: ignore[typeddict-item]
                captions.add(batch["tokens"].numpy().tobytes())
    assert set(counts) == {0, 1, 2, 3}
    assert len(captions) == len(counts)
    again = open_data(settings).batches(1).batch(5, 3)
    for name, tensor in replicas[1].batch(5, 3).items():
        assert torch.equal(tensor, again[name])  # type: ignore[literal-required, arg-type]


def test_heldout_microbatches_are_images_that_no_training_sees() -> None:
    settings = TrainSettings(model="vlm")
    data = open_data(settings)
    assert isinstance(data, ImageData)
    heldout = [data.heldout(index) for index in range(8)]
    seen = {
        image.tobytes()
        for step in range(4)
        for index in range(settings.data.microbatches)
        for image in data.batches(0).batch(step, index)["patches"].numpy()
    }
    for batch in heldout:
        check_form(batch, settings)
        assert len(batch["patch_counts"]) == settings.data.max_images
        assert not any(image.tobytes() in seen for image in batch["patches"].numpy())


# Scenes: a caption follows from its picture, and from nothing else.


def read(document: Document) -> str:
    """The caption, from the pixels alone."""
    pixels = document.pixels
    assert pixels is not None
    names = list(COLORS)
    distances = np.linalg.norm(pixels[..., None, :] - np.array(list(COLORS.values())), axis=-1)
    seen = distances.argmin(axis=-1)
    (ground, _), (color, _) = Counter(seen.ravel().tolist()).most_common(2)
    rows, columns = np.nonzero(seen == color)
    width = pixels.shape[1]
    side = int(columns.mean() > width / 2 - 0.5)
    covered = len(rows) / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
    form = "square" if covered > 0.95 else "disc" if covered > 0.62 else "cross"
    return f"{names[ground]}, {names[color]} {form} {SIDES[side]}."


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
    kinds = {"color": COLORS, "ground": COLORS, "form": FORMS, "side": SIDES}
    for kind, words in kinds.items():
        counts = Counter(getattr(scene, kind) for scene in scenes)
        for word in words:
            assert counts[word] == pytest.approx(len(scenes) / len(words), rel=0.2)
    assert all(scene.color != scene.ground for scene in scenes)


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
