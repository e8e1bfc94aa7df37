"""The network of a run's own: who is in it, who is not, and what happens where there is none."""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrfp.doctor.checks import State, private_network
from rrfp.errors import RrfpError, UsageError
from rrfp.train.launch import network_namespace as network_maker
from rrfp.train.launch import private_network as network_file
from rrfp.train.launch.private_network import (
    NotPermittedError,
    enter_network,
    made_network,
    network_of,
    told_network,
)
from rrfp.train.settings import DeviceKind, Network, RunSettings
from tests.sandbox import refusing
from tests.trained import Training

_ENTER = "from rrfp.train.launch.private_network import enter_network; enter_network(); "


@pytest.fixture
def network() -> Iterator[dict[str, str]]:
    try:
        with made_network() as paths:
            yield {"RRFP_NETWORK": ":".join(("private", *paths))}
    except NotPermittedError as error:
        pytest.skip(f"this process may not make a network: {error}")


def inside(network: dict[str, str], code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ENTER + code],
        env=os.environ | network,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out


LISTEN = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True); sys.stdin.read()"
)
CONNECT = "import socket; socket.create_connection(('127.0.0.1', {}), 5); print('connected')"


def test_its_processes_reach_each_other_and_nobody_else_does(network: dict[str, str]) -> None:
    with inside(network, LISTEN) as listener:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        assert said(inside(network, CONNECT.format(port))) == "connected\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        said(listener)


def test_there_is_no_way_out_of_it(network: dict[str, str]) -> None:
    code = (
        "import socket\n"
        "try: socket.create_connection(('192.0.2.1', 80), 5)\n"
        "except OSError as error: print(error.strerror)"
    )
    assert said(inside(network, f"exec({code!r})")) == "Network is unreachable\n"


def test_who_enters_keeps_his_user_and_gains_nothing(
    network: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import os; "
        f"os.mkdir({str(tmp_path / 'made')!r}); "
        "print(os.getuid(), os.getgid(), open('/proc/self/status').read().split('CapEff:')[1].split"
        "()[0])"
    )
    user, group, capabilities = said(inside(network, code)).split()
    assert (int(user), int(group)) == (os.getuid(), os.getgid())
    if os.getuid():
        assert int(capabilities, 16) == 0
    made = (tmp_path / "made").stat()
    assert (made.st_uid, stat.S_ISDIR(made.st_mode)) == (os.getuid(), True)


def test_it_ends_with_the_launcher() -> None:
    """Nothing is left that would keep it."""
    try:
        with made_network() as paths:
            number = Path(paths[-1]).readlink()
            assert number != Path("/proc/self/ns/net").readlink()
    except NotPermittedError as error:
        pytest.skip(f"this process may not make a network: {error}")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert (process / "ns/net").readlink() != number
        except OSError:
            continue


def test_a_network_that_is_gone_fails_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RRFP_NETWORK", "private:/proc/self/fd/999")
    with pytest.raises(RrfpError, match=r"cannot enter the network .*; run with --network host"):
        enter_network()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"network": Network.HOST}, "host: --network host"),
        ({"nnodes": 2}, "host: hosts reach each other by it"),
        ({"device": DeviceKind.CUDA}, "host: runs on GPUs take a private one only when asked"),
    ],
)
def test_a_run_that_takes_its_hosts_network_says_why(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with network_of(RunSettings(**settings)) as variables:
        assert variables == {"RRFP_NETWORK": told}
    monkeypatch.setenv("RRFP_NETWORK", told)
    enter_network()
    assert told_network() == told


@pytest.fixture
def forbidding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host that does not permit it."""
    maker = tmp_path / "maker.py"
    maker.write_text("import sys; sys.exit('Operation not permitted')")
    monkeypatch.setattr(network_maker, "__file__", str(maker))


@pytest.mark.parametrize("calls", [("unshare", "memfd_create", "prctl"), ("setns",)])
def test_a_run_goes_on_without_what_a_container_refuses(
    calls: tuple[str, ...], tmp_path: Path
) -> None:
    """And says once that its ports are open."""
    refused = refusing(*calls, "setsockopt")
    with Training(tmp_path / "run", "--pp=1", "--steps=2", within=refused) as training:
        code, _, err = training.ended()
    assert code == 0, err
    network = json.loads((tmp_path / "run" / "run.json").read_text())["network"]
    assert network.startswith("host: not permitted (")
    assert network.endswith(": Operation not permitted)")
    assert err.count("gloo's ports accept any connection: this run has no private network") == 1
    assert "no filter on ports (setsockopt(SO_ATTACH_FILTER): Operation not permitted)" in err


@pytest.mark.usefixtures("forbidding")
def test_where_it_is_not_permitted_a_run_goes_on_without() -> None:
    with network_of(RunSettings()) as variables:
        assert variables == {"RRFP_NETWORK": "host: not permitted (Operation not permitted)"}
    check = private_network()
    assert check.state is State.ABSENT
    assert "cannot be made (Operation not permitted); let users make" in check.advice
    with (
        pytest.raises(UsageError, match="--network is private, and this host does not permit it"),
        network_of(RunSettings(network=Network.PRIVATE)),
    ):
        pass


def test_a_kernel_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maker = tmp_path / "maker.py"
    maker.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(network_maker, "__file__", str(maker))
    monkeypatch.setattr(network_file, "_MAKE_S", 0.2)
    with pytest.raises(NotPermittedError, match=r"not made within 0\.2 s"), made_network():
        pass


def test_the_doctor_tries_it(network: dict[str, str]) -> None:
    check = private_network()
    assert (check.state, check.unit) == (State.OK, "ms")
