"""What is done when a process' main thread has ended: links say farewell, traces are merged."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import queue, sys, threading
from rrfp.runtime.exit_hooks import at_end

told, done = queue.Queue(), queue.Queue()

def work():
    for what in iter(told.get, None):
        print(what, threading.main_thread().is_alive())
        done.put(what)

# Other threads still run. From Python 3.12 on none can be started any more.
threading.Thread(target=work).start()

def tell(what):
    told.put(what)
    done.get(timeout=30)

def fail():
    raise RuntimeError("not this one")

at_end.call(lambda: told.put(None))
at_end.call(lambda: tell("first"))
at_end.call(fail)
at_end.call(lambda: tell("last"))
print("main ends", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('broken')", 1)]
)
def test_the_last_is_done_first_once_the_main_thread_has_ended(end: str, code: int) -> None:
    script = SCRIPT.format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert done.stdout.splitlines() == ["main ends", "last False", "first False"]
    assert "a function registered for the end of the process failed" in done.stderr


def test_it_is_done_once() -> None:
    script = SCRIPT.format(end="at_end.run()")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["main ends", "last True", "first True"]


@pytest.mark.parametrize(
    "end",
    [
        "error = PeerLostError('rank 1 has ended'); at_end.note(error); raise error",
        "raise RuntimeError('[pair.cc:547] Connection closed by peer [127.0.0.1]:4711')",
        "at_end.note(PeerLostError('rank 1 has ended')); sys.exit(1)",
    ],
)
def test_one_that_has_lost_a_peer_waits_for_its_launcher(end: str) -> None:
    script = (
        "import sys\n"
        "from rrfp.runtime.exit_hooks import at_end\n"
        "from rrfp.runtime.protocols import PeerLostError\n"
        "at_end.call(lambda: print('the rest is done', flush=True))\n"
        f"{end}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "the rest is done\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.terminate()
    process.communicate()
    assert process.returncode == -signal.SIGTERM
