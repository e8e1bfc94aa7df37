"""Draws the README's picture: one step under two schedules, from two paced runs. `make pictures`.

Both runs train the same model on the same data, and step k of the one meets the modelled times of
step k of the other. Of the steps after the first, in which caches warm up, the picture shows the
one whose speedup is the median. It prints what the README's caption says.
"""

import shlex
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import altair as alt

from rrfp.analyze.bubbles import bubbles
from rrfp.analyze.charts.export import save
from rrfp.analyze.charts.gantt import gantt
from rrfp.analyze.charts.style import INK
from rrfp.analyze.colors import KIND_COLORS
from rrfp.analyze.frame_files import load_frames
from rrfp.analyze.frames import Frames
from rrfp.cli import main as cli

PICTURE = Path(__file__).parent / "images" / "step.svg"
RUN = (
    "rrfp train --pp 8 --microbatches 16 --model mlp --layers 8 --hidden 32 --seq-length 16"
    " --pace multimodal --seed 1 --steps 6"
)
SCHEDULES = {"--dispatch megatron": "Megatron-Core's own 1F1B", "--hint bfw": "rrfp, hint bfw"}
"""The flag of each run, and what the picture calls it; the first is what the second is held to."""

_KINDS = {"F": "F  forward", "B": "B  backward", "W": "W  weight gradient"}
_NS_PER_S = 1e9
_IDLE_COLOUR = "#ececec"
_WIDTH_PX, _ROW_PX, _NUM_STAGES = 800, 21, 8


def main() -> None:
    if len(sys.argv) > 1:
        _draw([Path(folder) for folder in sys.argv[1:]])
        return
    with TemporaryDirectory() as folder:
        _draw([_run(flag, Path(folder) / flag.split()[-1]) for flag in SCHEDULES])


def _run(flag: str, out: Path) -> Path:
    sys.argv = [*shlex.split(f"{RUN} {flag}"), "--out", str(out)]
    if cli.main() != 0:
        sys.exit(f"make pictures: {RUN} {flag} failed")
    return out


def _draw(runs: list[Path]) -> None:
    slow, fast = (load_frames(run / "trace.pftrace", with_warm_up=True) for run in runs)
    speedups = {
        step: length / _lengths_s(fast)[step] for step, length in _lengths_s(slow).items() if step
    }
    median = statistics.median_low(speedups.values())
    (step,) = (step for step, speedup in speedups.items() if speedup == median)
    longest_s = _lengths_s(slow)[step]
    halves = [
        _half(frames, step, name, longest_s)
        for frames, name in zip((slow, fast), SCHEDULES.values(), strict=True)
    ]
    halves[1] = alt.layer(
        halves[1], _verdict(f"{median:.2f} times as fast", _lengths_s(fast)[step], longest_s)
    )
    picture = alt.vconcat(*halves, spacing=14, title="").configure(**_config(gantt(slow, step)))
    save(picture, PICTURE)
    told = ", ".join(f"{speedup:.2f}" for speedup in speedups.values())
    sys.stderr.write(f"{PICTURE}: step {step}, {median:.2f} times as fast; all steps: {told}\n")


def _lengths_s(frames: Frames) -> dict[int, float]:
    return {step: (end - start) / _NS_PER_S for step, start, end in frames.windows.iter_rows()}


def _half(frames: Frames, step: int, name: str, longest_s: float) -> Any:
    """The Gantt chart of a step on the longer step's time axis; what is grey is idle."""
    _, work, numbers, *_ = gantt(frames, step).layer
    length_s = _lengths_s(frames)[step]
    for layer in (work, numbers):
        layer.encoding.x.scale = alt.Scale(domain=[0, longest_s], nice=False)
        layer.encoding.x.title = None
    work.encoding.x.axis = alt.Axis(grid=False, labelExpr="datum.label + ' s'", tickCount=6)
    work.encoding.color = alt.Color(
        "what:N",
        title=None,
        scale=alt.Scale(domain=list(KIND_COLORS), range=list(KIND_COLORS.values())),
        legend=alt.Legend(labelExpr=f"({_KINDS!r})[datum.label]", columnPadding=18),
    )
    numbers.mark.fontSize = 8
    idle = (
        alt.Chart(work.data[["row"]].unique())
        .mark_bar(color=_IDLE_COLOUR)
        .encode(y=work.encoding.y, x=alt.datum(0), x2=alt.datum(length_s))
    )
    idle_share = bubbles(frames.of_steps([step])).bubble_fraction
    return alt.layer(idle, work, numbers).properties(
        width=_WIDTH_PX,
        height=_NUM_STAGES * _ROW_PX,
        title=alt.TitleParams(
            f"{name}: {length_s:.2f} s, {idle_share:.0%} idle", anchor="start", offset=6
        ),
    )


def _verdict(text: str, from_s: float, to_s: float) -> Any:
    """In the room that the faster half leaves."""
    at = alt.Chart(alt.InlineData(values=[{}])).encode(y=alt.value(_NUM_STAGES * _ROW_PX / 2))
    return at.mark_text(fontSize=18, fontWeight="bold", color=INK).encode(
        x=alt.datum((from_s + to_s) / 2), text=alt.value(text)
    )


def _config(chart: Any) -> dict[str, Any]:
    config: dict[str, Any] = chart.to_dict()["config"]
    return config


if __name__ == "__main__":
    main()
