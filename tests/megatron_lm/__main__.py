"""The command line: see the package's own description."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.megatron_lm.cases import CASES, Case
from tests.megatron_lm.harness import Ranks, RunFailedError, compare
from tests.megatron_own.harness import check_checkout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.megatron_lm", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Megatron-LM")
    parser.add_argument("--only", action="append", help="a case by its name; may be repeated")
    parser.add_argument("--schedules", help="such as bf,bfw; all of a case if left out")
    parser.add_argument("--torchrun", action="store_true", help="start each rank anew, by torchrun")
    parser.add_argument("--logs", type=Path, help="a new folder for what the runs write")
    options = parser.parse_args()
    reason = check_checkout(options.checkout)
    if reason is not None:
        parser.error(reason)
    names = [case.name for case in CASES]
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        parser.error(f"no case is called {unknown[0]}; they are {', '.join(names)}")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="megatron-lm-"))
    _row("case", "", "ranks", "held against", "the same", "not")
    _row(*["---"] * 6)
    failures: list[str] = []
    with Ranks(options.checkout, logs / "bytecode") as ranks:
        for case in CASES:
            has_it = (ranks.checkout / case.script).is_file()
            if has_it and (not options.only or case.name in options.only):
                failures += _run(ranks, case, logs, options)
    sys.stdout.write("".join(f"\n{failure}\n" for failure in failures))
    sys.stdout.write(f"\nWhat the runs wrote is in {logs}.\n")
    sys.exit(bool(failures))


def _run(ranks: Ranks, case: Case, logs: Path, options: argparse.Namespace) -> list[str]:
    """Writes the case's row; gives what failed."""
    only = options.schedules.split(",") if options.schedules else None
    begins = (f"`{case.name}`", case.what, str(case.num_ranks), case.reference)
    try:
        outcomes = compare(ranks, case, logs / case.name, only, torchrun=options.torchrun)
    except RunFailedError as error:
        _row(*begins, "", "it fails itself")
        return [f"{case.name}: {error}"]
    cells = (
        ", ".join(" to ".join(one.schedules) for one in outcomes if bool(one.failures) is fails)
        for fails in (False, True)
    )
    _row(*begins, *cells)
    return [
        f"{case.name}, {' to '.join(one.schedules)}: {failure}"
        for one in outcomes
        for failure in one.failures
    ]


def _row(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
