"""What `rrfp simulate` compares: from its flags, rows and sweeps to the settings of each row.

One grammar serves all three. A setting is a name and a text, and is read in the same way whether
it stands as a flag (for all rows), in `--row` (for that row) or in `--sweep` (for the rows that it
makes).
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from itertools import product
from math import prod
from typing import TypeVar

from rrfp.errors import RrfpError, UsageError, did_you_mean
from rrfp.inputs import admission_file, resolve_admission, resolve_hint
from rrfp.planning.balanced_costs import DealtCosts
from rrfp.planning.trials import Setting, check_fits
from rrfp.replay.cost_sources import resolve_costs
from rrfp.schedule.admission import Admission, Admit, check_replicas
from rrfp.schedule.balance import AdmitAcross
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.knobs import (
    IMPATIENT,
    Hold,
    Patience,
    described_hold,
    described_patience,
    parse_hold,
    parse_patience,
)
from rrfp.schedule.named_hints import AutoHint
from rrfp.schedule.policy import AgreementRule, Dispatch, Policy
from rrfp.schedule.rehearsal import fitted
from rrfp.schedule.shape import Placement, Shape
from rrfp.simulate.costs.language_models import check_divided
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.jitter import parse_jitter
from rrfp.simulate.transfers import check_meets

_Choice = TypeVar("_Choice", bound=StrEnum)

_MAX_ROWS = 10_000
"""More than anybody reads."""

_MAX_FORWARDS = 2**22
"""Of all ranks: four times 1,024 stages of 1,024 microbatches, which need 6 GB."""


class LinkMode(StrEnum):
    """How messages pass."""

    ASYNC = "async"
    """Beside the work, one at a time on a directed link."""
    BLOCKING = "blocking"
    """Both ranks wait for it, as in Megatron's own schedules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A row as its user asks for it: one field a flag."""

    hint: str = "bf"
    dispatch: Dispatch = Dispatch.READY
    links: LinkMode = LinkMode.ASYNC
    pp: int
    microbatches: int
    chunks: int = 1
    placement: Placement = Placement.LOOP
    tp: int = 1
    dp: int = 1
    limit: int | None = None
    """D at which forwards are withheld; None withholds none, unless it is the usual one."""
    limits_by_shape: bool = True
    """Whether the limit is the usual one of the row's hint and shape; `with_limits` puts it in."""
    hold: Hold | None = None
    """Most activations kept on a rank, in microbatches of the whole rank or in bytes."""
    w: WeightGradients = WeightGradients.IDLE
    agreement: AgreementRule = AgreementRule.INTERSECTION
    patience: Patience = IMPATIENT
    admit: str = Admit.GIVEN
    """A name, or an admission file."""
    admit_across: AdmitAcross = AdmitAcross.NONE
    costs: str = "uniform"
    jitter: str = "none"
    own: Mapping[str, str] = field(default_factory=dict)
    """What is said of this row, and not of all: its settings in `--row` and `--sweep`, as text."""

    @property
    def label(self) -> str:
        """What is said of this row, as short as it can be understood."""
        words = (
            text if name in _TELLING and text != "none" else f"{name} {text}"
            for name, text in self.own.items()
        )
        return " ".join(words) or "as given"

    @property
    def num_processes(self) -> int:
        return self.pp * self.tp * self.dp

    def described(self) -> dict[str, object]:
        """Every setting by its name, as JSON has it."""
        return {field_of(name): getattr(self, field_of(name)) for name in SETTINGS} | {
            "hold": described_hold(self.hold),
            "patience": described_patience(self.patience),
        }


def asked_rows(flags: Mapping[str, str], rows: Sequence[str], sweeps: Sequence[str]) -> list[Asked]:
    """The rows asked for, in order: the combinations of the sweeps, the first one slowest, and
    each of `rows` in every combination.

    Raises UsageError for a text that is not of this grammar, and for a setting that two of them
    decide.
    """
    own = [_read_row(text) for text in rows] or [{}]
    axes = _read_sweeps(sweeps)
    for name in axes:
        if name in flags:
            raise UsageError(f"--{name} is given and swept as well; keep one of the two")
        if any(name in settings for settings in own):
            raise UsageError(f"--row sets {name}, which is swept as well; keep one of the two")
    num_rows = prod(map(len, axes.values())) * len(own)
    if num_rows > _MAX_ROWS:
        raise UsageError(
            f"this makes {num_rows} rows, more than {_MAX_ROWS}; sweep fewer values at once"
        )
    return [
        _asked(flags, {**dict(zip(axes, values, strict=True)), **settings})
        for values in product(*axes.values())
        for settings in own
    ]


def settings_of(rows: Sequence[Asked], *, recorded: bool) -> list[Setting]:
    """What to simulate for each row.

    Positions in the order that a hint gives in rounds are counted where steps are `recorded` only:
    of a million tasks that order takes as long as the step. Raises UsageError or RrfpError for the
    first row that cannot be, and names it.
    """
    sources = _Sources()
    settings = []
    for row in rows:
        try:
            setting = _setting(row, sources, needs_order=recorded)
            # Where nothing comes before it, the step itself finds out, without drawing twice.
            if recorded or len(rows) > 1:
                sources.check_fits(row, setting)
            settings.append(setting)
        except RrfpError as error:
            if not row.own:
                raise
            place = " ".join(f"{name}={text}" for name, text in row.own.items())
            raise type(error)(f"in the row {place}: {error}") from None
    return settings


def with_limits(rows: Sequence[Asked], settings: Sequence[Setting]) -> list[Asked]:
    """The rows with the limits that their settings have."""
    return [
        replace(row, limit=setting.policy.limit)
        for row, setting in zip(rows, settings, strict=True)
    ]


class _Sources:
    """Reads every hint, costs and jitter once, so that rows which name the same share it."""

    def __init__(self) -> None:
        self._fitting: set[tuple[str, str, AdmitAcross, int, Admission, Shape]] = set()
        self.hint = cache(partial(resolve_hint, auto=True))
        self.fitted = cache(fitted)
        self.costs = cache(resolve_costs)
        self.admission = cache(resolve_admission)
        self.dealt = cache(lambda text, num_replicas: DealtCosts(self.costs(text), num_replicas))
        self.jitter = cache(parse_jitter)
        self.check_meets = cache(check_meets)

    def policy(self, row: Asked) -> Policy:
        return Policy(
            *(self.hint(row.hint), None, row.dispatch, row.limit, row.hold, row.w, row.agreement),
            patience=row.patience,
            limits_by_shape=row.limits_by_shape,
        )

    def costs_of(self, row: Asked) -> Costs:
        """Dealt to the replicas if the row asks for it."""
        costs = self.costs(row.costs)
        check_divided(costs, row.costs, row.tp)
        if row.admit_across is AdmitAcross.NONE:
            return costs
        if row.dp == 1:
            raise UsageError(
                "--admit-across replicas deals to data-parallel replicas and there is 1; add --dp"
            )
        if admission_file(row.admit) is not None:
            raise UsageError(
                f"--admit {row.admit} lists microbatches as the data give them, and --admit-across "
                "replicas deals others to a replica; leave one of them out"
            )
        return self.dealt(row.costs, row.dp)

    def check_fits(self, row: Asked, setting: Setting) -> None:
        key = row.costs, row.jitter, row.admit_across, row.dp, setting.admit, setting.shape
        if key not in self._fitting:
            check_fits(setting)
            self._fitting.add(key)


def _setting(row: Asked, sources: _Sources, *, needs_order: bool) -> Setting:
    if row.links is LinkMode.BLOCKING and row.dispatch is not Dispatch.FIXED:
        raise UsageError(
            "--links blocking has both ranks wait for a message, which only an order that binds "
            "can plan for; add --dispatch fixed or leave --links out"
        )
    shape = Shape(row.pp, row.microbatches, row.chunks, row.placement)
    num_forwards = row.num_processes * row.chunks * row.microbatches
    if num_forwards > _MAX_FORWARDS:
        raise UsageError(
            f"{row.num_processes} processes with --chunks {row.chunks} and --microbatches "
            f"{row.microbatches} run {num_forwards} forwards, more than the {_MAX_FORWARDS} that "
            "are simulated; choose smaller ones"
        )
    asked = sources.policy(row)
    policy, shape = sources.fitted(asked, shape, counts_places=needs_order)
    if isinstance(asked.hint, AutoHint):
        # The choice is made when its steps are simulated.
        policy = asked.of_shape(shape)
    if row.links is LinkMode.BLOCKING:
        assert policy.order is not None
        sources.check_meets(policy.order)
    admission = sources.admission(row.admit, row.microbatches)
    check_replicas(admission, row.dp)
    return Setting(
        shape=shape,
        policy=policy,
        costs=sources.costs_of(row),
        jitter=sources.jitter(row.jitter),
        admit=admission,
        blocking=row.links is LinkMode.BLOCKING,
        num_members=row.tp,
        num_replicas=row.dp,
    )


def _asked(flags: Mapping[str, str], own: Mapping[str, str]) -> Asked:
    texts = {**flags, **own}
    for name, what in (("pp", "pipeline ranks"), ("microbatches", "microbatches per step")):
        if name not in texts:
            raise UsageError(f"--{name} is missing; say how many {what}, as in --{name} 8")
    values = {field_of(name): SETTINGS[name](name, text) for name, text in texts.items()}
    is_ready = values.get("dispatch", Dispatch.READY) is Dispatch.READY
    values["limits_by_shape"] = is_ready and "limit" not in values and values.get("hold") is None
    return Asked(**values, own=own)  # type: ignore[arg-type]  # each by the reader of its field


def _read_row(text: str) -> dict[str, str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--row {text} cannot be read: {error}; close the quotation") from None
    settings: dict[str, str] = {}
    for word in words:
        name, value = _read_pair(
            word, f"--row takes settings such as hint=bfw hold=8, not '{word}'"
        )
        if name in settings:
            raise UsageError(f"--row {text} sets {name} twice; keep one")
        settings[name] = value
    return settings


def _read_sweeps(sweeps: Sequence[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for text in sweeps:
        name, values = _read_pair(
            text, f"--sweep takes a setting and its values, such as limit=4,8,16, not '{text}'"
        )
        if name in axes:
            raise UsageError(f"{name} is swept twice; put its values into one --sweep")
        axes[name] = values.split(",")
    return axes


def _read_pair(text: str, sentence: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(sentence)
    if name not in SETTINGS:
        raise UsageError(
            f"'{name}' is not a setting of a row ({', '.join(SETTINGS)})"
            f"{did_you_mean(name, SETTINGS)}"
        )
    return name, value


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text, re.ASCII):
        raise UsageError(f"--{name} is '{text}'; it must be a whole number from 1 to {10**9 - 1}")
    return int(text)


def count_or_none(name: str, text: str) -> int | None:
    return None if text == "none" else _count(name, text)


def hold_or_none(name: str, text: str) -> Hold | None:
    """Reads `--hold` where no device is used."""
    return None if text == "none" else parse_hold(text, f"--{name}", auto=False)


def _patience(name: str, text: str) -> Patience:
    return parse_patience(text, f"--{name}")


def _choice(*choices: _Choice) -> Callable[[str, str], _Choice]:
    def read(name: str, text: str) -> _Choice:
        if text not in choices:
            raise UsageError(f"--{name} is '{text}'; it must be one of {', '.join(choices)}")
        return choices[choices.index(text)]

    return read


def _text(_: str, text: str) -> str:
    return text


read_dispatch = _choice(Dispatch.READY, Dispatch.FIXED)
"""Reads `--dispatch` where Megatron's own schedule is no choice."""

SETTINGS: dict[str, Callable[[str, str], object]] = {
    "hint": _text,
    "dispatch": read_dispatch,
    "links": _choice(*LinkMode),
    "pp": _count,
    "microbatches": _count,
    "chunks": _count,
    "placement": _choice(*Placement),
    "tp": _count,
    "dp": _count,
    "limit": count_or_none,
    "hold": hold_or_none,
    "w": _choice(*WeightGradients),
    "agreement": _choice(*AgreementRule),
    "patience": _patience,
    "admit": _text,
    "admit-across": _choice(*AdmitAcross),
    "costs": _text,
    "jitter": _text,
}
"""The settings of a row, and how each is read."""


def field_of(name: str) -> str:
    """The field of `Asked` that has a setting."""
    return name.replace("-", "_")


_TELLING = ("hint", "dispatch", "links", "placement", "w", "agreement", "admit", "costs", "jitter")
"""Settings whose texts need no name to be understood, but for `none`."""
