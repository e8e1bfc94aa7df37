"""A headless Chromium, driven over the DevTools protocol: what a page asks for, what it complains
of, what it looks like (https://chromedevtools.github.io/devtools-protocol).

The protocol goes over two pipes, a JSON text a message, each ended by a zero byte.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

MISSING = "chromium is not installed" if CHROMIUM is None else None
"""Why there is no browser here, or None."""

_ANSWER_S = 60

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    # No page can reach another machine, so that a test does not either.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_AT_THEIR_PLACES = 'exec "$@" 3<"/dev/fd/$COMMANDS" 4>"/dev/fd/$EVENTS"'
"""The browser reads file descriptor 3 and writes 4."""


class BrowserError(Exception):
    """The browser ended, did not answer, or could not run a command."""


@dataclass(slots=True)
class Page:
    """A tab, and the requests and errors of it and its workers up to the last answer."""

    _browser: "Browser"
    _session: str
    _requests: dict[str, str] = field(default_factory=dict)
    """The address of each request."""
    blocked: set[str] = field(default_factory=set)
    """The addresses that the page's own policy kept it from requesting."""
    errors: list[str] = field(default_factory=list)
    """The errors on the console, including uncaught exceptions."""

    @property
    def requests(self) -> set[str]:
        """The requested addresses, without those that need no network (`data:`, `blob:`) and
        those in `blocked`."""
        return set(self._requests.values())

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page, or of its promise."""
        answer = self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str, wait_s: float = _ANSWER_S) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline_s = time.monotonic() + wait_s
        while not (found := self.evaluate(script)):
            if time.monotonic() > deadline_s:
                raise BrowserError(f"{script} did not come true; errors: {self.errors}")
            time.sleep(0.05)
        return found

    def resize(self, width: int, height: int) -> None:
        """Give the window this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self) -> bytes:
        """Return a screenshot of the window as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])

    def command(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol to the page."""
        return self._browser.command(method, self._session, **params)

    def note_event(self, event: str, params: Any) -> None:
        """Note the request or error in an event of the page or of one of its workers."""
        match event:
            case "Network.requestWillBeSent":
                address = params["request"]["url"]
                if not address.startswith(("data:", "blob:", "about:")):
                    self._requests[params["requestId"]] = address
            case "Network.loadingFailed" if params.get("blockedReason") == "csp":
                if address := self._requests.pop(params["requestId"], None):
                    self.blocked.add(address)
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", details).get("description", "?"))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                said = [str(each.get("value", each)) for each in params["args"]]
                self.errors.append(" ".join(said))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}".rstrip())


class Browser:
    """A running browser at the other end of two pipes."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = commands
        self._events = events
        self._unread = b""
        self._num_sent = 0
        self._answers: dict[int, Any] = {}
        self._pages: dict[str, Page] = {}
        """The page of each session; a worker's session has its page's."""

    def open(self, address: str, *, width: int = 1500, height: int = 900) -> Page:
        """Open a page in a window of this size, in pixels."""
        target = self.command("Target.createTarget", url="about:blank")
        attached = self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        session = attached["sessionId"]
        page = self._pages[session] = Page(self, session)
        self._watch(session)
        page.command("Page.enable")
        page.resize(width, height)
        page.command("Page.navigate", url=address)
        return page

    def command(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Send a command and wait for its answer; events are noted meanwhile."""
        number = self._send(method, session, params)
        deadline_s = time.monotonic() + _ANSWER_S
        while number not in self._answers:
            self._read_events(method, deadline_s)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def _watch(self, session: str) -> None:
        """Hear what goes on in a page or a worker, and in the workers that it starts."""
        for domain in ("Network", "Runtime", "Log"):
            self._send(f"{domain}.enable", session, {})
        attach = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        self._send("Target.setAutoAttach", session, attach)
        self._send("Runtime.runIfWaitingForDebugger", session, {})

    def _send(self, method: str, session: str | None, params: dict[str, Any]) -> int:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        unsent = memoryview(json.dumps(message).encode() + b"\0")
        while unsent:
            unsent = unsent[os.write(self._commands, unsent) :]
        return self._num_sent

    def _read_events(self, waiting_for: str, deadline_s: float) -> None:
        """Read what has come, or wait for it."""
        left_s = max(deadline_s - time.monotonic(), 0)
        if not select.select([self._events], [], [], left_s)[0]:
            raise BrowserError(f"{waiting_for} had no answer within {_ANSWER_S} s")
        found = os.read(self._events, 1 << 20)
        if not found:
            raise BrowserError(f"the browser ended before {waiting_for} was answered")
        *messages, self._unread = (self._unread + found).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                if message["method"] == "Target.attachedToTarget":
                    session = message["params"]["sessionId"]
                    self._pages[session] = page
                    self._watch(session)
                page.note_event(message["method"], message["params"])


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own profile, up until the block is left."""
    assert CHROMIUM is not None
    commands_end, commands = os.pipe()
    events, events_end = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["sh", "-c", _AT_THEIR_PLACES, "sh", CHROMIUM, f"--user-data-dir={profile}", *_FLAGS],
            env=os.environ | {"COMMANDS": str(commands_end), "EVENTS": str(events_end)},
            pass_fds=(commands_end, events_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_end)
        os.close(events_end)
        try:
            running = Browser(commands, events)
            yield running
            running.command("Browser.close")
            process.wait(timeout=_ANSWER_S)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(events)
