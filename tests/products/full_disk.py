"""Writes a file while its disk becomes full, and empty again:
`python -m tests.products.full_disk limited|private DIRECTORY`."""

import os
import subprocess
import sys
from pathlib import Path

from rrfp.chaos.disk import LimitedFiles, PrivateDisk
from rrfp.chaos.session import MarkedProcesses

MARK = "RRFP_TEST_OF_DISKS"
WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "a") as file:
            file.write("x" * 10000)
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


def main() -> None:
    kind, path = sys.argv[1], Path(sys.argv[2])
    disk: LimitedFiles | PrivateDisk = LimitedFiles(path)
    if kind == "private":
        try:
            disk = PrivateDisk(path)
        except OSError:
            sys.stdout.write("may not mount\n")
            return
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path / "file"],
        env=os.environ | {MARK: str(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    marked = MarkedProcesses(MARK, str(path))

    def write() -> None:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        sys.stdout.write(writer.stdout.readline())

    write()
    disk.fill(marked)
    write()
    write()
    disk.empty(marked)
    write()
    writer.communicate()
    disk.close()


if __name__ == "__main__":
    main()
