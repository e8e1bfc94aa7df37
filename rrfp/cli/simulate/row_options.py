"""Parses the flags, `--row` and `--sweep` of `rrfp simulate` into rows.

A setting is a name and a text. It is parsed in the same way as a flag (for all rows), in `--row`
(for that row) and in `--sweep` (for the rows that the sweep makes). The settings of a row are the
knobs of the policy and the fields that `RowOptions` declares.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from itertools import product
from math import prod
from typing import Any

from rrfp.cli.declared_options import DATA, LAYOUT, SCHEDULE, cost_names
from rrfp.errors import RrfpError, UsageError, did_you_mean
from rrfp.inputs import Declared, declared_in, declared_knobs, is_choice, read_knob, setting
from rrfp.schedule.admission import Admit, AdmitAcross
from rrfp.schedule.policy import KNOBS, Knob, Policy, one_of, parse_count
from rrfp.schedule.shape import Placement

_MAX_ROWS = 10_000
"""The largest number of rows of one command."""


class LinkMode(StrEnum):
    """How messages are transferred."""

    ASYNC = "async"
    """Concurrently with compute, one at a time on each directed link."""
    BLOCKING = "blocking"
    """Both ranks wait for the transfer, as in Megatron's own schedules."""


_COSTS = "Costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """The settings of one row."""

    policy: Policy
    """The policy; `with_limits` later adds the default limit of the row's shape."""
    links: LinkMode = setting(
        LinkMode.ASYNC,
        "async (default: messages overlap with compute) or blocking (both ranks wait for "
        "them, as in Megatron's own schedules; needs --dispatch fixed).",
        panel=_COSTS,
        metavar="MODE",
    )
    pp: int = setting(MISSING, "Pipeline ranks [required].", panel=LAYOUT)
    microbatches: int = setting(
        MISSING, "Microbatches per step and replica [required].", panel=DATA
    )
    chunks: int = setting(1, "Model chunks per pipeline rank", panel=LAYOUT)
    placement: Placement = setting(
        Placement.LOOP,
        "How chunks are placed: loop (default) or v (with --chunks 2).",
        panel=LAYOUT,
        metavar="WHERE",
    )
    tp: int = setting(1, "Tensor-parallel ranks", panel=LAYOUT)
    dp: int = setting(1, "Data-parallel replicas", panel=LAYOUT)
    admit: str = setting(
        Admit.GIVEN,
        "The order in which microbatches enter: given (default), pyramid (light, heavy, "
        "light), plan (searched by simulation before each step) or a file with a line per step.",
        panel=SCHEDULE,
        metavar="ORDER",
    )
    """A name or an admission file."""
    admit_across: AdmitAcross = setting(
        AdmitAcross.NONE,
        "Balance each step's microbatches over the --dp replicas by cost: none (default) or "
        "replicas.",
        panel=SCHEDULE,
        metavar="HOW",
    )
    costs: str = setting(
        "uniform",
        "uniform (default), language, multimodal, a CSV or TOML file, or a run or its trace.",
        panel=_COSTS,
        completes=cost_names,
    )
    jitter: str = setting(
        "none",
        "none (default), J0 to J3, lognormal:0.5, ...: see docs/reference/costs.md.",
        panel=_COSTS,
    )
    own: Mapping[str, str] = field(default_factory=dict)
    """The settings from `--row` and `--sweep`, as text."""

    @property
    def label(self) -> str:
        """The row's own settings, such as `bfw limit 8`, without names where the value is enough;
        `as given` without any."""
        words = (
            text if name in _SELF_EXPLANATORY and text != "none" else f"{name} {text}"
            for name, text in self.own.items()
        )
        return " ".join(words) or "as given"

    @property
    def num_processes(self) -> int:
        """The number of ranks: pp x tp x dp."""
        return self.pp * self.tp * self.dp

    def described(self) -> dict[str, object]:
        """Return all settings of the row by flag, as JSON values; the policy's come from the policy
        itself."""
        policy = self.policy.described()
        return {
            each.flag: policy[each.flag] if each.flag in policy else getattr(self, each.flag)
            for each in SETTINGS.values()
        }


def parse_rows(
    flags: Mapping[str, str], rows: Sequence[str], sweeps: Sequence[str]
) -> list[RowOptions]:
    """Return the rows in order: for each combination of the sweeps one row for each of `rows`, or a
    single row without `rows`. A row's settings override the flags.

    The first sweep varies slowest. Raises UsageError for an invalid text, a missing `pp` or
    `microbatches`, a swept setting that is also a flag or in a row, one that is swept twice or set
    twice in a row, and for more than 10,000 rows.
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
        _make_row(flags, {**dict(zip(axes, values, strict=True)), **settings})
        for values in product(*axes.values())
        for settings in own
    ]


def prefix_row(own: Mapping[str, str], error: RrfpError) -> RrfpError:
    """Return an error of the same type whose message begins with the row's own settings; the error
    itself if the row has none."""
    place = " ".join(f"{name}={text}" for name, text in own.items())
    return type(error)(f"in the row {place}: {error}") if own else error


def _make_row(flags: Mapping[str, str], own: Mapping[str, str]) -> RowOptions:
    """Make a row from the flags and its own settings, which override them. Raises UsageError for an
    invalid text, for values of the policy that exclude each other, and if --pp or --microbatches is
    missing."""
    texts = {**flags, **own}
    for name, what in (("pp", "pipeline ranks"), ("microbatches", "microbatches per step")):
        if name not in texts:
            raise UsageError(f"--{name} is missing; say how many {what}, as in --{name} 8")
    policy = {name: _read(name, text) for name, text in texts.items() if name in KNOBS}
    others = {
        SETTINGS[name].field: _read(name, text) for name, text in texts.items() if name not in KNOBS
    }
    try:
        made = Policy(**policy)
    except UsageError as error:
        raise prefix_row(own, error) from None
    if "limit" not in policy:
        made = made.with_usual_limit()
    return RowOptions(policy=made, own=own, **others)


def _read(name: str, text: str) -> Any:
    """Parse the text of a setting into a knob's value, a count or a choice; other settings stay
    text. Raises UsageError for an invalid text."""
    declared = SETTINGS[name]
    label, kind = f"--{name}", declared.kind
    if isinstance(kind, Knob):
        return read_knob(kind, text, label, in_run=False)
    if kind is int:
        return parse_count(text, label)
    return one_of(kind)(text, label, False) if is_choice(kind) else text


def _read_row(text: str) -> dict[str, str]:
    """Parse a --row into texts by setting. Raises UsageError for an open quotation, a word without
    `=`, an unknown setting, and one that is given twice. Values are not checked."""
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
    """Parse all --sweep options into lists of texts by setting. Raises UsageError for a text
    without `=`, an unknown setting, and one that is swept twice. Values are not checked."""
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
    """Split `name=value`. Raises UsageError with `sentence` if there is no `=`, and for a name that
    is not a setting of a row."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(sentence)
    if name not in SETTINGS:
        raise UsageError(
            f"'{name}' is not a setting of a row ({', '.join(SETTINGS)})"
            f"{did_you_mean(name, SETTINGS)}"
        )
    return name, value


_DECLARED = {
    each.spelled: each for each in (*declared_knobs("", in_run=False), *declared_in("", RowOptions))
}
_FIRST = ("hint", "dispatch", "links", "pp", "microbatches", "chunks", "placement", "tp", "dp")

SETTINGS: dict[str, Declared] = {name: _DECLARED[name] for name in _FIRST} | _DECLARED
"""The settings of a row by the names of their flags."""


_SELF_EXPLANATORY = (
    "hint",
    "dispatch",
    "links",
    "placement",
    "w",
    "agreement",
    "admit",
    "costs",
    "jitter",
)
"""Settings whose values identify them without a name, except `none`."""
