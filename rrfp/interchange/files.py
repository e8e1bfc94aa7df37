"""Which files make up a run to import, and what they hold."""

from collections.abc import Sequence
from pathlib import Path

from rrfp.errors import RrfpError
from rrfp.interchange.assemble import Imported, assemble
from rrfp.trace.rundir import RunDir

_PROFILES = (".json", ".json.gz")
_TABLES = (".csv", ".csv.gz", ".parquet")
_OF_A_RUN = RunDir(Path()).run_json.name
"""Not a profile, though a run's directory may hold its profiles too."""


def import_run(paths: Sequence[Path]) -> Imported:
    """Read one run from files and directories of files: profiles of torch.profiler, a file a rank,
    or one table of StragglerAnalysis. Raises RrfpError when they are neither, or not whole.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(path)))
    tables = [file for file in files if file.name.endswith(_TABLES)]
    if tables and len(files) > 1:
        raise RrfpError(
            f"{tables[0]} is a table and holds a run by itself; import it alone, and not with "
            f"{len(files) - 1} other files"
        )
    if tables:
        # polars is slow to import.
        from rrfp.interchange.straggler import read_table

        return assemble(*read_table(tables[0]))
    from rrfp.interchange.kineto import read_profiles

    return assemble(*read_profiles(files))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise RrfpError(f"there is nothing at {path}")
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.iterdir()
        if file.name.endswith((*_PROFILES, *_TABLES)) and file.name != _OF_A_RUN and file.is_file()
    )
    if not found:
        raise RrfpError(
            f"{path} has no file whose name ends in {', '.join((*_PROFILES, *_TABLES))}"
        )
    return found
