"""Readers of the small files that a user writes: orders, costs, settings."""

from collections.abc import Callable
from pathlib import Path

from rrfp.inputs import parse_layout, resolve_dealing
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.order import format_order
from rrfp.schedule.shape import Shape
from tests.fuzz.reader import Attempt, Reader, refusing_to_start, rrfp

_SIZE = ("--pp", "2", "--microbatches", "3")

_ROWS = """\
kind,pp_rank,chunk,microbatch,seconds,bytes
F,0,,,0.01,1000
B,0,,,0.02,
W,0,,,0.01,500
F,1,0,,0.01,1000
F,1,0,2,0.03,2000
B,1,,,0.02,
W,1,,,0.01,
"""
_TABLE = """\
seconds = { F = 0.02, B = 0.02, W = 0.02 }
bytes = 1e9
length = "text"
[lengths]
text = 0.5
images = 1.0
[[ranks]]
first_share = 0.375
length = "images"
"""
_MODEL = """\
split = "layers"
[device]
flops_per_s = 60e12
layer_s = 2e-4
[language]
layers = 4
hidden = 256
ffn = 1024
heads = 4
vocabulary = 1000
tokens = { median = 128, sigma = 0.5 }
"""
_CUT = """\
[cut]
costs = "uniform"
layers = "2,2"
joined = 1
[cut.given]
layers = "2,2"
pp = 2
microbatches = 3
"""
_SETTINGS = """\
pp = 2
layers = 4
microbatches = 3
steps = 2
hint = "bf"
limit = 4
lr = 1e-3
seed = 5
jitter = "lognormal:0.5"
pace = "uniform"
seq_length = 64
layout = "Ett|ttL"
"""


def _written(name: str, text: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).write_text(text)

    return make


def _order(directory: Path) -> None:
    order = hint_named("zb-h1").on(Shape(2, 3))
    (directory / "order.csv").write_text(format_order(order))  # type: ignore[arg-type]


def _dealt() -> object:
    return resolve_dealing("dealing.csv")


def _laid_out() -> object:
    text = Path("layout.txt").read_text(encoding="utf-8", errors="surrogateescape")
    return parse_layout(text, "--layout")


def _costs(name: str) -> tuple[Attempt, ...]:
    return (rrfp("simulate", *_SIZE, "--costs", name, "--seeds", "1"),)


READERS = (
    Reader(
        "order",
        _order,
        ("order.csv",),
        (
            rrfp("hint", "check", "order.csv", *_SIZE),
            rrfp("simulate", *_SIZE, "--hint", "order.csv", "--seeds", "1"),
            rrfp("simulate", *_SIZE, "--hint", "order.csv", "--dispatch", "fixed", "--seeds", "1"),
        ),
        share=6,
    ),
    Reader(
        "order of entry",
        _written("entry.txt", "2 0 1\n0,1,2\n"),
        ("entry.txt",),
        (rrfp("simulate", *_SIZE, "--admit", "entry.txt", "--seeds", "1"),),
        share=6,
    ),
    Reader(
        "dealing", _written("dealing.csv", "0 3; 1 2\n1,2;0,3\n"), ("dealing.csv",), (_dealt,), 20
    ),
    Reader("layout", _written("layout.txt", "Et*3|(tt|)*2t*3L"), ("layout.txt",), (_laid_out,), 20),
    Reader("rows of costs", _written("c.csv", _ROWS), ("c.csv",), _costs("c.csv"), 6),
    Reader("table of costs", _written("c.toml", _TABLE), ("c.toml",), _costs("c.toml"), 5),
    Reader("costs of a model", _written("c.toml", _MODEL), ("c.toml",), _costs("c.toml"), 5),
    Reader("costs that are cut", _written("c.toml", _CUT), ("c.toml",), _costs("c.toml"), 5),
    Reader(
        "settings",
        _written("run.toml", _SETTINGS),
        ("run.toml",),
        (refusing_to_start("--config", "run.toml"),),
        share=2,
    ),
)
