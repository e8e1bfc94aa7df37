"""Runs all checks in sequence, so that none disturbs another's measurement."""

from rrfp.doctor.checks import (
    Check,
    clock,
    compiled_core,
    cores,
    fabric,
    gloo,
    imports,
    nixl,
    open_files,
    port_filter,
    private_network,
    shared_memory,
    temporary_files,
)
from rrfp.doctor.cuda_ipc import cuda_ipc
from rrfp.doctor.gpus import gpus, pid_namespace
from rrfp.runtime.device.cuda_runtime import check_cuda
from rrfp.train.settings import DeviceKind


def diagnose() -> list[Check]:
    """Run all checks in sequence, and return their results, those of GPUs first; usually takes
    about ten seconds. Without usable temporary files, which others need, it returns only that
    check."""
    scratch = temporary_files()
    if scratch.prevents_runs_on(DeviceKind.CPU):
        # Other checks need temporary files too.
        return [scratch]
    presence = check_cuda()
    return [
        *gpus(presence),
        cuda_ipc(presence),
        pid_namespace(),
        nixl(),
        fabric(),
        clock(),
        cores(),
        open_files(),
        scratch,
        *shared_memory(),
        *imports(),
        compiled_core(),
        gloo(),
        private_network(),
        port_filter(),
    ]
