"""Who may connect to a rank's links, and what the store knows of it."""

import json
import os
import secrets
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rrfp.errors import RrfpError
from rrfp.runtime.connecting import Listener, dial
from rrfp.runtime.protocols import Inbox, PeerLostError
from rrfp.runtime.rendezvous import Rendezvous, files_identity
from rrfp.runtime.socket_transport import SocketTransport
from rrfp.runtime.whereabouts import Where
from tests.test_transport import PREFIX, pair

pytestmark = pytest.mark.timeout(60)


class KeptStore(HashStore):
    """A store that keeps what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()
        super().set(key, value)


def test_the_store_knows_no_secret_of_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    own = secrets.token_bytes

    def token_bytes(num_bytes: int) -> bytes:
        made.append(own(num_bytes))
        return made[-1]

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    monkeypatch.setattr("tests.test_transport.HashStore", KeptStore)
    with pair() as near:
        assert isinstance(near.store, KeptStore)
        said = b"".join(near.store.kept.values())
        assert made
        assert not [secret for secret in made if secret in said or secret.hex().encode() in said]
        assert {key.rpartition("/")[0] for key in near.store.kept} == {
            f"{PREFIX}/place",
            f"{PREFIX}/address",
        }
    with pair(allow_unix=False, address="127.0.0.1") as far:
        assert isinstance(far.store, KeptStore)
        said = b"".join(far.store.kept.values())
        # As docs/security.md says: who can read the store can connect from another host.
        assert sum(secret.hex().encode() in said for secret in made) == 2


def test_each_way_in_has_a_secret_of_its_own() -> None:
    listener = Listener(0, [1], lambda *_: None, unix=True, tcp=True, address="127.0.0.1")
    try:
        where = listener.where
        assert where.directory is not None
        assert where.tcp is not None
        directory = Path(where.directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600
        assert (directory / "secret").read_bytes() != where.tcp.secret
        assert Where.decode(json.loads(where.to_json())) == where
    finally:
        listener.close()


def strange_directory(how: str, made: Path) -> Path:
    """A directory with a socket that somebody else may have put there, in one way or another."""
    (made / "secret").write_bytes(bytes(32))
    (made / "secret").chmod(0o600)
    made.chmod(0o700)
    if how == "others may enter":
        made.chmod(0o701)
    if how == "group may read":
        made.chmod(0o740)
    if how == "a link":
        (made.parent / "link").symlink_to(made)
        return made.parent / "link"
    if how == "others may read the secret":
        (made / "secret").chmod(0o604)
    if how == "the secret is a link":
        (made / "secret").rename(made / "elsewhere")
        (made / "secret").symlink_to(made / "elsewhere")
    if how == "the secret is short":
        (made / "secret").write_bytes(bytes(31))
    if how == "the secret is a pipe":
        (made / "secret").unlink()
        os.mkfifo(made / "secret", 0o600)
    if how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory to another user")
        os.chown(made, 12345, -1)
    return made


@pytest.mark.parametrize(
    "how",
    [
        "others may enter",
        "group may read",
        "a link",
        "others may read the secret",
        "the secret is a link",
        "the secret is short",
        "the secret is a pipe",
        "another user's",
    ],
)
def test_a_directory_that_is_not_this_users_alone_is_not_dialled(how: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(made / "socket"))
        listening.listen()
        listening.settimeout(0)
        where = Where(str(strange_directory(how, made)), None)
        with pytest.raises(PeerLostError, match="rank 1 cannot connect to rank 0 at /") as refused:
            dial(1, 0, where, unix=True, timeout_s=5)
        assert "\n" not in str(refused.value)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize(
    "planted",
    [
        b"\x80\x04.",
        b"{}",
        b"[]",
        b'{"directory": "s", "tcp": null}',
        b'{"directory": null, "tcp": {"host": "h", "port": 1}}',
        b'{"directory": null, "tcp": {"host": "h", "port": 70000, "secret": "00"}}',
        b'{"directory": null, "tcp": {"host": "h", "port": 7, "secret": "zz"}}',
    ],
)
def test_an_address_that_cannot_be_read_is_told(planted: bytes) -> None:
    store = HashStore()
    store.set(f"{PREFIX}/place/1", files_identity())
    store.set(f"{PREFIX}/address/1", planted)  # type: ignore[arg-type]
    words = f"what rank 1 published as '{PREFIX}/address/1' cannot be read"
    with pytest.raises(RrfpError, match=words):
        SocketTransport(0, store, [1], [], Inbox(), num_credits=1, connect_s=5)


@pytest.mark.parametrize(
    ("sends_to", "receives_from"), [([2], []), ([], [2])], ids=["source", "destination"]
)
def test_a_peer_that_fails_before_its_links_are_open_is_told_at_once(
    sends_to: list[int], receives_from: list[int]
) -> None:
    store = HashStore()
    store.set(f"{PREFIX}/place/2", files_identity())
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(
            SocketTransport, 1, store, sends_to, receives_from, Inbox(), num_credits=1
        )
        Rendezvous(store, PREFIX, 1, 20).wait("place/1", 1)
        Rendezvous(store, PREFIX, 2, 0).fail("no memory")
        with pytest.raises(PeerLostError, match=r"rank 2 failed before its links .*: no memory"):
            making.result(timeout=20)
