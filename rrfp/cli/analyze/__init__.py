"""`rrfp analyze`: reports from a run's trace."""

import typer

from rrfp.cli.analyze.bubbles import bubbles
from rrfp.cli.analyze.chart import chart
from rrfp.cli.analyze.compare import compare
from rrfp.cli.analyze.critical_path import critical_path
from rrfp.cli.analyze.deviations import deviations
from rrfp.cli.analyze.misalignment import misalignment
from rrfp.cli.analyze.report import report
from rrfp.cli.analyze.whatif import whatif

app = typer.Typer(help="Reports from a run's trace.", no_args_is_help=True)

app.command(epilog="Example: rrfp analyze bubbles runs/latest --steps 3:10 --fail-above 0.4")(
    bubbles
)
app.command(
    epilog="Examples: rrfp analyze whatif runs/latest; "
    "rrfp analyze whatif runs/latest --hint bfw --hint zb-h1 --hold 8"
)(whatif)
app.command(epilog="Example: rrfp analyze deviations runs/latest --fail-above 0.2")(deviations)
app.command(epilog="Example: rrfp analyze misalignment runs/latest --steps 3:10")(misalignment)
app.command("critical-path", epilog="Example: rrfp analyze critical-path runs/latest --step 4")(
    critical_path
)
app.command(epilog="Example: rrfp analyze compare runs/before runs/after --steps 1:")(compare)
app.command(epilog="Example: rrfp analyze report runs/latest -o report.html")(report)
app.command(epilog="Example: rrfp analyze chart gantt runs/latest --step 4 -o gantt.png")(chart)
