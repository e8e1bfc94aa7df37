"""What ranks tell each other: JSON and tensors, and no object by any path."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rrfp.errors import RrfpError
from rrfp.runtime.decoding import integers
from rrfp.train.ranks.exchange import broadcast_json, gather_tensors, no_objects
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent

FORBIDDEN_MODULES = re.compile(
    r"(pickle|_pickle|cPickle|cloudpickle|dill|marshal|shelve|multiprocessing"
    r"|torch\.multiprocessing|torch\.distributed\.(launcher|run|rpc|elastic))(\.|$)"
)
"""What unpickles, or listens for those who have something unpickled."""

FORBIDDEN_NAMES = re.compile(
    r"pickle|_object(_list)?$|^(gather|scatter|all_gather|broadcast)_objects?\b|elastic_launch"
)
ALLOWED = {
    ("rrfp/train/ranks/exchange.py", "all_gather_object"),
    ("rrfp/train/ranks/exchange.py", "_unpickler"),
    ("rrfp/interchange/flight/dumps.py", "pickle"),
    ("rrfp/interchange/flight/dumps.py", "_Unpickler"),
    ("rrfp/interchange/flight/dumps.py", "UnpicklingError"),
    ("rrfp/megatron/memory/storages.py", "torch.multiprocessing.reductions.StorageWeakRef"),
    ("rrfp/simulate/plan/process.py", "pickle"),
    ("rrfp/train/checkpoints/reading.py", "pickle"),
    ("rrfp/train/checkpoints/reading.py", "own_pickle"),
    ("rrfp/train/checkpoints/reading.py", "Unpickler"),
    ("rrfp/train/checkpoints/reading.py", "_MetadataUnpickler"),
}
"""Where torch's own are shut, where dumps of torch's are read that may ask for no class, a weak
reference that stands beside torch's pickling, the pipe from a process to the planner that it
started, which nobody else can write to, and where the metadata of a checkpoint are read, which may
ask for torch's own classes alone."""

OURS = {"append_object", "py_object"}
"""What writes a line of JSON to a file, and a type of ctypes'."""


def forbidden(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (
            name for name in names if FORBIDDEN_MODULES.match(name) and (path, name) not in ALLOWED
        )
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        if FORBIDDEN_NAMES.search(name) and name not in OURS and (path, name) not in ALLOWED:
            yield name
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "torch.save"}:
            yield ast.unparse(node.func)
        if isinstance(node, ast.Constant) and node.value in ("c10d", "rdzv_backend"):
            yield repr(node.value)


@pytest.mark.parametrize("path", sorted((ROOT / "rrfp").rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_in_the_package_pickles_or_meets_by_elastic(path: Path) -> None:
    assert list(forbidden(str(path.relative_to(ROOT)), path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "from torch.distributed.elastic.rendezvous import RendezvousError",
        "from torch.distributed.launcher.api import elastic_launch",
        "import torch.multiprocessing as mp",
        "dist.all_gather_object(infos, own)",
        "dist.broadcast_object_list(told)",
        "dist.gather_object(own, found)",
        "dist.send_object_list([x])",
        "torch.load(path)",
        "LaunchConfig(rdzv_backend='c10d')",
    ],
)
def test_the_walk_finds_what_is_forbidden(source: str) -> None:
    assert list(forbidden("rrfp/train/rank.py", source))


def in_groups() -> dict[str, Any]:
    """What every helper gives on this rank of three."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = {f"w{rank}": torch.full((rank, 2), float(rank)), "b": torch.tensor(rank + 0.5)}
    found: dict[str, Any] = {
        "told": broadcast_json([7, 8] if rank == 0 else None, integers),
        "gathered": [
            {name: tensor.tolist() for name, tensor in of_rank.items()}
            for of_rank in gather_tensors(own if rank != 1 else {})
        ],
        "errors": [],
    }
    for attempt in (
        lambda: broadcast_json("7" if rank == 0 else None, integers),
        lambda: shut(lambda: dist.broadcast_object_list([print])),
        lambda: shut(lambda: dist.all_gather_object([None] * 3, {"a": print})),
    ):
        try:
            attempt()
        except RrfpError as error:
            found["errors"].append(str(error))
    with no_objects():
        plain: list[Any] = [None] * 3
        dist.all_gather_object(plain, [((("wd_mult", 0.0), ("lr", None)), rank == 1), (None, True)])
    found["plain"] = plain
    assert dist.all_gather_object.__module__.startswith("torch")
    dist.destroy_process_group()
    return found


def shut(attempt: Any) -> None:
    with no_objects():
        attempt()


@pytest.mark.timeout(120)
def test_json_and_tensors_go_between_ranks_and_objects_do_not() -> None:
    found = run_ranks(3, in_groups)
    gathered = [
        {"w0": [], "b": 0.5},
        {},
        {"w2": [[2.0, 2.0], [2.0, 2.0]], "b": 2.5},
    ]
    for rank, of_rank in enumerate(found):
        assert of_rank["told"] == (7, 8)
        assert of_rank["gathered"] == (gathered if rank == 0 else [])
        # Rank 0 has nothing to unpickle in a broadcast of its own.
        assert len(of_rank["errors"]) == (2 if rank == 0 else 3)
        assert "what rank 0 sent to the others cannot be read" in of_rank["errors"][0]
        assert "tried to unpickle an object" in of_rank["errors"][-1]
        assert of_rank["plain"] == [
            [((("wd_mult", 0.0), ("lr", None)), peer == 1), (None, True)] for peer in range(3)
        ]


def address_of_gloo() -> list[str]:
    """Where a rank's groups listen, whatever its environment says of gloo."""
    from tests.watch import doors_of

    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    from rrfp.train.ranks.gloo import one_device_at

    with one_device_at("127.0.0.1"):
        dist.init_process_group("gloo")
        # A rank that closed its group here would end the other's connecting to it.
        dist.barrier(dist.new_group([0, 1]))
        dist.destroy_process_group()
        return sorted({door.address for door in doors_of(os.getpid())})


@pytest.mark.timeout(120)
def test_gloo_listens_where_it_is_told() -> None:
    assert run_ranks(2, address_of_gloo) == [["127.0.0.1"]] * 2
