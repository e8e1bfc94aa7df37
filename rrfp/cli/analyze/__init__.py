"""`rrfp analyze`: reports from a run's trace."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from rrfp.cli.analyze.bubbles import bubbles
from rrfp.cli.analyze.chart import chart
from rrfp.cli.analyze.compare import compare
from rrfp.cli.analyze.critical_path import critical_path
from rrfp.cli.analyze.deviations import deviations
from rrfp.cli.analyze.findings import findings
from rrfp.cli.analyze.memory import memory
from rrfp.cli.analyze.misalignment import misalignment
from rrfp.cli.analyze.report import report
from rrfp.cli.analyze.whatif import whatif
from rrfp.cli.help_screens import Command
from rrfp.trace.run_dir import RUNS


class _FindingsByDefault(TyperGroup):
    """Without a report's name, what is given are the arguments of `findings`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # While a shell asks for what may follow `rrfp analyze`, that may be a report, too.
        is_open = not args and ctx.resilient_parsing
        if not is_open and (not args or self._is_argument(args[0], ctx.help_option_names)):
            args = ["findings", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The reports, and what may stand behind `findings`."""
        findings = self.commands["findings"]
        with findings.make_context("findings", [], parent=ctx, resilient_parsing=True) as context:
            is_option = incomplete.startswith("-")
            run = next(each for each in findings.params if each.name == "path")
            offered = (findings if is_option else run).shell_complete(context, incomplete)
        return [*super().shell_complete(ctx, incomplete), *offered]

    def _is_argument(self, text: str, help_options: list[str]) -> bool:
        """Whether it is neither a report's name, nor meant as one."""
        if text in self.commands or text in help_options:
            return False
        if text.startswith("-") or "/" in text or "." in text or Path(text).exists():
            return True
        if (RUNS / text).exists():
            return True
        return not get_close_matches(text, self.commands)


app = typer.Typer(
    cls=_FindingsByDefault,
    help="What makes a run's steps long, and reports from its trace. Without a report's name, the "
    "findings: rrfp analyze [RUN].",
)

app.command(cls=Command, epilog="Example: rrfp analyze runs/latest --steps 100:")(findings)

app.command(
    cls=Command, epilog="Example: rrfp analyze bubbles runs/latest --steps 3:10 --fail-above 0.4"
)(bubbles)
app.command(
    cls=Command,
    epilog="Examples: rrfp analyze whatif runs/latest; "
    "rrfp analyze whatif runs/latest --hint bfw --hint zb-h1 --hold 8",
)(whatif)
app.command(cls=Command, epilog="Example: rrfp analyze deviations runs/latest --fail-above 0.2")(
    deviations
)
app.command(cls=Command, epilog="Example: rrfp analyze memory runs/latest --steps 3:10 --by rank")(
    memory
)
app.command(cls=Command, epilog="Example: rrfp analyze misalignment runs/latest --steps 3:10")(
    misalignment
)
app.command(
    "critical-path", cls=Command, epilog="Example: rrfp analyze critical-path runs/latest --step 4"
)(critical_path)
app.command(
    cls=Command, epilog="Example: rrfp analyze compare runs/before runs/after -o compared.html"
)(compare)
app.command(cls=Command, epilog="Example: rrfp analyze report runs/latest -o report.html")(report)
app.command(
    cls=Command, epilog="Example: rrfp analyze chart gantt runs/latest --step 4 -o gantt.png"
)(chart)
