"""The server of a trace: this machine only, that file only, and the UI's own files."""

import http.client
import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.analyze import perfetto_overlay as initial_view
from rrfp.analyze.perfetto_overlay import find_initial_view
from rrfp.cli import main as cli
from rrfp.errors import RrfpError
from rrfp.schedule.policy import Bytes
from rrfp.trace.initial_view import InitialView, Preset, typical_step, widened, worst_step
from rrfp.trace.perfetto.format import PATH_OF_CATEGORY, counters_of, stage_path
from rrfp.trace.perfetto.writer import write_trace
from rrfp.trace.perfetto_server import PUBLIC_UI, PUBLIC_UI_PORT, TraceServer
from rrfp.trace.records import PhaseRecord, RankInfo, RankRecords, Recording
from tests.analyze.recordings import make_recording
from tests.analyze.test_memory import held_run as a_run
from tests.security.exposed import as_other_user, needs_root

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "trace.pftrace"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    (path.parent / "run.json").write_text("{}")
    return path


@pytest.fixture
def ui(tmp_path: Path) -> Path:
    folder = tmp_path / "ui"
    (folder / "v1").mkdir(parents=True)
    (folder / "index.html").write_text("<html>")
    (folder / "v1" / "engine.wasm").write_bytes(b"\0asm")
    (folder / "v1" / "bundle.js").write_text("1")
    (folder / "trace_processor").write_text("#!/usr/bin/env python3")
    return folder


def _serve(server: TraceServer) -> Iterator[TraceServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@pytest.fixture
def public(trace: Path) -> Iterator[TraceServer]:
    """A server for the public UI."""
    yield from _serve(TraceServer(trace, ui=None, port=0))


@pytest.fixture
def local(trace: Path, ui: Path) -> Iterator[TraceServer]:
    """A server that brings the UI along."""
    yield from _serve(TraceServer(trace, ui=ui, port=0))


def _ask(
    server: TraceServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def _path_of(server: TraceServer, name: str = "trace.pftrace") -> str:
    """The path of what only the server's user may read."""
    return urlsplit(server.address).path + name


def test_only_the_loopback_address_is_served(public: TraceServer) -> None:
    assert public.server_address[0] == "127.0.0.1"


def test_the_public_ui_may_read_the_trace(public: TraceServer, local: TraceServer) -> None:
    for server in (public, local):
        response, body = _ask(server, _path_of(server), Origin=PUBLIC_UI)
        assert (response.status, body) == (200, CONTENT)
        assert response.headers["Access-Control-Allow-Origin"] == PUBLIC_UI
        response, _ = _ask(server, _path_of(server), "OPTIONS", Origin=PUBLIC_UI)
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == PUBLIC_UI
        assert response.headers["Access-Control-Allow-Private-Network"] == "true"


@pytest.mark.parametrize(
    "path", ["/", "/index.html", "/v1/bundle.js", "/run.json", "/trace.pftrace"]
)
def test_the_public_ui_may_read_nothing_else(
    public: TraceServer, local: TraceServer, path: str
) -> None:
    for server in (public, local):
        for method in ("GET", "HEAD", "OPTIONS", "POST"):
            response, body = _ask(server, path, method, Origin=PUBLIC_UI)
            assert (response.status, body) == (403, b"")
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://example.com",
        f"{PUBLIC_UI}.example.com",
        "http://ui.perfetto.dev",
        "http://127.0.0.1:1",
        "http://127.0.0.1.example.com",
        "null",
        "",
    ],
)
def test_another_site_is_refused(public: TraceServer, local: TraceServer, origin: str) -> None:
    for server in (public, local):
        for path in (_path_of(server), _path_of(server, ""), "/index.html", "/"):
            for method in ("GET", "HEAD", "OPTIONS", "POST"):
                response, body = _ask(server, path, method, Origin=origin)
                assert (response.status, body) == (403, b"")
                assert "Access-Control-Allow-Origin" not in response.headers


def test_the_pages_served_here_may_ask(local: TraceServer) -> None:
    asking = [
        {"Origin": f"http://127.0.0.1:{local.port}"},
        {"Origin": f"http://localhost:{local.port}"},
        # Through a tunnel the browser sees another port.
        {"Origin": "http://localhost:8000", "Host": "localhost:8000"},
    ]
    for headers in asking:
        for path in (_path_of(local), "/index.html"):
            response, _ = _ask(local, path, **headers)
            assert response.status == 200
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/run.json",
        "/run/trace.pftrace",
        "/../run/run.json",
        "/%2e%2e/run/run.json",
        "//trace.pftrace/../run.json",
        "//[",
        "/v1/../../run/run.json",
        "/trace_processor",
        "/v1",
        "/v1/",
        "/vizviewer_info",
        "/localtrace",
        "",
    ],
)
def test_nothing_else_is_served(public: TraceServer, local: TraceServer, path: str) -> None:
    for server in (public, local):
        response, body = _ask(server, path or "*")
        assert (response.status, body) == (404, b"")


def test_posts_find_nothing(local: TraceServer) -> None:
    response, _ = _ask(local, "/status", "POST")
    assert response.status == 404


def test_another_host_name_is_refused(public: TraceServer, local: TraceServer) -> None:
    for server in (public, local):
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", ""):
            response, _ = _ask(server, _path_of(server), Host=host)
            assert response.status == 403
        for host in ("localhost", "127.0.0.1", "localhost:8000", f"127.0.0.1:{server.port}"):
            response, _ = _ask(server, _path_of(server), Host=host)
            assert response.status == 200


@pytest.mark.parametrize(
    ("path", "content_type", "content"),
    [
        ("/index.html?a=b", "text/html; charset=utf-8", b"<html>"),
        ("/v1/engine.wasm", "application/wasm", b"\0asm"),
        ("/v1/bundle.js", "text/javascript; charset=utf-8", b"1"),
        ("trace.pftrace", "application/octet-stream", CONTENT),
    ],
)
def test_the_local_ui_is_served(
    local: TraceServer, path: str, content_type: str, content: bytes
) -> None:
    path = path if path.startswith("/") else _path_of(local, path)
    response, body = _ask(local, path)
    assert (response.status, body) == (200, content)
    assert response.headers["Content-Type"] == content_type
    assert "Access-Control-Allow-Origin" not in response.headers
    response, body = _ask(local, path, "HEAD")
    assert (response.status, body) == (200, b"")
    assert response.headers["Content-Length"] == str(len(content))


def test_the_local_ui_may_ask_no_other_host(local: TraceServer) -> None:
    response, _ = _ask(local, "/index.html")
    policy = response.headers["Content-Security-Policy"].split()
    assert policy[0] == "default-src"
    assert not [source for source in policy if "*" in source or "//" in source]


def test_a_trace_that_went_away_is_not_found(public: TraceServer, trace: Path) -> None:
    trace.unlink()
    response, _ = _ask(public, _path_of(public))
    assert response.status == 404


def test_the_address_leads_to_the_ui_and_the_trace(public: TraceServer, local: TraceServer) -> None:
    for server, ui in ((public, f"{PUBLIC_UI}/"), (local, "http://{}/index.html")):
        assert server.own_address == f"http://127.0.0.1:{server.port}/"
        assert server.address.startswith(server.own_address)
        for host in (f"127.0.0.1:{server.port}", "127.0.0.1:8000", "localhost:8000"):
            for path in ("/", _path_of(server, "")):
                response, body = _ask(server, path, Host=host)
                assert (response.status, body) == (302, b"")
                page, _, arguments = response.headers["Location"].partition("#!/?")
                assert page == ui.format(host)
                assert parse_qs(arguments)["url"] == [f"http://{host}{_path_of(server)}"]


def test_only_who_knows_the_token_may_read_the_trace(local: TraceServer) -> None:
    token = urlsplit(local.address).path.strip("/")
    assert len(token) >= 22
    for path in (
        "/trace.pftrace",
        f"/{token}",
        f"/{token[:-1]}/trace.pftrace",
        f"/{token}x/trace.pftrace",
        f"/{token}/../{token}/trace.pftrace",
        f"/{token}/index.html",
        "//trace.pftrace",
        f"/trace.pftrace?{token}",
    ):
        for method in ("GET", "HEAD"):
            response, body = _ask(local, path, method)
            assert (response.status, body) == (404, b"")


@needs_root
def test_another_user_of_the_host_gets_nothing(public: TraceServer, local: TraceServer) -> None:
    def ask() -> set[bytes]:
        answers = set()
        for server in (public, local):
            for path in ("/", "/trace.pftrace", "/run.json"):
                with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                    connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                    answers.add(connection.makefile("rb").read().split(b"\r\n")[0])
        return answers

    assert ask() != {b"HTTP/1.0 404 Not Found"}
    assert as_other_user(ask) == {b"HTTP/1.0 404 Not Found"}


def test_a_browser_is_started_without_the_token(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    shown = threading.Event()
    write_trace(trace, make_recording(2, 3, 2))
    monkeypatch.setenv("BROWSER", "none")

    def open_browser(address: str) -> None:
        opened.append(address)
        shown.set()

    monkeypatch.setattr("webbrowser.open", open_browser)
    monkeypatch.setattr(TraceServer, "serve_forever", lambda _: shown.wait(10))
    monkeypatch.setattr(sys, "argv", ["rrfp", "trace", "view", str(trace)])
    assert cli.main() == 0
    printed = capsys.readouterr().out.split()
    (address,) = (word for word in printed if word.startswith("http://127"))
    assert opened == [f"{address.rsplit('/', 2)[0]}/"]


@pytest.mark.parametrize("host", ["127.0.0.1:80@evil.example", "127.0.0.1:x", "127.0.0.1:"])
def test_an_address_for_another_host_is_not_given(local: TraceServer, host: str) -> None:
    response, _ = _ask(local, "/", Host=host)
    assert response.status == 403


def test_the_window_asked_for_is_shown_first(trace: Path, ui: Path) -> None:
    with TraceServer(trace, ui=ui, port=0, initial_view=InitialView((1_000, 2_000))) as server:
        arguments = parse_qs(urlsplit(server.ui_address("localhost")).fragment)
    assert (arguments["visStart"], arguments["visEnd"]) == (["1000"], ["2000"])


def test_what_is_appended_is_shown_and_the_file_served_as_it_is(trace: Path, ui: Path) -> None:
    for folder in (ui, None):
        for server in _serve(TraceServer(trace, ui=folder, port=0, appended=b"more")):
            response, _ = _ask(server, "/")
            (shown,) = parse_qs(response.headers["Location"].partition("#!/?")[2])["url"]
            response, body = _ask(server, urlsplit(shown).path, Origin=PUBLIC_UI)
            assert (response.status, body) == (200, CONTENT + b"more")
            assert response.headers["Content-Length"] == str(len(body))
            assert _ask(server, _path_of(server))[1] == CONTENT
    assert trace.read_bytes() == CONTENT


def test_the_ui_is_served_without_the_script_of_its_makers(trace: Path, ui: Path) -> None:
    foreign = "https://storage.cloud.google.com/perfetto-ui-internal/a-b/is_internal_user.js"
    (ui / "v1" / "bundle.js").write_text(f'a="{foreign}";b=1')
    for server in _serve(TraceServer(trace, ui=ui, port=0)):
        response, body = _ask(server, "/v1/bundle.js")
        found = re.fullmatch(rb'a="(/[a-z_]+\.js)";b=1', body)
        assert found is not None
        assert response.headers["Content-Length"] == str(len(body))
        response, body = _ask(server, found[1].decode())
        assert (response.status, body) == (200, b"")
        assert response.headers["Content-Type"].startswith("text/javascript")


def test_a_port_in_use_is_a_sentence(public: TraceServer, trace: Path, ui: Path) -> None:
    for folder in (None, ui):
        with pytest.raises(RrfpError, match=f"port {public.port} of 127.0.0.1 cannot be opened"):
            TraceServer(trace, ui=folder, port=public.port)


def test_the_local_ui_needs_no_certain_port(
    public: TraceServer, trace: Path, ui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrfp.trace.perfetto_server.PUBLIC_UI_PORT", public.port)
    assert public.port != PUBLIC_UI_PORT
    with TraceServer(trace, ui=ui) as server:
        assert server.port not in (0, public.port)
    with pytest.raises(RrfpError, match="cannot be opened"):
        TraceServer(trace, ui=None)


def test_a_browser_that_went_away_is_no_news(
    public: TraceServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = threading.Event()
    handle_error = TraceServer.handle_error

    def handle(server: TraceServer, request: Any, client_address: Any) -> None:
        handle_error(server, request, client_address)
        handled.set()

    monkeypatch.setattr(TraceServer, "handle_error", handle)
    with socket.create_connection(("127.0.0.1", public.port)) as connection:
        connection.sendall(b"GET /tra")
        # Closed so, it is reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert handled.wait(10)
    assert capsys.readouterr().err == ""
    try:
        raise ValueError("ours")
    except ValueError:
        public.handle_error(None, ("127.0.0.1", 1))
    assert "ValueError: ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], ""),
        (["--preset", "bubbles"], "It shows step 1, the longest.\n"),
        (
            ["--preset", "flow"],
            "It shows step 1, the longest, and the message that a stage idled longest for.\n",
        ),
    ],
)
def test_the_command_says_which_step_it_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    path = tmp_path / "trace.pftrace"
    write_trace(path, make_recording(2, 3, 2))
    monkeypatch.setattr(TraceServer, "serve_forever", lambda _: None)
    monkeypatch.setattr(
        sys, "argv", ["rrfp", "trace", "view", str(path), "--no-browser", *arguments]
    )
    assert cli.main() == 0
    first, *rest = capsys.readouterr().out.splitlines(keepends=True)
    assert first.startswith(f"{path} is at http://127.0.0.1:")
    assert "".join(rest[:-1]) == sentence


# What a viewer is asked to show first: which tracks, and which step.


WINDOWS = {0: (0, 9_000), 1: (10_000, 11_000), 2: (20_000, 22_500), 3: (30_000, 34_000)}


def test_the_typical_step_has_the_median_length_and_the_worst_the_longest() -> None:
    assert typical_step(WINDOWS) == 2
    assert worst_step(WINDOWS) == 3


@pytest.mark.parametrize("choose", [typical_step, worst_step])
def test_the_first_step_counts_only_if_it_is_alone(choose: Any) -> None:
    assert choose({0: (0, 9_000), 1: (10_000, 11_000)}) == 1
    assert choose({0: (0, 9_000)}) == 0
    assert choose({}) is None


def test_a_step_is_shown_with_a_margin_inside_the_trace() -> None:
    assert widened((20_000, 22_500), 40_000) == (20_000 - 50, 22_500 + 50)
    assert widened((0, 1_000), 1_000) == (0, 1_000)


@given(
    st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)).map(sorted),
    st.integers(0, 10_000),
    st.floats(0, 1),
)
def test_a_step_is_in_view_around_what_is_selected(
    window: list[int], rest_ns: int, share: float
) -> None:
    start_ns, stop_ns = window
    end_ns = stop_ns + rest_ns
    selected_ns = start_ns + int(share * (stop_ns - start_ns))
    view = widened((start_ns, stop_ns), end_ns, selected_ns)
    assert 0 <= view[0] <= start_ns
    assert stop_ns <= view[1] <= end_ns
    # The viewer moves what is selected into the middle, as far as the trace goes.
    length_ns = view[1] - view[0]
    moved_ns = min(max(selected_ns - length_ns // 2, 0), end_ns - length_ns)
    assert moved_ns - 1 <= start_ns
    assert moved_ns + length_ns + 1 >= stop_ns


def _commands(view: InitialView) -> list[tuple[str, list[str]]]:
    commands = json.loads(parse_qs(view.ui_arguments())["startupCommands"][0])
    return [(each["id"].removeprefix("dev.perfetto."), each["args"]) for each in commands]


def test_without_a_preset_all_is_shown() -> None:
    arguments = parse_qs(InitialView().ui_arguments())
    assert set(arguments) == {"hideSidebar", "startupCommands"}


def test_an_address_of_blanks_would_not_be_read_by_the_ui() -> None:
    assert "+" not in InitialView((1, 2), Preset.FLOW, 3).ui_arguments()


@pytest.mark.parametrize("stages", [(2,), (0, 7)])
@pytest.mark.parametrize("dp_ranks", [(0,), (0, 1)])
def test_pipelines_and_stages_are_opened_and_nothing_below(
    stages: tuple[int, ...], dp_ranks: tuple[int, ...]
) -> None:
    ((name, (pattern,)),) = _commands(InitialView())
    assert name == "ExpandTracksByRegex"
    infos = [RankInfo(rank, 0, 0, rank, stages, "node", rank) for rank in dp_ranks]
    for _, name in stage_path(infos[-1], infos):
        assert re.search(pattern, name)
    for path in PATH_OF_CATEGORY.values():
        assert not any(re.search(pattern, name) for _, name in path)


@pytest.mark.parametrize(
    ("preset", "tracks"),
    [
        (Preset.BUBBLES, {"compute", "wait"}),
        (Preset.HINTS, {"compute", "hint", "D"}),
        (Preset.FLOW, {"compute", "send to stages 0 7", "receive from stage 1"}),
    ],
)
def test_a_preset_pins_its_tracks_and_opens_a_workspace_of_them(
    preset: Preset, tracks: set[str]
) -> None:
    names = {name for path in PATH_OF_CATEGORY.values() for _, name in path}
    names |= counters_of(a_run(Bytes(10_000)).ranks[0]).keys()
    names |= {"send to stages 0 7", "receive from stage 1"}
    commands = _commands(InitialView(preset=preset))
    assert [name for name, _ in commands if name != "ExpandTracksByRegex"] == [
        "PinTracksByRegex",
        "CopyTracksToWorkspaceByRegexWithAncestors",
        "SwitchWorkspace",
    ]
    for command, arguments in commands:
        if command.startswith(("Pin", "Copy")):
            assert {name for name in names if re.search(arguments[0], name)} == tracks


# From a trace.


def _recording(*windows_of_ranks: list[tuple[int, int]]) -> Recording:
    """A run whose ranks were in the schedule at these times, a pair a step."""
    ranks = []
    for rank, windows in enumerate(windows_of_ranks):
        records = RankRecords(RankInfo(rank, rank, 0, 0, (rank,), "node", 100 + rank))
        for step, (start_ns, end_ns) in enumerate(windows):
            records.phases.append(PhaseRecord(start_ns, end_ns, step, "schedule"))
        ranks.append(records)
    return Recording({}, ranks)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.pftrace"


def test_the_worst_step_that_every_rank_finished_is_found(path: Path) -> None:
    windows = list(WINDOWS.values())
    write_trace(path, _recording(windows, [(s + 100, e + 100) for s, e in windows[:3]]))
    found = find_initial_view(path, Preset.BUBBLES)
    assert found.step == 2
    assert found.view == InitialView((20_000 - 52, 22_600 + 52), Preset.BUBBLES)


@pytest.mark.parametrize("recording", [_recording(), _recording([(0, 1)], [])])
def test_without_a_whole_step_all_is_shown(path: Path, recording: Recording) -> None:
    write_trace(path, recording)
    assert find_initial_view(path, None).view == InitialView()
    found = find_initial_view(path, Preset.FLOW)
    assert (found.view, found.step) == (InitialView(preset=Preset.FLOW), None)


def test_the_flow_selects_the_message_that_was_waited_for_longest(path: Path) -> None:
    recording = make_recording(3, 4, 2, forward_ns=1_000_000, backward_ns=1_000)
    sends = [send for send in recording.ranks[1].sends if send.step == 1 and send.kind == "F"]
    write_trace(path, recording)
    found = find_initial_view(path, Preset.FLOW)
    assert found.step == 1
    # The last stage is idle from the start until the first forward has come all the way.
    assert found.view.selected_ns == sends[0].start_ns


def test_a_flow_without_messages_selects_nothing(path: Path) -> None:
    recording = make_recording(2, 3, 2)
    for records in recording.ranks:
        records.sends.clear()
        records.receives.clear()
    write_trace(path, recording)
    found = find_initial_view(path, Preset.FLOW)
    assert (found.step, found.view.selected_ns) == (1, None)


def test_a_large_trace_is_searched_only_for_a_preset(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(path, make_recording(2, 2, 3))
    monkeypatch.setattr(initial_view, "_MAX_BYTES", 100)
    assert find_initial_view(path, None).view == InitialView()
    assert find_initial_view(path, Preset.HINTS).view.window is not None


def test_a_file_that_is_no_whole_trace_is_refused(path: Path) -> None:
    write_trace(path, make_recording(2, 2, 3))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RrfpError, match="truncated"):
        find_initial_view(path, None)
