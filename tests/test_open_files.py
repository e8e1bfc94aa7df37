"""A process that may have few files open: refused at the start, or told as what it is."""

import errno
import os
import resource
from pathlib import Path

import pytest

from rrfp.system import FILES_OF_A_RANK, allow_open_files, is_of_too_many, told_of_too_many
from tests.trained import rrfp, rrfp_here

WITHIN = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {1}))"


def test_a_run_is_refused_where_no_rank_could_open_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))
    refused = rrfp_here(tmp_path, "train", "--pp", "2")
    assert refused.returncode == 2
    assert "a process may have 48 files open here and a rank needs 64" in refused.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (70, 100))
            allow_open_files(64)
            code = 0 if resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 100) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_too_many_open_files_are_told_as_that() -> None:
    assert is_of_too_many(OSError(errno.EMFILE, "Too many open files"))
    assert is_of_too_many(RuntimeError("[enforce fail] Too many open files"))
    assert not is_of_too_many(OSError(errno.ENOENT, "No such file"))
    assert "ulimit -n" in told_of_too_many()


@pytest.mark.slow
def test_a_rank_that_comes_to_its_limit_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"{WITHIN.format(FILES_OF_A_RANK, FILES_OF_A_RANK)}\n"
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    taken = [os.open('/dev/null', os.O_RDONLY) for _ in range(45)]\n"
    )
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        ended = rrfp(tmp_path, "train", "--pp", "2", "--steps", "3", "--out", "run")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "it needs more than the 64 files that it may have open" in ended.stderr
