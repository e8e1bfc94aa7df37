"""`rrfp trace`: look at a run's trace, and check that it is whole."""

import typer

from rrfp.cli.trace.check import check
from rrfp.cli.trace.export_run import export_run
from rrfp.cli.trace.import_run import import_run
from rrfp.cli.trace.view import view

app = typer.Typer(
    help="Look at a run's trace, check that it is whole, or change its form.", no_args_is_help=True
)

app.command(epilog="Example: rrfp trace view runs/latest --preset bubbles")(view)
app.command(epilog="Example: rrfp trace check runs/latest")(check)
app.command("import", epilog="Example: rrfp trace import profiles/ -o runs/other")(import_run)
app.command("export", epilog="Example: rrfp trace export runs/latest -o run.json.gz")(export_run)
