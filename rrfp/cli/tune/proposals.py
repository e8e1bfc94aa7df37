"""The output of `rrfp tune`: the table of proposals, their flags, and trials in real runs."""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rrfp.analyze.table import (
    BYTES,
    CHANGE,
    NAME,
    TEXT,
    Column,
    Table,
    Times,
    Unit,
    format_time,
    seconds,
)
from rrfp.cli.output import note
from rrfp.cli.progress import working
from rrfp.cli.train import print_pace
from rrfp.errors import UsageError
from rrfp.inputs import layout_string
from rrfp.schedule.admission import Admit
from rrfp.schedule.hints import WeightGradients
from rrfp.schedule.policy import Bytes, Dispatch, Hold, format_bytes
from rrfp.schedule.shape import Placement
from rrfp.simulate.costs.model import Uneven
from rrfp.trace.records import NS_PER_S
from rrfp.tune.flags import flags_of

if TYPE_CHECKING:
    from rrfp.train.settings import TrainSettings
    from rrfp.tune.search import Prediction, SearchResult
    from rrfp.tune.source import Candidate, Source

_WIDTH = 79
"""The width of lines of flags."""
_FEW_STAGES = 4
"""The table shows layers of at most this many stages; the flags below it show all."""


def print_flags(source: "Source", found: "SearchResult", *, markdown: bool) -> None:
    """Print on stdout the flags of each proposal for rrfp train, rrfp run and, if it supports them,
    Megatron-LM, for pasting into a command line."""
    for number, each in enumerate(found.proposals, 1):
        flags = flags_of(each.candidate, source)
        print(f"\n**{number}**\n\n```sh" if markdown else f"\n{number}", end="")
        parts = [("rrfp train", flags.train), ("rrfp run", flags.run)]
        if flags.megatron is not None:
            parts.append(("Megatron-LM", flags.megatron))
        lines = [line for name, words in parts for line in _wrapped(name, words)]
        print("\n" + "\n".join(f"  {line}" for line in lines))
        if markdown:
            print("```")


def proposal_table(
    source: "Source", found: "SearchResult", trials: "Sequence[TrialResult]"
) -> Table:
    """Make the table of proposals, the best first. The lead row has the current settings, or 1F1B
    for costs in a file; it is missing if they could not be predicted."""
    own = found.own
    return Table(
        f"Best within {_memory(found.memory)}, of {found.num_simulated} simulated steps",
        [*_predictions(source, found), *_trials(found, trials)],
        _notes(source, found),
        has_lead=own is not None,
        dispensable=("5 to 95%\nof steps",),
        facts={
            # A placeholder for the rows, which fixes the order of members.
            "proposals": None,
            "own": None
            if own is None
            else {
                "is_run": source.own is not None,
                "predicted_s": own.mean_s,
                "low_s": own.low_s,
                "high_s": own.high_s,
                "peak_bytes": own.peak_bytes,
                "measured_s": source.measured_s,
            },
            "memory": str(found.memory),
            "simulations": found.num_simulated,
            "not_searched": list(source.unsearched),
            "imbalance": found.imbalance,
        },
        rows_key="proposals",
    )


def _predictions(source: "Source", found: "SearchResult") -> Iterator[Column]:
    """Yield the columns of proposals: description, flags, predicted times and memory. The lead row
    is the run's own settings or 1F1B, if they could be predicted."""
    proposals, own = list(found.proposals), found.own
    rows = [*([] if own is None else [own]), *proposals]
    mean_s = [each.mean_s for each in proposals]
    flags = [flags_of(each.candidate, source) for each in proposals]
    times = Times(each.mean_s * NS_PER_S for each in rows)

    def interval(predicted: "Prediction") -> str:
        low, high = (times.format(s * NS_PER_S) for s in (predicted.low_s, predicted.high_s))
        return f"{low.split()[0]} - {high}"

    def words(name: str, values: Sequence[Sequence[str] | None]) -> Column:
        return Column(None, [None if each is None else " ".join(each) for each in values], key=name)

    yield Column(
        "",
        [str(number) for number in range(1, len(proposals) + 1)],
        NAME,
        lead="as it ran" if source.own is not None else "1F1B",
    )
    yield Column(
        "what",
        [candidate_in_words(each.candidate, source) for each in proposals],
        TEXT,
        lead=None if own is None else candidate_in_words(own.candidate, source),
    )
    yield words("flags", [each.train for each in flags])
    yield words("run_flags", [each.run for each in flags])
    yield words("megatron_flags", [each.megatron for each in flags])
    yield Column(
        "predicted",
        mean_s,
        seconds(each.mean_s for each in rows),
        "predicted_s",
        lead=None if own is None else own.mean_s,
    )
    yield Column(
        "5 to 95%\nof steps",
        [interval(each) for each in proposals],
        lead=None if own is None else interval(own),
    )
    if own is not None:
        yield Column("saved\n%", [1 - each / own.mean_s for each in mean_s], CHANGE)
    yield Column(None, [each.low_s for each in proposals], key="low_s")
    yield Column(None, [each.high_s for each in proposals], key="high_s")
    yield Column(
        "peak\nmemory" if all(each.peak_bytes is not None for each in rows) else None,
        [each.peak_bytes for each in proposals],
        BYTES,
        "peak_bytes",
        lead=None if own is None else own.peak_bytes,
    )
    yield Column(None, [each.candidate.split for each in proposals], key="layers")


def _trials(found: "SearchResult", trials: "Sequence[TrialResult]") -> Iterator[Column]:
    """Yield the columns of measured times of the proposals that were tried, with None for the
    others. Without trials the columns are for programs only."""
    untried = [None] * (len(found.proposals) - len(trials))
    real_s = [each.real_s for each in trials]
    predicted_s = [each.predicted_s for each in trials]
    off = [
        f"{100 * (predicted / real - 1):+.1f}"
        for predicted, real in zip(predicted_s, real_s, strict=True)
    ]
    unit = Unit(lambda time_s: format_time(time_s * NS_PER_S))
    yield Column("real" if trials else None, [*real_s, *untried], unit, "real_s")
    yield Column("off\n%" if trials else None, [*off, *untried])
    yield Column(None, [*predicted_s, *untried], key="predicted_for_real_s")
    yield Column(None, [*(str(each.path) for each in trials), *untried], key="run")


def _memory(memory: Hold) -> str:
    """Format a memory budget: bytes with a unit, or a number of microbatches."""
    if isinstance(memory, Bytes):
        return format_bytes(memory.num)
    return f"{memory} microbatch{'' if memory == 1 else 'es'}"


def _notes(source: "Source", found: "SearchResult") -> list[str]:
    """Return sentences about prediction error, imbalance, and settings that were not searched."""
    notes = []
    own = found.own
    if source.measured_s is not None and own is not None and source.own is not None:
        off = own.mean_s / source.measured_s - 1
        notes.append(
            f"The run's own steps took {format_time(source.measured_s * NS_PER_S)} (mean); their "
            f"prediction is {off:+.1%} off."
        )
    if found.imbalance is not None:
        notes.append(found.imbalance)
    notes += [f"Not searched: {each}." for each in source.unsearched]
    return notes


def candidate_in_words(candidate: "Candidate", source: "Source") -> str:
    """Describe a candidate in a few words: its hint, and what differs from the usual settings."""
    policy = candidate.policy
    words = [policy.hint.name]
    if policy.dispatch is not Dispatch.READY:
        words[0] += f" {policy.dispatch}"
    if policy.w is not WeightGradients.IDLE:
        words[0] += f", W {policy.w}"
    if candidate.chunks > 1:
        where = "a V" if candidate.placement is Placement.V else "a loop"
        words.append(f"{candidate.chunks} chunks in {where}")
    if isinstance(policy.hold, int):
        words.append(f"hold {policy.hold}")
    if policy.waits:
        words.append("patient")
    if candidate.admit is not Admit.GIVEN:
        words.append(str(candidate.admit))
    if candidate.joined != candidate.divided:
        words.append(f"{candidate.microbatches(source.shape.num_microbatches)} microbatches")
    if candidate.split is not None and len(set(candidate.split)) > 1:
        words.append(
            f"layers {layout_string(candidate.split)}"
            if len(candidate.split) <= _FEW_STAGES
            else "uneven layers"
        )
    return ", ".join(words)


def _wrapped(name: str, words: Sequence[str]) -> list[str]:
    """Format a command name, and below it its indented flags in lines of at most 77 characters (a
    longer flag exceeds them), with backslashes that continue them in a shell."""
    lines, line = [name], " "
    for number, word in enumerate(words):
        width = _WIDTH - 2 - (0 if number == len(words) - 1 else 2)
        if len(line) + 1 + len(word) > width and line.strip():
            lines.append(f"{line} \\")
            line = " "
        line += f" {word}"
    return [*lines, line]


# Trials: proposals in real runs of a few steps.

_WARM_UP = 1
"""The number of leading steps that are not measured."""
_HIDDEN, _HEADS, _SEQ_LENGTH = 8, 2, 16
"""A small model for trials of costs in a file, where tasks take their modelled time."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The measured time of a proposal."""

    path: Path
    """The directory of the run."""
    real_s: float
    """The mean step time."""
    predicted_s: float
    """The prediction for the same steps."""


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """Trains with proposals of a source."""

    source: "Source"
    settings: Mapping[str, object]
    """The settings of the run; empty for costs in a file."""
    uneven: Uneven
    steps: int
    jitter: str
    costs: str | None
    """The name of costs in a file; None for a run."""
    num: int
    """The number of proposals to try; for 0 the settings are not checked."""
    _own: "TrainSettings | None" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own", self._own_settings() if self.num else None)

    def run(self, number: int, proposal: "Prediction") -> TrialResult:
        """Train a few steps with a proposal in a new run directory, and return the mean time of a
        step without the warm-up step, measured and predicted. Progress goes to stderr.

        Raises UsageError if the proposal's settings are invalid, and RrfpError if a rank fails.
        """
        from rrfp.analyze.frame_files import load_frames
        from rrfp.analyze.frames import step_time_ns
        from rrfp.schedule.rehearsal import fitted
        from rrfp.trace.locate import resolve_session
        from rrfp.trace.outcome import noting_outcome
        from rrfp.trace.run_dir import own_files
        from rrfp.train.checkpoints.run_start import start_or_resume
        from rrfp.train.checks import check_settings
        from rrfp.train.launch.launcher import launch
        from rrfp.train.pacing import check_pace

        settings = self._settings(proposal)
        check_settings(settings)
        fitted(settings.effective_policy, settings.shape, counts_places=False)
        check_pace(settings)
        with own_files(shared=settings.run.shared_files):
            run = start_or_resume(settings, report=note).run
            note(f"Trying proposal {number}: {settings.num_steps} steps in {run.path}")
            with noting_outcome(run), working(f"Trying proposal {number}"):
                launch(settings, run)
            if settings.run.pace is not None:
                print_pace(run, 0)
            with working("Merging the ranks' records"):
                frames = load_frames(resolve_session(run.path), with_warm_up=True)
        counted = range(_WARM_UP, settings.num_steps)
        real_s = step_time_ns(frames, counted) / NS_PER_S
        return TrialResult(run.path, real_s, self._predicted_s(proposal, counted))

    def _predicted_s(self, proposal: "Prediction", counted: range) -> float:
        """Return the predicted mean time in seconds of these steps of the trial.

        A paced run of costs in a file has the seeds of the prediction, and any other run the seeds
        of the run that is tuned. If that run lacks any of these steps, or the proposal cannot run
        one, it is the mean of the proposal's own prediction.
        """
        from rrfp.tune.search import predict_unbound

        if self.costs is not None:
            return fmean(proposal.steps_s[: len(counted)])
        numbers = self.source.numbers
        seeds = [seed for seed, number in enumerate(numbers) if number in counted]
        same = predict_unbound(proposal.candidate, self.source, seeds) if seeds else None
        return proposal.mean_s if same is None or len(seeds) < len(counted) else same.mean_s

    def _own_settings(self) -> "TrainSettings":
        """Return the settings of the run without its policy, or of a small model for costs in a
        file. Raises UsageError for a run that `rrfp train` did not make."""
        from rrfp.schedule.policy import KNOBS
        from rrfp.train.settings import DECLARED, TrainSettings

        if self.costs is None:
            # The proposal replaces the run's policy, which may name an order file.
            flags = [flag for flag in DECLARED if flag not in KNOBS]
            known = {flag: self.settings[flag] for flag in flags if flag in self.settings}
            if "script" in self.settings or not {"model", "layers", "microbatches"} <= known.keys():
                raise UsageError(_NO_TRAINING)
            return TrainSettings(**known)
        source = self.source
        num_stages = source.shape.num_ranks
        return TrainSettings(
            model="mlp",
            pp=num_stages,
            tp=source.num_members,
            dp=source.num_replicas,
            layers=sum(source.split) if source.split is not None else num_stages,
            hidden=_HIDDEN * source.num_members,
            heads=_HEADS * source.num_members,
            seq_length=_SEQ_LENGTH,
            jitter=self.jitter,
        )

    def _settings(self, proposal: "Prediction") -> "TrainSettings":
        """Return the settings of the proposal's trial: the run's own, changed to the proposal's,
        with a trace and without checkpoints."""
        candidate, source, own = proposal.candidate, self.source, self._own
        assert own is not None
        changed: dict[str, Any] = {
            **candidate.policy.values(),
            "chunks": candidate.chunks,
            "placement": str(candidate.placement),
            "microbatches": candidate.microbatches(source.shape.num_microbatches),
            "admit": source.admitted or str(candidate.admit),
            "steps": _WARM_UP + self.steps,
            "out": None,
            "force": False,
            "no_trace": False,
            "save": None,
            "save_every": None,
            "save_async": False,
            "resume": False,
            "layout": None,
        }
        num_stages = own.layout.pp * candidate.chunks
        if candidate.split is None or not source.moves_layers:
            # Only the number of stages matters in a paced run.
            if self.costs is not None:
                changed["layers"] = num_stages
        else:
            changed["layout"] = layout_string(candidate.split)
        if self.costs is None and candidate.joined != candidate.divided:
            size = own.data.micro_batch_size * candidate.joined // candidate.divided
            changed["micro_batch_size"] = size
        pace = self.costs if self.costs is not None else own.run.pace
        if pace is not None:
            changed["pace"] = self._pace(pace, proposal)
        if self.costs is not None:
            # The warm-up step comes before the first predicted seed.
            first = proposal.first_seed - _WARM_UP
            changed["seed"] = max(0, first)
        return own.changed(**changed)

    def _pace(self, text: str, proposal: "Prediction") -> str:
        """Return the name of costs for the proposal's stages and microbatches; `text` names the
        costs of the run.

        If the proposal has a split of the layers, the costs are divided by it, and written to a
        file in runs/tune that is named by its content.
        """
        from rrfp.replay.cost_sources import costs_file, stable_costs_name
        from rrfp.simulate.costs.layer_costs import CUT, cut_in, written_cut
        from rrfp.trace.run_dir import RUNS
        from rrfp.trace.safe_files import make_directory, write_whole
        from rrfp.tune.from_costs import cut_of

        candidate = proposal.candidate
        if candidate.split is None:
            return stable_costs_name(text)
        file = costs_file(text)
        is_table = file is not None and file.suffix == ".toml"
        document = tomllib.loads(file.read_text(encoding="utf-8")) if file and is_table else {}
        if CUT in document:
            # The run was itself a trial, so its layers are those of the costs cut for it.
            cut = replace(cut_in(document, text), layers=",".join(map(str, candidate.split)))
        else:
            is_file = file is not None and file.suffix != ".pftrace"
            base = str(file.resolve()) if file and is_file else stable_costs_name(text)
            cut = cut_of(base, self.source, self.uneven, candidate.split)
            cut = replace(cut, joined=candidate.joined, divided=candidate.divided)
        content = written_cut(cut)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        path = RUNS / "tune" / f"{digest}.toml"
        make_directory(path.parent)
        write_whole(path, content.encode())
        return str(path)


_NO_TRAINING = (
    "--try needs the settings of a run of 'rrfp train', which this is not; run the job itself "
    "with the proposal's flags, or tune on costs in a file, for which --try makes paced runs"
)
