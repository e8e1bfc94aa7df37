"""What a stranger finds of a run on one host: no port, no secret, and nothing that is unpickled."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rrfp.trace.run_dir import own_files
from tests.link_pairs import needs_nixl
from tests.ranks import run_ranks
from tests.trained import TINY, Training, free_port
from tests.training import SMALL, train_variants
from tests.watch import (
    Door,
    OtherNetwork,
    Watch,
    doors_of,
    ports_of_network,
    read_store,
    told_variables,
)

pytestmark = pytest.mark.timeout(400)

TRAIN = ("train", *TINY, "--steps=2")
SAVING = ("--save=runs/ck", "--save-every=1")
BENCH = ("bench", "rq1", "--scale=tiny", "--profile=multimodal", "--steps=1", "--out=o")


@dataclass(frozen=True, slots=True)
class Watched:
    watch: Watch
    pickles: list[str]
    """What the processes unpickled, in words."""
    binds: list[str]
    """The addresses that Python's own sockets were bound to, in words."""
    open_files: list[str]
    """The files of the run that somebody else may read or write."""


def run_watched(directory: Path, *arguments: str) -> Watched:
    """A command line run to its end, every process of it watched."""
    # Somebody's own setting must not lead gloo to another address.
    environment = {**os.environ, **told_variables(directory), "GLOO_SOCKET_IFNAME": "eth0"}
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
    assert trained.watch.doors
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
    assert watched.watch.doors
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
    assert watch.doors
    assert watch.open_to_others == []


def test_the_drop_in_opens_nothing_to_others() -> None:
    """Over somebody else's store and groups, here those of the tests."""
    settings: dict[str, Any] = {**SMALL, "pp": 2, "steps": 1}
    before = doors_of(os.getpid())
    with Watch(includes_self=True) as watch:
        run_ranks(2, train_variants, settings, [{}], timeout_s=200)
    assert len(watch.doors - before) > 1
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
            doors = ports_of_network(run.pid)
            new = {door.port for door in doors if door.kind.startswith("tcp")} - tried
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
        found = doors_of(os.getpid())
        assert Door("tcp", "0.0.0.0", everywhere.getsockname()[1]) in found
        assert Door("tcp", "127.0.0.1", here.getsockname()[1]) in found
        assert Door("udp", "0.0.0.0", udp.getsockname()[1]) in found
        assert not Door("tcp", "0.0.0.0", 1).is_loopback
        assert Door("tcp", "127.0.0.1", here.getsockname()[1]).is_loopback


def test_the_watch_finds_a_pickle_and_a_brief_door(tmp_path: Path) -> None:
    code = (
        "import pickle, socket; pickle.loads(pickle.dumps(print)); socket.create_server(('', 0)); "
        "pickle.Unpickler(open('/dev/null', 'rb'))"
    )
    environment = {**os.environ, **told_variables(tmp_path)}
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
