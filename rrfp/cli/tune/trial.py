"""Proposals run for real, for a few steps."""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from rrfp.cli.progress import working
from rrfp.cli.train import tell_pace
from rrfp.errors import UsageError
from rrfp.simulate.costs.model import Uneven

if TYPE_CHECKING:
    from rrfp.train.settings import TrainSettings
    from rrfp.tune.search import Predicted
    from rrfp.tune.source import Source

_WARM_UP = 1
"""Steps before those that count."""
_HIDDEN, _HEADS, _SEQ_LENGTH = 8, 2, 16
"""The model of a trial of costs in a file, whose tasks only take their modelled time."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What a proposal took for real."""

    path: Path
    """Its run."""
    real_s: float
    """The mean of its steps."""
    predicted_s: float
    """What was predicted for these very steps."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Runs proposals of a source."""

    source: "Source"
    settings: Mapping[str, object]
    """The run's own; empty for costs in a file."""
    uneven: Uneven
    steps: int
    jitter: str
    costs: str | None
    """The costs in a file; None for a run."""
    num: int
    """How many proposals are to be tried; without any, nothing is checked."""
    _own: "TrainSettings | None" = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own", self._own_settings() if self.num else None)

    def run(self, number: int, proposal: "Predicted") -> Tried:
        """Train with a proposal; raises RrfpError if a rank fails."""
        from rrfp.analyze.chosen_steps import step_time_ns
        from rrfp.analyze.frame_files import load_frames
        from rrfp.schedule.rehearsal import fitted
        from rrfp.trace.locate import resolve_session
        from rrfp.trace.outcome import noting_outcome
        from rrfp.trace.records import NS_PER_S
        from rrfp.trace.run_dir import own_files
        from rrfp.train.checkpoints.resuming import beginning_of
        from rrfp.train.checks import check_settings
        from rrfp.train.launch.launcher import launch
        from rrfp.train.pacing import check_pace

        settings = self._settings(proposal)
        check_settings(settings)
        fitted(settings.effective_policy, settings.shape, counts_places=False)
        check_pace(settings)
        with own_files(shared=settings.run.shared_files):
            run = beginning_of(settings, tell=_tell).run
            _tell(f"Trying proposal {number}: {settings.num_steps} steps in {run.path}")
            with noting_outcome(run), working(f"Trying proposal {number}"):
                launch(settings, run)
            if settings.run.pace is not None:
                tell_pace(run, 0)
            with working("Merging the ranks' records"):
                frames = load_frames(resolve_session(run.path), with_warm_up=True)
        counted = range(_WARM_UP, settings.num_steps)
        real_s = step_time_ns(frames, counted) / NS_PER_S
        return Tried(run.path, real_s, self._predicted_s(proposal, counted))

    def _predicted_s(self, proposal: "Predicted", counted: range) -> float:
        """What was predicted for these steps of the trial. A paced run of costs in a file meets the
        seeds that were predicted for, and another run those of the one that it is tuned on."""
        from rrfp.tune.search import predict_unbound

        if self.costs is not None:
            return fmean(proposal.steps_s[: len(counted)])
        numbers = self.source.numbers
        seeds = [seed for seed, number in enumerate(numbers) if number in counted]
        same = predict_unbound(proposal.candidate, self.source, seeds) if seeds else None
        return proposal.mean_s if same is None or len(seeds) < len(counted) else same.mean_s

    def _own_settings(self) -> "TrainSettings":
        from rrfp.schedule.policy import KNOBS
        from rrfp.train.settings import DECLARED, TrainSettings

        if self.costs is None:
            # The proposal replaces the run's policy, which may be an order of the user's own.
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

    def _settings(self, proposal: "Predicted") -> "TrainSettings":
        """The run's own settings with the proposal's."""
        from rrfp.inputs import layout_string

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
            # Nothing but the number of stages counts for a paced run.
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
            # Its first step is the one to warm up.
            first = proposal.first_seed - _WARM_UP
            changed["seed"] = max(0, first)
        return own.changed(**changed)

    def _pace(self, text: str, proposal: "Predicted") -> str:
        """Costs of the proposal's own stages and microbatches, as a file where they are cut
        anew."""
        from rrfp.replay.cost_sources import costs_file, settled
        from rrfp.simulate.costs.layer_costs import CUT, cut_in, written_cut
        from rrfp.trace.run_dir import RUNS
        from rrfp.trace.safe_files import make_directory, write_whole
        from rrfp.tune.from_costs import cut_of

        candidate = proposal.candidate
        if candidate.split is None:
            return settled(text)
        file = costs_file(text)
        is_table = file is not None and file.suffix == ".toml"
        document = tomllib.loads(file.read_text(encoding="utf-8")) if file and is_table else {}
        if CUT in document:
            # The run was a trial itself. Its layers are those of the costs that were cut for it.
            cut = replace(cut_in(document, text), layers=",".join(map(str, candidate.split)))
        else:
            is_file = file is not None and file.suffix != ".pftrace"
            base = str(file.resolve()) if file and is_file else settled(text)
            cut = cut_of(base, self.source, self.uneven, candidate.split)
            cut = replace(cut, joined=candidate.joined, divided=candidate.divided)
        content = written_cut(cut)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        path = RUNS / "tune" / f"{digest}.toml"
        make_directory(path.parent)
        write_whole(path, content.encode())
        return str(path)


_NO_TRAINING = (
    "--try trains with the settings of a run of 'rrfp train', and this is none; run the job itself "
    "with the proposal's flags, or tune on costs in a file, which --try paces a run by"
)


def _tell(sentence: str) -> None:
    typer.echo(sentence, err=True)
