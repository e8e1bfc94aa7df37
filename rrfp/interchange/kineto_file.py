"""One file of torch.profiler (Kineto's JSON): the ranges in it that tell of a pipeline.

Times are microseconds with fractions, counted from `baseTimeNanoseconds`. A range stands in a
profile once for the CPU, as `user_annotation`. If the GPU worked for it, it also stands there once
a stream as `gpu_user_annotation`, from its first kernel to its last; `External id` tells which
belong together.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rrfp.errors import RrfpError
from rrfp.interchange.json_stream import JsonStream, writable
from rrfp.interchange.range_names import TaskRange, is_overlapped, parse_profiler_step, parse_range
from rrfp.trace.perfetto.format import MOST_OF_A_KIND

_ON_CPU, _ON_GPU = "user_annotation", "gpu_user_annotation"
_NS_PER_US = 1_000
_MOST_NS = 1 << 61
"""In 2043, counted from 1970."""
_MOST_PID = (1 << 31) - 1
_DIGITS = re.compile(r"\d{1,20}", re.ASCII)
_OF_TENSORBOARD = re.compile(r"(?P<host>.+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json")


class Event(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    external_id: int | None


@dataclass(slots=True)
class Profile:
    """What one file holds."""

    path: Path
    number: int = -1
    """Of its rank; -1 if it does not tell."""
    world_size: int | None = None
    pid: int = 0
    on_cpu: list[Event] = field(default_factory=list)
    on_gpu: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    """The profiler's own steps."""

    host_name: str = "unknown"

    @property
    def host(self) -> str:
        match = _OF_TENSORBOARD.match(self.path.name)
        return writable(match["host"] if match else self.host_name)

    @property
    def names_tasks(self) -> bool:
        """Whether any range is one of a task."""
        return any(isinstance(parse_range(event.name), TaskRange) for event in self.on_cpu)


def read_profile(path: Path) -> Profile:
    profile = Profile(path)
    stream = JsonStream(path)
    base_ns = 0
    has_events = stream.first() == "["
    if has_events:
        _keep_events(profile, stream)
    else:
        for key in stream.keys():  # noqa: SIM118 (no mapping)
            if key == "traceEvents" and stream.first() == "[":
                _keep_events(profile, stream)
                has_events = True
                continue
            value = stream.value()
            if key == "baseTimeNanoseconds":
                base_ns = start_of_times(path, value)
            elif key == "host_name" and isinstance(value, str):
                profile.host_name = value
            elif key == "distributedInfo" and isinstance(value, dict):
                number = _whole(value.get("rank"))
                profile.number = -1 if number is None else number
                profile.world_size = _whole(value.get("world_size"))
                if (profile.world_size or 0) > MOST_OF_A_KIND:
                    raise RrfpError(f"{path} says that its run had {profile.world_size} ranks")
    if not has_events:
        raise RrfpError(
            f"{path} is no profile: it has no traceEvents; import what torch.profiler's "
            "export_chrome_trace wrote"
        )
    for events in (profile.on_cpu, profile.on_gpu, profile.steps):
        events[:] = [
            event._replace(start_ns=event.start_ns + base_ns, end_ns=event.end_ns + base_ns)
            for event in sorted(events, key=lambda event: event[:3])
        ]
    return profile


def start_of_times(path: Path, value: object) -> int:
    """From when the times of a profile count, in nanoseconds since 1970."""
    base_ns = _whole(value) or 0
    if base_ns > _MOST_NS:
        raise RrfpError(f"{path} says that its times count from {str(value)[:20]} ns")
    return base_ns


def _keep_events(profile: Profile, stream: JsonStream) -> None:
    """Keep, of all events, the ranges that tell of a pipeline and the profiler's own steps."""
    for event in stream.items():
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category, name = event.get("cat"), event.get("name")
        if category not in (_ON_CPU, _ON_GPU) or not isinstance(name, str):
            continue
        if is_overlapped(name):
            raise RrfpError(
                f"{profile.path} has ranges of a forward and a backward at once, such as "
                f"'{name[:40]}', which nothing tells apart; profile a schedule without "
                "OVERLAP_F_B"
            )
        is_step = parse_profiler_step(name) is not None
        if not is_step and parse_range(name) is None:
            continue
        kept = event_of(profile.path, event, name)
        if category == _ON_GPU:
            if not is_step:
                profile.on_gpu.append(kept)
        elif is_step:
            profile.steps.append(kept)
        else:
            profile.on_cpu.append(kept)
            pid = _whole(event.get("pid")) or 0
            profile.pid = pid if pid <= _MOST_PID else 0


def event_of(path: Path, event: dict[str, Any], name: str) -> Event:
    """Its times and its number. Raises RrfpError where these are none of a profile."""
    start_us, duration_us = event.get("ts"), event.get("dur")
    most_us = _MOST_NS // _NS_PER_US
    for what, value in (("ts", start_us), ("dur", duration_us)):
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            # NaN fails this comparison too.
            or not (0 if what == "dur" else -most_us) <= value <= most_us
        ):
            raise RrfpError(
                f"{path} has a range '{name[:40]}' whose {what} is {str(value)[:20]}; profile the "
                "run again"
            )
    assert start_us is not None
    assert duration_us is not None
    start_ns = _ns(start_us)
    arguments = event.get("args")
    external_id = arguments.get("External id") if isinstance(arguments, dict) else None
    if isinstance(external_id, str) and _DIGITS.fullmatch(external_id):
        external_id = int(external_id)
    return Event(start_ns, start_ns + _ns(duration_us), name, _whole(external_id))


def _ns(time_us: float) -> int:
    """Whole and fraction apart: a float of microseconds since 1970 has no room for nanoseconds."""
    whole_us = math.floor(time_us)
    return whole_us * _NS_PER_US + round((time_us - whole_us) * _NS_PER_US)


def _whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
