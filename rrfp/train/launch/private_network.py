"""A network of a run's own: on one host, ranks meet at a loopback that no other process can reach.

gloo's ports, and those of whatever else a rank opens, ask nobody who he is. So the launcher has a
network namespace made, and each rank enters it before it imports anything that listens. Links are
Unix sockets, and files are files: they are reached as before.
"""

import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from rrfp.errors import RrfpError, UsageError, first_line
from rrfp.runtime import launchers as variables
from rrfp.runtime.net.source_filter import filter_refusal
from rrfp.train.launch import network_namespace as network_maker
from rrfp.train.settings import DeviceKind, Network, RunSettings

_MAKE_S = 10.0

_log = logging.getLogger(__name__)


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
    command = [sys.executable, "-I", "-S", network_maker.__file__]
    with ExitStack() as held:
        try:
            maker = subprocess.Popen(
                command,
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
                raise _refused(said)
            paths = []
            for kind in ("user", "net"):
                path = Path(f"/proc/{maker.pid}/ns/{kind}")
                if path.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
                    file = held.enter_context(path.open("rb"))
                    paths.append(f"/proc/{os.getpid()}/fd/{file.fileno()}")
            trial = subprocess.run([*command, *paths], capture_output=True, timeout=_MAKE_S)
            if trial.returncode:
                raise _refused(trial.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotPermittedError(first_line(str(error))) from None
        finally:
            # What has been opened keeps the namespaces.
            maker.kill()
            with suppress(subprocess.TimeoutExpired):
                maker.communicate(timeout=_MAKE_S)
        yield tuple(paths)


def _refused(said: bytes) -> NotPermittedError:
    return NotPermittedError(first_line(said.decode(errors="replace")))


def enter_network() -> None:
    """Enter the network that the launcher names. Must be called before this process has a second
    thread. Raises RrfpError if it cannot."""
    kind, _, rest = os.environ.get(variables.NETWORK, "").partition(":")
    if kind != Network.PRIVATE:
        return
    try:
        network_maker.enter(rest.split(":"))
    except OSError as error:
        raise RrfpError(
            f"this rank cannot enter the network that its launcher has made ({error}); run with "
            "--network host"
        ) from None


@cache
def warn_of_open_ports(network: str, ports: str) -> None:
    """Warn, once in a process, if these ports of a run can be neither in a private network nor
    filtered. `network` is the value of the variable that names the network."""
    kind, _, why = network.partition(":")
    refusal = "" if kind == Network.PRIVATE else filter_refusal()
    if refusal:
        _log.warning(
            "%s accept any connection: this run has no private network (%s), and no filter on ports"
            " (%s); 'rrfp doctor' says what to change",
            *(ports, why.strip(), refusal),
        )


def told_network() -> str:
    """In which network this rank is, for `run.json`: `private`, or `host` and why."""
    told = os.environ.get(variables.NETWORK, "")
    return Network.PRIVATE if told.startswith(f"{Network.PRIVATE}:") else told
