"""The settings of a training run: one field a flag, the same names in a TOML file.

This file imports no torch: the launcher checks the settings before it starts any process.
"""

import dataclasses
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from rrfp.errors import UsageError

DEVICES = ("cpu",)

_MAX_SEED = 2**32 - 1
_MAX_PORT = 2**16 - 1

_MAX_MICROBATCHES = 2**16
"""Far more than any pipeline can use; each costs a rank some memory for its tasks."""

_MAX_RANKS_PER_CORE = 16
"""More ranks than this on a host would start for many minutes, if there were memory for them."""


class DispatchMode(StrEnum):
    """Who decides what a rank runs next."""

    READY = "ready"
    """The hint ranks the tasks that are ready."""
    FIXED = "fixed"
    """The hint's order is binding."""
    MEGATRON = "megatron"
    """Megatron-Core's own schedule function, with its blocking transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What to train, on how many ranks, in which order, and where the run goes."""

    hint: str | None = None
    """A hint's name or an order file; None chooses by the dispatch (`resolved_hint`)."""
    dispatch: str = DispatchMode.READY
    pp: int = 4
    """Pipeline ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    dp: int = 1
    """Data-parallel replicas."""
    microbatches: int = 8
    """Microbatches a step, for each replica."""
    micro_batch_size: int = 1
    """Sequences a microbatch."""
    seq_length: int = 256
    """Tokens a sequence; the longest with `variable_lengths`."""
    layers: int = 8
    hidden: int = 128
    heads: int = 4
    lr: float = 2e-3
    """Learning rate, once it has warmed up over the first steps."""
    steps: int = 60
    limit: int | None = None
    """D (forwards minus backwards run on a rank) at which `ready` dispatch withholds forwards; None
    is `DEFAULT_LIMIT`. A binding order is checked against it when it is given."""
    seed: int = 1234
    data: Path | None = None
    """Text file, folder, JSONL or Megatron .bin/.idx; None trains on Python's standard library."""
    variable_lengths: bool = False
    """Give every microbatch the length of its own documents."""
    device: str = "cpu"
    out: Path | None = None
    """The run's directory; None names it by time and hint."""
    force: bool = False
    """Overwrite an existing `out`."""
    no_trace: bool = False
    nnodes: int = 1
    """Hosts; every one runs the same command but for `node_rank`."""
    node_rank: int = 0
    """This host's number, from 0."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of host 0, where the hosts meet."""

    @property
    def resolved_hint(self) -> str:
        """The hint asked for, or the default of the dispatch."""
        if self.hint is not None:
            return self.hint
        return "1f1b" if self.dispatch == DispatchMode.MEGATRON else "bf"

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @classmethod
    def from_toml(cls, path: Path, **flags: Any) -> Self:
        """Read a TOML file of the flags' names; `flags` given beside it go first.

        Relative paths in the file count from the current directory, as on the command line.
        Raises UsageError for a file that cannot be read, an unknown name or a wrong type.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"cannot read the configuration {path}: {error.strerror}; check --config"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not TOML: {error}") from None
        return cls(**{**_checked(table, path), **flags})

    def described(self) -> dict[str, object]:
        """Every setting by its name, as JSON has it, the hint resolved."""
        values = dataclasses.asdict(self) | {"hint": self.resolved_hint}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

    def to_json(self) -> str:
        """These settings as text, for `from_json`."""
        return json.dumps(self.described())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        paths = {name: Path(values[name]) for name in ("data", "out") if values[name] is not None}
        return cls(**{**values, **paths})

    def validate(self) -> None:
        """Raise UsageError when these settings cannot run. Hints and data are checked apart."""
        for name in _AT_LEAST_ONE:
            _require(
                getattr(self, name) is None or getattr(self, name) >= 1,
                f"--{_flag(name)} is {getattr(self, name)}; it must be at least 1",
            )
        _require(
            self.microbatches <= _MAX_MICROBATCHES,
            f"--microbatches is {self.microbatches}; it must be at most {_MAX_MICROBATCHES}",
        )
        _require(
            math.isfinite(self.lr) and self.lr > 0,
            f"--lr is {self.lr}; it must be a finite number above 0",
        )
        _require(
            0 <= self.seed <= _MAX_SEED, f"--seed is {self.seed}; it must be in 0..{_MAX_SEED}"
        )
        check_device(self.device)
        dispatches = tuple(DispatchMode)
        _require(
            self.dispatch in dispatches,
            f"'{self.dispatch}' is not a dispatch ({', '.join(dispatches)})",
        )
        _require(
            self.dispatch != DispatchMode.MEGATRON or self.resolved_hint == "1f1b",
            f"--dispatch megatron runs 1f1b only, not '{self.hint}'; leave --hint out",
        )
        self._validate_layout()
        self._validate_hosts()

    def _validate_layout(self) -> None:
        _require(
            self.layers % self.pp == 0,
            f"{self.layers} layers do not divide by {self.pp} pipeline ranks; "
            "change --layers or --pp",
        )
        _require(
            self.hidden % self.heads == 0,
            f"a hidden size of {self.hidden} does not divide by {self.heads} heads; "
            "change --hidden or --heads",
        )
        _require(
            self.hidden // self.heads % 2 == 0,
            f"a head of {self.hidden // self.heads} numbers cannot be rotated in pairs; "
            "make --hidden an even multiple of --heads",
        )
        _require(
            self.heads % self.tp == 0,
            f"{self.heads} heads do not divide by {self.tp} tensor-parallel ranks; "
            "change --heads or --tp",
        )
        _require(
            not self.variable_lengths or self.seq_length % self.tp == 0,
            f"a sequence length of {self.seq_length} does not divide by {self.tp} "
            "tensor-parallel ranks, as --variable-lengths needs; change --seq-length or --tp",
        )

    def _validate_hosts(self) -> None:
        _require(
            self.world_size % self.nnodes == 0,
            f"{self.world_size} ranks do not divide over {self.nnodes} hosts; change --nnodes",
        )
        num_ranks, num_cores = self.world_size // self.nnodes, os.cpu_count() or 1
        _require(
            num_ranks <= _MAX_RANKS_PER_CORE * num_cores,
            f"{num_ranks} ranks on a host of {num_cores} cores are too many; change --pp, --tp or "
            f"--dp so that there are at most {_MAX_RANKS_PER_CORE * num_cores}",
        )
        _require(
            0 <= self.node_rank < self.nnodes,
            f"--node-rank is {self.node_rank}; with --nnodes {self.nnodes} it must be in "
            f"0..{self.nnodes - 1}",
        )
        if self.rdzv_endpoint is not None:
            host, _, port = self.rdzv_endpoint.rpartition(":")
            _require(
                bool(host) and port.isdecimal() and 0 < int(port) <= _MAX_PORT,
                f"--rdzv-endpoint is '{self.rdzv_endpoint}'; it must be HOST:PORT, such as "
                f"node0:29400",
            )
        if self.nnodes > 1:
            _require(
                self.rdzv_endpoint is not None,
                "several hosts need --rdzv-endpoint HOST:PORT, an address of host 0",
            )
            _require(
                self.out is not None,
                "several hosts need --out DIR on a file system that all of them share",
            )


def check_device(device: str) -> None:
    """Raise UsageError unless training can run on the device."""
    _require(device != "cuda", "--device cuda has no transport in this version; use --device cpu")
    _require(device in DEVICES, f"'{device}' is not a device; use --device {' or '.join(DEVICES)}")


_AT_LEAST_ONE = (
    "pp",
    "tp",
    "dp",
    "microbatches",
    "micro_batch_size",
    "seq_length",
    "layers",
    "hidden",
    "heads",
    "steps",
    "limit",
    "nnodes",
)

_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise UsageError(sentence)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _checked(table: Mapping[str, object], path: Path) -> dict[str, object]:
    field_types = {
        name: _without_none(annotation)
        for name, annotation in typing.get_type_hints(TrainSettings).items()
    }
    values: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in field_types:
            known = ", ".join(_flag(field.name) for field in dataclasses.fields(TrainSettings))
            raise UsageError(f"{path} sets '{key}', which is not a setting ({known})")
        if name in values:
            raise UsageError(f"{path} sets '{_flag(name)}' twice; keep one")
        values[name] = _converted(value, field_types[name], f"{path} sets {key}")
    return values


def _without_none(annotation: Any) -> type:
    if isinstance(annotation, types.UnionType):
        (annotation,) = (part for part in annotation.__args__ if part is not types.NoneType)
    assert isinstance(annotation, type)
    return annotation


def _converted(value: object, wanted: type, context: str) -> object:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise UsageError(f"{context} to {value!r}; it takes {_TYPE_NAMES.get(wanted, 'a path')}")
    return value
