"""The protocol of outbox, pull and release on simulated devices: right as it is, and wrong in every
seed where one of its rules is broken."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from rrfp.runtime.device.interface import Device, Event, Stream
from rrfp.runtime.link.channel import Output
from rrfp.runtime.link.driver import LinkDriver
from rrfp.runtime.link.receiver import Receiver
from rrfp.runtime.planes.outbox import _Copying
from rrfp.runtime.planes.plane import Fetch, MappedFetcher
from tests.doubles.simulated_device import SimulatedDevice, _Stream
from tests.runtime.link_pairs import Mistake, PoisoningOutbox, exchange

NUM_SEEDS = 20
LARGE_OUTBOX_BYTES = 64 * 2**20
"""In which no slot is used twice."""
SLOW_S = 10e-3
"""Longer than a busy host needs to hand a message over."""

seeds = pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < 1 else pytest.mark.slow) for seed in range(NUM_SEEDS)],
)


class HeaderEarly(PoisoningOutbox):
    """The frame leaves when the copy into the slot is queued, which is slower than a frame."""

    def __init__(self, *plane: Any, **options: Any) -> None:
        super().__init__(*plane, **options)
        cast(_Stream, self._stream).mean_delay_s = SLOW_S

    def _copy(self, *taken: Any) -> _Copying:
        copying = super()._copy(*taken)
        super()._complete(copying)
        return copying

    def _complete(self, copying: _Copying) -> None:
        pass


class SourceFreedEarly(PoisoningOutbox):
    """The tensors are let go when the copy into the slot is queued."""

    def _copy(self, *taken: Any) -> _Copying:
        copying = super()._copy(*taken)
        copying.waiting.tensors = ()
        return copying


class NeverAwaited:
    """A device, but nothing is waited for."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def synchronize(self, event: Event, *, soon: bool = False) -> None:
        pass


class ArrivalEarly(MappedFetcher):
    """The arrival is reported when the fetch is queued."""

    def fetch(self, *fetched: Any) -> None:
        device = self._device
        self._device = NeverAwaited(device)
        super().fetch(*fetched)
        self._device = device

    def detach(self, *, waits: bool = True) -> None:
        # A message that was reported early may still be in flight.
        super().detach()


class NeverReleases(Receiver):
    """Fetched slots are not released: with an early arrival no slot is used twice, and with an
    early release no slot is released twice."""

    def complete(self, *completed: Any) -> list[Output]:
        outputs = super().complete(*completed)
        self._releases.clear()
        return outputs


class ReleasesEarly(LinkDriver[Any]):
    """The slot is released before its message is fetched."""

    def _emit(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, Fetch):
                with self._lock:
                    self._endpoint.direction._releases.append(output.descriptor.offset)
                with self._write_lock:
                    self._write()
            super()._emit([output])


class DetachesLate(LinkDriver[Any]):
    """It does not detach from the peer's memory before its farewell."""

    def _detach_if_done(self) -> None:
        with self._lock:
            self._endpoint.detached()


class DoesNotWait(SimulatedDevice):
    """The copy into the slot does not wait for the compute that makes the tensors."""

    def wait(self, stream: Stream, event: Event) -> None:
        pass


class DoesNotTakeOver(SimulatedDevice):
    """Does not record that the compute stream uses tensors that have arrived."""

    def use_on_compute_stream(self, tensors: object) -> None:
        pass


MISTAKES = {
    "header early": Mistake(outbox=HeaderEarly),
    "arrival early": Mistake(
        fetcher=ArrivalEarly, receiver=NeverReleases, outbox_bytes=LARGE_OUTBOX_BYTES
    ),
    "source freed early": Mistake(outbox=SourceFreedEarly),
    "slot released early": Mistake(driver=ReleasesEarly, receiver=NeverReleases),
    # With few slots its messages wait long enough for the compute to be done.
    "compute that does not wait": Mistake(
        device=DoesNotWait, compute_delay_s=SLOW_S, outbox_bytes=LARGE_OUTBOX_BYTES
    ),
    "compute that does not take over": Mistake(device=DoesNotTakeOver, compute_delay_s=SLOW_S),
    "detach after free": Mistake(driver=DetachesLate),
}


@seeds
def test_nothing_is_corrupt(seed: int) -> None:
    findings = exchange(seed, 500, Mistake())
    assert findings.num_arrived == 500
    assert findings.are_clean


@pytest.mark.parametrize("name", MISTAKES)
@seeds
def test_a_broken_rule_is_found(name: str, seed: int) -> None:
    assert not exchange(seed, 400, MISTAKES[name], until_found=True).are_clean
