"""Observes the attack surface of a run: its listeners, the content of its store, and its
pickles."""

import ipaddress
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

_LOOK_S = 0.05
_LISTENS, _UNCONNECTED = "0A", "07"
"""In proc(5)'s tables: TCP sockets that listen, and UDP sockets that take from anybody."""

_HOOK = """
import os, pickle, sys, traceback

log = os.open(
    os.path.join(os.environ["WATCH_DIRECTORY"], str(os.getpid())),
    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
)

def tell(what):
    os.write(log, (what + " " + str(traceback.extract_stack()[-3]) + "\\\\n").encode())

def hook(event, args):
    if event == "pickle.find_class":
        tell("find_class " + repr(args))
    if event == "socket.bind" and isinstance(args[1], tuple):
        tell("bind " + args[1][0])

sys.addaudithook(hook)
loads, load, Unpickler = pickle.loads, pickle.load, pickle.Unpickler

def watched_loads(*args, **options):
    tell("loads")
    return loads(*args, **options)

def watched_load(*args, **options):
    tell("load")
    return load(*args, **options)

class WatchedUnpickler(Unpickler):
    def __init__(self, *args, **options):
        tell("Unpickler")
        super().__init__(*args, **options)

pickle.loads, pickle.load, pickle.Unpickler = watched_loads, watched_load, WatchedUnpickler
"""


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A socket at which a process accepts data from anybody."""

    kind: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


@dataclass(slots=True)
class Watch:
    """Looks at this process' descendants, again and again, until the `with` block ends; with
    `includes_self` at this process too."""

    includes_self: bool = False
    listeners: set[Listener] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    store: dict[str, bytes] = field(default_factory=dict)
    """The store of a run on one host, as it was read last."""
    _stores: dict[int, Path | None] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            own = [os.getpid()] if self.includes_self else []
            for pid in [*own, *descendants(os.getpid())]:
                self.pids.add(pid)
                self.listeners |= listeners_of(pid)
                self._look_into_store(pid)

    def _look_into_store(self, pid: int) -> None:
        if self._stores.get(pid) is None:
            self._stores[pid] = store_of(pid)
        path = self._stores[pid]
        if path is not None:
            with suppress(OSError):
                self.store = read_store(path.read_bytes()) or self.store

    @property
    def open_to_others(self) -> list[Listener]:
        return sorted(listener for listener in self.listeners if not listener.is_loopback)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in _listed(Path(f"/proc/{pid}/task")):
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def listeners_of(pid: int) -> set[Listener]:
    """The TCP sockets of a process that listen, and its UDP sockets that are not connected."""
    inodes = set()
    for descriptor in _listed(Path(f"/proc/{pid}/fd")):
        with suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return {listener for inode, listener in _table(pid) if inode in inodes}


def ports_of_network(pid: int) -> set[Listener]:
    """The same, of every process in the network that a process is in."""
    return {listener for _, listener in _table(pid)}


def _table(pid: int) -> Iterator[tuple[str, Listener]]:
    for kind, state in (
        ("tcp", _LISTENS),
        ("tcp6", _LISTENS),
        ("udp", _UNCONNECTED),
        ("udp6", _UNCONNECTED),
    ):
        try:
            lines = Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            cells = line.split()
            if cells[3] == state:
                yield cells[9], _listener(kind, cells[1])


def _listener(kind: str, local: str) -> Listener:
    digits, _, port = local.partition(":")
    # The kernel writes addresses in words of 32 bits, each in the host's byte order.
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return Listener(kind, str(address), int(port, 16))


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def store_of(pid: int) -> Path | None:
    """The file that is the store of a rank of one host."""
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.decode(errors="replace").partition("=")
            if name == "RRFP_STORE" and value.startswith("file:"):
                return Path(value[len("file:") :])
    return None


def read_store(data: bytes) -> dict[str, bytes]:
    """Read the file of torch's FileStore: alternating keys and values, each after its length; a
    later value replaces an earlier one."""
    parts: list[bytes] = []
    place = 0
    while place + 4 <= len(data):
        (size,) = struct.unpack_from("=I", data, place)
        parts.append(data[place + 4 : place + 4 + size])
        place += 4 + size
    return {
        key.decode(errors="replace").removeprefix("/"): value
        for key, value in zip(parts[::2], parts[1::2], strict=False)
    }


def watch_variables(directory: Path) -> dict[str, str]:
    """The environment in which Python processes record everything that they unpickle and every
    address that Python binds, from their start, in `directory/told/PID`."""
    hooks, told = directory / "hooks", directory / "told"
    hooks.mkdir()
    told.mkdir()
    (hooks / "sitecustomize.py").write_text(_HOOK.replace("\\\\n", "\\n"))
    path = os.pathsep.join([str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "WATCH_DIRECTORY": str(told)}


class OtherNetwork:
    """A network namespace beside another one, with a wire between: for what reaches it."""

    def __init__(self, name: str) -> None:
        """Raises OSError where this process may not make any."""
        self.inside, self.outside = f"{name}-in", f"{name}-out"
        self.address = "10.213.77.1"
        for command in (
            f"netns add {self.inside}",
            f"netns add {self.outside}",
            f"link add {name}i netns {self.inside} type veth peer {name}o netns {self.outside}",
            f"-n {self.inside} addr add {self.address}/30 dev {name}i",
            f"-n {self.outside} addr add 10.213.77.2/30 dev {name}o",
            f"-n {self.inside} link set {name}i up",
            f"-n {self.outside} link set {name}o up",
            f"-n {self.inside} link set lo up",
            # As on a host of a cluster: its name leads to its address.
            f"-n {self.inside} route add default via 10.213.77.2",
        ):
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                self.close()
                raise OSError(f"ip {command}: {done.stderr.strip()}")

    def close(self) -> None:
        for namespace in (self.inside, self.outside):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def command(self, *command: str) -> list[str]:
        """A command in the network that is to be reached."""
        return [*self._exec(self.inside), *command]

    @staticmethod
    def _exec(namespace: str) -> list[str]:
        return ["ip", "netns", "exec", namespace]

    def reached(self, ports: Sequence[int]) -> list[int]:
        """The TCP ports that answer from outside, of those given."""
        code = (
            "import socket, sys\n"
            "for port in map(int, sys.argv[2:]):\n"
            "    try: socket.create_connection((sys.argv[1], port), timeout=2).close()\n"
            "    except OSError: continue\n"
            "    print(port)\n"
        )
        done = subprocess.run(
            [*self._exec(self.outside), sys.executable, "-S", "-c", code, self.address]
            + [str(port) for port in ports],
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(line) for line in done.stdout.split()]


# Runs a function as another user of the host, as only root can.


USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_other_user(function: Callable[[], Any]) -> Any:
    """Call a function in a process of another user and return its result. That user may not be able
    to read this installation, so all imports of the function must be done before."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)
                # This user's own may not be open to that one.
                os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
                pickle.dump(function(), answer)
                answer.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        answer.seek(0)
        return pickle.load(answer)
