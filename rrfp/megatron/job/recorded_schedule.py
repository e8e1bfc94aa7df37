"""A drop-in's schedule function, each call of which is recorded."""

from collections.abc import Callable
from typing import Any

from rrfp.megatron.job.recording import JobRecording


class RecordedSchedule:
    """A schedule function of a drop-in, recorded. Its other attributes are those of the drop-in."""

    def __init__(self, schedule: Callable[..., Any], recording: JobRecording) -> None:
        self._schedule = schedule
        self._recording = recording

    def __call__(self, **arguments: Any) -> Any:
        step = self._recording.begin(arguments)
        data = self._schedule(**arguments)
        steering = getattr(self._schedule, "last_steering", None)
        if steering is not None and not arguments.get("forward_only", False):
            self._recording.steered(step, steering.policy)
        planes = getattr(self._schedule, "planes", None)
        if planes is not None:
            self._recording.connected(planes)
        order = getattr(self._schedule, "last_order", None)
        if order is not None and not arguments.get("forward_only", False):
            self._recording.planned(order)
        look_ahead = getattr(self._schedule, "look_ahead", None)
        hands = None if look_ahead is None else look_ahead.hands
        if hands is not None and not arguments.get("forward_only", False):
            self._recording.dealt(hands)
        self._recording.end(step)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)
