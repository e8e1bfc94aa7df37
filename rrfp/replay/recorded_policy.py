"""What steered a recorded run.

It stands in the run's description (`run.json`, and the trace) as `policy`, and in those of earlier
versions among the `settings`. Of an order that came from a file only the path stands there; the
order is read from the places that the tasks were recorded to have in it.
"""

from contextlib import suppress
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from rrfp.errors import RrfpError, UsageError
from rrfp.replay.step_records import StepRecords
from rrfp.schedule.hints.hint import WeightGradients
from rrfp.schedule.hints.table import HINTS, hint_named
from rrfp.schedule.hold import Hold, check_is_absolute, parse_hold
from rrfp.schedule.order import Order
from rrfp.schedule.patience.setting import (
    IMPATIENT,
    Patience,
    described_patience,
    parse_patience,
)
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import order_of
from rrfp.schedule.shape import Shape
from rrfp.trace.perfetto.format import MOST_OF_A_KIND
from rrfp.trace.records import Recording
from rrfp.trace.run_policy import stated_policy
from rrfp.trace.stimuli import task_of

_Choice = TypeVar("_Choice", bound=StrEnum)


class RecordedSettings:
    """The settings of a run, as its trace has them."""

    def __init__(self, recording: Recording) -> None:
        found = recording.settings.get("settings")
        if not isinstance(found, dict):
            raise RrfpError(
                "the trace does not tell the settings of its run; record one with 'rrfp train'"
            )
        self._values: dict[str, Any] = found
        self._is_simulated = recording.settings.get("simulated") is True
        self._policy = stated_policy(recording.settings)

    def text(self, name: str) -> str:
        value = self._policy.get(name)
        if not isinstance(value, str):
            raise self._strange(name, value)
        return value

    def _bound(self, name: str) -> int | None:
        """None withholds nothing."""
        return self._whole(name, self._policy.get(name))

    def choice(self, name: str, choices: type[_Choice], default: _Choice) -> _Choice:
        """One of the choices; the default in traces from before there was one."""
        value = self._policy.get(name, default)
        if value not in list(choices):
            raise self._strange(name, value)
        return choices(str(value))

    def number(self, name: str) -> int | None:
        """A setting, None where it was not given."""
        return self._whole(name, self._values.get(name))

    def even_layers(self, shape: Shape) -> int | None:
        """The model's layers, if the stages share them evenly; None otherwise, or if it does not
        tell."""
        layers = self._values.get("layers")
        is_even = type(layers) is int and layers > 0 and layers % shape.num_stages == 0
        is_uneven = self._values.get("uneven_stages") or isinstance(self._values.get("layout"), str)
        return layers if is_even and not is_uneven else None

    def _whole(self, name: str, value: object) -> int | None:
        """A whole number from 1 on, or None."""
        if value is not None and (type(value) is not int or value < 1):
            raise self._strange(name, value)
        return value

    @property
    def is_blocking(self) -> bool:
        return self._is_native or self._values.get("links") == "blocking"

    @property
    def _is_native(self) -> bool:
        return self._policy.get("dispatch") == Dispatch.MEGATRON

    @property
    def dispatch(self) -> Dispatch:
        """Megatron's own schedules bind as a fixed order does."""
        if self._is_native:
            return Dispatch.FIXED
        return self.choice("dispatch", Dispatch, Dispatch.READY)

    @property
    def computes_on_cpu(self) -> bool:
        return not self._is_simulated and self._values.get("device", "cpu") == "cpu"

    @property
    def limit(self) -> int | None:
        return self._bound("limit")

    def hold(self, shape: Shape) -> Hold | None:
        """In microbatches or bytes; None withholds nothing."""
        value = self._policy.get("hold")
        found: Hold | None = None
        if isinstance(value, str):
            with suppress(UsageError):
                found = parse_hold(value)
                check_is_absolute(found)
                return found
        elif isinstance(value, float) and 0 < value <= MOST_OF_A_KIND:
            # A number of slots of one chunk each.
            found = Fraction(round(value * shape.num_chunks), shape.num_chunks)
            if float(found) == value:
                return found
        else:
            return self._bound("hold")
        raise self._strange("hold", value)

    @property
    def patience(self) -> Patience:
        """Runs of earlier versions had none."""
        value = self._policy.get("patience", described_patience(IMPATIENT))
        with suppress(UsageError):
            if isinstance(value, str):
                return parse_patience(value)
        raise self._strange("patience", value)

    @staticmethod
    def _strange(name: str, value: object) -> RrfpError:
        return RrfpError(
            f"the settings of the trace say {name} = {value!r}, which no run has; record it with "
            "'rrfp train'"
        )


def policy_of(settings: RecordedSettings, shape: Shape, step: StepRecords) -> Policy:
    """What steered every rank of the run."""
    name = settings.text("hint")
    hint = hint_named(name).on(shape) if name in HINTS else _order_as_run(name, shape, step)
    order = order_of(hint, shape)
    if order.shape.kinds != shape.kinds:
        raise RrfpError(
            f"the tasks of the trace are {' '.join(shape.kinds)} and its hint, {name}, has "
            f"{' '.join(order.shape.kinds)}; see 'rrfp trace check'"
        )
    return Policy(
        order if isinstance(hint, Order) else hint,
        order,
        settings.dispatch,
        settings.limit,
        settings.hold(shape),
        settings.choice("w", WeightGradients, WeightGradients.IDLE),
        settings.choice("agreement", AgreementRule, AgreementRule.INTERSECTION),
        settings.patience,
    )


def _order_as_run(name: str, shape: Shape, step: StepRecords) -> Order:
    """The order of a file, by the places that a step's tasks had in it."""
    rows = []
    for pp_rank, members in enumerate(step.replicas[0]):
        by_place = sorted(members[0].tasks, key=lambda task: task.hint_position)
        if [task.hint_position for task in by_place] != list(range(shape.num_tasks_of_a_rank)):
            raise RrfpError(
                f"the trace does not tell where the tasks of pipeline rank {pp_rank} stand in its "
                f"order {name}; see 'rrfp trace check'"
            )
        rows.append(tuple(map(task_of, by_place)))
    return Order(name, shape, tuple(rows))
