"""From an exception to one sentence on stderr and an exit code.

0 done; 1 failed; 2 wrong usage; 3 above a gate (`--fail-above`); 130 interrupted. Typer's own
handling is passed by: it would print a panel, and take every broken pipe for a closed stdout.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from rrfp.cli.terminal import tolerate_closed_streams
from rrfp.errors import RrfpError, did_you_mean

if TYPE_CHECKING:
    import typer


# Ctrl-C: the first one ends the command, and those that follow do not disturb its end.


def take_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt once, and have no effect from then on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _tell_unraisable


def give_interrupts_back() -> None:
    """Let SIGINT do what Python has it do, for code that is not ours."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt once more, for work that may take long after the first."""
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tell_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # It came amid a destructor and is lost, so the next one counts.
        signal.signal(signal.SIGINT, _interrupt)
    else:
        sys.__unraisablehook__(unraisable)


FAILED = 1
INTERRUPTED = 130

_NO_CHOICE = re.compile(r": '(.*)' is not one of ('.*')$")

_WANTED = (
    ("integer", "it takes a whole number"),
    ("number", "it takes a number"),
    ("greater than or equal to", "it takes at least {}"),
    ("greater than", "it takes more than {}"),
    ("less than or equal to", "it takes at most {}"),
    ("less than", "it takes less than {}"),
)
"""Phrases of pydantic's messages about a wrong value, and how ours say what an option takes."""

DEBUG_VARIABLE = "RRFP_DEBUG"
"""Set to anything, it shows the traceback of whatever ends a command."""


def run(app: "typer.Typer", arguments: Sequence[str]) -> int | Callable[[], int]:
    """Run a command line of typer's, and give what `handled` gives."""
    return handled(lambda: _invoke(app, arguments))


def handled(command: Callable[[], object]) -> int | Callable[[], int]:
    """Call a command and give its exit code, whatever happens in it. A command may return a
    function instead, whose errors are not ours to handle: then give that, to be called for the exit
    code."""
    with tolerate_closed_streams():
        try:
            return _handled(command)
        except KeyboardInterrupt:  # perhaps while another error was being told
            # As Python ends it gives up a handler of ours, and one more Ctrl-C would kill it.
            if signal.getsignal(signal.SIGINT) is _interrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            _say("interrupted")
            return INTERRUPTED


def _handled(command: Callable[[], object]) -> int | Callable[[], int]:
    try:
        left: Any = command()
    except RrfpError as error:
        return tell(error)
    except BrokenPipeError as error:
        _say(f"a pipe broke: {error}")
        return FAILED
    except OSError as error:
        _say(f"the system refused: {error}")
        return FAILED
    except Exception as error:
        _say(bug(error))
        return FAILED
    return left if callable(left) or isinstance(left, int) else 0


def bug(error: Exception) -> str:
    """The sentence for an error that nobody foresaw."""
    return (
        f"unexpected {type(error).__name__}: {error}; this is a bug, please report it with the "
        f"traceback that {DEBUG_VARIABLE}=1 shows"
    )


def tell(error: RrfpError) -> int:
    """Say an error that is being handled, and give its exit code."""
    _say(str(error))
    return error.exit_code


def _invoke(app: "typer.Typer", arguments: Sequence[str]) -> Any:
    import typer

    command = typer.main.get_command(app)
    try:
        with command.make_context("rrfp", list(arguments)) as context:
            left = command.invoke(context)
            return left if callable(left) else 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        # A group without a command has already shown its help, and brings no message.
        if error.format_message():
            _say(_usage_sentence(error, arguments))
        return error.exit_code
    finally:
        # Here, where a disk that is full can still be told of.
        sys.stdout.flush()


def _say(sentence: str) -> None:
    """Called while an exception is handled."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print(f"rrfp: {sentence}", file=sys.stderr)


def _usage_sentence(error: "typer.TyperException", arguments: Sequence[str]) -> str:
    """Typer's message on one line, with what was probably meant and the help that explains it."""
    # Typer would list whatever is a little near, in alphabetical order.
    near = getattr(error, "possibilities", None)
    told = error.message if near else error.format_message()
    sentence = " ".join(told.split()).rstrip(".").replace(". Did you mean", "; did you mean")
    sentence = sentence.replace(": Value error, ", ": ", 1)
    sentence = _named_value(error, arguments) or sentence
    chosen = _NO_CHOICE.search(sentence)
    if near:
        sentence += did_you_mean(getattr(error, "option_name", ""), near)
    elif chosen is not None:
        sentence += did_you_mean(chosen[1], chosen[2].strip("'").split("', '"))
    context = getattr(error, "ctx", None)
    if context is None:
        return sentence
    see = f"see '{context.command_path} --help'"
    return f"{sentence} S{see[1:]}" if sentence.endswith("?") else f"{sentence}; {see}"


def _named_value(error: "typer.TyperException", arguments: Sequence[str]) -> str | None:
    """A sentence with the value of an option that is no number, or not in its range: Typer's has
    pydantic's message in the place of the value. None for any other error."""
    names = getattr(getattr(error, "param", None), "opts", ())
    wanted = next((each for phrase, each in _WANTED if phrase in error.message), None)
    if wanted is None or not error.message.startswith(("Input should be", "Unable to parse")):
        return None
    for index, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name in names and (has_value or index + 1 < len(arguments)):
            value = value if has_value else arguments[index + 1]
            return f"{name} is '{value:.40}'; {wanted.format(error.message.rpartition(' ')[2])}"
    return None
