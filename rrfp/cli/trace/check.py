"""`rrfp trace check`: whether a trace holds all of its run."""

import typer

from rrfp.cli.options import TracePath
from rrfp.cli.progress import working
from rrfp.trace.steps import counted


def check(path: TracePath = None) -> None:
    """Report what is lost, open, unmatched, missing or impossible in a trace.

    Exits with 1 if it finds anything. For a whole trace it also states what
    recording cost.
    """
    from rrfp.trace.check import check_contents
    from rrfp.trace.cost import recording_fraction
    from rrfp.trace.ending.promise import Promise
    from rrfp.trace.locate import resolve_trace
    from rrfp.trace.perfetto.reader import read_contents

    with working("Checking the trace"):
        trace = resolve_trace(path)
        contents = read_contents(trace)
        problems = check_contents(contents, Promise.of_run(trace, contents.recording.settings))
    for problem in problems:
        print(problem)
    if problems:
        typer.echo(f"{trace}: {counted(len(problems), 'problem')}", err=True)
        raise typer.Exit(1)
    fraction = recording_fraction(contents.recording)
    print(f"{trace} is whole")
    if fraction is not None:
        print(f"Recording it took at most {fraction:.2%} of a rank's time in its steps")
