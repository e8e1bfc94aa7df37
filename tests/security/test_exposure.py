"""A stranger finds no port of a run on one host, no secret, and nothing that is unpickled."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rrfp.doctor.checks import State, private_network
from rrfp.errors import RrfpError, UsageError
from rrfp.trace.run_dir import own_files
from rrfp.train.launch import network_namespace
from rrfp.train.launch import private_network as network_file
from rrfp.train.launch.private_network import (
    NotPermittedError,
    created_network,
    describe_network,
    enter_network,
    run_network,
)
from rrfp.train.settings import DeviceKind, Network, RunSettings
from tests.e2e.ranks import run_ranks
from tests.megatron.training import SMALL, train_variants
from tests.runtime.link_pairs import needs_nixl
from tests.security.exposed import (
    Listener,
    OtherNetwork,
    Watch,
    listeners_of,
    ports_of_network,
    read_store,
    watch_variables,
)
from tests.security.sandbox import refusing
from tests.train.trained import TINY, Training, free_port

pytestmark = pytest.mark.timeout(400)


TRAIN = ("train", *TINY, "--steps=2")
SAVING = ("--save=runs/ck", "--save-every=1")
BENCH = ("bench", "rq1", "--scale=tiny", "--profile=multimodal", "--steps=1", "--out=o")


@dataclass(frozen=True, slots=True)
class Watched:
    watch: Watch
    pickles: list[str]
    """Descriptions of everything that the processes unpickled."""
    binds: list[str]
    """Descriptions of the addresses to which Python's own sockets were bound."""
    open_files: list[str]
    """The files of the run that somebody else may read or write."""


def run_watched(directory: Path, *arguments: str) -> Watched:
    """A command line run to its end, every process of it watched."""
    # A user's own setting must not lead gloo to another address.
    environment = {**os.environ, **watch_variables(directory), "GLOO_SOCKET_IFNAME": "eth0"}
    with Watch() as watch:
        done = subprocess.run(
            [sys.executable, "-m", "rrfp", *arguments],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    told = list((directory / "told").iterdir())
    assert {int(path.name) for path in told} & watch.pids
    lines = [line for path in told for line in path.read_text().splitlines()]
    binds = [line for line in lines if line.startswith("bind ")]
    open_files = [
        str(path.relative_to(directory))
        for path in directory.glob("runs/**/*")
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    return Watched(watch, [line for line in lines if line not in binds], binds, open_files)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return run_watched(tmp_path_factory.mktemp("trained"), *TRAIN, "--pp=2", *SAVING)


def test_a_run_listens_at_loopback_only(trained: Watched) -> None:
    assert trained.watch.listeners
    assert trained.watch.open_to_others == []
    assert trained.binds == []


def test_a_runs_files_are_its_users_alone(trained: Watched) -> None:
    assert trained.open_files == []


def test_files_are_shared_when_that_is_asked(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with own_files():
            (tmp_path / "own").mkdir()
        with own_files(shared=True):
            (tmp_path / "shared").mkdir()
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("own", "shared")]
    assert modes == [0o700, 0o750]


def test_no_process_of_a_run_unpickles_anything(trained: Watched) -> None:
    """Nor does any library while it is imported."""
    assert trained.pickles == []


def test_the_store_of_one_host_holds_no_secret(trained: Watched) -> None:
    addresses = {key: value for key, value in trained.watch.store.items() if "/address/" in key}
    assert len(addresses) == 2
    for value in addresses.values():
        told = json.loads(value)
        assert told.keys() == {"directory", "tcp", "transport"}
        assert told["tcp"] is None
    assert not [item for item in trained.watch.store.items() if "secret" in str(item)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (*TRAIN, "--pp=4"),
        (*TRAIN, "--pp=4", "--dispatch=fixed"),
        (*TRAIN, "--pp=4", "--dispatch=megatron"),
        (*TRAIN, "--pp=2", "--tp=2"),
        (*TRAIN, "--pp=2", "--tp=2", "--dispatch=megatron"),
        (*TRAIN, "--pp=2", "--dp=2"),
        (*TRAIN, "--pp=2", "--dp=2", "--distributed-optimizer"),
        (*TRAIN, "--pp=2", "--dp=2", "--ep=2", "--model=moe"),
        pytest.param((*TRAIN, "--pp=4", "--transport=nixl"), marks=needs_nixl),
        ("verify", "--layout=pp4", "--hint=bf", "--steps=1"),
        BENCH,
    ],
    ids=lambda arguments: " ".join(each for each in arguments if each not in TINY),
)
def test_nothing_of_any_kind_of_run_is_open(arguments: tuple[str, ...], tmp_path: Path) -> None:
    watched = run_watched(tmp_path, *arguments)
    assert watched.open_files == []
    assert watched.watch.listeners
    assert watched.watch.open_to_others == []
    assert watched.binds == []
    assert watched.pickles == []


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_several_hosts_listen_at_the_endpoints_interface_alone(host: str, tmp_path: Path) -> None:
    """Two on this machine, whose own addresses on the way to each other are loopback ones."""
    flags = ["--steps=2", "--nnodes=2", f"--rdzv-endpoint={host}:{free_port()}"]
    with (
        Watch() as watch,
        Training(tmp_path / "run", *flags, "--node-rank=0") as first,
        Training(tmp_path / "run", *flags, "--node-rank=1") as second,
    ):
        for each in (first, second):
            code, _, err = each.ended()
            assert code == 0, err
    assert watch.listeners
    assert watch.open_to_others == []


def test_the_drop_in_opens_nothing_to_others() -> None:
    """Over somebody else's store and groups, here those of the tests."""
    settings: dict[str, Any] = {**SMALL, "pp": 2, "steps": 1}
    before = listeners_of(os.getpid())
    with Watch(includes_self=True) as watch:
        run_ranks(2, train_variants, settings, [{}], timeout_s=200)
    assert len(watch.listeners - before) > 1
    assert set(watch.open_to_others) <= before


@pytest.fixture
def network() -> Iterator[OtherNetwork]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command to make a network with")
    try:
        made = OtherNetwork(f"rrfp{os.getpid()}")
    except OSError as error:
        pytest.skip(f"this process may not make a network: {error}")
    yield made
    made.close()


def test_no_port_answers_from_another_network(network: OtherNetwork, tmp_path: Path) -> None:
    """Over a wire that works: a port that is open to all is reached."""
    flags = ("--pp=2", "--steps=1000000", "--network=host")
    command = network.command(sys.executable, "-m", "rrfp", *TRAIN, *flags)
    listen = "import socket, time; s = socket.create_server(('', 4711)); time.sleep(600)"
    everywhere = subprocess.Popen(network.command(sys.executable, "-c", listen))
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        tried: set[int] = set()
        while not any(metrics.stat().st_size for metrics in tmp_path.glob("runs/*/metrics.jsonl")):
            assert run.poll() is None, run.communicate()[1]
            listeners = ports_of_network(run.pid)
            new = {
                listener.port for listener in listeners if listener.kind.startswith("tcp")
            } - tried
            if new:
                assert network.reached(sorted(new)) in ([], [4711])
                tried |= new
        assert network.reached(sorted(tried)) == [4711]
        assert len(tried) > 1
    finally:
        for process in (run, everywhere):
            process.terminate()
            process.communicate(timeout=30)


# The watching itself.


def test_the_watch_finds_a_door() -> None:
    with (
        socket.create_server(("", 0)) as everywhere,
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("0.0.0.0", 0))
        found = listeners_of(os.getpid())
        assert Listener("tcp", "0.0.0.0", everywhere.getsockname()[1]) in found
        assert Listener("tcp", "127.0.0.1", here.getsockname()[1]) in found
        assert Listener("udp", "0.0.0.0", udp.getsockname()[1]) in found
        assert not Listener("tcp", "0.0.0.0", 1).is_loopback
        assert Listener("tcp", "127.0.0.1", here.getsockname()[1]).is_loopback


def test_the_watch_finds_a_pickle_and_a_brief_door(tmp_path: Path) -> None:
    code = (
        "import pickle, socket; pickle.loads(pickle.dumps(print)); socket.create_server(('', 0)); "
        "pickle.Unpickler(open('/dev/null', 'rb'))"
    )
    environment = {**os.environ, **watch_variables(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    (told,) = (path.read_text() for path in (tmp_path / "told").iterdir())
    words = ["loads", "find_class", "bind", "Unpickler"]
    assert [line.split()[0] for line in told.splitlines()] == words


def test_the_store_is_read_as_torch_writes_it(tmp_path: Path) -> None:
    from torch.distributed import FileStore, PrefixStore

    store = FileStore(str(tmp_path / "store"))
    store.set("a", "one")
    PrefixStore("p", store).set("b", "two")
    store.set("a", "three")
    read = read_store((tmp_path / "store").read_bytes())
    assert (read["a"], read["p/b"]) == (b"three", b"two")


# The private network of a run: its members, outsiders, and hosts that do not permit one.


_ENTER = "from rrfp.train.launch.private_network import enter_network; enter_network(); "


@pytest.fixture
def own_network() -> Iterator[dict[str, str]]:
    try:
        with created_network() as paths:
            yield {"RRFP_NETWORK": ":".join(("private", *paths))}
    except NotPermittedError as error:
        pytest.skip(f"this process may not make a network: {error}")


def inside(own_network: dict[str, str], code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _ENTER + code],
        env=os.environ | own_network,
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


def test_its_processes_reach_each_other_and_nobody_else_does(own_network: dict[str, str]) -> None:
    with inside(own_network, LISTEN) as listener:
        assert listener.stdout is not None
        port = int(listener.stdout.readline())
        assert said(inside(own_network, CONNECT.format(port))) == "connected\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        said(listener)


def test_there_is_no_way_out_of_it(own_network: dict[str, str]) -> None:
    code = (
        "import socket\n"
        "try: socket.create_connection(('192.0.2.1', 80), 5)\n"
        "except OSError as error: print(error.strerror)"
    )
    assert said(inside(own_network, f"exec({code!r})")) == "Network is unreachable\n"


def test_who_enters_keeps_his_user_and_gains_nothing(
    own_network: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import os; "
        f"os.mkdir({str(tmp_path / 'made')!r}); "
        "print(os.getuid(), os.getgid(), open('/proc/self/status').read().split('CapEff:')[1].split"
        "()[0])"
    )
    user, group, capabilities = said(inside(own_network, code)).split()
    assert (int(user), int(group)) == (os.getuid(), os.getgid())
    if os.getuid():
        assert int(capabilities, 16) == 0
    made = (tmp_path / "made").stat()
    assert (made.st_uid, stat.S_ISDIR(made.st_mode)) == (os.getuid(), True)


def test_it_ends_with_the_launcher() -> None:
    """Nothing is left that would keep it."""
    try:
        with created_network() as paths:
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
    with run_network(RunSettings(**settings)) as variables:
        assert variables == {"RRFP_NETWORK": told}
    monkeypatch.setenv("RRFP_NETWORK", told)
    enter_network()
    assert describe_network() == told


@pytest.fixture
def forbidding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host that does not permit it."""
    maker = tmp_path / "maker.py"
    maker.write_text("import sys; sys.exit('Operation not permitted')")
    monkeypatch.setattr(network_namespace, "__file__", str(maker))


@pytest.mark.parametrize("calls", [("unshare", "memfd_create", "prctl"), ("setns",)])
def test_a_run_goes_on_without_what_a_container_refuses(
    calls: tuple[str, ...], tmp_path: Path
) -> None:
    """The run warns once that its ports are open."""
    refused = refusing(*calls, "setsockopt")
    with Training(tmp_path / "run", "--pp=1", "--steps=2", within=refused) as training:
        code, _, err = training.ended()
    assert code == 0, err
    own_network = json.loads((tmp_path / "run" / "run.json").read_text())["network"]
    assert own_network.startswith("host: not permitted (")
    assert own_network.endswith(": Operation not permitted)")
    assert err.count("gloo's ports accept any connection: this run has no private network") == 1
    assert "no filter on ports (setsockopt(SO_ATTACH_FILTER): Operation not permitted)" in err


@pytest.mark.usefixtures("forbidding")
def test_where_it_is_not_permitted_a_run_goes_on_without() -> None:
    with run_network(RunSettings()) as variables:
        assert variables == {"RRFP_NETWORK": "host: not permitted (Operation not permitted)"}
    check = private_network()
    assert check.state is State.ABSENT
    assert "cannot be made (Operation not permitted); let users make" in check.advice
    with (
        pytest.raises(UsageError, match="--network is private, and this host does not permit it"),
        run_network(RunSettings(network=Network.PRIVATE)),
    ):
        pass


def test_a_kernel_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maker = tmp_path / "maker.py"
    maker.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(network_namespace, "__file__", str(maker))
    monkeypatch.setattr(network_file, "_TIMEOUT_S", 0.2)
    with pytest.raises(NotPermittedError, match=r"not made within 0\.2 s"), created_network():
        pass


def test_the_doctor_tries_it(own_network: dict[str, str]) -> None:
    check = private_network()
    assert (check.state, check.unit) == (State.OK, "ms")
