"""The check of CUDA IPC: one process exports a slab of device memory, another copies out of it.

Neither imports torch. A round transfers one message as runs do: the exporter copies its data into
the slab, synchronizes and notifies the importer over a socket; the importer copies the data out of
the slab and synchronizes.
"""

import ctypes
import json
import socket
import statistics
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

from rrfp.doctor.checks import Check, absent, fails, works
from rrfp.errors import first_line
from rrfp.runtime.device.cuda_runtime import HOW_TO_INSTALL, CudaPresence, CudaRuntime, has_bindings
from rrfp.runtime.isolated_call import NoAnswerError, call_isolated

_NUM_BYTES = 1 << 26
_NUM_ROUNDS = 5
_NUM_TIMINGS, _NUM_COPIES = 5, 20
_SLOW_GB_S = 20.0
"""The speed of PCIe 4.0 between two GPUs."""
_TIMEOUT_S = 30.0
_LIMIT_S = 120.0
_NUMBER = struct.Struct("<q")


def cuda_ipc(presence: CudaPresence) -> Check:
    """Measure the speed in GB/s of copies by another process of exported memory: from GPU 0 to GPU
    1, or within the only GPU.

    It is absent without a usable GPU or cuda-bindings, slow below 20 GB/s, and fails if a process
    fails or needs more than 120 s.
    """
    if presence.problem is not None:
        return absent("cuda-ipc", "see gpu")
    if not has_bindings():
        return absent("cuda-ipc", f"cuda-bindings is not installed; {HOW_TO_INSTALL}")
    onto = min(1, len(presence.gpus) - 1)
    try:
        copy_s = call_isolated(pull_s, _NUM_BYTES, _NUM_ROUNDS, onto, limit_s=_LIMIT_S)
    except NoAnswerError as error:
        return fails(
            "cuda-ipc",
            f"CUDA IPC does not work ({error}); in containers see pid-namespace, and --ipc=host",
        )
    gb_s = _NUM_BYTES / copy_s / 1e9
    return works(
        "cuda-ipc",
        round(gb_s),
        "GB/s",
        f"from GPU 0 to GPU {onto}, {_NUM_BYTES >> 20} MiB",
        "; see nvidia-smi topo -m" if gb_s < _SLOW_GB_S else "",
    )


def pull_s(num_bytes: int, num_rounds: int, onto: int = 0) -> float:
    """Return the median time in seconds of a copy by the importer, after `num_rounds` rounds with a
    check of the data.

    Exports from GPU 0 to a process that it starts and ends, which imports on GPU `onto`. Raises
    RuntimeError if the importer fails or does not answer within 30 s.
    """
    cuda = CopyingCuda(0)
    slab, data = cuda.allocate(num_bytes), cuda.allocate(num_bytes)
    handle = cuda.export(slab)
    ours, theirs = socket.socketpair()
    command = (sys.executable, "-m", __name__, str(theirs.fileno()))
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as importer:
        theirs.close()
        ours.settimeout(_TIMEOUT_S)
        try:
            _send_json(ours, [handle.hex(), num_bytes, num_rounds, onto])
            _receive_json(ours)
            for number in range(num_rounds):
                _send(cuda, ours, data, slab, num_bytes, number)
            copy_s = float(_receive_json(ours))
            # The importer has unmapped the slab before it sent the time.
            cuda.free(slab)
        finally:
            ours.close()
            with suppress(subprocess.TimeoutExpired):
                importer.wait(_TIMEOUT_S)
            importer.kill()
    return copy_s


def _send(
    cuda: "CopyingCuda", link: socket.socket, data: int, slab: int, num_bytes: int, number: int
) -> None:
    """Run one round of the exporter: fill `data`, copy it into the slab, send the round's number,
    and wait until the importer has checked it. Raises RuntimeError if the importer reports an
    error."""
    cuda.call("cudaMemset", data, _filling(number), num_bytes)
    cuda.call("cudaDeviceSynchronize")
    cuda.copy(slab, data, num_bytes)
    cuda.synchronize()
    link.sendall(_NUMBER.pack(number))
    _receive_json(link)


def _import(link: socket.socket) -> None:
    """Run the importer: check the data of every round, then time copies and send the median in
    seconds. Raises RuntimeError if CUDA fails, data are corrupt or the exporter is gone."""
    octets, num_bytes, num_rounds, onto = _receive_json(link)
    cuda = CopyingCuda(onto)
    slab = cuda.open(bytes.fromhex(octets))
    target = cuda.allocate(num_bytes)
    _send_json(link, "ready")
    for _ in range(num_rounds):
        (number,) = _NUMBER.unpack(_exactly(link, _NUMBER.size))
        cuda.copy(target, slab, num_bytes)
        cuda.synchronize()
        cuda.check_filled(target, _filling(number), num_bytes)
        _send_json(link, "as it was sent")
    copy_s = statistics.median(cuda.copy_s(target, slab, num_bytes) for _ in range(_NUM_TIMINGS))
    cuda.close(slab)
    _send_json(link, copy_s)


class CopyingCuda(CudaRuntime):
    """CUDA calls on one device, with a stream for copies."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.stream = self.call("cudaStreamCreateWithFlags", self.bindings.cudaStreamNonBlocking)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Begin a copy on the stream, between host and device addresses; `synchronize` waits for
        it."""
        kind = self.bindings.cudaMemcpyKind.cudaMemcpyDefault
        self.call("cudaMemcpyAsync", target, source, num_bytes, kind, self.stream)

    def copy_s(self, target: int, source: int, num_bytes: int) -> float:
        """Return the time in seconds of a copy, averaged over 20 in a row, which hide launch
        times."""
        started, ended = self.call("cudaEventCreate"), self.call("cudaEventCreate")
        self.call("cudaEventRecord", started, self.stream)
        for _ in range(_NUM_COPIES):
            self.copy(target, source, num_bytes)
        self.call("cudaEventRecord", ended, self.stream)
        self.synchronize()
        return float(self.call("cudaEventElapsedTime", started, ended)) / 1e3 / _NUM_COPIES

    def synchronize(self) -> None:
        """Wait until the stream is done."""
        self.call("cudaStreamSynchronize", self.stream)

    def check_filled(self, source: int, octet: int, num_bytes: int) -> None:
        """Copy device memory to the host and raise RuntimeError unless all bytes equal `octet`."""
        here = ctypes.create_string_buffer(num_bytes)
        self.copy(ctypes.addressof(here), source, num_bytes)
        self.synchronize()
        if here.raw != bytes([octet]) * num_bytes:
            raise RuntimeError("what came over CUDA IPC is corrupt")


def _filling(number: int) -> int:
    """The byte that fills a round's data. It differs from the last round's and from 0."""
    return number % 255 + 1


def _send_json(link: socket.socket, words: object) -> None:
    """Send a value as JSON, preceded by its length in 8 bytes."""
    octets = json.dumps(words).encode()
    link.sendall(_NUMBER.pack(len(octets)) + octets)


def _receive_json(link: socket.socket) -> Any:
    """Receive a value that `_send_json` sent. Raises RuntimeError if it is an object with an
    `error`, and like `_exactly`."""
    (length,) = _NUMBER.unpack(_exactly(link, _NUMBER.size))
    words = json.loads(_exactly(link, length))
    if isinstance(words, dict) and "error" in words:
        raise RuntimeError(f"the importing process: {words['error']}")
    return words


def _exactly(link: socket.socket, num_octets: int) -> bytes:
    """Receive exactly `num_octets` bytes. Raises RuntimeError if the socket times out or the peer
    closes it."""
    octets = b""
    while len(octets) < num_octets:
        try:
            more = link.recv(num_octets - len(octets))
        except TimeoutError:
            raise RuntimeError(
                f"the importing process did not answer within {_TIMEOUT_S:g} s"
            ) from None
        if not more:
            raise RuntimeError("the importing process is gone")
        octets += more
    return octets


def _main(descriptor: str) -> None:
    """Run the importer over an inherited socket; an exception is sent to the exporter, not
    raised."""
    with socket.socket(fileno=int(descriptor)) as link:
        try:
            _import(link)
        except Exception as error:
            _send_json(link, {"error": f"{type(error).__name__}: {first_line(str(error))}"})


if __name__ == "__main__":
    _main(sys.argv[1])
