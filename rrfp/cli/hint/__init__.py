"""`rrfp hint`: what a hint's order looks like, and whether an order file can bind."""

import typer

from rrfp.cli.hint.check import check
from rrfp.cli.hint.show import show

app = typer.Typer(
    help="Look at the order that a hint gives, or check an order file.", no_args_is_help=True
)

app.command(
    epilog="Examples: rrfp hint show 1f1b --pp 4 --microbatches 8 > order.csv; "
    "rrfp hint show zb-v --pp 4 --microbatches 8 --chunks 2 --placement v"
)(show)
app.command(
    epilog="Example: rrfp hint check order.csv --pp 4 --microbatches 8 && "
    "rrfp train --dispatch fixed --hint order.csv --pp 4 --microbatches 8"
)(check)
