"""The command line: see the package's own description."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.megatron_own.harness import check_checkout, run, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.megatron_own", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Megatron-LM")
    parser.add_argument(
        "--native", action="store_true", help="run them under Megatron's own schedules, too"
    )
    parser.add_argument("--logs", type=Path, help="a new folder for the output of every rank")
    options, pytest_args = parser.parse_known_args()
    reason = check_checkout(options.checkout)
    if reason is not None:
        parser.error(reason)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="megatron-own-"))
    schedules = [*(["native"] if options.native else []), "install", "names"]
    outcomes = {
        schedule: run(options.checkout, schedule, logs / schedule, pytest_args)
        for schedule in schedules
    }
    sys.stdout.write(f"{table(outcomes)}\n\nThe output of every rank is in {logs}.\n")


if __name__ == "__main__":
    main()
