"""`python -m rrfp` is the command `rrfp`."""

import sys

from rrfp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
