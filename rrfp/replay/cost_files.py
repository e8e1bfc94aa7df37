"""What `--costs` may name: a preset, a table, rows, a model, or a recorded run."""

import tomllib
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from rrfp.errors import UsageError, did_you_mean
from rrfp.simulate.costs.cut_files import CUT, parse_cut
from rrfp.simulate.costs.flops import parse_flops
from rrfp.simulate.costs.model import Costs
from rrfp.simulate.costs.rows import parse_rows
from rrfp.simulate.costs.table import PRESETS, parse_table, preset
from rrfp.trace.files.reading import read_small
from rrfp.trace.locate import find_run, resolve_trace
from rrfp.trace.rundir import RUNS

DRAWN = "drawn:"
"""Before the path of a run: draw task times from those recorded."""

_OF_A_MODEL = {"language", "device"}
"""Keys that only a model's document has."""


def resolve_costs(text: str) -> Costs:
    """The costs of that name, or those in the file, trace or run directory at that path.

    Raises UsageError for anything else and for a file that cannot be read or is wrong, and
    RrfpError for a run without a whole trace.
    """
    return _resolved(text, is_cut=False)


def _resolved(text: str, *, is_cut: bool) -> Costs:
    """`is_cut`: another document cuts these costs, so that they cannot be such a document again."""
    if text in PRESETS:
        return preset(text)
    trace = _recorded_trace(text)
    if trace is not None:
        # Perfetto's module is slow to import, and most costs are not recorded ones.
        from rrfp.replay.recorded_costs import costs_of
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
    """The file that `resolve_costs` reads, a table or a trace; None for a preset."""
    return None if text in PRESETS else _recorded_trace(text) or Path(text)


def settled(text: str) -> str:
    """A name that stands for the same costs even after `runs/latest` has moved on."""
    trace = None if text in PRESETS else _recorded_trace(text)
    if trace is None:
        return text
    return f"{DRAWN if text.startswith(DRAWN) else ''}{trace.resolve()}"


def _recorded_trace(text: str) -> Path | None:
    """The trace whose times are the costs; None if the costs were not recorded."""
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
    """The run of that short name, or else what the text is as a path."""
    if text.startswith("@"):
        return find_run(Path(text))
    path, below = Path(text), RUNS / text
    return below if text and not _mode(path) and S_ISDIR(_mode(below)) else path


def _mode(path: Path) -> int:
    """The mode that `stat` gives for a path; 0 if nothing is found there."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def _read(path: Path) -> str:
    """A file's text, without the byte order mark that spreadsheets write."""
    try:
        return read_small(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the costs {path}: {reason}; choose another file") from None
