"""Readers of what a model is trained on and goes on from."""

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from rrfp.train.checkpoints.directory import FILE, METRICS, CheckpointDir, Manifest
from rrfp.train.checkpoints.resuming import check_continues
from rrfp.train.data.images import Part, PictureFolder
from rrfp.train.data.sources import check_data, data_contents, open_corpus
from rrfp.train.data.tokens import write_index
from rrfp.train.settings import TrainSettings
from tests.fuzz.reader import Reader
from tests.test_picture_folder import write_lines
from tests.test_tokenized_data import END, train_tokenizer, write_jsonl, write_parquet

_DATA = Path("data")
_FORMATS = ("png", "jpg", "gif", "bmp", "ppm", "tiff", "webp")


def _text_settings(**flags: object) -> TrainSettings:
    return TrainSettings(data=_DATA, seq_length=16, **flags)


def _read_text(**flags: object) -> None:
    settings = _text_settings(**flags)
    check_data(settings)
    corpus = open_corpus(settings.data)
    for document, length in enumerate(corpus.lengths[:20].tolist()):
        corpus.tokens(document, 0, min(length, 1000))


def _texts(directory: Path) -> None:
    data = directory / _DATA
    data.mkdir()
    write_jsonl(data / "a.jsonl")
    (data / "b.txt").write_text("def f():\n    return 'some text'\n" * 3)


def _rows(directory: Path) -> None:
    data = directory / _DATA
    data.mkdir()
    write_parquet(data / "a.parquet")


def _tokenized(directory: Path) -> None:
    _texts(directory)
    (directory / "tokenizer").mkdir()
    train_tokenizer(directory / "tokenizer", END)
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def _read_tokenized() -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").absolute())
    _read_text(tokenizer=Path("tokenizer"))


def _pair(directory: Path) -> None:
    lengths = np.array([5, 7, 0, 30], np.int32)
    tokens = np.arange(lengths.sum(), dtype=np.uint16)
    (directory / "data.bin").write_bytes(tokens.tobytes())
    write_index(directory / _DATA, np.uint16, lengths, np.array([0, 2, 3, 4]))


def _pictures(directory: Path) -> None:
    data = directory / _DATA
    data.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)
    lines = []
    for number, ending in enumerate(_FORMATS):
        Image.fromarray(pixels).save(data / f"{number}.{ending}")
        lines.append({"image": f"{number}.{ending}", "text": f"a picture {number}"})
    Image.fromarray(pixels).quantize(16).save(data / "p.png", transparency=3)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(data / "d.png")
    write_lines(data, [*lines, {"image": "p.png", "text": "p"}, {"image": "d.png", "text": "d"}])


def _read_pictures() -> None:
    settings = TrainSettings(model="vlm", data=_DATA)
    check_data(settings)
    folder = PictureFolder(_DATA, settings)
    folder.picture(Part.HELDOUT, 0)
    for number in range(9):
        folder.picture(Part.TRAINING, number)


def _checkpoint(directory: Path) -> None:
    settings = TrainSettings(pp=2, layers=4, microbatches=4, steps=8)
    path = directory / "saved" / "step-00000004"
    path.mkdir(parents=True)
    (path / METRICS).write_text('{"step": 3}\n')
    manifest = Manifest(
        4, settings.described(), "run", {"torch": "2"}, {METRICS: 12}, data_contents(settings)
    )
    (path / FILE).write_text(manifest.to_json())


def _resume() -> None:
    found = CheckpointDir(Path("saved")).newest()
    settings = TrainSettings(pp=2, layers=4, microbatches=4, steps=8)
    if found is not None:
        check_continues(settings, found.manifest.contents, found)


READERS = (
    Reader("texts", _texts, ("data/*",), (_read_text,), 10),
    Reader("texts in Parquet", _rows, ("data/*",), (_read_text,), 5, has_log=True),
    Reader("tokenizer", _tokenized, ("tokenizer/*",), (_read_tokenized,), 2),
    Reader("pairs of tokens", _pair, ("data.bin", "data.idx"), (_read_text,), 10),
    Reader("pictures", _pictures, ("data/*",), (_read_pictures,), 3),
    Reader("checkpoint", _checkpoint, ("saved/*/*",), (_resume,), 10),
)
