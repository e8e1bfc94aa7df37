"""Inputs that atheris finds by what they make a reader do: `python -m tests.fuzz.guided 500` tries
so many on each reader, and `python -m tests.fuzz.guided 500 order` on one.

atheris is no dependency of the project; `make fuzz` puts it into `build/atheris`.
"""

import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, suppress
from pathlib import Path

from rrfp.errors import RrfpError

_GUIDING = (
    *("rrfp.inputs", "rrfp.interchange", "rrfp.replay.cost_sources", "rrfp.schedule.hints"),
    *("rrfp.simulate.costs", "rrfp.trace", "rrfp.train.checkpoints", "rrfp.train.data"),
    *("rrfp.train.settings", "rrfp.watch"),
)
"""What reads, and so is worth following."""
_MOST_MB = 2048
"""Of a whole process, instrumented and with all that it has loaded."""
_LONGEST_S = 120
"""On the clock: other processes may be using the machine as well."""


def main(num_inputs: str, name: str | None = None) -> int:
    """Fuzz one reader in this process, or each in a process of its own."""
    if name is not None:
        _fuzz(name, num_inputs)
    from tests.fuzz.readers import READERS

    failed = []
    for each in READERS:
        command = [sys.executable, "-m", __spec__.name, num_inputs, each]
        done = subprocess.run(command, capture_output=True, check=False)
        told = done.stderr.decode("utf-8", "replace")
        last = next((line for line in reversed(told.splitlines()) if line.startswith("#")), "")
        sys.stdout.write(f"{each:32}{'found: ' + told[-4000:] if done.returncode else last}\n")
        sys.stdout.flush()
        failed += [each] * bool(done.returncode)
    return min(len(failed), 1)


def _fuzz(name: str, num_inputs: str) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris
    from polars.exceptions import PanicException

    with atheris.instrument_imports(include=list(_GUIDING)):  # pyright: ignore[reportAttributeAccessIssue]
        from tests.fuzz.readers import READERS
    from tests.fuzz.damage import damaged, damaged_inside

    reader = READERS[name]
    keep = Path("build/fuzz").absolute()
    folder = Path(tempfile.mkdtemp(prefix="rrfp-fuzz-"))
    whole, directory, corpus = (folder / each for each in ("whole", "input", "corpus"))
    whole.mkdir()
    corpus.mkdir()
    keep.mkdir(parents=True, exist_ok=True)
    reader.make(whole)
    files = sorted(file for each in reader.damaged for file in whole.glob(each))
    # The first octet of an input says which file the rest is, and what is tried.
    ways = [(file, attempt) for attempt in reader.attempts for file in files][:256]
    for number, (file, _) in enumerate(ways):
        (corpus / str(number)).write_bytes(bytes((number,)) + file.read_bytes())

    def one_input(data: bytes) -> None:
        file, attempt = ways[data[0] % len(ways) if data else 0]
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(whole, directory, symlinks=True)
        (directory / file.relative_to(whole)).write_bytes(data[1:])
        with chdir(directory), suppress(RrfpError):
            attempt()

    def other_input(data: bytes, max_size: int, seed: int) -> bytes:
        """Half of them are damaged as a file of that name can be, which libFuzzer does not know."""
        draw = random.Random(seed)
        if not data or draw.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        file, _ = ways[data[0] % len(ways)]
        found = None
        # It may be no such file any more.
        with suppress(Exception, PanicException):
            found = damaged_inside(file.name, draw, data[1:])
        return (data[:1] + (damaged(draw, data[1:]) if found is None else found))[:max_size]

    limits = [f"-runs={num_inputs}", f"-rss_limit_mb={_MOST_MB}", f"-timeout={_LONGEST_S}"]
    longest = 2 * max(file.stat().st_size for file in files)
    command = [
        sys.argv[0],
        *limits,
        f"-max_len={longest}",
        f"-artifact_prefix={keep}/",
        str(corpus),
    ]
    atheris.Setup(command, one_input, custom_mutator=other_input)
    atheris.Fuzz()


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
