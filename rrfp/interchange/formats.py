"""Recognizes the files of a run to import, and reads them with the right reader."""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.assemble import Imported, assemble
from rrfp.interchange.json_stream import open_bytes
from rrfp.interchange.spans import RankSpans, Source
from rrfp.trace.records import counted
from rrfp.trace.run_dir import RunDir

_TABLES = (".csv", ".csv.gz", ".parquet")
_OTHERS = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".sqlite", ".et")
_RUN = RunDir(Path())
_OF_A_RUN = {_RUN.run_json.name, _RUN.metrics.name}
"""Files that only rrfp writes; its run directories may also contain profiles."""
_OWN_TRACE = ".pftrace"
_OWN_TABLE = "tasks.parquet"
"""One of the tables that `rrfp trace export --format parquet` writes."""
_REPORTS = (".nsys-rep", ".qdrep")
_HEAD_BYTES = 4096
_SQLITE = b"SQLite format 3\0"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_SPANS = re.compile(rb'\s*\{\s*"resourceSpans"')
_NODES = re.compile(rb'\s*\{\s*(?:"schema"\s*:\s*"|"workload_graph")')
_OWN_EXPORT = re.compile(
    rb'\{"displayTimeUnit":"ms","metadata":\{.*"(?:ranks|settings)"', re.DOTALL
)
_DUMP = re.compile(rb'\s*\{\s*"(?:comm_lib_version|nccl_version|entries|pg_config)"')


class _Form(Enum):
    """A supported file format; the value is its name for messages."""

    PROFILE = "profile of torch.profiler"
    TABLE = "table of StragglerAnalysis"
    NSIGHT = "export of Nsight Systems"
    SPANS = "OpenTelemetry trace"
    NODES = "execution trace of Chakra"


def import_run(paths: Sequence[Path]) -> Imported:
    """Read one run from files and directories of files: profiles, exports of Nsight Systems or
    execution traces, one file per rank; OpenTelemetry spans; or one table of StragglerAnalysis.

    Raises RrfpError if a format cannot be imported, if the formats differ, if a table is not alone,
    or if the files cannot be read as one run.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    forms = {file: _form(file) for file in files}
    tables = [file for file in files if forms[file] is _Form.TABLE]
    if tables and len(files) > 1:
        if any(file.name == _OWN_TABLE for file in tables):
            raise RrfpError(
                f"{tables[0].parent} has the tables of a run that was exported; look at the run "
                "itself with rrfp analyze RUN"
            )
        raise RrfpError(
            f"{tables[0]} is a table and holds a run by itself; import it alone, and not with "
            f"{counted(len(files) - 1, 'other file')}"
        )
    if len(set(forms.values())) > 1:
        odd = next(file for file in files if forms[file] is not forms[files[0]])
        raise RrfpError(
            f"{files[0]} is a {forms[files[0]].value} and {odd} a {forms[odd].value}; import those "
            "of one kind"
        )
    return assemble(*_reader(forms[files[0]])(files))


def _reader(form: _Form) -> Callable[[Sequence[Path]], tuple[list[RankSpans], Source]]:
    """The function that reads files of a format. Imported on demand, because each needs other
    modules."""
    match form:
        case _Form.TABLE:
            # polars is slow to import.
            from rrfp.interchange.straggler import read_table

            return lambda files: read_table(files[0])
        case _Form.NSIGHT:
            from rrfp.interchange.nsight import read_exports

            return read_exports
        case _Form.SPANS:
            from rrfp.interchange.otel import read_spans

            return read_spans
        case _Form.NODES:
            from rrfp.interchange.chakra import read_execution_traces

            return read_execution_traces
    from rrfp.interchange.kineto import read_profiles

    return read_profiles


def _form(path: Path) -> _Form:
    """Determine a file's format by its name and its first bytes; a profile if nothing else matches.
    Raises RrfpError for an empty file, for a .sqlite file that is no database, and for known
    formats that cannot be imported, such as rrfp's own."""
    if path.name.endswith(_TABLES):
        return _Form.TABLE
    if path.name.endswith(_REPORTS):
        raise RrfpError(
            f"{path} is a report of Nsight Systems in its own form; make it readable with nsys "
            f"export --type sqlite {path.name}"
        )
    if path.name == _RUN.run_json.name and (path.parent / _RUN.trace.name).exists():
        raise RrfpError(_own_run_message(path.parent))
    if path.suffix == _OWN_TRACE:
        raise RrfpError(
            f"{path} is a trace of rrfp's own and needs no import; look at it with rrfp analyze "
            f"{path}"
        )
    head = b"".join(islice(open_bytes(path), 1))[:_HEAD_BYTES].removeprefix(BOM_UTF8)
    if not head:
        raise RrfpError(f"{path} is empty; the program that should have written it did not end")
    if head.startswith(_SQLITE):
        return _Form.NSIGHT
    if path.suffix == ".sqlite":
        raise RrfpError(
            f"{path} is no SQLite database; export the report again with nsys export --type sqlite"
        )
    if path.suffix == ".et" or _NODES.match(head):
        return _Form.NODES
    if _SPANS.match(head):
        return _Form.SPANS
    if _PICKLE.match(head) or _DUMP.match(head):
        raise RrfpError(
            f"{path} is a dump, and no profile; if it is one of torch's flight recorder, add "
            "--flight-recorder"
        )
    if _OWN_EXPORT.match(head):
        raise RrfpError(
            f"{path} is a run of rrfp's that was exported, which loses what a run needs; look at "
            "the run itself with rrfp analyze RUN"
        )
    return _Form.PROFILE


def _own_run_message(path: Path) -> str:
    """The message for a run directory of rrfp, which needs no import."""
    return f"{path} is a run already and needs no import; look at it with rrfp analyze {path}"


def _files(path: Path) -> list[Path]:
    """The file at a path, or the files to import in a directory, sorted, by the endings of their
    names; rrfp's run.json and metrics.jsonl are left out. Raises RrfpError if nothing remains, or
    the path is neither a file nor a directory."""
    if not path.exists():
        raise RrfpError(f"there is nothing at {path}")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RrfpError(
            f"{path} is neither a file nor a directory; write what it gives to a file and import "
            "that"
        )
    inside = sorted(file for file in path.iterdir() if file.is_file())
    found = [
        file
        for file in inside
        if file.name.endswith((*_OTHERS, *_TABLES)) and file.name not in _OF_A_RUN
    ]
    if found:
        return found
    if any(file.name == _RUN.run_json.name or file.suffix == _OWN_TRACE for file in inside):
        raise RrfpError(_own_run_message(path))
    if reports := [file for file in inside if file.name.endswith(_REPORTS)]:
        _form(reports[0])
    raise RrfpError(
        f"{path} has no file whose name ends in {', '.join((*_OTHERS, *_TABLES))}; give the "
        "directory that holds the profiles"
    )
