"""Prepares a rank's process before the script runs."""

import os

from tests.megatron_lm import cpu, recorder


def prepare_megatron() -> None:
    """Import Megatron and have it run on the CPU."""
    cpu.prepare()


def begin() -> None:
    """Record this rank. Environment variables: `RRFP_LM_NATIVE_GLOO` lets Megatron's
    interleaved schedule run over gloo; `RRFP_LM_SIGTERM_AT` is the step after which it sends itself
    SIGTERM."""
    if _asked("NATIVE_GLOO"):
        cpu.let_interleaving_run_over_gloo()
    # Not in the processes that a checkpoint starts: they have this environment, too.
    folder = os.environ.pop("RRFP_LM_RECORDS", None)
    if folder is not None:
        recorder.record(folder, sigterm_at=_asked("SIGTERM_AT"))


def _asked(name: str) -> int:
    return int(os.environ.get(f"RRFP_LM_{name}", "0"))
