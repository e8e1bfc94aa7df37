"""A private network for a run on one host: its loopback is out of reach of all other processes.

gloo's ports, and any others that a rank opens, authenticate nobody. So the launcher creates a
network namespace, and each rank enters it before it imports anything that listens. Unix sockets,
which carry rrfp's links, and files are reachable as before.
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
from rrfp.train.launch import network_namespace
from rrfp.train.settings import DeviceKind, Network, RunSettings

_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class NotPermittedError(Exception):
    """A network namespace cannot be created or entered here. Its text is the reason."""


@contextmanager
def run_network(run: RunSettings) -> Iterator[dict[str, str]]:
    """Create the run's network for as long as the block runs. Yield the variable that names it to
    this host's ranks or has the reason why they use the host's network. Raise UsageError if
    --network private is not permitted here."""
    if reason := _reason_for_host_network(run):
        yield {variables.NETWORK: f"{Network.HOST}: {reason}"}
        return
    with ExitStack() as held:
        try:
            namespaces = held.enter_context(created_network())
        except NotPermittedError as error:
            if run.network is Network.PRIVATE:
                raise UsageError(
                    f"--network is private, and this host does not permit it ({error}); see what "
                    "'rrfp doctor' advises"
                ) from None
            yield {variables.NETWORK: f"{Network.HOST}: not permitted ({error})"}
            return
        yield {variables.NETWORK: ":".join((Network.PRIVATE, *namespaces))}


def _reason_for_host_network(run: RunSettings) -> str:
    """Return the reason why a run uses the network of its host; empty if it may have a private
    one."""
    if run.network is Network.HOST:
        return "--network host"
    if run.nnodes > 1:
        return "hosts reach each other by it"
    if run.device is not DeviceKind.CPU and run.network is Network.AUTO:
        return "runs on GPUs take a private one only when asked"
    return ""


@contextmanager
def created_network() -> Iterator[tuple[str, ...]]:
    """Create a network with only loopback by a short-lived process, and let another one try to
    enter it. Yield the paths of the namespaces to enter, which last as long as the block: the user
    namespace, unless it is this process' own, and the network's. Raise NotPermittedError if that
    fails or a process takes over 10 s."""
    command = [sys.executable, "-I", "-S", network_namespace.__file__]
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
            if not select.select([maker.stdout], [], [], _TIMEOUT_S)[0]:
                raise NotPermittedError(f"not made within {_TIMEOUT_S:g} s")
            if maker.stdout.readline() != b"ready\n":
                _, errors = maker.communicate(timeout=_TIMEOUT_S)
                raise NotPermittedError(first_line(errors.decode(errors="replace")))
            paths = []
            for kind in ("user", "net"):
                path = Path(f"/proc/{maker.pid}/ns/{kind}")
                if path.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
                    file = held.enter_context(path.open("rb"))
                    paths.append(f"/proc/{os.getpid()}/fd/{file.fileno()}")
            trial = subprocess.run([*command, *paths], capture_output=True, timeout=_TIMEOUT_S)
            if trial.returncode:
                raise NotPermittedError(first_line(trial.stderr.decode(errors="replace")))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotPermittedError(first_line(str(error))) from None
        finally:
            # The open files keep the namespaces alive.
            maker.kill()
            with suppress(subprocess.TimeoutExpired):
                maker.communicate(timeout=_TIMEOUT_S)
        yield tuple(paths)


def enter_network() -> None:
    """Enter the private network that the launcher names; do nothing without one. Call this before
    the process starts a second thread. Raise RrfpError if the kernel refuses."""
    kind, _, rest = os.environ.get(variables.NETWORK, "").partition(":")
    if kind != Network.PRIVATE:
        return
    try:
        network_namespace.enter(rest.split(":"))
    except OSError as error:
        raise RrfpError(
            f"this rank cannot enter the network that its launcher has made ({error}); run with "
            "--network host"
        ) from None


@cache
def warn_of_open_ports(network: str, ports: str) -> None:
    """Warn, once per process for the same arguments, if these ports of a run are neither in a
    private network nor filtered. `network` is the value of the variable that names the network, and
    `ports` what the warning calls the ports."""
    kind, _, why = network.partition(":")
    refusal = "" if kind == Network.PRIVATE else filter_refusal()
    if refusal:
        _log.warning(
            "%s accept any connection: this run has no private network (%s), and no filter on ports"
            " (%s); 'rrfp doctor' says what to change",
            *(ports, why.strip(), refusal),
        )


def describe_network() -> str:
    """Return this rank's network, for `run.json`: `private`, or `host` with the reason; empty in
    the launcher."""
    network = os.environ.get(variables.NETWORK, "")
    return Network.PRIVATE if network.startswith(f"{Network.PRIVATE}:") else network
