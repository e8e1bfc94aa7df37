"""`rrfp run SCRIPT ARGS` runs a script as `python SCRIPT ARGS` does, whatever the script does."""

import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rrfp.cli import main
from rrfp.cli.run import parse_command
from rrfp.errors import UsageError
from rrfp.megatron.installation import call_after_import
from rrfp.megatron.job.request import RecordingRequest, StepWindow
from rrfp.megatron.settings import DispatchSettings
from rrfp.trace.run_dir import create_run_dir

ROOT = Path(__file__).parents[2]
RUN = ("-m", "rrfp", "run")
COMMAND = """
import sys
from rrfp.cli.main import main
sys.exit(main())
"""
"""The command `rrfp` as pip installs it."""
UNUSED = "called no pipeline schedule of Megatron's, so nothing was dispatched or recorded"


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


def outcome(where: Path, *arguments: str | Path, **environment: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def check_same(
    where: Path,
    *arguments: str | Path,
    options: tuple[str, ...] = (),
    run: tuple[str, ...] = RUN,
    **environment: str,
) -> Outcome:
    """Run it both ways, and compare all that can be seen from outside."""
    ways = ((), (*run, *options))
    with ThreadPoolExecutor() as pool:
        plain, ours = pool.map(lambda way: outcome(where, *way, *arguments, **environment), ways)
    stderr = plain.stderr
    if plain.code == 0:
        script = next(each for each in arguments if str(each).endswith(".py"))
        stderr += f"rrfp: {script} {UNUSED}\n"
    assert ours == Outcome(plain.code, plain.stdout, stderr)
    return plain


NAMES = """
import sys
import helper
print(sorted(globals()), __name__, __file__, __spec__, __cached__, __package__, __builtins__)
print(type(__loader__), __loader__.name, __loader__.path, sys.argv, sys.path[0], helper.__file__)
print(sys.modules["__main__"].sys is sys, __annotations__, repr(input()))
"""

SCRIPTS = {
    "exits with 0": "import sys; sys.exit()",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with true": "import sys; sys.exit(True)",
    "exits with text": "import sys; sys.exit('no data')",
    "exits at once": "import os; print('lost', end=''); os._exit(7)",
    "raises": "def deeper():\n    1 / 0\n\ndeeper()",
    "raises in a helper": "import helper\nhelper.fail()",
    "raises while it handles": """
try:
    1 / 0
except ZeroDivisionError as error:
    raise ValueError("worse") from error
""",
    "is no python": "if True\n    print()",
    "is interrupted": "raise KeyboardInterrupt",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "handles signals": """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("caught"))
os.kill(os.getpid(), signal.SIGTERM)
print(signal.getsignal(signal.SIGINT).__name__)
""",
    "reports by itself": """
import sys
def report(kind, error, trace):
    print("mine", kind, error, trace.tb_frame.f_code.co_name, error.__traceback__ is trace)
sys.excepthook = report
1 / 0
""",
    "ends late": """
import atexit, threading, time
atexit.register(print, "at exit")
def late():
    time.sleep(0.2)
    print("thread", threading.active_count(), __name__)
threading.Thread(target=late).start()
print("main")
""",
    "fails in a thread": """
import threading
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
""",
    "warns": "import warnings\nwarnings.warn('old', DeprecationWarning)\nprint('\\d')",
    "forks": """
import os, sys
child = os.fork()
if child == 0:
    print("child", flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print("parent")
""",
    "pickles": """
import pickle
class Thing:
    pass
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
""",
    "spawns": """
import multiprocessing
def work(number):
    return number + 1, __name__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
""",
}
"""A script each, by what it does."""


@pytest.fixture
def where(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def fail():\n    raise ValueError('helped')\n")
    return tmp_path


@pytest.mark.parametrize("does", SCRIPTS)
def test_a_script_runs_as_under_python(does: str, where: Path) -> None:
    (where / "script.py").write_text(SCRIPTS[does])
    check_same(where, "script.py")


ENDS = {
    "a bracket is open": b"x = (1,",
    "a bracket too many": b"print(1))",
    "an indent is missing": b"if True:\nprint()",
    "a tab among spaces": b"if 1:\n\tx = 1\n        y = 2",
    "a null byte": b"x = 1\0",
    "an unknown encoding": b"# coding: nope\nx = 1",
    "no encoding": b'x = "\xe9"',
    "another encoding": b'# coding: ascii\nx = "\xe9"',
    "a mark of byte order": b"\xef\xbb\xbfx = 1 +",
    "two bytes a character": "x = 1".encode("utf-16"),
    "the compiler refuses": b"def f():\n    nonlocal x",
    "it raises a SyntaxError": b"raise SyntaxError('own', ('file', 1, 2, 'abc', 1, 3))",
    "it imports one": b"import wrong",
    "it raises by chance": SCRIPTS["raises while it handles"].encode(),
    "it raises several": b"raise ExceptionGroup('all', [ValueError(1), TypeError(2)])",
    # Python 3.12 complains of the number unless something has imported threading, as ours does.
    "it exits with a huge number": b"import threading\nraise SystemExit(2**80)",
    "it exits with a list": b"raise SystemExit([1])",
    "it exits with nothing": b"raise SystemExit",
    "it exits with text": b"raise SystemExit('no data')",
    "it is interrupted": b"raise KeyboardInterrupt",
}
"""How a program may end, by a name for it."""


@pytest.mark.parametrize("how", ENDS)
def test_the_command_ends_as_python_does(how: str, where: Path) -> None:
    (where / "script.py").write_bytes(ENDS[how])
    (where / "wrong.py").write_text("x = (")
    (where / "rrfp").write_text(COMMAND)
    # The command's module `__main__` must outlive the script, as Python goes on to use it. Where it
    # does not, what this variable puts in its place makes sure of a SIGSEGV.
    plain = check_same(where, "script.py", run=("rrfp", "run"), PYTHONMALLOC="debug")
    assert plain.code != 0 or how.endswith("nothing")


def test_a_script_may_remove_its_streams(where: Path) -> None:
    (where / "script.py").write_text("import sys\ndel sys.stdout, sys.stderr\n")
    assert outcome(where, *RUN, "script.py") == Outcome(0, "", "")


@pytest.mark.parametrize("name", ["job", "./job", "job.zip", "empty"])
def test_a_directory_or_an_archive_runs_as_under_python(name: str, where: Path) -> None:
    (where / "job").mkdir()
    (where / "empty").mkdir()
    (where / "job" / "__main__.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0], __file__, __spec__.name)\n1 / 0"
    )
    with zipfile.ZipFile(where / "job.zip", "w") as archive:
        archive.write(where / "job" / "__main__.py", "__main__.py")
    assert check_same(where, name, "--hint", "no").code == 1


@pytest.mark.parametrize("path", ["script.py", "./scripts/../script.py", "links/other.py", "/"])
def test_its_names_are_those_that_python_gives(path: str, where: Path) -> None:
    (where / "scripts").mkdir()
    (where / "links").mkdir()
    (where / "script.py").write_text(NAMES)
    (where / "links" / "other.py").symlink_to("../script.py")
    path = str(where / "script.py") if path == "/" else path
    plain = check_same(where, path, "--hint", "no", "--", "--help", "", options=("--hint", "bfw"))
    assert "'--hint', 'no', '--', '--help', ''" in plain.stdout


def test_a_safe_path_stays_safe(where: Path) -> None:
    (where / "script.py").write_text("import sys\nprint(sys.path[0])\nimport helper")
    assert check_same(where, "script.py", PYTHONSAFEPATH="1").code == 1


def test_a_script_may_have_any_encoding(where: Path) -> None:
    (where / "script.py").write_bytes("# coding: latin-1\nprint(ascii('é'))".encode("latin-1"))
    assert check_same(where, "script.py").stdout == "'\\xe9'\n"


def test_the_command_by_its_own_name_is_the_same(where: Path) -> None:
    (where / "script.py").write_text(NAMES)
    command = Path(sys.executable).parent / "rrfp"
    if not command.exists():
        pytest.skip("rrfp is not installed as a command here")
    by_name = subprocess.run(
        [command, "run", "script.py", "a"],
        cwd=where,
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert by_name.stdout == outcome(where, "script.py", "a").stdout


MODULE = """
import sys
import helper
print(sorted(globals()), __name__, __file__, __spec__.name, __package__, sys.argv, sys.path[0])
print(sys.modules["__main__"].sys is sys, repr(input()))
if "fail" in sys.argv:
    helper.fail()
"""


@pytest.mark.parametrize("arguments", [["jobs.train", "-m", "--hint", "no"], ["jobs", "fail"]])
def test_a_module_runs_as_under_python(arguments: list[str], where: Path) -> None:
    (where / "jobs").mkdir()
    for name in ("train.py", "__main__.py"):
        (where / "jobs" / name).write_text(MODULE)
    plain = outcome(where, "-m", *arguments)
    ours = outcome(where, *RUN, "--hint", "bfw", "-m", *arguments)
    told = "" if plain.code else f"rrfp: {arguments[0]} {UNUSED}\n"
    assert ours == Outcome(plain.code, plain.stdout, plain.stderr + told)
    assert str(where / "jobs") in plain.stdout
    assert ("Traceback" in plain.stderr) == bool(plain.code)


@pytest.mark.parametrize("name", ["wrong", "package", "package.part"])
def test_a_module_that_is_no_python_ends_as_python_does(name: str, where: Path) -> None:
    (where / "package").mkdir()
    for wrong in ("wrong.py", "package/__main__.py", "package/part.py"):
        (where / wrong).write_text("x = (")
    (where / "package" / "__init__.py").touch()
    (where / "rrfp").write_text(COMMAND)
    assert outcome(where, "rrfp", "run", "-m", name) == outcome(where, "-m", name)


def test_a_module_that_is_nowhere_is_reported_as_by_python(where: Path) -> None:
    assert outcome(where, *RUN, "--module", "nowhere") == outcome(where, "-m", "nowhere")


def test_only_the_first_rank_says_that_nothing_was_called(where: Path) -> None:
    (where / "script.py").write_text("")
    assert outcome(where, *RUN, "script.py", RANK="1") == Outcome(0, "", "")
    assert outcome(where, *RUN, "script.py", SLURM_PROCID="1") == Outcome(0, "", "")
    told = outcome(where, *RUN, "--dispatch", "megatron", "script.py", RANK="0").stderr
    assert told.endswith("so nothing was recorded\n")


def test_nothing_is_imported_before_the_script_does(where: Path) -> None:
    (where / "script.py").write_text(
        "import sys\nprint({'torch', 'numpy', 'megatron', 'polars', 'perfetto'} & {*sys.modules})"
    )
    for options in ((), ("--dispatch", "megatron")):
        assert outcome(where, *RUN, *options, "script.py").stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.py"], "the script nowhere.py cannot be read (No such file or directory); name"),
        ([], "the script is missing; name a Python file, or -m and a module; see 'rrfp run --help"),
        (["--hint", "bf"], "the script is missing"),
        (["--hnt", "bf", "s.py"], "no option --hnt; did you mean '--hint'? See 'rrfp run --help'"),
        (["-x", "s.py"], "there is no option -x; see 'rrfp run --help'"),
        (["--hint"], "--hint needs a value; see 'rrfp run --help'"),
        (["--force=yes", "s.py"], "--force: ignored explicit argument 'yes'; see"),
        (["--limit", "three", "s.py"], "--limit is 'three'; it takes an integer"),
        (["--stall-s=-", "s.py"], "--stall-s is '-'; it takes a number"),
        (["--steps", "4", "s.py"], "the steps to record are '4'; give a range such as '20:40'"),
        (["--steps", "-4:", "s.py"], "the steps to record are '-4:'; give a range"),
        (["--steps", "4:4", "s.py"], "the range of steps to record, '4:4', is empty"),
        (["--no-trace", "--steps", "4:", "s.py"], "--no-trace records nothing; leave out --steps"),
        (["--no-trace", "--out", "x", "s.py"], "--no-trace records nothing; leave out --out"),
        (["--hint", "best", "s.py"], "'best' is"),
        (["--limit", "0", "s.py"], "the limit is 0; it must be a whole number, at least 1"),
        (["--limit", "3", "--hold", "3", "s.py"], "a limit of 3 and a hold of 3 exclude"),
        (["--placement", "x", "s.py"], "placement is 'x'; choose one of loop, v"),
        (
            ["--dispatch", "x", "s.py"],
            "--dispatch is 'x'; it must be one of ready, fixed, megatron",
        ),
        (
            ["--dispatch", "megatron", "--hint", "bf", "--hold", "0", "s.py"],
            "--dispatch megatron leaves Megatron's schedule as it is and --hint, --hold would "
            "steer ours; leave one of them out",
        ),
        (["--out", ".", "s.py"], "exists; choose another directory with --out, or replace"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["rrfp", "run", *arguments])
    assert main.main() == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.startswith("rrfp: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "told",
    ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"],
)
def test_a_job_that_is_started_again_goes_on(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.py").touch()
    arguments = ["--out", str(tmp_path), str(tmp_path / "s.py")]
    monkeypatch.setenv(told, "0")
    with pytest.raises(UsageError, match="exists; choose another directory"):
        parse_command(arguments)
    monkeypatch.setenv(told, "1")
    assert callable(parse_command(arguments))


def test_paths_count_from_where_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    requests = RecordingRequest("a test", Path("run")), RecordingRequest("a test")
    settings = DispatchSettings(admit="order.csv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert requests[0].out == tmp_path / "run"
    assert settings.admit == str(tmp_path / "order.csv")
    run = create_run_dir(None, False, "bf", requests[1].runs)
    assert run.path.parent == tmp_path / "runs"


@pytest.mark.parametrize(
    ("text", "steps", "evaluations_after"),
    [
        (None, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]),
        (":", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]),
        ("2:4", [2, 3], [3]),
        (":3", [0, 1, 2], [0, 1, 2]),
        ("4:", [4, 5], [5, 6]),
    ],
)
def test_a_window_is_read_as_a_slice(
    text: str | None, steps: list[int], evaluations_after: list[int]
) -> None:
    window = StepWindow.of(text)
    assert [step for step in range(6) if window.has_step(step)] == steps
    assert [num for num in range(7) if window.has_evaluation(num)] == evaluations_after
    assert StepWindow.of(str(window)) == window


@pytest.mark.parametrize(
    "text", ["", "3", "a:b", "1:2:3", "3:3", "5:4", "-1:", ":0", "1.5:", " 1:2"]
)
def test_a_window_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="steps to record"):
        StepWindow.of(text)


@pytest.mark.parametrize(
    ("text", "num_begun", "why"),
    [
        (":", 1, "the job began 1 step and ended none"),
        (":", 0, "the job began 0 steps, and those from 0 on were to be recorded"),
        ("2:4", 2, "the job began 2 steps, and those from 2 to 3 were to be recorded"),
    ],
)
def test_why_a_window_has_no_steps(text: str, num_begun: int, why: str) -> None:
    assert StepWindow.of(text).without_steps(num_begun) == why


# Megatron's functions are replaced once their module has been executed.

SCHEDULES = """
def get_forward_backward_func(pp_size=None, vp_size=None): return forward_backward_no_pipelining
def forward_backward_no_pipelining(*, model): return "Megatron's"
def forward_backward_pipelining_without_interleaving(*, model): pass
def forward_backward_pipelining_with_interleaving(*, model): pass
"""

LOOP = """
from megatron.core.pipeline_parallel import get_forward_backward_func as getter
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving as by_name,
)
import sys
for function in (getter, by_name, schedules.get_forward_backward_func):
    print(getattr(function, "__func__", function).__globals__["__name__"].startswith("rrfp."))
print(type(schedules.__loader__).__name__, [type(each).__name__ for each in sys.meta_path])
"""


@pytest.fixture
def unknown_megatron(where: Path) -> Path:
    """A Megatron-Core with nothing but schedules."""
    package = where / "megatron" / "core" / "pipeline_parallel"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "__init__.py").write_text("from .schedules import get_forward_backward_func")
    (package / "schedules.py").write_text(SCHEDULES)
    return where


def test_whoever_imports_megatron_gets_ours(unknown_megatron: Path) -> None:
    (unknown_megatron / "script.py").write_text(LOOP)
    plain = outcome(unknown_megatron, "script.py").stdout.splitlines()
    assert plain[:3] == ["False"] * 3
    ours = outcome(unknown_megatron, *RUN, "script.py").stdout.splitlines()
    assert ours[:3] == ["True"] * 3
    # Nothing of the hook is left behind.
    assert ours[3] == plain[3]
    # Megatron's own getter stays, and gives the recorded functions.
    native = outcome(unknown_megatron, *RUN, "--dispatch", "megatron", "script.py")
    assert native.stdout.splitlines()[:3] == ["False", "True", "False"]
    untouched = outcome(unknown_megatron, *RUN, "--dispatch", "megatron", "--no-trace", "script.py")
    assert untouched == outcome(unknown_megatron, "script.py")


@pytest.mark.parametrize(
    ("asks", "own"),
    [
        ("install(at_import=True)", ["True", "True", "True"]),
        ("trace_native('run', at_import=True)", ["False", "True", "False"]),
    ],
)
def test_a_module_that_every_process_imports_may_wait(
    asks: str, own: list[str], unknown_megatron: Path
) -> None:
    (unknown_megatron / "everywhere.py").write_text(f"import rrfp.megatron\nrrfp.megatron.{asks}")
    (unknown_megatron / "script.py").write_text(
        f"import sys, everywhere\nprint('megatron' in sys.modules)\n{LOOP}"
    )
    told = outcome(unknown_megatron, "script.py")
    assert (told.code, told.stderr) == (0, "")
    assert told.stdout.splitlines()[:4] == ["False", *own]


def test_an_unknown_megatron_is_refused_in_a_sentence(unknown_megatron: Path) -> None:
    script = unknown_megatron / "script.py"
    script.write_text(
        "from megatron.core.pipeline_parallel import get_forward_backward_func\n"
        "get_forward_backward_func()(model=None)\n"
    )
    for options in ((), ("--dispatch", "megatron")):
        refused = outcome(unknown_megatron, *RUN, *options, "script.py")
        assert refused.code == 2
        assert re.fullmatch(
            r"rrfp: Megatron-Core .* is not one that rrfp knows: .*\n", refused.stderr
        )
    schedules = unknown_megatron / "megatron/core/pipeline_parallel/schedules.py"
    schedules.write_text("def get_forward_backward_func(): pass")
    refused = outcome(unknown_megatron, *RUN, "script.py")
    assert refused.code == 2
    assert refused.stderr.startswith(
        "rrfp: megatron.core.pipeline_parallel.schedules has no forward"
    )


def test_a_script_that_installs_by_itself_is_informed_that_it_need_not(
    unknown_megatron: Path,
) -> None:
    (unknown_megatron / "script.py").write_text(
        "import rrfp.megatron\n"
        "import megatron.core.pipeline_parallel.schedules\n"
        "rrfp.megatron.install()\n"
    )
    told = outcome(unknown_megatron, *RUN, "script.py")
    assert told.code == 2
    assert told.stderr.endswith(
        "rrfp: rrfp run has replaced Megatron's schedule in this process already; leave out "
        "install()\n"
    )


def test_an_import_that_fails_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "imported_late.py"
    module.write_text("raise ValueError")
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    acted: list[bool] = []
    call_after_import("imported_late", lambda: acted.append("imported_late" in sys.modules))
    with pytest.raises(ValueError):  # noqa: PT011
        __import__("imported_late")
    assert not acted
    module.write_text("value = 12345")
    import importlib

    importlib.invalidate_caches()
    found = __import__("imported_late")
    assert (found.value, acted, sys.meta_path) == (12345, [True], finders)
    assert "exec_module" not in vars(found.__loader__)
    call_after_import("imported_late", lambda: acted.append(False))
    assert acted == [True, False]
    del sys.modules["imported_late"]
