"""Exceptions as one sentence on stderr and an exit code.

Exit codes: 0 success; 1 failure; 2 wrong usage; 3 above a gate (`--fail-above`); 130 interrupted.
typer's own error handling is not used: it prints a panel, and takes any broken pipe for a closed
stdout.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rrfp.cli.terminal import tolerate_closed_streams
from rrfp.errors import RrfpError, did_you_mean

if TYPE_CHECKING:
    import typer


# Ctrl-C: the first one ends the command, and later ones do not disturb its cleanup. The handler
# stays installed: replacing it takes calls, in which another Ctrl-C could still arrive.

_raises = False
"""True if the next SIGINT raises KeyboardInterrupt; later ones are ignored."""


def interrupt_once() -> None:
    """Make the first SIGINT raise KeyboardInterrupt, and ignore later ones. If a destructor
    swallows that exception, the next SIGINT counts again. Does nothing where Python's own handler
    is not installed."""
    global _raises
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _raises = True
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _handle_unraisable


def restore_default_interrupts() -> None:
    """Restore Python's handling of SIGINT, for a user's script. Does nothing unless the handler of
    `interrupt_once` is installed: after an interruption `call_command` ignores SIGINT instead."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, let the next SIGINT raise KeyboardInterrupt again, for long work after the
    first. It and the end of the block make later ones ignored."""
    global _raises
    _raises = True
    try:
        yield
    finally:
        _raises = False


def _interrupt(*_: object) -> None:
    """Signal handler: raise KeyboardInterrupt if `_raises` is set, and clear it, so that later
    signals are ignored."""
    global _raises
    if _raises:
        _raises = False
        raise KeyboardInterrupt


def _handle_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Hook for exceptions in destructors: after a KeyboardInterrupt let the next SIGINT raise one
    again. Others go to Python's own hook, except that about a SIGINT while its handler is
    replaced."""
    global _raises
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _raises = True
    elif "ignored due to race condition" not in str(unraisable.exc_value):
        # That is what Python says of a SIGINT that arrives while its handler is replaced.
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
"""Phrases of pydantic's messages about a wrong value, and our words for them."""

DEBUG_VARIABLE = "RRFP_DEBUG"
"""If this variable is set, the traceback of the error that ends a command is printed."""


def run_app(app: "typer.Typer", arguments: Sequence[str]) -> int | Callable[[], int]:
    """Run a command line of a typer app with its errors printed, and return the exit code or a
    function, as `call_command` does."""
    return call_command(lambda: _invoke(app, arguments))


def call_command(command: Callable[[], object]) -> int | Callable[[], int]:
    """Call a command, print its error as one sentence on stderr, and return the exit code: 130
    after Ctrl-C.

    If the command returns a function, that is returned instead: the caller calls it for the exit
    code, and its errors are not handled here. Until then stdout and stderr escape control
    characters, and discard output once their reader has gone.
    """
    global _raises
    with tolerate_closed_streams():
        try:
            done = _call_handled(command)
            if not callable(done):
                _ignore_interrupts()
            return done
        except KeyboardInterrupt:  # possibly while another error is being printed
            _raises = False  # Before any call, in which another Ctrl-C could raise.
            _ignore_interrupts()
            _say("interrupted")
            return INTERRUPTED


def _ignore_interrupts() -> None:
    """Ignore SIGINT if `interrupt_once` has set its handler. Python drops that handler at exit, and
    Ctrl-C would then kill the process."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call_handled(command: Callable[[], object]) -> int | Callable[[], int]:
    """Call a command and return its result if that is an int or a function, else 0. An exception is
    printed as a sentence; the code is that of an RrfpError, and otherwise 1. KeyboardInterrupt
    propagates."""
    try:
        result: Any = command()
    except RrfpError as error:
        return print_error(error)
    except BrokenPipeError as error:
        _say(f"a pipe broke: {error}")
        return FAILED
    except OSError as error:
        _say(f"the system refused: {error}")
        return FAILED
    except Exception as error:
        _say(describe_bug(error))
        return FAILED
    return result if callable(result) or isinstance(result, int) else 0


def describe_bug(error: Exception) -> str:
    """Describe an unexpected error, which is a bug of rrfp: type, message, and how to see the
    traceback."""
    return (
        f"unexpected {type(error).__name__}: {error}; this is a bug, please report it with the "
        f"traceback that {DEBUG_VARIABLE}=1 shows"
    )


def print_error(error: RrfpError) -> int:
    """Print an error on stderr, after its traceback if RRFP_DEBUG is set, and return its exit code;
    called while it is handled."""
    _say(str(error))
    return error.exit_code


def _invoke(app: "typer.Typer", arguments: Sequence[str]) -> Any:
    """Parse and run a command line with typer, and flush stdout. Returns a function that the
    command returned, else an exit code. Usage errors are printed as a sentence, and Abort becomes
    KeyboardInterrupt."""
    import typer

    command = typer.main.get_command(app)
    try:
        with command.make_context("rrfp", list(arguments)) as context:
            result = command.invoke(context)
            return result if callable(result) else 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        # A group without a command has already printed its help; its error has no message.
        if error.format_message():
            _say(_usage_sentence(error, arguments))
        return error.exit_code
    finally:
        # A full disk can still be reported here.
        sys.stdout.flush()


def _say(sentence: str) -> None:
    """Print `rrfp: ` and a sentence on stderr, after the traceback of the current exception if
    RRFP_DEBUG is set."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print(f"rrfp: {sentence}", file=sys.stderr)


def _usage_sentence(error: "typer.TyperException", arguments: Sequence[str]) -> str:
    """Format typer's error on one line, with the nearest known name and the command that shows the
    help, if there are any."""
    # typer would list all remotely similar names in alphabetical order.
    near = getattr(error, "possibilities", None)
    message = error.message if near else error.format_message()
    sentence = " ".join(message.split()).rstrip(".").replace(". Did you mean", "; did you mean")
    sentence = sentence.replace(": Value error, ", ": ", 1)
    sentence = _describe_bad_value(error, arguments) or sentence
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


def _describe_bad_value(error: "typer.TyperException", arguments: Sequence[str]) -> str | None:
    """Describe an option's value, found in `arguments`, that is no number or out of range; None for
    other errors, and if the value is not found.

    typer's own message has pydantic's message in place of the value.
    """
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
