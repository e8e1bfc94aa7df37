"""All checks, one after the other, so that none disturbs what another measures."""

from rrfp.doctor.check import Check
from rrfp.doctor.clock import clock
from rrfp.doctor.core import compiled_core
from rrfp.doctor.cores import cores
from rrfp.doctor.cuda_ipc import cuda_ipc
from rrfp.doctor.gloo import gloo
from rrfp.doctor.gpus import gpus
from rrfp.doctor.imports import imports
from rrfp.doctor.nixl import fabric, nixl
from rrfp.doctor.open_files import open_files
from rrfp.doctor.pid_namespace import pid_namespace
from rrfp.doctor.private_network import port_filter, private_network
from rrfp.doctor.shared_memory import shared_memory
from rrfp.doctor.temporary_files import temporary_files
from rrfp.runtime.device.cuda_presence import cuda_presence
from rrfp.train.setting_groups import DeviceKind


def diagnose() -> list[Check]:
    """What this machine can do; GPUs come first. Takes some ten seconds."""
    scratch = temporary_files()
    if scratch.ends_runs_on(DeviceKind.CPU):
        # Nor does any other check get there what it needs.
        return [scratch]
    presence = cuda_presence()
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
