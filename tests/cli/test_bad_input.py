"""Invalid input is refused before anything starts: one sentence, an exit code, no files."""

import errno
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import polars as pl
import pytest

from rrfp.cli import main as cli
from rrfp.cli import train as train_file
from rrfp.errors import UsageError
from rrfp.runtime.device.cuda_runtime import check_cuda
from rrfp.trace.perfetto.writer import write_trace
from rrfp.train.data.text_files import text_files
from tests.analyze.recordings import make_recording

ROOT = Path(__file__).parents[2]

Rrfp = Callable[..., tuple[int, str]]

INDEX_MAGIC = b"MMIDIDX\x00\x00"


@pytest.fixture
def rrfp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Rrfp:
    """Run a command line in an empty directory: its exit code and the sentence on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RRFP_DEBUG", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["rrfp", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("rrfp: ")
        assert captured.err.count("\n") == 1
        return code, captured.err

    return run


@pytest.fixture
def refused(rrfp: Rrfp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Have `rrfp train` refuse what it is given; the sentence."""

    def start(_: object) -> NoReturn:
        raise AssertionError("nothing refused this run")

    monkeypatch.setattr(train_file, "_run", start)

    def run(*arguments: str) -> str:
        code, sentence = rrfp("train", "--out", "run", *arguments)
        assert code == 2, sentence
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "runs").exists()
        return sentence

    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--layers 6", "6 layers do not divide by 4 pipeline ranks; change --layers, --pp or "),
        ("--hidden 96 --heads 6 --tp 4", "6 heads do not divide by 4 tensor-parallel ranks"),
        ("--hidden 100 --heads 6", "a hidden size of 100 does not divide by 6 heads"),
        ("--limit 0", "the limit is 0; it must be a whole number, at least 1"),
        ("--limit -1", "the limit is -1; it must be a whole number, at least 1"),
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--steps 1.5", "--steps is '1.5'; it takes a whole number; see 'rrfp train --help'"),
        ("--pp four", "--pp is 'four'; it takes a whole number; see 'rrfp train --help'"),
        ("--dropout=much", "--dropout is 'much'; it takes a number; see 'rrfp train --help'"),
        ("--pp -4", "--pp is -4; it must be at least 1"),
        ("--pp 4096 --layers 4096", "4096 ranks are more than 16 a core"),
        (
            "--microbatches 9999999999",
            "--microbatches is 9999999999; it must be at least 1 and at most 65536",
        ),
        ("--seq-length 99999999", "tokens and needs 100000000"),
        ("--lr nan", "--lr is nan; it must be a finite number above 0"),
        ("--seed -1", "--seed is -1; it must be in 0..4294967295"),
        ("--hint fancy", "neither a hint (bf, fb, b-first, f-first, bfw, "),
        ("--hint fancy", "interleaved, auto) nor the path of an order file"),
        ("--hint 1b1f", "did you mean '1f1b'?"),
        ("--hint atuo", "did you mean 'auto'?"),
        ("--hint no.csv", "cannot read the order file no.csv: No such file or directory"),
        ("--dispatch soon", "--dispatch is 'soon'; it must be one of ready, fixed, megatron"),
        ("--dispatch megatron --hint bf", "--dispatch megatron runs 1f1b only, not 'bf'"),
        ("--dispatch megatron --limit 2", "order 1f1b runs 4 forwards ahead of their backwards"),
        ("--dispatch fixed --hint gpipe --limit 2", "8 forwards ahead of their backwards"),
        (
            "--dispatch megatron --hold 2",
            "order 1f1b keeps 4 microbatches on rank 0, above the hold of 2",
        ),
        ("--dispatch fixed --hint zb-h1 --hold 2", "order zb-h1 keeps 4 microbatches on rank 0"),
        (
            "--dispatch fixed --chunks 2 --hint gpipe --hold 7",
            "above the hold of 7; raise --hold to 8",
        ),
        ("--dispatch megatron --chunks 2 --microbatches 6", "a multiple of its 4 pipeline ranks"),
        ("--hint zb-v", "order zb-v needs 2 chunks per rank in placement v"),
        ("--hint zb-v --chunks 2", "order zb-v needs 2 chunks per rank in placement v"),
        ("--hint interleaved", "order interleaved needs 2 or more chunks"),
        ("--hint interleaved --placement v --chunks 2", "order interleaved needs 2 or more chunks"),
        ("--hint 1f1b --chunks 2", "order 1f1b needs 1 chunk per rank"),
        ("--hint zb-h1 --chunks 2", "order zb-h1 needs 1 chunk per rank"),
        ("--placement v", "--placement v takes 2 chunks per rank, not 1; add --chunks 2"),
        ("--limit 4 --hold 3", "a limit of 4 and a hold of 3 exclude each other"),
        ("--ep 2", "--ep 2 shares out experts and the layers are dense; add --experts"),
        ("--cp 2", "--cp 2 needs the attention of Transformer Engine"),
        ("--sequence-parallel", "--sequence-parallel divides sequences among tensor-parallel"),
        ("--w ranked", "places the weight gradients, and bf does not"),
        ("--w ranked --hint 1f1b", "places the weight gradients, and 1f1b does not"),
        ("--admit heavy", "'heavy' is not an admission order; choose given, pyramid, plan, or"),
        ("--admit no.txt", "cannot read the admission file no.txt: No such file or directory"),
        ("--admit-cost work", "--admit given does not sort them; add --admit pyramid or leave"),
        ("--admit pyramid --admit-cost heavy", "'heavy' is not a microbatch's cost; choose work, "),
        ("--admit pyramid --admit-cost no:cost", "the cost no:cost cannot be imported: ModuleNotF"),
        ("--dropout 1", "--dropout is 1.0; it must be at least 0 and below 1"),
        ("--device tpu", "--device is 'tpu'; it must be one of cpu, cuda; did you mean 'cpu'?"),
        ("--nnodes 0", "--nnodes is 0; it must be at least 1"),
        ("--nnodes 3 --rdzv-endpoint a:1", "4 ranks do not divide over 3 hosts"),
        ("--nnodes 2", "several hosts need --rdzv-endpoint HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint a", "--rdzv-endpoint is 'a'; it must be HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint a:65536", "it must be HOST:PORT with a port from 1 to 65535"),
        ("--outbox-mb 9999999999999", "it must be at least 1 and at most 1048576"),
        ("--nnodes 2 --rdzv-endpoint a:b", "--rdzv-endpoint is 'a:b'; it must be HOST:PORT"),
        ("--node-rank 1", "--node-rank is 1; with --nnodes 1 it must be in 0..0"),
        ("--model vlm --image-size 8", "--image-size is 8; scenes take at least 16 pixels"),
        ("--stepz 3", "No such option: --stepz"),
    ],
)
def test_a_wrong_flag(refused: Callable[..., str], flags: str, words: str) -> None:
    assert words in refused(*flags.split())


def test_a_run_on_a_gpu_where_there_is_none(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused("--device", "cuda") == f"rrfp: {check_cuda().problem}\n"


def test_more_ranks_than_the_cores_can_start(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    words = "17 ranks are more than 16 a core, of which this process may use 1; change --pp"
    assert words in refused("--pp", "17", "--layers", "17")


def test_several_hosts_share_a_directory(rrfp: Rrfp) -> None:
    code, sentence = rrfp("train", "--nnodes", "2", "--rdzv-endpoint", "node0:29400")
    assert code == 2
    assert "several hosts need --out DIR" in sentence


def index(num_sequences: int, token_type: int = 4, *, length: int = 10) -> bytes:
    """A Megatron index of one sequence that claims to have `num_sequences`."""
    head = struct.pack("<9sQBQQ", INDEX_MAGIC, 1, token_type, num_sequences, 2)
    return head + struct.pack("<iqqq", length, 0, 0, 1)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "cannot read the data data: No such file or directory; check --data"),
        ({"data": b""}, "the data data holds no text"),
        ({"data": b"too little"}, "the data holds 11 tokens and needs 257"),
        ({"data.jsonl": b'{"text": "a"}\n{"text'}, "data.jsonl, line 2: not JSON"),
        (
            {"data.jsonl": b'{"txt": "a"}\n'},
            "line 1: no string field 'text', and it has 'txt'; name another with --text-key",
        ),
        ({"data.bin": b"abc"}, "data.idx does not exist"),
        ({"data.bin": b"abc", "data.idx": b"\xff" * 99}, "data.idx is not a Megatron index"),
        ({"data.bin": bytes(40), "data.idx": index(9)}, "data.idx is cut off after 62 bytes"),
        (
            {"data.bin": bytes(39), "data.idx": index(1)},
            "data.bin has 39 bytes where its .idx promises 40",
        ),
        ({"data.bin": bytes(40), "data.idx": index(1, 7)}, "tokens of type 7, which are not int"),
        ({"data.bin": bytes(40), "data.idx": index(1, length=0)}, "data.bin holds no text"),
        ({"data.bin": bytes(40), "data.idx": index(1)}, "the data holds 10 tokens and needs 257"),
    ],
)
def test_wrong_data(
    refused: Callable[..., str], tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert words in refused("--data", next(iter(files), "data"))


def test_a_pipe_and_a_folder_of_images_are_no_text(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "the data pipe is not a regular file" in refused("--data", "pipe")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1.PNG").write_bytes(b"an image")
    assert "holds the image 1.PNG and the model takes text; add" in refused("--data", "data")


def test_an_empty_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "the data data holds no text" in refused("--data", "data")


@pytest.mark.parametrize("where", ["../secret", "/etc/passwd", "/proc/self/environ", ".."])
def test_a_link_out_of_the_folder(refused: Callable[..., str], tmp_path: Path, where: str) -> None:
    (tmp_path / "secret").write_text("not to be trained on" * 100)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text" * 100)
    (tmp_path / "data" / "more").symlink_to(where)
    assert "the folder data holds the link more to /" in refused("--data", "data")


def test_links_within_a_folder_are_followed_to_files(tmp_path: Path) -> None:
    (tmp_path / "there" / "data" / "more").mkdir(parents=True)
    folder = tmp_path / "data"
    folder.symlink_to("there/data")
    (folder / "more" / "a.txt").write_text("text")
    (folder / "b.txt").symlink_to("more/a.txt")
    (folder / "less").symlink_to("more")
    (folder / "round").symlink_to("../data")
    assert text_files(folder) == [folder / "b.txt", folder / "more" / "a.txt"]


def test_a_folder_within_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    told = f"cannot read the data {tmp_path / 'closed'}: Permission denied; check --data"
    with pytest.raises(UsageError, match=re.escape(told)):
        text_files(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_data(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("text")
    (tmp_path / "data").chmod(0)
    assert "cannot read the data data: Permission denied" in refused("--data", "data")


ORDER = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (ORDER.replace("1F1", "banana"), "order.csv, line 2: 'banana' is not a task"),
        (ORDER.replace("1F1", "1F0"), "order.csv, line 2: 1F0 is listed twice"),
        (ORDER.replace(",0B1", ""), "order.csv, line 1: 0B1 is missing"),
        (ORDER.replace("1F1", "0F1"), "order.csv, line 2: 0F1 is not a task of rank 1"),
        (ORDER.replace("1F1", "1F2"), "order.csv, line 2: 1F2 is not a task of rank 1"),
        (ORDER + "2F0\n", "order.csv has 3 lines for 2 pipeline ranks"),
        ("", "order.csv has 0 lines for 2 pipeline ranks"),
        ('"0F0', "order.csv, line 1: unexpected end of data"),
        ("\udcff", "cannot read the order file order.csv: it is not UTF-8 text"),
        (
            "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W1\n",
            "order.csv, line 2: 1W0 is missing",
        ),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "order.csv deadlocks as a fixed order"),
    ],
)
def test_a_wrong_order_file(
    refused: Callable[..., str], tmp_path: Path, order: str, words: str
) -> None:
    (tmp_path / "order.csv").write_text(order, encoding="utf-8", errors="surrogateescape")
    shape = ("--pp", "2", "--microbatches", "2", "--dispatch", "fixed")
    assert words in refused("--hint", "order.csv", *shape)


def test_a_run_is_not_removed_whose_times_are_asked_for(rrfp: Rrfp, tmp_path: Path) -> None:
    trace = tmp_path / "old" / "trace.pftrace"
    trace.parent.mkdir()
    shutil.copy(ROOT / "traces" / "gpt-pp4-bf.pftrace", trace)
    code, sentence = rrfp("train", "--out", "old", "--force", "--pace", "drawn:old")
    assert code == 2
    assert "--force removes the run in old and --pace takes its times" in sentence
    assert trace.exists()


@pytest.mark.parametrize("flag", ["--admit", "--hint"])
def test_a_pipe_is_not_waited_for(refused: Callable[..., str], tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "order")
    assert "order is not a regular file; save it to one first" in refused(flag, "order")


def test_an_admission_file_for_another_number_of_microbatches(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "order.txt").write_text("1 0 2\n", encoding="utf-8")
    sentence = refused("--admit", "order.txt", "--microbatches", "4")
    assert "order.txt, line 1 admits 3 of 4 microbatches; 3 is missing, add it" in sentence


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (None, "cannot read the configuration run.toml: No such file or directory"),
        (b"steps =", "run.toml is not TOML"),
        (b"\xff", "run.toml is not TOML"),
        (b"stepz = 2", "run.toml sets 'stepz', which is not a setting"),
        (b"steps = '2'", "run.toml sets steps to '2'; it takes an integer"),
        (b"steps = true", "run.toml sets steps to True; it takes an integer"),
        (b"data = ['a']", "run.toml sets data to ['a']; it takes a path"),
        (b"force = 1", "run.toml sets force to 1; it takes true or false"),
        (b"steps = 0", "--steps is 0; it must be at least 1"),
        (b"nnodes = 2", "several hosts need --rdzv-endpoint"),
    ],
)
def test_a_wrong_configuration(
    refused: Callable[..., str], tmp_path: Path, toml: bytes | None, words: str
) -> None:
    if toml is not None:
        (tmp_path / "run.toml").write_bytes(toml)
    assert words in refused("--config", "run.toml")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("taken", "taken exists; choose another directory with --out, or replace the run in it"),
        ("file", "file is a file; choose a directory with --out"),
        ("file/run", "the run's directory file/run cannot be made (Not a directory)"),
        ("/proc/run", "the run's directory /proc/run cannot be made"),
    ],
)
def test_a_directory_that_cannot_be_the_runs(
    rrfp: Rrfp, tmp_path: Path, out: str, words: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("mine")
    code, sentence = rrfp("train", "--out", out)
    assert code == 2
    assert words in sentence
    assert (tmp_path / "file").read_text() == "mine"
    assert not any((tmp_path / "taken").iterdir())


READERS = (["trace", "check"], ["trace", "view", "--no-browser"], ["analyze", "bubbles"])


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_a_trace_that_cannot_be_read(rrfp: Rrfp, tmp_path: Path, reader: list[str]) -> None:
    whole = tmp_path / "whole.pftrace"
    write_trace(whole, make_recording(2, 2, 2))
    content = whole.read_bytes()
    for broken, words in {
        content[:-3]: "the trace run.pftrace is truncated",
        content[: len(content) // 2]: "the trace run.pftrace is truncated",
        b"": "the trace run.pftrace is empty",
        b"hello\n": "run.pftrace is not an uncompressed Perfetto trace",
        bytes(range(256)) * 9: "run.pftrace is not an uncompressed Perfetto trace",
    }.items():
        (tmp_path / "run.pftrace").write_bytes(broken)
        code, sentence = rrfp(*reader, "run.pftrace")
        assert code == 1
        assert words in sentence


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_a_run_that_is_not_there(rrfp: Rrfp, tmp_path: Path, reader: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in {
        "empty": "empty has no trace.pftrace",
        "nowhere": "there is no run or trace at nowhere",
    }.items():
        code, sentence = rrfp(*reader, path)
        assert code == 1
        assert words in sentence
    code, sentence = rrfp(*reader)
    assert code == 1
    assert "there is no run yet in runs; make one with 'rrfp train'" in sentence


SIMULATE = ("simulate", "--pp", "4", "--microbatches", "8")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--limit 0", "--limit is '0'; it must be a whole number from 1 to 9"),
        ("--limit -1", "--limit is '-1'; it must be a whole number from 1 to 9"),
        ("--limit 1.5", "--limit is '1.5'; it must be a whole number from 1 to 9"),
        (
            "--hold 9999999999",
            "--hold is '9999999999'; write 12 (microbatches), 1500000B, 512MiB, 40GiB, 40GB, 1.0x",
        ),
        ("--chunks none", "--chunks is 'none'; it must be a whole number from 1 to 9"),
        ("--tp 1000000", "4000000 processes with --chunks 1 and --microbatches 8 run 32000000 "),
        ("--limit 4 --hold 3", "a limit of 4 and a hold of 3 exclude each other"),
        ("--hint fancy", "neither a hint (bf, fb, b-first, f-first, bfw, "),
        ("--hint no.csv", "cannot read the order file no.csv: No such file or directory"),
        ("--hint zb-v", "order zb-v needs 2 chunks per rank in placement v"),
        ("--placement v", "placement v takes 2 chunks per rank, not 1; give it --chunks 2"),
        ("--placement w", "--placement is 'w'; it must be one of loop, v"),
        ("--dispatch megatron", "--dispatch is 'megatron'; it must be one of ready, fixed"),
        ("--links nvlink", "--links is 'nvlink'; it must be one of async, blocking"),
        ("--links blocking", "only an order that binds can plan for; add --dispatch fixed"),
        ("--dispatch fixed --w ranked --hint zb-h1", "--dispatch fixed runs weight gradients "),
        ("--w ranked", "places the weight gradients, and bf does not"),
        ("--dispatch fixed --agreement unanimous", "nothing to agree on; leave --agreement out"),
        ("--dispatch fixed --hint gpipe --limit 2", "8 forwards ahead of their backwards"),
        ("--dispatch fixed --hint 1f1b --hold 2", "order 1f1b keeps 4 microbatches on rank 0"),
        ("--admit heavy", "'heavy' is not an admission order; choose given, pyramid, plan, or"),
        ("--seeds 0", "--seeds is '0'; it takes at least 1"),
        ("--seed -1", "--seed is '-1'; it takes at least 0"),
        ("--format xml", "Invalid value for '--format'"),
        ("--sweep limit", "--sweep takes a setting and its values, such as limit=4,8,16, not "),
        ("--sweep hnt=bf", "'hnt' is not a setting of a row (hint, dispatch, links, pp, "),
        ("--sweep seeds=1,2", "'seeds' is not a setting of a row"),
        ("--sweep limit=4,,8", "--limit is ''; it must be a whole number from 1 to 9"),
        ("--sweep limit=4,x", "--limit is 'x'; it must be a whole number from 1 to 9"),
        ("--sweep hint=", "'' is neither a hint"),
        ("--sweep limit=4 --sweep limit=8", "limit is swept twice; put its values into one"),
        ("--sweep pp=2,4", "--pp is given and swept as well; keep one of the two"),
        ("--sweep hint=bf --row hint=bfw", "--row sets hint, which is swept as well; keep one"),
        ("--row bfw", "--row takes settings such as hint=bfw hold=8, not 'bfw'"),
        ("--row hint=bf,bfw", "'bf,bfw' is neither a hint"),
        ("--sweep hint=bf,zb-v --sweep hold=4,8", "in the row hint=zb-v hold=4: order zb-v needs"),
        ("--sweep hint=bf --sweep limit=" + "1," * 20_000 + "1", "this makes 20001 rows, more"),
        ("--costs nowhere.csv", "nowhere.csv"),
        ("--jitter J9", "J9"),
    ],
)
def test_a_wrong_simulation(rrfp: Rrfp, tmp_path: Path, flags: str, words: str) -> None:
    code, sentence = rrfp(*SIMULATE, "--out", "sim", *flags.split())
    assert code == 2
    assert words in sentence
    assert not (tmp_path / "sim").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("hint=bf hint=bfw", "--row hint=bf hint=bfw sets hint twice; keep one"),
        ("hint='bf", "--row hint='bf cannot be read: No closing quotation"),
    ],
)
def test_a_wrong_row(rrfp: Rrfp, row: str, words: str) -> None:
    code, sentence = rrfp(*SIMULATE, "--row", row)
    assert code == 2
    assert words in sentence


def test_a_simulation_without_its_size(rrfp: Rrfp) -> None:
    code, sentence = rrfp("simulate", "--pp", "4")
    assert (code, "--microbatches is missing; say how many microbatches" in sentence) == (2, True)
    code, sentence = rrfp("simulate", "--sweep", "microbatches=4,8")
    assert (code, "--pp is missing; say how many pipeline ranks" in sentence) == (2, True)


def test_a_simulation_into_an_existing_directory(rrfp: Rrfp, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for rows in ((), ("--sweep", "hint=bf,bfw")):
        code, sentence = rrfp(*SIMULATE, *rows, "--out", "taken")
        assert code == 2
        assert "taken exists; choose another directory with --out" in sentence
    assert not any((tmp_path / "taken").iterdir())


def test_costs_that_do_not_fit_the_pipeline_leave_nothing(rrfp: Rrfp, tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text("kind,pp_rank,chunk,microbatch,seconds\nF,0,,,0.1\n")
    code, sentence = rrfp(*SIMULATE, "--costs", "costs.csv", "--out", "sim")
    assert code == 2
    assert "costs.csv" in sentence
    assert not (tmp_path / "sim").exists()


def test_an_order_that_deadlocks_as_a_fixed_one(rrfp: Rrfp, tmp_path: Path) -> None:
    order = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
    (tmp_path / "order.csv").write_text(order)
    code, sentence = rrfp(
        *("simulate", "--pp", "2", "--microbatches", "2", "--dispatch", "fixed"),
        *("--row", "hint=1f1b", "--row", "hint=order.csv"),
    )
    assert code == 2
    assert "in the row hint=order.csv: order order.csv deadlocks as a fixed order" in sentence


def test_a_parquet_of_more_rows_than_bytes(refused: Callable[..., str], tmp_path: Path) -> None:
    pl.DataFrame({"text": ["a"]}).select(
        pl.col("text").repeat_by(1_000_000).explode()
    ).write_parquet(tmp_path / "a.parquet")
    assert "a.parquet claims 1000000 rows in " in refused("--data", "a.parquet")
