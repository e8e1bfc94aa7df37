"""Imports the parts of torch, Megatron and rrfp that ranks of tests need. The fork server of the
ranks (tests/e2e/ranks.py) loads this module once."""

import gc
import importlib

from rrfp.megatron.cpu.patches import prepare_cpu

prepare_cpu()

for _name in (
    "megatron.core.models.gpt",
    "megatron.core.transformer.multi_token_prediction",
    "rrfp.megatron.dropin",
    "rrfp.race.rank",
    "rrfp.race.peer_schedules",
    "rrfp.train.checkpoints.saving",
    "rrfp.train.data.batches",
    "rrfp.train.models.vlm",
    "rrfp.train.loop",
    "rrfp.verify.rank",
):
    importlib.import_module(_name)

# No rank's collector looks through all this again, nor copies its pages by doing so.
gc.freeze()
