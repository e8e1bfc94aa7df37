"""One module alone creates files; it writes them whole, whatever the disk does."""

import ast
import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rrfp
from rrfp.errors import RrfpError
from rrfp.trace import safe_files as report_file
from rrfp.trace.safe_files import ReportFile, WholeLines, open_whole

# A file that is written whole or not at all.


def test_a_reader_finds_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with open_whole(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_text() == "old"
        file.write(b"w")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    def fail() -> None:
        with open_whole(path) as file:
            file.write(b"new")
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# The reports of a run: whole lines, none left out, whatever the disk does.


class FullDisk:
    """A disk that writes half of the bytes and then none while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        own = WholeLines.write

        def write(file: WholeLines, octets: bytes) -> None:
            if self.is_full:
                own(file, octets[: len(octets) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            own(file, octets)

        monkeypatch.setattr(WholeLines, "write", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_lines_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = ReportFile(path)
    file.write("0\n")
    disk.is_full = True
    for step in range(1, 4):
        file.write(f"{step}\n")
        assert path.read_text() == "0\n"
    copy = tmp_path / "copy"
    file.copy_to(copy)
    assert copy.read_text() == "0\n1\n2\n3\n"
    disk.is_full = False
    file.write("4\n")
    file.close()
    assert path.read_text() == "0\n1\n2\n3\n4\n"
    assert [record.message for record in caplog.records] == [
        f"{path} cannot be written (No space left on device); its lines wait in memory until there "
        "is room, and the training goes on",
        f"{path} is written again; none of its lines is missing",
    ]


def test_a_disk_that_stays_full_is_tried_once_more_at_the_end(
    tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for is_full in (False, True):
        disk.is_full = False
        file = ReportFile(path)
        disk.is_full = True
        file.write("1\n")
        file.write("2\n")
        disk.is_full = is_full
        caplog.clear()
        file.close()
        file.close()
        assert path.read_text() == "1\n2\n"
    assert [record.message for record in caplog.records] == [
        f"{path} cannot be written (No space left on device): it ends here, its last 2 lines are "
        "lost, and the training goes on"
    ]


def test_waiting_lines_are_limited_and_leave_no_gap(
    tmp_path: Path,
    disk: FullDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(report_file, "MOST_WAITING_BYTES", 5)
    path = tmp_path / "metrics.jsonl"
    file = ReportFile(path)
    file.write("0\n")
    disk.is_full = True
    for step in range(1, 4):
        file.write(f"{step}\n")
    disk.is_full = False
    file.write("4\n")
    file.close()
    assert path.read_text() == "0\n"
    assert "its last 3 lines are lost" in caplog.text


def test_a_removed_directory_is_reported_and_its_lines_stay_for_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    file = ReportFile(directory / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        file.write("0\n")
        shutil.rmtree(directory)
        file.write("1\n")
        file.write("2\n")
    file.copy_to(tmp_path / "copy")
    file.close()
    assert (tmp_path / "copy").read_text() == "0\n1\n2\n"
    assert not directory.exists()
    (warning,) = caplog.records
    assert warning.message == (
        f"{directory / 'metrics.jsonl'} is gone (it was removed or moved away): its lines will not "
        "be found, and the training goes on"
    )


def test_a_run_whose_results_are_removed_ends(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    file = ReportFile(directory / "metrics.jsonl", is_needed=True)
    file.write("0\n")
    shutil.rmtree(directory)
    with pytest.raises(RrfpError, match=rf"the run's directory {directory} was removed"):
        file.write("1\n")


_SOURCES = Path(rrfp.__file__).parent
_ANY = {
    *("write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "mkfifo", "mknod"),
    *("mkdir", "makedirs", "copyfile", "copytree", "copy2", "move"),
    *("write_parquet", "write_csv", "write_json", "sink_parquet", "sink_csv", "to_csv", "savefig"),
    *("write_to_textfile", "SummaryWriter", "FileHandler", "memmap", "tofile", "savez", "creat"),
    *("mktemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "mkdtemp"),
}
"""Calls that make or fill a file, by the name of the function or method."""
_OF_MODULES = {
    ("torch", "save"),
    ("np", "save"),
    ("gzip", "open"),
    ("os", "link"),
    ("os", "symlink"),
}
_OPEN = {"file", "out", "octets"}
"""How a file that is open is called where polars writes a table to it; without one, to a text."""

_PRIVATE = "in a directory that this process has made with mkdtemp, or its tests' own"
_TEMPORARY = "an unpredictable name, made exclusively, by Python's tempfile"
ALLOWED = {
    ("trace/safe_files.py", "*"): "the one place",
    ("trace/safe_files.py", "os.open"): "reads: the flags are those of a file opened so",
    ("trace/run_dir.py", "mkdir"): "a new directory: mkdir follows no link and replaces nothing",
    ("trace/locate.py", "mkdtemp"): _TEMPORARY,
    ("trace/locate.py", "symlink_to"): _PRIVATE,
    ("analyze/frame_files.py", "TemporaryDirectory"): _TEMPORARY,
    ("analyze/frame_files.py", "mkdir"): "a new directory under an unpredictable name",
    ("watch/exporters.py", "mkdir"): "a directory that the user names for output",
    ("watch/exporters.py", "SummaryWriter"): "the library's own unique names",
    ("chaos/campaign.py", "mkdir"): _PRIVATE,
    ("chaos/campaign.py", "copytree"): "to --keep, a directory that the user names",
    ("chaos/campaign.py", "copyfile"): "to --keep, a directory that the user names",
    ("chaos/session.py", "mkdir"): _PRIVATE,
    ("cli/chaos.py", "mkdtemp"): _TEMPORARY,
    ("cli/chaos.py", "mkdir"): _PRIVATE,
    ("cli/verify.py", "mkdtemp"): _TEMPORARY,
    ("cli/verify.py", "mkdir"): _PRIVATE,
    ("cli/terminal.py", "open"): "/dev/null in the place of a closed stream",
    ("cli/terminal.py", "os.open"): "/dev/null in the place of a closed stream",
    ("interchange/assemble.py", "TemporaryDirectory"): _TEMPORARY,
    ("interchange/straggler.py", "open"): "/dev/null",
    ("runtime/net/connecting.py", "mkdtemp"): _TEMPORARY,
    ("runtime/net/handshake.py", "os.open"): "O_EXCL and O_NOFOLLOW, in a mkdtemp",
    ("runtime/net/tls.py", "NamedTemporaryFile"): _TEMPORARY,
    ("train/checkpoints", "*"): "in a directory that was checked (docs/security.md)",
    ("train/data/tokens.py", "memmap"): "maps a file of tokens to read it",
    ("train/data/tokens.py", "mkdir"): "the user's own cache directory",
    ("train/data/tokens.py", "TemporaryDirectory"): _TEMPORARY,
    ("train/launch/network_namespace.py", "write_text"): "/proc/self of a new namespace",
    ("train/launch/processes.py", "mkdtemp"): _TEMPORARY,
    ("train/data/images.py", "open"): "a picture to read",
    ("doctor/cuda_ipc.py", "open"): "memory of a GPU",
    ("runtime/planes/cuda_ipc.py", "open"): "memory of a GPU",
    ("interchange/json_stream.py", "gzip.open"): "reads",
    ("train/launch/rank_status.py", "mkfifo"): _PRIVATE,
    ("train/launch/rank_status.py", "os.open"): _PRIVATE,
}
"""Other calls that create files, by file (or folder) and call, each with the reason why it follows
no planted link. `*` means every call of that file."""


def test_nothing_but_one_module_creates_files() -> None:
    stray = []
    for source in sorted(_SOURCES.rglob("*.py")):
        name = source.relative_to(_SOURCES).as_posix()
        for call, line in writes_in(source.read_text(encoding="utf-8")):
            places = (name, name.rpartition("/")[0])
            if not any((place, each) in ALLOWED for place in places for each in (call, "*")):
                stray.append(f"rrfp/{name}:{line}: {call}")
    assert not stray, "write with rrfp.trace.safe_files, or say here why not"


def test_each_exception_names_a_file_that_is_there() -> None:
    assert [name for name, _ in ALLOWED if not (_SOURCES / name).exists()] == []


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("path.open('wb')", "open"),
        ("path.open(mode)", "open"),
        ("open(path, mode='a')", "open"),
        ("path.write_text('')", "write_text"),
        ("os.open(path, os.O_CREAT)", "os.open"),
        ("path.mkdir()", "mkdir"),
        ("shutil.copyfile(a, b)", "copyfile"),
        ("torch.save(x, path)", "torch.save"),
        ("frame.write_parquet(path)", "write_parquet"),
        ("tempfile.mkdtemp()", "mkdtemp"),
        ("path.open()", None),
        ("path.open('rb')", None),
        ("transport.open()", None),
        ("os.open(path, os.O_RDONLY)", None),
        ("frame.write_parquet(file)", None),
    ],
)
def test_a_write_is_found(source: str, call: str | None) -> None:
    assert [name for name, _ in writes_in(source)] == ([] if call is None else [call])


def writes_in(source: str) -> Iterator[tuple[str, int]]:
    """The calls in a source that may create or fill a file, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = _write(node)
            if name is not None:
                yield name, node.lineno


def _write(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(name):
            owner = ""
        case ast.Attribute(ast.Name(owner), name):
            pass
        case ast.Attribute(_, name):
            owner = "..."
        case _:
            return None
    if (owner, name) in _OF_MODULES:
        return f"{owner}.{name}"
    if name == "open":
        if owner == "os":
            return None if _only_reads(ast.unparse(call)) else "os.open"
        modes = [*call.args[1 if owner == "" else 0 :][:1]]
        modes += [each.value for each in call.keywords if each.arg == "mode"]
        texts = [m.value if isinstance(m, ast.Constant) else "w" for m in modes]
        return "open" if any(set(str(text)) & set("wax+") for text in texts) else None
    if name.startswith("write_") and {ast.unparse(each) for each in call.args[:1]} <= _OPEN:
        return None
    return name if name in _ANY else None


def _only_reads(text: str) -> bool:
    return "O_RDONLY" in text and "O_CREAT" not in text
