"""Whether gloo, which carries the collectives of runs on CPUs, works where ranks meet."""

import os
import statistics
import time
from datetime import timedelta
from threading import Thread
from typing import Any

from rrfp.doctor.check import EVERY_RUN, Check, State, fails
from rrfp.runtime.probe import NoAnswerError, probe
from rrfp.runtime.variables import LOOPBACK
from rrfp.train.ranks.private_network import enter_network, network_of
from rrfp.train.setting_groups import RunSettings

_SLOW_US = 20_000.0
"""Ten times what two busy cores take."""
_NUM_ROUNDS = 50
_PATIENCE_S = 20.0
_LIMIT_S = 120.0


def gloo() -> Check:
    """Two ranks of a process add up a number, again and again, in the network of a plain run."""
    try:
        with network_of(RunSettings()) as network:
            taken_us = probe(sum_us, network, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        if not error.raised:
            advice = "see whether torch can be imported, and no firewall fences loopback"
        elif error.raised in ("ImportError", "ModuleNotFoundError"):
            advice = "see what is found of torch and megatron-core"
        else:
            advice = "see what refuses that to this user"
        return fails("gloo", f"gloo does not work on {LOOPBACK} ({error}); {advice}", EVERY_RUN)
    is_slow = taken_us > _SLOW_US
    advice = f"for a sum of two ranks on {LOOPBACK}"
    return Check(
        "gloo",
        State.SLOW if is_slow else State.OK,
        round(taken_us),
        "us",
        f"{advice}; see what else runs on this machine" if is_slow else advice,
        EVERY_RUN,
    )


def sum_us(network: dict[str, str]) -> float:
    """The median time of a sum over two ranks, which are threads of this process, in the network
    that these variables name."""
    os.environ.update(network)
    enter_network()

    import torch.distributed as dist

    from rrfp.train.ranks.gloo import one_device_at

    store = dist.HashStore()
    taken_us: list[float] = []

    def rank(number: int) -> None:
        import torch

        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=_PATIENCE_S))
        for _ in range(_NUM_ROUNDS):
            total = torch.ones(1)
            start_s = time.perf_counter()
            group.allreduce(total).wait()
            if number == 0:
                taken_us.append((time.perf_counter() - start_s) * 1e6)

    with one_device_at(LOOPBACK):
        other = Thread(target=rank, args=(1,), daemon=True)
        other.start()
        rank(0)
        other.join(_PATIENCE_S)
    return statistics.median(taken_us)
