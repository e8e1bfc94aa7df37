"""The process of one rank: `python -m rrfp.train.launch.rank_process MODULE RUN_DIR SETTINGS`.

`rrfp.train.launch.launcher` starts it. Its output goes to its own log, so heavy modules, which
print when imported, are imported after output is redirected.
"""

import gc
import importlib
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rrfp.errors import RrfpError, first_line, is_torchs_loss, is_torchs_silence
from rrfp.system import describe_too_many_files, is_of_too_many
from rrfp.trace.outcome import FaultOrigin, FoundBy
from rrfp.trace.run_dir import RunDir
from rrfp.trace.safe_files import make_directory, open_own
from rrfp.train.launch.private_network import enter_network
from rrfp.train.launch.rank_status import (
    FailureReport,
    end_with_launcher,
    enter,
    finish,
    send_warnings_to_launcher,
    start_heartbeat,
)
from rrfp.train.launch.stopping import ignore_sigterm, take_sigterm_as_request


def main() -> None:
    """Run one rank, with its output in its own log: enter the run's network, create the process
    groups and call `work(run, settings, layout)` of the module that the command line names. A
    failure is reported to the launcher and ends the process."""
    # The objects that torch and Megatron-Core create on import live until the end. Garbage
    # collection of them would take a third of a short run.
    gc.disable()
    end_with_launcher()
    from rrfp.train.settings import DeviceKind, TrainSettings

    module, run = sys.argv[1], RunDir(Path(sys.argv[2]))
    settings = TrainSettings.from_json(sys.argv[3])
    rank = int(os.environ["RANK"])
    _redirect_output(run.rank_log(rank))
    logging.basicConfig(format="%(message)s")
    send_warnings_to_launcher(rank)
    # Let Ctrl-C end a rank at once, even inside a collective that Python cannot interrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        enter_network()  # requires a single thread
    except RrfpError as error:
        _fail(error)
    end_with_launcher()  # entering a user namespace has reset it
    start_heartbeat(waits_on_device=settings.run.device is not DeviceKind.CPU)
    if settings.run.save is not None:
        take_sigterm_as_request()
    try:
        from rrfp.train.launch.collectives import no_object_collectives
        from rrfp.train.launch.process_groups import parallel_groups, prepare_device

        device = prepare_device(settings.run)
        work = importlib.import_module(module).work
        gc.freeze()
        gc.enable()

        with parallel_groups(settings, device=device) as layout, no_object_collectives():
            try:
                work(run, settings, layout)
            except (Exception, SystemExit) as error:
                # Without leaving the groups, which could wait for ranks that wait for this one.
                _fail(error)
            enter("as it left its groups")
        enter("as it ended")
        if settings.run.save is not None:
            ignore_sigterm()
        finish()
    except (Exception, SystemExit) as error:
        _fail(error)
    gc.freeze()  # else the interpreter collects garbage twice as it ends


def _fail(error: Exception | SystemExit) -> NoReturn:
    """Log the failure, write it into the error file, and end this process with its exit code,
    without waiting for any other. SystemExit writes no error file."""
    logging.getLogger(__name__).error("this rank failed", exc_info=error)
    if isinstance(error, SystemExit):
        # The launcher reports the exit code. The interpreter exits with 1 after printing a text.
        code = error.code
        _end(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
    from rrfp.runtime.protocols import PeerLostError, PeerSilentError, StallError

    text, detail = first_line(str(error)), ""
    if isinstance(error, RrfpError):
        sentence, exit_code = text, error.exit_code
        detail = str(error).partition("\n")[2]
    elif is_of_too_many(error):
        sentence, exit_code = describe_too_many_files(), RrfpError.exit_code
    else:
        sentence, exit_code = f"{type(error).__name__}: {text}", RrfpError.exit_code
    is_silence = isinstance(error, PeerSilentError) or is_torchs_silence(error)
    is_lost = isinstance(error, PeerLostError) or is_torchs_loss(error)
    culprit = error.culprit if isinstance(error, PeerLostError) else None
    if isinstance(error, StallError):
        culprit = FaultOrigin(FoundBy.BOARD)
    elif not is_lost and not is_silence:
        culprit = FaultOrigin(FoundBy.RANK, int(os.environ["RANK"]))
    # The disk of the error file may be full; the log has the error too.
    with suppress(OSError):
        FailureReport(
            sentence, exit_code, is_lost and not is_silence, is_silence, detail, culprit=culprit
        ).write()
    _end(exit_code)


def _end(exit_code: int) -> NoReturn:
    """Flush the logs and end this process at once, without any cleanup."""
    logging.shutdown()
    os._exit(exit_code)


def _redirect_output(path: Path) -> None:
    """Append the output and errors of this process to a log file, creating its directory."""
    make_directory(path.parent)
    # Appended: the log of a resumed run has the output of all its sessions.
    log = open_own(path)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)


if __name__ == "__main__":
    main()
