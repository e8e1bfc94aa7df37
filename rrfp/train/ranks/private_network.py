"""A network of a run's own: on one host, ranks meet at a loopback that no other process can reach.

gloo's ports, and those of whatever else a rank opens, ask nobody who he is. So the launcher has a
network namespace made, and each rank enters it before it imports anything that listens. Links are
Unix sockets, and files are files: they are reached as before.
"""

import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime import variables
from rrfp.train import libc
from rrfp.train.ranks import network_maker
from rrfp.train.setting_groups import DeviceKind, Network, RunSettings

_CAPABILITY_VERSION_3 = 0x20080522
_MAKE_S = 10.0


class NotPermittedError(Exception):
    """This host lets its users make no network, in the kernel's words."""


@contextmanager
def network_of(run: RunSettings) -> Iterator[dict[str, str]]:
    """The variables that tell a host's ranks which network to enter, which is there as long as the
    block; where it is the host's, they say why. Raises UsageError if the user insists on a private
    one and this host or this run has none."""
    if reason := _needs_hosts(run):
        yield {variables.NETWORK: f"{Network.HOST}: {reason}"}
        return
    with ExitStack() as held:
        try:
            namespaces = held.enter_context(made_network())
        except NotPermittedError as error:
            if run.network is Network.PRIVATE:
                raise UsageError(
                    f"--network is private, and this host does not permit it ({error}); see what "
                    "'rrfp doctor' advises"
                ) from None
            yield {variables.NETWORK: f"{Network.HOST}: not permitted ({error})"}
            return
        yield {variables.NETWORK: ":".join((Network.PRIVATE, *namespaces))}


def _needs_hosts(run: RunSettings) -> str:
    """Why a run takes the network of its host; empty if it need not."""
    if run.network is Network.HOST:
        return "--network host"
    if run.nnodes > 1:
        return "hosts reach each other by it"
    if run.device is not DeviceKind.CPU and run.network is Network.AUTO:
        return "runs on GPUs take a private one only when asked"
    return ""


@contextmanager
def made_network() -> Iterator[tuple[str, ...]]:
    """A network with loopback alone, as the paths of the namespaces to enter: of users, unless this
    process' own does, and of the network. Raises NotPermittedError."""
    with ExitStack() as held:
        try:
            maker = subprocess.Popen(
                [sys.executable, "-I", "-S", network_maker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise NotPermittedError(error.strerror) from None
        try:
            assert maker.stdout is not None
            if not select.select([maker.stdout], [], [], _MAKE_S)[0]:
                raise NotPermittedError(f"not made within {_MAKE_S:g} s")
            if maker.stdout.readline() != b"ready\n":
                _, said = maker.communicate(timeout=_MAKE_S)
                raise NotPermittedError(first_line(said.decode(errors="replace")))
            paths = []
            for kind in ("user", "net"):
                path = Path(f"/proc/{maker.pid}/ns/{kind}")
                if path.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
                    file = held.enter_context(path.open("rb"))
                    paths.append(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotPermittedError(first_line(str(error))) from None
        finally:
            # What has been opened keeps the namespaces.
            maker.kill()
            with suppress(subprocess.TimeoutExpired):
                maker.communicate(timeout=_MAKE_S)
        yield tuple(paths)


def enter_network() -> None:
    """Enter the network that the launcher names. Must be called before this process has a second
    thread. Raises RrfpError if it cannot."""
    kind, _, rest = os.environ.get(variables.NETWORK, "").partition(":")
    if kind != Network.PRIVATE:
        return
    paths = rest.split(":")
    try:
        with ExitStack() as opened:
            # All at first: from within a namespace of users the launcher's files are out of reach.
            namespaces = [opened.enter_context(Path(path).open("rb")) for path in paths]
            for namespace in namespaces:
                libc.call("setns", namespace.fileno(), 0)
        if len(paths) > 1:
            _drop_capabilities()
    except OSError as error:
        raise RrfpError(
            f"this rank cannot enter the network that its launcher has made ({error}); run with "
            "--network host"
        ) from None


def _drop_capabilities() -> None:
    """Give up what a namespace of users grants to those who enter it: a rank is to be able to do
    what its user can, and no more."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    libc.call("capset", header, none)


def told_network() -> str:
    """In which network this rank is, for `run.json`: `private`, or `host` and why."""
    told = os.environ.get(variables.NETWORK, "")
    return Network.PRIVATE if told.startswith(f"{Network.PRIVATE}:") else told
