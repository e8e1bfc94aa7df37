"""`rrfp chaos` over ten layouts and three dispatches: `python -m benchmarks.run_chaos DIRECTORY`.

Each combination that there is gets its share of the faults, under a seed of its own. What has
ended stands in the directory, so the same command goes on where it was interrupted, and several
machines may share the work: `--part 1/10`. The summary is of all parts that are there.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

LAYOUTS = {
    "pp2": ("--pp=2",),
    "pp3": ("--pp=3",),
    "pp4": ("--pp=4",),
    "pp3-c2": ("--pp=3", "--chunks=2", "--microbatches=6"),
    "pp2-c2-v": ("--pp=2", "--chunks=2", "--placement=v", "--hint=zb-v"),
    "pp2-tp2-sp": ("--pp=2", "--tp=2", "--sequence-parallel"),
    "pp2-dp2-distopt": ("--pp=2", "--dp=2", "--distributed-optimizer"),
    "moe-pp2-ep2": ("--model=moe", "--pp=2", "--dp=2", "--ep=2"),
    "gpt-pp2-dropout": ("--model=gpt", "--pp=2", "--dropout=0.1"),
    "vlm-pp2": ("--model=vlm", "--pp=2", "--heldout-every=10"),
}
DISPATCHES = ("ready", "fixed", "megatron")
WITHOUT_MEGATRON = "pp2-c2-v"
"""Megatron has no V."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="1/1", metavar="N/M")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    part, num_parts = map(int, asked.part.split("/"))
    shares = combinations(asked.faults, asked.seed)
    for name, (num_faults, flags) in [*shares.items()][part - 1 :: num_parts]:
        path = asked.directory / f"{name}.json"
        if not path.exists():
            inject(path, num_faults, flags)
    summarise(asked.directory, shares)


def combinations(num_faults: int, seed: int) -> dict[str, tuple[int, tuple[str, ...]]]:
    """By name, how many faults each combination gets, and the flags of its training."""
    pairs = [
        (layout, dispatch)
        for layout in LAYOUTS
        for dispatch in DISPATCHES
        if (layout, dispatch) != (WITHOUT_MEGATRON, "megatron")
    ]
    least, num_more = divmod(num_faults, len(pairs))
    return {
        f"{layout}-{dispatch}": (
            least + (number < num_more),
            (*LAYOUTS[layout], f"--dispatch={dispatch}", f"--seed={seed + number}"),
        )
        for number, (layout, dispatch) in enumerate(pairs)
    }


def inject(path: Path, num_faults: int, flags: tuple[str, ...]) -> None:
    """Inject the faults of one combination, and write down what became of them."""
    began_s = time.monotonic()
    kept = f"--keep-failed={path.with_suffix('.kept')}"
    command = (sys.executable, "-m", "rrfp", "chaos", f"--faults={num_faults}", *flags, kept)
    with path.with_suffix(".txt").open("w") as err:
        done = subprocess.run(
            [*command, "--format=json"],
            stdout=subprocess.PIPE,
            stderr=err,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    if done.stdout:
        told = json.loads(done.stdout) | {"seconds": time.monotonic() - began_s}
        path.write_text(json.dumps(told))
    say(f"{path.stem}: exit code {done.returncode} after {time.monotonic() - began_s:.0f} s")


def summarise(directory: Path, shares: dict[str, tuple[int, tuple[str, ...]]]) -> None:
    """Say what became of all faults so far."""
    faults: list[dict[str, Any]] = []
    seconds = 0.0
    for name in shares:
        path = directory / f"{name}.json"
        if not path.exists():
            say(f"{name} is not there yet")
            continue
        told = json.loads(path.read_text())
        seconds += told["seconds"]
        faults += told["faults"]
        for fault in told["faults"]:
            for complaint in fault["complaints"]:
                say(f"{name}, fault {fault['number']} ({fault['kind']}): {complaint}")
    if not faults:
        return
    say(f"{len(faults)} faults in {seconds / 60:.0f} min, {seconds / len(faults):.1f} s each")
    for kind, of_kind in Counter(fault["kind"] for fault in faults).most_common():
        these = [fault for fault in faults if fault["kind"] == kind]
        tally = {
            "survived": sum(fault["has_survived"] for fault in these),
            "named right": sum(fault["named_right"] is True for fault in these),
            "named wrong": sum(fault["named_right"] is False for fault in these),
            "same": sum(bool(fault["is_same"]) for fault in these),
            "passed": sum(not fault["complaints"] for fault in these),
        }
        longest_s = max(fault["seconds"] for fault in these)
        counts = ", ".join(f"{count} {what}" for what, count in tally.items())
        say(f"{of_kind:4} {kind:8} {counts}; {longest_s:.1f} s at most")


def say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
