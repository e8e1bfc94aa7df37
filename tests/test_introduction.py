"""What a rank says of itself when it introduces itself."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch.distributed import HashStore

from rrfp.runtime.device.interface import CPU, CpuDevice
from rrfp.runtime.rendezvous import introduce, introduced
from rrfp.trace.records import RankInfo


class OwnClock(CpuDevice):
    """A device whose clock is related to the host's to within 7 us."""

    def relate_clocks(self) -> None:
        self.clock_error_ns = 7000


def test_times_are_as_uncertain_as_the_clock_of_the_device() -> None:
    store = HashStore()
    own = [RankInfo(rank, rank, 0, 0, (rank,), "host", 1) for rank in (0, 1)]
    meet = partial(introduce, store, "ranks", num_ranks=2, timeout_s=10)
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(meet, own[0], device=CPU), pool.submit(meet, own[1], device=OwnClock())]
    assert [each.result().clock_error_ns for each in told] == [0, 7000]
    heard = introduced(store, "ranks", 0, 2, timeout_s=2)
    assert [each.clock_error_ns for each in heard] == [0, 7000]
