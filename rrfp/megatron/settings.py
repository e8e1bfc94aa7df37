"""The drop-in's settings. Imports no torch."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rrfp.errors import UsageError
from rrfp.inputs import (
    FINITE_ABOVE_0,
    Must,
    admission_file,
    assignment_file,
    declared_in,
    is_choice,
    read_knob,
    setting,
)
from rrfp.runtime.net import tls
from rrfp.runtime.planes.registry import DEFAULT_OUTBOX_MB, MOST_OUTBOX_MB, TransportName
from rrfp.schedule.admission import Admit, AdmitAcross
from rrfp.schedule.hints import Hint
from rrfp.schedule.named_hints import AutoHint
from rrfp.schedule.policy import (
    KNOBS,
    Dispatch,
    Policy,
    check_hold_is_absolute,
    counts_microbatches,
    split_knobs,
)
from rrfp.schedule.shape import Placement
from rrfp.schedule.tasks import plain_integer, plain_real


class GradOrder(StrEnum):
    """The order in which the gradients of microbatches are summed."""

    CANONICAL = "canonical"
    """Microbatch order: gradients are bitwise equal for every order of tasks."""
    ARRIVAL = "arrival"
    """Arrival order: gradients never wait, and their last bits depend on timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings of a step in addition to its policy: the order in which microbatches enter, how
    they are measured, and the order in which their gradients are summed."""

    hold_features: str | Callable[[Any], Any] | None = setting(
        None,
        "What a microbatch's size grows with, for a hold in bytes: MODULE:FUNCTION, which takes an "
        "item of the data and returns a number or several [tokens, patches, images and squares].",
        kind=str,
        panel="Memory",
        metavar="FUNCTION",
    )
    """A name, or the function itself."""
    measure_memory: bool = setting(
        False,
        "Measure what activations take, in every step; a hold in bytes does so while it must.",
        panel="Memory",
    )
    grad_order: GradOrder = setting(
        GradOrder.CANONICAL,
        "How gradients are summed: canonical (default: by microbatch, the same to the bit) or "
        "arrival (in the order of arrival).",
        metavar="ORDER",
    )
    admit: str = setting(
        Admit.GIVEN,
        "The order in which a step's microbatches enter: given (default), pyramid (light, heavy, "
        "light), plan (searched by simulation while the step before runs) or a file with a line "
        "per step.",
        metavar="ORDER",
    )
    admit_cost: str | Callable[[Any], Any] | None = setting(
        None,
        "The weight of a microbatch in the pyramid: work (default), tokens, patches or "
        "MODULE:FUNCTION, which takes its batch.",
        kind=str,
        metavar="COST",
    )
    """A name, or the function itself, from an item to a number."""
    plan_ms: float | None = setting(
        None,
        "How long --admit plan searches for a step's order, in ms [a tenth of the last step].",
        must=FINITE_ABOVE_0,
        metavar="MS",
    )
    admit_across: str = setting(
        AdmitAcross.NONE,
        "Whether a step's microbatches are balanced over the --dp replicas by weight before they "
        "enter: none (default), replicas or a file with a line per step.",
        metavar="HOW",
    )


# Declarations that the drop-in's settings share with the layout of `rrfp train`, whose options
# they are as well.

PLACEMENT = setting(
    Placement.LOOP,
    "Placement of chunks: loop (default: Megatron's interleaving) or v (there and back, with "
    "--chunks 2).",
)
TRANSPORT = setting(
    TransportName.AUTO,
    "How tensors travel between ranks: auto (default: by device and peer), inline (sockets), shm, "
    "cuda-ipc, nixl or bounce.",
)
OUTBOX_MB = setting(
    DEFAULT_OUTBOX_MB,
    "Memory per rank and data plane for large messages that wait for receivers, in MiB; nixl "
    "needs twice as much",
    must=Must(
        f"at least 1 and at most {MOST_OUTBOX_MB}", lambda value: 1 <= value <= MOST_OUTBOX_MB
    ),
    metavar="MIB",
)
TLS = setting(
    False, "Encrypt the messages between pipeline ranks of different hosts (extra `tls`)."
)
_SECONDS = Must("a number of seconds above 0", FINITE_ABOVE_0.holds)


# Rules for combinations of a policy and the settings of a step. Policy checks its own knobs, and
# rrfp.train.checks has the rules that need a layout or a model.


@dataclass(frozen=True, slots=True)
class Spelling:
    """Formats settings in error messages, as command-line flags or as Python keywords."""

    is_flag: bool

    def name(self, keyword: str) -> str:
        """A setting's name as a flag, such as `--plan-ms`, or as a keyword, such as `plan_ms`."""
        return f"--{keyword.replace('_', '-')}" if self.is_flag else keyword

    def value(self, keyword: str, value: object) -> str:
        """A setting with its value, such as `--admit plan` or `admit 'plan'`."""
        return f"{self.name(keyword)} {value}" if self.is_flag else f"{keyword} '{value}'"

    def add(self, keyword: str, value: object) -> str:
        """Advice to set a setting, such as `add --admit plan` or `choose admit 'plan'`."""
        return f"{'add' if self.is_flag else 'choose'} {self.value(keyword, value)}"


FLAGS, KEYWORDS = Spelling(is_flag=True), Spelling(is_flag=False)


def check_step(policy: Policy, step: StepSettings, spelling: Spelling) -> None:
    """Raise UsageError for the first conflict among step settings, or between them and the policy.
    `spelling` formats settings in the message."""
    for message in _conflicts(policy, step, spelling):
        raise UsageError(message)


def _conflicts(policy: Policy, step: StepSettings, spelling: Spelling) -> Iterator[str]:
    """Yield an error message for each conflict: a setting without effect (`hold_features`,
    `admit_cost`, `plan_ms`), `admit` with another `admit_across` or dispatch than it works with,
    and hint `auto` with gradients that are not summed in canonical order."""
    admit, across = spelling.value("admit", step.admit), step.admit_across
    if isinstance(policy.hint, AutoHint) and step.grad_order is not GradOrder.CANONICAL:
        yield (
            f"a grad_order of {step.grad_order} lets the sums of gradients depend on the order of "
            "tasks, and hint auto changes it while the run goes on; choose canonical, or name a "
            "hint"
        )
    is_measured = step.admit == Admit.PLAN or not counts_microbatches(policy.hold)
    if step.hold_features is not None and not is_measured:
        name = spelling.name("hold_features")
        yield (
            f"{name} says what bytes grow with and there is no hold in bytes; set "
            f"{spelling.name('hold')} to a size such as 40GiB, or leave {name} out"
        )
    is_sorted = step.admit in (Admit.PYRAMID, Admit.PLAN) or across == AdmitAcross.REPLICAS
    if step.admit_cost is not None and not is_sorted:
        name = spelling.name("admit_cost")
        yield (
            f"{name} weighs microbatches and {admit} does not sort them; "
            f"{spelling.add('admit', 'pyramid')} or leave {name} out"
        )
    if step.plan_ms is not None and step.admit != Admit.PLAN:
        name = spelling.name("plan_ms")
        yield (
            f"{name} says how long to plan and {admit} plans nothing; "
            f"{spelling.add('admit', 'plan')} or leave {name} out"
        )
    if step.admit == Admit.PLAN and policy.dispatch is Dispatch.MEGATRON:
        yield (
            f"{admit} simulates our dispatcher, and --dispatch megatron runs Megatron-Core's own "
            f"schedule; choose {spelling.value('admit', 'pyramid')} or another --dispatch"
        )
    if across != AdmitAcross.NONE and step.admit not in (Admit.GIVEN, Admit.PYRAMID):
        yield (
            f"{spelling.value('admit_across', across)} assigns a replica other microbatches than "
            f"{admit} orders; choose {spelling.value('admit', 'pyramid')}"
        )
    if across not in list(AdmitAcross) and step.admit != Admit.GIVEN:
        yield (
            f"the file of {spelling.value('admit_across', across)} says in which order "
            f"microbatches enter; leave {admit} out"
        )


@dataclass(frozen=True, slots=True, init=False)
class DispatchSettings(StepSettings):
    """Settings of the drop-in: the dispatcher's policy, the order of microbatches, and the links.

    Keywords are all knobs of `rrfp.schedule.policy.Policy`, which may be text, and the settings
    below. The defaults are the paper's.
    """

    policy: Policy
    """The dispatcher's policy, built from the keywords that are its knobs."""
    transport: TransportName = TRANSPORT
    outbox_mb: int = OUTBOX_MB
    tls: bool = TLS
    placement: Placement = PLACEMENT
    connect_s: float | None = setting(
        None,
        "Seconds that ranks may take to connect at their first step [the timeout of the pipeline's "
        "process group].",
        must=_SECONDS,
    )
    silence_s: float = setting(
        20.0,
        "Seconds without any message or heartbeat from a neighbor after which it counts as lost",
        must=_SECONDS,
    )
    stall_s: float | None = setting(
        None,
        "Seconds that a rank waits with nothing arriving before it fails [the timeout of the "
        "pipeline's process group, and at least 600].",
        must=_SECONDS,
    )

    def __init__(
        self, hint: str | Hint | None = None, *, policy: Policy | None = None, **keywords: Any
    ) -> None:
        """Settings by keyword. Knobs without a keyword are as in `policy`, or have their default.
        With any knob, or without `policy`, the shape's usual limit applies if neither limit nor
        hold is set.

        Raises UsageError for an unknown name, an invalid value and settings that conflict, and
        TypeError for an unknown keyword.
        """
        given = keywords if hint is None else {"hint": hint, **keywords}
        knobs, others = split_knobs(given)
        if policy is None or knobs:
            base = {} if policy is None else policy.values()
            policy = Policy(**{**base, **_parse_knobs(knobs)}).with_usual_limit()
        defaults = {each.name: each.default for each in fields(type(self)) if each.name != "policy"}
        if unknown := next((name for name in others if name not in defaults), None):
            raise TypeError(f"DispatchSettings has no keyword '{unknown}'")
        for name, value in {"policy": policy, **defaults, **others}.items():
            object.__setattr__(self, name, value)
        self._convert()
        self._check()

    def _convert(self) -> None:
        """Replace, in place, names by enum members, other libraries' numbers by Python's, and
        relative paths by absolute ones. Raise UsageError for an unknown name, and for an order that
        is not text."""
        for each in _DECLARED:
            value = getattr(self, each.field)
            if is_choice(each.kind):
                value = _member(each.field, value, [*each.kind])
            elif each.kind is int:
                value = plain_integer(value)
            elif each.kind is float:
                value = plain_real(value)
            object.__setattr__(self, each.field, value)
        for name, file_of in (("admit", admission_file), ("admit_across", assignment_file)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise UsageError(f"{name} is {value!r}; it must be a name or a path, as text")
            if (file := file_of(value)) is not None:
                # A script may change the directory before the first step reads the file.
                object.__setattr__(self, name, str(file.absolute()))

    def _check(self) -> None:
        """Raise UsageError for a value of the wrong type or out of range, for `tls` without the
        package that it needs, for Megatron's own dispatch, for a hold relative to 1F1B's, and for
        settings that conflict."""
        for each in _DECLARED:
            each.check_keyword(getattr(self, each.field))
        if self.tls and not tls.is_installed():
            raise UsageError(
                f"tls needs the package cryptography, which is not installed; {tls.HOW_TO_INSTALL}"
            )
        for name in ("admit_cost", "hold_features"):
            value = getattr(self, name)
            is_function = callable(value) and isinstance(value, Hashable)
            if not (value is None or isinstance(value, str) or is_function):
                raise UsageError(
                    f"{name} is {value!r:.50}; it must be a name, or a function of an item that "
                    "can be hashed"
                )
        if self.policy.dispatch is Dispatch.MEGATRON:
            raise UsageError("dispatch is 'megatron'; choose one of ready, fixed")
        check_hold_is_absolute(self.policy.hold)
        check_step(self.policy, self, KEYWORDS)


_DECLARED = tuple(declared_in("", DispatchSettings))


def _member(name: str, value: object, choices: list[StrEnum]) -> StrEnum:
    """Return the choice that equals a value. Raise UsageError, which lists the choices, if there is
    none."""
    if value not in choices:
        raise UsageError(f"{name} is '{value}'; choose one of {', '.join(choices)}")
    return choices[choices.index(value)]  # type: ignore[arg-type]  # it is in there


def _parse_knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Parse knobs that are given as keywords, such as a hint's name. Values of knobs that take no
    text are returned as given, unchecked. Raise UsageError as `read_knob` does."""
    values = {}
    for name, value in knobs.items():
        given = str(value) if isinstance(KNOBS[name].default, StrEnum) else value
        is_number = str not in KNOBS[name].kinds
        values[name] = given if is_number else read_knob(KNOBS[name], given, f"the {name}")
    return values


def _signature() -> inspect.Signature:
    """The signature of `DispatchSettings` that `help()` shows: each knob of the policy, of which
    only `hint` may be positional, and the other settings; `policy` itself is left out."""
    keyword, positional = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, positional if name == "hint" else keyword, default=each.default)
        for name, each in KNOBS.items()
    ]
    parameters += [
        inspect.Parameter(each.name, keyword, default=each.default)
        for each in fields(DispatchSettings)
        if each.name != "policy"
    ]
    return inspect.Signature(parameters)


DispatchSettings.__signature__ = _signature()  # type: ignore[attr-defined]
