"""Coverage-guided fuzzing with atheris: `python -m tests.fuzz.guided 500` tries 500 inputs on each
reader, and `python -m tests.fuzz.guided 500 order` on one.

atheris is not a dependency of the project; `make fuzz` installs it into `build/atheris`.
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
"""The modules that read files, whose coverage guides the fuzzer."""
_MOST_MB = 2048
"""The memory limit of a whole instrumented process, with all modules that it has loaded."""
_LONGEST_S = 120
"""The longest time of an input in wall-clock seconds, generous because the machine may be busy."""


def main(num_inputs: str, name: str | None = None) -> int:
    """Fuzz one reader in this process, or each in a process of its own."""
    if name is not None:
        _fuzz(name, num_inputs)
    from tests.fuzz.readers import READERS

    failed = []
    for each in READERS:
        command = [sys.executable, "-m", __spec__.name, num_inputs, each]
        done = subprocess.run(command, capture_output=True, check=False)
        log = done.stderr.decode("utf-8", "replace")
        last = next((line for line in reversed(log.splitlines()) if line.startswith("#")), "")
        sys.stdout.write(f"{each:32}{'found: ' + log[-4000:] if done.returncode else last}\n")
        sys.stdout.flush()
        failed += [each] * bool(done.returncode)
    return min(len(failed), 1)


def _fuzz(name: str, num_inputs: str) -> None:
    """Fuzz one reader. Never returns: libFuzzer ends the process."""
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
    # The first byte of an input selects a file, whose content follows, and an attempt.
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
        """A mutated input. Half of them get the damage made for files of that name, which libFuzzer
        does not know."""
        draw = random.Random(seed)
        if not data or draw.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        file, _ = ways[data[0] % len(ways)]
        found = None
        # Earlier damage may have destroyed the file's format.
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
