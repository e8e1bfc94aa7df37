"""A row of the paper's tables as settings to simulate."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from rrfp.planning.trials import Setting, run_settings
from rrfp.schedule.hints import kinds_of
from rrfp.schedule.named_hints import hint_named
from rrfp.schedule.policy import Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.simulate.costs.language_models import FlopCosts, parse_flops
from rrfp.simulate.jitter import Jitter, parse_jitter

FOLDER = Path(__file__).parent

Parameters = Mapping[str, Any]


class Method(StrEnum):
    """The paper's methods, and one that it does not have."""

    BLOCKING_1F1B = "1f1b"
    ZB = "zb"
    BF = "bf"
    BFW = "bfw"
    ASYNC_1F1B = "async 1f1b"
    """The fixed order over the same asynchronous links as BF."""


_HINTS = {
    Method.BLOCKING_1F1B: "1f1b",
    Method.ZB: "zb-h1",
    Method.BF: "bf",
    Method.BFW: "bfw",
    Method.ASYNC_1F1B: "1f1b",
}
_BLOCKING = (Method.BLOCKING_1F1B, Method.ZB)
_READY = (Method.BF, Method.BFW)


@dataclass(frozen=True, slots=True)
class Workload:
    """The models and ranks of a row in the paper's tables."""

    language: str
    tp: int
    pp: int
    dp: int
    batch: int
    """Microbatches of one sample, over all replicas."""
    vision: str | None = None

    @property
    def models(self) -> str:
        return self.language if self.vision is None else f"{self.language} + {self.vision}"

    @property
    def ranks(self) -> str:
        return f"{self.tp}/{self.pp}/{self.dp}"


def load(name: str) -> dict[str, Any]:
    """A TOML file of this folder."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def document(workload: Workload, parameters: Parameters, *, is_blocking: bool) -> dict[str, Any]:
    """The FLOP model of a workload, as `rrfp simulate --costs` reads it from a TOML file."""
    fitted, machine, data = parameters["fitted"], parameters["machine"], parameters["multimodal"]
    meeting_s = fitted["meeting_s"] if is_blocking else 0.0
    group = workload.tp * workload.dp
    model = {
        "split": parameters["split"],
        "recompute": parameters["recompute"],
        "precision_bytes": parameters["precision_bytes"],
        "device": {"flops_per_s": fitted["flops_per_s"], "layer_s": machine["layer_s"]},
        "tensor_parallel": {
            "size": workload.tp,
            "latency_s": machine["all_reduce_latency_s"],
            "bandwidth_bytes_per_s": fitted["all_reduce_bytes_per_s"],
        },
        "links": {
            "latency_s": machine["latency_s"] + meeting_s,
            "bandwidth_bytes_per_s": machine["bandwidth_bytes_per_s"],
            # The ranks of a stage lie side by side, replicas included, as Megatron numbers them.
            "ranks_per_host": machine["ranks_per_host"] // group,
            "between_hosts_factor": machine["between_hosts_factor"],
        },
        "agreement": {"seconds": machine["agreement_s"]},
    }
    language = parameters["language"][workload.language]
    if workload.vision is None:
        return {**model, "language": {**language, **parameters["text"]}}
    seen = {key: data[key] for key in ("images", "patches", "patches_per_token")}
    return {
        **model,
        "language": {**language, "tokens": data["text"]},
        "vision": {**parameters["vision"][workload.vision], **seen},
    }


class Simulation:
    """Simulates workloads under one set of parameters."""

    def __init__(self, parameters: Parameters, num_seeds: int | None = None) -> None:
        self.parameters = parameters
        self.seeds = range(num_seeds or parameters["seeds"])
        # Rows that share costs or jitter share the object, and so what is drawn from it.
        self._costs = cache(self._read_costs)
        self._jitter = cache(parse_jitter)

    def setting(
        self,
        workload: Workload,
        method: Method,
        *,
        hint: str | None = None,
        limit: int | None = None,
        jitter: str | None = None,
    ) -> Setting:
        """How a method runs a workload; `hint` and `limit` replace its own, `jitter` comes
        on top of the natural one."""
        shape = Shape(workload.pp, workload.batch // workload.dp)
        name = hint or _HINTS[method]
        found = hint_named(name).for_shape(shape)
        shape = replace(shape, kinds=kinds_of(found))
        is_ready = method in _READY
        policy = Policy(
            found,
            None if is_ready else order_of(found, shape),
            Dispatch.READY if is_ready else Dispatch.FIXED,
            (limit or self.parameters["limit"]) if is_ready else None,
        )
        return Setting(
            shape=shape,
            policy=policy,
            costs=self._costs(workload, method in _BLOCKING),
            jitter=self._natural_jitter(jitter),
            blocking=method in _BLOCKING,
            num_members=workload.tp if is_ready else 1,
            num_replicas=workload.dp,
        )

    def seconds(self, settings: Sequence[Setting]) -> list[float]:
        """The mean seconds of a step of each setting."""
        return [row.mean_s for row in run_settings(settings, self.seeds)]

    def _read_costs(self, workload: Workload, is_blocking: bool) -> FlopCosts:
        model = document(workload, self.parameters, is_blocking=is_blocking)
        return parse_flops(model, workload.models)

    def _natural_jitter(self, injected: str | None) -> Jitter:
        spec = f"lognormal:{self.parameters['fitted']['sigma']:.6f}"
        return self._jitter(spec if injected is None else f"{spec}+{injected}")
