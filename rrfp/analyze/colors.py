"""The color of each kind of task and each cause of waiting, in charts, pages and terminals.

F, B and W have colors of Okabe and Ito (Color Universal Design, 2008) that also differ in
lightness. The colors of the causes were searched around the rest of that palette: any two differ by
at least 10 (CIEDE2000) with normal and with red- or green-deficient vision. The Perfetto UI ignores
colors in a trace and derives its own from the names of slices.
"""

from rrfp.schedule.tasks import Cause

KIND_COLORS = {"F": "#56B4E9", "B": "#D55E00", "W": "#F0E442"}
LINK_COLOR = "#009E73"
"""The color of a message in flight, the same as of a blocking transfer."""
_OF_CAUSES = {
    Cause.WARMUP: "#CFCFCF",
    Cause.FORWARD_INPUT: "#0072B2",
    Cause.BACKWARD_INPUT: "#832B00",
    Cause.LIMIT: "#E69F02",
    Cause.HOLD: "#79633C",
    Cause.PATIENCE: "#7878FF",
    Cause.COORDINATION: "#CC78A6",
    Cause.ORDER: "#4A32A1",
    Cause.TRANSFER: "#009E73",
    Cause.GRADIENT_SYNC: "#872455",
    Cause.DRAIN: "#777B7E",
}
CAUSE_COLORS = {
    **{cause.value: color for cause, color in _OF_CAUSES.items()},
    "overhead": "#BCC277",
}
