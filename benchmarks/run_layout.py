"""Real gain of a layout found by `rrfp tune`: `python -m benchmarks.run_layout [--rounds N]`.

A GPT that computes, on two pipeline ranks of one thread each, whose last stage has the loss over
16,384 tokens besides its layers. One run with equally many layers is what `rrfp tune` is given.
Then three runs take turns: the even one, the same under the split that is predicted to be best for
it, and the first proposal. Needs two cores of its own.
"""

import argparse
import json
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import fmean, median

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rrfp.trace.perfetto.reader import read_trace
from rrfp.tune.from_run import source_of_run
from rrfp.tune.search import Prediction, predict_unbound

LAYERS, VOCABULARY, WARM_UP = 12, 16_384, 2
END = "<|end|>"
MODEL = (
    *("--pp", "2", "--layers", str(LAYERS), "--hidden", "256", "--seq-length", "256"),
    *("--microbatches", "8", "--end-of-document", END),
)


def tokenizer(path: Path) -> None:
    """Writes one of `VOCABULARY` tokens, as Python's standard library has them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    standard = Path(sysconfig.get_path("stdlib"))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    texts = (file.read_text("utf-8", errors="replace") for file in sorted(standard.glob("*/*.py")))
    made.train_from_iterator(texts, trainer)
    made.save(str(path))


def train(out: Path, flags: str) -> list[float]:
    """The steps' times, in seconds, without the first few."""
    command = [sys.executable, "-m", "rrfp", "train", *MODEL, "--out", str(out)]
    quiet = subprocess.DEVNULL
    subprocess.run([*command, *shlex.split(flags)], check=True, stdout=quiet, stderr=quiet)
    lines = (out / "metrics.jsonl").read_text("utf-8").splitlines()
    return [float(json.loads(line)["step_time_s"]) for line in lines[WARM_UP:]]


def proposal(run: Path) -> tuple[str, float, float]:
    """The flags of the first of `rrfp tune`, what it takes, and the run itself, as predicted."""
    command = [sys.executable, "-m", "rrfp", "tune", str(run), "--format", "json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    first = found["proposals"][0]
    return first["flags"], first["predicted_s"], found["own"]["predicted_s"]


def best_split(run: Path) -> Prediction:
    """Predictions for the recorded run with other splits of its layers."""
    source = source_of_run(read_trace(run / "trace.pftrace"))
    assert source.own is not None
    found = []
    for first in range(LAYERS + 1):
        candidate = source.own.with_split((first, LAYERS - first))
        predicted = predict_unbound(candidate, source, source.fresh_seeds)
        assert predicted is not None
        found.append(predicted)
    return min(found, key=lambda each: each.mean_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tokenizer(root / "tokenizer.json")
        usual = f"--tokenizer {root}/tokenizer.json --steps {WARM_UP + asked.steps}"
        given = root / "given"
        train(given, f"{usual} --hint 1f1b")
        flags, proposed_s, own_s = proposal(given)
        alone = best_split(given)
        split = ",".join(map(str, alone.candidate.split or ()))
        rows = {
            "even": ("--hint 1f1b", own_s),
            f"--layout {split} alone": (f"--hint 1f1b --layout {split}", alone.mean_s),
            flags.split("--pp 2 ")[1]: (flags, proposed_s),
        }
        times: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(asked.rounds):
            for turn, (name, (more, _)) in enumerate(rows.items()):
                times[name].append(median(train(root / f"{number}-{turn}", f"{usual} {more}")))
        even_s = fmean(times["even"])
        print("run | predicted, s | real, s | predicted gain | real gain | real / predicted gain")
        for name, (_, predicted_s) in rows.items():
            real_s = fmean(times[name])
            predicted, real = own_s / predicted_s, even_s / real_s
            figures = f"{predicted_s:.3f} | {real_s:.3f} | {predicted:.3f} | {real:.3f}"
            print(f"{name} | {figures} | {real / predicted:.3f}")


if __name__ == "__main__":
    main()
