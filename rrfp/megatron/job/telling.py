"""What a job is told at its end: a sentence on stderr.

The logging of a script would hide it, or repeat it on every rank in a form of its own.
"""

import logging
import sys


def tell(sentence: str) -> None:
    """Write a sentence to stderr, whatever the script's logging is. Never raises."""
    stderr = getattr(sys, "stderr", None)
    if stderr is not None:  # a script may have removed it
        logging.StreamHandler(stderr).handle(logging.makeLogRecord({"msg": f"rrfp: {sentence}"}))
