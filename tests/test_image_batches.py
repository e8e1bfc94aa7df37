"""Microbatches of images and text: what is packed, where it lies, and what counts."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp.train.data.images import Document
from rrfp.train.data.open import ImageBatch, ImageData, cut, open_data, pack
from rrfp.train.data.tokens import DOCUMENT_END
from rrfp.train.settings import TrainSettings
from tests.effort import examples

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
    batch = pack(given_documents, settings)
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
            expected, _ = cut(document.pixels, PATCH)
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
    """What holds for every batch."""
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
    patches, places = cut(pixels, 2)
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
