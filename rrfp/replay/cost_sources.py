"""A recorded run as costs: what its tasks and messages took, for simulations and paced runs."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from statistics import median_low

from rrfp.errors import UsageError, did_you_mean
from rrfp.replay.change import W_SHARE, task_times
from rrfp.replay.measured import MeasuredStep, measure
from rrfp.replay.recorded import read_run
from rrfp.schedule.bounds import ActivationSizes, Rows
from rrfp.schedule.shape import Shape
from rrfp.schedule.tasks import Kind, Task
from rrfp.simulate.costs.language_models import parse_flops
from rrfp.simulate.costs.layer_costs import CUT, parse_cut
from rrfp.simulate.costs.model import Costs, Links, StepCosts
from rrfp.simulate.costs.rows import parse_rows
from rrfp.simulate.costs.toml_files import PRESETS, parse_table, preset
from rrfp.simulate.jitter import uniforms
from rrfp.trace.locate import find_run, resolve_trace
from rrfp.trace.records import Recording
from rrfp.trace.run_dir import RUNS
from rrfp.trace.safe_files import read_small


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """The costs of a recorded run (`rrfp.simulate.costs.model.Costs`).

    Seed s takes step s of the run, modulo its number of steps, with each task's own time. With
    `drawn` each task's time is drawn from those of its stage and kind in all steps, for any number
    of microbatches. A message takes the run's median. The runtime's own time between tasks does not
    count.
    """

    shape: Shape
    steps: Sequence[MeasuredStep]
    left_out: tuple[int, ...] = ()
    """The run's steps that are not whole training steps."""
    without_sizes: tuple[int, ...] = ()
    """The steps that are left out because the bytes of their microbatches were not known yet."""
    drawn: bool = False
    w_share: float = W_SHARE

    def step(self, shape: Shape, seed: int, replica: int) -> StepCosts:
        """Return the costs of a step: the task times of recorded step `seed` and of the replica,
        both modulo their numbers, or drawn ones. Messages take the run's median, and gradient
        reduction that step's tail. Raises UsageError if the shape is not that of the run; drawn
        costs take any number of microbatches."""
        self._check(shape)
        recorded = self.steps[seed % len(self.steps)]
        durations_ns: Mapping[Task, int]
        if self.drawn:
            durations_ns = self._draw(shape, seed, replica)
        else:
            durations_ns = recorded.replicas[replica % len(recorded.replicas)].durations_ns
        return StepCosts(
            task_times(durations_ns, shape, self.w_share),
            Links(latency_ns=self._message_ns()),
            gradient_sync_ns=recorded.tail_ns,
            is_known=not self.drawn,
            sizes=self._sizes(shape, seed, replica),
        )

    def _sizes(self, shape: Shape, seed: int, replica: int) -> ActivationSizes | None:
        """Return the activation sizes of the recorded step and replica; None if that does not
        record them. A drawn microbatch has those of one recorded microbatch on all stages; None
        unless all steps and replicas record them."""
        if not self.drawn:
            recorded = self.steps[seed % len(self.steps)].replicas
            return recorded[replica % len(recorded)].sizes
        of_replicas = [each.sizes for step in self.steps for each in step.replicas]
        known = [sizes for sizes in of_replicas if sizes is not None]
        if len(known) < len(of_replicas):
            return None
        draws = uniforms(shape.num_microbatches, seed, replica, "recorded sizes").tolist()

        def rows(found: Sequence[Rows]) -> Rows:
            whole = [[*chain.from_iterable(of_stage)] for of_stage in zip(*found, strict=True)]
            return [[row[int(draw * len(row))] for draw in draws] for row in whole]

        owed = [sizes.pending_w for sizes in known if sizes.pending_w is not None]
        return ActivationSizes(
            rows([sizes.activations for sizes in known]), rows(owed) if owed else None
        )

    def _check(self, shape: Shape) -> None:
        """Raise UsageError if the shape has other ranks, chunks or placement than the run or,
        unless costs are drawn, another number of microbatches."""
        own = self.shape
        needed = (
            ("pp", shape.num_ranks, own.num_ranks),
            ("chunks", shape.num_chunks, own.num_chunks),
            ("placement", shape.placement, own.placement),
            ("microbatches", shape.num_microbatches, own.num_microbatches),
        )
        for name, value, recorded in needed[:3] if self.drawn else needed:
            if value != recorded:
                raise UsageError(
                    f"the costs are of a run with --{name} {recorded}, not {value}; choose "
                    f"--{name} {recorded} or other costs"
                )

    def _draw(self, shape: Shape, seed: int, replica: int) -> dict[Task, int]:
        """Draw the time of each task from the recorded ones of its stage and kind in all steps and
        replicas; equal arguments give equal times."""
        recorded_ns: dict[tuple[int, Kind], list[int]] = {}
        for step in self.steps:
            for each in step.replicas:
                for task, time_ns in each.durations_ns.items():
                    recorded_ns.setdefault((task.stage, task.kind), []).append(time_ns)
        return {
            Task(stage, kind, microbatch): found_ns[int(draw * len(found_ns))]
            for (stage, kind), found_ns in sorted(recorded_ns.items())
            for microbatch, draw in enumerate(
                uniforms(shape.num_microbatches, seed, replica, "recorded", stage, kind).tolist()
            )
        }

    def _message_ns(self) -> int:
        """Return the median time of the run's messages in ns; 0 without any."""
        found_ns = [
            time_ns
            for step in self.steps
            for replica in step.replicas
            for time_ns in replica.transfers_ns.values()
        ]
        return median_low(found_ns) if found_ns else 0


def costs_of(recording: Recording, *, drawn: bool = False) -> RecordedCosts:
    """Measure the costs of a recorded run, from its whole steps that train under its last policy.

    Raises RrfpError when it has no such step, or the trace does not record what was run.
    """
    run = read_run(recording)
    return RecordedCosts(run.shape, measure(run), run.left_out, run.without_sizes, drawn)


# The values of `--costs`: a preset, a table, rows, a model, or a recorded run.


DRAWN = "drawn:"
"""The prefix of a run's path that asks to draw task times from the recorded ones."""

_OF_A_MODEL = {"language", "device"}
"""Keys that only a model's document has."""


def resolve_costs(text: str) -> Costs:
    """Read the costs of a preset's name, those of a run's name, or those in the file, trace or run
    directory at that path. A prefix `drawn:` asks to draw task times from a run's recorded ones. A
    run whose trace is not merged yet is merged, which writes the trace.

    Raises UsageError for anything else and for a file that cannot be read or is wrong, and
    RrfpError for a run without a whole trace.
    """
    return _resolved(text, is_cut=False)


def _resolved(text: str, *, is_cut: bool) -> Costs:
    """Read costs as `resolve_costs` does. With `is_cut` another document cuts these costs, and
    UsageError is raised if they are a cut themselves."""
    if text in PRESETS:
        return preset(text)
    trace = _recorded_trace(text)
    if trace is not None:
        # Perfetto's module is slow to import, and most costs are not recorded ones.
        from rrfp.trace.perfetto.reader import read_trace

        return costs_of(read_trace(trace), drawn=text.startswith(DRAWN))
    path = Path(text)
    if path.suffix not in (".csv", ".toml"):
        raise UsageError(
            f"'{text}' is not costs: choose {', '.join(PRESETS)}, a .toml or .csv file, or a run "
            f"or its trace{did_you_mean(text, PRESETS)}"
        )
    content = _read(path)
    if path.suffix == ".csv":
        return parse_rows(content, text)
    try:
        document = tomllib.loads(content)
    except ValueError as error:  # not only TOMLDecodeError: a number may have thousands of digits
        raise UsageError(f"{text} is not TOML ({error}); correct it") from None
    except RecursionError:
        raise UsageError(f"{text} is nested too deeply to be costs; choose another file") from None
    if CUT in document:
        if is_cut:
            raise UsageError(
                f"{text} cuts other costs and is to be cut itself; name the costs that it cuts in "
                "its place"
            )
        return parse_cut(document, text, lambda costs: _resolved(costs, is_cut=True))
    return (parse_flops if _OF_A_MODEL & document.keys() else parse_table)(document, text)


def costs_file(text: str) -> Path | None:
    """Return the path of the file that `resolve_costs` reads, a table or a trace; None for a
    preset. A run whose trace is not merged yet is merged. A table is not checked, and may not
    exist."""
    return None if text in PRESETS else _recorded_trace(text) or Path(text)


def stable_costs_name(text: str) -> str:
    """Return a name of the same costs that stays valid when `runs/latest` changes: the full path of
    a recorded run's trace, which is merged if it is not yet. Any other name stays."""
    trace = None if text in PRESETS else _recorded_trace(text)
    if trace is None:
        return text
    return f"{DRAWN if text.startswith(DRAWN) else ''}{trace.resolve()}"


def _recorded_trace(text: str) -> Path | None:
    """Return the path of the trace whose times are the costs, after merging the run's records if
    that is still to do; None if the costs were not recorded. Raises UsageError for a path that is
    neither a file nor a directory or cannot be read, and RrfpError for a run without a trace."""
    rest = text.removeprefix(DRAWN)
    path = _named(rest)
    # A pipe might never get a writer, and reading it would hang.
    mode = _mode(path)
    if mode and not (S_ISREG(mode) or S_ISDIR(mode)):
        raise UsageError(
            f"cannot read the costs {path}: it is not a regular file; choose another one"
        )
    is_recorded = text.startswith(DRAWN) or path.suffix == ".pftrace" or S_ISDIR(mode)
    # An empty path would mean the working directory.
    if not rest or not is_recorded:
        return None
    try:
        return resolve_trace(path)
    except OSError as error:
        raise UsageError(
            f"cannot read the costs {path}: {error.strerror}; choose another run"
        ) from None


def _named(text: str) -> Path:
    """Return the path that a text stands for: the run of a short name (`@...`), a directory of that
    name below `runs/` if nothing else has the path, or the text as a path."""
    if text.startswith("@"):
        return find_run(Path(text))
    path, below = Path(text), RUNS / text
    return below if text and not _mode(path) and S_ISDIR(_mode(below)) else path


def _mode(path: Path) -> int:
    """Return the mode that `stat` gives for a path; 0 if nothing is found there or it cannot be
    read."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def _read(path: Path) -> str:
    """Return a file's text, without the byte order mark that spreadsheets write. Raises UsageError
    if it cannot be read or is not UTF-8."""
    try:
        return read_small(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the costs {path}: {reason}; choose another file") from None
